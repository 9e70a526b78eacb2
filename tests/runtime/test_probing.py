"""Which drivers are asked for devices, and what their libraries may write to the terminal."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from devices import need

import aule
from aule.backends import registry
from aule.errors import BackendUnavailableError
from aule.runtime import _gpu_files
from aule.runtime._quiet import without_lines


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends that are probed from now on. None but the CPU has a device."""
    need("cpu")
    names: list[str] = []
    probe = registry.Backend.devices

    def devices(self: registry.Backend) -> list[registry.Device]:
        names.append(self.name)
        if self.name == "cpu":
            return probe(self)
        raise BackendUnavailableError(self.name, f"[{self.name}] expected a driver, got none; install one")

    monkeypatch.delenv("AULE_BACKEND", raising=False)
    monkeypatch.setattr(registry.Backend, "devices", devices)
    monkeypatch.setattr(registry, "_found", {})
    monkeypatch.setattr(registry, "_errors", {})
    return names


def test_cpu_tensors_ask_no_gpu_driver(asked: list[str]) -> None:
    torch = pytest.importorskip("torch")
    q = torch.ones(1, 2, 40, 32)
    assert torch.equal(aule.flash_attention(q, q, q), q)
    assert aule.decode_attention(q[:, :, :1], q, q).shape == (1, 2, 1, 32)
    assert aule.rms_norm(q, q[0, 0, 0]).shape == q.shape
    trained = q.clone().requires_grad_()
    aule.flash_attention(trained, q, q).sum().backward()
    assert asked == ["cpu"]


@pytest.mark.parametrize("gpu", [False, True])
def test_host_arrays_ask_slow_drivers_only_if_there_may_be_a_gpu(
    gpu: bool, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "may_have_gpu", lambda: gpu)
    q = np.ones((1, 2, 40, 32), np.float32)
    np.testing.assert_array_equal(aule.flash_attention(q, q, q), q)
    slow = ["vulkan", "opencl", "webgpu"] if gpu else []
    assert asked == ["cuda", "hip", "metal", *slow, "cpu"]


def test_the_device_file_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("dev")
    monkeypatch.setattr(_gpu_files, "_LINUX", (f"{folder}/renderD*", f"{folder}/kfd"))
    look = _gpu_files.may_have_gpu.__wrapped__
    monkeypatch.setattr(sys, "platform", "linux")
    assert not look()
    (folder / "renderD128").touch()
    assert look()
    monkeypatch.setattr(_gpu_files, "_LINUX", ())
    monkeypatch.setattr(sys, "platform", "win32")
    assert look(), "other systems are asked for their drivers"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files")
def test_lines_of_native_code_are_dropped_and_others_are_not(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), without_lines(b"noise"):
        os.write(2, b"some noise\nnews\n")
        raise KeyError
    os.write(2, b"noise later\n")
    assert capfd.readouterr().err == "news\nnoise later\n"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files")
def test_adapters_are_listed_in_silence() -> None:
    need("webgpu")
    script = "from aule.backends import registry; assert registry.devices('webgpu')"
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
