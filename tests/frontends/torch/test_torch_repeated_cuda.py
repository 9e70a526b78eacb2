"""Repeated calls on CUDA tensors: the quick path gives the same results as the full one, and is left when needed."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device for PyTorch"),
]

from aule.frontends.torch import repeated  # noqa: E402
from aule.frontends.torch.repeated import PlainOnCuda  # noqa: E402


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call that found a launch to repeat, whether it was repeated."""
    taken: list[bool] = []
    call = PlainOnCuda.__call__

    def counted(self: PlainOnCuda, tensors: Any) -> Any:
        out = call(self, tensors)
        taken.append(out is not None)
        return out

    monkeypatch.setattr(PlainOnCuda, "__call__", counted)
    repeated.forget()
    return taken


def tensors(*shape: int, dtype: Any = torch.float16) -> list[Any]:
    return [torch.randn(shape, dtype=dtype, device="cuda") for _ in range(3)]


def check(q: Any, k: Any, v: Any, **options: Any) -> None:
    out = aule.flash_attention(q, k, v, **options)
    causal = options.get("causal", True)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)
    torch.testing.assert_close(out.float(), expected, atol=4e-3, rtol=4e-3)


def test_repeated_calls_are_quick_and_right(quick: list[bool]) -> None:
    for _ in range(4):
        check(*tensors(1, 2, 64, 64))
        check(*tensors(1, 2, 64, 64), causal=False)
    assert quick == [True, True] * 3  # the first call plans and remembers


def test_other_shapes_in_between(quick: list[bool]) -> None:
    for seq in (64, 64, 64, 96, 96, 96, 64, 64):
        check(*tensors(1, 2, seq, 64))
    # The last call with these options is tried first, then the one with these shapes.
    assert quick == [True, True, False, True, True, False, True, True]


def test_other_contexts(quick: list[bool]) -> None:
    q, k, v = tensors(1, 2, 64, 64)
    wanted = torch.stack([aule.flash_attention(q, k, v) for _ in range(3)])[0]
    with ThreadPoolExecutor(1) as pool:  # where no context is current yet
        assert torch.equal(pool.submit(aule.flash_attention, q, k, v).result(), wanted)
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    own, other = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(own)) == 0
    assert driver.cuCtxCreate_v2(ctypes.byref(other), ctypes.c_uint(0), ctypes.c_int(0)) == 0
    try:
        found = aule.flash_attention(q, k, v)
    finally:
        assert driver.cuCtxDestroy_v2(other) == 0 and driver.cuCtxSetCurrent(own) == 0
    assert torch.equal(found, wanted) and quick == [True, True, True, True]


def test_streams(quick: list[bool]) -> None:
    q, k, v = tensors(1, 2, 64, 64)
    for _ in range(3):
        check(q, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        later = torch.randn_like(q)
        out = aule.flash_attention(later, k, v)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(out, aule.flash_attention(later.clone(), k, v))
    assert quick == [True, True, True, True]


def test_graphs(quick: list[bool]) -> None:
    q, k, v = tensors(1, 2, 64, 64)
    for _ in range(3):
        check(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = aule.flash_attention(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, aule.flash_attention(q, k, v))
    assert quick == [True, True, True, True]


def test_gradients_autocast_and_inference_take_their_own_way(quick: list[bool]) -> None:
    q, k, v = tensors(1, 2, 64, 64, dtype=torch.float32)
    for _ in range(3):
        check(q, k, v)
    with torch.autocast("cuda", torch.bfloat16):
        assert aule.flash_attention(q, k, v).dtype == torch.bfloat16
    leaf = q.clone().requires_grad_()
    aule.flash_attention(leaf, k, v).sum().backward()
    assert leaf.grad is not None and quick[:2] == [True, True] and not any(quick[2:])
    with torch.inference_mode():
        assert aule.flash_attention(q.clone(), k, v).is_inference()


def test_memory_that_is_not_aligned(quick: list[bool]) -> None:
    q, k, v = tensors(1, 2, 64, 64)
    for _ in range(3):
        check(q, k, v)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape).copy_(q)
    check(shifted, k, v)
    assert quick == [True, True, False]


def test_leaves_that_were_used_without_gradients_have_them_later(quick: list[bool]) -> None:
    given = [x.requires_grad_() for x in tensors(1, 2, 64, 64)]
    with torch.no_grad():
        for _ in range(4):
            assert aule.flash_attention(*given).grad_fn is None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            aule.flash_attention(*given)
    assert quick == [True] * 4
    out = aule.flash_attention(*given)
    assert out.grad_fn is not None
    for got in torch.autograd.grad(out.sum(), given):
        assert got.isfinite().all()


def test_the_environment_and_the_dtype_of_autocast_are_seen(quick: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(1, 2, 64, 64, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            assert aule.flash_attention(*given).dtype is dtype
    for _ in range(2):
        check(*given)
    quick.clear()
    monkeypatch.setenv("AULE_BACKEND", "numpy")
    check(*given)
    assert quick == [False]
