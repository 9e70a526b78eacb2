"""The CPU runtime: kernels compiled by LLVM (llvmlite) and run by a persistent pool of threads.

A kernel is LLVM IR, without a triple or a data layout, that defines

    define void @<entry>(ptr %args, ptr %next, i64 %total, i64 %chunk, i32 %nx, i32 %ny, i32 %nz)

``args`` are cells of 8 bytes, one per parameter in order: a buffer's address, or a scalar in the low bytes. ``next`` is
a counter that all threads of the launch share. The function repeatedly adds ``chunk`` to it and runs the workgroups
that start at the old value, until that value is ``total`` or more. So threads share the work by making the same call.

Launches are synchronous: nothing is queued. Memory is the process's own, so ``import_host`` and ``wrap`` cost nothing.
Launches of different threads run at the same time; one of them uses the pool, the others run on their own thread.
Unlike the devices of other runtimes, this one keeps working after a fork, with its memory and programs; the child
starts its own threads.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aule import settings
from aule.artifact import SCALAR_FORMATS, Artifact
from aule.errors import LaunchError, OutOfMemoryError, ShaderCompileError
from aule.runtime import _cpu_llvm, _cpu_openmp, _cpu_pool, _cpu_target
from aule.runtime._exit import in_flight
from aule.runtime.base import Allocation, Arguments, Device, Grid, Program

_ALIGNMENT = 64
"""Alignment of memory from `CpuDevice.alloc`: a cache line and the widest vector."""

# Guards the list of live memory of every device. There is one lock because it must be replaced after a fork.
_lock = threading.Lock()


def devices() -> list[Device]:
    """List the one CPU device.

    Raises
    ------
    BackendUnavailableError
        llvmlite is missing, or the processor is not supported.
    InvalidArgumentError
        ``AULE_CPU_FEATURES`` or ``AULE_NUM_THREADS`` has an invalid value.
    """
    return [CpuDevice(_cpu_llvm.machine(settings.cpu_features()))]


class _Kernel:
    """A loaded function; the `Program.handle` of this runtime."""

    __slots__ = ("_code", "address", "buffers", "pack", "scalars")

    def __init__(self, artifact: Artifact, code: _cpu_llvm.Code) -> None:
        self._code = code
        (self.address,) = code.addresses
        kinds = [p.kind for p in artifact.params]
        self.buffers = [i for i, kind in enumerate(kinds) if kind == "buffer"]
        self.scalars = [i for i, kind in enumerate(kinds) if kind == "scalar"]
        codes = ["Q" if p.kind == "buffer" else SCALAR_FORMATS[p.dtype] for p in artifact.params]
        # Little-endian, like every processor that `_cpu_llvm` supports: a scalar is in the low bytes of its cell.
        self.pack = struct.Struct("<" + "".join(c + "4x" * (struct.calcsize(c) == 4) for c in codes)).pack


class PreparedLaunch:
    """A launch whose kernel, grid and scalars are fixed; made by `CpuDevice.prepare`. Threads may share it."""

    __slots__ = (
        "_buffers",
        "_device",
        "_grid",
        "_kernel",
        "_pack",
        "_program",
        "_team_choice",
        "_total",
        "_values",
    )

    def __init__(self, device: CpuDevice, program: Program, grid: Grid, scalars: Sequence[Any]) -> None:
        device.check_program(program)
        device.check_grid(program, grid)
        kernel: _Kernel = program.handle
        self._device = device
        self._program = program
        self._kernel = kernel
        self._pack = kernel.pack
        self._buffers = kernel.buffers
        self._grid = grid
        self._total = device._total(program, grid)
        self._team_choice = _cpu_openmp.TeamChoice()
        if len(scalars) != len(kernel.scalars):
            raise device.argument_error(program.artifact, f"{len(scalars)} values for {len(kernel.scalars)} scalars")
        self._values: list[Any] = [0] * len(program.artifact.params)
        for i, value in zip(kernel.scalars, scalars, strict=True):
            self._values[i] = value
        try:
            self._pack(*self._values)  # refuses scalars that do not fit
        except (struct.error, OverflowError, TypeError) as error:
            raise device.argument_error(program.artifact, error) from None

    def launch(self, pointers: Sequence[int]) -> None:
        """Launch with new pointers, one per buffer in the kernel's order, and wait for the end.

        Checks only their number; the caller keeps the memory alive.
        """
        on_pytorch = self._team_choice.choose()
        start = time.perf_counter()
        self.launch_on(on_pytorch, pointers)
        self._team_choice.note(on_pytorch, time.perf_counter() - start)

    def launch_on(self, on_pytorch: bool, pointers: Sequence[int]) -> None:
        """Launch on PyTorch's threads or on ours; see `launch`."""
        device = self._device
        if device._closed:
            device._check()
        if len(pointers) != len(self._buffers):
            raise device.argument_error(
                self._program.artifact, f"{len(pointers)} pointers for {len(self._buffers)} buffers"
            )
        values = self._values.copy()
        for i, pointer in zip(self._buffers, pointers, strict=True):
            values[i] = pointer
        try:
            cells = self._pack(*values)
        except (struct.error, OverflowError, TypeError) as error:
            raise device.argument_error(self._program.artifact, error) from None
        with in_flight:
            device._run(self._kernel.address, cells, self._grid, self._total, on_pytorch)


class PreparedSequence:
    """Launches that run one after the other on the same threads, PyTorch's or ours, whichever are faster overall.

    A short launch alone would use our threads. After a long launch on PyTorch's threads, though, ours would share the
    cores with PyTorch's, which are still spinning.
    """

    __slots__ = ("_launches", "_team_choice")

    def __init__(self, launches: Sequence[PreparedLaunch]) -> None:
        self._launches = tuple(launches)
        self._team_choice = _cpu_openmp.TeamChoice()

    def launch(self, pointers: Iterable[Sequence[int]]) -> None:
        """Run all launches with new pointers for each, and wait for the end; see `PreparedLaunch.launch`."""
        on_pytorch = self._team_choice.choose()
        start = time.perf_counter()
        for launch, given in zip(self._launches, pointers, strict=True):
            launch.launch_on(on_pytorch, given)
        self._team_choice.note(on_pytorch, time.perf_counter() - start)


class CpuDevice(Device):
    """The processor as a device. Made by `devices`; see the module docstring."""

    def __init__(self, machine: _cpu_llvm.Machine) -> None:
        self.index = 0
        self.target = _cpu_target.read_target(machine, _cpu_pool.thread_count())
        self._machine = machine
        self._closed = False
        self._live: weakref.WeakSet[Allocation] = weakref.WeakSet()

    def _check(self) -> None:
        if self._closed:
            raise self.closed_error()

    # -- memory --------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> Allocation:
        self._check()
        if nbytes < 0:
            raise self.size_error(nbytes)
        try:
            memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        except (MemoryError, ValueError):  # ValueError: larger than the address space
            raise OutOfMemoryError(
                f"[cpu] expected {nbytes} bytes of memory, got none; free some or make the problem smaller",
                requested_bytes=nbytes,
            ) from None
        return self._adopt(-(-memory.ctypes.data // _ALIGNMENT) * _ALIGNMENT, nbytes, memory)

    def import_host(self, array: npt.NDArray[Any]) -> Allocation | None:
        """Use any C-contiguous array, of any alignment, as an allocation without a copy.

        Pass a read-only array only for buffers that the kernel does not write.
        """
        self._check()
        if not array.flags.c_contiguous:
            return None
        return self._adopt(array.ctypes.data, array.nbytes, array)

    def wrap(self, address: int, nbytes: int, owner: object = None) -> Allocation:
        """Wrap memory that someone else owns in an allocation, which holds a reference to ``owner`` until freed."""
        self._check()
        return self._adopt(address, nbytes, owner)

    def _adopt(self, address: int, nbytes: int, owner: object) -> Allocation:
        allocation = Allocation(self, nbytes, owner, address)
        with _lock:
            self._check()  # again: another thread may have closed the device in between
            self._live.add(allocation)
        return allocation

    def free(self, allocation: Allocation) -> None:
        if allocation.device is not self:
            raise self.foreign_error("an allocation", "free it there")
        # A launch or copy in progress holds its own reference to the memory.
        allocation.freed = True
        allocation.handle = None

    def _owner(self, allocation: Allocation) -> object:
        """Check an allocation and return the object that keeps its memory alive; hold it while using the memory."""
        owner = allocation.handle
        self.check_allocation(allocation)
        return owner

    def upload(self, allocation: Allocation, data: npt.NDArray[Any], offset: int = 0) -> None:
        self._check()
        owner = self._owner(allocation)
        self.check_copy(allocation, data, offset)
        ctypes.memmove(allocation.address + offset, data.ctypes.data, data.nbytes)
        del owner

    def download(self, allocation: Allocation, out: npt.NDArray[Any], offset: int = 0) -> None:
        self._check()
        owner = self._owner(allocation)
        self.check_copy(allocation, out, offset, into=True)
        ctypes.memmove(out.ctypes.data, allocation.address + offset, out.nbytes)
        del owner

    # -- kernels -------------------------------------------------------------------------------------------------------

    def load(self, artifact: Artifact) -> Program:
        self._check()
        self.check_language(artifact, "llvm")
        try:
            code = _cpu_llvm.load(self._machine, artifact.text, {artifact.entry: _cpu_pool.KERNEL_TYPES})
        except (_cpu_llvm.Refused, RuntimeError) as refusal:  # RuntimeError: llvmlite's, for all that LLVM refuses
            raise self.refused_error(artifact, "LLVM refused it", str(refusal)) from None
        return Program(self, artifact, _Kernel(artifact, code))

    def _total(self, program: Program, grid: Grid) -> int:
        """Count the workgroups of a grid."""
        total = grid[0] * grid[1] * grid[2]
        if total >> 62:  # the counter must not overflow: it passes the total by up to a chunk per thread
            raise LaunchError(f"[cpu] {program.artifact.entry} expected fewer than 2**62 workgroups, got {grid}")
        return total

    def _run(self, kernel: int, cells: bytes, grid: Grid, total: int, on_pytorch: bool = False) -> None:
        """Run all workgroups on this thread and workers of the pool, or on PyTorch's threads."""
        if not total:
            return
        count, set_by_pytorch = _cpu_pool.threads() if total > 1 else (1, False)
        try:
            team = _cpu_openmp.team(self._machine) if on_pytorch and set_by_pytorch and count > 1 else None
            pool = _cpu_pool.pool(self._machine)
        except (_cpu_llvm.Refused, RuntimeError) as refusal:
            raise ShaderCompileError(
                f"[cpu] expected LLVM to compile the code of the threads, got: {refusal}; reinstall llvmlite"
            ) from None
        if team is not None:
            # Use all of them: a smaller team makes OpenMP end threads now and restart them for the next operator.
            team.run(team.address, kernel, cells, total, 1, *grid, count - 1)
            return
        helpers = pool.ready(min(count, total) - 1) if total > 1 else 0
        pool.run(pool.address, kernel, cells, total, 1, *grid, helpers)

    def launch(self, program: Program, grid: Grid, args: Arguments, stream: int | None = None) -> None:
        """Run a kernel and return when it is done. ``stream`` must be None."""
        self._check()
        self.check_launch(program, grid, args)
        total = self._total(program, grid)
        if stream is not None:
            raise LaunchError(f"[cpu] expected no stream, got {stream!r}; a launch here is done when it returns")
        kernel: _Kernel = program.handle
        owners = [self._owner(arg) for arg in args if isinstance(arg, Allocation)]
        try:
            cells = kernel.pack(*(arg.address if isinstance(arg, Allocation) else arg for arg in args))
        except (struct.error, OverflowError, TypeError) as error:
            raise self.argument_error(program.artifact, error) from None
        self._run(kernel.address, cells, grid, total)
        del owners

    def prepare(self, program: Program, grid: Grid, scalars: Sequence[int | float]) -> PreparedLaunch:
        """Prepare a launch with everything fixed except its pointers; ``scalars`` in the kernel's order."""
        self._check()
        return PreparedLaunch(self, program, grid, scalars)

    def prepare_sequence(self, launches: Sequence[PreparedLaunch]) -> PreparedSequence:
        """Combine launches that always run one after the other."""
        return PreparedSequence(launches)

    def synchronize(self) -> None:
        """Do nothing: a launch is done when it returns."""
        self._check()

    def close(self) -> None:
        """Release all memory. Running launches finish; the threads stay for other devices."""
        with _lock:
            self._closed = True
            for allocation in self._live:
                allocation.freed = True
                allocation.handle = None
            self._live.clear()


def _after_fork() -> None:
    # A thread of the parent may have held the lock; nothing in the child would release it.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
