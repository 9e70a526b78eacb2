"""CrossEntropyProblem: a cross entropy, and the check of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from aule.dtypes import usual_name
from aule.errors import InvalidArgumentError, InvalidDtypeError
from aule.ops.rows.checks import check_devices, check_floats, check_rows, check_shape
from aule.ops.rows.problem import RowProblem
from aule.ops.shared.checks import checked_choice, checked_flag, number_or_nan
from aule.ops.shared.elements import Array
from aule.ops.shared.spec import Call, Result
from aule.view import TensorView, contiguous_strides

Reduction = Literal["mean", "sum", "none"]
STATISTICS = ("most", "above")
"""Values per row that the forward pass saves for the gradient."""


@dataclass(frozen=True)
class CrossEntropyProblem(RowProblem):
    """``lse(logits) - logits[target]`` of each row along the last axis of ``shape``, as PyTorch's cross_entropy.

    With smoothing the target has ``1 - label_smoothing`` of the weight and all columns share the rest. Rows whose
    target is ``ignore_index`` are ignored; the mean is over the others. A target outside the row gives NaN. A ``wide``
    loss, and so its gradient, has the dtype computed in; otherwise the logits' dtype.
    """

    ignore_index: int
    label_smoothing: float
    reduction: Reduction
    wide: bool

    @property
    def loss_dtype(self) -> str:
        return self.work if self.wide else self.dtype

    @property
    def loss_shape(self) -> tuple[int, ...]:
        return self.shape[:-1] if self.reduction == "none" else ()


def bind_cross_entropy(
    op: str, views: Mapping[str, TensorView], options: Mapping[str, Any], wanted: tuple[str, ...]
) -> Call:
    """Check a cross entropy, or its gradient."""
    floats = {name: view for name, view in views.items() if name != "target"}
    check_floats(op, "logits", floats)
    logits, target = views["logits"], views["target"]
    check_rows(op, "logits", logits)
    if target.dtype not in ("i32", "i64"):
        raise InvalidDtypeError(
            f"[{op}] expected target of int32 or int64, the correct column of each row, got {target.dtype_name}; "
            "convert it"
        )
    check_devices(op, "logits", views)
    check_shape(op, "target", target, logits.shape[:-1], "give it one column for each row of logits")
    problem = CrossEntropyProblem(
        logits.dtype,
        logits.shape,
        _index(op, options["ignore_index"]),
        _smoothing(op, options["label_smoothing"]),
        _reduction(op, options["reduction"]),
        checked_flag(op, "wide", options["wide"]),
    )
    if "dloss" in views:
        dloss = views["dloss"]
        if dloss.dtype != problem.loss_dtype:
            raise InvalidDtypeError(
                f"[{op}] expected dloss of {usual_name(problem.loss_dtype)}, got {dloss.dtype_name}; convert it"
            )
        check_shape(op, "dloss", dloss, problem.loss_shape, "give it the shape of the loss")
        for name in STATISTICS:
            saved = views[name]
            check_shape(op, name, saved, logits.shape[:-1], "pass what the forward pass returned")
            if saved.dtype != problem.work or (problem.rows > 1 and saved.strides != contiguous_strides(saved.shape)):
                raise InvalidArgumentError(
                    f"[{op}] expected {name} of {usual_name(problem.work)} without gaps, got {saved.dtype_name} with "
                    f"strides {list(saved.strides)}; pass what the forward pass returned"
                )
    known = {
        "loss": Result(problem.loss_dtype, problem.loss_shape),
        **dict.fromkeys(STATISTICS, Result(problem.work, logits.shape[:-1])),
        "dlogits": Result(logits.dtype, logits.shape),
    }
    return Call(problem, views, {name: known[name] for name in wanted})


def check_targets(op: str, problem: CrossEntropyProblem, arrays: Mapping[str, Array]) -> None:
    """Check that targets in host memory are columns."""
    target = arrays["target"]
    wrong = ((target < 0) | (target >= problem.length)) & (target != problem.ignore_index)
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise InvalidArgumentError(
            f"[{op}] expected targets of 0 to {problem.length - 1} or ignore_index={problem.ignore_index}, got "
            f"{int(target[place])} at {list(place)}; check the labels against the logits' last axis"
        )


def _index(op: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not -(2**63) <= value < 2**63:
        raise InvalidArgumentError(
            f"[{op}] expected ignore_index as an integer of 64 bits, got {value!r}; such as -100"
        )
    return int(value)


def _smoothing(op: str, value: Any) -> float:
    number = number_or_nan(value)
    if not 0.0 <= number <= 1.0:
        raise InvalidArgumentError(f"[{op}] expected label_smoothing of 0 to 1, got {value!r}; 0 means none")
    return number


def _reduction(op: str, value: Any) -> Reduction:
    return cast("Reduction", checked_choice(op, "reduction", value, ("mean", "sum", "none"), "choose one"))
