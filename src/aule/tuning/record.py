"""Record: one tuned choice and the conditions under which it applies; the data files of the device families."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

_SUFFIX = ".jsonl"

Facts = Mapping[str, Any]
"""A planner's facts about a problem and a device: plain values by name."""


@dataclass(frozen=True)
class Record:
    """One tuned choice.

    Attributes
    ----------
    op : str
        Operation and engine, as ``attention.forward.simt``.
    when : dict
        Conditions by name of a fact, all of which must hold: a value, a list of values, or a range
        ``{"min": a, "max": b}``, ends included. A condition on a missing fact fails.
    use : dict
        The choice: fields of a shape, or numbers by name.
    measured : str or dict
        Device and date of the measurement; ``"rule"`` if not measured.
    note : str
        File of docs/lab with the measurements and the alternatives.
    """

    op: str
    when: Facts
    use: Mapping[str, Any]
    measured: Any = "rule"
    note: str = ""

    def applies(self, facts: Facts) -> bool:
        """Return whether all conditions hold."""
        return all(name in facts and _holds(wanted, facts[name]) for name, wanted in self.when.items())

    def line(self) -> str:
        """Return the record as a line of a data file."""
        return json.dumps(asdict(self))


def _holds(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, Mapping):
        return bool(wanted.get("min", value) <= value <= wanted.get("max", value))
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)


def parse(text: str) -> tuple[Record, ...]:
    """Parse a data file, one JSON object per line."""
    return tuple(Record(**json.loads(line)) for line in text.splitlines() if line.strip())


def by_op(found: Iterable[Record]) -> dict[str, tuple[Record, ...]]:
    """Group records by op, in their order."""
    grouped: dict[str, tuple[Record, ...]] = {}
    for record in found:
        grouped[record.op] = (*grouped.get(record.op, ()), record)
    return grouped


# -- data files --------------------------------------------------------------------------------------------------------


@functools.cache
def _file(family: str) -> Mapping[str, tuple[Record, ...]]:
    file = resources.files(__package__) / f"{family}{_SUFFIX}"
    return by_op(parse(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def family_records(family: str, op: str) -> tuple[Record, ...]:
    """Return the records of an op in one family's data file; empty without a file."""
    return _file(family).get(op, ())


@functools.cache
def every(op: str) -> tuple[Record, ...]:
    """Return the records of an op in all data files."""
    names = sorted(file.name for file in resources.files(__package__).iterdir() if file.name.endswith(_SUFFIX))
    return tuple(record for name in names for record in family_records(name.removesuffix(_SUFFIX), op))
