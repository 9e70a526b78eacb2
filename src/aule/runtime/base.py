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
* A closed device or a freed allocation raises `ClosedError`; an allocation or program of another device,
  `DeviceMismatchError`.
* Once the interpreter ends, calls of threads that still run raise `ClosedError` (`_exit`).
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.artifact import Artifact
from aule.errors import (
    ClosedError,
    DeviceLostError,
    DeviceMismatchError,
    InvalidArgumentError,
    LaunchError,
    ShaderCompileError,
)
from aule.runtime._exit import in_flight
from aule.runtime._refused import save_refused
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


Grid = tuple[int, int, int]
"""Workgroups along each axis."""
Arguments = Sequence[Allocation | int | float]
"""A launch's arguments in the order of `Artifact.params`: an allocation per buffer, a number per scalar."""
Launch = tuple[Program, Grid, Arguments]
"""Program, grid and arguments, as for `Device.launch`."""


def as_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """View a C-contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)


_COUNTED = "alloc download import_host launch load synchronize time_launch time_launches upload".split()
"""Methods that call the driver. `free` is not among them: after the end it has nothing left to free."""


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that the interpreter's end waits for it, and refuses it afterwards."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with in_flight:
            return method(*args, **kwargs)

    return call


class Device(ABC):
    """One device of one runtime."""

    target: Target
    index: int
    """Position in the runtime's list: ``backend="vulkan:1"`` is index 1."""
    _closed: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in _COUNTED:
            if name in vars(cls):
                setattr(cls, name, _counted(vars(cls)[name]))

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

    @abstractmethod
    def load(self, artifact: Artifact) -> Program:
        """Load a kernel into the driver. Raises `ShaderCompileError` with the driver's log."""

    @abstractmethod
    def launch(self, program: Program, grid: Grid, args: Arguments, stream: int | None = None) -> None:
        """Start ``grid`` workgroups. ``stream`` is a native stream handle if the runtime has them (CUDA), else None."""

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

    def time_launch(self, program: Program, grid: Grid, args: Arguments) -> float:
        """Measure one launch in seconds, as `time_launches` does."""
        return self.time_launches([(program, grid, args)], 1)

    def time_launches(self, launches: Sequence[Launch], rounds: int) -> float:
        """Measure the average seconds of a round of launches over ``rounds`` rounds.

        Each launch waits for the one before. Timestamps around all rounds come from the device if it has any, else from
        the host's clock.
        """
        self.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            for launch in launches:
                self.launch(*launch)
        self.synchronize()
        return (time.perf_counter() - start) / rounds

    # -- checks and errors of all runtimes -----------------------------------------------------------------------------

    def check_allocation(self, allocation: Allocation) -> None:
        """Check that an allocation is this device's and was not freed."""
        if allocation.device is not self:
            raise self.foreign_error("an allocation", "copy the data first")
        if allocation.freed:
            raise self.freed_error()

    def check_program(self, program: Program) -> None:
        """Check that a program was loaded on this device."""
        if program.device is not self:
            raise self.foreign_error("a program", "load it here")

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

    def check_grid(self, program: Program, grid: Grid, least: int = 0) -> None:
        """Check that each axis of a grid has from ``least`` workgroups to as many as the device allows."""
        limits = self.target.max_grid
        if len(grid) != 3 or not all(least <= n <= most for n, most in zip(grid, limits, strict=True)):
            raise LaunchError(
                f"[{self.target.backend}] {program.artifact.entry} expected a grid from {(least,) * 3} to {limits}, "
                f"got {grid}; split the work"
            )

    def check_launch(self, program: Program, grid: Grid, args: Arguments, least: int = 0) -> None:
        """Check that a program is this device's, its grid, and the number and kinds of its arguments."""
        self.check_program(program)
        self.check_grid(program, grid, least)
        params = program.artifact.params
        if len(args) != len(params):
            raise self.argument_error(program.artifact, f"{len(args)} values for {len(params)} parameters")
        for param, arg in zip(params, args, strict=True):
            if isinstance(arg, Allocation):
                if param.kind != "buffer":
                    raise self.argument_error(program.artifact, f"a buffer for {param.name}")
            elif param.kind == "buffer":
                raise self.argument_error(program.artifact, f"{arg!r} for {param.name}")

    def check_language(self, artifact: Artifact, language: str) -> None:
        """Check that a kernel is in the language of the driver."""
        if artifact.language != language:
            backend = self.target.backend
            raise InvalidArgumentError(
                f"[{backend}] expected a kernel in {language}, got {artifact.language}; render it for {backend}"
            )

    def argument_error(self, artifact: Artifact, got: object) -> InvalidArgumentError:
        """Make the error for arguments that do not match a kernel's parameters."""
        expected = ", ".join(f"{p.name}: {p.dtype}{'*' if p.kind == 'buffer' else ''}" for p in artifact.params)
        return InvalidArgumentError(
            f"[{self.target.backend}] {artifact.entry} expected arguments ({expected}), got something else ({got}); "
            "pass one value for each parameter, in order and in range"
        )

    def size_error(self, nbytes: int) -> InvalidArgumentError:
        """Make the error for an allocation of a negative size."""
        return InvalidArgumentError(
            f"[{self.target.backend}] expected a size of at least 0 bytes, got {nbytes}; pass its true size"
        )

    def foreign_error(self, what: str, remedy: str) -> DeviceMismatchError:
        """Make the error for an allocation or a program of another device."""
        backend = self.target.backend
        return DeviceMismatchError(
            f"[{backend}] expected {what} of {backend}:{self.index}, got one of another device; {remedy}"
        )

    def freed_error(self) -> ClosedError:
        """Make the error for memory that was freed."""
        return ClosedError(
            f"[{self.target.backend}] expected live memory, got an allocation that was freed; free it after its last "
            "use"
        )

    def closed_error(self) -> ClosedError:
        """Make the error for calls on a closed device."""
        backend = self.target.backend
        return ClosedError(
            f"[{backend}] expected an open device, got {backend}:{self.index} after close; ask for the device again"
        )

    def forked_error(self) -> DeviceLostError:
        """Make the error for calls on a parent's device in a forked child."""
        return DeviceLostError(
            f"[{self.target.backend}] expected a device of this process, got one that was opened before fork; start "
            "the process with the multiprocessing method 'spawn' or 'forkserver'"
        )

    def refused_error(self, artifact: Artifact, reason: str, log: str = "") -> ShaderCompileError:
        """Save a kernel that cannot be loaded, and make the error for it; ``log`` is the driver's."""
        path = save_refused(artifact.language, artifact.code)
        return ShaderCompileError(
            f"[{self.target.backend}] {artifact.entry}: expected a kernel that {self.target.name} accepts, got: "
            f"{reason}; the source is in {path or 'no file (the cache directory cannot be written)'}\n{log}".rstrip(),
            log,
            path,
        )
