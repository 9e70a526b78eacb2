"""Cache files: only the user's own, intact and under their own name, are used; others cost a rebuild and a warning."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aule import settings, store
from aule.errors import InvalidArgumentError
from aule.runtime._refused import save_refused
from aule.store import folder as folders
from aule.store import sweep

POSIX = os.name == "posix"
posix = pytest.mark.skipif(not POSIX, reason="needs owners, modes and links of POSIX")
BODY = b"code" * 1000
HOUR, DAY = 3600, 24 * 3600


def name_of(number: int, room: str = "objects") -> str:
    key = f"{number:02x}" + "0" * 62
    return f"{room}/{key[:2]}/{key}"


NAME = name_of(0xAB)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("AULE_CACHE_DIR", str(place))
    monkeypatch.delenv("AULE_DISK_CACHE", raising=False)
    monkeypatch.delenv("AULE_CACHE_SIZE", raising=False)
    monkeypatch.setattr(sweep, "_written", 0)
    return place


def misses(caplog: pytest.LogCaptureFixture, word: str, name: str = NAME) -> None:
    """Reading misses, and says once why."""
    caplog.clear()
    store._warned.clear()
    with caplog.at_level(logging.WARNING, "aule"):
        assert store.read(name) is None
        assert store.read(name) is None
    assert word in caplog.text
    if word != "damaged":
        assert len(caplog.records) == 1


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file or folder belong to another user; who is not root only pretends to."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        return
    given, ask = path.stat(), os.fstat

    def lie(file: int) -> os.stat_result:
        found = ask(file)
        if (found.st_dev, found.st_ino) != (given.st_dev, given.st_ino):
            return found
        return os.stat_result([*found[:4], 12345, *found[5:]])

    monkeypatch.setattr(os, "fstat", lie)


# -- what an entry is --------------------------------------------------------------------------------------------------


def test_an_entry_is_read_back(root: Path) -> None:
    assert store.read(NAME) is None
    store.write(NAME, BODY)
    assert store.read(NAME) == BODY
    store.write(NAME, b"")
    assert store.read(NAME) == b""


@pytest.mark.parametrize("other", [name_of(1), name_of(0xAB, "kernels"), "vulkan/device.bin"])
def test_a_swapped_entry_is_a_miss(root: Path, other: str, caplog: pytest.LogCaptureFixture) -> None:
    store.write(NAME, BODY)
    store.write(other, b"another kernel")
    first, second = store.path(NAME), store.path(other)
    first.rename(root / "aside")
    second.rename(first)
    (root / "aside").rename(second)
    misses(caplog, "damaged")
    misses(caplog, "damaged", other)
    store.write(NAME, BODY)
    assert store.read(NAME) == BODY


def test_every_truncation_is_a_miss(root: Path) -> None:
    store.write(NAME, b"body")
    data = store.path(NAME).read_bytes()
    assert data.startswith(b"AULE2\n")
    for size in range(len(data)):
        store.path(NAME).write_bytes(data[:size])
        assert store.read(NAME) is None
    store.path(NAME).write_bytes(data + b"more")
    assert store.read(NAME) is None


def test_another_format_is_a_miss_and_no_damage(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.write(NAME, BODY)
    for magic in (b"AULE1\n", b"AULE3\n"):
        store.path(NAME).write_bytes(magic + store.path(NAME).read_bytes()[6:])
        with caplog.at_level(logging.WARNING, "aule"):
            assert store.read(NAME) is None
    assert not caplog.records
    store.write(NAME, BODY)
    assert store.read(NAME) == BODY


# -- who may have written it -------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_folders_and_files_are_the_users_alone(root: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = root / "above" / "cache"
    monkeypatch.setenv("AULE_CACHE_DIR", str(deep))
    before = os.umask(umask)
    try:
        store.write(NAME, BODY)
        save_refused("ptx", b"code")
    finally:
        os.umask(before)
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert store.read(NAME) == BODY


@posix
def test_a_file_of_another_user(root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(NAME, BODY)
    give_away(store.path(NAME), monkeypatch)
    misses(caplog, "belongs to user 12345, neither to you nor to root")
    store.write(NAME, BODY)  # replaces the file
    assert store.read(NAME) == BODY


@posix
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_folder_of_another_user(
    root: Path, depth: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(NAME, BODY)
    place = [root, root / "objects", store.path(NAME).parent][depth]
    give_away(place, monkeypatch)
    misses(caplog, f"{place} belongs to user 12345")
    before = store.path(NAME).stat().st_mtime_ns
    store.write(NAME, b"new")
    assert store.path(NAME).stat().st_mtime_ns == before, "nothing is written there either"


@posix
def test_what_root_put_there_is_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that an administrator filled. Who is not root only pretends that its files are root's."""
    store.write(NAME, BODY)
    ask = os.fstat
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result([*(found := ask(file))[:4], 0, *found[5:]]))
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert store.read(NAME) == BODY


@posix
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_folder_that_others_can_write(root: Path, depth: int, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    store.write(NAME, BODY)
    place = [root, root / "objects", store.path(NAME).parent][depth]
    place.chmod(mode)
    misses(caplog, f"chmod go-w {place}")
    place.chmod(0o700)
    assert store.read(NAME) == BODY


@posix
@pytest.mark.parametrize("mode", [0o622, 0o660])
def test_a_file_that_others_can_write(root: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    store.write(NAME, BODY)
    store.path(NAME).chmod(mode)
    misses(caplog, "can be written by others")
    store.write(NAME, BODY)
    assert store.read(NAME) == BODY


@posix
def test_links_are_not_followed(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.write(NAME, BODY)
    file, elsewhere = store.path(NAME), tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    misses(caplog, "is a link, so it is rebuilt")
    store.write(NAME, b"new")
    assert store.read(NAME) == b"new" and b"new" not in elsewhere.read_bytes()
    (root / "objects").rename(tmp_path / "objects")
    (root / "objects").symlink_to(tmp_path / "objects")
    misses(caplog, f"{root / 'objects'} is a link, so nothing in it is used; remove it")


@posix
def test_the_cache_folder_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    store.write(NAME, BODY)
    root.rename(tmp_path / "disk")
    root.symlink_to(tmp_path / "disk")
    assert store.read(NAME) == BODY


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("making a device needs root")


def listen(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


@posix
@pytest.mark.parametrize(
    "make",
    [lambda path: os.mkfifo(path), device, listen, lambda path: path.mkdir()],
    ids="fifo zero socket folder".split(),
)
def test_what_is_no_file_is_not_read(
    root: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store.write(NAME, BODY)
    store.path(NAME).unlink()
    make(store.path(NAME))
    misses(caplog, "is not a regular file")
    store.write(NAME, BODY)
    assert store.read(NAME) == (None if store.path(NAME).is_dir() else BODY)


def test_a_huge_file_is_not_read(root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(NAME, BODY)
    with store.path(NAME).open("r+b") as file:
        file.truncate(1 << 40)  # all of it a hole
    misses(caplog, "has more than 256 MiB")
    monkeypatch.setattr(store, "LARGEST", 100)
    store.write(NAME, BODY)
    assert store.path(NAME).stat().st_size == 1 << 40, "what could not be read is not written"


def test_a_file_that_grows_is_read_to_its_first_size(root: Path) -> None:
    with (root.parent / "file").open("wb") as file:
        file.write(b"x" * 1000)
    read = os.open(root.parent / "file", os.O_RDONLY)
    try:
        assert folders._read(read, 600) == b"x" * 600
    finally:
        os.close(read)


def test_no_descriptor_is_left(root: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    store.write(NAME, BODY)
    before = len(os.listdir("/proc/self/fd"))
    for name in (NAME, name_of(1), "objects/cd", "nothing/at/all"):
        store.read(name)
    store.path(NAME).chmod(0o666)
    store.read(NAME)
    store.path(NAME).parent.chmod(0o777)
    store.read(NAME)
    store.write(NAME, BODY)
    sweep.sweep(str(root), 1)
    assert len(os.listdir("/proc/self/fd")) == before


def refuse(*_: object, **__: object) -> None:
    raise OSError("disk full")


def test_without_descriptors_of_folders(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows: the same files by their paths, which may be relative."""
    monkeypatch.setattr(folders, "_POSIX", False)
    for flag in ("_NOFOLLOW", "_FOLDER", "_READ"):
        monkeypatch.setattr(folders, flag, os.O_RDONLY)
    root.mkdir()
    monkeypatch.chdir(root.parent)
    monkeypatch.setenv("AULE_CACHE_DIR", root.name)
    store.write(NAME, BODY)
    assert store.read(NAME) == BODY
    file = store.path(NAME)
    file.rename(root / "aside")
    assert store.read(NAME) is None
    if POSIX:
        file.symlink_to(root / "aside")
        misses(caplog, "is a link, so it is rebuilt")
        (root / "kernels").symlink_to(root / "objects")
        misses(caplog, "is a link, so nothing in it is used", NAME.replace("objects", "kernels"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        store.write(NAME, b"new")
    assert not list(root.rglob(".tmp-*"))
    store.write(NAME, BODY)
    assert store.read(NAME) == BODY
    sweep.sweep(str(root), 1)
    assert not [path for path in root.rglob("*") if path.is_file() and path.name not in ("swept", "aside")]


@posix
@pytest.mark.parametrize("call", "open fstat read write close replace mkdir utime stat scandir unlink".split())
def test_every_failing_file_operation_costs_speed_alone(root: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th one fails, for every n."""
    real, utime = getattr(os, call), os.utime
    left = [-1]

    def failing(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            if call == "close":
                real(*args)  # a descriptor is closed even if that fails
            raise OSError(errno.EIO, "Input/output error")
        return real(*args, **options)

    monkeypatch.setattr(os, call, failing)
    for n in range(1, 100):
        shutil.rmtree(root, ignore_errors=True)
        before = os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else []
        left[0] = n
        store.write(NAME, BODY)
        first = store.read(NAME)
        if first is not None:
            utime(store.path(NAME), (0, 0))
        second = store.read(NAME)
        sweep_quietly(root)
        fired, left[0] = left[0] <= 0, -1
        assert {first, second} <= {BODY, None}
        store.write(NAME, BODY)
        assert store.read(NAME) == BODY
        assert len(before) == len(os.listdir("/proc/self/fd")) or not before
        assert not list(root.rglob(".tmp-*"))
        if not fired:
            assert n > 1 or call == "unlink", "nothing called it"
            return
    raise AssertionError("it fails for ever")


def sweep_quietly(root: Path) -> None:
    with contextlib.suppress(OSError):
        sweep.sweep(str(root), 1)


# -- size --------------------------------------------------------------------------------------------------------------


def aged(name: str, age: float, size: int = 1000) -> None:
    store.write(name, b"x" * size)
    os.utime(store.path(name), (time.time() - age,) * 2)


def test_the_oldest_files_go_first(root: Path) -> None:
    for number in range(10):
        aged(name_of(number), 100 - number)
    aged("tuned/mine.jsonl", 10 * DAY)
    size = store.path(name_of(0)).stat().st_size
    sweep.sweep(str(root), 10 * size)
    assert all(store.read(name_of(number)) for number in range(10)), "within the limit nothing is removed"
    sweep.sweep(str(root), 8 * size)
    assert [n for n in range(10) if store.path(name_of(n)).exists()] == [4, 5, 6, 7, 8, 9]
    assert store.read("tuned/mine.jsonl"), "what the user measured stays"


def test_reading_makes_a_file_new(root: Path) -> None:
    aged(NAME, HOUR)
    before = store.path(NAME).stat().st_mtime
    assert store.read(NAME) and store.path(NAME).stat().st_mtime == before, "at most once a day"
    for age in (2 * DAY, -2 * DAY):  # the second by a clock that was wrong
        aged(NAME, age)
        assert store.read(NAME) and abs(store.path(NAME).stat().st_mtime - time.time()) < HOUR


def test_writing_sweeps_when_it_is_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_CACHE_SIZE", "1")
    aged(NAME, 5, 700_000)
    store.write(name_of(1), b"")
    assert (root / "swept").exists() and store.read(NAME)
    seen = [sweep._written]
    for number in range(2, 6):  # an eighth of the limit at once is a reason to look
        aged(name_of(number, "kernels"), 0, 140_000)
        seen.append(sweep._written)
    assert seen[-1] == 0
    assert not store.path(NAME).exists() and store.read(name_of(5, "kernels"))
    swept = (root / "swept").stat().st_mtime_ns
    store.write(NAME, b"")
    assert (root / "swept").stat().st_mtime_ns == swept, "one small write is none"
    for age in (2 * HOUR, -2 * HOUR):
        os.utime(root / "swept", (time.time() - age,) * 2)
        store.write(NAME, b"")
        assert abs((root / "swept").stat().st_mtime - time.time()) < HOUR


def test_an_entry_larger_than_the_cache_is_not_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_CACHE_SIZE", "1")
    store.write(NAME, bytes(1 << 20))
    assert not store.path(NAME).exists()


def test_files_left_behind_are_swept(root: Path) -> None:
    store.write(NAME, BODY)
    store.write("tuned/mine.jsonl", BODY)
    old, new = store.path(NAME).with_name(".tmp-old"), store.path(NAME).with_name(".tmp-new")
    tuned = root / "tuned" / ".tmp-old"
    for path in (old, new, tuned):
        path.write_bytes(b"part")
    for path in (old, tuned):
        os.utime(path, (time.time() - 2 * HOUR,) * 2)
    sweep.sweep(str(root), 1 << 30)
    assert new.exists() and not old.exists() and not tuned.exists()
    assert store.read(NAME) == BODY


def test_only_cache_files_are_swept(root: Path) -> None:
    """The user may point the cache at a folder with other things in it."""
    store.write(NAME, BODY)
    others = [
        "notes.txt", ".tmp-mine", "photos/ab/" + "ab" * 32, "objects/ab/cd.o", f"objects/{'ab' * 32}",
        f"objects/ab/{'cd' * 32}", "vulkan/demo.bin", "refused/letter.txt", "tuned/ab", "kernels/linux/.tmp-mine",
    ]  # fmt: skip
    for name in others:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"precious")
        os.utime(root / name, (0, 0))
    sweep.sweep(str(root), 1)
    assert not store.path(NAME).exists()
    assert [name for name in others if not (root / name).exists()] == []


def test_all_kinds_of_entries_are_swept(root: Path) -> None:
    names = [
        name_of(1), name_of(2, "kernels"),
        f"vulkan/10de-2335-{'ab' * 16}.bin", f"vulkan/10005-0000-{'ab' * 16}.bin",
    ]  # fmt: skip
    for name in names:
        store.write(name, BODY)
    saved = [save_refused(language, b"code") for language in ("spirv", "ptx", "llvm", "other")]
    assert all(Path(path or "").read_bytes() == b"code" for path in saved)
    sweep.sweep(str(root), 1)
    assert [path for path in root.rglob("*") if path.is_file()] == [root / "swept"]


@posix
def test_a_sweep_stays_in_the_cache(root: Path, tmp_path: Path) -> None:
    store.write(NAME, BODY)
    (root / "objects").rename(tmp_path / "objects")
    (root / "objects").symlink_to(tmp_path / "objects")
    sweep.sweep(str(root), 1)
    assert len([path for path in (tmp_path / "objects").rglob("*") if path.is_file()]) == 1


@pytest.mark.parametrize("value", ["0", "-1", "1G", "²", "1.5"])
def test_a_wrong_size_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AULE_CACHE_SIZE", value)
    with pytest.raises(
        InvalidArgumentError, match=r"expected AULE_CACHE_SIZE to be 1 or more, got .*; change or unset"
    ):
        store.write(NAME, BODY)
    monkeypatch.setenv("AULE_CACHE_SIZE", "")
    assert settings.cache_size() == 1 << 30


CROWD = """
import os, sys, random
from aule import store
from aule.store import sweep
me, root = int(sys.argv[1]), os.environ["AULE_CACHE_DIR"]
pick = random.Random(me)
keys = [f"{n:02x}" + "0" * 62 for n in range(40)]
for turn in range(150):
    key = pick.choice(keys)
    name = f"kernels/{key[:2]}/{key}"
    body = store.read(name)
    assert body is None or body == name.encode() * 1000, name
    store.write(name, name.encode() * 1000)
    if turn % 10 == me:
        sweep.sweep(root, 1_000_000)
"""


def test_many_processes_read_write_and_sweep(root: Path) -> None:
    crowd = [
        subprocess.Popen([sys.executable, "-c", CROWD, str(n)], stderr=subprocess.PIPE, text=True) for n in range(4)
    ]
    for process in crowd:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0 and said == "", said
    assert not [path for path in root.rglob(".tmp-*")]
    sweep.sweep(str(root), 1_000_000)
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= 1_000_000
