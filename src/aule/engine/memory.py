"""Memory of a call: host arrays and their copies on a device, workspace and scratch, and limits."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from aule.errors import InvalidDtypeError, InvalidShapeError
from aule.runtime.base import Allocation, Device
from aule.view import TensorView, contiguous_strides

Array = npt.NDArray[Any]

_LEAST_SCRATCH = 1024
_KEPT_BYTES = 256 << 20
"""The largest block of the host's memory that is kept for the next call."""
_lock = threading.Lock()

STORED = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "f64": np.float64}
"""NumPy's type for the elements of a result (bf16 as its bits)."""


def work_dtype(dtype: str) -> Any:
    """NumPy's type for what arrays of a dtype are computed in."""
    return np.float64 if dtype == "f64" else np.float32


def check_memory(op: str, views: Mapping[str, TensorView], device: Device) -> None:
    """Refuse arrays that a GPU cannot compute on, with the remedy."""
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


def host_view(dtype: str, array: Array) -> TensorView:
    """A view of an array of stored elements in host memory."""
    return TensorView(dtype, array.shape, tuple(step // array.itemsize for step in array.strides), "host", array)


def address(memory: Any) -> int:
    """Where an array or an allocation in host memory begins; 0 for None."""
    if memory is None:
        return 0
    return memory.address if isinstance(memory, Allocation) else int(memory.__array_interface__["data"][0])


# -- workspace and scratch ---------------------------------------------------------------------------------------------


class MemorySource(Protocol):
    """Where a call's workspace and scratch come from.

    Attributes
    ----------
    raw : bool
        Launches take memory as the source gives it (addresses, tensors), not the device's allocations.
    has_scratch : bool
        It has memory that is zero.
    """

    raw: bool
    has_scratch: bool

    def acquire(self, workspace: Sequence[int], scratch: Sequence[int], stream: int | None) -> tuple[list[Any], Any]:
        """Memory for one call on a stream.

        Parameters
        ----------
        workspace : sequence of int
            Bytes of each, of undefined contents.
        scratch : sequence of int
            32-bit words of each, all zero; the call leaves them zero.

        Returns
        -------
        memory : list
            Workspaces, then scratch, as launches take them.
        block : object
            What `release` is given.
        """

    def release(self, block: Any) -> None:
        """Take memory back, once all launches that use it were started."""


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
        """As `MemorySource.release`: devices free memory after the work that uses it."""
        block.close()


def device_scratch(device: Device, words: int, number: int = 0) -> Allocation:
    """At least ``words`` 32-bit words that are zero between launches; another allocation for each ``number``.

    Work on a device is ordered, so all its launches can share them. Streams of others are not: launches there need
    memory of their own.
    """
    # Allocations that are too small stay, since launches may use them: each is at least twice as large as the last.
    # Two threads may make one each, which does no harm.
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
    """Memory of the host, for the CPU: one block, kept for the next call, as fresh memory costs page faults."""

    raw = True
    has_scratch = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def acquire(self, workspace: Sequence[int], scratch: Sequence[int], stream: int | None) -> tuple[list[Any], Any]:
        """As `MemorySource.acquire`, with addresses. A thread that finds no block allocates another."""
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
        """As `MemorySource.release`; launches of the CPU have ended by then."""
        if block.nbytes <= _KEPT_BYTES:
            with _lock:
                vars(self._device).setdefault("_workspace", block)


def _after_fork() -> None:
    # Another thread of the parent may have held the lock; nobody would ever release it here.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# -- arrays of one call ------------------------------------------------------------------------------------------------


class Arena:
    """Device memory of one call, given back at its end whatever happens."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.owned: list[Allocation] = []

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give all memory back."""
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
