"""Runs the ops of the catalogue: plan, programs, launches; on a device, through one, on the CPU in place, or on
NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.backends import registry
from aule.engine import cpu
from aule.engine.memory import STORED, Arena, check_memory, host_view, zeroed
from aule.engine.probe import find_layout
from aule.engine.programs import StepLaunches, launch_steps, load_steps
from aule.errors import AuleError, InvalidArgumentError
from aule.ops.elements import as_float, stored
from aule.ops.spec import Call, OpSpec
from aule.runtime.base import Device
from aule.view import TensorView, contiguous_strides

Array = npt.NDArray[Any]
_MAX_SIGNATURES = 1024


def host_device(spec: str | None) -> Device | None:
    """The device for arrays in host memory; None stands for NumPy.

    These ops take about as long as their arrays take to be read: unlike attention, they stay where the arrays are, on
    the CPU, unless another device is named.
    """
    wanted = registry.asked(spec)
    if wanted is not None:
        return registry.find(wanted)
    try:
        return registry.find("cpu")
    except AuleError:
        return registry.choose(None)


def work_dtype(call: Call) -> Any:
    """NumPy's type for what a call is computed in."""
    return np.float64 if call.problem.dtype == "f64" else np.float32


def result_views(call: Call) -> dict[str, TensorView]:
    """Views of a call's outputs, in fresh memory unless they have a place."""
    return {
        name: TensorView(result.dtype, result.shape, result.strides or contiguous_strides(result.shape), "device", None)
        if result.place is None
        else call.views[result.place]
        for name, result in call.outputs.items()
    }


def prepare(spec: OpSpec, call: Call, views: Mapping[str, TensorView], device: Device) -> StepLaunches:
    """Plan a call on a GPU and build its kernels, or find those in memory. ``views`` are of operands and outputs. Where
    there is nothing to launch, every output is zero."""
    check_memory(spec.name, call.problem.dtype, views, device)
    if spec.products and call.problem.dtype in ("f16", "bf16"):
        find_layout(device)
    return load_steps(spec.plan(call.problem, views, device.target), device)


def prepare_cpu(spec: OpSpec, call: Call, views: Mapping[str, TensorView], device: Device) -> cpu.Ready:
    """The same on the processor, once per signature, for `cpu.run`."""
    known: dict[Any, cpu.Ready] = vars(device).setdefault("_ready_fused", {})
    layout = tuple((name, view.dtype, view.strides, view.offset) for name, view in views.items())
    key = (spec.name, call.problem, layout)
    ready = known.get(key)
    if ready is None:
        if len(known) >= _MAX_SIGNATURES:
            known.clear()
        plan = spec.plan(call.problem, views, device.target)
        ready = known[key] = cpu.prepare(plan, work_dtype(call), device)
    return ready


def on_host(spec: OpSpec, call: Call, device: Device | None) -> dict[str, Array]:
    """Compute on host arrays, through a device or with NumPy; results are finished on return, bf16 as its bits.

    Parameters
    ----------
    device : Device or None
        None stands for NumPy.
    """
    if spec.check is not None:
        spec.check(spec.name, call.problem, {name: view.storage for name, view in call.views.items()})
    results: dict[str, Array] = {}
    for name, result in call.outputs.items():
        if result.place is not None:
            results[name] = _writable(spec, result.place, call.views[result.place].storage)
        else:
            results[name] = np.empty(result.shape, STORED[result.dtype])
    if device is None:
        _on_numpy(spec, call, results)
    elif device.target.backend == "cpu":
        _on_cpu(spec, call, device, results)
    else:
        _through_device(spec, call, device, results)
    return results


def _writable(spec: OpSpec, name: str, array: Array) -> Array:
    if not array.flags.writeable:
        raise InvalidArgumentError(
            f"[{spec.name}] expected {name} to be writable, got a read-only array; copy it first, or leave inplace out"
        )
    return array


def _on_numpy(spec: OpSpec, call: Call, results: dict[str, Array]) -> None:
    arrays = {name: as_float(view.storage, view.dtype) for name, view in call.views.items()}
    with np.errstate(all="ignore"):
        found = spec.compute(call.problem, arrays, tuple(results))
        for name, array in found.items():
            dtype = call.outputs[name].dtype
            results[name][...] = stored(np.ascontiguousarray(array, work_dtype(call)), dtype)


def _on_cpu(spec: OpSpec, call: Call, device: Device, results: dict[str, Array]) -> None:
    views = dict(call.views)
    for name, array in results.items():
        views[name] = host_view(call.outputs[name].dtype, array)
    ready = prepare_cpu(spec, call, views, device)
    if not ready.buffers:
        _clear(results)
    cpu.run(ready, device, {name: cpu.address(view.storage) for name, view in views.items()})


def _through_device(spec: OpSpec, call: Call, device: Device, results: dict[str, Array]) -> None:
    check_memory(spec.name, call.problem.dtype, call.views, device)
    with Arena(device) as arena:
        views = {name: arena.bring(view) for name, view in call.views.items()}
        for name, result in call.outputs.items():  # in memory of their own also where they have a place
            views[name] = TensorView(result.dtype, result.shape, contiguous_strides(result.shape), "device", None)
        ready = prepare(spec, call, views, device)
        if not ready.steps:
            _clear(results)
            return
        memory = {name: view.storage for name, view in views.items()}
        memory |= {name: arena.alloc(array.nbytes) for name, array in results.items()}
        memory |= {name: arena.alloc(4 * count) for name, count in ready.workspace.items()}
        memory |= {name: zeroed(device, words) for name, words in ready.zeroed.items()}
        launch_steps(ready, device, memory)
        for name, array in results.items():
            finished = array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
            device.download(memory[name], finished)
            if finished is not array:
                array[...] = finished


def _clear(results: dict[str, Array]) -> None:
    for array in results.values():
        array.fill(0)
