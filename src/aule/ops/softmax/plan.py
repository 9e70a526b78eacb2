"""From a softmax to the launch that computes it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from aule.ir.types import SCALARS
from aule.ops.attention.dropout import keep_scale, threshold
from aule.ops.row_shapes import NO_SUMS, RowTuning, choose_rows, row_grid, streams
from aule.ops.rowwise import RowOperand, extent, has_statistics, lay_out, operand, view_numbers, view_width
from aule.ops.softmax.kernels import SoftmaxConfig, build_softmax, build_softmax_gradient
from aule.ops.softmax.problem import SoftmaxProblem
from aule.ops.step import Step, StepPlan
from aule.target import Target
from aule.tile.math import LOG2E, lowest
from aule.tile.vector import work_type
from aule.view import TensorView

_LONG = 8192
"""Columns of a row that does not yet fill so much of a unit that this is idle while the row is on its way."""
_SHORT = 2048
"""Columns of a row that one subgroup has."""
_CLUSTER = 4
_RESIDENT = 1024
"""Threads of a unit, with some 64 registers each."""


@dataclass(frozen=True)
class _Way:
    """How rows lie over a GPU's threads, None for what is usual, and what `SoftmaxConfig` says."""

    tuning: RowTuning | None = None
    meets: bool = False
    early: bool = False
    fetches: bool = False


def _way(problem: SoftmaxProblem, backward: bool, statistics: bool, target: Target) -> _Way:
    """What was fastest on the H200, for rows of 16-bit numbers.

    bf16, dropout, TB/s, 64 MiB and 1 GiB. Forward, 1024 columns: words drawn first and later rows fetched 3.25 and
    4.17, not fetched 3.19 and 4.07; drawn last 3.00 and 3.99, with eight parts 2.97 and 4.13. 4096 columns: one
    exchange and later rows fetched 3.24 and 4.17, not fetched 3.11 and 4.06; two exchanges 3.08 and 4.02, drawn first
    3.06 and 4.09, eight parts 2.94 and 4.06. 16384 columns: drawn first, one exchange, later rows fetched, at most 64
    registers 2.74 and 3.59, not told how many 2.71 and 3.51, not fetched 2.68 and 3.49; two exchanges 2.56 and 3.32; by
    a cluster of two 2.57 and 3.14 (2.73 and 3.29 if words wait as bits, for which more fit a unit), of four 2.56 and
    3.09. Workgroups that stay, with the next row on its way to shared memory, 2.52 and 3.43, with eight parts 2.54 and
    3.57, to registers 2.53 and 3.21. Without dropout, 16384 columns: one exchange, later rows fetched 3.68 and 4.26,
    not fetched 3.62 and 4.19, two exchanges 3.40 and 4.09, a cluster of two 3.14 and 3.76. Through Vulkan, 1024
    columns, eight parts 2.95 and 3.92, four 2.91 and 3.72; 16384 columns, drawn first 2.82 and 3.46, last 2.35 and
    2.86, with one exchange 1.92 and 2.20, with eight parts 2.50 and 3.06.

    Backward, 4096 columns: one exchange 3.71 and 4.14, two 3.38 and 3.89; through Vulkan 3.15 and 3.64, 2.95 and 3.45.
    16384 columns: a cluster of four with at most 72 registers 3.02 and 3.71, 64 (which spill) 2.48 and 2.96, 80 3.10
    and 3.57, of two 3.18 and 3.65; two parts and no cluster 2.81 and 3.14. Through Vulkan with two parts 2.56 and 2.93,
    four 2.54 and 2.94, with two exchanges 2.50 and 2.66.

    Backward with statistics of rows, 512 MiB, 32 random bits for each weight, without and with them: 16384 columns 3.39
    and, by clusters of four, 3.61, by one workgroup with at most 64 registers 3.96; through Vulkan 2.64 and, with four
    parts, 2.82, eight 3.40; 4096 columns 3.60 and 4.02, 1024 columns 3.69 and 4.04.
    """
    long, drops = problem.length > _LONG, problem.dropout_p > 0.0
    if long and backward and statistics and (target.max_cluster >= _CLUSTER or target.vulkan_on_nvidia):
        return _Way(RowTuning(parts=8) if target.vulkan_on_nvidia else RowTuning(registers=64))
    if target.max_cluster >= _CLUSTER:
        if backward:
            return _Way(RowTuning(cluster=_CLUSTER, registers=72) if long else None, meets=True)
        tuning, meets = RowTuning(registers=64) if long and drops else None, problem.length > _SHORT
        early = long or problem.length <= _SHORT
        return _Way(tuning, meets, early, fetches=True) if drops or long else _Way()
    if target.vulkan_on_nvidia:
        if backward:
            return _Way(RowTuning(parts=2) if long else None, meets=True)
        return _Way(RowTuning(parts=8) if drops and problem.length <= 1024 else None, early=long)
    return _Way(meets=backward)


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
    way = _way(problem, backward, statistics, target) if narrow else _Way(meets=backward)
    shape, span = choose_rows(target, problem.dtype, problem.length, width, count, NO_SUMS, way.tuning)
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
        meets=way.meets or shape.cluster > 1,
        early=way.early,
        fetches=way.fetches and span.parts > 0 and dict(operands)["x"].unit and target.compute_units > 0,
        dtype=problem.dtype,
        shape=shape,
        spans=(span,),
        axes=len(layout.sizes),
        index64=max(extent(view) for view in along.values()) > 2**31 - 1,
        operands=operands,
        stream=streams(rows, target),
    )
    scalars = layout.scalars | view_numbers(views) | {"length": problem.length, "seq": problem.rows}
    factor = problem.scale * LOG2E if folded else LOG2E
    scalars |= {
        "scale": problem.scale,
        "factor": factor,
        # Of scores whose product with the factor is a number for sure.
        "reach": -lowest(work_type(SCALARS[problem.dtype])) / max(factor, 2.0) / 2,
        "shift": problem.length - problem.rows,
        "dropout_limit": threshold(problem.dropout_p),
        "keep_scale": keep_scale(problem.dropout_p),
        # Rows that a device has at a time: others than the next ones would come too late, or be gone when their turn
        # comes. Twice as many: 3.0 in place of 3.2 TB/s at 64 MiB and 3.3 in place of 4.2 at 1 GiB (H200).
        "later": target.compute_units * (_RESIDENT // shape.threads),
    }
    build = build_softmax_gradient if backward else build_softmax
    return StepPlan((Step(config, build, row_grid(config.name, shape, count, target), scalars),))
