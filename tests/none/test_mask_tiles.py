"""Masks over warpgroups: what is found of their tiles beforehand, and attention with it, on the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grid
import numpy as np
import pytest
from test_backward_interpreted import run as backward
from test_forward_interpreted import run
from test_fragment_interpreted import target

from aule.ops.attention.reference import compare, expect
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import attention_problem
from aule.target import NVIDIA_LAYOUT
from aule.tile.fragment_shape import FragmentShape

SHAPE = FragmentShape(64, 80, 4, 2, False, warpgroups=True)
"""80 columns: a word and a quarter of a lane's bits."""


def documents(length: int, ends: list[int]) -> np.ndarray:
    """Each position sees what is before it in its document."""
    number = np.searchsorted(ends, np.arange(length), side="right")
    return (number[:, None] == number[None, :]) & np.tri(length, dtype=bool)


def mask_of(kind: str) -> tuple[np.ndarray, dict[str, Any]]:
    rng = np.random.default_rng(5)
    if kind == "documents":
        return documents(300, [90, 100, 250]), {}
    if kind == "padding":
        return (np.arange(300) < np.array([170, 300])[:, None])[:, None, None], {"causal": True}
    if kind == "by-head":
        return (rng.random((2, 2, 300, 300)) < 0.5) & documents(300, [64, 128]), {"softcap": 5.0}
    if kind == "columns":
        return rng.random((2, 1, 300, 1)) < 0.9, {"window": (50, 20)}
    additive = np.where(documents(300, [90, 230]), 0.0, -np.inf).astype(np.float16)
    if kind == "additive":
        additive[280:] += 0.5
    return additive, {}


@pytest.mark.parametrize("kind", ["documents", "padding", "by-head", "columns", "additive", "minus-infinity"])
def test_forward(kind: str) -> None:
    mask, options = mask_of(kind)
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal((2, 2, 300, 24)).astype(np.float16) for name in "qkv"} | {"mask": mask}
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, **options, return_lse=True)
    out, lse = run(problem, operands, SHAPE, replace(target(), matrix_layout=NVIDIA_LAYOUT))
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message


WIDE = FragmentShape(64, 64, 8, 2, False, columns=2, warpgroups=True)


@pytest.mark.parametrize("kind", ["documents", "padding", "by-head", "columns", "additive"])
def test_gradients(kind: str) -> None:
    mask, options = mask_of(kind)
    rng = np.random.default_rng(2)
    wide = kind == "documents"
    arrays = {name: rng.standard_normal((2, 2, 300, 128 if wide else 24)).astype(np.float16) for name in "qkv"}
    arrays["mask"] = mask
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, **options)
    shape = WIDE if wide else FragmentShape(64, 64 if kind == "padding" else 128, 4, 4, False, warpgroups=True)
    if shape.block_kv == 128:
        shape = FragmentShape(128, 128, 8, 4, False, warpgroups=True)
    device = replace(target(), matrix_layout=NVIDIA_LAYOUT)
    found, dout = backward(problem, operands, arrays, shape, target=device)
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong
