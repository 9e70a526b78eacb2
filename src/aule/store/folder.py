"""Folders of the disk cache, opened so that files of other users are never used.

A folder or file is used only if it belongs to the user or to root and nobody else can write to it. A group counts as
somebody else: its members are unknown here, and access control lists show in the group's bits. Folders are opened one
inside the other by descriptor, so that what is checked is what is used.

On Windows Python has no such descriptors and cannot ask for owners. There only links, kind and size are checked; the
permissions of the user's profile, where the cache is by default, keep others out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence

TEMPORARY = ".tmp-"
"""Prefix of files that are being written."""
TOUCH_AFTER = 24 * 3600.0
"""Age in seconds from which reading a file sets its time to now, so that files in use are evicted last."""


def _flags(*names: str) -> int:
    """Combine flags of `os.open`, without those that this system lacks."""
    return sum(getattr(os, name, 0) for name in names)


_POSIX = os.open in os.supports_dir_fd and hasattr(os, "geteuid")
_NOFOLLOW = _flags("O_NOFOLLOW")
_FOLDER = _flags("O_RDONLY", "O_DIRECTORY")
_READ = _flags("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_BINARY")  # a FIFO would wait for a writer
_CREATE = _flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_NOFOLLOW", "O_BINARY")
_UNUSED, _REBUILT = "nothing in it is used", "it is rebuilt"


class Untrusted(Exception):
    """A file or folder is not used: others may have written it, or it cannot be a cache file."""

    def __init__(self, path: str, reason: str, then: str = _REBUILT) -> None:
        super().__init__(f"{path} {reason}, so {then}")
        self.reason = reason


class Folder:
    """An open folder that only the user and root can write to; closed at the end of a ``with`` block.

    Methods raise `OSError`, and those that open something `Untrusted`.
    """

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: str, descriptor: int | None) -> None:
        self.path = path
        self._descriptor = descriptor

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            _close(self._descriptor)

    def inner(self, name: str, make: bool = False) -> Folder:
        """Open a folder in this one; ``make`` creates it if it is missing."""
        place, path = self._place(name), os.path.join(self.path, name)
        try:
            return _open(place, path, self._descriptor)
        except FileNotFoundError:
            if not make:
                raise
        except OSError:
            if stat.S_ISLNK(self._status(name).st_mode):
                raise Untrusted(path, "is a link", f"{_UNUSED}; remove it") from None
            raise
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(place, 0o700, dir_fd=self._descriptor)
        return _open(place, path, self._descriptor)

    def read(self, name: str, largest: int) -> bytes:
        """Return the contents of a file. An old file becomes new by it."""
        path = os.path.join(self.path, name)
        if not _POSIX:
            _check_kind(path, self._status(name))  # before opening: Windows would follow a link
        try:
            file = os.open(self._place(name), _READ, dir_fd=self._descriptor)
        except FileNotFoundError:
            raise
        except OSError:
            _check_kind(path, self._status(name))  # a link or a socket
            raise
        try:
            status = os.fstat(file)
            _check_kind(path, status)
            _check_owner(path, status)
            if status.st_size > largest:
                raise Untrusted(path, f"has more than {largest >> 20} MiB")
            data = _read(file, status.st_size)
            if abs(time.time() - status.st_mtime) > TOUCH_AFTER:
                with contextlib.suppress(OSError):  # a file of root's
                    os.utime(file if os.utime in os.supports_fd else path)
            return data
        finally:
            _close(file)

    def write(self, name: str, data: bytes) -> None:
        """Write a file under a temporary name and rename it: readers see the old file or the new one, never a part."""
        temporary = f"{TEMPORARY}{os.urandom(8).hex()}"
        file = os.open(self._place(temporary), _CREATE, 0o600, dir_fd=self._descriptor)
        try:
            try:
                _write(file, data)
            finally:
                os.close(file)
            within = self._descriptor
            os.replace(self._place(temporary), self._place(name), src_dir_fd=within, dst_dir_fd=within)
        except BaseException:
            self.remove(temporary)
            raise

    def remove(self, name: str) -> None:
        """Remove a file, if it is there and can be removed."""
        with contextlib.suppress(OSError):
            os.unlink(self._place(name), dir_fd=self._descriptor)

    def entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """Return names and states of what is in the folder, without following links."""
        with os.scandir(self.path if self._descriptor is None else self._descriptor) as found:
            for entry in found:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:  # removed by another process
                    continue
                yield entry.name, status

    def _place(self, name: str) -> str:
        """Return what functions of `os` take together with the descriptor."""
        return name if self._descriptor is not None else os.path.join(self.path, name)

    def _status(self, name: str) -> os.stat_result:
        return os.stat(self._place(name), dir_fd=self._descriptor, follow_symlinks=False)


def open_folder(root: str, names: Sequence[str] = (), make: bool = False) -> Folder:
    """Open the cache folder ``root``, then the folder ``names[0]`` in it, and so on.

    ``make`` creates missing folders, for the user alone. Only ``root`` and what is above it may be links.
    """
    try:
        folder = _open(root, root, None, follow=True)
    except FileNotFoundError:
        if not make:
            raise
        _make(root)
        folder = _open(root, root, None, follow=True)
    for name in names:
        with folder:
            folder = folder.inner(name, make)
    return folder


def _make(path: str) -> None:
    """Create a folder and those above it. Unlike `os.makedirs`, all of them are made for the user alone."""
    above = os.path.dirname(path)
    if above and above != path and not os.path.isdir(above):
        _make(above)
    with contextlib.suppress(FileExistsError):  # another process was faster
        os.mkdir(path, 0o700)


def _open(place: str, path: str, within: int | None, follow: bool = False) -> Folder:
    if not _POSIX:
        status = os.stat(path, follow_symlinks=follow)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return Folder(path, None)
    descriptor = os.open(place, _FOLDER if follow else _FOLDER | _NOFOLLOW, dir_fd=within)
    try:
        _check_owner(path, os.fstat(descriptor))
    except BaseException:
        _close(descriptor)
        raise
    return Folder(path, descriptor)


def _check_kind(path: str, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise Untrusted(path, "is a link")
    if not stat.S_ISREG(status.st_mode):
        raise Untrusted(path, "is not a regular file")


def _check_owner(path: str, status: os.stat_result) -> None:
    if not _POSIX:
        return
    folder = stat.S_ISDIR(status.st_mode)
    if status.st_uid not in (0, os.geteuid()):
        then = f"{_UNUSED}; set AULE_CACHE_DIR to a folder of your own" if folder else _REBUILT
        raise Untrusted(path, f"belongs to user {status.st_uid}, neither to you nor to root", then)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        then = f"{_UNUSED}; chmod go-w {path}" if folder else _REBUILT
        raise Untrusted(path, f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})", then)


def _close(descriptor: int) -> None:
    """Close what was only read: an error then has no meaning."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _read(file: int, size: int) -> bytes:
    """Read at most ``size`` bytes, however much the file grows meanwhile."""
    parts = []
    while size and (part := os.read(file, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
