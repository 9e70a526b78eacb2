"""The examples run with small sizes."""

from __future__ import annotations

import importlib.util
import sys
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

pytest.importorskip("torch")
pytest.importorskip("llvmlite", reason="training needs the CPU engine")

EXAMPLES = ROOT / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_train_tiny_gpt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "curves.svg"
    curves = load("train_tiny_gpt").main(["--steps", "4", "--plot", str(target)])
    assert curves["aule"] == pytest.approx(curves["PyTorch"], rel=1e-4)
    assert curves["aule"][-1] < curves["aule"][0]
    assert "aule served 12 calls and passed on 0" in capsys.readouterr().out
    assert len(xml.dom.minidom.parse(str(target)).getElementsByTagName("polyline")) == 5


def test_serve_tiny(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    requests = load("serve_tiny").main(["--prompts", "5", "--tokens", "6", "--pages", "16"])
    assert all(request.done for request in requests)
    said = capsys.readouterr().out
    assert "5 of 5 results are what generate() gives for the prompt alone" in said
    assert "tokens/s" in said and "at most 1" in said  # of 16 pages: not all prompts ran at once


def test_long_context_training(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)  # its processes import it by name
    losses = load("long_context_training").main(["--ranks", "2", "--rows", "512", "--steps", "3", "--limit", "1"])
    assert len(losses) == 3 and losses[-1] < losses[0]
    said = capfd.readouterr().out
    assert "one process: 512 rows need 1.2 MiB in one process; the limit is 1.0 MiB" in said
    assert "2 processes: 256 rows each, 0.6 MiB" in said
    assert said.count("busiest rank 1.0") == 3
