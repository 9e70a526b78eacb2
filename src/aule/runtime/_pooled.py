"""Base class of the OpenCL and WebGPU devices: one in-order queue and a pool of freed buffers.

The queue's order makes reuse safe without events: the next owner of a freed buffer uses it in work that runs after all
work of the previous owner. Buffers are never divided.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import abstractmethod
from typing import Any, Generic, TypeVar

from aule.errors import BackendUnavailableError, DeviceLostError, OutOfMemoryError
from aule.runtime._exit import at_end
from aule.runtime.base import Allocation, Device
from aule.target import Target

# A driver serves the process that started it and does not survive a fork: its threads and handles are lost.
_driver_pids: dict[str, int] = {}
_devices: weakref.WeakSet[PooledDevice[Any]] = weakref.WeakSet()


def claim_driver(backend: str) -> None:
    """Record that this process starts a backend's driver. Raises if a parent started it before the fork."""
    if _driver_pids.setdefault(backend, os.getpid()) != os.getpid():
        raise BackendUnavailableError(
            backend,
            f"[{backend}] expected a driver started in this process, got one started before os.fork(); "
            "start workers with the 'spawn' method",
        )
    at_end(_close_all)


def size_class(nbytes: int) -> int:
    """Round ``nbytes`` up to a pool size: powers of two when small, else eight sizes per octave (12.5 % waste)."""
    if nbytes <= 4096:
        return max(256, 1 << max(nbytes - 1, 0).bit_length())
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


def _close_all() -> None:
    """Close all devices at the interpreter's end: a driver may crash if it is unloaded while work runs."""
    for device in list(_devices):
        with contextlib.suppress(Exception):
            device.close()


class Block:
    """One driver buffer: the handle of an allocation. ``size`` is its bytes of device memory."""

    __slots__ = ("buffer", "size")

    def __init__(self, buffer: Any, size: int) -> None:
        self.buffer = buffer
        self.size = size


B = TypeVar("B", bound=Block)


class PooledDevice(Device, Generic[B]):
    """A device that keeps freed buffers for reuse.

    Parameters
    ----------
    target : Target
        What the device can do; its ``backend`` prefixes every error message.
    index : int
        As `Device.index`.
    largest : int
        Size in bytes of the largest buffer that the driver can allocate.
    pool_limit : int
        Most freed bytes to keep for reuse.
    """

    def __init__(self, target: Target, index: int, largest: int, pool_limit: int) -> None:
        self.target = target
        self.index = index
        self._largest = largest
        self._pool_limit = pool_limit
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        self._lost = ""
        self._live: weakref.WeakSet[Allocation] = weakref.WeakSet()
        self._pool: dict[int, list[B]] = {}
        self._pooled_bytes = 0
        _devices.add(self)

    def alloc(self, nbytes: int) -> Allocation:
        self._check()
        if nbytes < 0:
            raise self.size_error(nbytes)
        if nbytes > self._largest:
            raise OutOfMemoryError(
                f"[{self.target.backend}] expected an allocation of at most {self._largest} bytes, got {nbytes}; "
                f"{self.target.name} has no larger buffers, split the batch",
                nbytes,
            )
        size = min(size_class(nbytes), self._largest)
        with self._lock:
            self._open()  # checks again: another thread may have closed the device in between
            pooled = self._pool.get(size)
            if pooled:
                block = pooled.pop()
                self._pooled_bytes -= size
            else:
                block = self._new_block(size, nbytes)
            allocation = Allocation(self, nbytes, block)
            self._live.add(allocation)
        return allocation

    def free(self, allocation: Allocation) -> None:
        if os.getpid() != self._pid:
            return  # the memory is the parent's; a forked child has no driver to free it with
        with self._lock:
            if allocation.freed:
                return
            block = self._block(allocation)
            allocation.freed = True
            allocation.handle = None
            self._live.discard(allocation)
            self._retire(block)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wait_idle()
            for allocation in list(self._live):
                self._destroy(allocation.handle)
                allocation.freed = True
                allocation.handle = None
            self._live.clear()
            self._empty_pool()
            self._release()

    @abstractmethod
    def _open(self) -> Any:
        """Run `_check` and return the queue or device, opened on first use. `alloc` calls it under the lock."""

    @abstractmethod
    def _new_block(self, size: int, nbytes: int) -> B:
        """Allocate a driver buffer of ``size`` bytes for a request of ``nbytes``, emptying the pool if memory is short.

        The device is open and the caller holds the lock.
        """

    @abstractmethod
    def _wait_idle(self) -> None:
        """Wait for all work, ignoring its errors, before memory is freed. The caller holds the lock."""

    @abstractmethod
    def _release(self) -> None:
        """Release all driver objects other than blocks. The caller holds the lock."""

    def _destroy(self, block: B) -> None:
        """Free a block's memory. Does nothing by default: dropping the last reference frees it."""

    def _retire(self, block: B) -> None:
        """Put a freed block into the pool, or destroy it if the pool is full. The caller holds the lock."""
        if self._pooled_bytes + block.size <= self._pool_limit:
            # The queue is in order: the block's next owner runs after the work that still uses it.
            self._pool.setdefault(block.size, []).append(block)
            self._pooled_bytes += block.size
        else:
            self._destroy(block)

    def _empty_pool(self) -> None:
        """Destroy every pooled block. The caller holds the lock."""
        for blocks in self._pool.values():
            for block in blocks:
                self._destroy(block)
        self._pool.clear()
        self._pooled_bytes = 0

    def _check(self) -> None:
        """Refuse a device that is closed, lost or was opened before a fork.

        Every call starts with this, before taking the lock: in a forked child, a thread that is gone may hold it.
        """
        if os.getpid() != self._pid:
            raise self.forked_error()
        if self._closed:
            raise self.closed_error()
        if self._lost:
            raise DeviceLostError(self._lost)

    def _block(self, allocation: Allocation) -> B:
        """Return the block of a live allocation of this device."""
        block: B | None = allocation.handle
        if allocation.device is not self or block is None:
            self.check_allocation(allocation)
        assert block is not None
        return block
