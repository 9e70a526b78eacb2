"""The gradient of the scores alone, on the interpreter with the sanitizer on and on devices, against float64."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import devices
import grid
import numpy as np
import pytest
from test_backward_interpreted import SHAPES as SIMT
from test_backward_interpreted import TARGET
from test_backward_interpreted import run as backward
from test_fragment_interpreted import BACKWARD, target

from aule.engine.attention import attention_views, backward_on_host, scores_on_host
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.reference import attention_reference
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


def expected(arrays: dict[str, Any], dout: Any, out: Any, options: Collection[str]) -> Any:
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


def inputs(stored: Any, options: Collection[str]) -> tuple[Any, Any, dict[str, Any]]:
    """The problem, its operands and their arrays."""
    rng = np.random.default_rng(1)
    shapes = {"q": (1, 2, ROWS, DIM), "k": (1, 1, KEYS, DIM), "v": (1, 1, KEYS, 32)}
    arrays = {name: rng.standard_normal(shape).astype(stored) for name, shape in shapes.items()}
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, causal="causal" in options)
    problem = replace(problem, score_mod=bent() if "bent" in options else None)
    return replace(problem, mask_mod=blocks() if "listed" in options else None), operands, arrays


def compare(ds: Any, wanted: Any) -> None:
    """Within rounding of float32, and zero past the last row and key."""
    assert np.abs(ds[:, :, :ROWS, :KEYS] - wanted).max() <= 2e-5 * np.abs(wanted).max()
    assert not ds[:, :, ROWS:].any() and not ds[..., KEYS:].any()


@pytest.mark.parametrize("options", [("bent",), ("causal",), ("bent", "listed")], ids="-".join)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_interpreted(dtype: str, options: Collection[str]) -> None:
    stored, on_units = grid.NUMPY_DTYPES[dtype], dtype != "f32"
    problem, operands, arrays = inputs(stored, options)
    shape = BACKWARD["two-stages"] if on_units else SIMT["tall"]
    found, dout = backward(
        problem, operands, arrays, (shape, shape), dtype == "f16", target() if on_units else TARGET, (1, 2, 64, 72)
    )
    out = found["o"].view(stored).reshape(1, 2, ROWS, 32)
    compare(found["ds"].reshape(1, 2, 64, 72), expected(arrays, dout, out, options))


@pytest.mark.parametrize("name", ["cuda", "vulkan", "msl-shim", devices.HIP[0], "cpu"])
def test_devices(name: str) -> None:
    """Matrix units as Apple and AMD lay them out, plain arithmetic, and vectors."""
    stored, device, options = np.float16, devices.need(name), ("bent", "listed")
    problem, operands, arrays = inputs(stored, options)
    out, lse = attention_reference(problem, **arrays)
    out = out.astype(stored)
    dout = np.random.default_rng(2).standard_normal(out.shape).astype(stored)
    ds = np.zeros((1, 2, 64, 72), np.float32)
    scores_on_host(problem, operands, device, out, lse.astype(np.float32), grid.view_of(dout), ds)
    compare(ds, expected(arrays, dout, out, options))


def biased(keys: int) -> tuple[Any, Any, dict[str, Any]]:
    """A problem with a bias, its operands and their arrays."""
    rng = np.random.default_rng(1)
    shapes = {"q": (1, 2, ROWS, DIM), "k": (1, 1, keys, DIM), "v": (1, 1, keys, 32), "bias": (1, 2, ROWS, keys)}
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    return *attention_problem(**{name: grid.view_of(array) for name, array in arrays.items()}), arrays


@pytest.mark.parametrize("deterministic", [False, True])
def test_beside_other_gradients_it_has_a_kernel_on_matrix_units(deterministic: bool) -> None:
    found = {}
    for keys in (200, 202):  # more than one block, so that dQ has a kernel of its own
        problem, operands, arrays = biased(keys)
        out = grid.view_of(np.zeros(problem.out_shape, np.float16))
        views = attention_views(operands, out) | {
            "do": out,
            "ds": grid.view_of(np.zeros((1, 2, ROWS, keys), np.float32)),
        }
        views |= {f"d{name}": grid.view_of(arrays[name]) for name in "qkv"}
        plan = plan_backward(replace(problem, deterministic=deterministic), views, target())
        found[keys] = [(x.config.of, type(x.config).__name__) for x in plan.steps if hasattr(x.config, "of")]
    on_units = ["scores", "queries", "keys"] if deterministic else ["scores", "keys"]
    assert found[200] == [(of, "FragmentBackwardConfig") for of in on_units]
    # Rows of odd lengths, which no vector can be stored to.
    assert found[202][0] == ("queries", "BackwardConfig") and len(found[202]) == 2


@pytest.mark.parametrize("name", ["cuda", "msl-shim"])
def test_gradient_of_a_bias(name: str) -> None:
    device, (problem, operands, arrays) = devices.need(name), biased(48)
    out, lse = attention_reference(problem, **arrays)
    out = out.astype(np.float16)
    dout = np.random.default_rng(2).standard_normal(out.shape).astype(np.float16)
    ds = np.zeros((1, 2, ROWS, 48), np.float32)
    dq, _, _ = backward_on_host(problem, operands, device, out, lse.astype(np.float32), grid.view_of(dout), ds)
    q, k, v, bias = (x.astype(np.float64) for x in arrays.values())
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))
    p = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(DIM) + bias)
    p /= p.sum(-1, keepdims=True)
    dout = dout.astype(np.float64)
    wanted = p * (dout @ v.swapaxes(2, 3) - (dout * out.astype(np.float64)).sum(-1, keepdims=True))
    assert np.abs(ds - wanted).max() <= 2e-5 * np.abs(wanted).max()
    assert np.abs(dq.view(np.float16) - wanted @ k / np.sqrt(DIM)).max() <= 4e-3
