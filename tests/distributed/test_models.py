"""Models and caches over ranks: context_parallel, DTensors, transformers, diffusers, and decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import imports_attention
import torch
import torch.distributed as dist
from cases import difference, mesh
from torch import Tensor
from torch.nn import functional
from world import World, in_turn

import aule
import aule.distributed as distributed
from aule.errors import InvalidArgumentError

TOLERANCE = 1e-5


def scaled_dot_product(balance: str, on_mesh: bool) -> list[float]:
    """PyTorch's attention in the context, with and without a mask."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 96, 16) for _ in range(3))
    keep = torch.rand(96, 96) > 0.2
    group = mesh() if on_mesh else None
    q0, k0, v0, keep0 = (distributed.shard(x, group=group, balance=balance) for x in (q, k, v, keep))
    found = []
    for options, local in (({"is_causal": True}, {}), ({"attn_mask": keep}, {"attn_mask": keep0})):
        wanted = functional.scaled_dot_product_attention(q, k, v, **options)
        with distributed.context_parallel(group, balance=balance):
            out = functional.scaled_dot_product_attention(q0, k0, v0, **{**options, **local})
        found.append(difference(distributed.unshard(out, group=group, balance=balance), wanted))
    assert functional.scaled_dot_product_attention.__module__ != "aule.distributed.context"
    return found


def test_scaled_dot_product_attention_in_the_context(worlds: Callable[[int], World]) -> None:
    for arguments in (("zigzag", False), ("striped", True)):
        for found in worlds(4).run(scaled_dot_product, *arguments):
            assert max(found) < TOLERANCE


def attention_in_modules() -> list[float]:
    """Modules that reach PyTorch's function by another name, or would take a fused kernel instead of it."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 32, batch_first=True).eval()
    x = torch.randn(2, 32, 32)
    heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
    with torch.no_grad():
        wanted = imports_attention.attention(heads), layer(x)
        shards = distributed.shard(heads), distributed.shard(x, dim=1)
        with distributed.context_parallel():
            found = imports_attention.attention(shards[0]), layer(shards[1])
            with pytest.raises(InvalidArgumentError, match=r"expected to be called outside of .*context_parallel"):
                aule.install()
        assert torch.equal(imports_attention.attention(heads), wanted[0])
        assert torch.backends.mha.get_fastpath_enabled()
    whole = distributed.unshard(found[0]), distributed.unshard(found[1], dim=1)
    return [difference(a, b) for a, b in zip(whole, wanted, strict=True)]


def test_modules_in_the_context(worlds: Callable[[int], World]) -> None:
    for found in worlds(2).run(attention_in_modules):
        assert max(found) < TOLERANCE


def compiled() -> list[float]:
    """Functions of aule.distributed, and a model in the context, under torch.compile."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 32, 16) for _ in range(3))
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    shards = [distributed.shard(x) for x in (q, k, v)]

    @torch.compile(backend="eager")
    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return distributed.ring_attention(2 * q, k, v, scale=0.125) + 1

    @torch.compile(backend="eager")
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True) + 1

    alone = model(*shards)  # compiled for this rank's rows alone
    with distributed.context_parallel():
        found = [ring(*shards), model(*shards)]
    assert torch.equal(model(*shards), alone)
    return [difference(distributed.unshard(x) - 1, wanted) for x in found]


def test_compiled_functions(worlds: Callable[[int], World]) -> None:
    for found in worlds(2).run(compiled):
        assert max(found) < TOLERANCE


def dtensors() -> list[float]:
    """DTensors divided along their rows, on a mesh of two axes."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 96, 16, requires_grad=True) for _ in range(3))
    sinks = torch.randn(4, requires_grad=True)
    with in_turn():
        wanted = aule.flash_attention(q, k, v, sinks=sinks)
        grads = torch.autograd.grad(wanted.square().sum(), (q, k, v, sinks))
    rows = [Shard(2), Shard(2)]
    given = [distribute_tensor(x.detach(), mesh(), rows).requires_grad_() for x in (q, k, v)]
    same = distribute_tensor(sinks.detach(), mesh(), [Replicate(), Replicate()]).requires_grad_()
    out = distributed.attention(*given, balance="contiguous", sinks=same)
    assert isinstance(out, DTensor) and list(out.placements) == rows
    out.square().sum().backward()
    found = [difference(out.full_tensor(), wanted)]
    return found + [difference(x.grad.full_tensor(), grad) for x, grad in zip((*given, same), grads, strict=True)]


def test_dtensors(worlds: Callable[[int], World]) -> None:
    for found in worlds(4).run(dtensors):
        assert max(found) < TOLERANCE


def transformers_model(window: int | None, balance: str) -> list[float]:
    """A small Mistral: logits and gradients of shards against those of the whole sequence."""
    from transformers import MistralConfig, MistralForCausalLM

    from aule.integrations import transformers as integration

    integration.register()
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=window, attn_implementation="aule",
    )  # fmt: skip
    model = MistralForCausalLM(config)
    tokens = torch.randint(64, (1, 96))
    with in_turn():
        wanted = model(tokens, use_cache=False).logits
        wanted.square().sum().backward()
    grads = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    shard = distributed.shard(tokens, dim=1, balance=balance)
    places = distributed.shard_positions(96, balance=balance)[None]
    with distributed.context_parallel(balance=balance):
        logits = model(shard, position_ids=places, use_cache=False).logits
        logits.square().sum().backward()
    found = [difference(distributed.unshard(logits.detach(), dim=1, balance=balance), wanted)]
    for x, grad in zip(model.parameters(), grads, strict=True):
        dist.all_reduce(x.grad)
        found.append(difference(x.grad, grad))
    return found


def test_transformers(worlds: Callable[[int], World]) -> None:
    pytest.importorskip("transformers")
    for arguments in ((None, "zigzag"), (20, "contiguous")):
        for found in worlds(2).run(transformers_model, *arguments):
            assert max(found) < 1e-4  # sums over 96 rows and 64 columns in another order


def diffusers_dispatch() -> float:
    """The dispatcher of diffusers with a configuration of its context parallelism."""
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    from aule.integrations import diffusers as integration

    integration.register()
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 96, 4, 16) for _ in range(3))
    ring, ulysses = mesh().shape
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh())
    local = [distributed.shard(x, group=mesh(), dim=1, balance="contiguous") for x in (q, k, v)]
    out = dispatch_attention_fn(*local, backend="aule", parallel_config=ParallelConfig(context_parallel_config=config))
    wanted = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    served = aule.dispatch_stats()
    assert "context parallelism" not in str(served), served
    return difference(distributed.unshard(out, group=mesh(), dim=1, balance="contiguous"), wanted)


def test_diffusers(worlds: Callable[[int], World]) -> None:
    pytest.importorskip("diffusers")
    assert max(worlds(4).run(diffusers_dispatch)) < TOLERANCE


def decoding(options: dict[str, Any], seq_q: int) -> float:
    """Caches of different lengths on each rank against one cache."""
    torch.manual_seed(0)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    lens = torch.tensor([[7, 3], [0, 5], [9, 9], [4, 0]], dtype=torch.int32)[:ranks]
    total = lens.sum(0)
    q = torch.randn(2, 4, seq_q, 16)
    keys, values = (torch.randn(2, 2, int(total.max()), 16) for _ in range(2))
    given = dict(options)
    if "alibi_slopes" in given:
        given["alibi_slopes"] = torch.rand(given["alibi_slopes"])
    if "sinks" in given:
        given["sinks"] = torch.randn(4)
    with in_turn():
        wanted, lse = aule.decode_attention(q, keys, values, context_lens=total.int(), return_lse=True, **given)
    own = torch.zeros(2, 2, 2, 9, 16)
    starts = lens.cumsum(0)[rank] - lens[rank]
    for b in range(2):
        n, at = int(lens[rank, b]), int(starts[b])
        own[0, b, :, :n], own[1, b, :, :n] = keys[b, :, at : at + n], values[b, :, at : at + n]
    out, merged = distributed.decode_attention(q, own[0], own[1], context_lens=lens[rank], return_lse=True, **given)
    return max(difference(out, wanted), difference(merged, lse))


def test_decoding_over_a_split_cache(worlds: Callable[[int], World]) -> None:
    cases: tuple[tuple[dict[str, Any], int], ...] = (
        ({"sinks": True, "softcap": 2.0}, 1),
        ({"alibi_slopes": (4,), "window": 6}, 3),
        ({"alibi_slopes": (2, 4), "window": 9}, 2),
    )
    for options, seq_q in cases:
        found = worlds(4).run(decoding, options, seq_q)
        assert max(found) < TOLERANCE, (options, seq_q, found)


def merging() -> tuple[Tensor, Tensor]:
    """`merge_states` of results over each rank's keys, of which rank 1 has none."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
    part = slice(0, 0) if rank == 1 else slice(rank * 2, 2 * rank + 2) if rank else slice(0, 4)
    with in_turn():
        out, lse = aule.flash_attention(q, k[:, :, part], v[:, :, part], causal=False, return_lse=True)
        wanted, wanted_lse = aule.flash_attention(q, k, v, causal=False, return_lse=True)
    found, total = distributed.merge_states(out, lse)
    return difference(found, wanted), difference(total, wanted_lse)


def test_merge_states_of_all_ranks(worlds: Callable[[int], World]) -> None:
    for found in worlds(4).run(merging):
        assert max(found) < TOLERANCE


def drawn_seeds() -> list[bytes]:
    """Results with dropout and without a seed: the first rank draws it."""
    torch.manual_seed(dist.get_rank())
    q = torch.ones(1, 1, 64, 16)
    made = [distributed.ring_attention(q, q, q, causal=False, dropout_p=0.5) for _ in range(2)]
    whole = [distributed.unshard(x) for x in made]
    assert 0.6 < float(whole[0].mean()) < 1.4
    return [x.numpy().tobytes() for x in whole]


def test_the_first_rank_draws_the_seed(worlds: Callable[[int], World]) -> None:
    first, second = worlds(2).run(drawn_seeds)
    assert first == second and first[0] != first[1]


def sharding(balance: str) -> None:
    """`unshard` undoes `shard`, along any axis, and both have gradients."""
    for group in (None, mesh()):
        x = torch.arange(48.0).reshape(2, 24).requires_grad_()
        part = distributed.shard(x, group=group, dim=1, balance=balance)
        assert torch.equal(part[0].long(), distributed.shard_positions(24, group=group, balance=balance))
        whole = distributed.unshard(part, group=group, dim=1, balance=balance)
        assert torch.equal(whole, x)
        whole.sum().backward()
        total = x.grad.clone()
        dist.all_reduce(total)
        assert torch.equal(total, torch.full_like(total, dist.get_world_size()))


@pytest.mark.parametrize("balance", ("zigzag", "contiguous", "striped"))
def test_unshard_undoes_shard(worlds: Callable[[int], World], balance: str) -> None:
    worlds(4).run(sharding, balance)
