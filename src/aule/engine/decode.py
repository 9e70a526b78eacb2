"""Decoding: which planner serves a problem on a device, and how host arrays are computed on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aule.engine import host
from aule.engine.memory import STORED, MemorySource, check_memory, host_view, work_dtype
from aule.engine.probe import find_layout
from aule.engine.run import PreparedCall, prepare
from aule.ops.decode import sequences
from aule.ops.decode.plan.decode import decode_views, plan_decode
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.validate import DecodeOperands
from aule.runtime.base import Device
from aule.view import TensorView

Array = npt.NDArray[Any]


def prepare_decode(
    op: str,
    problem: DecodeProblem,
    views: dict[str, TensorView],
    device: Device,
    aligned_base: dict[str, bool] | None = None,
    memory: MemorySource | None = None,
) -> PreparedCall:
    """Plan decoding on a device and load its kernels.

    Parameters
    ----------
    op : str
        The public function that was called, for messages.
    views : dict
        As for `plan_decode`. The log-sum-exp, where it is wanted, is the buffer ``lse``: contiguous, in the type that
        is computed in.
    aligned_base, memory
        As for `prepare_forward`.
    """
    if device.target.backend == "cpu":
        from aule.ops.decode.cpu import plan as cpu

        return host.prepare_once(cpu.plan_decode, problem, views, device)
    check_memory(op, views, device)
    if problem.dtype in ("f16", "bf16"):
        find_layout(device)
    return prepare(plan_decode(problem, views, device.target, aligned_base), device, memory=memory)


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
    shape, dtype = problem.out_shape, problem.dtype
    if out is None:
        out = np.empty(shape, STORED[dtype])
    lse = np.empty(shape[:3], work_dtype(dtype)) if problem.return_lse else None
    views = decode_views(operands, host_view(dtype, out))
    del views["o"]
    target = host.without_overlap(out, views)
    if device is None:
        sequences.decode(problem, operands, target, lse)
    else:
        _through(op, problem, views, device, target, lse)
    if target is not out:
        out[...] = target
    return out, None if lse is None else lse.astype(np.float32, copy=False)


def _through(
    op: str, problem: DecodeProblem, views: dict[str, TensorView], device: Device, out: Array, lse: Array | None
) -> None:
    outputs = {"o": host_view(problem.dtype, out)}
    if lse is not None:
        outputs["lse"] = host_view("f64" if problem.dtype == "f64" else "f32", lse)
    filled = () if problem.total_q is None else ("o", "lse")
    if filled:  # rows of no sequence, which no kernel writes
        _fill(out, lse)

    def prepared(made: dict[str, TensorView]) -> PreparedCall:
        return prepare_decode(op, problem, {name: x for name, x in made.items() if name != "lse"}, device)

    if not host.compute(op, device, views, outputs, prepared, filled):
        _fill(out, lse)


def _fill(out: Array, lse: Array | None) -> None:
    """Results of rows without keys."""
    out.fill(0)
    if lse is not None:
        lse.fill(-np.inf)
