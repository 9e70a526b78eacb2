"""Prefetch to registers, one block ahead: for devices without asynchronous copies, and for short rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aule.ir import Value, Var
from aule.ir.types import element
from aule.tile.rows.engine import Rows
from aule.tile.rows.parts import Part, PerRow, RowArray, Source
from aule.tile.rows.prefetch import BlockPrefetch, RowPrefetch, SharedParts

if TYPE_CHECKING:
    from aule.tile.rows.passes import Passes

Key = tuple[int, int, int]
"""Numbers of an array, a row and a part; the part is 0 for values per row."""


class NextInRegisters(BlockPrefetch):
    """Registers hold the values of the next block."""

    def __init__(self, rows: Rows, arrays: Sequence[RowArray]) -> None:
        super().__init__(rows, arrays)
        self._next: dict[Key, Var] = {}
        self._now: dict[Key, Value] = {}

    def start(self, first: Value, last: Value, step: Value) -> None:
        def load() -> None:
            self._next = {key: self.b.var(value) for key, value in self._load().items()}

        self.rows.enter(self.b.min(first, last - 1), load)

    def advance(self, block: Value, last: Value, step: Value) -> None:
        for key, variable in self._next.items():
            self._arrive(key, variable.value)

        def load() -> None:
            for key, value in self._load().items():
                self._next[key].value = value

        # The last block is prefetched twice; cheaper than a branch.
        self.rows.enter(self.b.min(block + step, last - 1), load)

    def _arrive(self, key: Key, value: Value) -> None:
        """Make a value of the current block available."""
        self._now[key] = value

    @abstractmethod
    def _load(self) -> dict[Key, Value]:
        """Load the values of the rows that `Rows` has entered."""


class StatisticsPrefetch(NextInRegisters):
    """Prefetch of values per row (`Rows.get`), so that a row does not wait for memory twice."""

    @property
    def found(self) -> list[PerRow]:
        """Values of the current block, one `PerRow` for each array."""
        batch = self.rows.shape.batch
        return [PerRow(tuple(self._now[i, row, 0] for row in range(batch))) for i in range(len(self.arrays))]

    def _load(self) -> dict[Key, Value]:
        found = [self.rows.get(array) for array in self.arrays]
        return {(i, row, 0): value for i, given in enumerate(found) for row, value in enumerate(given.values)}


class RegisterPrefetch(RowPrefetch, NextInRegisters):
    """Registers hold the current and the next block."""

    def _load(self) -> dict[Key, Value]:
        found, passes = {}, self.passes
        for i, array in enumerate(self.arrays):
            source = self.rows.source(array)
            for number in range(passes.shape.parts):
                for part in passes.register_parts(number):
                    found[(i, part.row, number)] = passes.load(part, array, source.starts[part.row])
        return found

    def read(self, part: Part, source: Source) -> Value:
        assert part.number is not None
        key = (self.number(source), part.row, part.number)
        return self.passes.narrow_elements(part, source, lambda: self._now[key])


class StagedPrefetch(RegisterPrefetch):
    """Registers hold the next block, and shared memory the current rows of one array.

    For blocks of which registers cannot hold two. ``staged`` is the array that most passes read; each of them reads its
    parts again. With ``alone`` no other array is prefetched. With `PassShape.reload` the other arrays stay in registers
    only until the first pass has read them.
    """

    rereads = True

    def __init__(self, passes: Passes, arrays: Sequence[RowArray], staged: RowArray, alone: bool) -> None:
        super().__init__(passes, [staged] if alone else arrays)
        self.staged = next(i for i, array in enumerate(self.arrays) if array is staged)
        self.place = SharedParts(passes)
        self.memory = self.b.shared("parked", element(staged.buffer.type), self.place.size)

    def _arrive(self, key: Key, value: Value) -> None:
        if key[0] == self.staged:
            self.b.store(self.memory, self.place.at(*key[1:]), value)
        else:
            super()._arrive(key, value)

    def read(self, part: Part, source: Source) -> Value:
        if self.number(source) != self.staged:
            if self.passes.reloads(part):
                return self.passes.load(part, source.array, source.starts[part.row])
            return super().read(part, source)
        assert part.number is not None
        return self.b.load(self.memory, self.place.at(part.row, part.number), self.passes.shape.width)
