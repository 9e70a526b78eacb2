"""The OpenCL runtime, on whatever OpenCL device is first: PoCL where there is no GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aule.artifact import Artifact, Param
from aule.errors import (
    BackendUnavailableError,
    ClosedError,
    DeviceLostError,
    InvalidArgumentError,
    LaunchError,
    OutOfMemoryError,
    ShaderCompileError,
)
from aule.runtime import opencl
from aule.runtime.base import Allocation, Device

try:
    opencl.devices()
except BackendUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

SCALE = Artifact(
    language="opencl",
    code=b"""
__kernel __attribute__((reqd_work_group_size(64, 1, 1)))
void scale(__global float *out, __global const float *in, int n, float factor) {
    size_t i = get_global_id(0);
    if (i < (size_t)n) out[i] = in[i] * factor;
}
""",
    entry="scale",
    params=(
        Param("out", "buffer", "f32", "write"),
        Param("in", "buffer", "f32"),
        Param("n", "scalar", "i32"),
        Param("factor", "scalar", "f32"),
    ),
    workgroup=64,
)
INCREMENT = Artifact(
    language="opencl",
    code=b"""
__kernel __attribute__((reqd_work_group_size(32, 1, 1))) void increment(__global int *x) { x[get_global_id(0)] += 1; }
""",
    entry="increment",
    params=(Param("x", "buffer", "i32", "readwrite"),),
    workgroup=32,
)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    opened = opencl.devices()[0]
    yield opened
    opened.close()


def fetch(device: Device, allocation: Allocation, like: npt.NDArray[Any], offset: int = 0) -> npt.NDArray[Any]:
    out = np.empty_like(like)
    device.download(allocation, out, offset)
    return out


def test_devices_and_targets() -> None:
    found = opencl.devices()
    assert [d.index for d in found] == list(range(len(found)))
    software = [d.target.software for d in found]
    assert software == sorted(software), "CPU devices come last"
    for target in (d.target for d in found):
        assert target.backend == "opencl"
        assert target.name and target.driver
        assert target.max_threads >= 64 and target.max_shared_bytes >= 16384
        assert target.max_buffers >= 8 and target.memory_bytes >= target.max_buffer_bytes > 0
        assert target.language_version in (110, 120, 200, 210, 220, 300)
        assert target.f16 == ("cl_khr_fp16" in target.extensions)
        assert target.f64 == ("cl_khr_fp64" in target.extensions)
        assert target.int64 and target.storage16 and target.storage8
        assert target.subgroup_size == 0 or target.subgroup_size & (target.subgroup_size - 1) == 0
        assert hash(target) == hash(target)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 255, 256, 257, 4095, 4097, 1_000_003])
def test_round_trip(device: Device, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    allocation = device.alloc(nbytes)
    assert allocation.nbytes == nbytes
    device.upload(allocation, data)
    assert np.array_equal(fetch(device, allocation, data), data)
    device.free(allocation)


def test_offsets_leave_neighbours_alone(device: Device) -> None:
    rng = np.random.default_rng(1)
    model = rng.integers(0, 256, 103, dtype=np.uint8)
    allocation = device.alloc(model.nbytes)
    device.upload(allocation, model)
    for _ in range(60):
        start, stop = sorted(rng.integers(0, 104, 2))
        piece = rng.integers(0, 256, stop - start, dtype=np.uint8)
        model[start:stop] = piece
        device.upload(allocation, piece, int(start))
        start, stop = sorted(rng.integers(0, 104, 2))
        assert np.array_equal(fetch(device, allocation, model[start:stop], int(start)), model[start:stop])
    assert np.array_equal(fetch(device, allocation, model), model)
    device.free(allocation)


@pytest.mark.parametrize("dtype", ["f2", "f8", "i8", "bool"])
def test_other_element_types_and_zero_dimensions(device: Device, dtype: str) -> None:
    allocation = device.alloc(64)
    for shape in [(), (3, 1), (2, 0)]:
        data = np.ones(shape, dtype)
        device.upload(allocation, data)
        assert np.array_equal(fetch(device, allocation, data), data)
    device.free(allocation)


def test_copies_are_checked(device: Device) -> None:
    allocation = device.alloc(16)
    with pytest.raises(InvalidArgumentError, match="within the allocation"):
        device.upload(allocation, np.zeros(17, np.uint8))
    with pytest.raises(InvalidArgumentError, match="within the allocation"):
        device.download(allocation, np.zeros(8, np.uint8), 9)
    with pytest.raises(InvalidArgumentError, match="C-contiguous"):
        device.upload(allocation, np.zeros((4, 4), np.uint8)[:, ::2])
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    device.upload(allocation, frozen)
    with pytest.raises(InvalidArgumentError, match="writable"):
        device.download(allocation, frozen)
    with pytest.raises(InvalidArgumentError):
        device.alloc(-1)
    device.free(allocation)


def test_launch_with_buffers_and_scalars(device: Device) -> None:
    program = device.load(SCALE)
    x = np.arange(1000, dtype=np.float32)
    source, result = device.alloc(x.nbytes), device.alloc(x.nbytes)
    device.upload(source, x)
    device.upload(result, np.full_like(x, 7))
    device.launch(program, (16, 1, 1), [result, source, 990, 0.5])
    assert np.array_equal(fetch(device, result, x), np.concatenate([x[:990] * 0.5, np.full(10, 7, np.float32)]))
    device.launch(program, (16, 1, 1), [result, source, 1000, float("-inf")])
    out = fetch(device, result, x)
    assert np.isnan(out[0]) and np.all(np.isneginf(out[1:]))
    device.free(source)
    device.free(result)


def test_every_scalar_type_and_every_axis_of_the_grid(device: Device) -> None:
    if not device.target.f64:
        pytest.skip("the device has no fp64")
    code = b"""
    #pragma OPENCL EXTENSION cl_khr_fp64 : enable
    __kernel void every(int a, __global double *out, uint b, float c, long d, ulong e, double f) {
        size_t g = get_group_id(0) + get_num_groups(0) * (get_group_id(1) + get_num_groups(1) * get_group_id(2));
        size_t i = g * get_local_size(0) + get_local_id(0);
        out[i] = i == 0 ? a : i == 1 ? b : i == 2 ? c : i == 3 ? (double)d : i == 4 ? (double)e : i == 5 ? f : i;
    }
    """
    types = ["i32", None, "u32", "f32", "i64", "u64", "f64"]
    params = tuple(
        Param(f"p{i}", "scalar", t) if t else Param("out", "buffer", "f64", "write") for i, t in enumerate(types)
    )
    program = device.load(Artifact("opencl", code, "every", params, 8))
    allocation = device.alloc(8 * 8 * 30)
    device.launch(program, (2, 3, 5), [-5, allocation, 2**32 - 1, 0.25, -(2**62), 2**63, 1e300])
    out = fetch(device, allocation, np.empty(240))
    assert out[:6].tolist() == [-5.0, 2.0**32 - 1, 0.25, -(2.0**62), 2.0**63, 1e300]
    assert np.array_equal(out[6:], np.arange(6.0, 240.0))
    device.free(allocation)


def test_work_is_ordered(device: Device) -> None:
    program = device.load(INCREMENT)
    x = np.zeros(3200, np.int32)
    allocation = device.alloc(x.nbytes)
    device.upload(allocation, x)
    for _ in range(100):
        device.launch(program, (100, 1, 1), [allocation])
    device.upload(allocation, np.full(100, -1, np.int32), 400)
    device.launch(program, (100, 1, 1), [allocation])
    expected = np.full(3200, 101, np.int32)
    expected[100:200] = 0
    assert np.array_equal(fetch(device, allocation, x), expected)
    device.free(allocation)


def test_freed_memory_is_reused_in_order(device: Device) -> None:
    program = device.load(SCALE)
    x = np.random.default_rng(0).random(1 << 18, np.float32)
    result = device.alloc(x.nbytes)
    for factor in range(5):
        source = device.alloc(x.nbytes)
        device.upload(source, x)
        device.launch(program, (x.size // 64, 1, 1), [result, source, x.size, factor])
        device.free(source)
        other = device.alloc(x.nbytes)
        device.upload(other, np.zeros_like(x))
        assert np.array_equal(fetch(device, result, x), x * np.float32(factor))
        device.free(other)
    device.free(result)


def test_memory_is_pooled() -> None:
    device = opencl.devices()[0]
    first = device.alloc(5000)
    block = first.handle
    device.free(first)
    again = device.alloc(4999)
    assert again.handle is block
    device.close()


def test_threads_share_a_device(device: Device) -> None:
    program = device.load(SCALE)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for _ in range(30):
                x = rng.random(int(rng.integers(1, 5000)), np.float32)
                source, result = device.alloc(x.nbytes), device.alloc(x.nbytes)
                factor = np.float32(rng.random())
                device.upload(source, x)
                device.launch(program, (-(-x.size // 64), 1, 1), [result, source, x.size, float(factor)])
                assert np.array_equal(fetch(device, result, x), x * factor)
                device.free(source)
                device.free(result)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_out_of_memory_leaves_the_device_usable() -> None:
    device = opencl.devices()[0]
    target = device.target
    with pytest.raises(OutOfMemoryError) as caught:
        device.alloc(target.max_buffer_bytes + 1)
    assert caught.value.requested_bytes == target.max_buffer_bytes + 1
    counts = []
    # Twice, with two sizes: the second round can only succeed when the pool of the first is given up.
    for size in (target.max_buffer_bytes, target.max_buffer_bytes * 3 // 4):
        held = []
        with pytest.raises(OutOfMemoryError):
            while True:
                held.append(device.alloc(size))
                assert len(held) * size <= target.memory_bytes
        counts.append(len(held))
        for allocation in held:
            device.free(allocation)
    assert 1 <= counts[0] <= counts[1]
    program = device.load(INCREMENT)
    allocation = device.alloc(128)
    device.upload(allocation, np.zeros(32, np.int32))
    device.launch(program, (1, 1, 1), [allocation])
    assert np.array_equal(fetch(device, allocation, np.empty(32, np.int32)), np.ones(32, np.int32))
    device.close()


def driver_error(name: str) -> Exception:
    """What pyopencl raises for a status code."""
    cl: Any = importlib.import_module("pyopencl")
    kind = cl.MemoryError if name == "MEM_OBJECT_ALLOCATION_FAILURE" else cl.RuntimeError
    record = cl._cl._ErrorRecord(msg="forged", code=getattr(cl.status_code, name), routine="clForged")
    error: Exception = kind(record)
    return error


def test_memory_bound_late_is_retried_without_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    device = opencl.devices()[0]
    cl: Any = importlib.import_module("pyopencl")
    monkeypatch.setattr(device, "_is_cpu", False)  # GPUs bind memory at first use; a large buffer is used at once
    data = np.arange(1 << 19, dtype=np.int32)
    kept, spare = device.alloc(data.nbytes), device.alloc(100)
    device.free(spare)
    real, failures = cl.enqueue_copy, [driver_error("MEM_OBJECT_ALLOCATION_FAILURE")]

    def copy(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(cl, "enqueue_copy", copy)
    device.upload(kept, data)
    assert np.array_equal(fetch(device, kept, data), data)
    failures.append(driver_error("MEM_OBJECT_ALLOCATION_FAILURE"))  # the pool is empty now: nothing to retry with
    with pytest.raises(OutOfMemoryError, match="upload"):
        device.upload(kept, data)
    failures.append(driver_error("INVALID_OPERATION"))
    with pytest.raises(LaunchError, match="upload"):
        device.upload(kept, data)
    assert np.array_equal(fetch(device, kept, data), data)
    device.close()


def test_a_driver_that_stops_answering_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    device = opencl.devices()[0]
    cl: Any = importlib.import_module("pyopencl")
    allocation = device.alloc(16)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise driver_error("OUT_OF_RESOURCES")

    with monkeypatch.context() as patch:
        patch.setattr(cl, "enqueue_copy", fail)
        with pytest.raises(DeviceLostError):
            device.upload(allocation, np.zeros(16, np.uint8))
    with pytest.raises(DeviceLostError):
        device.alloc(16)
    device.close()


def test_refused_source(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    code = b"__kernel void broken(__global float *x) { x[0] = nonsense_name; }"
    broken = Artifact("opencl", code, "broken", (Param("x", "buffer", "f32", "write"),), 1)
    with pytest.raises(ShaderCompileError) as caught:
        device.load(broken)
    assert "nonsense_name" in caught.value.log
    assert caught.value.source_path is not None
    path = Path(caught.value.source_path)
    assert path.is_relative_to(tmp_path) and path.read_bytes() == code
    device.load(INCREMENT)  # the device is none the worse for it


def test_kernels_that_do_not_fit_are_refused(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    code = INCREMENT.code
    with pytest.raises(ShaderCompileError):
        device.load(Artifact("opencl", code, "no_such_entry", INCREMENT.params, 32))
    with pytest.raises(ShaderCompileError, match="arguments"):
        device.load(Artifact("opencl", code, "increment", INCREMENT.params * 2, 32))
    with pytest.raises(ShaderCompileError, match="expected a kernel in opencl"):
        device.load(Artifact("wgsl", code, "increment", INCREMENT.params, 32))
    huge = b"__kernel void huge(__global int *x) { x[0] = 1; }"
    with pytest.raises(ShaderCompileError, match="threads"):
        device.load(Artifact("opencl", huge, "huge", INCREMENT.params, 1 << 20))


def test_launches_are_checked(device: Device) -> None:
    program = device.load(SCALE)
    allocation = device.alloc(256)
    with pytest.raises(LaunchError, match="expected 4 arguments"):
        device.launch(program, (1, 1, 1), [allocation])
    with pytest.raises(LaunchError, match="'in'"):
        device.launch(program, (1, 1, 1), [allocation, 3, 4, 1.0])
    with pytest.raises(LaunchError, match="'n'"):
        device.launch(program, (1, 1, 1), [allocation, allocation, allocation, 1.0])
    with pytest.raises(LaunchError, match="does not fit"):
        device.launch(program, (1, 1, 1), [allocation, allocation, 2**40, 1.0])
    with pytest.raises(LaunchError, match="grid"):
        device.launch(program, (1, 1, -1), [allocation, allocation, 1, 1.0])
    with pytest.raises(LaunchError, match="stream"):
        device.launch(program, (1, 1, 1), [allocation, allocation, 1, 1.0], stream=1)
    device.launch(program, (0, 1, 1), [allocation, allocation, 1, 1.0])  # nothing to do is no error
    other = opencl.devices()[0]
    with pytest.raises(LaunchError, match="another device"):
        other.launch(program, (1, 1, 1), [allocation, allocation, 1, 1.0])
    foreign = other.alloc(256)
    with pytest.raises(LaunchError, match="another device"):
        device.launch(program, (1, 1, 1), [allocation, foreign, 1, 1.0])
    other.close()
    device.free(allocation)


def test_time_launch(device: Device) -> None:
    program = device.load(INCREMENT)
    x = np.zeros(32 * 256, np.int32)
    allocation = device.alloc(x.nbytes)
    device.upload(allocation, x)
    device.launch(program, (256, 1, 1), [allocation])
    seconds = device.time_launch(program, (256, 1, 1), [allocation])
    assert 0 < seconds < 5
    assert np.array_equal(fetch(device, allocation, x), x + 2)
    device.free(allocation)


def test_import_host(device: Device) -> None:
    raw = np.zeros(4096 + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    array = raw[start : start + 4096].view(np.float32)
    allocation = device.import_host(array)
    if not device.target.software:
        assert allocation is None, "only a CPU device works in the host's memory itself"
        return
    assert allocation is not None and allocation.nbytes == 4096
    assert device.import_host(raw[start + 1 : start + 101]) is None, "misaligned"
    assert device.import_host(raw[start : start + 64 : 2]) is None, "strided"
    program = device.load(SCALE)
    result = device.alloc(4096)
    for value in (1.0, 2.0):
        array[:] = value
        device.launch(program, (16, 1, 1), [result, allocation, 1024, 3.0])
        assert np.all(fetch(device, result, array) == 3 * value)
    device.launch(program, (16, 1, 1), [allocation, result, 1024, 2.0])
    device.synchronize()
    assert np.all(array == 12)
    device.launch(program, (16, 1, 1), [allocation, result, 1024, 4.0])
    device.free(allocation)
    device.synchronize()
    assert np.all(array == 24)
    device.free(result)


def test_free_twice_and_use_after_free(device: Device) -> None:
    program = device.load(INCREMENT)
    allocation = device.alloc(128)
    device.free(allocation)
    device.free(allocation)
    assert allocation.freed
    one, two = device.alloc(128), device.alloc(128)
    assert one.handle is not two.handle, "a double free must not hand the block out twice"
    with pytest.raises(ClosedError):
        device.upload(allocation, np.zeros(4, np.uint8))
    with pytest.raises(ClosedError):
        device.download(allocation, np.zeros(4, np.uint8))
    with pytest.raises(ClosedError):
        device.launch(program, (1, 1, 1), [allocation])
    device.free(one)
    device.free(two)


def test_use_after_close() -> None:
    device = opencl.devices()[0]
    program = device.load(INCREMENT)
    allocation = device.alloc(128)
    device.launch(program, (1, 1, 1), [allocation])
    device.close()
    device.close()
    device.free(allocation)
    data = np.zeros(32, np.int32)
    for call in (
        lambda: device.alloc(4),
        lambda: device.upload(allocation, data),
        lambda: device.download(allocation, data),
        lambda: device.load(INCREMENT),
        lambda: device.launch(program, (1, 1, 1), [allocation]),
        lambda: device.time_launch(program, (1, 1, 1), [allocation]),
        lambda: device.import_host(data),
        device.synchronize,
    ):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_refuses_to_work_after_fork() -> None:
    script = """
    import os
    import numpy as np
    from aule.errors import BackendUnavailableError, DeviceLostError
    from aule.runtime import opencl

    device = opencl.devices()[0]
    allocation = device.alloc(16)
    device.upload(allocation, np.zeros(4, np.int32))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in (
                lambda: device.alloc(4),
                lambda: device.upload(allocation, np.zeros(4, np.int32)),
                device.synchronize,
            ):
                try:
                    call()
                except DeviceLostError as error:
                    assert "fork" in str(error)
                else:
                    raise AssertionError("no error")
            device.free(allocation)
            device.close()
            try:
                opencl.devices()
            except BackendUnavailableError as error:
                assert "fork" in str(error)
                status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    device.upload(allocation, np.ones(4, np.int32))
    device.close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)


def test_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install aule-attention\[opencl\]") as caught:
        opencl.devices()
    assert caught.value.code == "AULE_ERROR_OPENCL_INIT"
