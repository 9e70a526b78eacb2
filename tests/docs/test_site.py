"""The documentation site: generated pages are up to date, every public name has its place, and links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from repository import ROOT

import aule

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
PUBLIC = ("nn", "codegen", "kernels", "distributed", *(f"integrations.{name}" for name in aule.integrations._FILES))
"""Modules whose ``__all__`` is public, beside that of aule itself."""
ELSEWHERE = {
    "aule.__version__", "aule.codegen", "aule.kernels",  # a line of text; modules, by their members
    "aule.integrations.patching.PatchReport", "aule.integrations.patching.patch_model",  # as aule's own names
    "aule.integrations.comfyui.NODE_CLASS_MAPPINGS", "aule.integrations.comfyui.NODE_DISPLAY_NAME_MAPPINGS",
}  # fmt: skip
"""Public names without an entry of their own; the last two are for ComfyUI to read."""


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


# -- what is generated -------------------------------------------------------------------------------------------------


def test_support_is_written_from_its_data() -> None:
    write = tool("write_support")
    data, models = write.read()
    assert (DOCS / "support.md").read_text("utf-8") == write.page(data, models)
    readme = (ROOT / "README.md").read_text("utf-8")
    assert write.readme_with(write.readme_table(data), readme) == readme
    assert {feature["group"] for feature in data["features"]} == {"", *data["groups"]}


def test_a_group_of_features_is_no_better_than_its_worst() -> None:
    write = tool("write_support")
    marks = (["run", "run"], ["run", "no"])
    data = {
        "backends": [{"name": name, "short": name} for name in "AB"],
        "groups": {"g": "both"},
        "features": [{"group": "g", "feature": "f", "marks": mark} for mark in marks],
    }
    assert "| both | ✓ | partly |" in write.readme_table(data)


def test_table_of_performance_is_what_the_results_say() -> None:
    plots = tool("plot_results")
    assert plots.page_with(plots.table()) == (DOCS / "performance.md").read_text("utf-8")


def test_plots_are_the_same_every_time() -> None:
    """SVG files of matplotlib have a date unless told otherwise."""
    drawn = [DOCS / "images" / f"{x}.svg" for x in ("speed", "forward", "backward", "decode", "row-operations", "cpu")]
    assert not [path.name for path in drawn if "<dc:date>" in path.read_text("utf-8")]


# -- the reference -----------------------------------------------------------------------------------------------------


def exported(module: str) -> list[str]:
    """Names in ``__all__``, without importing a module that needs another package."""
    path = ROOT / "src" / "aule" / module.replace(".", "/")
    source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    for node in ast.parse(source.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [f"aule.{module}.{name}" for name in ast.literal_eval(node.value)]
    raise AssertionError(f"{module} has no __all__")


def test_every_public_name_has_its_place() -> None:
    text = "\n".join(path.read_text("utf-8") for path in (DOCS / "api").glob("*.md"))
    entries = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    names = {f"aule.{name}" for name in (*aule.__all__, "PatchReport", "patch_model")}
    names |= {name for module in PUBLIC for name in exported(module)}
    modules = {"codegen", "distributed", "integrations", "ir", "kernels", "nn"}
    assert {name for name in dir(aule) if not name.startswith("__")} - modules <= {name[5:] for name in names}
    assert len(entries) == len(set(entries)) and set(entries) == names - ELSEWHERE
    assert "`aule.__version__`" in text


def test_lines_are_short() -> None:
    """Beside tables and code, as on every other page."""
    found = [*DOCS.glob("*.md"), *(DOCS / "api").glob("*.md")]
    pages = [path for path in found if "--8<--" not in path.read_text("utf-8")]
    lines = [(path.name, line) for path in pages for line in text_of(path).splitlines() if not line.startswith("|")]
    assert not [(name, line) for name, line in lines if len(line) > 120 and not name.startswith(("models", "compiled"))]


# -- links -------------------------------------------------------------------------------------------------------------

LINK = re.compile(r"\]\(([^)\s]+)\)")
EXTERNAL = re.compile(r"https?://[a-z0-9-]+(\.[a-z0-9-]+)+(/[\w./%#?=&~+-]*)?")


@cache
def text_of(path: Path) -> str:
    """A page with what it includes, and without code."""
    text = re.sub(r'--8<-- "([^"]+)"', lambda m: (ROOT / m[1]).read_text("utf-8"), path.read_text("utf-8"))
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", text)


@cache
def anchors(path: Path) -> set[str]:
    """Of headings, as the site makes them, and of entries of the reference."""
    headings = re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain}
    return slugs | set(re.findall(r"^::: (\S+)$", text_of(path), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links(page: Path) -> None:
    wrong = []
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", text_of(page))):
        if "://" in link:
            wrong += [] if EXTERNAL.fullmatch(link) else [link]
            continue
        name, _, anchor = link.partition("#")
        target = page if not name else (page.parent / name).resolve()
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong
