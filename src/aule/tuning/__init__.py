"""Tuned numbers: one data file per device family, and one look-up for planners."""

from aule.tuning.lookup import find, matching, number, records, use
from aule.tuning.own import own_records, trying
from aule.tuning.record import Facts, Record, every, family_records

__all__ = [
    "Facts",
    "Record",
    "every",
    "family_records",
    "find",
    "matching",
    "number",
    "own_records",
    "records",
    "trying",
    "use",
]
