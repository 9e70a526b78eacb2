"""Rows on their way: copied to shared memory past the registers, some blocks before their turn.

A kernel that loads a row, combines it and only then loads the next leaves the memory idle while it combines. With
`Stages` the copies of later blocks are under way all the time, and take no registers. A thread reads what it has copied
itself, so no barrier comes with it; each pass reads a part again, which spares the registers between passes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aule.ir import Value
from aule.ir.types import element
from aule.target import Target
from aule.tile.rows import RowArray, Source

if TYPE_CHECKING:
    from aule.tile.spans import Part, Span

COPIED_BYTES = 16
"""That one asynchronous copy brings."""


def copies_past_registers(target: Target) -> bool:
    """Whether kernels may copy to shared memory asynchronously: cp.async, from sm_80 on."""
    return target.backend == "cuda" and target.arch != "sm_75"


class Stages:
    """Shared memory for the parts that threads have of the rows of some arrays, ``ahead + 1`` blocks of them.

    Parameters
    ----------
    arrays : sequence of RowArray
        Of one type, aligned to a part, which has 16 bytes.
    """

    def __init__(self, span: Span, arrays: Sequence[RowArray]) -> None:
        self.span, self.arrays = span, tuple(arrays)
        rows, shape = span.rows, span.rows.shape
        self.step = shape.workgroup * span.shape.width
        """Elements from one part of a thread to its next."""
        self.size = len(arrays) * shape.batch * span.shape.parts * self.step
        elem = element(arrays[0].buffer.type)
        self.memory = rows.b.shared("stages", elem, self.size * (shape.ahead + 1))
        self.own = rows.b.thread_id() * span.shape.width

    def fetch(self, stage: Value) -> None:
        """Start to copy the rows that `Rows` has now."""
        rows, span = self.span.rows, self.span
        for array in self.arrays:
            source = rows.source(array)
            for number in range(span.shape.parts):
                for part in span.held_parts(number):
                    start = source.starts[part.row]
                    index = start + rows.b.cast(span.safe_column(part), element(start.type))
                    to = self._place(stage, part, source)
                    rows.b.async_copy(self.memory, to, array.buffer, index, span.shape.width)

    def holds(self, source: Source) -> bool:
        """Whether its rows come this way."""
        return any(source.array is array for array in self.arrays)

    def read(self, part: Part, source: Source) -> Value:
        """A part of the block that is worked on."""
        return self.span.rows.b.load(self.memory, self._place(self.span.rows.turn, part, source), self.span.shape.width)

    def _place(self, stage: Value, part: Part, source: Source) -> Value:
        assert part.number is not None
        array = next(i for i, array in enumerate(self.arrays) if source.array is array)
        place = (array * self.span.rows.shape.batch + part.row) * self.span.shape.parts + part.number
        return stage * self.size + (self.own + place * self.step)
