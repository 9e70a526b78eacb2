"""The data files: records of each device family."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources

from aule.tuning.record import Record, by_op, parse

_SUFFIX = ".jsonl"


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
