"""The Metal runtime, through PyObjC (`pip install pyobjc-framework-Metal`).

Untested on Apple hardware: the tests use a substitute for the `Metal` module.

All buffers are in shared storage, so uploads and downloads are copies by the CPU. Metal orders the command buffers of
the single queue by the buffers they read and write, so a freed buffer can go to a pool and be reused at once. An upload
waits for the command buffers that use its buffer. ``stream`` is ignored.

Kernels follow the *block* convention: buffers at indices ``0 .. n - 1``, the packed scalars at index ``n``.
"""

from __future__ import annotations

import importlib
import mmap
import os
import platform
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.artifact import Artifact
from aule.errors import (
    AuleError,
    BackendUnavailableError,
    DeviceLostError,
    LaunchError,
    OutOfMemoryError,
    ShaderCompileError,
)
from aule.runtime.base import Allocation, Arguments, Device, Grid, Program, as_bytes
from aule.target import Target

# MTLGPUFamily, MTLCommandBufferStatus and MTLCommandBufferError, by value: older PyObjC lacks some of the names.
_FAMILY_APPLE6, _FAMILY_APPLE7, _FAMILY_METAL3 = 1006, 1007, 5001
_STATUS_COMPLETED, _STATUS_ERROR = 4, 5
_ERROR_ACCESS_REVOKED, _ERROR_OUT_OF_MEMORY, _ERROR_DEVICE_REMOVED = 4, 8, 11

_TRIVIAL = "kernel void trivial(device float *x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = 0.0f; }"

_devices: weakref.WeakSet[MetalDevice] = weakref.WeakSet()


def _after_fork() -> None:
    for device in list(_devices):
        device._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def devices() -> list[Device]:
    """List the Metal devices of this Mac, the system's default first.

    Raises
    ------
    BackendUnavailableError
        Not macOS, no PyObjC, or no device.
    """
    if platform.system() != "Darwin":
        raise BackendUnavailableError(
            "metal", f"[metal] expected macOS, got {platform.system()}; use backend='cuda', 'vulkan' or 'cpu'"
        )
    try:
        metal, objc = importlib.import_module("Metal"), importlib.import_module("objc")
    except ImportError as error:
        raise BackendUnavailableError(
            "metal", f"[metal] expected PyObjC, got {error}; pip install pyobjc-framework-Metal"
        ) from None
    default = metal.MTLCreateSystemDefaultDevice()
    found = list(metal.MTLCopyAllDevices() or ())
    if default is not None:
        found = [default] + [d for d in found if d.registryID() != default.registryID()]
    if not found:
        raise BackendUnavailableError("metal", "[metal] expected a GPU, got none; a virtual machine may lack Metal")
    return [MetalDevice(metal, objc, native, index) for index, native in enumerate(found)]


def _vendor(name: str) -> str:
    lowered = name.lower()
    return next((v for v in ("apple", "amd", "intel", "nvidia") if v in lowered), "unknown")


def _read_target(metal: Any, native: Any) -> Target:
    name = str(native.name())
    vendor = _vendor(name)
    version = platform.mac_ver()[0]
    # MSL 3.1, which has bfloat, came with macOS 14.
    recent = int(version.split(".")[0] or 0) >= 14
    bf16 = recent and bool(native.supportsFamily_(_FAMILY_APPLE6) or native.supportsFamily_(_FAMILY_METAL3))
    matrix_units: tuple[str, ...] = ()
    if native.supportsFamily_(_FAMILY_APPLE7):
        matrix_units = ("m8n8k8:f16:f32", "m8n8k8:f32:f32", *(("m8n8k8:bf16:f32",) if bf16 else ()))
    width = 32
    if vendor != "apple":
        # Only Apple's own GPUs are known to have 32 lanes.
        pipeline, _ = _pipeline(metal, native, _TRIVIAL, "trivial")
        width = int(pipeline.threadExecutionWidth()) if pipeline is not None else 32
    return Target(
        backend="metal",
        name=name,
        vendor=vendor,
        driver=f"macOS {version}",
        subgroup_size=width,
        max_threads=int(native.maxThreadsPerThreadgroup().width),
        max_shared_bytes=int(native.maxThreadgroupMemoryLength()),
        max_grid=((1 << 31) - 1, 65535, 65535),
        max_buffers=30,  # of 31 indices, one is for the scalars
        max_buffer_bytes=int(native.maxBufferLength()),
        offset_alignment=16 if vendor == "apple" else 256,
        memory_bytes=int(native.recommendedMaxWorkingSetSize()),
        unified_memory=bool(native.hasUnifiedMemory()),
        f16=True,
        f64=False,
        int64=True,
        storage16=True,
        storage8=True,
        bf16=bf16,
        matrix_units=matrix_units,
    )


def _pipeline(metal: Any, native: Any, source: str, entry: str) -> tuple[Any, str]:
    """Compile a compute pipeline; return it, or None and the compiler's message."""
    options = metal.MTLCompileOptions.alloc().init()
    # Fast math may assume that there are no infinities; masked scores are infinite.
    options.setFastMathEnabled_(False)
    library, error = native.newLibraryWithSource_options_error_(source, options, None)
    if library is None:
        return None, _message(error)
    function = library.newFunctionWithName_(entry)
    if function is None:
        return None, f"the library has no function {entry}"
    pipeline, error = native.newComputePipelineStateWithFunction_error_(function, None)
    return pipeline, "" if pipeline is not None else _message(error)


def _message(error: Any) -> str:
    return "no message" if error is None else str(error.localizedDescription())


class _Buffer:
    """A Metal buffer, its bytes as an array, and the last command buffer that uses it."""

    __slots__ = ("bytes", "native", "owner", "size", "used")

    def __init__(self, native: Any, size: int, owner: npt.NDArray[Any] | None = None) -> None:
        self.native = native
        self.size = size
        self.owner = owner
        self.used: Any = None
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(native.contents().as_buffer(size), np.uint8)


def _finished(command: Any) -> bool:
    return command is None or command.status() >= _STATUS_COMPLETED


def _size_class(nbytes: int) -> int:
    """Round a size up to a pool size: pages, with four sizes per power of two, so at most a quarter is unused."""
    pages = max(1, -(-nbytes // mmap.PAGESIZE))
    step = 1 << max(0, pages.bit_length() - 3)
    return -(-pages // step) * step * mmap.PAGESIZE


class MetalDevice(Device):
    """One Metal GPU. Made by `devices`."""

    def __init__(self, metal: Any, objc: Any, native: Any, index: int) -> None:
        self.index = index
        self.target = _read_target(metal, native)
        self._metal = metal
        self._objc = objc
        self._native = native
        self._queue: Any = None
        self._lock = threading.RLock()
        self._refusal: Callable[[], AuleError] | None = None
        self._closed = False
        self._cache: dict[int, list[_Buffer]] = {}
        # `free` only appends here, which is atomic: a finalizer may call it in the middle of any other method.
        self._returned: deque[_Buffer] = deque()
        self._pending: deque[tuple[str, Any]] = deque()
        self._failed: AuleError | None = None
        _devices.add(self)

    # -- state ---------------------------------------------------------------------------------------------------------

    def _after_fork(self) -> None:
        # A thread of the parent, which does not exist here, may have held the lock.
        self._lock = threading.RLock()
        self._pending.clear()
        if self._refusal is None:
            self._refusal = self.forked_error

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal()

    def _failure(self, entry: str, command: Any) -> AuleError:
        """Make the error for a command buffer that failed."""
        error = command.error()
        code = 0 if error is None else int(error.code())
        text = f"[metal] {entry}: expected the GPU to finish, got error {code}: {_message(error)}"
        if code == _ERROR_OUT_OF_MEMORY:
            return OutOfMemoryError(f"{text}; free memory or make the problem smaller")
        if code in (_ERROR_ACCESS_REVOKED, _ERROR_DEVICE_REMOVED):
            message = f"{text}; the device is lost for this process, restart it"
            self._refusal = lambda: DeviceLostError(message)
            return DeviceLostError(message)
        return LaunchError(f"{text}; run with METAL_DEVICE_WRAPPER_TYPE=1 to let Metal check the launch")

    def _settle(self) -> None:
        """Forget command buffers that are done, and keep the first error among them. The lock is held."""
        while self._pending and _finished(self._pending[0][1]):
            entry, command = self._pending.popleft()
            if command.status() == _STATUS_ERROR and self._failed is None:
                self._failed = self._failure(entry, command)

    def _wait(self) -> None:
        """Wait for all work, and raise the first error since the last wait."""
        with self._lock:
            self._check()
            last = self._pending[-1][1] if self._pending else None
        if last is not None:
            # Without the lock, so that other threads can launch meanwhile. The queue finishes in order.
            last.waitUntilCompleted()
        with self._lock:
            self._settle()
            failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    # -- memory --------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> Allocation:
        if nbytes < 0:
            raise self.size_error(nbytes)
        size = min(_size_class(nbytes), max(nbytes, self.target.max_buffer_bytes))
        with self._lock:
            self._check()
            self._reclaim()
            cached = self._cache.get(size)
            buffer = cached.pop() if cached else self._new_buffer(size, nbytes)
        # list.pop is atomic: of two threads that free the same allocation, one gets the buffer.
        return Allocation(self, nbytes, [buffer])

    def _new_buffer(self, size: int, nbytes: int) -> _Buffer:
        limit = self.target.memory_bytes
        if limit and self._native.currentAllocatedSize() + size > limit:
            self._cache.clear()
        native = self._native.newBufferWithLength_options_(size, self._metal.MTLResourceStorageModeShared)
        if native is None:
            self._cache.clear()
            native = self._native.newBufferWithLength_options_(size, self._metal.MTLResourceStorageModeShared)
        if native is None:
            raise OutOfMemoryError(
                f"[metal] expected {nbytes} bytes, got none: {self._native.currentAllocatedSize()} of {limit} bytes "
                f"are in use, and one buffer may have {self.target.max_buffer_bytes}; free tensors or make the problem "
                "smaller",
                requested_bytes=nbytes,
            )
        return _Buffer(native, size)

    def _reclaim(self) -> None:
        """Put freed buffers into the pool. The lock is held."""
        for _ in range(len(self._returned)):
            buffer = self._returned.popleft()
            if buffer.owner is None:
                self._cache.setdefault(buffer.size, []).append(buffer)
            elif not _finished(buffer.used):
                # The command buffer keeps the Metal buffer alive, but not the imported array.
                self._returned.append(buffer)

    def free(self, allocation: Allocation) -> None:
        if allocation.device is not self:
            raise self.foreign_error("an allocation", "free it there")
        allocation.freed = True
        try:
            buffer = allocation.handle.pop()
        except IndexError:
            return
        self._returned.append(buffer)

    def import_host(self, array: npt.NDArray[Any]) -> Allocation | None:
        usable = array.flags.c_contiguous and array.flags.writeable and array.nbytes
        if not usable or array.ctypes.data % mmap.PAGESIZE or array.nbytes % mmap.PAGESIZE:
            return None
        with self._lock:
            self._check()
            native = self._native.newBufferWithBytesNoCopy_length_options_deallocator_(
                as_bytes(array).data, array.nbytes, self._metal.MTLResourceStorageModeShared, None
            )
        return None if native is None else Allocation(self, array.nbytes, [_Buffer(native, array.nbytes, array)])

    def _buffer(self, allocation: Allocation) -> _Buffer:
        self.check_allocation(allocation)
        try:
            buffer: _Buffer = allocation.handle[0]
        except IndexError:  # freed by another thread since the check
            raise self.freed_error() from None
        return buffer

    def upload(self, allocation: Allocation, data: npt.NDArray[Any], offset: int = 0) -> None:
        buffer = self._buffer(allocation)
        self.check_copy(allocation, data, offset)
        with self._lock:
            self._check()
            used = buffer.used
        if not _finished(used):
            used.waitUntilCompleted()
        buffer.bytes[offset : offset + data.nbytes] = as_bytes(data)

    def download(self, allocation: Allocation, out: npt.NDArray[Any], offset: int = 0) -> None:
        buffer = self._buffer(allocation)
        self.check_copy(allocation, out, offset, into=True)
        self._wait()
        as_bytes(out)[...] = buffer.bytes[offset : offset + out.nbytes]

    # -- kernels -------------------------------------------------------------------------------------------------------

    def load(self, artifact: Artifact) -> Program:
        self.check_language(artifact, "msl")
        with self._lock:
            self._check()
        pipeline, log = _pipeline(self._metal, self._native, artifact.text, artifact.entry)
        if pipeline is None:
            raise self.refused_error(artifact, "the compiler refused it", log)
        allowed, width = int(pipeline.maxTotalThreadsPerThreadgroup()), int(pipeline.threadExecutionWidth())
        if artifact.workgroup > allowed:
            raise ShaderCompileError(
                f"[metal] {artifact.entry} expected workgroups of {artifact.workgroup} threads, got room for {allowed} "
                "with the registers it uses; use fewer threads"
            )
        if artifact.subgroup_size not in (0, width):
            raise ShaderCompileError(
                f"[metal] {artifact.entry} expected {artifact.subgroup_size} lanes in a subgroup, got {width}; build "
                "the kernel for that"
            )
        return Program(self, artifact, pipeline)

    def statistics(self, program: Program) -> dict[str, int]:
        """Return a kernel's ``max_threads``, ``subgroup_size`` and ``static_shared_bytes``."""
        pipeline = program.handle
        return {
            "max_threads": int(pipeline.maxTotalThreadsPerThreadgroup()),
            "subgroup_size": int(pipeline.threadExecutionWidth()),
            "static_shared_bytes": int(pipeline.staticThreadgroupMemoryLength()),
        }

    def launch(self, program: Program, grid: Grid, args: Arguments, stream: int | None = None) -> None:
        self._launch(program, grid, args)

    def _launch(self, program: Program, grid: Grid, args: Arguments) -> Any:
        """Launch a kernel and return the command buffer."""
        self.check_launch(program, grid, args, least=1)
        artifact = program.artifact
        buffers, scalars = self._sort_arguments(artifact, args)
        with self._lock, self._objc.autorelease_pool():
            self._check()
            self._settle()
            self._reclaim()
            command, encoder = self._begin(artifact)
            encoder.setComputePipelineState_(program.handle)
            for i, buffer in enumerate(buffers):
                encoder.setBuffer_offset_atIndex_(buffer.native, 0, i)
            if scalars:
                encoder.setBytes_length_atIndex_(scalars, len(scalars), len(buffers))
            size = self._metal.MTLSize
            encoder.dispatchThreadgroups_threadsPerThreadgroup_(size(*grid), size(artifact.workgroup, 1, 1))
            encoder.endEncoding()
            command.commit()
            for buffer in buffers:
                buffer.used = command
            self._pending.append((artifact.entry, command))
        return command

    def _begin(self, artifact: Artifact) -> tuple[Any, Any]:
        """Return a command buffer and its encoder. The lock is held."""
        if self._queue is None:
            self._queue = self._native.newCommandQueue()
        # Metal gives nil for what it cannot create, without a reason.
        command = None if self._queue is None else self._queue.commandBuffer()
        encoder = None if command is None else command.computeCommandEncoder()
        if encoder is None:
            missing = "queue" if self._queue is None else "buffer" if command is None else "encoder"
            raise LaunchError(
                f"[metal] {artifact.entry}: expected a command {missing}, got none; wait for work in progress, or free "
                "memory"
            )
        return command, encoder

    def _sort_arguments(self, artifact: Artifact, args: Arguments) -> tuple[list[_Buffer], bytes]:
        """Return the buffers, and the packed scalars (empty if there are none)."""
        buffers = [self._buffer(arg) for arg in args if isinstance(arg, Allocation)]
        scalars = [arg for arg in args if not isinstance(arg, Allocation)]
        try:
            return buffers, artifact.scalar_struct.pack(*scalars) if scalars else b""
        except (struct.error, OverflowError, TypeError, ValueError) as error:
            raise self.argument_error(artifact, error) from None

    def time_launch(self, program: Program, grid: Grid, args: Arguments) -> float:
        """Measure one launch in seconds, with the GPU's clock."""
        self._wait()
        command = self._launch(program, grid, args)
        self._wait()
        return float(command.GPUEndTime() - command.GPUStartTime())

    def synchronize(self) -> None:
        """Wait for all launches. Raises the first error since the last wait."""
        self._wait()

    def close(self) -> None:
        """Wait for all work and release everything. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._refusal = self.closed_error
            for _, command in self._pending:
                command.waitUntilCompleted()
            self._pending.clear()
            self._returned.clear()
            self._cache.clear()
            self._queue = None
