"""DispatchStats: the counts of `aule.dispatch_stats`, which print as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_COLUMNS = ("op", "direction", "backend", "kernel", "caller", "count", "launches")


class DispatchStats(dict[str, Any]):
    """A dict of counts, as `aule.dispatch_stats` describes them; ``str()`` makes a table of it."""

    def __str__(self) -> str:
        rows = [[_cell(row[name]) for name in _COLUMNS] for row in self["calls"]]
        lines = table([list(_COLUMNS), *rows]) if rows else ["no calls"]
        lines.append(f"PyTorch's attention: {self['served']} calls served, {self['passed_on']} passed on")
        lines += [f"  {count} passed on: {reason}" for reason, count in self["reasons"].items()]
        return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as their longest cell; the last one is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return ["  ".join(row).rstrip() for row in padded]


def _cell(value: object) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
