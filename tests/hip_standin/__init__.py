"""Libraries that stand in for libamdhip64 and libhiprtc: they run rendered HIP kernels on the CPU.

`Libraries` builds them into a folder, as ROCm's are in one. Their devices are AMD's by name, arch and wave size.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from aule.runtime import hip
from aule.runtime.hip import HipDevice

_HERE = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-fPIC",
    "-w",
    "-U_FORTIFY_SOURCE",
    "-ffp-contract=off",
)


def available() -> bool:
    """Whether there is a g++ that can build them and compile kernels."""
    return shutil.which("g++") is not None


class Libraries:
    """The libraries in a folder, with state of their own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="aule-hip-standin-")
        self.folder = self._folder.name
        folder = Path(self.folder)
        for header in (_HERE / "device.h", _HERE.parent / "shim_fibers.h"):
            shutil.copy(header, folder)
        header = folder / "device.h"
        # What a kernel is compiled with, precompiled: it saves a third of the time.
        kernel_flags = [*_FLAGS, "-DAULE_STAND_IN"]
        subprocess.run(["g++", *kernel_flags, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True)
        defined = [f'-DFOLDER="{folder}"', f'-DFLAGS="{" ".join(_FLAGS)}"']
        for name in ("amdhip64", "hiprtc"):
            command = [
                "g++",
                *_FLAGS,
                *defined,
                "-shared",
                "-o",
                folder / f"lib{name}.so",
                _HERE / f"{name}.cpp",
                "-ldl",
            ]
            subprocess.run(command, check=True)
        self.runtime: Any = ctypes.CDLL(str(folder / "libamdhip64.so"))
        self.runtime.standin_log.restype = ctypes.c_char_p
        self.runtime.standin_memory.argtypes = [ctypes.c_size_t]
        self.runtime.standin_memory_used.restype = ctypes.c_size_t
        self.runtime.standin_capture.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.compiler: Any = ctypes.CDLL(str(folder / "libhiprtc.so"))
        self.compiler.standin_options.restype = ctypes.c_char_p

    def calls(self) -> list[str]:
        """Names of the calls since the last look."""
        names: list[str] = self.runtime.standin_log().decode().split()
        self.runtime.standin_clear_log()
        return names

    def fail(self, name: str, code: int, after: int = 0) -> None:
        """Make a call of a function fail, the next or a later one."""
        self.runtime.standin_fail(name.encode(), code, after)

    def devices(self) -> list[HipDevice]:
        """New devices."""
        found = hip.devices(self.folder)
        return [device for device in found if isinstance(device, HipDevice)]


@functools.cache
def shared() -> tuple[Libraries, list[HipDevice]]:
    """The libraries that most tests use, and devices that stay open."""
    libraries = Libraries()
    return libraries, libraries.devices()
