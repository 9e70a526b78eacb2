"""Cross entropy of torch tensors, against PyTorch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

from aule.backends import registry  # noqa: E402
from aule.engine.signatures import signatures  # noqa: E402
from aule.frontends.torch import repeated as torch_repeated  # noqa: E402
from aule.ops.cross_entropy import plan as cross_entropy_plan  # noqa: E402


def both(logits: Any, target: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Our loss and gradient, and PyTorch's in float64."""
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    loss, right = (
        aule.cross_entropy(ours, target, **options),
        torch.nn.functional.cross_entropy(
            theirs.reshape(-1, logits.shape[-1]), target.reshape(-1).long(), **options
        ).reshape(target.shape if options.get("reduction") == "none" else ()),
    )
    weight = torch.linspace(0.5, 1.5, max(loss.numel(), 1), dtype=torch.float64)[: loss.numel()].reshape(loss.shape)
    (loss * weight.to(loss.dtype)).sum().backward()
    (right * weight).sum().backward()
    return loss.detach(), ours.grad, right.detach(), theirs.grad


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(33,), (2, 3, 33), (0, 33)])
def test_as_pytorch(shape: tuple[int, ...], reduction: str) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    target = torch.arange(logits[..., 0].numel(), dtype=torch.int32).reshape(shape[:-1])
    options = {"reduction": reduction, "label_smoothing": 0.1, "ignore_index": 2}
    loss, grad, right, gradient = both(logits, target, **options)
    assert loss.dtype == torch.float32 and loss.shape == right.shape
    torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(grad.double(), gradient, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("length", [33, 1600])
def test_gradient_past_the_caches(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, wherever rows begin."""
    logits = torch.randn(7, length, generator=torch.Generator().manual_seed(1))
    target, options = torch.arange(7), {"label_smoothing": 0.1, "ignore_index": 2}
    want = both(logits, target, **options)[1]
    device: Any = registry.find("cpu")
    monkeypatch.setattr(device, "target", replace(device.target, cache_bytes=1))
    signatures.clear()
    torch_repeated.forget()
    streamed, config = {}, cross_entropy_plan.CrossEntropyConfig

    def noted(**given: Any) -> Any:
        streamed[given["name"]] = given.get("stream", False)
        return config(**given)

    monkeypatch.setattr(cross_entropy_plan, "CrossEntropyConfig", noted)
    assert torch.equal(both(logits, target, **options)[1], want)
    assert streamed == {
        "cross_entropy": False, "cross_entropy_reduction": False, "cross_entropy_backward": True,
    }  # fmt: skip
    signatures.clear()
    torch_repeated.forget()


def test_every_row_ignored() -> None:
    loss, grad, right, gradient = both(torch.randn(3, 20), torch.full((3,), -100))
    assert torch.isnan(loss) and torch.isnan(right)
    assert not grad.any() and not gradient.any()


def test_bad_target_of_a_tensor_is_found_on_every_call() -> None:
    logits = torch.randn(2, 20)
    aule.cross_entropy(logits, torch.tensor([0, 19]))
    with pytest.raises(aule.InvalidArgumentError, match="got 20 at"):
        aule.cross_entropy(logits, torch.tensor([0, 20]))


def test_compiled() -> None:
    logits, target = torch.randn(4, 19, requires_grad=True), torch.tensor([1, 2, -100, 3])
    compiled = torch.compile(lambda x: aule.cross_entropy(x * 2, target) * 3, backend="aot_eager", fullgraph=True)
    compiled(logits).backward()
    found, logits.grad = logits.grad, None
    (torch.nn.functional.cross_entropy(logits * 2, target) * 3).backward()
    torch.testing.assert_close(found, logits.grad, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: Any, reduction: str, compiled: bool) -> None:
    """The loss has 32 bits: rounded to 16, one that is scaled by 65536, as for float16, would have no gradient."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    target = torch.tensor([1, 2, -100, 3, 49, 0])

    def call(x: Any, t: Any) -> Any:
        return aule.cross_entropy(x, t, reduction=reduction)

    loss = call(logits, target)  # without autocast before
    assert loss.dtype == dtype
    with torch.autocast("cpu", dtype):
        loss = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(logits, target)
        right = torch.nn.functional.cross_entropy(logits, target, reduction=reduction)
    assert loss.dtype == right.dtype == torch.float32
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(65536 * loss.mean(), logits)[0]
    want = torch.autograd.grad(65536 * right.mean(), logits)[0]
    torch.testing.assert_close(found, want, rtol=2e-3 if dtype == torch.float16 else 1e-2, atol=1e-2)
