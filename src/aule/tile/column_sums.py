"""Sums of columns over rows: what the gradients of weights and biases are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal

from aule.ir import Builder, Value, Var
from aule.ir.types import Vector, element, i32
from aule.tile.math import fold, posted_words
from aule.tile.matrix import divmod_const
from aule.tile.rows import RowArray
from aule.tile.short_floats import RUN, shortened
from aule.tile.spans import Part, Product, Span, Term

_PIECE = 4
"""Sums of 16 bytes."""
SumsLayout = Literal["whole", "halves", "posted", "short"]
"""How a row of partial sums lies in memory: in the order of columns; or, of parts of eight columns, all first fours and
then all second fours; the same as words that others wait for (`aule.ops.column_trail`); or `aule.tile.short_floats`,
all upper halves and then what follows those. Neighbouring threads store 16 bytes at a time, and only in the last three
ways does one come right behind the other: memory takes 32 at once."""

_FOLDED = 16
"""Partial sums that one thread adds up at a time."""
MIN_LANES = 8
"""For `fold_threads`, where each thread has left up to eight columns: so there are enough for one column each."""


class ColumnSums:
    """Sums of each column over all rows of a workgroup: in registers where rows are, else in the memory of the result.

    Each workgroup leaves a row of partial sums; another kernel adds those up (`aule.ops.column_sum`).

    Parameters
    ----------
    array : RowArray
        Of the type that is computed in, or of words where sums are ``posted`` or ``short``; rows are workgroups.
    layout : str
        See `SumsLayout`; other than ``whole`` where they are in registers, in parts of eight columns.
    """

    def __init__(self, span: Span, array: RowArray, layout: SumsLayout = "whole") -> None:
        self.span, rows = span, span.rows
        self.layout = layout
        assert layout == "whole" or (span.shape.parts and span.shape.width == RUN), (layout, span.shape)
        b, width = rows.b, span.shape.width
        self.array = array
        gather = rows.shape.gather
        self.start = array.start(rows.group // gather if gather > 1 else rows.group)
        self.zero = b.splat(b.const(0.0, rows.work), width)
        self.sums: list[Var] = [b.var(self.zero) for _ in range(span.shape.parts)]
        if not span.shape.parts:
            self._visit(lambda part: self.zero)

    def add(self, parts: list[Part], terms: Sequence[Term]) -> None:
        """Add what the rows have at a place; rows that do not exist add nothing."""
        rows, b = self.span.rows, self.span.rows.b
        number = parts[0].number
        total = self.span.load(parts[0], self.array, self.start) if number is None else self.sums[number].value

        def counted(exists: Value | None, value: Value) -> Value:
            return value if exists is None else b.select(exists, value, self.zero)

        values = []
        for exists, term in zip(rows.exists, terms, strict=True):
            if isinstance(term, Product):
                total = b.fma(counted(exists, term.x), counted(exists, term.y), total)
            else:
                values.append(counted(exists, term))
        total = fold(b, "add", [total, *values])
        if number is None:
            self._store(parts[0], total)
        else:
            self.sums[number].value = total

    def finish(self) -> None:
        """Store what registers hold, added up over the workgroup's slots."""
        if not self.sums:
            return
        rows, b, width = self.span.rows, self.span.rows.b, self.span.shape.width
        slots = rows.shape.slots
        if slots == 1:
            self._visit(lambda part: self.sums[part.number or 0].value)
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
            self._visit(lambda part: self.sums[part.number or 0].value)

    def _visit(self, f: Callable[[Part], Value]) -> None:
        b = self.span.rows.b

        def store(parts: list[Part], _: int) -> None:
            part = parts[0]
            if part.number is not None and part.inside is not None:
                with b.if_(part.inside):
                    self._store(part, f(part))
            else:
                self._store(part, f(part))

        self.span.walk(store)

    def _store(self, part: Part, value: Value) -> None:
        if self.layout == "whole":
            self.span.store_run(self.array, self.start, part.col, value, part.count)
            return
        b, values, buffer = self.span.rows.b, self.span.rows.b.unpack(value), self.array.buffer
        index = element(self.start.type)
        col, half = b.cast(part.col, index), b.cast(self.span.length, index) >> 1
        first, second = self.start + (col >> 1), self.start + half
        if self.layout == "halves":
            b.store(buffer, first, b.vector(values[:_PIECE]), align=_PIECE)
            b.store(buffer, second + (col >> 1), b.vector(values[_PIECE:]), align=_PIECE)
        elif self.layout == "posted":
            words = posted_words(b, values)
            b.post(buffer, first, b.vector(words[:_PIECE]))
            b.post(buffer, second + (col >> 1), b.vector(words[_PIECE:]))
        else:
            upper, lower = shortened(b, values)
            b.store(buffer, first, upper, align=4)
            b.store(buffer, second + (col >> 2), lower, align=2)


def column_in_halves(b: Builder, place: Value, length: Value) -> Value:
    """The column whose sum is at a place of a row in halves."""
    half = length >> 1
    second = place >= half
    place = b.select(second, place - half, place)
    return (place >> 2 << 3) + (place & 3) + b.select(second, b.const(4, i32), b.const(0, i32))


def fold_threads(b: Builder, memory: Value, columns: int, lanes: int) -> Value:
    """The sum of each of ``columns`` over what ``lanes`` have in shared memory, in rows of columns; for as many first
    threads, of at least ``columns`` and one for each ``_FOLDED`` numbers."""
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
    """Store vectors that follow each other, of which none need be aligned, to the one of some arrays that has this
    number."""
    for i, out in enumerate(outs):
        with b.if_(b.eq(number, i)):
            for j, value in enumerate(values):
                width = value.type.lanes if isinstance(value.type, Vector) else 1
                b.store(out, at + j * width, b.cast(value, element(out.type)), align=1)


def has_pieces(span: Span) -> bool:
    """Whether what registers hold can travel so: whole `Pieces`, none of them behind the end of a row."""
    return span.rows.work.bytes == 4 and span.shape.width % _PIECE == 0 and not span.shape.ragged


class Pieces:
    """What registers hold of some sums, as pieces of 16 bytes on their way through shared memory.

    Parameters
    ----------
    memory : sequence of Value
        Shared memory for each of the sums: of pieces of which a thread has every n-th of n threads, and has used no
        other. So nobody has to be waited for before it is written.
    """

    def __init__(self, sums: Sequence[ColumnSums], memory: Sequence[Value]) -> None:
        self.span = sums[0].span
        self.b, self.shape = self.span.rows.b, self.span.rows.shape
        self.places = list(zip(sums, memory[: len(sums)], strict=True))
        self._each = self.span.shape.width // _PIECE
        """Pieces of a part."""
        self.count = self.span.shape.parts * self._each
        """Of a thread."""

    def get(self, total: ColumnSums, number: int) -> Value:
        """One of this thread's."""
        part, i = divmod(number, self._each)
        return self.b.vector(self.b.unpack(total.sums[part].value)[_PIECE * i : _PIECE * (i + 1)])

    def column(self, number: Value | int) -> Value:
        """Its first column."""
        threads = self.shape.threads * self.shape.cluster
        if isinstance(number, int):
            part, i = divmod(number, self._each)
            return (self.span.rows.lane + part * threads) * self.span.shape.width + i * _PIECE
        which, rest = divmod_const(self.b, number, self._each)
        return (self.span.rows.lane + which * threads) * self.span.shape.width + rest * _PIECE

    def place(self, memory: Value, thread: Value, number: Value | int) -> Value:
        """Where a thread's piece is."""
        return (thread + number * self.shape.workgroup) * _lanes(memory)

    def leave(self, memory: Value, number: int, value: Value) -> None:
        """Put a piece where this thread's are."""
        type_ = Vector(element(memory.type), _lanes(memory))
        self.b.store(memory, self.place(memory, self.b.thread_id(), number), self.b.bitcast(value, type_))

    def read(self, memory: Value, at: Value) -> Value:
        """A piece that a thread of this workgroup has left."""
        return self.b.bitcast(self.b.load(memory, at, _lanes(memory)), Vector(self.span.rows.work, _PIECE))

    def store(self, total: ColumnSums, column: Value, value: Value) -> None:
        """Store a piece of the sums."""
        at = total.start + self.b.cast(column, element(total.start.type))
        self.b.store(total.array.buffer, at, value, align=_PIECE)


def put_together(pieces: Pieces) -> None:
    """Store what registers hold, added up over the workgroup's slots, which share that work."""
    b, shape, rows = pieces.b, pieces.shape, pieces.span.rows
    for total, memory in pieces.places:
        for number in range(pieces.count):
            pieces.leave(memory, number, pieces.get(total, number))
    b.barrier()
    lane = b.thread_id() - rows.slot * shape.threads
    for first in range(0, pieces.count, shape.slots):
        mine = rows.slot + first
        with b.if_(mine < pieces.count) if first + shape.slots > pieces.count else nullcontext():
            for total, memory in pieces.places:
                at = [pieces.place(memory, lane + slot * shape.threads, mine) for slot in range(shape.slots)]
                pieces.store(total, pieces.column(mine), fold(b, "add", [pieces.read(memory, i) for i in at]))


def gather(pieces: Pieces) -> None:
    """Store what registers of a cluster's two workgroups hold, added up: each has half of all columns, and leaves its
    sums of the other half where the other finds them."""
    b, half = pieces.b, pieces.count // 2
    rank = pieces.span.rows.group & 1
    upper = b.ne(rank, 0)
    for total, memory in pieces.places:
        for number in range(half):
            theirs = b.select(upper, pieces.get(total, number), pieces.get(total, half + number))
            pieces.leave(memory, number, theirs)
    b.cluster_barrier()
    # All are sent for before any is stored: no compiler knows that these are different memory, and would wait for each.
    found = [
        [b.cluster_load(memory, pieces.place(memory, b.thread_id(), i), 1 - rank, _lanes(memory)) for i in range(half)]
        for _, memory in pieces.places
    ]
    for (total, _), sent in zip(pieces.places, found, strict=True):
        for number, words in enumerate(sent):
            mine = b.select(upper, pieces.get(total, half + number), pieces.get(total, number))
            column = b.select(upper, pieces.column(half + number), pieces.column(number))
            pieces.store(total, column, mine + b.bitcast(words, Vector(pieces.span.rows.work, _PIECE)))


def _lanes(place: Value) -> int:
    """Elements of 16 bytes."""
    return 16 // element(place.type).bytes
