"""From a rotation to the launches that compute it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aule import tuning
from aule.ops.rope.kernels import RopeConfig, build_norm_rope_gradient, build_rope
from aule.ops.rope.problem import RopeProblem
from aule.ops.rows.column_sum import column_sum_step
from aule.ops.rows.hints import NO_SUMS, Work
from aule.ops.rows.layout import (
    choose_rows,
    evicts_last,
    mark_group_is_block,
    overlaps_launch,
    row_grid,
    streams,
)
from aule.ops.rows.views import (
    RowLayout,
    lay_out,
    needs_index64,
    row_operands,
    view_scalars,
    view_width,
)
from aule.ops.shared.plan import Plan, Step
from aule.target import Target
from aule.tile.rows.shape import PassShape, RowShape
from aule.view import TensorView

_ROWS = ("x", "y", "dy", "dx")


def plan_rope(problem: RopeProblem, views: Mapping[str, TensorView], target: Target) -> Plan:
    """Plan a rotation: ``x`` and ``y``, or ``dy`` and ``dx``, and ``cos``, ``sin``, and where present
    ``position_ids`` and ``weight``; for the gradient of a norm also ``x`` and ``dweight``."""
    if not problem.rows:
        return Plan(())
    sums, norm = "dweight" in views, problem.eps is not None
    rows = {name: view for name, view in views.items() if name in _ROWS}
    longest = max(problem.pairs, problem.rest)
    shape, passes, evict_last = _shape(problem, rows, sums, target)
    # Heads of a position that a thread processes at once share its angles.
    most = 1 if sums else tuning.number(target, "rope.heads", norm=norm)
    heads, layout = _heads_last(problem, views, most)
    loops = sums or target.host
    shape = replace(shape, batch=heads, loops=loops, exact=problem.rows % (shape.slots * heads) == 0)
    ranges = [_cut(problem.pairs, passes, longest)]
    if problem.rest and not (problem.inplace and not norm):
        ranges.append(_cut(problem.rest, passes, longest))
    name = "rms_norm_rope" if norm else "rope"
    grid = row_grid(name, shape, problem.rows, target)
    shape = mark_group_is_block(shape, grid, target)
    partials = grid[0]
    ids = views.get("position_ids")
    scalars = layout.scalars | view_scalars(views) | {"length": problem.pairs, "length1": problem.rest}
    scalars |= {"inverse_length": 1.0 / problem.length, "sums": problem.length}
    config = RopeConfig(
        name=f"{name}_backward" if problem.inverse else name,
        interleaved=problem.interleaved,
        ids=None if ids is None else ids.dtype,
        inverse=problem.inverse,
        norm=norm,
        copies=not problem.inplace or norm,
        dtype=problem.dtype,
        shape=shape,
        passes=tuple(ranges),
        axes=len(layout.sizes),
        index64=needs_index64(views.values(), partials * problem.length),
        operands=row_operands({n: view for n, view in views.items() if n != "position_ids"}, passes.width, target),
        stream=streams(rows, target) and not problem.inplace,  # in place, the row is in the cache already
        evict_last=evict_last,
        awaits=overlaps_launch(target, shape),
    )
    scalars |= {"eps": problem.eps or 0.0, "partials": partials, "positions": problem.positions}
    if ids is not None:
        scalars |= {f"{n}_position_stride": views[n].strides[0] for n in ("cos", "sin")}
    build = build_norm_rope_gradient if norm and problem.inverse else build_rope
    step = Step(config, build, grid, scalars)
    if not sums:
        return Plan((step,))
    outputs = [("dweight", views["dweight"])]
    pairs = problem.pairs if problem.interleaved else 0
    finish = column_sum_step(problem.dtype, outputs, partials, problem.length, target, pairs)
    return Plan((step, finish), {"partial": partials * problem.length})


def _shape(
    problem: RopeProblem, rows: Mapping[str, TensorView], sums: bool, target: Target
) -> tuple[RowShape, PassShape, bool]:
    """The layout of the longer of a row's two ranges of columns: pairs, and the rest; and `evicts_last`."""
    width = min(view_width(view, math.gcd(problem.pairs, problem.rest)) for view in rows.values())
    longest = max(problem.pairs, problem.rest)
    # As for sums even if there are none: one part each of many arrays.
    shape, passes = choose_rows(target, problem.dtype, longest, width, problem.rows, Work(sums=1, rotates=True))
    if target.host:
        passes = replace(passes, unroll=tuning.use(target, "rope.cpu")["unroll"], **_host_width(problem, passes))
    evict_last = evicts_last(rows, target, NO_SUMS, passes.width)
    if problem.eps is not None and not sums:
        threads = tuning.number(target, "rope.norm_threads", overlap=target.overlap, evict_last=evict_last)
        shape = replace(shape, slots=max(min(shape.slots, threads // shape.threads), 1))
    room = tuning.number(target, "rope.sum_threads")
    if sums and room:
        shape = replace(shape, resident=max(room // shape.workgroup, 1))
    return shape, passes, evict_last


def _host_width(problem: RopeProblem, passes: PassShape) -> dict[str, Any]:
    """Fields of a CPU's `PassShape`: each range of columns has at least one vector; in place, only full ones, since
    columns of a tail would be read again after they were rotated."""
    lengths = [n for n in (problem.pairs, problem.rest) if n]
    width = min(passes.width, *(1 << (n.bit_length() - 1) for n in lengths))
    if problem.inplace:
        width = min(width, *(n & -n for n in lengths))
    return {"width": width, "tail": width > 1 and not problem.inplace}


def _cut(columns: int, passes: PassShape, longest: int) -> PassShape:
    """Divide a range of columns as the longest one; of a shorter range, all parts may be past the end."""
    return passes if columns == longest else replace(passes, ragged=passes.parts)


def _heads_last(problem: RopeProblem, views: Mapping[str, TensorView], most: int) -> tuple[int, RowLayout]:
    """Order rows so that up to ``most`` heads of a position follow each other; how many do, and the layout.

    Other axes are ordered as in memory, so that neighbouring threads have neighbouring rows.
    """
    shape = problem.shape[:-1]
    main = views["dy" if problem.inverse else "x"]
    strides = {name: view.strides[: len(shape)] for name, view in views.items() if name in _ROWS}
    angles = ["position_ids"] if problem.positions else ["cos", "sin"]
    strides |= {name: views[name].strides[: len(shape)] for name in angles}
    shared = [axis for axis, n in enumerate(shape) if n > 1 and not any(strides[name][axis] for name in angles)]
    heads, head_axis = 1, shared[-1] if shared else None
    if head_axis is not None:
        while heads < most and shape[head_axis] % (2 * heads) == 0:
            heads *= 2
    axes = [(n // heads if axis == head_axis else n, axis) for axis, n in enumerate(shape)]
    axes.sort(key=lambda entry: -abs(main.strides[entry[1]]))
    sizes = [n for n, _ in axes]
    found = {
        name: [given[axis] * (heads if axis == head_axis else 1) for _, axis in axes] for name, given in strides.items()
    }
    if heads > 1 and head_axis is not None:
        sizes.append(heads)
        for name, given in strides.items():
            found[name].append(given[head_axis])
    return heads, lay_out(tuple(sizes), found)
