"""A sample of CPU kernels compiles for every feature level; `tools/compile_cpu.py` compiles all of them.

Each is compiled in the child process that compiles at run time, so that a failed assertion of LLVM fails a test only.
"""

from __future__ import annotations

import sys

import pytest
from repository import ROOT

sys.path.append(str(ROOT / "tools"))

import compile_cpu

SHARE = 60
"""One problem in so many is compiled here."""


@pytest.mark.slow
@pytest.mark.parametrize("level", compile_cpu.levels())
@pytest.mark.parametrize("optimise", [True, False], ids=["optimised", "unoptimised"])
def test_kernels_compile(level: str, optimise: bool) -> None:
    found = compile_cpu.compile_all(level, SHARE if optimise else 4 * SHARE, optimise)
    assert found.pop("compiled", 0) > 0
    assert not found, "\n".join(found)
