"""The Vulkan runtime: any device with Vulkan 1.2 and a compute queue, through ctypes.

Environment
-----------
``AULE_VULKAN_VALIDATION=1`` turns the validation layer on. Its messages go to the logger ``aule.vulkan`` and to
`validation_messages`. ``AULE_CACHE_DIR`` is the directory for compiled pipelines and refused shaders.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt

from aule.artifact import Artifact
from aule.errors import AuleError, BackendUnavailableError, LaunchError, NoComputeQueueError
from aule.runtime._exit import at_end
from aule.runtime._vulkan_context import Context, Dispatch
from aule.runtime._vulkan_loader import close_instance, driver_remedy, instance, validation_messages
from aule.runtime._vulkan_memory import Region
from aule.runtime._vulkan_pipeline import Pipeline
from aule.runtime._vulkan_target import Facts, inspect_all
from aule.runtime.base import Allocation, Arguments, Device, Grid, Launch, Program

__all__ = ["VulkanDevice", "devices", "skipped", "validation_messages"]


class VulkanDevice(Device):
    """One Vulkan device, opened by the first call that needs more than its Target.

    Allocations have no device address; their ``handle`` holds the buffer and the byte offset.
    """

    def __init__(self, facts: Facts, index: int) -> None:
        self.target = facts.target
        self.index = index
        self._facts = facts
        self._lock = threading.RLock()
        self._pid = 0
        self._opened: Context | None = None
        self._closed = False

    def _context(self) -> Context:
        """Return the open device, opening it on first use. The caller holds the lock."""
        if self._opened is None:
            if self._closed:
                raise self.closed_error()
            _check_fork()
            self._opened = Context(instance(), self._facts)
            self._pid = os.getpid()
            _opened.append(self)
        self._opened.tidy()
        return self._opened

    def _check_process(self) -> None:
        # Called before taking the lock: in a forked child, a thread that no longer exists may hold it.
        if self._pid and self._pid != os.getpid():
            raise self.forked_error()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[Context]:
        """Hold the lock and the open device in a ``with`` block. Launches and copies avoid its overhead."""
        self._check_process()
        with self._lock:
            yield self._context()

    def _region(self, allocation: Allocation) -> Region:
        if allocation.device is not self or allocation.freed:
            self.check_allocation(allocation)
        region: Region = allocation.handle
        return region

    def alloc(self, nbytes: int) -> Allocation:
        if nbytes < 0:
            raise self.size_error(nbytes)
        self._check_process()
        with self._lock:
            return Allocation(self, nbytes, self._context().memory.alloc(nbytes))

    def free(self, allocation: Allocation) -> None:
        # No lock: finalisers call this in any thread and in the middle of anything. The next call on the device
        # reclaims the memory.
        if not allocation.freed and allocation.device is self:
            allocation.freed = True
            region: Region = allocation.handle
            region.give_up()

    def upload(self, allocation: Allocation, data: npt.NDArray[Any], offset: int = 0) -> None:
        self._check_process()
        with self._lock:
            context, region = self._context(), self._region(allocation)
            self.check_copy(allocation, data, offset)
            if data.nbytes:
                context.upload(region, offset, data.ctypes.data, data.nbytes)

    def download(self, allocation: Allocation, out: npt.NDArray[Any], offset: int = 0) -> None:
        self._check_process()
        with self._lock:
            context, region = self._context(), self._region(allocation)
            self.check_copy(allocation, out, offset, into=True)
            if out.nbytes:
                context.download(region, offset, out.ctypes.data, out.nbytes)

    def import_host(self, array: npt.NDArray[Any]) -> Allocation | None:
        self._check_process()
        if not array.flags.c_contiguous:
            return None
        with self._lock:
            region = self._context().memory.import_host(array.ctypes.data, array.nbytes, array)
            return None if region is None else Allocation(self, array.nbytes, region)

    def load(self, artifact: Artifact) -> Program:
        self.check_language(artifact, "spirv")
        with self._entered() as context:
            return Program(self, artifact, context.pipelines.load(artifact))

    def launch(self, program: Program, grid: Grid, args: Arguments, stream: int | None = None) -> None:
        self._check_process()
        with self._lock:
            context = self._context()
            pipeline, regions, scalars = self._prepare(program, grid, args)
            if 0 not in grid:
                context.launch(pipeline, grid, regions, scalars)

    def time_launches(self, launches: Sequence[Launch], rounds: int) -> float:
        if not self._facts.timestamp_bits:
            return super().time_launches(launches, rounds)
        with self._entered() as context:
            dispatches = []
            for program, grid, args in launches:
                pipeline, regions, scalars = self._prepare(program, grid, args)
                if 0 not in grid:
                    dispatches.append(Dispatch(pipeline, grid, regions, scalars))
            return context.time_launches(dispatches, rounds) if dispatches else 0.0

    def _prepare(self, program: Program, grid: Grid, args: Arguments) -> tuple[Pipeline, list[Region], list[Any]]:
        """Sort a launch's arguments into buffers and scalars, and check what the driver does not."""
        self.check_program(program)
        pipeline: Pipeline = program.handle
        if len(args) != len(pipeline.names):
            raise LaunchError(f"[vulkan] expected {len(pipeline.names)} arguments {pipeline.names}, got {len(args)}")
        limit = self.target.max_grid
        if not (0 <= grid[0] <= limit[0] and 0 <= grid[1] <= limit[1] and 0 <= grid[2] <= limit[2]):
            raise LaunchError(f"[vulkan] expected a grid of at most {limit} workgroups, got {grid}")
        regions: list[Region] = []
        for i in pipeline.buffers:
            argument = args[i]
            if not isinstance(argument, Allocation):
                raise LaunchError(f"[vulkan] expected an allocation for {pipeline.names[i]}, got {argument!r}")
            regions.append(self._region(argument))
            if argument.nbytes > self.target.max_buffer_bytes:
                raise LaunchError(
                    f"[vulkan] expected at most {self.target.max_buffer_bytes} bytes in {pipeline.names[i]} (the "
                    f"device's maxStorageBufferRange), got {argument.nbytes}; split the problem"
                )
        return pipeline, regions, [args[i] for i in pipeline.scalars]

    def synchronize(self) -> None:
        with self._entered() as context:
            context.synchronize()

    def statistics(self, program: Program) -> dict[str, int | float | bool]:
        """Return the driver's statistics of a program's machine code: registers, spills, shared memory ...

        They have the driver's own names; none without VK_KHR_pipeline_executable_properties.
        """
        with self._entered() as context:
            self.check_program(program)
            return context.pipelines.statistics(program.artifact)

    def representations(self, program: Program) -> dict[str, str]:
        """Return a program's texts in the driver, from its intermediate code to assembly; named as `statistics`."""
        with self._entered() as context:
            self.check_program(program)
            return context.pipelines.representations(program.artifact)

    def pipeline_cache_data(self) -> bytes:
        """Return the driver's pipeline cache, which is also written to disk when the device is closed."""
        with self._entered() as context:
            return context.pipelines.cache_data()

    def memory_info(self) -> dict[str, int]:
        """Return the bytes ``used`` by tensors, the bytes ``reserved``, and the number of ``driver_allocations``."""
        with self._entered() as context:
            names = ("used", "reserved", "driver_allocations")
            return {name: getattr(context.memory, name) for name in names}

    def close(self) -> None:
        if self._pid and self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            if self._opened is not None:
                context, self._opened = self._opened, None
                if self in _opened:
                    _opened.remove(self)
                context.close()


_lock = threading.Lock()
_devices: list[VulkanDevice] = []
_devices_pid = 0
_skipped: list[AuleError] = []
_opened: list[VulkanDevice] = []


def _check_fork() -> None:
    """Refuse to start a GPU's driver again in a forked child: it may hang or crash. Software devices are safe."""
    lost = [d.target.name for d in _opened if d._pid != os.getpid() and not d.target.software]
    if lost:
        raise BackendUnavailableError(
            "vulkan",
            f"[vulkan] {lost[0]} was opened before fork and its driver cannot be started again in the child; start "
            "workers with the multiprocessing method 'spawn'",
        )


def devices() -> list[Device]:
    """List the Vulkan devices that can compute, in the driver's order.

    Each call returns the same objects, except that a new device replaces a closed one.

    Raises
    ------
    BackendUnavailableError
        No loader, driver or device was found, or this is a forked child of a process that used a GPU.
    NoComputeQueueError
        There are devices, but none has a compute queue.
    """
    global _devices, _devices_pid, _skipped, _lock
    if _devices_pid not in (0, os.getpid()):
        _lock, _devices, _devices_pid = threading.Lock(), [], 0
    _check_fork()
    with _lock:
        if not _devices:
            usable, _skipped = inspect_all(instance())
            if not usable:
                raise _none_usable(_skipped)
            _devices, _devices_pid = [VulkanDevice(facts, i) for i, facts in enumerate(usable)], os.getpid()
        for i, device in enumerate(_devices):
            if device._closed:
                _devices[i] = VulkanDevice(device._facts, i)
        return list(_devices)


def skipped() -> list[AuleError]:
    """Return why some of the driver's devices are not in `devices`: no compute queue, or older than Vulkan 1.2."""
    devices()
    return list(_skipped)


def _none_usable(reasons: list[AuleError]) -> AuleError:
    if not reasons:
        return BackendUnavailableError("vulkan", f"[vulkan] no driver lists a device; {driver_remedy()}")
    text = "; ".join(error.message for error in reasons)
    kind = NoComputeQueueError if all(isinstance(e, NoComputeQueueError) for e in reasons) else BackendUnavailableError
    return kind("vulkan", text)


def _close_all() -> None:
    """Close all devices at the interpreter's end: a driver may crash if it is unloaded while work runs."""
    for device in list(_opened):
        device.close()
    close_instance()


at_end(_close_all)
