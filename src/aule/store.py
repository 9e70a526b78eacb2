"""Disk cache files: written atomically, and checked when read.

A file is a digest and a body. It is written under a temporary name and renamed, so readers and other processes never
see a partial file; a digest that does not match counts as a cache miss.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from aule import settings

log = logging.getLogger("aule")
_MAGIC = b"AULE1\n"


def path(name: str) -> Path:
    """Return the path of a cache file, named relative to `settings.cache_dir`."""
    return settings.cache_dir() / name


def read(name: str) -> bytes | None:
    """Return the body of a cache file; None if it is missing or damaged, or the cache is off."""
    if not settings.disk_cache():
        return None
    try:
        data = path(name).read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + 32
    body = data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        warn_damaged(name)
        return None
    return body


def write(name: str, body: bytes) -> None:
    """Write a cache file. A full or read-only disk is ignored: it costs speed, not correctness."""
    if not settings.disk_cache():
        return
    place = path(name)
    try:
        write_atomically(place, _MAGIC + hashlib.sha256(body).digest() + body)
    except OSError as error:
        log.debug("kernel cache: could not write %s: %s", place, error)


def write_atomically(place: Path, data: bytes) -> None:
    """Write a file atomically, creating its folders: readers see the old file or the new one, never a part."""
    import tempfile  # slow to import, and needed only when a kernel is new

    place.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise


def warn_damaged(name: str) -> None:
    """Log that a cache file is damaged; the caller rebuilds it."""
    log.warning("kernel cache: entry %s is damaged and is rebuilt", path(name))
