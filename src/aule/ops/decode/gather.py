"""Parts of rows, which workgroups made of parts of a sequence's keys, added up and weighted by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, f32, i32
from aule.ops.attention.config import ScoreConfig
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.scores import Extent
from aule.ops.decode.result import normal
from aule.ops.parameters import Access
from aule.tile.math import LN2, LOWEST, NEG_INF, fold
from aule.tile.matrix import QUAD, Matrix, divmod_const


@dataclass(frozen=True)
class Row:
    """A query row: its number among those with parts, and whose it is."""

    number: Value
    batch: Value
    head: Value
    token: Value
    extent: Extent


class _Sums:
    """What some parts of a row come to: their maximum, their sum of weights, and sums of four columns."""

    def __init__(self, b: Builder) -> None:
        self.b = b
        self.base, self.total = b.var(b.const(LOWEST, f32), "m"), b.var(b.const(0.0, f32), "l")
        self.acc = [b.var(b.const(0.0, f32), "o") for _ in range(QUAD)]

    def add(self, lse: list[Value], values: list[Value]) -> None:
        """Add parts."""
        b = self.b
        new = fold(b, "max", [self.base.value, *lse])
        old = b.exp2(self.base.value - new)
        weights = [b.exp2(x - new) for x in lse]
        self.base.value, self.total.value = new, b.fma(self.total.value, old, fold(b, "add", list(weights)))
        for c, variable in enumerate(self.acc):
            sum_ = variable.value * old
            for weight, quad_values in zip(weights, values, strict=True):
                # A part without keys was never written: whatever is there must not count.
                sum_ = b.select(b.eq(weight, 0.0), sum_, b.fma(weight, b.extract(quad_values, c), sum_))
            variable.value = sum_


def row_quads(value_dim: int, threads: int) -> int:
    """Threads along a row, four columns each."""
    return min(-(-value_dim // QUAD), threads)


def gather_bytes(value_dim: int, threads: int) -> int:
    """Shared memory of a `Gather`, at most."""
    quads = row_quads(value_dim, threads)
    return 4 * (threads // quads) * (quads * QUAD + 2) + 48  # three arrays, each up to a multiple of 16 bytes


class Gather:
    """The addition of the parts of some rows by all threads of a workgroup.

    Threads are laid over columns, then over the parts of a row, in *slots*, as far as there are no more rows to give
    them to; what the slots of a row made of their parts is put together in shared memory.

    Parameters
    ----------
    aligned : bool
        Rows of o can be written as vectors of four.
    at_once : int
        Parts that a thread loads before it uses any.
    access : str
        How the kernel accesses the parts.
    """

    def __init__(
        self, parameters: Parameters, config: ScoreConfig, aligned: bool, threads: int, at_once: int, access: Access
    ) -> None:
        self.p, self.b, self.config, self.aligned, self.at_once = parameters, parameters.b, config, aligned, at_once
        b = self.b
        self._parts = parameters.buffer("part", f32, access)
        self._part_lse = parameters.buffer("part_lse", f32, access)
        self.quads = row_quads(config.value_dim, threads)
        self._padded = -(-config.value_dim // (self.quads * QUAD)) * self.quads * QUAD
        self.teams = threads // self.quads
        thread = b.thread_id()
        self.team, self.quad = divmod_const(b, thread, self.quads)

    @cached_property
    def _maxima(self) -> Value:
        return self.b.shared("row_maxima", f32, self.teams)

    @cached_property
    def _totals(self) -> Value:
        return self.b.shared("row_totals", f32, self.teams)

    @cached_property
    def _sums(self) -> Value:
        return self.b.shared("row_sums", f32, self.teams * self.quads * QUAD)

    def add_row(self, row: Row, parts: Value) -> None:
        """Add up the one row of the workgroup and store it; uniform."""
        exists = self.team < self.teams  # there may be threads left over
        for first_column in range(0, self.config.value_dim, self.quads * QUAD):
            self._round(row, exists, self.team, self.teams, parts, first_column)

    def add_rows(self, count: Value, parts: Value, row_of: Callable[[Value], Row]) -> None:
        """Add up rows ``0 .. count - 1`` of the workgroup, each of ``parts`` parts, and store them; uniform."""
        b = self.b
        # As many slots as there are teams for, a power of two: nobody waits for divisions.
        shift = b.const(0, i32)
        for power in range(1, self.teams.bit_length()):
            shift = b.select(count << power <= self.teams, b.const(power, i32), shift)
        slots, each = b.const(1, i32) << shift, b.const(self.teams, i32) >> shift
        turn = self.team >> shift
        slot = self.team & (slots - 1)
        for first_column in range(0, self.config.value_dim, self.quads * QUAD):
            with b.loop(0, count, each, name="row") as first:
                number = first + turn
                exists = (number < count) & (self.team < self.teams)
                self._round(row_of(b.min(number, count - 1)), exists, slot, slots, parts, first_column)

    def add_rows_apart(self, count: Value, parts: Value, row_of: Callable[[Value], Row], rows_at_once: int) -> None:
        """The same for many rows of few parts: each team has rows of its own, some of them at a time, and nothing goes
        through shared memory."""
        b = self.b
        for first_column in range(0, self.config.value_dim, self.quads * QUAD):
            column = self.quad * QUAD + first_column
            stop = b.select(self.team < self.teams, count, b.const(0, i32))
            with b.loop(self.team, stop, self.teams * rows_at_once, name="row") as first:
                numbers = [first + self.teams * i for i in range(rows_at_once)]
                rows = [row_of(b.min(number, count - 1)) for number in numbers]
                parts_of, sums = [self._parts_of(row) for row in rows], [_Sums(b) for _ in rows]
                with b.loop(0, parts, self.at_once, name="split") as start:
                    found = [self._load(of, column, start, 1, parts) for of in parts_of]
                    for sum_, (lse, values) in zip(sums, found, strict=True):
                        sum_.add(lse, values)
                for number, row, sum_ in zip(numbers, rows, sums, strict=True):
                    with b.if_(number < count):
                        self._store(row, column, sum_)

    def _round(self, row: Row, exists: Value, slot: Value, slots: Value | int, parts: Value, first_column: int) -> None:
        """A row for each team, or for several of them, and as many columns as a team holds."""
        b = self.b
        column = self.quad * QUAD + first_column
        stop = b.select(exists, parts, b.const(0, i32))
        parts_of, sums = self._parts_of(row), _Sums(b)
        with b.loop(slot, stop, slots * self.at_once, name="split") as start:
            sums.add(*self._load(parts_of, column, start, slots, stop))
        with b.if_(exists):
            with b.if_(b.eq(self.quad, 0)):
                b.store(self._maxima, self.team, sums.base.value)
                b.store(self._totals, self.team, sums.total.value)
            b.store(self._sums, (self.team * self.quads + self.quad) * QUAD, b.vector([x.value for x in sums.acc]))
        b.barrier()
        with b.if_(exists & b.eq(slot, 0)):
            self._finish(row, column, slots)
        # The next round takes the same memory; and see `aule.ops.attention.forward`: PoCL 3.1 needs a barrier behind
        # the last condition.
        b.barrier()

    def _parts_of(self, row: Row) -> tuple[Value, Matrix]:
        """The number of a row's first part, and its parts as rows of a matrix."""
        b, index, dim = self.b, self.p.index, self.config.value_dim
        first = b.cast(row.number, index) * b.cast(self.p.number("splits"), index)
        zero = b.const(0, i32)
        return first, Matrix(self._parts, first * dim, zero, dim, b.const(dim, index), None, dim % QUAD == 0)

    def _load(
        self, parts_of: tuple[Value, Matrix], column: Value, start: Value, slots: Value | int, stop: Value
    ) -> tuple[list[Value], list[Value]]:
        """The log-sum-exps of some parts of a row, from ``start`` on in steps of ``slots``, and four columns of each;
        parts from ``stop`` on weigh nothing."""
        b, index, (first, whole) = self.b, self.p.index, parts_of
        places = [start + slots * i for i in range(self.at_once)]
        near = [b.min(place, stop - 1) for place in places]
        found = [b.load(self._part_lse, first + b.cast(place, index)) for place in near]
        values = [
            whole.load_quad(b, whole.base + b.cast(place, index) * whole.row_stride, column, self._padded)
            for place in near
        ]
        lse = [b.select(place < stop, x, b.const(NEG_INF, f32)) for place, x in zip(places, found, strict=True)]
        return lse, values

    def _finish(self, row: Row, column: Value, slots: Value | int) -> None:
        """Put together what the slots of a row, from this thread's team on, made of it, and store the columns."""
        b, sums = self.b, _Sums(self.b)
        highest, total, acc = sums.base, sums.total, sums.acc
        with b.loop(0, slots, unroll=-1 if isinstance(slots, int) else 0, name="slot") as i:
            highest.value = b.max(highest.value, b.load(self._maxima, self.team + i))
        with b.loop(0, slots, unroll=-1 if isinstance(slots, int) else 0, name="slot") as i:
            factor = b.exp2(b.load(self._maxima, self.team + i) - highest.value)
            total.value = b.fma(factor, b.load(self._totals, self.team + i), total.value)
            at = ((self.team + i) * self.quads + self.quad) * QUAD
            for variable, x in zip(acc, b.unpack(b.load(self._sums, at, QUAD)), strict=True):
                variable.value = b.fma(factor, x, variable.value)
        self._store(row, column, sums)

    def _store(self, row: Row, column: Value, sums: _Sums) -> None:
        """Store columns of a row of which all parts are added up."""
        b, p, config = self.b, self.p, self.config
        sink = b.load(p.buffer("sinks", f32), p.strided("sinks", row.head)) if config.sinks else None
        factor, lse = normal(b, sums.base.value, sums.total.value, sink)
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
        o.store(b, token, column, [x.value * factor for x in sums.acc], self._padded)
        if config.lse:
            with b.if_(b.eq(column, 0)):
                at = row.extent.row_base(p, row.batch * p.number("heads_q") + row.head, row.head)
                b.store(p.buffer("lse", f32, "write"), at + b.cast(row.token, p.index), lse * LN2)
