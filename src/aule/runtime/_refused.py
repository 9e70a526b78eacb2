"""Saving kernels that a driver refused, for inspection."""

from __future__ import annotations

import hashlib

from aule import store

_SUFFIXES = {"ptx": "ptx", "hip": "hip", "spirv": "spv", "opencl": "cl", "wgsl": "wgsl", "msl": "metal", "llvm": "ll"}


def save_refused(language: str, code: bytes) -> str | None:
    """Save a refused kernel in ``refused/`` of the cache directory, named by the digest of its code; return the path.

    None if the directory is not writable: a read-only disk must not hide the driver's error.
    """
    name = f"{hashlib.sha256(code).hexdigest()[:16]}.{_SUFFIXES.get(language, language)}"
    path = store.write_plain(f"refused/{name}", code)
    return None if path is None else str(path)
