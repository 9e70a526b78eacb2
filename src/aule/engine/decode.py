"""Runs decoding: plan, programs, launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aule.engine.attention import STORED
from aule.ops.decode import sequences
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.validate import DecodeOperands
from aule.runtime.base import Device

Array = npt.NDArray[Any]


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
    sequences.decode(problem, operands, out, lse)
    return out, lse
