"""Interface of prefetches, in kernels whose workgroups process one block of rows after the other.

A kernel that loads a row, reduces it and only then loads the next leaves the memory idle while it reduces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aule.ir import Value
from aule.tile.rows.parts import Part, RowArray, Source

if TYPE_CHECKING:
    from aule.tile.rows.engine import Rows
    from aule.tile.rows.passes import Passes


class BlockPrefetch(ABC):
    """Loads from some arrays that are started some blocks before their values are used."""

    def __init__(self, rows: Rows, arrays: Sequence[RowArray]) -> None:
        self.rows, self.b, self.arrays = rows, rows.b, tuple(arrays)

    @abstractmethod
    def start(self, first: Value, last: Value, step: Value) -> None:
        """Start to load the first blocks: ``first``, and every ``step`` further, below ``last``."""

    @abstractmethod
    def advance(self, block: Value, last: Value, step: Value) -> None:
        """Start to load the next block, and make ``block`` available."""


class RowPrefetch(BlockPrefetch):
    """Prefetch of this thread's parts of the rows of some arrays."""

    rereads = False
    """Each pass reads a part again, so registers need not keep it."""

    def __init__(self, passes: Passes, arrays: Sequence[RowArray]) -> None:
        super().__init__(passes.rows, arrays)
        self.passes = passes

    def covers(self, source: Source) -> bool:
        """Whether rows of this array are prefetched."""
        return any(source.array is array for array in self.arrays)

    def number(self, source: Source) -> int:
        return next(i for i, array in enumerate(self.arrays) if source.array is array)

    @abstractmethod
    def read(self, part: Part, source: Source) -> Value:
        """A part of the current block."""


class SharedParts:
    """Addresses of this thread's parts of a block in shared memory.

    A thread reads only what it has stored or copied itself, so no barrier is needed.
    """

    def __init__(self, passes: Passes) -> None:
        shape = passes.rows.shape
        self.b, self.width, self.parts = passes.rows.b, passes.shape.width, passes.shape.parts
        self.step = shape.workgroup * self.width
        """Elements from one part of a thread to its next."""
        self.size = shape.batch * self.parts * self.step
        """Elements of a block of one array."""

    def at(self, row: int, number: int, stage: Value | None = None) -> Value:
        """Where part ``number`` of the thread's ``row`` is, in a ring of stages if ``stage`` is given."""
        first = 0 if stage is None else stage * self.size
        own = self.b.thread_id() * self.width
        return (own if stage is None else first + own) + (row * self.parts + number) * self.step
