"""Cross entropy: its errors, and its GPU kernels in the interpreter."""

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
    given |= {"most": found["most"], "above": found["above"], "dloss": np.float32(1.5)[...]}
    got, gradient = interpreted(SPEC.gradient, given, options, target), reference(SPEC.gradient, given, options)
    assert error(got["dlogits"], gradient["dlogits"]) < 2e-6


@pytest.mark.parametrize(
    ("changed", "options", "said"),
    [
        ({"target": np.array([1, 2, 37])}, {}, r"expected targets of 0 to 36 or ignore_index=-100, got 37 at \[2\]"),
        ({"target": np.array([1, -3, -100])}, {}, r"got -3 at \[1\]"),
        ({"target": np.array([1.0, 2.0, 3.0])}, {}, "expected target of int32 or int64"),
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
