"""Cross entropy beside PyTorch's, its errors, and its GPU kernels in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from op_plans import error, interpreted, reference

import aule
from aule.codegen import TARGETS
from aule.ops.catalogue import CATALOGUE

SPEC = CATALOGUE["cross_entropy"]


def arrays(rows: int, length: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows + length)
    target = rng.integers(0, length, rows)
    target[1] = -100
    return {"logits": rng.normal(0, 3, (rows, length)).astype(np.float32), "target": target}


@pytest.mark.parametrize(("rows", "length"), [(5, 37), (3, 4200)])
@pytest.mark.parametrize("language", ["ptx", "wgsl"])
def test_interpreted(language: str, rows: int, length: int) -> None:
    """With and without subgroups; rows in registers and in a loop, which a workgroup has one of."""
    target = replace(TARGETS[language], max_threads=128)
    given, options = arrays(rows, length), {"label_smoothing": 0.2}
    found, right = interpreted(SPEC, given, options, target), reference(SPEC, given, options)
    assert error(found["loss"], right["loss"]) < 1e-6
    assert SPEC.gradient is not None
    given |= {"lse": found["lse"], "dloss": np.float32(1.5)[...]}
    got, gradient = interpreted(SPEC.gradient, given, options, target), reference(SPEC.gradient, given, options)
    assert error(got["dlogits"], gradient["dlogits"]) < 2e-6


@pytest.mark.parametrize(
    ("changed", "options", "said"),
    [
        ({"target": np.array([1, 2, 37])}, {}, r"expected targets of 0 to 36 or ignore_index=-100, got 37 at \[2\]"),
        ({"target": np.array([1, -3, -100])}, {}, r"got -3 at \[1\]"),
        ({"target": np.array([1.0, 2.0, 3.0])}, {}, "expected target of dtype i32 or i64"),
        ({"target": np.array([1, 2])}, {}, r"expected target of shape \[3\], got \[2\]"),
        ({}, {"reduction": "max"}, "expected reduction 'mean', 'sum' or 'none', got 'max'"),
        ({}, {"label_smoothing": 1.5}, "expected label_smoothing of 0 to 1, got 1.5"),
        ({}, {"ignore_index": 0.5}, "expected ignore_index as an integer"),
    ],
)
def test_errors(changed: dict[str, Any], options: dict[str, Any], said: str) -> None:
    given = {**arrays(3, 37), **changed}
    with pytest.raises(aule.AuleError, match=said):
        aule.cross_entropy(given["logits"], given["target"], **options)


# -- torch -------------------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True, scope="module")
def engine() -> None:
    pytest.importorskip("llvmlite", reason="gradients need the CPU engine")


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
