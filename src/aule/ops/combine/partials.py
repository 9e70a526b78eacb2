"""Combines partial results in global memory, weighted by their log-sum-exps.

The buffer ``part`` holds rows of O divided by their sums, ``[rows, splits, value_dim]``; ``part_lse`` their base-2
log-sum-exps, ``[rows, splits]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, f32, i32
from aule.ops.scores.band import Extent
from aule.ops.scores.parameters import Parameters
from aule.ops.shared.parameters import Access
from aule.ops.softmax.online_softmax import Maximum, finish
from aule.tile.common.math import LN2, LOG2E, LOWEST, NEG_INF, fold
from aule.tile.common.matrix import QUAD, Matrix, divmod_const, padded


@dataclass(frozen=True)
class Row:
    """A query row: its number among the rows with partial results, and its place in the result."""

    number: Value
    batch: Value
    head: Value
    token: Value
    extent: Extent


class _Sums:
    """Combination of some partial results of a row: maximum m, sum of weights l, and four columns of O."""

    def __init__(self, b: Builder) -> None:
        self.b = b
        self.m, self.l = b.var(b.const(LOWEST, f32), "m"), b.var(b.const(0.0, f32), "l")
        self.columns = [b.var(b.const(0.0, f32), "o") for _ in range(QUAD)]

    def add(self, lse: list[Value], quads: list[Value]) -> None:
        """Add partial results, given their log-sum-exps and columns."""
        b, form = self.b, Maximum(self.b)
        new = fold(b, form.kind, [self.m.value, *lse])
        old = form.factor(self.m.value, new)
        weights = [form.factor(x, new) for x in lse]
        self.m.value, self.l.value = new, b.fma(self.l.value, old, fold(b, "add", list(weights)))
        for c, variable in enumerate(self.columns):
            total = variable.value * old
            for weight, quad in zip(weights, quads, strict=True):
                # A split without keys is never written: its memory may hold NaN.
                total = b.select(b.eq(weight, 0.0), total, b.fma(weight, b.extract(quad, c), total))
            variable.value = total


def finish_row(b: Builder, m: Value, l: Value, sink: Value | None = None) -> tuple[Value, Value]:
    """The factor for O, and the base-2 log-sum-exp, of a row with maximum ``m`` and sum of weights ``l``.

    A sink counts as a key without a value.
    """
    form, rescale = Maximum(b), b.const(1.0, f32)
    if sink is not None:
        new = form.larger(m, sink * LOG2E)
        rescale = form.factor(m, new)
        l = b.fma(l, rescale, b.exp2(sink * LOG2E - new))
        m = new
    end = finish(form, l)
    return end.inverse * rescale, end.log2_sum(m)


def row_quads(value_dim: int, threads: int) -> int:
    """Threads along a row, four columns each."""
    return min(-(-value_dim // QUAD), threads)


def combiner_bytes(value_dim: int, threads: int) -> int:
    """Most shared memory of a `RowCombiner`."""
    quads = row_quads(value_dim, threads)
    return 4 * (threads // quads) * (quads * QUAD + 2) + 48  # three arrays, each up to a multiple of 16 bytes


class RowCombiner:
    """Combines the partial results of rows with all threads of a workgroup.

    A team of threads covers the columns of a row, four each. If there are more teams than rows, several teams share the
    partial results of a row, each in a *slot*; the slots of a row are combined in shared memory.

    Parameters
    ----------
    aligned : bool
        Rows of o can be written as vectors of four.
    at_once : int
        Partial results that a thread loads before it uses any.
    access : str
        How the kernel accesses the partial results.
    """

    def __init__(self, parameters: Parameters, aligned: bool, at_once: int, access: Access) -> None:
        self.p, self.b, self.config = parameters, parameters.b, parameters.config
        self.aligned, self.at_once, dim = aligned, at_once, parameters.config.value_dim
        self._partials = parameters.buffer("part", f32, access)
        self._partial_lse = parameters.buffer("part_lse", f32, access)
        self.quads = row_quads(dim, self.b.workgroup)
        self._padded = padded(dim, self.quads * QUAD)
        self.teams = self.b.workgroup // self.quads
        self.team, self.quad = divmod_const(self.b, self.b.thread_id(), self.quads)

    @cached_property
    def _slots(self) -> tuple[Value, Value, Value]:
        """Shared memory for m, l and the columns of O of each team."""
        sizes = {"row_maxima": self.teams, "row_totals": self.teams, "row_sums": self.teams * self.quads * QUAD}
        maxima, totals, sums = (self.b.shared(name, f32, size) for name, size in sizes.items())
        return maxima, totals, sums

    def combine_row(self, row: Row, splits: Value) -> None:
        """Combine and store one row with all teams; uniform."""
        exists = self.team < self.teams  # some threads may belong to no team
        for first_column in range(0, self.config.value_dim, self.quads * QUAD):
            self._combine_in_slots(row, exists, self.team, self.teams, splits, first_column)

    def combine_rows(self, count: Value, splits: Value, row_of: Callable[[Value], Row]) -> None:
        """Combine and store rows ``0 .. count - 1`` of the workgroup, with several teams for a row; uniform."""
        b = self.b
        # The most slots there are teams for, as a power of two to avoid divisions.
        shift = b.const(0, i32)
        for power in range(1, self.teams.bit_length()):
            shift = b.select(count << power <= self.teams, b.const(power, i32), shift)
        slots, rows_at_once = b.const(1, i32) << shift, b.const(self.teams, i32) >> shift
        turn = self.team >> shift
        slot = self.team & (slots - 1)
        for first_column in range(0, self.config.value_dim, self.quads * QUAD):
            with b.loop(0, count, rows_at_once, name="row") as first:
                number = first + turn
                exists = (number < count) & (self.team < self.teams)
                self._combine_in_slots(row_of(b.min(number, count - 1)), exists, slot, slots, splits, first_column)

    def combine_rows_per_team(
        self, count: Value, splits: Value, row_of: Callable[[Value], Row], rows_at_once: int
    ) -> None:
        """Combine and store rows ``0 .. count - 1``, each with one team and without shared memory.

        For many rows of few splits; a team has ``rows_at_once`` rows at a time.
        """
        b = self.b
        for first_column in range(0, self.config.value_dim, self.quads * QUAD):
            column = self.quad * QUAD + first_column
            stop = b.select(self.team < self.teams, count, b.const(0, i32))
            with b.loop(self.team, stop, self.teams * rows_at_once, name="row") as first:
                numbers = [first + self.teams * i for i in range(rows_at_once)]
                rows = [row_of(b.min(number, count - 1)) for number in numbers]
                partials, sums = [self._partials_of(row) for row in rows], [_Sums(b) for _ in rows]
                with b.loop(0, splits, self.at_once, name="split") as start:
                    found = [self._load(of, column, start, 1, splits) for of in partials]
                    for sum_, (lse, quads) in zip(sums, found, strict=True):
                        sum_.add(lse, quads)
                for number, row, sum_ in zip(numbers, rows, sums, strict=True):
                    with b.if_(number < count):
                        self._store(row, column, sum_)

    def _combine_in_slots(
        self, row: Row, exists: Value, slot: Value, slots: Value | int, splits: Value, first_column: int
    ) -> None:
        """Combine a row for each group of ``slots`` teams, and as many columns as a team has."""
        b = self.b
        column = self.quad * QUAD + first_column
        stop = b.select(exists, splits, b.const(0, i32))
        partials, sums = self._partials_of(row), _Sums(b)
        with b.loop(slot, stop, slots * self.at_once, name="split") as start:
            sums.add(*self._load(partials, column, start, slots, stop))
        slot_maxima, slot_totals, slot_sums = self._slots
        with b.if_(exists):
            with b.if_(b.eq(self.quad, 0)):
                b.store(slot_maxima, self.team, sums.m.value)
                b.store(slot_totals, self.team, sums.l.value)
            at = (self.team * self.quads + self.quad) * QUAD
            b.store(slot_sums, at, b.vector([x.value for x in sums.columns]))
        b.barrier()
        with b.if_(exists & b.eq(slot, 0)):
            self._combine_slots(row, column, slots)
        # The next round uses the same memory. Also, a driver takes the last condition of a kernel for uniform unless a
        # barrier follows.
        b.barrier()

    def _combine_slots(self, row: Row, column: Value, slots: Value | int) -> None:
        """Combine the slots of a row, from this thread's team on, and store the columns."""
        b, sums, (slot_maxima, slot_totals, slot_sums) = self.b, _Sums(self.b), self._slots
        unroll = -1 if isinstance(slots, int) else 0
        with b.loop(0, slots, unroll=unroll, name="slot") as i:
            sums.m.value = b.max(sums.m.value, b.load(slot_maxima, self.team + i))
        with b.loop(0, slots, unroll=unroll, name="slot") as i:
            factor = b.exp2(b.load(slot_maxima, self.team + i) - sums.m.value)
            sums.l.value = b.fma(factor, b.load(slot_totals, self.team + i), sums.l.value)
            at = ((self.team + i) * self.quads + self.quad) * QUAD
            for variable, x in zip(sums.columns, b.unpack(b.load(slot_sums, at, QUAD)), strict=True):
                variable.value = b.fma(factor, x, variable.value)
        self._store(row, column, sums)

    def _partials_of(self, row: Row) -> tuple[Value, Matrix]:
        """Number of a row's first partial result, and its partial results as rows of a matrix."""
        b, index, dim = self.b, self.p.index, self.config.value_dim
        first = b.cast(row.number, index) * b.cast(self.p.number("splits"), index)
        zero = b.const(0, i32)
        return first, Matrix(self._partials, first * dim, zero, dim, b.const(dim, index), None, dim % QUAD == 0)

    def _load(
        self, partials: tuple[Value, Matrix], column: Value, start: Value, step: Value | int, stop: Value
    ) -> tuple[list[Value], list[Value]]:
        """Log-sum-exps and four columns of the partial results ``start``, ``start + step``, ... of a row.

        Those from ``stop`` on have a log-sum-exp of -inf.
        """
        b, index, (first, matrix) = self.b, self.p.index, partials
        splits = [start + step * i for i in range(self.at_once)]
        existing = [b.min(split, stop - 1) for split in splits]
        found = [b.load(self._partial_lse, first + b.cast(split, index)) for split in existing]
        quads = [
            matrix.load_quad(b, matrix.base + b.cast(split, index) * matrix.row_stride, column, self._padded)
            for split in existing
        ]
        lse = [b.select(split < stop, x, b.const(NEG_INF, f32)) for split, x in zip(splits, found, strict=True)]
        return lse, quads

    def _store(self, row: Row, column: Value, sums: _Sums) -> None:
        """Store columns of a row whose partial results are all combined."""
        b, p, config = self.b, self.p, self.config
        sink = b.load(p.buffer("sinks", f32), p.strided("sinks", row.head)) if config.sinks else None
        factor, lse = finish_row(b, sums.m.value, sums.l.value, sink)
        o = Matrix(
            p.buffer("o", SCALARS[config.dtype], "write"),
            p.strided("o", b.const(0, i32) if config.packed else row.batch, row.head),
            b.const(0, i32),
            config.value_dim,
            p.number("o_row_stride", p.index),
            None if config.unit[3] else p.number("o_col_stride", p.index),
            self.aligned,
        )
        token = row.token if row.extent.first_q is None else row.extent.first_q + row.token
        o.store(b, token, column, [x.value * factor for x in sums.columns], self._padded)
        if config.lse:
            with b.if_(b.eq(column, 0)):
                at = row.extent.row_base(p, row.batch * p.number("heads_q") + row.head, row.head)
                b.store(p.buffer("lse", f32, "write"), at + b.cast(row.token, p.index), lse * LN2)
