"""Layout of rows over a device: threads of a row, columns of a thread, workgroups of a launch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aule import tuning
from aule.ir.types import SCALARS, f32
from aule.ops.rows.classes import RowClass, row_class
from aule.ops.rows.hints import NO_SUMS, RowTuning, SumTuning, Work
from aule.ops.shared.plan import grid_of
from aule.target import Target
from aule.tile.rows.column_sums import OCTET, SumsLayout
from aule.tile.rows.prefetch_shared import COPIED_BYTES
from aule.tile.rows.shape import PassShape, RowShape
from aule.tile.vector.engine import vector_unit, work_type
from aule.tuning import model
from aule.tuning.family import GENERIC
from aule.view import TensorView

_ROW_SUMS = 5
"""Most values per row that kernels with sums of columns exchange."""
_RESERVED = 1024
"""Bytes of each workgroup's shared memory that a driver may take."""


def choose_rows(
    target: Target,
    dtype: str,
    length: int,
    width: int,
    rows: int,
    work: Work = NO_SUMS,
    hints: RowTuning | None = None,
) -> tuple[RowShape, PassShape]:
    """The layout of rows of ``length`` columns, of which ``width`` can be loaded together. ``hints`` replace the usual
    ones in GPU kernels without sums of columns."""
    if target.host:
        return _choose_cpu_rows(target, dtype, length, rows, work)
    kind = row_class(target, dtype, length, width, work.use)
    return _choose_gpu_rows(target, dtype, kind, rows, work, hints)


def _choose_gpu_rows(
    target: Target, dtype: str, kind: RowClass, rows: int, work: Work, hints: RowTuning | None = None
) -> tuple[RowShape, PassShape]:
    size, length, width = SCALARS[dtype].bytes, kind.columns, kind.width
    narrow = size == 2 and width > 1
    if not work.sums:
        if hints is None:
            norm = work.columns or work.written > 1
            hints = _norm_hints(target, length, rows, work, narrow) if norm else RowTuning(**tuning.use(target, "rows"))
        full = width * size == COPIED_BYTES and length * size + 2 * _RESERVED <= target.max_shared_bytes
        hints = replace(hints, in_shared=hints.in_shared and full and narrow, narrow=hints.narrow and narrow)
        return _over_cluster(target, kind, rows, hints)
    summing = choose_sums(target, length, work, rows) if work.copied else usual_sums()
    if summing.narrow and not narrow:
        summing = usual_sums()
    shape, passes = _over_cluster(target, kind, rows, summing)
    if not summing.prefetch:
        return shape, passes
    prefetch, resident = summing.prefetch, shape.resident
    if not passes.parts or width * min(work.copied) != COPIED_BYTES:
        prefetch = 0
    elif summing.prefetch_to.startswith("staged"):
        rest, exchanged = _shared_bytes(target, dtype, shape, passes, replace(work, copied=()))
        staged = max(work.copied) * passes.width * passes.parts * shape.batch * shape.workgroup
        prefetch = int(rest + 2 * exchanged + staged <= target.max_shared_bytes)
    elif summing.prefetch_to == "shared":
        rest, block = _shared_bytes(target, dtype, shape, passes, work)
        resident = min(resident, target.max_shared_bytes // (rest + 2 * block))  # with one block ahead at least
        prefetch = min(prefetch, (target.max_shared_bytes // resident - rest) // block - 1) if resident else 0
    if summing.cluster_exchange and not (shape.cluster_exchange and prefetch):
        return _choose_gpu_rows(target, dtype, kind, rows, replace(work, exchanged=0))  # a cluster has no room
    if not prefetch:
        return _over_threads(target, kind, rows, usual_sums())
    shape = replace(shape, resident=resident, prefetch=prefetch, prefetch_to=summing.prefetch_to)
    combined = replace(shape, sums_cluster=summing.sums_cluster)
    return (combined if _can_combine_sums(target, dtype, rows, combined, passes, work) else shape), passes


def _can_combine_sums(target: Target, dtype: str, rows: int, shape: RowShape, passes: PassShape, work: Work) -> bool:
    """Whether workgroups can add up their sums of columns in the memory of prefetched rows, and all have rows."""
    size = work_type(SCALARS[dtype]).bytes
    pieces = passes.parts * passes.width * size // COPIED_BYTES
    room = (shape.prefetch + 1) * shape.batch * min(work.copied) >= size and work.sums <= len(work.copied)
    alike = shape.slots == 1 and pieces % shape.sums_cluster == 0
    enough = rows >= shape.block * shape.resident * model.units(target)
    paired = size == 4 and shape.sums_cluster == 2 <= target.max_cluster and shape.prefetch_to == "shared"
    return paired and alike and room and enough


def choose_sums(target: Target, length: int, work: Work, rows: int = 0) -> SumTuning:
    """The hints for kernels with sums of columns, which are gradients of norms."""
    facts = {
        "length": length,
        "sums": work.sums,
        "arrays": len(work.copied),
        "mixed": len(set(work.copied)) > 1,
        "bytes": max(work.copied, default=0),
        "exchanged": work.exchanged,
        "rows": rows,
        "rows_per_unit": rows // model.units(target),
        "cluster": target.max_cluster,
        "copies": target.async_copies,
    }
    return SumTuning(**tuning.use(target, "rows.sums", **facts))


def usual_sums() -> SumTuning:
    """The hints for kernels with sums of columns that prefetch nothing."""
    return SumTuning(**tuning.family_records(GENERIC, "rows.sums")[-1].use)


def _norm_facts(target: Target, length: int, work: Work, rows: int = 0, narrow: bool = False) -> dict[str, Any]:
    return {
        "length": length,
        "rows": rows,
        "residual": work.written > 1,
        "centred": work.centred,
        "narrow": narrow,
        "sums": work.sums,
        "arrays": len(work.copied),
        "overlap": target.overlap,
        "copies": target.async_copies,
    }


def _norm_hints(target: Target, length: int, rows: int, work: Work, narrow: bool) -> RowTuning:
    """The hints for forward norms."""
    facts = _norm_facts(target, length, work, rows, narrow)
    threads = tuning.number(target, "rows.norm.threads", **facts)
    return RowTuning(threads=threads, **tuning.use(target, "rows.norm", **facts))


def has_moments(target: Target, dtype: str, length: int, work: Work = NO_SUMS) -> bool:
    """Whether one exchange gives mean and squares of rows: on GPUs, for 16-bit elements."""
    faster = tuning.number(target, "rows.norm.moments", **_norm_facts(target, length, work))
    return not target.host and SCALARS[dtype].bytes == 2 and faster


def rounds_fused(target: Target, length: int, work: Work = NO_SUMS) -> bool:
    """Whether a norm's results are rounded by a fused operation (`KernelIR`)."""
    return bool(tuning.number(target, "rows.norm.fused_rounding", **_norm_facts(target, length, work)))


def _over_threads(
    target: Target, kind: RowClass, rows: int, hints: RowTuning, cluster: int = 1
) -> tuple[RowShape, PassShape]:
    """The layout over the threads of one workgroup, or of each of a cluster's."""
    sums, width = isinstance(hints, SumTuning), kind.width
    columns = kind.columns // cluster
    smallest = max(min(target.subgroup_sizes, default=target.subgroup_size), 1)
    limit = 1 << (min(target.max_threads, 1024).bit_length() - 1)
    most = min(hints.widest, limit) if isinstance(hints, SumTuning) else limit
    while most < limit and columns > most * hints.most:
        most *= 2
    best = (kind.parts or max(8 // width, 1) * hints.parts) * width
    threads = 1
    while threads < most and columns > threads * best:
        threads *= 2
    if smallest < threads <= 2 * smallest and columns <= hints.most * smallest and not sums:
        threads = smallest  # no barriers
    while kind.held and columns > threads * width and columns % (threads * width):
        threads //= 2  # of a class of three times a power of two
    parts = max(columns // (threads * width), 1)
    if kind.held and parts * width <= hints.most:
        ragged = kind.ragged(parts, threads * cluster)
        passes = PassShape(width, parts, ragged, columns=hints.columns, narrow=hints.narrow, reload=hints.reload)
    else:
        threads = min(int(tuning.number(target, "rows.stream_threads", wide=width > 1)), limit)
        passes = PassShape(width)
    slots = max(min(hints.threads, most) // threads, 1)
    if not isinstance(hints, SumTuning):
        in_shared = hints.in_shared and passes.parts > 0
        return RowShape(threads, slots, exact=rows % slots == 0, registers=hints.registers, in_shared=in_shared), passes
    if not passes.parts:
        slots = 1  # sums that are not in registers are a workgroup's own
    batch = hints.batch if passes.parts and rows >= hints.batch * slots * model.units(target) else 1
    resident = max(hints.resident // (threads * slots), 1)
    shape = RowShape(threads, slots, batch, loops=True, exact=rows % (slots * batch) == 0, resident=resident)
    return replace(shape, registers=hints.registers), passes


def _over_cluster(target: Target, kind: RowClass, rows: int, hints: RowTuning) -> tuple[RowShape, PassShape]:
    """The layout over a cluster of workgroups, if they are large enough; else over one workgroup."""
    cluster, most = hints.cluster, target.subgroup_size * target.subgroup_size
    cluster_exchange = hints.cluster_exchange if isinstance(hints, SumTuning) else 0
    if 1 < cluster <= target.max_cluster and kind.held:
        shape, passes = _over_threads(target, kind, rows, hints, cluster)
        most //= cluster * max(cluster_exchange, 1)  # each lane receives one value of one subgroup
        fits = target.subgroup_size <= shape.threads <= most
        if fits and (cluster_exchange or shape.slots == 1) and passes.parts:
            return replace(shape, cluster=cluster, cluster_exchange=cluster_exchange), passes
    if cluster > 1:
        hints = replace(hints, registers=0)  # the limit is for a cluster's shorter share of a row
    return _over_threads(target, kind, rows, hints)


def _shared_bytes(target: Target, dtype: str, shape: RowShape, passes: PassShape, work: Work) -> tuple[int, int]:
    """Bytes of shared memory of a workgroup: fixed ones, and those for each block of rows."""
    size = work_type(SCALARS[dtype]).bytes
    block = sum(work.copied) * passes.width * passes.parts * shape.batch * shape.workgroup
    subgroups = shape.workgroup // max(target.subgroup_size, 1)
    if shape.cluster_exchange:
        # Each subgroup receives from all subgroups of its row; slots are combined in the memory of prefetched rows.
        senders = shape.threads * shape.cluster // target.subgroup_size
        return _RESERVED, block + size * shape.cluster_exchange * senders * subgroups
    slots = size * shape.workgroup * passes.width if shape.slots > 1 else 0
    return slots + _RESERVED, block + size * _ROW_SUMS * shape.batch * subgroups


def _choose_cpu_rows(target: Target, dtype: str, length: int, rows: int, work: Work) -> tuple[RowShape, PassShape]:
    """The layout on a CPU: one row at a time, which stays in the first-level cache; or a batch of longer rows, which
    share the loads of arrays with one number per column."""
    limits = tuning.use(target, "rows.cpu")
    elem, sums = SCALARS[dtype], work.sums > 0
    lanes = vector_unit(target, work_type(elem)).lanes
    # Sums of 16-bit numbers are twice as wide as the rows.
    most = 0 if sums and elem.bytes < f32.bytes else limits["row_bytes"][sums]
    batch = limits["batch"] if (sums or work.columns) and length * elem.bytes > most else 1
    width = min(lanes, 1 << (max(length, 1).bit_length() - 1))  # a row has at least one vector
    unroll = tuning.use(target, "rows.cpu.unroll")["one_row" if batch == 1 else "batch"]
    passes = PassShape(width, tail=width > 1, unroll=unroll)
    return RowShape(batch=batch, loops=True, exact=rows % batch == 0), passes


def scratch_columns(target: Target, length: int) -> int:
    """Columns of a row for which a CPU's thread has scratch memory; 0 if that would be too much."""
    return next((n for n in tuning.use(target, "rows.cpu")["scratch"] if length <= n), 0) if target.host else 0


def row_grid(op: str, shape: RowShape, rows: int, target: Target) -> tuple[int, int, int]:
    """The grid of a kernel over rows."""
    blocks = -(-rows // shape.block)
    if not shape.loops or blocks == 0:
        return grid_of(op, blocks * shape.cluster, target)
    if target.host:
        return (min(blocks, model.tasks(target, rows=True)), 1, 1)
    units = model.units(target)
    if shape.cluster_exchange:
        # A cluster needs free neighbouring units, and not all units have enough of them.
        found, of = tuning.number(target, "rows.clustered_units")
        units = units * found // of
    groups = max(shape.resident * units // shape.cluster, 1)
    groups -= groups % shape.sums_cluster
    if shape.resident == 1:
        # Equal shares finish no later and leave fewer partial sums. Not if several workgroups share a unit: some units
        # would get fewer.
        even = -(-blocks // -(-blocks // groups))
        even += even % shape.sums_cluster
        least, of = tuning.number(target, "rows.even_groups")
        groups = even if of * even >= least * groups else groups
    return (min(blocks, groups) * shape.cluster, 1, 1)


def sums_layout(target: Target, passes: PassShape) -> SumsLayout:
    """The layout of partial sums of columns: deinterleaved if that is faster and parts allow it."""
    layout: SumsLayout = tuning.number(target, "rows.sums.layout")
    return layout if passes.parts and passes.width == OCTET else "in_order"


def mark_group_is_block(shape: RowShape, grid: tuple[int, int, int], target: Target) -> RowShape:
    """The shape with ``group_is_block`` set for a grid."""
    alike = not shape.loops and shape.cluster == 1 and grid[1] == 1
    return replace(shape, group_is_block=alike and tuning.number(target, "rows.group_is_block"))


def overlap_threads(target: Target) -> int:
    """Fewest threads of a workgroup that starts while the launch before it ends."""
    return int(tuning.number(target, "rows.overlap_threads"))


def overlaps_launch(target: Target, shape: RowShape) -> bool:
    """Whether a kernel starts while the launch before it ends: if its workgroups are large and do not loop."""
    return target.overlap and not shape.loops and shape.workgroup >= overlap_threads(target)


def streams(views: Mapping[str, TensorView], target: Target) -> bool:
    """Whether results bypass the caches: on CPUs, if a kernel's arrays fill them, so the next kernel would not find the
    results there. Not if an array is so large that it is fresh memory each time, which the system clears and so
    brings into the caches, nor for 16-bit elements, whose conversion takes as long."""
    if not target.host:
        return False
    limits = tuning.use(target, "rows.cpu.stream")
    sizes = [math.prod(view.shape) * view.itemsize for view in views.values()]
    fills = sum(sizes) >= (target.cache_bytes or limits["cache_bytes"]) and max(sizes) < limits["fresh_bytes"]
    return fills and all(view.itemsize >= f32.bytes for view in views.values())


def evicts_last(views: Mapping[str, TensorView], target: Target, work: Work, width: int) -> bool:
    """Whether rows that are read, ``width`` columns at a time, are evicted last from the second-level cache: if arrays
    are too large for results to stay there for the next kernel. Memory is faster then; cause unknown."""
    least: int = tuning.number(target, "rows.evict_last_bytes", residual=work.written > 1)
    moved = sum(math.prod(view.shape) * view.itemsize for view in views.values())
    return 0 < least <= moved and width > 1
