"""The gradient of the scores alone, on the interpreter with the sanitizer on, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grid
import numpy as np
import pytest
from test_backward_interpreted import SHAPES as SIMT
from test_backward_interpreted import TARGET
from test_backward_interpreted import run as backward
from test_fragment_interpreted import BACKWARD, target

from aule.ops.attention.validate import attention_problem
from aule.ops.scores.functions.program import BoundFunction, Graph

ROWS, KEYS, DIM = 39, 50, 24


def blocks() -> BoundFunction:
    """Keeps keys of the row's block of 20, of which tiles are listed."""
    g = Graph()
    row, key = (g.binary("floordiv", g.input(name), g.literal(20)) for name in ("query", "key"))
    return BoundFunction(g.finish([g.compare("eq", row, key)]))


def bent() -> BoundFunction:
    """``score * score / 4``: dS is the gradient of this, not of the score."""
    g = Graph()
    score = g.input("score")
    return BoundFunction(g.finish([g.binary("mul", g.binary("mul", score, score), g.literal(0.25))]))


def expected(arrays: dict[str, Any], dout: Any, out: Any, options: set[str]) -> Any:
    q, k, v = (arrays[name].astype(np.float64) for name in "qkv")
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    s = q @ k.swapaxes(2, 3) / np.sqrt(DIM)
    s = s * s / 4 if "bent" in options else s
    row, key = np.indices((ROWS, KEYS))
    if "causal" in options:
        s = np.where(key <= row + KEYS - ROWS, s, -np.inf)
    if "listed" in options:
        s = np.where(row // 20 == key // 20, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dout = dout.astype(np.float64)
    return p * (dout @ v.swapaxes(2, 3) - (dout * out.astype(np.float64)).sum(-1, keepdims=True))


@pytest.mark.parametrize("options", [{"bent"}, {"causal"}, {"listed", "bent"}], ids="-".join)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_scores_alone(dtype: str, options: set[str]) -> None:
    rng, stored = np.random.default_rng(1), grid.NUMPY_DTYPES[dtype]
    shapes = {"q": (1, 2, ROWS, DIM), "k": (1, 1, KEYS, DIM), "v": (1, 1, KEYS, 32)}
    arrays = {name: rng.standard_normal(shape).astype(stored) for name, shape in shapes.items()}
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, causal="causal" in options)
    problem = replace(problem, score_mod=bent() if "bent" in options else None)
    problem = replace(problem, mask_mod=blocks() if "listed" in options else None)
    on_units = dtype != "f32"
    shape = BACKWARD["two-stages"] if on_units else SIMT["tall"]
    found, dout = backward(
        problem, operands, arrays, (shape, shape), dtype == "f16", target() if on_units else TARGET, (1, 2, 64, 72)
    )
    out = found["o"].view(stored).reshape(1, 2, ROWS, 32)
    wanted, ds = expected(arrays, dout, out, options), found["ds"].reshape(1, 2, 64, 72)
    assert np.abs(ds[:, :, :ROWS, :KEYS] - wanted).max() <= 2e-5 * np.abs(wanted).max()
    assert not ds[:, :, ROWS:].any() and not ds[..., KEYS:].any()
