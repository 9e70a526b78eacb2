"""Queries of the decoding kernel on matrix units: Q as right factors, in registers.

Columns of Q are in the order in which lanes hold those of K. Lanes either load right factors themselves, or Q goes
through shared memory.
"""

from __future__ import annotations

from contextlib import nullcontext

from aule.ir import Value
from aule.ir.types import Vector, f16, f32, i32, u32
from aule.ops.decode.config import FragmentDecodeConfig
from aule.ops.decode.work_range import WorkRange
from aule.tile.common.math import fold
from aule.tile.common.matrix import QUAD
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.direct import Direct
from aule.tile.fragment.engine import Components
from aule.tile.fragment.shape import row_stride


class Queries:
    """Loads Q and makes right factors of it.

    Attributes
    ----------
    scales : Value or None
        After `factors`: shared memory with the power of two that undoes the scaling of each row; None if rows are not
        scaled.
    """

    def __init__(self, work: WorkRange, config: FragmentDecodeConfig, engine: Components, keys: Direct) -> None:
        self.work, self.b, self.config, self.shape = work, work.b, config, config.shape
        self.engine, self.keys = engine, keys
        self.scales: Value | None = None
        self._rows: list[list[Value]] | None = None
        self._words: dict[int, list[Value]] = {}

    def load_early(self) -> None:
        """Begin to load Q before the sequence's length is known, if the configuration says so."""
        if not self.config.early_queries:
            return
        self.work.find_rows()
        if self.config.direct_queries:
            self._words = self._load_words()
        else:
            self._rows = [self._load_row(row) for row in self._subgroup_rows()]

    def factors(self, weights: Value) -> list[Value]:
        """Q as right factors. Clears the rows of ``weights``, shared memory for P, that no query row has."""
        return self._direct_factors(weights) if self.config.direct_queries else self._shared_factors(weights)

    # -- through shared memory -----------------------------------------------------------------------------------------

    def _shared_factors(self, weights: Value) -> list[Value]:
        b, engine, shape, most_rows = self.b, self.engine, self.shape, self.config.most_rows
        stride = row_stride(self.keys.padded)
        memory = b.shared("queries", engine.elem, SIZE * stride)
        if self.config.quantised and self.config.dtype == "bf16":
            self.scales = b.shared("factors", f32, most_rows)
        # Rows that do not exist are multiplied, too; they are cleared while loads are in flight.
        self._clear(memory, most_rows * stride, (SIZE - most_rows) * stride, engine.thread, shape.threads)
        if shape.rows < SIZE:
            self._clear(weights, 0, shape.step * row_stride(SIZE), engine.thread, shape.threads)
        for i, row in enumerate(self._subgroup_rows()):
            with b.if_(row < most_rows) if shape.subgroups > most_rows else nullcontext():
                found = self._load_row(row) if self._rows is None else self._rows[i]
                self._store_row(row, found, memory, stride)
        b.barrier()
        start = b.const(0, i32)
        depth = range(self.keys.fragments)
        return [engine.load_right(memory, start, stride, k * SIZE, 0, transposed=True) for k in depth]

    def _subgroup_rows(self) -> list[Value]:
        """Rows of Q that this subgroup loads; the last may be past ``most_rows``."""
        return [self.engine.subgroup + first for first in range(0, self.config.most_rows, self.shape.subgroups)]

    def _columns(self) -> list[Value]:
        return [self.engine.lane + i for i in range(0, self.keys.padded, self.shape.lanes)]

    def _load_row(self, row: Value) -> list[Value]:
        b, work, dim = self.b, self.work, self.keys.padded
        start = work.row_start("q", work.q, *work.own_query(row))
        inside = [b.min(column, dim - 1) if dim % self.shape.lanes else column for column in self._columns()]
        return [work.q.load_quad(b, start, self.keys.source(column), dim, 1) for column in inside]

    def _store_row(self, row: Value, found: list[Value], memory: Value, stride: int) -> None:
        b, engine, dim, lanes = self.b, self.engine, self.keys.padded, self.shape.lanes
        if self.scales is not None:
            found, scale = self._narrowed([b.cast(x, f32) for x in found])
            with b.if_(b.eq(engine.lane, 0)):
                b.store(self.scales, row, scale)
        for i, (column, x) in enumerate(zip(self._columns(), found, strict=True)):
            if (i + 1) * lanes <= dim:
                b.store(memory, row * stride + column, x)
            else:
                with b.if_(column < dim):
                    b.store(memory, row * stride + column, x)

    def _narrowed(self, found: list[Value]) -> tuple[list[Value], Value]:
        """A row of Q as fp16 below 2, and the power of two to multiply it by.

        This loses less than 2^-24 of the largest element. The lanes of a subgroup hold the elements.
        """
        b = self.b
        largest = b.subgroup_reduce("max", fold(b, "max", [b.abs(x) for x in found]))
        exponent = b.min(b.max(b.bitcast(largest, u32) >> 23, 1), 253)
        down = b.bitcast((254 - exponent) << 23, f32)
        return [b.cast(x * down, f16) for x in found], b.bitcast(exponent << 23, f32)

    def _clear(self, memory: Value, begin: Value | int, size: int, thread: Value, threads: int) -> None:
        b, at_once = self.b, threads * QUAD
        zeros = b.splat(b.const(0, self.engine.elem), QUAD)
        for first in range(0, size, at_once):
            at = thread * QUAD + first
            with b.if_(at < size) if first + at_once > size else nullcontext():
                b.store(memory, at + begin, zeros)

    # -- directly ------------------------------------------------------------------------------------------------------

    def _load_words(self) -> dict[int, list[Value]]:
        """Load this lane's words of Q, by row relative to the lane's."""
        b, work, keys = self.b, self.work, self.keys
        found = {}
        for part in self.engine.part_rows:
            if part < self.shape.rows:
                start = work.row_start("q", work.q, *work.own_query(self.engine.lane_row + part))
                runs = [b.load(work.q.buffer, start + keys.column(piece), keys.run) for piece in range(keys.pieces)]
                found[part] = keys.row_words([b.bitcast(run, Vector(u32, keys.words)) for run in runs])
        return found

    def _direct_factors(self, weights: Value) -> list[Value]:
        shape, keys, engine = self.shape, self.keys, self.engine
        if shape.rows < SIZE:
            own = shape.subgroup_step * row_stride(SIZE)
            self._clear(weights, engine.subgroup * own, own, engine.lane, shape.lanes)
        return [keys.right_factor(self._words, number) for number in range(keys.fragments)]
