"""Rows on their way to registers, one block before their turn: where memory cannot be copied past those, and for short
rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aule.ir import Value, Var
from aule.tile.early import Early
from aule.tile.rows import RowArray, Source

if TYPE_CHECKING:
    from aule.tile.spans import Part, Span

Place = tuple[int, int, int]
"""Number of an array, of a row and of a part."""


class Carried(Early):
    """Registers for two blocks of rows."""

    def __init__(self, span: Span, arrays: Sequence[RowArray]) -> None:
        super().__init__(span, arrays)
        self._next: dict[Place, Var] = {}
        self._now: dict[Place, Value] = {}

    def start(self, first: Value, last: Value, step: Value) -> None:
        def load() -> None:
            self._next = {place: self.b.var(value) for place, value in self._loaded().items()}

        self.rows.take(self.b.min(first, last - 1), load)

    def advance(self, block: Value, last: Value, step: Value) -> None:
        for place, variable in self._next.items():
            self.arrived(place, variable.value)

        def load() -> None:
            for place, value in self._loaded().items():
                self._next[place].value = value

        # Behind the last block comes that one again, which costs less than to ask each time.
        self.rows.take(self.b.min(block + step, last - 1), load)

    def arrived(self, place: Place, value: Value) -> None:
        """Have a part of the block that is worked on at hand."""
        self._now[place] = value

    def _loaded(self) -> dict[Place, Value]:
        """The parts of the rows that `Rows` has now."""
        found, span = {}, self.span
        for i, array in enumerate(self.arrays):
            source = self.rows.source(array)
            for number in range(span.shape.parts):
                for part in span.held_parts(number):
                    found[(i, part.row, number)] = span.load(part, array, source.starts[part.row])
        return found

    def read(self, part: Part, source: Source) -> Value:
        assert part.number is not None
        return self._now[(self.number(source), part.row, part.number)]
