"""How rows lie over a device: which threads have what of them, and how many workgroups there are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from aule.ir.types import SCALARS, f32
from aule.ops.column_trail import trail_shape
from aule.ops.row_tuning import (
    LANDS,
    LARGE_ROWS,
    LONG,
    NO_SUMS,
    SUMS,
    TUNING,
    UNITS,
    RowTuning,
    SumTuning,
    Work,
    is_middle,
)
from aule.ops.step import grid_of
from aule.ops.sum_tuning import choose_sums
from aule.target import Target
from aule.tile.column_sums import SumsLayout
from aule.tile.rows import RowShape
from aule.tile.short_floats import RUN, short_words
from aule.tile.spans import ColumnReads, SpanShape
from aule.tile.stages import COPIED_BYTES, copies_past_registers
from aule.tile.vector import vector_unit, work_type
from aule.view import TensorView

_PARTS = {(1, False): 4, (1, True): 8, (2, False): 2, (2, True): 4}
"""Parts of a thread in norms on NVIDIA's GPUs, by arrays that are written (two with a residual) and whether rows are
long; through Vulkan four for one array in any case, but for what `_vulkan_tuning` says.

H200, bf16, TB/s, 64 MiB and 1 GiB. One array, eight parts and four: rms_norm of 4096 columns 3.69, 3.80 and 4.10, 4.09,
of 16384 columns 3.43, 3.40 and 4.13, 4.11; layer_norm 3.34, 3.68 and 4.13, 4.13; 3.05, 2.98 and 4.06, 3.97. Two arrays,
four and two: residual_rms_norm of 4096 columns 3.71, 3.83 and 4.11, 4.10, of 16384 columns 3.59, 3.68 and 4.14, 4.13;
residual_layer_norm 3.56, 3.75 and 4.10, 4.12; 3.35, 3.27 and 4.14, 4.10. Through Vulkan: residual_rms_norm of 4096
columns 3.36, 3.30 and 4.07, 4.07; residual_layer_norm 3.13, 3.28 and 4.05, 4.03, of 16384 columns 3.10, 2.76 and 4.00,
3.66.
"""
_NORM_THREADS = 32
"""Of a workgroup of those at least: a row that one subgroup has is a workgroup of its own. H200, bf16, 1024 columns,
TB/s with 32, 64 and 128, 64 MiB and 1 GiB: rms_norm 3.80, 3.71, 3.80 and 4.22, 4.22, 4.16, residual_rms_norm 3.86,
3.72, 3.69 and 4.21, 4.19, 4.14; through Vulkan layer_norm 3.29, 3.24, 3.24 and 4.19, 4.18, 4.17."""
AWAITING = 128
"""The same where they begin while the launch before ends, and there are not so `_MANY_ROWS`; workgroups with fewer do
not. 64 MiB: rms_norm of 1024 columns 3.76 -> 3.85, residual_layer_norm 3.70 -> 3.85, layer_norm 3.61 -> 3.74, and with
at most 64 registers in place of 72 3.79; with 32 threads each that all begin early it has 3.19. 256 MiB: layer_norm
with 128 threads 4.04, with 32 4.06. Longer rows, without and with that: rms_norm of 4096 columns 3.81, 3.86, of 16384
3.44, 3.65. With a residual, 1024 columns, and each of four arrays of memory, a row for 64 threads and for 128:
residual_rms_norm 3.86 to 3.93 and 4.09 to 4.12, residual_layer_norm 3.76 to 3.87 and 4.04 to 4.08."""
_MANY_ROWS = 1 << 16
_SHORT = 1024
_COLUMNS: ColumnReads = "late"
"""Through Vulkan on NVIDIA's GPUs. H200, bf16, 512 MiB, TB/s with weights read late and held: layer_norm of 4096
columns 4.01, 3.79, of 16384 columns 3.63 (64 registers), 2.22 (78); residual_layer_norm of 16384 columns 3.47, 3.34,
rms_norm 3.90, 3.78, residual_rms_norm 3.94, 3.65; at 1024 columns the same. Through CUDA nothing is gained."""
_SCRATCH = (1024, 4096, 16384)
"""Columns for which a CPU's thread may have memory of its own, which is to stay in its caches."""
_ROW_BYTES = (6 << 10, 5 << 10)
"""Bytes of a row up to which a CPU's thread takes one at a time, in kernels without and with sums of columns."""
_CACHE_BYTES = 32 << 20
"""Of a CPU's last cache, where the system does not say."""
_FRESH_BYTES = 32 << 20
"""An array of so much is fresh memory each time (glibc), which the system has cleared and so brought to the caches:
past them a result of 40 MiB took 5 to 10% longer."""
_LASTING_BYTES = (256 << 20, 64 << 20)
"""Of all rows that a kernel reads and writes, and where it writes two arrays of them: more than the second-level cache
holds."""
_CLUSTERED = (10, 11)
"""Of a device's units, how many clusters of eight find at once: those of a cluster are neighbours, and not all units
have seven that are left. An H200 has place for 15, and 132 units; where there are more than that, some come last."""
_ROW_SUMS = 5
"""Numbers for each row that kernels with sums of columns exchange, at most."""
_RESERVED = 1024
"""Bytes of shared memory that CUDA takes of each workgroup's."""


def choose_rows(
    target: Target,
    dtype: str,
    length: int,
    width: int,
    rows: int,
    work: Work = NO_SUMS,
    tuning: RowTuning | None = None,
) -> tuple[RowShape, SpanShape]:
    """How rows of ``length`` columns, of which ``width`` can travel together, lie over a device's threads; ``tuning``
    is another than `TUNING`, for kernels without sums of columns on GPUs."""
    if target.backend == "cpu":
        return _choose_cpu_rows(target, dtype, length, rows, work)
    size = SCALARS[dtype].bytes
    narrow = size == 2 and width % 2 == 0
    if not work.sums:
        tuning = tuning or TUNING
        if (work.columns or work.written > 1) and (target.backend == "cuda" or target.vulkan_on_nvidia):
            tuning = _norm_tuning(target, length, rows, work, tuning, narrow)
        whole = width * size == COPIED_BYTES and length * size + 2 * _RESERVED <= target.max_shared_bytes
        tuning = replace(tuning, landed=tuning.landed and whole, packed=tuning.packed and narrow)
        return _over_cluster(target, length, width, rows, tuning)
    summing = choose_sums(target, length, work, rows) if work.copied else SUMS
    if summing.packed and not narrow:
        summing = SUMS
    shape, span = _over_cluster(target, length, width, rows, summing)
    if not summing.ahead:
        return shape, span
    ahead, resident = summing.ahead, shape.resident
    if not span.parts or width * min(work.copied) != COPIED_BYTES:
        ahead = 0
    elif summing.through.startswith("parked"):
        rest, exchanged = _shared_bytes(target, dtype, shape, span, replace(work, copied=()))
        parked = max(work.copied) * span.width * span.parts * shape.batch * shape.workgroup
        ahead = int(rest + 2 * exchanged + parked <= target.max_shared_bytes)
    elif summing.through == "shared":
        rest, block = _shared_bytes(target, dtype, shape, span, work)
        resident = min(resident, target.max_shared_bytes // (rest + 2 * block))  # with one block ahead at least
        ahead = min(ahead, (target.max_shared_bytes // resident - rest) // block - 1) if resident else 0
    if summing.mail and not (shape.mail and ahead):  # a cluster's threads would not have as much each, or no room
        return choose_rows(target, dtype, length, width, rows, replace(work, exchanged=0))
    if not ahead:
        return _over_threads(target, length, width, rows, SUMS)
    shape = replace(shape, resident=resident, ahead=ahead, through=summing.through)
    gathered = replace(shape, gather=summing.gather)
    return (gathered if _can_gather(target, dtype, rows, gathered, span, work) else shape), span


def _can_gather(target: Target, dtype: str, rows: int, shape: RowShape, span: SpanShape, work: Work) -> bool:
    """Whether workgroups can add up their sums of columns in the shared memory through which rows have come, and all
    of them have rows."""
    size = work_type(SCALARS[dtype]).bytes
    pieces = span.parts * span.width * size // COPIED_BYTES
    room = (shape.ahead + 1) * shape.batch * min(work.copied) >= size and work.sums <= len(work.copied)
    alike = shape.through == "shared" and shape.slots == 1 and not span.ragged and pieces % shape.gather == 0
    groups = shape.resident * (target.compute_units or UNITS)
    return size == 4 and shape.gather == 2 <= target.max_cluster and alike and room and rows >= shape.block * groups


def _norm_tuning(target: Target, length: int, rows: int, work: Work, tuning: RowTuning, narrow: bool) -> RowTuning:
    """Norms on NVIDIA's GPUs, forward."""
    tuning = replace(tuning, threads=_NORM_THREADS)
    if target.backend == "cuda" or work.written > 1:
        tuning = replace(tuning, parts=_PARTS[min(work.written, 2), length > LONG])
    if target.vulkan_on_nvidia:
        return _vulkan_tuning(length, work, tuning)
    if target.overlap and rows < _MANY_ROWS:
        tuning = replace(tuning, threads=AWAITING)
        if length <= _SHORT and work.written > 1:
            tuning = replace(tuning, parts=1)
        elif narrow and length <= _SHORT and work.centred:
            tuning = replace(tuning, registers=64)
    if length > LANDS and work.centred and work.written == 1 and copies_past_registers(target):
        tuning = replace(tuning, parts=4, columns="late", landed=narrow)
    elif is_middle(length) and work.written > 1 and rows >= LARGE_ROWS:
        tuning = replace(tuning, parts=1)
    elif narrow and LONG < length <= 2 * LONG and work.centred and work.written > 1:
        tuning = replace(tuning, registers=64)  # two workgroups of 512 threads fit; left alone it has 64, 91 or 112
    return tuning


def _vulkan_tuning(length: int, work: Work, tuning: RowTuning) -> RowTuning:
    """The same through Vulkan, where kernels know strides and lengths.

    H200, bf16, TB/s, 64 MiB and 1 GiB. 1024 columns: residual_layer_norm with one part, so a row for 128 threads, 3.54
    and 4.19, two 3.48 and 4.18, four 3.46 and 4.16; residual_rms_norm with one 3.60 and 4.21, four 3.60 and 4.17;
    layer_norm with two 3.45 and 4.20, four 3.41 and 4.18, one 3.28; rms_norm with one 3.61 and 4.17, four 3.50 and
    4.20. 4096 columns: rms_norm with two parts 3.55 and 4.10, four 3.51 and 4.11, one 3.07; residual_rms_norm with one
    3.51 and 4.11, two 3.51 and 4.07, four 3.44; residual_layer_norm by moments and with fused rounding, weights held
    3.48 and 4.07, by moments alone 3.46 and 4.05, weights held alone 3.44 and 4.06, neither 3.42 and 4.05, one part
    3.32, four 3.26; layer_norm with four 3.27, two 3.25, and by moments 3.29; with weights of the first part held 3.34
    and 4.12, all late 3.24 and 4.11, by moments or fused rounding 3.22 to 3.27. 16384 columns: residual_layer_norm with
    eight 3.22 and 4.03, four 3.17 and 4.04, packed 3.09, two 2.95; residual_rms_norm 3.40 and 4.06, 3.39 and 4.09;
    rms_norm 3.24 and 4.17, 3.23 and 4.14; layer_norm, packed, with weights late 3.12 and 4.08, those of the first part
    held 2.91 and 3.94 (3.04 and 4.07 where it reads strides and lengths), not packed 3.03 and 4.12.
    """
    residual = work.written > 1
    tuning = replace(tuning, columns=_COLUMNS, packed=length > LONG and work.centred and not residual)
    if _SHORT // 2 < length <= _SHORT and residual:
        return replace(tuning, parts=1, threads=128)
    if _SHORT // 2 < length <= _SHORT and work.centred:
        return replace(tuning, parts=2, most=16, threads=64)
    if is_middle(length) and work.centred:
        return replace(tuning, columns="held" if residual else "first")
    if is_middle(length) and not work.centred:
        return replace(tuning, parts=1 if residual else 2)
    return replace(tuning, parts=8) if length > LONG and residual == work.centred else tuning


def has_moments(target: Target, dtype: str, length: int, work: Work = NO_SUMS) -> bool:
    """Whether mean and squares of rows are to come from one exchange: on GPUs, of 16-bit numbers. H200, 64 MiB, without
    and with: layer_norm of 16384 columns 3.15 and 3.32, with a residual 3.39 and 3.48, of 1024 columns 3.63 and 3.74;
    through Vulkan, with a residual, 16384 columns 3.03 and 3.14, of 4096 3.42 and 3.46, without 3.19 and 3.14."""
    long = length > LONG or (work.written > 1 and is_middle(length)) or not target.vulkan_on_nvidia
    return target.backend != "cpu" and SCALARS[dtype].bytes == 2 and long


def rounds_fused(target: Target, length: int, work: Work = NO_SUMS) -> bool:
    """Whether a norm's results are rounded by a fused operation (`KernelIR`). H200 through Vulkan, 64 MiB, without and
    with, 16384 columns: layer_norm 2.93 and 2.98, residual_rms_norm 3.25 and 3.32, rms_norm 3.08 and 3.11; gradients
    1.76 and 1.83 (residual_layer_norm), 2.28 and 2.32, 2.54 and 2.55, layer_norm at 1 GiB 3.22 and 3.31. 4096 columns:
    layer_norm 3.19 and 3.14, its gradient 2.72 and 2.68, with a residual 2.36 and 2.34; residual_layer_norm forward
    (`_vulkan_tuning`) 3.46 and 3.48."""
    middle = is_middle(length) and work.written > 1 and work.centred
    return target.vulkan_on_nvidia and (length > LONG or middle)


def _over_threads(target: Target, length: int, width: int, rows: int, tuning: RowTuning) -> tuple[RowShape, SpanShape]:
    """Rows over the threads of a GPU."""
    pieces, sums = -(-length // width), isinstance(tuning, SumTuning)
    best = max(8 // width, 1) * tuning.parts
    smallest = max(min(target.subgroup_sizes, default=target.subgroup_size), 1)
    limit = 1 << (min(target.max_threads, 1024).bit_length() - 1)
    most = min(tuning.widest, limit) if isinstance(tuning, SumTuning) else limit
    while most < limit and pieces * width > most * tuning.most:
        most *= 2
    threads = 1
    while threads < most and pieces > threads * best:
        threads *= 2
    if smallest < threads <= 2 * smallest and pieces * width <= tuning.most * smallest and not sums:
        threads = smallest  # no barriers
    elif max(smallest, tuning.threads // 2) < threads <= smallest * smallest:
        # Whole subgroups are enough, as long as one can read what all of them leave (`Rows`).
        each = max(best, -(-pieces // most))
        threads = -(-pieces // each // smallest) * smallest
    slots = max(min(tuning.threads, most) // threads, 1)
    parts = -(-pieces // threads)
    span = SpanShape(width)
    if parts * width <= tuning.most:
        ragged = pieces % threads != 0
        span = SpanShape(width, parts, ragged, columns=tuning.columns, packed=tuning.packed, again=tuning.again)
    if not isinstance(tuning, SumTuning):
        landed = tuning.landed and span.parts > 0
        return RowShape(threads, slots, exact=rows % slots == 0, registers=tuning.registers, landed=landed), span
    if not span.parts:
        slots = 1  # sums that are not in registers are a workgroup's own
    batch = tuning.batch if span.parts and rows >= tuning.batch * slots * (target.compute_units or UNITS) else 1
    resident = max(tuning.resident // (threads * slots), 1)
    shape = RowShape(threads, slots, batch, loops=True, exact=rows % (slots * batch) == 0, resident=resident)
    return replace(shape, registers=tuning.registers), span


def _over_cluster(target: Target, length: int, width: int, rows: int, tuning: RowTuning) -> tuple[RowShape, SpanShape]:
    """The same over those of several workgroups, where all have as much of a row."""
    cluster, most = tuning.cluster, target.subgroup_size * target.subgroup_size
    mail = tuning.mail if isinstance(tuning, SumTuning) else 0
    if 1 < cluster <= target.max_cluster and length % (width * cluster) == 0:
        shape, span = _over_threads(target, length // cluster, width, rows, tuning)
        most //= cluster * max(mail, 1)  # of a row's numbers from everyone each lane of a subgroup has one
        even = shape.threads & (shape.threads - 1) == 0 and target.subgroup_size <= shape.threads <= most
        if even and (mail or shape.slots == 1) and span.parts and not span.ragged:
            return replace(shape, cluster=cluster, mail=mail), span
    if cluster > 1:
        tuning = replace(tuning, registers=0)  # which are for shorter parts of a row
    return _over_threads(target, length, width, rows, tuning)


def _shared_bytes(target: Target, dtype: str, shape: RowShape, span: SpanShape, work: Work) -> tuple[int, int]:
    """Bytes of shared memory that a workgroup has in any case, and for each block of rows."""
    size = work_type(SCALARS[dtype]).bytes
    block = sum(work.copied) * span.width * span.parts * shape.batch * shape.workgroup
    subgroups = shape.workgroup // max(target.subgroup_size, 1)
    if shape.mail:  # of every subgroup from all that share its row; slots are put together where rows have come
        senders = shape.threads * shape.cluster // target.subgroup_size
        return _RESERVED, block + size * shape.mail * senders * subgroups
    slots = size * shape.workgroup * span.width if shape.slots > 1 else 0
    return slots + _RESERVED, block + size * _ROW_SUMS * shape.batch * subgroups


def _choose_cpu_rows(target: Target, dtype: str, length: int, rows: int, work: Work) -> tuple[RowShape, SpanShape]:
    """One row at a time, which stays in the first-level cache with all that it meets; or four, where that would not and
    what belongs to columns is brought for all of them at once.

    Zen 4, one thread, 2**22 elements, LayerNorm forward and backward in ms. fp32, one row and four: 1024 columns 0.97,
    2.65 and 1.86, 2.96; 1536 columns 1.30, 3.47 and 1.70, 3.10; 4096 columns 1.98, 4.07 and 1.41, 2.70. bf16, whose
    sums are twice as wide as its rows: 1024 columns 1.16, 2.30 and 1.03, 1.81.
    """
    elem, sums = SCALARS[dtype], work.sums > 0
    lanes = vector_unit(target, work_type(elem)).lanes
    most = 0 if sums and elem.bytes < f32.bytes else _ROW_BYTES[sums]
    batch = 4 if (sums or work.columns) and length * elem.bytes > most else 1
    scratch = next((n for n in _SCRATCH if length <= n), 0)
    span = SpanShape(lanes, tail=length % lanes, unroll=4 if batch == 1 else 2, scratch=scratch)
    return RowShape(batch=batch, loops=True, exact=rows % batch == 0), span


def row_grid(op: str, shape: RowShape, rows: int, target: Target) -> tuple[int, int, int]:
    """The workgroups of a kernel."""
    blocks = -(-rows // shape.block)
    if not shape.loops or blocks == 0:
        return grid_of(op, blocks * shape.cluster, target)
    if target.backend == "cpu":
        return (min(blocks, 8 * max(target.compute_units, 1)), 1, 1)
    units = target.compute_units or UNITS
    if shape.mail:
        units = units * _CLUSTERED[0] // _CLUSTERED[1]
    groups = max(shape.resident * units // shape.cluster, 1)
    groups -= groups % shape.gather
    if shape.resident == 1:
        # So many are done no later, and leave fewer sums. H200, 64 MiB, 16384 columns, 132 workgroups and 128, gradient
        # of layer_norm 2.50 and 2.52 TB/s, of residual_layer_norm 2.21 and 2.21; through Vulkan 2.12 and 2.15, 1.84 and
        # 1.86. Where several share a unit some units would have fewer: rms_norm of 4096 columns 3.21 and 3.16.
        even = -(-blocks // -(-blocks // groups))
        even += even % shape.gather
        groups = even if 10 * even >= 9 * groups else groups
    return (min(blocks, groups) * shape.cluster, 1, 1)


def usual_grid(target: Target, shape: RowShape, rows: int, grid: tuple[int, int, int]) -> bool:
    """Whether a kernel that loops has as many workgroups as it has for other numbers of rows, or nearly so, so that
    whoever adds up what they leave may know how many there are: on NVIDIA's GPUs, where rows do not run out first. For
    each number of columns that is one kernel, or up to seven where shares are made even; it takes 1.3 ms to make, and
    a driver some ten."""
    return target.backend == "cuda" and -(-rows // shape.block) > grid[0] // shape.cluster


def fixes(target: Target, length: int, work: Work) -> bool:
    """Whether kernels over rows without gaps are to know strides and lengths, rather than to read them.

    What is read past a descriptor is probably in no cache when a launch begins, and the first row waits for it. H200
    through Vulkan, 64 MiB, without and with: rms_norm of 4096 columns 3.39 and 3.51, layer_norm of 1024 and 4096
    columns 3.27 and 3.39, 3.21 and 3.27, residual_layer_norm of 1024 columns 3.29 and 3.46, rms_norm_rope, which has
    divisions less, 3.05 and 3.36; 1 GiB, where timed, alike. Gradients of long rows: layer_norm of 16384 columns 2.01
    and 2.05, residual_rms_norm 2.31 and 2.39, residual_layer_norm at 1 GiB 3.68 and 3.79; of 4096 columns 2.74 and
    2.72, 2.35 and 2.33. Packed rows: layer_norm of 16384 columns 3.06 and 3.12.

    Through CUDA, where they come with a launch, code is shorter by 5 to 40 instructions of 150 to 1100, but has other
    registers. Gradients, 64 MiB and 1 GiB, us without and with: residual_layer_norm of 1024, 4096 and 16384 columns
    21.33 and 21.23, 256.5 and 256.9; 24.17 and 23.85, 259.5 and 257.7; 29.73 and 29.49, 262.2 and 261.7;
    residual_rms_norm 20.25 and 20.04, 253.9 and 253.5; 22.32 and 22.21, 256.6 and 256.0; 25.97 and 25.77, 257.6 and
    257.5; layer_norm 32.03 and 31.41, 384.0 and 398.1; 33.89 and 33.44, 393.9 and 392.2; 38.94 and 39.68, 413.9 and
    416.4; rms_norm of 4096 columns 31.35 and 31.20, 387.1 and 390.9, others within 0.1. Forward, 64 MiB:
    residual_layer_norm 16.62 and 16.54, 16.65 and 16.55, 19.88 and 19.82, residual_rms_norm of 1024 columns 16.37 and
    16.08, of 16384 with 66 registers, of which one workgroup fits where two did; rms_norm of 16384 18.51 and 18.74.
    Others were not timed, but for the gradient of residual_layer_norm of 5120 columns, which spills: 23.07 and 26.09.
    """
    if target.vulkan_on_nvidia:
        return not work.sums or length > LONG
    alike = length & (length - 1) == 0 and (length <= _SHORT or is_middle(length) or length > LONG)
    if target.backend != "cuda" or not alike:
        return False
    if work.sums:
        return len(work.copied) > 2 or (work.sums > 1 and is_middle(length))
    return work.written > 1 and (work.centred or length <= _SHORT)


def fixes_heads(target: Target) -> bool:
    """The same for rotations of heads, which divide by how many there are. H200, 64 MiB and 1 GiB, us without and with:
    rms_norm_rope of 1024, 4096 and 16384 columns 19.73 and 19.38, 266.2 and 265.9; 18.92 and 18.39, 255.4 and 254.8;
    18.35 and 18.12, 252.8 and 252.4; gradients 29.44 and 28.69, 410.9 and 398.9; 29.07 and 28.34, 399.8 and 387.0;
    29.02 and 28.35, 397.3 and 384.5; rope of 4096 columns 17.16 and 16.98, 255.2 and 254.8."""
    return target.backend == "cuda" or target.vulkan_on_nvidia


def sums_layout(target: Target, length: int, span: SpanShape, sizes: Sequence[int], partials: int) -> SumsLayout:
    """How kernels leave ``partials`` rows of sums of columns; ``sizes`` are bytes of each element of what becomes of
    them. For sums that are posted see `aule.ops.column_trail`.

    H200 through Vulkan, bf16, 64 MiB, us, gradients with sums in the order of columns, in halves and short. 16384
    columns: residual_layer_norm 35.2, 30.8, 29.4, layer_norm 47.3, 43.6, 41.3, rms_norm 37.3, 35.1, 34.8,
    residual_rms_norm 27.6, 26.2, 25.8. 4096 columns: 28.5, 27.1, 26.9; 36.8, 35.0, 35.0; 35.1, 34.5, 34.8; 24.3, 23.6,
    24.0. 1024 columns: 25.0, 25.1, 25.2; 34.2, 33.9, 34.1; 31.5, 31.4, 32.1; 23.3, 23.1, 23.8. 1 GiB, 16384 columns:
    residual_layer_norm 291.3, 287.8, 289.2, layer_norm 466.6, 462.9, 457.0.
    """
    if not target.vulkan_on_nvidia or not span.parts or span.width != RUN or not sizes:
        return "whole"
    if trail_shape(len(sizes), partials, length, target) is not None:
        return "posted"
    short = length > LONG and len(sizes) > 1 and max(sizes) == 2 and length % (2 * RUN) == 0
    return "short" if short else "halves"


def sum_words(length: int, layout: SumsLayout) -> int:
    """Elements, of the type that is computed in, of a row of partial sums."""
    return short_words(length) if layout == "short" else length


def numbered(shape: RowShape, grid: tuple[int, int, int], target: Target) -> RowShape:
    """The same shape, with whether a workgroup's number is that of its block."""
    alike = not shape.loops and shape.cluster == 1 and grid[1] == 1
    return replace(shape, numbered=target.vulkan_on_nvidia and alike)


def begins_early(target: Target, shape: RowShape) -> bool:
    """Whether a kernel begins while the launch before ends: where workgroups are large, and do not stay."""
    return target.overlap and not shape.loops and shape.workgroup >= AWAITING


def streams(views: Mapping[str, TensorView], target: Target) -> bool:
    """Whether what a kernel writes is to go past the caches: on CPUs, where all that it reads and writes fills them, so
    that whoever comes next would not find it there anyway.

    Zen 4, one thread, fp32, LayerNorm: 1.29 -> 1.13 ms forward and 3.5 -> 2.5 backward with arrays of 16 MiB, and with
    a sum over the result after that 1.58 -> 1.57 and 4.0 -> 3.4. Kernels of 16-bit numbers take as long as it takes to
    convert those: 3% less (SwiGLU) to 7% more (softmax, backward).
    """
    sizes = [math.prod(view.shape) * view.itemsize for view in views.values()]
    fills = sum(sizes) >= (target.cache_bytes or _CACHE_BYTES) and max(sizes) < _FRESH_BYTES
    return target.backend == "cpu" and fills and all(view.itemsize >= f32.bytes for view in views.values())


def lasts(views: Mapping[str, TensorView], target: Target, work: Work) -> bool:
    """Whether what a kernel reads is to be the last that the second-level cache gives up: where it could not keep what
    is written for whoever comes next.

    Why memory is faster so nobody has looked into. H200, bf16, 1 GiB, TB/s without and with: rms_norm of 1024, 4096 and
    16384 columns 4.23 and 4.29, 4.11 and 4.28, 4.18 and 4.28; layer_norm 4.21 and 4.27, 4.14 and 4.30, 4.17 and 4.27;
    residual_rms_norm of 4096 and 16384 columns 4.15 and 4.25, 4.14 and 4.25; gradients 4.05 and 4.13 (rms_norm of 4096
    columns), 4.15 and 4.19 (layer_norm of 1024 columns), others the same. What is read evicted first 3.99 (in
    residual_rms_norm of 4096 columns, 4.13 as usual), what is written evicted first 4.13, last 4.11. 64 MiB, six inputs
    in turn: residual_rms_norm of 1024 columns 3.77 and 3.92, residual_layer_norm 3.62 and 3.74, of 16384 columns 3.45
    and 3.61; rms_norm of 4096 columns 3.79 and 3.95, layer_norm 3.61 and 3.67, but of 1024 columns 3.80 and 3.65. Rope
    of 4096 columns, 1 GiB, 4.11 and 4.20, 64 MiB 4.02 to 4.07 and 3.94 to 3.99; swiglu 4.37 and 4.40, its gradient 4.29
    and 4.35.
    """
    moved = sum(math.prod(view.shape) * view.itemsize for view in views.values())
    return target.backend == "cuda" and moved >= _LASTING_BYTES[work.written > 1]
