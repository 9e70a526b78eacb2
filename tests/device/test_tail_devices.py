"""The last, partial wave of a launch in pieces, on a device: software Vulkan stands in for a GPU."""

from __future__ import annotations

import devices
import grid
import numpy as np
import pytest

from aule.engine import attention
from aule.engine.attention import forward_on_host, prepare_forward
from aule.engine.memory import zeroed
from aule.ops.attention import plan
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import attention_problem
from aule.ops.attention.wave import Wave
from aule.tile.simt_shape import SimtShape

SHAPE = SimtShape(32, 32, 8, 8, 8, 4, False)


@pytest.mark.parametrize("waves", [0, 1])
def test_pieces(waves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = devices.need("vulkan")
    slots = device.target.compute_units
    if not device.target.device_fence or slots < 2:
        pytest.skip("the last wave is not cut here")
    monkeypatch.setattr(attention, "tuned_shape", lambda device, problem: SHAPE)
    monkeypatch.setattr(plan, "choose_wave", lambda target, shape: Wave(1, 3, 1, leading=bool(waves)))
    launches = []
    monkeypatch.setattr(
        attention, "prepare_forward", lambda *args: launches.append(prepare_forward(*args)) or launches[-1]
    )
    rng = np.random.default_rng(5)
    blocks = waves * slots + slots // 2
    arrays = {
        name: rng.standard_normal((1, heads, rows, 16), np.float32)
        for name, heads, rows in (("q", blocks, 27), ("k", 1, 500), ("v", 1, 500))
    }
    problem, operands = attention_problem(**{n: grid.view_of(a) for n, a in arrays.items()}, return_lse=True)
    out, lse = forward_on_host(problem, operands, device)
    beside, whole = launches[0].plan.beside, launches[0].plan
    assert beside is not None and whole.grid[0] == waves * slots and beside.grid[0] > 1
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message
    tickets = np.ones(blocks, np.int32)
    device.download(zeroed(device, blocks), tickets)
    assert not tickets.any()  # as they were found
    again, _ = forward_on_host(problem, operands, device)
    assert np.array_equal(out, again)
