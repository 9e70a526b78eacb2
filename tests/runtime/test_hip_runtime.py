"""The HIP runtime on libraries that stand in for AMD's (`hip_standin`), and against the prototypes of AMD's headers."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hip_standin
import numpy as np
import pytest
from hip_standin import Libraries

from aule.artifact import Artifact, Param
from aule.backends import registry
from aule.errors import (
    AuleError,
    BackendUnavailableError,
    ClosedError,
    DeviceLostError,
    InvalidArgumentError,
    LaunchError,
    OutOfMemoryError,
    ShaderCompileError,
)
from aule.runtime import _hip_driver, _hip_library, hip
from aule.runtime.hip import HipDevice

needs_compiler = pytest.mark.skipif(not hip_standin.available(), reason="no g++ to build the stand-in")

SCALE = """// scale
#define AULE_WAVE 32
AULE_KERNEL(64) void scale(
    f32* out, const f32* in, const i32 n, const f32 factor)
{
    const i32 i = aule::group_id_x() * 64 + aule::thread_id();
    if (i < n) out[i] = in[i] * factor;
}
"""
PARAMS = (
    Param("out", "buffer", "f32", "write"),
    Param("in", "buffer", "f32"),
    Param("n", "scalar", "i32"),
    Param("factor", "scalar", "f32"),
)


def kernel(source: str = SCALE, entry: str = "scale", **more: Any) -> Artifact:
    return Artifact("hip", source.encode(), entry, PARAMS, 64, **more)


@pytest.fixture(scope="module")
def built() -> Libraries:
    return Libraries()


@pytest.fixture
def libraries(built: Libraries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Libraries]:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path / "cache"))
    built.calls()
    yield built
    built.runtime.standin_recover()
    built.runtime.standin_memory(1 << 32)


@pytest.fixture
def device(libraries: Libraries) -> Iterator[HipDevice]:
    """The second of several devices: another one is selected."""
    device = libraries.devices()[1]
    yield device
    device.close()
    assert libraries.runtime.standin_memory_used() == 0 and libraries.runtime.standin_live() == 0
    assert selected(libraries) == 0


def selected(libraries: Libraries) -> int:
    number = ctypes.c_int()
    libraries.runtime.hipGetDevice(ctypes.byref(number))
    return number.value


def scaled(device: HipDevice, x: np.ndarray, factor: float, stream: int | None = None) -> np.ndarray:
    program = device.load(kernel())
    source, result, out = device.alloc(x.nbytes), device.alloc(x.nbytes), np.empty_like(x)
    device.upload(source, x)
    device.launch(program, (-(-x.size // 64), 1, 1), [result, source, x.size, factor], stream)
    device.download(result, out)
    device.free(source)
    device.free(result)
    return out


# -- finding the libraries ---------------------------------------------------------------------------------------------


def test_missing_library(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="install PyTorch for ROCm") as caught:
        hip.devices(str(tmp_path))
    assert caught.value.code == "AULE_ERROR_HIP_INIT"


def test_a_machine_without_the_device_file_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hip_library, "may_have_device", lambda: False)
    monkeypatch.setattr(_hip_library, "candidates", None)
    with pytest.raises(BackendUnavailableError, match="/dev/kfd"):
        hip.devices()


def test_other_libraries_are_refused(tmp_path: Path) -> None:
    for name in ("amdhip64", "hiprtc"):
        (tmp_path / f"lib{name}.so").write_bytes(b"no library")
    with pytest.raises(BackendUnavailableError, match=r"expected AMD's HIP library, got .*libamdhip64.so"):
        hip.devices(str(tmp_path))


def test_where_the_libraries_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own, ROCm's packages, the system's, the loader's."""
    places = ["torch/lib", "_rocm_sdk_core/lib", "rocm/lib"]
    for place in places:
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "libhiprtc.so.7").touch()
    packages = {
        name: SimpleNamespace(submodule_search_locations=[str(tmp_path / name)]) for name in _hip_library._PACKAGES
    }
    monkeypatch.setattr(importlib.util, "find_spec", packages.get)
    monkeypatch.setattr(_hip_library, "_loaded", lambda name: iter(()))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    found = _hip_library.candidates("hiprtc")
    assert found[:3] == [str(tmp_path / place / "libhiprtc.so.7") for place in places]
    assert found[-4:] == ["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libhiprtc.so"]


def test_names_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("amdhip64_6.dll", "amdhip64_7.dll", "hiprtc0604.dll", "hiprtc-builtins0604.dll"):
        (tmp_path / "bin" / name).touch()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("HIP_PATH", str(tmp_path))
    runtime, compiler = (_hip_library.candidates(name) for name in ("amdhip64", "hiprtc"))
    ours = str(tmp_path / "bin")
    assert [os.path.basename(p) for p in runtime if ours in p] == ["amdhip64_7.dll", "amdhip64_6.dll"]
    assert [os.path.basename(p) for p in compiler if ours in p] == ["hiprtc0604.dll"]
    assert runtime[-4:] == ["amdhip64_7.dll", "amdhip64_6.dll", "amdhip64_5.dll", "amdhip64.dll"]
    monkeypatch.delenv("HIP_PATH")
    monkeypatch.setenv("PATH", os.pathsep.join(["", ours]))
    assert os.path.join(ours, "hiprtc0604.dll") in _hip_library.candidates("hiprtc"), "the loader cannot list names"


@needs_compiler
def test_a_loaded_copy_comes_first(built: Libraries) -> None:
    first = _hip_library.candidates("amdhip64")[0]
    assert first.startswith("/tmp/aule-hip-standin-") or os.path.exists("/dev/kfd")


# -- devices -----------------------------------------------------------------------------------------------------------


@needs_compiler
class TestDevices:
    def test_targets(self, libraries: Libraries) -> None:
        found = {device.target.arch: device for device in libraries.devices()}
        assert [device.index for device in found.values()] == list(range(len(found)))
        rdna, cdna = found["gfx1100"].target, found["gfx942"].target
        assert (rdna.backend, rdna.vendor, rdna.name) == ("hip", "amd", "Stand-in gfx1100")
        assert rdna.driver == "HIP 6.3.42131, hiprtc 6.3"
        assert (rdna.subgroup_sizes, cdna.subgroup_sizes) == ((32,), (64,))
        assert rdna.max_shared_bytes == 65536 and found["gfx950"].target.max_shared_bytes == 163840
        assert rdna.compute_units == 48 and rdna.max_threads == 1024  # pairs, as of an RX 7900 XTX with 96
        assert (rdna.shared_per_unit, rdna.registers_per_unit) == (128 << 10, 4 * 32 * 1536)
        assert (cdna.shared_per_unit, cdna.registers_per_unit) == (64 << 10, 4 * 64 * 512)
        assert rdna.max_grid[0] * rdna.max_threads < 2**32 and rdna.max_grid[1:] == (65535, 65535)
        assert rdna.matrix_units and cdna.matrix_units and not found["gfx1030"].target.matrix_units
        assert rdna.matrix_layout is None, "layouts are probed"
        assert found["gfx1151"].target.unified_memory and not cdna.unified_memory
        assert not {"hipSetDevice", "hipMalloc", "hipStreamCreateWithFlags"} & set(libraries.calls())

    def test_no_device(self, libraries: Libraries) -> None:
        libraries.runtime.standin_devices(0)
        with pytest.raises(BackendUnavailableError, match="HIP_VISIBLE_DEVICES"):
            libraries.devices()
        libraries.runtime.standin_devices(8)

    def test_without_the_compiler(self, libraries: Libraries, tmp_path: Path) -> None:
        shutil.copy(Path(libraries.folder, "libamdhip64.so"), tmp_path)
        with pytest.raises(BackendUnavailableError, match="expected AMD's compiler hiprtc beside its HIP library, got"):
            hip.devices(str(tmp_path))

    def test_old_versions_are_refused(self, libraries: Libraries, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_hip_driver, "OLDEST", 60400000)
        monkeypatch.setattr(_hip_driver, "_drivers", {})
        with pytest.raises(BackendUnavailableError, match=r"expected ROCm 6 or later, .* got 6\.3\.42131"):
            libraries.devices()

    def test_probe_fails(self, libraries: Libraries) -> None:
        libraries.fail("hipGetDeviceProperties", 1)
        with pytest.raises(BackendUnavailableError, match="hipErrorInvalidValue"):
            libraries.devices()

    def test_other_instruction_sets_are_refused(self, libraries: Libraries, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_hip_driver.Driver, "arch", lambda driver, device: "gfx803")
        with pytest.raises(BackendUnavailableError, match=r"expected gfx9 to gfx12, got gfx803"):
            libraries.devices()


# -- work --------------------------------------------------------------------------------------------------------------


@needs_compiler
class TestWork:
    def test_end_to_end(self, libraries: Libraries, device: HipDevice) -> None:
        x = np.arange(100, dtype=np.float32)
        assert np.array_equal(scaled(device, x, 0.5), x * 0.5)
        assert np.array_equal(scaled(device, x, 3.0, stream=0), x * 3)  # ordered with our stream by events
        assert libraries.calls().count("hipStreamWaitEvent") == 2
        assert selected(libraries) == 0
        free, total = device.memory_info()
        assert free < total == 1 << 32
        device.empty_cache()

    def test_prepared_launches_select_the_device(self, libraries: Libraries, device: HipDevice) -> None:
        """The default stream is that of the selected device."""
        x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
        prepared = device.prepare(device.load(kernel()), (1, 1, 1), [None, None, 64, 2.0])
        libraries.calls()
        prepared.launch((y.ctypes.data, x.ctypes.data), 0)
        assert libraries.calls() == [
            "hipGetDevice",
            "hipGetDevice",
            "hipSetDevice",
            "hipModuleLaunchKernel",
            "hipSetDevice",
        ]
        assert np.array_equal(y, x * 2) and selected(libraries) == 0

    def test_one_device_is_always_selected(self, libraries: Libraries) -> None:
        libraries.runtime.standin_devices(1)
        (device,) = libraries.devices()
        libraries.runtime.standin_devices(8)
        x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
        prepared = device.prepare(device.load(kernel()), (1, 1, 1), [None, None, 64, 2.0])
        libraries.calls()
        prepared.launch((y.ctypes.data, x.ctypes.data), 0)
        assert libraries.calls() == ["hipModuleLaunchKernel"] and np.array_equal(y, x * 2)
        device.close()

    def test_wrong_arguments(self, device: HipDevice) -> None:
        program, memory = device.load(kernel()), device.alloc(256)
        with pytest.raises(InvalidArgumentError, match="n: i32"):
            device.launch(program, (1, 1, 1), [memory, memory, 0.5, 1.0])
        with pytest.raises(LaunchError, match="grid"):
            device.launch(program, (1 << 30, 1, 1), [memory, memory, 1, 1.0])
        with pytest.raises(InvalidArgumentError, match="expected a kernel in hip, got ptx"):
            device.load(Artifact("ptx", b"", "scale", PARAMS, 64))

    def test_time_and_statistics(self, device: HipDevice) -> None:
        program, memory = device.load(kernel()), device.alloc(256)
        assert device.time_launch(program, (1, 1, 1), [memory, memory, 64, 1.0]) > 0
        assert device.statistics(program)["max_threads"] == 1024

    def test_capture(self, libraries: Libraries, device: HipDevice) -> None:
        assert device.capture(device.stream) == 0
        libraries.runtime.standin_capture(device.stream, 1)
        assert device.capture(device.stream) == 7
        libraries.runtime.standin_capture(device.stream, 0)


# -- compiling ---------------------------------------------------------------------------------------------------------


@needs_compiler
class TestCompiling:
    def test_code_objects_are_cached(self, libraries: Libraries, device: HipDevice) -> None:
        before = libraries.compiler.standin_compiled()
        device.load(kernel())
        assert libraries.compiler.standin_options().decode().split()[0] == "--offload-arch=gfx942:sramecc+:xnack-"
        device.load(kernel())
        assert libraries.compiler.standin_compiled() == before + 1
        other = libraries.devices()[2]
        other.load(kernel())  # for another instruction set
        other.close()
        device.load(kernel(extensions=("wavefrontsize64",)))
        assert libraries.compiler.standin_compiled() == before + 3
        assert "-mwavefrontsize64" in libraries.compiler.standin_options().decode()

    def test_refused_source(self, device: HipDevice, tmp_path: Path) -> None:
        bad = kernel(SCALE.replace("* factor", "* nonsense_name"))
        with pytest.raises(ShaderCompileError, match="hiprtc refused it") as caught:
            device.load(bad)
        assert "nonsense_name" in caught.value.log and caught.value.source_path is not None
        path = Path(caught.value.source_path)
        assert path.is_relative_to(tmp_path) and path.read_bytes() == bad.code and path.suffix == ".hip"
        device.load(kernel())

    def test_other_failures(self, libraries: Libraries, device: HipDevice) -> None:
        with pytest.raises(ShaderCompileError, match="hipErrorNotFound"):
            device.load(kernel(entry="no_such_entry"))
        libraries.compiler.standin_fail_compiler(4)
        with pytest.raises(ShaderCompileError, match="hiprtc got HIPRTC_ERROR"):
            device.load(kernel(SCALE + "// another"))
        with pytest.raises(ShaderCompileError, match="expected 1048576 bytes of shared memory"):
            device.load(kernel(shared_bytes=1 << 20))


# -- failures ----------------------------------------------------------------------------------------------------------


@needs_compiler
class TestFailures:
    def test_out_of_memory(self, libraries: Libraries, device: HipDevice) -> None:
        libraries.runtime.standin_memory(8 << 20)
        kept = device.alloc(4 << 20)
        device.free(device.alloc(3 << 20))
        device.free(device.alloc(4 << 20))  # the pool gives back what it holds
        with pytest.raises(OutOfMemoryError, match=r"\[hip\] expected 16777216 bytes") as caught:
            device.alloc(16 << 20)
        assert caught.value.requested_bytes == 16 << 20
        device.free(kept)
        device.alloc(1)

    def test_errors_are_not_left_for_pytorch(self, libraries: Libraries, device: HipDevice) -> None:
        """ROCm 7 keeps a thread's last error, which PyTorch asks for after its own launches."""
        x = np.ones(4, np.float32)
        libraries.fail("hipModuleLaunchKernel", 1)
        with pytest.raises(LaunchError):
            scaled(device, x, 2.0)
        assert not libraries.runtime.standin_last()
        libraries.runtime.standin_memory(8 << 20)
        device.free(device.alloc(3 << 20))
        device.free(device.alloc(6 << 20))  # refused at first
        assert not libraries.runtime.standin_last()
        with pytest.raises(OutOfMemoryError):
            device.alloc(16 << 20)
        assert not libraries.runtime.standin_last()
        assert device._driver.attribute(1, 9876) == 0 and not libraries.runtime.standin_last()

    def test_lost(self, libraries: Libraries) -> None:
        device = libraries.devices()[1]
        program, memory = device.load(kernel()), device.alloc(256)
        libraries.fail("hipModuleLaunchKernel", 719)
        with pytest.raises(DeviceLostError, match="hipErrorLaunchFailure"):
            device.launch(program, (1, 1, 1), [memory, memory, 1, 1.0])
        with pytest.raises(DeviceLostError, match="restart"):
            device.alloc(1)
        device.close()

    def test_refused_launch_leaves_the_device_usable(self, libraries: Libraries, device: HipDevice) -> None:
        x = np.ones(4, np.float32)
        libraries.fail("hipModuleLaunchKernel", 1)
        with pytest.raises(LaunchError, match="hipErrorInvalidValue"):
            scaled(device, x, 2.0)
        assert np.array_equal(scaled(device, x, 2.0), x * 2)

    def test_closed(self, libraries: Libraries) -> None:
        device = libraries.devices()[0]
        device.alloc(16)
        device.close()
        device.close()
        with pytest.raises(ClosedError):
            device.alloc(1)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
    def test_fork(self, libraries: Libraries, device: HipDevice) -> None:
        device.alloc(16)
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            report = []
            for action in (lambda: device.alloc(1), libraries.devices):
                try:
                    action()
                except AuleError as error:
                    report.append(type(error).__name__ + ("+fork" if "fork" in str(error) else ""))
            os.write(writer, " ".join(report).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 1000).decode() == "DeviceLostError+fork BackendUnavailableError+fork"


@needs_compiler
def test_the_backend_by_its_name(libraries: Libraries, monkeypatch: pytest.MonkeyPatch) -> None:
    import aule

    found = libraries.devices()
    monkeypatch.delitem(registry._errors, "hip", raising=False)  # of a test before
    monkeypatch.setitem(registry._found, "hip", found)
    x = np.random.default_rng(0).standard_normal((3, 40), np.float32)
    libraries.calls()
    y = aule.rms_norm(x, backend="hip:1")
    assert "hipModuleLaunchKernel" in libraries.calls()
    np.testing.assert_allclose(y, aule.rms_norm(x, backend="numpy"), rtol=1e-5, atol=1e-6)
    for device in found:
        device.close()


# -- AMD's headers -----------------------------------------------------------------------------------------------------

HEADERS = [Path(p) for p in os.environ.get("AULE_HIP_HEADERS", "").split(os.pathsep) if p] + [
    Path("/usr/include"), Path("/opt/rocm/include"), Path.home() / ".cache" / "aule-hip-headers" / "usr" / "include",
]  # fmt: skip
"""Where Debian's libamdhip64-dev or ROCm has them; scripts/test unpacks them into the cache."""
_CTYPES = {"int": ctypes.c_int, "unsigned int": ctypes.c_uint, "unsigned": ctypes.c_uint, "size_t": ctypes.c_size_t}
_ENUMS = ("hipDevice_t", "hipError_t", "hipDeviceAttribute_t", "hipFunction_attribute", "hiprtcResult")
_HANDLES = ("hipStream_t", "hipEvent_t", "hipModule_t", "hipFunction_t", "hipDeviceptr_t", "hiprtcProgram")


@pytest.fixture(scope="module")
def headers() -> str:
    """Both headers without comments."""
    for folder in HEADERS:
        if (folder / "hip" / "hiprtc.h").exists():
            text = "".join((folder / "hip" / name).read_text() for name in ("hip_runtime_api.h", "hiprtc.h"))
            return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    pytest.skip("no headers of HIP here; scripts/test brings them")


def ctype_of(declared: str) -> Any:
    """The type by which an argument must be passed."""
    text = re.sub(r"__dparm\([^)]*\)|=\s*NULL|\bconst\b", "", declared).strip()
    text = re.sub(r"\s+", " ", text)
    if "*" in text:
        return ctypes.c_void_p
    kind = text.rsplit(" ", 1)[0] if text not in ("unsigned int", "unsigned", "int") else text
    if kind in _HANDLES:
        return ctypes.c_void_p
    return ctypes.c_int if kind in _ENUMS else _CTYPES[kind]


PROTOTYPES = {
    entry[0]: entry[1:] for table in (_hip_driver.FUNCTIONS, _hip_driver.COMPILER_FUNCTIONS) for entry in table.values()
} | {_hip_driver.LAUNCH[0]: _hip_driver.LAUNCH[1:], _hip_driver.PROPERTIES[-1]: (ctypes.c_void_p, ctypes.c_int)}


@pytest.mark.parametrize("name", PROTOTYPES)
def test_prototypes(headers: str, name: str) -> None:
    found = re.search(rf"(hipError_t|hiprtcResult|const char\s*\*)\s*{name}\s*\(([^;]*?)\)\s*;", headers)
    assert found, f"the headers have no {name}"
    arguments = [x for x in re.split(r",(?![^()]*\))", found[2]) if x.strip() not in ("", "void")]
    given = [ctypes.c_void_p if t is ctypes.c_char_p else t for t in PROTOTYPES[name]]
    assert given == [ctype_of(x) for x in arguments], found[0]
    assert (found[1].startswith("const char")) == (
        name in ("hipGetErrorName", "hipGetErrorString", "hiprtcGetErrorString")
    )


def test_constants(headers: str) -> None:
    values = enumerated(headers, "hipDeviceAttribute_t")
    assert {f"hipDeviceAttribute{name}": values[f"hipDeviceAttribute{name}"] for name in _hip_driver.ATTRIBUTES} == {
        f"hipDeviceAttribute{name}": number for name, number in _hip_driver.ATTRIBUTES.items()
    }
    errors = re.search(r"typedef enum[^{]*hipError_t\s*\{(.*?)\}\s*hipError_t", headers, re.DOTALL)
    assert errors
    for name, number in (("OutOfMemory", 2), ("InvalidValue", 1), ("IllegalAddress", 700), ("LaunchFailure", 719)):
        assert re.search(rf"hipError{name}\s*=\s*{number}\b", errors[1]), name


def enumerated(text: str, name: str) -> dict[str, int]:
    """The values of an enumeration."""
    body = re.search(rf"typedef enum {name}\s*\{{(.*?)\}}\s*{name}", text, re.DOTALL)
    assert body
    values: dict[str, int] = {}
    last = -1
    for item in filter(None, map(str.strip, body[1].split(","))):
        word, _, value = (part.strip() for part in item.partition("="))
        last = last + 1 if not value else values[value] if value in values else int(value)
        values[word] = last
    return values


@needs_compiler
def test_stand_in_agrees_with_the_headers(headers: str) -> None:
    """Its definitions are compiled against the real declarations, so a test cannot agree with itself alone."""
    folder = next(folder for folder in HEADERS if (folder / "hip" / "hiprtc.h").exists())
    for name in ("amdhip64", "hiprtc"):
        command = ["g++", "-std=c++17", "-fsyntax-only", "-w", "-DWITH_HIP_HEADERS", "-D__HIP_PLATFORM_AMD__"]
        command += [
            '-DFOLDER=""',
            '-DFLAGS=""',
            "-I",
            str(folder),
            str(Path(hip_standin.__file__).with_name(f"{name}.cpp")),
        ]
        subprocess.run(command, check=True)
