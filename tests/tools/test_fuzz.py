"""`tools/fuzz.py`: a short run with a fixed seed on each backend, and that failures are found, reduced and written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
from repository import ROOT

import aule

TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

import fuzz  # noqa: E402
from fuzzing import bounds, report, space  # noqa: E402
from fuzzing.trial import Wanted  # noqa: E402

SEED = 22


def run(folder: Path, **options: Any) -> int:
    given = {"seed": SEED, "out": folder, "shrink": 5, **options}
    return fuzz.main([str(x) for name, value in given.items() for x in (f"--{name}", value)])


def check(folder: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> None:
    status = run(folder, **options)
    said = capsys.readouterr().out
    assert status == 0, said
    assert f"{options['cases']} cases on {options['backend']}, seed {SEED}" in said and "0 failed" in said


@pytest.mark.device
@pytest.mark.parametrize(
    ("ops", "cases", "together"), [("attention", 90, 30), ("rows", 60, 30), ("decode", 40, 30), ("cache", 20, 30)]
)
def test_on_the_cpu(ops: str, cases: int, together: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    devices.need("cpu")
    check(tmp_path, capsys, ops=ops, cases=cases, backend="cpu", together=together)


@pytest.mark.device
@pytest.mark.parametrize("backend", ["cuda", "vulkan", "opencl", "webgpu"])
def test_on_devices(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    devices.need(backend)
    check(tmp_path, capsys, ops="all", cases=20, backend=backend, together=5)


def test_with_numpy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    check(tmp_path, capsys, ops="all", cases=100, backend="numpy", together=5)


@pytest.mark.parametrize("group", space.GROUPS)
def test_cases_are_json_and_come_again(group: str) -> None:
    cases = [space.numbered(SEED, group, number, "cpu", 10) for number in range(60)]
    assert cases == [space.numbered(SEED, group, number, "cpu", 10) for number in range(60)]
    assert json.loads(json.dumps(cases)) == cases
    assert len({json.dumps(case) for case in cases}) == 60


def case_of(op: str, group: str = "rows", **fields: Any) -> space.Case:
    """The first case of an op with these fields, on NumPy."""
    for number in range(2000):
        case = space.numbered(SEED, group, number, "numpy", 1)
        if case["op"] == op and all(case.get(name) == value for name, value in fields.items()):
            return case
    raise AssertionError(f"no case of {op} with {fields}")


def broken_swiglu(gate: Any, up: Any = None, **options: Any) -> Any:
    """Wrong in the fourth row, if there is one."""
    found = fuzz_original(gate, up, **options)
    if found.ndim > 1 and found.shape[-2] > 3:
        found = np.array(found)
        found[..., 3, :] *= 1.5
    return found


fuzz_original = aule.swiglu


def test_a_failure_is_reduced_and_its_script_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = case_of("swiglu", front="numpy") | {
        "values": "offset",
        "dtype": "f32",
        "layout": "gap",
        "shape": [2, 20, 64],
    }
    assert not fuzz.judge(case)
    monkeypatch.setattr(aule, "swiglu", broken_swiglu)
    said = fuzz.judge(case)
    assert "y is wrong at" in said
    smaller = fuzz.save(tmp_path, "one", case, said, seconds=60.0)
    assert smaller["shape"] == [1, 4, 2] or (smaller["shape"] == [1, 4, 1] and smaller["without"] == [])
    assert (smaller["values"], smaller["layout"], smaller["twice"]) == ("normal", "contiguous", False)
    assert "FAILED one: y is wrong" in capsys.readouterr().out
    assert json.loads((tmp_path / "one.json").read_text()) == smaller
    program = compile((tmp_path / "one.py").read_text(), "one.py", "exec")
    with pytest.raises(AssertionError, match="y: "):
        exec(program, {"__name__": "__main__"})
    monkeypatch.undo()
    exec(program, {"__name__": "__main__"})
    assert fuzz.main(["--case", str(tmp_path / "one.json")]) == 0


@pytest.mark.parametrize(
    ("group", "op"),
    [("attention", "flash_attention"), ("attention", "varlen"), ("decode", "paged"), ("cache", "cache")],
)
@pytest.mark.parametrize("front", ["numpy", "torch"])
def test_scripts_of_right_cases_run(group: str, op: str, front: str) -> None:
    if front == "torch":
        pytest.importorskip("torch")
    case = case_of(op, group, front=front)
    exec(compile(report.script(fuzz.trial_of(case), case, "nothing"), "script.py", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("layout", ["contiguous", "gap", "step", "expanded"])
def test_rope_in_place(layout: str) -> None:
    """Elements that share memory are refused, which is right."""
    case = case_of("rope", front="numpy") | {"inplace": True, "grad": False, "shape": [2, 3, 5, 64], "columns": 64}
    case |= {"layout": layout, "pairs": 32, "ids": None, "tables": "positions", "values": "normal"}
    trial = fuzz.trial_of(case)
    assert trial.refused == (layout == "expanded") and not fuzz.judge(case)


@pytest.mark.parametrize(
    ("op", "backend", "rounded"),
    [("layer_norm", "cpu", False), ("layer_norm", "vulkan", True), ("layer_norm_linear", "cpu", True)],
)
def test_rows_of_equal_numbers(op: str, backend: str, rounded: bool) -> None:
    """Where the mean of equal numbers is rounded, what is left of them is divided by the root of eps."""
    case = case_of(op, front="numpy") | {"backend": backend, "values": "constant", "dtype": "f32"}
    case |= {"without": ["bias"], "options": {"eps": 1e-5}}
    limit = float(np.max(fuzz.trial_of(case).wanted()["y"].limit))
    assert (limit > 2.0**-23 * 0.75 / 1e-5**0.5) == rounded and limit < 0.1


def test_faint_weights_promise_nothing() -> None:
    """`docs/numerics.md`, nan-in-v: an infinity whose weight may be zero."""
    values, weights = np.array([[np.inf, np.inf, 1.0]]), np.array([[2.0**-25, 0.5, 0.0]])
    for dtype, skipped in (("f16", [True, False, False]), ("f32", [False, False, False])):
        found = bounds.without_faint({"out": Wanted(values, 1e-3, dtype)}, weights)["out"]
        assert np.broadcast_to(found.skip, values.shape)[0].tolist() == skipped
    assert bounds.marks(np.ones(3, np.float16), "f16") is None
    assert bounds.marks(np.array([1.0, np.nan], np.float16), "f16").tolist() == [0.0, 1.0]


def test_every_kind_of_mistake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed input, an error that is none of ours, a result that differs from run to run, a mistake let through."""
    case = case_of("rms_norm", front="numpy", values="normal", dtype="f32") | {"shape": [3, 8], "twice": True}
    right = aule.rms_norm

    def judged(function: Any, given: space.Case = case) -> str:
        monkeypatch.setattr(aule, "rms_norm", function)
        return fuzz.judge(given)

    def writes(x: Any, *args: Any, **options: Any) -> Any:
        found = right(x, *args, **options)
        x[0, 0] = 7.0
        return found

    def raises(*_: Any, **__: Any) -> Any:
        raise IndexError("out of range")

    def refuses(*_: Any, **__: Any) -> Any:
        raise aule.InvalidShapeError("[rms_norm] expected nothing, got something; stop")

    def drifts(*args: Any, **options: Any) -> Any:
        drifts.calls += 1  # type: ignore[attr-defined]
        return right(*args, **options) * np.float32(1 + 1e-7 * drifts.calls)  # type: ignore[attr-defined]

    drifts.calls = 0  # type: ignore[attr-defined]
    assert judged(right) == ""
    assert judged(writes) == "changed its inputs: x"
    assert judged(raises) == "raised IndexError: out of range"
    assert judged(refuses).startswith("refused: InvalidShapeError")
    assert judged(drifts) == "y differs in a second run"
    assert "has shape" in judged(lambda *args, **options: right(*args, **options)[:2])
    double = case | {"dtype": "f64", "backend": "opencl"}
    assert judged(lambda x, *_, **__: x, double) == "a call with a mistake was not refused"


def test_hypothesis_draws_and_reduces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    assert run(tmp_path, ops="rows", cases=15, backend="numpy") == 0
    monkeypatch.setattr(fuzz, "judge", lambda case: "too long" if case["shape"][0] > 4 else "")
    options = fuzz.parsed(
        ["--hypothesis", "--ops", "rows", "--cases", "60", "--backend", "numpy", "--out", str(tmp_path)]
    )
    assert fuzz.with_hypothesis(options) == 1
    found = json.loads((tmp_path / f"numpy-rows-hypothesis-{options.seed}.json").read_text())
    assert found["shape"][0] == 5 and found["values"] == "normal"
    assert "60 cases of rows by hypothesis: a failure" in capsys.readouterr().out


def test_a_case_that_ends_its_process(tmp_path: Path) -> None:
    """The case is known, and the run goes on behind it; without hypothesis, which other machines lack."""
    pytest.importorskip("torch")
    numbers = [n for n in range(200) if space.numbered(SEED, "rows", n, "numpy", 1)["op"] == "geglu"]
    start = numbers[0] - 1
    crash = "import os, sys, aule\nsys.modules['hypothesis'] = None\naule.geglu = lambda *_, **__: os.abort()\n"
    (tmp_path / "sitecustomize.py").write_text(crash)
    command = [
        sys.executable,
        str(TOOLS / "fuzz.py"),
        "--isolate",
        "--seed",
        str(SEED),
        "--start",
        str(start),
        "--cases",
    ]
    command += ["3", "--together", "1", "--ops", "rows", "--backend", "numpy", "--shrink", "0", "--out", str(tmp_path)]
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAILED numpy-{SEED}-{numbers[0]}: ended its process with status -6" in done.stdout, done.stdout
    rest = [space.numbered(SEED, "rows", n, "numpy", 1)["op"] for n in range(numbers[0] + 1, start + 3)]
    assert "geglu" not in rest and f"1 cases on numpy, seed {SEED}, from {numbers[0] + 1}: 0 failed" in done.stdout
