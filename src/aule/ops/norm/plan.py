"""From a normalisation to the launches that compute it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from aule.ir import KernelIR
from aule.ops.column_sum import column_sum_step
from aule.ops.column_trail import POSTED
from aule.ops.norm.kernels import NormConfig, build_norm, build_norm_gradient, rows_read
from aule.ops.norm.problem import NormProblem
from aule.ops.row_shapes import (
    begins_early,
    choose_rows,
    fixes,
    has_moments,
    lasts,
    numbered,
    rounds_fused,
    row_grid,
    streams,
    sum_words,
    sums_layout,
    usual_grid,
)
from aule.ops.row_tuning import Work
from aule.ops.rowwise import (
    RowOperand,
    common_width,
    extent,
    fixed_numbers,
    has_statistics,
    lay_out,
    operand,
    view_numbers,
)
from aule.ops.step import Step, StepPlan
from aule.target import Target
from aule.view import TensorView

_VECTORS = ("weight", "bias", "dweight", "dbias")
"""Operands with one number for each column."""


def plan_norm(problem: NormProblem, views: Mapping[str, TensorView], target: Target) -> StepPlan:
    """Plan a normalisation: ``x``, ``y`` and, where present, ``residual``, ``h``, ``weight``, ``bias``."""
    name = "layer_norm" if problem.center else "rms_norm"
    if "residual" in views:
        name = f"residual_{name}"
    step, _ = norm_step(name, problem, views, target, build_norm)
    return StepPlan((step,) if step.grid[0] else ())


def plan_norm_gradient(problem: NormProblem, views: Mapping[str, TensorView], target: Target) -> StepPlan:
    """Plan the gradient: ``dy``, ``x`` or ``h``, and where present ``dh``, ``weight``, ``dx``, ``dweight``,
    ``dbias``."""
    name = "layer_norm_backward" if problem.center else "rms_norm_backward"
    sums = tuple(name for name in ("dweight", "dbias") if name in views)
    step, partials = norm_step(name, problem, views, target, build_norm_gradient, sums)
    if not step.grid[0]:
        return StepPlan(())
    if not sums:
        return StepPlan((step,))
    outputs, layout = [(name, views[name]) for name in sums], step.config.sums
    usual = usual_grid(target, step.config.shape, math.prod(problem.shape[:-1]), step.grid)
    finish = column_sum_step(problem.dtype, outputs, partials, problem.length, target, usual=usual, layout=layout)
    words = partials * len(sums) * sum_words(problem.length, layout)
    if layout == "posted":
        return StepPlan((step, finish), zeroed={POSTED: words})
    return StepPlan((step, finish), {"partial": words})


def norm_step(
    name: str,
    problem: NormProblem,
    views: Mapping[str, TensorView],
    target: Target,
    build: Callable[[NormConfig, Target], KernelIR],
    sums: tuple[str, ...] = (),
) -> tuple[Step, int]:
    """The launch over rows, and how many rows of partial sums it leaves."""
    statistics = has_statistics(views)
    views = {n: view for n, view in views.items() if n != "statistics"}
    rows = {n: view for n, view in views.items() if n not in _VECTORS}
    count = math.prod(problem.shape[:-1])
    layout = lay_out(problem.shape[:-1], {n: view.strides[:-1] for n, view in rows.items()})
    copied = tuple(views[n].itemsize for n in rows_read(views)) if sums else ()
    columns = any(n in views for n in _VECTORS)
    written = 2 if "y" in views and "h" in views else 1
    # A gradient adds up two numbers of each row, if it need not find the mean first.
    at_once = len(copied) > 1 and (statistics or not problem.center)
    work = Work(len(sums), columns, copied, written, problem.center, exchanged=2 if at_once else 0)
    shape, span = choose_rows(target, problem.dtype, problem.length, common_width(rows.values()), count, work)
    grid = row_grid(name, shape, count, target)
    shape = numbered(shape, grid, target)
    partials = grid[0] // max(shape.cluster, shape.gather)
    operands = tuple((n, operand(view, span.width)) for n, view in views.items())
    left = sums_layout(target, problem.length, span, [views[n].itemsize for n in sums], partials)
    scalars = layout.scalars | view_numbers(views)
    scalars |= {"length": problem.length, "inverse_length": 1.0 / problem.length}
    scalars["sums"] = sum_words(problem.length, left)
    dense = layout.dense(problem.length) and all(view.offset == 0 for view in views.values())
    whole = span.parts > 0 and not span.ragged  # so that rows of this shape have this length alone
    if statistics:
        operands = (*operands, ("statistics", RowOperand("f64" if problem.dtype == "f64" else "f32")))
    config = NormConfig(
        name=name,
        center=problem.center,
        dtype=problem.dtype,
        shape=shape,
        spans=(span,),
        axes=len(layout.sizes),
        index64=max(extent(view) for view in rows.values()) + partials * len(sums) * problem.length > 2**31 - 1,
        operands=operands,
        stream=streams(rows, target),
        lasting=lasts(rows, target, work),
        fused_rounding=rounds_fused(target, problem.length, work),
        awaits=begins_early(target, shape),
        moments=problem.center and has_moments(target, problem.dtype, problem.length, work),
        sums=left,
        fixed=fixed_numbers(scalars) if dense and whole and fixes(target, problem.length, work) else (),
    )
    return Step(config, build, grid, scalars | {"eps": problem.eps, "partials": partials}), partials
