"""The Target of this processor: names and sizes from the system, features from LLVM."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import sys
from pathlib import Path

from aule.runtime._cpu_llvm import Machine
from aule.target import Target

_SHARED_BYTES = 256 << 10
"""Shared memory is on each thread's stack; this size fits the second-level cache of current processors."""


def read_target(machine: Machine, threads: int) -> Target:
    """Describe this processor as a Target with ``threads`` compute units."""
    name, vendor = _name_and_vendor()
    return Target(
        "cpu",
        name,
        vendor=vendor,
        driver=machine.version,
        arch=machine.arch,
        max_threads=1024,
        max_shared_bytes=_SHARED_BYTES,
        max_grid=(2**31 - 1, 2**31 - 1, 2**31 - 1),
        max_buffers=64,
        max_buffer_bytes=1 << 62,
        offset_alignment=1,
        memory_bytes=_memory_bytes(),
        cache_bytes=_cache_bytes(),
        compute_units=threads,
        unified_memory=True,
        f16=True,
        f64=True,
        int64=True,
        storage16=True,
        storage8=True,
        device_fence=True,
        extensions=machine.extensions,
    )


def _name_and_vendor() -> tuple[str, str]:
    name, maker = _system_names()
    known = f"{name} {maker}".lower()
    vendor = next((owner for owner in ("intel", "amd", "apple") if owner in known), "unknown")
    if vendor == "unknown" and platform.machine().lower() in ("aarch64", "arm64"):
        vendor = "arm"
    return name or platform.processor() or platform.machine() or "CPU", vendor


def _system_names() -> tuple[str, str]:
    """Return the names of the processor and its maker as the system reports them; empty if unknown."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string"), ""
    if sys.platform == "win32":
        return _registry_name(), platform.processor()
    return _cpuinfo()


def _cpuinfo() -> tuple[str, str]:
    fields: dict[str, str] = {}
    try:
        # Read the lines of the first processor only.
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if not key.strip():
                    break
                fields.setdefault(key.strip(), value.strip())
    except OSError:
        return "", ""
    # On ARM the maker is a number.
    maker = {"0x61": "Apple"}.get(fields.get("CPU implementer", ""), fields.get("vendor_id", ""))
    return fields.get("model name", ""), maker


def _sysctl(name: str) -> str:
    size = ctypes.c_size_t(256)
    text = ctypes.create_string_buffer(size.value)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), text, ctypes.byref(size), None, ctypes.c_size_t(0))
    return "" if failed else text.value.decode(errors="replace")


def _registry_name() -> str:
    registry = importlib.import_module("winreg")
    path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
    try:
        with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, path) as key:
            return str(registry.QueryValueEx(key, "ProcessorNameString")[0])
    except OSError:
        return ""


def _cache_bytes() -> int:
    """Return the size of the first processor's largest cache; 0 if unknown."""
    found = 0
    with contextlib.suppress(OSError):  # of the folder
        for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
            with contextlib.suppress(OSError, ValueError):
                found = max(found, int(file.read_text().strip().removesuffix("K")) << 10)
    return found


def _memory_bytes() -> int:
    if sys.platform == "win32":
        # MEMORYSTATUSEX: its own size and the load in percent (32 bits each), then seven sizes, total memory first.
        status = (ctypes.c_uint64 * 8)(64)
        return int(status[1]) if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else 0
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
