"""From a cross entropy to the launches that compute it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aule.ops.cross_entropy.kernels import (
    CrossEntropyConfig,
    build_cross_entropy,
    build_cross_entropy_gradient,
    build_reduction,
)
from aule.ops.cross_entropy.problem import CrossEntropyProblem
from aule.ops.row_shapes import choose_rows, row_grid, streams
from aule.ops.rowwise import extent, lay_out, operand, view_numbers, view_width
from aule.ops.step import Step, StepPlan
from aule.target import Target
from aule.tile.rows import RowShape
from aule.tile.spans import SpanShape
from aule.view import TensorView, contiguous_strides

_LOOPED = 4096
"""Columns from which on a GPU's threads go along a row in a loop instead of keeping it in registers."""
_LOOP_THREADS = 256
"""So few that a unit has several rows under way, one of which is read while another is summed up; for few rows
more."""


def plan_cross_entropy(problem: CrossEntropyProblem, views: Mapping[str, TensorView], target: Target) -> StepPlan:
    """Plan a cross entropy: ``logits``, ``target``, ``most``, ``above`` and ``loss``."""
    if problem.reduction == "none":
        return StepPlan(_over_rows(problem, views, target))
    row_loss = _rows_of(problem)
    kept = {name: view for name, view in views.items() if name != "loss"} | {"row_loss": row_loss}
    names = ("row_loss", "above") if problem.reduction == "mean" else ("row_loss",)
    last = _reduction(problem, {name: kept[name] for name in names}, {"loss": views["loss"]}, target)
    return StepPlan((*_over_rows(problem, kept, target), last), {"row_loss": problem.rows})


def plan_cross_entropy_gradient(
    problem: CrossEntropyProblem, views: Mapping[str, TensorView], target: Target
) -> StepPlan:
    """Plan the gradient: ``dloss``, ``logits``, ``target``, ``most``, ``above`` and ``dlogits``."""
    if problem.reduction != "mean" or not problem.rows:
        return StepPlan(_over_rows(problem, views, target))
    scale = TensorView(problem.work, (), (), "device", None)
    first = _reduction(problem, {"above": views["above"]}, {"scale": scale}, target)
    return StepPlan((first, *_over_rows(problem, {**views, "scale": scale}, target)), {"scale": 1})


def _over_rows(problem: CrossEntropyProblem, views: Mapping[str, TensorView], target: Target) -> tuple[Step, ...]:
    """The launch over rows; none where there are none."""
    backward = "dlogits" in views
    name = "cross_entropy_backward" if backward else "cross_entropy"
    shape, numbers = problem.shape[:-1], {n: _one_column(view, problem) for n, view in views.items()}
    layout = lay_out(shape, {n: view.strides[:-1] for n, view in numbers.items()})
    width = min(view_width(views[n]) for n in ("logits", "dlogits") if n in views)
    row_shape, span = _shape(problem, width, target)
    grid = row_grid(name, row_shape, problem.rows, target)
    if not grid[0]:
        return ()
    config = CrossEntropyConfig(
        name=name,
        smooth=problem.label_smoothing > 0.0,
        dtype=problem.dtype,
        shape=row_shape,
        spans=(span,),
        axes=len(layout.sizes),
        index64=max(extent(view) for view in numbers.values()) > 2**31 - 1,
        operands=tuple((n, operand(view, span.width)) for n, view in numbers.items()),
        stream=backward and streams({n: views[n] for n in ("logits", "dlogits")}, target),
    )
    scalars = layout.scalars | view_numbers(numbers)
    scalars |= {"length": problem.length, "ignore_index": problem.ignore_index}
    scalars |= {"inverse_length": 1.0 / problem.length, "each_share": problem.label_smoothing / problem.length}
    scalars |= {"smoothing": problem.label_smoothing, "picked_share": 1.0 - problem.label_smoothing}
    return (Step(config, build_cross_entropy_gradient if backward else build_cross_entropy, grid, scalars),)


def _shape(problem: CrossEntropyProblem, width: int, target: Target) -> tuple[RowShape, SpanShape]:
    shape, span = choose_rows(target, problem.dtype, problem.length, width, problem.rows)
    if target.backend == "cpu" or problem.length < _LOOPED:
        return shape, span
    few = problem.rows < 4 * target.compute_units
    threads = shape.threads if few else min(shape.threads, _LOOP_THREADS)
    return replace(shape, threads=threads, slots=1, exact=True), SpanShape(width)


def _reduction(
    problem: CrossEntropyProblem,
    views: Mapping[str, TensorView],
    result: Mapping[str, TensorView],
    target: Target,
) -> Step:
    """The launch over all rows as columns of one."""
    length = problem.rows
    lines = {n: replace(view, shape=(1, length), strides=(0, 1)) for n, view in views.items()}
    lines |= {n: replace(view, shape=(1, 1), strides=(0, 1)) for n, view in result.items()}
    width = min(view_width(lines[n]) for n in views)
    shape, span = choose_rows(target, problem.dtype, length, width, 1)
    if not length:
        span = SpanShape(span.width)  # which reads nothing
    config = CrossEntropyConfig(
        name="cross_entropy_reduction",
        dtype=problem.dtype,
        shape=replace(shape, slots=1, exact=True),
        spans=(span,),
        axes=1,
        index64=False,
        operands=tuple((n, operand(view, span.width)) for n, view in lines.items()),
    )
    layout = lay_out((1,), {n: view.strides[:-1] for n, view in lines.items()})
    return Step(config, build_reduction, (1, 1, 1), layout.scalars | view_numbers(lines) | {"length": length})


def _one_column(view: TensorView, problem: CrossEntropyProblem) -> TensorView:
    """An array with one number for each row, or for all of them, as rows of one column."""
    if view.shape == problem.shape:
        return view
    strides = view.strides if view.shape == problem.shape[:-1] else (0,) * (len(problem.shape) - 1)
    return replace(view, shape=(*problem.shape[:-1], 1), strides=(*strides, 1))


def _rows_of(problem: CrossEntropyProblem) -> TensorView:
    shape = problem.shape[:-1]
    return TensorView(problem.work, shape, contiguous_strides(shape), "device", None)
