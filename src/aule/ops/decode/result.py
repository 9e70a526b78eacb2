"""Results of a decoding workgroup: rows of O, or partial results of its split."""

from __future__ import annotations

from dataclasses import replace

from aule.ir import Value
from aule.ir.types import f32, i32
from aule.ops.combine.partials import Row, RowCombiner, finish_row
from aule.ops.combine.workgroup import WorkgroupPartials
from aule.ops.decode.work_range import WorkRange
from aule.ops.shared.parameters import Access
from aule.ops.shared.tickets import when_last
from aule.tile.common.math import LN2
from aule.tile.common.matrix import QUAD, Matrix


class Result:
    """The results of a workgroup's rows, which are counted from its first."""

    def __init__(self, work: WorkRange) -> None:
        self.work, self.b, self.p, self.config = work, work.b, work.p, work.config
        self._access: Access = "readwrite" if work.config.last_workgroup_combines else "write"

    def combine(self, partials: WorkgroupPartials) -> None:
        """Combine the partial results of the workgroup's subgroups, or of its cluster, and store the rows."""
        work, config = self.work, self.config

        def store(row: Value, column: Value, m: Value, l: Value, values: list[Value]) -> None:
            factor, lse = self.finish(row, m, l)
            self.store(row, column, [x * factor for x in values], partials.columns)
            self.store_lse(row, lse, self.b.eq(column, 0))

        def count() -> Value:
            return work.rows - work.row0

        if config.cluster > 1:
            partials.combine_cluster(count, work.split, store)
            return
        partials.combine(count, store)
        if not config.last_workgroup_combines:  # `combine_splits` begins with a barrier
            # A driver takes the last condition of a kernel for uniform unless a barrier follows.
            self.b.barrier()

    def combine_splits(self, thread: Value) -> None:
        """Combine all splits of the workgroup's rows if it is the last to finish; uniform."""
        work, config, b = self.work, self.config, self.b

        def row_of(number: Value) -> Row:
            token, head = work.query(work.row0 + number)
            return Row(self._row_number(number), work.batch, head, token, work.extent)

        def combine() -> None:
            combiner = RowCombiner(self.p, config.aligned[3], config.partials_at_once, "readwrite")
            if 2 * config.fixed_rows > combiner.teams:  # no two teams for a row
                combiner.combine_rows_per_team(b.const(config.fixed_rows, i32), work.splits, row_of, 1)
            else:
                combiner.combine_rows(b.min(work.rows - work.row0, config.shape.rows), work.splits, row_of)

        when_last(self.p, work.row_block, work.splits, thread, combine)

    def finish(self, row: Value, m: Value, l: Value) -> tuple[Value, Value]:
        """The factor for O and the base-2 log-sum-exp of a row; partial results do not count the sink."""
        sink = None
        if self.config.sinks and not self.config.stores_partials:
            _, head = self.work.own_query(row)
            sink = self.b.load(self.p.buffer("sinks", f32), self.p.strided("sinks", head))
        return finish_row(self.b, m, l, sink)

    def store(self, row: Value, column: Value, values: list[Value], padded: int) -> None:
        """Store columns of a row that exists, except those past the last."""
        target = self.target(row, self.config.value_dim % QUAD == 0 and len(values) % QUAD == 0)
        for i in range(0, len(values), QUAD):
            target.store(self.b, self.b.const(0, i32), column + i, values[i : i + QUAD], padded)

    def target(self, row: Value, wide: bool) -> Matrix:
        """Where a row of the result goes, as row 0 of a matrix; ``wide`` if partial results are stored as vectors."""
        b, p, dim, index = self.b, self.p, self.config.value_dim, self.work.index
        zero = b.const(0, i32)
        if self.config.stores_partials:
            start, partials = self._partial_number(row) * dim, p.buffer("part", f32, self._access)
            return Matrix(partials, start, zero, dim, b.const(0, index), None, wide)
        target = self.work.matrix("o")
        token, head = self.work.query(self.work.row0 + row)
        return replace(target, base=self.work.row_start("o", target, token, head))

    def store_lse(self, row: Value, lse: Value, chosen: Value) -> None:
        """Store the log-sum-exp of a row that exists, by the threads that are ``chosen``."""
        b, p, work = self.b, self.p, self.work
        if self.config.stores_partials:
            with b.if_(chosen):
                b.store(p.buffer("part_lse", f32, self._access), self._partial_number(row), lse)
        elif self.config.lse:
            token, head = work.query(work.row0 + row)
            first = work.extent.row_base(p, work.batch * p.number("heads_q") + head, head)
            with b.if_(chosen):
                b.store(p.buffer("lse", f32, "write"), first + b.cast(token, work.index), lse * LN2)

    def _row_number(self, row: Value) -> Value:
        """Number of a row among all with partial results, ``[batch, heads, tokens]``."""
        p, work, index = self.p, self.work, self.work.index
        token, head = work.query(work.row0 + row)
        heads = self.b.cast(work.batch * p.number("heads_q") + head, index)
        return heads * self.b.cast(p.number("tokens"), index) + self.b.cast(token, index)

    def _partial_number(self, row: Value) -> Value:
        """Number of a row's partial result, ``[batch, heads, tokens, splits]``."""
        b, index = self.b, self.work.index
        return self._row_number(row) * b.cast(self.p.number("splits"), index) + b.cast(self.work.split, index)
