"""aule doctor: what it makes of machines that are not this one, and its report on this one."""

from __future__ import annotations

import json
from typing import Any

import pytest

import aule
from aule.cli import _facts, doctor, main
from aule.cli._diagnosis import Finding, diagnose
from aule.cli._facts import Facts

ALL = {
    "numpy": "2.4.6",
    "llvmlite": "0.50.0",
    "torch": "2.9.0",
    "pyopencl": "2026.1",
    "wgpu": "0.32.0",
    "ml_dtypes": "0.6",
}
CPU = {"cpu": [("a processor", False)]}
LAVAPIPE = {"vulkan": [("llvmpipe", True)]}
BUILD: dict[str, str | None] = {"version": "2.9.0", "cuda": None, "hip": None, "xpu": None, "mps": None}


def facts(**changes: Any) -> Facts:
    """A Linux machine with every package and without a GPU."""
    usual: dict[str, Any] = {
        "platform": "linux",
        "distribution": "debian",
        "packages": ALL,
        "torch": BUILD,
        "torch_runs": {"available": False, "archs": [], "gpus": []},
        "devices": {**CPU, **LAVAPIPE},
        "default": "cpu:0",
    }
    return Facts(**usual | changes)


def findings(**changes: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(facts(**changes))}


def test_a_machine_without_a_gpu_has_no_problem() -> None:
    found = findings()
    assert {f.status for f in found.values()} == {"ok", "missing"}
    assert {f.name for f in found.values() if f.status == "missing"} == {
        "transformers",
        "diffusers",
        "matplotlib",
        "opencl",
        "webgpu",
    }
    assert all(f.remedy for f in found.values() if f.status == "missing")
    assert "cuda" not in found and "metal" not in found and "pyobjc-framework-Metal" not in found
    assert found["vulkan"].text == "llvmpipe (software)"


def test_packages_that_are_missing_or_old() -> None:
    found = findings(packages={"numpy": "2.0", "llvmlite": "0.44.1", "torch": "2.10.0+cu130"})
    assert (found["llvmlite"].status, found["torch"].status) == ("problem", "ok")
    assert found["llvmlite"].remedy == 'pip install --upgrade "aule-attention[cpu]"'
    assert found["wgpu"].remedy == 'pip install "aule-attention[webgpu]"'
    assert findings(platform="darwin")["pyobjc-framework-Metal"].remedy == 'pip install "aule-attention[metal]"'


@pytest.mark.parametrize(
    ("distribution", "gpus", "name", "remedy"),
    [
        ("ubuntu", ("nvidia",), "cuda", "sudo ubuntu-drivers install"),
        ("arch", ("nvidia",), "cuda", "sudo pacman -S nvidia"),
        ("", ("nvidia",), "cuda", "install the driver from https://www.nvidia.com/drivers"),
        ("debian", ("amd",), "vulkan", "sudo apt install libvulkan1 mesa-vulkan-drivers"),
        ("arch", ("intel",), "vulkan", "sudo pacman -S vulkan-icd-loader vulkan-intel"),
        ("fedora", ("intel",), "opencl", "sudo dnf install ocl-icd intel-compute-runtime"),
        ("ubuntu", (), "opencl", "sudo apt install ocl-icd-libopencl1 pocl-opencl-icd"),
    ],
)
def test_the_command_of_the_distribution(distribution: str, gpus: tuple[str, ...], name: str, remedy: str) -> None:
    finding = findings(distribution=distribution, gpus=gpus, devices=CPU)[name]
    assert finding.remedy == remedy
    assert finding.status == ("missing" if name == "opencl" else "problem")


def test_a_gpu_that_only_software_stands_in_for() -> None:
    finding = findings(gpus=("amd",), drivers={"vulkan": ["lvp"]})["vulkan"]
    assert finding.status == "problem" and "llvmpipe (software) only, though there is a GPU of amd" in finding.text
    assert "drivers installed: lvp" in finding.text
    working = {**CPU, **LAVAPIPE, "cuda": [("a GPU", False)]}
    assert findings(gpus=("nvidia",), devices=working)["vulkan"].status == "ok"
    closed = findings(gpus=("amd",), closed=("/dev/dri/renderD128",))["/dev/dri/renderD128"]
    assert closed.status == "problem" and "usermod -aG render" in closed.remedy


CUDA = BUILD | {"version": "2.9.0+cu130", "cuda": "13.0"}
H200 = {"available": True, "archs": ["sm_80", "sm_90"], "gpus": [["H200", 9, 0]]}
WITH_CUDA = {"gpus": ("nvidia",), "devices": {**CPU, "cuda": [("H200", False)]}}


@pytest.mark.parametrize(
    ("build", "runs", "status", "text"),
    [
        (CUDA, H200, "ok", "built for CUDA 13.0; fits H200"),
        (CUDA, H200 | {"gpus": [["RTX 3090", 8, 6]]}, "ok", "fits RTX 3090"),
        (CUDA, H200 | {"gpus": [["V100", 7, 0]]}, "problem", "no kernels for V100 (sm_70), only for sm_80, sm_90"),
        (CUDA, H200 | {"gpus": [["B200", 10, 0]]}, "problem", "no kernels for B200 (sm_100)"),
        (CUDA, H200 | {"gpus": [["B200", 10, 0]], "archs": ["sm_90", "compute_90"]}, "ok", "fits B200"),
        (CUDA, {"available": False, "archs": [], "gpus": []}, "problem", "newer than the driver"),
        (BUILD, H200, "problem", "built for the CPU alone, beside an NVIDIA GPU"),
        (BUILD | {"hip": "6.4"}, H200, "problem", "built for ROCm 6.4, beside an NVIDIA GPU"),
    ],
)
def test_pytorch_beside_an_nvidia_gpu(
    build: dict[str, str | None], runs: dict[str, Any], status: str, text: str
) -> None:
    found = findings(torch=build, torch_runs=runs, **WITH_CUDA)["build"]
    assert found.status == status and text in found.text and bool(found.remedy) == (status == "problem")


def test_pytorch_elsewhere() -> None:
    assert findings(torch=None, torch_runs=None).get("build") is None
    broken = findings(torch_runs={"error": "OSError: libcudart.so.12: cannot open"})["import torch"]
    assert broken.status == "problem" and "libcudart" in broken.text
    amd = findings(gpus=("amd",))["build"]
    assert amd.status == "ok" and "ROCm" in amd.remedy
    driver = findings(gpus=("amd",))["hip"]  # beside Vulkan, no problem
    assert driver.status == "missing" and "ROCm" in driver.remedy and "hip" not in findings()
    assert findings(torch=BUILD | {"hip": "6.4"})["build"].status == "problem"
    runs = {"available": True, "archs": ["gfx1100"], "gpus": [["RX 7900 XTX", 11, 0]]}
    without = findings(torch=BUILD | {"hip": "6.4"}, torch_runs=runs, errors={"hip": "[hip] expected hiprtc"})
    assert (without["hip"].status, without["build"].status) == ("missing", "problem")
    assert "copies them through the host: [hip] expected hiprtc" in without["build"].text
    with_it = findings(torch=BUILD | {"hip": "6.4"}, torch_runs=runs, devices={"hip": [("RX 7900 XTX", False)]})
    assert (with_it["hip"].status, with_it["build"].status) == ("ok", "ok")
    assert "ROCm" not in findings()["build"].text + findings()["build"].remedy


def test_settings() -> None:
    assert findings(cache_error="/x cannot be written")["cache"].status == "problem"
    assert findings()["cache"].status == "ok"
    assert findings(default=None, default_error="[vulkan] expected")["AULE_BACKEND"].status == "problem"


def test_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("AULE_BACKEND", raising=False)
    monkeypatch.setattr(_facts, "_torch_runs", lambda: {"available": False, "archs": [], "gpus": []})
    fast = aule.get_backend_info()["default_device"] != "numpy"
    assert main(["doctor"]) == int(not fast)
    said = capsys.readouterr().out
    assert "ok       numpy" in said and "\nResult\n" in said and ("right on" in said) == fast
    assert main(["doctor", "--json"]) == int(not fast)
    answer = json.loads(capsys.readouterr().out)
    assert answer["works"] is fast and answer["findings"][-1]["name"] == "attention"
    assert {f["status"] for f in answer["findings"]} <= {"ok", "missing", "problem"}


def test_without_a_fast_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "gather", lambda packages: facts(devices={}, packages={"numpy": "2.4"}, default=None))
    monkeypatch.delenv("AULE_BACKEND", raising=False)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert (
        "there is no GPU and no CPU engine: NumPy is slow, without gradients" in said
        and '-> pip install "aule-attention[cpu]"' in said
    )


def test_a_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = doctor.flash_attention

    def wrong(*arrays: Any, backend: str) -> Any:
        return right(*arrays, backend="numpy") * (1.01 if backend == "cpu:0" else 1.0)

    monkeypatch.setattr(doctor, "gather", lambda packages: facts())
    monkeypatch.setattr(doctor, "flash_attention", wrong)
    assert main(["doctor"]) == 1
    assert "cpu:0 is off by" in capsys.readouterr().out


def test_pytorch_is_imported_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_facts, "_TORCH", "raise OSError('a library is missing')")
    assert _facts._torch_runs() == {"error": "OSError: a library is missing"}
    monkeypatch.setattr(_facts, "_TORCH", "print('{\"available\": true}')")
    assert _facts._torch_runs() == {"available": True}
