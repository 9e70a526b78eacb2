"""What the subgroups of a workgroup made of their keys, put together in shared memory."""

from __future__ import annotations

from aule.ir import Value
from aule.ir.types import f32
from aule.ops.decode.result import Result
from aule.tile.math import fold
from aule.tile.matrix import QUAD


class Join:
    """Room for every part's sums, maximum and sum of weights of each row; and their addition.

    Parameters
    ----------
    parts : int
        Of the workgroup: subgroups, or teams where there are no subgroups.
    columns : int
        Of a row, padding included.
    """

    def __init__(self, result: Result, parts: int, rows: int, columns: int) -> None:
        self.result, self.b, self.place = result, result.b, result.place
        self.parts, self.rows, self.columns = parts, rows, columns
        self._sums = self.b.shared("parts", f32, parts * rows * columns)
        self._maxima, self._totals = (self.b.shared(name, f32, parts * rows) for name in ("maxima", "sums"))

    def leave(self, part: Value, row: Value, base: Value, total: Value) -> None:
        """The maximum and the sum of weights of a row."""
        at = part * self.rows + row
        self.b.store(self._maxima, at, base)
        self.b.store(self._totals, at, total)

    def leave_sums(self, part: Value, row: Value | int, column: Value, values: list[Value]) -> None:
        """Consecutive columns of a row, at most four or a multiple of it."""
        at = (part * self.rows + row) * self.columns + column
        for i in range(0, len(values), QUAD):
            self.b.store(self._sums, at + i, self.b.vector(values[i : i + QUAD]))

    def finish(self, thread: Value, threads: int, width: int) -> None:
        """Wait for all, add up, and store the results, ``width`` columns to a thread at a time."""
        b, rows, columns = self.b, self.rows, self.columns
        b.barrier()
        with b.loop(thread, rows * columns // width, threads, name="place") as place:
            r, column = place * width // columns, place * width % columns
            highest = fold(b, "max", [b.load(self._maxima, i * rows + r) for i in range(self.parts)])
            factors = [b.exp2(b.load(self._maxima, i * rows + r) - highest) for i in range(self.parts)]
            total, values = b.const(0.0, f32), [b.const(0.0, f32)] * width
            for i, factor in enumerate(factors):
                total = b.fma(factor, b.load(self._totals, i * rows + r), total)
                found = b.unpack(b.load(self._sums, (r + i * rows) * columns + column, width))
                values = [b.fma(factor, x, y) for x, y in zip(found, values, strict=True)]
            factor, lse = self.result.normal(r, highest, total)
            with b.if_(self.place.row0 + r < self.place.rows):
                self.result.store(r, column, [x * factor for x in values], columns)
                self.result.store_lse(r, lse, b.eq(column, 0))
        # See `aule.ops.attention.forward`: PoCL 3.1 needs a barrier behind the last condition.
        b.barrier()
