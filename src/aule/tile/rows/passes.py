"""Passes over the columns of rows: reductions along them, and loads and stores of their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aule.ir import Value
from aule.ir.types import Vector, element, i32, u32
from aule.tile.common.math import LOG2E, fold, lowest
from aule.tile.rows.engine import Rows
from aule.tile.rows.parts import Columns, Derived, Part, PartGroup, PerRow, Product, RowArray, Source, Term
from aule.tile.rows.prefetch import RowPrefetch
from aule.tile.rows.reductions import NEUTRAL
from aule.tile.rows.shape import PassShape

if TYPE_CHECKING:
    from aule.tile.rows.column_sums import ColumnSums

_LINE = 64
"""Bytes of a cache line."""


class Passes:
    """Passes over the columns of rows, or over a range of them.

    ``length`` is their number: i32, or on CPUs i64, since compilers cannot fold a sum that may wrap into an address.
    """

    def __init__(self, rows: Rows, shape: PassShape, length: Value) -> None:
        self.rows, self.shape, self.length = rows, shape, length
        self.lane = rows.b.cast(rows.lane, element(length.type))
        self.prefetch: RowPrefetch | None = None
        """How rows are prefetched, if they are."""
        self.kernel_masks = False
        """The kernel masks columns past a row's end itself."""
        self._cache: dict[tuple[int, int, int, int], tuple[object, Value]] = {}
        self._scratch: dict[Derived, tuple[Value, int]] = {}
        self._passes = 0
        """Passes so far: the number of the current one."""
        self._first_pass: dict[Source | Derived, int] = {}
        """The pass that first read an array or derived a value."""
        self._next_rows: tuple[Source, ...] = ()

    def preload(self, *sources: Source | Columns) -> None:
        """Start to load rows into registers, so that all loads overlap, unless they are prefetched.

        CPUs keep no rows in registers. There, a second or later `each` fetches the next rows into the cache, which the
        next row's first pass would otherwise wait for.
        """
        if self.rows.vectors:
            self._next_rows += tuple(x for x in sources if isinstance(x, Source) and x.array.stride is None)
        prefetch, when = self.prefetch, self.shape.columns
        for number in range(self.shape.parts):
            columns_now = when in ("resident", "row_start") or (when == "first_part" and number == 0)
            for source in sources:
                if columns_now if isinstance(source, Columns) else prefetch is None or not prefetch.covers(source):
                    for part in self.register_parts(number):
                        part.raw(source)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def sum(self, f: Callable[[Part], Term]) -> PerRow:
        """Sum ``f`` over each row."""
        return self.sums(f)[0]

    def sums(self, *fs: Callable[[Part], Term]) -> list[PerRow]:
        """Sum several functions over each row, in one pass."""
        return self.rows.reduce("add", self.partials("add", lambda p: [f(p) for f in fs], len(fs)))

    def thread_max(self, source: Source | Derived) -> PerRow:
        """The maximum of each thread's elements in registers, compared before they are widened."""
        rows, b = self.rows, self.rows.b
        found: dict[int, Value] = {}

        def compare(parts: list[Part], place: int) -> None:
            for part in parts:
                value = part.masked(part.raw(source), NEUTRAL["max"])
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

    def exp_sums(
        self, f: Callable[[Part], Value], *others: Callable[[Part], Value]
    ) -> tuple[PerRow, PerRow, list[PerRow]]:
        """The maximum m of ``f`` in each row, or the lowest finite number; the sum of ``exp(f - m)``; and sums of
        ``others``: in one pass, which rescales the sum whenever the maximum grows."""
        rows, b = self.rows, self.rows.b
        # A maximum for each lane on CPUs; one for each thread on GPUs, where exponentials are the bottleneck.
        lanes = self.shape.width if rows.vectors else 1
        zero = b.splat(b.const(0.0, rows.work), lanes)
        largest = [b.var(b.splat(b.const(lowest(rows.work), rows.work), lanes)) for _ in range(rows.shape.batch)]
        totals = [[b.var(zero) for _ in range(1 + len(others))] for _ in range(rows.shape.batch)]

        def combined(kind: str, values: list[Value]) -> Value:
            return fold(b, kind, values if rows.vectors else [rows.combine(kind, x) for x in values])

        def add(places: list[list[Part]]) -> None:
            for row, (m, (total, *rest)) in enumerate(zip(largest, totals, strict=True)):
                values = [parts[row].masked(f(parts[row]), float("-inf")) for parts in places]
                new = b.max(m.value, combined("max", values))
                powers = [b.exp2((x - new) * LOG2E) for x in values]
                total.value = total.value * b.exp2((m.value - new) * LOG2E) + combined("add", powers)
                m.value = new
                for other, g in zip(rest, others, strict=True):
                    found = [parts[row].masked(g(parts[row]), 0.0) for parts in places]
                    other.value = other.value + combined("add", found)

        self._walk_steps(add)
        row_max = rows.reduce("max", [PerRow(tuple(rows.combine("max", m.value) for m in largest))])[0]
        for (total, *_), old, m in zip(totals, largest, row_max.values, strict=True):
            total.value = total.value * b.exp2((old.value - m) * LOG2E)
        ended = [PerRow(tuple(rows.combine("add", row[i].value) for row in totals)) for i in range(1 + len(others))]
        first, *rest = rows.reduce("add", ended)
        return row_max, first, rest

    def dot_of_pairs(self, x: Source | Derived, y: Source) -> PerRow:
        """The dot product of two arrays of bf16, by an instruction for pairs, which need not be widened."""
        rows, b = self.rows, self.rows.b
        pairs = Vector(u32, self.shape.width // 2)
        zero = b.splat(b.const(0.0, rows.work), pairs.lanes)
        totals = [[b.var(zero) for _ in range(self.shape.unroll)] for _ in range(rows.shape.batch)]

        def add(parts: list[Part], place: int) -> None:
            for part in parts:
                total = totals[part.row][place]
                left, right = (b.bitcast(part.masked(part.raw(source), 0.0), pairs) for source in (x, y))
                total.value = b.dot_pairs(left, right, total.value)

        self.walk(add)
        ended = [rows.combine("add", fold(b, "add", [x.value for x in row])) for row in totals]
        return rows.reduce("add", [PerRow(tuple(ended))])[0]

    def partials(self, kind: str, f: Callable[[Part], Sequence[Term]], count: int) -> list[PerRow]:
        """Each thread's share of ``count`` results per row, for `Rows.reduce`."""
        rows, b = self.rows, self.rows.b
        # CPUs sum vectors, in several chains, since an addition waits for the one before; GPUs reduce the lanes at
        # once, since vectors of sums would take registers.
        neutral = b.splat(b.const(NEUTRAL[kind], rows.work), self.shape.width if rows.vectors else 1)
        chains = self.shape.unroll if rows.vectors and rows.shape.batch == 1 else 1
        totals = [[[b.var(neutral) for _ in range(chains)] for _ in range(count)] for _ in range(rows.shape.batch)]

        def add(parts: list[Part], chain: int) -> None:
            for part in parts:
                for total, x in zip(totals[part.row], f(part), strict=True):
                    variable = total[chain % chains]
                    variable.value = self._accumulate(kind, variable.value, part.masked_term(x, NEUTRAL[kind]))

        self.walk(add)
        ended = [
            [rows.combine(kind, fold(b, kind, [x.value for x in total])) for total in row_totals]
            for row_totals in totals
        ]
        return [PerRow(tuple(row[i] for row in ended)) for i in range(count)]

    def _accumulate(self, kind: str, total: Value, term: Term) -> Value:
        """Add a term to a total: on CPUs as vectors, on GPUs with the term's lanes reduced."""
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

    # -- walks over parts ----------------------------------------------------------------------------------------------

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
        """Fetch the same columns of the thread's next rows into the cache, once per line."""
        rows, b = self.rows, self.rows.b
        for part in parts:
            for source in self._next_rows:
                line = max(_LINE // element(source.array.buffer.type).bytes // self.shape.width, 1)
                if place % line == 0:
                    start = source.array.start(rows.numbers[part.row] + rows.shape.batch)
                    b.prefetch(source.array.buffer, start + b.cast(part.col, element(start.type)))

    def walk(self, visit: Callable[[list[Part], int], None]) -> None:
        """Call ``visit`` with the parts of all rows at the same columns, and their place within a step."""

        def each(places: list[list[Part]]) -> None:
            for i, parts in enumerate(places):
                visit(parts, i)

        self._walk_steps(each)

    def _walk_steps(self, visit: Callable[[list[list[Part]]], None]) -> None:
        """Call ``visit`` with the parts of all rows, for all places of a step together."""
        b, shape = self.rows.b, self.shape
        self._passes += 1
        if shape.parts:
            for first in range(0, shape.parts, shape.unroll):
                last = min(first + shape.unroll, shape.parts)
                visit([self.register_parts(number) for number in range(first, last)])
            return
        step = self.rows.shape.threads * shape.width
        start = self.lane * shape.width
        rest = self.length & (shape.width - 1) if shape.tail else None
        full = self.length if rest is None else self.length - rest
        # All threads make the same number of rounds, even if some could make one more or fewer: a driver takes the end
        # of one thread's loop for that of all.
        begin = b.const(0, element(full.type))
        if shape.unroll > 1:
            far = step * shape.unroll
            rounds = full // far * far
            with b.loop(start, rounds, far, name="col") as col:
                groups = [PartGroup(col, shape.unroll) for _ in range(self.rows.shape.batch)]
                places = [self._parts(col + i * step) for i in range(shape.unroll)]
                for i, parts in enumerate(places):
                    for part, group in zip(parts, groups, strict=True):
                        part.group = (group, i) if self.rows.shape.threads == 1 else None
                visit(places)
            begin = rounds
        with b.loop(begin, full, step, name="col") as col:
            col = col + start
            visit([self._parts(col, inside=None if self.rows.shape.threads == 1 else col < full)])
        if rest is not None:
            with b.if_(rest > 0):
                # Moved back to the row's end: its first columns are visited twice, but count once.
                shift = b.cast(shape.width - rest, i32)
                inside = b.vector([b.const(i, i32) for i in range(shape.width)]) >= shift
                visit([self._parts(self.length - shape.width, inside=inside, shift=shift)])

    def register_parts(self, number: int) -> list[Part]:
        """The part with this number of each row in registers."""
        shape = self.shape
        threads = self.rows.shape.threads * self.rows.shape.cluster
        col = (self.lane + number * threads) * shape.width
        inside = col < self.length if number >= shape.parts - shape.ragged else None
        return self._parts(col, number, inside)

    def _parts(
        self, col: Value, number: int | None = None, inside: Value | None = None, shift: Value | None = None
    ) -> list[Part]:
        return [Part(self, row, col, number, inside, shift) for row in range(self.rows.shape.batch)]

    # -- values of a part ----------------------------------------------------------------------------------------------

    def elements(self, part: Part, what: Source | Columns) -> Value:
        """Elements of an array at a part: loaded once if rows are in registers."""
        prefetch = self.prefetch
        if isinstance(what, Columns):
            each_pass = self.shape.columns == "every_pass"
            return self._once(part, -1, what, lambda: self._columns(part, what), self._passes * each_pass)
        if prefetch is not None and prefetch.covers(what):
            return self._once(part, part.row, what, lambda: prefetch.read(part, what), self._passes)
        if self.reloads(part):
            return self._once(part, part.row, what, lambda: self._reload(part, what), self._passes)
        return self.narrow_elements(part, what, lambda: self.load(part, what.array, what.starts[part.row]))

    def reloads(self, part: Part) -> bool:
        """Whether this pass reloads rows that an earlier one has read."""
        return self.shape.reload and part.number is not None and self._passes > 1

    def _reload(self, part: Part, source: Source) -> Value:
        """Load a part of a row again, from an address that compilers cannot know to be the same."""
        start, b = source.starts[part.row], self.rows.b
        return self.load(part, source.array, start + b.cast(self._opaque_zero(), element(start.type)))

    def _opaque_zero(self) -> Value:
        """Zero, computed so that compilers cannot know it."""
        return self.rows.b.min(self.rows.numbers[0], 0)

    def narrow_elements(self, part: Part, what: Source | Derived, make: Callable[[], Value]) -> Value:
        """Elements of a part, made once; with `PassShape.narrow`, compilers take them for new ones in each pass."""
        raw = self._once(part, part.row, what, make)
        first = self._first_pass.setdefault(what, max(self._passes, 1))
        if not self.shape.narrow or part.number is None or self._passes <= first:
            return raw
        return self._once(part, part.row, what, lambda: self._opaque(raw), self._passes)

    def _opaque(self, raw: Value) -> Value:
        """Combine elements with a zero that compilers cannot know."""
        b = self.rows.b
        words = Vector(u32, element(raw.type).bytes * self.shape.width // 4)
        zero = b.cast(b.min(self.rows.count, 0), u32)
        return b.bitcast(b.bitcast(raw, words) ^ zero, Vector(element(raw.type), self.shape.width))

    def _columns(self, part: Part, what: Columns) -> Value:
        """Elements of an array with one number per column at a part."""
        start, rows = what.start, self.rows
        if self.shape.columns == "every_pass" and rows.shape.loops:
            # A driver's compiler would otherwise load them before the loop and keep them in registers.
            start = start + rows.b.cast(self._opaque_zero(), element(start.type))
        return self.load(part, what.array, start)

    def derived(self, part: Part, what: Derived) -> Value:
        """A value derived from a part, in the type computed in."""
        if what.narrow:
            return self.rows.b.cast(self.derived_narrow(part, what), self.rows.work)
        if part.number is not None:
            # Derived again from what each pass reads again.
            remade = (self.shape.narrow or self.shape.reload) and not what.costly
            remade = remade or (self.prefetch is not None and self.prefetch.rereads)
            return self._once(part, part.row, what, lambda: what.f(part), self._passes if remade else 0)
        if what not in part.cache:
            part.cache[what] = self._scratched(part, what) if what.costly and self.shape.scratch else what.f(part)
        return part.cache[what]

    def derived_narrow(self, part: Part, what: Derived) -> Value:
        """A narrow derived value, in its own type."""
        if part.number is not None:
            return self.narrow_elements(part, what, lambda: what.f(part))
        if what not in part.cache:
            part.cache[what] = what.f(part)
        return part.cache[what]

    def _scratched(self, part: Part, what: Derived) -> Value:
        """A derived value that the first pass stores in scratch memory and later ones load."""
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
        """Make a value once for a part in registers: for all passes, or for the pass of this number."""
        if part.number is None:
            return make()
        key = (id(what), row, part.number, number)
        if key not in self._cache:
            self._cache[key] = (what, make())  # `what` must stay alive: its id is in the key
        return self._cache[key][1]

    # -- memory --------------------------------------------------------------------------------------------------------

    def load(self, part: Part, array: RowArray, start: Value) -> Value:
        """Elements of the row that begins at ``start``."""
        return self.load_run(array, start, self.existing_column(part))

    def existing_column(self, part: Part) -> Value:
        """A part's first column, or one that exists if the part is past the end; its values are masked later."""
        if not part.may_end:
            return part.col
        return self.rows.b.min(part.col, self.length - self.shape.width)

    def load_run(self, array: RowArray, start: Value, col: Value) -> Value:
        """As many columns from ``col`` on as a part has."""
        b, width = self.rows.b, self.shape.width
        index = element(start.type)
        if array.stride is None:
            return b.load(array.buffer, start + b.cast(col, index), width, align=self._alignment(array))
        places = [start + b.cast(col + i, index) * array.stride for i in range(width)]
        return b.vector([b.load(array.buffer, place) for place in places])

    def _alignment(self, array: RowArray) -> int:
        """Elements by which a part is aligned: at most 16 bytes, which is all that memory guarantees."""
        return min(self.shape.width, 16 // element(array.buffer.type).bytes) if array.aligned else 1

    @contextmanager
    def where_exists(self, part: Part) -> Iterator[None]:
        """Run the body where the row and the columns exist."""
        exists = self.rows.exists[part.row]
        if part.may_end and part.inside is not None:
            exists = part.inside if exists is None else exists & part.inside
        if exists is None:
            yield
        else:
            with self.rows.b.if_(exists):
                yield

    def store_run(self, array: RowArray, start: Value, col: Value, value: Value) -> None:
        """Store a vector in the columns from ``col`` on."""
        b = self.rows.b
        index, value = element(start.type), b.cast(value, element(array.buffer.type))
        if array.stride is not None:
            for i, x in enumerate(b.unpack(value)):
                b.store(array.buffer, start + b.cast(col + i, index) * array.stride, x)
            return
        store = b.store_streaming if array.stream else b.store
        store(array.buffer, start + b.cast(col, index), value, align=self._alignment(array))
