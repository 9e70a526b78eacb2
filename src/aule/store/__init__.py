"""Disk cache: files that are written atomically, checked when they are read, and removed when they grow too many.

A file is a header (the format's number and a digest) and a body. The digest covers the file's name, so an entry that
was moved or swapped is a miss, as is a damaged one. Cached code runs in the user's process: it is taken only from files
and folders that nobody else can have written (`aule.store.folder`, `SECURITY.md`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path

from aule import settings
from aule.store import sweep
from aule.store.folder import Untrusted, open_folder

log = logging.getLogger("aule")
_MAGIC = b"AULE2\n"
_OTHER_FORMAT = re.compile(rb"AULE\d\n")
_START = len(_MAGIC) + hashlib.sha256().digest_size
LARGEST = 256 << 20
"""Size in bytes above which a file is neither written nor read. The largest are pipeline caches of Vulkan drivers."""

_warned: set[tuple[str, str]] = set()
"""Cache folders and reasons that were logged."""


def path(name: str) -> Path:
    """Return the path of a cache file, named relative to `settings.cache_dir`, with ``/`` between folders."""
    return settings.cache_dir() / name


def read(name: str) -> bytes | None:
    """Return the body of a cache file; None if it is missing, damaged or untrusted, or the cache is off."""
    if not settings.disk_cache():
        return None
    root, (*folders, file) = str(settings.cache_dir()), name.split("/")
    try:
        with open_folder(root, folders) as folder:
            data = folder.read(file, LARGEST)
    except Untrusted as error:
        _warn_untrusted(root, error)
        return None
    except OSError:
        return None
    if data.startswith(_MAGIC) and _digest(name, body := data[_START:]) == data[len(_MAGIC) : _START]:
        return body
    if data.startswith(_MAGIC) or not _OTHER_FORMAT.match(data):
        warn_damaged(name)
    return None


def write(name: str, body: bytes) -> None:
    """Write a cache file. A full or read-only disk is ignored: it costs speed, not correctness."""
    if settings.disk_cache():
        write_plain(name, _MAGIC + _digest(name, body) + body)


def write_plain(name: str, data: bytes) -> Path | None:
    """Write a file without a header, for people and other programs; return its path, or None if that failed.

    Readers see the old file or the new one, never a part.
    """
    root, (*folders, file), limit = str(settings.cache_dir()), name.split("/"), settings.cache_size()
    if len(data) > min(LARGEST, limit):
        log.debug("kernel cache: %s of %d bytes is too large to be written", path(name), len(data))
        return None
    try:
        with open_folder(root, folders, make=True) as folder:
            folder.write(file, data)
        sweep.after_write(root, len(data), limit)
    except Untrusted as error:
        _warn_untrusted(root, error)
        return None
    except OSError as error:
        log.debug("kernel cache: could not write %s: %s", path(name), error)
        return None
    return path(name)


def warn_damaged(name: str) -> None:
    """Log that a cache file is damaged; the caller rebuilds it."""
    log.warning("kernel cache: entry %s is damaged and is rebuilt", path(name))


def _warn_untrusted(root: str, error: Untrusted) -> None:
    """Log why a file or folder is not used, once for each reason."""
    if (root, error.reason) not in _warned:
        _warned.add((root, error.reason))
        log.warning("kernel cache: %s", error)


def _digest(name: str, body: bytes) -> bytes:
    digest = hashlib.sha256(os.fsencode(name) + b"\0")
    digest.update(body)
    return digest.digest()
