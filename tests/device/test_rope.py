"""RoPE inside attention, forward and backward, on every device. Compiling takes the time, so software devices share the
cases; a GPU runs all of them."""

from __future__ import annotations

import devices
import numpy as np
import pytest
import rope_cases
from rope_cases import Case

from aule.engine.attention import backward_on_host, forward_on_host, host_view
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients

CASES = (
    Case("f32", (16, 16), 16, (30, 41)),
    Case("f16", (16, 16), 16, (41, 30), interleaved=True, causal=False, tables="batch", table="f16"),
    Case("bf16", (32, 16), 16, (30, 30), tables="full"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", devices.BACKENDS)
def test_forward_and_gradients(backend: str, case: Case) -> None:
    device = devices.need(backend)
    devices.spare(device, CASES.index(case))
    inputs = rope_cases.make_inputs(case)
    problem, operands = rope_cases.case_problem(case, inputs)
    arrays = rope_cases.reference_arrays(inputs, operands)
    out, lse = forward_on_host(problem, operands, device, exact_lse=True)
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message
    dout = np.random.default_rng(1).standard_normal(problem.out_shape).astype(inputs["q"].dtype)
    stored = host_view(problem.dtype, dout.view(out.dtype))
    assert lse is not None
    found = dict(zip(("dq", "dk", "dv"), backward_on_host(problem, operands, device, out, lse, stored), strict=True))
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong
