"""The WebGPU runtime, on the first adapter found: lavapipe without a GPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runtime_contract import INCREMENT_PARAMS, SCALE_PARAMS, RuntimeContract, fetch

from aule.artifact import Artifact, Param
from aule.errors import BackendUnavailableError, LaunchError, ShaderCompileError
from aule.runtime import webgpu
from aule.runtime.base import Device

pytestmark = pytest.mark.device

try:
    webgpu.devices()
except BackendUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

SCALE = Artifact(
    language="wgsl",
    code=b"""
struct Scalars { n: i32, factor: f32 }
@group(0) @binding(0) var<storage, read_write> result: array<f32>;
@group(0) @binding(1) var<storage, read> source: array<f32>;
@group(0) @binding(2) var<uniform> scalars: Scalars;
@compute @workgroup_size(64)
fn scale(@builtin(global_invocation_id) id: vec3<u32>) {
    if (i32(id.x) < scalars.n) { result[id.x] = source[id.x] * scalars.factor; }
}
""",
    entry="scale",
    params=SCALE_PARAMS,
    workgroup=64,
)
INCREMENT = Artifact(
    language="wgsl",
    code=b"""
@group(0) @binding(0) var<storage, read_write> x: array<i32>;
@compute @workgroup_size(32) fn increment(@builtin(global_invocation_id) id: vec3<u32>) { x[id.x] += 1; }
""",
    entry="increment",
    params=INCREMENT_PARAMS,
    workgroup=32,
)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    opened = webgpu.devices()[0]
    yield opened
    opened.close()


class TestContract(RuntimeContract):
    runtime = webgpu
    backend = "webgpu"
    package = "wgpu"
    scale = SCALE
    increment = INCREMENT


def test_targets() -> None:
    for target in (d.target for d in webgpu.devices()):
        assert "wgpu" in target.driver and not target.driver.startswith("OpenGL")
        assert target.max_threads >= 256 and target.max_buffer_bytes >= 1 << 27 and min(target.max_grid) >= 65535
        assert target.f16 == target.storage16 == ("shader-f16" in target.extensions)
        assert not (target.int64 or target.f64 or target.storage8)
        assert target.subgroup_size == 0 or "subgroup" in target.extensions


def test_every_scalar_type_and_every_axis_of_the_grid(device: Device) -> None:
    code = b"""
    struct Scalars { a: i32, b: u32, c: f32 }
    @group(0) @binding(0) var<storage, read_write> result: array<f32>;
    @group(0) @binding(1) var<uniform> scalars: Scalars;
    @compute @workgroup_size(8)
    fn every(
        @builtin(workgroup_id) group: vec3<u32>,
        @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_id) lane: vec3<u32>,
    ) {
        let i = (group.x + groups.x * (group.y + groups.y * group.z)) * 8u + lane.x;
        var value = f32(i);
        if (i == 0u) { value = f32(scalars.a); }
        if (i == 1u) { value = f32(scalars.b); }
        if (i == 2u) { value = scalars.c; }
        result[i] = value;
    }
    """
    params = (
        Param("a", "scalar", "i32"),
        Param("out", "buffer", "f32", "write"),
        Param("b", "scalar", "u32"),
        Param("c", "scalar", "f32"),
    )
    program = device.load(Artifact("wgsl", code, "every", params, 8))
    allocation = device.alloc(4 * 8 * 30)
    device.launch(program, (2, 3, 5), [-5, allocation, 2**32 - 256, 0.25])
    out = fetch(device, allocation, np.empty(240, np.float32))
    assert out[:3].tolist() == [-5.0, 2.0**32 - 256, 0.25]
    assert np.array_equal(out[3:], np.arange(3, 240, dtype=np.float32))
    device.free(allocation)


def test_more_scalars_than_are_remembered(device: Device) -> None:
    program = device.load(SCALE)
    x = np.arange(64, dtype=np.float32)
    source = device.alloc(x.nbytes)
    device.upload(source, x)
    results = [device.alloc(x.nbytes) for _ in range(200)]
    for _ in range(2):
        for factor, result in enumerate(results):
            device.launch(program, (1, 1, 1), [result, source, 64, factor])
        for factor, result in enumerate(results):
            assert np.array_equal(fetch(device, result, x), x * factor)
    for allocation in [source, *results]:
        device.free(allocation)


def test_aliases(device: Device) -> None:
    program = device.load(SCALE)
    allocation = device.alloc(256)
    with pytest.raises(LaunchError, match="one allocation for out, in"):
        device.launch(program, (1, 1, 1), [allocation, allocation, 64, 2.0])
    code = b"""
    @group(0) @binding(0) var<storage, read> a: array<f32>;
    @group(0) @binding(1) var<storage, read> b: array<f32>;
    @group(0) @binding(2) var<storage, read_write> sum: array<f32>;
    @compute @workgroup_size(64)
    fn add(@builtin(global_invocation_id) id: vec3<u32>) { sum[id.x] = a[id.x] + b[id.x]; }
    """
    params = (Param("a", "buffer", "f32"), Param("b", "buffer", "f32"), Param("sum", "buffer", "f32", "write"))
    add = device.load(Artifact("wgsl", code, "add", params, 64))
    x = np.arange(64, dtype=np.float32)
    device.upload(allocation, x)
    result = device.alloc(256)
    device.launch(add, (1, 1, 1), [allocation, allocation, result])
    assert np.array_equal(fetch(device, result, x), 2 * x)
    device.free(allocation)
    device.free(result)


def test_large_copies_go_in_pieces(device: Device) -> None:
    data = np.random.default_rng(0).integers(0, 256, (70 << 20) + 5, dtype=np.uint8)
    allocation = device.alloc(data.nbytes)
    device.upload(allocation, data[1:], 1)
    assert np.array_equal(fetch(device, allocation, data[1:], 1), data[1:])
    device.free(allocation)


def test_f16(device: Device) -> None:
    if not device.target.f16:
        pytest.skip("the device has no f16")
    code = b"""
    enable f16;
    @group(0) @binding(0) var<storage, read_write> x: array<f16>;
    @compute @workgroup_size(32) fn double(@builtin(global_invocation_id) id: vec3<u32>) { x[id.x] = x[id.x] * 2.0h; }
    """
    params = (Param("x", "buffer", "f16", "readwrite"),)
    program = device.load(Artifact("wgsl", code, "double", params, 32, extensions=("shader-f16",)))
    x = np.arange(33, dtype=np.float16)
    allocation = device.alloc(x.nbytes)
    device.upload(allocation, x)
    device.launch(program, (1, 1, 1), [allocation])
    assert np.array_equal(fetch(device, allocation, x), np.where(np.arange(33) < 32, x * 2, x))
    device.free(allocation)


def test_subgroups(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    # Standard WGSL wants the directive; the runtime takes it out for a naga that does not know it.
    code = b"""
    enable subgroups;
    @group(0) @binding(0) var<storage, read_write> x: array<u32>;
    @compute @workgroup_size(64) fn sums(@builtin(local_invocation_index) i: u32) {
        x[i] = subgroupAdd(x[i]);
        x[i] = x[i] + subgroupShuffleXor(x[i], 1u);
    }
    """
    params = (Param("x", "buffer", "u32", "readwrite"),)
    lanes = device.target.subgroup_size
    artifact = Artifact("wgsl", code, "sums", params, 64, uses_subgroups=True)
    if not lanes:
        with pytest.raises(ShaderCompileError, match="subgroup"):
            device.load(artifact)
        return
    program = device.load(artifact)
    x = np.arange(64, dtype=np.uint32)
    allocation = device.alloc(x.nbytes)
    device.upload(allocation, x)
    device.launch(program, (1, 1, 1), [allocation])
    expected = 2 * np.repeat(x.reshape(-1, lanes).sum(1), lanes)
    assert np.array_equal(fetch(device, allocation, x), expected)
    with pytest.raises(ShaderCompileError, match="lanes"):
        device.load(Artifact("wgsl", code, "sums", params, 64, subgroup_size=2 * lanes, uses_subgroups=True))
    device.free(allocation)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS and /proc")
def test_out_of_memory_leaves_the_device_usable(device: Device) -> None:
    if not device.target.software:
        pytest.skip("a limit on the process does not bound a GPU's memory")
    script = """
    import resource
    import numpy as np
    from aule.errors import OutOfMemoryError
    from aule.runtime import webgpu

    device = webgpu.devices()[0]
    kept = device.alloc(100)
    device.upload(kept, np.arange(25, dtype=np.float32))
    device.synchronize()
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
    counts = []
    # Twice, with two sizes: the second round can only succeed when the pool of the first is given up.
    for size in (200 << 20, 150 << 20):
        held = []
        try:
            while True:
                held.append(device.alloc(size))
        except OutOfMemoryError as error:
            assert error.requested_bytes == size
        counts.append(len(held))
        for allocation in held:
            device.free(allocation)
    assert 1 <= counts[0] <= counts[1], counts
    out = np.empty(25, np.float32)
    device.download(kept, out)
    assert np.array_equal(out, np.arange(25))
    device.close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)


def test_kernels_that_do_not_fit_are_refused(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    target = device.target
    with pytest.raises(ShaderCompileError, match="binding"):
        device.load(replace(INCREMENT, params=()))
    with pytest.raises(ShaderCompileError, match="workgroup memory"):
        device.load(replace(INCREMENT, shared_bytes=target.max_shared_bytes + 4))
    with pytest.raises(ShaderCompileError, match="threads"):
        device.load(replace(INCREMENT, workgroup=target.max_threads + 1))
