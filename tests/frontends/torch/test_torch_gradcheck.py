"""``torch.autograd.gradcheck`` in float64 of every operation, outputs without a gradient included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import aule

torch = pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="these run on the CPU engine")

from test_torch_fused import ANGLES  # noqa: E402

from aule.ops.catalogue import CATALOGUE  # noqa: E402

COS, SIN = ANGLES.cos().double(), ANGLES.sin().double()
TARGET = torch.tensor([0, 3, -100])
OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)
ROWS, QUERIES, KEYS = (3, 8), (1, 2, 3, 4), (1, 1, 5, 4)
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rms_norm": (aule.rms_norm, [ROWS, (8,)]),
    "layer_norm": (aule.layer_norm, [ROWS, (8,), (8,)]),
    "residual_rms_norm": (aule.residual_rms_norm, [ROWS, ROWS, (8,)]),
    "residual_layer_norm": (aule.residual_layer_norm, [ROWS, ROWS, (8,), (8,)]),
    "layer_norm_linear": (aule.layer_norm_linear, [ROWS, (8,), (8,), (5, 8), (5,)]),
    "cross_entropy": (lambda x: aule.cross_entropy(x, TARGET), [ROWS]),
    "cross_entropy of each row": (lambda x: aule.cross_entropy(x, TARGET, reduction="none"), [ROWS]),
    "swiglu": (aule.swiglu, [ROWS, ROWS]),
    "packed swiglu": (aule.swiglu, [ROWS]),
    "geglu": (aule.geglu, [ROWS, ROWS]),
    "rope": (lambda x: aule.rope(x, COS, SIN), [(1, 1, 5, 10)]),
    "rms_norm_rope": (lambda x, w: aule.rms_norm_rope(x, w, COS, SIN), [(1, 1, 5, 10), (10,)]),
    "softmax_dropout": (lambda x: aule.softmax_dropout(x, causal=True), [ROWS]),
    "flash_attention": (aule.flash_attention, [QUERIES, KEYS, KEYS]),
    "flash_attention with a mask": (
        lambda q, k, v, mask: aule.flash_attention(q, k, v, mask=mask, causal=False),
        [QUERIES, KEYS, KEYS, (3, 5)],
    ),
    "flash_attention_varlen": (
        lambda q, k, v: aule.flash_attention_varlen(q, k, v, OFFSETS, OFFSETS),
        [(5, 2, 4), (5, 1, 4), (5, 1, 4)],
    ),
}


def tensors(name: str) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in CASES[name][1]]
    return [x.requires_grad_() for x in made]


def test_all_row_operations_are_here() -> None:
    assert set(CATALOGUE) <= set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name: str) -> None:
    mapped = name != "flash_attention_varlen"  # which refuses to be mapped
    assert torch.autograd.gradcheck(CASES[name][0], tensors(name), check_undefined_grad=True, check_batched_grad=mapped)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_are_refused(name: str) -> None:
    op = name.split()[1] if name.startswith("packed") else name.split()[0]
    with pytest.raises(aule.AuleError, match=rf"^\[{op}\] expected one derivative, got a second; use (PyTorch|torch)"):
        torch.autograd.gradgradcheck(CASES[name][0], tensors(name))
