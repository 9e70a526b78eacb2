"""LayerNormLinearProblem: a linear layer after a normalisation, and the check of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aule.errors import InvalidShapeError
from aule.ops.norm.problem import NormProblem, checked_eps
from aule.ops.rows.checks import MAX_LENGTH, check_floats, check_rows, check_shape
from aule.ops.rows.problem import RowProblem
from aule.ops.shared.spec import Call, Result
from aule.view import TensorView


@dataclass(frozen=True)
class LayerNormLinearProblem(RowProblem):
    """``y = layer_norm(x) @ weight.T + bias``; ``shape`` is the shape of ``x``, and ``y`` has ``features`` columns."""

    features: int
    eps: float

    @property
    def norm(self) -> NormProblem:
        return NormProblem(self.dtype, self.shape, self.eps, center=True)


def bind_layer_norm_linear(
    op: str, views: Mapping[str, TensorView], options: Mapping[str, Any], wanted: tuple[str, ...]
) -> Call:
    """Check a call, or its gradient."""
    check_floats(op, "x", views, ("x", "weight", "dy"))
    x, weight = views["x"], views["weight"]
    check_rows(op, "x", x)
    length = x.shape[-1]
    if len(weight.shape) != 2 or weight.shape[1] != length or not 1 <= weight.shape[0] <= MAX_LENGTH:
        raise InvalidShapeError(
            f"[{op}] expected weight of shape [features, {length}], got {list(weight.shape)}; as torch.nn.Linear has it"
        )
    features = weight.shape[0]
    for name, columns in {"weight_norm": length, "bias_norm": length, "bias": features}.items():
        if name in views:
            check_shape(op, name, views[name], (columns,), f"give it {columns} numbers")
    shape = (*x.shape[:-1], features)
    if "dy" in views:
        check_shape(op, "dy", views["dy"], shape, "give it the shape of the result")
    problem = LayerNormLinearProblem(x.dtype, x.shape, features, checked_eps(op, options["eps"]))
    outputs = {}
    for name in wanted:
        if name == "y":
            outputs[name] = Result(x.dtype, shape)
        elif name[1:] in views:
            given = views[name[1:]]
            outputs[name] = Result(given.dtype, given.shape)
    return Call(problem, views, outputs)
