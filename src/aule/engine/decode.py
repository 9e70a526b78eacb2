"""Runs decoding: plan, programs, launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aule.engine import cpu
from aule.engine.memory import STORED, Arena, check_memory, host_view, zeroed
from aule.engine.probe import find_layout
from aule.engine.programs import StepLaunches, launch_steps, load_steps
from aule.ops.decode import sequences
from aule.ops.decode.plan import decode_views, plan_decode
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.validate import DecodeOperands
from aule.runtime.base import Device
from aule.view import TensorView, contiguous_strides

Array = npt.NDArray[Any]


def prepare_decode(
    op: str,
    problem: DecodeProblem,
    views: dict[str, TensorView],
    device: Device,
    aligned_base: dict[str, bool] | None = None,
) -> StepLaunches:
    """Plan decoding on a GPU and build its kernels, or find both in memory. ``views`` as for `plan_decode`."""
    check_memory(op, problem.dtype, views, device)
    if problem.dtype in ("f16", "bf16"):
        find_layout(device)
    return load_steps(plan_decode(problem, views, device.target, aligned_base), device)


def decode_on_host(
    op: str, problem: DecodeProblem, operands: DecodeOperands, device: Device | None, out: Array | None = None
) -> tuple[Array, Array | None]:
    """Compute on host arrays, through a device or with NumPy; the results are finished on return.

    Parameters
    ----------
    op : str
        The public function that was called, for messages.
    out : ndarray, optional
        ``problem.out_shape``, of any strides; made when not given.
    """
    shape = problem.out_shape
    if out is None:
        out = np.empty(shape, STORED[problem.dtype])
    lse = np.empty(shape[:3], np.float32) if problem.return_lse else None
    inputs = (getattr(operands, name) for name in ("q", "k", "v", "k_scale", "v_scale", "alibi", "sinks"))
    overlaps = any(view is not None and np.may_share_memory(out, view.storage) for view in inputs)
    target = np.empty(shape, out.dtype) if overlaps else out
    if device is None:
        sequences.decode(problem, operands, target, lse)
    elif device.target.backend == "cpu":
        _on_cpu(problem, operands, device, target, lse)
    else:
        _through_device(op, problem, operands, device, target, lse)
    if target is not out:
        out[...] = target
    return out, lse


def _on_cpu(problem: DecodeProblem, operands: DecodeOperands, device: Device, out: Array, lse: Array | None) -> None:
    """Compute with the CPU engine, in place. The log-sum-exp of an fp64 problem is computed in fp64."""
    kept = None if lse is None else np.empty(lse.shape, cpu.work_dtype(problem))
    cpu.decode(problem, decode_views(operands, host_view(problem.dtype, out)), device, kept)
    if lse is not None:
        lse[...] = kept


def _through_device(
    op: str, problem: DecodeProblem, operands: DecodeOperands, device: Device, out: Array, lse: Array | None
) -> None:
    result = TensorView(problem.dtype, problem.out_shape, contiguous_strides(problem.out_shape), "device", None)
    views = decode_views(operands, result)
    check_memory(op, problem.dtype, views, device)
    with Arena(device) as arena:
        views = {name: view if name == "o" else arena.bring(view) for name, view in views.items()}
        ready = prepare_decode(op, problem, views, device)
        finished = np.zeros(out.shape, out.dtype)
        if ready.steps:
            memory = {name: view.storage for name, view in views.items()}
            memory["o"] = arena.alloc(finished.nbytes)
            memory["lse"] = arena.alloc(4 * max(finished[..., 0].size, 1))
            if problem.total_q is not None:  # rows that no sequence has
                device.upload(memory["o"], finished)
                device.upload(memory["lse"], np.full(problem.out_shape[:3], -np.inf, np.float32))
            memory |= {name: arena.alloc(4 * count) for name, count in ready.workspace.items()}
            memory |= {name: zeroed(device, words) for name, words in ready.zeroed.items()}
            launch_steps(ready, device, memory)
            device.download(memory["o"], finished)
            if lse is not None:
                device.download(memory["lse"], lse)
        elif lse is not None:
            lse[...] = -np.inf
    out[...] = finished
