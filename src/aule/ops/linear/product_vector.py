"""A product on CPU cores, by the vector engine: a task has a tile of the result, brings both factors together for a
part of the summed dimension after the other, as numbers of the type that is computed in, and multiplies there."""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, i32, i64
from aule.ops.linear.config import ProductConfig, VectorBlocks
from aule.ops.linear.factors import Factor, RowAt, Stored
from aule.ops.linear.product_fragment import tile_of
from aule.ops.parameters import Parameters
from aule.target import Target
from aule.tile.vector import Operand, Vectors, vector_unit


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
        self.left_memory = b.shared("left", self.work, blocks.rows * blocks.depth)
        self.right_memory = b.shared("right", self.work, blocks.cols * blocks.depth)
        self.result = b.shared("result", self.work, blocks.rows * blocks.cols)

    def run(self) -> None:
        b, blocks = self.b, self.blocks
        for memory, size in (
            (self.left_memory, blocks.rows * blocks.depth),
            (self.right_memory, blocks.cols * blocks.depth),
            (self.result, blocks.rows * blocks.cols),
        ):
            with b.loop(b.const(0, i64), size, blocks.lanes, name="i") as i:
                b.store(memory, i, self.engine.const(0.0), align=1)
        with b.loop(b.const(0, i32), self.k, blocks.depth, name="start") as start:
            depth = b.min(self.k - start, blocks.depth)
            if self.config.left.across:
                self._copy(self.left, self.row0, blocks.rows, start, depth, self.left_memory)
            else:
                self._lines(self.left, self.row0, blocks.rows, start, depth)
            if self.config.right.across:
                self._copy(self.right, self.col0, blocks.cols, start, depth, self.right_memory)
            else:
                self._transpose(start, depth)
            self._multiply(depth)
        self._finish()

    # -- bringing in ---------------------------------------------------------------------------------------------------

    def _along(self, count: Value, f: Callable[[Value, int], None]) -> None:
        """Call ``f`` for whole vectors of ``count`` columns, and for those that are left one by one."""
        b, lanes = self.b, self.blocks.lanes
        whole = count - count % lanes
        with b.loop(b.const(0, i32), whole, lanes, name="col") as col:
            f(col, lanes)
        with b.loop(whole, count, name="col") as col:
            f(col, 1)

    def _value(self, factor: Factor, at: RowAt, col: Value, width: int) -> Value:
        return factor.value(factor.load(at, col, width), at, factor.affine(col, width))

    def _copy(self, factor: Factor, first: Value, outer: int, start: Value, depth: Value, memory: Value) -> None:
        """Stored rows as they are: ``outer`` numbers for each of the summed dimension."""
        b = self.b
        count = b.min(factor.cols - first, outer)
        with b.loop(b.const(0, i32), depth, name="row") as row:
            line = factor.row(start + row)

            def put(col: Value, width: int) -> None:
                at = self._index(row) * outer + self._index(col)
                b.store(memory, at, self._value(factor, line, first + col, width), align=1)

            self._along(count, put)

    def _lines(self, factor: Factor, first: Value, outer: int, start: Value, depth: Value) -> None:
        """Stored rows of the left factor as they are: a part of the summed dimension for each row of the result."""
        b = self.b
        with b.loop(b.const(0, i32), b.min(factor.rows - first, outer), name="row") as row:
            line = factor.row(first + row)

            def put(col: Value, width: int) -> None:
                at = self._index(row) * self.blocks.depth + self._index(col)
                b.store(self.left_memory, at, self._value(factor, line, start + col, width), align=1)

            self._along(depth, put)

    def _transpose(self, start: Value, depth: Value) -> None:
        """Stored rows of the right factor as columns."""
        b, lanes, cols = self.b, self.blocks.lanes, self.blocks.cols
        factor = self.right
        with b.loop(b.const(0, i32), b.min(self.n - self.col0, cols), lanes, name="part") as part:
            lines = [factor.row(self.col0 + part + i) for i in range(lanes)]

            def put(col: Value, width: int) -> None:
                rows = [self._value(factor, line, start + col, width) for line in lines]
                columns = self.engine.transpose(rows) if width > 1 else [b.vector(rows)]
                for i, column in enumerate(columns):
                    at = self._index(col + i) * cols + self._index(part)
                    b.store(self.right_memory, at, column, align=1)

            self._along(depth, put)

    # -- products ------------------------------------------------------------------------------------------------------

    def _multiply(self, depth: Value) -> None:
        b, blocks, engine = self.b, self.blocks, self.engine
        piece_rows, pieces = engine.pieces(self.unit, blocks.rows, blocks.cols)
        row_step, step = (1, blocks.rows) if self.config.left.across else (blocks.depth, 1)
        count = b.min(self.m - self.row0, blocks.rows)
        with b.loop(b.const(0, i32), count, piece_rows, name="row") as row:
            for first, widths in pieces:
                base = self._index(row)
                c = engine.accumulators(piece_rows, widths)
                left = Operand(self.left_memory, base * row_step, row_step, step)
                right = Operand(self.right_memory, b.const(first * blocks.lanes, i64), 0, blocks.cols)
                engine.multiply(c, left, right, 0, self._index(depth))
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
