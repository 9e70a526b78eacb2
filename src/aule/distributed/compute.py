"""Calls of attention on blocks: ordinary kernels with shifted positions, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from aule.distributed import counting
from aule.distributed.group import Ring
from aule.distributed.positions import Block, Positions
from aule.distributed.schedule import Hop
from aule.frontends.torch import parts, repeated, route, varlen
from aule.frontends.torch.attention import Saved
from aule.ops.attention.problem import Origin
from aule.options import AttentionOptions


@dataclass(frozen=True)
class Job:
    """One call of distributed attention on this rank.

    Attributes
    ----------
    options : AttentionOptions
        Without causal, window and alignment, which ``positions`` hold, without rope and sinks, which are applied
        before and after; with the words of the seed.
    heads : (int, int)
        The first of this rank's query heads among those of all ranks, and how many all ranks have.
    training : bool
        Whether gradients will follow.
    """

    ring: Ring
    positions: Positions
    options: AttentionOptions
    heads: tuple[int, int]
    training: bool


@dataclass(frozen=True)
class Call:
    """A block, for one batch or all of them."""

    block: Block
    batch: slice
    origin: Origin

    def rows(self, x: Tensor) -> Tensor:
        """The query rows of ``[batch, heads, rows, ...]``."""
        return x[self.batch, :, self.block.rows]

    def keys(self, x: Tensor, first: int) -> Tensor:
        """The keys of a tensor that holds those from row ``first`` on."""
        keys = self.block.keys
        return x[self.batch, :, keys.start - first : keys.stop - first]


def calls(job: Job, hop: Hop, batch: int, heads: int) -> Iterator[Call]:
    """The calls of a hop.

    Dropout numbers heads through all batches: if this rank has only some of the heads, each batch is a call.
    """
    first, all_heads = job.heads
    drops = bool(job.options.dropout_p)
    for block in hop.blocks:
        if drops and all_heads != heads:
            for b in range(batch):
                number = (b + block.sequence) * all_heads + first
                yield Call(block, slice(b, b + 1), Origin(block.shift, block.q.start, block.k.start, number))
        elif drops:
            number = block.sequence * all_heads
            yield Call(block, slice(None), Origin(block.shift, block.q.start, block.k.start, number))
        else:
            yield Call(block, slice(None), Origin(block.shift))


def _options(job: Job, call: Call) -> tuple[AttentionOptions, Tensor | None]:
    """The options of a call, and what its scores lack: with strides, ALiBi's distances are not multiples of them."""
    given, block = job.options, call.block
    slopes, lacking = given.alibi_slopes, None
    if slopes is not None and slopes.ndim == 2:
        slopes = slopes[call.batch]
    if slopes is not None and block.sign:
        step, distance = block.q.step, block.q.start + job.positions.shift - block.k.start
        rest = distance % step if block.sign > 0 else step - distance % step
        slopes, lacking = slopes * step, -rest * slopes
    return given._replace(
        causal=False,
        window=block.window,
        mask=columns(given.mask, call),
        bias=columns(given.bias, call),
        alibi_slopes=slopes,
    ), None if lacking is None else lacking[..., None]


def columns(x: Tensor | None, call: Call) -> Tensor | None:
    """The rows and keys of a mask or bias, of which this rank has its rows and all keys."""
    if x is None:
        return None
    rows, keys = call.block.rows, call.block.k
    if x.shape[-2] > 1:
        x = x[..., rows, :]
    if x.shape[-1] > 1:
        x = x[..., keys.start : keys.stop : keys.step]
    return x[call.batch] if x.ndim == 4 and x.shape[0] > 1 else x


def forward(job: Job, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of a call; ``k`` and ``v`` hold its keys only."""
    options, lacking = _options(job, call)
    if call.block.offsets is not None:
        packed = _packed(call.block, options, q.device)
        made: Any = varlen.Forward(_tokens(call.rows(q)), _tokens(k), _tokens(v), packed, job.training)
    else:
        made = parts.Forward(call.rows(q), k, v, options, call.origin, job.training)
    out, lse = _run(made)
    if call.block.offsets is not None:
        out, lse = out.transpose(0, 1)[None], lse[None]
    _count(call, q, v, q.shape[-1] + v.shape[-1])
    return out, lse if lacking is None else lse + lacking.to(lse.dtype)


def backward(
    job: Job, call: Call, saved: Saved, k: Tensor, v: Tensor, scores: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of a call's queries, keys and values and, if wanted, scores.

    ``saved`` has all rows of this rank, with the output and log-sum-exp over the keys of all ranks.
    """
    options, lacking = _options(job, call)
    q, out, lse, dout = (call.rows(x) for x in (saved.q, saved.out, saved.lse, saved.dout))
    lse = (lse if lacking is None else lse - lacking.to(lse.dtype)).contiguous()
    if torch.are_deterministic_algorithms_enabled():
        options = options._replace(deterministic=True)
    _count(call, saved.q, v, 3 * q.shape[-1] + 2 * v.shape[-1])
    if call.block.offsets is not None:
        q, k, v, out, dout = (_tokens(x) for x in (q, k, v, out, dout))
        found = _run(varlen.Backward(Saved(q, k, v, out, lse[0], dout), _packed(call.block, options, q.device)))
        dq, dk, dv = (x.transpose(0, 1)[None] for x in found)
        return dq, dk, dv, None
    dq, dk, dv, *rest = _run(parts.Backward(Saved(q, k, v, out, lse, dout), options, call.origin, scores))
    return dq, dk, dv, rest[0] if rest else None


def _tokens(x: Tensor) -> Tensor:
    """``[1, heads, rows, dim]`` as packed sequences are: ``[rows, heads, dim]``."""
    return x[0].transpose(0, 1)


def _packed(block: Block, options: AttentionOptions, device: torch.device) -> varlen.Packed:
    offsets = torch.tensor(block.offsets, dtype=torch.int32, device=device)
    longest = max(y - x for x, y in pairwise(block.offsets or (0, 0)))
    return varlen.Packed(offsets, offsets, longest, longest, options._replace(return_lse=True))


def _run(call: Any) -> Any:
    found = None
    if call.repeat_key is not None:
        found = repeated.repeat(call.repeat_key, list(call.tensors.values()))
    return found or route.route(call.first, call.backend).compute(call)


def _count(call: Call, q: Tensor, v: Tensor, width: int) -> None:
    batches = len(range(*call.batch.indices(q.shape[0])))
    counting.computed(call.block.kept * batches * q.shape[1], width)
