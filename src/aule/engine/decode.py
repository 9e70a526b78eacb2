"""Runs decoding: plan, programs, launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aule.engine import cpu
from aule.engine.attention import STORED, host_view
from aule.ops.decode import sequences
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.validate import DecodeOperands
from aule.runtime.base import Device
from aule.view import TensorView

Array = npt.NDArray[Any]


def named(operands: DecodeOperands, out: TensorView) -> dict[str, TensorView]:
    """The operands by the names that plans and kernels use; the log-sum-exp is contiguous and needs no view."""
    views = {"q": operands.q, "k": operands.k, "v": operands.v, "o": out}
    for name in ("k_scale", "v_scale", "tables", "lens", "cu_q", "alibi", "sinks"):
        view = getattr(operands, name)
        if view is not None:
            views[name] = view
    return views


def decode_on_host(
    problem: DecodeProblem, operands: DecodeOperands, device: Device | None, out: Array | None = None
) -> tuple[Array, Array | None]:
    """Compute on host arrays, through a device or with NumPy; the results are finished on return.

    Parameters
    ----------
    out : ndarray, optional
        ``problem.out_shape``, of any strides; made when not given.
    """
    shape = problem.out_shape
    if out is None:
        out = np.empty(shape, STORED[problem.dtype])
    lse = np.empty(shape[:3], np.float32) if problem.return_lse else None
    if device is not None and device.target.backend == "cpu":
        _decode_on_cpu(problem, operands, device, out, lse)
    else:
        sequences.decode(problem, operands, out, lse)
    return out, lse


def _decode_on_cpu(
    problem: DecodeProblem, operands: DecodeOperands, device: Device, out: Array, lse: Array | None
) -> None:
    """Compute with the CPU engine, in place. The log-sum-exp of an fp64 problem is computed in fp64."""
    # Rows are written while others are still to be read.
    overlaps = any(np.may_share_memory(out, view.storage) for view in named(operands, operands.q).values())
    target = np.empty(out.shape, out.dtype) if overlaps else out
    kept = None if lse is None else np.empty(lse.shape, cpu.work_dtype(problem))
    cpu.decode(problem, named(operands, host_view(problem.dtype, target)), device, kept)
    if target is not out:
        out[...] = target
    if lse is not None:
        lse[...] = kept
