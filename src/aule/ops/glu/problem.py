"""GluProblem: a gated unit, and the check of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aule.errors import InvalidShapeError
from aule.ops.rows.checks import check_floats, check_rows, check_shape
from aule.ops.rows.problem import RowProblem
from aule.ops.shared.checks import checked_choice
from aule.ops.shared.spec import Call, Result
from aule.view import TensorView

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True)
class GluProblem(RowProblem):
    """``activation(gate) * up``, element by element; ``shape`` is the result's.

    With ``packed`` one array holds both along its last axis: gate, then up.
    """

    activation: Activation
    packed: bool


def bind_glu(op: str, views: Mapping[str, TensorView], options: Mapping[str, Any], wanted: tuple[str, ...]) -> Call:
    """Check a gated unit, or its gradient."""
    check_floats(op, "gate", views, ("gate", "up", "dy"))
    gate = views["gate"]
    check_rows(op, "gate", gate)
    packed = "up" not in views
    shape = gate.shape
    if packed:
        if gate.shape[-1] % 2:
            raise InvalidShapeError(
                f"[{op}] expected gate with an even last axis when up is not given, got {list(gate.shape)}; "
                "it holds gate and up one after the other"
            )
        shape = (*gate.shape[:-1], gate.shape[-1] // 2)
    else:
        check_shape(op, "up", views["up"], shape, "give it the shape of gate")
    if "dy" in views:
        check_shape(op, "dy", views["dy"], shape, "give it the shape of the result")
    problem = GluProblem(gate.dtype, shape, _activation(op, options), packed)
    shapes = {"y": shape, "dgate": gate.shape} | ({} if packed else {"dup": shape})
    return Call(problem, views, {name: Result(gate.dtype, shapes[name]) for name in wanted if name in shapes})


def _activation(op: str, options: Mapping[str, Any]) -> Activation:
    if "approximate" not in options:
        return "silu"
    chosen = checked_choice(op, "approximate", options["approximate"], ("none", "tanh"), "as in PyTorch and ONNX")
    return "gelu" if chosen == "none" else "gelu_tanh"
