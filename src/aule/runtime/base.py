"""The interface of every runtime: devices, memory and launches. A runtime knows a driver, never the IR.

A runtime module has one entry point, ``devices() -> list[Device]``. It raises `BackendUnavailableError` with a remedy
when the driver is missing. A device opens its context on first use; reading its Target does not count as use.

Rules for every implementation:

* Thread-safe: any thread may call any method at any time.
* Work on one device is ordered: launches and downloads see the results of all earlier uploads and launches.
* ``launch`` is asynchronous; ``download`` and ``synchronize`` wait; ``upload`` returns once ``data`` may be reused.
* ``free`` may be called while queued work still uses the memory; the implementation defers it.
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
    """A range of device memory.

    ``handle`` is private to the runtime. ``address`` is a device pointer, or 0 if the runtime has none.
    """

    __slots__ = ("__weakref__", "address", "device", "freed", "handle", "nbytes")

    def __init__(self, device: Device, nbytes: int, handle: Any = None, address: int = 0) -> None:
        self.device = device
        self.nbytes = nbytes
        self.handle = handle
        self.address = address
        self.freed = False


class Program:
    """A kernel loaded by a driver. ``handle`` is private to the runtime."""

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
        """Allocate ``nbytes`` (0 is allowed) with undefined contents. Raises `OutOfMemoryError`."""

    @abstractmethod
    def free(self, allocation: Allocation) -> None:
        """Release an allocation. Freeing twice is a no-op."""

    @abstractmethod
    def upload(self, allocation: Allocation, data: npt.NDArray[Any], offset: int = 0) -> None:
        """Copy a C-contiguous array to ``offset`` bytes into the allocation."""

    @abstractmethod
    def download(self, allocation: Allocation, out: npt.NDArray[Any], offset: int = 0) -> None:
        """Copy from the allocation into a writable C-contiguous array, after all earlier work is done."""

    def check_copy(self, allocation: Allocation, array: npt.NDArray[Any], offset: int, *, into: bool = False) -> None:
        """Check that an array can be uploaded to, or downloaded (``into=True``) from, ``offset`` in an allocation."""
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

    def check_arguments(self, artifact: Artifact, args: Sequence[Any]) -> None:
        """Check that a launch's arguments are as many as the kernel's parameters, and of the same kinds."""
        params = artifact.params
        if len(args) != len(params):
            raise self.argument_error(artifact, f"{len(args)} values for {len(params)} parameters")
        for param, arg in zip(params, args, strict=True):
            if isinstance(arg, Allocation):
                if param.kind != "buffer":
                    raise self.argument_error(artifact, f"a buffer for {param.name}")
            elif param.kind == "buffer":
                raise self.argument_error(artifact, f"{arg!r} for {param.name}")

    def argument_error(self, artifact: Artifact, got: object) -> InvalidArgumentError:
        """Make the error for arguments that do not match a kernel's parameters."""
        expected = ", ".join(f"{p.name}: {p.dtype}{'*' if p.kind == 'buffer' else ''}" for p in artifact.params)
        return InvalidArgumentError(
            f"[{self.target.backend}] {artifact.entry} expected arguments ({expected}), got something else ({got}); "
            "pass one value for each parameter, in order and in range"
        )

    @abstractmethod
    def load(self, artifact: Artifact) -> Program:
        """Load a kernel into the driver. Raises `ShaderCompileError` with the driver's log."""

    @abstractmethod
    def launch(
        self,
        program: Program,
        grid: tuple[int, int, int],
        args: Sequence[Allocation | int | float],
        stream: int | None = None,
    ) -> None:
        """Start ``grid`` workgroups.

        ``args`` follow ``program.artifact.params``: an Allocation for a buffer, a number for a scalar. ``stream`` is a
        native stream handle if the runtime has them (CUDA), else None.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all submitted work is done. Raises the error of any that failed."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Idempotent."""

    def import_host(self, array: npt.NDArray[Any]) -> Allocation | None:
        """Make host memory visible to the device without a copy; return None if that is not possible.

        The allocation keeps ``array`` alive. Kernels read and write the host's bytes; the host sees the results after
        ``synchronize``.
        """
        return None

    def time_launch(
        self, program: Program, grid: tuple[int, int, int], args: Sequence[Allocation | int | float]
    ) -> float:
        """Measure one launch in seconds, with device timestamps if available, else with the host's clock."""
        import time

        self.synchronize()
        start = time.perf_counter()
        self.launch(program, grid, args)
        self.synchronize()
        return time.perf_counter() - start

    def time_launches(self, launches: Sequence[Launch], rounds: int) -> float:
        """Measure the average seconds of a round of launches over ``rounds`` rounds.

        Each launch waits for the one before. Timestamps around all rounds come from the device if it has any, else from
        the host's clock.
        """
        import time

        self.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            for launch in launches:
                self.launch(*launch)
        self.synchronize()
        return (time.perf_counter() - start) / rounds
