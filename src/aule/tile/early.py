"""Rows that come ahead of their turn, in kernels whose workgroups take one block of rows after the other.

A kernel that loads a row, combines it and only then loads the next leaves the memory idle while it combines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aule.ir import Value
from aule.tile.rows import RowArray, Source

if TYPE_CHECKING:
    from aule.tile.spans import Part, Span


class Ahead(ABC):
    """What is sent for before its turn."""

    @abstractmethod
    def start(self, first: Value, last: Value, step: Value) -> None:
        """Send for the first blocks: ``first``, those ``step`` further each, and none from ``last`` on."""

    @abstractmethod
    def advance(self, block: Value, last: Value, step: Value) -> None:
        """Send for the next block, and have ``block`` at hand."""


class Early(Ahead):
    """The parts that threads have of the rows of some arrays, of the block that is worked on and of later ones.

    Attributes
    ----------
    again : bool
        Each pass reads a part again.
    """

    again = False

    def __init__(self, span: Span, arrays: Sequence[RowArray]) -> None:
        self.span, self.arrays = span, tuple(arrays)
        self.rows, self.b = span.rows, span.rows.b

    def holds(self, source: Source) -> bool:
        """Whether its rows come this way."""
        return any(source.array is array for array in self.arrays)

    def number(self, source: Source) -> int:
        """Which of the arrays it is of."""
        return next(i for i, array in enumerate(self.arrays) if source.array is array)

    @abstractmethod
    def read(self, part: Part, source: Source) -> Value:
        """A part of the block that is worked on."""
