"""Checkpointing: the forward pass is recomputed for the gradient, and drops the same weights."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="gradients need the CPU engine")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

ANGLES = torch.linspace(0, 3, 20).reshape(5, 4)
TABLES = ANGLES.cos(), ANGLES.sin()
LENGTHS = torch.tensor([0, 2, 5], dtype=torch.int32)
TARGET = torch.tensor([1, 7, -100, 3, 0])


def packed(x: Any) -> Any:
    heads = x.transpose(0, 1)
    return aule.flash_attention_varlen(heads, heads, heads, LENGTHS, LENGTHS).transpose(0, 1)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "attention": lambda x, w: aule.flash_attention(x, x, x * w, rope=TABLES, dropout_p=0.3),
    "scaled dot products": lambda x, w: aule.scaled_dot_product_attention(x, x, x * w, dropout_p=0.3),
    "packed": lambda x, w: packed(x[0]) * w,
    "softmax_dropout": lambda x, w: aule.softmax_dropout(x * w, dropout_p=0.3),
    "rms_norm": aule.rms_norm,
    "residual_layer_norm": lambda x, w: aule.residual_layer_norm(x, 2 * x, w)[0],
    "rms_norm_rope": lambda x, w: aule.rms_norm_rope(x, w, *TABLES),
    "swiglu": lambda x, w: aule.swiglu(x, x * w),
    "layer_norm_linear": lambda x, w: aule.layer_norm_linear(x, w, None, torch.eye(8)),
    "cross_entropy": lambda x, w: aule.cross_entropy(x[0] * w, TARGET.expand(3, 5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_memory_is_autograd_s_to_keep(name: str) -> None:
    """What a call needs for its gradient is what autograd keeps: other hooks may move it, and nothing else holds it."""
    leaves = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((2, 3, 5, 8), (8,))]
    found = []
    for moved in (False, True):
        x, w = (leaf.clone().requires_grad_() for leaf in leaves)
        torch.manual_seed(5)
        inside = []

        def call(x: Any, w: Any, inside: list[Any] = inside) -> Any:
            between = x.transpose(-1, -2).contiguous().transpose(-1, -2)  # with strides that a copy does not have
            inside.append(StorageWeakRef(between.untyped_storage()))
            return CALLS[name](between, w)

        if moved:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(order="C"), torch.from_numpy):
                out = call(x, w)
            gc.collect()
            assert inside[0].expired()
        else:
            out = call(x, w)
        out.square().sum().backward()
        found.append((out.detach(), x.grad, w.grad))
    for right, got in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_without(name: str, reentrant: bool) -> None:
    leaves = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((2, 3, 5, 8), (8,))]
    found = []
    for kept in (True, False):
        x, w = (leaf.clone().requires_grad_() for leaf in leaves)
        torch.manual_seed(5)
        out = CALLS[name](x, w) if kept else checkpoint(CALLS[name], x, w, use_reentrant=reentrant)
        torch.rand(3)  # others draw, too
        out.square().sum().backward()
        found.append((out.detach(), x.grad, w.grad))
    assert found[0][2].any()
    for right, got in zip(*found, strict=True):
        assert torch.equal(got, right)
