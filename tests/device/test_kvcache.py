"""The kernels of a cache on every device, and `KVCache` itself where it computes: on the CPU and through torch."""

from __future__ import annotations

from typing import Any

import devices
import kvcache_cases as cases
import numpy as np
import pytest

from aule.engine.kvcache import programs, words
from aule.ops.attention.plan import Step
from aule.ops.kvcache import numpy_append
from aule.ops.kvcache.plan import plan_append, plan_copy
from aule.runtime.base import Device


@pytest.fixture(params=devices.BACKENDS, scope="module")
def device(request: pytest.FixtureRequest) -> Device:
    return devices.need(request.param)


def run(steps: tuple[Step, ...], device: Device, arrays: dict[str, np.ndarray], back: list[str]) -> None:
    """Launch on copies in device memory, and bring some of them back."""
    memory = {name: device.alloc(max(array.nbytes, 16)) for name, array in arrays.items()}
    try:
        for name, array in arrays.items():
            device.upload(memory[name], array)
        for step, loaded in programs(steps, device):
            values: dict[str, Any] = {f"{name}_ptr": held for name, held in memory.items()} | dict(step.scalars)
            device.launch(loaded, step.grid, [values[p.name] for p in loaded.artifact.params])
        for name in back:
            device.download(memory[name], arrays[name])
    finally:
        for held in memory.values():
            device.free(held)


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_append(device: Device, case: cases.Case) -> None:
    devices.spare(device, cases.CASES.index(case))
    problem, views = cases.make(case)
    wanted = cases.expected(problem, views)
    written = [name for name in views if cases.written(name)]
    arrays = {name: v.storage.swapaxes(1, 2) if _turned(v) else v.storage for name, v in views.items()}
    run(plan_append(problem, views, device.target), device, arrays, written)
    cases.compare(case, {name: views[name].storage for name in written}, wanted)


def _turned(view: cases.TensorView) -> bool:
    return not view.storage.flags.c_contiguous


def test_copy(device: Device) -> None:
    rng = np.random.default_rng(2)
    shapes = {"k_cache": (np.uint8, 2 * 3 * 5), "v_cache": (np.uint16, 4096 * 3), "v_scale": (np.uint32, 6)}
    arrays = {name: rng.integers(0, 255, (3, 5, n)).astype(kind) for name, (kind, n) in shapes.items()}
    pairs = np.array([[0, 3], [0, 4], [2, 1]], np.int32)
    wanted = {name: array.copy() for name, array in arrays.items()}
    numpy_append.copy_pages(pairs, wanted)
    steps = plan_copy(len(pairs), {name: words(array) for name, array in arrays.items()}, device.target)
    run(steps, device, {"pairs": pairs, **arrays}, list(arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, wanted[name])
