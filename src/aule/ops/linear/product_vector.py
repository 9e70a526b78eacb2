"""A product on CPU cores, by the vector engine.

A task has a tile of the result. For one part of the summed dimension after the other it packs both factors, as numbers
of the type computed in, and multiplies them. If the processor multiplies pairs of bf16, factors of bf16 are packed as
pairs along the summed dimension.
"""

from __future__ import annotations

from functools import partial

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, element, i32, i64
from aule.ops.linear.config import ProductConfig, VectorBlocks
from aule.ops.linear.factors import Factor, Stored
from aule.ops.linear.pack_vector import FactorPacker
from aule.ops.linear.results import tile_of
from aule.ops.shared.parameters import Parameters
from aule.target import Target
from aule.tile.vector.engine import Operand


class VectorProduct(FactorPacker):
    """The product of a tile on a CPU."""

    def __init__(self, config: ProductConfig, blocks: VectorBlocks, target: Target) -> None:
        b = Builder(config.name, 1)
        super().__init__(b, blocks, config.work, config.left.stored.dtype, target)
        self.config = config
        p = self.p = Parameters(b, i64)
        self.m, self.n, self.k = (p.number(name) for name in "mnk")
        self.row0, self.col0 = tile_of(b, self.m, self.n, blocks.rows, blocks.cols, 1)
        self.left = Factor(p, config.left, self.m, self.k, self.work, full_steps=True)
        self.right = None if config.packed else Factor(p, config.right, self.n, self.k, self.work, full_steps=True)
        self.left_memory = b.shared("left", self.stored, blocks.rows * self.depth)
        if config.packed:
            self.right_memory = p.buffer("packed", self.stored)
        else:
            self.right_memory = b.shared("right", self.stored, self.panel_numbers)
        self.result = b.shared("result", self.work, blocks.rows * blocks.cols)

    def build(self) -> KernelIR:
        b, blocks = self.b, self.blocks
        cleared = [(self.left_memory, blocks.rows * self.depth), (self.result, blocks.rows * blocks.cols)]
        if self.right is not None:
            cleared.append((self.right_memory, self.panel_numbers))
        for memory, size in cleared:
            zero = b.splat(b.const(0, element(memory.type)), blocks.lanes)
            with b.loop(b.const(0, i64), size, blocks.lanes, name="i") as i:
                b.store(memory, i, zero, align=1)
        with b.loop(b.const(0, i32), self.k, blocks.depth, name="start") as start:
            count = b.min(self.k - start, blocks.depth)
            if self.config.left.depth_major:
                self.copy(
                    self.left, self.row0, blocks.rows, start, count, self.left_memory,
                    lambda step, row: step * blocks.rows + row,
                )  # fmt: skip
            else:
                self._lines(start, count)
            right = b.const(0, i64)
            if self.right is None:
                right = self.panel(self.col0, start, self.k)
            else:
                self.pack_columns(self.right, self.col0, start, count, self.right_memory, right)
            self._multiply((count + 1) >> 1 if self.pairs else count, right)
        self._finish()
        return b.finish()

    # -- packing -------------------------------------------------------------------------------------------------------

    def _lines(self, start: Value, depth: Value) -> None:
        """Pack stored rows of the left factor in their order: steps of each row of the result."""
        b, factor = self.b, self.left
        single = self.each
        with b.loop(b.const(0, i32), b.min(self.m - self.row0, self.blocks.rows), name="row") as row:
            line = factor.row(self.row0 + row)

            def put(col: Value, width: int) -> None:
                at = self._index(row) * self.depth + self._index(col // single)
                if self.pairs and width == single:
                    numbers = [self._value(factor, line, start + b.min(col + i, depth - 1), 1) for i in range(2)]
                    value = self._paired(numbers[0], numbers[1], col + 1 < depth)
                else:
                    load = self._neighbours if self.pairs else partial(self._value, width=width)
                    value = load(factor, line, start + col)
                b.store(self.left_memory, at, value, align=1)

            self._along(depth, put, single=single)

    # -- products ------------------------------------------------------------------------------------------------------

    def _multiply(self, steps: Value, start: Value) -> None:
        """Multiply the packed parts, the right one from ``start`` on: piece by piece, each with all rows, so that its
        vectors are in the first-level cache for all but the first."""
        b, blocks = self.b, self.blocks
        width = self.piece * blocks.lanes
        full, rest = divmod(blocks.cols // blocks.lanes, self.piece)
        columns = b.min(self.n - self.col0, blocks.cols)
        with b.loop(b.const(0, i32), b.min((columns + (width - 1)) // width, full), name="piece") as number:
            self._multiply_piece(number, self.piece, steps, start)
        if rest:
            with b.if_(columns > full * width):
                self._multiply_piece(b.const(full, i32), rest, steps, start)

    def _multiply_piece(self, number: Value, vectors: int, steps: Value, start: Value) -> None:
        b, blocks, engine = self.b, self.blocks, self.engine
        row_step, step = (1, blocks.rows) if self.config.left.depth_major else (self.depth, 1)
        width = self.piece * blocks.lanes
        right = Operand(self.right_memory, start + self._index(number) * (width * self.depth), 0, width)
        count = b.min(self.m - self.row0, blocks.rows)
        with b.loop(b.const(0, i32), count, self.piece_rows, name="row") as row:
            base = self._index(row)
            c = engine.accumulators(self.piece_rows, vectors)
            engine.multiply(c, Operand(self.left_memory, base * row_step, row_step, step), right, 0, self._index(steps))
            for i, variables in enumerate(c):
                for j, variable in enumerate(variables):
                    at = (base + i) * blocks.cols + self._index(number) * width + j * blocks.lanes
                    old = b.load(self.result, at, blocks.lanes, align=1)
                    b.store(self.result, at, old + variable.value, align=1)

    def _finish(self) -> None:
        b, blocks = self.b, self.blocks
        out = Stored(self.p, self.config.out, "write")
        bias = self._bias()
        with b.loop(b.const(0, i32), b.min(self.m - self.row0, blocks.rows), name="row") as row:
            start = out.start(self.row0 + row)

            def put(col: Value, width: int) -> None:
                at = self._index(row) * blocks.cols + self._index(col)
                value = b.load(self.result, at, width, align=1)
                if bias is not None:
                    value = value + b.load(bias, self._index(col), width, align=1)
                value = b.cast(value, out.elem)
                if self.config.out.unit:
                    b.store(out.buffer, out.index(start, self.col0 + col), value, align=1)
                    return
                for i, x in enumerate(b.unpack(value)):
                    b.store(out.buffer, out.index(start, self.col0 + col + i), x)

            self._along(b.min(self.n - self.col0, blocks.cols), put)

    def _bias(self) -> Value | None:
        """The bias of the tile's columns, converted once for all rows."""
        if self.config.bias is None:
            return None
        b, p = self.b, self.p
        given, memory = p.buffer("bias", SCALARS[self.config.bias]), b.shared("bias_part", self.work, self.blocks.cols)
        start, step = p.strided("bias"), p.number("bias_col_stride", i64)
        with b.loop(b.const(0, i32), b.min(self.n - self.col0, self.blocks.cols), name="col") as col:
            x = b.load(given, start + self._index(self.col0 + col) * step)
            b.store(memory, self._index(col), b.cast(x, self.work))
        return memory
