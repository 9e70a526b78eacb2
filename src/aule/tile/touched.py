"""Rows on their way to the first-level cache: touched one block before their turn, where memory cannot be copied past
registers and those have no room either.

A thread loads one element of each of its parts, which brings all of them to the cache, from where each pass reads them
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aule.ir import Value, Var
from aule.ir.types import element, f32
from aule.tile.early import Early
from aule.tile.math import fold
from aule.tile.rows import RowArray, Source

if TYPE_CHECKING:
    from aule.tile.spans import Part, Span


class Touched(Early):
    """The parts that threads have of the rows of some arrays, in the cache."""

    again = rereads = True

    def __init__(self, span: Span, arrays: Sequence[RowArray], nothing: Value) -> None:
        super().__init__(span, arrays, nothing)
        self._touched: list[Var] = []
        self._arrived: list[Value] = []

    def start(self, first: Value, last: Value, step: Value) -> None:
        def touch() -> None:
            self._touched = [self.b.var(x) for x in self._elements()]

        self.rows.take(self.b.min(first, last - 1), touch)

    def advance(self, block: Value, last: Value, step: Value) -> None:
        self._arrived = [self.b.cast(x.value, f32) for x in self._touched]
        self.rows.latest = None

        def touch() -> None:
            for variable, x in zip(self._touched, self._elements(), strict=True):
                variable.value = x

        # Behind the last block comes that one again, which costs less than to ask each time.
        self.rows.take(self.b.min(block + step, last - 1), touch)

    def found(self) -> Value:
        # Before the first sum, that the elements are there.
        return fold(self.b, "add", self._arrived) if self.rows.latest is None else super().found()

    def _elements(self) -> list[Value]:
        """The first element of each part of the rows that `Rows` has now."""
        found, span, b = [], self.span, self.b
        for array in self.arrays:
            source = self.rows.source(array)
            for number in range(span.shape.parts):
                for part in span.held_parts(number):
                    start = source.starts[part.row]
                    found.append(b.load(array.buffer, start + b.cast(span.safe_column(part), element(start.type))))
        return found

    def read(self, part: Part, source: Source) -> Value:
        return self.load(part, source.array, source.starts[part.row])
