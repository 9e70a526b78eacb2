"""docs/design.md names every room of the package, what it names exists, and it stays short."""

from __future__ import annotations

import re

from repository import ROOT

PACKAGE = ROOT / "src" / "aule"
PAGE = (ROOT / "docs" / "design.md").read_text()


def rooms() -> list[str]:
    """Folders of the package, by their own names, without those inside ir/ and frontends/torch/."""
    folders = (path.parent for path in sorted(PACKAGE.rglob("__init__.py")))
    whole = (PACKAGE / "ir", PACKAGE / "frontends" / "torch")
    return [folder.name for folder in folders if folder != PACKAGE and folder.parent not in whole]


def test_every_room_is_named() -> None:
    assert len(rooms()) > 30 and not [room for room in rooms() if not re.search(rf"\b{room}\b", PAGE)]


def test_what_is_named_exists() -> None:
    named = sorted(set(re.findall(r"\b[\w/]+\.(?:py|txt|toml)\b", PAGE)))
    folders = [PACKAGE, ROOT, *(ROOT / name for name in ("tests", "tools"))]
    assert len(named) > 15
    assert not [path for path in named if not any(any(folder.rglob(path)) for folder in folders)]


def test_it_stays_short() -> None:
    assert len(PAGE.encode()) < 12 * 1024
