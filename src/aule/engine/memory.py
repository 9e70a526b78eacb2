"""Memory of a call: what arrays of results are made of, device memory that is given back, and what is too large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.errors import InvalidDtypeError, InvalidShapeError
from aule.runtime.base import Allocation, Device
from aule.view import TensorView, contiguous_strides

Array = npt.NDArray[Any]

_LEAST_ZEROED = 1024

STORED = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "f64": np.float64}
"""NumPy's type for the elements of a result (bf16 as its bits)."""


def check_memory(op: str, dtype: str, views: Mapping[str, TensorView], device: Device) -> None:
    """Refuse what a GPU cannot do, with the remedy."""
    target = device.target
    if dtype == "f64":
        raise InvalidDtypeError(
            f"[{op}] expected float32, float16 or bfloat16 on {target.backend}, got float64; "
            "use backend='cpu' or 'numpy' for float64"
        )
    for name, view in views.items():
        steps = zip(view.shape, view.strides, strict=True)
        extent = (view.offset + 1 + sum((n - 1) * s for n, s in steps if n > 0)) * view.itemsize
        if extent > target.max_buffer_bytes:
            raise InvalidShapeError(
                f"[{op}] expected arrays of at most {target.max_buffer_bytes} bytes on {target.name}, got "
                f"{name} with {extent}; split the batch or use another backend"
            )


def host_view(dtype: str, array: Array) -> TensorView:
    """A view of an array of stored elements in host memory."""
    return TensorView(dtype, array.shape, tuple(step // array.itemsize for step in array.strides), "host", array)


def zeroed(device: Device, words: int) -> Allocation:
    """At least so many 32-bit words of a device's own, for launches that find them zero and leave them zero.

    Work on a device is ordered, so all launches can have the same, whoever starts them; streams of others, on which
    CUDA's can be launched as well, are not, and need memory of their own.
    """
    # Those that are too small stay, for whoever has them in hand: each is at least twice as large as the one before.
    # Two threads may make one each, which does no harm.
    pieces: list[Allocation] = vars(device).setdefault("_engine_zeroed", [])
    for piece in pieces:
        if piece.nbytes >= 4 * words:
            return piece
    zeros = np.zeros(1 << (max(words, _LEAST_ZEROED) - 1).bit_length(), np.int32)
    made = device.alloc(zeros.nbytes)
    device.upload(made, zeros)
    pieces.append(made)
    return made


class Arena:
    """Device memory of one call, given back at its end whatever happens."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.owned: list[Allocation] = []

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        for allocation in self.owned:
            self.device.free(allocation)

    def alloc(self, nbytes: int) -> Allocation:
        """Memory; never empty, since no driver binds an empty buffer."""
        self.owned.append(self.device.alloc(max(nbytes, 16)))
        return self.owned[-1]

    def bring(self, view: TensorView) -> TensorView:
        """A host array on the device: without a copy where the device can, and never expanding what is broadcast."""
        array: Array = view.storage
        compact = np.asarray(array[tuple(slice(None) if s else slice(0, 1) for s in view.strides)], order="C")
        packed = contiguous_strides(compact.shape)
        strides = tuple(p if s else 0 for p, s in zip(packed, view.strides, strict=True))
        allocation = self.device.import_host(compact) if compact.size else None
        if allocation is not None:
            self.owned.append(allocation)
        else:
            allocation = self.alloc(compact.nbytes)
            if compact.size:
                self.device.upload(allocation, compact)
        return TensorView(view.dtype, view.shape, strides, "device", allocation)
