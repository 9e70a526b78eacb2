"""The Metal runtime against a stand-in for PyObjC's `Metal` module."""

from __future__ import annotations

import mmap
import os
import platform
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_metal import MIB, FakeNative, FakeQueue, install

from aule.artifact import Artifact, Param
from aule.errors import (
    AuleError,
    BackendUnavailableError,
    ClosedError,
    DeviceLostError,
    DeviceMismatchError,
    InvalidArgumentError,
    LaunchError,
    OutOfMemoryError,
    ShaderCompileError,
)
from aule.runtime import metal
from aule.runtime.metal import MetalDevice


@pytest.fixture
def natives(monkeypatch: pytest.MonkeyPatch) -> list[FakeNative]:
    return install(monkeypatch)


@pytest.fixture
def device(natives: list[FakeNative], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetalDevice]:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path / "cache"))
    device = metal.devices()[0]
    assert isinstance(device, MetalDevice)
    yield device
    device.close()


def kernel(params: str = "p i32 i32", entry: str = "increment", text: str = "", **more: Any) -> Artifact:
    made = tuple(
        Param(f"p{i}", "buffer", "i32", "readwrite") if word == "p" else Param(f"p{i}", "scalar", word)
        for i, word in enumerate(params.split())
    )
    return Artifact("msl", f"kernel void {entry}() {{}} {text}".encode(), entry, made, 128, **more)


def native_of(device: MetalDevice) -> FakeNative:
    native = device._native
    assert isinstance(native, FakeNative)
    return native


def queue_of(device: MetalDevice) -> FakeQueue:
    queue = native_of(device).queue
    assert queue is not None
    return queue


def test_not_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    with pytest.raises(BackendUnavailableError, match="expected macOS, got Linux") as caught:
        metal.devices()
    assert caught.value.code == "AULE_ERROR_METAL_INIT"


def test_no_pyobjc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setitem(sys.modules, "Metal", None)
    with pytest.raises(BackendUnavailableError, match="pip install pyobjc-framework-Metal"):
        metal.devices()


def test_no_device(natives: list[FakeNative]) -> None:
    natives.clear()
    with pytest.raises(BackendUnavailableError, match="virtual machine"):
        metal.devices()


def test_targets(natives: list[FakeNative]) -> None:
    apple, amd = (d.target for d in metal.devices())
    assert (apple.vendor, apple.name, apple.driver) == ("apple", "Apple M3 Max", "macOS 14.5")
    assert apple.subgroup_size == 32 and amd.subgroup_size == 16
    assert apple.unified_memory and not amd.unified_memory
    assert apple.bf16 and not amd.bf16 and apple.f16 and not apple.f64 and apple.int64
    assert (apple.max_threads, apple.max_shared_bytes, apple.max_buffers) == (1024, 32768, 30)
    assert apple.max_buffer_bytes == 128 * MIB
    assert "m8n8k8:f16:f32" in apple.matrix_units and amd.matrix_units == ()
    assert natives[1].queue is None, "a queue is opened by the first launch"
    hash(apple)


def test_old_macos_has_no_bfloat(natives: list[FakeNative], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("13.6.1", ("", "", ""), "arm64"))
    target = metal.devices()[0].target
    assert not target.bf16 and "m8n8k8:bf16:f32" not in target.matrix_units


def test_round_trip(device: MetalDevice) -> None:
    program = device.load(kernel())
    allocation = device.alloc(400)
    device.upload(allocation, np.arange(100, dtype=np.int32))
    device.upload(allocation, np.array([-1], np.int32), offset=4)
    device.launch(program, (2, 3, 4), [allocation, 50, 1000])
    assert queue_of(device).ran == [], "a launch does not wait"
    out = np.empty((5, 2), np.int32)
    device.download(allocation, out, offset=4)
    np.testing.assert_array_equal(out.ravel(), [999, *range(1002, 1011)])
    assert queue_of(device).ran[0].dispatched == ((2, 3, 4), (128, 1, 1))


def test_bindings(device: MetalDevice) -> None:
    program = device.load(kernel("i32 p f32 i64 p", entry="mixed"))
    first, second = device.alloc(16), device.alloc(16)
    device.launch(program, (1, 1, 1), [-5, first, 1.5, 1 << 40, second])
    device.synchronize()
    encoder = queue_of(device).ran[0].encoded
    assert encoder is not None
    assert encoder.buffers[0] is first.handle[0].native and encoder.buffers[1] is second.handle[0].native
    assert list(encoder.bytes) == [2]
    assert struct.unpack_from("<ifq", encoder.bytes[2]) == (-5, 1.5, 1 << 40) and len(encoder.bytes[2]) == 16


def test_kernel_without_scalars_has_no_block(device: MetalDevice) -> None:
    device.launch(device.load(kernel("p", entry="plain")), (1, 1, 1), [device.alloc(4)])
    device.synchronize()
    encoder = queue_of(device).ran[0].encoded
    assert encoder is not None and encoder.bytes == {}


def test_upload_waits_for_the_launch_that_reads(device: MetalDevice) -> None:
    program = device.load(kernel())
    source = device.alloc(4)
    device.upload(source, np.array([1], np.int32))
    device.launch(program, (1, 1, 1), [source, 1, 1])
    device.free(source)
    reused = device.alloc(4)
    assert reused.handle[0].native is queue_of(device).committed[0].encoded.buffers[0]  # type: ignore[union-attr]
    device.upload(reused, np.array([100], np.int32))
    out = np.empty(1, np.int32)
    device.download(reused, out)
    assert out[0] == 100, "the launch came before the upload"


def test_pool(device: MetalDevice) -> None:
    for _ in range(50):
        allocations = [device.alloc(n) for n in (0, 10, 5 * MIB, 5 * MIB + 1)]
        for allocation in allocations:
            device.free(allocation)
            device.free(allocation)
    assert native_of(device).created == 4
    with pytest.raises(ClosedError):
        device.upload(allocations[0], np.zeros(0))
    assert all(
        metal._size_class(n) >= n and metal._size_class(n) <= max(n * 1.26, mmap.PAGESIZE * (n // mmap.PAGESIZE + 1))
        for n in range(1, 40 * MIB, 77_777)
    )


def test_out_of_memory(device: MetalDevice) -> None:
    device.free(device.alloc(10 * MIB))
    native_of(device).limit = 5 * MIB
    with pytest.raises(OutOfMemoryError) as caught:
        device.alloc(20 * MIB)
    assert caught.value.requested_bytes == 20 * MIB
    with pytest.raises(OutOfMemoryError):
        device.alloc(200 * MIB)
    assert not any(device._cache.values())
    device.alloc(MIB)


def test_largest_buffer(device: MetalDevice) -> None:
    first = device.alloc(127 * MIB)
    device.free(first)
    device.alloc(126 * MIB)
    assert native_of(device).created == 1


def test_import_host(device: MetalDevice) -> None:
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    array = np.frombuffer(memory, np.int32)
    assert device.import_host(array[1:]) is None
    assert device.import_host(array[: mmap.PAGESIZE // 8]) is None
    imported = device.import_host(array)
    assert imported is not None and imported.nbytes == array.nbytes
    program = device.load(kernel())
    device.launch(program, (1, 1, 1), [imported, 3, 7])
    references = sys.getrefcount(array)
    device.free(imported)
    device.alloc(1)
    assert sys.getrefcount(array) == references, "still in use by the launch"
    device.synchronize()
    np.testing.assert_array_equal(array[:4], [7, 7, 7, 0])
    device.alloc(1)
    assert sys.getrefcount(array) < references


def test_refused_source(device: MetalDevice, tmp_path: Path) -> None:
    artifact = kernel(text="BAD")
    with pytest.raises(ShaderCompileError, match="unknown type name") as caught:
        device.load(artifact)
    assert caught.value.log.startswith("program_source:7")
    saved = Path(str(caught.value.source_path))
    assert saved.parent == tmp_path / "cache" / "refused" and saved.suffix == ".metal"
    assert saved.read_bytes() == artifact.code
    options = native_of(device).options
    assert options is not None and not options.fast


def test_other_refusals(device: MetalDevice) -> None:
    with pytest.raises(ShaderCompileError, match="no pipeline"):
        device.load(kernel(entry="hopeless"))
    with pytest.raises(ShaderCompileError, match="no function"):
        device.load(Artifact("msl", b"", "absent", (), 32))
    with pytest.raises(ShaderCompileError, match="room for 64"):
        device.load(kernel(entry="fat"))
    with pytest.raises(ShaderCompileError, match="64 lanes"):
        device.load(kernel(subgroup_size=64))
    with pytest.raises(InvalidArgumentError, match="ptx"):
        device.load(Artifact("ptx", b"", "kernel", (), 32))
    assert device.statistics(device.load(kernel(subgroup_size=32)))["static_shared_bytes"] == 512


@pytest.mark.parametrize("args", [[], [1, 1, 1], ["p", "p", 1], ["p", 1], ["p", 1, 1 << 31], ["p", 1.5, 1]])
def test_wrong_arguments(device: MetalDevice, args: list[Any]) -> None:
    allocation = device.alloc(4)
    with pytest.raises(InvalidArgumentError, match=r"p0: i32\*, p1: i32"):
        device.launch(device.load(kernel()), (1, 1, 1), [allocation if a == "p" else a for a in args])


def test_wrong_ranges_and_grids(device: MetalDevice) -> None:
    allocation = device.alloc(16)
    for array, offset in ((np.zeros(17, np.uint8), 0), (np.zeros(1, np.uint8), 16), (np.zeros(1, np.uint8), -1)):
        with pytest.raises(InvalidArgumentError, match="within the allocation's 16 bytes"):
            device.upload(allocation, array, offset)
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        device.download(allocation, np.zeros((2, 2), np.float32).T)
    read_only = np.zeros(1)
    read_only.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="writable"):
        device.download(allocation, read_only)
    with pytest.raises(LaunchError, match="grid"):
        device.launch(device.load(kernel("", entry="plain")), (0, 1, 1), [])
    with pytest.raises(InvalidArgumentError):
        device.alloc(-1)


def test_other_device(natives: list[FakeNative], device: MetalDevice) -> None:
    other = metal.devices()[1]
    theirs = other.alloc(4)
    actions: list[Callable[[], object]] = [
        lambda: device.upload(theirs, np.zeros(1, np.int32)),
        lambda: device.free(theirs),
        lambda: device.launch(device.load(kernel()), (1, 1, 1), [theirs, 1, 1]),
        lambda: device.launch(other.load(kernel()), (1, 1, 1), [device.alloc(4), 1, 1]),
    ]
    for action in actions:
        with pytest.raises(DeviceMismatchError):
            action()
    other.close()


@pytest.mark.parametrize(
    ("code", "expected"), [(3, LaunchError), (2, LaunchError), (8, OutOfMemoryError), (11, DeviceLostError)]
)
def test_errors_of_the_gpu(device: MetalDevice, code: int, expected: type[AuleError]) -> None:
    program = device.load(kernel("", entry="plain"))
    device.launch(program, (1, 1, 1), [])
    queue_of(device).fail_with = code
    device.launch(program, (1, 1, 1), [])
    with pytest.raises(expected, match="the GPU gave up"):
        device.synchronize()
    if expected is DeviceLostError:
        with pytest.raises(DeviceLostError):
            device.launch(program, (1, 1, 1), [])
    else:
        device.launch(program, (1, 1, 1), [])
        device.synchronize()


def test_time(device: MetalDevice) -> None:
    assert device.time_launch(device.load(kernel("", entry="plain")), (1, 1, 1), []) == 0.25


def test_close(device: MetalDevice) -> None:
    program = device.load(kernel())
    allocation = device.alloc(4)
    device.launch(program, (1, 1, 1), [allocation, 1, 1])
    device.close()
    assert len(queue_of(device).ran) == 1
    device.close()
    device.free(allocation)
    actions: list[Callable[[], object]] = [
        lambda: device.alloc(1),
        lambda: device.load(kernel()),
        lambda: device.launch(device.load(kernel("", entry="plain")), (1, 1, 1), []),
        device.synchronize,
    ]
    for action in actions:
        with pytest.raises(ClosedError):
            action()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_fork(device: MetalDevice) -> None:
    program = device.load(kernel("", entry="plain"))
    device.launch(program, (1, 1, 1), [])
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        report = []
        actions: list[Callable[[], object]] = [
            lambda: device.alloc(1),
            device.synchronize,
            lambda: device.launch(program, (1, 1, 1), []),
        ]
        for action in actions:
            try:
                action()
                report.append("nothing")
            except DeviceLostError as error:
                report.append("lost" if "before fork" in str(error) else "other")
        device.close()
        os.write(writer, " ".join(report).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1000).decode().split() == ["lost"] * 3
    os.close(reader)
    os.close(writer)
    device.synchronize()
