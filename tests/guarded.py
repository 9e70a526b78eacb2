"""Runs CPU kernels on memory between inaccessible pages, so that an access outside of a buffer ends the process.

Any test runs so with ``AULE_TEST_GUARD=end`` (buffers end where a page does) or ``start`` (they start there), which
`conftest.py` looks at; run it in a process of its own. Indices outside of a kernel's own arrays end the process too.

    AULE_TEST_GUARD=end python -m pytest -n 2 tests/ops -k cpu
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aule.engine import memory
from aule.engine import run as engine
from aule.render import llvm

_PAGE = mmap.PAGESIZE

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Region:
    """Memory whose first or last byte is next to an inaccessible page. It is full of NaN, and freed by `close`."""

    def __init__(self, nbytes: int, side: str) -> None:
        pages = -(-max(nbytes, 1) // _PAGE) * _PAGE
        self._size = pages + 2 * _PAGE
        self._base = _libc.mmap(None, self._size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if self._base == ctypes.c_void_p(-1).value:
            raise MemoryError
        if _libc.mprotect(self._base + _PAGE, pages, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")
        self.address = self._base + _PAGE
        if side == "end":
            self.address += pages - nbytes
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))
        self.bytes.fill(0xFF)

    def close(self) -> None:
        _libc.munmap(self._base, self._size)


class _Copy:
    """A copy of an array in a region, with the array's strides; `aule.engine.memory.address` takes it as memory."""

    def __init__(self, array: np.ndarray[Any, Any], side: str) -> None:
        steps = [stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True)]
        before, behind = -sum(x for x in steps if x < 0), sum(x for x in steps if x > 0) + array.itemsize
        nbytes, low = before + behind if array.size else 0, array.ctypes.data - before
        self._original = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(low))
        self._before = self._original.copy()
        self.region = Region(nbytes, side)
        self.region.bytes[...] = self._original
        self.__array_interface__ = {"data": (self.region.address + before, False)}

    def return_results(self) -> None:
        """Copy what the kernels have written: other buffers of the call may lie between this one's rows."""
        changed = self.region.bytes != self._before
        if changed.any():
            self._original[changed] = self.region.bytes[changed]
        self.region.close()


def install(side: str) -> None:
    """Guard all memory of CPU kernels in this process from now on."""
    if side not in ("start", "end"):
        raise ValueError(f"expected AULE_TEST_GUARD of start or end, got {side!r}")
    cache = tempfile.mkdtemp(prefix="aule-guarded-")  # kernels with checks are other kernels
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["AULE_CACHE_DIR"] = cache
    llvm.render = functools.partial(llvm.render, checked=True)
    engine._ALIGNMENT = 1  # sizes of workspaces are not rounded up
    plain = engine.PreparedCall.run

    def run(self: engine.PreparedCall, given: Mapping[str, Any], stream: int | None = None) -> None:
        copies = {name: _Copy(x, side) for name, x in given.items() if isinstance(x, np.ndarray) and self._on_host}
        plain(self, {**given, **copies}, stream)
        for copy in copies.values():
            copy.return_results()

    def acquire(self: object, workspace: Sequence[int], scratch: Sequence[int], stream: int | None) -> Any:
        regions = [Region(nbytes, side) for nbytes in (*workspace, *(4 * words for words in scratch))]
        for region in regions[len(workspace) :]:
            region.bytes.fill(0)
        return [region.address for region in regions], regions

    def release(self: object, regions: list[Region]) -> None:
        for region in regions:
            region.close()

    engine.PreparedCall.run = run
    memory.HostMemory.acquire, memory.HostMemory.release = acquire, release
