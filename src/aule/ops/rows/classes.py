"""Classes of row lengths: rows of all lengths of a class share a kernel, which has the length as a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aule import tuning
from aule.ir.types import SCALARS
from aule.target import Target

Use = Literal["rows", "sums", "rotation", "elements"]
"""What a kernel does: it reduces rows, also sums columns, rotates pairs of columns, or only maps elements."""
_VECTOR_BYTES = 16
"""Bytes of a full part on a GPU."""


@dataclass(frozen=True)
class RowClass:
    """Lengths of rows that share a kernel on a GPU.

    Attributes
    ----------
    width : int
        Columns that are loaded together: 16 bytes, or 1.
    columns : int
        Most columns of a row: what its threads have room for, a power of two or three times one. Of rows that are too
        long for registers, the fewest.
    shortest : int
        Every row has more columns than this.
    exact : bool
        All rows have ``columns`` columns.
    held : bool
        Rows may stay in registers.
    parts : int
        Preferred number of parts of a row per thread; 0 leaves the choice to `RowTuning`.
    """

    width: int
    columns: int
    shortest: int = 0
    exact: bool = False
    held: bool = True
    parts: int = 0

    def ragged(self, parts: int, threads: int) -> int:
        """How many of the last of ``parts`` parts may be past a row's end, if ``threads`` threads share the row."""
        return 0 if self.exact else parts - min(self.shortest // (threads * self.width), parts)


def row_class(target: Target, dtype: str, length: int, width: int, use: Use = "rows") -> RowClass:
    """The class of rows of ``length`` columns, of which ``width`` can be loaded together."""
    wide = width * SCALARS[dtype].bytes >= _VECTOR_BYTES
    width = width if wide else 1
    choice = tuning.use(target, "rows.classes", wide=wide, use=use)
    shortest = 0
    for columns in choice["columns"]:
        if length <= columns:
            exact = length == columns and columns in choice["exact"]
            return RowClass(width, columns, shortest, exact, parts=choice["parts"])
        shortest = columns
    return RowClass(width if choice["streams"] else 1, shortest + 1, shortest, held=False)
