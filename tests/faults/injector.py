"""Makes the n-th point of a scenario fail, in the manner of SQLite's tests.

A point is a place where the world may refuse something: a call of a driver, an allocation, a file operation. Stand-ins
ask `Injector.fails` there. Outside of `Injector.armed` nothing is counted and nothing fails.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest


class Injector:
    """Counts points of one group, and lets one of them, or all from it on, fail.

    Attributes
    ----------
    points : list of str
        Names of the points since `armed`.
    kind : str
        Which error a failing point gives.
    """

    def __init__(self) -> None:
        self.points: list[str] = []
        self.kind = ""
        self.failed: list[str] = []
        self._group = ""
        self._first: int | None = None
        self._lasting = False

    @contextlib.contextmanager
    def armed(self, group: str, kind: str = "", first: int | None = None, lasting: bool = False) -> Iterator[None]:
        """Count the points of a group; the one with number ``first`` fails, and with ``lasting`` all after it."""
        self.points, self.failed, self.kind, self._first, self._lasting = [], [], kind, first, lasting
        self._group = group
        try:
            yield
        finally:
            self._group = ""

    def fails(self, group: str, name: str) -> bool:
        """Count a point and return whether it fails."""
        if group != self._group:
            return False
        number = len(self.points)
        self.points.append(name)
        failing = self._first is not None and (number >= self._first if self._lasting else number == self._first)
        if failing:
            self.failed.append(name)
        return failing


def _of_aule(depth: int) -> bool:
    """Whether a function of aule is among the next callers."""
    frame = sys._getframe(2)
    for _ in range(depth):
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__", "")).startswith("aule."):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def patch_arrays(injector: Injector, patch: pytest.MonkeyPatch) -> None:
    """Allocations of host memory: NumPy's functions, where aule calls them."""

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _of_aule(1) and injector.fails("arrays", f"numpy.{name}"):
                raise MemoryError(f"injected in numpy.{name}")
            return function(*args, **kwargs)

        return call

    for name in ("empty", "empty_like", "zeros", "zeros_like", "full", "ones", "array", "ascontiguousarray"):
        patch.setattr(np, name, wrapped(name, getattr(np, name)))


class _File:
    """A file whose reads and writes are points."""

    def __init__(self, injector: Injector, file: Any) -> None:
        self._injector, self._file = injector, file

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        if name not in ("read", "write", "readinto", "flush", "truncate"):
            return found

        def call(*args: Any) -> Any:
            if self._injector.fails("files", f"file.{name}"):
                raise OSError(errno.ENOSPC if name == "write" else errno.EIO, "injected")
            return found(*args)

        return call

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(*exc)


def patch_files(injector: Injector, patch: pytest.MonkeyPatch) -> None:
    """File operations that aule makes itself or through pathlib and tempfile. Closing and removing never fail."""

    def wrapped(name: str, function: Callable[..., Any], opens: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            ours = _of_aule(6) and not (opens and isinstance(args[0], int))  # os.fdopen has opened nothing
            if ours and injector.fails("files", name):
                raise OSError(errno.EIO, f"injected in {name}")
            found = function(*args, **kwargs)
            return _File(injector, found) if ours and opens else found

        return call

    for module, names in ((os, "open read write replace rename mkdir makedirs listdir scandir"), (io, "open")):
        for name in names.split():
            patch.setattr(module, name, wrapped(f"{module.__name__}.{name}", getattr(module, name), module is io))
    fdopen = os.fdopen
    patch.setattr(os, "fdopen", lambda *args, **kwargs: _File(injector, fdopen(*args, **kwargs)))
    patch.setattr(tempfile, "mkstemp", wrapped("tempfile.mkstemp", tempfile.mkstemp, False))
