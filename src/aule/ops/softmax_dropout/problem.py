"""SoftmaxProblem: a softmax with dropout, and the check of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aule.errors import InvalidArgumentError, InvalidDtypeError
from aule.ops.rows.checks import (
    check_devices,
    check_floats,
    check_rows,
    check_shape,
    check_statistics,
    checked_broadcast,
    statistics_result,
)
from aule.ops.rows.problem import RowProblem
from aule.ops.shared.checks import (
    FLOAT_DTYPES,
    LARGEST,
    checked_dropout,
    checked_flag,
    checked_seed_words,
    number_or_nan,
)
from aule.ops.shared.spec import Call, Result
from aule.view import TensorView

STATISTICS = 2
"""Values per row saved for the gradient: the largest score, and one over the sum of exponentials.

For bf16, CPUs save all ``weights`` instead, negative if dropped: reading 2 bytes per weight is faster than reading x
and y and recomputing weights."""


@dataclass(frozen=True)
class SoftmaxProblem(RowProblem):
    """``dropout(softmax(scale * x + mask))`` along the last axis, as ONNX defines Softmax for ``axis=-1``.

    A row whose columns are all masked or -inf is zero. `aule.ops.softmax.dropout` says which weights are dropped:
    columns are those of ``x``, rows its last axis but one, and heads the axes before that in C order; so attention with
    the same seed drops the same weights.

    ``mask`` is the dtype of a mask, or None: columns count where a ``bool`` is true; floats are added. With ``causal``
    row ``i`` of n counts columns up to ``i + length - n``.
    """

    scale: float
    mask: str | None
    causal: bool
    dropout_p: float

    @property
    def head_rows(self) -> int:
        """Rows of a head: the last axis but one."""
        return self.shape[-2] if len(self.shape) > 1 else 1


def bind_softmax(op: str, views: Mapping[str, TensorView], options: Mapping[str, Any], wanted: tuple[str, ...]) -> Call:
    """Check a softmax, or its gradient. The mask is broadcast to the shape of ``x``, without a copy."""
    mask = views.get("mask")
    alike = ("x", "dy", "y", "weights")
    floats = {name: view for name, view in views.items() if name in alike}
    if mask is not None and mask.dtype != "bool":
        if mask.dtype not in FLOAT_DTYPES:
            raise InvalidDtypeError(f"[{op}] expected mask of bool or floats, got {mask.dtype_name}; convert it")
        floats["mask"] = mask
    check_floats(op, "x", floats, alike)
    check_devices(op, "x", views)
    x = views["x"]
    check_rows(op, "x", x, least=0)
    for name in alike[1:]:
        if name in views:
            check_shape(op, name, views[name], x.shape, "give it the shape of the result")
    check_statistics(op, "x", views, STATISTICS)
    normal = dict(views)
    if mask is not None:
        remedy = "it is what x is masked with, or can be repeated to it"
        normal["mask"] = checked_broadcast(op, "mask", mask, x.shape, remedy)
    p = checked_dropout(op, options["dropout_p"])
    if p == 0.0:
        for name in ("seed", "y", "statistics", "weights"):
            normal.pop(name, None)
    else:
        normal["seed"] = checked_seed_words(op, views.get("seed"))
    problem = SoftmaxProblem(
        dtype=x.dtype,
        shape=x.shape,
        scale=_scale(op, options["scale"]),
        mask=None if mask is None else mask.dtype,
        causal=checked_flag(op, "causal", options["causal"]),
        dropout_p=p,
    )
    outputs = {name: Result(x.dtype, x.shape) for name in wanted if name != "statistics"}
    if "statistics" in wanted:
        outputs["statistics"] = statistics_result(x.dtype, x.shape, STATISTICS)
    return Call(problem, normal, outputs)


def _scale(op: str, scale: Any) -> float:
    value = number_or_nan(scale)
    if not abs(value) <= LARGEST:
        raise InvalidArgumentError(
            f"[{op}] expected a finite scale of at most {LARGEST:g}, got {scale!r}; pass 1.0 for none"
        )
    return value
