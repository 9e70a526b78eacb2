"""Replaces tuning records for a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from aule import tuning
from aule.target import Target
from aule.tuning import Record, lookup


def replace_records(monkeypatch: pytest.MonkeyPatch, uses: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Give each of these ops only records with these uses, which always apply."""
    found = {op: tuple(Record(op, {}, use) for use in each) for op, each in uses.items()}
    original = lookup.records

    def records(target: Target, op: str) -> tuple[Record, ...]:
        return found[op] if op in found else original(target, op)

    for module in (lookup, tuning):
        monkeypatch.setattr(module, "records", records)
