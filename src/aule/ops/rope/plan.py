"""From a rotation to the launches that compute it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from aule.ops.column_sum import column_sum_step
from aule.ops.rope.kernels import RopeConfig, build_norm_rope_gradient, build_rope
from aule.ops.rope.problem import RopeProblem
from aule.ops.row_shapes import (
    AWAITING,
    begins_early,
    choose_rows,
    fixes_heads,
    lasts,
    numbered,
    row_grid,
    streams,
    usual_grid,
)
from aule.ops.row_tuning import NO_SUMS, Work
from aule.ops.rowwise import RowLayout, extent, fixed_numbers, lay_out, operand, view_numbers, view_width
from aule.ops.step import Step, StepPlan
from aule.target import Target
from aule.tile.spans import SpanShape
from aule.view import TensorView

_HEADS, _NORM_HEADS, _CPU_HEADS = 1, 2, 4
"""Heads of a position that a thread has at once, so that they share its angles: in rotations on GPUs, with norms there,
and on CPUs. H200, bf16, TB/s with one, two and four, 64 MiB and 1 GiB: rope of 32 heads 3.82, 3.77, 3.69 and 4.12,
4.09, 3.99; rms_norm_rope 3.43, 3.52, 3.50 and 3.87, 4.12, 4.03. Through Vulkan 3.48, 3.45, 3.39 and 4.12, 4.08, 4.01;
3.02, 3.03, 2.92 and 3.51, 3.55, 3.51."""
_NORM_THREADS = 64
"""Of a workgroup where rows are normalised; 128 have 3.49 and 4.03 there. Where it may begin while the launch before
ends, 64 MiB and 1 GiB: 64 threads that do so 3.54 to 3.82 and 4.14, 128 3.78 to 3.81 and 4.06; 64 that do not, with
rows that last, 4.21 at 1 GiB, 128 that do 4.16. Rope of 32 heads, without and with: 4.02 to 4.07 and 4.08 to 4.14, at 1
GiB 4.11 and 4.13, and with rows that last 4.20."""
_RESIDENT = 640
"""Threads for each of NVIDIA's multiprocessors, where sums of columns are made: as many as fit. H200, rms_norm_rope of
8 heads, backward: 3.42 and 3.95; 512 have 3.18 and 3.70, 1024, which do not fit, 3.05 and 3.58. Through Vulkan, of 32
heads: 3.08 and 3.83; 2.87 and 3.56; 2.76 and 3.48."""
_ROWS = ("x", "y", "dy", "dx")


def plan_rope(problem: RopeProblem, views: Mapping[str, TensorView], target: Target) -> StepPlan:
    """Plan a rotation: ``x`` and ``y``, or ``dy`` and ``dx``, and ``cos``, ``sin``, and where present
    ``position_ids`` and ``weight``; for the gradient of a norm as well ``x`` and ``dweight``."""
    count = math.prod(problem.shape[:-1])
    if count == 0:
        return StepPlan(())
    sums = "dweight" in views
    rows = {name: view for name, view in views.items() if name in _ROWS}
    width = min(view_width(view, math.gcd(problem.pairs, problem.rest)) for view in rows.values())
    widest = max(problem.pairs, problem.rest)
    work = Work(sums=1)  # also where there are none: one part of each of many arrays
    shape, span = choose_rows(target, problem.dtype, widest, width, count, work)
    cpu, norm = target.backend == "cpu", problem.eps is not None
    if cpu:
        span = replace(span, unroll=1)
    most = _CPU_HEADS if cpu else _NORM_HEADS if norm else _HEADS
    heads, layout = _heads_last(problem, views, 1 if sums else most)
    lasting = lasts(rows, target, NO_SUMS)
    if norm and not sums:
        threads = AWAITING if target.overlap and not lasting else _NORM_THREADS
        shape = replace(shape, slots=max(min(shape.slots, threads // shape.threads), 1))
    if sums and (target.backend == "cuda" or target.vulkan_on_nvidia):
        shape = replace(shape, resident=max(_RESIDENT // shape.workgroup, 1))
    shape = replace(shape, batch=heads, loops=sums or cpu, exact=count % (shape.slots * heads) == 0)
    spans = [_cut(problem.pairs, span, shape.threads)]
    if problem.rest and not (problem.inplace and problem.eps is None):
        spans.append(_cut(problem.rest, span, shape.threads))
    name = "rms_norm_rope" if norm else "rope"
    grid = row_grid(name, shape, count, target)
    shape = numbered(shape, grid, target)
    partials = grid[0]
    ids = views.get("position_ids")
    scalars = layout.scalars | view_numbers(views) | {"length": problem.pairs, "length1": problem.rest}
    scalars |= {"inverse_length": 1.0 / problem.length, "sums": problem.length}
    known = ids is None and _positions_first(problem, views, layout) and fixes_heads(target)
    config = RopeConfig(
        name=f"{name}_backward" if problem.inverse else name,
        interleaved=problem.interleaved,
        ids=None if ids is None else ids.dtype,
        inverse=problem.inverse,
        norm=norm,
        copies=not problem.inplace or norm,
        dtype=problem.dtype,
        shape=shape,
        spans=tuple(spans),
        axes=len(layout.sizes),
        index64=max(extent(view) for view in views.values()) + partials * problem.length > 2**31 - 1,
        operands=tuple((n, operand(view, span.width)) for n, view in views.items() if n != "position_ids"),
        lasting=lasting,
        awaits=begins_early(target, shape),
        stream=streams(rows, target) and not problem.inplace,  # what was just read is in the cache
        fixed=fixed_numbers(scalars) if known else (),
    )
    scalars |= {"eps": problem.eps or 0.0, "partials": partials, "positions": problem.positions}
    if ids is not None:
        scalars |= {f"{n}_position_stride": views[n].strides[0] for n in ("cos", "sin")}
    build = build_norm_rope_gradient if norm and problem.inverse else build_rope
    step = Step(config, build, grid, scalars)
    if not sums:
        return StepPlan((step,))
    outputs = [("dweight", views["dweight"])]
    pairs = problem.pairs if problem.interleaved else 0
    usual = usual_grid(target, shape, count, grid)
    finish = column_sum_step(problem.dtype, outputs, partials, problem.length, target, pairs, usual)
    return StepPlan((step, finish), {"partial": partials * problem.length})


def _positions_first(problem: RopeProblem, views: Mapping[str, TensorView], layout: RowLayout) -> bool:
    """Whether strides are the same however many positions there are: those are the first axis, and behind it come heads
    alone, without gaps."""
    alone = all(not any(layout.strides[name][1:]) for name in ("cos", "sin"))
    heads = math.prod(layout.sizes[1:])
    dense = all(layout.strides[name][0] == heads * problem.length for name in _ROWS if name in layout.strides)
    return alone and dense and all(view.offset == 0 for view in views.values())


def _cut(columns: int, span: SpanShape, threads: int) -> SpanShape:
    """How so many columns are cut, where a span of another length is cut like ``span``."""
    if not span.parts:
        return replace(span, tail=columns % span.width)
    pieces = -(-columns // span.width)
    return replace(span, parts=-(-pieces // threads), ragged=pieces % threads != 0)


def _heads_last(problem: RopeProblem, views: Mapping[str, TensorView], most: int) -> tuple[int, RowLayout]:
    """Rows in an order in which some heads of a position follow each other, and how many.

    Other axes come as they lie in memory, so that neighbouring threads have neighbouring rows.
    """
    shape = problem.shape[:-1]
    main = views["dy" if problem.inverse else "x"]
    strides = {name: view.strides[: len(shape)] for name, view in views.items() if name in _ROWS}
    angles = ["position_ids"] if problem.positions else ["cos", "sin"]
    strides |= {name: views[name].strides[: len(shape)] for name in angles}
    alike = [axis for axis, n in enumerate(shape) if n > 1 and not any(strides[name][axis] for name in angles)]
    heads = 1
    if alike:
        while heads < most and shape[alike[-1]] % (2 * heads) == 0:
            heads *= 2
    axes = [(n // heads if alike and axis == alike[-1] else n, axis) for axis, n in enumerate(shape)]
    axes.sort(key=lambda entry: -abs(main.strides[entry[1]]))
    sizes = [n for n, _ in axes]
    found = {
        name: [given[axis] * (heads if alike and axis == alike[-1] else 1) for _, axis in axes]
        for name, given in strides.items()
    }
    if heads > 1:
        sizes.append(heads)
        for name, given in strides.items():
            found[name].append(given[alike[-1]])
    return heads, lay_out(tuple(sizes), found)
