"""aule bench: its table, files and mistakes. Times are not looked at."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from devices import need

from aule.cli import _measure, bench, main
from aule.cli._measure import Attention, Case, race


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tiny cases instead of those that say something about speed."""
    monkeypatch.setattr(_measure, "_SECONDS", 0.0)
    monkeypatch.setattr(bench, "QUICK_ROUNDS", 1)
    sizes = [Attention(1, 4, 2, 64, 64, 64, True, "float32")]
    pytest.importorskip("torch")
    from aule.cli._measure_torch import TorchBench

    monkeypatch.setattr(TorchBench, "_attention", lambda self: sizes)
    monkeypatch.setattr(TorchBench, "_decode", lambda self: [Attention(2, 4, 2, 1, 100, 64, False, "float32")])


def test_the_cpu_beside_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need("cpu")
    small(monkeypatch)
    files = [str(tmp_path / name) for name in ("a.json", "a.csv")]
    assert main(["bench", "--quick", "--backend", "cpu", "--json", files[0], "--csv", files[1]]) == 0
    said = capsys.readouterr().out
    document = json.loads(Path(files[0]).read_text())
    assert [r["group"] for r in document["results"]] == ["forward", "backward", "decode"] + 8 * ["rows"]
    assert all(r["ratio"] > 0 and r["peer"] == "PyTorch" for r in document["results"])
    assert "times PyTorch" in said and said.count("x  ") >= len(document["results"])
    with open(files[1], newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [r["name"] for r in document["results"]]

    assert main(["bench", "--compare", files[0], files[0]]) == 0
    assert capsys.readouterr().out.count("1.00x as fast") == len(document["results"])


@pytest.mark.device
@pytest.mark.parametrize("backend", ["vulkan"])
def test_a_device_without_pytorch(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need(backend)
    small(monkeypatch)
    from aule.cli._measure_device import DeviceBench

    sizes = [Attention(1, 2, 2, 64, 64, 64, True, dtype) for dtype in ("float32", "float16")]
    monkeypatch.setattr(DeviceBench, "_attention", lambda self: sizes)
    assert main(["bench", "--quick", "--backend", backend, "--json", "-"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [r["group"] for r in results] == 2 * ["forward", "backward"] and all(r["rate"] > 0 for r in results)
    assert main(["bench", "--backend", backend, "--only", "rows"]) == 2
    assert "without PyTorch's tensors on it" in capsys.readouterr().err


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    need("cpu")
    small(monkeypatch)
    import aule

    right = aule.flash_attention
    monkeypatch.setattr(aule, "flash_attention", lambda *args, **options: right(*args, **options) * 1.01)
    assert main(["bench", "--quick", "--backend", "cpu", "--only", "forward"]) == 2
    assert "expected an error of at most" in capsys.readouterr().err


def test_the_best_peer_counts() -> None:
    took = {"ours": 2.0, "slow": 9.0, "quick": 3.0}
    calls: dict[str, Any] = {name: (lambda name=name: name) for name in took}

    def timed(call: Any, count: int) -> float:
        return took[call()] * count

    result = race(Case("", "forward", "", 4e9), calls["ours"], {n: calls[n] for n in ("slow", "quick")}, 3, timed)
    assert (result.seconds, result.rate, result.peer, result.peer_seconds) == (2.0, 2.0, "quick", 3.0)
    assert result.ratio == 1.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "forwards"], "expected --only with some of forward, backward, decode, rows, got forwards"),
        (["--json", "no/such/folder/a.json"], "expected a file in a folder that exists"),
        (["--compare", "nothing.json", "nothing.json"], "expected a file written by `aule bench --json`"),
        (["--backend", "numpy"], "expected a device to measure, got NumPy alone"),
        (["--backend", "sun"], "expected one of"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    from aule.cli._bench_plot import plot

    row = {"name": "a", "group": "forward", "dtype": "float32", "rate": 2.0, "unit": "GB/s", "ratio": 1.5}
    document = {"aule": "1", "name": "device", "date": "today", "torch": "2", "results": [row, row | {"ratio": 0.5}]}
    plot(document, str(tmp_path / "a.svg"))
    assert "1.50x" in (tmp_path / "a.svg").read_text() or (tmp_path / "a.svg").stat().st_size > 1000
