"""The HIP libraries: entry points, constants, and the Target of a device."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from dataclasses import replace

from aule.errors import BackendUnavailableError
from aule.runtime import _hip_chips, _hip_library
from aule.runtime._stream_driver import INT, PTR, SIZE, UINT, Functions, StreamDriver, Table, load_library
from aule.target import Target

TEXT = ctypes.c_char_p

FUNCTIONS: Table = {
    "init": ("hipInit", UINT),
    "driver_version": ("hipRuntimeGetVersion", PTR),
    "error_name": ("hipGetErrorName", INT),
    "error_text": ("hipGetErrorString", INT),
    "last_error": ("hipGetLastError",),
    "device_count": ("hipGetDeviceCount", PTR),
    "device_name": ("hipDeviceGetName", PTR, INT, INT),
    "device_memory": ("hipDeviceTotalMem", PTR, INT),
    "device_attribute": ("hipDeviceGetAttribute", PTR, INT, INT),
    "device_current": ("hipGetDevice", PTR),
    "device_select": ("hipSetDevice", INT),
    "synchronize": ("hipDeviceSynchronize",),
    "memory_allocate": ("hipMalloc", PTR, SIZE),
    "memory_free": ("hipFree", PTR),
    "memory_info": ("hipMemGetInfo", PTR, PTR),
    "copy_to_device": ("hipMemcpyHtoDAsync", PTR, PTR, SIZE, PTR),
    "copy_to_host": ("hipMemcpyDtoHAsync", PTR, PTR, SIZE, PTR),
    "fill": ("hipMemsetD32Async", PTR, INT, SIZE, PTR),
    "stream_create": ("hipStreamCreateWithFlags", PTR, UINT),
    "stream_destroy": ("hipStreamDestroy", PTR),
    "stream_synchronize": ("hipStreamSynchronize", PTR),
    "stream_wait": ("hipStreamWaitEvent", PTR, PTR, UINT),
    "stream_is_capturing": ("hipStreamIsCapturing", PTR, PTR),
    "stream_capture": ("hipStreamGetCaptureInfo_v2", PTR, PTR, PTR, PTR, PTR, PTR),
    "event_create": ("hipEventCreateWithFlags", PTR, UINT),
    "event_destroy": ("hipEventDestroy", PTR),
    "event_record": ("hipEventRecord", PTR, PTR),
    "event_synchronize": ("hipEventSynchronize", PTR),
    "event_elapsed": ("hipEventElapsedTime", PTR, PTR, PTR),
    "module_load": ("hipModuleLoadData", PTR, PTR),
    "module_unload": ("hipModuleUnload", PTR),
    "module_function": ("hipModuleGetFunction", PTR, PTR, TEXT),
    "function_attribute": ("hipFuncGetAttribute", PTR, INT, PTR),
}
COMPILER_FUNCTIONS: Table = {
    "version": ("hiprtcVersion", PTR, PTR),
    "error_text": ("hiprtcGetErrorString", INT),
    "create": ("hiprtcCreateProgram", PTR, TEXT, TEXT, INT, PTR, PTR),
    "compile": ("hiprtcCompileProgram", PTR, INT, PTR),
    "log_size": ("hiprtcGetProgramLogSize", PTR, PTR),
    "log": ("hiprtcGetProgramLog", PTR, PTR),
    "code_size": ("hiprtcGetCodeSize", PTR, PTR),
    "code": ("hiprtcGetCode", PTR, PTR),
    "destroy": ("hiprtcDestroyProgram", PTR),
}
LAUNCH = ("hipModuleLaunchKernel", PTR, UINT, UINT, UINT, UINT, UINT, UINT, UINT, PTR, PTR, PTR)
"""Called without argtypes; `aule.runtime._stream_kernel.Kernel.call` makes objects of these types."""
PROPERTIES = ("hipGetDevicePropertiesR0600", "hipGetDeviceProperties")
"""Names of one function (PTR, INT) in ROCm 6 and later, and before."""

OLDEST = 60000000
"""The first version with clang 17: kernels call builtins that older compilers lack."""
ATTRIBUTES = {
    "Integrated": 16,
    "L2CacheSize": 19,
    "MaxGridDimX": 29,
    "MaxGridDimY": 30,
    "MaxGridDimZ": 31,
    "MaxThreadsPerBlock": 56,
    "MultiprocessorCount": 63,
    "MaxSharedMemoryPerBlock": 74,
    "WarpSize": 87,
    "MaxSharedMemoryPerMultiprocessor": 10002,
}
"""hipDeviceAttribute_t, without the prefix hipDeviceAttribute."""

# hipError_t: not initialised, shut down, uncorrectable memory, illegal address, timeout, context destroyed, assertion,
# launch failure. Many faults never get here: ROCm ends the process itself.
_LOST = frozenset({3, 4, 214, 700, 702, 709, 710, 719})
_LARGEST_PROPERTIES = 1 << 14
"""Bytes of the buffer for hipDeviceProp_t, which has about 1500 and grows."""
_NAME_BYTES = 256
"""Bytes of hipDeviceProp_t's first field, the device's name."""


class Driver(StreamDriver):
    """The loaded libraries. One per folder and process."""

    backend = "hip"
    manual = "hipError_t in HIP's documentation"
    remedy = "check `rocminfo` and HIP_VISIBLE_DEVICES"
    lost = _LOST

    def __init__(self, folder: str | None) -> None:
        library = load_library(_hip_library.candidates("amdhip64", folder))
        if isinstance(library, str):
            raise BackendUnavailableError(
                "hip",
                f"[hip] expected AMD's HIP library, got {library}; install PyTorch for ROCm, or ROCm, and set "
                "ROCM_PATH if it is not in /opt/rocm",
            )
        compiler = load_library(_hip_library.candidates("hiprtc", folder))
        if isinstance(compiler, str):
            raise BackendUnavailableError(
                "hip",
                f"[hip] expected AMD's compiler hiprtc beside its HIP library, got {compiler}; install PyTorch for "
                "ROCm, or ROCm with hiprtc",
            )
        try:
            self.api = Functions(library, FUNCTIONS)
            self.launch_kernel = library[LAUNCH[0]]
            self._properties = _first(library, PROPERTIES)
            self.compiler = Functions(compiler, COMPILER_FUNCTIONS)
        except AttributeError as error:
            raise BackendUnavailableError(
                "hip",
                f"[hip] expected ROCm 6 or later with hiprtc, got libraries without an entry point ({error}); update "
                "ROCm",
            ) from None
        for function in (self.api.error_name, self.api.error_text, self.compiler.error_text):
            function.restype = TEXT  # type: ignore[attr-defined]
        code = self.api.init(0)
        if code:
            raise self.probe_error(code, "a working ROCm driver")
        number, major, minor = INT(), INT(), INT()
        self.api.driver_version(ctypes.byref(number))
        self.compiler.version(ctypes.byref(major), ctypes.byref(minor))
        # 60342131 is 6.3.42131
        version = f"{number.value // 10**7}.{number.value // 10**5 % 100}.{number.value % 10**5}"
        self.version = f"HIP {version}, hiprtc {major.value}.{minor.value}"
        if 0 < number.value < OLDEST:  # 0 if the call fails
            raise BackendUnavailableError(
                "hip",
                f"[hip] expected ROCm 6 or later, whose compiler has what kernels call, got {version}; update it",
            )
        super().__init__()

    def describe(self, code: int) -> str:
        self.forget_error()
        name, text = self.api.error_name(code), self.api.error_text(code)
        return f"{_decoded(name) or 'HIP error'} ({code}: {_decoded(text)})"

    def forget_error(self) -> None:
        # PyTorch asks for it after its own launches, and would raise ours.
        self.api.last_error()

    def arch(self, device: int) -> str:
        """Return the instruction set of a device with its settings, such as ``gfx90a:sramecc+:xnack-``."""
        properties = ctypes.create_string_buffer(_LARGEST_PROPERTIES)
        code = self._properties(properties, device)
        if code:
            raise self.probe_error(code, "the device's properties")
        # ROCm 6 has moved the name in the struct. No other text after the device's name starts like this.
        found = re.search(rb"gfx[0-9a-f]+(:\w+[+-])*(?=\0)", properties.raw[_NAME_BYTES:])
        if found is None:
            raise BackendUnavailableError("hip", "[hip] expected the name of an instruction set, got none; update ROCm")
        return found[0].decode()


def _first(library: ctypes.CDLL, names: tuple[str, ...]) -> ctypes._NamedFuncPointer:
    for name in names[:-1]:
        if hasattr(library, name):
            names = (name,)
    function = library[names[-1]]
    function.argtypes = (PTR, INT)
    return function


def _decoded(text: object) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else ""


_drivers: dict[str | None, Driver] = {}
_drivers_lock = threading.Lock()


def open_driver(folder: str | None) -> Driver:
    """Load the libraries, the best that are found or those of a folder; once per process."""
    if folder is None and not _hip_library.may_have_device():
        raise BackendUnavailableError(
            "hip",
            "[hip] expected ROCm's device file /dev/kfd, got none; install the amdgpu driver, and give containers "
            "--device=/dev/kfd --device=/dev/dri",
        )
    if folder is None and sys.platform == "darwin":
        raise BackendUnavailableError("hip", "[hip] expected Linux or Windows, got macOS; use backend='metal'")
    with _drivers_lock:
        driver = _drivers.get(folder)
        if driver is None:
            driver = _drivers[folder] = Driver(folder)
    driver.refuse_fork()
    return driver


def read_target(driver: Driver, device: int, arch: str) -> Target:
    """Read a device's properties into a Target; ``arch`` is its instruction set with settings."""

    def attribute(name: str) -> int:
        return driver.attribute(device, ATTRIBUTES[name])

    name, memory = driver.name_and_memory(device)
    if not _hip_chips.known(arch):
        raise BackendUnavailableError(
            "hip",
            f"[hip] expected gfx9 to gfx12, got {arch} ({name}); hide it with HIP_VISIBLE_DEVICES",
        )
    threads, wave = attribute("MaxThreadsPerBlock"), attribute("WarpSize")
    chip = _hip_chips.chip(arch)
    grid_x, grid_y, grid_z = (attribute(f"MaxGridDim{axis}") for axis in "XYZ")
    return replace(
        chip,
        name=name,
        driver=driver.version,
        subgroup_size=wave,
        subgroup_sizes=(wave,),
        max_threads=threads,
        max_shared_bytes=attribute("MaxSharedMemoryPerBlock"),
        # HIP counts threads along an axis in 32 bits. Numbers of workgroups along y and z have 16 bits on gfx12.
        max_grid=(min(grid_x, (2**32 - 1) // threads), min(grid_y, 65535), min(grid_z, 65535)),
        max_buffer_bytes=memory,
        memory_bytes=memory,
        l2_bytes=attribute("L2CacheSize"),
        compute_units=attribute("MultiprocessorCount"),
        # HIP tells it of one compute unit, also where it counts pairs.
        shared_per_unit=attribute("MaxSharedMemoryPerMultiprocessor") * (chip.shared_per_unit // chip.max_shared_bytes),
        unified_memory=bool(attribute("Integrated")),
        # The engine probes layouts before it uses the documented ones.
        matrix_layout=None,
        matrix_right=None,
        matrix_factors=None,
    )
