"""The CUDA runtime against a stand-in for libcuda that works on host memory (fake_libcuda.c)."""

from __future__ import annotations

import ctypes
import gc
import glob
import itertools
import os
import shutil
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from aule import settings
from aule.artifact import Artifact, Param, TensorMap
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
from aule.runtime import cuda
from aule.runtime._cuda_driver import read_target
from aule.runtime._stream_pool import Block, Pool
from aule.runtime.base import Allocation
from aule.runtime.cuda import CudaDevice
from aule.target import WARPGROUP_UNITS

SOURCE = Path(__file__).with_name("fake_libcuda.c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
MIB = 1 << 20

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler to build the stand-in for libcuda")


class Fake:
    """One copy of the stand-in, with state of its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lib = ctypes.CDLL(path)
        self.lib.fake_log.restype = ctypes.c_char_p
        self.lib.fake_memory.argtypes = [ctypes.c_size_t]
        self.lib.fake_memory_used.restype = ctypes.c_size_t
        self.lib.fake_capture.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.lib.fake_last.restype = ctypes.POINTER(ctypes.c_uint64)
        self.lib.fake_function_attribute.argtypes = [ctypes.c_void_p, ctypes.c_int]

    def calls(self) -> list[str]:
        """Names of the driver calls since the last look."""
        names: list[str] = self.lib.fake_log().decode().split()
        self.lib.fake_clear_log()
        return names

    def fail(self, name: str, code: int, after: int = 0) -> None:
        self.lib.fake_fail(name.encode(), code, after)

    def last(self) -> dict[str, list[int] | int]:
        words = self.lib.fake_last()
        return {
            "grid": list(words[0:3]),
            "block": list(words[3:6]),
            "shared": words[6],
            "stream": words[7],
            "values": list(words[8:24]),
            "early": words[24],
        }

    def tensor(self, i: int, rank: int) -> dict[str, int | list[int]]:
        """A tensor map of the last launch, as the arguments of cuTensorMapEncodeTiled."""
        words = self.lib.fake_last()[25 + 16 * i : 41 + 16 * i]
        kinds = {name: words[1] >> shift & 255 for shift, name in ((0, "type"), (8, "swizzle"), (16, "promotion"))}
        assert words[1] >> 24 == rank
        sizes, strides, box = words[2:][:rank], words[2 + rank :][: rank - 1], words[1 + 2 * rank :][:rank]
        return {"address": words[0], **kinds, "sizes": sizes, "strides": strides, "box": box}

    def device(self) -> CudaDevice:
        device = cuda.devices(self.path)[0]
        assert isinstance(device, CudaDevice)
        return device


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert COMPILER is not None
    path = tmp_path_factory.mktemp("fake") / "libfake.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE)], check=True)
    return path


@pytest.fixture
def fake(built: Path, tmp_path: Path) -> Fake:
    # A copy under a name of its own is a library with state of its own.
    return Fake(shutil.copy(built, str(tmp_path / "libfakecuda.so")))


@pytest.fixture
def device(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path / "cache"))
    device = fake.device()
    yield device
    device.close()
    assert fake.lib.fake_depth() == 0, "a context was left on the stack"
    assert fake.lib.fake_retained() == 0
    assert fake.lib.fake_memory_used() == 0


def kernel(params: str = "", entry: str = "kernel", text: str = "", **more: object) -> Artifact:
    """An artifact by a short text: ``"p i32 f32"`` is a buffer, an i32 and an f32."""
    made = tuple(
        Param(f"p{i}", "buffer", "f32", "readwrite") if word == "p" else Param(f"p{i}", "scalar", word)
        for i, word in enumerate(params.split())
    )
    return Artifact("ptx", f"parameters {len(made)} {text}".encode(), entry, made, 128, **more)  # type: ignore[arg-type]


def test_missing_library() -> None:
    with pytest.raises(BackendUnavailableError, match="install the NVIDIA driver") as caught:
        cuda.devices("/nonexistent/libcuda.so.1")
    assert caught.value.code == "AULE_ERROR_CUDA_INIT"


def test_macos_has_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BackendUnavailableError, match="metal"):
        cuda.devices()


@needs_compiler
def test_stand_in_agrees_with_the_header(tmp_path: Path) -> None:
    headers = glob.glob("/usr/local/cuda*/include/cuda.h")
    if not headers:
        pytest.skip("no cuda.h on this machine")
    command = [str(COMPILER), "-fsyntax-only", "-DWITH_CUDA_H", "-I", os.path.dirname(headers[0]), str(SOURCE)]
    subprocess.run(command, check=True)


@needs_compiler
class TestEnumeration:
    def test_opens_no_context(self, fake: Fake) -> None:
        fake.lib.fake_devices(2)
        first, second = cuda.devices(fake.path)
        assert (first.index, second.index) == (0, 1)
        assert not {"cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuStreamCreate"} & set(fake.calls())
        first.synchronize()
        first.close()
        assert "cuDevicePrimaryCtxRetain" not in fake.calls()

    def test_target(self, fake: Fake) -> None:
        fake.lib.fake_devices(2)
        hopper, turing = (d.target for d in cuda.devices(fake.path))
        assert (hopper.backend, hopper.vendor, hopper.name) == ("cuda", "nvidia", "Fake H200 0")
        assert (hopper.arch, turing.arch) == ("sm_90", "sm_75")
        assert hopper.driver == "CUDA 13.0"
        assert hopper.max_shared_bytes == 232448
        assert hopper.max_grid == (2147483647, 65535, 65535)
        assert hopper.max_threads == 1024 and hopper.subgroup_sizes == (32,) and hopper.compute_units == 132
        assert hopper.memory_bytes == hopper.max_buffer_bytes == 1 << 30
        assert hopper.bf16 and not turing.bf16 and turing.f16
        assert "m16n8k16:bf16:f32" in hopper.matrix_units and turing.matrix_units == ("m16n8k8:f16:f32",)
        assert set(WARPGROUP_UNITS) < set(hopper.matrix_units)
        assert (hopper.overlap, hopper.max_cluster, hopper.tensor_maps) == (True, 8, True)
        assert (turing.overlap, turing.max_cluster, turing.tensor_maps) == (False, 1, False)
        hash(hopper)

    def test_used_as_an_older_one(self, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        fake.lib.fake_devices(2)
        monkeypatch.setenv("AULE_CUDA_ARCH", "80")
        hopper, turing = (d.target for d in cuda.devices(fake.path))
        assert (hopper.arch, hopper.max_shared_bytes, hopper.max_cluster) == ("sm_80", 166912, 1)
        assert not hopper.tensor_maps
        assert "m16n8k16:bf16:f32" in hopper.matrix_units and not set(WARPGROUP_UNITS) & set(hopper.matrix_units)
        assert turing.arch == "sm_75", "an older one stays what it is"
        monkeypatch.setenv("AULE_CUDA_ARCH", "sm_80")
        with pytest.raises(InvalidArgumentError, match=r"expected AULE_CUDA_ARCH to be one of 60, .*, got 'sm_80'"):
            settings.cuda_arch()

    def test_no_device(self, fake: Fake) -> None:
        fake.lib.fake_devices(0)
        with pytest.raises(BackendUnavailableError, match="CUDA_VISIBLE_DEVICES"):
            cuda.devices(fake.path)

    def test_init_fails(self, fake: Fake) -> None:
        fake.fail("cuInit", 100)
        with pytest.raises(BackendUnavailableError, match="CUDA_ERROR_NO_DEVICE"):
            cuda.devices(fake.path)
        assert len(cuda.devices(fake.path)) == 1

    def test_context_refused(self, fake: Fake) -> None:
        device = fake.device()
        fake.fail("cuDevicePrimaryCtxRetain", 46)
        with pytest.raises(BackendUnavailableError, match="exclusively"):
            device.alloc(1)
        device.alloc(1)
        device.close()

    def test_half_opened_is_released(self, fake: Fake) -> None:
        device = fake.device()
        fake.fail("cuEventCreate", 1)
        with pytest.raises(LaunchError):
            device.alloc(1)
        assert fake.lib.fake_retained() == 0 and fake.lib.fake_depth() == 0
        assert "cuStreamDestroy_v2" in fake.calls()
        device.alloc(1)
        assert fake.lib.fake_retained() == 1
        device.close()


@needs_compiler
class TestMemory:
    def test_round_trip(self, device: CudaDevice) -> None:
        data = np.arange(1000, dtype=np.float32)
        allocation = device.alloc(data.nbytes)
        device.upload(allocation, data)
        device.upload(allocation, np.array([7, 8], np.float32), offset=40)
        out = np.empty(10, np.float32)
        device.download(allocation, out, offset=20)
        np.testing.assert_array_equal(out, [5, 6, 7, 8, 9, 7, 8, 12, 13, 14])

    def test_pool_calls_the_driver_once(self, fake: Fake, device: CudaDevice) -> None:
        for _ in range(100):
            allocations = [device.alloc(n) for n in (0, 1, 1000, 100_000, 5 * MIB, 40 * MIB)]
            assert len({a.address for a in allocations}) == len(allocations)
            for allocation in allocations:
                device.free(allocation)
        calls = fake.calls()
        assert calls.count("cuMemAlloc_v2") == 3, "one segment for the small ones, one for each large one"
        assert "cuMemFree_v2" not in calls

    def test_blocks_do_not_overlap(self, device: CudaDevice) -> None:
        rng = np.random.default_rng(0)
        live: list[Allocation] = []
        for _ in range(2000):
            if live and rng.random() < 0.5:
                device.free(live.pop(rng.integers(len(live))))
            else:
                live.append(device.alloc(int(2 ** rng.uniform(0, 24))))
            spans = sorted((a.address, a.address + a.nbytes) for a in live)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))

    def test_large_block_keeps_out_small_tenants(self, device: CudaDevice) -> None:
        big = device.alloc(400 * MIB)
        device.free(big)
        little = device.alloc(2 * MIB)
        assert not big.address <= little.address < big.address + 400 * MIB
        assert device.alloc(390 * MIB).address == big.address

    def test_out_of_memory_empties_the_cache_first(self, fake: Fake, device: CudaDevice) -> None:
        fake.lib.fake_memory(64 * MIB)
        for size in (40, 50, 60):
            device.free(device.alloc(size * MIB))
        kept = device.alloc(30 * MIB)
        with pytest.raises(OutOfMemoryError) as caught:
            device.alloc(40 * MIB)
        assert caught.value.requested_bytes == 40 * MIB
        free, total = device.memory_info()
        assert total == 64 * MIB and f"{free} of {total}" in str(caught.value)
        device.upload(kept, np.ones(4, np.float32))
        device.free(kept)
        device.alloc(60 * MIB)

    def test_empty_cache(self, fake: Fake, device: CudaDevice) -> None:
        device.empty_cache()
        kept, dropped = device.alloc(5 * MIB), device.alloc(5 * MIB)
        device.free(dropped)
        used = fake.lib.fake_memory_used()
        device.empty_cache()
        assert 0 < fake.lib.fake_memory_used() < used
        device.upload(kept, np.zeros(5 * MIB, np.uint8))

    def test_free_twice_and_use_after(self, device: CudaDevice) -> None:
        first = device.alloc(64)
        device.free(first)
        device.free(first)
        second = device.alloc(64)
        device.free(first)
        assert device.alloc(64).address != second.address, "a stale free must not give away somebody else's block"
        with pytest.raises(ClosedError):
            device.upload(first, np.zeros(1, np.float32))
        with pytest.raises(ClosedError):
            device.download(first, np.zeros(1, np.float32))

    def test_wrap(self, fake: Fake, device: CudaDevice) -> None:
        class Owner:
            pass

        owner = Owner()
        theirs = np.arange(8, dtype=np.int32)
        before = sys.getrefcount(owner)
        wrapped = device.wrap(theirs.ctypes.data, theirs.nbytes, owner)
        assert wrapped.address == theirs.ctypes.data and sys.getrefcount(owner) == before + 1
        out = np.empty(8, np.int32)
        device.download(wrapped, out)
        np.testing.assert_array_equal(out, theirs)
        assert "cuCtxSynchronize" in fake.calls(), "the owner's stream is not ours"
        device.free(wrapped)
        device.free(wrapped)
        assert sys.getrefcount(owner) == before
        with pytest.raises(ClosedError):
            device.download(wrapped, out)

    @pytest.mark.parametrize(
        ("data", "offset"),
        [(np.zeros(17, np.uint8), 0), (np.zeros(8, np.uint8), 9), (np.zeros(1, np.uint8), -1)],
    )
    def test_out_of_range(self, device: CudaDevice, data: np.ndarray, offset: int) -> None:
        allocation = device.alloc(16)
        with pytest.raises(InvalidArgumentError, match="within the allocation's 16 bytes"):
            device.upload(allocation, data, offset)

    def test_refused_arrays(self, device: CudaDevice) -> None:
        allocation = device.alloc(64)
        with pytest.raises(InvalidArgumentError, match="contiguous"):
            device.upload(allocation, np.zeros((4, 4), np.float32).T[1:])
        read_only = np.zeros(4)
        read_only.flags.writeable = False
        with pytest.raises(InvalidArgumentError, match="writable"):
            device.download(allocation, read_only)
        device.upload(allocation, read_only)
        device.upload(allocation, np.zeros(0))
        with pytest.raises(InvalidArgumentError):
            device.alloc(-1)

    def test_other_device(self, fake: Fake, device: CudaDevice) -> None:
        other = fake.device()
        theirs = other.alloc(16)
        with pytest.raises(DeviceMismatchError):
            device.upload(theirs, np.zeros(1))
        with pytest.raises(DeviceMismatchError):
            device.free(theirs)
        program = other.load(kernel())
        with pytest.raises(DeviceMismatchError):
            device.launch(program, (1, 1, 1), [])
        other.close()


@needs_compiler
class TestLoad:
    def test_statistics_and_log(self, device: CudaDevice) -> None:
        program = device.load(kernel(text="WARN", shared_bytes=100, dynamic_shared=True))
        assert device.statistics(program) == {
            "registers": 168,
            "local_bytes": 24,
            "static_shared_bytes": 16,
            "dynamic_shared_bytes": 100,
            "max_threads": 1024,
        }
        assert program.handle.log == "wgmma serialized"

    def test_refused(self, device: CudaDevice, tmp_path: Path) -> None:
        artifact = kernel(text="BAD", entry="broken")
        with pytest.raises(ShaderCompileError, match=r"broken.*CUDA_ERROR_INVALID_PTX") as caught:
            device.load(artifact)
        assert "line 7" in caught.value.log
        assert caught.value.source_path is not None
        saved = Path(caught.value.source_path)
        assert saved.parent == tmp_path / "cache" / "refused" and saved.suffix == ".ptx"
        assert saved.read_bytes() == artifact.code
        device.load(kernel())

    def test_refused_and_unsaved(self, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path / "file"))
        with pytest.raises(ShaderCompileError) as caught:
            device.load(kernel(text="BAD"))
        assert caught.value.source_path is None

    def test_missing_entry_unloads(self, fake: Fake, device: CudaDevice) -> None:
        with pytest.raises(ShaderCompileError, match="CUDA_ERROR_NOT_FOUND"):
            device.load(kernel(entry="missing"))
        assert fake.calls().count("cuModuleUnload") == 1

    def test_too_many_registers(self, device: CudaDevice) -> None:
        artifact = Artifact("ptx", b"", "fat", (), 256)
        with pytest.raises(ShaderCompileError, match="room for 128"):
            device.load(artifact)

    def test_other_language(self, device: CudaDevice) -> None:
        with pytest.raises(InvalidArgumentError, match="opencl"):
            device.load(Artifact("opencl", b"", "kernel", (), 32))

    def test_memory_error_is_no_compile_error(self, fake: Fake, device: CudaDevice) -> None:
        fake.fail("cuModuleLoadDataEx", 2)
        with pytest.raises(OutOfMemoryError):
            device.load(kernel())

    def test_dynamic_shared(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel(shared_bytes=100_000, dynamic_shared=True))
        function = program.handle.function
        assert fake.lib.fake_function_attribute(function, 8) == 100_000
        # 168 registers x 128 threads: 3 workgroups, for which all of the shared memory is too little.
        assert fake.lib.fake_function_attribute(function, 9) == 100
        device.launch(program, (1, 1, 1), [])
        assert fake.last()["shared"] == 100_000

        # 3 x (9 KiB + 1 KiB) of 228 KiB
        small = device.load(kernel(shared_bytes=9 * 1024))
        assert fake.lib.fake_function_attribute(small.handle.function, 9) == 14
        assert fake.lib.fake_function_attribute(small.handle.function, 8) == 0
        device.launch(small, (1, 1, 1), [])
        assert fake.last()["shared"] == 0

        with pytest.raises(ShaderCompileError, match="smaller tiles"):
            device.load(kernel(shared_bytes=233_000, dynamic_shared=True))


@needs_compiler
class TestLaunch:
    def test_end_to_end(self, device: CudaDevice) -> None:
        program = device.load(kernel("p i32 i32", entry="increment"))
        allocation = device.alloc(400)
        device.upload(allocation, np.arange(100, dtype=np.int32))
        device.launch(program, (1, 1, 1), [allocation, 50, -3])
        out = np.empty(100, np.int32)
        device.download(allocation, out)
        np.testing.assert_array_equal(out, np.arange(100) - 3 * (np.arange(100) < 50))

    def test_packing(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel("i32 p f32 i64 p u32 f64 u64"))
        first, second = device.alloc(16), device.wrap(0xFFFF_8000_0000_0010, 16)
        device.launch(program, (3, 2, 1), [-5, first, 1.5, -(1 << 40), second, 1 << 31, 2.25, 1 << 63])
        last = fake.last()
        assert last["grid"] == [3, 2, 1] and last["block"] == [128, 1, 1]
        assert isinstance(last["values"], list)
        raw = [struct.pack("<Q", v) for v in last["values"][:8]]
        formats = "iQfqQIdQ"
        got = [struct.unpack_from("<" + f, cell)[0] for f, cell in zip(formats, raw, strict=True)]
        assert got == [-5, first.address, 1.5, -(1 << 40), second.address, 1 << 31, 2.25, 1 << 63]

    def test_numpy_scalars(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel("i32 f32"))
        device.launch(program, (1, 1, 1), [np.int64(3), np.float32(0.5)])  # type: ignore[list-item]
        values = fake.last()["values"]
        assert isinstance(values, list) and values[0] & 0xFFFFFFFF == 3

    @pytest.mark.parametrize("args", [[], [1, 2], ["x"], [1 << 31], [0.5]])
    def test_wrong_scalars(self, device: CudaDevice, args: list[object]) -> None:
        program = device.load(kernel("i32"))
        with pytest.raises(InvalidArgumentError, match="p0: i32"):
            device.launch(program, (1, 1, 1), args)  # type: ignore[arg-type]

    def test_wrong_kinds(self, device: CudaDevice) -> None:
        program = device.load(kernel("p i32"))
        allocation = device.alloc(4)
        for args in ([1, 1], [allocation, allocation]):
            with pytest.raises(InvalidArgumentError):
                device.launch(program, (1, 1, 1), args)
        device.free(allocation)
        with pytest.raises(ClosedError):
            device.launch(program, (1, 1, 1), [allocation, 1])

    @pytest.mark.parametrize("grid", [(0, 1, 1), (1, 65536, 1), (1, 1, -1)])
    def test_grid_limits(self, device: CudaDevice, grid: tuple[int, int, int]) -> None:
        program = device.load(kernel())
        with pytest.raises(LaunchError, match="grid"):
            device.launch(program, grid, [])

    def test_does_not_wait(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel("p"))
        args = [device.alloc(4)]
        fake.calls()
        device.launch(program, (1, 1, 1), args)
        assert fake.calls() == ["cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuLaunchKernel", "cuCtxPopCurrent_v2"]
        assert fake.last()["stream"] == device.stream != 0

    def test_callers_stream(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel("p"))
        pooled, wrapped = device.alloc(4), device.wrap(4096, 4)
        fake.lib.fake_push_primary()
        fake.calls()
        device.launch(program, (1, 1, 1), [wrapped], stream=0)
        assert fake.calls() == ["cuCtxGetCurrent", "cuLaunchKernel"] and fake.last()["stream"] == 0
        device.launch(program, (1, 1, 1), [pooled], stream=0)
        fence = ["cuEventRecord", "cuStreamWaitEvent"]
        assert fake.calls() == ["cuCtxGetCurrent", "cuStreamIsCapturing", *fence, "cuLaunchKernel", *fence]
        device.launch(program, (1, 1, 1), [pooled], stream=device.stream)
        assert not {"cuEventRecord", "cuStreamIsCapturing"} & set(fake.calls())
        fake.lib.fake_pop()

    def test_capture(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel("p"))
        pooled = device.alloc(4)
        stream = ctypes.c_void_p()
        fake.lib.fake_push_primary()
        fake.lib.cuStreamCreate(ctypes.byref(stream), 1)
        fake.lib.fake_capture(stream, 1)
        fake.calls()
        device.launch(program, (1, 1, 1), [pooled], stream=stream.value)
        prepared = device.prepare(program, (1, 1, 1), [pooled])
        prepared.launch((pooled.address,), stream.value or 0)
        assert not {"cuEventRecord", "cuStreamWaitEvent", "cuStreamSynchronize", "cuMemAlloc_v2"} & set(fake.calls())
        assert device.capture(stream.value or 0) == 7
        fake.lib.fake_capture(stream, 0)
        assert device.capture(stream.value or 0) == 0
        fake.lib.fake_pop()

    def test_context_is_restored(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel("p"))
        allocation = device.alloc(16)
        fake.lib.fake_push_other()
        actions: list[Callable[[], object]] = [
            lambda: device.launch(program, (1, 1, 1), [allocation]),
            lambda: device.launch(program, (1, 1, 1), [allocation], stream=0),
            lambda: device.prepare(program, (1, 1, 1), [None]).launch((1,), 0),
            lambda: device.upload(allocation, np.zeros(2)),
            lambda: device.download(allocation, np.zeros(2)),
            lambda: device.alloc(3 * MIB),
            lambda: device.load(kernel()),
            lambda: device.time_launch(program, (1, 1, 1), [allocation]),
            device.synchronize,
            device.memory_info,
            device.empty_cache,
        ]
        for action in actions:
            fake.calls()
            action()
            calls = fake.calls()
            assert calls.count("cuCtxPushCurrent_v2") == calls.count("cuCtxPopCurrent_v2") >= 1
            current = ctypes.c_void_p()
            fake.lib.cuCtxGetCurrent(ctypes.byref(current))
            assert current.value == 0x2000 and fake.lib.fake_depth() == 1
        fake.lib.fake_pop()
        fake.lib.fake_push_primary()
        fake.calls()
        for action in actions:
            action()
        assert "cuCtxPushCurrent_v2" not in fake.calls()
        fake.lib.fake_pop()

    def test_time(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel("p"))
        allocation = device.alloc(4)
        fake.calls()
        assert device.time_launch(program, (1, 1, 1), [allocation]) == pytest.approx(2.5e-3)
        calls = fake.calls()
        assert calls.count("cuEventCreate") == calls.count("cuEventDestroy_v2") == 2
        at = calls.index("cuEventRecord")
        assert calls[at : at + 3] == ["cuEventRecord", "cuLaunchKernel", "cuEventRecord"]
        fake.lib.fake_memory(10 * MIB)
        device.empty_cache()
        assert device.time_launch(program, (1, 1, 1), [allocation]) == pytest.approx(2.5e-3)
        assert "cuMemsetD32Async" not in fake.calls()


@needs_compiler
class TestPrepared:
    def test_pointers_and_scalars(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel("p i32 p f32", shared_bytes=60_000, dynamic_shared=True))
        prepared = device.prepare(program, (7, 8, 9), [None, 11, device.alloc(4), 0.5])
        other = device.prepare(program, (1, 1, 1), [None, 22, None, 0.25])
        other.launch((1, 2), 0)
        prepared.launch((1 << 47, 3), 0x2)
        last = fake.last()
        half = struct.unpack("<I", struct.pack("<f", 0.5))[0]
        assert last["grid"] == [7, 8, 9] and last["shared"] == 60_000 and last["stream"] == 2
        assert isinstance(last["values"], list)
        assert last["values"][:4] == [1 << 47, 11, 3, half]
        prepared.launch([5, 6], 0)
        assert fake.last()["values"][:4] == [5, 11, 6, half]  # type: ignore[index]

    def test_only_the_launch(self, fake: Fake, device: CudaDevice) -> None:
        prepared = device.prepare(device.load(kernel("p p")), (1, 1, 1), [None, None])
        fake.lib.fake_push_primary()
        fake.calls()
        prepared.launch((1, 2), 0)
        assert fake.calls() == ["cuLaunchKernelEx"]
        assert not fake.last()["early"]
        fake.lib.fake_pop()
        launch = "cuLaunchKernelEx"
        pushed = [launch, "cuCtxGetCurrent", "cuCtxPushCurrent_v2", launch, "cuCtxPopCurrent_v2"]
        prepared.launch((3, 4), 0)
        assert fake.calls() == pushed and fake.last()["values"][:2] == [3, 4]  # type: ignore[index]
        fake.lib.fake_push_other()
        prepared.launch((5, 6), 0)
        assert fake.calls() == pushed and fake.last()["values"][:2] == [5, 6]  # type: ignore[index]
        fake.lib.fake_pop()

    def test_kernels_that_wait_themselves_may_start_early(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel("p i32", shared_bytes=60_000, dynamic_shared=True, dependent_launch=True))
        prepared = device.prepare(program, (7, 8, 9), [None, 11])
        memory = device.alloc(4)
        fake.lib.fake_push_primary()
        fake.calls()
        gc.collect()  # nobody but the launch holds what the driver reads
        prepared.launch((1 << 47,), 0x2)
        fake.lib.fake_pop()
        assert [name for name in fake.calls() if "Launch" in name] == ["cuLaunchKernelEx"]
        last = fake.last()
        assert (last["grid"], last["block"], last["shared"], last["stream"]) == ([7, 8, 9], [128, 1, 1], 60_000, 2)
        assert last["values"][:2] == [1 << 47, 11] and last["early"]  # type: ignore[index]
        device.launch(program, (3, 1, 1), [memory, 12])
        assert fake.last()["grid"] == [3, 1, 1] and fake.last()["stream"] == device.stream
        assert [name for name in fake.calls() if "Launch" in name] == ["cuLaunchKernelEx"]

    def test_refusals(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel("p i32"))
        prepared = device.prepare(program, (1, 1, 1), [None, 1])
        for pointers in ((), (1, 2), (-1,), ("x",)):
            with pytest.raises(InvalidArgumentError):
                prepared.launch(pointers, 0)  # type: ignore[arg-type]
        for given in ([1], [None, "x"], [None, 1 << 40]):
            with pytest.raises(InvalidArgumentError):
                device.prepare(program, (1, 1, 1), given)
        with pytest.raises(LaunchError):
            device.prepare(program, (0, 1, 1), [None, 1])
        fake.fail("cuLaunchKernelEx", 1)
        with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE"):
            prepared.launch((1,), 0)
        prepared.launch((1,), 0)
        device.close()
        with pytest.raises(ClosedError):
            prepared.launch((1,), 0)

    def test_threads_do_not_mix_arguments(self, device: CudaDevice) -> None:
        program = device.load(kernel("p i32 i32", entry="increment"))
        counters = [np.zeros(1, np.int32) for _ in range(4)]
        prepared = device.prepare(program, (1, 1, 1), [None, 1, 1])

        def work(counter: np.ndarray) -> None:
            for _ in range(500):
                prepared.launch((counter.ctypes.data,), 0)

        threads = [threading.Thread(target=work, args=(c,)) for c in counters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [int(c[0]) for c in counters] == [500] * 4


def with_tensors() -> Artifact:
    """A kernel with a tensor of four axes, [batch, heads, rows, 64] in elements of bf16, and one of two."""
    names = ("offset", "rows", "heads", "batch", "row_stride", "head_stride", "batch_stride")
    scalars = [Param(n, "scalar", "i32" if n in ("rows", "heads", "batch") else "i64") for n in names]
    params = (*(Param(n, "buffer", "bf16") for n in "ab"), *scalars)
    wide = TensorMap(
        "wide", "b", "offset", (64, *names[1:4]), ("row_stride", "head_stride", "batch_stride"), (64, 128, 1, 1), 128
    )
    flat = TensorMap("flat", "a", "offset", (32, "rows"), ("row_stride",), (16, 8), 32)
    return Artifact("ptx", b"parameters 9 tensors 2", "mapped", params, 128, maps=(wide, flat))


@needs_compiler
class TestTensorMaps:
    SCALARS = (8, 1000, 4, 1, 256, 64, 3)  # an axis of one element, whose stride does not count

    def expected(self, a: int, b: int) -> list[dict[str, int | list[int]]]:
        wide = {"address": b + 16, "type": 9, "swizzle": 3, "promotion": 2, "sizes": [64, 1000, 4, 1],
                "strides": [512, 128, 16], "box": [64, 128, 1, 1]}  # fmt: skip
        flat = {"address": a + 16, "type": 9, "swizzle": 1, "promotion": 2, "sizes": [32, 1000], "strides": [512],
                "box": [16, 8]}  # fmt: skip
        return [wide, flat]  # type: ignore[list-item]

    def got(self, fake: Fake) -> list[dict[str, int | list[int]]]:
        return [fake.tensor(0, 4), fake.tensor(1, 2)]

    def test_encoded_again_when_a_buffer_moves(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(with_tensors())
        prepared = device.prepare(program, (1, 1, 1), [None, None, *self.SCALARS])
        other = device.prepare(program, (1, 1, 1), [None, None, *self.SCALARS])
        fake.lib.fake_push_primary()
        fake.calls()
        gc.collect()  # nobody but the launch holds what the driver reads
        prepared.launch((4096, 8192), 0)
        assert fake.calls() == ["cuTensorMapEncodeTiled"] * 2 + ["cuLaunchKernelEx"]
        assert self.got(fake) == self.expected(4096, 8192)
        assert fake.last()["values"][:4] == [4096, 8192, 8, 1000]  # type: ignore[index]
        prepared.launch((4096, 8192), 0)
        assert fake.calls() == ["cuLaunchKernelEx"]
        other.launch((64, 128), 0)
        fake.calls()
        prepared.launch((4096, 1024), 0)
        assert fake.calls() == ["cuTensorMapEncodeTiled", "cuLaunchKernelEx"]
        assert self.got(fake) == self.expected(4096, 1024)
        prepared.launch((4096, 8192), 0)
        assert fake.calls() == ["cuLaunchKernelEx"], "addresses that come back are known"
        assert self.got(fake) == self.expected(4096, 8192)
        for i in range(100):
            prepared.launch((4096, 16 * i), 0)
            assert self.got(fake) == self.expected(4096, 16 * i)
        fake.lib.fake_pop()

    def test_launch(self, fake: Fake, device: CudaDevice) -> None:
        """Scalars may change from launch to launch."""
        program = device.load(with_tensors())
        a, b = device.alloc(4096), device.alloc(4096)
        for rows in (1000, 2000):
            device.launch(program, (1, 1, 1), [a, b, 8, rows, *self.SCALARS[2:]])
            got = self.got(fake)
            assert [got[0]["sizes"], got[1]["sizes"]] == [[64, rows, 4, 1], [32, rows]]
            assert [x["address"] for x in got] == [b.address + 16, a.address + 16]

    def test_capture(self, fake: Fake, device: CudaDevice) -> None:
        """Nothing but the launch is recorded: maps are encoded on the host."""
        prepared = device.prepare(device.load(with_tensors()), (1, 1, 1), [None, None, *self.SCALARS])
        stream = ctypes.c_void_p()
        fake.lib.fake_push_primary()
        fake.lib.cuStreamCreate(ctypes.byref(stream), 1)
        fake.lib.fake_capture(stream, 1)
        fake.calls()
        for pointers in ((4096, 8192), (512, 1024)):
            prepared.launch(pointers, stream.value or 0)
            assert fake.calls() == ["cuTensorMapEncodeTiled"] * 2 + ["cuLaunchKernelEx"]
            assert self.got(fake) == self.expected(*pointers)
        fake.lib.fake_pop()

    @pytest.mark.parametrize(
        ("pointers", "scalars"),
        [((4096, 8200), SCALARS), ((4096, 8192), (4, *SCALARS[1:])), ((4096, 8192), (8, 0, *SCALARS[2:])),
         ((4096, 8192), (*SCALARS[:4], 252, *SCALARS[5:])), ((4096, 8192), (*SCALARS[:4], 1 << 39, *SCALARS[5:]))],
        ids=["address", "offset", "empty", "stride", "far"],
    )  # fmt: skip
    def test_refused(self, fake: Fake, device: CudaDevice, pointers: tuple[int, int], scalars: tuple[int, ...]) -> None:
        prepared = device.prepare(device.load(with_tensors()), (1, 1, 1), [None, None, *scalars])
        with pytest.raises(LaunchError, match=r"launch of mapped.*CUDA_ERROR_INVALID_VALUE"):
            prepared.launch(pointers, 0)
        assert "cuLaunchKernelEx" not in fake.calls()

    def test_wrong_context(self, fake: Fake, device: CudaDevice) -> None:
        """A driver that wants a context for encoding has one the second time."""
        prepared = device.prepare(device.load(with_tensors()), (1, 1, 1), [None, None, *self.SCALARS])
        fake.fail("cuTensorMapEncodeTiled", 201)
        prepared.launch((4096, 8192), 0)
        assert "cuCtxPushCurrent_v2" in fake.calls() and self.got(fake) == self.expected(4096, 8192)

    def test_old_driver(self, fake: Fake, device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device._driver, "encode_tensor_map", None)
        assert not read_target(device._driver, 0).tensor_maps  # type: ignore[arg-type]
        with pytest.raises(ShaderCompileError, match=r"expected a driver of CUDA 12\.0 or later"):
            device.load(with_tensors())


@needs_compiler
class TestErrors:
    def test_launch_error_leaves_the_device_usable(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel())
        fake.fail("cuLaunchKernel", 1)
        with pytest.raises(LaunchError, match=r"CUDA_ERROR_INVALID_VALUE.*what happened"):
            device.launch(program, (1, 1, 1), [])
        device.launch(program, (1, 1, 1), [])
        fake.fail("cuCtxSynchronize", 1234)
        with pytest.raises(LaunchError, match="CUDA error 1234"):
            device.synchronize()

    def test_lost_is_sticky(self, fake: Fake) -> None:
        device = fake.device()
        program = device.load(kernel("p"))
        allocation = device.alloc(16)
        prepared = device.prepare(program, (1, 1, 1), [None])
        fake.fail("cuCtxSynchronize", 700)
        with pytest.raises(DeviceLostError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            device.synchronize()
        fake.calls()
        actions: list[Callable[[], object]] = [
            lambda: device.launch(program, (1, 1, 1), [allocation]),
            lambda: prepared.launch((1,), 0),
            lambda: device.alloc(1),
            lambda: device.upload(allocation, np.zeros(1)),
            device.synchronize,
        ]
        for action in actions:
            with pytest.raises(DeviceLostError):
                action()
        assert fake.calls() == []
        device.free(allocation)
        device.close()
        assert fake.lib.fake_retained() == 0
        with pytest.raises(ClosedError):
            device.alloc(1)

    def test_lost_in_a_launch(self, fake: Fake) -> None:
        device = fake.device()
        program = device.load(kernel())
        fake.fail("cuLaunchKernel", 719)
        with pytest.raises(DeviceLostError):
            device.launch(program, (1, 1, 1), [])
        device.close()


@needs_compiler
class TestLife:
    def test_close(self, fake: Fake) -> None:
        device = fake.device()
        program = device.load(kernel("p"))
        device.load(kernel())
        allocation = device.alloc(5 * MIB)
        device.close()
        calls = fake.calls()
        assert calls.count("cuModuleUnload") == 2
        assert calls.count("cuDevicePrimaryCtxRelease_v2") == calls.count("cuDevicePrimaryCtxRetain") == 1
        assert calls.count("cuMemFree_v2") == 1 and calls.count("cuStreamDestroy_v2") == 1
        assert fake.lib.fake_memory_used() == 0 and fake.lib.fake_depth() == 0
        device.close()
        device.free(allocation)
        actions: list[Callable[[], object]] = [
            lambda: device.alloc(1),
            lambda: device.launch(program, (1, 1, 1), [device.wrap(1, 1)]),
            lambda: device.load(kernel()),
            lambda: device.prepare(program, (1, 1, 1), [None]),
            lambda: device.statistics(program),
            device.synchronize,
            device.memory_info,
            device.empty_cache,
        ]
        for action in actions:
            with pytest.raises(ClosedError):
                action()
        assert fake.calls() == []
        reopened = fake.device()
        reopened.alloc(1)
        reopened.close()

    def test_close_waits_for_calls_under_way(self, fake: Fake) -> None:
        device = fake.device()
        device.alloc(1)
        inside, leave = threading.Event(), threading.Event()

        def wait() -> None:
            with device._context.entered():
                inside.set()
                leave.wait()

        waiter = threading.Thread(target=wait)
        closer = threading.Thread(target=device.close)
        waiter.start()
        inside.wait()
        fake.calls()
        closer.start()
        closer.join(0.05)
        assert closer.is_alive() and "cuDevicePrimaryCtxRelease_v2" not in fake.calls()
        leave.set()
        waiter.join()
        closer.join()
        assert fake.lib.fake_retained() == 0

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
    def test_fork(self, fake: Fake, device: CudaDevice) -> None:
        program = device.load(kernel("p"))
        allocation = device.alloc(16)
        prepared = device.prepare(program, (1, 1, 1), [None])
        fake.calls()
        reader, writer = os.pipe()
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with device._context.lock:
                held.set()
                release.wait()

        # Another thread has the lock when the process forks.
        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            report = []
            actions: list[Callable[[], object]] = [
                lambda: device.alloc(1),
                lambda: prepared.launch((1,), 0),
                lambda: device.launch(program, (1, 1, 1), [allocation]),
                device.synchronize,
                lambda: cuda.devices(fake.path),
            ]
            for action in actions:
                try:
                    action()
                    report.append("nothing")
                except AuleError as error:
                    report.append(type(error).__name__ + ("+fork" if "fork" in str(error) else ""))
            device.free(allocation)
            device.close()
            report.extend(fake.calls())
            os.write(writer, " ".join(report).encode())
            os._exit(0)
        release.set()
        holder.join()
        os.waitpid(child, 0)
        assert os.read(reader, 10000).decode().split() == ["DeviceLostError+fork"] * 4 + [
            "BackendUnavailableError+fork"
        ]
        os.close(reader)
        os.close(writer)
        device.upload(allocation, np.zeros(2))

    def test_threads(self, device: CudaDevice) -> None:
        program = device.load(kernel("p i32 i32", entry="increment"))
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for i in range(100):
                    n = 10 + (seed * 37 + i * 11) % 500
                    allocation = device.alloc(4 * n)
                    device.upload(allocation, np.full(n, seed, np.int32))
                    device.launch(program, (1, 1, 1), [allocation, n, i])
                    out = np.empty(n, np.int32)
                    device.download(allocation, out)
                    device.free(allocation)
                    np.testing.assert_array_equal(out, seed + i)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_pool_merges() -> None:
    pool = Pool()
    assert pool.take(100) is None
    pool.add(0, Pool.segment_size(100), 100)
    blocks = [pool.take(512) for _ in range(3)]
    assert all(isinstance(b, Block) for b in blocks)
    assert pool.drop_free_segments() == []
    for block in (blocks[1], blocks[0], blocks[2]):
        assert block is not None
        pool.give(block)
    assert pool.take(Pool.SMALL) is not None
    assert pool.drop_free_segments() == []
    assert pool.segments == {0: Pool.SEGMENT}
