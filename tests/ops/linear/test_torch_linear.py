"""A linear layer after a normalisation on torch tensors, against PyTorch's."""

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


@pytest.mark.parametrize("shape", [(2, 3, 5, 40), (7, 33), (33,), (1, 1), (0, 8)])
def test_as_pytorch(shape: tuple[int, ...]) -> None:
    ours, theirs = twice(torch.float32, shape, 19)
    y, right = aule.layer_norm_linear(*ours), torch_s(*theirs)
    y.backward(torch.ones_like(y))
    right.backward(torch.ones_like(right))
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-5)
    for x, exact in zip(ours, theirs, strict=True):
        if x is not None:
            torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool) -> None:
    """Activations of autocast's type and parameters of float32, as training has them."""
    ours, _ = twice(torch.float32, (6, 33), 19)
    x = ours[0].detach().bfloat16()
    call = torch.compile(aule.layer_norm_linear, backend="aot_eager", fullgraph=True) if compiled else (
        aule.layer_norm_linear
    )  # fmt: skip
    for _ in range(2):
        for parameter in ours[1:]:
            if parameter is not None:
                parameter.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y = call(x, *ours[1:])
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        right = aule.layer_norm_linear(x, ours[1], None, ours[3].bfloat16(), ours[4])
        assert torch.equal(y, right)
        assert ours[3].grad.dtype == torch.float32
        torch.testing.assert_close(ours[3].grad, torch.autograd.grad(right.sum(), ours[3])[0], rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        offset = ours[0].detach() + 1e4  # rounded to bfloat16 nothing would be left of it
        kept = call(offset, *ours[1:])
    torch.testing.assert_close(
        kept, torch_s(*(None if y is None else y.detach() for y in (offset, *ours[1:]))), rtol=1e-2, atol=1e-2
    )
