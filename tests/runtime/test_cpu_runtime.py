"""The CPU runtime, with kernels written by hand in LLVM IR."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from runtime_contract import INCREMENT_PARAMS, SCALE_PARAMS, RuntimeContract

from aule.api import info
from aule.artifact import Artifact, Param
from aule.errors import (
    BackendUnavailableError,
    ClosedError,
    InvalidArgumentError,
    LaunchError,
    OutOfMemoryError,
    ShaderCompileError,
)
from aule.runtime import _cpu_llvm, _cpu_openmp, _cpu_pool, cpu
from aule.runtime.base import Device

pytestmark = pytest.mark.device

try:
    cpu.devices()
except BackendUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

X86 = _cpu_llvm.machine("native").arch == "x86_64"


def kernel(entry: str, loads: str, group: str, params: tuple[Param, ...], declarations: str = "") -> Artifact:
    """A kernel whose workgroup ``%i`` (an i64) is done by the lines of ``group``."""
    code = f"""
{declarations}
define void @{entry}(ptr %args, ptr %next, i64 %total, i64 %chunk, i32 %nx, i32 %ny, i32 %nz) {{
entry:
{loads}
  br label %take
take:
  %from = atomicrmw add ptr %next, i64 %chunk monotonic
  %some = icmp slt i64 %from, %total
  br i1 %some, label %take.some, label %done
take.some:
  %sum = add i64 %from, %chunk
  %short = icmp slt i64 %sum, %total
  %to = select i1 %short, i64 %sum, i64 %total
  br label %group
group:
  %i = phi i64 [ %from, %take.some ], [ %i.next, %group.end ]
{group}
  br label %group.end
group.end:
  %i.next = add i64 %i, 1
  %again = icmp slt i64 %i.next, %to
  br i1 %again, label %group, label %take
done:
  ret void
}}
"""
    return Artifact("llvm", textwrap.dedent(code).encode(), entry, params, 1)


def cell(name: str, number: int, kind: str) -> str:
    return f"  %{name}.at = getelementptr i64, ptr %args, i64 {number}\n  %{name} = load {kind}, ptr %{name}.at"


def lanes(count: int, body: str) -> str:
    """``body`` for each element ``%e`` of the workgroup's ``count``."""
    return f"""
  %base = mul i64 %i, {count}
  br label %lane
lane:
  %l = phi i64 [ 0, %group ], [ %l.next, %lane.end ]
  %e = add i64 %base, %l
{body}
  br label %lane.end
lane.end:
  %l.next = add i64 %l, 1
  %l.again = icmp slt i64 %l.next, {count}
  br i1 %l.again, label %lane, label %lanes.done
lanes.done:"""


SCALE = kernel(
    "scale",
    "\n".join([cell("out", 0, "ptr"), cell("in", 1, "ptr"), cell("n", 2, "i32"), cell("factor", 3, "float")])
    + "\n  %n64 = sext i32 %n to i64",
    lanes(
        64,
        """
  %inside = icmp slt i64 %e, %n64
  br i1 %inside, label %store, label %lane.end
store:
  %from.at = getelementptr float, ptr %in, i64 %e
  %value = load float, ptr %from.at
  %scaled = fmul float %value, %factor
  %to.at = getelementptr float, ptr %out, i64 %e
  store float %scaled, ptr %to.at""",
    ),
    SCALE_PARAMS,
)
ADD_ONE = """
  %x.e = getelementptr i32, ptr %x, i64 %e
  %old = load i32, ptr %x.e
  %new = add i32 %old, 1
  store i32 %new, ptr %x.e"""
INCREMENT = kernel("increment", cell("x", 0, "ptr"), lanes(32, ADD_ONE), INCREMENT_PARAMS)
# Not atomic, one workgroup an element: a workgroup that is left out or done twice shows.
COUNT = kernel("count", cell("x", 0, "ptr"), "  %e = add i64 %i, 0\n" + ADD_ONE, INCREMENT_PARAMS)
SLOW_COUNT = kernel(
    "slow_count",
    cell("x", 0, "ptr"),
    """
  %e = add i64 %i, 0
  br label %spin
spin:
  %s = phi i64 [ 0, %group ], [ %s.next, %spin ]
  %s.next = add i64 %s, 1
  store volatile i64 %s, ptr %waste
  %spin.on = icmp slt i64 %s.next, 20000
  br i1 %spin.on, label %spin, label %spun
spun:
"""
    + ADD_ONE,
    INCREMENT_PARAMS,
)
SLOW_COUNT = replace(SLOW_COUNT, code=SLOW_COUNT.code.replace(b"entry:\n", b"entry:\n  %waste = alloca i64\n", 1))


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("AULE_CACHE_DIR", str(folder))
        patch.delenv("AULE_DISK_CACHE", raising=False)
        patch.delenv("AULE_CPU_FEATURES", raising=False)
        patch.delenv("AULE_NUM_THREADS", raising=False)
        yield folder


@pytest.fixture(scope="module")
def device(cache_folder: Path) -> Iterator[cpu.CpuDevice]:
    (opened,) = cpu.devices()
    assert isinstance(opened, cpu.CpuDevice)
    yield opened
    opened.close()


def counted(device: cpu.CpuDevice, artifact: Artifact, total: int, launches: int = 1) -> None:
    x = np.zeros(total, np.int32)
    memory = device.import_host(x)
    program = device.load(artifact)
    assert memory is not None
    for _ in range(launches):
        device.launch(program, (total, 1, 1), [memory])
    assert np.array_equal(x, np.full(total, launches, np.int32))


class TestContract(RuntimeContract):
    runtime = cpu
    backend = "cpu"
    package = "llvmlite"
    scale = SCALE
    increment = INCREMENT

    test_memory_is_pooled = None  # the process's own allocator keeps what was freed

    def test_refused_source(self, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
        code = self.increment.code.replace(b"add i32 %old, 1", b"add i32 %nonsense_name, 1")
        with pytest.raises(ShaderCompileError) as caught:
            device.load(replace(self.increment, code=code))
        assert "nonsense_name" in caught.value.log
        assert caught.value.source_path is not None
        path = Path(caught.value.source_path)
        assert path.is_relative_to(tmp_path) and path.suffix == ".ll" and path.read_bytes() == code
        device.load(self.increment)  # the device is none the worse for it

    test_refuses_to_work_after_fork = None  # it does work; see test_fork

    def test_missing_package_names_the_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llvmlite", None)
        monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
        _cpu_llvm._llvm.cache_clear()
        with pytest.raises(BackendUnavailableError, match=r'pip install "aule-attention\[cpu\]"') as caught:
            cpu.devices()
        assert caught.value.code == "AULE_ERROR_CPU_INIT"


# -- the device --------------------------------------------------------------------------------------------------------


def test_target(device: cpu.CpuDevice) -> None:
    target = device.target
    assert (target.backend, device.index) == ("cpu", 0)
    assert target.name and "LLVM" in target.driver and target.arch in ("x86_64", "aarch64")
    assert target.vendor in ("intel", "amd", "apple", "arm", "unknown")
    assert target.f16 and target.f64 and target.int64 and target.storage16 and target.storage8
    assert target.unified_memory and not target.software
    assert target.compute_units >= 1 and target.memory_bytes > 1 << 28
    assert list(target.extensions) == sorted(target.extensions)
    assert hash(target) == hash(cpu.devices()[0].target)


@pytest.mark.skipif(sys.platform != "linux" or not X86, reason="compares with Linux's list")
def test_the_features_are_those_that_the_system_names(device: cpu.CpuDevice) -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split())
    for ours, theirs in (("avx2", "avx2"), ("fma", "fma"), ("avx512f", "avx512f"), ("sse4.1", "sse4_1")):
        assert (ours in device.target.extensions) == (theirs in flags)


def test_unsupported_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu_llvm.platform, "machine", lambda: "riscv64")
    with pytest.raises(BackendUnavailableError, match="riscv64"):
        cpu.devices()


def test_importing_the_runtime_imports_no_llvmlite() -> None:
    script = "import sys, aule.runtime.cpu; assert not any(name.startswith('llvmlite') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_info_says_what_llvmlite_would_bring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info, "_installed", lambda module: module != "llvmlite")
    info.print_backend_info()
    out = capsys.readouterr().out
    assert 'pip install "aule-attention[cpu]"' in out and "compiled for this processor" in out and "units" in out


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_is_aligned(device: cpu.CpuDevice) -> None:
    for nbytes in (0, 1, 100, 1 << 20):
        allocation = device.alloc(nbytes)
        assert allocation.address and allocation.address % 64 == 0


def test_out_of_memory(device: cpu.CpuDevice) -> None:
    for nbytes in (1 << 60, 1 << 70):
        with pytest.raises(OutOfMemoryError) as caught:
            device.alloc(nbytes)
        assert caught.value.requested_bytes == nbytes


def test_host_memory_is_used_in_place(device: cpu.CpuDevice) -> None:
    source = np.arange(70, dtype=np.float32)
    source.flags.writeable = False
    result = np.zeros(70, np.float32)
    read, written = device.import_host(source), device.import_host(result)
    assert read is not None and written is not None and read.address == source.ctypes.data
    device.launch(device.load(SCALE), (2, 1, 1), [written, read, 70, 3.0])
    assert np.array_equal(result, source * 3)
    assert device.import_host(np.zeros((4, 4))[:, ::2]) is None


class Owner:
    """Something that a weak reference can look at."""


def test_wrapped_memory_keeps_its_owner_until_it_is_freed(device: cpu.CpuDevice) -> None:
    x = np.zeros(32, np.int32)
    owner = Owner()
    allocation = device.wrap(x.ctypes.data, x.nbytes, owner)
    alive = weakref.ref(owner)
    del owner
    device.launch(device.load(INCREMENT), (1, 1, 1), [allocation])
    assert alive() is not None and np.all(x == 1)
    device.free(allocation)
    assert alive() is None
    with pytest.raises(ClosedError):
        device.launch(device.load(INCREMENT), (1, 1, 1), [allocation])


def test_memory_freed_during_a_launch_lives_until_its_end(device: cpu.CpuDevice) -> None:
    group = """
  %begun.at = getelementptr i32, ptr %x, i64 1
  store atomic i32 1, ptr %begun.at seq_cst, align 4
  br label %wait
wait:
  %told = load atomic i32, ptr %x seq_cst, align 4
  %on = icmp ne i32 %told, 0
  br i1 %on, label %over, label %wait
over:
"""
    program = device.load(kernel("wait", cell("x", 0, "ptr"), group, INCREMENT_PARAMS))
    x = np.zeros(2, np.int32)
    owner = Owner()
    alive = weakref.ref(owner)
    allocation = device.wrap(x.ctypes.data, x.nbytes, owner)
    del owner
    thread = threading.Thread(target=device.launch, args=(program, (1, 1, 1), [allocation]))
    thread.start()
    while not x[1]:
        time.sleep(1e-3)
    device.free(allocation)
    assert alive() is not None
    x[0] = 1
    thread.join()
    del thread
    assert alive() is None


def test_close_lets_go_of_everything() -> None:
    device = cpu.devices()[0]
    assert isinstance(device, cpu.CpuDevice)
    allocation = device.alloc(100)
    prepared = device.prepare(device.load(COUNT), (1, 1, 1), ())
    device.close()
    assert device.closed and allocation.freed and allocation.handle is None
    for call in (
        lambda: prepared.launch([0]),
        lambda: device.import_host(np.zeros(1)),
        lambda: device.wrap(64, 1),
        lambda: device.prepare(prepared._program, (1, 1, 1), ()),
    ):
        with pytest.raises(ClosedError):
            call()


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_every_scalar_type_and_every_axis_of_the_grid(device: cpu.CpuDevice) -> None:
    kinds = {"i32": "i32", "u32": "i32", "f32": "float", "i64": "i64", "u64": "i64", "f64": "double"}
    loads, group = [cell("out", 2, "ptr")], []
    params = [Param(f"s{n}", "scalar", dtype) for n, dtype in enumerate(kinds)]
    params.insert(2, Param("out", "buffer", "u64", "write"))
    for n, dtype in enumerate(kinds):
        loads.append(cell(f"s{n}", n if n < 2 else n + 1, kinds[dtype]))
        group += [f"  %o{n} = getelementptr i64, ptr %out, i64 {n}", f"  store {kinds[dtype]} %s{n}, ptr %o{n}"]
    for n, axis in enumerate(("%nx", "%ny", "%nz"), 6):
        group += [f"  %o{n} = getelementptr i64, ptr %out, i64 {n}", f"  store i32 {axis}, ptr %o{n}"]
    program = device.load(kernel("every", "\n".join(loads), "\n".join(group), tuple(params)))
    out = np.zeros(9, np.uint64)
    memory = device.import_host(out)
    assert memory is not None
    device.launch(program, (2, 3, 5), [-5, 2**32 - 1, memory, 0.25, -(2**63), 2**64 - 1, -1e300])
    assert out[:1].view(np.int32)[0] == -5
    assert out[1:2].view(np.uint32)[0] == 2**32 - 1
    assert out[2:3].view(np.float32)[0] == 0.25
    assert out[3:4].view(np.int64)[0] == -(2**63)
    assert out[4] == 2**64 - 1
    assert out[5:6].view(np.float64)[0] == -1e300
    assert out[6:].tolist() == [2, 3, 5]


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (b"this is no IR", "expected top-level entity"),
        (b"define void @other(ptr %a) { ret void }", "does not define @count"),
        (b"define void @count(ptr %a) { ret void }", r"@count\(ptr, ptr, i64, i64, i32, i32, i32\)"),
        (b"declare void @count(ptr, ptr, i64, i64, i32, i32, i32)", "definition"),
        (
            b"declare void @nobody_has_this()\n"
            + COUNT.code.replace(b"entry:", b"entry:\n  call void @nobody_has_this()"),
            "undefined symbols: nobody_has_this",
        ),
    ],
)
def test_what_llvm_refuses(device: cpu.CpuDevice, code: bytes, word: str) -> None:
    if b"nobody" in code and sys.platform == "darwin":
        pytest.skip("symbols are looked up in ELF objects only")
    with pytest.raises(ShaderCompileError, match=word) as caught:
        device.load(replace(COUNT, code=code))
    assert caught.value.source_path is not None and Path(caught.value.source_path).read_bytes() == code


def test_a_kernel_may_call_the_mathematics_library(device: cpu.CpuDevice) -> None:
    group = """
  %at = getelementptr float, ptr %x, i64 %i
  %v = load float, ptr %at
  %r = call float @llvm.exp.f32(float %v)
  store float %r, ptr %at"""
    declarations = "declare float @llvm.exp.f32(float)"
    program = device.load(
        kernel("exponent", cell("x", 0, "ptr"), group, (Param("x", "buffer", "f32", "readwrite"),), declarations)
    )
    x = np.linspace(-3, 3, 50, dtype=np.float32)
    expected = np.exp(x)
    memory = device.import_host(x)
    assert memory is not None
    device.launch(program, (50, 1, 1), [memory])
    assert np.allclose(x, expected, rtol=1e-6)


WIDE = """
define void @wide(ptr %args, ptr %next, i64 %total, i64 %chunk, i32 %nx, i32 %ny, i32 %nz) {
  %x = load ptr, ptr %args
  %v = load <16 x float>, ptr %x, align 4
  %w = fmul <16 x float> %v, %v
  store <16 x float> %w, ptr %x, align 4
  ret void
}
"""


@pytest.mark.skipif(not X86, reason="x86 only")
@pytest.mark.parametrize("level", ["native", "avx2", "baseline"])
def test_lowered_features(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_CPU_FEATURES", level)
    try:
        device = cpu.devices()[0]
    except InvalidArgumentError as error:
        pytest.skip(str(error))
    extensions = set(device.target.extensions)
    assert {
        "native": True,
        "avx2": {"avx2", "fma", "f16c"} <= extensions and not any(e.startswith("avx512") for e in extensions),
        "baseline": not extensions,
    }[level]
    machine = _cpu_llvm.machine(level)
    llvm = _cpu_llvm._llvm()
    with llvm.create_context() as context, llvm.parse_assembly(WIDE, context) as module:
        text = _cpu_llvm._target_machine(machine).emit_assembly(module)
    widest = "zmm" if "avx512f" in extensions else "ymm" if "avx" in extensions else "xmm"
    assert widest in text
    assert not any(wider in text for wider in ("zmm", "ymm", "xmm") if wider > widest)
    x = np.arange(16, dtype=np.float32)
    memory = device.import_host(x)
    assert memory is not None
    wide = Artifact("llvm", WIDE.encode(), "wide", (Param("x", "buffer", "f32", "readwrite"),), 1)
    device.launch(device.load(wide), (1, 1, 1), [memory])
    assert np.array_equal(x, np.arange(16, dtype=np.float32) ** 2)


def test_features_outside_the_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_CPU_FEATURES", "sse9")
    with pytest.raises(InvalidArgumentError, match="native, avx2 or baseline"):
        cpu.devices()
    monkeypatch.setenv("AULE_CPU_FEATURES", "avx2")
    monkeypatch.setattr(_cpu_llvm.platform, "machine", lambda: "arm64")
    with pytest.raises(InvalidArgumentError, match="native, baseline on aarch64"):
        cpu.devices()


# -- object code on disk -----------------------------------------------------------------------------------------------


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    return tmp_path / "objects"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    seen: list[tuple[str, ...]] = []
    compile_ = _cpu_llvm._compile_safely

    def noting(machine: _cpu_llvm.Machine, text: str, entries: dict[str, tuple[str, ...]]) -> bytes:
        seen.append(tuple(entries))
        return compile_(machine, text, entries)

    monkeypatch.setattr(_cpu_llvm, "_compile_safely", noting)
    return seen


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_object_code_is_compiled_once(
    device: cpu.CpuDevice, objects: Path, compilations: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        counted(device, COUNT, 10)
    assert compilations == [("count",)] and len(files(objects)) == 1
    monkeypatch.setenv("AULE_CPU_FEATURES", "baseline")
    other = cpu.devices()[0]
    assert isinstance(other, cpu.CpuDevice)
    counted(other, COUNT, 10)
    assert len(compilations) == 2 and len(files(objects)) == 2
    monkeypatch.setenv("AULE_DISK_CACHE", "0")
    counted(device, COUNT, 10)
    assert len(compilations) == 3 and len(files(objects)) == 2


@pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
def test_a_damaged_object_is_rebuilt(
    device: cpu.CpuDevice,
    objects: Path,
    compilations: list[tuple[str, ...]],
    caplog: pytest.LogCaptureFixture,
    harm: str,
) -> None:
    counted(device, COUNT, 10)
    (file,) = files(objects)
    intact = file.read_bytes()
    flipped = bytearray(intact)
    flipped[len(intact) // 2] ^= 1
    file.write_bytes({"flip": bytes(flipped), "cut": intact[:-9], "empty": b""}[harm])
    with caplog.at_level("WARNING", "aule"):
        counted(device, COUNT, 10)
    assert "damaged" in caplog.text and len(compilations) == 2
    assert file.read_bytes() == intact


def test_swapped_objects_are_rebuilt(
    device: cpu.CpuDevice, objects: Path, compilations: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """Each is intact; only its name says what it computes."""
    for artifact in (COUNT, SLOW_COUNT):
        counted(device, artifact, 10)
    first, second = files(objects)
    swapped = second.read_bytes(), first.read_bytes()
    for file, data in zip((first, second), swapped, strict=True):
        file.write_bytes(data)
    with caplog.at_level("WARNING", "aule"):
        for artifact in (COUNT, SLOW_COUNT):
            counted(device, artifact, 10)
    assert caplog.text.count("damaged") == 2 and len(compilations) == 4
    assert (second.read_bytes(), first.read_bytes()) == swapped


def test_objects_that_others_can_write_are_rebuilt(
    device: cpu.CpuDevice, objects: Path, compilations: list[tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    if os.name != "posix":
        pytest.skip("needs modes of POSIX")
    counted(device, COUNT, 10)
    (file,) = files(objects)
    file.chmod(0o666)
    with caplog.at_level("WARNING", "aule"):
        counted(device, COUNT, 10)
        counted(device, COUNT, 10)
    assert caplog.text.count("can be written by others") == 1 and len(compilations) == 2


def test_a_cache_that_cannot_be_written(device: cpu.CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("AULE_CACHE_DIR", str(blocked))
    counted(device, COUNT, 10)
    with pytest.raises(ShaderCompileError) as caught:
        device.load(replace(COUNT, code=b"nonsense"))
    assert caught.value.source_path is None


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_every_workgroup_is_done_once(device: cpu.CpuDevice, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_NUM_THREADS", str(threads))
    for total in (1, 2, 3, 7, 1000):
        counted(device, COUNT, total, 50)
    counted(device, COUNT, 300_000)
    counted(device, SLOW_COUNT, 2000)


MEET = kernel(
    "meet",
    cell("x", 0, "ptr"),
    """
  %mine = atomicrmw add ptr %x, i32 1 seq_cst
  br label %wait
wait:
  %begun = load atomic i32, ptr %x seq_cst, align 4
  %all = icmp sge i32 %begun, 3
  br i1 %all, label %over, label %wait
over:
""",
    INCREMENT_PARAMS,
)
"""Each of three workgroups waits until all have begun: on fewer threads they would wait for ever."""


def meet(device: cpu.CpuDevice) -> None:
    program = device.load(MEET)
    for _ in range(20):
        x = np.zeros(1, np.int32)
        memory = device.import_host(x)
        assert memory is not None
        device.launch(program, (3, 1, 1), [memory])
        assert x[0] == 3


def test_threads_take_part(device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_NUM_THREADS", "3")
    meet(device)


def test_launches_of_one_workgroup_stay_in_the_thread(device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_NUM_THREADS", "4")
    asked: list[int] = []
    ready = _cpu_pool.Pool.ready

    def noting(self: _cpu_pool.Pool, helpers: int) -> int:
        asked.append(helpers)
        return ready(self, helpers)

    monkeypatch.setattr(_cpu_pool.Pool, "ready", noting)
    program = device.load(COUNT)
    x = np.zeros(10, np.int32)
    memory = device.import_host(x)
    assert memory is not None
    device.launch(program, (1, 1, 1), [memory])
    assert asked == []
    device.launch(program, (2, 1, 1), [memory])
    device.launch(program, (10, 1, 1), [memory])
    assert asked == [1, 3]
    assert x.tolist() == [3, 2] + [1] * 8


def test_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert _cpu_pool.thread_count() == here
    monkeypatch.setenv("OMP_NUM_THREADS", "5,2")
    assert _cpu_pool.thread_count() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert _cpu_pool.thread_count() == here
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: 7))
    assert _cpu_pool.thread_count() == 7
    assert cpu.devices()[0].target.compute_units == 7
    monkeypatch.setenv("AULE_NUM_THREADS", "3")
    assert _cpu_pool.thread_count() == 3
    monkeypatch.setenv("AULE_NUM_THREADS", "1000000")
    assert _cpu_pool.thread_count() == 1024
    for wrong in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv("AULE_NUM_THREADS", wrong)
        with pytest.raises(InvalidArgumentError, match="AULE_NUM_THREADS"):
            _cpu_pool.thread_count()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_says_how_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert _cpu_pool.thread_count() == 1
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def openmp(device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[_cpu_openmp.Team]:
    """Three threads of PyTorch's, and none of ours."""
    torch = pytest.importorskip("torch")
    team = _cpu_openmp.team(device._machine)
    if team is None:
        pytest.skip("PyTorch is linked to no OpenMP library with GNU's entry point")

    def refuse(self: _cpu_pool.Pool, helpers: int) -> int:
        raise AssertionError(f"{helpers} threads of our own")

    monkeypatch.delenv("AULE_NUM_THREADS", raising=False)
    monkeypatch.setattr(_cpu_pool.Pool, "ready", refuse)
    run = device._run
    monkeypatch.setattr(device, "_run", lambda *arguments: run(*arguments[:4], on_pytorch=True))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield team
    torch.set_num_threads(before)


def test_threads_of_pytorch_take_part(device: cpu.CpuDevice, openmp: _cpu_openmp.Team) -> None:
    meet(device)
    for total in (2, 3, 7, 1000):
        counted(device, COUNT, total, 50)
    counted(device, SLOW_COUNT, 2000)


def test_a_team_of_pytorch_serves_one_launch_at_a_time(device: cpu.CpuDevice, openmp: _cpu_openmp.Team) -> None:
    many_launches(device)


def test_threads_of_pytorch_serve_launches_that_are_long_and_quicker_there() -> None:
    def served(ours: float, theirs: float, team: _cpu_openmp.TeamChoice, count: int = 64) -> int:
        chosen = 0
        for _ in range(count):
            mine = team.choose()
            team.note(mine, theirs if mine else ours)
            chosen += mine
        return chosen

    assert served(1e-5, 1e-5, _cpu_openmp.TeamChoice()) == 0
    team = _cpu_openmp.TeamChoice()
    assert served(4e-3, 2e-3, team) >= 58
    assert served(4e-3, 9e-3, team) <= 8  # others use the cores now
    assert served(4e-3, 9e-3, team, 256) <= 4  # which is looked at seldom
    assert served(4e-3, 2e-3, team, 192) >= 96
    assert served(1e-5, 1e-5, team) <= 1
    team = _cpu_openmp.TeamChoice()
    served(4e-3, 40e-3, team, 2)  # a moment's bad luck
    assert served(4e-3, 2e-3, team) >= 56
    served(4e-3, 40e-3, team, 1)  # and another one
    assert served(4e-3, 2e-3, team) >= 58


def test_launches_of_a_sequence_have_the_same_threads(device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one goes where the long one before it goes; by itself it would be ours."""
    long, short = (device.prepare(device.load(COUNT), (count, 1, 1), ()) for count in (1000, 2))
    served: list[tuple[int, bool]] = []

    def run(kernel: int, cells: bytes, grid: tuple[int, ...], total: int, on_pytorch: bool) -> None:
        served.append((total, on_pytorch))
        time.sleep(1e-3 if total == 1000 else 0)

    monkeypatch.setattr(device, "_run", run)
    sequence = device.prepare_sequence([long, short])
    for _ in range(2):
        sequence.launch([[0], [0]])
        short.launch([0])
    assert served == [(1000, False), (2, False), (2, False), (1000, True), (2, True), (2, False)]
    with pytest.raises(ValueError, match="zip"):
        sequence.launch([[0]])


def test_stacks_that_were_chosen_for_openmp_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_STACKSIZE", "64k")
    assert _cpu_openmp._parallel_entry() == 0


def test_threads_that_cannot_be_started(
    device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setenv("AULE_NUM_THREADS", "4")
    _cpu_pool.pool(device._machine)
    assert _cpu_pool._code is not None
    monkeypatch.setattr(_cpu_pool, "_pool", _cpu_pool.Pool(_cpu_pool._code.addresses))
    with monkeypatch.context() as patch, caplog.at_level("WARNING", "aule"):
        patch.setattr(threading.Thread, "start", refuse)
        counted(device, COUNT, 1000, 3)
    assert caplog.text.count("no more than 1 threads") == 1


def test_launches_of_many_python_threads(device: cpu.CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_NUM_THREADS", "3")
    many_launches(device)


def many_launches(device: cpu.CpuDevice) -> None:
    """Launches of several threads of Python at the same time."""
    failures: list[BaseException] = []
    program = device.load(COUNT)
    shared = device.prepare(program, (500, 1, 1), ())

    def work() -> None:
        try:
            x = np.zeros(500, np.int32)
            for turn in range(400):
                shared.launch([x.ctypes.data])
                assert np.all(x == turn + 1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_prepared_launches(device: cpu.CpuDevice) -> None:
    program = device.load(SCALE)
    x = np.arange(128, dtype=np.float32)
    out = np.zeros_like(x)
    prepared = device.prepare(program, (2, 1, 1), (128, 2.0))
    prepared.launch([out.ctypes.data, x.ctypes.data])
    assert np.array_equal(out, x * 2)
    for pointers in ([1], [1, 2, 3], [1.5, 2], [-1, 2]):
        with pytest.raises(InvalidArgumentError, match="expected arguments"):
            prepared.launch(pointers)
    for scalars in ((), (1,), (2**40, 1.0), (1, None)):
        with pytest.raises(InvalidArgumentError, match="expected arguments"):
            device.prepare(program, (1, 1, 1), scalars)
    with pytest.raises(LaunchError, match="grid"):
        device.prepare(program, (1, 1, -1), (1, 1.0))


FORK = """
import faulthandler, os, signal, sys, threading
faulthandler.register(signal.SIGALRM, chain=True)
import numpy as np
from aule.artifact import Artifact, Param
from aule.runtime import cpu

os.environ["AULE_NUM_THREADS"] = "3"
code = open(sys.argv[1], "rb").read()
count = Artifact("llvm", code, "count", (Param("x", "buffer", "i32", "readwrite"),), 1)
device = cpu.devices()[0]
program = device.load(count)
x = np.zeros(20000, np.int32)
memory = device.import_host(x)
device.launch(program, (20000, 1, 1), [memory])

stop = False
def busy():
    y = np.zeros(1000, np.int32)
    own = device.import_host(y)
    n = 0
    while not stop:
        device.load(Artifact("llvm", code + b"; %d %d" % (os.getpid(), n), "count", count.params, 1))
        for _ in range(20):
            device.launch(program, (1000, 1, 1), [own])
        n += 1
thread = threading.Thread(target=busy, daemon=True)
thread.start()

def in_child():
    for _ in range(50):
        device.launch(program, (20000, 1, 1), [memory])
    assert np.all(x == 51)
    fresh = device.load(Artifact("llvm", code + b"; %d" % os.getpid(), "count", count.params, 1))
    device.launch(fresh, (20000, 1, 1), [memory])
    assert np.all(x == 52)
    other = device.alloc(16)
    device.upload(other, np.zeros(4, np.int32))
    cpu.devices()[0].close()
    device.close()

for _ in range(10):
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that hangs says where, and ends
        status = 1
        try:
            in_child()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
device.launch(program, (20000, 1, 1), [memory])
assert np.all(x == 2)
stop = True
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("threads", ["ours", "PyTorch's"])
def test_fork(tmp_path: Path, threads: str) -> None:
    source = tmp_path / "count.ll"
    source.write_bytes(COUNT.code)
    code = FORK
    if threads == "PyTorch's":
        pytest.importorskip("torch")
        code = code.replace('os.environ["AULE_NUM_THREADS"] = "3"', "import torch\ntorch.set_num_threads(3)")
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(source)], check=True, timeout=120)


EXIT = """
import os, sys, threading
import numpy as np
from aule.artifact import Artifact, Param
from aule.runtime import cpu

os.environ["AULE_NUM_THREADS"] = "8"
count = Artifact("llvm", open(sys.argv[1], "rb").read(), "count", (Param("x", "buffer", "i32", "readwrite"),), 1)
device = cpu.devices()[0]
program = device.load(count)
x = np.zeros(1000, np.int32)
prepared = device.prepare(program, (1000, 1, 1), ())
def for_ever():
    while True:
        prepared.launch([x.ctypes.data])
if sys.argv[2] == "busy":
    threading.Thread(target=for_ever, daemon=True).start()
for _ in range(100):
    prepared.launch([x.ctypes.data])
"""


@pytest.mark.parametrize("how", ["idle", "busy"])
def test_the_interpreter_ends(tmp_path: Path, how: str) -> None:
    source = tmp_path / "count.ll"
    source.write_bytes(COUNT.code)
    for _ in range(5):
        subprocess.run([sys.executable, "-c", EXIT, str(source), how], check=True, timeout=60)
