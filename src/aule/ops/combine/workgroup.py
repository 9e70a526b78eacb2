"""Combines the partial results of a workgroup's subgroups in shared memory, and those of a cluster's workgroups."""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Builder, Value
from aule.ir.types import f32, i32
from aule.ops.softmax.online_softmax import Maximum, merge_maxima
from aule.tile.common.matrix import QUAD, divmod_const

Store = Callable[[Value, Value, Value, Value, list[Value]], None]
"""Stores columns of a row, given row, first column, m, l and the columns of O."""

Count = Callable[[], Value]
"""Gives the number of rows, where it is needed."""


class WorkgroupPartials:
    """Shared memory for the partial results of a workgroup's subgroups: O, m and l of each row.

    Parameters
    ----------
    thread : Value
        Number of this thread.
    parts : int
        Subgroups of the workgroup; teams, if there are no subgroups.
    columns : int
        Columns of a row, padding included.
    width : int
        Columns that a thread combines at a time.
    """

    def __init__(self, b: Builder, thread: Value, parts: int, rows: int, columns: int, width: int) -> None:
        self.b, self.thread, self.parts, self.rows, self.columns, self.width = b, thread, parts, rows, columns, width
        self._sums = b.shared("parts", f32, parts * rows * columns)
        self._m, self._l = (b.shared(name, f32, parts * rows) for name in ("maxima", "sums"))

    def store_state(self, part: Value, row: Value, m: Value, l: Value) -> None:
        """Store m and l of a row."""
        at = part * self.rows + row
        self.b.store(self._m, at, m)
        self.b.store(self._l, at, l)

    def store_columns(self, part: Value, row: Value | int, column: Value, values: list[Value]) -> None:
        """Store consecutive columns of a row, at most four or a multiple of four."""
        at = (part * self.rows + row) * self.columns + column
        for i in range(0, len(values), QUAD):
            self.b.store(self._sums, at + i, self.b.vector(values[i : i + QUAD]))

    def combine(self, count: Count, store: Store) -> None:
        """Wait for all subgroups, combine their results of rows ``0 .. count - 1`` and store them; uniform."""
        b, rows, columns, width = self.b, self.rows, self.columns, self.width
        b.barrier()
        with b.loop(self.thread, self._groups(count), b.workgroup, name="place") as group:
            r, column = divmod_const(b, group * width, columns)
            maxima = [b.load(self._m, i * rows + r) for i in range(self.parts)]
            totals = [b.load(self._l, i * rows + r) for i in range(self.parts)]
            sums = [b.load(self._sums, (r + i * rows) * columns + column, width) for i in range(self.parts)]
            store(r, column, *_combined(b, maxima, totals, sums))

    def combine_cluster(self, count: Count, rank: Value, store: Store) -> None:
        """Combine the results of all workgroups of a cluster, each of which stores its share of the columns; uniform.

        ``rank`` is the number of this workgroup in the cluster.
        """
        b, rows, columns, width = self.b, self.rows, self.columns, self.width
        sums = b.shared("cluster_sums", f32, rows * columns)
        maxima, totals = (b.shared(f"cluster_{name}", f32, rows) for name in ("maxima", "totals"))

        def publish(r: Value, column: Value, m: Value, l: Value, values: list[Value]) -> None:
            b.store(sums, r * columns + column, b.vector(values))
            with b.if_(b.eq(column, 0)):
                b.store(maxima, r, m)
                b.store(totals, r, l)

        self.combine(count, publish)
        b.cluster_barrier()
        groups = self._groups(count)
        share, _ = divmod_const(b, groups + (b.cluster - 1), b.cluster)
        first, ranks = rank * share, [b.const(i, i32) for i in range(b.cluster)]
        with b.loop(first + self.thread, b.min(first + share, groups), b.workgroup, name="place") as group:
            r, column = divmod_const(b, group * width, columns)
            found = _combined(
                b,
                [b.cluster_load(maxima, r, i) for i in ranks],
                [b.cluster_load(totals, r, i) for i in ranks],
                [b.cluster_load(sums, group * width, i, width) for i in ranks],
            )
            store(r, column, *found)
        b.cluster_barrier()  # no workgroup may end while others read its shared memory

    def _groups(self, count: Count) -> Value:
        """Groups of ``width`` columns in ``count`` rows, or in all rows if these are fewer."""
        return self.b.min(count(), self.rows) * (self.columns // self.width)


def _combined(
    b: Builder, maxima: list[Value], totals: list[Value], sums: list[Value]
) -> tuple[Value, Value, list[Value]]:
    """m, l and columns of O of some partial results together."""
    m, factors = merge_maxima(Maximum(b), maxima)
    l, values = b.const(0.0, f32), [b.const(0.0, f32)] * len(b.unpack(sums[0]))
    for factor, part, found in zip(factors, totals, sums, strict=True):
        l = b.fma(factor, part, l)
        values = [b.fma(factor, x, y) for x, y in zip(b.unpack(found), values, strict=True)]
    return m, l, values
