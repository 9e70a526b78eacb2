"""From a decoding problem and a target to launches, in three steps: choose, configure, scalars. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from aule import tuning
from aule.ir import KernelIR
from aule.ops.attention.plan.layout import Layout, view_scalars
from aule.ops.attention.plan.scalars import problem_scalars, score_options
from aule.ops.attention.problem import UNBOUNDED, AttentionProblem
from aule.ops.combine.partials import row_quads
from aule.ops.combine.second_launch import CombineConfig, build_combine
from aule.ops.decode.config import (
    AnyLatentShape,
    AnyShape,
    CacheConfig,
    DecodeConfig,
    DecodeShape,
    FragmentDecodeConfig,
    FragmentDecodeShape,
    LatentConfig,
    LatentShape,
    LatentWarpgroupConfig,
    LatentWarpgroupShape,
)
from aule.ops.decode.fragment.kernel import build_decode_fragment
from aule.ops.decode.fragment.latent import build_latent
from aule.ops.decode.plan.latent import choose_latent
from aule.ops.decode.plan.prefill import few_tokens, page_scalars, plan_prefill
from aule.ops.decode.plan.shapes import (
    choose_cluster,
    choose_decode_fragments,
    choose_decode_shape,
    choose_splits,
    combines_in_last_workgroup,
    fragment_runs,
    is_short,
    reads_queries_direct,
    reads_queries_early,
    split_limits,
)
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.simt.kernel import build_decode
from aule.ops.decode.validate import DecodeOperands
from aule.ops.decode.warpgroup.latent import build_latent_warpgroup
from aule.ops.scores.config import Paging
from aule.ops.shared.plan import Plan, Step, grid_of
from aule.target import Target
from aule.tile.common.matrix import QUAD
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.shape import RUN
from aule.tuning import model
from aule.view import ITEMSIZE, TensorView

Combine = Literal["cluster", "last_workgroup", "second_launch"]
"""How the partial results of a split sequence are combined."""
_BUILDERS: dict[type[AnyShape], Callable[[Any, Target], KernelIR]] = {
    DecodeShape: build_decode,
    FragmentDecodeShape: build_decode_fragment,
    LatentShape: build_latent,
    LatentWarpgroupShape: build_latent_warpgroup,
}
"""Kernels by the type of their shape."""


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
    return {**views, **operands.captured}


def plan_decode(
    problem: DecodeProblem,
    views: dict[str, TensorView],
    target: Target,
    aligned_base: dict[str, bool] | None = None,
    shape: AnyShape | None = None,
    splits: int | None = None,
    combine: Combine | None = None,
) -> Plan:
    """Plan decoding on a GPU.

    Parameters
    ----------
    views : dict
        From `decode_views`, with device strides and offsets.
    aligned_base : dict, optional
        For q, k, v, o: whether the memory starts at a multiple of 16 bytes (default: it does).
    shape : DecodeShape, FragmentDecodeShape or one of AnyLatentShape, optional
        Shape of a workgroup; by default the planner chooses.
    splits : int, optional
        Splits of each sequence's keys; by default the planner chooses.
    combine : {"cluster", "last_workgroup", "second_launch"}, optional
        How splits are combined; by default the planner chooses. Ignored if there is one split.
    """
    if math.prod(problem.out_shape) == 0 or problem.batch == 0 or problem.seq_q == 0:
        return Plan(())
    call = _Call(problem, Layout(views, aligned_base or {}), target)
    shape = shape or choose_latent(problem, call.layout, target)
    prefill = None
    if not isinstance(shape, AnyLatentShape):  # which serves many tokens as well
        prefill = plan_prefill(problem, views, target, call.paging, aligned_base or {}, call.largest_index > 2**31 - 1)
    if prefill is not None and problem.total_q is None:
        return Plan((prefill,))
    # In a packed batch the prefill launch takes the sequences of many tokens.
    tokens = problem.seq_q if prefill is None else min(problem.seq_q, few_tokens(problem, target))
    choice = _choose(call, tokens, shape, splits, combine)
    plan = _plan(call, choice)
    return plan if prefill is None else replace(plan, steps=(*plan.steps, prefill))


@dataclass(frozen=True)
class _Call:
    """A problem, its operands and the target."""

    problem: DecodeProblem
    layout: Layout
    target: Target

    @cached_property
    def attention(self) -> AttentionProblem:
        """Attention of the batch, as if every sequence had ``seq_q`` queries and ``seq_kv`` keys."""
        return replace(self.problem.alone(self.problem.seq_q, self.problem.seq_kv), batch=self.problem.batch)

    @property
    def paging(self) -> Paging:
        page = self.problem.page
        if not page:
            return "none"
        return "shift" if page & (page - 1) == 0 else "divide"

    @property
    def largest_index(self) -> int:
        """Largest number of elements up to the last of an operand."""
        return max(view.last_index + 1 for view in self.layout.views.values())

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys and values that the sequences can have."""
        problem = self.problem
        per_key = (problem.head_dim + problem.value_dim) * ITEMSIZE[problem.cache]
        return problem.batch * problem.heads_kv * problem.seq_kv * per_key


# -- choose ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """How a call is divided among workgroups.

    Attributes
    ----------
    tokens : int
        Most query tokens of a sequence that these launches serve.
    splits : int
        Most splits of a sequence's keys.
    combine : str or None
        How splits are combined; None if there is one.
    least_keys : int
        Fewest keys of a split, if a sequence is shorter than it could be.
    """

    problem: DecodeProblem
    tokens: int
    shape: AnyShape
    splits: int
    combine: Combine | None
    least_keys: int

    @cached_property
    def row_blocks(self) -> int:
        """Blocks of rows of a key head."""
        return -(-self.problem.group * self.tokens // self.shape.rows)

    @property
    def blocks(self) -> int:
        """Blocks of rows of all sequences."""
        return self.row_blocks * self.problem.heads_kv * self.problem.batch

    @property
    def rows(self) -> int:
        """Query rows of all sequences."""
        return self.problem.batch * self.problem.heads_q * self.tokens

    @property
    def most_rows(self) -> int:
        """Most rows of a workgroup, rounded up to a power of two."""
        return 1 << (min(self.shape.rows, self.problem.group * self.tokens) - 1).bit_length()

    @property
    def axes(self) -> tuple[int, int, int]:
        """The grid's axes, unless it is flat."""
        heads = self.row_blocks * self.problem.heads_kv
        if self.combine == "cluster":
            return self.splits, heads, self.problem.batch
        return heads, self.splits, self.problem.batch


def _choose(call: _Call, tokens: int, shape: AnyShape | None, splits: int | None, combine: Combine | None) -> _Choice:
    """Choose shape, splits and how these are combined, unless they are given."""
    shape = _choose_shape(call, tokens, shape)
    choice = _Choice(call.problem, tokens, shape, 1, combine, split_limits(call.target)["least_keys"])
    choice = replace(choice, splits=splits) if splits is not None else _choose_splits(call, choice)
    if choice.splits == 1:
        return replace(choice, combine=None)
    if choice.combine == "cluster" and _is_flat(choice, call.target):
        choice = replace(choice, combine=None)
    return choice if choice.combine is not None else replace(choice, combine=_choose_combine(call, choice))


def _choose_shape(call: _Call, tokens: int, shape: AnyShape | None) -> AnyShape:
    problem, target = replace(call.problem, seq_q=tokens), call.target
    shape = shape or choose_decode_fragments(problem, target)
    if isinstance(shape, FragmentDecodeShape):
        k_run, v_run = fragment_runs(problem, target)
        if not all(call.layout.aligned("k", k_run) + call.layout.aligned("v", v_run)):
            shape = None
    if shape is not None:
        return shape
    run = 16
    while run > 1 and not all(call.layout.aligned("kv", run)):
        run //= 2
    return choose_decode_shape(problem, target, run)


def _choose_splits(call: _Call, choice: _Choice) -> _Choice:
    """Choose the number of splits, and a cluster if that suits."""
    problem, target, shape, blocks = call.problem, call.target, choice.shape, choice.blocks
    if isinstance(shape, FragmentDecodeShape):
        if choice.combine is None:
            cluster = choose_cluster(shape, blocks, problem.seq_kv, (problem.head_dim, problem.value_dim), target)
            if cluster > 1:
                return replace(choice, splits=cluster, combine="cluster")
        if is_short(problem, target):
            return choice
    resident = _resident(shape, target, (problem.head_dim, problem.value_dim))
    # If several workgroups share a compute unit it is better to have all of them.
    even = isinstance(shape, DecodeShape) or resident < split_limits(target)["uneven_resident"]
    # Partial results of many blocks of rows would take too much memory.
    most_blocks = tuning.number(target, "decode.latent.uneven_blocks")
    many = isinstance(shape, AnyLatentShape) and choice.row_blocks > most_blocks
    uneven = problem.lens and not many
    splits, least = choose_splits(blocks, problem.seq_kv, shape.step, resident, target, uneven, even)
    return replace(choice, splits=splits, least_keys=least)


def _choose_combine(call: _Call, choice: _Choice) -> Combine:
    """Choose between the last workgroup and a second launch."""
    problem = call.problem
    if isinstance(choice.shape, LatentWarpgroupShape):  # whose threads have few registers at the end
        return "second_launch"
    block_rows = min(choice.shape.rows, problem.group * choice.tokens)
    buffers = len(call.layout.views) + int(problem.return_lse) + 3  # partial results, their log-sum-exps, tickets
    dims = problem.head_dim, problem.value_dim
    last = combines_in_last_workgroup(choice.shape, block_rows, choice.splits, dims, buffers, call.target)
    return "last_workgroup" if last else "second_launch"


def _is_flat(choice: _Choice, target: Target) -> bool:
    """Whether some axis of the grid is longer than the target allows, so that the grid is flat."""
    return any(count > most for count, most in zip(choice.axes, target.max_grid, strict=True))


def _resident(shape: AnyShape, target: Target, dims: tuple[int, int]) -> int:
    """Workgroups that a compute unit runs at a time.

    Without a limit on registers, a few subgroups on matrix units have more loads in flight than a compute unit's share
    of the memory's bandwidth needs.
    """
    if isinstance(shape, AnyLatentShape):
        return model.resident(target, shape.threads, shape.registers, shape.shared_bytes(*dims))
    resident = model.resident(target, shape.threads, shape.registers)
    unlimited = isinstance(shape, FragmentDecodeShape) and not shape.registers
    if not unlimited:
        return resident
    enough = int(tuning.number(target, "decode.fragment.resident_subgroups"))
    return min(resident, max(1, enough // shape.subgroups))


# -- configure ---------------------------------------------------------------------------------------------------------


def _configure(call: _Call, choice: _Choice) -> CacheConfig:
    """Configuration of the kernel that attends to the keys."""
    problem, layout, shape = call.problem, call.layout, choice.shape
    options = _score_options(call) | _grid_options(call, choice)
    q_aligned, o_aligned = layout.aligned("qo", QUAD)
    if isinstance(shape, FragmentDecodeShape):
        early = reads_queries_early(problem, call.target)
        direct = early and all(layout.aligned("q", RUN)) and reads_queries_direct(problem, call.target)
        return FragmentDecodeConfig(
            **options,
            shape=shape,
            most_rows=choice.most_rows,
            early_queries=early,
            direct_queries=direct,
            page_shared=problem.page > 0 and problem.page % SIZE == 0,
            aligned=(q_aligned, True, True, o_aligned),
        )
    aligned = (*layout.aligned("qkv", RUN), o_aligned)
    if isinstance(shape, LatentShape):
        return LatentConfig(**options, shape=shape, aligned=aligned)
    if isinstance(shape, LatentWarpgroupShape):
        together = problem.page > 0 and problem.page % SIZE == 0
        return LatentWarpgroupConfig(**options, shape=shape, page_shared=together, aligned=aligned)
    return DecodeConfig(
        **options,
        shape=shape,
        page_shared=problem.page > 0 and problem.page % shape.subgroup_step == 0,
        aligned=(q_aligned, *layout.aligned("kv", shape.run), o_aligned),
        latent=problem.latent,
    )


def _score_options(call: _Call) -> dict[str, Any]:
    """Fields that the problem and its operands decide."""
    problem = call.problem
    (left, right), packed = problem.limits, problem.total_q is not None
    return score_options(call.attention) | {
        "cache": problem.cache,
        "left": left != UNBOUNDED,
        # A single query stands at the last key: there are no keys to its right.
        "right": right != UNBOUNDED and (packed or problem.seq_q > 1 or right < 0),
        "packed": packed,
        "lens": problem.lens,
        "paging": call.paging,
        "unit": call.layout.unit("qkvo"),
        "one_token": problem.seq_q == 1 and not packed,
    }


def _grid_options(call: _Call, choice: _Choice) -> dict[str, Any]:
    """Fields that the division among workgroups decides."""
    problem, combine, splits = call.problem, choice.combine, choice.splits
    by_last = combine == "last_workgroup"
    one_block = choice.row_blocks == 1
    largest = max(choice.rows * splits * problem.value_dim, call.largest_index)
    at_once = tuning.use(call.target, "decode.combine_at_once")["last_workgroup"]
    return {
        "split": splits > 1,
        "flat_grid": _is_flat(choice, call.target),
        "next_launch_overlaps": combine == "second_launch" and call.target.overlap,
        "several_row_blocks": not one_block,
        "fixed_rows": problem.group * choice.tokens if one_block and problem.total_q is None else 0,
        "partials_at_once": min(at_once, 1 << (splits - 1).bit_length()) if by_last else 1,
        # Keys that several blocks of rows read, or that the next call finds in the cache, are to stay there.
        "evict_first": one_block and call.cache_bytes > model.cached_bytes(call.target, "decode"),
        "last_workgroup_combines": by_last,
        "cluster": splits if combine == "cluster" else 1,
        "index64": largest > 2**31 - 1,
    }


# -- scalars and steps -------------------------------------------------------------------------------------------------


def _scalars(call: _Call, choice: _Choice) -> dict[str, int | float]:
    problem = call.problem
    least_steps = 1 if choice.combine == "cluster" else max(choice.least_keys // choice.shape.step, 1)
    return problem_scalars(call.attention, call.target) | view_scalars(call.layout.views) | page_scalars(problem) | {
        "blocks": choice.blocks * choice.splits,
        "row_blocks": choice.row_blocks,
        "splits": choice.splits,
        "least_shift": least_steps.bit_length() - 1,
        "tokens": choice.tokens,
        "total_q": problem.total_q or 0,
    }  # fmt: skip


def _plan(call: _Call, choice: _Choice) -> Plan:
    """The launch that attends to the keys, and one that combines splits if that is a launch of its own."""
    config, scalars, grid = _configure(call, choice), _scalars(call, choice), choice.axes
    if config.flat_grid:
        grid = grid_of("decode_attention", choice.blocks * choice.splits, call.target)
    attend = Step(config, _BUILDERS[type(choice.shape)], grid, scalars)
    if not config.stores_partials:
        return Plan((attend,))
    partials = choice.rows * choice.splits
    workspace = {"part": partials * call.problem.value_dim, "part_lse": partials}
    if choice.combine == "last_workgroup":
        return Plan((attend,), workspace, {"tickets": choice.blocks})
    return Plan((attend, _combine_step(call, choice, config, scalars)), workspace)


def _combine_step(call: _Call, choice: _Choice, config: CacheConfig, scalars: dict[str, int | float]) -> Step:
    """The launch that combines the partial results of ``config``'s launch."""
    problem, target = call.problem, call.target
    quads = row_quads(problem.value_dim, target.max_threads)
    most_threads = min(tuning.number(target, "decode.combine_threads"), target.max_threads)
    one_token = config.one_token and problem.heads_q <= target.max_grid[0] and problem.batch <= target.max_grid[1]
    combine = CombineConfig(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        one_token=one_token,
        overlaps_previous=config.next_launch_overlaps,
        threads=quads * max(1, most_threads // quads),
        at_once=tuning.use(target, "decode.combine_at_once")["second_launch"],
        sinks=problem.sinks,
        lse=problem.return_lse,
        packed=config.packed,
        lens=problem.lens,
        unit=config.unit,
        aligned=config.aligned[3],
        index64=config.index64,
    )
    grid = (problem.heads_q, problem.batch, 1) if one_token else grid_of("decode_attention", choice.rows, target)
    return Step(combine, build_combine, grid, {**scalars, "blocks": choice.rows})
