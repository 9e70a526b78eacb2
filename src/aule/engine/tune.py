"""`aule tune`: times candidate shapes on a device, and saves the fastest for later calls.

The winner is saved as a record in the format of the tables (`aule.tuning.own`), for this device and driver, under the
conditions for which it was measured. Every candidate must match the result of the table's choice.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from aule import settings, tuning
from aule.engine.memory import Arena, Array, reports_shortage
from aule.engine.probe import find_layout
from aule.engine.run import prepare
from aule.engine.tune_cases import Case, Settings, cases
from aule.errors import AuleError, InvalidArgumentError
from aule.ops.attention.plan import tiles, tiles_backward
from aule.ops.shared.elements import as_float
from aule.ops.shared.plan import Plan
from aule.runtime.base import Device
from aule.target import Target
from aule.tile.fragment.arrangement import SIZE, arrange
from aule.tile.fragment.engine import fitted
from aule.tile.fragment.shape import FragmentShape
from aule.tuning import own

Use = Mapping[str, Any]
_GAIN = 1.03
"""Speed-up over the table's choice from which a candidate is saved."""
_MAX_SUMS = 208
"""Most registers per lane for S, O and Q on matrix units."""
_LIMITS = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}
"""Largest difference between two results, relative to the largest element."""
_ROUNDS = 3


@dataclass(frozen=True)
class Measured:
    """A candidate and its work per second, or why it was refused. ``use`` is None for the table's choice."""

    use: Use | None
    speed: float
    refused: str = ""


@dataclass(frozen=True)
class Outcome:
    """Result of a case: all candidates, the table's choice first, and the one that was saved."""

    case: Case
    measured: list[Measured]
    saved: Use | None


def tune(device: Device, op: str, wanted: Settings, seconds: float = 0.2) -> Iterator[Outcome]:
    """Measure candidates for each problem of an op, and save the fastest if it beats the table's choice.

    Parameters
    ----------
    op : str
        One of `aule.engine.tune_cases.OPS`.
    seconds : float
        Warm-up before a candidate is timed, so that clocks have risen.

    Raises
    ------
    InvalidArgumentError
        The device has no tiles to choose, or the disk cache, which saves the result, is off.
    """
    if device.target.host:
        raise InvalidArgumentError(
            "[tune] expected a GPU, got the CPU, whose blocks follow from its registers and caches; name another "
            "device with --backend"
        )
    if not settings.disk_cache():
        raise InvalidArgumentError(
            "[tune] expected a disk cache to keep the result in, got AULE_DISK_CACHE=0; turn it on"
        )
    if wanted.dtype != "f32":
        find_layout(device)
    following = reports_shortage(partial(next, cases(op, wanted, device.target), None))  # makes the case's arrays
    while (case := following()) is not None:
        yield _tune_case(device, case, seconds)


@reports_shortage
def _tune_case(device: Device, case: Case, seconds: float) -> Outcome:
    with _Bench(device, case) as bench:
        tried = (None, *candidates(case, device.target))
        measured = [found for use in tried if (found := bench.measure(use, seconds)) is not None]
    table, best = measured[0], max(measured, key=lambda m: m.speed)
    saved = best.use if best.speed > _GAIN * table.speed > 0 else None
    record = None
    if saved is not None:
        where = {"device": device.target.name, "driver": device.target.driver, "date": str(datetime.date.today())}
        record = tuning.Record(case.op, case.when, saved, where)
    if table.speed > 0:  # otherwise nothing was learnt
        own.save(device.target, case.op, case.when, record)
    return Outcome(case, measured, saved)


# -- candidates --------------------------------------------------------------------------------------------------------


def candidates(case: Case, target: Target) -> Iterator[Use]:
    """Yield the candidates for a case: the records of all families, and variations."""
    found = [record.use for record in tuning.every(case.op)]
    dim = int(case.when.get("head_dim", 0))
    if case.op == tiles.FRAGMENT:
        found += [{"shape": _fields(shape)} for shape in _fragments(target, dim)]
    elif case.op == tiles.WARPGROUP:
        found += [{"shape": _fields(shape)} for shape in _warpgroups(dim)]
    elif case.op == tiles_backward.FRAGMENT:
        found += [use for known in found for use in _other_keys(known)]
    elif case.op == "decode.fragment":
        found += [
            {"shape": {"rows": 8, "blocks": blocks, "subgroups": subgroups}}
            for blocks, subgroups in itertools.product((1, 2, 4), (2, 4, 8))
        ]
    elif case.op == "decode.simt.keys":
        found += [{"value": keys} for keys in (2, 4, 8)]
    elif case.op in ("rows.norm", "rows.sums", "glu"):
        found += [{**use, "parts": parts} for use in found for parts in (1, 2, 4, 8)]
    # The tables' measured waves do not apply to another device.
    plain = ({name: value for name, value in use.items() if name not in ("wave", "full")} for use in found)
    seen: list[Use] = []
    for use in plain:
        if use not in seen:
            seen.append(use)
            yield use


def _fragments(target: Target, head_dim: int) -> Iterator[FragmentShape]:
    columns = -(-head_dim // SIZE) * SIZE
    shapes = itertools.product(((128, 4), (64, 4), (128, 8), (64, 2)), (16, 32, 48, 64, 96), (1, 2), (True, False))
    for (block_q, subgroups), block_kv, stages, resident in shapes:
        shape = fitted(FragmentShape(block_q, block_kv, subgroups, stages, resident), target)
        held = shape.rows * (block_kv + columns + (columns // 2 if resident else 0)) // shape.lanes
        if held <= _MAX_SUMS and shape.rows % arrange(target).height == 0:
            yield replace(shape, lanes=32, staged=False)


def _warpgroups(head_dim: int) -> Iterator[FragmentShape]:
    columns = -(-head_dim // SIZE) * SIZE
    for subgroups, registers in ((4, 255), (8, 255), (12, 168)):
        for block_kv in (32, 48, 64, 96, 128, 160):
            # Registers for O, S and P, and 40 for everything else.
            if (columns + block_kv) // 2 + block_kv // 4 <= registers - 40:
                yield FragmentShape(SIZE * subgroups, block_kv, subgroups, 2, False, registers, warpgroups=True)


def _fields(shape: FragmentShape) -> Use:
    """Return the fields of a shape that a record states: those that differ from the default."""
    usual = asdict(FragmentShape(0, 0, 0, 0, shape.resident_q))
    needed = ("block_q", "block_kv", "subgroups", "stages", "resident_q")
    return {name: value for name, value in asdict(shape).items() if name in needed or value != usual[name]}


def _other_keys(use: Use) -> Iterator[Use]:
    """Yield a backward record with half and twice the keys per tile."""
    for block_kv in (use["shape"]["block_kv"] // 2, use["shape"]["block_kv"] * 2):
        if block_kv % SIZE == 0:
            yield {"shape": {**use["shape"], "block_kv": block_kv}}


# -- measuring ---------------------------------------------------------------------------------------------------------


class _Bench:
    """A case on the device: its memory, and the results that every candidate must match."""

    def __init__(self, device: Device, case: Case) -> None:
        self.device, self.case, self._arena = device, case, Arena(device)
        self.memory: dict[str, Any] = {}
        self.expected: dict[str, Array] = {}
        self._planned: set[Any] = set()

    def __enter__(self) -> _Bench:
        try:
            for name, array in self.case.arrays.items():
                self.memory[name] = self._arena.alloc(max(array.nbytes, 4))
                self.device.upload(self.memory[name], array.view(np.uint8) if array.dtype == np.bool_ else array)
            if self.case.before is not None:
                prepare(self.case.before, self.device).run(self.memory)
                self.device.synchronize()
        except BaseException:
            self._arena.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._arena.close()

    def measure(self, use: Use | None, seconds: float) -> Measured | None:
        """Time a candidate (None: the table's choice). Returns None if its plan was already measured."""
        target = self.device.target
        tried = () if use is None else (tuning.Record(self.case.op, self.case.when, use),)
        try:
            with tuning.trying(*tried):
                plan = self.case.plan(target)
                key = tuple((step.config, step.grid) for step in plan.steps)
                if key in self._planned:
                    return None
                self._planned.add(key)
                prepare(plan, self.device)
        except Exception as error:  # tracing fails in many ways for impossible shapes
            if use is None:
                raise
            return Measured(use, 0.0, str(error) or type(error).__name__)
        try:
            took = self._time(plan, seconds)
            wrong = self._differs()
        except AuleError as error:
            return Measured(use, 0.0, error.message)
        if wrong:
            return Measured(use, 0.0, "another result than the table's choice gives")
        return Measured(use, self.case.work / took)

    def _time(self, plan: Plan, seconds: float) -> float:
        """Return the median seconds of a call."""
        device = self.device
        with Arena(device) as arena:
            space = {name: arena.alloc(max(4 * count, 4)) for name, count in plan.workspace.items()}
            for name, words in plan.scratch.items():
                space[name] = arena.alloc(4 * words)
                device.upload(space[name], np.zeros(words, np.int32))
            # Overwrite the results of the previous candidate.
            for name in self.case.results:
                device.upload(self.memory[name], np.full(self.case.arrays[name].nbytes, 0xFF, np.uint8))
            launches = prepare(plan, device).launches(self.memory | space)
            start = time.perf_counter()
            device.time_launches(launches, 1)
            while time.perf_counter() - start < seconds:
                device.time_launches(launches, _ROUNDS)
            return float(np.median([device.time_launches(launches, _ROUNDS) for _ in range(5)]))

    def _differs(self) -> bool:
        """Return whether results differ from the first candidate's."""
        for name, dtype in self.case.results.items():
            array = np.empty_like(self.case.arrays[name])
            self.device.download(self.memory[name], array)
            found = as_float(array, dtype)
            expected = self.expected.setdefault(name, found)
            if not np.abs(found - expected).max() <= _LIMITS[dtype] * np.abs(expected).max():
                return True
        return False
