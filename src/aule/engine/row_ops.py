"""Runs row operations: plans them on a device, and computes on host arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.backends import registry
from aule.engine import host, observe
from aule.engine.memory import STORED, check_memory, host_view, work_dtype
from aule.engine.probe import find_layout
from aule.engine.run import PreparedCall, prepare
from aule.errors import AuleError, InvalidArgumentError
from aule.ops.catalogue import CATALOGUE
from aule.ops.shared.elements import as_float, stored
from aule.ops.shared.plan import Plan
from aule.ops.shared.spec import Call, OpSpec
from aule.runtime.base import Device
from aule.view import TensorView, contiguous_strides

Array = npt.NDArray[Any]


def host_device(spec: str | None) -> Device | None:
    """Return the device for arrays in host memory; None means NumPy.

    Row operations are bound by memory: unlike attention, they stay on the CPU unless another device is requested.
    """
    wanted = registry.requested_backend(spec)
    if wanted is not None:
        return registry.find(wanted)
    try:
        return registry.find("cpu")
    except AuleError:
        return registry.choose(None)


def result_views(call: Call) -> dict[str, TensorView]:
    """Return views of a call's outputs, without memory unless they replace an operand."""
    return {
        name: TensorView(result.dtype, result.shape, result.strides or contiguous_strides(result.shape), "device", None)
        if result.place is None
        else call.views[result.place]
        for name, result in call.outputs.items()
    }


def row_op_plan(spec: OpSpec, problem: Any, views: Mapping[str, TensorView], device: Device) -> Plan:
    """Plan a call on a device; ``views`` holds operands and outputs by name."""
    if device.target.backend != "cpu":
        check_memory(spec.name, views, device)
        if spec.products and problem.dtype in ("f16", "bf16"):
            find_layout(device)
    return spec.plan(problem, views, device.target)


def prepare_row_op(spec: OpSpec, call: Call, views: Mapping[str, TensorView], device: Device) -> PreparedCall:
    """Plan a call on a device and load its kernels. If there is nothing to launch, every output is zero.

    ``views`` holds operands and outputs by name.
    """
    backward = is_gradient(spec)
    if device.target.backend == "cpu":
        return host.prepare_once(spec.name, spec.plan, call.problem, views, device, backward)
    return prepare(row_op_plan(spec, call.problem, views, device), device, op=spec.name, backward=backward)


def is_gradient(spec: OpSpec) -> bool:
    """Whether an op is the gradient of another."""
    return spec.name not in CATALOGUE


def on_host(spec: OpSpec, call: Call, device: Device | None) -> dict[str, Array]:
    """Compute on host arrays, through a device or with NumPy; results are finished on return, bf16 as its bits.

    Parameters
    ----------
    device : Device or None
        None means NumPy.
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
        with observe.on_numpy(spec.name, is_gradient(spec)):
            _on_numpy(spec, call, results)
        return results
    outputs = {name: host_view(call.outputs[name].dtype, array) for name, array in results.items()}
    if not host.compute(spec.name, device, call.views, outputs, lambda x: prepare_row_op(spec, call, x, device)):
        for array in results.values():
            array.fill(0)
    return results


def _writable(spec: OpSpec, name: str, array: Array) -> Array:
    if not array.flags.writeable:
        raise InvalidArgumentError(
            f"[{spec.name}] expected {name} to be writable, got a read-only array; copy it first, or leave inplace out"
        )
    return array


def _on_numpy(spec: OpSpec, call: Call, results: dict[str, Array]) -> None:
    if call.problem.length == 0:  # as on devices, which have nothing to launch
        for array in results.values():
            array.fill(0)
        return
    arrays = {name: as_float(view.storage, view.dtype) for name, view in call.views.items()}
    with np.errstate(all="ignore"):
        found = spec.compute(call.problem, arrays, tuple(results))
        for name, array in found.items():
            dtype = call.outputs[name].dtype
            results[name][...] = stored(np.ascontiguousarray(array, work_dtype(call.problem.dtype)), dtype)
