"""What ``aule doctor`` looks at: packages, GPUs, drivers, PyTorch and the cache, gathered before anything is judged."""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aule import settings
from aule.api.info import torch_build
from aule.backends import registry
from aule.errors import AuleError
from aule.store.folder import Untrusted, open_folder

_VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
_TORCH = """
import json, torch
found = {"available": torch.cuda.is_available(), "archs": torch.cuda.get_arch_list(), "gpus": []}
for i in range(torch.cuda.device_count() if found["available"] and torch.version.cuda else 0):
    found["gpus"].append([torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)])
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Facts:
    """This machine, as far as aule is concerned.

    Attributes
    ----------
    platform : str
        As ``sys.platform``; ``distribution`` is ``debian``, ``ubuntu``, ``fedora``, ``arch`` or empty.
    gpus : tuple of str
        Vendors of the GPUs on the PCI bus; empty where the system does not list them.
    closed : tuple of str
        Device files of GPUs that this user may not open.
    packages : dict
        Version of each installed package, by its name for pip.
    torch, torch_runs : dict or None
        What PyTorch was built with, and what it says when it is imported (``error`` if that fails).
    devices : dict
        Names of devices by backend, and whether they are software.
    errors : dict
        Why other backends have none.
    drivers : dict
        Installed drivers of ``vulkan`` and ``opencl``, by the names of their files.
    default : str or None
        The device for host arrays, or None if there is none, because of ``default_error`` if that is not empty.
    cache_error : str
        Why the cache cannot be used.
    """

    platform: str
    distribution: str = ""
    gpus: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    packages: dict[str, str] = field(default_factory=dict)
    torch: dict[str, str | None] | None = None
    torch_runs: dict[str, Any] | None = None
    devices: dict[str, list[tuple[str, bool]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    drivers: dict[str, list[str]] = field(default_factory=dict)
    default: str | None = None
    default_error: str = ""
    cache_error: str = ""

    @property
    def hardware(self) -> dict[str, list[str]]:
        """Names of hardware devices, by backend."""
        found = {backend: [n for n, software in devices if not software] for backend, devices in self.devices.items()}
        return {backend: names for backend, names in found.items() if names}


def gather(packages: tuple[str, ...]) -> Facts:
    """Look at this machine. ``packages`` are names for pip."""
    default, default_error = _default()
    build = torch_build()
    return Facts(
        platform=sys.platform,
        distribution=_distribution(),
        gpus=_gpus(),
        closed=tuple(p for p in glob.glob("/dev/dri/renderD*") + glob.glob("/dev/kfd") if not os.access(p, os.W_OK)),
        packages={name: found for name in packages if (found := _version(name))},
        torch=build,
        torch_runs=None if build is None else _torch_runs(),
        devices={n: [(d.target.name, d.target.software) for d in found] for n, found in registry.available().items()},
        errors=registry.errors(),
        drivers={"vulkan": _vulkan_drivers(), "opencl": _names("/etc/OpenCL/vendors/*.icd")},
        default=default,
        default_error=default_error,
        cache_error=_cache_error(),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _distribution() -> str:
    if sys.platform != "linux":
        return ""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return ""
    known = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    return next((name for name in known if name in ("ubuntu", "debian", "fedora", "arch")), "")


def _gpus() -> tuple[str, ...]:
    """Vendors of the display controllers and accelerators (classes 03 and 12) on Linux's PCI bus."""
    found = []
    for folder in glob.glob("/sys/bus/pci/devices/*"):
        try:
            kind, vendor = (Path(folder, name).read_text().strip() for name in ("class", "vendor"))
        except OSError:
            continue
        if kind.startswith(("0x03", "0x12")) and vendor in _VENDORS:
            found.append(_VENDORS[vendor])
    return tuple(dict.fromkeys(found))


def _vulkan_drivers() -> list[str]:
    folders = ("/usr/share", "/usr/local/share", "/etc", os.path.expanduser("~/.local/share"))
    return [name for folder in folders for name in _names(f"{folder}/vulkan/icd.d/*.json")]


def _names(pattern: str) -> list[str]:
    return sorted(Path(path).name.split(".")[0].removesuffix("_icd") for path in glob.glob(pattern))


def _torch_runs() -> dict[str, Any]:
    """Import PyTorch in a process of its own, because a broken one may end it."""
    try:
        done = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": str(error)}
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        said = done.stderr.strip().splitlines()
        return {"error": said[-1] if said else f"exit status {done.returncode}"}


def _default() -> tuple[str | None, str]:
    try:
        device = registry.choose()
    except AuleError as error:
        return None, error.message
    return (None, "") if device is None else (f"{device.target.backend}:{device.index}", "")


def _cache_error() -> str:
    root = str(settings.cache_dir())
    try:
        if not settings.disk_cache():
            return "it is switched off by AULE_DISK_CACHE=0"
        open_folder(root, make=True).__exit__()
    except AuleError as error:  # a setting
        return error.message
    except (Untrusted, OSError) as error:
        return str(error)
    return "" if os.access(root, os.W_OK) else f"{root} cannot be written"
