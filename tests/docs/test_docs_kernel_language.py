"""The page on the kernel language: its code runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
from repository import ROOT

from aule.ir import Builder

PAGE = ROOT / "docs" / "kernel-language.md"


def test_the_examples_run_and_print_what_the_page_says() -> None:
    if not PAGE.exists():
        pytest.skip("the documentation is not part of this installation")
    page = PAGE.read_text()
    namespace: dict[str, Any] = {}
    printed, compared = "", 0
    for match in re.finditer(r"```(python|text)\n(.*?)```", page, re.DOTALL):
        kind, body = match.groups()
        if kind == "python":
            line = page[: match.start()].count("\n") + 1
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile("\n" * line + body, str(PAGE), "exec"), namespace)
            printed = output.getvalue()
        else:
            assert printed.strip() == body.strip()
            compared += 1
    assert compared == 5


def test_the_page_names_all_that_a_kernel_is_written_with() -> None:
    if not PAGE.exists():
        pytest.skip("the documentation is not part of this installation")
    inside = {"coerce", "emit", "get", "set"}  # what operators and variables are made of
    methods = {name for name in vars(Builder) if not name.startswith("_")} - inside
    assert len(methods) > 60
    assert not {name for name in methods if not re.search(rf"\b{name}\b", PAGE.read_text())}
