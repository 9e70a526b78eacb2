"""Shards of a sequence: the rows of each rank, and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aule.distributed import counting
from aule.distributed.graphs import outside_graphs
from aule.distributed.group import Ring, agree, device_of, guarded, mesh_rings
from aule.distributed.positions import Numbers, check_balance, check_length, order, rows
from aule.errors import InvalidArgumentError, InvalidShapeError
from aule.frontends.torch.checks import require_plain
from aule.ops.shared.checks import checked_integer

__all__ = ["shard", "shard_positions", "unshard"]


def held_rows(ring: Ring, across: Ring, balance: str, length: int) -> Numbers:
    """Numbers in the sequence of the ``length`` rows that this rank holds."""
    if ring.ranks == 1:
        return rows(balance, across.rank, across.ranks, length)
    share = rows(balance, ring.rank, ring.ranks, length * across.ranks)
    return share[across.rank * length : (across.rank + 1) * length]


def shard(x: Tensor, *, group: Any = None, dim: int = -2, balance: str = "zigzag") -> Tensor:
    """Take this rank's rows of a tensor that every rank has.

    Parameters
    ----------
    x : Tensor
        Tokens, position ids, labels, q, k, v ...: anything with an axis of rows.
    group : ProcessGroup or DeviceMesh, optional
        The ranks; default: all. A mesh may have two axes, as for `attention`.
    dim : int
        The axis of rows; its length must be a multiple of the number of ranks, with ``"zigzag"`` of twice that.
    balance : {"zigzag", "contiguous", "striped"}
        Which rows a rank gets, as in `ring_attention`. For `ulysses_attention` pass its ``balance``.

    Returns
    -------
    Tensor
        The rows in a new tensor. Gradients flow back to ``x``: this rank's rows have one, the others are zero.
    """
    op = "shard"
    ring, across = mesh_rings(op, group)
    check_balance(op, balance)
    require_plain(x, "x", op, "x")
    _check_dim(op, x, dim)
    ranks, length = ring.ranks * across.ranks, x.shape[dim]
    if length % ranks:
        raise InvalidShapeError(
            f"[{op}] expected a multiple of {ranks} rows, one share for each rank, got {length}; pad the sequence"
        )
    check_length(op, "x", length // ring.ranks, ring.ranks, balance)
    return x.index_select(dim, torch.from_numpy(held_rows(ring, across, balance, length // ranks)).to(x.device))


def _check_dim(op: str, x: Tensor, dim: int) -> None:
    if not -x.ndim <= checked_integer(op, "dim", dim, "pass the axis of rows") < x.ndim:
        raise InvalidArgumentError(
            f"[{op}] expected dim as an axis of x {list(x.shape)}, got {dim}; pass the axis of rows"
        )


def shard_positions(length: int, *, group: Any = None, balance: str = "zigzag", device: Any = None) -> Tensor:
    """Return the positions in the sequence of this rank's rows, for ``position_ids`` and rotary embeddings.

    Parameters
    ----------
    length : int
        Rows of all ranks.
    group, balance
        As for `shard`.
    device : torch.device, optional
        Where the result is made; default: the CPU.

    Returns
    -------
    Tensor
        int64 ``[rows]``.
    """
    rows = checked_integer("shard_positions", "length", length, "pass the number of rows of all ranks")
    if rows < 0:
        raise InvalidArgumentError(
            f"[shard_positions] expected a length of at least 0, got {rows}; pass the number of rows of all ranks"
        )
    return shard(torch.arange(rows, device=device), group=group, dim=0, balance=balance)


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, rings: tuple[Ring, Ring], dim: int) -> Tensor:
        ctx.rings, ctx.dim, ctx.length = rings, dim, x.shape[dim]
        for ring in reversed(rings):
            if ring.ranks > 1:
                own = x.contiguous()
                parts = [torch.empty_like(own) for _ in range(ring.ranks)]
                counting.sent(own.numel() * own.element_size() * (ring.ranks - 1))
                with guarded(ring):
                    dist.all_gather(parts, own, group=ring.group)
                x = torch.cat(parts, dim)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Every rank has the result, and so a part of its gradient: the sum is this rank's rows of all of them."""
        for ring in ctx.rings:
            if ring.ranks > 1:
                total = grad.contiguous().clone()
                with guarded(ring):
                    dist.all_reduce(total, group=ring.group)
                grad = total.tensor_split(ring.ranks, ctx.dim)[ring.rank]
        return grad, None, None


@outside_graphs
def unshard(x: Tensor, *, group: Any = None, dim: int = -2, balance: str = "zigzag") -> Tensor:
    """Gather the rows of all ranks, in the order of the sequence; undoes `shard`.

    Parameters
    ----------
    x : Tensor
        This rank's rows; all ranks have as many.
    group, dim, balance
        As for `shard`.

    Returns
    -------
    Tensor
        The same on every rank. Gradients of all ranks are summed, so a loss that every rank computes on all rows must
        be divided by their number.
    """
    op = "unshard"
    rings = mesh_rings(op, group)
    ring, across = rings

    def check() -> dict[str, object]:
        check_balance(op, balance)
        require_plain(x, "x", op, "x")
        _check_dim(op, x, dim)
        return {"call": op, "shape": list(x.shape), "dtype": x.dtype, "dim": dim, "balance": balance}

    agree(rings[::-1], device_of(x), check)
    at = dim % x.ndim
    found: Tensor = _Gather.apply(x, rings, at)
    if balance == "contiguous":
        return found
    whole = order(balance, across.ranks if ring.ranks == 1 else ring.ranks, x.shape[at] * across.ranks)
    if ring.ranks == 1:
        whole = order(balance, across.ranks, x.shape[at])
    return found.index_select(at, torch.argsort(torch.from_numpy(whole)).to(x.device))
