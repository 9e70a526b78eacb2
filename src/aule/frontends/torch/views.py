"""Memory of tensors: views, keys of layouts, overlaps, and fresh tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aule.engine.memory import STORED
from aule.errors import DeviceMismatchError
from aule.frontends.torch.checks import NAMES, dtype_name, require_plain
from aule.view import TensorView, contiguous_strides

Array = npt.NDArray[Any]
ViewOf = Callable[[Tensor, str, str, str], TensorView]
"""Views a tensor; its name, the op and the name of the first operand are for messages."""

DTYPES = {name: dtype for dtype, name in NAMES.items()}
CPU = torch.device("cpu")
"""Named explicitly for new tensors, since PyTorch's default device may be another."""

_STORED = STORED | {
    "bool": np.bool_, "u8": np.uint8, "i8": np.int8, "i32": np.int32, "i64": np.int64, "e4m3": np.uint8
}  # fmt: skip
"""NumPy's type for the elements of any array."""


# -- views -------------------------------------------------------------------------------------------------------------


class _Memory:
    """A tensor's memory in NumPy's array interface; an array made of it keeps the tensor alive."""

    def __init__(self, tensor: Tensor, interface: dict[str, object]) -> None:
        self.tensor, self.__array_interface__ = tensor, interface


def host_array(tensor: Tensor, dtype: str) -> Array:
    """The memory of a CPU tensor as a NumPy array of stored elements.

    ``Tensor.numpy`` would make the storage impossible to resize, as FSDP does with parameters between their uses.
    """
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), _STORED[dtype])
    interface = {
        "version": 3,
        "shape": tuple(tensor.shape),
        "typestr": np.dtype(_STORED[dtype]).str,
        "data": (tensor.data_ptr(), False),
        "strides": tuple(tensor.element_size() * step for step in tensor.stride()),
    }
    return np.asarray(_Memory(tensor, interface))


def view_on_host(tensor: Tensor, name: str, op: str = "flash_attention", like: str = "q") -> TensorView:
    """A view of a CPU tensor, whose storage is a NumPy array."""
    require_plain(tensor, name, op, like)
    if tensor.device.type != "cpu":
        raise DeviceMismatchError(
            f"[{op}] expected {name} on the CPU like {like}, got {tensor.device}; move it with .to"
        )
    dtype = dtype_name(tensor, name, op)
    return TensorView(dtype, tuple(tensor.shape), tensor.stride(), "host", host_array(tensor.detach(), dtype))


def view_on_device(tensor: Tensor, name: str, op: str = "flash_attention", like: str = "q") -> TensorView:
    """A view of a tensor in the memory of its device."""
    require_plain(tensor, name, op, like)
    dtype, at = dtype_name(tensor, name, op), tensor.data_ptr()
    return TensorView(dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device), at, alignment=alignment(at))


def alignment(address: int) -> int:
    """The alignment of an address in bytes, at most 16."""
    return (address | 16) & -(address | 16)


def fresh_view(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> TensorView:
    """A view of memory that is allocated when a call runs; contiguous if strides are None."""
    return TensorView(dtype, shape, strides or contiguous_strides(shape), "device", None)


def four_axes(view: TensorView) -> TensorView:
    """A view with leading axes of length 1, so that there are four."""
    lead = 4 - len(view.shape)
    storage = view.storage
    if isinstance(storage, np.ndarray):
        storage = storage[(None,) * lead]
    return replace(view, shape=(1,) * lead + view.shape, strides=(0,) * lead + view.strides, storage=storage)


def aligned(tensors: dict[str, Tensor]) -> dict[str, bool]:
    """Whether each tensor starts at a multiple of 16 bytes."""
    return {name: x.data_ptr() % 16 == 0 for name, x in tensors.items()}


# -- signatures --------------------------------------------------------------------------------------------------------


def device_layouts(tensors: Iterable[object]) -> Hashable:
    """A key of all that plans and checks depend on, for tensors on a device."""
    return tuple(
        [
            (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.is_neg())
            if isinstance(x, Tensor)
            else type(x)
            for x in tensors
        ]
    )


def host_layouts(tensors: Iterable[object]) -> Hashable:
    """A key of all that plans and checks depend on, for CPU tensors."""
    return tuple(
        [
            (x.shape, x.stride(), x.dtype, x.is_cpu, x.is_neg()) if isinstance(x, Tensor) else type(x)
            for x in tensors
        ]
    )  # fmt: skip


# -- overlaps ----------------------------------------------------------------------------------------------------------


def extent(x: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first element and of the end of its last."""
    start: int = x.data_ptr()
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()


def lies_over(tensors: Sequence[Tensor]) -> bool:
    """Whether writing the last tensor, ``out``, would overwrite rows of q, k or v that a device has still to read.

    q, k and v are the first three. ``out`` may be ``q`` itself: each row of q is read only by the workgroup that writes
    the same row of ``out``.
    """
    q, k, v, *_, out = tensors
    home = out.untyped_storage().data_ptr()
    beside = [x for x in (q, k, v) if x.untyped_storage().data_ptr() == home]
    first, end = extent(out) if beside else (0, 0)
    for x in beside:
        start, stop = extent(x)
        same = x is q and start == first and x.shape == out.shape and x.stride() == out.stride()
        if start < end and first < stop and not same:
            return True
    return False


def shares_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether the last tensor overlaps another in host memory.

    Addresses are compared, not storages: PyTorch makes two storages of two views of one NumPy array.
    """
    *inputs, out = tensors
    first, end = extent(out)
    return any(start < end and first < stop for start, stop in map(extent, inputs))


# -- results -----------------------------------------------------------------------------------------------------------


def fresh(shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor in fresh memory; contiguous if strides are None."""
    if strides is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def written(x: Tensor) -> Tensor:
    """Tell autograd that a kernel writes to a tensor, so that it refuses gradients that need the old contents."""
    torch.autograd.graph.increment_version(x)
    return x


def tensor_like(array: Array, like: Tensor) -> Tensor:
    """An array of stored elements as a tensor of another's dtype and shape."""
    return torch.from_numpy(array).view(like.dtype).reshape(like.shape)


def work_dtype(x: Tensor) -> torch.dtype:
    """The dtype that attention computes in, and that its log-sum-exp has."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
