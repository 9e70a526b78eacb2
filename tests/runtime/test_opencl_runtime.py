"""The OpenCL runtime, on the first OpenCL device found: PoCL without a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_contract import INCREMENT_PARAMS, SCALE_PARAMS, RuntimeContract, fetch

from aule.artifact import Artifact, Param
from aule.errors import (
    BackendUnavailableError,
    ClosedError,
    DeviceLostError,
    LaunchError,
    OutOfMemoryError,
    ShaderCompileError,
)
from aule.runtime import opencl
from aule.runtime.base import Device

pytestmark = pytest.mark.device

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
    params=SCALE_PARAMS,
    workgroup=64,
)
INCREMENT = Artifact(
    language="opencl",
    code=b"""
__kernel __attribute__((reqd_work_group_size(32, 1, 1))) void increment(__global int *x) { x[get_global_id(0)] += 1; }
""",
    entry="increment",
    params=INCREMENT_PARAMS,
    workgroup=32,
)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    opened = opencl.devices()[0]
    yield opened
    opened.close()


class TestContract(RuntimeContract):
    runtime = opencl
    backend = "opencl"
    package = "pyopencl"
    scale = SCALE
    increment = INCREMENT


def test_targets() -> None:
    for target in (d.target for d in opencl.devices()):
        assert target.memory_bytes >= target.max_buffer_bytes > 0
        assert target.language_version in (110, 120, 200, 210, 220, 300)
        assert target.f16 == ("cl_khr_fp16" in target.extensions)
        assert target.f64 == ("cl_khr_fp64" in target.extensions)
        assert target.int64 and target.storage16 and target.storage8


def test_how_many_threads_a_kernel_may_have(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the device has; fewer where the driver says so of a kernel, unless it says so of every one."""
    threads = device.target.max_threads
    code = f"""
    __attribute__((reqd_work_group_size({threads}, 1, 1))) __kernel void reversed(__global int *x) {{
        __local int held[{threads}];
        int i = get_local_id(0);
        held[i] = x[i];
        barrier(CLK_LOCAL_MEM_FENCE);
        x[i] = held[{threads} - 1 - i];
    }}
    """
    artifact = Artifact("opencl", code.encode(), "reversed", (Param("x", "buffer", "i32", "readwrite"),), threads)
    allocation = device.alloc(4 * threads)
    device.upload(allocation, np.arange(threads, dtype=np.int32))
    device.launch(device.load(artifact), (1, 1, 1), [allocation])
    assert np.array_equal(fetch(device, allocation, np.empty(threads, np.int32)), np.arange(threads)[::-1])
    device.free(allocation)
    import pyopencl

    monkeypatch.setattr(pyopencl.Kernel, "get_work_group_info", lambda *_: threads // 4)
    monkeypatch.setattr(device, "target", replace(device.target, vendor="nvidia"))
    device.load(artifact)
    monkeypatch.setattr(device, "target", replace(device.target, vendor="amd"))
    with pytest.raises(ShaderCompileError, match=f"workgroups of {threads} threads and the driver allows"):
        device.load(artifact)


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


def test_out_of_memory_leaves_the_device_usable() -> None:
    device = opencl.devices()[0]
    target = device.target
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


def test_kernels_that_do_not_fit_are_refused(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    with pytest.raises(ShaderCompileError, match="arguments"):
        device.load(replace(INCREMENT, params=INCREMENT.params * 2))
    huge = b"__kernel void huge(__global int *x) { x[0] = 1; }"
    with pytest.raises(ShaderCompileError, match="threads"):
        device.load(Artifact("opencl", huge, "huge", INCREMENT.params, 1 << 20))


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


def test_import_host_after_close() -> None:
    device = opencl.devices()[0]
    device.alloc(128)
    device.close()
    with pytest.raises(ClosedError):
        device.import_host(np.zeros(32, np.int32))
