"""A pytest plugin of `check_device.py`: several processes take tests from one list.

    python -m pytest -p shared_tests --shared FOLDER --backends cuda,vulkan -m device tests

Every process collects the same tests in the same order, and draws the next from a shared counter. The start and the end
of each test are written at once, as a line of JSON each, so that the results of a process that is killed, and the name
of its last test, are known.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from aule.errors import DeviceLostError

GRIDS = {
    "test_forward.py::test_grid": "forward",
    "test_backward.py::test_grid": "gradients",
    "test_backward.py::test_grid_deterministic": "deterministic gradients",
}
UNNAMED = {
    "test_decode_streams.py": "cuda", "test_spirv_execute.py": "vulkan",
    "test_tail_devices.py": "vulkan",
}  # fmt: skip
"""Files whose tests are one backend's though they have no parameter that says so."""
HAND = {"big": 6, "render_execute": 25}
"""How many tests are drawn at a time: those that share kernels, or are so small that drawing is worth as much."""
ELSEWHERE = ("test_cpu_runtime.py", "test_opencl_runtime.py", "test_vulkan_runtime.py", "test_webgpu_runtime.py")
"""Tests of runtimes: they look at the host's side, and fill a device's memory, which the others need."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shared", help="folder of the number that is shared and of what is written down")
    parser.addoption("--backends", default="cuda,vulkan,opencl,webgpu")
    parser.addoption("--parts", default="grids,tests,big")
    parser.addoption("--until", type=float, default=float("inf"), help="time.time() after which nothing is begun")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SharedTests(config), "shared tests")


def place_of(item: pytest.Item, backends: list[str], parts: list[str]) -> tuple[str, str, str] | None:
    """Part, name of the group and backend of a test; None where none of it is asked for."""
    path, _, function = item.nodeid.partition("::")
    file, function = Path(path).name, function.partition("[")[0]
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    named = [value.partition("-")[0] for value in values if isinstance(value, str)]
    backend = next((name for name in named if name in backends), UNNAMED.get(file))
    if file in ELSEWHERE or backend not in backends:
        return None
    if file == "test_large.py":
        return "big", "large problems", backend
    if file == "test_kinds.py" and "sanitize" in parts:
        return "sanitize", "kinds", backend
    grid = GRIDS.get(f"{file}::{function}")
    return ("grids", grid, backend) if grid else ("tests", file.removeprefix("test_").removesuffix(".py"), backend)


def turn(place: tuple[str, str, str], item: pytest.Item) -> int:
    """When a test comes: what must not be missed first, and what takes long before what is short."""
    part, group, backend = place
    foremost = backend in ("cuda", "vulkan")
    if group == "precision" and "test_grid" in item.nodeid:
        return 0  # one test that goes through a grid
    if part == "grids":
        first = {"forward": 1, "gradients": 2, "deterministic gradients": 5}[group]
        return first if foremost else first + 5
    return 4 if part == "big" or group == "render_execute" else 3


class SharedTests:
    """The list, and one process's way through it."""

    def __init__(self, config: pytest.Config) -> None:
        self.folder = Path(config.getoption("--shared"))
        self.backends = config.getoption("--backends").split(",")
        self.parts = config.getoption("--parts").split(",")
        self.until: float = config.getoption("--until")
        self.written: TextIO = open(self.folder / f"{os.getpid()}.jsonl", "w")  # noqa: SIM115
        self.lost = False
        self.hands: list[list[pytest.Item]] = []

    def write(self, **line: Any) -> None:
        # The session is the process that was started, also where that is a sanitizer which started this one.
        print(json.dumps(line | {"session": os.getsid(0)}), file=self.written, flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item: place_of(item, self.backends, self.parts) for item in items}
        places = {item: place for item, place in found.items() if place is not None and place[0] in self.parts}
        items[:] = sorted(places, key=lambda item: turn(places[item], item))  # stable: else as they were collected
        before = None
        for item in items:
            part, group, _ = place = places[item]
            if before != place or len(self.hands[-1]) >= HAND.get(part, HAND.get(group, 1)):
                self.hands.append([])
            self.hands[-1].append(item)
            before = place
        mine = self.folder / f"{os.getpid()}.list"
        mine.write_text(json.dumps([(item.nodeid, *places[item]) for item in items]))
        mine.replace(self.folder / "list.json")  # the same from every process

    def drawn(self) -> Iterator[pytest.Item]:
        with open(self.folder / "next", "a+") as shared:
            while time.time() < self.until and not self.lost:
                fcntl.flock(shared, fcntl.LOCK_EX)
                shared.seek(0)
                number = int(shared.read() or 0)
                shared.truncate(0)
                shared.write(str(number + 1))
                shared.flush()
                fcntl.flock(shared, fcntl.LOCK_UN)
                if number >= len(self.hands):
                    return
                for item in self.hands[number]:
                    if time.time() < self.until and not self.lost:
                        yield item

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in self.drawn():  # also where a file could not be collected, which is written down
            self.write(test=item.nodeid, outcome="started")
            print(f"\n-- {item.nodeid}", file=sys.__stderr__, flush=True)  # beside what a sanitizer reports
            # Each is torn down by itself: which one comes next is not known yet, and devices are kept by the package.
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = report.longreprtext
            if report.skipped and isinstance(report.longrepr, tuple):
                text = report.longrepr[2]
            self.write(test=report.nodeid, outcome=report.outcome, when=report.when, text=text, took=report.duration)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        # A device that is lost would fail whatever comes next: another process goes on.
        self.lost = self.lost or (call.excinfo is not None and call.excinfo.errisinstance(DeviceLostError))
        yield

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="failed", when="collect", text=report.longreprtext, took=0.0)

    def pytest_sessionfinish(self) -> None:
        self.write(test="", outcome="lost" if self.lost else "finished")
