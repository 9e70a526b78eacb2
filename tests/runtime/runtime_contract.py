"""Tests of both the OpenCL and the WebGPU runtime: a test file subclasses `RuntimeContract` with kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aule.artifact import Artifact, Param
from aule.errors import BackendUnavailableError, ClosedError, InvalidArgumentError, LaunchError, ShaderCompileError
from aule.runtime.base import Allocation, Device

SCALE_PARAMS = (
    Param("out", "buffer", "f32", "write"),
    Param("in", "buffer", "f32"),
    Param("n", "scalar", "i32"),
    Param("factor", "scalar", "f32"),
)
INCREMENT_PARAMS = (Param("x", "buffer", "i32", "readwrite"),)


def fetch(device: Device, allocation: Allocation, like: npt.NDArray[Any], offset: int = 0) -> npt.NDArray[Any]:
    out = np.empty_like(like)
    device.download(allocation, out, offset)
    return out


class RuntimeContract:
    """Tests of one runtime. A test file that subclasses it has a fixture ``device``, open for the whole file.

    Tests that close their device, or exhaust it, open one of their own.
    """

    runtime: ModuleType
    backend: str
    package: str
    """What the runtime imports."""
    scale: Artifact
    """``out[i] = in[i] * factor`` for ``i < n``, in workgroups of 64 threads; takes `SCALE_PARAMS`."""
    increment: Artifact
    """``x[i] += 1`` in workgroups of 32 threads; takes `INCREMENT_PARAMS`, and its source has ``+= 1``."""

    @pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 255, 256, 257, 4095, 4097, 1_000_003])
    def test_round_trip(self, device: Device, nbytes: int) -> None:
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
        allocation = device.alloc(nbytes)
        assert allocation.nbytes == nbytes
        device.upload(allocation, data)
        assert np.array_equal(fetch(device, allocation, data), data)
        device.free(allocation)

    def test_offsets_leave_neighbours_alone(self, device: Device) -> None:
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
    def test_other_element_types_and_zero_dimensions(self, device: Device, dtype: str) -> None:
        allocation = device.alloc(64)
        for shape in [(), (3, 1), (2, 0)]:
            data = np.ones(shape, dtype)
            device.upload(allocation, data)
            assert np.array_equal(fetch(device, allocation, data), data)
        device.free(allocation)

    def test_copies_are_checked(self, device: Device) -> None:
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

    def test_launch_with_buffers_and_scalars(self, device: Device) -> None:
        program = device.load(self.scale)
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

    def test_work_is_ordered(self, device: Device) -> None:
        program = device.load(self.increment)
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

    def test_freed_memory_is_reused_in_order(self, device: Device) -> None:
        program = device.load(self.scale)
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

    def test_memory_is_pooled(self) -> None:
        device = self.runtime.devices()[0]
        first = device.alloc(5000)
        block = first.handle
        device.free(first)
        again = device.alloc(4999)
        assert again.handle is block
        device.close()

    def test_threads_share_a_device(self, device: Device) -> None:
        program = device.load(self.scale)
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

    def test_refused_source(self, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
        code = self.increment.code.replace(b"+= 1", b"+= nonsense_name")
        with pytest.raises(ShaderCompileError) as caught:
            device.load(replace(self.increment, code=code))
        assert "nonsense_name" in caught.value.log
        assert caught.value.source_path is not None
        path = Path(caught.value.source_path)
        assert path.is_relative_to(tmp_path) and path.read_bytes() == code
        device.load(self.increment)  # the device is none the worse for it

    def test_launches_are_checked(self, device: Device) -> None:
        program = device.load(self.scale)
        allocation, source = device.alloc(256), device.alloc(256)
        with pytest.raises(LaunchError, match="expected 4 arguments"):
            device.launch(program, (1, 1, 1), [allocation])
        with pytest.raises(LaunchError, match="'in'"):
            device.launch(program, (1, 1, 1), [allocation, 3, 4, 1.0])
        with pytest.raises(LaunchError, match="'n'"):
            device.launch(program, (1, 1, 1), [allocation, source, source, 1.0])
        with pytest.raises(LaunchError, match="does not fit"):
            device.launch(program, (1, 1, 1), [allocation, source, 2**40, 1.0])
        with pytest.raises(LaunchError, match="grid"):
            device.launch(program, (1, 1, -1), [allocation, source, 1, 1.0])
        with pytest.raises(LaunchError, match="grid"):
            device.launch(program, (1, 1, device.target.max_grid[2] + 1), [allocation, source, 1, 1.0])
        with pytest.raises(LaunchError, match="stream"):
            device.launch(program, (1, 1, 1), [allocation, source, 1, 1.0], stream=1)
        device.launch(program, (0, 1, 1), [allocation, source, 1, 1.0])  # nothing to do is no error
        other = self.runtime.devices()[0]
        with pytest.raises(LaunchError, match="another device"):
            other.launch(program, (1, 1, 1), [allocation, source, 1, 1.0])
        foreign = other.alloc(256)
        with pytest.raises(LaunchError, match="another device"):
            device.launch(program, (1, 1, 1), [allocation, foreign, 1, 1.0])
        other.close()
        device.free(allocation)
        device.free(source)

    def test_time_launch(self, device: Device) -> None:
        program = device.load(self.increment)
        x = np.zeros(32 * 256, np.int32)
        allocation = device.alloc(x.nbytes)
        device.upload(allocation, x)
        device.launch(program, (256, 1, 1), [allocation])
        seconds = device.time_launch(program, (256, 1, 1), [allocation])
        assert 0 < seconds < 5
        assert 0 < device.time_launches([(program, (256, 1, 1), [allocation])] * 2, 3) < 5
        assert np.array_equal(fetch(device, allocation, x), x + 8)
        device.free(allocation)

    def test_free_twice_and_use_after_free(self, device: Device) -> None:
        program = device.load(self.increment)
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

    def test_use_after_close(self) -> None:
        device = self.runtime.devices()[0]
        program = device.load(self.increment)
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
            lambda: device.load(self.increment),
            lambda: device.launch(program, (1, 1, 1), [allocation]),
            lambda: device.time_launch(program, (1, 1, 1), [allocation]),
            device.synchronize,
        ):
            with pytest.raises(ClosedError):
                call()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
    def test_refuses_to_work_after_fork(self) -> None:
        script = """
        import importlib, os, sys
        import numpy as np
        from aule.errors import BackendUnavailableError, DeviceLostError

        runtime = importlib.import_module(sys.argv[1])
        device = runtime.devices()[0]
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
                    runtime.devices()
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
        command = [sys.executable, "-c", textwrap.dedent(script), self.runtime.__name__]
        subprocess.run(command, check=True, timeout=120)

    def test_missing_package_names_the_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, self.package, None)
        with pytest.raises(BackendUnavailableError, match=rf'pip install "aule-attention\[{self.backend}\]"') as caught:
            self.runtime.devices()
        assert caught.value.code == f"AULE_ERROR_{self.backend.upper()}_INIT"
