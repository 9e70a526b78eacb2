"""Decoding over a cache that is spread over ranks: each attends to its own keys, and the results are merged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aule.api.decode import decode_attention as decode_here
from aule.api.names import unknown_option
from aule.distributed import counting
from aule.distributed.graphs import outside_graphs
from aule.distributed.group import Ring, agree, device_of, guarded, ring_of
from aule.errors import InvalidArgumentError, InvalidShapeError
from aule.frontends.torch.checks import require_plain
from aule.frontends.torch.views import work_dtype
from aule.ops.attention.validate import window_sides

__all__ = ["decode_attention", "merge_states"]

_OPTIONS = ("scale", "softcap", "backend")
"""Passed on to each rank's own call. Others, such as functions of scores, would need positions of the whole cache."""
_KNOWN = ("group", "context_lens", "causal", "window", "alibi_slopes", "sinks", "return_lse", *_OPTIONS)


@outside_graphs
def merge_states(out: Tensor, lse: Tensor, *, group: Any = None, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge results of all ranks over disjoint keys, in the order of the ranks.

    For caches of other kinds than `decode_attention` takes: call `aule.flash_attention_paged` or `aule.KVCache.attend`
    with ``return_lse=True`` on the keys of this rank, and merge.

    Parameters
    ----------
    out : Tensor
        ``[..., heads, rows, dim]`` or, for one row, ``[..., heads, dim]``: the same rows on every rank.
    lse : Tensor
        The shape of ``out`` without its last axis; -inf for rows without keys on this rank.
    group : ProcessGroup or DeviceMesh, optional
        The ranks; default: all.
    sinks : float32 Tensor, optional
        One logit that takes part in the softmax for each element of the last axes of ``lse``, such as ``[heads]`` for
        one row; pass none to the ranks' own calls.

    Returns
    -------
    out, lse : Tensor
        The same on every rank.
    """
    op = "merge_states"
    ring = ring_of(op, group)

    def check() -> dict[str, object]:
        for name, x in (("out", out), ("lse", lse)):
            require_plain(x, name, op, "out")
        if lse.shape != out.shape[:-1]:
            raise InvalidShapeError(
                f"[{op}] expected lse of the shape of out without its last axis, got {list(lse.shape)} for "
                f"{list(out.shape)}; pass both as return_lse=True gives them"
            )
        logits = None if sinks is None else list(sinks.shape)
        return {"call": op, "shape": list(out.shape), "dtype": out.dtype, "sinks": logits}

    agree([ring], device_of(out), check)
    return _merged(ring, out, lse, sinks)


def _merged(ring: Ring, out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    work = work_dtype(out)
    own = torch.cat([out.to(work), lse.to(work)[..., None]], -1).contiguous()
    parts = [own]
    if ring.ranks > 1:
        parts = [torch.empty_like(own) for _ in range(ring.ranks)]
        counting.sent(own.numel() * own.element_size() * (ring.ranks - 1))
        with guarded(ring):
            dist.all_gather(parts, own, group=ring.group)
    levels = [part[..., -1] for part in parts]
    if sinks is not None:
        levels.append(sinks.to(work).expand_as(levels[0]))
    total = torch.logsumexp(torch.stack(levels), 0)
    level = torch.where(total == -torch.inf, 0, total)  # no keys anywhere: exp(-inf + inf) would be NaN
    merged = torch.zeros_like(own[..., :-1])
    for part in parts:
        weight = torch.exp(part[..., -1:] - level[..., None])
        merged += torch.where(weight != 0, part[..., :-1] * weight, 0)  # a rank without keys may hold anything
    return merged.to(out.dtype), total.float()


@outside_graphs
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    context_lens: Tensor | None = None,
    causal: bool = True,
    window: Any = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Compute attention of the newest tokens over a cache whose keys are divided among ranks.

    The ranks of a group hold consecutive keys of each sequence, in the order of the ranks; the newest tokens, those of
    ``q``, are the last keys. Any rank may hold any number of keys.

    Parameters
    ----------
    q : Tensor
        ``[batch, heads_q, seq_q, head_dim]``, or ``[batch, heads_q, head_dim]`` for one token: the same on every rank.
    k, v : Tensor
        ``[batch, heads_kv, max_len, head_dim]``: the cache of this rank. Lengths may differ between ranks.
    group : ProcessGroup or DeviceMesh, optional
        The ranks; default: all.
    context_lens : int32 Tensor, optional
        ``[batch]``: keys of each sequence on this rank; None: all.
    causal, window, alibi_slopes, sinks, return_lse
        As in `aule.decode_attention`, over the keys of all ranks.
    **options
        ``scale``, ``softcap`` and ``backend``.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        The same on every rank.
    """
    op = "decode_attention"
    ring = ring_of(op, group)
    call = _Decode(ring, q, (k, v), alibi_slopes, options)

    def check() -> dict[str, object]:
        unknown = {name: x for name, x in options.items() if name not in _OPTIONS}
        if unknown:
            raise unknown_option(_KNOWN, unknown, op)
        call.check(context_lens, causal, window)
        if sinks is not None:
            require_plain(sinks, "sinks", op)
            if sinks.shape != q.shape[1:2]:
                raise InvalidShapeError(
                    f"[{op}] expected sinks [{q.shape[1]}], got {list(sinks.shape)}; give one logit for each query head"
                )
        facts: dict[str, object] = {"call": op, "q": f"{list(q.shape)} of {q.dtype}"}
        for name, x in (("heads and dims of k", k), ("heads and dims of v", v)):
            facts[name] = f"{x.shape[1]}, {x.shape[3]} of {x.dtype}"
        facts |= {"causal": causal, "window": window, "sinks": sinks is not None, "return_lse": return_lse}
        return facts | {"alibi_slopes": alibi_slopes is not None} | options

    agree([ring], device_of(q), check)
    out, lse = _merged(ring, *call.run(), None if sinks is None else sinks[:, None])
    if q.ndim == 3:
        out, lse = out[:, :, 0], lse[:, :, 0]
    return (out, lse) if return_lse else out


class _Decode:
    """A call on this rank's keys."""

    def __init__(
        self,
        ring: Ring,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        slopes: Tensor | None,
        options: dict[str, Any],
    ) -> None:
        self.ring, self.q, self.cache, self.slopes, self.options = ring, q, cache, slopes, options

    def check(self, context_lens: Tensor | None, causal: bool, window: Any) -> None:
        """Check the arguments as `aule.decode_attention` does, by a call on no batches."""
        op, (k, v) = self.ring.op, self.cache
        for name, x in (("q", self.q), ("k", k), ("v", v)):
            require_plain(x, name, op)
        left, right = (None if side < 0 else side for side in window_sides(op, window, causal))
        self.left, self.right = left, 0 if causal else right
        if self.q.ndim == 3:
            self.q = self.q[:, :, None]
        q = self.q
        if self.slopes is not None and self.right != 0 and q.shape[2] > 1:
            raise InvalidArgumentError(
                f"[{self.ring.op}] expected causal=True for alibi_slopes and several tokens, got False; pass one token"
            )
        if context_lens is None:
            context_lens = torch.full((len(q),), k.shape[2], dtype=torch.int32)
        self.lens = context_lens.to("cpu", torch.int64)
        if self.lens.shape != (len(q),) or len(k) != len(q):
            raise InvalidShapeError(
                f"[{self.ring.op}] expected context_lens [{len(q)}] and a cache of as many sequences, got "
                f"{list(self.lens.shape)} and {len(k)}; give one length for each sequence of q"
            )
        if len(q) and not 0 <= int(self.lens.min()) <= int(self.lens.max()) <= k.shape[2]:
            raise InvalidShapeError(
                f"[{op}] expected context_lens from 0 to {k.shape[2]}, the size of this rank's cache, got "
                f"{self.lens.tolist()[:8]}; enlarge the cache or correct the lengths"
            )
        if q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3]:
            raise InvalidShapeError(
                f"[{op}] expected k of q's head_dim, and k and v of equal shapes but for their last axis, got q "
                f"{list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}; correct the cache"
            )
        none = context_lens[:0].to(torch.int32)
        slopes = self._slopes(slice(0))
        decode_here(q[:0], k[:0], v[:0], context_lens=none, alibi_slopes=slopes, **self.options)

    def run(self) -> tuple[Tensor, Tensor]:
        """The output and log-sum-exp over this rank's keys."""
        start, end = self._span()
        seq_q = self.q.shape[2]
        position = self._total - seq_q  # of the first new token
        found = []
        for i in range(seq_q):
            # Row i sees this rank's first `seen` keys. `past` further ones, on other ranks, are behind those.
            limit = end if self.right is None else torch.minimum(end, position + i + self.right + 1)
            seen = (limit - start).clamp(min=0)
            past = position + i + 1 - start - seen
            found.append(self._row(i, seen, past))
        return torch.stack([out for out, _ in found], 2), torch.stack([lse for _, lse in found], 2)

    def _span(self) -> tuple[Tensor, Tensor]:
        """Numbers of this rank's first key, and of the one after its last, in every sequence."""
        lens = [self.lens]
        if self.ring.ranks > 1:
            own = self.lens.to(self.q.device)
            parts = [torch.empty_like(own) for _ in range(self.ring.ranks)]
            with guarded(self.ring):
                dist.all_gather(parts, own, group=self.ring.group)
            lens = [part.cpu() for part in parts]
        ends = torch.stack(lens).cumsum(0)
        self._total = ends[-1]
        end = ends[self.ring.rank]
        return end - self.lens, end

    def _row(self, i: int, seen: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """One token of every sequence. A window leaves each its own number of keys, so sequences may need calls."""
        q, (k, v) = self.q[:, :, i], self.cache
        if self.left is None:
            return self._call(q, k, v, seen, past, None, self.slopes)
        found: list[tuple[Tensor, Tensor]] = []
        for left in (self.left - past).tolist():
            at = slice(len(found), len(found) + 1)
            count = seen[at] if left >= 0 else torch.zeros_like(seen[at])
            found.append(self._call(q[at], k[at], v[at], count, past[at], max(left, 0), self._slopes(at)))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def _slopes(self, batches: slice) -> Tensor | None:
        """The slopes of some sequences, where each has its own."""
        slopes = self.slopes
        own = slopes is not None and slopes.ndim == 2 and len(slopes) == len(self.q)
        return slopes[batches] if slopes is not None and own else slopes

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seen: Tensor,
        past: Tensor,
        left: int | None,
        slopes: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        window = None if left is None else (left, None)
        lens = seen.to(torch.int32).to(q.device)
        out, lse = decode_here(
            q,
            k,
            v,
            context_lens=lens,
            causal=False,
            window=window,
            alibi_slopes=slopes,
            return_lse=True,
            **self.options,
        )
        if slopes is not None:  # the call takes its last key for the token's own
            lse = lse - past.to(lse.device, lse.dtype)[:, None] * slopes.to(lse.dtype)
        return out, lse
