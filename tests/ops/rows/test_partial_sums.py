"""Partial sums of columns in half precision, through Vulkan: an NVIDIA GPU's plan on any device."""

from __future__ import annotations

from dataclasses import replace

import devices
import fused_cases
import numpy as np
import pytest

from aule.engine.row_ops import on_host, result_views
from aule.ops.catalogue import CATALOGUE
from aule.runtime.base import Device

pytestmark = pytest.mark.device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = devices.need("vulkan")
    if found.target.vendor != "nvidia":
        if found.target.max_threads < 1024:
            pytest.skip("workgroups are as large as an NVIDIA GPU's here")
        monkeypatch.setattr(found, "target", replace(found.target, vendor="nvidia", compute_units=132))
    return found


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "residual_layer_norm"])
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(200, 1024, "bf16"), (200, 1024, "f16"), (40, 4104, "f16"), (30, 16384, "bf16")],
)
def test_gradients(device: Device, op: str, rows: int, columns: int, dtype: str) -> None:
    """All of them right, the same each time, and NaN and infinities where they belong."""
    spec = CATALOGUE[op]
    assert spec.gradient is not None
    case = fused_cases.Case(op, (rows, columns), dtype)
    arrays = fused_cases.operands(case)
    call = fused_cases.bound(spec, arrays, fused_cases.options(spec, case))
    backward = fused_cases.gradient_call(spec, arrays, call, on_host(spec, call, device), case)
    plan = spec.gradient.plan(backward.problem, {**backward.views, **result_views(backward)}, device.target)
    assert plan.steps[0].config.sums == "deinterleaved"
    grads = on_host(spec.gradient, backward, device)
    fused_cases.judge(backward, grads, fused_cases.right(spec.gradient, backward), gradient=True)
    again = on_host(spec.gradient, backward, device)
    for name, array in grads.items():
        assert array.tobytes() == again[name].tobytes(), f"{name} came out differently the second time"
    dy = backward.views["dy"].storage
    number = {"bf16": (0x7FC0, 0xFF80), "f16": (0x7E00, 0xFC00)}[dtype]
    dy.view(np.uint16)[3, 5], dy.view(np.uint16)[rows - 1, columns - 1] = number
    fused_cases.judge(
        backward, on_host(spec.gradient, backward, device), fused_cases.right(spec.gradient, backward), gradient=True
    )
