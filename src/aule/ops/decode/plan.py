"""From a decoding problem and a target to a plan: which kernels, which grids, which numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from aule.ir import KernelIR
from aule.ops.attention.config import Paging
from aule.ops.attention.plan import aligned_rows, problem_scalars, view_scalars
from aule.ops.attention.problem import UNBOUNDED
from aule.ops.decode import last
from aule.ops.decode.await_parts import awaited_words, span_of
from aule.ops.decode.config import (
    DecodeConfig,
    DecodeShape,
    FragmentDecodeConfig,
    FragmentDecodeShape,
    ReduceConfig,
    TrailConfig,
)
from aule.ops.decode.gather import row_quads
from aule.ops.decode.kernel import build_decode
from aule.ops.decode.kernel_fragment import build_decode_fragment
from aule.ops.decode.prefill import few_tokens, page_scalars, plan_prefill
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.reduce import build_reduce
from aule.ops.decode.shapes import (
    LEAST_KEYS,
    choose_cluster,
    choose_decode_fragments,
    choose_decode_shape,
    choose_splits,
    choose_trail,
    choose_waiters,
    fragment_runs,
    gathers,
    is_short,
    reads_queries_direct,
    reads_queries_early,
)
from aule.ops.decode.trail import build_trail
from aule.ops.decode.validate import DecodeOperands
from aule.ops.step import Step, StepPlan, grid_of
from aule.target import Target
from aule.tile.arrangement import SIZE
from aule.tile.direct import padded_columns
from aule.tile.fragment_shape import RUN
from aule.tile.matrix import QUAD
from aule.view import ITEMSIZE, TensorView

_REDUCE_THREADS = 256
_KEPT_BYTES = 48 << 20
"""Keys and values that fit into the second level of the caches, about. H200, us through CUDA: what leaves first takes
13.0 where 16k keys in int8 (36 MB) take 11.2 otherwise, and 21.4 where 32k keys take 22.5."""
_REGISTERS = 1 << 16
"""Of a multiprocessor: NVIDIA's number, and that of others by order of magnitude."""


def decode_views(operands: DecodeOperands, out: TensorView) -> dict[str, TensorView]:
    """The operands by the names that plans and kernels use; the log-sum-exp is contiguous and needs no view."""
    views = {"q": operands.q, "k": operands.k, "v": operands.v, "o": out}
    for name in ("k_scale", "v_scale"):
        view = getattr(operands, name)
        if view is not None:  # as rows of one element
            storage = view.storage[..., None] if view.is_host else view.storage
            views[name] = replace(view, shape=(*view.shape, 1), strides=(*view.strides, 1), storage=storage)
    for name in ("tables", "lens", "cu_q", "alibi", "sinks"):
        view = getattr(operands, name)
        if view is not None:
            views[name] = view
    return views


def plan_decode(
    problem: DecodeProblem,
    views: dict[str, TensorView],
    target: Target,
    aligned_base: dict[str, bool] | None = None,
    shape: DecodeShape | FragmentDecodeShape | None = None,
    splits: int | None = None,
    gather: bool | None = None,
    cluster: bool | None = None,
    awaits: int | None = None,
    trails: bool | None = None,
) -> StepPlan:
    """Plan decoding on a GPU.

    Parameters
    ----------
    views : dict
        From `decode_views`, with device strides and offsets.
    aligned_base : dict, optional
        For q, k, v, o: whether the memory starts at a multiple of 16 bytes (default: it does).
    shape : DecodeShape or FragmentDecodeShape, optional
        The shape of a workgroup to use instead of the table's.
    splits : int, optional
        Parts of each sequence's keys, instead of the table's.
    gather : bool, optional
        Whether parts are added up in the launch that makes them; default: where that is possible and quicker.
    cluster : bool, optional
        Whether the parts of a block of rows are a cluster of workgroups, which add them up; default: likewise.
    awaits : int, optional
        How many workgroups of a block of rows wait for the parts of all and add them up, if the shape allows it; 0 for
        none; default: as many as is quickest, where parts are added up in the launch that makes them.
    trails : bool, optional
        Whether a second launch goes with the first and waits for its parts, if the shape allows it; default: where that
        is quicker.
    """
    if math.prod(problem.out_shape) == 0 or problem.batch == 0 or problem.seq_q == 0:
        return StepPlan(())
    base_ok = aligned_base or {}

    def aligned(name: str, run: int) -> bool:
        return aligned_rows(views[name], run) and base_ok.get(name, True)

    paging: Paging = "none"
    if problem.page:
        paging = "shift" if problem.page & (problem.page - 1) == 0 else "divide"
    index64 = max(view.last_index + 1 for view in views.values()) > 2**31 - 1
    many = plan_prefill(problem, views, target, paging, base_ok, index64)
    if many is not None and problem.total_q is None:
        return StepPlan((many,))
    if trails is None and (gather is not None or awaits is not None):
        trails = False
    few = _plan_few(
        problem, views, target, paging, aligned, shape, splits, gather, cluster, awaits, trails, many is not None
    )
    return few if many is None else replace(few, steps=(*few.steps, many))


def _plan_few(
    problem: DecodeProblem,
    views: dict[str, TensorView],
    target: Target,
    paging: Paging,
    aligned: Callable[[str, int], bool],
    shape: DecodeShape | FragmentDecodeShape | None,
    splits: int | None,
    gather: bool | None,
    cluster: bool | None,
    awaits: int | None,
    trails: bool | None,
    shared: bool,
) -> StepPlan:
    """The launches of decoding; ``shared`` when another one takes the sequences of many rows."""
    tokens = min(problem.seq_q, few_tokens(problem)) if shared else problem.seq_q
    run = 16
    while run > 1 and not (aligned("k", run) and aligned("v", run)):
        run //= 2
    limited = replace(problem, seq_q=tokens)
    shape = shape or choose_decode_fragments(limited, target)
    if isinstance(shape, FragmentDecodeShape):
        runs = fragment_runs(problem, target)
        if not (aligned("k", runs[0]) and aligned("v", runs[1])):
            shape = None
    shape = shape or choose_decode_shape(limited, target, run)
    row_blocks = -(-problem.group * tokens // shape.rows)
    blocks = row_blocks * problem.heads_kv * problem.batch
    dims, least = (problem.head_dim, problem.value_dim), LEAST_KEYS
    if splits is None:
        together = 1
        if isinstance(shape, FragmentDecodeShape) and gather is None and cluster is None:
            together = choose_cluster(shape, blocks, problem.seq_kv, dims, target)
        if together > 1:
            splits, cluster = together, True
        elif isinstance(shape, FragmentDecodeShape) and is_short(problem, target):
            splits = 1
        else:
            resident = _resident(shape)
            # Where three workgroups share a multiprocessor it is better to have all of them.
            even = not isinstance(shape, FragmentDecodeShape) or resident < 3
            splits, least = choose_splits(blocks, problem.seq_kv, shape.step, resident, target, problem.lens, even)
    if gather is None:
        block_rows = min(shape.rows, problem.group * tokens)
        buffers = len(views) + int(problem.return_lse) + 3  # parts, their log-sum-exps, tickets
        gather = gathers(shape, block_rows, splits, dims, buffers, target)
    held = 1 << (min(shape.rows, problem.group * tokens) - 1).bit_length()
    heads = row_blocks * problem.heads_kv
    single = problem.total_q is None and problem.seq_q == 1
    grid = (splits, heads, problem.batch) if cluster else (heads, splits, problem.batch)
    flat = any(count > most for count, most in zip(grid, target.max_grid, strict=True))
    columns, trail = 0, _NOBODY
    inside = replace(_NOBODY, each=1 << (splits - 1).bit_length())
    if isinstance(shape, FragmentDecodeShape) and splits > 1 and not cluster:
        assert target.matrix_layout is not None
        columns = held * padded_columns(target.matrix_layout, problem.value_dim, problem.cache, "rows")
        places = columns // QUAD
        if trails is not False and not flat:
            trail = _Waiting.of(*choose_trail(blocks, splits, places, shape, target, trails), places, splits)
        if not trail.workgroups and (gather or awaits):
            waiters = choose_waiters(blocks, splits, places, shape, target, awaits)
            inside = _Waiting.of(waiters, shape.threads, places, splits) if waiters else inside
    trailed = trail.workgroups > 0
    gather = gather and not inside.workgroups and not trailed
    cluster = bool(cluster) and splits > 1 and not flat
    alone = splits > 1 and not inside.workgroups and not trailed and not cluster
    followed = alone and not gather and target.overlap
    left, right = problem.limits
    rows = problem.batch * problem.heads_q * tokens
    unit = tuple(views[n].strides[3] == 1 or views[n].shape[3] == 1 for n in "qkvo")
    largest = max(rows * splits * problem.value_dim, *(view.last_index + 1 for view in views.values()))
    options: dict[str, Any] = {
        "dtype": problem.dtype,
        "cache": problem.cache,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "left": left != UNBOUNDED,
        # A single query stands at the last key: nothing is to its right.
        "right": right != UNBOUNDED and (problem.total_q is not None or problem.seq_q > 1 or right < 0),
        "softcap": problem.softcap > 0,
        "alibi": problem.alibi,
        "sinks": problem.sinks,
        "lse": problem.return_lse,
        "packed": problem.total_q is not None,
        "lens": problem.lens,
        "paging": paging,
        "unit": unit,
        "split": splits > 1,
        "flat": flat,
        "followed": followed,
        "tall": row_blocks > 1,
        "single": single,
        "fixed": problem.group * tokens if row_blocks == 1 and problem.total_q is None else 0,
        "at_once": inside.at_once if inside.workgroups or (alone and gather) else 1,
        # What several blocks of rows read, or the next call will find in the cache, is to stay there.
        "once": row_blocks == 1 and _cache_bytes(problem) > _KEPT_BYTES,
        "gather": alone and gather,
        "waiters": inside.workgroups,
        "trailed": trailed,
        "everyone": inside.workgroups == splits,
        "at_one_go": inside.workgroups > 0 and inside.at_one_go,
        "cluster": splits if cluster else 1,
        "index64": largest > 2**31 - 1,
    }
    brief = False
    config: DecodeConfig | FragmentDecodeConfig
    build: Callable[..., KernelIR]
    if isinstance(shape, FragmentDecodeShape):
        whole = problem.page > 0 and problem.page % SIZE == 0
        rows_ok = (aligned("q", QUAD), True, True, aligned("o", QUAD))
        early = reads_queries_early(problem, target)
        # Without a window a part begins where it would if the sequence were as long as it can be.
        brief = (inside.workgroups > 0 or trailed) and left == UNBOUNDED and 0 < problem.seq_kv <= splits * shape.step
        direct = early and unit[0] and aligned("q", RUN) and reads_queries_direct(problem, target)
        config = FragmentDecodeConfig(
            **options, shape=shape, held=held, early=early, brief=brief, direct=direct, whole=whole, aligned=rows_ok
        )
        build = build_decode_fragment
    else:
        whole = problem.page > 0 and problem.page % shape.stretch == 0
        rows_ok = (aligned("q", QUAD), aligned("k", shape.run), aligned("v", shape.run), aligned("o", QUAD))
        config = DecodeConfig(**options, shape=shape, whole=whole, aligned=rows_ok)
        build = build_decode
    attention = replace(problem.alone(problem.seq_q, problem.seq_kv), batch=problem.batch)
    scalars = problem_scalars(attention) | view_scalars(views) | page_scalars(problem) | {
        "blocks": blocks * splits,
        "row_blocks": row_blocks,
        "splits": splits,
        "least_shift": 0 if cluster or brief else max(least // shape.step, 1).bit_length() - 1,
        "tokens": tokens,
        "total_q": problem.total_q or 0,
    }  # fmt: skip
    if flat:
        grid = grid_of("decode_attention", blocks * splits, target)
    first = Step(config, build, grid, scalars)
    if splits == 1 or cluster:
        return StepPlan((first,))
    if trailed or inside.workgroups:
        words = {"tickets": blocks * awaited_words(columns, splits)}
        if not trailed:
            return StepPlan((first,), {}, words)
        assert isinstance(config, FragmentDecodeConfig)
        waiting = TrailConfig.beside(
            config, columns // held, trail.workgroups, trail.threads, trail.at_once, trail.at_one_go
        )
        second = Step(waiting, build_trail, (heads, trail.workgroups, problem.batch), scalars, together=True)
        return StepPlan((first, second), {}, words)
    workspace = {"part": rows * splits * problem.value_dim, "part_lse": rows * splits}
    if gather:
        return StepPlan((first,), workspace, {"tickets": blocks})
    quads = row_quads(problem.value_dim, target.max_threads)
    by_axes = single and problem.heads_q <= target.max_grid[0] and problem.batch <= target.max_grid[1]
    reduce = ReduceConfig(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        single=by_axes,
        awaits=followed,
        threads=quads * max(1, min(_REDUCE_THREADS, target.max_threads) // quads),
        sinks=problem.sinks,
        lse=problem.return_lse,
        packed=config.packed,
        lens=problem.lens,
        unit=unit,
        aligned=config.aligned[3],
        index64=config.index64,
    )
    grid = (problem.heads_q, problem.batch, 1) if by_axes else grid_of("decode_attention", rows, target)
    second = Step(reduce, build_reduce, grid, {**scalars, "blocks": rows})
    return StepPlan((first, second), workspace)


@dataclass(frozen=True)
class _Waiting:
    """Workgroups that wait for the parts of a block of rows, their threads, and the parts that each of these reads."""

    workgroups: int
    threads: int
    each: int

    @classmethod
    def of(cls, workgroups: int, threads: int, places: int, splits: int) -> _Waiting:
        """Of so many for so many fours of columns; none wait if there are none."""
        if not workgroups:
            return _NOBODY
        return cls(workgroups, threads, -(-splits // (threads // span_of(places, workgroups, threads))))

    @property
    def at_once(self) -> int:
        """Of those parts, how many it asks for at the same time."""
        return min(last.AT_ONCE, self.each)

    @property
    def at_one_go(self) -> bool:
        return self.each <= last.AT_ONCE


_NOBODY = _Waiting(0, 0, 0)


def _cache_bytes(problem: DecodeProblem) -> int:
    """Bytes of all keys and values that sequences can have."""
    per_key = (problem.head_dim + problem.value_dim) * ITEMSIZE[problem.cache]
    return problem.batch * problem.heads_kv * problem.seq_kv * per_key


def _resident(shape: DecodeShape | FragmentDecodeShape) -> int:
    """Workgroups that a multiprocessor is reckoned to run at a time, by the registers that it has. Eight subgroups on
    matrix units that have as many as there are have 64 KiB under way, more than its share of the memory's speed
    needs."""
    held = max(1, _REGISTERS // (shape.threads * (shape.registers or 255)))
    few = isinstance(shape, FragmentDecodeShape) and not shape.registers
    return min(held, max(1, 8 // shape.subgroups)) if few else held
