"""Files and names of the code that the pages mention exist, and lines are short enough."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from repository import ROOT

FOLDERS = ("src", "tests", "tools", "benchmarks", "examples", "scripts", "docs", ".github")
PRESENT = ("docs/contributing.md", "docs/design.md", "docs/kernel-language.md", "docs/numerics.md")
"""Pages on what is there now; the notebook, docs/lab, tells of what was there on its day."""
GUIDES = ("docs/migrating.md", "docs/troubleshooting.md")
"""They name other libraries' functions too."""
NOTEBOOK = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "lab").glob("*.md"))
FOREIGN = {"v_permlanex16", "OpAtomicIAdd"}
"""Instructions of drivers' languages that no renderer of ours writes."""
SITE = tuple(f"docs/{name}.md" for name in ("install", "quick-start", "commands", "support"))
"""Pages of the site on what users type."""
PIECES = {"build_", "_ptr"}
"""Of names that are made of them."""
INHERITED = {("AuleCache", "update")}
"""From classes of other packages."""


@cache
def files() -> tuple[str, ...]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return (*FOLDERS, *(path.relative_to(ROOT).as_posix() for path in (*found, *ROOT.glob("*.*"))))


@cache
def words() -> frozenset[str]:
    """Of all code and settings."""
    read = [ROOT / name for name in files() if name.endswith((".py", ".yml", ".toml", ".sh")) or "." not in name]
    texts = (path.read_text("utf-8") for path in read if path.is_file() and path != Path(__file__).resolve())
    return frozenset(word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text))


@cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Words of each class of the package, and its bases."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                own, bases = found.setdefault(node.name, (set(), set()))
                own.update(re.findall(r"\w+", ast.get_source_segment(text, node) or ""))
                bases.update(ast.unparse(base).split(".")[-1] for base in node.bases)
    return found


def has(owner: str, member: str) -> bool:
    own, bases = classes().get(owner, (set(), set()))
    return member in own or any(has(base, member) for base in bases)


def text_of(page: str) -> str:
    """Without blocks of code, which are run, or are of a shell."""
    return re.sub(r"(?ms)^```.*?^```\n", "", (ROOT / page).read_text("utf-8"))


def quoted(page: str) -> list[str]:
    return sorted({re.sub(r"\s+", " ", x) for x in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text_of(page))})


def is_path(token: str) -> bool:
    return bool(re.fullmatch(r"[\w./-]+\.(py|md|csv|svg|toml|yml)|[\w.-]+(/[\w.-]+)*/", token))


@pytest.mark.parametrize("page", PRESENT)
def test_files(page: str) -> None:
    named = [token for token in quoted(page) if is_path(token)]
    # A file of results may go by the end of its name, where those before it have said the rest.
    ends = {token: token if token.startswith("-") else f"/{token.rstrip('/')}" for token in named}
    assert len(named) > 2
    assert not [token for token, end in ends.items() if not any(f"/{name}".endswith(end) for name in files())]


@pytest.mark.parametrize("page", [*PRESENT, *SITE])
def test_names(page: str) -> None:
    unknown = {
        (token, word)
        for token in quoted(page)
        if not is_path(token)
        for word in re.findall(r"[A-Za-z_]\w*", token)
        if word.removesuffix("_ptr") not in words() | FOREIGN and word not in PIECES
    }
    assert len(quoted(page)) > 20 and not unknown


@pytest.mark.parametrize("page", [*PRESENT, *SITE])
def test_members(page: str) -> None:
    pairs = {
        pair
        for token in quoted(page)
        if re.fullmatch(r"[\w.]+", token)
        for pair in zip(token.split("."), token.split(".")[1:], strict=False)
        if pair[0] in classes()
    }
    assert not {pair for pair in pairs - INHERITED if not has(*pair)}


def test_places() -> None:
    """Of names that are said to be in a file."""
    said = [x for page in PRESENT for x in re.findall(r"`([\w.]+)`\s+(?:in|of)\s+`([\w/]+\.py)`", text_of(page))]
    wrong = []
    for name, path in said:
        there = [(ROOT / file).read_text("utf-8") for file in files() if f"/{file}".endswith(f"/{path}")]
        if not any(re.search(rf"\b{name.split('.')[-1]}\b", text) for text in there):
            wrong.append((name, path))
    assert said and not wrong


@pytest.mark.parametrize("page", ["README.md", *PRESENT, *GUIDES, "CHANGELOG.md", "SECURITY.md", *NOTEBOOK])
def test_lines(page: str) -> None:
    """Rows of tables and lines with an address are as long as they are."""
    lines = text_of(page).splitlines()
    assert not [line for line in lines if len(line) > 120 and not (line.startswith("|") or "](https:" in line)]


def test_every_error_code_is_explained() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    sources = (path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    codes = {code for source in sources for code in re.findall(r"\"(AULE_ERROR_[A-Z_]+)\"", source)}
    assert len(codes) > 12 and not {code for code in codes if f"`{code}`" not in text}
