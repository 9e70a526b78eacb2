"""``torch.vmap`` of the operators: the mapped axis joins the batch.

Tensors that are not mapped are expanded, which costs memory only where they have a batch of their own. Cases without a
batch axis, or that would be summed over it, are computed call by call: mapped sinks, dropout, and the gradients of
masks, biases and sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Dim = int | None
"""The mapped axis of a tensor; None if it has none, and for all other arguments."""


class Info(Protocol):
    """PyTorch's description of a mapped call."""

    batch_size: int


_ROWS = 4
"""Axes of q, k, v, of the result, and of masks and biases."""


class Mapped:
    """How the tensors of a mapped call become those of one call with a larger batch.

    Parameters
    ----------
    size : int
        Length of the mapped axis.
    q, dim
        The queries, which say how many axes the caller gave, and where they are mapped, or None.
    """

    def __init__(self, size: int, q: Tensor, dim: Dim) -> None:
        self.size = size
        one = self.one(q, dim)
        self.rank = one.dim()
        self.batch = int(one.shape[0]) if self.rank == _ROWS else 1

    def one(self, x: Tensor, dim: Dim) -> Tensor:
        """The first of the mapped tensors."""
        return x.select(dim, 0) if isinstance(dim, int) else x

    def fold(self, x: Tensor, dim: Dim, axes: int = _ROWS) -> Tensor:
        """The mapped tensors in one batch, with ``axes`` axes."""
        mapped = isinstance(dim, int)
        x = x.movedim(dim, 0) if mapped else x[None]
        x = x.reshape(x.shape[0], *(1,) * (axes + 1 - x.dim()), *x.shape[1:])
        return x.expand(self.size, self.batch, *x.shape[2:]).reshape(self.size * self.batch, *x.shape[2:])

    def fold_scores(self, x: Tensor, dim: Dim) -> Tensor:
        """`fold` for a mask or a bias; one that is broadcast over the batch stays so."""
        lead = isinstance(dim, int) or x.shape[:-3].numel() > 1
        return self.fold(x, dim) if lead else x

    def fold_slopes(self, x: Tensor, dim: Dim) -> Tensor:
        """`fold` for ALiBi's slopes, per head or per batch and head."""
        return self.fold(x, dim, 2) if isinstance(dim, int) or x.dim() == 2 else x

    def fold_table(self, x: Tensor, dim: Dim) -> Tensor:
        """`fold` for a table of cosines or sines, for all batches or per batch."""
        return self.fold(x, dim, 3) if isinstance(dim, int) or x.dim() == 3 else x

    def unfold(self, x: Tensor) -> Tensor:
        """A result with the mapped axis first."""
        return x.reshape(self.size, *(self.batch, *x.shape[1:])[_ROWS - self.rank :])


def one_by_one(
    call: Callable[..., Sequence[Tensor | None]], size: int, dims: Sequence[Dim], arguments: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Call once per element of the mapped axis, and stack the results."""
    results = [
        call(*(x.select(d, i) if isinstance(d, int) else x for x, d in zip(arguments, dims, strict=True)))
        for i in range(size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def row_op_one_by_one(call: Callable[..., Any], info: Info, dims: Sequence[Dim], arguments: Sequence[Any]) -> Any:
    """`one_by_one` for a function that returns a tensor or a tuple, in the form that PyTorch's vmap rules return."""

    def results(*given: Any) -> tuple[Any, ...]:
        found = call(*given)
        return found if isinstance(found, tuple) else (found,)

    found, out_dims = one_by_one(results, info.batch_size, dims, arguments)
    return (found, out_dims) if len(found) > 1 else (found[0], out_dims[0])
