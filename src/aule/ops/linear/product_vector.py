"""A product on CPU cores, by the vector engine: a task has a tile of the result, brings both factors together for a
part of the summed dimension after the other, as numbers of the type that is computed in, and multiplies there. Where
the processor multiplies pairs of bf16, factors of bf16 come together as such pairs along the summed dimension."""

from __future__ import annotations

from functools import partial

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, element, i32, i64
from aule.ops.linear.config import ProductConfig, VectorBlocks
from aule.ops.linear.factors import Factor, Stored
from aule.ops.linear.pack_vector import Bringing
from aule.ops.linear.product_fragment import tile_of
from aule.ops.parameters import Parameters
from aule.target import Target
from aule.tile.vector import Operand, vector_unit


def build_product_vector(config: ProductConfig, target: Target) -> KernelIR:
    """Trace the kernel."""
    blocks = config.blocks
    assert isinstance(blocks, VectorBlocks)
    b = Builder(config.name, 1)
    _Product(b, config, blocks, target).run()
    return b.finish()


class _Product(Bringing):
    def __init__(self, b: Builder, config: ProductConfig, blocks: VectorBlocks, target: Target) -> None:
        super().__init__(b, blocks, config.work, config.left.stored.dtype, target)
        self.config = config
        p = self.p = Parameters(b, i64)
        self.unit = vector_unit(target, self.work)
        self.m, self.n, self.k = (p.number(name) for name in "mnk")
        self.row0, self.col0 = tile_of(b, self.m, self.n, blocks.rows, blocks.cols, 1)
        self.left = Factor(p, config.left, self.m, self.k, self.work, whole=True)
        self.right = None if config.packed else Factor(p, config.right, self.n, self.k, self.work, whole=True)
        self.left_memory = b.shared("left", self.stored, blocks.rows * self.depth)
        if config.packed:
            self.right_memory = p.buffer("packed", self.stored)
        else:
            self.right_memory = b.shared("right", self.stored, blocks.cols * self.depth)
        self.result = b.shared("result", self.work, blocks.rows * blocks.cols)

    def run(self) -> None:
        b, blocks = self.b, self.blocks
        cleared = [(self.left_memory, blocks.rows * self.depth), (self.result, blocks.rows * blocks.cols)]
        if self.right is not None:
            cleared.append((self.right_memory, blocks.cols * self.depth))
        for memory, size in cleared:
            zero = b.splat(b.const(0, element(memory.type)), blocks.lanes)
            with b.loop(b.const(0, i64), size, blocks.lanes, name="i") as i:
                b.store(memory, i, zero, align=1)
        with b.loop(b.const(0, i32), self.k, blocks.depth, name="start") as start:
            count = b.min(self.k - start, blocks.depth)
            if self.config.left.across:
                self.copy(self.left, self.row0, blocks.rows, start, count, self.left_memory, b.const(0, i64))
            else:
                self._lines(start, count)
            right = b.const(0, i64)
            if self.right is None:
                right = self.panel(self.col0, start, self.k)
            else:
                self.bring_columns(self.right, self.col0, start, count, self.right_memory, right)
            self._multiply((count + 1) >> 1 if self.pairs else count, right)
        self._finish()

    # -- bringing in ---------------------------------------------------------------------------------------------------

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
                    bring = self._neighbours if self.pairs else partial(self._value, width=width)
                    value = bring(factor, line, start + col)
                b.store(self.left_memory, at, value, align=1)

            self._along(depth, put, single=single)

    # -- products ------------------------------------------------------------------------------------------------------

    def _multiply(self, steps: Value, start: Value) -> None:
        """The part that lies in memory, of the right factor from ``start`` on."""
        b, blocks, engine = self.b, self.blocks, self.engine
        piece_rows, pieces = engine.pieces(self.unit, blocks.rows, blocks.cols, self.pairs)
        row_step, step = (1, blocks.rows) if self.config.left.across else (self.depth, 1)
        count = b.min(self.m - self.row0, blocks.rows)
        with b.loop(b.const(0, i32), count, piece_rows, name="row") as row:
            for first, widths in pieces:
                base = self._index(row)
                c = engine.accumulators(piece_rows, widths)
                left = Operand(self.left_memory, base * row_step, row_step, step)
                right = Operand(self.right_memory, start + first * blocks.lanes, 0, blocks.cols)
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
