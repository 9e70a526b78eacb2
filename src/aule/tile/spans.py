"""Passes over rows: parts of them as kernels see them, and sums along them.

See `aule.tile.rows`, which says how rows lie over threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aule.ir import Value
from aule.ir.types import Vector, element, i32, u32
from aule.tile.early import Early
from aule.tile.math import LOG2E, fold, lowest
from aule.tile.rows import NEUTRAL, Columns, PerRow, RowArray, Rows, Source

if TYPE_CHECKING:
    from aule.tile.column_sums import ColumnSums

ColumnReads = Literal["kept", "held", "first", "late", "again"]
_LINE = 64
"""Bytes of a cache line."""


@dataclass(frozen=True)
class SpanShape:
    """How the columns of a row, or a part of them, are cut.

    Attributes
    ----------
    width : int
        Neighbouring columns that travel together.
    parts : int
        Of ``width`` columns, that a thread keeps in registers; 0 when each pass reads memory again.
    ragged : bool
        Where the row is kept in registers: the last part of some threads is behind the row's end.
    tail : int
        Where it is not: columns behind the last whole part.
    unroll : int
        Parts that a pass takes together: where the row is not kept, they are under way together.
    scratch : int
        Where it is not: columns of a row for which a thread has memory of its own; 0 when that would be too much.
    columns : str
        Where it is kept in registers: arrays of one number for each column are ``kept`` from before the first row;
        ``held`` from the start of each, as rows are; read ``late``, when a pass first wants them, or all but the
        ``first`` part; or ``again`` in each pass that does. Each spares registers, as compared with those before.
    packed : bool
        Where it is kept in registers, and its elements are narrower than what is computed in: it is so as they are, and
        each pass makes them wider again. Compilers would else keep the wide ones.
    again : bool
        Where it would be kept in registers: passes behind the first read it again, from the cache, but for what is
        parked in shared memory (`aule.tile.parked`).
    """

    width: int
    parts: int = 0
    ragged: bool = False
    tail: int = 0
    unroll: int = 4
    scratch: int = 0
    columns: ColumnReads = "held"
    packed: bool = False
    again: bool = False


@dataclass(frozen=True, eq=False)
class Derived:
    """What is computed from a part: once where rows are kept in registers, else once in each pass that asks for it.

    With ``costly`` the first pass leaves it in memory of the thread's own, where the span has such, or in registers.
    With ``narrow`` it is of the type of an array, and `Part.raw` has it as it is.
    """

    f: Callable[[Part], Value]
    costly: bool = False
    narrow: bool = False


@dataclass(frozen=True, eq=False)
class Product:
    """What is multiplied on its way into a sum: one operation does both."""

    x: Value
    y: Value


Term = Value | Product
"""What a sum is made of."""


class Group:
    """Parts of a row that follow each other and are visited together; ``made`` is for what they share.

    Attributes
    ----------
    col : Value
        The first column.
    count : int
        How many parts.
    """

    def __init__(self, col: Value, count: int) -> None:
        self.col, self.count = col, count
        self.made: dict[object, Any] = {}


class Part:
    """Some neighbouring columns of one row, as a kernel sees them: ``p[x]`` is what it needs of ``x`` there.

    Attributes
    ----------
    row : int
        Which of the thread's rows.
    col : Value
        The first column.
    group : Group or None
        What it is visited together with, and its place there, where those parts are neighbours.
    """

    def __init__(self, span: Span, row: int, col: Value, number: int | None, inside: Value | None, count: int) -> None:
        self.span, self.row, self.col = span, row, col
        self.group: tuple[Group, int] | None = None
        self.number, self.inside, self.count = number, inside, count
        self.made: dict[Derived, Value] = {}
        """What was derived from it in this pass."""

    def __getitem__(self, what: Source | Columns | PerRow | Derived) -> Value:
        """Columns of a row of an array, or of an array of columns, as numbers of the type that is computed in; what was
        derived from such; or the number of this row."""
        if isinstance(what, PerRow):
            return what.values[self.row]
        if isinstance(what, Derived):
            return self.span.derived(self, what)
        return self.span.rows.b.cast(self.raw(what), self.span.rows.work)

    def raw(self, what: Source | Columns | Derived) -> Value:
        """The same as numbers of the array's own type."""
        if isinstance(what, Derived):
            return self.span.narrow(self, what)
        return self.span.loaded(self, what)

    def columns(self) -> Value:
        """The number of each column."""
        b, elem = self.span.rows.b, element(self.col.type)
        return b.vector([b.const(i, elem) for i in range(self.span.shape.width)]) + self.col

    def store(self, to: Source, value: Value) -> None:
        """Store what belongs there; it is rounded to the array's type."""
        self.span.store(self, to, value)

    def kept(self, value: Value, otherwise: float) -> Value:
        """The value where there are columns, something else in lanes behind the row's end."""
        b = self.span.rows.b
        if self.inside is None:
            return value
        return b.select(self.inside, value, b.const(otherwise, element(value.type)))

    def kept_term(self, term: Term, otherwise: float) -> Term:
        """The same of a term of a sum; of a product, which is added, both factors become zero."""
        if isinstance(term, Product):
            return Product(self.kept(term.x, 0.0), self.kept(term.y, 0.0))
        return self.kept(term, otherwise)


class Span:
    """The columns of rows, or some of them.

    Parameters
    ----------
    length : Value
        How many columns: i32, or on CPUs i64, since LLVM cannot fold a sum that may wrap into an address.
    """

    def __init__(self, rows: Rows, shape: SpanShape, length: Value) -> None:
        self.rows, self.shape, self.length = rows, shape, length
        self.lane = rows.b.cast(rows.lane, element(length.type))
        self._held: dict[tuple[int, int, int, int], tuple[object, Value]] = {}
        self._scratch: dict[Derived, tuple[Value, int]] = {}
        self._passes = 0
        self._first: dict[Source | Derived, int] = {}
        """The pass that first had something."""
        self._fetched: tuple[Source, ...] = ()
        self._again = shape.columns == "again"
        self.early: Early | None = None
        """Where rows come from that are read ahead of their turn."""

    # -- passes --------------------------------------------------------------------------------------------------------

    def hold(self, *sources: Source | Columns) -> None:
        """Start to read whole rows, so that all loads are under way together, unless they have come early. On
        CPUs, which do not keep them, `each` fetches the rows that come next into the cache where it is not the first
        pass: it would be the next one's that waits for memory."""
        if self.rows.vectors:
            self._fetched += tuple(x for x in sources if isinstance(x, Source) and x.array.stride is None)
        early = self.early
        if self.shape.parts:
            for number in range(self.shape.parts):
                held = self.shape.columns in ("kept", "held") or (self.shape.columns == "first" and number == 0)
                for source in sources:
                    if held if isinstance(source, Columns) else early is None or not early.holds(source):
                        for part in self.held_parts(number):
                            part.raw(source)

    def sum(self, f: Callable[[Part], Term]) -> PerRow:
        """The sum of ``f`` over each row."""
        return self.sums(f)[0]

    def sums(self, *fs: Callable[[Part], Term]) -> list[PerRow]:
        """Several sums in one pass."""
        return self.rows.reduce("add", self.partials("add", lambda p: [f(p) for f in fs], len(fs)))

    def max(self, f: Callable[[Part], Value]) -> PerRow:
        """The largest of ``f`` in each row; of NaN nothing is said."""
        return self.rows.reduce("max", self.partials("max", lambda p: [f(p)], 1))[0]

    def largest_held(self, source: Source | Derived) -> PerRow:
        """The largest element that each thread has of its rows in registers, found before elements are made wider."""
        rows, b = self.rows, self.rows.b
        found: dict[int, Value] = {}

        def compare(parts: list[Part], place: int) -> None:
            for part in parts:
                value = part.kept(part.raw(source), NEUTRAL["max"])
                found[part.row] = b.max(found[part.row], value) if part.row in found else value

        self.walk(compare)
        ended = []
        for row in range(rows.shape.batch):
            lanes = b.unpack(found[row])
            while len(lanes) > 2:
                half = len(lanes) // 2
                lanes = b.unpack(b.max(b.vector(lanes[:half]), b.vector(lanes[half:])))
            ended.append(fold(b, "max", [b.cast(x, rows.work) for x in lanes]))
        return PerRow(tuple(ended))

    def log_sum(
        self, f: Callable[[Part], Value], *also: Callable[[Part], Value]
    ) -> tuple[PerRow, PerRow, list[PerRow]]:
        """The largest of ``f`` in each row, or the lowest finite number; the sum of ``exp(f - largest)``; and sums of
        other functions: in one pass, in which what was summed up is scaled anew with each step."""
        rows, b = self.rows, self.rows.b
        # A maximum for each lane on CPUs, for each thread on GPUs, where every exponential counts.
        lanes = self.shape.width if rows.vectors else 1
        zero = b.splat(b.const(0.0, rows.work), lanes)
        largest = [b.var(b.splat(b.const(lowest(rows.work), rows.work), lanes)) for _ in range(rows.shape.batch)]
        totals = [[b.var(zero) for _ in range(1 + len(also))] for _ in range(rows.shape.batch)]

        def combined(kind: str, values: list[Value]) -> Value:
            return fold(b, kind, values if rows.vectors else [rows.combine(kind, x) for x in values])

        def add(places: list[list[Part]]) -> None:
            for row, (high, (total, *others)) in enumerate(zip(largest, totals, strict=True)):
                values = [parts[row].kept(f(parts[row]), float("-inf")) for parts in places]
                new = b.max(high.value, combined("max", values))
                powers = [b.exp2((x - new) * LOG2E) for x in values]
                total.value = total.value * b.exp2((high.value - new) * LOG2E) + combined("add", powers)
                high.value = new
                for other, g in zip(others, also, strict=True):
                    found = [parts[row].kept(g(parts[row]), 0.0) for parts in places]
                    other.value = other.value + combined("add", found)

        self._walk_steps(add)
        most = rows.reduce("max", [PerRow(tuple(rows.combine("max", high.value) for high in largest))])[0]
        for (total, *_), high, m in zip(totals, largest, most.values, strict=True):
            total.value = total.value * b.exp2((high.value - m) * LOG2E)
        ended = [PerRow(tuple(rows.combine("add", row[i].value) for row in totals)) for i in range(1 + len(also))]
        first, *rest = rows.reduce("add", ended)
        return most, first, rest

    def dot_of_pairs(self, x: Source | Derived, y: Source) -> PerRow:
        """The sum of products of two arrays of bf16, by an instruction for pairs, which need not be made wider."""
        rows, b = self.rows, self.rows.b
        pairs = Vector(u32, self.shape.width // 2)
        zero = b.splat(b.const(0.0, rows.work), pairs.lanes)
        totals = [[b.var(zero) for _ in range(self.shape.unroll)] for _ in range(rows.shape.batch)]

        def add(parts: list[Part], place: int) -> None:
            for part in parts:
                total = totals[part.row][place]
                left, right = (b.bitcast(part.raw(source), pairs) for source in (x, y))
                total.value = b.dot_pairs(left, right, total.value)

        self.walk(add)
        ended = [rows.combine("add", fold(b, "add", [x.value for x in row])) for row in totals]
        return rows.reduce("add", [PerRow(tuple(ended))])[0]

    def partials(self, kind: str, f: Callable[[Part], Sequence[Term]], count: int) -> list[PerRow]:
        """What each thread has of ``count`` results in each row, for `Rows.reduce`."""
        rows, b = self.rows, self.rows.b
        # On CPUs sums are vectors, and several, since an addition waits for the one before; on GPUs lanes are added up
        # at once, since they would take registers.
        neutral = b.splat(b.const(NEUTRAL[kind], rows.work), self.shape.width if rows.vectors else 1)
        chains = self.shape.unroll if rows.vectors and rows.shape.batch == 1 else 1
        totals = [[[b.var(neutral) for _ in range(chains)] for _ in range(count)] for _ in range(rows.shape.batch)]

        def add(parts: list[Part], chain: int) -> None:
            for part in parts:
                for total, x in zip(totals[part.row], f(part), strict=True):
                    variable = total[chain % chains]
                    variable.value = self._combined(kind, variable.value, part.kept_term(x, NEUTRAL[kind]))

        self.walk(add)
        ended = [
            [rows.combine(kind, fold(b, kind, [x.value for x in total])) for total in row_totals]
            for row_totals in totals
        ]
        return [PerRow(tuple(row[i] for row in ended)) for i in range(count)]

    def _combined(self, kind: str, total: Value, term: Term) -> Value:
        """A total with one more term: on CPUs vectors, on GPUs the sum of the term's lanes."""
        rows, b = self.rows, self.rows.b
        if not isinstance(term, Product):
            return b.binary(kind, total, term if rows.vectors else rows.combine(kind, term))
        if rows.vectors or self.shape.width == 1:
            return b.fma(term.x, term.y, total)
        # Two chains, since an addition waits for the one before.
        pairs = list(zip(b.unpack(term.x), b.unpack(term.y), strict=True))
        other = b.binary("mul", *pairs[1])
        for i, (x, y) in enumerate(pairs):
            if i % 2 == 0:
                total = b.fma(x, y, total)
            elif i > 1:
                other = b.fma(x, y, other)
        return total + other

    def each(self, f: Callable[[Part], Sequence[Term] | None], sums: Sequence[ColumnSums] = ()) -> None:
        """Visit every part; what ``f`` returns is added to the sums of its columns."""

        first_pass = self._passes == 0

        def visit(parts: list[Part], place: int) -> None:
            if not first_pass:
                self._fetch_next(parts, place)
            found = [f(part) or () for part in parts]
            for i, total in enumerate(sums):
                total.add(parts, [terms[i] for terms in found])

        self.walk(visit)

    def _fetch_next(self, parts: list[Part], place: int) -> None:
        """Fetch what the thread's next rows have at a place into the cache, by whole lines."""
        rows, b = self.rows, self.rows.b
        for part in parts:
            for source in self._fetched:
                line = max(_LINE // element(source.array.buffer.type).bytes // self.shape.width, 1)
                if place % line == 0:
                    start = source.array.start(rows.numbers[part.row] + rows.shape.batch)
                    b.prefetch(source.array.buffer, start + b.cast(part.col, element(start.type)))

    def walk(self, visit: Callable[[list[Part], int], None]) -> None:
        """Call ``visit`` with the parts of all rows at each place, and the place's number within a step."""

        def each(places: list[list[Part]]) -> None:
            for i, parts in enumerate(places):
                visit(parts, i)

        self._walk_steps(each)

    def _walk_steps(self, visit: Callable[[list[list[Part]]], None]) -> None:
        """The same, with all the places of a step together."""
        b, shape = self.rows.b, self.shape
        self._passes += 1
        if shape.parts:
            for first in range(0, shape.parts, shape.unroll):
                last = min(first + shape.unroll, shape.parts)
                visit([self.held_parts(number) for number in range(first, last)])
            return
        step = self.rows.shape.threads * shape.width
        start = self.lane * shape.width
        whole = self.length - shape.tail if shape.tail else self.length
        if shape.unroll > 1:
            # As often for all threads, and not once more for those whose places are all there: PoCL 3.1 would take the
            # end of one thread's loop for that of all.
            far = step * shape.unroll
            rounds = whole // far * far
            with b.loop(start, rounds, far, name="col") as col:
                groups = [Group(col, shape.unroll) for _ in range(self.rows.shape.batch)]
                places = [self._parts(col + i * step, None, None, shape.width) for i in range(shape.unroll)]
                for i, parts in enumerate(places):
                    for part, group in zip(parts, groups, strict=True):
                        part.group = (group, i) if self.rows.shape.threads == 1 else None
                visit(places)
            start = start + rounds
        with b.loop(start, whole, step, name="col") as col:
            visit([self._parts(col, None, None, shape.width)])
        if shape.tail:
            there = b.vector([b.const(i, i32) for i in range(shape.width)]) < shape.tail
            visit([self._parts(whole, None, there, shape.tail)])

    def held_parts(self, number: int) -> list[Part]:
        """The part of each row that has this number, where a thread has some."""
        shape = self.shape
        threads = self.rows.shape.threads * self.rows.shape.cluster
        col = (self.lane + number * threads) * shape.width
        inside = col < self.length if shape.ragged and number == shape.parts - 1 else None
        return self._parts(col, number, inside, shape.width)

    def _parts(self, col: Value, number: int | None, inside: Value | None, count: int) -> list[Part]:
        return [Part(self, row, col, number, inside, count) for row in range(self.rows.shape.batch)]

    # -- memory --------------------------------------------------------------------------------------------------------

    def loaded(self, part: Part, what: Source | Columns) -> Value:
        """Elements of an array at a part; once, where rows are kept in registers."""
        early = self.early
        if isinstance(what, Columns):
            return self._once(part, -1, what, lambda: self._columns(part, what), self._passes * self._again)
        if early is not None and early.holds(what):
            return self._once(part, part.row, what, lambda: early.read(part, what), self._passes)
        if self.reads_again(part):
            return self._once(part, part.row, what, lambda: self.read_again(part, what), self._passes)
        return self.packed(part, what, lambda: self.load(part, what.array, what.starts[part.row]))

    def reads_again(self, part: Part) -> bool:
        """Whether this pass is to `read_again` what an earlier one has read."""
        return self.shape.again and part.number is not None and self._passes > 1

    def read_again(self, part: Part, source: Source) -> Value:
        """A part of a row, from memory once more, as far as compilers know from elsewhere."""
        start, b = source.starts[part.row], self.rows.b
        return self.load(part, source.array, start + b.cast(self._zero(), element(start.type)))

    def _zero(self) -> Value:
        """0, which no compiler knows."""
        return self.rows.b.min(self.rows.numbers[0], 0)

    def narrow(self, part: Part, what: Derived) -> Value:
        """What was derived, as numbers of an array's type."""
        if part.number is not None:
            return self.packed(part, what, lambda: what.f(part))
        if what not in part.made:
            part.made[what] = what.f(part)
        return part.made[what]

    def packed(self, part: Part, what: Source | Derived, make: Callable[[], Value]) -> Value:
        """Elements of a part, once; where they are to stay narrow, others in each pass as far as compilers know."""
        raw = self._once(part, part.row, what, make)
        first = self._first.setdefault(what, max(self._passes, 1))
        if not self.shape.packed or part.number is None or self._passes <= first:
            return raw
        return self._once(part, part.row, what, lambda: self._unknown(raw), self._passes)

    def _unknown(self, raw: Value) -> Value:
        """The same elements, with 0 added to their bits that no compiler knows."""
        b = self.rows.b
        words = Vector(u32, element(raw.type).bytes * self.shape.width // 4)
        zero = b.cast(b.min(self.rows.count, 0), u32)
        return b.bitcast(b.bitcast(raw, words) ^ zero, Vector(element(raw.type), self.shape.width))

    def _columns(self, part: Part, what: Columns) -> Value:
        """Elements of an array of columns at a part."""
        start, rows = what.start, self.rows
        if self._again and rows.shape.loops:
            # NVIDIA's compiler would else read them before the loop and keep them.
            start = start + rows.b.cast(self._zero(), element(start.type))
        return self.load(part, what.array, start)

    def derived(self, part: Part, what: Derived) -> Value:
        """What was derived from a part."""
        if what.narrow:
            return self.rows.b.cast(self.narrow(part, what), self.rows.work)
        if part.number is not None:
            # Made of what each pass reads again, it is made again.
            remade = (self.shape.packed or self.shape.again) and not what.costly
            remade = remade or (self.early is not None and self.early.again)
            number = self._passes if remade else 0
            return self._once(part, part.row, what, lambda: what.f(part), number)
        if what not in part.made:
            part.made[what] = self._scratched(part, what) if what.costly and self.shape.scratch else what.f(part)
        return part.made[what]

    def _scratched(self, part: Part, what: Derived) -> Value:
        """The value by way of memory: the pass that asks first leaves it there, later ones read it."""
        rows, b = self.rows, self.rows.b
        if what not in self._scratch:
            name = f"scratch_{len(self._scratch)}"
            memory = b.shared(name, rows.work, rows.shape.batch * (self.shape.scratch + self.shape.width))
            self._scratch[what] = (memory, self._passes)
        memory, first = self._scratch[what]
        at = part.col + part.row * (self.shape.scratch + self.shape.width)
        if first != self._passes:
            return b.load(memory, at, self.shape.width, align=1)
        value = what.f(part)
        b.store(memory, at, value, align=1)
        return value

    def _once(self, part: Part, row: int, what: object, make: Callable[[], Value], number: int = 0) -> Value:
        """What is made for a part, the first time: in all passes, or in the one of this number."""
        if part.number is None:
            return make()
        key = (id(what), row, part.number, number)
        if key not in self._held:
            self._held[key] = (what, make())  # with the array, whose identity is the key
        return self._held[key][1]

    def load(self, part: Part, array: RowArray, start: Value) -> Value:
        """Elements of the row that begins at ``start``."""
        return self.load_run(array, start, self.safe_column(part), part.count)

    def safe_column(self, part: Part) -> Value:
        """A part's first column, or an existing one where it is behind the end: whoever uses it knows that."""
        if part.number is None or part.inside is None:
            return part.col
        return self.rows.b.min(part.col, self.length - self.shape.width)

    def load_run(self, array: RowArray, start: Value, col: Value, count: int) -> Value:
        """``count`` columns from ``col`` on as a vector of the span's width, with zeros behind them."""
        b, width = self.rows.b, self.shape.width
        index = element(start.type)
        if count == width and array.stride is None:
            return b.load(array.buffer, start + b.cast(col, index), width, align=self._alignment(array))
        values: list[Value] = []
        while len(values) < count:
            at = b.cast(col + len(values), index)
            if array.stride is not None:
                values.append(b.load(array.buffer, start + at * array.stride))
                continue
            run = 1 << ((count - len(values)).bit_length() - 1)
            values += b.unpack(b.load(array.buffer, start + at, run, align=1))
        zeros = [b.const(0, element(array.buffer.type))] * (width - count)
        return b.vector([*values, *zeros])

    def _alignment(self, array: RowArray) -> int:
        """Elements that divide where a part starts: no more than 16 bytes of them, which is what memory is sure of."""
        return min(self.shape.width, 16 // element(array.buffer.type).bytes) if array.aligned else 1

    @contextmanager
    def where_there(self, part: Part) -> Iterator[None]:
        """What is stored in here is stored where the row and the columns exist."""
        there = self.rows.exists[part.row]
        if part.number is not None and part.inside is not None:
            there = part.inside if there is None else there & part.inside
        if there is None:
            yield
        else:
            with self.rows.b.if_(there):
                yield

    def store(self, part: Part, to: Source, value: Value) -> None:
        """Elements of the thread's row, where the row and the columns exist."""
        with self.where_there(part):
            self.store_run(to.array, to.starts[part.row], part.col, value, part.count)

    def store_run(self, array: RowArray, start: Value, col: Value, value: Value, count: int) -> None:
        """The first ``count`` lanes of a vector to the columns from ``col`` on."""
        b = self.rows.b
        index, value = element(start.type), b.cast(value, element(array.buffer.type))
        if array.stride is not None:
            for i, x in enumerate(b.unpack(value)[:count]):
                b.store(array.buffer, start + b.cast(col + i, index) * array.stride, x)
            return
        if count == self.shape.width:
            store = b.stream if array.stream else b.store
            store(array.buffer, start + b.cast(col, index), value, align=self._alignment(array))
            return
        done = 0
        while done < count:
            run = 1 << ((count - done).bit_length() - 1)
            piece = b.permute(value, None, tuple(range(done, done + run)))
            b.store(array.buffer, start + b.cast(col + done, index), piece, align=1)
            done += run
