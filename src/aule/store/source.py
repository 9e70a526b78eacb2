"""Digests of the package's own code, for the keys of cache entries."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import Any


def code_digest(*names: str) -> str:
    """Return a digest of the code of modules, and of all modules inside those that are packages.

    Python's import system reads the code, so it may be source or bytecode, in folders or in a zip file.
    """
    digest = hashlib.sha256()
    for name in names:
        for spec in _modules(importlib.util.find_spec(name)):
            code = _code(spec)
            digest.update(f"{spec.name} {len(code)}\n".encode() + code)
    return digest.hexdigest()


def _modules(spec: ModuleSpec | None) -> Iterator[ModuleSpec]:
    if spec is None:
        return
    yield spec
    for found in sorted(pkgutil.iter_modules(spec.submodule_search_locations or [], f"{spec.name}.")):
        finder: Any = found.module_finder
        yield from _modules(finder.find_spec(found.name))


def _code(spec: ModuleSpec) -> bytes:
    loader: Any = spec.loader
    try:
        return bytes(loader.get_data(loader.get_filename(spec.name)))
    except (AttributeError, ImportError, OSError):
        # Frozen into an application, whose loader gives nothing away: another build has another size or time.
        status = os.stat(sys.executable)
        return f"{status.st_size} {status.st_mtime_ns}".encode()
