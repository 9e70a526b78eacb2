"""The OpenCL runtime, through pyopencl.

Kernels follow the *args* convention: one kernel argument per parameter, in order.
"""

from __future__ import annotations

import contextlib
import importlib
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from aule.artifact import SCALAR_FORMATS, Artifact
from aule.errors import (
    AuleError,
    BackendUnavailableError,
    DeviceLostError,
    LaunchError,
    OutOfMemoryError,
)
from aule.runtime._pooled import Block, PooledDevice, claim_driver
from aule.runtime.base import Allocation, Arguments, Device, Grid, Program, as_bytes
from aule.target import Target

_T = TypeVar("_T")

_USEFUL_EXTENSIONS = (
    "cl_ext_float_atomics",
    "cl_intel_required_subgroup_size",
    "cl_intel_subgroup_matrix_multiply_accumulate",
    "cl_intel_subgroups",
    "cl_intel_subgroups_short",
    "cl_khr_fp16",
    "cl_khr_fp64",
    "cl_khr_int64_base_atomics",
    "cl_khr_integer_dot_product",
    "cl_khr_subgroup_ballot",
    "cl_khr_subgroup_shuffle",
    "cl_khr_subgroup_shuffle_relative",
    "cl_khr_subgroups",
    "cl_nv_pragma_unroll",
)
_VENDORS = {"nvidia": "nvidia", "advanced micro devices": "amd", "amd": "amd", "intel": "intel", "apple": "apple"}
LARGE_REGISTERS = "-cl-intel-256-GRF-per-thread"
"""Build option of Intel's own driver: twice the registers for half the threads. Older devices ignore it."""
_SUB_GROUP_SIZES_INTEL = 0x4108
_WAVEFRONT_WIDTH_AMD = 0x4043
_WARP_SIZE_NV = 0x4003


def devices() -> list[Device]:
    """List the OpenCL devices of all platforms: GPUs first, then accelerators, CPUs last.

    Raises
    ------
    BackendUnavailableError
        pyopencl is missing, no driver is installed, or the driver was started before a fork.
    """
    try:
        cl: Any = importlib.import_module("pyopencl")
    except ImportError as error:
        raise BackendUnavailableError(
            "opencl", f'[opencl] expected the package pyopencl, got {error}; pip install "aule-attention[opencl]"'
        ) from error
    claim_driver("opencl")
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise BackendUnavailableError(
            "opencl",
            f"[opencl] expected an OpenCL driver, got none ({error}); install your GPU's OpenCL driver (ICD), or PoCL "
            "for the CPU (pip install pyopencl[pocl], or your system's pocl-opencl-icd)",
        ) from error
    found: list[Any] = []
    for platform in platforms:
        # A platform without devices raises an error instead of returning an empty list.
        with contextlib.suppress(cl.Error):
            found += [d for d in platform.get_devices() if d.available and d.compiler_available]
    if not found:
        names = ", ".join(p.name for p in platforms)
        raise BackendUnavailableError(
            "opencl", f"[opencl] expected a device, got none from platforms: {names}; check the driver and permissions"
        )

    def rank(device: Any) -> int:
        kinds = cl.device_type
        return 0 if device.type & kinds.GPU else 1 if device.type & kinds.ACCELERATOR else 2

    return [OpenCLDevice(cl, device, index) for index, device in enumerate(sorted(found, key=rank))]


class _Block(Block):
    """One cl.Buffer. ``array`` is the host memory of an imported buffer, whose ``size`` is 0."""

    __slots__ = ("array",)

    def __init__(self, buffer: Any, size: int, array: npt.NDArray[Any] | None = None) -> None:
        super().__init__(buffer, size)
        self.array = array


class _Kernel:
    """A cl.Kernel with the lock that OpenCL requires: threads must not interleave setting arguments and enqueueing."""

    __slots__ = ("kernel", "local", "lock")

    def __init__(self, kernel: Any, workgroup: int) -> None:
        self.kernel = kernel
        self.local = (workgroup, 1, 1)
        self.lock = threading.Lock()


class OpenCLDevice(PooledDevice[_Block]):
    """One OpenCL device with one context and one in-order queue."""

    def __init__(self, cl: Any, device: Any, index: int) -> None:
        target = _target(cl, device)
        # Pooling a quarter of the memory avoids allocations in a decode loop and leaves room for other users.
        super().__init__(target, index, target.max_buffer_bytes, max(target.memory_bytes // 4, 64 << 20))
        self._cl = cl
        self._device = device
        self._context: Any = None
        self._queue: Any = None
        self._timing_queue: Any = None
        self._retired: list[tuple[Any, _Block]] = []
        self._is_cpu = bool(device.type & cl.device_type.CPU)

    def upload(self, allocation: Allocation, data: npt.NDArray[Any], offset: int = 0) -> None:
        queue = self._open()
        block = self._block(allocation)
        self.check_copy(allocation, data, offset)
        flat = as_bytes(data)
        if flat.nbytes:
            self._with_memory(
                "upload",
                flat.nbytes,
                lambda: self._cl.enqueue_copy(queue, block.buffer, flat, dst_offset=offset, is_blocking=True),
            )

    def download(self, allocation: Allocation, out: npt.NDArray[Any], offset: int = 0) -> None:
        queue = self._open()
        block = self._block(allocation)
        self.check_copy(allocation, out, offset, into=True)
        flat = as_bytes(out)
        if flat.nbytes:
            self._with_memory(
                "download",
                flat.nbytes,
                lambda: self._cl.enqueue_copy(queue, flat, block.buffer, src_offset=offset, is_blocking=True),
            )
        else:
            self.synchronize()

    def load(self, artifact: Artifact) -> Program:
        self._open()
        self.check_language(artifact, "opencl")
        cl, version = self._cl, self.target.language_version
        # No -cl-fast-relaxed-math or -cl-finite-math-only, because masks use infinities. Fused multiply-adds need no
        # option: FP_CONTRACT is on by default.
        options = [f"-cl-std=CL{version // 100}.{version // 10 % 10}"]
        if self.target.vendor == "intel" and self.target.driver.startswith("Intel"):  # Mesa's driver refuses the option
            options.append(LARGE_REGISTERS)
        try:
            kernel = cl.Kernel(cl.Program(self._context, artifact.text).build(options=options), artifact.entry)
            # NVIDIA's driver reports a wrong entry point only at the first query of the kernel.
            arguments = int(kernel.num_args)
            info = cl.kernel_work_group_info
            threads = int(kernel.get_work_group_info(info.WORK_GROUP_SIZE, self._device))
            shared = int(kernel.get_work_group_info(info.LOCAL_MEM_SIZE, self._device))
        except cl.Error as error:
            if error.code == cl.status_code.OUT_OF_HOST_MEMORY:
                raise OutOfMemoryError(f"[opencl] building '{artifact.entry}' ran out of memory: {error}") from error
            raise self.refused_error(artifact, f"the driver of {self.target.name} refused it", str(error)) from error
        if arguments != len(artifact.params):
            raise self.refused_error(artifact, f"it takes {arguments} arguments, expected {len(artifact.params)}")
        # NVIDIA's driver (580) always reports 256 threads, but launches up to the device's limit.
        if threads < artifact.workgroup and self.target.vendor != "nvidia":
            raise self.refused_error(
                artifact,
                f"it wants workgroups of {artifact.workgroup} threads and the driver allows {threads} "
                "(registers run out); use a smaller workgroup or smaller tiles",
            )
        if shared > self.target.max_shared_bytes:
            raise self.refused_error(
                artifact, f"it uses {shared} bytes of local memory, the device has {self.target.max_shared_bytes}"
            )
        kernel.set_scalar_arg_dtypes(
            [None if p.kind == "buffer" else np.dtype(SCALAR_FORMATS[p.dtype]) for p in artifact.params]
        )
        return Program(self, artifact, _Kernel(kernel, artifact.workgroup))

    def launch(self, program: Program, grid: Grid, args: Arguments, stream: int | None = None) -> None:
        if stream is not None:
            raise LaunchError("[opencl] expected stream=None, got a native stream; OpenCL devices have one queue")
        queue = self._open()
        self._enqueue(queue, program, grid, args)
        # Some drivers hold commands back until a flush; the device should start at once.
        try:
            queue.flush()
        except self._cl.Error as error:
            raise self._translate(error, f"launch of '{program.artifact.entry}'", None) from error

    def synchronize(self) -> None:
        queue = self._open()
        try:
            queue.finish()
        except self._cl.Error as error:
            raise self._translate(error, "synchronize", None) from error
        with self._lock:
            self._sweep()

    def import_host(self, array: npt.NDArray[Any]) -> Allocation | None:
        # Only a CPU device works in the array's own memory. With CL_MEM_USE_HOST_PTR a GPU may keep a copy that only a
        # map synchronises, and a map would overwrite what the host wrote in the meantime.
        self._open()
        flags = array.flags
        if not self._is_cpu or not flags.c_contiguous or not flags.writeable or array.nbytes == 0:
            return None
        if array.ctypes.data % self.target.offset_alignment or array.nbytes > self.target.max_buffer_bytes:
            return None
        mem = self._cl.mem_flags
        with self._lock:
            self._open()
            try:
                buffer = self._cl.Buffer(self._context, mem.READ_WRITE | mem.USE_HOST_PTR, hostbuf=as_bytes(array))
            except self._cl.Error:
                return None
            allocation = Allocation(self, array.nbytes, _Block(buffer, 0, array))
            self._live.add(allocation)
        return allocation

    def time_launch(self, program: Program, grid: Grid, args: Arguments) -> float:
        # Profiling slows every launch of a queue, so timed launches use a separate queue. Work stays ordered: earlier
        # work is finished first, and the host waits for the timed launch.
        self.synchronize()
        with self._lock:
            self._open()
            if self._timing_queue is None:
                properties = self._cl.command_queue_properties.PROFILING_ENABLE
                try:
                    self._timing_queue = self._cl.CommandQueue(self._context, self._device, properties)
                except self._cl.Error as error:
                    raise self._opening_error(error) from error
            queue = self._timing_queue
        event = self._enqueue(queue, program, grid, args)
        if event is None:
            return 0.0
        try:
            event.wait()
            return float(event.profile.end - event.profile.start) * 1e-9
        except self._cl.Error as error:
            raise self._translate(error, f"launch of '{program.artifact.entry}'", None) from error

    def _enqueue(self, queue: Any, program: Program, grid: Grid, args: Arguments) -> Any:
        """Start a launch and return its event; None if the grid is empty."""
        self.check_launch(program, grid, args)
        values = [self._block(arg).buffer if isinstance(arg, Allocation) else arg for arg in args]
        if 0 in grid:
            return None
        handle: _Kernel = program.handle
        total = (grid[0] * handle.local[0], grid[1], grid[2])

        def enqueue() -> Any:
            with handle.lock:
                return handle.kernel(queue, total, handle.local, *values)

        try:
            return self._with_memory(f"launch of '{program.artifact.entry}'", None, enqueue)
        except (struct.error, TypeError, OverflowError, RuntimeError) as error:
            raise self.argument_error(program.artifact, error) from error

    def _open(self) -> Any:
        """Run `_check` and return the queue, opening the context on first use."""
        self._check()
        if self._queue is None:
            with self._lock:
                self._check()  # again: another thread may have closed the device in between
                if self._queue is None:
                    try:
                        self._context = self._cl.Context([self._device])
                        self._queue = self._cl.CommandQueue(self._context, self._device)
                    except self._cl.Error as error:
                        self._context = None
                        raise self._opening_error(error) from error
        return self._queue

    def _opening_error(self, error: Any) -> AuleError:
        text = f"[opencl] expected a context and a queue on {self.target.name}, got {error}"
        if error.code in self._memory_codes() and error.code != self._cl.status_code.OUT_OF_RESOURCES:
            return OutOfMemoryError(f"{text}; free memory of the device")
        return BackendUnavailableError("opencl", f"{text}; check the driver")

    def _new_block(self, size: int, nbytes: int) -> _Block:
        memory = self.target.memory_bytes
        live = sum(a.handle.size for a in self._live)
        # Drivers promise memory that they do not have and fail, page or crash at first use. So sizes are counted here.
        if memory and live + self._pooled_bytes + size > memory:
            self._trim()
            if live + size > memory:
                raise OutOfMemoryError(
                    f"[opencl] expected {nbytes} free bytes on {self.target.name}, got {max(memory - live, 0)} of "
                    f"{memory}; free tensors or split the batch",
                    nbytes,
                )
        cl, queue = self._cl, self._queue

        def create() -> Any:
            buffer = cl.Buffer(self._context, cl.mem_flags.READ_WRITE, size)
            if not self._is_cpu and size >= 1 << 20:
                # Memory is bound at first use. Use it now, so that running out shows here and not in a launch.
                cl.enqueue_fill_buffer(queue, buffer, np.uint32(0), 0, 4)
            return buffer

        return _Block(self._with_memory("allocation", nbytes, create), size)

    def _retire(self, block: _Block) -> None:
        if block.array is None:
            super()._retire(block)
            return
        # Queued kernels may still use the array's memory: keep it until the queue has passed this point.
        with contextlib.suppress(self._cl.Error):
            self._retired.append((self._cl.enqueue_marker(self._queue), block))
        self._sweep()

    def _wait_idle(self) -> None:
        if self._queue is not None:
            with contextlib.suppress(self._cl.Error):
                self._queue.finish()

    def _release(self) -> None:
        self._retired.clear()
        self._queue = self._timing_queue = self._context = None

    def _trim(self) -> bool:
        """Return pooled memory to the driver; True if there was any."""
        with self._lock:
            had = bool(self._pool)
            self._empty_pool()
            if had:
                self._wait_idle()  # a buffer is released once the work that uses it is done
            return had

    def _sweep(self) -> None:
        """Release freed host arrays that the queue no longer uses. The caller holds the lock."""
        if self._retired:
            complete = self._cl.command_execution_status.COMPLETE
            self._retired = [r for r in self._retired if r[0].command_execution_status > complete]

    def _with_memory(self, what: str, nbytes: int | None, action: Callable[[], _T]) -> _T:
        """Run a driver call; if the device runs out of memory, empty the pool and try once more."""
        try:
            return action()
        except self._cl.Error as error:
            if error.code not in self._memory_codes() or not self._trim():
                raise self._translate(error, what, nbytes) from error
        try:
            return action()
        except self._cl.Error as error:
            raise self._translate(error, what, nbytes) from error

    def _memory_codes(self) -> tuple[int, ...]:
        codes = self._cl.status_code
        return (codes.MEM_OBJECT_ALLOCATION_FAILURE, codes.OUT_OF_RESOURCES, codes.OUT_OF_HOST_MEMORY)

    def _translate(self, error: Any, what: str, nbytes: int | None) -> AuleError:
        if not self._alive():
            # Drivers report a kernel's out-of-bounds access as OUT_OF_RESOURCES and refuse everything after it.
            self._lost = f"[opencl] {self.target.name} stopped answering ({what}: {error}); start a new process"
            return DeviceLostError(self._lost)
        # For calls that allocate nothing, OUT_OF_RESOURCES is about registers or the launch, not memory.
        short_of_memory = error.code in self._memory_codes() and (
            nbytes is not None or error.code != self._cl.status_code.OUT_OF_RESOURCES
        )
        if short_of_memory:
            return OutOfMemoryError(
                f"[opencl] {what} ran out of memory on {self.target.name} ({error}); free tensors or split the batch",
                nbytes,
            )
        return LaunchError(f"[opencl] {what} failed on {self.target.name}: {error}")

    def _alive(self) -> bool:
        cl = self._cl
        try:
            buffer = cl.Buffer(self._context, cl.mem_flags.READ_WRITE, 256)
            cl.enqueue_copy(self._queue, buffer, np.zeros(4, np.uint8), is_blocking=True)
        except cl.Error as error:
            # A device that is completely out of memory is still alive.
            return bool(error.code in (cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE, cl.status_code.OUT_OF_HOST_MEMORY))
        return True


def _info(device: Any, key: int) -> Any:
    """Return a vendor-specific device property; None if the driver does not have it."""
    try:
        return device.get_info(key)
    except Exception:  # pyopencl raises its own Error for an unknown value and others for an unknown type
        return None


def _language_version(cl: Any, device: Any) -> int:
    versions = [int(float(device.opencl_c_version.split()[2]) * 100 + 0.5)]
    # An OpenCL 3.0 device reports its newest language only in this list; for the older query it answers 1.2.
    with contextlib.suppress(AttributeError, cl.Error):
        versions += [(v.version >> 22) * 100 + (v.version >> 12 & 0x3FF) * 10 for v in device.opencl_c_all_versions]
    return max(versions)


def _subgroups(device: Any, extensions: set[str], is_cpu: bool) -> tuple[int, tuple[int, ...]]:
    """Return the subgroup size and the sizes a kernel may require; (0, ()) unless shuffles work and it is known."""
    khronos = {"cl_khr_subgroups", "cl_khr_subgroup_shuffle"} <= extensions
    if is_cpu or not (khronos or "cl_intel_subgroups" in extensions):
        return 0, ()
    if "cl_intel_required_subgroup_size" in extensions:
        sizes = tuple(sorted(int(n) for n in _info(device, _SUB_GROUP_SIZES_INTEL) or ()))
        # Intel's compiler favours 16 lanes: 32 halve the registers per lane, and the newest devices do not support 8.
        return (16 if 16 in sizes else max(sizes, default=0)), sizes
    return int(_info(device, _WARP_SIZE_NV) or _info(device, _WAVEFRONT_WIDTH_AMD) or 0), ()


def _target(cl: Any, device: Any) -> Target:
    extensions = set(device.extensions.split())
    is_cpu = bool(device.type & cl.device_type.CPU)
    maker = device.vendor.lower()
    vendor = next((name for text, name in _VENDORS.items() if text in maker), "unknown")
    subgroup_size, subgroup_sizes = _subgroups(device, extensions, is_cpu)
    full = device.profile == "FULL_PROFILE"
    return Target(
        backend="opencl",
        name=device.name.strip(),
        vendor="software" if is_cpu else vendor,
        driver=f"{device.platform.name.strip()} {device.driver_version.strip()}",
        software=is_cpu,
        subgroup_size=subgroup_size,
        subgroup_sizes=subgroup_sizes,
        max_threads=min(int(device.max_work_group_size), int(device.max_work_item_sizes[0])),
        max_shared_bytes=int(device.local_mem_size),
        max_grid=(2**31 - 1, 65535, 65535),
        # Half of the parameter space for pointers of 8 bytes, the other half for scalars.
        max_buffers=int(device.max_parameter_size) // 16,
        max_buffer_bytes=int(device.max_mem_alloc_size),
        offset_alignment=max(int(device.mem_base_addr_align) // 8, 1),
        memory_bytes=int(device.global_mem_size),
        compute_units=int(device.max_compute_units),
        unified_memory=bool(device.host_unified_memory),
        f16="cl_khr_fp16" in extensions,
        f64="cl_khr_fp64" in extensions,
        int64=full or "cles_khr_int64" in extensions,
        # vload_half and ushort need no extension, and byte stores are core since OpenCL 1.1.
        storage16=True,
        storage8=True,
        language_version=_language_version(cl, device),
        extensions=tuple(e for e in _USEFUL_EXTENSIONS if e in extensions),
    )
