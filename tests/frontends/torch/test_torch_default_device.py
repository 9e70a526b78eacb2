"""CPU tensors with another default device in PyTorch (`torch.set_default_device`, `with torch.device`): results are on
the device of q."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import devices
import numpy as np
import pytest

import aule

torch = pytest.importorskip("torch")


def rows(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


Q, K, V = (rows(1, 4, 20, 16, seed=i) for i in range(3))
PACKED = tuple(rows(20, 4, 16, seed=i) for i in range(3))
OFFSETS = torch.tensor([0, 7, 20], dtype=torch.int32)
POOL = rows(2, 8, 4, 2, 16, seed=4)
TABLE, LENS = torch.tensor([[7, 3, 1], [5, 0, 0]], dtype=torch.int32), torch.tensor([9, 3], dtype=torch.int32)
BIAS = rows(20, 20, seed=5)
TOKEN = rows(2, 4, 16, seed=6)


def gradients(call: Callable[..., Any], *given: Any) -> Any:
    leaves = [x.clone().requires_grad_() for x in given]
    return torch.autograd.grad(call(*leaves), leaves, leaves[0].detach())


def cached() -> Any:
    cache = aule.KVCache(8, heads_kv=2, head_dim=16, page_size=4, device="cpu")
    seq = cache.allocate()
    cache.append(seq, POOL[0, 0], POOL[1, 0])
    return cache.attend(TOKEN[:1], [seq])


CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: aule.flash_attention(Q, K, V, return_lse=True),
    "numpy": lambda: aule.flash_attention(Q, K, V, bias=BIAS, return_lse=True, backend="numpy"),
    "dropout": lambda: aule.flash_attention(Q, K, V, dropout_p=0.3, seed=1),
    "gradients": lambda: gradients(aule.flash_attention, Q, K, V),
    "of a bias": lambda: gradients(lambda q, bias: aule.flash_attention(q, K, V, bias=bias), Q, BIAS),
    "pytorch's": lambda: aule.scaled_dot_product_attention(Q, K, V, is_causal=True),
    "packed": lambda: aule.flash_attention_varlen(*PACKED, OFFSETS, OFFSETS, return_lse=True),
    "packed, gradients": lambda: gradients(
        lambda q: aule.flash_attention_varlen(q, *PACKED[1:], OFFSETS, OFFSETS), PACKED[0]
    ),
    "decoding": lambda: aule.decode_attention(TOKEN, K[:, :2].expand(2, 2, 20, 16), V[:, :2].expand(2, 2, 20, 16)),
    "pages": lambda: aule.flash_attention_paged(TOKEN, POOL[0], POOL[1], TABLE, LENS, return_lse=True),
    "a cache": cached,
    "a norm": lambda: aule.rms_norm(Q),
    "of a norm": lambda: gradients(aule.rms_norm, Q),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_results_lie_where_q_does(name: str) -> None:
    """Twice, for the second call takes another way: one that has no more questions to ask."""
    devices.need("cpu")
    call = CALLS[name]
    wanted = call()
    for _ in range(3):
        with torch.device("meta"):
            found = call()
        both = ((found, wanted),) if isinstance(found, torch.Tensor) else tuple(zip(found, wanted, strict=True))
        for x, y in both:
            assert x.is_cpu and torch.equal(x, y)


def test_what_pytorch_is_asked_once() -> None:
    from aule.frontends.torch.repeated import reliable

    wanted = reliable()
    reliable.cache_clear()
    with torch.device("meta"):
        assert reliable() == wanted
