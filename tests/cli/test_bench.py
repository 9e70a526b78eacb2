"""aule bench: its table, files and mistakes. Times are not looked at."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from devices import need

from aule.cli import _measure, bench, main
from aule.cli._figures import duration, speed
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
    groups = [*2 * ["forward", "backward"], *2 * ["decode"], *8 * ["rows"]]
    assert [r["group"] for r in results] == groups and all(r["rate"] > 0 for r in results)


@pytest.mark.parametrize("group", ["backward", "decode", "rows"])
def test_a_wrong_result_of_a_device_is_not_timed(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need("vulkan")
    from aule.api.context import Tensor
    from aule.cli import _measure_device

    sizes = [Attention(1, 2, 2, 64, 64, 64, True, "float32")]
    monkeypatch.setattr(_measure_device.DeviceBench, "_attention", lambda self: sizes)
    monkeypatch.setattr(_measure_device, "race", lambda *args: pytest.fail("it was timed"))
    right = Tensor.download
    monkeypatch.setattr(Tensor, "download", lambda self: right(self) * 1.001)
    assert main(["bench", "--quick", "--backend", "vulkan", "--only", group]) == 2
    assert f"for {group} " in capsys.readouterr().err


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
        (["--only", "forwards"], "expected --only with some of forward, backward, decode, rows, got 'forwards'"),
        (
            ["--json", "no/such/folder/a.json"],
            "expected a file that can be written, got no/such/folder/a.json (No such",
        ),
        (["--compare", "nothing.json", "nothing.json"], "expected a file written by `aule bench --json`"),
        (["--backend", "numpy"], "expected a device to measure, got NumPy alone"),
        (["--backend", "sun"], "expected one of"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"date": None}, "no 'date'"),
        ({"results": [{}]}, "no 'group'"),
        ({"results": 7}, "int"),
        (None, "Expecting value"),
    ],
)
def test_files_that_cannot_be_compared(
    change: dict[str, Any] | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = DOCUMENT | (change or {})
    file = tmp_path / "a.json"
    text = json.dumps({name: value for name, value in good.items() if value is not None})
    file.write_text("nothing" if change is None else text)
    assert main(["bench", "--compare", str(file), str(file)]) == 2
    said = capsys.readouterr().err
    assert "expected a file written by `aule bench --json`" in said and reason in said and said.count("\n") == 1


def test_pictures_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_measured", lambda *args, **options: pytest.fail("it was measured"))
    assert main(["bench", "--plot", str(tmp_path / "a.gif")]) == 2
    assert "expected --plot with .svg, .png, .pdf, got" in capsys.readouterr().err
    assert main(["bench", "--csv", str(tmp_path)]) == 2
    assert "expected a file that can be written, got" in capsys.readouterr().err
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--plot", str(tmp_path / "a.svg")]) == 2
    assert 'pip install "aule-attention[bench]"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


ROW = {"name": "a", "group": "forward", "dtype": "float32", "seconds": 0.1, "rate": 2.0, "unit": "GB/s", "ratio": 1.5}
DOCUMENT: dict[str, Any] = {
    "aule": "1",
    "device": "cpu:0",
    "name": "device",
    "date": "today",
    "torch": "2",
    "results": [ROW | {"peer": "PyTorch"}, ROW | {"dtype": "bfloat16", "ratio": 0.5, "peer": "cuDNN"}],
}


def test_bars_of_a_case_stand_together() -> None:
    from aule.cli._bench_plot import _label, _layout, _offset

    more = [ROW | {"group": group, "name": name} for group, name in (("forward", "b"), ("rows", "a"))]
    bars, headings, height = _layout([*DOCUMENT["results"], *more])
    assert [bar.name for bar in bars] == ["a", "", "b", "a"] and [text for _, text in headings] == [
        "Attention",
        "Row operations",
    ]
    places = [bar.y for bar in bars]
    assert places == sorted(places) and places[1] - places[0] < places[2] - places[1] and height > places[-1]
    assert _offset(bars, "a", places[0]) == pytest.approx((places[1] - places[0]) / 2)
    assert _offset(bars, "a", places[3]) == 0
    assert _label(DOCUMENT["results"][1], True) == "0.50x cuDNN  (2.00 GB/s)"


@pytest.mark.parametrize("ratio", [1.5, None])
def test_the_picture(tmp_path: Path, ratio: float | None) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    from aule.cli._bench_plot import plot

    results = [row if ratio else row | {"ratio": None} for row in DOCUMENT["results"]]
    plot(DOCUMENT | {"results": results}, str(tmp_path / "a.svg"))
    drawn = (tmp_path / "a.svg").read_text()
    assert "<svg" in drawn and ("1.50x" in drawn if ratio else "1.50x" not in drawn)


def test_a_busy_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 4)
    for load, busy in ((1.9, False), (2.1, True)):
        monkeypatch.setattr(bench.os, "getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        assert bench._busy() is busy
    monkeypatch.delattr(bench.os, "getloadavg")
    assert bench._busy() is False


@pytest.mark.parametrize(
    ("rate", "unit", "text"),
    [
        (0.0004, "TFLOPS", "400 MFLOPS"),
        (1234.5, "GFLOP/s", "1.23 TFLOP/s"),
        (0.99996, "GB/s", "1000 MB/s"),
        (3e-10, "TB/s", "300 B/s"),
        (45.678, "TB/s", "45.7 TB/s"),
        (0.0, "TFLOPS", "0.00 FLOPS"),
    ],
)
def test_speeds_have_digits(rate: float, unit: str, text: str) -> None:
    assert speed(rate, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(5e-6, "5 us"), (0.0015, "1.50 ms"), (0.1234, "123 ms"), (12.345, "12.3 s")]
)
def test_times_have_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
