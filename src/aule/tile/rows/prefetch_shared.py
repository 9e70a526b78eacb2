"""Prefetch to shared memory by asynchronous copies, some blocks ahead.

Copies of later blocks are always in flight and take no registers. Each pass reads a part again, so registers need not
keep it between passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aule.ir import Value
from aule.ir.types import element, i32
from aule.tile.rows.parts import Part, RowArray, Source
from aule.tile.rows.prefetch import RowPrefetch, SharedParts

if TYPE_CHECKING:
    from aule.tile.rows.passes import Passes

COPIED_BYTES = 16
"""Bytes of an asynchronous copy."""


class SharedPrefetch(RowPrefetch):
    """Shared memory holds the current block and ``RowShape.prefetch`` more, of arrays aligned to parts of 16 bytes."""

    rereads = True

    def __init__(self, passes: Passes, arrays: Sequence[RowArray]) -> None:
        super().__init__(passes, arrays)
        self.ahead = self.rows.shape.prefetch
        self.place = SharedParts(passes)
        self.memory = [
            self.b.shared(f"stages_{i}", element(array.buffer.type), self.place.size * (self.ahead + 1))
            for i, array in enumerate(arrays)
        ]

    def start(self, first: Value, last: Value, step: Value) -> None:
        for number in range(self.ahead):
            self._start_copies(first + step * number, last, self.b.const(number, i32))

    def advance(self, block: Value, last: Value, step: Value) -> None:
        self._start_copies(block + step * self.ahead, last, self.rows.wrapped(self.rows.stage + self.ahead))
        self.b.async_wait(self.ahead)

    def copy_block(self) -> None:
        """Copy the only block of a kernel that does not loop, and wait for it."""
        self._copy(self.b.const(0, i32))
        self.b.async_commit()
        self.b.async_wait(0)

    def _start_copies(self, block: Value, last: Value, stage: Value) -> None:
        """Start to copy a block, if it exists; commit a group either way, so that groups can be counted."""
        with self.b.if_(block < last):
            self.rows.enter(block, lambda: self._copy(stage))
        self.b.async_commit()

    def _copy(self, stage: Value) -> None:
        """Start to copy the rows that `Rows` has entered."""
        passes, b = self.passes, self.b
        for memory, array in zip(self.memory, self.arrays, strict=True):
            source = self.rows.source(array)
            for number in range(passes.shape.parts):
                for part in passes.register_parts(number):
                    start = source.starts[part.row]
                    index = start + b.cast(passes.existing_column(part), element(start.type))
                    to = self.place.at(part.row, number, stage)
                    b.async_copy(memory, to, array.buffer, index, passes.shape.width)

    def read(self, part: Part, source: Source) -> Value:
        assert part.number is not None
        at = self.place.at(part.row, part.number, self.rows.stage)
        return self.b.load(self.memory[self.number(source)], at, self.passes.shape.width)
