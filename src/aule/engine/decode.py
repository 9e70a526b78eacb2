"""Runs decoding: plans a problem on a device, loads its kernels, and computes on host arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.engine import host
from aule.engine.memory import STORED, check_memory, host_view
from aule.engine.probe import find_layout
from aule.engine.run import PreparedCall, prepare
from aule.ops.decode import sequences
from aule.ops.decode.plan.decode import decode_views, plan_decode
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.validate import DecodeOperands
from aule.ops.shared.plan import Plan
from aule.runtime.base import Device
from aule.view import TensorView

Array = npt.NDArray[Any]


def decode_plan(
    op: str,
    problem: DecodeProblem,
    views: dict[str, TensorView],
    device: Device,
    aligned_base: dict[str, bool] | None = None,
) -> Plan:
    """Plan decoding on a device.

    Parameters
    ----------
    op : str
        The public function that was called, for messages.
    views : dict
        As for `plan_decode`. The log-sum-exp, if wanted, is the buffer ``lse``: contiguous, in the type that is
        computed in.
    aligned_base : dict, optional
        As for `forward_plan`.
    """
    if device.target.backend == "cpu":
        from aule.ops.decode.cpu import plan as cpu

        return cpu.plan_decode(problem, views, device.target)
    check_memory(op, views, device)
    if problem.dtype in ("f16", "bf16"):
        find_layout(device)
    return plan_decode(problem, views, device.target, aligned_base)


def prepare_decode(op: str, problem: DecodeProblem, views: dict[str, TensorView], device: Device) -> PreparedCall:
    """Plan decoding on a device, as `decode_plan` does, and load its kernels."""
    if device.target.backend == "cpu":
        from aule.ops.decode.cpu import plan as cpu

        return host.prepare_once(op, cpu.plan_decode, problem, views, device)
    return prepare(decode_plan(op, problem, views, device), device, op=op)


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
    if out is None:
        out = np.empty(problem.out_shape, STORED[problem.dtype])
    views = decode_views(operands, host_view(problem.dtype, out))
    on_numpy, prepared = partial(sequences.decode, problem, operands), partial(prepare_decode, op, problem)
    out, lse = host.attend(op, problem, views, device, on_numpy, prepared, some_rows=problem.total_q is not None)
    return out, None if lse is None else lse.astype(np.float32, copy=False)
