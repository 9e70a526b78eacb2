"""Rows that come ahead of their turn, in kernels whose workgroups take one block of rows after the other.

A kernel that loads a row, combines it and only then loads the next leaves the memory idle while it combines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aule.ir import Value
from aule.ir.types import element, f32, u32
from aule.tile.rows import RowArray, Source

if TYPE_CHECKING:
    from aule.tile.spans import Part, Span


class Early:
    """The parts that threads have of the rows of some arrays, of the block that is worked on and of later ones.

    Parameters
    ----------
    nothing : Value
        u32, a parameter of the kernel that is 0, which only the kernel's caller knows.

    Attributes
    ----------
    again : bool
        Each pass reads a part again.
    rereads : bool
        So it does with what belongs to columns.
    """

    again = rereads = False

    def __init__(self, span: Span, arrays: Sequence[RowArray], nothing: Value) -> None:
        self.span, self.arrays, self.nothing = span, tuple(arrays), nothing
        self.rows, self.b = span.rows, span.rows.b
        self._zeros: dict[int, Value] = {}

    def holds(self, source: Source) -> bool:
        """Whether its rows come this way."""
        return any(source.array is array for array in self.arrays)

    def load(self, part: Part, array: RowArray, start: Value) -> Value:
        """Elements of the row that begins at ``start``, for this pass alone."""
        return self.span.load(part, array, start + self.b.cast(self.zero(), element(start.type)))

    def zero(self) -> Value:
        """What is added to indices in this pass: nothing. It is made of what the last pass has found, so that no
        compiler sees that memory is read again, and keeps it in registers instead."""
        number = self.span.passes
        if number not in self._zeros:
            self._zeros[number] = self.b.min(self.b.bitcast(self.found(), u32), self.nothing)
        return self._zeros[number]

    def found(self) -> Value:
        """An f32 that is known no earlier than this pass begins."""
        return self.b.const(0.0, f32) if self.rows.latest is None else self.b.cast(self.rows.latest, f32)

    def start(self, first: Value, last: Value, step: Value) -> None:
        """Send for the first blocks: ``first``, those ``step`` further each, and none from ``last`` on."""
        raise NotImplementedError

    def advance(self, block: Value, last: Value, step: Value) -> None:
        """Send for the next block, and have ``block`` at hand."""
        raise NotImplementedError

    def read(self, part: Part, source: Source) -> Value:
        """A part of the block that is worked on."""
        raise NotImplementedError
