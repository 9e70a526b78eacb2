"""docs/design.md names every module, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "aule"
PAGE = (ROOT / "docs" / "design.md").read_text()

WHOLE_FOLDERS = ("ir/interpret", "ir/passes", "cli", "kernels")
"""Described as folders, not file by file."""


def modules() -> list[str]:
    """All that somebody else may import, by their paths in the package."""
    paths = (path.relative_to(PACKAGE).with_suffix("").as_posix() for path in sorted(PACKAGE.rglob("*.py")))
    return [path for path in paths if not Path(path).name.startswith("_") and not path.startswith(WHOLE_FOLDERS)]


def test_every_module_is_named() -> None:
    unnamed = []
    for module in modules():
        folder, name = Path(module).parent.name, Path(module).name
        if name == f"numpy_{folder}":  # numpy_norm stands for its like
            name = "numpy_norm"
        if not re.search(rf"\b{name}\b", PAGE):
            unnamed.append(module)
    assert len(modules()) > 200 and not unnamed


def test_what_is_named_exists() -> None:
    named = sorted(set(re.findall(r"\b[\w/]+\.py\b", PAGE)))
    folders = [PACKAGE, *(ROOT / name for name in ("tests", "tools"))]
    assert len(named) > 50
    assert not [path for path in named if not any(found for folder in folders for found in folder.rglob(path))]
