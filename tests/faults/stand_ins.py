"""Points in the stand-ins for CUDA's, AMD's and Metal's drivers."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import fake_metal
import hip_standin
import msl_shim
import pytest
from drivers import Driver
from injector import Injector

from aule.errors import LaunchError, OutOfMemoryError, ShaderCompileError
from aule.runtime import _cuda_driver as cu
from aule.runtime import _hip_driver
from aule.runtime._stream_driver import Functions, Table

_SOURCE = Path(__file__).parents[1] / "runtime" / "fake_libcuda.c"
_CODES = {"memory": 2, "lost": 700, "refused": 999}
"""Of CUDA and HIP."""
_COMPILER_CODES = {"memory": 1, "refused": 6}
"""hiprtcResult. The compiler needs no device, so it cannot lose one."""
_ENDS = {
    "memory_free": "memory_allocate",
    "stream_destroy": "stream_create",
    "event_destroy": "event_create",
    "module_unload": "module_load",
    "context_release": "context_retain",
    "context_pop": "context_push",
    "destroy": "create",  # hiprtc's programs
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


@functools.cache
def _two_gpus() -> hip_standin.Libraries:
    """The stand-in for AMD's libraries, with two devices."""
    if not hip_standin.available():
        pytest.skip("no g++ to build the stand-in for AMD's libraries")
    libraries = hip_standin.Libraries()
    libraries.runtime.standin_devices(2)
    return libraries


class Streams(Driver):
    """A runtime with streams (CUDA, HIP), whose functions return codes."""

    kinds = "memory", "lost", "refused"
    enters: tuple[str, ...] = ()
    """What makes a device's context current. If it fails in `Device.close`, the contents stay."""

    def __init__(self, injector: Injector) -> None:
        super().__init__(injector)
        self.live: Counter[str] = Counter()

    def wrapped(self, name: str, function: Any, codes: dict[str, int] = _CODES) -> Any:
        """The function with a point, which counts what it takes and gives back."""
        ends, begins = _ENDS.get(name), name in _ENDS.values()

        def call(*args: Any) -> int:
            gives_back = ends is not None or (name == "device_select" and args == (0,))
            known = self.injector.kind in ("", *codes)
            if known and not gives_back and self.injector.fails("driver", name):
                return codes[self.injector.kind]
            code = int(function(*args))
            if not code and begins:
                self.live[name] += 1
            elif not code and ends is not None:
                self.live[ends] -= 1
            return code

        return call

    def renew(self) -> None:
        super().renew()
        if set(self.enters) & set(self.injector.failed):
            self.live.clear()
        assert not +self.live, f"not given back: {+self.live}"

    def held(self) -> Counter[str]:
        device: Any = self.device()
        device.empty_cache()
        return Counter(self.live)


class Cuda(Streams):
    """The CUDA runtime; kernels do nothing."""

    backend, computes, enters = "cuda", False, ("context_push",)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        driver = cu.Driver([str(_library()[1])])
        api = driver.api

        class Proxy:
            def __getattr__(proxy, name: str) -> Any:
                function = getattr(api, name)
                made = function if name.startswith("error_") else self.wrapped(name, function)
                setattr(proxy, name, made)
                return made

        for place in ("launch_kernel", "launch_kernel_ex", "get_current", "func_load", "encode_tensor_map"):
            setattr(driver, place, self.wrapped(place, getattr(driver, place)))
        driver.api = Proxy()  # type: ignore[assignment]
        patch.setattr(cu, "open_driver", lambda library: driver)


class Hip(Streams):
    """The HIP runtime on the second of two devices, so that it must be selected; g++ compiles the kernels.

    Each `renew` also unloads the libraries, so that loading them is a point, too.
    """

    backend, enters = "hip:1", ("device_current", "device_select")

    def __init__(self, injector: Injector) -> None:
        super().__init__(injector)
        self._driver: _hip_driver.Driver | None = None

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        libraries, load = _two_gpus(), _hip_driver.load_library

        def load_or_fail(names: list[str]) -> Any:
            if self.injector.kind in ("", "refused") and self.injector.fails("driver", "load_library"):
                return f"none of {names}"
            return load(names)

        def opened(folder: str | None) -> _hip_driver.Driver:
            if self._driver is None:
                driver = _hip_driver.Driver(libraries.folder)
                driver.launch_kernel = self.wrapped("launch_kernel", driver.launch_kernel)
                driver._properties = self.wrapped("properties", driver._properties)
                self._driver = driver
            return self._driver

        class Points(Functions):
            def __init__(found, library: Any, table: Table) -> None:
                super().__init__(library, table)
                codes = _COMPILER_CODES if table is _hip_driver.COMPILER_FUNCTIONS else _CODES
                for name in table:
                    if not name.startswith("error_"):
                        setattr(found, name, self.wrapped(name, getattr(found, name), codes))

        patch.setattr(_hip_driver, "load_library", load_or_fail)
        patch.setattr(_hip_driver, "Functions", Points)
        patch.setattr(_hip_driver, "open_driver", opened)

    def renew(self) -> None:
        super().renew()
        self._driver = None


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
