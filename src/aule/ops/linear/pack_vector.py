"""Packing of factors for a CPU's vectors, and the kernel that packs the right factor once for all rows of tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, Vector, bf16, element, i32, i64, u16, u32
from aule.ops.linear.config import FactorConfig, VectorBlocks
from aule.ops.linear.factors import Factor, FactorRow
from aule.ops.shared.parameters import Parameters
from aule.target import Target
from aule.tile.vector.engine import Vectors, has_pairs, vector_unit


def steps_of(blocks: VectorBlocks, dtype: str, target: Target) -> int:
    """Steps of a part: numbers of the summed dimension, or pairs of them."""
    return blocks.depth // 2 if has_pairs(target, SCALARS[dtype]) else blocks.depth


def piece_of(blocks: VectorBlocks, work: str, target: Target) -> tuple[int, int]:
    """Rows and vectors of the pieces of a tile that stay in registers."""
    return vector_unit(target, SCALARS[work]).tile(blocks.rows, blocks.cols // blocks.lanes)


def panel_numbers(blocks: VectorBlocks, work: str, dtype: str, target: Target) -> int:
    """Numbers, or pairs, of the right factor's part for a tile: full pieces, one after the other."""
    _, vectors = piece_of(blocks, work, target)
    width = vectors * blocks.lanes
    return -(-blocks.cols // width) * width * steps_of(blocks, dtype, target)


class FactorPacker:
    """Packs parts of factors in memory, as numbers of the type computed in or as pairs of bf16.

    A part of the right factor is packed piece by piece, since a piece's vectors are read for many rows: side by side
    they stay in the first-level cache. At the distance of a tile's width they would share a few of its sets.
    """

    def __init__(self, b: Builder, blocks: VectorBlocks, work: str, dtype: str, target: Target) -> None:
        self.b, self.blocks = b, blocks
        self.work = SCALARS[work]
        self.engine = Vectors(b, self.work, blocks.lanes)
        self.pairs = has_pairs(target, SCALARS[dtype])
        self.each = 2 if self.pairs else 1
        """Numbers of the summed dimension in a step."""
        self.depth = steps_of(blocks, dtype, target)
        self.piece_rows, self.piece = piece_of(blocks, work, target)
        self.panel_numbers = panel_numbers(blocks, work, dtype, target)
        self.stored = u32 if self.pairs else self.work

    def panel(self, first: Value, start: Value, summed: Value) -> Value:
        """Where the part from ``start`` on of the columns from ``first`` on begins in the packed factor."""
        parts = self._index((summed + (self.blocks.depth - 1)) // self.blocks.depth)
        number = self._index(first // self.blocks.cols) * parts + self._index(start // self.blocks.depth)
        return number * self.panel_numbers

    def _place(self, step: Value, col: Value) -> Value:
        """Where a column of a part of the right factor is at a step."""
        width = self.piece * self.blocks.lanes
        if width >= self.blocks.cols:
            return step * width + col
        piece = col // width
        return piece * (width * (self.depth - 1)) + step * width + col  # `col` counts the columns before the piece

    def _along(self, count: Value, f: Callable[[Value, int], None], width: int | None = None, single: int = 1) -> None:
        """Call ``f`` for each ``width`` of ``count`` columns (a vector by default), then for each ``single`` of the
        rest."""
        b, width = self.b, width or self.blocks.lanes
        last = count - count % width
        with b.loop(b.const(0, i32), last, width, name="col") as col:
            f(col, width)
        with b.loop(last, count, single, name="col") as col:
            f(col, single)

    def _value(self, factor: Factor, row: FactorRow, col: Value, width: int) -> Value:
        return factor.value(factor.load(row, col, width), row, factor.affine(col, width))

    def _neighbours(self, factor: Factor, row: FactorRow, col: Value) -> Value:
        """A vector of columns as pairs of neighbours: as they are stored, if they are not normalised."""
        lanes = self.blocks.lanes
        if factor.norm is None:
            return self.b.bitcast(factor.load(row, col, lanes), Vector(u32, lanes // 2))
        return self.engine.pairs(self._value(factor, row, col, lanes))

    def _paired(self, first: Value, second: Value, exists: Value) -> Value:
        """Pairs of the numbers of two vectors, with zeros for the second if that does not exist."""
        b = self.b
        lanes = first.type.lanes if isinstance(first.type, Vector) else 1
        second = b.select(exists, second, b.splat(b.const(0.0, element(second.type)), lanes))
        if lanes > 1:
            return self.engine.pair_up(first, second)
        low, high = (b.cast(b.bitcast(b.cast(x, bf16), u16), u32) for x in (first, second))
        return low | (high << 16)

    def pack_columns(
        self, factor: Factor, first: Value, start: Value, depth: Value, memory: Value, base: Value
    ) -> None:
        """Pack a part of the right factor, for a tile's columns from ``first`` on, to memory from ``base`` on."""
        if factor.depth_major:
            self.copy(
                factor, first, self.blocks.cols, start, depth, memory, lambda row, col: base + self._place(row, col)
            )
        else:
            self._transpose(factor, first, start, depth, memory, base)

    def copy(
        self,
        factor: Factor,
        first: Value,
        outer: int,
        start: Value,
        depth: Value,
        memory: Value,
        place: Callable[[Value, Value], Value],
    ) -> None:
        """Pack stored rows in their order, or in pairs: ``outer`` numbers per step; ``place`` says where one goes."""
        b, each = self.b, self.each
        count = b.min(factor.cols - first, outer)
        with b.loop(b.const(0, i32), depth, each, name="row") as row:
            lines = [factor.row(start + b.min(row + i, depth - 1)) for i in range(each)]

            def put(col: Value, width: int) -> None:
                load = factor.load if self.pairs and factor.norm is None else partial(self._value, factor)
                values = [load(line, first + col, width) for line in lines]
                value = self._paired(values[0], values[1], row + 1 < depth) if self.pairs else values[0]
                b.store(memory, place(self._index(row // each), self._index(col)), value, align=1)

            self._along(count, put)

    def _transpose(self, factor: Factor, first: Value, start: Value, depth: Value, memory: Value, base: Value) -> None:
        """Pack stored rows of the right factor, from ``first`` on, as columns, to memory from ``base`` on."""
        b, lanes, cols, single = self.b, self.blocks.lanes, self.blocks.cols, self.each
        with b.loop(b.const(0, i32), b.min(factor.rows - first, cols), lanes, name="part") as part:
            lines = [factor.row(first + part + i) for i in range(lanes)]

            def column(col: Value) -> Value:
                return b.vector([self._value(factor, line, start + col, 1) for line in lines])

            def block(line: FactorRow, col: Value) -> Value:
                if not self.pairs:
                    return self._value(factor, line, start + col, lanes)
                low, high = (self._neighbours(factor, line, start + col + i * lanes) for i in range(2))
                return b.permute(low, high, tuple(range(lanes)))

            def put(col: Value, width: int) -> None:
                if width > single:
                    columns = self.engine.transpose([block(line, col) for line in lines])
                elif self.pairs:
                    columns = [self._paired(column(col), column(b.min(col + 1, depth - 1)), col + 1 < depth)]
                else:
                    columns = [column(col)]
                for i, value in enumerate(columns):
                    at = self._place(self._index(col // single + i), self._index(part))
                    b.store(memory, base + at, value, align=1)

            self._along(depth, put, lanes * single, single)

    def _index(self, value: Value) -> Value:
        return self.b.cast(value, i64)


@dataclass(frozen=True)
class PackConfig:
    """Configuration of the kernel that packs a right factor."""

    work: str
    factor: FactorConfig
    blocks: VectorBlocks


def build_pack(config: PackConfig, target: Target) -> KernelIR:
    """Trace the kernel: a task packs a part of the columns of a tile."""
    b = Builder("linear_pack", 1)
    p, blocks = Parameters(b, i64), config.blocks
    packer = FactorPacker(b, blocks, config.work, config.factor.stored.dtype, target)
    n, k = p.number("n"), p.number("k")
    factor = Factor(p, config.factor, n, k, packer.work, full_steps=True)
    packed = p.buffer("packed", packer.stored, "write")
    first, start = b.group_id(0) * blocks.cols, b.group_id(1) * blocks.depth
    depth = b.min(k - start, blocks.depth)
    packer.pack_columns(factor, first, start, depth, packed, packer.panel(first, start, k))
    return b.finish()
