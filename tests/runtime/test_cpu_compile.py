"""CPU kernels are compiled in a child process: what happens if it dies, cannot be started, is forked or interrupted."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aule.artifact import Artifact
from aule.errors import ShaderCompileError
from aule.ir.builder import Builder
from aule.ir.types import f32
from aule.render.llvm import render
from aule.runtime import _cpu_compile, _cpu_llvm, _cpu_pool, cpu
from aule.target import Target

SERVE = "from aule.runtime import _cpu_llvm as llvm; import os, signal, time; {}; llvm.serve()"
OPTIMISED_DIES = "make = llvm._optimise; llvm._optimise = lambda m, e, level: {} if level else make(m, e, level)"


def doubling(name: str = "doubling") -> Artifact:
    """A kernel that doubles 16 numbers, through an array that is stored in halves, the second one first."""
    b = Builder(name, 1)
    x, out = b.buffer("x", f32), b.buffer("result", f32, "write")
    own = b.private("own", f32, 16)
    for at in (8, 0):
        b.store(own, at, b.load(x, at, 8, align=1))
    b.store(out, 0, b.load(own, 0, 16) * 2.0, align=1)
    return render(b.finish(), Target("cpu", "Test", arch=_cpu_llvm.machine("native").arch))


def check(device: cpu.CpuDevice, artifact: Artifact) -> None:
    x, out = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
    memory = [device.wrap(a.ctypes.data, a.nbytes, a) for a in (x, out)]
    device.launch(device.load(artifact), (1, 1, 1), memory)
    assert np.array_equal(out, 2 * x)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[cpu.CpuDevice]:
    """A device without cached code whose child, if any, starts with this test and ends with it."""
    _cpu_pool.pool(_cpu_llvm.machine("native"))  # the code of the threads, which other tests use too
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_cpu_compile, "_child", None)
    monkeypatch.setattr(_cpu_compile, "_unavailable", None)
    monkeypatch.setattr(_cpu_llvm, "_unoptimised", {})
    (opened,) = cpu.devices()
    assert isinstance(opened, cpu.CpuDevice)
    yield opened
    opened.close()
    if _cpu_compile._child is not None:
        _cpu_compile._child.close()


def child_runs(monkeypatch: pytest.MonkeyPatch, statement: str) -> None:
    """Let the child run a statement before it serves."""
    command = _cpu_compile._command()
    assert command is not None
    monkeypatch.setattr(_cpu_compile, "_command", lambda: [sys.executable, "-c", SERVE.format(statement)])


def stored(folder: Path) -> int:
    return sum(path.is_file() for path in (folder / "objects").rglob("*"))


def test_stores_out_of_order_compile(
    device: cpu.CpuDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM 22 makes invalid code out of such stores if they are loaded as one vector."""
    check(device, doubling())
    assert not caplog.records
    assert stored(tmp_path) >= 1
    # The child has compiled it, and compiles the next one too.
    (child,) = {_cpu_compile._child}
    assert child is not None
    check(device, doubling("again"))
    assert _cpu_compile._child is child


@pytest.mark.parametrize("end", ["os.abort()", "os.kill(os.getpid(), 9)", "os._exit(1)"])
def test_a_child_that_dies(
    device: cpu.CpuDevice, tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not hasattr(os, "fork") and "kill" in end:
        pytest.skip("the system has no signals")
    child_runs(monkeypatch, OPTIMISED_DIES.format(end))
    artifact = doubling()
    check(device, artifact)
    (said,) = [x.getMessage() for x in caplog.records if "doubling" in x.getMessage()]
    assert "failed to optimise doubling" in said
    (source,) = [path for path in (tmp_path / "refused").iterdir() if str(path) in said]
    assert source.read_bytes() == artifact.code
    before = len(caplog.records)
    check(device, artifact)  # not tried again
    assert len(caplog.records) == before
    assert stored(tmp_path) == 0  # another process, or version of LLVM, tries again


def test_a_child_killed_between_two_kernels(device: cpu.CpuDevice, caplog: pytest.LogCaptureFixture) -> None:
    check(device, doubling())
    child = _cpu_compile._child
    assert child is not None
    child._process.kill()
    child._process.wait()
    check(device, doubling("next"))
    assert not caplog.records and _cpu_compile._child not in (None, child)


def test_a_child_that_always_dies(
    device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child_runs(monkeypatch, "llvm._optimise = lambda *a: os.abort()")
    for _ in range(2):
        with pytest.raises(ShaderCompileError, match="crashed; use another version of llvmlite, or backend="):
            device.load(doubling())
    assert len(caplog.records) == 2 and _cpu_compile._child is None
    monkeypatch.undo()  # the next kernel has a new child


def test_invalid_code_after_optimising(
    device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LLVM does not check what its passes return."""
    monkeypatch.setattr(_cpu_compile, "_command", lambda: None)
    optimise = _cpu_llvm._optimise

    def broken(module: Any, emitter: Any, level: int) -> None:
        optimise(module, emitter, level)
        if level:
            module.get_function("doubling").linkage = "common"  # which only variables can have

    monkeypatch.setattr(_cpu_llvm, "_optimise", broken)
    check(device, doubling())
    assert "failed to optimise doubling" in caplog.text and "common linkage" in caplog.text


@pytest.mark.parametrize("executable", ["", None, "/usr/bin/uwsgi", "/nowhere/python3"])
def test_without_an_interpreter_to_start(
    device: cpu.CpuDevice, tmp_path: Path, executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    check(device, doubling())
    assert _cpu_compile._child is None and stored(tmp_path) >= 1


def test_a_frozen_program_is_not_started_again(device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    check(device, doubling())
    assert _cpu_compile._child is None


def test_a_child_that_cannot_import(device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    child_runs(monkeypatch, "import no_such_module")
    check(device, doubling())
    assert _cpu_compile._child is None and "no_such_module" in str(_cpu_compile._unavailable)


def test_what_a_library_prints_is_no_answer(device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    child_runs(monkeypatch, OPTIMISED_DIES.format("(os.write(1, b'x' * 100), make(m, e, level))"))
    check(device, doubling())
    assert _cpu_compile._child is not None


def test_an_interrupted_wait(device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the child compiles: the next kernel must not get that answer."""
    child_runs(monkeypatch, "pass")
    check(device, doubling())
    child, read = _cpu_compile._child, _cpu_compile._read

    def interrupted(pipe: object) -> bytes:
        monkeypatch.setattr(_cpu_compile, "_read", read)
        raise KeyboardInterrupt

    monkeypatch.setattr(_cpu_compile, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        device.load(doubling("interrupted"))
    check(device, doubling("next"))
    assert _cpu_compile._child not in (None, child)


def test_many_threads_share_the_child(device: cpu.CpuDevice) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            check(device, doubling(f"doubling{number % 3}"))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


SCRIPT = """
import os, sys, time
print("started", flush=True)
import numpy as np
from aule.runtime import _cpu_compile, _cpu_llvm
machine = _cpu_llvm.machine("native")
def load(name):
    text = f"define void @{name}(ptr %x) {{\\n  store i32 7, ptr %x\\n  ret void\\n}}"
    return _cpu_llvm.load(machine, text, {name: ("ptr",)})
load("first")
mine = _cpu_compile._child._process.pid
if hasattr(os, "fork"):
    child = os.fork()
    if child == 0:
        assert _cpu_compile._child is None
        load("second")
        os._exit(_cpu_compile._child._process.pid == mine)
    assert os.waitpid(child, 0)[1] == 0
load("third")
assert _cpu_compile._child._process.pid == mine
print(mine, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_the_child_ends_with_the_process_and_runs_no_script(tmp_path: Path, how: str) -> None:
    """A script without ``if __name__ == "__main__"`` is not run twice; warnings would be errors."""
    if how == "killed" and not hasattr(os, "fork"):
        pytest.skip("the system has no signals")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"AULE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(script), how],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    started, pid = done.stdout.split()
    assert started == "started"
    assert done.stderr == ""
    assert done.returncode == (0 if how == "ends" else -9)
    if hasattr(os, "fork"):
        for _ in range(100):
            if not _running(int(pid)):
                break
            threading.Event().wait(0.1)
        assert not _running(int(pid))


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/status")  # a process that nobody has waited for is a zombie
    return not (status.exists() and "\nState:\tZ" in status.read_text())


def test_what_happened_is_logged(
    device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with caplog.at_level(logging.DEBUG, "aule"):
        device.load(doubling())
    assert "compiling in this process: sys.executable is not a Python interpreter" in caplog.text
