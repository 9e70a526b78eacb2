"""Every command on AMD's GPUs: the libraries that stand in for AMD's (`hip_standin`) are found as ROCm's would be.

Two devices: hip:0 is a gfx1100 with waves of 32 lanes, hip:1 a gfx942 with 64.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hip_standin
import pytest
from hip_standin import Libraries

from aule.backends import registry
from aule.cli import _measure, bench, check, main
from aule.cli._measure import Attention
from aule.cli._measure_device import DeviceBench
from aule.engine import tune_cases
from aule.runtime import _hip_driver, _hip_library
from aule.tuning import own

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not hip_standin.available(), reason="no g++ to build the stand-in"),
]


@functools.cache
def two_gpus() -> Libraries:
    libraries = Libraries()
    libraries.runtime.standin_devices(2)
    return libraries


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Libraries]:
    found, candidates = two_gpus(), _hip_library.candidates
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("AULE_BACKEND", raising=False)
    monkeypatch.setattr(_hip_library, "may_have_device", lambda: True)
    monkeypatch.setattr(_hip_library, "candidates", lambda name, folder=None: candidates(name, found.folder))
    monkeypatch.setattr(_hip_driver, "_drivers", {})
    registry.forget()
    found.calls()
    yield found
    registry.forget()
    assert found.runtime.standin_memory_used() == 0 and found.runtime.standin_live() == 0


def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def counted(libraries: Libraries) -> int:
    """Launches since the last look."""
    return Counter(libraries.calls())["hipModuleLaunchKernel"]


def test_info(libraries: Libraries, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    told = answer(capsys)
    found = [(d["device"], d["arch"], d["subgroup_size"]) for d in told["backends"]["hip"]["devices"]]
    assert found == [("hip:0", "gfx1100", 32), ("hip:1", "gfx942", 64)] and told["backends"]["hip"]["available"]
    assert main(["info"]) == 0
    assert "HIP 6.3.42131, hiprtc 6.3" in capsys.readouterr().out


def test_check(libraries: Libraries, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["check", "--backend", "hip", "--quick", "--json"]) == 0
    told = answer(capsys)
    assert told["headline"]["device"] == "hip:0" and told["headline"]["status"] == "ok"
    assert Counter(r["device"] for r in told["results"]) == {"hip:0": 3, "hip:1": 3}
    assert all(r["status"] == "ok" and 0 < r["error"] <= r["tolerance"] for r in told["results"])
    assert counted(libraries) >= 2 * 7  # two calls of each case, and the probe of matrix layouts
    assert all(device.target.matrix_layout for device in registry.devices("hip"))  # bf16 took the matrix units

    right = check.flash_attention
    monkeypatch.setattr(check, "flash_attention", lambda *args, **options: right(*args, **options) * 1.05)
    assert main(["check", "--backend", "hip:1", "--quick"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_show(libraries: Libraries, capsys: pytest.CaptureFixture[str]) -> None:
    for spec, wave, product in (("hip:0", 32, "wmma_f32_16x16x16_f16_w32"), ("hip:1", 64, "mfma_f32_16x16x16f16")):
        assert main(["show", "flash_attention", "--backend", spec, "--dtype", "float16"]) == 0
        said = capsys.readouterr().out
        assert f"#define AULE_WAVE {wave}" in said and f"__builtin_amdgcn_{product}(" in said
    assert main(["show", "rms_norm", "--backward", "--backend", "hip:1"]) == 0
    assert "AULE_KERNEL(" in capsys.readouterr().out


def test_tune(libraries: Libraries, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_cases, "_heads", lambda target: 1)
    arguments = ["--op", "decode", "--dtype", "bfloat16", "--head-dim", "64", "--seq-len", "64", "--seconds", "0"]
    assert main(["tune", "--backend", "hip:1", *arguments, "--json"]) == 0
    told = answer(capsys)
    assert told["device"] == "hip:1"
    (case,) = told["cases"]
    assert len(case["measured"]) >= 2 and all(m["speed"] > 0 and not m["refused"] for m in case["measured"])
    assert counted(libraries) > 2 * len(case["measured"])
    # Records belong to the device that was measured, and to no other.
    devices = registry.devices("hip")
    kept = [bool(own.own_records(device.target, case["op"])) for device in devices]
    assert kept == [False, case["saved"] is not None]


def test_bench(libraries: Libraries, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_measure, "_SECONDS", 0.0)
    monkeypatch.setattr(bench, "QUICK_ROUNDS", 1)
    sizes = [Attention(1, 2, 2, 64, 64, 64, True, "float16")]
    monkeypatch.setattr(DeviceBench, "_attention", lambda self: sizes)
    monkeypatch.setattr(DeviceBench, "_decode", lambda self: [Attention(1, 4, 1, 1, 64, 64, False, "float16")])
    monkeypatch.setattr(DeviceBench, "_row_operations", lambda self: [("rms_norm", "float32", 4)])
    assert main(["bench", "--quick", "--backend", "hip:1", "--json", "-"]) == 0
    told = answer(capsys)
    assert (told["device"], told["name"], told["torch"]) == ("hip:1", "Stand-in gfx942", None)
    assert [r["group"] for r in told["results"]] == ["forward", "backward", "decode", "rows"]
    assert all(r["rate"] > 0 for r in told["results"]) and counted(libraries) >= 8


def test_without_the_library(
    libraries: Libraries, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_hip_library, "candidates", lambda name, folder=None: [str(tmp_path / f"lib{name}.so")])
    for command in ("check", "bench", "tune"):
        assert main([command, "--backend", "hip"]) == 2
        assert "expected AMD's HIP library, got none of" in capsys.readouterr().err
    assert main(["info", "--json"]) == 0
    told = answer(capsys)["backends"]["hip"]
    assert not told["available"] and "install PyTorch for ROCm" in told["error"]
