"""TensorView: where an array lives and how it is laid out, whatever framework it came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from aule.dtypes import usual_name

ITEMSIZE = {
    "bool": 1, "u8": 1, "i8": 1, "e4m3": 1, "f16": 2, "bf16": 2, "i32": 4, "u32": 4, "f32": 4, "i64": 8, "f64": 8,
}  # fmt: skip
"""Bytes per element by dtype name; also the list of dtypes that a view may have."""


@dataclass(frozen=True, eq=False)
class TensorView:
    """A strided view of memory on some device.

    Attributes
    ----------
    dtype : str
        IR name: ``f32``, ``f16``, ``bf16``, ``f64``, ``bool`` ..., or ``e4m3``, which kernels read as bits.
    shape, strides : tuple of int
        Strides are in elements; 0 broadcasts an axis; negative only for host arrays.
    device : str
        ``"host"`` or a device name such as ``"cuda:0"``.
    storage : object
        Host: a NumPy array of exactly this shape and strides (bf16 as uint16, e4m3 as uint8). Device: a buffer as
        `Device.launch` takes it.
    offset : int
        Elements from the start of ``storage`` to element (0, ..., 0); 0 for host arrays.
    alignment : int
        Guaranteed alignment of the address of ``storage`` in bytes, a power of two up to 16.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    storage: Any
    offset: int = 0
    alignment: int = 16

    @property
    def dtype_name(self) -> str:
        """The dtype as messages name it: ``float32``."""
        return usual_name(self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def is_host(self) -> bool:
        """True if the array is in host memory."""
        return self.device == "host"

    @property
    def last_index(self) -> int:
        """Largest element index used, counted from the start of ``storage``."""
        return self.offset + sum((n - 1) * abs(s) for n, s in zip(self.shape, self.strides, strict=True) if n > 1)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def packed_strides(view: TensorView) -> tuple[int, ...]:
    """Strides without gaps that keep a view's axis order in memory.

    Contiguous strides if the last axis of the view does not have stride 1, or if elements repeat.
    """
    used = [(stride, axis) for axis, (n, stride) in enumerate(zip(view.shape, view.strides, strict=True)) if n != 1]
    if not used or view.strides[-1] != 1 or any(stride <= 0 for stride, _ in used):
        return contiguous_strides(view.shape)
    strides, step = list(contiguous_strides(view.shape)), 1
    for _, axis in sorted(used, key=lambda entry: (entry[0], -entry[1])):
        strides[axis] = step
        step *= view.shape[axis]
    return tuple(strides)


def broadcast(view: TensorView, shape: tuple[int, ...], axes: tuple[int | None, ...]) -> TensorView:
    """Broadcast a view to a shape.

    ``axes`` gives, for each axis of ``shape``, the axis of the view, or None for a new one. New axes and axes of
    length 1 get stride 0.
    """
    strides = tuple(
        0 if axis is None or (view.shape[axis] == 1 and n != 1) else view.strides[axis]
        for n, axis in zip(shape, axes, strict=True)
    )
    return restride(view, shape, strides)


def every_nth(view: TensorView, step: int, count: int | None = None) -> TensorView:
    """Every ``step``-th column, at most ``count`` of them."""
    columns = -(-view.shape[-1] // step) if count is None else count
    return restride(view, (*view.shape[:-1], columns), (*view.strides[:-1], view.strides[-1] * step))


def restride(view: TensorView, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorView:
    """View the same memory with another shape and strides; read-only in host memory, since axes may overlap."""
    storage = view.storage
    if isinstance(storage, np.ndarray):
        steps = tuple(stride * storage.itemsize for stride in strides)
        storage = np.lib.stride_tricks.as_strided(storage, shape, steps, writeable=False)
    return replace(view, shape=shape, strides=strides, storage=storage)
