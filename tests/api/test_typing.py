"""Types of the public functions, as a user's mypy sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

pytest.importorskip("mypy")
SNIPPETS = Path(__file__).parent / "typing"


@pytest.mark.slow
def test_snippets() -> None:
    """mypy with the user's settings, not ours: every type is as claimed, and every wrong call is refused."""
    flags = ["--strict", "--config-file=", "--follow-imports=silent", "--python-version=3.11"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, f"--cache-dir={ROOT / '.mypy_cache' / 'snippets'}", "snippets.py"],
        cwd=SNIPPETS,
        env={**os.environ, "MYPYPATH": f"{SNIPPETS}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (SNIPPETS / "snippets.py").read_text("utf-8")
    assert text.count("assert_type(") > 30 and text.count("# type: ignore") > 15
