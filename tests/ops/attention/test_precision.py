"""The option ``precision`` on every device: on matrix units where there are any, else a clear error."""

from __future__ import annotations

import functools
from dataclasses import replace

import devices
import grid
import msl_shim
import numpy as np
import pytest

import aule
from aule.engine.attention import forward_on_host
from aule.engine.probe import find_layout
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import attention_problem
from aule.runtime.base import Device
from aule.tile.fragment.engine import multiplies

pytestmark = pytest.mark.device

CASES = [case for case in grid.forward_grid("full") if case.dtype == "f32"]
TYPES = {"fp16": "f16", "bf16": "bf16", "tf32": "tf32"}


@functools.cache
def matrices() -> Device:
    """The MSL shim with matrix units."""
    if not msl_shim.available():
        pytest.skip("the MSL shim needs g++")
    return msl_shim.ShimDevice(matrices=True)


def served(name: str, factor: str) -> Device:
    device = matrices() if name == "msl-shim" else devices.need(name)
    find_layout(device)
    if not multiplies(device.target, factor):
        pytest.skip(f"{device.target.name} has no matrix units for {factor}")
    return device


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("name", ["cuda", "vulkan", "msl-shim"])
def test_grid(name: str, precision: str) -> None:
    factor = TYPES[precision]
    device = served(name, factor)
    wrong = {}
    for case in [c for c in CASES if max(c.head_dim, c.value_dim) <= 128][:2] if name == "msl-shim" else CASES:
        inputs = grid.make_inputs(case, seed=2)
        problem, operands = grid.case_problem(case, inputs)
        out, lse = forward_on_host(replace(problem, precision=factor), operands, device)
        rounded = {n: grid.rounded_to(x, factor) if n in "qkv" else x for n, x in inputs.items()}
        arrays = {"alibi" if n == "alibi_slopes" else n: array for n, array in rounded.items()}
        half = replace(problem, dtype="f16" if factor == "tf32" else factor)  # tf32 has as many digits as fp16
        verdict = compare(half, out, lse, expect(half, **arrays))
        if not verdict:
            wrong[str(case)] = verdict.message
    assert not wrong, wrong


def test_heads_that_are_too_wide_for_them() -> None:
    x = np.zeros((1, 1, 4, 256), np.float32)
    problem, operands = attention_problem(*(grid.view_of(x) for _ in range(3)), precision="fp16")
    with pytest.raises(aule.InvalidArgumentError, match="expected a smaller head_dim for precision='float16'"):
        forward_on_host(problem, operands, served("msl-shim", "f16"))


@pytest.mark.parametrize("name", ["numpy", "cpu", "vulkan", "opencl", "webgpu"])
def test_devices_without_matrix_units_say_so(name: str) -> None:
    if name != "numpy" and devices.need(name).target.matrix_units:
        pytest.skip(f"{name} has matrix units")
    x = np.zeros((1, 2, 5, 8), np.float32)
    with pytest.raises(aule.InvalidArgumentError, match=r"expected a device with matrix units .* offers none"):
        aule.flash_attention(x, x, x, precision="fp16", backend=name)


def test_gradients_of_cuda_tensors() -> None:
    """They are computed in fp32, from the rounded result."""
    torch = pytest.importorskip("torch")
    devices.need("cuda")
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", requires_grad=True) for _ in range(3))
    out, lse = aule.flash_attention(q, k, v, causal=True, precision="bf16", return_lse=True)
    assert out.dtype == lse.dtype == torch.float32
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True)
    assert 1e-6 < float((out.detach() - want).abs().max()) < 4e-2  # rounded, and no more than that
    for f, w in zip(found, torch.autograd.grad(want.square().sum(), exact), strict=True):
        assert float((f - w).abs().max()) < 4e-2 * float(w.abs().max())
