"""RoPE inside attention, forward and backward, on every device. Compiling takes the time, so software devices share the
cases; a GPU runs all of them."""

from __future__ import annotations

import os

import devices
import numpy as np
import pytest
from rope_cases import Case, case_problem, judge, make_inputs

from aule.engine.attention import backward_on_host, forward_on_host
from aule.engine.memory import host_view
from aule.ops.attention.reference import to_f64

pytestmark = pytest.mark.device

CASES = (
    Case("f32", (16, 16), 16, (30, 41)),
    Case("f16", (16, 16), 16, (41, 30), interleaved=True, causal=False, tables="batch", table="f16"),
    Case("bf16", (32, 16), 16, (30, 30), tables="full"),
)


LARGER = (
    Case("f32", (64, 64), 64, (300, 300), heads=(4, 2)),
    Case("f32", (128, 128), 64, (129, 260), interleaved=True, causal=False, heads=(4, 2), tables="batch"),
    Case("f16", (128, 128), 128, (300, 300), heads=(4, 2)),
    Case("f16", (80, 80), 32, (129, 260), interleaved=True, causal=False, heads=(4, 2), tables="batch"),
    Case("bf16", (64, 64), 64, (129, 260), causal=False, heads=(4, 2), tables="batch"),
    Case("bf16", (256, 256), 256, (300, 300), heads=(4, 2)),
)
"""Tiles of real devices, several to a sequence."""


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", devices.BACKENDS)
def test_forward_and_gradients(backend: str, case: Case) -> None:
    device = devices.need(backend)
    devices.spare(device, CASES.index(case), parts=6)
    wrong = judge(case, device)
    assert not wrong, wrong


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize("backend", devices.BACKENDS)
def test_weights_of_large_scores_add_up_to_one(backend: str, rows: int) -> None:
    """The gradients' weights are of the scores that the forward pass made its log-sum-exps of, rotated rows rounded or
    not: with dO of ones, dV summed over the keys is the number of rows."""
    device = devices.need(backend)
    devices.spare(device, rows // 9)
    case = Case("bf16", (64, 64), 64, (rows, 60), causal=False, heads=(1, 1))
    inputs = make_inputs(case)
    problem, operands = case_problem(case, inputs, scale=1.5)
    out, lse = forward_on_host(problem, operands, device, exact_lse=True)
    assert lse is not None
    ones = host_view("bf16", np.ones(problem.out_shape, inputs["q"].dtype).view(out.dtype))
    _, _, dv = backward_on_host(problem, operands, device, out, lse, ones)
    np.testing.assert_allclose(to_f64(dv, "bf16").sum(axis=2), rows, rtol=2**-8)


# Each one way, but through CUDA, where the two ways differ most.
WAYS = [
    pytest.param(backend, case, deterministic, id=f"{backend}-{case}{'-deterministic' if deterministic else ''}")
    for backend in ("cuda", "vulkan", "opencl", "webgpu")
    for number, case in enumerate(LARGER)
    for deterministic in ((False, True) if backend == "cuda" else (number % 2 == 1,))
]


@pytest.mark.parametrize(("backend", "case", "deterministic"), WAYS)
def test_tiles_of_a_gpu(backend: str, case: Case, deterministic: bool) -> None:
    device = devices.need(backend)
    if device.target.software and os.environ.get("AULE_FULL_GRID") != "1":
        pytest.skip("for tiles of a GPU; AULE_FULL_GRID=1 runs them anyway")
    wrong = judge(case, device, deterministic)
    assert not wrong, wrong
