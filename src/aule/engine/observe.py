"""What aule did, for the user to see: counts of calls, ranges for profilers, and one log line per device.

A call is counted when its launches have started, in the `Tally` that was bound to it when it was prepared: counting is
one increment, without a lock. Two threads that count the same kind of call at the same moment may lose one of the two.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

from aule import settings
from aule.backends import registry
from aule.target import Target

log = logging.getLogger("aule")

NUMPY = Target(registry.NUMPY, "NumPy")
"""Stands for NumPy, which is no device."""

caller: ContextVar[str] = ContextVar("aule_caller", default="direct")
"""Who calls aule: the user's own code (``direct``), or an integration."""


class called_by:  # not a generator, which takes longer
    """Count calls inside a ``with`` block under a caller's name."""

    __slots__ = ("_name", "_token")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._token = caller.set(self._name)

    def __exit__(self, *exc: object) -> None:
        caller.reset(self._token)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# -- counts ------------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """A kind of call: what is counted separately."""

    op: str
    direction: str
    backend: str
    kernel: str
    launches: tuple[str, ...]


class Tally(defaultdict[str, int]):
    """Calls of one kind by caller."""

    def __init__(self, work: Work) -> None:
        super().__init__(int)
        self.work = work

    @property
    def range_name(self) -> str:
        """The name of a call in profilers."""
        return f"aule::{self.work.op}" + ("_backward" if self.work.direction == "backward" else "")


UNCOUNTED = Tally(Work("", "", "", "", ()))
"""For calls that are not the user's, such as those of tuning; nothing shows it."""
_lock = threading.Lock()
_tallies: dict[Work, Tally] = {}
_said: set[str] = set()


def tally(op: str, target: Target, kernel: str, launches: Sequence[str], backward: bool = False) -> Tally:
    """The tally of a kind of call; the first of a device logs that it serves.

    Parameters
    ----------
    kernel : str
        The engine that computes (``simt``, ``vector`` ...).
    launches : sequence of str
        Names of the kernels that are launched.
    """
    op = op.removesuffix("_backward") if backward else op
    work = Work(op, "backward" if backward else "forward", target.backend, kernel, tuple(launches))
    with _lock:
        found = _tallies.get(work)
        if found is None:
            found = _tallies[work] = Tally(work)
        first = target.name not in _said
        _said.add(target.name)
    if first:
        others = "".join(f"; not on {message}" for message in registry.passed_over(target.backend).values())
        log.info("serving on %s (%s)%s", target.backend, target.name, others)
    return found


def counts() -> list[dict[str, Any]]:
    """All calls that were counted, most frequent first; the fields of `Work` with ``caller`` and ``count``."""
    with _lock:
        found = [(work, dict(each)) for work, each in _tallies.items()]
    rows = [
        {**work._asdict(), "launches": list(work.launches), "caller": name, "count": count}
        for work, each in found
        for name, count in each.items()
    ]
    return sorted(rows, key=lambda row: -row["count"])


def reset() -> None:
    """Set all counts to zero."""
    with _lock:
        for each in _tallies.values():
            each.clear()


# -- ranges ------------------------------------------------------------------------------------------------------------

Range = Callable[[str], AbstractContextManager[Any]]


class _Profiler(NamedTuple):
    """A framework's profiler: whether it records now, and its ranges."""

    active: Callable[[], bool]
    range: Range


_profilers: list[_Profiler] = []


def add_profiler(active: Callable[[], bool], range_: Range) -> None:
    """Show calls in a framework's profiler while it is active."""
    _profilers.append(_Profiler(active, range_))


def wanted() -> list[Range]:
    """The ranges that a call is to be shown by; none unless a profiler is active or the environment asks for them."""
    found = [profiler.range for profiler in _profilers if profiler.active()]
    if settings.nvtx() and markers() is not None:
        found.append(_marked)
    return found


@contextlib.contextmanager
def named(ranges: Sequence[Range], name: str) -> Iterator[None]:
    """Show a block by all of some ranges."""
    with contextlib.ExitStack() as stack:
        for each in ranges:
            stack.enter_context(each(name))
        yield


class _Markers(NamedTuple):
    push: Callable[[str], Any]
    pop: Callable[[], Any]


@contextlib.contextmanager
def _marked(name: str) -> Iterator[None]:
    found = markers()
    assert found is not None
    found.push(name)
    try:
        yield
    finally:
        found.pop()


_LIBRARIES = (
    ("libnvToolsExt.so.1", "nvtxRangePushA", "nvtxRangePop"),
    ("nvToolsExt64_1.dll", "nvtxRangePushA", "nvtxRangePop"),
    ("libroctx64.so.4", "roctxRangePushA", "roctxRangePop"),
    ("libroctx64.so", "roctxRangePushA", "roctxRangePop"),
)
"""NVIDIA's and AMD's libraries of ranges, with their functions."""

other_markers: list[Callable[[], tuple[Callable[[str], Any], Callable[[], Any]] | None]] = []
"""Where to look for ranges if no library is found: a framework may have its own."""


@functools.cache
def markers() -> _Markers | None:
    """The functions that begin and end an NVTX or ROCTX range; None, with a warning, if there are none."""
    for library, push, pop in _LIBRARIES:
        try:
            loaded = ctypes.CDLL(library)
            begin, end = getattr(loaded, push), getattr(loaded, pop)
        except (OSError, AttributeError):
            continue
        begin.argtypes = [ctypes.c_char_p]
        return _Markers(lambda name, begin=begin: begin(name.encode()), end)  # type: ignore[misc]
    for look in other_markers:
        found = look()
        if found is not None:
            return _Markers(*found)
    log.warning("AULE_NVTX=1 has no effect: expected libnvToolsExt or libroctx64, found neither")
    return None


# -- calls that no kernel computes -------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_numpy(op: str, backward: bool = False) -> Iterator[None]:
    """Count a call that NumPy computes, and show it in profilers."""
    found = tally(op, NUMPY, "numpy", (), backward)
    with named(wanted(), found.range_name):
        yield
    found[caller.get()] += 1
