"""A sample of rendered kernels equals `tests/kernel_hashes.txt`, to the byte; `tools/kernel_hashes.py` checks all."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from repository import ROOT

TOOLS = ROOT / "tools"
SAMPLE = 8
"""Of each place every eighth problem is rendered here, the first one included."""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_hashes", TOOLS / "kernel_hashes.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["kernel_hashes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hashes = load()


@pytest.mark.parametrize("where", hashes.PLACES)
def test_rendered_kernels(where: str) -> None:
    problems = list(hashes.listed(where))[::SAMPLE]
    names = {hashes.name_of(problem, where) for problem in problems}
    found = [line for problem in problems for line in hashes.lines_of(problem, where)]
    expected = [line for line in hashes.known(f"/{where}") if line.split("#")[0] in names]
    assert found
    said = hashes.differences(found, expected)
    remedy = "python tools/kernel_hashes.py --check names them all, --write accepts them"
    assert not said, "\n".join([f"kernels of {where} are not those of tests/kernel_hashes.txt; {remedy}", *said])


def test_every_problem_has_its_lines() -> None:
    """Those that are not rendered here are listed as well, and nothing else is."""
    names = {line.split("#")[0] for line in hashes.known()}
    wanted = {hashes.name_of(problem, where) for where in hashes.PLACES for problem in hashes.listed(where)}
    assert names == wanted
