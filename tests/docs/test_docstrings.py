"""Examples in docstrings run as they stand."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import aule
from aule.api.info import get_available_backends

PACKAGE = Path(aule.__file__).parent
FILES = sorted(p for p in PACKAGE.rglob("*.py") if ">>> " in p.read_text(encoding="utf-8"))


def test_there_are_examples() -> None:
    assert len(FILES) >= 9


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_examples_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if file.name == "context.py" and get_available_backends() == ["numpy"]:
        pytest.skip("no device, not even a software one")
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
    found = doctest.testmod(module)
    assert found.attempted and not found.failed, capsys.readouterr().out[:3000]
