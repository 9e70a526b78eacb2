"""Parts of a larger problem on every backend: shifted positions, and dropout numbered as in the whole."""

from __future__ import annotations

import os
from dataclasses import replace

import devices
import numpy as np
import pytest

from aule.engine.attention import backward_on_host, forward_on_host
from aule.engine.memory import host_view
from aule.ops.attention.problem import Origin
from aule.ops.attention.validate import attention_problem
from aule.ops.softmax.dropout import seed_words
from aule.runtime.base import Device

ROWS, KEYS, PART = 48, 64, (slice(16, 40), slice(24, 56))
FULL = os.environ.get("AULE_FULL_GRID") == "1"
OPTIONS = {"dropout_p": 0.3, "window": (20, 6), "causal_align": "top-left", "return_lse": True}


def arrays() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((2, 3, n, 16)).astype(np.float32) for n in (ROWS, KEYS, KEYS, ROWS)]


def results(device: Device | None, whole: bool) -> tuple[np.ndarray, ...]:
    """Output, log-sum-exp and gradients: of the whole with keys of the part only, or of the part."""
    rows, keys = PART
    q, k, v, dout = arrays()
    slopes, seed = np.full(3, 0.1, np.float32), seed_words(7)
    mask = np.zeros((ROWS, KEYS), bool)
    mask[:, keys] = True
    extra = {"mask": host_view("bool", mask)} if whole else {}
    if not whole:
        q, dout, k, v = (
            np.ascontiguousarray(x[:, :, part]) for x, part in ((q, rows), (dout, rows), (k, keys), (v, keys))
        )
    views = (host_view("f32", x) for x in (q, k, v))
    words = host_view("u32", seed)
    problem, operands = attention_problem(*views, **OPTIONS, alibi_slopes=host_view("f32", slopes), seed=words, **extra)
    if not whole:
        problem = replace(problem, origin=Origin(rows.start - keys.start, rows.start, keys.start))
    out, lse = forward_on_host(problem, operands, device)
    assert lse is not None
    if device is None:
        return out, lse
    grads = backward_on_host(problem, operands, device, out, lse, host_view("f32", dout))
    return out, lse, *grads


@pytest.mark.device
@pytest.mark.parametrize("backend", ("numpy", *(devices.BACKENDS if FULL else ("cuda", "vulkan", "cpu"))))
def test_a_part_is_what_the_whole_computes_there(backend: str) -> None:
    device = None if backend == "numpy" else devices.need(backend)
    rows = PART[0]
    wanted = results(None if backend == "numpy" else devices.need("cpu"), whole=True)
    found = results(device, whole=False)
    for part, x in zip(found[:2], wanted[:2], strict=True):
        np.testing.assert_allclose(part, x[:, :, rows], atol=1e-5)
    if device is not None:
        # Rows outside of the part also add to the gradients of its keys, so only those of the queries are compared.
        np.testing.assert_allclose(found[2], wanted[2][:, :, rows], atol=1e-5)
        assert all(np.isfinite(x).all() for x in found[3:])
