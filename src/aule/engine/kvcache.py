"""Writes into caches of keys and values: plan, programs, launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from aule.backends import registry
from aule.engine.programs import load_steps
from aule.errors import AuleError, OutOfMemoryError
from aule.ops.kvcache import numpy_append
from aule.ops.kvcache.plan import plan_append, plan_copy
from aule.ops.kvcache.problem import AppendProblem
from aule.ops.step import StepPlan
from aule.runtime.base import Device
from aule.view import TensorView

Array = npt.NDArray[Any]
_MAX_SIGNATURES = 1024

Launches = tuple[tuple[Any, tuple[str, ...]], ...]
"""Prepared launches, each with the names of its buffers."""


def writer(spec: str | None) -> Device | None:
    """What writes into a cache in host memory: the CPU engine, or None for NumPy, if asked for or all there is.

    Another device that is asked for has no part in it: it could only write to a copy.
    """
    if registry.asked(spec) == registry.NUMPY:
        return None
    try:
        return registry.find("cpu")
    except AuleError:
        return None


def no_memory(nbytes: int, where: str, error: Exception) -> OutOfMemoryError:
    """What to raise where there is no room for the pool of a cache."""
    return OutOfMemoryError(
        f"[KVCache] expected {nbytes} bytes on {where}, got none ({error}); take fewer pages, or quantize", nbytes
    )


def append_on_host(problem: AppendProblem, views: Mapping[str, TensorView], device: Device | None) -> None:
    """Write new rows into caches in host memory, where they lie. ``device`` is that of `writer`."""
    if device is None:
        numpy_append.append(problem, views)
        return
    key = (problem, tuple((name, view.strides, view.shape) for name, view in views.items()))
    known: dict[Any, Launches] = vars(device).setdefault("_ready_append", {})
    ready = known.get(key)
    if ready is None:
        if len(known) >= _MAX_SIGNATURES:
            known.clear()
        ready = known[key] = prepare(plan_append(problem, views, device.target), device)
    _run(ready, {name: view.storage for name, view in views.items()})


def copy_on_host(pairs: Array, arrays: Mapping[str, Array], device: Device | None) -> None:
    """Copy pages of caches in host memory: ``arrays`` of ``[layers, pages, elements]``, ``pairs`` as in `plan_copy`."""
    if device is None:
        numpy_append.copy_pages(pairs, arrays)
        return
    views = {name: words(array) for name, array in arrays.items()}
    alignment = {name: address & -address for name, address in ((n, _address(a)) for n, a in arrays.items())}
    plan = plan_copy(len(pairs), views, device.target, alignment)
    _run(prepare(plan, device), {"pairs": pairs, **arrays})


def words(array: Any) -> TensorView:
    """A contiguous array ``[layers, pages, elements]`` of whatever type by its bits, as `plan_copy` takes it."""
    layers, pages, size = array.shape
    bits = {1: "u8", 2: "f16", 4: "u32"}[array.itemsize]
    return TensorView(bits, (layers, pages, size), (pages * size, size, 1), "host", array)


def prepare(plan: StepPlan, device: Any) -> Launches:
    """Load the kernels of a plan and fix all of its launches but their memory."""
    ready = []
    for step, loaded in load_steps(plan, device).steps:
        artifact = loaded.artifact
        # The CPU's launches take scalars alone; those of other devices something in the place of each buffer.
        params = artifact.scalars if device.target.backend == "cpu" else artifact.params
        start = device.prepare(loaded, step.grid, [step.scalars.get(p.name) for p in params]).launch
        ready.append((start, tuple(p.name.removesuffix("_ptr") for p in artifact.buffers)))
    return tuple(ready)


def _run(ready: Launches, memory: Mapping[str, Array]) -> None:
    for launch, buffers in ready:
        launch([_address(memory[name]) for name in buffers])


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
