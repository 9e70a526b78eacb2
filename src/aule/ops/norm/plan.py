"""From a normalisation to the launches that compute it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aule.ir import KernelIR
from aule.ops.norm.kernels import NormConfig, build_norm, build_norm_gradient, rows_read
from aule.ops.norm.problem import NormProblem
from aule.ops.rows.checks import has_statistics
from aule.ops.rows.classes import row_class
from aule.ops.rows.column_sum import column_sum_step
from aule.ops.rows.hints import Work
from aule.ops.rows.layout import (
    choose_rows,
    evicts_last,
    has_moments,
    mark_group_is_block,
    overlaps_launch,
    rounds_fused,
    row_grid,
    streams,
    sums_layout,
)
from aule.ops.rows.views import (
    RowOperand,
    common_width,
    needs_index64,
    row_layout,
    row_operands,
    view_scalars,
)
from aule.ops.shared.plan import Plan, Step
from aule.target import Target
from aule.view import TensorView

_VECTORS = ("weight", "bias", "dweight", "dbias")
"""Operands with one number per column; all others are rows."""


def plan_norm(problem: NormProblem, views: Mapping[str, TensorView], target: Target) -> Plan:
    """Plan a normalisation: ``x``, ``y`` and, where present, ``residual``, ``h``, ``weight``, ``bias``."""
    name = "layer_norm" if problem.center else "rms_norm"
    if "residual" in views:
        name = f"residual_{name}"
    return Plan((norm_step(name, problem, views, target, build_norm),) if problem.rows * problem.length else ())


def plan_norm_gradient(problem: NormProblem, views: Mapping[str, TensorView], target: Target) -> Plan:
    """Plan the gradient: ``dy``, ``x`` or ``h``, and where present ``dh``, ``weight``, ``dx``, ``dweight``,
    ``dbias``."""
    if not problem.rows * problem.length:
        return Plan(())
    name = "layer_norm_backward" if problem.center else "rms_norm_backward"
    sums = tuple(name for name in ("dweight", "dbias") if name in views)
    step = norm_step(name, problem, views, target, build_norm_gradient, sums)
    if not sums:
        return Plan((step,))
    partials = int(step.scalars["partials"])
    outputs, layout = [(name, views[name]) for name in sums], step.config.sums
    finish = column_sum_step(problem.dtype, outputs, partials, problem.length, target, layout=layout)
    return Plan((step, finish), {"partial": partials * len(sums) * problem.length})


def norm_step(
    name: str,
    problem: NormProblem,
    views: Mapping[str, TensorView],
    target: Target,
    build: Callable[[NormConfig, Target], KernelIR],
    sums: tuple[str, ...] = (),
) -> Step:
    """The launch over rows; its scalar ``partials`` is the number of rows of partial sums that it stores."""
    statistics = has_statistics(views)
    views = {n: view for n, view in views.items() if n != "statistics"}
    rows = {n: view for n, view in views.items() if n not in _VECTORS}
    layout = row_layout(problem.shape, rows)
    copied = tuple(views[n].itemsize for n in rows_read(views)) if sums else ()
    columns = any(n in views for n in _VECTORS)
    written = 2 if "y" in views and "h" in views else 1
    # A gradient reduces two values per row, in one exchange if it need not find the mean first.
    one_exchange = len(copied) > 1 and (statistics or not problem.center)
    work = Work(len(sums), columns, copied, written, problem.center, exchanged=2 if one_exchange else 0)
    width = common_width(rows.values())
    kind = row_class(target, problem.dtype, problem.length, width, work.use)
    shape, passes = choose_rows(target, problem.dtype, problem.length, width, problem.rows, work)
    grid = row_grid(name, shape, problem.rows, target)
    shape = mark_group_is_block(shape, grid, target)
    partials = grid[0] // max(shape.cluster, shape.sums_cluster)
    operands = row_operands(views, passes.width, target)
    if statistics:
        operands = (*operands, ("statistics", RowOperand(problem.work)))
    scalars = layout.scalars | view_scalars(views)
    scalars |= {"length": problem.length, "inverse_length": 1.0 / problem.length, "sums": problem.length}
    config = NormConfig(
        name=name,
        center=problem.center,
        moments=problem.center and has_moments(target, problem.dtype, kind.columns, work),
        dtype=problem.dtype,
        shape=shape,
        passes=(passes,),
        axes=len(layout.sizes),
        index64=needs_index64(rows.values(), partials * len(sums) * problem.length),
        operands=operands,
        stream=streams(rows, target),
        evict_last=evicts_last(rows, target, work, passes.width),
        awaits=overlaps_launch(target, shape),
        fused_rounding=rounds_fused(target, kind.columns, work),
        sums=sums_layout(target, passes) if sums else "in_order",
    )
    return Step(config, build, grid, scalars | {"eps": problem.eps, "partials": partials})
