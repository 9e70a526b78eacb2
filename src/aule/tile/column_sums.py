"""Sums of columns over rows: what the gradients of weights and biases are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aule.ir import Value, Var
from aule.ir.types import Vector, element
from aule.tile.math import fold
from aule.tile.rows import RowArray
from aule.tile.spans import Part, Product, Span, Term


class ColumnSums:
    """Sums of each column over all rows of a workgroup: in registers where rows are, else in the memory of the result.

    Each workgroup leaves a row of partial sums; another kernel adds those up (`aule.ops.column_sum`).

    Parameters
    ----------
    array : RowArray
        Of the type that is computed in; rows are workgroups.
    """

    def __init__(self, span: Span, array: RowArray) -> None:
        self.span, rows = span, span.rows
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
        self.span.store_run(self.array, self.start, part.col, value, part.count)


def gather(sums: Sequence[ColumnSums], memory: Sequence[Value]) -> None:
    """Store what registers of a cluster's two workgroups hold, added up: each has half of all columns, and leaves its
    sums of the other half where the other finds them.

    Parameters
    ----------
    memory : sequence of Value
        Shared memory for each of them: of pieces of 16 bytes, of which a thread has every n-th of n threads, and has
        used no other. So nobody has to be waited for.
    """
    span = sums[0].span
    rows, b = span.rows, span.rows.b
    shape, threads = rows.shape, rows.shape.workgroup
    four, pieces = Vector(rows.work, 4), span.shape.width // 4
    half = span.shape.parts * pieces // 2
    rank = rows.group & 1
    upper = b.ne(rank, 0)

    def piece(total: ColumnSums, number: int) -> Value:
        part, i = divmod(number, pieces)
        return b.vector(b.unpack(total.sums[part].value)[4 * i : 4 * i + 4])

    def at(place: Value, number: int) -> Value:
        """Where this thread's piece of a number is."""
        return (b.thread_id() + number * threads) * _lanes(place)

    def column(number: int) -> Value:
        return (rows.lane + number // pieces * shape.threads) * span.shape.width + number % pieces * 4

    places = list(zip(sums, memory[: len(sums)], strict=True))
    for total, place in places:
        type_ = Vector(element(place.type), _lanes(place))
        for number in range(half):
            theirs = b.select(upper, piece(total, number), piece(total, half + number))
            b.store(place, at(place, number), b.bitcast(theirs, type_))
    b.cluster_barrier()
    # All are sent for before any is stored: no compiler knows that these are different memory, and would wait for each.
    found = [
        [b.bitcast(b.cluster_load(place, at(place, i), 1 - rank, _lanes(place)), four) for i in range(half)]
        for _, place in places
    ]
    for (total, _), pieces_of in zip(places, found, strict=True):
        for number, theirs in enumerate(pieces_of):
            value = b.select(upper, piece(total, half + number), piece(total, number)) + theirs
            col = b.select(upper, column(half + number), column(number))
            b.store(total.array.buffer, total.start + b.cast(col, element(total.start.type)), value, align=4)


def _lanes(place: Value) -> int:
    """Elements of 16 bytes."""
    return 16 // element(place.type).bytes
