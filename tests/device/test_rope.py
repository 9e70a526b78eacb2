"""RoPE inside attention, forward and backward, on every device. Compiling takes the time, so software devices share the
cases; a GPU runs all of them."""

from __future__ import annotations

import devices
import pytest
from rope_cases import Case, judge

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
    wrong = judge(case, device)
    assert not wrong, wrong
