"""Which backends and devices this machine has, and why others are unavailable. Nothing is probed at import."""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aule import settings
from aule._version import __version__
from aule.backends import registry
from aule.errors import AuleError
from aule.target import Target

__all__ = ["get_available_backends", "get_backend_errors", "get_backend_info", "print_backend_info"]

_EXTRAS = (
    ("opencl", "pyopencl", "OpenCL: AMD, Intel and NVIDIA drivers, and PoCL on CPUs", None),
    ("webgpu", "wgpu", "WebGPU: any GPU through wgpu, also where Vulkan's own loader is missing", None),
    ("metal", "Metal", "Metal: Apple's GPUs", "darwin"),
    ("cpu", "llvmlite", "CPU: attention kernels compiled for this processor, several times NumPy's speed", None),
)
"""Extra of the distribution, the module it installs, what that enables, and the platform it is limited to, if any."""


_TENSORS = {"hip": "rocm"}
"""Our name of a kind of tensors, where PyTorch calls its build otherwise."""


def get_available_backends() -> list[str]:
    """List the backends that work on this machine, in order of preference.

    Returns
    -------
    list of str
        Backends with a hardware device in order of preference, then those with software devices only (lavapipe, PoCL),
        which are used only if named, and last ``"numpy"``, which is always available.
    """
    found = registry.available()
    software = {name: all(d.target.software for d in devices) for name, devices in found.items()}
    return [*sorted(found, key=lambda name: software[name]), registry.NUMPY]


def get_backend_errors() -> dict[str, str]:
    """Say why each unavailable backend is unavailable.

    Returns
    -------
    dict
        For each backend that is not in `get_available_backends`: what was missing, and the remedy.
    """
    return registry.errors()


def get_backend_info() -> dict[str, Any]:
    """Return everything about backends and devices, in a form that JSON can hold.

    Returns
    -------
    dict
        ``version``, ``python``, ``numpy``, ``platform``; ``forced`` (``AULE_BACKEND``); ``default_device``, where
        arrays in host memory are computed (None when a forced backend is missing or a setting is wrong:
        ``default_error`` says why);
        ``torch``, for each kind of tensor that the installed PyTorch was built with how it is computed on (None without
        PyTorch or a default device), and ``torch_version``;
        ``backends``, for each by name ``available``, ``devices`` (``device`` as ``backend=`` takes it, and every field
        of its `Target`) and ``error``.
    """
    found, refused = registry.available(), registry.errors()
    backends: dict[str, Any] = {}
    for name in (*get_available_backends(), *refused):
        targets = [_numpy_target()] if name == registry.NUMPY else [d.target for d in found.get(name, [])]
        devices = [
            {"device": name if name == registry.NUMPY else f"{name}:{number}", **target.to_dict()}
            for number, target in enumerate(targets)
        ]
        backends[name] = {"available": bool(devices), "devices": devices, "error": refused.get(name)}
    default, error = _default_device()
    build = torch_build()
    return {
        "version": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "forced": settings.backend(),
        "default_device": default,
        "default_error": error,
        "torch": _torch_routes(default, build) if default and build else None,
        "torch_version": build["version"] if build else None,
        "backends": backends,
    }


def print_backend_info() -> None:
    """Print the devices of this machine, where arrays go by default, and what is missing for the other backends."""
    print("\n".join(folded(line, 11) for line in _report(get_backend_info())))


def _report(info: dict[str, Any]) -> list[str]:
    torch = f", PyTorch {info['torch_version']}" if info["torch_version"] else ""
    lines = [f"aule {info['version']}, Python {info['python']}, NumPy {info['numpy']}{torch}, {info['platform']}", ""]
    rows: list[tuple[str, ...]] = [("", "device", "name", "memory", "units", "subgroup", "fp16", "driver")]
    for backend in info["backends"].values():
        for device in backend["devices"]:
            rows.append(
                (
                    "*" if device["device"] == info["default_device"] else "",
                    device["device"],
                    device["name"] + (" (software)" if device["software"] else ""),
                    f"{device['memory_bytes'] / 2**30:.1f} GiB" if device["memory_bytes"] else "-",
                    str(device["compute_units"] or "-"),
                    str(device["subgroup_size"] or "-"),
                    "yes" if device["f16"] else "no",
                    device["driver"] or "-",
                )
            )
    lines += table(rows)
    lines += ["", _default_line(info)]
    if info["torch"]:
        lines += ["", "Torch tensors:", *(f"  {kind:5} {how}" for kind, how in info["torch"].items())]

    refused = {name: b["error"] for name, b in info["backends"].items() if b["error"]}
    if refused:
        lines += ["", "Not available:"]
        lines += [f"  {name:8} {reason}" for name, reason in refused.items()]
    offers = [
        (f'  pip install "aule-attention[{extra}]"', brings)
        for extra, module, brings, where in _EXTRAS
        if where in (None, sys.platform) and not _installed(module)
    ]
    if offers:
        lines += ["", "Optional packages that would open more devices:", *table(offers)]
    return lines


def _default_line(info: dict[str, Any]) -> str:
    default, forced = info["default_device"], info["forced"]
    if default is None:
        what = f"AULE_BACKEND={forced} cannot" if forced else "Host arrays cannot"
        return f"{what} be served: {info['default_error']}"
    why = "by AULE_BACKEND" if forced else "the first hardware device in order of preference"
    if default == registry.NUMPY and not forced:
        why = "there is no hardware device; a software one is used only when asked for, as backend='vulkan'"
    return f"* Host arrays go to {default}: {why}. GPU arrays stay where they are."


def torch_build() -> dict[str, str | None] | None:
    """What the installed PyTorch was built with: ``version``, ``cuda``, ``hip``, ``xpu`` and ``mps``; None without it.

    PyTorch's own file of versions is read, because to import all of PyTorch takes a second.
    """
    try:
        spec = importlib.util.find_spec("torch") if _installed("torch") else None
        if spec is None or spec.origin is None:
            return None
        facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except (ImportError, OSError, ValueError, SyntaxError):
        return None
    found = {name: facts.get(name) for name in ("cuda", "hip", "xpu")}
    apple = "yes" if sys.platform == "darwin" and platform.machine() == "arm64" else None
    return {"version": str(facts.get("__version__", "of an unknown version")), **found, "mps": apple}


def _torch_routes(default: str, build: dict[str, str | None]) -> dict[str, str]:
    """How tensors of each device type that PyTorch was built with are computed."""
    forced = settings.backend()
    lacks = ", without gradients" if default == registry.NUMPY else ""
    staged = f"copied through host memory, computed by {default}{lacks}"
    host = f"in place, by {default}{lacks}"
    if forced is None and "cpu" in registry.available():
        host = "in place, by cpu:0"
    elif default.partition(":")[0] not in ("cpu", registry.NUMPY):
        host = f"copied to {default} and back"
    in_place = "in place, on PyTorch's current stream"
    routes = {
        "cpu": host,
        "cuda": staged if forced and not forced.startswith("cuda") else in_place,
        "hip": staged if "hip" not in registry.available() or (forced and not forced.startswith("hip")) else in_place,
        "xpu": staged,
        "mps": staged if forced and not forced.startswith("metal") else "in place, by torch.mps.compile_shader",
    }
    return {_TENSORS.get(kind, kind): how for kind, how in routes.items() if kind == "cpu" or build[kind]}


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def folded(line: str, indent: int) -> str:
    """A line broken at the width of the terminal, what follows indented; as it is if the output is no terminal."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _default_device() -> tuple[str | None, str | None]:
    try:
        device = registry.choose()
    except AuleError as error:
        return None, error.message
    return (registry.NUMPY if device is None else f"{device.target.backend}:{device.index}"), None


def _numpy_target() -> Target:
    return Target(
        registry.NUMPY,
        platform.processor() or platform.machine(),
        driver=f"NumPy {np.__version__}",
        compute_units=os.cpu_count() or 0,
        unified_memory=True,
        f16=True,
        f64=True,
        int64=True,
        storage16=True,
        storage8=True,
    )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
