"""Fault injection: each allocation, driver call and file operation of each scenario fails in turn.

Afterwards the error is one of ours and fits the fault, inputs are untouched, nothing has leaked, and the next call is
right. ``AULE_ALL_FAULTS=1`` tries every point; by default long scenarios are sampled. ``-rP`` shows the counts.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import devices
import numpy as np
import pytest
from drivers import Cpu, Driver, OpenCL, Vulkan
from injector import Injector, patch_arrays, patch_files
from scenarios import INPUTS, SCENARIOS, Array

from aule.errors import (
    AuleError,
    BackendUnavailableError,
    DeviceLostError,
    LaunchError,
    OutOfMemoryError,
    ShaderCompileError,
)

pytestmark = pytest.mark.device
DRIVERS = {"cpu": Cpu, "vulkan": Vulkan, "opencl": OpenCL}
ALLOWED: dict[str, tuple[type[AuleError], ...]] = {
    "memory": (OutOfMemoryError,),
    "lost": (DeviceLostError, BackendUnavailableError),  # the latter if it is lost before it is opened
    "refused": (LaunchError, ShaderCompileError, BackendUnavailableError, DeviceLostError),
    # OpenCL's OUT_OF_RESOURCES: of memory, of registers, or because the device is lost.
    "resources": (OutOfMemoryError, LaunchError, ShaderCompileError, BackendUnavailableError, DeviceLostError),
    "arrays": (OutOfMemoryError,),
    "files": (),  # a broken disk costs speed, never a result
}
LEAST = {"driver": {"cpu": 5, "vulkan": 60, "opencl": 25}, "arrays": {}, "files": {}}
"""Fewest points of all scenarios together, so that the injector cannot silently inject nothing."""
COPIES = [x.copy() for x in INPUTS]


@pytest.fixture(params=list(DRIVERS))
def driver(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    devices.need(request.param)
    monkeypatch.setenv("AULE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("AULE_DISK_CACHE", "1")
    found: Driver = DRIVERS[request.param](Injector())
    found.renew()
    with monkeypatch.context() as patch:
        found.patch(patch)
        patch_arrays(found.injector, patch)
        patch_files(found.injector, patch)
        yield found
        found.renew()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def same(found: list[Array], expected: list[Array]) -> bool:
    return len(found) == len(expected) and all(np.array_equal(x, y) for x, y in zip(found, expected, strict=True))


def sampled(count: int) -> list[int]:
    """The first points, and some of the others."""
    if os.environ.get("AULE_ALL_FAULTS") == "1" or count <= 20:
        return list(range(count))
    return [*range(12), *range(12, count, -(-(count - 12) // 8))]


class Case:
    """One scenario on one driver."""

    def __init__(self, driver: Driver, name: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.driver, self.name, self.scenario = driver, name, SCENARIOS[name]
        self._folder, self._patch, self._number = folder, patch, 0
        self.begin()
        self.expected = self.scenario.run(driver)
        for _ in range(2):  # until nothing is opened or built any more
            self.begin()
            self.scenario.run(driver)

    def begin(self) -> None:
        """Bring everything into the state that the scenario begins with."""
        if self.scenario.cold:
            self.driver.renew()
            self._number += 1
            self._patch.setenv("AULE_CACHE_DIR", str(self._folder / f"cold{self._number}"))
        if self.name == "close":
            SCENARIOS["rows"].run(self.driver)

    def points(self, group: str) -> list[str]:
        self.begin()
        with self.driver.injector.armed(group):
            self.scenario.run(self.driver)
        return list(self.driver.injector.points)

    def inject(self, group: str, kind: str, number: int, lasting: bool) -> None:
        driver, injector = self.driver, self.driver.injector
        self.begin()
        where = f"{self.name}: {kind} {number}{' and all after' if lasting else ''}"
        held = None if self.scenario.cold else driver.held()
        opened = descriptors()
        lost = False
        with injector.armed(group, kind, number, lasting):
            try:
                found = self.scenario.run(driver)
                assert same(found, self.expected), f"{where} ({injector.failed[:3]}): a wrong result"
            except AuleError as error:
                told = f"{where} ({injector.failed[:3]}): {type(error).__name__}: {error}"
                fits = isinstance(error, ALLOWED[kind]) or (self.name == "tune" and type(error) is AuleError)
                assert fits and error.message.startswith("["), told
                # A backend that cannot be probed is remembered as such.
                lost = isinstance(error, (DeviceLostError, BackendUnavailableError)) or "stopped answ" in error.message
            except AssertionError:
                raise
            except Exception as error:
                raise AssertionError(f"{where} ({injector.failed[:3]}): {type(error).__name__}: {error}") from error
        assert injector.failed, f"{where}: nothing failed"
        assert all((x == y).all() for x, y in zip(INPUTS, COPIES, strict=True)), f"{where}: an input was changed"
        if lost:
            driver.renew()
        found = self.scenario.run(driver)
        assert same(found, self.expected), f"{where} ({injector.failed[:3]}): the next result is wrong"
        leaks = self._leaks(held if not lost else None, opened)
        if leaks:
            gc.collect()  # the error's traceback may hold memory
            leaks = self._leaks(held if not lost else None, opened)
        assert not leaks, f"{where} ({injector.failed[:3]}): leaked {leaks}"

    def _leaks(self, held: Counter[str] | None, opened: int) -> Counter[str]:
        found = Counter() if held is None else self.driver.held() - held
        return found + Counter({"descriptors": descriptors() - opened})


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_faults(driver: Driver, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "tune" and driver.backend == "cpu":
        pytest.skip("the CPU has nothing to tune")
    case = Case(driver, name, tmp_path, monkeypatch)
    for group, kinds in (("driver", driver.kinds), ("arrays", ("arrays",)), ("files", ("files",))):
        points = case.points(group)
        injected = 0
        for kind in kinds:
            for lasting in (False, True):
                for number in sampled(len(points)):
                    case.inject(group, kind, number, lasting)
                    injected += 1
        print(f"{driver.backend} {name} {group}: {len(points)} points, {injected} faults injected")
