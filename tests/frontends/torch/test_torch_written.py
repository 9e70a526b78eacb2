"""Calls that write in place write to the given tensor on every path, and PyTorch knows that it has changed.

Autograd uses a tensor's version to find out whether a saved tensor has changed. A kernel that writes without counting
the version up would make gradients silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_torch_varlen_cuda import in_place_of_cuda

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="these run on the CPU engine")

from aule.frontends.torch import route as torch_routes  # noqa: E402

ANGLES = torch.linspace(0, 3, 20).reshape(5, 4)
TABLE = (ANGLES.cos(), ANGLES.sin())
OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)


def made(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def rope(x: Any, backend: str | None) -> Any:
    return aule.rope(x, *TABLE, inplace=True, backend=backend)


def forward(out: Any, backend: str | None) -> Any:
    q = made(1, 2, 8, 16)
    return aule.flash_attention(q, q, q, out=out, backend=backend)


def packed(out: Any, backend: str | None) -> Any:
    q = made(8, 2, 16)
    return aule.flash_attention_varlen(q, q, q, OFFSETS, OFFSETS, 5, 5, out=out, backend=backend)


def decode(out: Any, backend: str | None) -> Any:
    return aule.decode_attention(made(2, 4, 1, 16), made(2, 4, 7, 16), made(2, 4, 7, 16), out=out, backend=backend)


CALLS: dict[str, tuple[Callable[[Any, str | None], Any], tuple[int, ...]]] = {
    "rope": (rope, (2, 3, 5, 10)),
    "flash_attention": (forward, (1, 2, 8, 16)),
    "flash_attention_varlen": (packed, (8, 2, 16)),
    "decode_attention": (decode, (2, 4, 1, 16)),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors in the place of CUDA's, and the interpreter as the device."""
    in_place_of_cuda(monkeypatch)


def counted(name: str, backend: str | None) -> None:
    call, shape = CALLS[name]
    for _ in range(2):  # a signature that is new, and one that is known
        weight, target = made(*shape).requires_grad_(), made(*shape)
        kept = (weight * target).sum()
        assert call(target, backend) is target
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
@pytest.mark.parametrize("name", CALLS)
def test_a_write_is_counted(name: str, backend: str) -> None:
    counted(name, backend)


@pytest.mark.parametrize("name", CALLS)
def test_a_write_is_counted_on_cuda(name: str, cuda: None) -> None:
    counted(name, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "numpy"])
def test_rope_in_place_is_the_tensor_itself(backend: str, dtype: Any) -> None:
    """In any memory, and with a gradient."""
    for leaf in (made(2, 3, 5, 10), made(2, 5, 3, 10).transpose(1, 2)):
        leaf = leaf.to(dtype).requires_grad_()
        x, grad = leaf * 1, made(2, 3, 5, 10).to(dtype)
        want = aule.rope(leaf, *TABLE, backend=backend)
        found = rope(x, backend)
        assert found is x and torch.equal(found, want)
        assert torch.equal(torch.autograd.grad(found, leaf, grad)[0], torch.autograd.grad(want, leaf, grad)[0])
        with torch.inference_mode():
            assert rope(leaf.detach().clone(), backend).is_inference()


def test_rope_in_place_by_way_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back goes where it was wanted."""
    x = made(2, 3, 5, 10)
    want = aule.rope(x, *TABLE, backend="cpu")
    monkeypatch.setattr(torch_routes, "route", lambda x, backend: torch_routes.STAGED)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: x.clone())  # as of another device
    assert rope(x, "cpu") is x and torch.equal(x, want)


def test_rope_in_place_where_the_environment_sends_cuda_tensors_to_the_host(
    cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = made(2, 3, 5, 10)
    want = aule.rope(x, *TABLE, backend="cpu")
    monkeypatch.setenv("AULE_BACKEND", "cpu")
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: x.clone())
    assert rope(x, None) is x and torch.equal(x, want)


def test_the_gradient_of_rope_in_place_is_fresh() -> None:
    """Also where what comes is negated when it is read, so that something else is computed on."""
    leaf, grad = made(2, 3, 5, 10).requires_grad_(), made(2, 3, 5, 10)
    (found,) = torch.autograd.grad(rope(leaf * 1, "cpu"), leaf, torch._neg_view(grad))
    assert torch.equal(grad, made(2, 3, 5, 10))
    torch.testing.assert_close(found, -torch.autograd.grad(aule.rope(leaf, *TABLE), leaf, grad)[0])


def test_what_autograd_cannot_go_back_from_is_refused_before_it_is_written() -> None:
    leaf = made(2, 3, 5, 10).requires_grad_()
    cases = {
        "a leaf": leaf,
        "a view of a leaf": leaf[:1],
        "one of several views": (leaf * 1).chunk(2)[0],
    }
    for got, x in cases.items():
        before = x.detach().clone()
        with pytest.raises(aule.InvalidArgumentError, match=rf"\[rope\] expected x .*, got {got}.*; clone it first"):
            rope(x, "cpu")
        assert torch.equal(x, before)
    with torch.no_grad():
        assert rope(leaf, "cpu") is leaf
    part = (leaf * 1)[:1]
    assert rope(part, "cpu") is part
    part.sum().backward()
