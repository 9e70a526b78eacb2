"""Rows on their way to shared memory: copied there past the registers, some blocks before their turn.

The copies of later blocks are under way all the time, and take no registers. A thread reads what it has copied itself,
so no barrier comes with it; each pass reads a part again, which spares the registers between passes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aule.ir import Value
from aule.ir.types import element, i32
from aule.target import Target
from aule.tile.early import Early
from aule.tile.rows import RowArray, Source

if TYPE_CHECKING:
    from aule.tile.spans import Part, Span

COPIED_BYTES = 16
"""That one asynchronous copy brings."""


def copies_past_registers(target: Target) -> bool:
    """Whether kernels may copy to shared memory asynchronously: cp.async, from sm_80 on."""
    return target.backend == "cuda" and target.arch != "sm_75"


class Stages(Early):
    """Shared memory for ``ahead + 1`` blocks of rows.

    Parameters
    ----------
    arrays : sequence of RowArray
        Aligned to a part, which has 16 bytes.
    """

    again = True

    def __init__(self, span: Span, arrays: Sequence[RowArray]) -> None:
        super().__init__(span, arrays)
        shape = self.rows.shape
        self.ahead = shape.ahead
        self.step = shape.workgroup * span.shape.width
        """Elements from one part of a thread to its next."""
        self.size = shape.batch * span.shape.parts * self.step
        """Elements of a block of an array."""
        self.memory = [
            self.b.shared(f"stages_{i}", element(array.buffer.type), self.size * (self.ahead + 1))
            for i, array in enumerate(arrays)
        ]

    def start(self, first: Value, last: Value, step: Value) -> None:
        for early in range(self.ahead):
            self._send(first + step * early, last, self.b.const(early, i32))

    def advance(self, block: Value, last: Value, step: Value) -> None:
        self._send(block + step * self.ahead, last, self.rows.turned(self.rows.turn + self.ahead))
        self.b.async_wait(self.ahead)

    def _send(self, block: Value, last: Value, stage: Value) -> None:
        """Send for a block, if there is one; a group of copies either way, so that they can be counted."""
        with self.b.if_(block < last):
            self.rows.take(block, lambda: self._copy(stage))
        self.b.async_commit()

    def _copy(self, stage: Value) -> None:
        """Start to copy the rows that `Rows` has now."""
        span, b = self.span, self.b
        for memory, array in zip(self.memory, self.arrays, strict=True):
            source = self.rows.source(array)
            for number in range(span.shape.parts):
                for part in span.held_parts(number):
                    start = source.starts[part.row]
                    index = start + b.cast(span.safe_column(part), element(start.type))
                    b.async_copy(memory, self._place(stage, part), array.buffer, index, span.shape.width)

    def read(self, part: Part, source: Source) -> Value:
        memory = self.memory[self.number(source)]
        return self.b.load(memory, self._place(self.rows.turn, part), self.span.shape.width)

    def land(self) -> None:
        """In kernels that do not loop: copy the rows of the only block, and wait for them."""
        self._copy(self.b.const(0, i32))
        self.b.async_commit()
        self.b.async_wait(0)

    def _place(self, stage: Value, part: Part) -> Value:
        assert part.number is not None
        own = stage * self.size + self.b.thread_id() * self.span.shape.width
        return own + (part.row * self.span.shape.parts + part.number) * self.step
