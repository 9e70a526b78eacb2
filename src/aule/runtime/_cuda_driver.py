"""The CUDA driver library: loading, entry points, constants, and the Target of a device."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from aule.errors import AuleError, BackendUnavailableError, OutOfMemoryError
from aule.target import NVIDIA_LAYOUT, WARPGROUP_UNITS, Target

INT, UINT, SIZE = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
PTR = ctypes.c_void_p  # every pointer and every opaque handle
DEV = ctypes.c_uint64  # CUdeviceptr

# Entry points by their exported names. The header maps names such as cuMemAlloc to the _v2 symbols; the plain symbols
# are the 32-bit API of CUDA 3.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (UINT,),
    "cuDriverGetVersion": (PTR,),
    "cuGetErrorName": (INT, PTR),
    "cuGetErrorString": (INT, PTR),
    "cuDeviceGetCount": (PTR,),
    "cuDeviceGet": (PTR, INT),
    "cuDeviceGetName": (PTR, INT, INT),
    "cuDeviceGetAttribute": (PTR, INT, INT),
    "cuDeviceTotalMem_v2": (PTR, INT),
    "cuDevicePrimaryCtxRetain": (PTR, INT),
    "cuDevicePrimaryCtxRelease_v2": (INT,),
    "cuCtxGetCurrent": (PTR,),
    "cuCtxPushCurrent_v2": (PTR,),
    "cuCtxPopCurrent_v2": (PTR,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (PTR, SIZE),
    "cuMemFree_v2": (DEV,),
    "cuMemGetInfo_v2": (PTR, PTR),
    "cuMemcpyHtoDAsync_v2": (DEV, PTR, SIZE, PTR),
    "cuMemcpyDtoHAsync_v2": (PTR, DEV, SIZE, PTR),
    "cuMemsetD32Async": (DEV, UINT, SIZE, PTR),
    "cuStreamCreate": (PTR, UINT),
    "cuStreamDestroy_v2": (PTR,),
    "cuStreamSynchronize": (PTR,),
    "cuStreamWaitEvent": (PTR, PTR, UINT),
    "cuStreamIsCapturing": (PTR, PTR),
    "cuStreamGetCaptureInfo_v2": (PTR, PTR, PTR, PTR, PTR, PTR),
    "cuEventCreate": (PTR, UINT),
    "cuEventDestroy_v2": (PTR,),
    "cuEventRecord": (PTR, PTR),
    "cuEventSynchronize": (PTR,),
    "cuEventElapsedTime": (PTR, PTR, PTR),
    "cuModuleLoadDataEx": (PTR, PTR, UINT, PTR, PTR),
    "cuModuleUnload": (PTR,),
    "cuModuleGetFunction": (PTR, PTR, ctypes.c_char_p),
    "cuFuncGetAttribute": (PTR, INT, PTR),
    "cuFuncSetAttribute": (PTR, INT, INT),
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
FUNC_MAX_THREADS = 0
FUNC_STATIC_SHARED = 1
FUNC_LOCAL = 3
FUNC_REGISTERS = 4
FUNC_MAX_DYNAMIC_SHARED = 8
FUNC_CARVEOUT = 9

# CUlaunchAttributeID
PROGRAMMATIC_STREAM_SERIALIZATION = 6

# CUjit_option: info log, its size, error log, its size
JIT_LOG_OPTIONS = (3, 4, 5, 6)

STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2

# CUresult
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
WRONG_CONTEXT = frozenset({201, 400})  # no context is current, or not the kernel's
# After these errors every call on the context fails with the same error (as CUDA documents), or the driver is gone.
LOST = frozenset({3, 4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})


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


class Driver:
    """The loaded library. One per library name and process."""

    def __init__(self, names: Sequence[str]) -> None:
        self.forked = False
        self.devices: weakref.WeakSet[Any] = weakref.WeakSet()
        """Objects whose ``after_fork()`` is called in a forked child."""
        self.api = self._load(names)
        try:
            for name, argtypes in _SIGNATURES.items():
                getattr(self.api, name).argtypes = argtypes
            # Separate function objects without argtypes: ctypes then passes ctypes objects through unchecked, which is
            # faster on the hot path.
            self.launch_kernel: Callable[..., int] = self.api["cuLaunchKernel"]
            self.get_current: Callable[..., int] = self.api["cuCtxGetCurrent"]
        except AttributeError as error:
            raise BackendUnavailableError(
                "cuda",
                f"[cuda] expected a driver of CUDA 11.3 or later, got one that lacks an entry point ({error}); "
                "update the NVIDIA driver",
            ) from None
        # Exists since CUDA 12.4. Loads a kernel eagerly, so that its first launch can be captured into a graph.
        self.func_load: Callable[..., int] | None = getattr(self.api, "cuFuncLoad", None)
        code = self.api.cuInit(0)
        if code:
            raise BackendUnavailableError(
                "cuda",
                f"[cuda] expected a working NVIDIA driver, cuInit got {self.describe(code)}; "
                "check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
            )
        number = INT()
        self.api.cuDriverGetVersion(ctypes.byref(number))
        self.version = number.value
        # Launches that overlap the end of the previous one; CUDA graphs support them since 12.3.
        known = self.version >= _FIRST_WITH_OVERLAP
        self.launch_kernel_ex: Callable[..., int] | None = self.api["cuLaunchKernelEx"] if known else None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    @staticmethod
    def _load(names: Sequence[str]) -> ctypes.CDLL:
        reasons = []
        for name in names:
            try:
                return ctypes.CDLL(name)
            except OSError as error:
                if "No such file" not in str(error):  # the library exists but does not load
                    reasons.append(str(error))
        found = "; ".join(reasons) or f"none of {', '.join(names)}"
        raise BackendUnavailableError(
            "cuda",
            f"[cuda] expected the NVIDIA driver library, got {found}; install the NVIDIA driver "
            "(the CUDA toolkit is not needed)",
        )

    def _after_fork(self) -> None:
        self.forked = True
        for device in list(self.devices):
            device.after_fork()

    def describe(self, code: int) -> str:
        """Return the driver's name and text for an error code."""
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        if self.api.cuGetErrorName(code, ctypes.byref(name)) or name.value is None:
            return f"CUDA error {code}"
        self.api.cuGetErrorString(code, ctypes.byref(text))
        return f"{name.value.decode()} ({code}: {(text.value or b'').decode(errors='replace')})"

    def attribute(self, device: int, attribute: int) -> int:
        """Return a CUdevice_attribute; 0 if an old driver does not know it."""
        value = INT()
        code = self.api.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        if code not in (0, INVALID_VALUE):
            raise self.probe_error(code, "an attribute of the device")
        return 0 if code else value.value

    def probe_error(self, code: int, expected: str) -> AuleError:
        """Make the error for a question about devices that the driver does not answer."""
        text = f"[cuda] expected {expected}, got {self.describe(code)}"
        if code == OUT_OF_MEMORY:
            return OutOfMemoryError(f"{text}; free some memory")
        return BackendUnavailableError("cuda", f"{text}; check `nvidia-smi`")

    def count(self) -> int:
        """Return the number of devices."""
        value = INT()
        code = self.api.cuDeviceGetCount(ctypes.byref(value))
        if code:
            raise self.probe_error(code, "a count of devices")
        return value.value


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
    if driver.forked:
        raise BackendUnavailableError(
            "cuda",
            "[cuda] expected a process that initialises CUDA itself, got one forked after CUDA was initialised; "
            "start it with the multiprocessing method 'spawn' or 'forkserver'",
        )
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

    name = ctypes.create_string_buffer(256)
    memory = SIZE()
    code = driver.api.cuDeviceGetName(name, len(name), handle)
    code = code or driver.api.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    if code:
        raise driver.probe_error(code, "the device's name and memory")
    capability = attribute(CAPABILITY_MAJOR), attribute(CAPABILITY_MINOR)
    matrix_units: tuple[str, ...] = ()
    if capability >= (8, 0):
        matrix_units = ("m16n8k16:f16:f32", "m16n8k16:bf16:f32", "m16n8k8:tf32:f32")
    elif capability >= (7, 5):
        matrix_units = ("m16n8k8:f16:f32",)
    if capability == (9, 0) and driver.version >= _FIRST_WITH_WGMMA:
        matrix_units += WARPGROUP_UNITS
    return Target(
        backend="cuda",
        name=name.value.decode(errors="replace"),
        vendor="nvidia",
        driver=f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10}",
        arch=f"sm_{capability[0]}{capability[1]}",
        subgroup_size=32,
        subgroup_sizes=(32,),
        max_threads=attribute(MAX_THREADS_PER_BLOCK),
        max_shared_bytes=max(attribute(MAX_SHARED_PER_BLOCK_OPTIN), attribute(MAX_SHARED_PER_BLOCK)),
        max_grid=(attribute(MAX_GRID_DIM_X), attribute(MAX_GRID_DIM_Y), attribute(MAX_GRID_DIM_Z)),
        max_buffers=512,  # kernel parameters may take 4 KiB, a pointer 8 bytes
        max_buffer_bytes=memory.value,
        offset_alignment=1,  # a buffer is a plain pointer
        memory_bytes=memory.value,
        l2_bytes=attribute(L2_CACHE_SIZE),
        compute_units=attribute(MULTIPROCESSOR_COUNT),
        shared_per_unit=attribute(MAX_SHARED_PER_SM),
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
        matrix_units=matrix_units,
        matrix_layout=NVIDIA_LAYOUT if matrix_units else None,
    )
