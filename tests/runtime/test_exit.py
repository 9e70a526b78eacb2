"""Threads that still call while the interpreter ends: daemon threads get `ClosedError`, others finish. Never a crash.

``AULE_EXIT_RUNS=50`` repeats each case as often; by default a case runs twice.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import devices
import pytest

from aule.errors import ClosedError
from aule.runtime import _exit

RUNS = int(os.environ.get("AULE_EXIT_RUNS", "2"))

CHILD = """
import atexit, os, sys, threading, time

atexit.register(time.sleep, 0.2)  # runs last: the threads have time to call once more
import numpy as np
import aule

backend, seconds = sys.argv[1], float(sys.argv[2])
shapes = ((1, 2, 33, 16), (1, 2, 7, 16), (1, 2, 20, 24))
arrays = [[np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i in range(3)] for shape in shapes]
expected = [aule.flash_attention(*qkv, backend="numpy") for qkv in arrays]
aule.flash_attention(*arrays[0], backend=backend)
said = set()


def say(word):
    if word not in said:
        said.add(word)
        os.write(1, (word + "\\n").encode())


def call(number, daemon):  # the last thread compiles its first kernel while the others run
    kind, turns = "daemon" if daemon else "other", 0
    while daemon or turns < 20:
        turns += 1
        try:
            found = aule.flash_attention(*arrays[number], backend=backend)
            say(kind + (" right" if np.abs(found - expected[number]).max() < 1e-4 else " wrong"))
        except aule.ClosedError:
            say(kind + " closed")
        except BaseException as error:
            say(f"{kind} {type(error).__name__}: {error}")


for number, daemon in enumerate((True, False, True)):
    threading.Thread(target=call, args=(number, daemon), daemon=daemon).start()
time.sleep(seconds)
"""


@pytest.mark.device
@pytest.mark.parametrize("backend", ["cpu", "cuda", "vulkan", "opencl", "webgpu"])
def test_threads_at_the_end(backend: str, tmp_path: Path) -> None:
    devices.need(backend)
    environment = {**os.environ, "AULE_CACHE_DIR": str(tmp_path), "AULE_BACKEND": ""}
    for run in range(RUNS):
        command = [sys.executable, "-c", CHILD, backend, str(0.02 * (run % 9))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, f"run {run}: status {done.returncode}\n{done.stdout}{done.stderr}"
        said = sorted(done.stdout.splitlines())
        assert said == ["daemon closed", "daemon right", "other right"], done.stdout


def test_the_end_waits_for_calls_and_refuses_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_exit, "_ended", False)
    monkeypatch.setattr(_exit, "_GRACE_SECONDS", 0.01)
    closed: list[str] = []
    monkeypatch.setattr(_exit, "_shut_down", [lambda: closed.append("closed"), lambda: 1 / 0])  # errors are ignored
    with _exit.in_flight:
        _exit._end()
    assert not closed, "a driver was shut down under a call"
    _exit._end()
    assert closed == ["closed"]
    with pytest.raises(ClosedError, match="interpreter's end"), _exit.in_flight:
        pass
    assert not _exit._calls
