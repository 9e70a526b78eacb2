"""The look-up of tuned numbers: the first record that applies and fits wins.

The order of records: `aule tune`'s for this device, the device family's, those of its fallback families, and generic
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from aule.target import Target
from aule.tuning.family import families
from aule.tuning.own import own_records
from aule.tuning.record import Facts, Record, family_records


def records(target: Target, op: str) -> tuple[Record, ...]:
    """Return every record of an op for a device, in the order of the look-up."""
    tables = (record for family in families(target) for record in family_records(family, op))
    return (*own_records(target, op), *tables)


def matching(target: Target, op: str, facts: Facts) -> Iterator[Record]:
    """Yield the records that apply, in the order of the look-up."""
    return (record for record in records(target, op) if record.applies(facts))


def find(target: Target, op: str, facts: Facts, fits: Callable[[Record], bool] | None = None) -> Record | None:
    """Return the first record that applies and fits the device; None if there is none."""
    return next((record for record in matching(target, op, facts) if fits is None or fits(record)), None)


def use(target: Target, op: str, **facts: Any) -> Mapping[str, Any]:
    """Return the choice of the first record that applies; empty if there is none."""
    record = find(target, op, facts)
    return record.use if record is not None else {}


def number(target: Target, op: str, **facts: Any) -> Any:
    """Return the ``value`` of an op's first record that applies.

    Raises
    ------
    KeyError
        No record applies: the generic family lacks one.
    """
    return use(target, op, **facts)["value"]
