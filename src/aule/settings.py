"""Every environment variable that aule reads, typed, in one place. They are read at use, not at import."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def backend() -> str | None:
    """``AULE_BACKEND``: force a backend or a device (``vulkan``, ``cuda:1``). With CUDA tensors it is read when a call's
    signature is first seen."""
    return os.environ.get("AULE_BACKEND") or None


def cache_dir() -> Path:
    """``AULE_CACHE_DIR``: where compiled kernels are kept; by default the platform's cache folder."""
    chosen = os.environ.get("AULE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "aule" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "aule"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aule"


def disk_cache() -> bool:
    """``AULE_DISK_CACHE=0`` turns the disk cache off."""
    return os.environ.get("AULE_DISK_CACHE", "1") != "0"


def vulkan_validation() -> bool:
    """``AULE_VULKAN_VALIDATION=1`` loads Khronos' validation layer and logs what it says."""
    return os.environ.get("AULE_VULKAN_VALIDATION", "0") == "1"


def vulkan_sdk() -> Path | None:
    """``VULKAN_SDK``: where LunarG's SDK is; on macOS the Vulkan loader is looked for in it first."""
    chosen = os.environ.get("VULKAN_SDK")
    return Path(chosen) if chosen else None
