"""How decoding is cut up: lanes, rows and keys of a workgroup, and parts of a sequence. Pure, and tuned by hand."""

from __future__ import annotations

from dataclasses import replace

from aule.ops.decode.config import DecodeShape
from aule.ops.decode.problem import DecodeProblem
from aule.target import Target
from aule.view import ITEMSIZE

_RUN_BYTES = 16
_MAX_ROWS = 8
CHUNK_SIZE = 512
"""Keys below which a part of a sequence costs more than it brings: a second launch takes as long as reading them."""
_USUAL_UNITS = 64
"""Multiprocessors of a device that does not say how many it has."""
_MAX_SPLITS = 128
LEAST_KEYS = 256
"""Keys that a part of a sequence has at least."""
UNEVEN_KEYS = 16384
"""The same where there are workgroups enough, and only sequences far longer than others are to be divided."""
_MAX_UNEVEN = 8


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


def subgroup_size(target: Target) -> int:
    """Lanes of a subgroup that a kernel can rely on; 0 when there are none."""
    if target.subgroup_sizes:
        return 32 if 32 in target.subgroup_sizes else target.subgroup_size
    # Intel's compilers choose a size for each kernel, and 8 is the smallest.
    return min(target.subgroup_size, 8) if target.vendor == "intel" else target.subgroup_size


def choose_splits(blocks: int, keys: int, resident: int, target: Target, uneven: bool = False) -> tuple[int, int]:
    """Parts of the keys of each sequence: as few as fill the device well.

    Parameters
    ----------
    blocks : int
        Workgroups when nothing is split.
    keys : int
        Keys that a sequence can have.
    resident : int
        Workgroups that a multiprocessor runs at a time.
    uneven : bool
        Sequences may be shorter than that, each in its own way.

    Returns
    -------
    splits : int
    least : int
        Keys that a part has at least, where a sequence turns out shorter than it could be.
    """
    slots = (target.compute_units or _USUAL_UNITS) * resident
    most = min(-(-keys // CHUNK_SIZE), _MAX_SPLITS)
    if blocks == 0 or most <= 1:
        return 1, LEAST_KEYS
    if blocks >= 0.8 * slots:
        # Full already; but one very long sequence among short ones would keep a few workgroups busy for long.
        splits = min(keys // UNEVEN_KEYS, _MAX_UNEVEN) if uneven and blocks > 1 else 1
        return max(splits, 1), UNEVEN_KEYS if splits > 1 else LEAST_KEYS

    def filled(splits: int) -> float:
        waves = blocks * splits / slots
        return waves / -(-blocks * splits // slots)

    best = max(filled(n) for n in range(1, most + 1))
    at_once = min(slots // blocks, most)  # as many as run at a time
    if filled(at_once) >= 0.9 * best:
        return at_once, LEAST_KEYS
    return next(n for n in range(1, most + 1) if filled(n) >= 0.9 * best), LEAST_KEYS


def _power(n: int) -> int:
    """The smallest power of two that is not below a number."""
    return 1 << (max(n, 1) - 1).bit_length()
