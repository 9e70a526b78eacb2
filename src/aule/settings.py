"""Every environment variable that aule reads, typed, in one place. They are read at use, not at import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from aule.errors import InvalidArgumentError

_BACKEND, _NUM_THREADS = (
    os.fsencode(name) if os.name == "posix" else name for name in ("AULE_BACKEND", "AULE_NUM_THREADS")
)


def _missing(key: bytes | str) -> bool:
    """Whether a variable is known not to be set, by the dictionary inside of `os.environ`: `os.environ.get` calls four
    functions and catches an exception to say so, which calls on CPU tensors wait for."""
    found = getattr(os.environ, "_data", None)
    return found is not None and key not in found


def _switch(name: str, default: str) -> bool:
    chosen = os.environ.get(name) or default
    if chosen not in ("0", "1"):
        raise InvalidArgumentError(f"[settings] expected {name} to be 0 or 1, got {chosen!r}; change or unset it")
    return chosen == "1"


def backend() -> str | None:
    """``AULE_BACKEND``: force a backend or a device (``vulkan``, ``cuda:1``). With CUDA tensors it is read when a
    call's signature is first seen."""
    return None if _missing(_BACKEND) else os.environ.get("AULE_BACKEND") or None


def cache_dir() -> Path:
    """``AULE_CACHE_DIR``: where compiled kernels are kept; by default the platform's cache folder. Whoever has neither
    (a container's user without a home) has one that cannot be written to: code that runs is taken from no folder that
    others may write to."""
    chosen = os.environ.get("AULE_CACHE_DIR")
    try:
        if chosen:
            return Path(chosen).expanduser()  # where no shell has done it, as in a Dockerfile
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


def cpu_features() -> str:
    """``AULE_CPU_FEATURES``: which instructions kernels for the CPU may use. ``native`` (the default) is all that this
    processor has, ``avx2`` those of x86-64-v3, ``baseline`` those that every processor of its kind has."""
    chosen = os.environ.get("AULE_CPU_FEATURES") or "native"
    if chosen not in ("native", "avx2", "baseline"):
        raise InvalidArgumentError(
            f"[settings] expected AULE_CPU_FEATURES to be native, avx2 or baseline, got {chosen!r}; change or unset it"
        )
    return chosen


def num_threads() -> int | None:
    """``AULE_NUM_THREADS``: threads that share a launch on the CPU; None leaves it to PyTorch's number where PyTorch is
    loaded, else to ``OMP_NUM_THREADS``, else to the processors of this process."""
    chosen = None if _missing(_NUM_THREADS) else os.environ.get("AULE_NUM_THREADS")
    if not chosen:
        return None
    if not (chosen.isascii() and chosen.isdigit()) or int(chosen) < 1:
        raise InvalidArgumentError(
            f"[settings] expected AULE_NUM_THREADS to be 1 or more, got {chosen!r}; change or unset it"
        )
    return int(chosen)


def omp_num_threads() -> int | None:
    """``OMP_NUM_THREADS``: how many threads OpenMP programs start. Its first number, where it is a list by level of
    nesting; None when it is not set to a number, which OpenMP ignores too."""
    chosen = os.environ.get("OMP_NUM_THREADS")
    if not chosen:
        return None
    first = chosen.split(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) > 0 else None


def omp_stack_size() -> str | None:
    """``OMP_STACKSIZE`` or ``GOMP_STACKSIZE``: the stack of OpenMP's threads, where it is not the usual one."""
    return os.environ.get("OMP_STACKSIZE") or os.environ.get("GOMP_STACKSIZE")


def vulkan_validation() -> bool:
    """``AULE_VULKAN_VALIDATION=1`` loads Khronos' validation layer and logs what it says."""
    return _switch("AULE_VULKAN_VALIDATION", "0")


def vulkan_sdk() -> Path | None:
    """``VULKAN_SDK``: where LunarG's SDK is; on macOS the Vulkan loader is looked for in it first."""
    chosen = os.environ.get("VULKAN_SDK")
    return Path(chosen) if chosen else None
