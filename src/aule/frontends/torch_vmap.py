"""What ``torch.vmap`` does to the operators of `aule.frontends.torch_ops`: the mapped axis joins the batch.

Tensors that are not mapped are expanded, which costs memory only where they have a batch of their own. Some things
have no axis of batches, or would be summed over it, and are computed call by call: mapped sinks, dropout, and the
gradients of masks, biases and sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_ROWS = 4
"""Axes of q, k, v, of the result, and of masks and biases."""


class Mapped:
    """The tensors of a mapped call, and how they become those of one with a larger batch.

    Parameters
    ----------
    size : int
        Length of the mapped axis.
    q, dim
        The queries, which say how many axes the caller gave, and where they are mapped, or None.
    """

    def __init__(self, size: int, q: Any, dim: Any) -> None:
        self.size = size
        one = self.one(q, dim)
        self.rank = one.dim()
        self.batch = int(one.shape[0]) if self.rank == _ROWS else 1

    def one(self, x: Any, dim: Any) -> Any:
        """The first of the mapped tensors."""
        return x.select(dim, 0) if isinstance(dim, int) else x

    def fold(self, x: Any, dim: Any, axes: int = _ROWS) -> Any:
        """All of them in one batch, with ``axes`` axes."""
        mapped = isinstance(dim, int)
        x = x.movedim(dim, 0) if mapped else x[None]
        x = x.reshape(x.shape[0], *(1,) * (axes + 1 - x.dim()), *x.shape[1:])
        return x.expand(self.size, self.batch, *x.shape[2:]).reshape(self.size * self.batch, *x.shape[2:])

    def fold_scores(self, x: Any, dim: Any) -> Any:
        """A mask or a bias, which stays broadcast over the batch where it was."""
        lead = isinstance(dim, int) or x.shape[:-3].numel() > 1
        return self.fold(x, dim) if lead else x

    def fold_slopes(self, x: Any, dim: Any) -> Any:
        """Slopes of ALiBi, for each head or for each head of each batch."""
        return self.fold(x, dim, 2) if isinstance(dim, int) or x.dim() == 2 else x

    def fold_table(self, x: Any, dim: Any) -> Any:
        """Cosines or sines of positions, for all or for each batch."""
        return self.fold(x, dim, 3) if isinstance(dim, int) or x.dim() == 3 else x

    def unfold(self, x: Any) -> Any:
        """A result with the mapped axis first."""
        return x.reshape(self.size, *(self.batch, *x.shape[1:])[_ROWS - self.rank :])


def one_by_one(call: Callable[..., Any], size: int, dims: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """A call for each element of the mapped axis; the results are stacked."""
    results = [
        call(*(x.select(d, i) if isinstance(d, int) else x for x, d in zip(arguments, dims, strict=True)))
        for i in range(size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)
