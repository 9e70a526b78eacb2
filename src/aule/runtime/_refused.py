"""Where the source of a kernel goes that a driver refused, so that a person can look at it."""

from __future__ import annotations

import hashlib

from aule import settings

_SUFFIXES = {"ptx": "ptx", "spirv": "spv", "opencl": "cl", "wgsl": "wgsl", "msl": "metal", "llvm": "ll"}


def save_refused(language: str, code: bytes) -> str | None:
    """Save a refused kernel for inspection, in ``refused/`` of the cache directory, named by the digest of the code.

    Parameters
    ----------
    language : str
        As `Artifact.language`; decides the suffix.
    code : bytes
        The source text or binary.

    Returns
    -------
    str or None
        The file, or None where the cache directory cannot be written: the driver's refusal is the news, and a
        read-only disk must not hide it.
    """
    name = f"{hashlib.sha256(code).hexdigest()[:16]}.{_SUFFIXES.get(language, language)}"
    path = settings.cache_dir() / "refused" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(code)
    except OSError:
        return None
    return str(path)
