"""PyTorch's own threads, for launches between its operators.

After an operator, OpenMP's threads go on spinning for some milliseconds in wait of the next one. Threads of ours would
share the cores with them for just that time: on two cores a launch behind an operator took up to twice as long. So
where PyTorch is loaded and says how many threads there are, a launch is a parallel region of the OpenMP library that
PyTorch is linked to, in the same team, which is awake already.

A region ends only when every thread has been there, and whoever waits for that spins. So where cores are shared with
other processes our own threads, which come or come not, are the better ones, and always for short launches, which would
take milliseconds instead of microseconds. A launch finds out which are (`Habit`).

GNU's entry point is used, which LLVM's and Intel's libraries have too. Where there is none (macOS, Windows), and in a
child of a fork, where GNU's library waits for threads that are gone, the threads are those of `_cpu_pool`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from aule import settings
from aule.runtime import _cpu_llvm
from aule.runtime._cpu_pool import JOB_CALL, JOB_LOADS, JOB_PLACES, JOB_STORES, RUN_TYPES, native

_LONG_SECONDS = 0.2e-3
"""A launch that has ever taken less is short."""
_TURNS, _RARE_TURNS, _MUCH = 16, 64, 1.25
"""Of so many launches one looks whether the other threads have become the quicker ones; of the first ones after a
change more, and later fewer where those took so many times as long."""
_MOST_SLOWER = 2.0
"""A launch that took longer than so many times what it used to counts as one that took just that: one that waited for a
core is no reason to leave threads that are the quicker ones, but three in a row are."""

# Every thread of the team takes workgroups until there are none; the region ends when all of them have come back. A
# second launch at the same time runs in its own thread alone: a team for each would be too many threads.
_CODE = f"""
%job = type {{ ptr, ptr, ptr, i64, i64, i32, i32, i32 }} ; kernel, args, next, total, chunk, grid

@taken = internal global i64 0

define internal void @work(ptr %job) {{
{JOB_PLACES}{JOB_LOADS}{JOB_CALL}  ret void
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
{JOB_PLACES}{JOB_STORES}  %count = trunc i64 %helpers to i32
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
        What it takes first: of the function that begins a parallel region.
    """

    def __init__(self, machine: _cpu_llvm.Machine, address: int) -> None:
        code = _cpu_llvm.load(machine, _CODE, {"aule_run_openmp": RUN_TYPES})
        code.keep_for_ever()
        self.run = native(code.addresses[0], RUN_TYPES)
        self.address = address


class Habit:
    """Whose threads serve a launch: PyTorch's if they took less time of late, and ours if it is short."""

    __slots__ = ("_chosen", "_count", "_least", "_times")

    def __init__(self) -> None:
        self._chosen: bool | None = None
        self._count = 0
        self._least = 0.0
        self._times: list[float | None] = [None, None]

    def choose(self) -> bool:
        """Whether the next launch goes to PyTorch's threads. Now and then it is the turn of those that were slower."""
        ours, theirs = self._times
        if ours is None or self._least < _LONG_SECONDS:
            return False
        if theirs is None:
            return True
        if self._chosen != (theirs <= ours):
            self._chosen, self._count = theirs <= ours, 0
        self._count += 1
        turns = _RARE_TURNS if max(ours, theirs) > _MUCH * min(ours, theirs) else _TURNS
        looks = self._count % turns == 0 or self._count in (4, 8)
        return (theirs <= ours) != looks

    def note(self, theirs: bool, seconds: float) -> None:
        """How long it took. Less than before counts at once, and more only by and by: that others had the cores for a
        moment is to be forgotten at the next look, which comes seldom to the slower threads."""
        before = self._times[theirs]
        self._least = seconds if self._times == [None, None] else min(self._least, seconds)
        if before is not None and seconds > before:
            seconds = before + (min(seconds, _MOST_SLOWER * before) - before) / 4
        self._times[theirs] = seconds


_team: Team | None = None
_asked = False


def team(machine: _cpu_llvm.Machine) -> Team | None:
    """PyTorch's threads, once it is loaded; None where they cannot be used."""
    global _team, _asked
    if not _asked:
        address = _entry()
        _team = Team(machine, address) if address else None
        _asked = True
    return _team


def _entry() -> int:
    """Address of the function that begins a parallel region, in the library that PyTorch uses; 0 if there is none."""
    home = getattr(sys.modules.get("torch"), "__file__", None)
    if home is None or settings.omp_stack_size():
        return 0
    try:
        library = ctypes.CDLL(str(Path(home).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def _after_fork() -> None:
    global _team, _asked
    _team, _asked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
