"""The page on the kernel language names all that a kernel is written with; `test_pages.py` runs its code."""

from __future__ import annotations

import re

import pytest
from repository import ROOT

from aule.ir import Builder
from aule.ir.ops import OPS

PAGE = ROOT / "docs" / "kernel-language.md"


@pytest.fixture(scope="module")
def page() -> str:
    if not PAGE.exists():
        pytest.skip("the documentation is not part of this installation")
    return PAGE.read_text(encoding="utf-8")


def test_the_page_names_all_that_a_kernel_is_written_with(page: str) -> None:
    inside = {"coerce", "emit", "get", "location", "set"}  # what operators, variables and messages are made of
    methods = {name for name in vars(Builder) if not name.startswith("_")} - inside
    assert len(methods) > 60
    assert not {name for name in methods if not re.search(rf"\b{name}\b", page)}
    assert not {name for name in re.findall(r"`b\.(\w+)\(", page) if not hasattr(Builder, name)}


def test_the_table_has_all_operations(page: str) -> None:
    table = page[page.index("\n## All operations") :]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", table, re.MULTILINE)
    assert [name for name, *_ in rows if name not in OPS] == []
    assert sorted(name for name, *_ in rows) == sorted(OPS)
    # The meaning of an operation is said in ops.py and repeated on the page.
    assert {name: meaning for name, _, meaning in rows} == {
        name: info.doc.replace("``", "`") for name, info in OPS.items()
    }
