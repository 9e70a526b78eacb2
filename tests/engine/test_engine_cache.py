"""The disk cache: entries are read back intact, and damaged entries are never used."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from aule import codegen, store
from aule.artifact import Artifact, Param, TensorMap
from aule.engine import cache
from aule.errors import InvalidArgumentError
from aule.ops.attention.config import ForwardConfig
from aule.ops.attention.plan.tiles import choose_shape
from aule.runtime._refused import save_refused
from aule.store import source
from aule.store.source import code_digest

ARTIFACT = Artifact(
    language="spirv",
    code=bytes(range(256)) * 8,
    entry="flash_attention",
    params=(Param("q_ptr", "buffer", "f16"), Param("o_ptr", "buffer", "f16", "write"), Param("n", "scalar", "i32")),
    workgroup=128,
    shared_bytes=4096,
    dynamic_shared=True,
    subgroup_size=32,
    uses_subgroups=True,
    extensions=("SPV_KHR_16bit_storage",),
    maps=(TensorMap("q_tensor", "q_ptr", "n", (64, "n"), ("n",), (64, 128), 128),),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("AULE_DISK_CACHE", raising=False)
    return tmp_path


def entry_file(folder: Path) -> Path:
    (file,) = [path for path in (folder / "kernels").rglob("*") if path.is_file()]
    return file


def test_hit(folder: Path) -> None:
    key = cache.key("config", "target")
    assert cache.load(key) is None
    cache.save(key, ARTIFACT)
    assert cache.load(key) == ARTIFACT
    assert cache.load(cache.key("config", "other")) is None
    assert entry_file(folder).name == key


def test_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = cache.key("config")
    cache.save(key, ARTIFACT)
    monkeypatch.setenv("AULE_DISK_CACHE", "0")
    assert cache.load(key) is None
    cache.save(cache.key("more"), ARTIFACT)
    entry_file(folder)  # still the only one


@pytest.mark.parametrize("place", [0, 5, 10, 40, 60, 300, -1])
def test_a_flipped_byte_is_a_miss(folder: Path, place: int, caplog: pytest.LogCaptureFixture) -> None:
    key = cache.key("config")
    cache.save(key, ARTIFACT)
    file = entry_file(folder)
    data = bytearray(file.read_bytes())
    data[place] ^= 0x10
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING, "aule"):
        assert cache.load(key) is None
    assert "damaged" in caplog.text
    cache.save(key, ARTIFACT)
    assert cache.load(key) == ARTIFACT


@pytest.mark.parametrize("keep", [0, 3, 20, 38, 41, 200, -1])
def test_a_truncated_entry_is_a_miss(folder: Path, keep: int) -> None:
    key = cache.key("config")
    cache.save(key, ARTIFACT)
    file = entry_file(folder)
    file.write_bytes(file.read_bytes()[:keep])
    assert cache.load(key) is None
    cache.save(key, ARTIFACT)
    assert cache.load(key) == ARTIFACT


def test_a_whole_entry_of_another_program_is_a_miss(folder: Path) -> None:
    """The digest holds, the fields do not: a format of the future, or of somebody else."""
    import json

    key = cache.key("config")
    cache.save(key, ARTIFACT)
    header = json.dumps({"language": "ptx", "unknown": 1}).encode()
    name = entry_file(folder).relative_to(folder).as_posix()
    store.write(name, len(header).to_bytes(4, "little") + header)
    assert store.read(name) is not None
    assert cache.load(key) is None


def test_a_folder_that_cannot_be_written_costs_nothing_but_speed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file where a folder must be refuses everybody, root included.
    blocked = folder / "file"
    blocked.write_bytes(b"")
    monkeypatch.setenv("AULE_CACHE_DIR", str(blocked))
    cache.save(cache.key("config"), ARTIFACT)
    assert cache.load(cache.key("config")) is None
    assert blocked.read_bytes() == b""


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run under any number: nothing is kept, and nothing fails."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("AULE_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    cache.save(cache.key("config"), ARTIFACT)
    assert cache.load(cache.key("config")) is None
    assert save_refused("ptx", b"code") is None


def test_a_home_that_no_shell_has_filled_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Dockerfile: a folder called ~ wherever the program runs is what nobody wants."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    monkeypatch.setenv("AULE_CACHE_DIR", "~/kernels")
    cache.save(cache.key("config"), ARTIFACT)
    assert cache.load(cache.key("config")) == ARTIFACT
    assert (folder / "kernels").is_dir()


@pytest.mark.parametrize("value", ["off", "false", "2"])
def test_a_switch_is_0_or_1(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AULE_DISK_CACHE", value)
    with pytest.raises(InvalidArgumentError, match=f"expected AULE_DISK_CACHE to be 0 or 1, got '{value}'; change"):
        cache.load(cache.key("config"))


def test_a_read_only_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = cache.key("config")
    cache.save(key, ARTIFACT)
    place = entry_file(folder).parent
    place.chmod(0o500)
    try:
        if os.access(place, os.W_OK):  # root is refused nothing by that

            def refused(*args: Any, **options: Any) -> None:
                raise PermissionError(errno.EACCES, "Permission denied", str(place))

            monkeypatch.setattr(os, "replace", refused)
        cache.save(key, replace(ARTIFACT, code=b"new"))
        assert cache.load(key) == ARTIFACT
    finally:
        place.chmod(0o700)


def test_a_failed_write_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    cache.save(cache.key("config"), ARTIFACT)
    assert [p for p in folder.rglob("*") if p.is_file()] == []


def test_the_key_holds_everything_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    target = codegen.TARGETS["ptx"]
    config = ForwardConfig(dtype="f32", head_dim=64, value_dim=64, shape=choose_shape(target, 64, 64))
    keys = {
        cache.key(config, target),
        cache.key(replace(config, dtype="f16"), target),
        cache.key(replace(config, right=True), target),
        cache.key(replace(config, shape=replace(config.shape, chunk_v=8)), target),
        cache.key(config, replace(target, arch="sm_90")),
        cache.key(config, replace(target, driver="999")),
        cache.key(config, replace(target, max_shared_bytes=1)),
    }
    assert len(keys) == 7
    before = cache.key(config, target)
    assert before == cache.key(replace(config), replace(target))
    monkeypatch.setattr(cache, "source_fingerprint", lambda: "another version")
    assert cache.key(config, target) != before


def test_the_fingerprint_changes_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "some_package" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def fingerprint() -> str:
        return code_digest("some_package.inner", "aule.artifact")

    seen = [fingerprint()]
    assert fingerprint() == seen[0] != code_digest("some_package.inner")
    (inner.parent / "other.py").write_text("a = 1")
    assert fingerprint() == seen[0]
    (inner / "kernel.py").write_text("a = 1")
    seen.append(fingerprint())
    (inner / "kernel.py").write_text("a = 2")
    seen.append(fingerprint())
    (inner / "kernel.py").rename(inner / "other.py")
    seen.append(fingerprint())
    (inner / "more").mkdir()
    (inner / "more" / "kernel.pyc").write_text("a = 2")
    seen.append(fingerprint())
    assert len(set(seen)) == 5


def test_the_fingerprint_reads_all_code_that_makes_kernels() -> None:
    """Modules that are not imported, too."""
    root = Path(source.__file__).parent.parent
    for name in ("ir", "tile", "ops", "render"):
        expected = sorted(path for path in (root / name).rglob("*.py"))
        found = sorted(root.parent / path for path, _ in source._files(resources.files("aule"), "aule", [name]))
        assert found == expected
    for name in ("artifact", "runtime._cpu_llvm"):
        (found,) = source._files(resources.files("aule"), "aule", name.split("."))
        assert found[0] == f"aule/{name.replace('.', '/')}.py"


def test_the_fingerprint_of_code_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a frozen application: its program file stands for the code."""
    program = tmp_path / "program"
    program.write_bytes(b"one build")
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(source.resources, "files", lambda package: tmp_path / "nothing")
    before = code_digest("aule.artifact")
    assert code_digest("aule.artifact") == before
    program.write_bytes(b"another build")
    assert code_digest("aule.artifact") != before


WRITER = """
import sys
import tempfile
from aule.artifact import Artifact
from aule.engine import cache
from aule.errors import InvalidArgumentError
me = int(sys.argv[1])
whole = [bytes([n]) * 300_000 for n in range(4)]
for turn in range(40):
    cache.save("ab" * 32, Artifact("ptx", whole[me], f"writer{me}", (), 32))
    got = cache.load("ab" * 32)
    assert got is not None and got.code in whole and got.entry == f"writer{got.code[0]}"
"""


def test_processes_that_write_the_same_entry(folder: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(n)], stderr=subprocess.PIPE, text=True) for n in range(4)
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors
        assert "damaged" not in errors
    entry_file(folder)  # one entry, and no temporary file is left
