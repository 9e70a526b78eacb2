"""Limits the size of the disk cache: the least recently used files are removed first.

Rarely, after a write, a process looks at all files. Several may do so at once, while others read and write: a removed
file is only a cache miss for later readers.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator

from aule.store.folder import TEMPORARY, Folder, Untrusted, open_folder

_STAMP = "swept"
"""File whose time says when the cache was last swept."""
_EVERY = 3600.0
"""Seconds between two sweeps. Temporary files of this age were left behind by a process that died."""
_SHARE = 8
"""A process sweeps earlier if it alone has written this part of the limit."""

# The user may point the cache at a folder with other things in it: only what is named like a cache file is removed.
# Records of `aule tune`, in tuned/, stay: they are small, and measuring them took minutes.
_FOLDERS = re.compile(r"(kernels|objects)(/[0-9a-f]{2})?|vulkan|refused|tuned")
_EVICTED = re.compile(
    r"(kernels|objects)/([0-9a-f]{2})/\2[0-9a-f]{62}|vulkan/[0-9a-f-]{42,50}\.bin|refused/[0-9a-f]{16}\.[a-z]+"
)

_TUNED = re.compile(r"tuned/[0-9a-f]+\.jsonl$")

_written = 0
"""Bytes this process has written since it last swept."""


def after_write(root: str, size: int, limit: int) -> None:
    """Note that ``size`` bytes were written to the cache at ``root``, and sweep it if it is time."""
    global _written
    _written += size
    if _written * _SHARE < limit and _age(os.path.join(root, _STAMP)) < _EVERY:
        return
    _written = 0
    sweep(root, limit)


def sweep(root: str, limit: int) -> None:
    """Remove abandoned temporary files, and if the cache has more than ``limit`` bytes, its oldest files."""
    with open_folder(root) as folder:
        folder.write(_STAMP, b"")  # first, so that few processes sweep at the same time
        now = time.time()
        files = []
        for name, status in _walk(folder, ""):
            if name.rpartition("/")[2].startswith(TEMPORARY):
                if now - status.st_mtime > _EVERY:
                    remove(root, name)
            elif _EVICTED.fullmatch(name):
                files.append((min(status.st_mtime, now), status.st_size, name))  # a clock may have been wrong
    total = sum(size for _, size, _ in files)
    if total <= limit:
        return
    for _, size, name in sorted(files):
        remove(root, name)
        total -= size
        if total <= limit * 3 // 4:  # room for the writes until the next sweep
            return


def usage(root: str) -> dict[str, tuple[int, int]]:
    """Return the number and the bytes of the cache's files in each of its folders; empty if there is no cache."""
    found: dict[str, tuple[int, int]] = {}
    try:
        with open_folder(root) as folder:
            for name, status in _walk(folder, ""):
                count, size = found.get(kind := name.partition("/")[0], (0, 0))
                found[kind] = count + 1, size + status.st_size
    except OSError:
        return {}
    return found


def clear(root: str, tuned: bool = False) -> None:
    """Remove all files that can be made again; with ``tuned`` also the records of `aule tune`."""
    try:
        with open_folder(root) as folder:
            names = [name for name, _ in _walk(folder, "")]
    except OSError:
        return
    for name in names:
        if _EVICTED.fullmatch(name) or name.rpartition("/")[2].startswith(TEMPORARY) or (tuned and _TUNED.match(name)):
            remove(root, name)


def tuned(root: str) -> list[str]:
    """Return the names of the files with records of `aule tune`."""
    try:
        with open_folder(root) as folder:
            return sorted(name for name, _ in _walk(folder, "") if _TUNED.match(name))
    except OSError:
        return []


def _walk(folder: Folder, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """Return relative names and states of the regular files in the cache's own folders."""
    for name, status in folder.entries():
        path = f"{prefix}{name}"
        if prefix and stat.S_ISREG(status.st_mode):
            yield path, status
        elif stat.S_ISDIR(status.st_mode) and _FOLDERS.fullmatch(path):
            try:
                with folder.inner(name) as inner:
                    yield from _walk(inner, f"{path}/")
            except (OSError, Untrusted):
                continue


def remove(root: str, name: str) -> None:
    """Remove a file of the cache, if it is there and trusted."""
    *folders, file = name.split("/")
    try:
        with open_folder(root, folders) as folder:
            folder.remove(file)
    except (OSError, Untrusted):
        return


def _age(path: str) -> float:
    """Return the age of a file in seconds; infinity if it is missing or newer than now."""
    try:
        age = time.time() - os.stat(path).st_mtime
    except OSError:
        return float("inf")
    return age if age >= -1 else float("inf")  # file systems round times
