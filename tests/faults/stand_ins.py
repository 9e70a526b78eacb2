"""Points in the stand-ins for CUDA's and Metal's drivers."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import fake_metal
import msl_shim
import pytest
from drivers import Driver
from injector import Injector

from aule.errors import LaunchError, OutOfMemoryError, ShaderCompileError
from aule.runtime import _cuda_driver as cu

_SOURCE = Path(__file__).parents[1] / "runtime" / "fake_libcuda.c"
_CU_CODES = {"memory": 2, "lost": 700, "refused": 999}
_ENDS = {
    "memory_free": "memory_allocate",
    "stream_destroy": "stream_create",
    "event_destroy": "event_create",
    "module_unload": "module_load",
    "context_release": "context_retain",
    "context_pop": "context_push",
}
"""What gives back what another call took. These never fail: nothing could be done about it."""
_GPU_CODES = {"memory": 8, "lost": 11, "refused": 1}


@functools.cache
def _library() -> Any:
    """The stand-in for libcuda, built once."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in for libcuda")
    folder = tempfile.TemporaryDirectory(prefix="aule-fake-cuda-")
    path = Path(folder.name) / "libfake.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(path), str(_SOURCE)], check=True)
    return folder, path


class Cuda(Driver):
    """The CUDA runtime; kernels do nothing."""

    backend, kinds, computes = "cuda", ("memory", "lost", "refused"), False

    def __init__(self, injector: Injector) -> None:
        super().__init__(injector)
        self.live: Counter[str] = Counter()

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        driver = cu.Driver([str(_library()[1])])
        api = driver.api

        class Proxy:
            def __getattr__(proxy, name: str) -> Any:
                made = self._wrapped(name, getattr(api, name))
                setattr(proxy, name, made)
                return made

        for place in ("launch_kernel", "launch_kernel_ex", "get_current", "func_load"):
            setattr(driver, place, self._wrapped(place, getattr(driver, place)))
        driver.api = Proxy()  # type: ignore[assignment]
        patch.setattr(cu, "open_driver", lambda library: driver)

    def _wrapped(self, name: str, function: Any) -> Any:
        ends, begins = _ENDS.get(name), name in _ENDS.values()

        def call(*args: Any) -> int:
            fallible = ends is None and not name.startswith("error_")
            if fallible and self.injector.fails("driver", name):
                return _CU_CODES[self.injector.kind]
            code = int(function(*args))
            if not code and begins:
                self.live[name] += 1
            elif not code and ends is not None:
                self.live[ends] -= 1
            return code

        return call

    def renew(self) -> None:
        super().renew()
        if "context_push" in self.injector.failed:  # a context that cannot be entered keeps its contents
            self.live.clear()
        assert not +self.live, f"not given back: {+self.live}"

    def held(self) -> Counter[str]:
        device: Any = self.device()
        device.empty_cache()
        return Counter(self.live)


class Metal(Driver):
    """The Metal runtime; the MSL shim runs the kernels."""

    backend, kinds = "metal", ("memory", "lost", "refused")
    also = OutOfMemoryError, LaunchError, ShaderCompileError  # nil is all that one is told
    creations = (
        (fake_metal.FakeNative, "newBufferWithLength_options_", None),
        (fake_metal.FakeNative, "newLibraryWithSource_options_error_", (None, None)),
        (fake_metal.FakeNative, "newComputePipelineStateWithFunction_error_", (None, None)),
        (fake_metal.FakeNative, "newCommandQueue", None),
        (fake_metal.FakeQueue, "commandBuffer", None),
        (fake_metal.FakeCommand, "computeCommandEncoder", None),
    )

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        if not msl_shim.available():
            pytest.skip("no g++ to run Metal's kernels")
        fake_metal.install(patch)
        patch.setattr(fake_metal.FakeNative, "newCommandQueue", lambda gpu: fake_metal.FakeQueue(msl_shim.execute))
        for owner, name, nothing in self.creations:
            patch.setattr(owner, name, self._wrapped(name, getattr(owner, name), nothing))
        run = fake_metal.FakeCommand.run

        def failing(command: fake_metal.FakeCommand) -> None:
            if self.injector.fails("driver", "FakeCommand.run"):
                command.queue.fail_with = _GPU_CODES[self.injector.kind]
            run(command)

        patch.setattr(fake_metal.FakeCommand, "run", failing)

    def _wrapped(self, name: str, function: Any, nothing: Any) -> Any:
        def call(*args: Any) -> Any:
            return nothing if self.injector.fails("driver", name) else function(*args)

        return call

    def held(self) -> Counter[str]:
        device: Any = self.device()
        device._reclaim()
        kept = sum(b.size for buffers in device._cache.values() for b in buffers)
        return Counter({"pooled bytes": kept, "commands": len(device._pending)})
