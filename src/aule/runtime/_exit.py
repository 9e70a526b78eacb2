"""The interpreter's end. Calls in flight finish, later ones raise `ClosedError`, and then drivers are shut down.

Daemon threads run until the process ends. A driver or LLVM that is torn down under a call crashes, and so may a call
that opens a driver again. So every call into a driver is counted while it runs. The interpreter waits for all other
threads itself, before `_end` runs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable

from aule.errors import ClosedError

_GRACE_SECONDS = 10.0
"""Longest wait for calls in flight: a device that never answers must not keep the process alive."""

# One entry per call in flight. Appending and removing are atomic.
_calls: list[None] = []
_ended = False
_shut_down: list[Callable[[], None]] = []


class _InFlight:
    """Counts a call into a driver during a ``with`` block. Raises `ClosedError` once the interpreter ends."""

    __slots__ = ()

    def __enter__(self) -> None:
        _calls.append(None)  # before the check, so that `_end` waits for every call that passes it
        if _ended:
            del _calls[-1:]
            raise ClosedError(
                "[exit] expected a call before the interpreter's end, got one during it; stop the threads that call "
                "aule, and join them, before the main thread ends"
            )

    def __exit__(self, *exc: object) -> None:
        del _calls[-1:]


in_flight = _InFlight()


def at_end(shut_down: Callable[[], None]) -> None:
    """Shut a driver down at the interpreter's end, after its last call. Call this once its package is imported."""
    if shut_down not in _shut_down:
        _shut_down.append(shut_down)
    # Before the package's own exit handlers: Python runs the latest registered first.
    atexit.unregister(_end)
    atexit.register(_end)


@atexit.register
def _end() -> None:
    global _ended
    _ended = True
    until = time.monotonic() + _GRACE_SECONDS
    while _calls and time.monotonic() < until:
        time.sleep(0.001)
    # A call that is still in flight uses what would be destroyed; the system frees it.
    for shut_down in [] if _calls else _shut_down:
        with contextlib.suppress(Exception):
            shut_down()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_calls.clear)  # calls of the parent's threads, which the child lacks
