"""From a softmax to the launch that computes it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from aule.ir.types import SCALARS
from aule.ops.attention.dropout import OCTET, keep_scale, threshold
from aule.ops.row_shapes import begins_early, choose_rows, lasts, row_grid, streams
from aule.ops.row_tuning import NO_SUMS, RowTuning
from aule.ops.rowwise import RowOperand, extent, has_statistics, lay_out, operand, view_numbers, view_width
from aule.ops.softmax.kernels import (
    Early,
    SoftmaxConfig,
    build_gradient_of_weights,
    build_softmax,
    build_softmax_gradient,
)
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
_ROUNDED = 96
"""What an exponent may be off, for all of a row: a million weights of 2**96 still have a sum."""


def _compares_pairs(target: Target) -> bool:
    """Whether one instruction compares two 16-bit floats."""
    return target.backend == "cuda" and target.arch != "sm_75"


@dataclass(frozen=True)
class _Way:
    """How rows lie over a GPU's threads, None for what is usual, and what `SoftmaxConfig` says."""

    tuning: RowTuning | None = None
    meets: bool = False
    early: Early = ""
    fetches: bool = False
    awaits: bool = False
    small: bool = False


def _way(problem: SoftmaxProblem, backward: bool, statistics: bool, target: Target) -> _Way:
    """What was fastest on the H200, for rows of 16-bit numbers.

    bf16, dropout, TB/s, 64 MiB and 1 GiB, the seed at hand. Forward, rows that depend on masks, on words, on nothing
    (so that compilers draw last): 1024 columns 3.80 and 4.26, 3.77 and 4.26, 3.59 and 4.24; 4096 columns 3.79 and 4.26,
    3.67 and 4.25, 3.60 and 4.25; 16384 columns 3.45 and 4.25, 3.26 and 3.83, 3.09 and 3.72, with masks by comparisons
    3.55 and 4.19, two exchanges 3.23 and 4.19. Starting while the launch before ends, 64 MiB: 3.84, 3.86, 3.53. 16384
    columns before that: rows not fetched 3.28 and 3.84, fetched 3.41 and 3.95; exponentials made again for the result,
    so that four workgroups fit in place of two, 3.13 and 3.77, three (40 registers) 2.89 and 3.51, of rows in shared
    memory 2.95 and 2.87 at best. Clusters, and workgroups that stay, have lost before. Without dropout, 16384 columns:
    one exchange, later rows fetched 3.68 and 4.26, not fetched 3.62 and 4.19, two exchanges 3.40 and 4.09, a cluster
    of two 3.14 and 3.76.

    Through Vulkan, words, masks, drawn last: 1024 columns 3.45 and 4.10, 3.39 and 4.01, 3.15 and 3.99, with eight parts
    3.13 and 3.95; 4096 columns 3.41 and 4.07, 3.35 and 3.99, 3.17 and 3.97, with one exchange 3.35 and 4.01; 16384
    columns with one exchange 3.08 and 3.81, two 2.99 and 3.72, masks 2.87 and 3.68, drawn last 2.60 and 3.28. Numbers
    that are not said to be small: 3.40 and 4.03, 3.34 and 3.99, 2.93 and 3.66.

    Backward, 4096 columns: one exchange 3.71 and 4.14, two 3.38 and 3.89; through Vulkan 3.15 and 3.64, 2.95 and 3.45.
    16384 columns: a cluster of four with at most 72 registers 3.02 and 3.71, 64 (which spill) 2.48 and 2.96, 80 3.10
    and 3.57, of two 3.18 and 3.65; two parts and no cluster 2.81 and 3.14. Through Vulkan with two parts 2.56 and 2.93,
    four 2.54 and 2.94, with two exchanges 2.50 and 2.66.

    Backward with statistics of rows, 512 MiB, 32 random bits for each weight, without and with them: 16384 columns 3.39
    and, by clusters of four, 3.61, by one workgroup with at most 64 registers 3.96; through Vulkan 2.64 and, with four
    parts, 2.82, eight 3.40; 4096 columns 3.60 and 4.02, 1024 columns 3.69 and 4.04. Since then, 64 MiB and 1 GiB: 16384
    columns 3.29 and 3.94 with ten numbers of a thread spilled; with masks and what comes for weights packed none is:
    4.02 and 4.35, rows that depend on masks 3.97 and 4.35, rows that land in shared memory 3.82 and 4.35, and weights
    made again, so that three workgroups fit, 3.61 and 4.29; later rows fetched 2.79 and 2.92. 4096 and 1024 columns
    packed with masks 4.07 and 4.34, 4.07 and 4.33, as they are 4.12 and 4.35, 4.15 and 4.34. Starting while the launch
    before ends 4.18 and 4.20, at 16384 columns 3.82 -> 3.85; rows that last 1% more at 1 GiB, 3% less at 64 MiB.
    Through Vulkan, us: 4096 columns with two parts 26.6 and 374, four 27.3 and 379, packed 27.2 and 375, with masks
    27.3 and 379; 1024 columns 27.4 and 376, 27.3 and 378; 16384 columns with eight parts 33.4 and 420, packed 33.3 and
    417, with masks 33.9 and 457, two parts packed 36.7 and 534, four 38.3 and 524.
    """
    long, drops = problem.length > _LONG, problem.dropout_p > 0.0
    if long and backward and statistics and (target.max_cluster >= _CLUSTER or target.vulkan_on_nvidia):
        if target.vulkan_on_nvidia:
            return _Way(RowTuning(parts=8))
        return _Way(RowTuning(registers=64, packed=True), early="masks", awaits=True)
    if target.max_cluster >= _CLUSTER:
        if backward:
            return _Way(RowTuning(cluster=_CLUSTER, registers=72) if long else None, meets=True, awaits=not long)
        if not (drops or long):
            return _Way()
        tuning, meets = RowTuning(registers=64) if drops else None, problem.length > _SHORT
        return _Way(tuning, meets, "masks", fetches=True, awaits=drops)
    if target.vulkan_on_nvidia:
        if backward:
            few = long or (statistics and problem.length > _SHORT)
            return _Way(RowTuning(parts=2) if few else None, meets=True)
        return _Way(meets=long and drops, early="words", small=True)
    return _Way(meets=backward)


def plan_softmax(problem: SoftmaxProblem, views: Mapping[str, TensorView], target: Target) -> StepPlan:
    """Plan a softmax (``x``, ``y``, and where present ``mask`` and ``seed``) or its gradient (``dy``, ``dx``).

    With ``y`` given, a gradient on a CPU sees there what was dropped, and draws nothing again; with ``statistics`` as
    well, it does not add up weights again; with ``weights`` it needs none of these.
    """
    count = math.prod(problem.shape[:-1])
    if count == 0:
        return StepPlan(())
    backward = "dy" in views
    cpu = target.backend == "cpu"
    weights = backward and cpu and "weights" in views and SCALARS[problem.dtype].bytes == 2
    statistics = has_statistics(views) and not weights and ("y" in views or not backward or not cpu)
    unused = {"statistics"}
    if weights:
        unused |= {"x", "y", "mask", "seed"}
    elif backward:
        unused |= {"weights", "seed" if "y" in views and cpu else "y"}
    views = {name: view for name, view in views.items() if name not in unused}
    rows = {name: view for name, view in views.items() if name not in ("mask", "seed")}
    along = {name: view for name, view in views.items() if name != "seed"}
    layout = lay_out(problem.shape[:-1], {name: view.strides[:-1] for name, view in along.items()})
    width = min(view_width(view) for view in rows.values())
    narrow = SCALARS[problem.dtype].bytes == 2
    way = _way(problem, backward, statistics, target) if narrow else _Way(meets=backward)
    shape, span = choose_rows(target, problem.dtype, problem.length, width, count, NO_SUMS, way.tuning)
    folded = problem.scale > 0 and problem.mask in (None, "bool")
    plain = folded and problem.mask is None and not problem.causal
    draws = problem.dropout_p > 0.0 and "weights" not in views
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
        early=way.early if draws and span.parts > 0 and span.width == OCTET else "",
        narrow=plain and narrow and not backward and span.parts > 0 and span.width > 1 and _compares_pairs(target),
        small=way.small and not backward,
        awaits=way.awaits and begins_early(target, shape),
        fetches=way.fetches and span.parts > 0 and dict(operands)["x"].unit and target.compute_units > 0,
        dtype=problem.dtype,
        shape=shape,
        spans=(span,),
        axes=len(layout.sizes),
        index64=max(extent(view) for view in along.values()) > 2**31 - 1,
        operands=operands,
        stream=streams(rows, target),
        lasting=backward and lasts(rows, target, NO_SUMS),
    )
    scalars = layout.scalars | view_numbers(views) | {"length": problem.length, "seq": problem.rows}
    factor = problem.scale * LOG2E if folded else LOG2E
    work = work_type(SCALARS[problem.dtype])
    reach = -lowest(work) / max(factor, 2.0) / 2
    bits = (problem.rows - 1).bit_length()
    scalars |= {
        "scale": problem.scale,
        "factor": factor,
        "power": 2.0 ** math.floor(math.log2(factor)) if factor > 0.0 else 1.0,
        # Of scores whose product with the factor is rounded by less than exponents have room for, and of those whose
        # product is a number for sure.
        "near": min(_ROUNDED * 2.0 ** (53 if work.bits == 64 else 24) / factor, reach) if factor > 0.0 else reach,
        "reach": reach,
        "shift": problem.length - problem.rows,
        "seq_factor": ((1 << 32) * ((1 << bits) - problem.rows)) // problem.rows + 1,
        "seq_bits": bits,
        "dropout_limit": threshold(problem.dropout_p),
        "keep_scale": keep_scale(problem.dropout_p),
        # Rows that a device has at a time: others than the next ones would come too late, or be gone when their turn
        # comes. Twice as many: 3.0 in place of 3.2 TB/s at 64 MiB and 3.3 in place of 4.2 at 1 GiB (H200).
        "later": target.compute_units * (_RESIDENT // shape.threads),
    }
    build = build_softmax_gradient if backward else build_softmax
    if weights:
        build = build_gradient_of_weights
    return StepPlan((Step(config, build, row_grid(config.name, shape, count, target), scalars),))
