"""A linear layer behind a normalisation, of torch tensors, beside PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")
F = torch.nn.functional


def twice(dtype: Any, shape: tuple[int, ...], features: int) -> tuple[list[Any], list[Any]]:
    """The operands as leaves, and the same in float64; x with gaps, and without bias_norm."""
    source = torch.Generator().manual_seed(3)
    wide = torch.randn(*shape[:-1], shape[-1] + 3, generator=source, dtype=torch.float64)[..., :-3]
    vectors = [torch.randn(n, generator=source, dtype=torch.float64) for n in (shape[-1], features)]
    weight = torch.randn(shape[-1], features, generator=source, dtype=torch.float64).T
    ours = [wide.to(dtype), vectors[0].to(dtype), None, weight.to(dtype), vectors[1].to(dtype)]
    theirs = [None if x is None else x.double().requires_grad_() for x in ours]
    return [None if x is None else x.detach().requires_grad_() for x in ours], theirs


def torch_s(x: Any, weight_norm: Any, bias_norm: Any, weight: Any, bias: Any) -> Any:
    return F.linear(F.layer_norm(x, x.shape[-1:], weight_norm, bias_norm), weight, bias)


@pytest.mark.parametrize("shape", [(2, 3, 5, 40), (7, 33), (1, 1), (0, 8)])
def test_as_pytorch(shape: tuple[int, ...]) -> None:
    ours, theirs = twice(torch.float32, shape, 19)
    y, right = aule.layer_norm_linear(*ours), torch_s(*theirs)
    y.backward(torch.ones_like(y))
    right.backward(torch.ones_like(right))
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-5)
    for x, exact in zip(ours, theirs, strict=True):
        if x is not None:
            torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2e-5, atol=2e-5)
