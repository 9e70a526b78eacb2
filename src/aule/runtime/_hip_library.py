"""Finds libamdhip64 and libhiprtc (Windows: amdhip64_*.dll, hiprtc*.dll).

The process must have one copy of them. So a copy that is already loaded comes first, then PyTorch's own, which
PyTorch would load later, then the system's.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import sys
from collections.abc import Iterator

_PACKAGES = ("torch", "_rocm_sdk_core")
"""Python packages that contain the libraries: PyTorch's wheels, and ROCm's wheels that PyTorch's may depend on."""
_MAJOR_VERSIONS = (7, 6, 5)
"""Versions to ask the loader for, where the name without a version belongs to a package for developers."""
_DEVICE_FILES = ("/dev/kfd", "/dev/dxg")
"""What ROCm opens on Linux, and under Windows' WSL."""


def may_have_device() -> bool:
    """Whether ROCm could find a device: False only on Linux without ROCm's device file."""
    return sys.platform != "linux" or any(map(os.path.exists, _DEVICE_FILES))


def candidates(name: str, folder: str | None = None) -> list[str]:
    """Return paths and names of a library, best first.

    Parameters
    ----------
    name : {"amdhip64", "hiprtc"}
    folder : str or None
        The only folder to look in.
    """
    if folder is not None:
        return _in_folder(folder, name) or [os.path.join(folder, usual) for usual in _names(name)]
    found = list(_loaded(name))
    for place in _folders():
        found += _in_folder(place, name)
    return list(dict.fromkeys([*found, *_names(name)]))


def _loaded(name: str) -> Iterator[str]:
    """Paths of copies that this process has loaded, on Linux."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if f"/lib{name}.so" in line}
    except OSError:
        return
    yield from sorted(paths)


def _folders() -> Iterator[str]:
    inside = ("bin", "lib") if sys.platform == "win32" else ("lib",)
    for package in _PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):  # half imported, or hidden by a test
            continue
        for root in (spec and spec.submodule_search_locations) or ():
            yield from (os.path.join(root, folder) for folder in inside)
    for variable in ("ROCM_PATH", "HIP_PATH"):
        if os.environ.get(variable):
            yield from (os.path.join(os.environ[variable], folder) for folder in inside)
    if sys.platform == "win32":
        yield os.path.join(os.environ.get("SYSTEMROOT", r"C:\Windows"), "System32")
        # hiprtc's name contains its minor version, so the loader cannot be asked for it.
        yield from filter(None, os.environ.get("PATH", "").split(os.pathsep))
    else:
        yield "/opt/rocm/lib"


def _in_folder(folder: str, name: str) -> list[str]:
    """Paths of a library in a folder, the newest version first."""
    pattern = f"{name}*.dll" if sys.platform == "win32" else f"lib{name}.so*"
    paths = glob.glob(os.path.join(glob.escape(folder), pattern))
    # hiprtc-builtins*.dll is data of hiprtc*.dll.
    return sorted((p for p in paths if "builtins" not in os.path.basename(p)), reverse=True)


def _names(name: str) -> list[str]:
    if sys.platform == "win32":
        return [f"{name}_{major}.dll" for major in _MAJOR_VERSIONS] + [f"{name}.dll"]
    return [f"lib{name}.so.{major}" for major in _MAJOR_VERSIONS] + [f"lib{name}.so"]
