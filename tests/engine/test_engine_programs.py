"""Programs are built once per device and configuration, by the first thread that needs them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aule
from aule.artifact import Artifact
from aule.backends import registry
from aule.codegen import TARGETS
from aule.engine import cache, programs
from aule.errors import BackendUnavailableError, ShaderCompileError
from aule.ir import Builder, KernelIR
from aule.ir.types import f32
from aule.runtime.base import Allocation, Device, Program

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


class FakeDevice(Device):
    """A device that only loads, slowly, and counts."""

    def __init__(self) -> None:
        self.target = TARGETS["opencl"]
        self.index = 0
        self.loaded: list[Artifact] = []
        self.refuse = False

    def load(self, artifact: Artifact) -> Program:
        time.sleep(0.05)
        if self.refuse:
            raise ShaderCompileError("[fake] expected a kernel, got one that it does not like; none", log="no")
        self.loaded.append(artifact)
        return Program(self, artifact, None)

    def alloc(self, nbytes: int) -> Allocation:
        return Allocation(self, nbytes)

    def free(self, allocation: Allocation) -> None:
        allocation.freed = True

    def upload(self, allocation: Allocation, data: Any, offset: int = 0) -> None: ...

    def download(self, allocation: Allocation, out: Any, offset: int = 0) -> None: ...

    def launch(self, program: Program, grid: Any, args: Sequence[Any], stream: int | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


class Tracer:
    """Builds a small kernel, slowly, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> KernelIR:
        self.calls += 1
        time.sleep(0.05)
        b = Builder("clear", workgroup=32)
        out = b.buffer("out", f32, "write")
        b.store(out, b.group_id() * 32 + b.thread_id(), 0.0)
        return b.finish()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("AULE_DISK_CACHE", raising=False)
    return tmp_path


def test_eight_threads_build_once() -> None:
    device, tracer, got = FakeDevice(), Tracer(), []
    ready = threading.Barrier(8)

    def ask() -> None:
        ready.wait()
        got.append(programs.program(device, "config", tracer))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracer.calls == 1 and len(device.loaded) == 1
    assert len(got) == 8 and len({id(program) for program in got}) == 1
    assert not programs._building


def test_threads_with_different_configurations_do_not_wait_for_each_other() -> None:
    device = FakeDevice()
    inside = threading.Barrier(4, timeout=10)  # passed only when four builds are under way at once

    def build() -> KernelIR:
        inside.wait()
        return Tracer()()

    threads = [threading.Thread(target=programs.program, args=(device, n, build)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(device.loaded) == 4


def test_the_second_device_takes_the_kernel_from_disk() -> None:
    tracer = Tracer()
    first, second = FakeDevice(), FakeDevice()
    programs.program(first, "config", tracer)
    programs.program(second, "config", tracer)
    assert tracer.calls == 1
    assert first.loaded == second.loaded


def test_a_damaged_entry_is_rebuilt_and_never_loaded(folder: Path) -> None:
    tracer, device = Tracer(), FakeDevice()
    programs.program(device, "config", tracer)
    (file,) = [path for path in (folder / "kernels").rglob("*") if path.is_file()]
    intact = file.read_bytes()
    file.write_bytes(intact[:-3] + b"???")
    other = FakeDevice()
    programs.program(other, "config", tracer)
    assert tracer.calls == 2
    assert other.loaded == device.loaded
    assert file.read_bytes() == intact


def test_a_refusal_is_not_remembered() -> None:
    device, tracer = FakeDevice(), Tracer()
    device.refuse = True
    for _ in range(2):
        with pytest.raises(ShaderCompileError):
            programs.program(device, "config", tracer)
    assert not programs._building
    device.refuse = False
    assert programs.program(device, "config", tracer).device is device


def test_a_kernel_that_breaks_a_rule_is_not_cached(folder: Path) -> None:
    def broken() -> KernelIR:
        kernel = Tracer()()
        kernel.body.append(kernel.body[-1])  # a value that is defined twice, or a store out of order
        kernel.body[0].args = (kernel.values["out"],) * 9
        return kernel

    with pytest.raises(aule.KernelError):
        programs.program(FakeDevice(), "config", broken)
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_programs_live_as_long_as_their_device() -> None:
    """The last reference to a device takes its programs along."""
    device = FakeDevice()
    programs.program(device, "config", Tracer())
    gone = weakref.ref(device)
    del device
    gc.collect()
    assert gone() is None


# -- fork ------------------------------------------------------------------------------------------------------------


def in_child(work: Any) -> Any:
    """Run ``work`` in a forked child and return what it returned, or the text of what it raised."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            sender.send(work())
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}")
        os._exit(0)
    sender.close()
    if not receiver.poll(60):
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    answer = receiver.recv()
    os.waitpid(child, 0)
    return answer


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_numpy_works_in_a_forked_child() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 33, 16)).astype(np.float32)
    expected = aule.flash_attention(q, k, v, backend="numpy")
    got = in_child(lambda: aule.flash_attention(q, k, v, backend="numpy"))
    np.testing.assert_array_equal(got, expected)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_waits_for_no_lock_of_the_parent() -> None:
    """Another thread holds every lock while the process forks: the child must not wait for it."""
    device, tracer = FakeDevice(), Tracer()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with registry._lock, programs._lock:
            held.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    programs._building[(id(device), "config")] = busy = threading.Lock()
    busy.acquire()
    try:
        answer = in_child(
            lambda: (programs.program(device, "config", tracer).artifact.entry, sorted(registry.errors())[:0])
        )
    finally:
        release.set()
        holder.join()
        programs._building.clear()
    assert answer == ("clear", [])


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["vulkan", "opencl", "webgpu"])
def test_a_device_of_the_parent_works_or_refuses_in_a_forked_child(name: str) -> None:
    """Run in a process of its own: it must not have forked before, and its driver's threads end with it."""
    import subprocess

    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
import aule
from test_engine_programs import in_child
try:
    aule.Aule({name!r})
except aule.BackendUnavailableError:
    print("skip"); sys.exit()
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 33, 16)).astype(np.float32)
call = lambda: aule.flash_attention(q, k, v, backend={name!r})
expected = call()
got = in_child(call)
if isinstance(got, str):
    assert got.startswith(("DeviceLostError", "BackendUnavailableError")) and "fork" in got, got
else:
    np.testing.assert_array_equal(got, expected)
np.testing.assert_array_equal(call(), expected)
print("refused:" if isinstance(got, str) else "works", got if isinstance(got, str) else "")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skip"):
        pytest.skip(f"no {name} here")


# -- the registry ----------------------------------------------------------------------------------------------------


def test_an_error_of_a_probe_is_raised_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remembered error must not collect the frames, and so the arrays, of everybody who met it."""
    monkeypatch.setattr(registry, "_errors", {"cuda": BackendUnavailableError("cuda", "[cuda] expected, got; buy")})
    caught = []
    for _ in range(3):
        with pytest.raises(BackendUnavailableError) as info:
            registry.devices("cuda")
        caught.append(info.value)
    assert len({id(error) for error in caught}) == 3
    assert registry._errors["cuda"].__traceback__ is None
    assert caught[0].code == "AULE_ERROR_CUDA_INIT"


def test_a_driver_that_breaks_is_refused_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Device]:
        raise OSError("undefined symbol: clever")

    import aule.runtime.opencl

    monkeypatch.setattr(registry, "_found", {})
    monkeypatch.setattr(registry, "_errors", {})
    monkeypatch.setattr(aule.runtime.opencl, "devices", broken)
    with pytest.raises(BackendUnavailableError, match=r"\[opencl\] expected a working driver.*undefined symbol"):
        registry.devices("opencl")
    assert "opencl" not in aule.get_available_backends()
    assert aule.get_available_backends()[-1] == "numpy"
    assert "undefined symbol" in aule.get_backend_errors()["opencl"]


def test_the_key_is_the_configuration_and_the_target() -> None:
    device, tracer = FakeDevice(), Tracer()
    program = programs.program(device, "config", tracer)
    assert cache.load(cache.key("config", device.target)) == program.artifact


def test_a_closed_device_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever closes a device does not take it away from the others for good."""
    made: list[Device] = []

    def probe(self: registry.Backend) -> list[Device]:
        made.append(FakeDevice())
        return made[-1:]

    monkeypatch.setattr(registry.Backend, "devices", probe)
    monkeypatch.setattr(registry, "_found", {})
    monkeypatch.setattr(registry, "_errors", {})
    first = registry.find("vulkan")
    assert registry.find("vulkan") is first
    assert first is not None
    first._closed = True
    assert registry.find("vulkan") is made[1] is not first
