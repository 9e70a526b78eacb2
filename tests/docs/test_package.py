"""The package as users get it: modules that importing it loads, contents of the wheel, and files that pages name."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from repository import ROOT

import aule

OPTIONAL = {
    "torch", "pyopencl", "wgpu", "Metal", "objc", "ml_dtypes", "llvmlite", "cupy", "jax", "matplotlib", "transformers",
    "diffusers",
}  # fmt: skip

NUMPY_ALONE = """
import sys
class NumPyAlone:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names | {"numpy", "aule"} and not top.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NumPyAlone())
"""
"""Hides every package but NumPy and aule, as in an environment that has no others."""

ATTENTION = """
import numpy as np
import aule
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 33, 16), dtype=np.float32)
p = np.exp(q @ k.swapaxes(-1, -2) / 4)
expected = p / p.sum(-1, keepdims=True) @ v
assert np.abs(aule.flash_attention(q, k, v, causal=False, backend="numpy") - expected).max() < 1e-5
"""


def run_python(code: str, **env: str) -> str:
    """Run code in a fresh interpreter and give back what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_import_loads_no_optional_package() -> None:
    loaded = run_python("import json, sys, aule; print(json.dumps([m.partition('.')[0] for m in sys.modules]))")
    assert not OPTIONAL & set(json.loads(loaded))


def test_import_probes_no_driver() -> None:
    """No runtime, hence no driver library, is loaded before it is needed."""
    loaded = run_python("import json, sys, aule; print(json.dumps([m for m in sys.modules if 'aule.runtime' in m]))")
    assert set(json.loads(loaded)) <= {"aule.runtime", "aule.runtime.base"}


def test_import_alone_loads_next_to_nothing() -> None:
    code = "import sys, aule; print(*(m for m in sys.modules if m.partition('.')[0] in ('aule', 'numpy')))"
    assert set(run_python(code).split()) == {"aule", "aule._version", "aule.api", "aule.api.exported"}


def test_every_public_name_is_found() -> None:
    """Whatever was asked for first, and whatever of the package was imported before."""
    for first in ("aule.cli", "aule.api.sdpa", "aule.api.row_ops"):
        assert (
            run_python(f"import {first}; from aule import *; print(install.__name__, KVCache.__name__)")
            == "install KVCache\n"
        )
    assert all(hasattr(aule, name) for name in aule.__all__)
    assert not hasattr(aule, "no_such_name") and set(aule.__all__) <= set(dir(aule))


def test_integrations_are_found_by_their_names() -> None:
    """``import aule`` is enough to name one, as the README does; each comes when it is named, and no other."""
    found = run_python("import sys, aule; print(aule.integrations.comfyui.__name__, 'torch' in sys.modules)")
    assert found == "aule.integrations.comfyui False\n"
    files = {p.stem for p in (ROOT / "src/aule/integrations").glob("[a-z]*.py")}
    assert set(aule.integrations._FILES) == files and not hasattr(aule.integrations, "no_such_name")


def test_works_with_numpy_alone() -> None:
    run_python(NUMPY_ALONE + ATTENTION)


def test_version_is_single_sourced() -> None:
    assert aule.__version__ == run_python("from aule._version import __version__; print(__version__)").strip()
    assert f"[{aule.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# -- the wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("build", "hatchling"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    # Not in ROOT: there a folder named build would be taken for the module.
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.iterdir()
    return made


def test_wheel_fits_every_platform(wheel: Path) -> None:
    assert wheel.name == f"aule_attention-{aule.__version__}-py3-none-any.whl"


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "aule").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "aule/py.typed" in expected
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_wheel_requires_numpy_alone(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    required = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert [re.match(r"[\w-]+", r).group() for r in required] == ["numpy"]  # type: ignore[union-attr]
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "torch", "opencl", "webgpu", "metal", "cpu", "bench", "docs", "dev", "all",
    }  # fmt: skip
    assert metadata["Requires-Python"] == ">=3.10"


def test_wheel_passes_check_with_numpy_alone(wheel: Path, tmp_path: Path) -> None:
    """What ``aule check`` does after the wheel was installed into an empty environment."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = f"""{NUMPY_ALONE}
sys.path.insert(0, {str(tmp_path / "site")!r})
sys.argv[:] = ["aule", "check"]
import aule.cli
assert aule.__file__.startswith(sys.path[0]), aule.__file__
sys.exit(aule.cli.main())
"""
    assert "numpy" in run_python(code, AULE_CACHE_DIR=str(tmp_path / "cache"), AULE_BACKEND="numpy").lower()


# -- without files of source -------------------------------------------------------------------------------------------


def zipped(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "aule.zip", "w") as archive:
        for path in (ROOT / "src" / "aule").rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(ROOT / "src"))
    return folder / "aule.zip"


def bytecode(folder: Path) -> Path:
    shutil.copytree(ROOT / "src" / "aule", folder / "aule", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "compileall", "-b", "-q", "aule"], cwd=folder, check=True)
    for path in (folder / "aule").rglob("*.py"):
        path.unlink()
    return folder


PACKED = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
import numpy as np, aule
from aule.engine import cache
assert aule.__file__.startswith(sys.argv[1]), aule.__file__
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 33, 16), dtype=np.float32)
p = np.exp(q @ k.swapaxes(-1, -2) / 4)
expected = p / p.sum(-1, keepdims=True) @ v
for backend in sys.argv[2:]:
    assert np.abs(aule.flash_attention(q, k, v, causal=False, backend=backend) - expected).max() < 1e-5
b = aule.ir.Builder("mine", 32)
b.thread_id()
print(cache.source_fingerprint(), *{op.where.file for op in b.finish().body})
"""


@pytest.mark.parametrize("packed", [zipped, bytecode])
def test_the_package_needs_no_files_of_source(packed: Callable[[Path], Path], tmp_path: Path) -> None:
    """From a zip file, and as bytecode alone: kernels are built, and found in the cache by the next process."""
    place = packed(tmp_path)
    backends = ["numpy", *(["cpu"] if importlib.util.find_spec("llvmlite") else [])]
    environment = {**os.environ, "PYTHONPATH": str(place), "AULE_CACHE_DIR": str(tmp_path / "cache")}
    seen = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PACKED, str(place), *backends],
            capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert done.stdout.endswith(" <string>\n"), "operations know the line of the user's kernel"
        seen.append((done.stdout, sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())))
    assert seen[0] == seen[1] and (len(seen[0][1]) > 2) == (len(backends) > 1)


def test_without_torch_the_error_says_so() -> None:
    code = """
import sys
sys.modules["torch"] = None
import aule
for function in (
    aule.install,
    lambda: aule.scaled_dot_product_attention(1, 2, 3),
    lambda: aule.KVCache(4, 2, 16, device="cpu"),
    lambda: aule.precompute_rope_frequencies(4, 8, device="cpu"),
):
    try:
        function()
    except aule.BackendUnavailableError as error:
        assert "pip install torch" in str(error), error
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- what pages say ----------------------------------------------------------------------------------------------------


def test_page_lists_every_environment_variable() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    known = set(re.findall(r"AULE_[A-Z_]+", (ROOT / "src/aule/settings.py").read_text(encoding="utf-8")))
    listed = set(re.findall(r"^\| `(AULE_[A-Z_]+)`", page, re.MULTILINE))
    assert listed == known


def test_page_lists_every_error() -> None:
    page = (ROOT / "docs" / "api" / "errors.md").read_text(encoding="utf-8")
    errors = {name for name in aule.__all__ if name.endswith("Error") and name != "AuleError"}
    assert set(re.findall(r"^\| `(\w+Error)`", page, re.MULTILINE)) == errors


def test_page_lists_every_extra_and_command() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = re.findall(r"^(\w+) = \[", listed, re.MULTILINE)
    install = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", install, re.MULTILINE)
    assert sorted(re.findall(r"\w+", " ".join(rows))) == sorted(extras)
    said = run_python("import sys; sys.argv[:] = ['aule', '--help']; import aule.cli; aule.cli.main()", COLUMNS="200")
    commands = re.findall(r"^    (\w+) ", said, re.MULTILINE)
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert len(commands) > 5 and sorted(re.findall(r"^\| `aule (\w+)`", page, re.MULTILINE)) == sorted(commands)


PAGES = (path for path in (ROOT / "docs").rglob("*.md") if "lab" not in path.parts)
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *PAGES])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_documents_name_files_that_exist(document: Path) -> None:
    """Whatever looks like a file in code; several may be written as one with braces or a star."""
    text = document.read_text(encoding="utf-8")
    folders = (ROOT / name for name in ("benchmarks", "docs", "examples", "src", "tests", "tools"))
    known = [p.as_posix() for p in (*ROOT.glob("*.*"), *(p for folder in folders for p in folder.rglob("*.*")))]
    for code in re.findall(r"`([^`\n]+)`", text):
        for name in re.findall(r"(?<![\w/.{}*,-])[\w][\w./-]*\.(?:py|md|csv|svg|toml|yml)\b", code):
            assert any(file.endswith(f"/{name}") for file in known), name
