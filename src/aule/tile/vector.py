"""The vector engine: register-blocked products on one CPU core.

A product ``C += A B`` keeps a few rows of C by a few vectors in registers. For each step along the summed dimension it
reads the vectors of B, spreads one element of A per row over a vector, and multiplies. Everything attention needs has
this form once the operand whose columns are lanes is laid out with its rows along memory: K and V as they are for
``P V`` and ``dS K``, and packed into panels (`Vectors.pack_panel`) for ``Q K^T`` and ``dO V^T``.

Where the processor multiplies pairs of bf16 (`has_pairs`), operands of bf16 are kept as pairs along the summed
dimension, a u32 each, and a product takes two steps at a time, at twice the rate. It is said by the operands alone:
an `Operand` of u32 is one of pairs.

All indices into memory are i64: a sum of 32-bit numbers may wrap, so LLVM could not fold it into an address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from aule.ir import Builder, Value, Var
from aule.ir.types import Ref, Scalar, Vector, bf16, element, f32, f64, i32, i64, u8, u16, u32
from aule.target import Target
from aule.tile.math import fold_lanes, from_e4m3
from aule.tile.matrix import Matrix

_CACHE_LINE = 64
"""Bytes; where lines are longer some are asked for twice, which costs little."""


@dataclass(frozen=True)
class VectorUnit:
    """Registers of a CPU: how many numbers one holds, and how many there are."""

    lanes: int
    registers: int

    def tile(self, rows: int, vectors: int) -> tuple[int, int]:
        """How to cut ``rows`` × ``vectors`` of C into pieces that stay in registers: rows and vectors of a piece.

        A piece needs its accumulators, its vectors of B and one of A. Of all that fit, the one that reads least for its
        multiplications is best; one too small to hide the latency of an FMA pays for eight.
        """
        best, cheapest = (1, 1), float("inf")
        for piece_rows in (n for n in range(1, rows + 1) if rows % n == 0):
            widest = (self.registers - 6) // (piece_rows + 1)
            if widest < 1:
                continue
            pieces = -(-vectors // widest)
            width = -(-vectors // pieces)
            cost = pieces * (max(piece_rows * width, 8) + 0.5 * (piece_rows + width)) / piece_rows
            if cost < cheapest:
                best, cheapest = (piece_rows, width), cost
        return best


def vector_unit(target: Target, work: Scalar) -> VectorUnit:
    """The vector registers of a target for numbers of a type."""
    if "avx512f" in target.extensions:
        return VectorUnit(64 // work.bytes, 32)
    if "avx2" in target.extensions:
        return VectorUnit(32 // work.bytes, 16)
    return VectorUnit(16 // work.bytes, 32 if target.arch == "aarch64" else 16)


def has_pairs(target: Target, elem: Scalar) -> bool:
    """Whether numbers of a type are best multiplied as pairs of bf16."""
    return elem == bf16 and {"avx512bf16", "avx512dq", "avx512vl"} <= set(target.extensions)


@dataclass(frozen=True)
class Operand:
    """A matrix in memory, as a product walks over it: element (i, k) of A, or vector k of B's rows. In an operand of
    pairs k counts pairs, and an element is one.

    Attributes
    ----------
    base : Value
        i64 index of the first element.
    row, step : int or Value
        Elements from one row to the next (unused for B), and from one step of the summed dimension to the next.
    places : Value or None
        For B whose steps lie anywhere: an array (i64) of each step's distance from ``base``, instead of ``step``.
    ahead : int
        For B that comes from memory: how many steps ahead it is fetched into the cache.
    """

    pointer: Value
    base: Value
    row: int | Value
    step: int | Value
    places: Value | None = None
    ahead: int = 0


class Vectors:
    """The engine: vectors of ``lanes`` numbers of type ``work``."""

    def __init__(self, b: Builder, work: Scalar, lanes: int) -> None:
        self.b = b
        self.work = work
        self.lanes = lanes

    # -- values --------------------------------------------------------------------------------------------------------

    def const(self, value: float) -> Value:
        """A vector with a number in every lane."""
        return self.b.splat(self.b.const(value, self.work), self.lanes)

    def count(self, start: Value) -> Value:
        """``start, start + 1, ...`` (i32), one to a lane."""
        b = self.b
        return b.vector([b.const(i, i32) for i in range(self.lanes)]) + start

    def reduce(self, kind: str, vector: Value) -> Value:
        """Combine the lanes of a vector, halves first."""
        return fold_lanes(self.b, kind, vector)

    def index(self, value: Value) -> Value:
        return self.b.cast(value, i64)

    def numbers(self, x: Value) -> Value:
        """What memory held, as numbers of type ``work``. Bytes (u8) are fp8 e4m3."""
        return self.b.cast(from_e4m3(self.b, x) if element(x.type) == u8 else x, self.work)

    # -- memory --------------------------------------------------------------------------------------------------------

    def load(self, pointer: Value, index: Any) -> Value:
        """A vector from anywhere, as numbers of type ``work``."""
        return self.numbers(self.b.load(pointer, index, self.lanes, align=1))

    def read(self, source: Matrix, start: Value, col: Value | int, count: int) -> Value:
        """Columns ``col .. col + count - 1`` of the row that begins at ``start``; lanes from ``count`` on are zero."""
        return self.numbers(self.read_raw(source, start, col, count))

    def read_raw(self, source: Matrix, start: Value, col: Value | int, count: int) -> Value:
        """The same, as numbers of the matrix's own type."""
        b = self.b
        col = b.coerce(col, i64)
        if source.col_stride is not None:
            parts = [b.load(source.buffer, start + (col + i) * source.col_stride) for i in range(count)]
        elif count == self.lanes:
            return b.load(source.buffer, start + col, self.lanes, align=1)
        else:
            parts = []
            while len(parts) < count:
                width = 1 << ((count - len(parts)).bit_length() - 1)
                parts += b.unpack(b.load(source.buffer, start + col + len(parts), width, align=1))
        zeros = [b.const(0, source.elem)] * (self.lanes - count)
        return b.vector([*parts, *zeros])

    def write(self, target: Matrix, start: Value, col: Value | int, vector: Value, count: int) -> None:
        """Store the first ``count`` lanes into columns from ``col`` on of the row that begins at ``start``."""
        b = self.b
        col = b.coerce(col, i64)
        vector = b.cast(vector, target.elem)
        if target.col_stride is not None:
            for i, x in enumerate(b.unpack(vector)[:count]):
                b.store(target.buffer, start + (col + i) * target.col_stride, x)
            return
        done = 0
        while done < count:
            width = 1 << ((count - done).bit_length() - 1)
            part = vector if width == self.lanes else b.permute(vector, None, tuple(range(done, done + width)))
            b.store(target.buffer, start + col + done, part, align=1)
            done += width

    def columns(self, cols: int) -> list[tuple[int, int]]:
        """The vectors that cover ``cols`` columns: where each starts, and how many lanes of it count."""
        return [(col, min(self.lanes, cols - col)) for col in range(0, cols, self.lanes)]

    def copy_rows(
        self,
        source: Matrix,
        first: Value,
        count: Value,
        target: Value,
        base: Value,
        stride: int,
        scale: Value | None = None,
    ) -> None:
        """Bring ``count`` rows from row ``first`` on into an array of rows of ``stride`` elements, as numbers of type
        ``work``, scaled, and with zeros behind the last column. Rows past the source's end repeat its last."""
        b = self.b
        with b.loop(b.const(0, i32), count, name="row") as row:
            start = source.row_start(b, first + row)
            for col, width in self.columns(source.cols):
                x = self.read(source, start, col, width)
                b.store(target, base + self.index(row) * stride + col, x if scale is None else x * scale, align=1)

    def line_vectors(self, elem: Scalar) -> int:
        """Vectors of a cache line's elements."""
        return max(_CACHE_LINE // elem.bytes // self.lanes, 1)

    # -- pairs of bf16 -------------------------------------------------------------------------------------------------

    def pairs(self, vector: Value) -> Value:
        """The lanes of a vector as bf16, neighbours paired: half as many u32."""
        return self.b.bitcast(self._bf16(vector), Vector(u32, self.lanes // 2))

    def pair_up(self, first: Value, second: Value) -> Value:
        """The lanes of two vectors as bf16, each of the first with that of the second."""
        b = self.b
        words = Vector(u16, self.lanes)
        low, high = (b.cast(b.bitcast(self._bf16(x), words), u32) for x in (first, second))
        return low | (high << 16)

    def _bf16(self, vector: Value) -> Value:
        """As bf16, which every number of 8 bits is exactly."""
        elem = element(vector.type)
        return vector if elem == bf16 else self.b.cast(vector if elem.is_float else self.numbers(vector), bf16)

    def copy_row_pairs(
        self, source: Matrix, first: Value, count: Value, target: Value, base: Value, stride: int
    ) -> None:
        """Bring ``count`` rows from row ``first`` on into an array of rows of ``stride`` pairs, neighbouring columns
        paired, with zeros behind the last. Rows past the source's end repeat its last."""
        b = self.b
        with b.loop(b.const(0, i32), count, name="row") as row:
            start = source.row_start(b, first + row)
            for col, width in self.columns(source.cols):
                x = self.pairs(self.read_raw(source, start, col, width))
                b.store(target, base + self.index(row) * stride + col // 2, x, align=1)

    def pair_rows(self, source: Matrix, first: Value, count: Value, target: Value, base: Value, stride: int) -> None:
        """Bring ``count`` rows from row ``first`` on into an array of rows of ``stride`` pairs, each row paired with
        the next. Past the source's end, and behind the last column, are zeros."""
        b = self.b
        with b.loop(b.const(0, i32), count, 2, name="row") as row:
            starts = [source.row_start(b, first + row + i) for i in range(2)]
            zero = b.splat(b.const(0, source.elem), self.lanes)
            inside = [first + row + i < source.rows for i in range(2)]
            to = base + self.index(row >> 1) * stride
            for col, width in self.columns(source.cols):
                rows = [self.read_raw(source, start, col, width) for start in starts]
                rows = [b.select(there, x, zero) for there, x in zip(inside, rows, strict=True)]
                b.store(target, to + col, self.pair_up(*rows), align=1)

    # -- panels and dot products ---------------------------------------------------------------------------------------

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """The columns of as many vectors as there are lanes."""
        b, lanes = self.b, self.lanes
        result = list(rows)
        step = 1
        while step < lanes:
            upper = tuple(i if not i & step else lanes + i - step for i in range(lanes))
            lower = tuple(i + step if not i & step else lanes + i for i in range(lanes))
            for i in range(lanes):
                if not i & step:
                    x, y = result[i], result[i + step]
                    result[i], result[i + step] = b.permute(x, y, upper), b.permute(x, y, lower)
            step *= 2
        return result

    def pack_panel(self, source: Matrix, first: Value, panel: int, target: Value, base: Value) -> None:
        """Transpose ``panel`` rows from row ``first`` on into a panel: column by column, ``panel`` numbers to a column;
        or, into an array of u32, pair of columns by pair of columns.

        Rows past the source's end repeat its last: whoever uses their columns masks them.
        """
        b, lanes = self.b, self.lanes
        step = 2 * lanes if element(target.type) == u32 else lanes
        with b.loop(b.const(0, i64), panel, lanes, name="part") as part:
            starts = [source.row_start(b, first + b.cast(part, i32) + i) for i in range(lanes)]
            whole = source.cols // step * step
            if whole:
                with b.loop(b.const(0, i64), whole, step, name="col") as col:
                    self._pack_block(source, starts, col, step, panel, target, base + part)
            if source.cols > whole:
                self._pack_block(source, starts, b.const(whole, i64), source.cols - whole, panel, target, base + part)

    def _pack_block(
        self, source: Matrix, starts: list[Value], col: Value, count: int, panel: int, target: Value, base: Value
    ) -> None:
        b = self.b
        if element(target.type) == u32:
            rows = [self._read_pairs(source, start, col, count) for start in starts]
            col, count = col >> 1, (count + 1) // 2
        else:
            rows = [self.read(source, start, col, count) for start in starts]
        for i, column in enumerate(self.transpose(rows)[:count]):
            b.store(target, base + (col + i) * panel, column, align=1)

    def _read_pairs(self, source: Matrix, start: Value, col: Value, count: int) -> Value:
        """As many pairs of neighbouring columns as there are lanes; columns from ``count`` on are zero."""
        b, lanes = self.b, self.lanes
        halves = [self.pairs(self.read_raw(source, start, col, min(count, lanes)))]
        if count > lanes:
            halves.append(self.pairs(self.read_raw(source, start, col + lanes, count - lanes)))
        else:
            halves.append(b.splat(b.const(0, u32), lanes // 2))
        return b.permute(halves[0], halves[1], tuple(range(lanes)))

    def dots(
        self, left: Operand, rows: int, source: Matrix, first: Value, ahead: int = 0, whole: int = 0
    ) -> list[Value]:
        """Dot products of ``rows`` rows of A with as many rows of a matrix as there are lanes, from row ``first`` on:
        one vector for each row of A. ``rows`` is a power of two; A's rows are padded with zeros to whole vectors. The
        matrix has stride 1 along its rows. Those that come ``ahead`` rows later are fetched into the cache. Where A is
        one of pairs, so is what is read of the matrix, which is bf16.

        For few rows this is cheaper than packing: the vectors of partial sums are added up together, as many at a time
        as there are lanes. The matrix is read a few lines of several rows at a time, or, with ``whole``, row by row,
        so many of them to a round of the loop; A's rows are then to stay in registers.
        """
        if whole:
            return self._dots_of_whole_rows(left, rows, source, first, ahead, whole)
        span = self.lanes // rows
        return self.dots_of([self.some_dots(left, rows, source, first + group * span, ahead) for group in range(rows)])

    def some_dots(self, left: Operand, rows: int, source: Matrix, first: Value, ahead: int = 0) -> Value:
        """The part of `dots` that fills one vector: all rows of A with as many rows of the matrix as that has room
        for."""
        b, lanes = self.b, self.lanes
        span = lanes // rows
        pairs = element(left.pointer.type) == u32
        step_cols = 2 * lanes if pairs else lanes
        together = max(_CACHE_LINE // source.elem.bytes // step_cols, 1) if ahead else 1
        starts = [source.row_start(b, first + i) for i in range(span)]
        later = [source.row_start(b, first + (i + ahead)) for i in range(span if ahead else 0)]
        c = self.accumulators(rows, span)

        def step(col: Value, count: int) -> None:
            read = self._read_pairs if pairs else self.read
            theirs = [read(source, start, col, count) for start in starts]
            for i, row in enumerate(c):
                mine = self._factor(left.pointer, left.base + left.row * i + (col >> 1 if pairs else col), lanes)
                for variable, x in zip(row, theirs, strict=True):
                    variable.value = self._accumulate(mine, x, variable.value)

        width = together * step_cols
        end = source.cols // width * width
        if end:
            with b.loop(b.const(0, i64), end, width, unroll=max(2 // together, 1), name="col") as col:
                for start in later:
                    b.prefetch(source.buffer, start + col)
                for i in range(together):
                    step(col + i * step_cols, step_cols)
        for start in later if source.cols > end else ():
            b.prefetch(source.buffer, start + end)
        for at in range(end, source.cols, step_cols):
            step(b.const(at, i64), min(step_cols, source.cols - at))
        return self._sums([variable.value for row in c for variable in row])

    def dots_of(self, parts: list[Value]) -> list[Value]:
        """The result of `dots` from all of its parts."""
        span = self.lanes // len(parts)
        return [self._gather([(part, r * span) for part in parts], span) for r in range(len(parts))]

    def _dots_of_whole_rows(
        self, left: Operand, rows: int, source: Matrix, first: Value, ahead: int, unroll: int
    ) -> list[Value]:
        """`dots`, row by row of the matrix. The partial sums wait in memory: all at once they would not leave A its
        registers, and LLVM would gather loads of many rows before their products."""
        b, lanes = self.b, self.lanes
        pairs = element(left.pointer.type) == u32
        step_cols, read = (2 * lanes, self._read_pairs) if pairs else (lanes, self.read)
        steps = range(0, source.cols, step_cols)
        mine = [
            [self._factor(left.pointer, left.base + left.row * r + i * lanes, lanes) for i in range(len(steps))]
            for r in range(rows)
        ]
        partial = b.private("dots", self.work, lanes * rows * lanes)
        with b.loop(b.const(0, i32), lanes, unroll=unroll, name="row") as row:
            start = source.row_start(b, first + row)
            if ahead:
                later = source.row_start(b, first + row + ahead)
                for col in range(0, source.cols, _CACHE_LINE // source.elem.bytes):
                    b.prefetch(source.buffer, later + col)
            totals = [self.const(0.0)] * rows
            for i, col in enumerate(steps):
                x = read(source, start, b.const(col, i64), min(step_cols, source.cols - col))
                totals = [self._accumulate(mine[r][i], x, totals[r]) for r in range(rows)]
            for r, total in enumerate(totals):
                b.store(partial, (self.index(row) * rows + r) * lanes, total)
        span = lanes // rows

        def sums(group: int) -> Value:
            order = [(row, r) for r in range(rows) for row in range(group * span, (group + 1) * span)]
            return self._sums([b.load(partial, (row * rows + r) * lanes, lanes) for row, r in order])

        return self.dots_of([sums(group) for group in range(rows)])

    def _sums(self, vectors: list[Value]) -> Value:
        """The sum over the lanes of each of as many vectors as there are lanes, as one vector."""
        b, lanes = self.b, self.lanes
        size = lanes // 2
        while len(vectors) > 1:
            # In runs of 2 * size lanes that belong to one sum, the halves are added; the runs of two vectors alternate.
            runs = range(0, lanes, 2 * size)
            low = tuple(of + at + i for at in runs for of in (0, lanes) for i in range(size))
            high = tuple(i + size for i in low)
            half = len(vectors) // 2
            pairs = zip(vectors[:half], vectors[half:], strict=True)
            vectors = [b.permute(x, y, low) + b.permute(x, y, high) for x, y in pairs]
            size //= 2
        return vectors[0]

    def _gather(self, pieces: list[tuple[Value, int]], width: int) -> Value:
        """A vector put together from ``width`` lanes of each of some vectors, from a lane on."""
        b = self.b
        if len(pieces) == 1:
            return pieces[0][0]
        parts = [b.permute(x, None, tuple(range(at, at + width))) for x, at in pieces]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            whole = tuple(range(2 * width))
            parts = [b.vector([x, y]) if width == 1 else b.permute(x, y, whole) for x, y in pairs]
            width *= 2
        return parts[0]

    # -- products ------------------------------------------------------------------------------------------------------

    def pieces(
        self, unit: VectorUnit, rows: int, cols: int, pairs: bool = False
    ) -> tuple[int, list[tuple[int, list[int]]]]:
        """How to cut ``rows`` × ``cols`` of a result: rows of a piece, and for each piece its first vector and the
        lanes of its vectors.

        Of 512-bit registers the last vector is half of one where that holds what is left: there are two units for
        halves. It is a piece by itself where its rows are enough to hide the latency of both units, since LLVM spreads
        a number once for each width (Zen 4, fp32, d40: 4% faster; pairs take longer, and are 4% slower).
        """
        vectors = -(-cols // self.lanes)
        widths = [self.lanes] * vectors
        halved = self.lanes * self.work.bytes == 64 and 0 < cols % self.lanes <= self.lanes // 2
        if halved:
            widths[-1] //= 2
        piece_rows, width = unit.tile(rows, vectors)
        if halved and vectors > 1 and not pairs:
            alone_rows, alone_width = unit.tile(rows, vectors - 1)
            if alone_rows >= 12:
                starts = [*range(0, vectors - 1, alone_width), vectors - 1]
                return alone_rows, [(at, widths[at:end]) for at, end in pairwise([*starts, vectors])]
        return piece_rows, [(at, widths[at : at + width]) for at in range(0, vectors, width)]

    def accumulators(self, rows: int, vectors: int | Sequence[int]) -> list[list[Var]]:
        """Registers for ``rows`` × ``vectors`` of a result, all zero; vectors may be given by their lanes."""
        widths = [self.lanes] * vectors if isinstance(vectors, int) else vectors
        zeros = [self.b.splat(self.b.const(0.0, self.work), width) for width in widths]
        return [[self.b.var(zero) for zero in zeros] for _ in range(rows)]

    def multiply(
        self, c: list[list[Var]], left: Operand, right: Operand, start: Any, stop: Any, unroll: int = 2
    ) -> None:
        """``C[i] += sum over k of A[i, k] * B[k]`` for k from ``start`` up to ``stop``. Vectors of C may be narrower
        than the engine's (`pieces`)."""
        b, lanes = self.b, self.lanes
        with b.loop(b.coerce(start, i64), b.coerce(stop, i64), unroll=unroll, name="k") as k:
            columns = self._columns(c, right, k)
            a_at = left.base + k * left.step
            for i, row in enumerate(c):
                a = b.splat(self._factor(left.pointer, a_at + left.row * i, 1), lanes)
                for variable, column in zip(row, columns, strict=True):
                    variable.value = self._accumulate(a, column, variable.value)

    def _columns(self, c: list[list[Var]], right: Operand, k: Value) -> list[Value]:
        """The vectors of B at a step, as wide as those of C."""
        if right.ahead:
            later = self._step_start(right, k + right.ahead)
            for j in range(0, len(c[0]), self.line_vectors(element(right.pointer.type))):
                self.b.prefetch(right.pointer, later + j * self.lanes)
        at = self._step_start(right, k)
        return [self._factor(right.pointer, at + j * self.lanes, _lanes(x.ref)) for j, x in enumerate(c[0])]

    def _step_start(self, right: Operand, k: Value) -> Value:
        """Index of B's first element at a step."""
        return right.base + (k * right.step if right.places is None else self.b.load(right.places, k))

    def _factor(self, pointer: Value, index: Any, lanes: int) -> Value:
        """What a product reads: numbers of type ``work``, or pairs."""
        x = self.b.load(pointer, index, lanes, align=1)
        return x if element(pointer.type) == u32 else self.numbers(x)

    def _accumulate(self, a: Value, x: Value, c: Value) -> Value:
        b = self.b
        if _lanes(c) < self.lanes:
            a = b.permute(a, None, tuple(range(_lanes(c))))
        return b.dot_pairs(a, x, c) if element(x.type) == u32 else b.fma(a, x, c)

    def multiply_guarding(
        self, c: list[list[Var]], left: Operand, right: Operand, start: Any, stop: Any, wild: Value | None
    ) -> None:
        """`multiply`, or `multiply_guarded` where ``wild`` says so at run time."""
        if wild is None:
            self.multiply(c, left, right, start, stop)
            return
        with self.b.if_(wild):
            self.multiply_guarded(c, left, right, start, stop)
        with self.b.else_():
            self.multiply(c, left, right, start, stop)

    def multiply_guarded(self, c: list[list[Var]], left: Operand, right: Operand, start: Any, stop: Any) -> None:
        """The same, but a factor of zero in A gives zero whatever B holds, Inf and NaN included."""
        b, lanes = self.b, self.lanes
        with b.loop(b.coerce(start, i64), b.coerce(stop, i64), name="k") as k:
            columns = self._columns(c, right, k)
            for i, row in enumerate(c):
                scalar = self._factor(left.pointer, left.base + k * left.step + left.row * i, 1)
                a = b.splat(scalar, lanes)
                for variable, column in zip(row, columns, strict=True):
                    variable.value = self._accumulate(a, self._kept(scalar, column), variable.value)

    def _kept(self, scalar: Value, column: Value) -> Value:
        """A vector of B, or zeros where the factor of A is zero; halves of pairs each by themselves."""
        b = self.b
        if element(column.type) != u32:
            return b.select(b.eq(scalar, 0.0), b.splat(b.const(0.0, self.work), _lanes(column)), column)
        zero = b.const(0, u32)
        bits = [b.select(b.eq(scalar & half & 0x7FFF7FFF, 0), zero, half) for half in (0xFFFF, 0xFFFF0000)]
        return column & b.splat(bits[0] | bits[1], _lanes(column))

    def has_wild(self, right: Operand, vectors: int, start: Value, stop: Value) -> Value:
        """Whether any of the vectors of B from ``start`` up to ``stop`` holds Inf or NaN: 0 times either is NaN."""
        b = self.b
        zero = self.const(0.0)
        total = b.var(zero, "wild")
        with b.loop(start, stop, unroll=2, name="k") as k:
            at = self._step_start(right, k)
            for j in range(vectors):
                x = self._factor(right.pointer, at + j * self.lanes, self.lanes)
                if element(x.type) == u32:
                    numbers = [b.bitcast(half, Vector(f32, self.lanes)) for half in (x << 16, x & 0xFFFF0000)]
                else:
                    numbers = [x]
                for number in numbers:
                    total.value = b.fma(number, zero, total.value)
        return b.ne(self.reduce("add", total.value), 0.0)


def work_type(elem: Scalar) -> Scalar:
    """The type in which numbers of a type are computed with."""
    return f64 if elem == f64 else f32


def _lanes(value: Value) -> int:
    """Lanes of a vector, or of the vector that a variable holds."""
    type_ = value.type.target if isinstance(value.type, Ref) else value.type
    assert isinstance(type_, Vector)
    return type_.lanes
