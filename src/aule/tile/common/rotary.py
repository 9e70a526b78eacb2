"""RoPE: rotation of pairs of columns by angles that depend on the row.

A thread rotates runs of consecutive columns. In the interleaved order a run has both elements of each of its pairs; in
the other order its partners are another run, half of the rotated columns away.
"""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, Value
from aule.ir.types import f32
from aule.tile.common.matrix import Matrix


@dataclass(frozen=True)
class Angles:
    """Where the cosines and the sines of a row begin in memory."""

    cos: Value
    sin: Value


@dataclass(frozen=True)
class Rotary:
    """How the rows of a matrix are rotated.

    Attributes
    ----------
    cos, sin : Matrix
        A row for each position, a column for each pair.
    first : Value
        Position (i32) of the matrix's row 0.
    dim : int
        The first columns, which are rotated.
    interleaved : bool
        Column ``2 i`` is paired with ``2 i + 1``; otherwise ``i`` with ``i + dim // 2``.
    """

    cos: Matrix
    sin: Matrix
    first: Value
    dim: int
    interleaved: bool

    @property
    def half(self) -> int:
        return self.dim // 2

    def angles(self, b: Builder, row: Value) -> Angles:
        """The angles of a row of the matrix; arbitrary ones for a row past its end."""
        position = row + self.first
        return Angles(self.cos.row_start(b, position), self.sin.row_start(b, position))

    def partner(self, b: Builder, col: Value) -> Value:
        """The column that a column is paired with; arbitrary for one that is not rotated."""
        if self.interleaved:
            return col ^ 1
        return b.select(col < self.half, col + self.half, col - self.half)

    def fetch_partners(
        self, b: Builder, source: Matrix, start: Value, col: Value, cols_padded: int, width: int
    ) -> Value | None:
        """The partners of columns ``col .. col + width - 1`` of the row that begins at ``start``; None if they are
        among these columns. ``col`` is a multiple of ``width``."""
        if self.interleaved:
            return None
        if self.alike(width):
            return source.load_quad(b, start, self.partner(b, col), cols_padded, width)
        return b.vector([source.load(b, start, self.partner(b, col + i), cols_padded) for i in range(width)])

    def fetch_angles(self, b: Builder, angles: Angles, col: Value, width: int) -> tuple[Value, Value]:
        """Cosines and sines of these columns, or, interleaved, of their pairs, in the tables' type; arbitrary
        ones for columns that are not rotated."""
        col, count = (col >> 1, max(width // 2, 1)) if self.interleaved else (col, width)

        def inside(at: Value, length: int) -> Value:
            if not self.interleaved:
                at = b.select(at < self.half, at, at - self.half)
            return b.min(at, self.half - length)

        def read(table: Matrix, start: Value) -> Value:
            if self.alike(width) and count > 1:
                return table.load_quad(b, start, inside(col, count), self.half, count)
            parts = [table.load(b, start, inside(col + i, 1), self.half) for i in range(count)]
            return parts[0] if count == 1 else b.vector(parts)

        return read(self.cos, angles.cos), read(self.sin, angles.sin)

    def rotate(
        self, b: Builder, x: list[Value], partners: list[Value], angles: tuple[Value, Value], col: Value,
        cols_padded: int, back: bool = False,
    ) -> list[Value]:  # fmt: skip
        """Columns ``x`` from ``col`` on, in fp32, rotated by ``angles`` (`fetch_angles`); with ``back`` by the negative
        angles. ``partners`` are in fp32, too, and empty if they are among the columns themselves."""
        cos, sin = (b.unpack(b.cast(angle, f32)) for angle in angles)
        places = [col] if self.alike(len(x)) else [col + i for i in range(len(x))]
        lower = [b.eq(at & 1, 0) if self.interleaved else at < self.half for at in places] if partners else []
        rotated = [at < self.dim for at in places] if self.dim < cols_padded else []
        result = []
        for i, value in enumerate(x):
            place = i if len(places) > 1 else 0
            angle = i // 2 if self.interleaved else i
            s = -sin[angle] if back else sin[angle]
            if partners:
                new = b.fma(partners[i], b.select(lower[place], -s, s), value * cos[angle])
            else:
                even = i - i % 2
                new = self.rotate_pair(b, x[even], x[even + 1], cos[angle], s)[i % 2]
            result.append(b.select(rotated[place], new, value) if rotated else new)
        return result

    @staticmethod
    def rotate_pair(b: Builder, x: Value, y: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
        """The two elements of a pair, rotated."""
        return b.fma(-y, sin, x * cos), b.fma(x, sin, y * cos)

    def alike(self, width: int) -> bool:
        """Whether all or none of the columns of a run that begins at a multiple of ``width`` are rotated, and their
        partners are one run."""
        return (self.dim if self.interleaved else self.half) % width == 0
