"""`tools/check_device.py` on small tests: it reports failures, tests that ended their process, and tests not run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

pytest.importorskip("fcntl")  # a POSIX system
TOOL = ROOT / "tools" / "check_device.py"

FORWARD = """
import os, pytest
from aule.errors import DeviceLostError

pytestmark = pytest.mark.device

@pytest.fixture(params=["vulkan", "cpu"], scope="module")
def device(request):
    return request.param

@pytest.mark.parametrize("case", range(20))
def test_grid(device, case):
    assert device != "cpu"
    assert case != 7, "wrong by design"
    if case == 9:
        os.kill(os.getpid(), 9)
    if case == 11:
        raise DeviceLostError("gone")
    if case == 12:
        pytest.skip("no reason")
"""
SLOW = """
import time, pytest

pytestmark = pytest.mark.device

@pytest.mark.parametrize("name", ["vulkan"])
@pytest.mark.parametrize("n", range(5))
def test_slow(name, n):
    time.sleep(60)
"""
KINDS = """
import os, pytest

pytestmark = pytest.mark.device

@pytest.mark.parametrize("name", ["cuda"])
@pytest.mark.parametrize("n", range(4))
def test_kind(name, n):
    if n == 2:
        os.write(2, b"========= Invalid __global__ read\\n=========     by thread 3\\n")
"""
SANITIZER = """#!/bin/sh
shift 2
echo "========= COMPUTE-SANITIZER"
"$@"
echo "========= ERROR SUMMARY: 0 errors"
"""


def check(folder: Path, limit: float, *options: str, **environment: str) -> tuple[int, str]:
    command = [sys.executable, str(TOOL), "--limit", str(limit), "--folder", str(folder), "--workers", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    return done.returncode, done.stdout + done.stderr


def test_failures_and_what_ends_a_process(tmp_path: Path) -> None:
    (tmp_path / "test_forward.py").write_text(FORWARD)
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name  # pytest.mark.device")
    out = tmp_path / "out"
    status, said = check(tmp_path, 60, "--only", "grids,tests", "--out", str(out))
    assert status == 1, said
    assert re.search(r"grids forward +16 3F 1S", said), said
    for line in (
        r"test_grid\[vulkan-7\]: AssertionError: wrong by design",
        r"test_grid\[vulkan-9\]: the process ended with signal SIGKILL",
        r"test_grid\[vulkan-11\]: aule.errors.DeviceLostError: gone",
        r"test_broken.py: ModuleNotFoundError: No module named 'nothing_of_this_name'",
    ):
        assert re.search(rf"FAILED .*{line}", said), said
    assert "16 passed, 4 failed, 1 skipped, 0 cut off, 0 not run" in said, said
    assert (out / "summary.txt").read_text() == said
    assert "assert 7 != 7" in (out / "failures.txt").read_text()
    assert len((out / "results.tsv").read_text().splitlines()) == 21


def test_what_the_clock_cuts_off(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW)
    status, said = check(tmp_path, 20, "--only", "tests")
    assert status == 2, said
    assert re.search(r"tests slow +0 2C 3N", said), said
    assert re.search(r"CUT OFF .*test_slow\[0-vulkan\]", said), said


def test_what_a_sanitizer_reports(tmp_path: Path) -> None:
    (tmp_path / "test_kinds.py").write_text(KINDS)
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    status, said = check(tmp_path, 60, "--only", "sanitize", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert status == 1, said
    for name in ("memcheck", "racecheck", "initcheck"):
        assert re.search(rf"sanitize {name} +3 1F", said), said
        assert re.search(rf"FAILED sanitize {name} .*\[2-cuda\]: =+ Invalid __global__ read", said), said


def test_a_sanitizer_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "test_kinds.py").write_text(KINDS)
    status, said = check(tmp_path, 20, "--only", "sanitize", "--backends", "vulkan")
    assert status == 2 and "1 not run" in said, said
