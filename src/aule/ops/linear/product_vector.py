"""A product on CPU cores, by the vector engine: a task has a tile of the result, brings both factors together for a
part of the summed dimension after the other, as numbers of the type that is computed in, and multiplies there. Where
the processor multiplies pairs of bf16, factors of bf16 come together as such pairs along the summed dimension."""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, Vector, bf16, element, i32, i64, u16, u32
from aule.ops.linear.config import ProductConfig, VectorBlocks
from aule.ops.linear.factors import Factor, RowAt, Stored
from aule.ops.linear.product_fragment import tile_of
from aule.ops.parameters import Parameters
from aule.target import Target
from aule.tile.vector import Operand, Vectors, has_pairs, vector_unit


def build_product_vector(config: ProductConfig, target: Target) -> KernelIR:
    """Trace the kernel."""
    blocks = config.blocks
    assert isinstance(blocks, VectorBlocks)
    b = Builder(config.name, 1)
    _Product(b, config, blocks, target).run()
    return b.finish()


class _Product:
    def __init__(self, b: Builder, config: ProductConfig, blocks: VectorBlocks, target: Target) -> None:
        self.b, self.config, self.blocks = b, config, blocks
        p = self.p = Parameters(b, i64)
        self.work = SCALARS[config.work]
        self.unit = vector_unit(target, self.work)
        self.engine = Vectors(b, self.work, blocks.lanes)
        self.m, self.n, self.k = (p.number(name) for name in "mnk")
        self.row0, self.col0 = tile_of(b, self.m, self.n, blocks.rows, blocks.cols, 1)
        self.left = Factor(p, config.left, self.m, self.k, self.work, whole=True)
        self.right = Factor(p, config.right, self.n, self.k, self.work, whole=True)
        self.pairs = has_pairs(target, self.left.stored.elem)
        self.depth = blocks.depth // 2 if self.pairs else blocks.depth
        """Steps of a part: numbers of the summed dimension, or pairs of them."""
        elem = u32 if self.pairs else self.work
        self.left_memory = b.shared("left", elem, blocks.rows * self.depth)
        self.right_memory = b.shared("right", elem, blocks.cols * self.depth)
        self.result = b.shared("result", self.work, blocks.rows * blocks.cols)

    def run(self) -> None:
        b, blocks = self.b, self.blocks
        for memory, size in (
            (self.left_memory, blocks.rows * self.depth),
            (self.right_memory, blocks.cols * self.depth),
            (self.result, blocks.rows * blocks.cols),
        ):
            zero = b.splat(b.const(0, element(memory.type)), blocks.lanes)
            with b.loop(b.const(0, i64), size, blocks.lanes, name="i") as i:
                b.store(memory, i, zero, align=1)
        with b.loop(b.const(0, i32), self.k, blocks.depth, name="start") as start:
            count = b.min(self.k - start, blocks.depth)
            if self.config.left.across:
                self._copy(self.left, self.row0, blocks.rows, start, count, self.left_memory)
            else:
                self._lines(start, count)
            if self.config.right.across:
                self._copy(self.right, self.col0, blocks.cols, start, count, self.right_memory)
            else:
                self._transpose(start, count)
            self._multiply((count + 1) >> 1 if self.pairs else count)
        self._finish()

    # -- bringing in ---------------------------------------------------------------------------------------------------

    def _along(self, count: Value, f: Callable[[Value, int], None], whole: int | None = None, single: int = 1) -> None:
        """Call ``f`` for whole vectors of ``count`` columns, or for as many columns as said, and then for the few that
        are left, one by one or two by two."""
        b, whole = self.b, whole or self.blocks.lanes
        last = count - count % whole
        with b.loop(b.const(0, i32), last, whole, name="col") as col:
            f(col, whole)
        with b.loop(last, count, single, name="col") as col:
            f(col, single)

    def _value(self, factor: Factor, at: RowAt, col: Value, width: int) -> Value:
        return factor.value(factor.load(at, col, width), at, factor.affine(col, width))

    def _paired(self, first: Value, second: Value, there: Value) -> Value:
        """Numbers, each with that of another vector, or with zero where those are not there."""
        b = self.b
        lanes = first.type.lanes if isinstance(first.type, Vector) else 1
        second = b.select(there, second, b.splat(b.const(0.0, self.work), lanes))
        if lanes > 1:
            return self.engine.pair_up(first, second)
        low, high = (b.cast(b.bitcast(b.cast(x, bf16), u16), u32) for x in (first, second))
        return low | (high << 16)

    def _copy(self, factor: Factor, first: Value, outer: int, start: Value, depth: Value, memory: Value) -> None:
        """Stored rows as they are, or in pairs: ``outer`` numbers for each step."""
        b, each = self.b, 2 if self.pairs else 1
        count = b.min(factor.cols - first, outer)
        with b.loop(b.const(0, i32), depth, each, name="row") as row:
            lines = [factor.row(start + b.min(row + i, depth - 1)) for i in range(each)]

            def put(col: Value, width: int) -> None:
                values = [self._value(factor, line, first + col, width) for line in lines]
                value = self._paired(values[0], values[1], row + 1 < depth) if self.pairs else values[0]
                b.store(memory, self._index(row // each) * outer + self._index(col), value, align=1)

            self._along(count, put)

    def _lines(self, start: Value, depth: Value) -> None:
        """Stored rows of the left factor as they are: steps for each row of the result."""
        b, factor = self.b, self.left
        single = 2 if self.pairs else 1
        with b.loop(b.const(0, i32), b.min(self.m - self.row0, self.blocks.rows), name="row") as row:
            line = factor.row(self.row0 + row)

            def put(col: Value, width: int) -> None:
                at = self._index(row) * self.depth + self._index(col // single)
                if self.pairs and width == single:
                    numbers = [self._value(factor, line, start + b.min(col + i, depth - 1), 1) for i in range(2)]
                    value = self._paired(numbers[0], numbers[1], col + 1 < depth)
                else:
                    value = self._value(factor, line, start + col, width)
                    value = self.engine.pairs(value) if self.pairs else value
                b.store(self.left_memory, at, value, align=1)

            self._along(depth, put, single=single)

    def _transpose(self, start: Value, depth: Value) -> None:
        """Stored rows of the right factor as columns."""
        b, lanes, cols = self.b, self.blocks.lanes, self.blocks.cols
        factor, single = self.right, 2 if self.pairs else 1
        with b.loop(b.const(0, i32), b.min(self.n - self.col0, cols), lanes, name="part") as part:
            lines = [factor.row(self.col0 + part + i) for i in range(lanes)]

            def column(col: Value) -> Value:
                return b.vector([self._value(factor, line, start + col, 1) for line in lines])

            def block(line: RowAt, col: Value) -> Value:
                low, *high = [self._value(factor, line, start + col + i * lanes, lanes) for i in range(single)]
                if not self.pairs:
                    return low
                return b.permute(self.engine.pairs(low), self.engine.pairs(high[0]), tuple(range(lanes)))

            def put(col: Value, width: int) -> None:
                if width > single:
                    columns = self.engine.transpose([block(line, col) for line in lines])
                elif self.pairs:
                    columns = [self._paired(column(col), column(b.min(col + 1, depth - 1)), col + 1 < depth)]
                else:
                    columns = [column(col)]
                for i, value in enumerate(columns):
                    at = self._index(col // single + i) * cols + self._index(part)
                    b.store(self.right_memory, at, value, align=1)

            self._along(depth, put, lanes * single, single)

    # -- products ------------------------------------------------------------------------------------------------------

    def _multiply(self, steps: Value) -> None:
        b, blocks, engine = self.b, self.blocks, self.engine
        piece_rows, pieces = engine.pieces(self.unit, blocks.rows, blocks.cols, self.pairs)
        row_step, step = (1, blocks.rows) if self.config.left.across else (self.depth, 1)
        count = b.min(self.m - self.row0, blocks.rows)
        with b.loop(b.const(0, i32), count, piece_rows, name="row") as row:
            for first, widths in pieces:
                base = self._index(row)
                c = engine.accumulators(piece_rows, widths)
                left = Operand(self.left_memory, base * row_step, row_step, step)
                right = Operand(self.right_memory, b.const(first * blocks.lanes, i64), 0, blocks.cols)
                engine.multiply(c, left, right, 0, self._index(steps))
                for i, vectors in enumerate(c):
                    for j, (variable, width) in enumerate(zip(vectors, widths, strict=True)):
                        at = (base + i) * blocks.cols + (first + j) * blocks.lanes
                        b.store(self.result, at, b.load(self.result, at, width, align=1) + variable.value, align=1)

    def _finish(self) -> None:
        b, blocks = self.b, self.blocks
        out = Stored(self.p, self.config.out, "write")
        bias = None if self.config.bias is None else self.p.buffer("bias", SCALARS[self.config.bias])
        with b.loop(b.const(0, i32), b.min(self.m - self.row0, blocks.rows), name="row") as row:
            start = out.start(self.row0 + row)

            def put(col: Value, width: int) -> None:
                at = self._index(row) * blocks.cols + self._index(col)
                value = b.load(self.result, at, width, align=1)
                if bias is not None:
                    step = self.p.number("bias_col_stride", i64)
                    places = [self._index(self.col0 + col + i) * step for i in range(width)]
                    begin = self.p.strided("bias")
                    added = b.vector([b.load(bias, begin + place) for place in places])
                    value = value + b.cast(added, self.work)
                value = b.cast(value, out.elem)
                if self.config.out.unit:
                    b.store(out.buffer, out.index(start, self.col0 + col), value, align=1)
                    return
                for i, x in enumerate(b.unpack(value)):
                    b.store(out.buffer, out.index(start, self.col0 + col + i), x)

            self._along(b.min(self.n - self.col0, blocks.cols), put)

    def _index(self, value: Value) -> Value:
        return self.b.cast(value, i64)
