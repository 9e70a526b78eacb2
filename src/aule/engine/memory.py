"""Memory of a call: host arrays and their copies on a device, workspace, scratch, and size limits."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from aule.errors import AuleError, InvalidDtypeError, InvalidShapeError, OutOfMemoryError
from aule.runtime.base import Allocation, Device
from aule.view import TensorView, contiguous_strides

Array = npt.NDArray[Any]
_P = ParamSpec("_P")
_T = TypeVar("_T")

_LEAST_SCRATCH = 1024
_MOST_REUSED_BYTES = 256 << 20
"""Largest block of host memory that is reused by the next call."""
_lock = threading.Lock()

STORED = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "f64": np.float64}
"""NumPy type of a result's elements; bf16 as its bits."""


def work_dtype(dtype: str) -> Any:
    """Return the NumPy type in which arrays of a dtype are computed."""
    return np.float64 if dtype == "f64" else np.float32


def check_memory(op: str, views: Mapping[str, TensorView], device: Device) -> None:
    """Refuse arrays that a GPU cannot compute on: float64, or too large for a buffer."""
    target = device.target
    if any(view.dtype == "f64" for view in views.values()):
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


_PYTORCH_SHORTAGE = re.compile(r"DefaultCPUAllocator.*you tried to allocate (\d+) bytes", re.DOTALL)
"""Text of the RuntimeError of PyTorch's allocator of host memory."""


def reports_shortage(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a function so that a shortage of host memory raises `OutOfMemoryError`."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            found = _shortage(error)
            if found is None:
                raise
            raise found from error

    return call


def _shortage(error: Exception) -> OutOfMemoryError | None:
    """Return our error for a shortage of host memory that NumPy, PyTorch or Python reported; None for other errors."""
    if isinstance(error, AuleError):
        return None
    requested: int | None = None
    if isinstance(error, RuntimeError):
        asked = _PYTORCH_SHORTAGE.search(str(error))
        if asked is None:
            return None
        requested = int(asked[1])
    elif hasattr(error, "shape") and hasattr(error, "dtype"):  # NumPy says which array
        requested = math.prod(error.shape) * error.dtype.itemsize
    size = "enough" if requested is None else f"{requested} bytes of"
    return OutOfMemoryError(
        f"[host] expected {size} memory, got none ({error or type(error).__name__}); free some or make the problem "
        "smaller",
        requested,
    )


def host_view(dtype: str, array: Array) -> TensorView:
    """Return a view of an array in host memory."""
    return TensorView(dtype, array.shape, tuple(step // array.itemsize for step in array.strides), "host", array)


def address(memory: Any) -> int:
    """Return the address of an array or an allocation in host memory; 0 for None."""
    if memory is None:
        return 0
    return memory.address if isinstance(memory, Allocation) else int(memory.__array_interface__["data"][0])


# -- workspace and scratch ---------------------------------------------------------------------------------------------


class MemorySource(Protocol):
    """Source of a call's workspace and scratch.

    Attributes
    ----------
    raw : bool
        Launches take memory as the source returns it (addresses, tensors), instead of the device's allocations.
    has_scratch : bool
        The source has zeroed memory.
    """

    raw: bool
    has_scratch: bool

    def acquire(self, workspace: Sequence[int], scratch: Sequence[int], stream: int | None) -> tuple[list[Any], Any]:
        """Return memory for one call on a stream.

        Parameters
        ----------
        workspace : sequence of int
            Size of each in bytes; contents are undefined.
        scratch : sequence of int
            Size of each in 32-bit words, all zero; the call leaves them zero.

        Returns
        -------
        memory : list
            Workspaces, then scratch, as launches take them.
        block : object
            Argument for `release`.
        """

    def release(self, block: Any) -> None:
        """Take memory back, after all launches that use it have started."""


class DeviceMemory:
    """Allocations of a device."""

    raw = False
    has_scratch = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def acquire(self, workspace: Sequence[int], scratch: Sequence[int], stream: int | None) -> tuple[list[Any], Any]:
        """As `MemorySource.acquire`."""
        arena = Arena(self._device)
        try:
            zeros = [device_scratch(self._device, words, i) for i, words in enumerate(scratch)]
            return [*map(arena.alloc, workspace), *zeros], arena
        except BaseException:
            arena.close()
            raise

    def release(self, block: Arena) -> None:
        """As `MemorySource.release`; the device defers the free until the work is done."""
        block.close()


def device_scratch(device: Device, words: int, number: int = 0) -> Allocation:
    """Return at least ``words`` 32-bit words that are zero between launches; a separate allocation per ``number``.

    Work on a device is ordered, so all its launches can share them. Launches on a framework's streams are not ordered
    with these and need separate memory.
    """
    # Allocations that are too small stay, since launches may use them; each is at least twice as large as the previous.
    # Two threads may each make one, which is harmless.
    pieces: list[Allocation] = vars(device).setdefault("_engine_scratch", {}).setdefault(number, [])
    for piece in pieces:
        if piece.nbytes >= 4 * words:
            return piece
    zeros = np.zeros(1 << (max(words, _LEAST_SCRATCH) - 1).bit_length(), np.int32)
    made = device.alloc(zeros.nbytes)
    device.upload(made, zeros)
    pieces.append(made)
    return made


class HostMemory:
    """Host memory for the CPU: one block, reused by the next call because fresh memory costs page faults."""

    raw = True
    has_scratch = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def acquire(self, workspace: Sequence[int], scratch: Sequence[int], stream: int | None) -> tuple[list[Any], Any]:
        """As `MemorySource.acquire`, with addresses. A thread that finds no free block allocates one."""
        size = sum(workspace) + 4 * sum(scratch)
        with _lock:
            block: Allocation | None = vars(self._device).pop("_workspace", None)
        if block is None or block.nbytes < size or block.freed:
            block = self._device.alloc(size)
        at = block.address
        memory = []
        for nbytes in workspace:
            memory.append(at)
            at += nbytes
        for words in scratch:
            ctypes.memset(at, 0, 4 * words)
            memory.append(at)
            at += 4 * words
        return memory, block

    def release(self, block: Allocation) -> None:
        """As `MemorySource.release`; launches on the CPU have ended by then."""
        if block.nbytes <= _MOST_REUSED_BYTES:
            with _lock:
                vars(self._device).setdefault("_workspace", block)


def _after_fork() -> None:
    # A thread of the parent may have held the lock; nothing in the child would release it.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def on_device(view: TensorView, memory: Any = None) -> TensorView:
    """A host view as it is on a device: without gaps, broadcast axes still broadcast."""
    packed = contiguous_strides(tuple(n if s else min(n, 1) for n, s in zip(view.shape, view.strides, strict=True)))
    strides = tuple(p if s else 0 for p, s in zip(packed, view.strides, strict=True))
    return TensorView(view.dtype, view.shape, strides, "device", memory)


# -- arrays of one call ------------------------------------------------------------------------------------------------


class Arena:
    """Device memory of one call, freed at the end of a ``with`` block."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.owned: list[Allocation] = []

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory."""
        for allocation in self.owned:
            self.device.free(allocation)

    def alloc(self, nbytes: int) -> Allocation:
        """Allocate memory, at least 16 bytes: no driver binds an empty buffer."""
        self.owned.append(self.device.alloc(max(nbytes, 16)))
        return self.owned[-1]

    def bring(self, view: TensorView) -> TensorView:
        """Bring a host array to the device, without a copy if possible. Broadcast axes are not expanded."""
        array: Array = view.storage
        compact = np.asarray(array[tuple(slice(None) if s else slice(0, 1) for s in view.strides)], order="C")
        allocation = self.device.import_host(compact) if compact.size else None
        if allocation is not None:
            self.owned.append(allocation)
        else:
            allocation = self.alloc(compact.nbytes)
            if compact.size:
                self.device.upload(allocation, compact)
        return on_device(view, allocation)
