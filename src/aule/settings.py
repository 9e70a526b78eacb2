"""All environment variables that aule reads. Each is read at use, not at import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aule.errors import InvalidArgumentError

_BACKEND, _NUM_THREADS, _CHECK_INDICES, _NVTX = (
    os.fsencode(name) if os.name == "posix" else name
    for name in ("AULE_BACKEND", "AULE_NUM_THREADS", "AULE_CHECK_INDICES", "AULE_NVTX")
)


CUDA_SHARED_BYTES = {"60": 49152, "70": 98304, "75": 65536, "80": 166912, "86": 101376, "89": 101376, "90": 232448}
"""Shared memory that a workgroup may have, by compute capability."""


def _missing(key: bytes | str) -> bool:
    """True if a variable is known to be unset.

    Looks into the dictionary inside `os.environ`, because `os.environ.get` is slow for unset variables and small CPU
    calls would notice.
    """
    data = getattr(os.environ, "_data", None)
    return data is not None and key not in data


def _switch(name: str, default: str) -> bool:
    chosen = os.environ.get(name) or default
    if chosen not in ("0", "1"):
        raise InvalidArgumentError(f"[settings] expected {name} to be 0 or 1, got {chosen!r}; change or unset it")
    return chosen == "1"


def _count(name: str, chosen: str) -> int:
    if not (chosen.isascii() and chosen.isdigit()) or int(chosen) < 1:
        raise InvalidArgumentError(f"[settings] expected {name} to be 1 or more, got {chosen!r}; change or unset it")
    return int(chosen)


def backend() -> str | None:
    """``AULE_BACKEND``: force a backend or a device (``vulkan``, ``cuda:1``)."""
    return None if _missing(_BACKEND) else os.environ.get("AULE_BACKEND", "").strip().lower() or None


def check_indices() -> bool:
    """``AULE_CHECK_INDICES=1`` also checks lengths, block tables, positions and targets in a device's memory.

    Every such call then waits for the device. Those in host memory are always checked.
    """
    return not _missing(_CHECK_INDICES) and _switch("AULE_CHECK_INDICES", "0")


def nvtx() -> bool:
    """``AULE_NVTX=1`` shows every call and its kernels as NVTX or ROCTX ranges, for Nsight Systems and rocprof."""
    return not _missing(_NVTX) and _switch("AULE_NVTX", "0")


def cache_dir() -> Path:
    """``AULE_CACHE_DIR``: folder for compiled kernels; by default the platform's cache folder.

    A user with neither (no home, as in some containers) gets a path that cannot be written: cached code must never
    come from a folder that others may write to.
    """
    chosen = os.environ.get("AULE_CACHE_DIR")
    try:
        if chosen:
            return Path(chosen).expanduser()  # no shell has expanded ~ in, for example, a Dockerfile
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "aule" / "cache"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "aule"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aule"
    except RuntimeError:
        return Path(os.devnull) / "aule"


def disk_cache() -> bool:
    """``AULE_DISK_CACHE=0`` turns the disk cache off."""
    return _switch("AULE_DISK_CACHE", "1")


def cache_size() -> int:
    """``AULE_CACHE_SIZE``: largest size of the disk cache, a number of MiB; returned in bytes."""
    return _count("AULE_CACHE_SIZE", os.environ.get("AULE_CACHE_SIZE") or "1024") << 20


def cpu_features() -> str:
    """``AULE_CPU_FEATURES``: which instructions CPU kernels may use.

    ``native`` (the default): all that this processor has; ``avx2``: x86-64-v3; ``baseline``: only those that every
    processor of the architecture has.
    """
    chosen = os.environ.get("AULE_CPU_FEATURES") or "native"
    if chosen not in ("native", "avx2", "baseline"):
        raise InvalidArgumentError(
            f"[settings] expected AULE_CPU_FEATURES to be native, avx2 or baseline, got {chosen!r}; change or unset it"
        )
    return chosen


def cuda_arch() -> tuple[int, int] | None:
    """``AULE_CUDA_ARCH``: compute capability up to which CUDA kernels use a newer GPU, such as ``80``; None if unset.

    For trying on one machine what owners of older GPUs get.
    """
    chosen = os.environ.get("AULE_CUDA_ARCH")
    if not chosen:
        return None
    if chosen not in CUDA_SHARED_BYTES:
        known = ", ".join(CUDA_SHARED_BYTES)
        raise InvalidArgumentError(
            f"[settings] expected AULE_CUDA_ARCH to be one of {known}, got {chosen!r}; change or unset it"
        )
    return int(chosen[:-1]), int(chosen[-1])


def num_threads() -> int | None:
    """``AULE_NUM_THREADS``: number of threads for a launch on the CPU.

    None if unset: then PyTorch's number if PyTorch is loaded, else ``OMP_NUM_THREADS``, else the number of processors
    available to this process.
    """
    chosen = None if _missing(_NUM_THREADS) else os.environ.get("AULE_NUM_THREADS")
    return _count("AULE_NUM_THREADS", chosen) if chosen else None


def omp_num_threads() -> int | None:
    """``OMP_NUM_THREADS``: number of threads for OpenMP programs.

    The first number if it is a list by nesting level; None if it is not a number, which OpenMP ignores too.
    """
    chosen = os.environ.get("OMP_NUM_THREADS")
    if not chosen:
        return None
    first = chosen.split(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) > 0 else None


def omp_stack_size() -> str | None:
    """``OMP_STACKSIZE`` or ``GOMP_STACKSIZE``: stack size of OpenMP threads; None if unset."""
    return os.environ.get("OMP_STACKSIZE") or os.environ.get("GOMP_STACKSIZE")


def vulkan_validation() -> bool:
    """``AULE_VULKAN_VALIDATION=1`` loads the Khronos validation layer and logs its messages."""
    return _switch("AULE_VULKAN_VALIDATION", "0")


def vulkan_sdk() -> Path | None:
    """``VULKAN_SDK``: folder of the LunarG SDK; on macOS the Vulkan loader is searched there first."""
    chosen = os.environ.get("VULKAN_SDK")
    return Path(chosen) if chosen else None
