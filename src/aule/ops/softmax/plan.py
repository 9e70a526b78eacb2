"""From a softmax to the launch that computes it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from aule.ir.types import SCALARS
from aule.ops.attention.dropout import keep_scale, threshold
from aule.ops.row_shapes import NO_SUMS, RowTuning, choose_rows, row_grid, streams
from aule.ops.rowwise import RowOperand, extent, has_statistics, lay_out, operand, view_numbers, view_width
from aule.ops.softmax.kernels import SoftmaxConfig, build_softmax, build_softmax_gradient
from aule.ops.softmax.problem import SoftmaxProblem
from aule.ops.step import Step, StepPlan
from aule.target import Target
from aule.tile.math import LOG2E
from aule.view import TensorView

_LONG = 8192
"""Columns of a row that does not yet fill so much of a unit that this is idle while the row is on its way."""
_CLUSTER = 4


def _tuning(problem: SoftmaxProblem, backward: bool, statistics: bool, target: Target) -> RowTuning | None:
    """What was fastest on the H200, for rows of 16-bit numbers with dropout; None for what is usual.

    bf16, TB/s, 64 MiB and 1 GiB. Forward, 1024 columns, with at most 64 registers 2.92 and 3.49; of itself ptxas takes
    56: 2.76 and 3.37. 16384 columns: two exchanges, no cluster and words that are drawn last 2.20 and 2.70; drawn first
    by a cluster of two, one exchange, 2.36 and 3.01, by one of four 2.25 and 2.77. Through Vulkan that has 1.62 and
    1.91 without clusters, and what is usual 1.94 and 2.46.

    Backward, 4096 columns: one exchange 3.71 and 4.14, two 3.38 and 3.89; through Vulkan 3.15 and 3.64, 2.95 and 3.45.
    16384 columns: a cluster of four with at most 72 registers 3.02 and 3.45, 64 (which spill) 2.45 and 2.87, 80 2.90
    and 3.31; no cluster 2.27 and 2.41; two exchanges 2.24 and 2.37. Through Vulkan with two parts 2.44 and 2.67, four
    2.09 and 2.25, with two exchanges 2.14 and 2.39.

    Backward with statistics, at 512 MiB, before and with them: 16384 columns 3.39, and by clusters of four 3.61, by one
    workgroup with at most 64 registers 3.99; through Vulkan 2.64, and with four parts 2.82, eight 3.40. 4096 columns
    through Vulkan 3.60 and 4.02, 1024 columns 3.69 and 4.04.
    """
    long = problem.length > _LONG
    if long and backward and statistics and (target.max_cluster >= _CLUSTER or target.vulkan_on_nvidia):
        return RowTuning(parts=8) if target.vulkan_on_nvidia else RowTuning(registers=64)
    if target.max_cluster >= _CLUSTER:
        if long:
            return RowTuning(cluster=_CLUSTER, registers=72) if backward else RowTuning(cluster=2)
        return None if backward or problem.length > 1024 else RowTuning(registers=64)
    return RowTuning(parts=2) if long and backward and target.vulkan_on_nvidia else None


def plan_softmax(problem: SoftmaxProblem, views: Mapping[str, TensorView], target: Target) -> StepPlan:
    """Plan a softmax (``x``, ``y``, and where present ``mask`` and ``seed``) or its gradient (``dy``, ``dx``).

    With ``y`` given, a gradient on a CPU sees there what was dropped, and draws nothing again; with ``statistics`` as
    well, it does not add up weights again.
    """
    count = math.prod(problem.shape[:-1])
    if count == 0:
        return StepPlan(())
    backward = "dy" in views
    statistics = has_statistics(views) and ("y" in views or not backward or target.backend != "cpu")
    unused = {"statistics"}
    if backward:
        unused.add("seed" if "y" in views and target.backend == "cpu" else "y")
    views = {name: view for name, view in views.items() if name not in unused}
    rows = {name: view for name, view in views.items() if name not in ("mask", "seed")}
    along = {name: view for name, view in views.items() if name != "seed"}
    layout = lay_out(problem.shape[:-1], {name: view.strides[:-1] for name, view in along.items()})
    width = min(view_width(view) for view in rows.values())
    narrow = SCALARS[problem.dtype].bytes == 2
    tuning = _tuning(problem, backward, statistics, target) if narrow else None
    shape, span = choose_rows(target, problem.dtype, problem.length, width, count, NO_SUMS, tuning)
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
        meets=backward or shape.cluster > 1,
        early=shape.cluster > 1 and not backward,
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
