"""Sums of columns over rows, for the gradients of weights and biases.

Each workgroup stores a row of partial sums; another kernel adds those up (`aule.ops.rows.column_sum`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from aule.ir import Builder, Value, Var
from aule.ir.types import Vector, element, i32
from aule.tile.common.math import fold
from aule.tile.common.matrix import divmod_const
from aule.tile.rows.parts import Part, Product, RowArray, Term
from aule.tile.rows.passes import Passes

_PIECE = 4
"""Sums of 16 bytes, which a thread stores at a time."""
OCTET = 2 * _PIECE
"""Width of the parts whose sums can be stored deinterleaved."""
SumsLayout = Literal["in_order", "deinterleaved"]
"""How a row of partial sums is laid out: in the order of columns; or, for parts of eight columns, the first four of
each part and then the second four of each. Deinterleaved, neighbouring threads store to adjacent memory, so each
32-byte sector is written once."""

_FOLDED = 16
"""Partial sums that one thread adds up at a time."""


class ColumnSums:
    """Sums of each column over all rows of a workgroup: in registers if rows are, else in the result's memory.

    ``array`` takes the partial sums, in the type computed in; it has one row per workgroup.
    """

    def __init__(self, passes: Passes, array: RowArray, layout: SumsLayout = "in_order") -> None:
        self.passes, self.array, self.layout = passes, array, layout
        rows, shape = passes.rows, passes.shape
        assert layout == "in_order" or (shape.parts and shape.width == OCTET), (layout, shape)
        b, cluster = rows.b, rows.shape.sums_cluster
        self.start = array.start(rows.group // cluster if cluster > 1 else rows.group)
        self.zero = b.splat(b.const(0.0, rows.work), shape.width)
        self.sums: list[Var] = [b.var(self.zero) for _ in range(shape.parts)]
        if not shape.parts:
            self._store_all(lambda part: self.zero)

    def add(self, parts: list[Part], terms: Sequence[Term]) -> None:
        """Add the terms of all rows at a part; rows that do not exist add nothing."""
        number = parts[0].number
        if number is not None:
            self.sums[number].value = self._added(self.sums[number].value, terms)
            return
        terms = [part.masked_term(term, 0.0) for part, term in zip(parts, terms, strict=True)]
        with self._where_inside(parts[0]):
            self._store(parts[0], self._added(self.passes.load(parts[0], self.array, self.start), terms))

    def _added(self, total: Value, terms: Sequence[Term]) -> Value:
        """A sum with the terms of all rows that exist added."""
        rows, b = self.passes.rows, self.passes.rows.b

        def counted(exists: Value | None, value: Value) -> Value:
            return value if exists is None else b.select(exists, value, self.zero)

        values = []
        for exists, term in zip(rows.exists, terms, strict=True):
            if isinstance(term, Product):
                total = b.fma(counted(exists, term.x), counted(exists, term.y), total)
            else:
                values.append(counted(exists, term))
        return fold(b, "add", [total, *values])

    def finish(self) -> None:
        """Add up the workgroup's slots and store the sums, if they are in registers."""
        if not self.sums:
            return
        rows, b, width = self.passes.rows, self.passes.rows.b, self.passes.shape.width
        slots = rows.shape.slots
        if slots == 1:
            self._store_all(lambda part: self.sums[part.number or 0].value)
            return
        if rows.scratch is None:
            rows.scratch = b.shared("slots", rows.work, rows.shape.workgroup * width)
        else:
            b.barrier()
        scratch = rows.scratch
        for number, variable in enumerate(self.sums):
            b.store(scratch, b.thread_id() * width, variable.value)
            b.barrier()
            with b.if_(b.eq(rows.slot, 0)):
                at = [(rows.lane + slot * rows.shape.threads) * width for slot in range(slots)]
                variable.value = fold(b, "add", [b.load(scratch, i, width) for i in at])
            if number + 1 < len(self.sums):
                b.barrier()
        with b.if_(b.eq(rows.slot, 0)):
            self._store_all(lambda part: self.sums[part.number or 0].value)

    def _store_all(self, f: Callable[[Part], Value]) -> None:
        def store(parts: list[Part], _: int) -> None:
            with self._where_inside(parts[0]):
                self._store(parts[0], f(parts[0]))

        self.passes.walk(store)

    def _where_inside(self, part: Part) -> AbstractContextManager[None]:
        """Run the body unless the part is past the row's end."""
        return self.passes.rows.b.if_(part.inside) if part.may_end and part.inside is not None else nullcontext()

    def _store(self, part: Part, value: Value) -> None:
        if self.layout == "in_order":
            self.passes.store_run(self.array, self.start, part.col, value)
            return
        b, values, buffer = self.passes.rows.b, self.passes.rows.b.unpack(value), self.array.buffer
        index = element(self.start.type)
        col, half = b.cast(part.col, index), b.cast(self.passes.length, index) >> 1
        first, second = self.start + (col >> 1), self.start + half
        b.store(buffer, first, b.vector(values[:_PIECE]), align=_PIECE)
        b.store(buffer, second + (col >> 1), b.vector(values[_PIECE:]), align=_PIECE)


def deinterleaved_column(b: Builder, place: Value, length: Value) -> Value:
    """The column whose sum is at a place of a deinterleaved row."""
    half = length >> 1
    second = place >= half
    place = b.select(second, place - half, place)
    return (place >> 2 << 3) + (place & 3) + b.select(second, b.const(4, i32), b.const(0, i32))


def fold_threads(b: Builder, memory: Value, columns: int, lanes: int) -> Value:
    """The sum of each column over ``lanes`` rows of ``columns`` in shared memory.

    The first ``columns`` threads get the results. It takes at least those, and one per ``_FOLDED`` values.
    """
    lane, column = divmod_const(b, b.thread_id(), columns)
    elem = element(memory.type)
    value = b.const(0.0, elem)
    while lanes > 1:
        b.barrier()
        count = min(lanes, _FOLDED)
        lanes //= count
        result = b.var(b.const(0.0, elem))
        with b.if_(lane < lanes):
            at = [(lane + i * lanes) * columns + column for i in range(count)]
            result.value = fold(b, "add", [b.load(memory, i) for i in at])
        value = result.value
        if lanes > 1:
            b.barrier()
            with b.if_(lane < lanes):
                b.store(memory, lane * columns + column, value)
    return value


def store_numbered(b: Builder, outs: Sequence[Value], number: Value, at: Value, values: Sequence[Value]) -> None:
    """Store consecutive vectors, none of them aligned, in the array with this number."""
    for i, out in enumerate(outs):
        with b.if_(b.eq(number, i)):
            for j, value in enumerate(values):
                width = value.type.lanes if isinstance(value.type, Vector) else 1
                b.store(out, at + j * width, b.cast(value, element(out.type)), align=1)


# -- sums combined through the shared memory of prefetched rows --------------------------------------------------------


def has_pieces(passes: Passes) -> bool:
    """Whether sums in registers are `SumPieces`."""
    return passes.rows.work.bytes == 4 and passes.shape.width % _PIECE == 0


class SumPieces:
    """Sums in registers as pieces of 16 bytes, which threads exchange through ``memory``, a shared array for each sum.

    A thread's pieces are where its own prefetched rows were, so it can store them without a barrier.
    """

    def __init__(self, sums: Sequence[ColumnSums], memory: Sequence[Value]) -> None:
        self.passes = sums[0].passes
        self.b, self.shape = self.passes.rows.b, self.passes.rows.shape
        self.places = list(zip(sums, memory[: len(sums)], strict=True))
        self._each = self.passes.shape.width // _PIECE
        """Pieces of a part."""
        self.count = self.passes.shape.parts * self._each
        """Pieces of a thread."""

    def get(self, total: ColumnSums, number: int) -> Value:
        part, i = divmod(number, self._each)
        return self.b.vector(self.b.unpack(total.sums[part].value)[_PIECE * i : _PIECE * (i + 1)])

    def column(self, number: Value | int) -> Value:
        """The first column of one of this thread's pieces."""
        threads = self.shape.threads * self.shape.cluster
        part, i = divmod(number, self._each) if isinstance(number, int) else divmod_const(self.b, number, self._each)
        return (self.passes.rows.lane + part * threads) * self.passes.shape.width + i * _PIECE

    def place(self, memory: Value, thread: Value, number: Value | int) -> Value:
        """Where a thread's piece is in shared memory."""
        return (thread + number * self.shape.workgroup) * _lanes(memory)

    def publish(self, memory: Value, number: int, value: Value) -> None:
        """Store one of this thread's pieces in shared memory."""
        type_ = Vector(element(memory.type), _lanes(memory))
        self.b.store(memory, self.place(memory, self.b.thread_id(), number), self.b.bitcast(value, type_))

    def read(self, memory: Value, at: Value) -> Value:
        """A piece that a thread of this workgroup has published."""
        return self.b.bitcast(self.b.load(memory, at, _lanes(memory)), Vector(self.passes.rows.work, _PIECE))

    def store(self, total: ColumnSums, column: Value, value: Value) -> None:
        at = total.start + self.b.cast(column, element(total.start.type))
        with self.b.if_(column < self.passes.length) if self.passes.shape.ragged else nullcontext():
            self.b.store(total.array.buffer, at, value, align=_PIECE)


def store_slot_sums(pieces: SumPieces) -> None:
    """Add up sums over the workgroup's slots, which share that work, and store them."""
    b, shape, rows = pieces.b, pieces.shape, pieces.passes.rows
    for total, memory in pieces.places:
        for number in range(pieces.count):
            pieces.publish(memory, number, pieces.get(total, number))
    b.barrier()
    lane = b.thread_id() - rows.slot * shape.threads
    for first in range(0, pieces.count, shape.slots):
        mine = rows.slot + first
        with b.if_(mine < pieces.count) if first + shape.slots > pieces.count else nullcontext():
            for total, memory in pieces.places:
                at = [pieces.place(memory, lane + slot * shape.threads, mine) for slot in range(shape.slots)]
                pieces.store(total, pieces.column(mine), fold(b, "add", [pieces.read(memory, i) for i in at]))


def store_cluster_sums(pieces: SumPieces) -> None:
    """Add up the sums of a cluster's two workgroups and store them: each takes half of the columns, and publishes its
    sums of the other half."""
    b, half = pieces.b, pieces.count // 2
    rank = pieces.passes.rows.group & 1
    upper = b.ne(rank, 0)
    for total, memory in pieces.places:
        for number in range(half):
            theirs = b.select(upper, pieces.get(total, number), pieces.get(total, half + number))
            pieces.publish(memory, number, theirs)
    b.cluster_barrier()
    # All loads come before any store: compilers cannot tell the memories apart, and would wait for each load.
    found = [
        [b.cluster_load(memory, pieces.place(memory, b.thread_id(), i), 1 - rank, _lanes(memory)) for i in range(half)]
        for _, memory in pieces.places
    ]
    for (total, _), received in zip(pieces.places, found, strict=True):
        for number, words in enumerate(received):
            mine = b.select(upper, pieces.get(total, half + number), pieces.get(total, number))
            column = b.select(upper, pieces.column(half + number), pieces.column(number))
            pieces.store(total, column, mine + b.bitcast(words, Vector(pieces.passes.rows.work, _PIECE)))


def _lanes(place: Value) -> int:
    """Elements of 16 bytes."""
    return 16 // element(place.type).bytes
