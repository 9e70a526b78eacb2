"""NormProblem: a normalisation, and the check of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aule.errors import InvalidArgumentError
from aule.ops.rows.checks import check_floats, check_rows, check_shape, check_statistics, statistics_result
from aule.ops.rows.problem import RowProblem
from aule.ops.shared.checks import LARGEST, number_or_nan
from aule.ops.shared.spec import Call, Result
from aule.view import TensorView

STATISTICS = 3
"""Values per row saved for the gradient: mean, scale and the rest of the mean (`aule.ops.norm.kernels.Normalised`)."""


@dataclass(frozen=True)
class NormProblem(RowProblem):
    """Normalisation of rows along the last axis of ``shape``: LayerNorm with ``center``, else RMSNorm.

    ``y = (x - mean) / sqrt(mean((x - mean)**2) + eps) * weight + bias``, as ONNX defines LayerNormalization, and
    RMSNormalization without the mean, both for ``axis=-1``. The arrays of a call say whether it has a weight, a bias
    and a residual.
    """

    eps: float
    center: bool


def bind_norm(
    op: str, views: Mapping[str, TensorView], options: Mapping[str, Any], wanted: tuple[str, ...], center: bool
) -> Call:
    """Check a normalisation."""
    problem = _problem(op, "x", views, options, center)
    outputs = {name: Result(problem.dtype, problem.shape) for name in wanted if name != "statistics"}
    if "statistics" in wanted:
        outputs["statistics"] = statistics_result(problem.dtype, problem.shape, STATISTICS)
    return Call(problem, views, outputs)


def bind_norm_gradient(
    op: str, views: Mapping[str, TensorView], options: Mapping[str, Any], wanted: tuple[str, ...], center: bool
) -> Call:
    """Check the gradient of a normalisation."""
    problem = _problem(op, "h" if "h" in views else "x", views, options, center)
    vectors = {"dweight": "weight", "dbias": "bias"}
    outputs = {}
    for name in wanted:
        if name == "dx":
            outputs[name] = Result(problem.dtype, problem.shape)
        elif vectors[name] in views:
            outputs[name] = Result(views[vectors[name]].dtype, problem.shape[-1:])
    return Call(problem, views, outputs)


def _problem(
    op: str, main: str, views: Mapping[str, TensorView], options: Mapping[str, Any], center: bool
) -> NormProblem:
    rows = ("x", "residual", "h", "dy", "dh")
    views = check_statistics(op, main, views, STATISTICS)
    check_floats(op, main, views, rows)
    x = views[main]
    check_rows(op, main, x, least=0)
    for name, view in views.items():
        if name in rows:
            check_shape(op, name, view, x.shape, f"give it the shape of {main}")
        else:
            check_shape(op, name, view, x.shape[-1:], f"give it one number for each column of {main}")
    return NormProblem(x.dtype, x.shape, checked_eps(op, options["eps"]), center)


def checked_eps(op: str, eps: Any) -> float:
    """The ``eps`` that is added inside a root, or an error."""
    value = number_or_nan(eps)
    if not 0.0 <= value <= LARGEST:
        raise InvalidArgumentError(
            f"[{op}] expected eps from 0 to {LARGEST:g}, got {eps!r}; pass a small number such as 1e-6"
        )
    return value
