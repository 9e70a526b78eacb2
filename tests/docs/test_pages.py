"""Every code block of the README and the site runs, and prints what the page says.

Blocks of a page run in order, in one process with one namespace:

- ``python`` is executed; a ``text`` block right below it is what it prints.
- ``sh`` has a command a line. Those of aule and Python are executed, in the same folder; installers are not.
- ``console``, ``yaml``, ``cpp`` and the like are for reading.

What a page needs beyond NumPy stands in its front matter, ``needs: torch, transformers``, or, in the README, in a
comment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

import aule

PAGES = sorted([ROOT / "README.md", *(p for p in (ROOT / "docs").rglob("*.md") if "lab" not in p.parts)])
BLOCK = re.compile(r"^(?P<indent> *)```(?P<kind>[a-z]+)[^\n]*\n(?P<body>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
RUN = ("aule", "python")
NOT_RUN = (
    "#", "apt-get", "brew", "dnf", "export", "git", "mkdocs", "pacman", "pip", "python -m pip", "scripts/", "sudo",
    "vulkaninfo",
)  # fmt: skip
"""Commands that install, or need a network, an environment of their own or minutes."""

RUNNER = """
import contextlib, io, json, sys, types
runner = sys.modules["__main__"]
sys.modules["__main__"] = types.ModuleType("__main__")  # PyTorch's compiler looks up globals of functions there
namespace = vars(sys.modules["__main__"])
for kind, line, body in json.load(open(sys.argv[1], encoding="utf-8")):
    if kind == "python":
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("\\n" * line + body, sys.argv[2], "exec"), namespace)
        printed = output.getvalue()
    elif printed.strip() != body.strip():
        sys.exit(f"{sys.argv[2]}:{line}: the page says\\n{body}\\nand the code prints\\n{printed}")
"""


def blocks(page: Path) -> list[tuple[str, int, str, bool]]:
    """Kind, line, text, and whether it follows the block before with only white space between."""
    text, found, end = page.read_text(encoding="utf-8"), [], 0
    for match in BLOCK.finditer(text):
        indent = match["indent"]
        body = "".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start()) + 1
        found.append((match["kind"], line, body, bool(end) and not text[end : match.start()].strip()))
        end = match.end()
    return found


def needs(page: Path) -> list[str]:
    said = r"(?:---\n.*?^|<!-- )needs: *([^\n]*?)(?: -->)?$"
    match = re.match(said, page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [name.strip() for name in match[1].split(",")] if match else []


def skip_without(page: Path) -> None:
    for name in needs(page):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}


def with_kind(*kinds: str) -> list[Path]:
    return [page for page in PAGES if any(kind in kinds for kind, *_ in blocks(page))]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", with_kind("python"), ids=name)
def test_code(page: Path, tmp_path: Path) -> None:
    skip_without(page)
    steps, before = [], ""
    for kind, line, body, follows in blocks(page):
        if kind == "python" or (kind == "text" and before == "python" and follows):
            steps.append((kind, line, body))
        before = kind
    (tmp_path / "steps.json").write_text(json.dumps(steps), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, "steps.json", name(page)],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def commands(page: Path) -> list[tuple[int, str]]:
    return [
        (line + 1 + i, text.strip())
        for kind, line, body, _ in blocks(page)
        if kind == "sh"
        for i, text in enumerate(body.splitlines())
        if text.strip()
    ]


@pytest.mark.parametrize("page", with_kind("sh"), ids=name)
def test_commands(page: Path, tmp_path: Path) -> None:
    skip_without(page)
    for line, command in commands(page):
        if command.startswith(NOT_RUN):
            continue
        words = shlex.split(command, comments=True)
        assert words[0] in RUN, f"{name(page)}:{line}: neither of {RUN} nor of {NOT_RUN}"
        if "hip" in words and "hip" in aule.get_backend_errors():
            continue  # for owners of an AMD GPU
        program = [sys.executable, "-m", "aule"] if words[0] == "aule" else [sys.executable]
        done = subprocess.run(
            [*program, *words[1:]], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{name(page)}:{line}: {command}\n{done.stdout}{done.stderr}"
