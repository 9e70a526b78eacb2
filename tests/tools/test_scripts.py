"""Functions of the shell scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMMON = Path(__file__).parents[2] / "scripts" / "_common.sh"


@pytest.mark.skipif(shutil.which("bash") is None or sys.platform == "win32", reason="needs bash")
@pytest.mark.parametrize(
    ("fails", "message", "tries", "status"),
    [
        (2, "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7", 3, 0),
        (2, "E: Unable to locate package nothing", 1, 1),
        (0, "", 1, 0),
    ],
)
def test_apt_waits_for_its_locks(tmp_path: Path, fails: int, message: str, tries: int, status: int) -> None:
    calls = tmp_path / "calls"
    tools = {
        "apt-get": f'echo "$*" >>{calls}; [ "$(wc -l <{calls})" -gt {fails} ] || {{ echo "{message}" >&2; exit 100; }}',
        "sudo": 'exec "$@"',
        "sleep": ":",
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = f"set -euo pipefail; PATH={tmp_path}:$PATH; source {COMMON}; apt_update"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    said = calls.read_text().splitlines()
    assert (done.returncode, len(said)) == (status, tries) and all("DPkg::Lock::Timeout=" in line for line in said)
    assert done.stderr.strip() == (message if status else "")
