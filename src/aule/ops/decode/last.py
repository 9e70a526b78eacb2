"""The end of a split sequence in the launch that made its parts: the last workgroup of a block of rows adds them up.

Every workgroup makes its part visible to the device and draws a ticket, a number that counts up, from a word that
belongs to its block of rows. Who draws the last one knows that all parts are there, adds them up, and sets the word
back to zero, as it was found: nobody else will draw from it before the next launch.
"""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Value
from aule.ir.types import i32
from aule.ops.attention.parameters import Parameters
from aule.ops.decode.gather import Gather, Row
from aule.ops.decode.result import Result

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


def when_last(p: Parameters, ticket: Value, parts: Value, thread: Value, do: Callable[[], None]) -> None:
    """Draw from a word of the buffer of tickets, and ``do`` something if ``parts`` workgroups have by now; uniform."""
    b, tickets = p.b, p.buffer("tickets", i32, "readwrite")
    b.comment("draw a ticket")
    # The barrier puts what all threads stored before the fence of the one that draws.
    b.barrier(global_memory=True)
    drawn = b.var(b.const(-1, i32), "drawn")
    with b.if_(b.eq(thread, 0)):
        drawn.value = b.atomic("add", tickets, ticket, 1, ordered=True)
    # What the one that drew has seen, all have seen.
    with b.if_(b.workgroup_any(b.eq(drawn.value, parts - 1), global_memory=True)):
        do()
        with b.if_(b.eq(thread, 0)):
            b.atomic("exchange", tickets, ticket, 0)
