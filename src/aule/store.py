"""Files of the disk cache: written whole or not at all, and read only when they are what was written.

A file is a digest and a body. It is written under a temporary name and renamed, so that readers and other processes see
all of it or nothing; the digest makes a damaged file a miss.
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
    """Where a file of the cache is.

    Parameters
    ----------
    name : str
        Path below `settings.cache_dir`.
    """
    return settings.cache_dir() / name


def read(name: str) -> bytes | None:
    """The body of a file; None when there is none, it is damaged, or the cache is turned off."""
    if not settings.disk_cache():
        return None
    try:
        data = path(name).read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + 32
    body = data[start:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        say_damaged(name)
        return None
    return body


def write(name: str, body: bytes) -> None:
    """Keep a body. A disk that is full or read-only costs speed, not correctness."""
    if not settings.disk_cache():
        return
    place = path(name)
    try:
        write_whole(place, _MAGIC + hashlib.sha256(body).digest() + body)
    except OSError as error:
        log.debug("kernel cache: could not write %s: %s", place, error)


def write_whole(place: Path, data: bytes) -> None:
    """Write a file, with the folders above it: others see the old one or the new one, never a part."""
    import tempfile  # which loads much that a process without a new kernel never needs

    place.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise


def say_damaged(name: str) -> None:
    """Log that a file is not what was written; whoever reads it makes it anew."""
    log.warning("kernel cache: entry %s is damaged and is rebuilt", path(name))
