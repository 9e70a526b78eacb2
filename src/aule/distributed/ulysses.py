"""Exchange of heads for rows: each rank gives away most of its heads and gets the rows of all ranks for the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aule.distributed import counting
from aule.distributed.group import Ring, guarded

HEADS, ROWS = 1, 2
"""Axes of ``[batch, heads, rows, ...]``."""


def _exchange(x: Tensor, ring: Ring, given: int, got: int) -> Tensor:
    """Divide axis ``given`` among the ranks, and concatenate theirs along axis ``got``."""
    parts = x.unflatten(given, (ring.ranks, -1)).movedim(given, 0).contiguous()
    found = torch.empty_like(parts)
    raw = (found.view(torch.uint8), parts.view(torch.uint8)) if x.dtype is torch.bool else (found, parts)
    counting.sent(parts.numel() * parts.element_size() * (ring.ranks - 1) // ring.ranks)
    with guarded(ring):
        dist.all_to_all_single(*raw, group=ring.group)
    return found.movedim(0, got).flatten(got, got + 1)


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring, given: int, got: int) -> Tensor:
        ctx.ring, ctx.axes = ring, (given, got)
        return _exchange(x, ring, given, got)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, got = ctx.axes
        return _exchange(grad, ctx.ring, got, given), None, None, None


class Heads:
    """The exchange of one call: which heads a rank computes.

    Parameters
    ----------
    ring : Ring
        The ranks that exchange.
    query, key : int
        Query heads and key heads.
    order : Tensor or None
        Numbers in the sequence of the rows of all ranks, concatenated; None if they are in order.
    """

    def __init__(self, ring: Ring, query: int, key: int, order: Tensor | None) -> None:
        self.ring, self.count, self.order = ring, query // ring.ranks, order
        self.inverse = None if order is None else torch.argsort(order)
        group = query // key
        if self.count % group == 0:
            self.key_heads = None  # every rank has all query heads of its key heads
        else:
            # Each rank gets the key heads that its query heads share: one, or one for each query head.
            step = self.count if group % self.count == 0 else 1
            self.key_heads = torch.arange(0, query, step) // group

    @property
    def first(self) -> int:
        """The first query head of this rank."""
        return self.ring.rank * self.count

    def rows(self, x: Tensor) -> Tensor:
        """All rows, in the order of the sequence, of this rank's heads of ``[batch, heads, rows, ...]``."""
        if self.ring.ranks == 1:
            return x
        found: Tensor = _Exchange.apply(x, self.ring, HEADS, ROWS)
        return found if self.inverse is None else found.index_select(ROWS, self.inverse.to(x.device))

    def keys(self, x: Tensor) -> Tensor:
        """All rows of this rank's heads of keys or values."""
        if self.ring.ranks > 1 and self.key_heads is not None:
            x = x.index_select(HEADS, self.key_heads.to(x.device))
        return self.rows(x)

    def heads(self, x: Tensor) -> Tensor:
        """All heads of this rank's rows: the way back."""
        if self.ring.ranks == 1:
            return x
        if self.order is not None:
            x = x.index_select(ROWS, self.order.to(x.device))
        found: Tensor = _Exchange.apply(x, self.ring, ROWS, HEADS)
        return found

    def own(self, x: Tensor | None) -> Tensor | None:
        """Select this rank's heads of ``[..., heads]``, which every rank has."""
        return x if x is None or self.ring.ranks == 1 else x[..., self.first : self.first + self.count]

    def scores(self, x: Tensor | None, rows: int) -> Tensor | None:
        """All rows, for this rank's heads, of a mask or bias of which a rank has its ``rows``, or one for all rows."""
        if x is None or self.ring.ranks == 1:
            return x
        x = x[(None,) * (4 - x.ndim)]
        if x.shape[ROWS] == 1 and rows != 1:
            return x if x.shape[HEADS] == 1 else x[:, self.first : self.first + self.count]
        if x.shape[HEADS] == 1:  # the same for all heads: every rank gets the rows of all others
            x = x.expand(-1, self.ring.ranks, -1, -1)
        return self.rows(x)
