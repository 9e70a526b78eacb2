"""The pool of worker threads that share the workgroups of a launch with the calling thread.

A launch is machine code throughout, compiled from the LLVM IR below: it wakes workers, runs workgroups, and waits for
the workers that joined. No thread needs the interpreter's lock for it, so a busy Python thread delays none of them, and
many workers do not queue up to start. Python starts the worker threads, and each stays inside one native call forever.

Steps of a launch: the caller writes the job, opens it, invites workers and works itself. A worker that wakes while the
job is open joins; one that wakes late goes back to sleep. When the caller finds no more workgroups, there are none left
to start: it closes the job and waits for the workers that joined, not for those that were only invited. Hence a small
launch costs little more than the wake-ups. A second launch at the same time finds the pool taken and runs in its own
thread alone. PyTorch's threads may be used instead (`_cpu_openmp`).

A waiting thread first spins briefly (`_SPIN_SECONDS`), since launches come in sequences. Then it sleeps on one of
CPython's own locks, which exist on every system and can be used without the interpreter.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from aule import settings
from aule.runtime import _cpu_llvm

log = logging.getLogger("aule")

_SPIN_SECONDS = 20e-6
_MOST_WORKERS = 1023
_LINE = 64
"""Bytes of a cache line. Data that different threads write is in different lines."""

# Offsets into the memory that all threads of a pool share.
_STATE, _TAKEN, _CURSOR, _JOB, _FIXED, _WORKERS = (_LINE * n for n in (0, 1, 2, 3, 4, 5))

KERNEL_TYPES = ("ptr", "ptr", "i64", "i64", "i32", "i32", "i32")
"""Parameter types of a kernel: argument cells, counter, total, chunk, and the grid's three sizes."""
RUN_TYPES = ("ptr", "ptr", "ptr", "i64", "i64", "i32", "i32", "i32", "i64")
"""Parameter types of a launch: see `Pool.run`."""
_PAUSE = {"x86_64": "call void @llvm.x86.sse2.pause()", "aarch64": "call void @llvm.aarch64.hint(i32 1)"}
_PAUSE_DECLARATION = {
    "x86_64": "declare void @llvm.x86.sse2.pause()",
    "aarch64": "declare void @llvm.aarch64.hint(i32)",
}

# A job is a kernel and its arguments. Four pieces of IR: addresses of the fields, stores, loads, and the kernel's call.
_FIELDS = (
    ("args", "ptr"), ("next", "ptr"), ("total", "i64"), ("chunk", "i64"), ("nx", "i32"), ("ny", "i32"), ("nz", "i32"),
)  # fmt: skip
JOB_ADDRESSES = "".join(
    f"  %{name}.at = getelementptr %job, ptr %job, i64 0, i32 {number}\n" for number, (name, _) in enumerate(_FIELDS, 1)
)
JOB_STORES = "  store ptr %kernel, ptr %job\n" + "".join(
    f"  store {kind} %{name}, ptr %{name}.at\n" for name, kind in _FIELDS
)
JOB_LOADS = "  %kernel = load ptr, ptr %job\n" + "".join(
    f"  %{name} = load {kind}, ptr %{name}.at\n" for name, kind in _FIELDS
)
JOB_CALL = f"  call void %kernel({', '.join(f'{kind} %{name}' for name, kind in _FIELDS)})\n"

# The state counts the workers inside the job; OPEN lets more join, WAITING means the caller sleeps.
# A worker's flag: 0 awake and not invited, 1 invited, 2 asleep and not invited.
_CODE = f"""
%job = type {{ ptr, ptr, ptr, i64, i64, i32, i32, i32, i64 }} ; kernel, args, next, total, chunk, grid, helpers
%fixed = type {{ ptr, ptr, ptr, i64 }}                        ; acquire, release, the caller's lock, spins
%worker = type {{ i64, ptr }}                                 ; flag, lock

@PAUSE_DECLARATION

define void @aule_spin(i64 %turns) {{
entry:
  br label %turn
turn:
  %i = phi i64 [ 0, %entry ], [ %more, %turn ]
  @PAUSE
  %more = add i64 %i, 1
  %on = icmp ult i64 %more, %turns
  br i1 %on, label %turn, label %done
done:
  ret void
}}

define internal void @sleep(ptr %pool, ptr %lock) noinline {{
  %fixed = getelementptr i8, ptr %pool, i64 {_FIXED}
  %acquire = load ptr, ptr %fixed
  %got = call i32 %acquire(ptr %lock, i32 1)
  ret void
}}

define internal void @wake(ptr %pool, ptr %lock) noinline {{
  %fixed = getelementptr i8, ptr %pool, i64 {_FIXED}
  %at = getelementptr %fixed, ptr %fixed, i64 0, i32 1
  %release = load ptr, ptr %at
  call void %release(ptr %lock)
  ret void
}}

define internal i64 @spins(ptr %pool) {{
  %fixed = getelementptr i8, ptr %pool, i64 {_FIXED}
  %at = getelementptr %fixed, ptr %fixed, i64 0, i32 3
  %spins = load i64, ptr %at
  ret i64 %spins
}}

; Every thread of a launch calls this, so that many workers are woken in parallel.
define internal void @invite(ptr %pool) {{
entry:
  %cursor = getelementptr i8, ptr %pool, i64 {_CURSOR}
  %job = getelementptr i8, ptr %pool, i64 {_JOB}
  %helpers.at = getelementptr %job, ptr %job, i64 0, i32 8
  %helpers = load i64, ptr %helpers.at
  br label %next
next:
  %seen = load atomic i64, ptr %cursor monotonic, align 8
  %some = icmp ult i64 %seen, %helpers
  br i1 %some, label %take, label %done
take:
  %i = atomicrmw add ptr %cursor, i64 1 monotonic
  %mine = icmp ult i64 %i, %helpers
  br i1 %mine, label %call, label %done
call:
  %offset = mul i64 %i, {_LINE}
  %first = getelementptr i8, ptr %pool, i64 {_WORKERS}
  %worker = getelementptr i8, ptr %first, i64 %offset
  %flag = atomicrmw xchg ptr %worker, i64 1 acq_rel
  %asleep = icmp eq i64 %flag, 2
  br i1 %asleep, label %rouse, label %next
rouse:
  %lock.at = getelementptr %worker, ptr %worker, i64 0, i32 1
  %lock = load ptr, ptr %lock.at
  call void @wake(ptr %pool, ptr %lock)
  br label %next
done:
  ret void
}}

define void @aule_run(ptr %pool, ptr %kernel, ptr %args, i64 %total, i64 %chunk, i32 %nx, i32 %ny, i32 %nz,
                      i64 %helpers) {{
entry:
  %next = alloca [8 x i64], align {_LINE}
  store i64 0, ptr %next
  %alone = icmp eq i64 %helpers, 0
  br i1 %alone, label %solo, label %claim
claim:
  %taken = getelementptr i8, ptr %pool, i64 {_TAKEN}
  %claimed = cmpxchg ptr %taken, i64 0, i64 1 acquire monotonic
  %ours = extractvalue {{ i64, i1 }} %claimed, 1
  br i1 %ours, label %share, label %solo
solo:
{JOB_CALL}  ret void
share:
  %job = getelementptr i8, ptr %pool, i64 {_JOB}
{JOB_ADDRESSES}  %helpers.at = getelementptr %job, ptr %job, i64 0, i32 8
{JOB_STORES}  store i64 %helpers, ptr %helpers.at
  %cursor = getelementptr i8, ptr %pool, i64 {_CURSOR}
  store atomic i64 0, ptr %cursor monotonic, align 8
  %state = getelementptr i8, ptr %pool, i64 {_STATE}
  store atomic i64 @OPEN, ptr %state release, align 8
  call void @invite(ptr %pool)
{JOB_CALL}  %before = atomicrmw and ptr %state, i64 @COUNT acq_rel
  %inside = and i64 %before, @COUNT
  %nobody = icmp eq i64 %inside, 0
  br i1 %nobody, label %finish, label %spin
spin:
  %spins = call i64 @spins(ptr %pool)
  br label %look
look:
  %i = phi i64 [ 0, %spin ], [ %more, %pause ]
  %now = load atomic i64, ptr %state acquire, align 8
  %left = icmp eq i64 %now, 0
  br i1 %left, label %finish, label %again
again:
  %more = add i64 %i, 1
  %patient = icmp ult i64 %more, %spins
  br i1 %patient, label %pause, label %tire
pause:
  @PAUSE
  br label %look
tire:
  %last = atomicrmw or ptr %state, i64 @WAITING acq_rel
  %gone = icmp eq i64 %last, 0
  br i1 %gone, label %finish, label %sleep
sleep:
  %fixed = getelementptr i8, ptr %pool, i64 {_FIXED}
  %lock.at = getelementptr %fixed, ptr %fixed, i64 0, i32 2
  %lock = load ptr, ptr %lock.at
  call void @sleep(ptr %pool, ptr %lock)
  br label %finish
finish:
  store atomic i64 0, ptr %state monotonic, align 8
  store atomic i64 0, ptr %taken release, align 8
  ret void
}}

define void @aule_work(ptr %pool, i64 %number) {{
entry:
  %offset = mul i64 %number, {_LINE}
  %first = getelementptr i8, ptr %pool, i64 {_WORKERS}
  %worker = getelementptr i8, ptr %first, i64 %offset
  %lock.at = getelementptr %worker, ptr %worker, i64 0, i32 1
  %lock = load ptr, ptr %lock.at
  %spins = call i64 @spins(ptr %pool)
  %state = getelementptr i8, ptr %pool, i64 {_STATE}
  %job = getelementptr i8, ptr %pool, i64 {_JOB}
{JOB_ADDRESSES}  %fixed = getelementptr i8, ptr %pool, i64 {_FIXED}
  %caller.at = getelementptr %fixed, ptr %fixed, i64 0, i32 2
  %caller = load ptr, ptr %caller.at
  br label %wait
wait:
  br label %look
look:
  %i = phi i64 [ 0, %wait ], [ %more, %pause ]
  %flag = load atomic i64, ptr %worker acquire, align 8
  %invited = icmp eq i64 %flag, 1
  br i1 %invited, label %awake, label %again
again:
  %more = add i64 %i, 1
  %patient = icmp ult i64 %more, %spins
  br i1 %patient, label %pause, label %tire
pause:
  @PAUSE
  br label %look
tire:
  %lie = cmpxchg ptr %worker, i64 0, i64 2 acq_rel acquire
  %down = extractvalue {{ i64, i1 }} %lie, 1
  br i1 %down, label %sleep, label %awake
sleep:
  call void @sleep(ptr %pool, ptr %lock)
  br label %awake
awake:
  %cleared = atomicrmw xchg ptr %worker, i64 0 acq_rel
  %start = load atomic i64, ptr %state acquire, align 8
  br label %enter
enter:
  %old = phi i64 [ %start, %awake ], [ %found, %try ]
  %bit = and i64 %old, @OPEN
  %open = icmp ne i64 %bit, 0
  br i1 %open, label %try, label %wait
try:
  %new = add i64 %old, 1
  %entered = cmpxchg ptr %state, i64 %old, i64 %new acq_rel acquire
  %found = extractvalue {{ i64, i1 }} %entered, 0
  %in = extractvalue {{ i64, i1 }} %entered, 1
  br i1 %in, label %work, label %enter
work:
  call void @invite(ptr %pool)
{JOB_LOADS}{JOB_CALL}  %then = atomicrmw sub ptr %state, i64 1 acq_rel
  %last = icmp eq i64 %then, @ONE_WAITING
  br i1 %last, label %tell, label %wait
tell:
  call void @wake(ptr %pool, ptr %caller)
  br label %wait
}}
"""
_OPEN, _WAITING = 1 << 32, 1 << 33
_ENTRIES = {"aule_run": RUN_TYPES, "aule_work": ("ptr", "i64"), "aule_spin": ("i64",)}

_lock = threading.Lock()
_code: _cpu_llvm.Code | None = None
_pool: Pool | None = None


def pool(made_for: _cpu_llvm.Machine) -> Pool:
    """Return the process's pool. Its code is compiled for ``made_for`` on first use."""
    global _code, _pool
    found = _pool
    if found is None:
        with _lock:
            if _code is None:
                _code = _cpu_llvm.load(made_for, _text(made_for.arch), _ENTRIES)
                _code.keep_for_ever()
            if _pool is None:
                _pool = Pool(_code.addresses)
            found = _pool
    return found


def _text(arch: str) -> str:
    text = _CODE
    for word, value in (
        ("@PAUSE_DECLARATION", _PAUSE_DECLARATION[arch]),
        ("@PAUSE", _PAUSE[arch]),
        ("@OPEN", str(_OPEN)),
        ("@COUNT", str(_OPEN - 1)),
        ("@ONE_WAITING", str(_WAITING + 1)),
        ("@WAITING", str(_WAITING)),
    ):
        text = text.replace(word, value)
    return text


def thread_count() -> int:
    """Return how many threads a launch may use now."""
    return threads()[0]


def threads() -> tuple[int, bool]:
    """Return how many threads a launch may use now, and whether PyTorch set the number."""
    chosen = settings.num_threads()
    if chosen is None:
        # PyTorch's thread count applies to us too. While torch is being imported it has no such function yet.
        ask = getattr(sys.modules.get("torch"), "get_num_threads", None)
        if ask is not None:
            return min(int(ask()), _MOST_WORKERS + 1), True
        chosen = settings.omp_num_threads()
    if chosen is None:
        chosen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(chosen, _MOST_WORKERS + 1), False


def native(address: int, types: tuple[str, ...]) -> Callable[..., None]:
    """Wrap compiled code in a Python function that releases the interpreter's lock during the call."""
    integers = {"ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "i32": ctypes.c_int32}
    made: Callable[..., None] = ctypes.CFUNCTYPE(None, *(integers[t] for t in types))(address)
    return made


class Pool:
    """Worker threads, and the memory they share with callers.

    Attributes
    ----------
    run : callable
        ``run(address, kernel, cells, total, chunk, nx, ny, nz, helpers)`` runs all workgroups and returns when they are
        done. At least ``helpers`` workers must exist (see `ready`).
    address : int
        Address of the shared memory.
    """

    def __init__(self, code: tuple[int, ...]) -> None:
        run, work, spin = code
        self.run = native(run, RUN_TYPES)
        self._work = native(work, _ENTRIES["aule_work"])
        api: Any = ctypes.pythonapi
        self._new_lock = _function(api.PyThread_allocate_lock, ctypes.c_void_p)
        self._acquire = _function(api.PyThread_acquire_lock, ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
        # Never freed: workers use it until the process ends, after Python has freed everything else.
        size = _WORKERS + _LINE * _MOST_WORKERS
        memory = _function(api.PyMem_RawCalloc, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)(1, size + _LINE)
        if not memory:
            raise MemoryError
        self.address: int = -(-memory // _LINE) * _LINE
        fixed = (ctypes.c_uint64 * 4).from_address(self.address + _FIXED)
        fixed[0] = ctypes.cast(api.PyThread_acquire_lock, ctypes.c_void_p).value or 0
        fixed[1] = ctypes.cast(api.PyThread_release_lock, ctypes.c_void_p).value or 0
        fixed[2] = self._new_locked_lock()
        fixed[3] = _spins(native(spin, _ENTRIES["aule_spin"]))
        self._lock = threading.Lock()
        self._workers = 0
        self._most = _MOST_WORKERS

    def _new_locked_lock(self) -> int:
        lock = self._new_lock()
        if not lock:
            raise MemoryError
        self._acquire(lock, 1)
        return int(lock)

    def ready(self, helpers: int) -> int:
        """Start missing workers; return how many of ``helpers`` exist."""
        if helpers <= self._workers:
            return helpers
        with self._lock:
            while self._workers < min(helpers, self._most):
                cell = (ctypes.c_uint64 * 2).from_address(self.address + _WORKERS + _LINE * self._workers)
                cell[1] = self._new_locked_lock()
                thread = threading.Thread(
                    target=self._work, args=(self.address, self._workers), name=f"aule-cpu-{self._workers}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    # Existing workers do the work; do not try again at every launch.
                    log.warning("cpu: no more than %d threads could be started: %s", self._workers + 1, error)
                    self._most = self._workers
                    break
                self._workers += 1
        return min(helpers, self._workers)


def _function(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Give a CPython function our own argument types; types set on ``ctypes.pythonapi`` would affect other users."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    made: Callable[..., Any] = ctypes.CFUNCTYPE(result, *arguments)(address)
    return made


def _spins(spin: Callable[[int], None]) -> int:
    """Measure how many turns of the spin loop take `_SPIN_SECONDS`; a pause takes one to hundreds of cycles."""
    turns, best = 500, float("inf")
    for _ in range(4):
        start = time.perf_counter()
        spin(turns)
        best = min(best, time.perf_counter() - start)
    return max(1, int(turns * _SPIN_SECONDS / best))


def _after_fork() -> None:
    # The child inherits the memory and the code, but no worker threads, and perhaps a lock that one of them held.
    global _lock, _pool
    _lock = threading.Lock()
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
