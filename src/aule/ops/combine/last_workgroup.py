"""Combines partial results in the launch that makes them, by the last workgroup of a block of rows to finish.

Every workgroup draws a ticket (`ops/shared/tickets.py`) from a word that belongs to its block of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aule.ir import Value
from aule.ir.types import i32
from aule.ops.combine.partials import Row, RowCombiner
from aule.ops.scores.parameters import Parameters
from aule.ops.shared.tickets import when_last


@dataclass(frozen=True)
class RowBlock:
    """A block of rows whose workgroups each have a split of the keys.

    Attributes
    ----------
    number : Value
        Number of the block, which selects its ticket.
    splits : Value
        Splits of the block.
    count : callable
        Gives the number of rows of the block.
    fixed_rows : int
        Rows of every block, if all have as many; else 0.
    row_of : callable
        Gives the row of a number in ``0 .. count - 1``.
    """

    number: Value
    splits: Value
    count: Callable[[], Value]
    fixed_rows: int
    row_of: Callable[[Value], Row]


def combine_if_last(p: Parameters, block: RowBlock, thread: Value, combiner: Callable[[], RowCombiner]) -> None:
    """Combine a block of rows if all other splits of it have been stored; uniform."""

    def combine() -> None:
        rows = combiner()
        if 2 * block.fixed_rows > rows.teams:  # no two teams for a row
            rows.combine_rows_per_team(p.b.const(block.fixed_rows, i32), block.splits, block.row_of, 1)
        else:
            rows.combine_rows(block.count(), block.splits, block.row_of)

    when_last(p, block.number, block.splits, thread, combine)
