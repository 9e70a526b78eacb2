"""Tickets: how the last of several workgroups to finish knows that it is the last.

Every workgroup makes what it has written visible to the device and draws a ticket, a number that counts up, from a word
that belongs to what they do together. Who draws the last one knows that all is there, and sets the word back to zero,
as it was found: nobody else will draw from it before the next launch.
"""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Value
from aule.ir.types import i32
from aule.ops.parameters import Parameters


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
