"""A strided matrix in global memory, read and written four elements at a time."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aule.ir import Builder, Value
from aule.ir.types import Scalar, element, i32

if TYPE_CHECKING:
    from aule.tile.common.rotary import Rotary

QUAD = 4
"""Elements that are moved together from global memory."""


@dataclass(frozen=True)
class Matrix:
    """One head of Q, K, V or O.

    Attributes
    ----------
    buffer, base : Value
        Memory, and the index of element (0, 0).
    rows : Value
        Number of rows, known only at run time.
    cols : int
        Number of columns, known while tracing.
    row_stride, col_stride : Value or None
        In elements; a column stride of None means 1.
    aligned : bool
        Every quad of a row starts at a multiple of four elements, so it can be read as one vector.
    rotary : Rotary or None
        The rotation that readers must apply to rows.
    once : bool
        Elements are not read again soon.
    in_bounds : bool
        Rows past the end are never accessed.
    """

    buffer: Value
    base: Value
    rows: Value
    cols: int
    row_stride: Value
    col_stride: Value | None
    aligned: bool
    rotary: Rotary | None = field(default=None, kw_only=True)
    once: bool = field(default=False, kw_only=True)
    in_bounds: bool = field(default=False, kw_only=True)

    @property
    def elem(self) -> Scalar:
        return element(self.buffer.type)

    @property
    def even(self) -> bool:
        """Whether the distance of rows is ``row_stride``."""
        return True

    def columns(self, b: Builder, first: int, end: int) -> Matrix:
        """The columns from ``first`` up to ``end``."""
        if (first, end) == (0, self.cols):
            return self
        assert self.rotary is None, "a rotation needs all columns"
        return replace(self, base=self.base + self._offset(b, b.const(first, i32)), cols=end - first)

    def row_start(self, b: Builder, row: Value) -> Value:
        """Index of a row's first element. A row past the end is replaced by the last one, and the caller masks it."""
        existing = row if self.in_bounds else b.min(row, self.rows - 1)
        return self.base + self.index(b, existing) * self.row_stride

    def distance(self, rows: int, cols: int) -> int | None:
        """Elements from any quad to the one so many rows and columns further, if known while tracing."""
        known = self.row_stride.constant
        dense = self.in_bounds and self.aligned and self.col_stride is None and self.rotary is None
        return int(rows * known + cols) if dense and known is not None else None

    def load_quad(self, b: Builder, start: Value, col: Value, cols_padded: int, width: int = QUAD) -> Value:
        """Elements ``col .. col + width - 1`` of the row that begins at ``start``, as a vector; ``aligned`` is meant
        for that width. Columns from ``cols`` up to ``cols_padded`` read as zero."""
        if self.aligned and self.col_stride is None:
            if cols_padded == self.cols:
                return self._read(b, start + self.index(b, col), width)
            inside = b.min(col, self.cols - width)
            vector = self._read(b, start + self.index(b, inside), width)
            return b.select(col < self.cols, vector, b.splat(b.const(0, self.elem), width))
        return b.vector([self.load(b, start, col + i, cols_padded) for i in range(width)])

    def _read(self, b: Builder, index: Value, width: int) -> Value:
        return (b.load_streaming if self.once else b.load)(self.buffer, index, width)

    def load(self, b: Builder, start: Value, col: Value, cols_padded: int) -> Value:
        """One element of the row that begins at ``start``, as in `load_quad`."""
        if cols_padded == self.cols:
            return b.load(self.buffer, start + self._offset(b, col))
        value = b.load(self.buffer, start + self._offset(b, b.min(col, self.cols - 1)))
        return b.select(col < self.cols, value, b.const(0, self.elem))

    def store(self, b: Builder, row: Value, col: Value, values: list[Value], cols_padded: int) -> None:
        """Store consecutive columns of a row that exists, leaving out those past ``cols``."""
        start = self.base + self.index(b, row) * self.row_stride
        values = [b.cast(v, self.elem) for v in values]
        padding = cols_padded > self.cols
        if len(values) in (2, QUAD) and self.aligned and self.col_stride is None:
            with b.if_(col < self.cols) if padding else nullcontext():
                b.store(self.buffer, start + self.index(b, col), b.vector(values))
            return
        for i, value in enumerate(values):
            with b.if_(col + i < self.cols) if padding else nullcontext():
                b.store(self.buffer, start + self._offset(b, col + i), value)

    def index(self, b: Builder, value: Value) -> Value:
        """A number in the type of this matrix's indices."""
        return b.cast(value, element(self.base.type))

    def _offset(self, b: Builder, col: Value) -> Value:
        index = self.index(b, col)
        return index if self.col_stride is None else index * self.col_stride


@dataclass(frozen=True)
class PlacedMatrix(Matrix):
    """A matrix whose rows lie anywhere. The private array ``places`` (i64) holds the offsets from ``base`` at which the
    rows from ``first`` on begin."""

    places: Value
    first: Value

    @property
    def even(self) -> bool:
        return False

    def row_start(self, b: Builder, row: Value) -> Value:
        """Index of the first element of a row that was looked up."""
        return self.base + b.load(self.places, self.index(b, row - self.first))


def padded(n: int, multiple: int) -> int:
    """The smallest multiple that is at least ``n``."""
    return -(-n // multiple) * multiple


def binary_runs(count: int) -> list[tuple[int, int]]:
    """Runs that cover ``count`` elements, as (first, length); lengths are powers of two, the longest first."""
    runs, first = [], 0
    while first < count:
        length = 1 << ((count - first).bit_length() - 1)
        runs.append((first, length))
        first += length
    return runs


def divmod_const(b: Builder, x: Value, n: int) -> tuple[Value, Value]:
    """``x // n`` and ``x % n`` of a non-negative i32, by shift and mask if n is a power of two."""
    if n == 1:
        return x, b.const(0, i32)
    if n & (n - 1) == 0:
        return x >> (n.bit_length() - 1), x & (n - 1)
    quotient = x // n
    return quotient, x - quotient * n
