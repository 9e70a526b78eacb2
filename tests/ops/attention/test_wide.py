"""Heads above 256, forward and backward, on every device. Compiling takes the time, so software devices share the
cases; a GPU runs all of them."""

from __future__ import annotations

from dataclasses import replace

import devices
import grid
import numpy as np
import pytest
import rope_cases
import varlen_cases

import aule
from aule.engine.attention import backward_on_host, forward_on_host
from aule.engine.memory import host_view
from aule.ops.attention.reference import compare
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.varlen import expect_varlen, expect_varlen_gradients
from aule.runtime.base import Device

pytestmark = pytest.mark.device

CASES = grid.forward_grid("wide")


@pytest.fixture(params=devices.BACKENDS, scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    return devices.need(request.param)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients(device: Device, case: grid.Case) -> None:
    devices.spare(device, CASES.index(case), parts=len(CASES), cpu_parts=9)
    inputs = grid.make_inputs(case, seed=1)
    problem, operands = grid.case_problem(case, inputs)
    out, lse = forward_on_host(replace(problem, return_lse=True), operands, device, exact_lse=True)
    verdict = compare(problem, out, lse if case.return_lse else None, grid.expected(case, inputs))
    assert verdict, verdict.message
    assert lse is not None
    shape = (case.batch, case.heads_q, case.seq_q, case.value_dim)
    values = np.random.default_rng(7).standard_normal(shape).astype(grid.NUMPY_DTYPES[case.dtype])
    dout = grid.lay_out(values, case.strides)
    stored = dout.view(np.uint16) if case.dtype == "bf16" else dout
    found = backward_on_host(problem, operands, device, out, lse, host_view(problem.dtype, stored))
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
    gradients = dict(zip(("dq", "dk", "dv"), found, strict=True))
    wrong = compare_gradients(problem, gradients, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


def test_rope(device: Device) -> None:
    """Rows too wide for the stage exchange partners a few at a time."""
    devices.spare(device, 0)
    wrong = rope_cases.judge(rope_cases.Case("f32", (576, 512), 64, (30, 41)), device)
    assert not wrong, wrong


def test_packed(device: Device) -> None:
    devices.spare(device, 1)
    options = {"causal": True}
    case = varlen_cases.Case("wide", (5, 0, 17), (7, 3, 20), (2, 1), (320, 288), options=options)
    problem, operands = varlen_cases.problem_of(varlen_cases.make(case))
    out, lse = forward_on_host(problem, operands, device)
    assert lse is not None
    verdict = compare(problem, out, lse, expect_varlen(problem, operands))
    assert verdict, verdict.message
    dout = np.random.default_rng(1).standard_normal(problem.out_shape).astype(np.float32)
    found = backward_on_host(problem, operands, device, out, lse, host_view("f32", dout))
    expected = expect_varlen_gradients(problem, operands, dout)
    wrong = compare_gradients(problem, dict(zip(("dq", "dk", "dv"), found, strict=True)), expected)
    assert not wrong, wrong


def test_functions() -> None:
    """Functions of scores and masks, against NumPy's engine."""
    devices.need("cpu")
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 2, n, d), np.float32) for n, d in ((20, 320), (33, 320), (33, 512)))
    mask = aule.create_block_mask(lambda b, h, i, j: (i + 13 >= j) & (j != 5), None, None, 20, 33)
    found, wanted = (
        aule.flex_attention(q, k, v, lambda s, b, h, i, j: s - 0.1 * h * (i - j), mask, backend=name)
        for name in ("cpu", "numpy")
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
