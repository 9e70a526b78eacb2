"""aule tune: what it lists, removes and prints. Its measurements are tested in tests/engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from devices import need

import aule
from aule import store
from aule.cli import main
from aule.cli import tune as tune_command
from aule.engine.tune import Measured, Outcome
from aule.engine.tune_cases import Case as TunedCase
from aule.ops.shared.plan import Plan
from aule.tuning import own

RECORD = {
    "op": "attention.forward.simt",
    "when": {"dtype": "f32", "head_dim": {"min": 32, "max": 64}},
    "use": {"shape": {"block_q": 32, "block_kv": 32, "resident_q": False}},
    "measured": {"device": "a GPU", "driver": "1", "date": "2026-11-18"},
}


def test_what_was_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["tune", "--list"]) == 0
    assert "Nothing was measured yet" in capsys.readouterr().out
    store.write("tuned/abc.jsonl", f"{json.dumps(RECORD)}\nnot a record\n".encode())
    assert main(["tune", "--list"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "a GPU" in line and "dtype f32, head_dim 32..64" in line and "block_q 32, block_kv 32" in line
    assert "resident_q" not in line
    assert main(["tune", "--list", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["records"]
    assert {name: record[name] for name in RECORD} == RECORD
    assert main(["tune", "--reset"]) == 0
    assert "1 record removed" in capsys.readouterr().out
    assert store.read("tuned/abc.jsonl") is None


@pytest.mark.device
def test_records_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path / "cache"))
    target = need("vulkan").target
    for name in (own.file_name(target), "tuned/abc.jsonl"):
        store.write(name, json.dumps(RECORD).encode())
    own.forget(target)
    assert own.own_records(target, RECORD["op"])
    assert main(["tune", "--reset", "--backend", "vulkan", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["removed"]) == 1
    assert not own.own_records(target, RECORD["op"]) and store.read("tuned/abc.jsonl") is not None


@pytest.mark.device
def test_tune_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path / "cache"))
    need("vulkan")
    measured = [Measured(None, 0.0004), Measured({"shape": {"rows": 8}}, 0.0, "too large")]
    case = TunedCase("a case", "op", {}, lambda target: Plan(()), {}, {}, 1.0)
    monkeypatch.setattr(tune_command, "tune", lambda *args: iter([Outcome(case, measured, None)]))
    arguments = ["tune", "--backend", "vulkan", "--dtype", "float32", "--head-dim", "64"]
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["device"] == "vulkan:0" and answer["cases"][0]["measured"][0]["speed"] == 0.0004
    assert answer["cases"][0]["measured"][1]["refused"] == "too large"
    assert main(arguments) == 0
    assert "400 MFLOPS  as it is  (the table)" in capsys.readouterr().out


@pytest.mark.device
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "nan"], "expected --seconds of 0 or more, got nan"),
        (["--head-dim", "600"], "expected --head-dim of 1 to 576, got 600"),
    ],
)
def test_mistakes_of_tune(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    need("vulkan")
    assert main(["tune", "--backend", "vulkan", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
def test_there_is_nothing_to_tune_without_a_gpu(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    if backend not in aule.get_available_backends():
        pytest.skip("no CPU engine here")
    assert main(["tune", "--backend", backend]) == 2
    said = capsys.readouterr().err
    assert "expected a GPU, got" in said and "name another device with --backend" in said
