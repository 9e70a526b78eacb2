"""From a cross entropy to the launches that compute it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aule import tuning
from aule.ops.cross_entropy.kernels import (
    CrossEntropyConfig,
    build_cross_entropy,
    build_cross_entropy_gradient,
    build_reduction,
)
from aule.ops.cross_entropy.problem import CrossEntropyProblem
from aule.ops.rows.layout import choose_rows, row_grid, streams
from aule.ops.rows.views import needs_index64, row_layout, row_operands, view_scalars, view_width
from aule.ops.shared.plan import Plan, Step
from aule.target import Target
from aule.tile.rows.shape import PassShape, RowShape
from aule.view import TensorView, contiguous_strides


def plan_cross_entropy(problem: CrossEntropyProblem, views: Mapping[str, TensorView], target: Target) -> Plan:
    """Plan a cross entropy: ``logits``, ``target``, ``most``, ``above`` and ``loss``."""
    if problem.reduction == "none":
        return Plan(_over_rows(problem, views, target))
    shape = problem.shape[:-1]
    row_loss = TensorView(problem.work, shape, contiguous_strides(shape), "device", None)
    rows = {name: view for name, view in views.items() if name != "loss"} | {"row_loss": row_loss}
    names = ("row_loss", "above") if problem.reduction == "mean" else ("row_loss",)
    last = _reduction(problem, {name: rows[name] for name in names}, {"loss": views["loss"]}, target)
    return Plan((*_over_rows(problem, rows, target), last), {"row_loss": problem.rows})


def plan_cross_entropy_gradient(problem: CrossEntropyProblem, views: Mapping[str, TensorView], target: Target) -> Plan:
    """Plan the gradient: ``dloss``, ``logits``, ``target``, ``most``, ``above`` and ``dlogits``."""
    if problem.reduction != "mean" or not problem.rows:
        return Plan(_over_rows(problem, views, target))
    scale = TensorView(problem.work, (), (), "device", None)
    first = _reduction(problem, {"above": views["above"]}, {"scale": scale}, target)
    return Plan((first, *_over_rows(problem, {**views, "scale": scale}, target)), {"scale": 1})


def _over_rows(problem: CrossEntropyProblem, views: Mapping[str, TensorView], target: Target) -> tuple[Step, ...]:
    """The launch over rows, if there are any."""
    if not problem.rows:
        return ()
    backward = "dlogits" in views
    name = "cross_entropy_backward" if backward else "cross_entropy"
    rows = {n: _as_rows(view, problem) for n, view in views.items()}
    layout = row_layout(problem.shape, rows)
    width = min(view_width(views[n]) for n in ("logits", "dlogits") if n in views)
    shape, passes = _shape(problem, width, target)
    grid = row_grid(name, shape, problem.rows, target)
    config = CrossEntropyConfig(
        name=name,
        smooth=problem.label_smoothing > 0.0,
        dtype=problem.dtype,
        shape=shape,
        passes=(passes,),
        axes=len(layout.sizes),
        index64=needs_index64(rows.values()),
        operands=row_operands(rows, passes.width, target),
        stream=backward and streams({n: views[n] for n in ("logits", "dlogits")}, target),
    )
    scalars = layout.scalars | view_scalars(rows)
    scalars |= {"length": problem.length, "ignore_index": problem.ignore_index}
    scalars |= {"inverse_length": 1.0 / problem.length, "each_share": problem.label_smoothing / problem.length}
    scalars |= {"smoothing": problem.label_smoothing, "picked_share": 1.0 - problem.label_smoothing}
    return (Step(config, build_cross_entropy_gradient if backward else build_cross_entropy, grid, scalars),)


def _shape(problem: CrossEntropyProblem, width: int, target: Target) -> tuple[RowShape, PassShape]:
    shape, passes = choose_rows(target, problem.dtype, problem.length, width, problem.rows)
    # Threads loop over longer rows instead of keeping them in registers. They are few, so that a unit reads one row
    # while it reduces another; a small batch takes more.
    loop = tuning.use(target, "cross_entropy.loop")
    if target.host or problem.length <= loop["columns"]:
        return shape, passes
    threads = tuning.number(target, "rows.stream_threads", wide=passes.width > 1)
    if problem.rows >= loop["few_rows"] * target.compute_units:
        threads = min(threads, loop["threads"])
    return RowShape(min(threads, target.max_threads), exact=True), PassShape(passes.width)


def _reduction(
    problem: CrossEntropyProblem,
    views: Mapping[str, TensorView],
    result: Mapping[str, TensorView],
    target: Target,
) -> Step:
    """The launch that reduces over rows: they are the columns of its only row."""
    length = problem.rows
    lines = {n: replace(view, shape=(1, length), strides=(0, 1)) for n, view in views.items()}
    lines |= {n: replace(view, shape=(1, 1), strides=(0, 1)) for n, view in result.items()}
    width = min(view_width(lines[n]) for n in views)
    shape, passes = choose_rows(target, problem.dtype, length, width, 1)
    if not length:
        passes = PassShape(passes.width)  # reads nothing
    config = CrossEntropyConfig(
        name="cross_entropy_reduction",
        dtype=problem.dtype,
        shape=replace(shape, slots=1, exact=True),
        passes=(passes,),
        axes=1,
        index64=False,
        operands=row_operands(lines, passes.width, target),
    )
    scalars = row_layout((1, length), lines).scalars | view_scalars(lines) | {"length": length}
    return Step(config, build_reduction, (1, 1, 1), scalars)


def _as_rows(view: TensorView, problem: CrossEntropyProblem) -> TensorView:
    """An array with one value per row, or one for all rows, as rows of one column."""
    if view.shape == problem.shape:
        return view
    strides = view.strides if view.shape == problem.shape[:-1] else (0,) * (len(problem.shape) - 1)
    return replace(view, shape=(*problem.shape[:-1], 1), strides=(*strides, 1))
