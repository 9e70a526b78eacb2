"""The Vulkan runtime on any device; made for lavapipe, Mesa's software device."""

from __future__ import annotations

import dataclasses
import gc
import glob
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import ROOT

from aule import store
from aule.artifact import Artifact, Param
from aule.errors import (
    AuleError,
    BackendUnavailableError,
    ClosedError,
    DeviceMismatchError,
    InvalidArgumentError,
    LaunchError,
    NoComputeQueueError,
    OutOfMemoryError,
    ShaderCompileError,
)
from aule.runtime import _vulkan_api as api
from aule.runtime import _vulkan_loader, _vulkan_target, vulkan
from aule.runtime._vulkan_memory import Block
from aule.runtime._vulkan_pipeline import spirv_fault
from aule.runtime.base import Allocation, Program
from aule.runtime.vulkan import VulkanDevice

pytestmark = pytest.mark.device

# y[i] = f * x[i] for i < n; x and y are bindings 0 and 1, the block {n, f} is binding 2.
SCALE = """
               OpCapability Shader
               OpMemoryModel Logical GLSL450
               OpEntryPoint GLCompute %main "scale" %gid %x %y %block
               OpExecutionMode %main LocalSize 64 1 1
               OpDecorate %gid BuiltIn GlobalInvocationId
               OpDecorate %array ArrayStride 4
               OpDecorate %buffer Block
               OpMemberDecorate %buffer 0 Offset 0
               OpDecorate %x DescriptorSet 0
               OpDecorate %x Binding 0
               OpDecorate %y DescriptorSet 0
               OpDecorate %y Binding 1
               OpDecorate %scalars Block
               OpMemberDecorate %scalars 0 Offset 0
               OpMemberDecorate %scalars 1 Offset 4
               OpDecorate %block DescriptorSet 0
               OpDecorate %block Binding 2
       %void = OpTypeVoid
   %function = OpTypeFunction %void
       %uint = OpTypeInt 32 0
      %float = OpTypeFloat 32
       %bool = OpTypeBool
      %uvec3 = OpTypeVector %uint 3
   %in_uvec3 = OpTypePointer Input %uvec3
    %in_uint = OpTypePointer Input %uint
        %gid = OpVariable %in_uvec3 Input
      %array = OpTypeRuntimeArray %float
     %buffer = OpTypeStruct %array
   %p_buffer = OpTypePointer StorageBuffer %buffer
    %p_float = OpTypePointer StorageBuffer %float
          %x = OpVariable %p_buffer StorageBuffer
          %y = OpVariable %p_buffer StorageBuffer
    %scalars = OpTypeStruct %uint %float
  %p_scalars = OpTypePointer Uniform %scalars
  %p_uniform = OpTypePointer Uniform %uint
 %p_uniformf = OpTypePointer Uniform %float
      %block = OpVariable %p_scalars Uniform
         %u0 = OpConstant %uint 0
         %u1 = OpConstant %uint 1
       %main = OpFunction %void None %function
      %start = OpLabel
         %pi = OpAccessChain %in_uint %gid %u0
          %i = OpLoad %uint %pi
         %pn = OpAccessChain %p_uniform %block %u0
          %n = OpLoad %uint %pn
     %inside = OpULessThan %bool %i %n
               OpSelectionMerge %done None
               OpBranchConditional %inside %body %done
       %body = OpLabel
         %pf = OpAccessChain %p_uniformf %block %u1
          %f = OpLoad %float %pf
         %px = OpAccessChain %p_float %x %u0 %i
         %vx = OpLoad %float %px
          %r = OpFMul %float %vx %f
         %py = OpAccessChain %p_float %y %u0 %i
               OpStore %py %r
               OpBranch %done
       %done = OpLabel
               OpReturn
               OpFunctionEnd
"""

PARAMS = (
    Param("x", "buffer", "f32"),
    Param("y", "buffer", "f32", "write"),
    Param("n", "scalar", "u32"),
    Param("f", "scalar", "f32"),
)

if shutil.which("spirv-as") is None:
    pytest.skip("spirv-as (Debian spirv-tools) is not installed", allow_module_level=True)
try:
    DEVICES = vulkan.devices()
except BackendUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)


def assemble(text: str) -> bytes:
    command = ["spirv-as", "--target-env", "vulkan1.2", "-o", "-", "-"]
    return subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout


SCALE_CODE = assemble(SCALE)


def scale_artifact(**changes: Any) -> Artifact:
    artifact = Artifact("spirv", SCALE_CODE, "scale", PARAMS, workgroup=64)
    return dataclasses.replace(artifact, **changes)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AULE_CACHE_DIR", str(folder))
        yield folder


def facts() -> _vulkan_target.Facts:
    """A software device where there is one, so that a person's GPU is left alone."""
    chosen = next((d for d in DEVICES if d.target.software), DEVICES[0])
    assert isinstance(chosen, VulkanDevice)
    return chosen._facts


@pytest.fixture(params=["as it is", "staged", "fences"])
def device(request: pytest.FixtureRequest) -> Iterator[VulkanDevice]:
    """The device; the same without mapped tensors, like a discrete one; and the same without timeline semaphores."""
    known = facts()
    if request.param == "staged":
        known = dataclasses.replace(known, target=dataclasses.replace(known.target, unified_memory=False))
    if request.param == "fences":
        known = dataclasses.replace(known, features=known.features - {"timelineSemaphore"})
    opened = VulkanDevice(known, 0)
    yield opened
    opened.close()


def put(device: VulkanDevice, data: np.ndarray[Any, Any]) -> Allocation:
    allocation = device.alloc(data.nbytes)
    device.upload(allocation, data)
    return allocation


def get(device: VulkanDevice, allocation: Allocation, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    out = np.empty(allocation.nbytes // np.dtype(dtype).itemsize, dtype)
    device.download(allocation, out)
    return out


def run_python(text: str, **environment: str) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_enumeration_and_target() -> None:
    assert [d.index for d in DEVICES] == list(range(len(DEVICES)))
    # not DEVICES itself: a test that ran before in this process may have lost a device, which is made anew
    assert [a is b for a, b in zip(vulkan.devices(), vulkan.devices(), strict=True)] == [True] * len(DEVICES)
    for d in DEVICES:
        t = d.target
        assert t.backend == "vulkan" and t.name and t.driver
        assert t.language_version in (12, 13)
        assert t.max_threads >= 128 and t.max_shared_bytes >= 16384 and t.max_buffers >= 4
        assert t.offset_alignment & (t.offset_alignment - 1) == 0
        assert t.max_buffer_bytes >= 1 << 27
        assert all(s & (s - 1) == 0 for s in t.subgroup_sizes)
        assert not t.subgroup_sizes or t.subgroup_size in t.subgroup_sizes
        assert t.software == (t.vendor == "software")
    assert vulkan.skipped() == []


def test_lavapipe_target() -> None:
    t = facts().target
    if "llvmpipe" not in t.name:
        pytest.skip("not lavapipe")
    assert t.software and t.unified_memory and t.storage16 and t.storage8 and t.int64 and t.f64
    assert t.subgroup_size in (4, 8, 16) and t.subgroup_sizes == (t.subgroup_size,)
    assert t.memory_bytes > 0 and t.matrix_units == ()
    assert "VK_EXT_external_memory_host" in t.extensions


def test_accesses_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that can be told so is told; lavapipe cannot, and ignores a struct that it does not know."""
    opened = VulkanDevice(facts(), 0)
    pipelines = opened._context().pipelines
    create, told = pipelines._vk.vkCreateComputePipelines, []

    def watch(device: Any, cache: Any, count: int, info: Any, allocator: Any, out: Any) -> Any:
        after = info._obj.pNext
        told.append(api.VkPipelineRobustnessCreateInfoEXT.from_address(after).storageBuffers if after else None)
        return create(device, cache, count, info, allocator, out)

    monkeypatch.setattr(pipelines._vk, "vkCreateComputePipelines", watch)
    known = pipelines._facts.features
    for features in (known - {"pipelineRobustness"}, known | {"pipelineRobustness"}):
        monkeypatch.setattr(pipelines, "_facts", dataclasses.replace(pipelines._facts, features=features))
        opened.load(scale_artifact())
    opened.close()
    assert told == [None, api.VK_PIPELINE_ROBUSTNESS_BUFFER_BEHAVIOR_DISABLED_EXT]


@pytest.mark.parametrize("nbytes", [0, 1, 3, 255, 4097, 1 << 20, (9 << 20) + 5, (70 << 20) + 1])
def test_round_trip(device: VulkanDevice, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    allocation = put(device, data)
    assert allocation.nbytes == nbytes
    assert np.array_equal(get(device, allocation, np.uint8), data)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (1, 1), (3, 1021), (4095, 2), (9999, 1)])
def test_odd_offsets(device: VulkanDevice, offset: int, nbytes: int) -> None:
    expected = np.arange(10000, dtype=np.uint32).astype(np.uint8)
    allocation = put(device, expected)
    part = np.full(nbytes, 0xA5, np.uint8)
    device.upload(allocation, part, offset)
    expected[offset : offset + nbytes] = part
    assert np.array_equal(get(device, allocation, np.uint8), expected)
    out = np.zeros(nbytes, np.uint8)
    device.download(allocation, out, offset)
    assert np.array_equal(out, part)


def test_wrong_copies_are_refused(device: VulkanDevice) -> None:
    allocation = device.alloc(16)
    with pytest.raises(InvalidArgumentError, match="within the allocation's 16 bytes"):
        device.upload(allocation, np.zeros(17, np.uint8))
    with pytest.raises(InvalidArgumentError, match="within the allocation's 16 bytes"):
        device.download(allocation, np.zeros(1, np.uint8), offset=16)
    with pytest.raises(InvalidArgumentError, match="C-contiguous"):
        device.upload(allocation, np.zeros((2, 4), np.uint8).T)
    frozen = np.zeros(16, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="writable"):
        device.download(allocation, frozen)
    with pytest.raises(InvalidArgumentError, match="at least 0"):
        device.alloc(-1)


def test_tensors_share_driver_allocations(device: VulkanDevice) -> None:
    device.free(put(device, np.zeros(1, np.float32)))
    before = device.memory_info()["driver_allocations"]
    kept = [put(device, np.full(100 + i, i, np.int32)) for i in range(500)]
    assert device.memory_info()["driver_allocations"] == before
    offsets = sorted((a.handle.buffer, a.handle.offset, a.nbytes) for a in kept)
    for (buffer, offset, nbytes), (next_buffer, following, _) in pairwise(offsets):
        assert buffer != next_buffer or offset + nbytes <= following
    for i, allocation in enumerate(kept):
        assert (get(device, allocation, np.int32) == i).all()
        device.free(allocation)
    assert device.memory_info()["used"] == 0
    big = device.alloc(40 << 20)
    assert device.memory_info()["driver_allocations"] == before, "freed neighbours must join into one range"
    device.free(big)
    for _ in range(20):
        device.free(device.alloc(200 << 20))
    assert device.memory_info()["driver_allocations"] <= before + 20


def test_free_ranges_join() -> None:
    """The free list keeps its order and its sum under random traffic, and ends as one range."""
    random.seed(1)
    block = Block(None, None, 1 << 16, 0, True)
    held: list[tuple[int, int]] = []
    for step in range(2000):
        size = 256 * random.randint(1, 20)
        fit = block.best_fit(size)
        if fit is not None and random.random() < 0.55:
            start, _use = block.take(fit[1], size)
            assert all(start + size <= s or e <= start for s, e in held)
            held.append((start, start + size))
        elif held:
            start, end = held.pop(random.randrange(len(held)))
            block.give(start, end, step)
        free = sum(e - s for s, e in zip(block.starts, block.ends, strict=True))
        assert free + sum(e - s for s, e in held) == block.size
        assert block.starts == sorted(block.starts)
        assert all(e < s for e, s in zip(block.ends, block.starts[1:], strict=False)), "neighbours must be joined"
    for start, end in held:
        block.give(start, end, 5000)
    assert block.empty and block.uses == [5000]


def test_launch(device: VulkanDevice) -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    a, b = put(device, x), put(device, np.full(1000, -1, np.float32))
    program = device.load(scale_artifact())
    device.launch(program, (16, 1, 1), [a, b, 900, 2.0])
    y = get(device, b)
    assert np.array_equal(y[:900], 2 * x[:900]) and (y[900:] == -1).all()
    device.launch(program, (0, 1, 1), [a, b, 1000, 3.0])
    device.synchronize()
    assert np.array_equal(get(device, b), y)


def test_wrong_launches_are_refused(device: VulkanDevice) -> None:
    a = device.alloc(256)
    program = device.load(scale_artifact())
    limit = device.target.max_grid[1]
    with pytest.raises(LaunchError, match="expected 4 arguments"):
        device.launch(program, (1, 1, 1), [a, a, 1])
    with pytest.raises(LaunchError, match="an allocation for y"):
        device.launch(program, (1, 1, 1), [a, 1, 1, 2.0])
    with pytest.raises(LaunchError, match="a grid of at most"):
        device.launch(program, (1, limit + 1, 1), [a, a, 1, 2.0])
    with pytest.raises(LaunchError, match="numbers that fit n, f"):
        device.launch(program, (1, 1, 1), [a, a, -1, 2.0])
    freed = device.alloc(256)
    device.free(freed)
    with pytest.raises(ClosedError, match="freed"):
        device.launch(program, (1, 1, 1), [a, freed, 1, 2.0])
    other = VulkanDevice(facts(), 0)
    with pytest.raises(DeviceMismatchError, match="of another"):
        other.launch(program, (1, 1, 1), [a, a, 1, 2.0])
    other.close()
    device.launch(program, (1, 1, 1), [a, a, 1, 2.0])
    device.synchronize()


def test_dependent_launches_are_ordered(device: VulkanDevice) -> None:
    x = np.arange(4096, dtype=np.float32)
    a, b = put(device, x), device.alloc(x.nbytes)
    program = device.load(scale_artifact())
    for _ in range(50):
        device.launch(program, (64, 1, 1), [a, b, 4096, 2.0])
        device.launch(program, (64, 1, 1), [b, a, 4096, 0.5])
    for _ in range(10):
        device.launch(program, (64, 1, 1), [a, b, 4096, 2.0])
        device.launch(program, (64, 1, 1), [b, a, 4096, 1.0])
    assert np.array_equal(get(device, a), x * 1024)


def test_each_launch_keeps_its_scalars(device: VulkanDevice) -> None:
    """Recordings are used again, also while earlier launches with other scalars are still under way."""
    a = put(device, np.ones(64, np.float32))
    program = device.load(scale_artifact())
    exponent = 0
    generator = random.Random(2)
    for _ in range(500):
        step = generator.choice([-2, -1, 1, 2] if abs(exponent) < 60 else [-1 if exponent > 0 else 1])
        exponent += step
        device.launch(program, (1, 1, 1), [a, a, 64, 2.0**step])
    assert (get(device, a) == 2.0**exponent).all()


def test_uploads_and_frees_wait_for_launches(device: VulkanDevice) -> None:
    program = device.load(scale_artifact())
    n = 1 << 18
    results = []
    for i in range(12):
        a, b = put(device, np.full(n, i, np.float32)), device.alloc(4 * n)
        device.launch(program, (n // 64, 1, 1), [a, b, n, 3.0])
        device.upload(a, np.full(n, -1, np.float32))
        device.free(a)
        results.append(b)
    for i, b in enumerate(results):
        assert (get(device, b) == 3 * i).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_gpu_is_not_started_again_after_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    known = facts()
    gpu = VulkanDevice(dataclasses.replace(known, target=dataclasses.replace(known.target, software=False)), 0)
    gpu.free(gpu.alloc(1))
    monkeypatch.setattr(gpu, "_pid", os.getpid() + 1)
    with pytest.raises(BackendUnavailableError, match="before fork"):
        vulkan.devices()
    monkeypatch.undo()
    gpu.close()
    assert vulkan.devices()


def test_threads(device: VulkanDevice) -> None:
    program = device.load(scale_artifact())
    failures: list[object] = []

    def work(seed: int) -> None:
        try:
            generator = np.random.default_rng(seed)
            for i in range(40):
                x = generator.standard_normal(1 + int(generator.integers(5000))).astype(np.float32)
                a, b = put(device, x), device.alloc(x.nbytes)
                device.launch(program, (-(-x.size // 64), 1, 1), [a, b, x.size, 2.0])
                if not np.array_equal(get(device, b), 2 * x):
                    failures.append((seed, i))
                device.free(a)
                device.free(b)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert device.memory_info()["used"] == 0


def test_forgotten_memory_and_programs_come_back(device: VulkanDevice) -> None:
    a = device.alloc(4096)
    program: Program | None = device.load(scale_artifact())
    assert program is not None
    device.launch(program, (1, 1, 1), [a, a, 64, 1.0])
    assert device.memory_info()["used"] > 0
    del a, program
    gc.collect()
    device.synchronize()
    assert device.memory_info()["used"] == 0
    assert device._opened is not None and device._opened.pipelines._live == set()


def page_aligned(count: int, shift: int = 0) -> np.ndarray[Any, Any]:
    raw = np.zeros(4 * count + 8192, np.uint8)
    start = -raw.ctypes.data % 4096 + shift
    return raw[start : start + 4 * count].view(np.float32)


def test_import_host(device: VulkanDevice) -> None:
    alignment = device.target.offset_alignment
    program = device.load(scale_artifact())
    for x, y in (
        (page_aligned(1024), page_aligned(1024)),
        (page_aligned(1000, shift=alignment), page_aligned(1000, shift=4 * alignment)),
    ):
        x[:] = np.arange(x.size)
        a, b = device.import_host(x), device.import_host(y)
        if a is None or b is None:
            pytest.skip("the driver does not import this memory")
        assert a.handle.offset == x.ctypes.data % 4096
        device.launch(program, (16, 1, 1), [a, b, x.size, 2.0])
        device.synchronize()
        assert np.array_equal(y, 2 * np.arange(x.size, dtype=np.float32))
        x[:] = 1
        device.launch(program, (16, 1, 1), [a, b, x.size, 5.0])
        assert (get(device, b) == 5).all()
        device.free(a)
        device.free(b)
        device.free(b)
        device.synchronize()
        y[:] = 7
        with pytest.raises(ClosedError):
            device.launch(program, (16, 1, 1), [a, b, x.size, 2.0])


def test_import_host_refuses_what_cannot_be_bound(device: VulkanDevice) -> None:
    assert device.import_host(page_aligned(1024)[::2]) is None
    assert device.import_host(np.zeros(0, np.float32)) is None
    if device.target.offset_alignment > 4:
        assert device.import_host(page_aligned(1000, shift=4)) is None


def test_out_of_memory_leaves_the_device_usable(device: VulkanDevice) -> None:
    a = put(device, np.arange(1000, dtype=np.float32))
    with pytest.raises(OutOfMemoryError, match="limit") as caught:
        device.alloc(1 << 50)
    assert caught.value.requested_bytes == 1 << 50
    assert device._opened is not None
    # A small heap, so that the test does not depend on the machine.
    device._opened.memory._heap = 256 << 20
    kept = []
    with pytest.raises(OutOfMemoryError, match="in use by tensors") as caught:
        for _ in range(20):
            kept.append(device.alloc(50 << 20))
    assert caught.value.requested_bytes == 50 << 20
    assert len(kept) >= 3
    assert np.array_equal(get(device, a), np.arange(1000, dtype=np.float32))
    for allocation in kept:
        device.free(allocation)
    device.free(put(device, np.zeros(120 << 20, np.uint8)))
    program = device.load(scale_artifact())
    device.launch(program, (16, 1, 1), [a, a, 1000, 2.0])
    assert get(device, a)[999] == 1998


def test_refused_shaders(device: VulkanDevice, cache: Path) -> None:
    garbage = np.random.default_rng(3).integers(0, 1 << 32, 200, dtype=np.uint64).astype(np.uint32)
    with_magic = garbage.copy()
    with_magic[0] = 0x07230203
    for code in (b"", b"abc", garbage.tobytes(), with_magic.tobytes(), SCALE_CODE[:-4], SCALE_CODE[:-8]):
        with pytest.raises(ShaderCompileError) as caught:
            device.load(scale_artifact(code=code))
        assert caught.value.source_path is not None
        saved = Path(caught.value.source_path)
        assert saved.parent == cache / "refused" and saved.read_bytes() == code
        assert str(saved) in caught.value.message and caught.value.log
    for changes, text in (
        ({"entry": "main"}, "SPIR-V"),
        ({"workgroup": 1 << 20}, "threads"),
        ({"shared_bytes": 1 << 30}, "shared memory"),
        ({"subgroup_size": 3}, "subgroup size"),
        ({"params": tuple(Param(f"s{i}", "scalar", "f64") for i in range(200))}, "bytes of scalars"),
    ):
        with pytest.raises(ShaderCompileError, match=text):
            device.load(scale_artifact(**changes))
    with pytest.raises(InvalidArgumentError, match="spirv"):
        device.load(scale_artifact(language="ptx"))
    device.load(scale_artifact())


def test_spirv_fault() -> None:
    assert spirv_fault(SCALE_CODE, "scale") == ""
    assert "entry point" in spirv_fault(SCALE_CODE, "other")
    assert "magic" in spirv_fault(bytes(32), "scale")


def test_required_subgroup_size(device: VulkanDevice) -> None:
    x = np.arange(128, dtype=np.float32)
    a, b = put(device, x), device.alloc(x.nbytes)
    for size in (0, device.target.subgroup_size, *device.target.subgroup_sizes):
        program = device.load(scale_artifact(subgroup_size=size, uses_subgroups=device.target.subgroup_size > 0))
        device.launch(program, (2, 1, 1), [a, b, 128, 2.0])
        assert np.array_equal(get(device, b), 2 * x)


def test_time_launch(device: VulkanDevice) -> None:
    n = 1 << 16
    a = put(device, np.ones(n, np.float32))
    program = device.load(scale_artifact())
    seconds = device.time_launch(program, (n // 64, 1, 1), [a, a, n, 2.0])
    assert 0 < seconds < 10
    assert (get(device, a) == 2).all()
    # Each has its own buffers and scalars, and waits for the one before.
    b = device.alloc(4 * n)
    launches = [(program, (n // 64, 1, 1), [a, b, n, 3.0]), (program, (n // 64, 1, 1), [b, a, n, 0.5])]
    assert 0 < device.time_launches(launches, 4) < 10
    assert (get(device, a) == 2 * 1.5**4).all()
    device.launch(*launches[0])
    assert (get(device, b) == 3 * 2 * 1.5**4).all()


def test_double_free_and_use_after_close(device: VulkanDevice) -> None:
    x = np.arange(64, dtype=np.float32)
    a, b = put(device, x), put(device, x)
    program = device.load(scale_artifact())
    device.free(a)
    device.free(a)
    with pytest.raises(ClosedError, match="freed"):
        device.upload(a, x)
    c = device.alloc(x.nbytes)
    assert device.alloc(x.nbytes).handle.offset != c.handle.offset, "a range freed twice must not be given out twice"
    device.close()
    device.close()
    for call in (
        lambda: device.alloc(1),
        lambda: device.upload(b, x),
        lambda: device.download(b, x),
        lambda: device.launch(program, (1, 1, 1), [b, b, 64, 1.0]),
        lambda: device.load(scale_artifact()),
        device.synchronize,
    ):
        with pytest.raises(ClosedError):
            call()
    device.free(b)


def test_closed_device_is_replaced() -> None:
    first = vulkan.devices()[0]
    first.close()
    second = vulkan.devices()[0]
    assert second is not first and second.target == first.target
    second.free(second.alloc(1))


def test_pipeline_cache_is_kept(device: VulkanDevice, cache: Path) -> None:
    device.load(scale_artifact())
    data = device.pipeline_cache_data()
    device.close()
    (file,) = (cache / "vulkan").glob("*.bin")
    name = file.relative_to(cache).as_posix()
    assert (store.read(name) or b"")[:32] == data[:32]
    file.write_bytes(b"\xff" * 100)
    again = VulkanDevice(facts(), 0)
    again.load(scale_artifact())
    again.close()
    assert (store.read(name) or b"")[:32] == data[:32]


def test_the_driver_is_given_no_foreign_pipeline_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a driver runs comes from the checked store, even if it has the driver's own header."""
    given: list[int] = []
    info = api.VkPipelineCacheCreateInfo

    def noting(**fields: Any) -> Any:
        given.append(fields["initialDataSize"])
        return info(**fields)

    def use() -> bytes:
        device = VulkanDevice(facts(), 0)
        device.load(scale_artifact())
        data = device.pipeline_cache_data()
        device.close()
        return data

    monkeypatch.setattr(api, "VkPipelineCacheCreateInfo", noting)
    size = len(use())
    (file,) = (cache / "vulkan").glob("*.bin")
    data = use()
    file.write_bytes(data)
    use()
    assert given[1:] == [size, 0]


def test_pipeline_cache_is_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("AULE_DISK_CACHE", "0")
    device = VulkanDevice(facts(), 0)
    device.load(scale_artifact())
    device.close()
    assert not list(tmp_path.rglob("*.bin"))


def test_missing_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_vulkan_loader, "_library_names", lambda: ["libvulkan-that-is-not-there.so"])
    with pytest.raises(BackendUnavailableError, match="install") as caught:
        _vulkan_loader.Instance()
    assert caught.value.code == "AULE_ERROR_VULKAN_INIT"


def test_no_driver() -> None:
    script = """
        from aule.errors import BackendUnavailableError
        from aule.runtime import vulkan
        try:
            vulkan.devices()
        except BackendUnavailableError as error:
            print(error)
    """
    said = run_python(script, VK_DRIVER_FILES="/nonexistent.json", VK_ICD_FILENAMES="/nonexistent.json")
    assert "AULE_ERROR_VULKAN_INIT" in said and "install" in said
    assert said.count("[vulkan]") == said.count("; ") == 1, "one message, with one remedy"


def test_device_without_compute_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = _vulkan_loader.instance()
    ask = instance.vk.vkGetPhysicalDeviceQueueFamilyProperties

    def without_compute(physical: Any, count: Any, items: Any) -> None:
        ask(physical, count, items)
        for item in items or ():
            item.queueFlags = 0

    monkeypatch.setattr(instance.vk, "vkGetPhysicalDeviceQueueFamilyProperties", without_compute)
    usable, refused = _vulkan_target.inspect_all(instance)
    assert usable == [] and all(isinstance(e, NoComputeQueueError) for e in refused)
    final: AuleError = vulkan._none_usable(refused)
    assert isinstance(final, NoComputeQueueError) and final.code == "AULE_ERROR_NO_COMPUTE_QUEUE"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork() -> None:
    if not facts().target.software:
        pytest.skip("drivers of hardware do not survive a fork")
    script = """
        import os
        from aule.errors import DeviceLostError
        from aule.runtime import vulkan
        device = vulkan.devices()[0]
        allocation = device.alloc(64)
        child = os.fork()
        if child == 0:
            said = []
            for call in (lambda: device.alloc(1), device.synchronize):
                try:
                    call()
                except DeviceLostError as error:
                    said.append("opened before fork" in str(error))
            device.free(allocation)
            device.close()
            fresh = vulkan.devices()[0]
            fresh.free(fresh.alloc(64))
            os._exit(0 if said == [True, True] and fresh is not device else 1)
        assert os.waitpid(child, 0)[1] == 0
        device.free(allocation)
        device.synchronize()
        print("parent works on")
    """
    assert "parent works on" in run_python(script)


WORK = """
    import dataclasses, os, sys
    import numpy as np
    from aule.artifact import Artifact, Param
    from aule.runtime import _vulkan_api as api, vulkan
    params = tuple(Param(n, k, d, "readwrite") for n, k, d in (
        ("x", "buffer", "f32"), ("y", "buffer", "f32"), ("n", "scalar", "u32"), ("f", "scalar", "f32")))
    artifact = Artifact("spirv", open(sys.argv[1] if len(sys.argv) > 1 else os.environ["CODE"], "rb").read(),
                        "scale", params, 64)
"""


@pytest.fixture(scope="module")
def code_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("code") / "scale.spv"
    path.write_bytes(SCALE_CODE)
    return str(path)


@pytest.mark.parametrize("variant", ["as it is", "staged", "fences"])
def test_validation_is_clean(code_file: str, variant: str) -> None:
    if not glob.glob("/usr/share/vulkan/explicit_layer.d/*validation*.json"):
        pytest.skip("vulkan-validationlayers is not installed")
    script = (
        WORK
        + """
    known = next((d for d in vulkan.devices() if d.target.software), vulkan.devices()[0])._facts
    if os.environ["VARIANT"] == "staged":
        known = dataclasses.replace(known, target=dataclasses.replace(known.target, unified_memory=False))
    if os.environ["VARIANT"] == "fences":
        known = dataclasses.replace(known, features=known.features - {"timelineSemaphore"})
    for _ in range(2):
        device = vulkan.VulkanDevice(known, 0)
        program = device.load(dataclasses.replace(artifact, subgroup_size=device.target.subgroup_size,
                                                  uses_subgroups=True))
        x = np.ones(20000, np.float32)
        a, b = device.alloc(x.nbytes), device.alloc(x.nbytes)
        device.upload(a, x)
        for i in range(200):
            device.launch(program, (313, 1, 1), [a, b, 20000 - i % 3, 2.0])
        big = device.alloc(100 << 20)
        device.free(a)
        imported = device.import_host(x)
        if imported is not None:
            device.launch(program, (313, 1, 1), [imported, b, 20000, 3.0])
            device.free(imported)
        out = np.empty_like(x)
        device.download(b, out)
        device.time_launch(program, (313, 1, 1), [b, big, 20000, 3.0])
        device.free(big)
        device.statistics(program)
        device.representations(program)
        device.close()
    # A layer older than an extension says so, and knows nothing more about it.
    older = ("VUID-VkDeviceCreateInfo-pNext-pNext", "is not supported by this layer")
    messages = [m for m in vulkan.validation_messages() if not any(text in m for text in older)]
    assert not messages, messages
    assert out[0] == (2 if imported is None else 3)
    # The layer is really there: it hears of a wrong call.
    device = vulkan.VulkanDevice(known, 0)
    device.synchronize()
    try:
        device._opened.memory._create_buffer(0, 0)
    except vulkan.AuleError:
        pass
    heard = len(vulkan.validation_messages())
    vulkan._close_all()
    print("heard", heard > 0, "left", vulkan.validation_messages()[heard:])
    os._exit(0)
    """
    )
    said = run_python(script, AULE_VULKAN_VALIDATION="1", CODE=code_file, VARIANT=variant)
    assert "heard True" in said, said


@pytest.mark.parametrize("family", ["navi21", "navi31", "gfx1100"])
def test_radv_null_device_compiles(code_file: str, family: str) -> None:
    drivers = glob.glob("/usr/share/vulkan/icd.d/radeon_icd*.json")
    if not drivers:
        pytest.skip("Mesa's AMD driver is not installed")
    script = (
        WORK
        + """
    from aule.errors import AuleError, OutOfMemoryError
    (device,) = vulkan.devices()
    t = device.target
    assert t.vendor == "amd" and t.memory_bytes == 0 and not t.software, t
    assert t.subgroup_sizes == (32, 64), t
    layouts = [f"workgroupMemoryExplicitLayout{bits}BitAccess" for bits in (8, 16)]
    assert {"VK_KHR_workgroup_memory_explicit_layout", "shaderInt16", *layouts} <= set(t.extensions), t
    seen = {}
    for size in t.subgroup_sizes:
        program = device.load(dataclasses.replace(artifact, subgroup_size=size, uses_subgroups=True))
        s = device.statistics(program)
        assert s["Subgroup Size"] == size and s["VGPRs"] > 0 and s["Spilled VGPRs"] == 0, s
        assert "LDS size" in s and "Code size" in s
        assert "s_endpgm" in "".join(device.representations(program).values())
    try:
        device.alloc(64)
    except OutOfMemoryError as error:
        print(error)
    device.close()
    print("units", t.matrix_units)
    """
    )
    environment = {"RADV_FORCE_FAMILY": family, "VK_DRIVER_FILES": drivers[0], "VK_ICD_FILENAMES": drivers[0]}
    probe = subprocess.run(
        [sys.executable, "-c", "from aule.runtime import vulkan; vulkan.devices()"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "Unknown family" in probe.stderr:
        pytest.skip(f"this Mesa does not know {family}")
    said = run_python(script, CODE=code_file, **environment)
    assert "can only compile" in said


def test_generated_bindings_are_current() -> None:
    if not Path("/usr/share/vulkan/registry/vk.xml").exists():
        pytest.skip("vk.xml (Debian libvulkan-dev) is not installed")
    version = (ROOT / "src/aule/runtime/_vulkan_api.py").read_text().split("vk.xml ")[1].split(". Do")[0]
    text = Path("/usr/share/vulkan/registry/vk.xml").read_text(encoding="utf-8")
    if f"<name>VK_HEADER_VERSION</name> {version.rsplit('.', 1)[1]}<" not in text:
        pytest.skip(f"the registry here is not {version}")
    done = subprocess.run([sys.executable, ROOT / "tools/generate_vulkan.py", "--check"], check=False)
    assert done.returncode == 0
