"""Rows on their way to registers, one block before their turn: where memory cannot be copied past those, and for short
rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aule.ir import Value, Var
from aule.tile.early import Ahead, Early
from aule.tile.rows import PerRow, RowArray, Rows, Source

if TYPE_CHECKING:
    from aule.tile.spans import Part, Span

Place = tuple[int, int, int]
"""Number of an array, of a row and of a part."""


class Numbers(Ahead):
    """The numbers that some arrays have of each row (`Rows.get`), in registers one block before their turn: a row is
    not to wait for memory twice."""

    def __init__(self, rows: Rows, arrays: Sequence[RowArray]) -> None:
        self.rows, self.arrays = rows, tuple(arrays)
        self._next: list[list[Var]] = []
        self.found: list[PerRow] = []
        """Those of the block that is worked on."""

    def start(self, first: Value, last: Value, step: Value) -> None:
        def load() -> None:
            self._next = [[self.rows.b.var(x) for x in numbers.values] for numbers in self._loaded()]

        self.rows.take(self.rows.b.min(first, last - 1), load)

    def advance(self, block: Value, last: Value, step: Value) -> None:
        self.found = [PerRow(tuple(variable.value for variable in variables)) for variables in self._next]

        def load() -> None:
            for variables, numbers in zip(self._next, self._loaded(), strict=True):
                for variable, value in zip(variables, numbers.values, strict=True):
                    variable.value = value

        self.rows.take(self.rows.b.min(block + step, last - 1), load)

    def _loaded(self) -> list[PerRow]:
        return [self.rows.get(array) for array in self.arrays]


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
        place = (self.number(source), part.row, part.number)
        return self.span.packed(part, source, lambda: self._now[place])
