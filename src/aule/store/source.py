"""Digests of the package's own code, for the keys of cache entries."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from importlib.machinery import all_suffixes
from typing import Any


def code_digest(*names: str) -> str:
    """Return a digest of the code of modules, and of all modules inside those that are packages.

    The code may be source, bytecode or compiled, in folders or in a zip file.
    """
    digest = hashlib.sha256()
    for name in names:
        package, *inner = name.split(".")
        for path, data in list(_files(resources.files(package), package, inner)) or [("", _application())]:
            digest.update(f"{path} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _files(folder: Any, path: str, inner: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Return paths and contents of the code in a package, or in the module ``inner`` of it."""
    try:
        items = sorted(folder.iterdir(), key=lambda item: str(item.name))
    except OSError:  # no such folder: the code is somewhere else
        return
    for item in items:
        name = item.name
        if name == "__pycache__" or (inner and name.partition(".")[0] != inner[0]):
            continue
        if item.is_dir():
            yield from _files(item, f"{path}/{name}", inner[1:])
        elif len(inner) < 2 and name.endswith(tuple(all_suffixes())):
            yield f"{path}/{name}", item.read_bytes()


def _application() -> bytes:
    """Stand for code that cannot be found because it is frozen into an application: each build has a size and time."""
    status = os.stat(sys.executable)
    return f"{status.st_size} {status.st_mtime_ns}".encode()
