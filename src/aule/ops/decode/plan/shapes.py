"""Shapes of the decoding kernels (lanes, rows and keys of a workgroup) and splits of a sequence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aule import tuning
from aule.ops.combine.partials import combiner_bytes
from aule.ops.decode.config import WIDEST, AnyShape, DecodeShape, FragmentDecodeShape
from aule.ops.decode.problem import DecodeProblem
from aule.target import Target
from aule.tile.common.matrix import QUAD, padded
from aule.tile.fragment.arrangement import uniform
from aule.tile.fragment.direct import choose_run, holds_pairs, mirrors
from aule.tile.fragment.engine import multiplies
from aule.tile.fragment.shape import RUN
from aule.tuning import model
from aule.view import ITEMSIZE

_RUN_BYTES = 16
"""Most bytes of one load."""


def choose_decode_shape(problem: DecodeProblem, target: Target, run: int) -> DecodeShape:
    """Choose the shape of a simt workgroup.

    Parameters
    ----------
    run : int
        Elements that the alignment of keys and values allows to read at once; a power of two.
    """
    subgroup = subgroup_size(target)
    limits = tuning.use(target, "decode.simt", subgroups=subgroup > 0)
    rows = min(_power(problem.group * max(problem.seq_q, 1)), limits["rows"])
    # Queries and sums take a register for each row and column of a lane, so quantised keys are not read sixteen columns
    # at a time.
    run = min(run, _RUN_BYTES // ITEMSIZE[problem.cache], limits["run"])
    widest = max(problem.head_dim, problem.value_dim)
    lanes = min(_power(-(-widest // run)), subgroup or min(32, target.max_threads))
    columns = -(-widest // (lanes * run)) * run
    while rows > 1 and rows * columns > limits["held"]:
        rows //= 2
    facts = {"subgroups": subgroup > 0, "held": rows * columns, "quantised": problem.quantised}
    keys, registers = (tuning.number(target, f"decode.simt.{name}", **facts) for name in ("keys", "registers"))
    threads = max(subgroup, min(limits["threads"], target.max_threads))
    shape = DecodeShape(rows, lanes, run, keys, subgroup, max(1, threads // (subgroup or lanes)), registers)
    while shape.subgroups > 1 and shape.shared_bytes(problem.value_dim) > target.max_shared_bytes:
        shape = replace(shape, subgroups=shape.subgroups // 2)
    return shape


def choose_decode_fragments(problem: DecodeProblem, target: Target) -> FragmentDecodeShape | None:
    """Choose the shape of a workgroup on matrix units; None if there is none, or simt is as good."""
    dims = problem.head_dim, problem.value_dim
    if problem.dtype not in ("f16", "bf16") or not multiplies(target, "f16" if problem.quantised else problem.dtype):
        return None
    assert target.matrix_layout is not None
    if not uniform(target) or not holds_pairs(target.matrix_layout) or (problem.quantised and not target.f16):
        return None

    def shape_of(record: tuning.Record) -> FragmentDecodeShape:
        shape = FragmentDecodeShape(**record.use["shape"])
        while shape.subgroups > 1 and not model.fits(target, shape.threads, shape.shared_bytes(*dims)):
            shape = replace(shape, subgroups=shape.subgroups // 2)
        return shape

    def fits(record: tuning.Record) -> bool:
        shape = shape_of(record)
        return model.fits(target, shape.threads, shape.shared_bytes(*dims)) and shape.lanes == target.subgroup_size

    facts = {
        "head_dim": max(dims),
        "narrow_dim": min(dims),
        "cache": problem.cache,
        "keys": problem.seq_kv,
        "rows": problem.group * max(problem.seq_q, 1),
        "quantised": problem.quantised,
        "short": is_short(problem, target),
        "lone": is_lone(problem, target),
    }
    record = tuning.find(target, "decode.fragment", facts, fits)
    return shape_of(record) if record is not None else None


def is_short(problem: DecodeProblem, target: Target) -> bool:
    """Whether one large workgroup on matrix units for each key head reads everything at once: sequences are short, and
    more than half of the compute units have a key head."""
    blocks, units = problem.batch * problem.heads_kv, model.units(target)
    return problem.seq_kv <= _short_keys(target) and units < 2 * blocks <= 2 * units


def is_lone(problem: DecodeProblem, target: Target) -> bool:
    """Whether few sequences are long enough for several workgroups on each compute unit."""
    blocks, units, limits = problem.batch * problem.heads_kv, model.units(target), split_limits(target)
    splits = min(problem.seq_kv // limits["part_keys"], limits["most"])
    few = limits["lone_units"] * blocks <= units
    return bool(few and splits * blocks >= limits["lone_workgroups"] * units)


def reads_queries_early(problem: DecodeProblem, target: Target) -> bool:
    """Whether the kernel on matrix units loads queries before it knows the sequence's length; never if sequences are
    packed."""
    return problem.total_q is None and bool(tuning.number(target, "decode.fragment.early_queries"))


def reads_queries_direct(problem: DecodeProblem, target: Target) -> bool:
    """Whether lanes can load right factors of Q themselves, in the runs in which they load K; not for quantised caches,
    whose queries are narrowed to fp16 first."""
    if problem.quantised or not mirrors(target):
        return False
    assert target.matrix_layout is not None
    run = choose_run(target.matrix_layout, problem.head_dim, problem.cache, "columns")
    lanes = 1 << sum(weight > 0 for weight in target.matrix_layout.lane_cols)
    return run == RUN and problem.head_dim % (lanes * run) == 0


def choose_cluster(shape: FragmentDecodeShape, blocks: int, keys: int, dims: tuple[int, int], target: Target) -> int:
    """Choose the workgroups of a cluster that splits a short sequence; 1 if that is impossible or not faster.

    A cluster takes a single launch. Its workgroups have to start together, in one part of the device, so that clusters
    are slower for long sequences.
    """
    cluster = min(target.max_cluster, _power(-(-keys // shape.step)))
    sums = 4 * shape.rows * (padded(dims[1], WIDEST) + 2)
    fits = shape.shared_bytes(*dims) + sums <= target.max_shared_bytes
    if keys > _short_keys(target) or not fits or blocks * cluster > model.units(target):
        return 1
    return cluster


def fragment_runs(problem: DecodeProblem, target: Target) -> tuple[int, int]:
    """Elements of K and of V that the kernel on matrix units reads at once."""
    assert target.matrix_layout is not None
    return (
        choose_run(target.matrix_layout, problem.head_dim, problem.cache, "columns"),
        choose_run(target.matrix_layout, problem.value_dim, problem.cache, "rows"),
    )


def subgroup_size(target: Target) -> int:
    """Lanes of a subgroup that a kernel can rely on; 0 if there are no subgroups."""
    if target.subgroup_sizes:
        return 32 if 32 in target.subgroup_sizes else target.subgroup_size
    return target.sure_subgroup


def choose_splits(
    blocks: int, keys: int, step: int, resident: int, target: Target, uneven: bool = False, even: bool = True
) -> tuple[int, int]:
    """Choose the splits of each sequence: as few as fill the device well.

    Parameters
    ----------
    blocks : int
        Workgroups without splits.
    keys : int
        Most keys of a sequence.
    step : int
        Keys that a workgroup takes at a time.
    resident : int
        Workgroups that a compute unit runs at a time.
    uneven : bool
        Sequences may be shorter, each with its own length.
    even : bool
        Prefer fewer splits with equal numbers of steps.

    Returns
    -------
    splits : int
    least : int
        Fewest keys of a split, if a sequence is shorter than it could be.
    """
    units, limits = model.units(target), split_limits(target)
    slots, least = units * resident, limits["least_keys"]
    if blocks == 0:
        return 1, least
    most = min(max(keys // limits["part_keys"], min(units // blocks, keys // limits["least_part"])), limits["most"])
    if most <= 1:
        return 1, least
    if blocks >= limits["full"] * slots:
        # The device is full, but one very long sequence among short ones would keep a few workgroups busy for long.
        splits = min(keys // limits["uneven_keys"], limits["most_uneven"]) if uneven and blocks > 1 else 1
        return max(splits, 1), limits["uneven_keys"] if splits > 1 else least

    def filled(splits: int) -> float:
        waves = blocks * splits / slots
        return waves / -(-blocks * splits // slots)

    best = max(filled(n) for n in range(1, most + 1))
    splits = min(slots // blocks, most)  # as many as run at a time
    enough = limits["enough"] * best
    if filled(splits) < enough:
        splits = next(n for n in range(1, most + 1) if filled(n) >= enough)
    if even:
        # No more than the longest split needs: 32 splits of 16 steps are faster than 33 of which half have 15.
        steps = -(-keys // step)
        splits = -(-steps // -(-steps // splits))
    return splits, min(least, keys // splits)


def combines_in_last_workgroup(
    shape: AnyShape, rows: int, splits: int, dims: tuple[int, int], buffers: int, target: Target
) -> bool:
    """Whether the last workgroup of a block of rows combines its splits, rather than a second launch.

    It does if a second launch cannot overlap the first, fences make the partial results visible, they are few enough
    for one workgroup, and the kernel has enough buffers and shared memory for it.

    Parameters
    ----------
    rows : int
        Query rows of a workgroup.
    dims : tuple of int
        Head dimensions of keys and of values.
    buffers : int
        Buffers of the kernel, if it combines.
    """
    if target.overlap:
        return False
    shared = shape.shared_bytes(dims[1]) if isinstance(shape, DecodeShape) else shape.shared_bytes(*dims)
    fits = shared + combiner_bytes(dims[1], shape.threads) <= target.max_shared_bytes and buffers <= target.max_buffers
    most = tuning.number(target, "decode.gathered_quads") * QUAD * shape.threads
    return target.device_fence and fits and rows * splits * dims[1] <= most


def split_limits(target: Target) -> Mapping[str, Any]:
    """Limits of splits.

    ``part_keys`` are the fewest keys of a split, or ``least_part`` if compute units would otherwise be idle, and
    ``least_keys`` if a sequence is shorter than it could be. ``most`` is the most splits. ``uneven_keys`` and
    ``most_uneven`` apply if workgroups fill the device, and only sequences far longer than others are split: from a
    share ``full`` of those that it runs at a time. Splits that use a share ``enough`` of the best use are good enough;
    if ``uneven_resident`` workgroups share a compute unit, the numbers of their steps need not be even. Sequences are
    lone if each key head has ``lone_units`` compute units, and each of those ``lone_workgroups`` splits.
    """
    return {**tuning.use(target, "decode.splits"), **tuning.use(target, "decode.filling")}


def _short_keys(target: Target) -> int:
    """Keys of sequences that a cluster may take, and that are not split if most compute units have a workgroup."""
    return int(tuning.number(target, "decode.short_keys"))


def _power(n: int) -> int:
    """Smallest power of two that is at least ``n``."""
    return 1 << (max(n, 1) - 1).bit_length()
