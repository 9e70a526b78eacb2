"""Tensors saved for the backward pass may be moved, or dropped and recomputed: activation checkpointing, offloading,
custom hooks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import devices
import numpy as np
import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("torch.utils.checkpoint")


def rows(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


BIAS, SINKS, TABLES = rows(20, 20, seed=5), rows(4, seed=6), aule.precompute_rope_frequencies(20, 16, device="cpu")
PACKED = torch.tensor([0, 7, 20], dtype=torch.int32)
CALLS: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "plain": ((1, 4, 20, 16), aule.flash_attention),
    "options": (
        (1, 4, 20, 16),
        lambda q, k, v: aule.flash_attention(q, k, v, bias=BIAS, sinks=SINKS, rope=TABLES, dropout_p=0.3),
    ),
    "sdpa": ((1, 4, 20, 16), lambda q, k, v: aule.scaled_dot_product_attention(q, k, v, dropout_p=0.3)),
    "packed": ((20, 4, 16), lambda q, k, v: aule.flash_attention_varlen(q, k, v, PACKED, PACKED, dropout_p=0.3)),
    "packed, sinks": ((20, 4, 16), lambda q, k, v: aule.flash_attention_varlen(q, k, v, PACKED, PACKED, sinks=SINKS)),
}


@pytest.fixture(autouse=True)
def engine() -> None:
    devices.need("cpu")


def inputs(shape: tuple[int, ...]) -> list[Any]:
    return [rows(*shape, seed=i).requires_grad_() for i in range(3)]


def gradients(call: Callable[..., Any], given: list[Any]) -> list[Any]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(call(*given).square().sum(), given))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_checkpointed(name: str, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    shape, call = CALLS[name]
    torch.manual_seed(1)
    given = inputs(shape)
    checkpoint(call, *given, use_reentrant=reentrant).square().sum().backward()
    for found, wanted in zip(given, gradients(call, inputs(shape)), strict=True):
        assert torch.equal(found.grad, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_what_was_kept_elsewhere_is_what_counts(name: str) -> None:
    """Packed away as copies, in another order of axes, and each asked for once; the originals are gone by then."""
    shape, call = CALLS[name]
    wanted = gradients(call, inputs(shape))
    given, asked = inputs(shape), []

    def pack(x: Any) -> Any:
        return x.detach().transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 2 else x.detach().clone()

    def unpack(x: Any) -> Any:
        asked.append(id(x))
        return x

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = call(*given)
    grad = 2 * out.detach()
    for tensor in given:
        tensor.data.zero_()
    for found, expected in zip(torch.autograd.grad(out, given, grad), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert asked and len(asked) == len(set(asked))


@pytest.mark.parametrize("name", CALLS)
def test_a_result_that_nobody_differentiates_is_freed(name: str) -> None:
    """At once, without the garbage collector: no function of the graph holds its own result."""
    shape, call = CALLS[name]
    out = call(*inputs(shape))
    gone = weakref.ref(out)
    gc.collect()
    gc.disable()
    try:
        del out
        assert gone() is None
    finally:
        gc.enable()
