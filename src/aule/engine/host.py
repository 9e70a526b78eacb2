"""Calls on host arrays: in place on the CPU, with copies to any other device and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.engine import observe
from aule.engine.memory import Arena, check_memory, host_view, work_dtype
from aule.engine.run import PreparedCall, prepare
from aule.engine.signatures import signatures
from aule.ops.attention.problem import AttentionProblem
from aule.ops.decode.problem import DecodeProblem
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
    """Compute on arrays in host memory; the results are finished on return.

    Parameters
    ----------
    inputs, outputs : mapping
        Views of arrays, by buffer name; outputs of any strides.
    prepared : callable
        Returns the call for views of all memory on the device.
    uploaded : iterable of str
        Outputs whose initial contents matter.

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


def attend(
    op: str,
    problem: AttentionProblem | DecodeProblem,
    views: dict[str, TensorView],
    device: Device | None,
    on_numpy: Callable[[Array, Array | None], None],
    prepared: Callable[[dict[str, TensorView], Device], PreparedCall],
    some_rows: bool = False,
) -> tuple[Array, Array | None]:
    """Compute attention on host arrays; return O and, if the problem wants it, the log-sum-exp.

    Parameters
    ----------
    views : dict
        Operands and the result ``o``, which may overlap them.
    device : Device or None
        None means NumPy.
    on_numpy : callable
        Computes O and the log-sum-exp, its arguments, with NumPy.
    prepared : callable
        Returns the call on the device, from views of all memory but the log-sum-exp's.
    some_rows : bool
        The kernels leave rows of no sequence unwritten.
    """
    dtype = problem.dtype
    out: Array = views.pop("o").storage
    lse = np.empty(problem.out_shape[:3], work_dtype(dtype)) if problem.return_lse else None
    target = without_overlap(out, views)
    if device is None:
        with observe.on_numpy(op):
            on_numpy(target, lse)
    else:
        outputs = {"o": host_view(dtype, target)}
        if lse is not None:
            outputs["lse"] = host_view("f64" if dtype == "f64" else "f32", lse)
        if some_rows:
            _fill_without_keys(target, lse)
        uploaded = ("o", "lse") if some_rows else ()
        if not compute(op, device, views, outputs, lambda made: prepared(without_lse(made), device), uploaded):
            _fill_without_keys(target, lse)
    if target is not out:
        out[...] = target
    return out, lse


def without_lse(views: Views) -> dict[str, TensorView]:
    """Drop the view of the log-sum-exp, which planners do not take: it is contiguous."""
    return {name: view for name, view in views.items() if name != "lse"}


def _fill_without_keys(out: Array, lse: Array | None) -> None:
    """Write the results of rows without keys."""
    out.fill(0)
    if lse is not None:
        lse.fill(-np.inf)


def _download(device: Device, memory: Any, array: Array) -> None:
    finished = array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
    device.download(memory, finished)
    if finished is not array:
        array[...] = finished


def without_overlap(out: Array, inputs: Views) -> Array:
    """Return ``out``, or fresh memory if it overlaps an input: rows are written before others are read."""
    overlaps = any(np.may_share_memory(out, view.storage) for view in inputs.values())
    return np.empty(out.shape, out.dtype) if overlaps else out


def prepare_once(
    op: str,
    planner: Callable[[Any, Any, Target], Plan],
    problem: Any,
    views: Views,
    device: Device,
    backward: bool = False,
) -> PreparedCall:
    """Plan and load a call on the CPU, once per signature; ``op`` and ``backward`` as for `prepare`."""
    layout = tuple((name, x.dtype, x.shape, x.strides, x.offset, x.alignment) for name, x in views.items())
    key = (planner, device, problem, layout)
    found: PreparedCall | None = signatures.get(key)
    if found is None:
        plan = planner(problem, views, device.target)
        size = np.dtype(work_dtype(problem.dtype)).itemsize
        found = prepare(plan, device, op=op, backward=backward, itemsize=size)
        signatures.put(key, found, device)
    return found
