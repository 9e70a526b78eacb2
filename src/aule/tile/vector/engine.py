"""The vector engine: register-blocked products on one CPU core.

A product ``C += A B`` keeps a few rows of C by a few vectors in registers. For each step along the summed dimension it
reads the vectors of B, broadcasts one element of A per row, and multiplies. B's rows must be contiguous. K and V are
read in place for ``P V`` and ``dS K``, and packed into panels (`Vectors.pack_panel`) for ``Q K^T`` and ``dO V^T``.

If the processor multiplies pairs of bf16 (`has_pairs`), operands of bf16 are stored as pairs along the summed
dimension, one u32 each, and a step covers two elements. An `Operand` of u32 is an operand of pairs.

All memory indices are i64: 32-bit sums may wrap, so compilers could not fold them into addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from aule.ir import Builder, Value, Var
from aule.ir.types import Ref, Scalar, Vector, bf16, element, f32, f64, i32, i64, u8, u16, u32
from aule.target import Target
from aule.tile.common.math import fold_lanes, from_e4m3
from aule.tile.common.matrix import Matrix, binary_runs

CACHE_LINE = 64
"""Bytes. On CPUs with longer lines some are prefetched twice, which costs little."""
_UNROLLED_COLUMNS = 256
"""Columns of a result up to which the code of each piece is written out."""


@dataclass(frozen=True)
class VectorUnit:
    """Vector registers of a CPU: elements per register, and the number of registers."""

    lanes: int
    registers: int

    def tile(self, rows: int, vectors: int) -> tuple[int, int]:
        """Choose the piece of a ``rows`` × ``vectors`` result that stays in registers, as (rows, vectors).

        A piece needs its accumulators, its vectors of B and one of A. Among those that fit, the one with the fewest
        loads per multiplication wins. Pieces with fewer than eight accumulators do not hide the latency of an FMA, so
        they are charged for eight.
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
    """Vector registers of a target for elements of type ``work``."""
    size, registers = target.vector_registers
    return VectorUnit(size // work.bytes, registers)


def has_pairs(target: Target, elem: Scalar) -> bool:
    """Whether products of this element type run on pairs of bf16."""
    return elem == bf16 and target.multiplies_pairs


@dataclass(frozen=True)
class Operand:
    """A matrix in memory, indexed as in a product: element (i, k) of A, or row k of B. For pairs, k counts pairs.

    Attributes
    ----------
    base : Value
        i64 index of the first element.
    row, step : int or Value
        Strides: from one row to the next (unused for B), and from one step of the summed dimension to the next.
    places : Value or None
        For B with scattered rows: an i64 array with each step's offset from ``base``; replaces ``step``.
    ahead : int
        For B: steps ahead of use at which its rows are prefetched into the cache; 0 for none.
    """

    pointer: Value
    base: Value
    row: int | Value
    step: int | Value
    places: Value | None = None
    ahead: int = 0


class Vectors:
    """The vector engine: vectors of ``lanes`` elements of type ``work``."""

    def __init__(self, b: Builder, work: Scalar, lanes: int) -> None:
        self.b, self.work, self.lanes = b, work, lanes

    # -- values --------------------------------------------------------------------------------------------------------

    def const(self, value: float) -> Value:
        """A vector with ``value`` in every lane."""
        return self.b.splat(self.b.const(value, self.work), self.lanes)

    def lane_numbers(self, start: Value) -> Value:
        """The vector ``start, start + 1, ...`` (i32)."""
        b = self.b
        return b.vector([b.const(i, i32) for i in range(self.lanes)]) + start

    def reduce(self, kind: str, vector: Value) -> Value:
        """Reduce a vector over its lanes, pairing halves."""
        return fold_lanes(self.b, kind, vector)

    def index(self, value: Value) -> Value:
        """``value`` as a memory index (i64)."""
        return self.b.cast(value, i64)

    def to_work(self, x: Value) -> Value:
        """Convert loaded elements to type ``work``. Bytes (u8) are fp8 e4m3."""
        return self.b.cast(from_e4m3(self.b, x) if element(x.type) == u8 else x, self.work)

    # -- memory --------------------------------------------------------------------------------------------------------

    def read(self, source: Matrix, start: Value, col: Value | int, count: int) -> Value:
        """Load columns ``col .. col + count - 1`` of the row at ``start`` as type ``work``; other lanes are zero."""
        return self.to_work(self.read_raw(source, start, col, count))

    def read_raw(self, source: Matrix, start: Value, col: Value | int, count: int) -> Value:
        """Load like `read`, in the matrix's own element type."""
        b = self.b
        col = b.coerce(col, i64)
        if source.col_stride is not None:
            parts = [b.load(source.buffer, start + (col + i) * source.col_stride) for i in range(count)]
        elif count == self.lanes:
            return b.load(source.buffer, start + col, self.lanes, align=1)
        else:
            parts = []
            for at, width in binary_runs(count):
                parts += b.unpack(b.load(source.buffer, start + col + at, width, align=1))
        zeros = [b.const(0, source.elem)] * (self.lanes - count)
        return b.vector([*parts, *zeros])

    def write(self, target: Matrix, start: Value, col: Value | int, vector: Value, count: int) -> None:
        """Store the first ``count`` lanes into the row at ``start``, from column ``col`` on."""
        b = self.b
        col = b.coerce(col, i64)
        vector = b.cast(vector, target.elem)
        if target.col_stride is not None:
            for i, x in enumerate(b.unpack(vector)[:count]):
                b.store(target.buffer, start + (col + i) * target.col_stride, x)
            return
        for at, width in binary_runs(count):
            part = vector if width == self.lanes else b.permute(vector, None, tuple(range(at, at + width)))
            b.store(target.buffer, start + col + at, part, align=1)

    def columns(self, cols: int) -> list[tuple[int, int]]:
        """Vectors that cover ``cols`` columns, each as (first column, lanes in use)."""
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
        """Copy ``count`` rows, from row ``first`` on, into an array with rows of ``stride`` elements of type ``work``.

        Elements are multiplied by ``scale``. Columns after the last are zero; rows past the source's end repeat its
        last row.
        """
        b = self.b
        with b.loop(b.const(0, i32), count, name="row") as row:
            start = source.row_start(b, first + row)
            for col, width in self.columns(source.cols):
                x = self.read(source, start, col, width)
                b.store(target, base + self.index(row) * stride + col, x if scale is None else x * scale, align=1)

    # -- pairs of bf16 -------------------------------------------------------------------------------------------------

    def pairs(self, vector: Value) -> Value:
        """Round a vector to bf16 and pair neighbouring lanes: half as many u32."""
        return self.b.bitcast(self._bf16(vector), Vector(u32, self.lanes // 2))

    def pair_up(self, first: Value, second: Value) -> Value:
        """Round two vectors to bf16 and pair equal lanes, ``first`` in the low halves."""
        b = self.b
        words = Vector(u16, self.lanes)
        low, high = (b.cast(b.bitcast(self._bf16(x), words), u32) for x in (first, second))
        return low | (high << 16)

    def _bf16(self, vector: Value) -> Value:
        """A vector as bf16; exact for 8-bit elements."""
        elem = element(vector.type)
        return vector if elem == bf16 else self.b.cast(vector if elem.is_float else self.to_work(vector), bf16)

    def copy_paired_columns(
        self, source: Matrix, first: Value, count: Value, target: Value, base: Value, stride: int
    ) -> None:
        """Copy ``count`` rows, from row ``first`` on, into rows of ``stride`` pairs of neighbouring columns.

        Columns after the last are zero; rows past the source's end repeat its last row.
        """
        b = self.b
        with b.loop(b.const(0, i32), count, name="row") as row:
            start = source.row_start(b, first + row)
            for col, width in self.columns(source.cols):
                x = self.pairs(self.read_raw(source, start, col, width))
                b.store(target, base + self.index(row) * stride + col // 2, x, align=1)

    def copy_paired_rows(
        self, source: Matrix, first: Value, count: Value, target: Value, base: Value, stride: int
    ) -> None:
        """Copy ``count`` rows, from row ``first`` on, into half as many rows of ``stride`` pairs of neighbouring rows.

        Rows past the source's end and columns after the last are zero.
        """
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

    # -- panels --------------------------------------------------------------------------------------------------------

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """Transpose a square of ``lanes`` vectors."""
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
        """Transpose ``panel`` rows, from row ``first`` on, into a panel: ``panel`` elements per column, or, in an array
        of u32, per pair of columns.

        Rows past the source's end repeat its last row; users mask their scores.
        """
        b, lanes = self.b, self.lanes
        step = 2 * lanes if element(target.type) == u32 else lanes
        with b.loop(b.const(0, i64), panel, lanes, name="part") as part:
            starts = [source.row_start(b, first + b.cast(part, i32) + i) for i in range(lanes)]
            full = source.cols // step * step
            if full:
                with b.loop(b.const(0, i64), full, step, name="col") as col:
                    self._pack_block(source, starts, col, step, panel, target, base + part)
            if source.cols > full:
                self._pack_block(source, starts, b.const(full, i64), source.cols - full, panel, target, base + part)

    def _pack_block(
        self, source: Matrix, starts: list[Value], col: Value, count: int, panel: int, target: Value, base: Value
    ) -> None:
        b = self.b
        if element(target.type) == u32:
            rows = [self.read_pairs(source, start, col, count) for start in starts]
            col, count = col >> 1, (count + 1) // 2
        else:
            rows = [self.read(source, start, col, count) for start in starts]
        for i, column in enumerate(self.transpose(rows)[:count]):
            b.store(target, base + (col + i) * panel, column, align=1)

    def read_pairs(self, source: Matrix, start: Value, col: Value, count: int) -> Value:
        """Load ``lanes`` pairs of neighbouring columns of the row at ``start``; columns from ``count`` on are zero."""
        b, lanes = self.b, self.lanes
        halves = [self.pairs(self.read_raw(source, start, col, min(count, lanes)))]
        if count > lanes:
            halves.append(self.pairs(self.read_raw(source, start, col + lanes, count - lanes)))
        else:
            halves.append(b.splat(b.const(0, u32), lanes // 2))
        return b.permute(halves[0], halves[1], tuple(range(lanes)))

    # -- products ------------------------------------------------------------------------------------------------------

    def pieces(
        self, unit: VectorUnit, rows: int, cols: int, pairs: bool = False
    ) -> tuple[int, list[tuple[int, list[int]]]]:
        """Divide a ``rows`` × ``cols`` result into pieces that stay in registers: the rows of a piece, and for each
        piece its first vector and the lanes of its vectors.

        With 512-bit registers the last vector is half a register if that holds the remaining columns. It becomes a
        piece of its own if it has enough rows to hide the latency of an FMA, since the compiler broadcasts an element
        once for each width. This does not pay for pairs.
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

    def each_piece(self, pieces: list[tuple[int, list[int]]]) -> Iterator[tuple[Value | int, list[int]]]:
        """First column and vectors of each of the pieces of `pieces`: written out, or in a loop if the result is wide,
        so that compiling it does not take seconds."""
        if sum(len(widths) for _, widths in pieces) * self.lanes <= _UNROLLED_COLUMNS:
            yield from ((first * self.lanes, widths) for first, widths in pieces)
            return
        alike = pieces[0][1]
        count = len(list(takewhile(lambda piece: piece[1] == alike, pieces)))
        step = len(alike) * self.lanes
        with self.b.loop(self.b.const(0, i64), count * step, step, name="column") as column:
            yield column, alike
        yield from ((first * self.lanes, widths) for first, widths in pieces[count:])

    def accumulators(self, rows: int, vectors: int | Sequence[int]) -> list[list[Var]]:
        """Zeroed registers for ``rows`` × ``vectors`` of a result; ``vectors`` is a count, or the lanes of each."""
        widths = [self.lanes] * vectors if isinstance(vectors, int) else vectors
        zeros = [self.b.splat(self.b.const(0.0, self.work), width) for width in widths]
        return [[self.b.var(zero) for zero in zeros] for _ in range(rows)]

    def multiply(
        self, c: list[list[Var]], left: Operand, right: Operand, start: Any, stop: Any, unroll: int = 2
    ) -> None:
        """Compute ``C[i] += sum over k of A[i, k] * B[k]`` for k in ``start .. stop - 1``. Vectors of C may be narrower
        than the engine's (`pieces`)."""
        b, lanes = self.b, self.lanes
        with b.loop(b.coerce(start, i64), b.coerce(stop, i64), unroll=unroll, name="k") as k:
            columns = self._columns(c, right, k)
            a_at = left.base + k * left.step
            for i, row in enumerate(c):
                a = b.splat(self.load_factor(left.pointer, a_at + left.row * i, 1), lanes)
                for variable, column in zip(row, columns, strict=True):
                    variable.value = self.accumulate(a, column, variable.value)

    def _columns(self, c: list[list[Var]], right: Operand, k: Value) -> list[Value]:
        """Vectors of row k of B, as wide as those of C."""
        if right.ahead:
            later = self._step_start(right, k + right.ahead)
            line_vectors = max(CACHE_LINE // element(right.pointer.type).bytes // self.lanes, 1)
            for j in range(0, len(c[0]), line_vectors):
                self.b.prefetch(right.pointer, later + j * self.lanes)
        at = self._step_start(right, k)
        return [self.load_factor(right.pointer, at + j * self.lanes, _lanes(x.ref)) for j, x in enumerate(c[0])]

    def _step_start(self, right: Operand, k: Value) -> Value:
        """Index of the first element of row k of B."""
        return right.base + (k * right.step if right.places is None else self.b.load(right.places, k))

    def load_factor(self, pointer: Value, index: Any, lanes: int) -> Value:
        """Load an operand's elements: pairs as they are, others as type ``work``."""
        x = self.b.load(pointer, index, lanes, align=1)
        return x if element(pointer.type) == u32 else self.to_work(x)

    def accumulate(self, a: Value, x: Value, c: Value) -> Value:
        """``c + a * x``, for elements or pairs; ``a`` may have more lanes than ``c``."""
        b = self.b
        if _lanes(c) < self.lanes:
            a = b.permute(a, None, tuple(range(_lanes(c))))
        return b.dot_pairs(a, x, c) if element(x.type) == u32 else b.fma(a, x, c)

    def multiply_guarded(
        self, c: list[list[Var]], left: Operand, right: Operand, start: Any, stop: Any, nonfinite: Value | None
    ) -> None:
        """`multiply`; if ``nonfinite`` is true at run time, a zero in A gives zero even where B holds Inf or NaN."""
        if nonfinite is None:
            self.multiply(c, left, right, start, stop)
            return
        with self.b.if_(nonfinite):
            self._multiply_skipping_zeros(c, left, right, start, stop)
        with self.b.else_():
            self.multiply(c, left, right, start, stop)

    def _multiply_skipping_zeros(
        self, c: list[list[Var]], left: Operand, right: Operand, start: Any, stop: Any
    ) -> None:
        b, lanes = self.b, self.lanes
        with b.loop(b.coerce(start, i64), b.coerce(stop, i64), name="k") as k:
            columns = self._columns(c, right, k)
            for i, row in enumerate(c):
                scalar = self.load_factor(left.pointer, left.base + k * left.step + left.row * i, 1)
                a = b.splat(scalar, lanes)
                for variable, column in zip(row, columns, strict=True):
                    variable.value = self.accumulate(a, self._zero_where(scalar, column), variable.value)

    def _zero_where(self, scalar: Value, column: Value) -> Value:
        """A vector of B, or zeros if ``scalar`` of A is zero; for pairs, each half by itself."""
        b = self.b
        if element(column.type) != u32:
            return b.select(b.eq(scalar, 0.0), b.splat(b.const(0.0, self.work), _lanes(column)), column)
        zero = b.const(0, u32)
        bits = [b.select(b.eq(scalar & half & 0x7FFF7FFF, 0), zero, half) for half in (0xFFFF, 0xFFFF0000)]
        return column & b.splat(bits[0] | bits[1], _lanes(column))

    def has_nonfinite(self, right: Operand, vectors: int, start: Value, stop: Value) -> Value:
        """Whether the first ``vectors`` of rows ``start .. stop - 1`` of B hold Inf or NaN."""
        b = self.b
        zero = self.const(0.0)  # zero times Inf or NaN is NaN
        total = b.var(zero, "wild")
        with b.loop(start, stop, unroll=2, name="k") as k:
            at = self._step_start(right, k)
            for j in range(vectors):
                x = self.load_factor(right.pointer, at + j * self.lanes, self.lanes)
                if element(x.type) == u32:
                    numbers = [b.bitcast(half, Vector(f32, self.lanes)) for half in (x << 16, x & 0xFFFF0000)]
                else:
                    numbers = [x]
                for number in numbers:
                    total.value = b.fma(number, zero, total.value)
        return b.ne(self.reduce("add", total.value), 0.0)


def work_type(elem: Scalar) -> Scalar:
    """Type in which elements of a type are computed: f64 for f64, else f32."""
    return f64 if elem == f64 else f32


def _lanes(value: Value) -> int:
    """Lanes of a vector or of a variable's vector."""
    type_ = value.type.target if isinstance(value.type, Ref) else value.type
    assert isinstance(type_, Vector)
    return type_.lanes
