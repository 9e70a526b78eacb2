"""From a decoding problem to the launches that compute it on a CPU. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from aule import tuning
from aule.ir.types import SCALARS
from aule.ops.attention.cpu.config import CpuShape
from aule.ops.attention.cpu.shapes import (
    block_shape,
    grouped_shape,
    kernel_options,
    most_grouped_rows,
    most_rows_in_place,
    most_splits,
    multiplies_in_place,
    wanted_splits,
)
from aule.ops.attention.plan.layout import view_scalars
from aule.ops.attention.plan.scalars import function_scalars, score_scalars
from aule.ops.attention.problem import FAR, UNBOUNDED
from aule.ops.combine.cpu import PartialLayout
from aule.ops.decode.cpu.config import CpuDecodeConfig
from aule.ops.decode.cpu.kernel import RUN, build_decode
from aule.ops.decode.problem import DecodeProblem
from aule.ops.shared.plan import Plan, Step
from aule.target import Target
from aule.tile.vector.engine import has_pairs, vector_unit, work_type
from aule.tuning import model
from aule.view import TensorView


@dataclass(frozen=True)
class _Launch:
    """A launch for sequences of ``least .. most`` query tokens: its configuration, and its numbers of blocks.

    Attributes
    ----------
    blocks_q : int
        Blocks of rows of a key head, or of the key heads of a task.
    blocks : int
        Blocks of rows of all sequences.
    splits : int
        Splits of each sequence's keys.
    """

    least: int
    most: int
    config: CpuDecodeConfig
    blocks_q: int
    blocks: int
    splits: int

    @property
    def partial_elements(self) -> int:
        """Elements of the workspace for partial results."""
        if self.splits == 1:
            return 0
        shape = self.config.shape
        return self.blocks * self.splits * shape.block_q * PartialLayout(self.config.value_dim, shape.lanes).size

    def step(self, scalars: dict[str, int | float]) -> Step:
        """The launch, given the scalars that all launches share."""
        own = {"least": self.least, "most": self.most, "splits": self.splits, "blocks_q": self.blocks_q}
        return Step(self.config, build_decode, (self.blocks * self.splits, 1, 1), scalars | own)


def plan_decode(problem: DecodeProblem, views: dict[str, TensorView], target: Target) -> Plan:
    """Plan decoding over host arrays.

    Parameters
    ----------
    views : dict
        From `decode_views`. The log-sum-exp is the buffer ``lse``.
    """
    if math.prod(problem.out_shape) == 0:
        return Plan(())
    launches = [_choose_launch(problem, views, target, *tokens) for tokens in _token_ranges(problem, target)]
    scalars = _scalars(problem) | view_scalars(views)
    steps = tuple(launch.step(scalars) for launch in launches)
    split = [launch for launch in launches if launch.splits > 1]
    if not split:
        return Plan(steps)
    partial = max(launch.partial_elements for launch in split)
    return Plan(steps, {"partial": partial}, {"tickets": max(launch.blocks for launch in split)})


def _token_ranges(problem: DecodeProblem, target: Target) -> list[tuple[int, int]]:
    """Fewest and most query tokens of the sequences that each launch serves.

    A batch that mixes prompts with sequences of one token takes two launches, since one token is fastest without
    packing K.
    """
    unit = vector_unit(target, work_type(SCALARS[problem.dtype]))
    mixed = problem.total_q is not None and problem.seq_q > 1 and problem.group <= most_rows_in_place(unit, target)
    return [(1, 1), (2, problem.seq_q)] if mixed else [(1, problem.seq_q)]


def _choose_launch(
    problem: DecodeProblem, views: dict[str, TensorView], target: Target, least: int, most: int
) -> _Launch:
    """Choose shape, heads of a task and splits for sequences of ``least .. most`` tokens."""
    unit = vector_unit(target, work_type(SCALARS[problem.dtype]))
    rows, blocks = problem.group * most, problem.batch * problem.heads_kv
    if rows <= most_grouped_rows(target):
        shape = grouped_shape(rows, unit, target)
    else:
        shape = block_shape(rows, blocks, problem.head_dim, unit, target)
    limits = {**tuning.use(target, "decode.cpu"), **tuning.use(target, "decode.cpu.few")}
    config = _configure(problem, views, target, shape, most, limits)
    # Pages with heads outermost take several heads only if that leaves enough tasks without splitting keys, which
    # costs more than it gains for keys in the cache. If heads of a key are neighbours it is worth splitting.
    splits = most_splits(problem.seq_kv // shape.block_kv, target)
    most_heads = blocks * (1 if config.heads_outermost else splits) // model.tasks(target)
    heads = _choose_heads(config, views, rows, min(max(most_heads, 1), limits["heads"]))
    if heads > 1:
        blocks, rows, shape = blocks // heads, rows * heads, replace(shape, block_q=rows * heads)
    interleave = _choose_interleave(config, views, heads, limits)
    blocks_q = -(-rows // shape.block_q)
    blocks *= blocks_q
    splits = min(wanted_splits(blocks, target), splits)
    config = replace(config, heads=heads, interleave=interleave, shape=shape, split=splits > 1)
    return _Launch(least, most, config, blocks_q, blocks, splits)


def _configure(
    problem: DecodeProblem,
    views: dict[str, TensorView],
    target: Target,
    shape: CpuShape,
    tokens: int,
    limits: Mapping[str, Any],
) -> CpuDecodeConfig:
    """Configuration of a shape for up to ``tokens`` query tokens, for one head and without splits."""
    unit = tuple(views[n].strides[3] == 1 or views[n].shape[3] == 1 for n in "qkvo")
    keys_in_place, can_pair = multiplies_in_place(shape, unit[1]), has_pairs(target, SCALARS[problem.dtype])
    pairs = not keys_in_place and can_pair
    # V that is used by few groups of rows is read in place, and converted again by every group.
    few = problem.group * tokens <= limits["direct_rows"]
    values_direct = unit[2] and problem.value_dim % shape.lanes == 0 and few and not pairs
    left, right = problem.limits
    return CpuDecodeConfig(
        **kernel_options(target),
        **tuning.use(target, "decode.cpu.kernel"),
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        left=left != UNBOUNDED and problem.seq_kv - 1 - left > 0,
        right=right != UNBOUNDED and tokens - 1 - right > 0,
        softcap=problem.softcap > 0,
        alibi=problem.alibi,
        score_function=None if problem.score_mod is None else problem.score_mod.program,
        mask_function=None if problem.mask_mod is None else problem.mask_mod.program,
        sinks=problem.sinks,
        lse=problem.return_lse,
        unit=unit,
        shape=shape,
        pairs=pairs,
        key_pairs=keys_in_place and problem.cache == "bf16" and can_pair,
        panels="none" if keys_in_place else "scratch",
        values="direct" if values_direct else "scratch",
        cache=problem.cache,
        group=problem.group,
        page=problem.page,
        lens=problem.lens,
        ragged=problem.total_q is not None,
        heads_outermost=_heads_outermost(problem, views, limits),
    )


def _needs_order(config: CpuDecodeConfig) -> bool:
    """Whether keys must be read in order: they are packed, or a mask, scale or function depends on a key's number."""
    functions = config.score_function is not None or config.mask_function is not None
    return config.left or config.right or config.alibi or functions or config.quantised or config.panels != "none"


def _heads_outermost(problem: DecodeProblem, views: dict[str, TensorView], limits: Mapping[str, Any]) -> bool:
    """Whether short pages have all keys of a head before those of the next head."""
    dims, page = {"k": problem.head_dim, "v": problem.value_dim}, problem.page
    outermost = all(tuple(views[name].strides[1:3]) == (page * dim, dim) for name, dim in dims.items())
    return outermost and RUN <= page <= limits["short_page"] and page & (page - 1) == 0


def _choose_heads(config: CpuDecodeConfig, views: dict[str, TensorView], rows: int, most: int) -> int:
    """Key heads of a task, at most ``most``: several if they are neighbours in memory, so that it is read in order."""
    k, v = views["k"], views["v"]
    neighbours = k.strides[1] == config.head_dim and v.strides[1] == config.value_dim
    # Every sequence of the launch must have the same number of rows.
    same_rows = rows == config.shape.rows and not (config.ragged and rows > config.group)
    in_order = neighbours or config.heads_outermost
    if _needs_order(config) or not in_order or not same_rows or config.values != "direct":
        return 1
    return math.gcd(k.shape[1], 1 << (most.bit_length() - 1))


def _choose_interleave(
    config: CpuDecodeConfig, views: dict[str, TensorView], heads: int, limits: Mapping[str, Any]
) -> int:
    """Runs of keys that are read in turns: several if pages are too short for the hardware's prefetcher, fewer of them
    if there are gaps between a task's keys of a page."""
    if not config.page or config.page > limits["short_page"] or _needs_order(config):
        return 1
    gaps = heads == 1 and views["k"].strides[2] != config.head_dim
    return int(limits["pages_with_gaps" if gaps else "pages"])


def _scalars(problem: DecodeProblem) -> dict[str, int | float]:
    """Scalar parameters that the problem alone decides."""
    left, right = problem.limits
    return {
        "seq_q": problem.seq_q,
        "seq_kv": problem.seq_kv,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "left": min(left, FAR),
        "right": min(right, FAR),
        **score_scalars(problem.scale, problem.softcap, 1.0),
        "total_q": problem.total_q or 0,
        "pages": problem.pages,
        **function_scalars(problem.alone(problem.seq_q, problem.seq_kv)),
    }
