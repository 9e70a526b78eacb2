"""Computes on host arrays: in place on the CPU, with copies to any other device and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.engine.memory import Arena, check_memory, work_dtype
from aule.engine.run import PreparedCall, prepare
from aule.engine.signatures import signatures
from aule.ops.shared.plan import Plan
from aule.runtime.base import Device
from aule.target import Target
from aule.view import TensorView, contiguous_strides

Array = npt.NDArray[Any]
Views = Mapping[str, TensorView]


def compute(
    op: str,
    device: Device,
    inputs: Views,
    outputs: Views,
    prepared: Callable[[dict[str, TensorView]], PreparedCall],
    uploaded: Iterable[str] = (),
) -> bool:
    """Compute on arrays in host memory; the results are there on return.

    Parameters
    ----------
    inputs, outputs : mapping
        Views of arrays, by buffer name; outputs of any strides.
    prepared : callable
        The call for views of all memory, in its place on the device.
    uploaded : iterable of str
        Outputs whose contents matter before.

    Returns
    -------
    bool
        Whether anything was launched; outputs are unchanged otherwise.
    """
    if device.target.backend == "cpu":
        views = {**inputs, **outputs}
        call = prepared(views)
        call.run({name: view.storage for name, view in views.items()})
        return not call.empty
    check_memory(op, inputs, device)
    with Arena(device) as arena:
        views = {name: arena.bring(view) for name, view in inputs.items()}
        for name, view in outputs.items():
            memory = arena.alloc(view.storage.nbytes)
            views[name] = TensorView(view.dtype, view.shape, contiguous_strides(view.shape), "device", memory)
        call = prepared(views)
        if call.empty:
            return False
        for name in uploaded:
            if name in outputs:
                device.upload(views[name].storage, np.ascontiguousarray(outputs[name].storage))
        call.run({name: view.storage for name, view in views.items()})
        for name, view in outputs.items():
            _download(device, views[name].storage, view.storage)
    return True


def _download(device: Device, memory: Any, array: Array) -> None:
    finished = array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
    device.download(memory, finished)
    if finished is not array:
        array[...] = finished


def without_overlap(out: Array, inputs: Views) -> Array:
    """``out``, or fresh memory if it overlaps an input: rows are written while others have still to be read."""
    overlaps = any(np.may_share_memory(out, view.storage) for view in inputs.values())
    return np.empty(out.shape, out.dtype) if overlaps else out


def prepare_once(
    planner: Callable[[Any, Any, Target], Plan], problem: Any, views: Views, device: Device
) -> PreparedCall:
    """A plan of the CPU, made and loaded once per signature."""
    layout = tuple((name, x.dtype, x.shape, x.strides, x.offset, x.alignment) for name, x in views.items())
    key = (planner, device, problem, layout)
    found: PreparedCall | None = signatures.get(key)
    if found is None:
        plan = planner(problem, views, device.target)
        found = prepare(plan, device, itemsize=np.dtype(work_dtype(problem.dtype)).itemsize)
        signatures.put(key, found, device)
    return found
