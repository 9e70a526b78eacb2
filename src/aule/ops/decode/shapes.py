"""How decoding is cut up: lanes, rows and keys of a workgroup, and parts of a sequence. Pure, and tuned by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aule.ops.decode.await_parts import TRAIL_BYTES, span_of
from aule.ops.decode.config import WIDEST, DecodeShape, FragmentDecodeShape
from aule.ops.decode.gather import gather_bytes
from aule.ops.decode.problem import DecodeProblem
from aule.ops.step import can_wait
from aule.target import Target
from aule.tile.arrangement import SIZE, uniform
from aule.tile.direct import choose_run, holds_pairs, mirrors
from aule.tile.fragment import multiplies
from aule.tile.fragment_shape import RUN
from aule.tile.matrix import QUAD, padded
from aule.view import ITEMSIZE

_RUN_BYTES = 16
_MAX_ROWS = 8
PART_KEYS = 256
"""Keys of a part of a sequence at least, where there are workgroups for all multiprocessors. H200, bf16, 8 key heads,
us: 4k keys in 16 parts 7.75, in 32 8.0, in 8 10.8; 8k in 32 parts 10.0, in 16 11.9."""
LEAST_PART = 64
"""The same where there are not. 2k keys in 16 parts 6.4, in four 10.6; four sequences of 1k in four parts 7.8, in eight
8.7."""
_SHORT = 1024
"""Keys of sequences that a cluster may take, and that are not divided where most multiprocessors have a workgroup
already. 16 sequences of 1k keys: 19.6 us, in two parts 22.0."""
_USUAL_UNITS = 64
"""Multiprocessors of a device that does not say how many it has."""
_MAX_SPLITS = 128
LEAST_KEYS = 128
"""Keys that a part has at least, where a sequence turns out shorter than it could be."""
LONE_REGISTERS = 168
"""That three workgroups of four subgroups have room for."""
UNEVEN_KEYS = 16384
"""The same where there are workgroups enough, and only sequences far longer than others are to be divided."""
_MAX_UNEVEN = 8
_WAITERS = 16
"""Workgroups of a block of rows that wait for parts at most."""
_TRAILING, _TRAILED, _TRAIL_SLOTS = 8, 16, 16
"""Workgroups of a block of rows that wait in a launch of their own, parts from which on they do, and threads that share
the parts of a column at most."""
_SPREAD = (2048, 8192)
"""Keys beyond which, and up to which, `is_spread`."""
_GATHERED = 16
"""Vectors of four that a thread of the last workgroup adds up at most: as many as are under way at a time. H200 through
Vulkan, one sequence, us: 4k keys in 16 parts 8.5, by a second launch 9.7; in 32 parts 32k 38.8; 39.0, in int8 26.7;
26.5, in fp8 27.3; 28.2."""


def choose_decode_shape(problem: DecodeProblem, target: Target, run: int) -> DecodeShape:
    """The shape of a workgroup.

    Parameters
    ----------
    run : int
        Elements that rows of keys and values allow to be read at once; a power of two.
    """
    subgroup = subgroup_size(target)
    rows = min(_power(problem.group * max(problem.seq_q, 1)), _MAX_ROWS)
    # Queries and sums take a register for each row and column of a lane: columns of quantised keys, which are smaller,
    # are read eight at a time and not sixteen.
    run = min(run, _RUN_BYTES // ITEMSIZE[problem.cache], 8)
    widest = max(problem.head_dim, problem.value_dim)
    lanes = min(_power(-(-widest // run)), subgroup or min(32, target.max_threads))
    columns = -(-widest // (lanes * run)) * run
    while rows > 1 and rows * columns > 64:
        rows //= 2
    keys = 4 if rows * columns > 16 and not problem.quantised else 8
    if not subgroup:
        teams = max(1, min(64, target.max_threads) // lanes)
        shape = DecodeShape(rows, lanes, run, 2, 0, teams)
    else:
        # Two workgroups of 256 threads share a multiprocessor's registers when each thread has 128.
        registers = 128 if rows * columns <= 32 else 0
        threads = max(subgroup, min(256, target.max_threads))
        shape = DecodeShape(rows, lanes, run, keys, subgroup, threads // subgroup, registers)
    while shape.subgroups > 1 and shape.shared_bytes(problem.value_dim) > target.max_shared_bytes:
        shape = replace(shape, subgroups=shape.subgroups // 2)
    return shape


@dataclass(frozen=True)
class FragmentEntry:
    """When matrix units are used, and how, for heads of up to ``dim``.

    Attributes
    ----------
    fewest : int
        Query rows of a key head from which on they are, for caches of 16 bits. Those of 8 bits always take them.
    few, many : FragmentDecodeShape
        For up to eight rows, and for more; blocks of keys are doubled for caches of 8 bits.
    """

    dim: int
    fewest: int
    few: FragmentDecodeShape
    many: FragmentDecodeShape


FRAGMENTS: dict[str, tuple[FragmentEntry, ...]] = {
    # H200, bf16, d128, 32 query and 8 key heads, us of single launches; d64 by rule.
    # Batch 32 of 4k keys 134; plain arithmetic 135, eight subgroups in 128 registers 156, keys by 32 147. Batch 4, 32k:
    # 143; 151, 158, 155. In int8 92; plain 132, keys by 16 over eight subgroups 97. In fp8 94; 133, 99. Four tokens of
    # batch 32: 140; eight subgroups 144, plain 326 to 823.
    "cuda": (
        FragmentEntry(64, 1, FragmentDecodeShape(8, 2, 4), FragmentDecodeShape(16, 2, 4)),
        FragmentEntry(128, 1, FragmentDecodeShape(8, 1, 4), FragmentDecodeShape(16, 1, 4)),
    ),
    # One sequence of 32k keys 52; plain arithmetic 76. Batch 4 in int8 103; plain 210, keys by 16 129. Four tokens, of
    # many calls in turn: 128.3; keys by 32, which spill, 197.5.
    "vulkan": (
        FragmentEntry(64, 1, FragmentDecodeShape(8, 2, 4), FragmentDecodeShape(16, 2, 4)),
        FragmentEntry(128, 1, FragmentDecodeShape(8, 1, 4), FragmentDecodeShape(16, 1, 4)),
    ),
}
"""By backend."""


def choose_decode_fragments(problem: DecodeProblem, target: Target) -> FragmentDecodeShape | None:
    """The shape of a workgroup on matrix units; None where there are none for it, or plain arithmetic is as good."""
    dims, rows = (problem.head_dim, problem.value_dim), problem.group * max(problem.seq_q, 1)
    if problem.dtype not in ("f16", "bf16") or not multiplies(target, "f16" if problem.quantised else problem.dtype):
        return None
    assert target.matrix_layout is not None
    if not uniform(target) or not holds_pairs(target.matrix_layout) or (problem.quantised and not target.f16):
        return None
    for entry in FRAGMENTS.get(target.backend, ()):
        if max(dims) > entry.dim or (rows < entry.fewest and not problem.quantised):
            continue
        shape = entry.few if rows <= entry.few.rows else entry.many
        if problem.quantised and rows <= entry.few.rows and entry.dim == 128 and is_lone(problem, target):
            shape = replace(shape, registers=LONE_REGISTERS, ahead=False)
        elif problem.quantised:
            shape = replace(shape, blocks=2 * shape.blocks)
        if is_short(problem, target) and rows <= shape.rows < SIZE:
            # One workgroup to a multiprocessor, and everything under way at once.
            shape = replace(shape, blocks=1, subgroups=min(8, target.max_threads // shape.lanes))
        if not problem.quantised and rows <= shape.rows < SIZE and entry.dim == 128 and is_spread(problem, target):
            shape = replace(shape, subgroups=8)
        while shape.subgroups > 1 and shape.shared_bytes(*dims) > target.max_shared_bytes:
            shape = replace(shape, subgroups=shape.subgroups // 2)
        fits = shape.threads <= target.max_threads and shape.shared_bytes(*dims) <= target.max_shared_bytes
        if fits and shape.lanes == target.subgroup_size:
            return shape
    return None


def is_short(problem: DecodeProblem, target: Target) -> bool:
    """Whether short sequences are best read by one workgroup of matrix units for each key head, as large as a
    multiprocessor has room for: where more than half of these have one."""
    blocks, units = problem.batch * problem.heads_kv, target.compute_units or _USUAL_UNITS
    return problem.seq_kv <= _SHORT and units < 2 * blocks <= 2 * units


def is_spread(problem: DecodeProblem, target: Target) -> bool:
    """Whether a sequence is best read by one workgroup of eight subgroups for each multiprocessor, in parts that are
    waited for. H200 through Vulkan, one sequence, us, where those that make them wait: 4k keys 7.05, by four subgroups
    7.45; 8k in 16 parts 9.6, by four subgroups in 32, of which a quarter waits, 9.9 and by two launches 10.8; 2k 5.8
    both ways."""
    blocks, units = problem.batch * problem.heads_kv, target.compute_units or _USUAL_UNITS
    return can_wait(target) and _SPREAD[0] < problem.seq_kv <= _SPREAD[1] and blocks * _WAITERS <= units


def is_lone(problem: DecodeProblem, target: Target) -> bool:
    """Whether a long quantised sequence by itself is best read in as many parts as make three workgroups of
    `LONE_REGISTERS` on each multiprocessor, which then have something to compute while others wait. H200 through
    Vulkan, 32k keys, us: int8 in 48 parts 26.0, in 49 26.1, in 47 26.3, and by twice the keys at a time in 32 parts,
    two workgroups to a multiprocessor, 26.5; fp8 26.8 and 28.2. Four sequences of int8 74.0 and 74.9, of fp8 77.5 and
    77.3."""
    blocks, units = problem.batch * problem.heads_kv, target.compute_units or _USUAL_UNITS
    parts = min(problem.seq_kv // PART_KEYS, _MAX_SPLITS)
    return target.backend == "vulkan" and 8 * blocks <= units and parts * blocks >= 3 * units


def reads_queries_early(problem: DecodeProblem, target: Target) -> bool:
    """Whether the kernel for matrix units reads queries before it knows how long the sequence is, which it can where
    rows are not packed. H200, one sequence, us: through Vulkan 512 keys 6.08 -> 5.95, 1k 6.26 -> 6.18, 4k 9.06 -> 8.92;
    through CUDA 512 keys 3.48 -> 3.63, 4k 6.73 -> 6.89."""
    return target.backend == "vulkan" and problem.total_q is None


def reads_queries_direct(problem: DecodeProblem, target: Target) -> bool:
    """Whether lanes can read the elements of queries that they hold of right factors, in runs as those of keys; bytes
    are multiplied with queries that are narrowed on their way."""
    if problem.quantised or not mirrors(target):
        return False
    assert target.matrix_layout is not None
    run = choose_run(target.matrix_layout, problem.head_dim, problem.cache, "columns")
    lanes = 1 << sum(weight > 0 for weight in target.matrix_layout.lane_cols)
    return run == RUN and problem.head_dim % (lanes * run) == 0


def choose_waiters(
    blocks: int, splits: int, places: int, shape: FragmentDecodeShape, target: Target, wanted: int | None = None
) -> int:
    """Workgroups of each block of rows that wait for the parts of all and add them up; 0 for none, so that the last one
    to finish does it.

    H200 through Vulkan, us, by the last one and by those that wait: one sequence of 512 keys 5.4 and 4.5, of 1k 5.75
    and 5.0, of 2k 6.5 and 5.8, four of 1k 7.9 and 7.15; four of 32k, where four of eight wait, 127.4 and 127.0, in int8
    75.3 and 74.6. One sequence of 32k keys in int8, where eight of 48 would, takes 27.1 and by two launches 26.0.

    Parameters
    ----------
    blocks : int
        Workgroups when nothing is split.
    places : int
        Fours of columns that there is room for.
    wanted : int, optional
        As many as that, wherever they can be.
    """
    most = min(_WAITERS if wanted is None else wanted, splits, places)
    if wanted is None:
        # All run at the same time, or a multiprocessor is left to those that do not wait.
        if blocks * splits > target.compute_units:
            most = min(most, (target.compute_units - 1) // blocks)
        if not can_wait(target) or most < 2:
            return 0
    waiters = splits if most == splits else 1 << max(most, 1).bit_length() - 1 if most else 0
    # Lanes that share the parts of a place are in one subgroup.
    while waiters and (places % waiters or span_of(places, waiters, shape.threads) < shape.subgroups):
        waiters = 1 << (waiters - 1).bit_length() - 1 if waiters > 1 else 0
    return waiters


def choose_trail(
    blocks: int, splits: int, places: int, shape: FragmentDecodeShape, target: Target, wanted: bool | None = None
) -> tuple[int, int]:
    """Workgroups for each block of rows of a launch that goes with the one that makes parts and waits for them, and
    their threads; (0, 0) where there is none.

    H200 through Vulkan, us, as before and by eight workgroups that have two parts to a thread, or one: one sequence of
    1k keys 5.05 and 4.8, 2k 5.85 and 5.7, 4k 7.0 and 6.75, 8k 9.9 and 9.15 (before, all waited for each other), 16k
    22.3 and 20.5, 32k 38.9 and 36.9 (before, a second launch behind the first); two of 4k 9.9 and 9.55, of 32k 67.7 and
    66.7, in int8 41.9 and 40.5. 512 keys, in eight parts, take 4.5 both ways. By 16 workgroups of 128 threads, with
    four parts to each, 49 parts of int8 25.9 and 23.85, of fp8 26.9 and 24.75; by eight of 512 24.1 and 24.85. By four
    workgroups 4k keys take 7.25; with one part to a thread 1k takes 4.9.

    Parameters
    ----------
    blocks, places : int
        As for `choose_waiters`.
    wanted : bool, optional
        Wherever it can be.
    """
    # Whichever launch begins first, a multiprocessor is left to those that are waited for.
    room = max(target.compute_units - 1, 0) // blocks
    wide = 2 * _TRAILING if splits > 2 * _TRAIL_SLOTS else _TRAILING
    waiters = min(wide, places, 1 << room.bit_length() - 1 if room else 0)
    quicker = can_wait(target) and waiters >= _TRAILING and splits >= _TRAILED
    if not waiters or not (wanted or quicker):
        return 0, 0
    most = min(target.max_threads, target.max_shared_bytes // TRAIL_BYTES)
    slots = min(_power(-(-splits // 2)), _TRAIL_SLOTS)
    threads = max(slots * span_of(places, waiters, most), shape.threads)
    return waiters, min(threads, 1 << most.bit_length() - 1)


def choose_cluster(shape: FragmentDecodeShape, blocks: int, keys: int, dims: tuple[int, int], target: Target) -> int:
    """Workgroups of a cluster that divide the keys of a short sequence; 1 where that is not possible, or not quicker.

    A single launch, which matters to whoever waits for the host, and no slower than two: H200, one sequence, us: 512
    keys 4.6, 1k 5.3; by two launches 4.8 and 5.6. Workgroups of a cluster have to start together, in one part of the
    device: four sequences of 32k keys take 177 where parts by themselves take 125, and clusters of 16 are slower than
    those of 8.
    """
    together = min(target.max_cluster, _power(-(-keys // shape.step)))
    sums = 4 * shape.rows * (padded(dims[1], WIDEST) + 2)
    fits = shape.shared_bytes(*dims) + sums <= target.max_shared_bytes
    if keys > _SHORT or not fits or blocks * together > (target.compute_units or _USUAL_UNITS):
        return 1
    return together


def fragment_runs(problem: DecodeProblem, target: Target) -> tuple[int, int]:
    """Elements of K and of V that the kernel for matrix units reads at once."""
    assert target.matrix_layout is not None
    return (
        choose_run(target.matrix_layout, problem.head_dim, problem.cache, "columns"),
        choose_run(target.matrix_layout, problem.value_dim, problem.cache, "rows"),
    )


def subgroup_size(target: Target) -> int:
    """Lanes of a subgroup that a kernel can rely on; 0 when there are none."""
    if target.subgroup_sizes:
        return 32 if 32 in target.subgroup_sizes else target.subgroup_size
    # Intel's compilers choose a size for each kernel, and 8 is the smallest.
    return min(target.subgroup_size, 8) if target.vendor == "intel" else target.subgroup_size


def choose_splits(
    blocks: int, keys: int, step: int, resident: int, target: Target, uneven: bool = False, even: bool = True
) -> tuple[int, int]:
    """Parts of the keys of each sequence: as few as fill the device well.

    Parameters
    ----------
    blocks : int
        Workgroups when nothing is split.
    keys : int
        Keys that a sequence can have.
    step : int
        Keys that a workgroup takes at a time.
    resident : int
        Workgroups that a multiprocessor runs at a time.
    uneven : bool
        Sequences may be shorter than that, each in its own way.
    even : bool
        Parts have as many steps, if that makes them fewer.

    Returns
    -------
    splits : int
    least : int
        Keys that a part has at least, where a sequence turns out shorter than it could be.
    """
    units = target.compute_units or _USUAL_UNITS
    slots = units * resident
    if blocks == 0:
        return 1, LEAST_KEYS
    most = min(max(keys // PART_KEYS, min(units // blocks, keys // LEAST_PART)), _MAX_SPLITS)
    if most <= 1:
        return 1, LEAST_KEYS
    if blocks >= 0.8 * slots:
        # Full already; but one very long sequence among short ones would keep a few workgroups busy for long.
        splits = min(keys // UNEVEN_KEYS, _MAX_UNEVEN) if uneven and blocks > 1 else 1
        return max(splits, 1), UNEVEN_KEYS if splits > 1 else LEAST_KEYS

    def filled(splits: int) -> float:
        waves = blocks * splits / slots
        return waves / -(-blocks * splits // slots)

    best = max(filled(n) for n in range(1, most + 1))
    splits = min(slots // blocks, most)  # as many as run at a time
    if filled(splits) < 0.9 * best:
        splits = next(n for n in range(1, most + 1) if filled(n) >= 0.9 * best)
    if even:
        # No more than the longest part needs: 32 parts of 16 steps each are quicker than 33 of which half have 15.
        steps = -(-keys // step)
        splits = -(-steps // -(-steps // splits))
    return splits, min(LEAST_KEYS, keys // splits)


def gathers(
    shape: DecodeShape | FragmentDecodeShape,
    rows: int,
    splits: int,
    dims: tuple[int, int],
    buffers: int,
    target: Target,
) -> bool:
    """Whether the last workgroup that finishes parts of its rows adds them up, rather than a second launch: where that
    cannot begin while the first ends, fences let the workgroup see the parts, they are not too many to be read by one
    alone, and a kernel can have so many buffers and so much shared memory.

    H200, us: one sequence of 32k keys 37.8; by two launches that overlap 36.3, by two others 37.4. 64k keys 66.2; 64.9.

    Parameters
    ----------
    rows : int
        Query rows that a workgroup has, of those that it has room for.
    dims : tuple of int
        Of keys and of values.
    buffers : int
        That the kernel then has.
    """
    if target.overlap:
        return False
    shared = shape.shared_bytes(*dims) if isinstance(shape, FragmentDecodeShape) else shape.shared_bytes(dims[1])
    fits = shared + gather_bytes(dims[1], shape.threads) <= target.max_shared_bytes and buffers <= target.max_buffers
    return target.device_fence and fits and rows * splits * dims[1] <= _GATHERED * QUAD * shape.threads


def _power(n: int) -> int:
    """The smallest power of two that is not below a number."""
    return 1 << (max(n, 1) - 1).bit_length()
