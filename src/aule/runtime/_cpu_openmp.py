"""Running launches on PyTorch's own OpenMP threads.

After each PyTorch operator, OpenMP's threads spin for some milliseconds, waiting for the next one. Threads of our own
would compete with them for the cores during that time. So if PyTorch is loaded and sets the number of threads, a launch
can be a parallel region of PyTorch's OpenMP library, in the same team of threads, which is already awake.

A parallel region ends only after every thread has joined it, and the waiting threads spin. Our own pool does not wait
for late workers, so it is faster if other processes use the cores, and always for short launches. `TeamChoice` finds
out by measuring.

The entry point is GNU's, which LLVM's and Intel's libraries provide as well. The threads of `_cpu_pool` are used if it
does not exist (macOS, Windows), and in a forked child, where GNU's library waits for threads that are gone.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from aule import settings
from aule.runtime import _cpu_llvm
from aule.runtime._cpu_pool import JOB_ADDRESSES, JOB_CALL, JOB_LOADS, JOB_STORES, RUN_TYPES, native

_SHORT_SECONDS = 0.2e-3
"""A launch is short if it has ever taken less than this."""
_RETRY_PERIOD = 16
"""One launch in this many tries the slower threads again."""
_RARE_RETRY_PERIOD, _MUCH_SLOWER = 64, 1.25
"""Period of these trials, and the ratio of times from which it applies, for threads that are much slower."""
_EARLY_RETRIES = (4, 8)
"""Launches after a change of threads that also try the others."""
_OUTLIER_RATIO = 2.0
"""Longest time of a launch that is counted, relative to the average. A launch that once waited for a core should not
cause a change of threads; three in a row should."""

# Every thread of the team takes workgroups until none are left; the region ends when all threads have returned. A
# second launch at the same time runs in its own thread alone: a second team would be too many threads.
_CODE = f"""
%job = type {{ ptr, ptr, ptr, i64, i64, i32, i32, i32 }} ; kernel, args, next, total, chunk, grid

@taken = internal global i64 0

define internal void @work(ptr %job) {{
{JOB_ADDRESSES}{JOB_LOADS}{JOB_CALL}  ret void
}}

define void @aule_run_openmp(ptr %parallel, ptr %kernel, ptr %args, i64 %total, i64 %chunk, i32 %nx, i32 %ny, i32 %nz,
                             i64 %helpers) {{
  %next = alloca [8 x i64], align 64
  %job = alloca %job, align 64
  store i64 0, ptr %next
  %claimed = cmpxchg ptr @taken, i64 0, i64 1 acquire monotonic
  %ours = extractvalue {{ i64, i1 }} %claimed, 1
  br i1 %ours, label %share, label %solo
solo:
{JOB_CALL}  ret void
share:
{JOB_ADDRESSES}{JOB_STORES}  %count = trunc i64 %helpers to i32
  %threads = add i32 %count, 1
  call void %parallel(ptr @work, ptr %job, i32 %threads, i32 0)
  store atomic i64 0, ptr @taken release, align 8
  ret void
}}
"""


class Team:
    """PyTorch's threads.

    Attributes
    ----------
    run : callable
        As `aule.runtime._cpu_pool.Pool.run`.
    address : int
        First argument of ``run``: the address of the function that starts a parallel region.
    """

    def __init__(self, machine: _cpu_llvm.Machine, address: int) -> None:
        code = _cpu_llvm.load(machine, _CODE, {"aule_run_openmp": RUN_TYPES})
        code.keep_for_ever()
        self.run = native(code.addresses[0], RUN_TYPES)
        self.address = address


class TeamChoice:
    """Chooses the threads for repeated launches: ours for short ones, else those that were faster recently."""

    __slots__ = ("_chosen", "_count", "_least", "_times")

    def __init__(self) -> None:
        self._chosen: bool | None = None
        self._count = 0
        self._least = 0.0
        self._times: list[float | None] = [None, None]  # ours, PyTorch's

    def choose(self) -> bool:
        """Decide whether the next launch uses PyTorch's threads. Now and then the slower threads are tried again."""
        ours, theirs = self._times
        if ours is None or self._least < _SHORT_SECONDS:
            return False
        if theirs is None:
            return True
        if self._chosen != (theirs <= ours):
            self._chosen, self._count = theirs <= ours, 0
        self._count += 1
        much_slower = max(ours, theirs) > _MUCH_SLOWER * min(ours, theirs)
        period = _RARE_RETRY_PERIOD if much_slower else _RETRY_PERIOD
        retry = self._count % period == 0 or self._count in _EARLY_RETRIES
        return (theirs <= ours) != retry

    def note(self, theirs: bool, seconds: float) -> None:
        """Record the time of a launch on PyTorch's threads or on ours.

        A shorter time counts at once, a longer one gradually: the slower threads are tried so rarely that one good
        launch must undo a moment in which other processes had the cores.
        """
        before = self._times[theirs]
        self._least = seconds if self._times == [None, None] else min(self._least, seconds)
        if before is not None and seconds > before:
            seconds = before + (min(seconds, _OUTLIER_RATIO * before) - before) / 4
        self._times[theirs] = seconds


_team: Team | None = None
_searched = False


def team(machine: _cpu_llvm.Machine) -> Team | None:
    """Return PyTorch's threads; None if they cannot be used. Call it only once PyTorch is loaded."""
    global _team, _searched
    if not _searched:
        address = _parallel_entry()
        _team = Team(machine, address) if address else None
        _searched = True
    return _team


def _parallel_entry() -> int:
    """Return the address of the function that starts a parallel region in PyTorch's OpenMP library; 0 if none."""
    home = getattr(sys.modules.get("torch"), "__file__", None)
    if home is None or settings.omp_stack_size():
        return 0
    try:
        library = ctypes.CDLL(str(Path(home).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def _after_fork() -> None:
    global _team, _searched
    _team, _searched = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
