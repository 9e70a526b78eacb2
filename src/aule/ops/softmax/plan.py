"""From a softmax to the launch that computes it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from aule.ops.attention.dropout import keep_scale, threshold
from aule.ops.row_shapes import choose_rows, row_grid, streams
from aule.ops.rowwise import RowOperand, extent, has_statistics, lay_out, operand, view_numbers, view_width
from aule.ops.softmax.kernels import SoftmaxConfig, build_softmax, build_softmax_gradient
from aule.ops.softmax.problem import SoftmaxProblem
from aule.ops.step import Step, StepPlan
from aule.target import Target
from aule.tile.math import LOG2E
from aule.view import TensorView


def plan_softmax(problem: SoftmaxProblem, views: Mapping[str, TensorView], target: Target) -> StepPlan:
    """Plan a softmax (``x``, ``y``, and where present ``mask`` and ``seed``) or its gradient (``dy``, ``dx``).

    With ``y`` given, a gradient on a CPU sees there what was dropped, and draws nothing again; with ``statistics`` as
    well, it does not add up weights again.
    """
    count = math.prod(problem.shape[:-1])
    if count == 0:
        return StepPlan(())
    backward = "dy" in views
    statistics = has_statistics(views, target) and ("y" in views or not backward)
    unused = {"statistics"}
    if backward:
        unused.add("seed" if "y" in views and target.backend == "cpu" else "y")
    views = {name: view for name, view in views.items() if name not in unused}
    rows = {name: view for name, view in views.items() if name not in ("mask", "seed")}
    along = {name: view for name, view in views.items() if name != "seed"}
    layout = lay_out(problem.shape[:-1], {name: view.strides[:-1] for name, view in along.items()})
    width = min(view_width(view) for view in rows.values())
    shape, span = choose_rows(target, problem.dtype, problem.length, width, count)
    folded = problem.scale > 0 and problem.mask in (None, "bool")
    operands = tuple((name, operand(view, span.width)) for name, view in along.items())
    if statistics:
        operands = (*operands, ("statistics", RowOperand("f64" if problem.dtype == "f64" else "f32")))
    config = SoftmaxConfig(
        name="softmax_dropout_backward" if backward else "softmax_dropout",
        mask=problem.mask,
        causal=problem.causal,
        dropout=problem.dropout_p > 0.0,
        folded=folded,
        dtype=problem.dtype,
        shape=shape,
        spans=(span,),
        axes=len(layout.sizes),
        index64=max(extent(view) for view in along.values()) > 2**31 - 1,
        operands=operands,
        stream=streams(rows, target),
    )
    scalars = layout.scalars | view_numbers(views) | {"length": problem.length, "seq": problem.rows}
    scalars |= {
        "scale": problem.scale,
        "factor": problem.scale * LOG2E if folded else LOG2E,
        "shift": problem.length - problem.rows,
        "dropout_limit": threshold(problem.dropout_p),
        "keep_scale": keep_scale(problem.dropout_p),
    }
    build = build_softmax_gradient if backward else build_softmax
    return StepPlan((Step(config, build, row_grid(config.name, shape, count, target), scalars),))
