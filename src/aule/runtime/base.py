"""What every runtime offers: devices, memory and launches. Knows a driver, never the IR.

A runtime module has one entry point, ``devices() -> list[Device]``. It raises `BackendUnavailableError` with a remedy
when the driver is missing, and it opens no context until a device is first used beyond its Target.

Rules for every implementation:

* Thread-safe: any thread may call any method at any time.
* Work on one device is ordered: a launch sees the uploads and launches before it, a download sees all before it.
* ``launch`` is asynchronous; ``download`` and ``synchronize`` wait; ``upload`` may return once ``data`` may be reused.
* ``free`` may be called while work that uses the memory is under way; the implementation defers it.
* A failed call raises a child of `AuleError` and leaves the device usable, unless it is `DeviceLostError`.
* After ``os.fork()``, a device opened in the parent raises `DeviceLostError` in the child ("opened before fork").
* A closed device, a freed allocation: `ClosedError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from aule.artifact import Artifact
from aule.errors import InvalidArgumentError
from aule.target import Target


class Allocation:
    """A range of device memory. ``handle`` is the runtime's own; ``address`` is a device pointer where there is one."""

    __slots__ = ("__weakref__", "address", "device", "freed", "handle", "nbytes")

    def __init__(self, device: Device, nbytes: int, handle: Any = None, address: int = 0) -> None:
        self.device = device
        self.nbytes = nbytes
        self.handle = handle
        self.address = address
        self.freed = False


class Program:
    """A kernel loaded by a driver. ``handle`` is the runtime's own."""

    __slots__ = ("artifact", "device", "handle")

    def __init__(self, device: Device, artifact: Artifact, handle: Any) -> None:
        self.device = device
        self.artifact = artifact
        self.handle = handle


Launch = tuple[Program, tuple[int, int, int], Sequence[Allocation | int | float]]
"""Program, grid and arguments, as for `Device.launch`."""


class Device(ABC):
    """One device of one runtime."""

    target: Target
    index: int
    """Position in the runtime's list: ``backend="vulkan:1"`` is index 1."""
    _closed: bool = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called; a closed device refuses all work."""
        return self._closed

    @abstractmethod
    def alloc(self, nbytes: int) -> Allocation:
        """Allocate; contents are undefined. ``nbytes`` may be 0. Raises `OutOfMemoryError`."""

    @abstractmethod
    def free(self, allocation: Allocation) -> None:
        """Give memory back. Freeing twice is a no-op."""

    @abstractmethod
    def upload(self, allocation: Allocation, data: npt.NDArray[Any], offset: int = 0) -> None:
        """Copy a C-contiguous array to ``offset`` bytes into the allocation."""

    @abstractmethod
    def download(self, allocation: Allocation, out: npt.NDArray[Any], offset: int = 0) -> None:
        """Copy from the allocation into a writable C-contiguous array; waits for the work before it."""

    def check_copy(self, allocation: Allocation, array: npt.NDArray[Any], offset: int, *, into: bool = False) -> None:
        """Refuse an array that cannot be copied to ``offset`` bytes into an allocation, or from there ``into`` it."""
        backend = self.target.backend
        if not array.flags.c_contiguous:
            raise InvalidArgumentError(
                f"[{backend}] expected a C-contiguous array to copy, got a strided one; use numpy.ascontiguousarray"
            )
        if into and not array.flags.writeable:
            raise InvalidArgumentError(
                f"[{backend}] expected a writable array to download into, got a read-only one; copy it"
            )
        if offset < 0 or offset + array.nbytes > allocation.nbytes:
            raise InvalidArgumentError(
                f"[{backend}] expected a copy within the allocation's {allocation.nbytes} bytes, got {array.nbytes} "
                f"bytes at offset {offset}; allocate more or copy less"
            )

    @abstractmethod
    def load(self, artifact: Artifact) -> Program:
        """Hand a kernel to the driver. Raises `ShaderCompileError` with the driver's log."""

    @abstractmethod
    def launch(
        self,
        program: Program,
        grid: tuple[int, int, int],
        args: Sequence[Allocation | int | float],
        stream: int | None = None,
    ) -> None:
        """Start ``grid`` workgroups. ``args`` follow ``program.artifact.params``: an Allocation for a buffer, a number
        for a scalar. ``stream`` is a native stream handle where the runtime has such (CUDA), else None."""

    def launch_together(self, launches: Sequence[Launch]) -> None:
        """Start launches none of which depends on another, or which wait themselves for what those before them leave:
        one may begin while those before it still run, where a device can do that."""
        for launch in launches:
            self.launch(*launch)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work given to the device is done. Raises what went wrong in it."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent."""

    def import_host(self, array: npt.NDArray[Any]) -> Allocation | None:
        """Make host memory visible to the device without a copy, or None where that cannot be done. The allocation
        keeps ``array`` alive; kernels see and change the host's bytes, current after ``synchronize``."""
        return None

    def time_launch(
        self, program: Program, grid: tuple[int, int, int], args: Sequence[Allocation | int | float]
    ) -> float:
        """Seconds one launch takes, by device timestamps where there are any, by the host's clock otherwise."""
        import time

        self.synchronize()
        start = time.perf_counter()
        self.launch(program, grid, args)
        self.synchronize()
        return time.perf_counter() - start

    def time_launches(self, launches: Sequence[Launch], rounds: int, together: bool = False) -> float:
        """Seconds that a round of launches takes when ``rounds`` of them follow each other, each launch waiting for the
        one before; by device timestamps around them all where there are any, by the host's clock otherwise. Where those
        of a round go ``together``, they do not wait for each other if the device can do without."""
        import time

        self.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            for launch in launches:
                self.launch(*launch)
        self.synchronize()
        return (time.perf_counter() - start) / rounds
