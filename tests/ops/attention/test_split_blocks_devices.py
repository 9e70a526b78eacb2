"""Blocks split along the keys, on a device: software Vulkan stands in for a GPU."""

from __future__ import annotations

import devices
import grid
import numpy as np
import pytest

from aule.engine import attention
from aule.engine.attention import forward_on_host, prepare_forward
from aule.engine.memory import device_scratch
from aule.ops.attention.plan import forward as plan
from aule.ops.attention.plan.split import Wave
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import attention_problem
from aule.tile.simt.shape import SimtShape

pytestmark = pytest.mark.device

SHAPE = SimtShape(32, 32, 8, 8, 8, 4, False)


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.need("vulkan")
    slots = device.target.compute_units
    if not device.target.device_fence or slots < 2:
        pytest.skip("blocks are not split here")
    monkeypatch.setattr(plan, "choose_shape", lambda *_: SHAPE)
    monkeypatch.setattr(plan, "choose_wave", lambda target, shape: Wave(1, 3, 1))
    launches = []
    monkeypatch.setattr(
        attention, "prepare_forward", lambda *args: launches.append(prepare_forward(*args)) or launches[-1]
    )
    rng = np.random.default_rng(5)
    blocks = slots // 2
    arrays = {
        name: rng.standard_normal((1, heads, rows, 16), np.float32)
        for name, heads, rows in (("q", blocks, 27), ("k", 1, 500), ("v", 1, 500))
    }
    problem, operands = attention_problem(**{n: grid.view_of(a) for n, a in arrays.items()}, return_lse=True)
    out, lse = forward_on_host(problem, operands, device)
    (step,) = launches[0].plan.steps
    assert step.config.pieces and step.grid[0] > blocks
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message
    tickets = np.ones(blocks, np.int32)
    device.download(device_scratch(device, blocks), tickets)
    assert not tickets.any()  # as they were found
    again, _ = forward_on_host(problem, operands, device)
    assert np.array_equal(out, again)
