"""The end of a split sequence in the launch that made its parts: the last workgroup of a block of rows adds them up.

Each draws a ticket (`ops/tickets.py`) from a word that belongs to its block of rows.
"""

from __future__ import annotations

from aule.ir import Value
from aule.ir.types import i32
from aule.ops.decode.gather import Gather, Row
from aule.ops.decode.result import Result
from aule.ops.tickets import when_last

AT_ONCE = 16
"""Parts that a thread loads before it uses any, at most: one workgroup does all the reading, and waits for each."""


def add_up(result: Result, rows: int, thread: Value, threads: int) -> None:
    """Add up the parts of the workgroup's rows, which are all stored here, if no other is to come; uniform.

    Parameters
    ----------
    rows : int
        Query rows of a workgroup.
    """
    b, p, place, config = result.b, result.p, result.place, result.config

    def add() -> None:
        def row_of(number: Value) -> Row:
            token, head = place.token(place.row0 + number)
            return Row(result.row_number(number), place.batch, head, token, place.extent)

        fixed = config.fixed
        gather = Gather(p, config, config.aligned[3], threads, config.at_once, "readwrite")
        if 2 * fixed > gather.teams:  # no two teams for a row
            gather.add_rows_apart(b.const(fixed, i32), place.parts, row_of, 1)
        else:
            gather.add_rows(b.min(place.rows - place.row0, rows), place.parts, row_of)

    when_last(p, place.block_of_rows, place.parts, thread, add)
