"""Calls of distributed attention, made on every rank by `world.World`, and the same call in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import aule
import aule.distributed as distributed

BATCH, HEADS, DIM, VALUE_DIM = 2, 4, 16, 24


@dataclass(frozen=True)
class Case:
    """A call. Options that are True in ``arrays`` are made by `inputs`.

    ``way`` is "ring", "ulysses" or "mesh"; ``lengths`` are the rows and keys of all ranks.
    """

    way: str = "ring"
    balance: str = "zigzag"
    lengths: tuple[int, int] = (96, 96)
    heads_kv: int = HEADS
    arrays: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    cu_seqlens: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    heads: int = HEADS
    batch: int = BATCH


@dataclass
class Inputs:
    """Tensors of a call: of the whole sequence, the same on every rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    arrays: dict[str, Any] = field(default_factory=dict)

    def differentiable(self) -> dict[str, Tensor]:
        """Tensors with gradients, by name."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        return found | {name: x for name, x in self.arrays.items() if name in ("bias", "sinks")}


def inputs(case: Case, seed: int = 0) -> Inputs:
    """The tensors of a case."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make).to(case.dtype)

    (n, m), heads = case.lengths, case.heads
    if case.cu_seqlens:
        q, dout = normal(n, heads, DIM), normal(n, heads, VALUE_DIM)
        k, v = normal(n, case.heads_kv, DIM), normal(n, case.heads_kv, VALUE_DIM)
    else:
        q, dout = normal(case.batch, heads, n, DIM), normal(case.batch, heads, n, VALUE_DIM)
        k, v = normal(case.batch, case.heads_kv, m, DIM), normal(case.batch, case.heads_kv, m, VALUE_DIM)
    arrays: dict[str, Any] = {}
    if "bias" in case.arrays:
        arrays["bias"] = normal(heads, n, m).requires_grad_()
    if "row bias" in case.arrays:
        arrays["bias"] = normal(case.batch, 1, n, m).requires_grad_()
    if "mask" in case.arrays:
        arrays["mask"] = torch.rand((case.batch, 1, n, m), generator=make) > 0.2
    if "alibi" in case.arrays:
        arrays["alibi_slopes"] = torch.rand(heads, generator=make)
    if "sinks" in case.arrays:
        arrays["sinks"] = torch.randn(heads, generator=make).requires_grad_()
    if "rope" in case.arrays:
        arrays["rope"] = aule.precompute_rope_frequencies(max(n, m), DIM, device="cpu", dtype=torch.float32)
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout, arrays)


def alone(case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, log-sum-exp and gradients in this process."""
    given = inputs(case)
    options = dict(case.options) | given.arrays | {"return_lse": True}
    if case.cu_seqlens:
        offsets = torch.tensor(case.cu_seqlens, dtype=torch.int32)
        out, lse = aule.flash_attention_varlen(given.q, given.k, given.v, offsets, offsets, **options)
    else:
        out, lse = aule.flash_attention(given.q, given.k, given.v, **options)
    wanted = given.differentiable()
    grads = torch.autograd.grad(out, list(wanted.values()), given.dout)
    return out.detach(), lse, dict(zip(wanted, grads, strict=True))


@cache
def mesh() -> DeviceMesh:
    """Two rings, or one on two ranks; as many Ulysses groups as fit."""
    ranks = dist.get_world_size()
    rings = 2 if ranks % 2 == 0 else 1
    return init_device_mesh("cpu", (rings, ranks // rings), mesh_dim_names=("ring", "ulysses"))


def together(case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor], bytes]:
    """The same on all ranks, gathered; and this rank's own bits."""
    given = inputs(case)
    group = mesh() if case.way == "mesh" else None
    rows = 0 if case.cu_seqlens else 2

    def shard(x: Tensor, dim: int) -> Tensor:
        return distributed.shard(x, group=group, dim=dim, balance=case.balance)

    def unshard(x: Tensor, dim: int) -> Tensor:
        return distributed.unshard(x, group=group, dim=dim, balance=case.balance)

    options = dict(case.options) | given.arrays | {"return_lse": True, "balance": case.balance}
    for name in ("mask", "bias"):
        if name in options:
            options[name] = shard(options[name], -2)
    if case.cu_seqlens:
        options["cu_seqlens"] = case.cu_seqlens
    function, where = {
        "ring": (distributed.ring_attention, {}),
        "ulysses": (distributed.ulysses_attention, {}),
        "mesh": (distributed.attention, {"mesh": group}),
    }[case.way]
    q, k, v = (shard(x, rows) for x in (given.q, given.k, given.v))
    out, lse = function(q, k, v, **where, **options)
    wanted = given.differentiable()
    grads = torch.autograd.grad(out, list(wanted.values()), shard(given.dout, rows))
    bits = b"".join(x.detach().contiguous().view(torch.uint8).numpy().tobytes() for x in (out, lse, *grads))
    for x in grads:  # each rank has those of its own rows, and zero elsewhere
        dist.all_reduce(x)
    return (
        unshard(out.detach(), rows),
        unshard(lse, 1 if case.cu_seqlens else 2),
        dict(zip(wanted, grads, strict=True)),
        bits,
    )


def compare(case: Case) -> dict[str, float]:
    """On rank 0: the largest differences between all ranks and this process."""
    expected = alone(case) if dist.get_rank() == 0 else None
    out, lse, grads, bits = together(case)
    again = together(case)[3]
    found = {"bits": float(bits != again)}
    if expected is not None:
        wanted, wanted_lse, wanted_grads = expected
        empty = torch.isinf(wanted_lse)
        assert torch.equal(empty, torch.isinf(lse))
        found |= {"out": difference(out, wanted), "lse": difference(lse[~empty], wanted_lse[~empty])}
        found |= {name: difference(grads[name], x) for name, x in wanted_grads.items()}
    return found


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest number if that is above 1; infinite if one has a NaN."""
    if not a.numel():
        return 0.0
    found = float((a - b).abs().max() / max(float(b.abs().max()), 1.0))
    return found if found == found else float("inf")
