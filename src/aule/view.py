"""TensorView: where an array lives and how it is laid out, whatever framework it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

ITEMSIZE = {
    "bool": 1, "u8": 1, "i8": 1, "e4m3": 1, "f16": 2, "bf16": 2, "i32": 4, "u32": 4, "f32": 4, "i64": 8, "f64": 8,
}  # fmt: skip
"""Bytes of an element, by dtype name; also the list of dtypes a view may have."""


@dataclass(frozen=True, eq=False)
class TensorView:
    """A strided view of memory on some device.

    Attributes
    ----------
    dtype : str
        IR name: ``f32``, ``f16``, ``bf16``, ``f64``, ``bool`` ..., or ``e4m3``, which kernels know by its bits.
    shape, strides : tuple of int
        Strides count elements, may be 0 (broadcast) or negative (host arrays only).
    device : str
        ``"host"`` or a device name such as ``"cuda:0"``.
    storage : object
        Host: a NumPy array of exactly this shape and strides (bf16 as uint16, e4m3 as uint8). Device: what
        `Device.launch` takes.
    offset : int
        Elements from the start of ``storage`` to element (0, ..., 0); 0 for host arrays.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    storage: Any
    offset: int = 0

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def is_host(self) -> bool:
        return self.device == "host"


def restride(view: TensorView, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorView:
    """The same memory with another shape and other strides, read-only in host memory."""
    storage = view.storage
    if view.is_host:
        # The host storage promises exactly the view's shape and strides; read-only because axes may overlap.
        steps = tuple(stride * view.itemsize for stride in strides)
        storage = np.lib.stride_tricks.as_strided(storage, shape, steps, writeable=False)
    return TensorView(view.dtype, shape, strides, view.device, storage, view.offset)
