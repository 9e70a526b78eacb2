"""Dropout factors of a block's weights, made before the weights are."""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Builder, Value
from aule.ir.types import i32
from aule.ops.attention.cpu.config import CpuScoreConfig
from aule.ops.softmax.dropout import VECTORS, Dropout
from aule.tile.vector.engine import Vectors


class DropoutFactors:
    """Factors of ``shape.rows`` rows with the keys of a block: 0 if a weight is dropped, else ``scale``."""

    def __init__(self, b: Builder, config: CpuScoreConfig, engine: Vectors, dropout: Dropout, scale: Value) -> None:
        self.b, self.engine, self.dropout, self.scale = b, engine, dropout, scale
        self.rows, self.span = config.shape.rows, VECTORS * engine.lanes
        self.stride = -(-config.shape.block_kv // self.span) * self.span
        self.factors = b.private("keep", config.work, self.rows * self.stride)

    def fill(self, query: Callable[[Value], tuple[Value, Value]], key0: Value, first: Value, last: Value) -> None:
        """Make the factors of the keys ``first .. last - 1`` of a block that begins at ``key0``.

        ``query`` gives the number of a row's query head (``batch * heads_q + head``) and its query row.
        """
        b, engine = self.b, self.engine
        with b.loop(b.const(0, i32), self.rows, name="r") as r:
            head, row = query(r)
            with b.loop(first // self.span * self.span, last, self.span, name="keys") as at:
                to = engine.index(r) * self.stride + engine.index(at)
                for j, x in enumerate(self.dropout.vectors(engine, head, row, key0 + at, self.scale)):
                    b.store(self.factors, to + j * engine.lanes, x)

    def load(self, row: Value | int, key: Value) -> Value:
        """Load a vector of a row's factors, from key ``key`` (i64) of the block on."""
        return self.b.load(self.factors, key + row * self.stride, self.engine.lanes)
