"""What the subgroups of a workgroup made of their keys, put together in shared memory; and what workgroups of a cluster
made of theirs."""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Builder, Value
from aule.ir.types import f32, i32
from aule.ops.decode.await_parts import AwaitedParts, PostedParts
from aule.ops.decode.result import Result
from aule.tile.math import fold
from aule.tile.matrix import QUAD, divmod_const

Use = Callable[[Value, Value, Value, Value, list[Value]], None]
"""Takes the row, the first column, the row's maximum and sum of weights, and the columns' sums."""


class Join:
    """Room for every part's sums, maximum and sum of weights of each row; and their addition.

    Parameters
    ----------
    parts : int
        Of the workgroup: subgroups, or teams where there are no subgroups.
    columns : int
        Of a row, padding included.
    posted : PostedParts, optional
        Where parts are left, if somebody waits for them.
    """

    def __init__(self, result: Result, parts: int, rows: int, columns: int, posted: PostedParts | None = None) -> None:
        self.result, self.b, self.place = result, result.b, result.place
        self.parts, self.rows, self.columns, self.posted = parts, rows, columns, posted
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
        if self.place.config.cluster > 1:
            self._finish_together(thread, threads, width)
            return
        if self.posted is not None:
            self._finish_posted(self.posted, thread, threads, width)
            return
        self._add_up(thread, threads, width, self._store)
        if not self.place.config.gather:  # which begins with one
            # See `aule.ops.attention.forward`: PoCL 3.1 needs a barrier behind the last condition.
            self.b.barrier()

    def _places(self, width: int) -> Value:
        """Groups of ``width`` columns of the rows that there are, of those that there is room for."""
        return self.b.min(self.place.rows - self.place.row0, self.rows) * (self.columns // width)

    def _add_up(self, thread: Value, threads: int, width: int, use: Use) -> None:
        b, rows, columns = self.b, self.rows, self.columns
        b.barrier()
        with b.loop(thread, self._places(width), threads, name="place") as place:
            r, column = divmod_const(b, place * width, columns)
            maxima = [b.load(self._maxima, i * rows + r) for i in range(self.parts)]
            totals = [b.load(self._totals, i * rows + r) for i in range(self.parts)]
            sums = [b.load(self._sums, (r + i * rows) * columns + column, width) for i in range(self.parts)]
            use(r, column, *_weighted(b, maxima, totals, sums))

    def _store(self, r: Value, column: Value, highest: Value, total: Value, values: list[Value]) -> None:
        self.result.finish(r, column, highest, total, values, self.columns)

    def _finish_posted(self, parts: PostedParts, thread: Value, threads: int, width: int) -> None:
        """The same of all parts of these rows, by workgroups that wait for them."""

        def leave(r: Value, column: Value, highest: Value, total: Value, values: list[Value]) -> None:
            parts.leave(r * self.columns + column, highest, total, values)

        def store(place: Value, highest: Value, total: Value, values: list[Value]) -> None:
            self._store(*divmod_const(self.b, place, self.columns), highest, total, values)

        self._add_up(thread, threads, width, leave)
        if isinstance(parts, AwaitedParts):
            parts.add_up(self._places(width) * width, store)

    def _finish_together(self, thread: Value, threads: int, width: int) -> None:
        """The same of all workgroups of a cluster, each of which stores its share of the columns."""
        b, rows, columns, cluster = self.b, self.rows, self.columns, self.place.config.cluster
        sums = b.shared("cluster_sums", f32, rows * columns)
        maxima, totals = (b.shared(f"cluster_{name}", f32, rows) for name in ("maxima", "totals"))

        def keep(r: Value, column: Value, highest: Value, total: Value, values: list[Value]) -> None:
            b.store(sums, r * columns + column, b.vector(values))
            with b.if_(b.eq(column, 0)):
                b.store(maxima, r, highest)
                b.store(totals, r, total)

        self._add_up(thread, threads, width, keep)
        b.cluster_barrier()
        places = self._places(width)
        share, _ = divmod_const(b, places + (cluster - 1), cluster)
        first, numbers = self.place.part * share, [b.const(i, i32) for i in range(cluster)]
        with b.loop(first + thread, b.min(first + share, places), threads, name="place") as place:
            r, column = divmod_const(b, place * width, columns)
            found = _weighted(
                b,
                [b.cluster_load(maxima, r, i) for i in numbers],
                [b.cluster_load(totals, r, i) for i in numbers],
                [b.cluster_load(sums, place * width, i, width) for i in numbers],
            )
            self._store(r, column, *found)
        b.cluster_barrier()  # nobody ends while others read


def _weighted(
    b: Builder, maxima: list[Value], totals: list[Value], sums: list[Value]
) -> tuple[Value, Value, list[Value]]:
    """The maximum, the sum of weights and the sums of some parts together."""
    highest = fold(b, "max", list(maxima))
    factors = [b.exp2(x - highest) for x in maxima]
    total, values = b.const(0.0, f32), [b.const(0.0, f32)] * len(b.unpack(sums[0]))
    for factor, part, found in zip(factors, totals, sums, strict=True):
        total = b.fma(factor, part, total)
        values = [b.fma(factor, x, y) for x, y in zip(b.unpack(found), values, strict=True)]
    return highest, total, values
