"""Rows that came through registers, in shared memory while they are worked on: where those have no room for two blocks,
and memory cannot be copied past them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aule.ir import Value
from aule.ir.types import element
from aule.tile.carried import Carried, Place
from aule.tile.rows import RowArray, Source

if TYPE_CHECKING:
    from aule.tile.spans import Part, Span


class Parked(Carried):
    """Registers for the next block, and shared memory for the rows that one array has in this one.

    A thread reads what it has put there itself, so no barrier comes with it; each pass reads a part again. With
    `SpanShape.again` the other arrays are in registers until the first pass has read them.

    Parameters
    ----------
    parked : RowArray
        The array of those rows: the one that most passes read.
    alone : bool
        No other comes ahead of its turn.
    """

    again = True

    def __init__(self, span: Span, arrays: Sequence[RowArray], parked: RowArray, alone: bool) -> None:
        super().__init__(span, [parked] if alone else arrays)
        shape = self.rows.shape
        self.parked = next(i for i, array in enumerate(self.arrays) if array is parked)
        self.step = shape.workgroup * span.shape.width
        """Elements from one part of a thread to its next."""
        size = shape.batch * span.shape.parts * self.step
        self.memory = self.b.shared("parked", element(parked.buffer.type), size)

    def arrived(self, place: Place, value: Value) -> None:
        if place[0] == self.parked:
            self.b.store(self.memory, self._at(*place[1:]), value)
        else:
            super().arrived(place, value)

    def read(self, part: Part, source: Source) -> Value:
        if self.number(source) != self.parked:
            if self.span.reads_again(part):
                return self.span.load(part, source.array, source.starts[part.row])
            return super().read(part, source)
        assert part.number is not None
        return self.b.load(self.memory, self._at(part.row, part.number), self.span.shape.width)

    def _at(self, row: int, number: int) -> Value:
        own = self.b.thread_id() * self.span.shape.width
        return own + (row * self.span.shape.parts + number) * self.step
