"""From a decoding problem to the launches that compute it on a CPU. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from aule.ir.types import SCALARS
from aule.ops.attention.cpu.config import CpuShape
from aule.ops.attention.cpu.plan import GROUPED_ROWS, block_shape, dotted, grouped_shape, most_dotted
from aule.ops.attention.plan import FAR, view_scalars
from aule.ops.attention.problem import UNBOUNDED
from aule.ops.decode.cpu.config import CpuDecodeConfig
from aule.ops.decode.cpu.kernel import RUN, build_decode
from aule.ops.decode.problem import DecodeProblem
from aule.ops.step import Step, StepPlan
from aule.target import Target
from aule.tile.math import LOG2E
from aule.tile.vector import VectorUnit, has_pairs, vector_unit, work_type
from aule.view import TensorView

_MOST_IN_PLACE = 48
"""Rows up to which V is read where it lies, and converted again by every group of rows."""
_MOST_HEADS = 8
"""Key heads of one task, at most."""
_SHORT_PAGE = 64
"""Keys of a page up to which several are read in turns (docs/performance.md, "Decoding on the CPU")."""


def plan_decode(problem: DecodeProblem, views: dict[str, TensorView], target: Target) -> StepPlan:
    """Plan decoding over host arrays.

    Parameters
    ----------
    views : dict
        From `decode_views`. The log-sum-exp is the buffer ``lse``.
    """
    if math.prod(problem.out_shape) == 0:
        return StepPlan(())
    unit = vector_unit(target, work_type(SCALARS[problem.dtype]))
    numbers = _scalars(problem) | view_scalars(views)
    steps: list[Step] = []
    partial = tickets = 0
    for least, most in _served(problem, unit):
        step, parts, blocks = _launch(problem, views, target, most, numbers | {"least": least, "most": most})
        steps.append(step)
        partial, tickets = max(partial, parts), max(tickets, blocks)
    return StepPlan(tuple(steps), *({"partial": partial}, {"tickets": tickets}) if partial else ())


def _served(problem: DecodeProblem, unit: VectorUnit) -> list[tuple[int, int]]:
    """Sequences of how many tokens, at least and at most, are served by one launch. A batch that mixes prompts with
    sequences that are decoded takes two, since a single token goes fastest without packing K."""
    mixed = problem.total_q is not None and problem.seq_q > 1 and problem.group <= most_dotted(unit)
    return [(1, 1), (2, problem.seq_q)] if mixed else [(1, problem.seq_q)]


def _launch(
    problem: DecodeProblem,
    views: dict[str, TensorView],
    target: Target,
    tokens: int,
    numbers: dict[str, int | float],
) -> tuple[Step, int, int]:
    """The launch for sequences of up to so many tokens, the elements of its partial results, and the blocks of rows
    that have such."""
    unit = vector_unit(target, work_type(SCALARS[problem.dtype]))
    count, threads = problem.group * tokens, max(target.compute_units, 1)
    heads = problem.batch * problem.heads_kv
    few = count <= 8 * GROUPED_ROWS
    shape = grouped_shape(count, unit) if few else block_shape(count, heads, problem.head_dim, unit, threads)
    unit_strides = tuple(views[n].strides[3] == 1 or views[n].shape[3] == 1 for n in "qkvo")
    dots = dotted(shape, unit_strides)
    pairs = not dots and has_pairs(target, SCALARS[problem.dtype])
    # Read by a few groups of rows, V is converted as it is read.
    in_place = unit_strides[2] and problem.value_dim % unit.lanes == 0 and count <= _MOST_IN_PLACE and not pairs
    left, right = problem.limits
    config = CpuDecodeConfig(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        left=left != UNBOUNDED and problem.seq_kv - 1 - left > 0,
        right=right != UNBOUNDED and tokens - 1 - right > 0,
        softcap=problem.softcap > 0,
        alibi=problem.alibi,
        sinks=problem.sinks,
        lse=problem.return_lse,
        unit=unit_strides,
        shape=shape,
        pairs=pairs,
        key_pairs=dots and problem.cache == "bf16" and has_pairs(target, SCALARS[problem.dtype]),
        panels="none" if dots else "scratch",
        values="direct" if in_place else "scratch",
        cache=problem.cache,
        group=problem.group,
        page=problem.page,
        lens=problem.lens,
        ragged=problem.total_q is not None,
    )
    config = replace(config, piled=_piled(config, views))
    # Heads of a page are taken together where that leaves enough tasks: dividing keys for it would cost 3 to 5% of keys
    # that are in the cache. Where rows of heads are neighbours it is worth that (docs/performance.md).
    parts = 1 if config.piled else _parts(problem.seq_kv, shape)
    together = _heads(config, views, count, heads * parts // (4 * threads))
    if together > 1:
        heads, count, shape = heads // together, count * together, replace(shape, block_q=count * together)
    config = replace(config, heads=together, ways=_ways(config, views, together))
    blocks_q = -(-count // shape.block_q)
    splits = _splits(problem.seq_kv, heads * blocks_q, shape, threads)
    config = replace(config, shape=shape, split=splits > 1)
    blocks, numbers = heads * blocks_q, numbers | {"splits": splits, "blocks_q": blocks_q}
    step = Step(config, build_decode, (blocks * splits, 1, 1), numbers)
    if splits == 1:
        return step, 0, 0
    return step, blocks * splits * shape.block_q * (shape.padded(problem.value_dim) + shape.lanes), blocks


def _ordered(config: CpuDecodeConfig) -> bool:
    """Whether keys are to come one after the other: rows are many, or a mask or a scale goes by the number of a key."""
    return config.left or config.right or config.alibi or config.quantised or config.panels != "none"


def _piled(config: CpuDecodeConfig, views: dict[str, TensorView]) -> bool:
    """Whether a page, a short one, has its heads one behind the other."""
    dims = {"k": config.head_dim, "v": config.value_dim}
    piled = all(tuple(views[name].strides[1:3]) == (config.page * dim, dim) for name, dim in dims.items())
    return piled and RUN <= config.page <= _SHORT_PAGE and config.page & (config.page - 1) == 0


def _heads(config: CpuDecodeConfig, views: dict[str, TensorView], rows: int, most: int) -> int:
    """How many key heads, ``most`` or fewer, one task takes: several where a key's rows of all heads are neighbours, or
    those of a page, so that memory is read from one end to the other."""
    k, v = views["k"], views["v"]
    beside = k.strides[1] == config.head_dim and v.strides[1] == config.value_dim
    same = rows == config.shape.rows and not (config.ragged and rows > config.group)  # in each sequence that is served
    if _ordered(config) or not (beside or config.piled) or not same or config.values != "direct":
        return 1
    return math.gcd(k.shape[1], 1 << (min(max(most, 1), _MOST_HEADS).bit_length() - 1))


def _ways(config: CpuDecodeConfig, views: dict[str, TensorView], heads: int) -> int:
    """How many runs of keys are read in turns: several where their order does not matter and pages are so short that
    hardware does not fetch ahead. Four of what a task has in one piece of memory, two of rows that lie apart."""
    if not config.page or config.page > _SHORT_PAGE or _ordered(config):
        return 1
    return 4 if heads > 1 or views["k"].strides[2] == config.head_dim else 2


def _splits(seq_kv: int, blocks: int, shape: CpuShape, threads: int) -> int:
    """Into how many parts the keys of each sequence go: so many that every thread has work, and that the last to finish
    has little left, if there are keys enough for it."""
    wanted = 1 if blocks >= 4 * threads or threads == 1 else -(-4 * threads // blocks)
    return min(wanted, _parts(seq_kv, shape))


def _parts(seq_kv: int, shape: CpuShape) -> int:
    """Into how many parts the keys of a sequence may go at most."""
    return max(1, seq_kv // shape.block_kv // 4)


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
        # As in attention: in the log2 domain at once, or, with a softcap, after tanh.
        "scale": problem.scale / problem.softcap if problem.softcap > 0 else problem.scale * LOG2E,
        "softcap": problem.softcap * LOG2E,
        "total_q": problem.total_q or 0,
        "pages": problem.pages,
    }
