"""The CUDA driver library: loading, entry points, constants, and the Target of a device."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence

from aule import settings
from aule.errors import BackendUnavailableError
from aule.runtime._stream_driver import DEV, INT, PTR, SIZE, UINT, Functions, StreamDriver, Table, load_library
from aule.target import NVIDIA_LAYOUT, WARPGROUP_UNITS, Target

# Entry points by their exported names. The header maps names such as cuMemAlloc to the _v2 symbols; the plain symbols
# are the 32-bit API of CUDA 3.
_FUNCTIONS: Table = {
    "context_retain": ("cuDevicePrimaryCtxRetain", PTR, INT),
    "context_release": ("cuDevicePrimaryCtxRelease_v2", INT),
    "context_push": ("cuCtxPushCurrent_v2", PTR),
    "context_pop": ("cuCtxPopCurrent_v2", PTR),
    "device_get": ("cuDeviceGet", PTR, INT),
    "device_count": ("cuDeviceGetCount", PTR),
    "device_name": ("cuDeviceGetName", PTR, INT, INT),
    "device_attribute": ("cuDeviceGetAttribute", PTR, INT, INT),
    "device_memory": ("cuDeviceTotalMem_v2", PTR, INT),
    "error_name": ("cuGetErrorName", INT, PTR),
    "error_text": ("cuGetErrorString", INT, PTR),
    "init": ("cuInit", UINT),
    "driver_version": ("cuDriverGetVersion", PTR),
    "synchronize": ("cuCtxSynchronize",),
    "memory_allocate": ("cuMemAlloc_v2", PTR, SIZE),
    "memory_free": ("cuMemFree_v2", DEV),
    "memory_info": ("cuMemGetInfo_v2", PTR, PTR),
    "copy_to_device": ("cuMemcpyHtoDAsync_v2", DEV, PTR, SIZE, PTR),
    "copy_to_host": ("cuMemcpyDtoHAsync_v2", PTR, DEV, SIZE, PTR),
    "fill": ("cuMemsetD32Async", DEV, UINT, SIZE, PTR),
    "stream_create": ("cuStreamCreate", PTR, UINT),
    "stream_destroy": ("cuStreamDestroy_v2", PTR),
    "stream_synchronize": ("cuStreamSynchronize", PTR),
    "stream_wait": ("cuStreamWaitEvent", PTR, PTR, UINT),
    "stream_is_capturing": ("cuStreamIsCapturing", PTR, PTR),
    "stream_capture": ("cuStreamGetCaptureInfo_v2", PTR, PTR, PTR, PTR, PTR, PTR),
    "event_create": ("cuEventCreate", PTR, UINT),
    "event_destroy": ("cuEventDestroy_v2", PTR),
    "event_record": ("cuEventRecord", PTR, PTR),
    "event_synchronize": ("cuEventSynchronize", PTR),
    "event_elapsed": ("cuEventElapsedTime", PTR, PTR, PTR),
    "module_load": ("cuModuleLoadDataEx", PTR, PTR, UINT, PTR, PTR),
    "module_unload": ("cuModuleUnload", PTR),
    "module_function": ("cuModuleGetFunction", PTR, PTR, ctypes.c_char_p),
    "function_attribute": ("cuFuncGetAttribute", PTR, INT, PTR),
    "function_set_attribute": ("cuFuncSetAttribute", PTR, INT, INT),
}

# CUdevice_attribute
MAX_THREADS_PER_BLOCK = 1
MAX_GRID_DIM_X, MAX_GRID_DIM_Y, MAX_GRID_DIM_Z = 5, 6, 7
MAX_SHARED_PER_BLOCK = 8
MULTIPROCESSOR_COUNT = 16
INTEGRATED = 18
L2_CACHE_SIZE = 38
MAX_THREADS_PER_SM = 39
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
MAX_SHARED_PER_SM = 81
MAX_REGISTERS_PER_SM = 82
MAX_SHARED_PER_BLOCK_OPTIN = 97
RESERVED_SHARED_PER_BLOCK = 111

# CUfunction_attribute
FUNC_MAX_DYNAMIC_SHARED = 8
FUNC_CARVEOUT = 9

# CUlaunchAttributeID
PROGRAMMATIC_STREAM_SERIALIZATION = 6

# CUjit_option: info log, its size, error log, its size
JIT_LOG_OPTIONS = (3, 4, 5, 6)

# CUresult
_WRONG_CONTEXT = frozenset({201, 400})  # no context is current, or not the kernel's
# After these errors every call on the context fails with the same error (as CUDA documents), or the driver is gone.
_LOST = frozenset({3, 4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, with its value as an array of numbers."""

    _fields_ = (("id", INT), ("padding", INT), ("value", UINT * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", UINT * 3),
        ("block", UINT * 3),
        ("shared", UINT),
        ("stream", PTR),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", UINT),
    )


class Driver(StreamDriver):
    """The loaded library. One per library name and process."""

    backend = "cuda"
    manual = "the CUDA driver API"
    remedy = "check `nvidia-smi`"
    lost = _LOST
    wrong_context = _WRONG_CONTEXT

    def __init__(self, names: Sequence[str]) -> None:
        library = load_library(names)
        if isinstance(library, str):
            raise BackendUnavailableError(
                "cuda",
                f"[cuda] expected the NVIDIA driver library, got {library}; install the NVIDIA driver "
                "(the CUDA toolkit is not needed)",
            )
        try:
            self.api = Functions(library, _FUNCTIONS)
            self.launch_kernel = library["cuLaunchKernel"]
            self.get_current: Callable[..., int] = library["cuCtxGetCurrent"]
        except AttributeError as error:
            raise BackendUnavailableError(
                "cuda",
                f"[cuda] expected a driver of CUDA 11.3 or later, got one that lacks an entry point ({error}); "
                "update the NVIDIA driver",
            ) from None
        # Exists since CUDA 12.4. Loads a kernel eagerly, so that its first launch can be captured into a graph.
        self.func_load: Callable[..., int] | None = getattr(library, "cuFuncLoad", None)
        code = self.api.init(0)
        if code:
            raise BackendUnavailableError(
                "cuda",
                f"[cuda] expected a working NVIDIA driver, cuInit got {self.describe(code)}; "
                "check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
            )
        number = INT()
        self.api.driver_version(ctypes.byref(number))
        self.version = number.value
        # Launches that overlap the end of the previous one; CUDA graphs support them since 12.3.
        known = self.version >= _FIRST_WITH_OVERLAP
        self.launch_kernel_ex: Callable[..., int] | None = library["cuLaunchKernelEx"] if known else None
        # Exists since CUDA 12.0.
        self.encode_tensor_map: Callable[..., int] | None = getattr(library, "cuTensorMapEncodeTiled", None)
        super().__init__()

    def describe(self, code: int) -> str:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        if self.api.error_name(code, ctypes.byref(name)) or name.value is None:
            return f"CUDA error {code}"
        self.api.error_text(code, ctypes.byref(text))
        return f"{name.value.decode()} ({code}: {(text.value or b'').decode(errors='replace')})"

    def forget_error(self) -> None:
        """Nothing to do: CUDA's driver keeps no error, and its runtime, which does, is not called."""


_drivers: dict[str | None, Driver] = {}
_drivers_lock = threading.Lock()


def open_driver(library: str | None) -> Driver:
    """Load the driver library, the system's or the one named; once per process."""
    if library is None and sys.platform == "darwin":
        raise BackendUnavailableError(
            "cuda", "[cuda] expected Linux or Windows, got macOS, which has no CUDA driver; use backend='metal'"
        )
    with _drivers_lock:
        driver = _drivers.get(library)
        if driver is None:
            if library is not None:
                names = [library]
            elif sys.platform == "win32":
                names = ["nvcuda.dll"]
            else:
                names = ["libcuda.so.1", "libcuda.so", "/usr/lib/wsl/lib/libcuda.so.1"]
            driver = _drivers[library] = Driver(names)
    driver.refuse_fork()
    return driver


_FIRST_WITH_WGMMA = 12000
"""First driver version with PTX 8.0."""
_FIRST_WITH_OVERLAP = 12030
"""First driver version whose graphs can capture overlapping launches."""
_PORTABLE_CLUSTER = 8
"""Largest cluster that every architecture with clusters supports. Larger ones gained nothing."""


def read_target(driver: Driver, handle: int) -> Target:
    """Read a device's properties into a Target."""

    def attribute(number: int) -> int:
        return driver.attribute(handle, number)

    name, memory = driver.name_and_memory(handle)
    capability = attribute(CAPABILITY_MAJOR), attribute(CAPABILITY_MINOR)
    shared = max(attribute(MAX_SHARED_PER_BLOCK_OPTIN), attribute(MAX_SHARED_PER_BLOCK))
    shared_per_unit = attribute(MAX_SHARED_PER_SM)
    limit = settings.cuda_arch()
    if limit is not None and limit < capability:
        capability = limit
        less = shared - settings.CUDA_SHARED_BYTES[f"{limit[0]}{limit[1]}"]
        shared, shared_per_unit = shared - less, shared_per_unit - less
    matrix_units: tuple[str, ...] = ()
    if capability >= (8, 0):
        matrix_units = ("m16n8k16:f16:f32", "m16n8k16:bf16:f32", "m16n8k8:tf32:f32")
    elif capability >= (7, 5):
        matrix_units = ("m16n8k8:f16:f32",)
    if capability == (9, 0) and driver.version >= _FIRST_WITH_WGMMA:
        matrix_units += WARPGROUP_UNITS
    return Target(
        backend="cuda",
        name=name,
        vendor="nvidia",
        driver=f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10}",
        arch=f"sm_{capability[0]}{capability[1]}",
        subgroup_size=32,
        subgroup_sizes=(32,),
        max_threads=attribute(MAX_THREADS_PER_BLOCK),
        max_shared_bytes=shared,
        max_grid=(attribute(MAX_GRID_DIM_X), attribute(MAX_GRID_DIM_Y), attribute(MAX_GRID_DIM_Z)),
        max_buffers=512,  # kernel parameters may take 4 KiB, a pointer 8 bytes
        max_buffer_bytes=memory,
        offset_alignment=1,  # a buffer is a plain pointer
        memory_bytes=memory,
        l2_bytes=attribute(L2_CACHE_SIZE),
        compute_units=attribute(MULTIPROCESSOR_COUNT),
        shared_per_unit=shared_per_unit,
        registers_per_unit=attribute(MAX_REGISTERS_PER_SM),
        unified_memory=bool(attribute(INTEGRATED)),
        f16=capability >= (5, 3),
        f64=True,
        int64=True,
        storage16=True,
        storage8=True,
        bf16=capability >= (8, 0),
        e4m3=capability >= (9, 0),
        device_fence=True,
        atomic_f32_add=True,
        overlap=capability >= (9, 0) and driver.launch_kernel_ex is not None,
        max_cluster=_PORTABLE_CLUSTER if capability >= (9, 0) else 1,
        tensor_maps=WARPGROUP_UNITS[0] in matrix_units and driver.encode_tensor_map is not None,
        matrix_units=matrix_units,
        matrix_layout=NVIDIA_LAYOUT if matrix_units else None,
    )
