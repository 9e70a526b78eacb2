"""SoftmaxProblem: what a softmax with dropout is, and the check of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aule.errors import InvalidArgumentError, InvalidDtypeError
from aule.ops.attention.validate import FLOAT_DTYPES, checked_dropout, checked_seed_words
from aule.ops.checked import LARGEST, checked_flag, number_or_nan
from aule.ops.rowwise import (
    check_devices,
    check_floats,
    check_rows,
    check_shape,
    check_statistics,
    spread,
    statistics_of,
)
from aule.ops.spec import Call, Result
from aule.view import TensorView

STATISTICS = 2
"""Numbers that are kept of each row for the gradient: its largest score, and one over the sum of exponentials.

CPUs keep all weights of bf16 instead, ``weights``, of which those that are dropped are negative: reading 2 bytes for
each takes less time than reading x and y and making weights again."""


@dataclass(frozen=True)
class SoftmaxProblem:
    """``dropout(softmax(scale * x + mask))`` along the last axis, as ONNX defines Softmax for ``axis=-1``.

    A row with nothing to weigh, every column masked or -inf, is zero. Which weights are dropped is said in
    `aule.ops.attention.dropout`: columns are those of ``x``, rows its last axis but one, and heads what is before that,
    counted in C order; so attention with the same seed drops the same weights.

    Attributes
    ----------
    mask : str or None
        dtype of a mask: ``bool`` keeps where it is true, floats are added.
    causal : bool
        Row ``i`` of n keeps columns up to ``i + length - n``.
    """

    dtype: str
    shape: tuple[int, ...]
    scale: float
    mask: str | None
    causal: bool
    dropout_p: float

    @property
    def length(self) -> int:
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Rows of a head."""
        return self.shape[-2] if len(self.shape) > 1 else 1


def bind_softmax(op: str, views: Mapping[str, TensorView], options: Mapping[str, Any], wanted: tuple[str, ...]) -> Call:
    """Check a softmax, or its gradient. The mask is brought to the shape of ``x``, without a copy."""
    mask = views.get("mask")
    alike = ("x", "dy", "y", "weights")
    floats = {name: view for name, view in views.items() if name in alike}
    if mask is not None and mask.dtype != "bool":
        if mask.dtype not in FLOAT_DTYPES:
            raise InvalidDtypeError(f"[{op}] expected mask of bool or floats, got {mask.dtype}; convert it")
        floats["mask"] = mask
    check_floats(op, "x", floats, alike)
    check_devices(op, "x", views)
    x = views["x"]
    check_rows(op, "x", x)
    for name in alike[1:]:
        if name in views:
            check_shape(op, name, views[name], x.shape, "give it the shape of the result")
    check_statistics(op, "x", views, STATISTICS)
    normal = dict(views)
    if mask is not None:
        normal["mask"] = spread(op, "mask", mask, x.shape, "it is what x is masked with, or can be repeated to it")
    p = checked_dropout(op, options["dropout_p"])
    if p == 0.0:
        normal.pop("seed", None)
        normal.pop("y", None)
        normal.pop("statistics", None)
        normal.pop("weights", None)
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
        outputs["statistics"] = statistics_of(x.dtype, x.shape, STATISTICS)
    return Call(problem, normal, outputs)


def _scale(op: str, scale: Any) -> float:
    value = number_or_nan(scale)
    if not abs(value) <= LARGEST:
        raise InvalidArgumentError(
            f"[{op}] expected a finite scale of at most {LARGEST:g}, got {scale!r}; pass 1.0 for none"
        )
    return value
