"""Fault injection: each allocation, driver call and file operation of each scenario fails in turn.

Afterwards the error is one of ours and fits the fault, inputs are untouched, nothing has leaked, and the next call is
right. ``AULE_ALL_FAULTS=1`` tries every point; by default long scenarios are sampled. ``-rP`` shows the counts.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import devices
import numpy as np
import pytest
from drivers import Cpu, DiscreteVulkan, Driver, OpenCL, Vulkan
from injector import Injector, patch_arrays, patch_files
from scenarios import INPUTS, SCENARIOS, Array
from stand_ins import Cuda, Hip, Metal

from aule.errors import (
    AuleError,
    BackendUnavailableError,
    DeviceLostError,
    LaunchError,
    OutOfMemoryError,
    ShaderCompileError,
)

pytestmark = pytest.mark.device
DRIVERS: dict[str, type[Driver]] = {
    "cpu": Cpu, "vulkan": Vulkan, "discrete": DiscreteVulkan, "opencl": OpenCL, "cuda": Cuda, "hip": Hip,
    "metal": Metal,
}  # fmt: skip
LEFT_OUT = {
    "cpu": ("tune",),  # has nothing to tune
    "discrete": ("rows", "cache", "tune", "close"),  # little else than vulkan
    "cuda": ("tune",),  # its kernels do nothing
    "hip": ("tune",),  # passes, but a measurement on the stand-in takes a second
    "metal": ("backward", "cache", "tune"),  # g++ takes seconds for each kernel
}
ALLOWED: dict[str, tuple[type[AuleError], ...]] = {
    "memory": (OutOfMemoryError,),
    "lost": (DeviceLostError, BackendUnavailableError),  # the latter if it is lost before it is opened
    "refused": (LaunchError, ShaderCompileError, BackendUnavailableError, DeviceLostError),
    # OpenCL's OUT_OF_RESOURCES: of memory, of registers, or because the device is lost.
    "resources": (OutOfMemoryError, LaunchError, ShaderCompileError, BackendUnavailableError, DeviceLostError),
    "arrays": (OutOfMemoryError,),
    "files": (),  # a broken disk costs speed, never a result
}
LEAST = {
    "cpu": {"compile": 14},  # LLVM's own passes run in a child
    "vulkan": {
        "forward": 10,
        "backward": 4,
        "decode": 12,
        "rows": 8,
        "cache": 16,
        "compile": 30,
        "tune": 20,
        "close": 2,
    },
    "discrete": {"forward": 20, "backward": 40, "decode": 20, "compile": 40},
    "opencl": {"forward": 5, "backward": 12, "decode": 5, "rows": 3, "cache": 5, "compile": 9, "tune": 30, "close": 1},
    "cuda": {"forward": 15, "backward": 32, "decode": 15, "rows": 10, "cache": 18, "compile": 35, "close": 2},
    "hip": {"forward": 26, "backward": 55, "decode": 26, "rows": 17, "cache": 30, "compile": 60, "close": 3},
    "metal": {"forward": 3, "decode": 3, "rows": 3, "compile": 8, "close": 0},
}
"""Fewest points in the driver, so that the injector cannot silently inject nothing; 0 where not listed."""
LEAST_ARRAYS = {"forward": 2, "backward": 5, "decode": 1, "rows": 1, "cache": 5, "compile": 1, "tune": 10, "close": 0}
COPIES = [x.copy() for x in INPUTS]


@pytest.fixture
def driver(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    if request.param in ("cpu", "vulkan", "discrete", "opencl"):
        target = devices.need("vulkan" if request.param == "discrete" else request.param).target
        if not (target.host or target.software):
            pytest.skip("a hardware driver keeps descriptors of its own; faults are injected through software drivers")
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


def sampled(count: int, most: int, turn: int) -> range:
    """At most so many of the points, others in each turn."""
    step = 1 if os.environ.get("AULE_ALL_FAULTS") == "1" else max(1, -(-count // most))
    return range(turn % step, count, step)


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

    def right(self, found: list[Array]) -> bool:
        pairs = zip(found, self.expected, strict=True)
        return not self.driver.computes or all(np.array_equal(x, y) for x, y in pairs)

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
                assert self.right(found), f"{where} ({injector.failed[:3]}): a wrong result"
            except AuleError as error:
                told = f"{where} ({injector.failed[:3]}): {type(error).__name__}: {error}"
                allowed = (*ALLOWED[kind], *(driver.also if group == "driver" else ()))
                fits = isinstance(error, allowed) or (self.name == "tune" and type(error) is AuleError)
                assert fits and error.message.startswith("["), told
                # A backend that cannot be probed is remembered as such.
                lost = isinstance(error, (DeviceLostError, BackendUnavailableError))
                lost = lost or "stopped answ" in error.message or "context is lost" in error.message
            except AssertionError:
                raise
            except Exception as error:
                raise AssertionError(f"{where} ({injector.failed[:3]}): {type(error).__name__}: {error}") from error
        # A driver that is asked whether work is done may be asked less often this time.
        assert injector.failed or len(injector.points) <= number, f"{where}: nothing failed"
        assert all((x == y).all() for x, y in zip(INPUTS, COPIES, strict=True)), f"{where}: an input was changed"
        if lost:
            driver.renew()
        found = self.scenario.run(driver)
        assert self.right(found), f"{where} ({injector.failed[:3]}): the next result is wrong"
        leaks = self._leaks(held if not lost else None, opened)
        if leaks:
            gc.collect()  # the error's traceback may hold memory
            leaks = self._leaks(held if not lost else None, opened)
        assert not leaks, f"{where} ({injector.failed[:3]}): leaked {leaks}"

    def _leaks(self, held: Counter[str] | None, opened: int) -> Counter[str]:
        found = Counter() if held is None else self.driver.held() - held
        return found + Counter({"descriptors": descriptors() - opened})


@pytest.mark.parametrize(
    "driver, name",
    [(kind, name) for kind in DRIVERS for name in SCENARIOS if name not in LEFT_OUT.get(kind, ())],
    indirect=["driver"],
)
def test_faults(driver: Driver, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(driver, name, tmp_path, monkeypatch)
    kind_of_driver = next(kind for kind, made in DRIVERS.items() if type(driver) is made)
    least = {
        "driver": LEAST[kind_of_driver].get(name, 0),
        "arrays": LEAST_ARRAYS[name],
        "files": 7 * (name == "compile"),
    }
    for group, kinds in (("driver", driver.kinds), ("arrays", ("arrays",)), ("files", ("files",))):
        points = case.points(group)
        assert len(points) >= least[group], f"{group}: only {points}"
        injected = tried = 0
        for turn, (kind, lasting) in enumerate(itertools.product(kinds, (False, True))):
            for number in sampled(len(points), 2 if case.scenario.cold else 6, turn):
                case.inject(group, kind, number, lasting)
                injected += bool(driver.injector.failed)
                tried += 1
        assert injected >= 0.9 * tried, f"{group}: of {tried} faults only {injected} happened"
        print(f"{kind_of_driver} {name} {group}: {len(points)} points, {injected} faults injected")
