"""Tickets: how the last of several workgroups to finish knows that it is the last.

Every workgroup makes its writes visible to the device and draws a ticket, a number that counts up, from a word that
they share. The workgroup with the last ticket knows that all parts are written. It sets the word back to zero, since
nobody else draws from it before the next launch.
"""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Value
from aule.ir.types import i32
from aule.ops.shared.parameters import Parameters


def when_last(p: Parameters, ticket: Value, parts: Value, thread: Value, do: Callable[[], None]) -> None:
    """Draw a ticket from a word of the buffer, and ``do`` something if it is the last of ``parts``; uniform."""
    b, tickets = p.b, p.buffer("tickets", i32, "readwrite")
    b.comment("draw a ticket")
    # The barrier orders the stores of all threads before the fence of the one that draws.
    b.barrier(global_memory=True)
    drawn = b.var(b.const(-1, i32), "drawn")
    with b.if_(b.eq(thread, 0)):
        drawn.value = b.atomic("add", tickets, ticket, 1, ordered=True)
    # After this barrier all threads see what the one that drew saw.
    with b.if_(b.workgroup_any(b.eq(drawn.value, parts - 1), global_memory=True)):
        do()
        with b.if_(b.eq(thread, 0)):
            b.atomic("exchange", tickets, ticket, 0)
