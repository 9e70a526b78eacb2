"""What dropout multiplies the weights of some rows by, made before the weights are."""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Builder, Value
from aule.ir.types import i32
from aule.ops.attention.cpu.config import CpuScoreConfig
from aule.ops.attention.dropout import VECTORS, Dropout
from aule.tile.vector import Vectors


class Keep:
    """Factors of ``shape.rows`` rows with the keys of a block: 0 where a weight is dropped, else ``scale``.

    Attributes
    ----------
    stride : int
        Factors from one row to the next.
    """

    def __init__(self, b: Builder, config: CpuScoreConfig, engine: Vectors, dropout: Dropout, scale: Value) -> None:
        self.b, self.engine, self.dropout, self.scale = b, engine, dropout, scale
        self.rows, self.span = config.shape.rows, VECTORS * engine.lanes
        self.stride = -(-config.shape.block_kv // self.span) * self.span
        self.factors = b.private("keep", config.work, self.rows * self.stride)

    def fill(self, place: Callable[[Value], tuple[Value, Value]], key0: Value, first: Value, last: Value) -> None:
        """Make the factors of the keys ``first .. last - 1`` of a block that begins at ``key0``; ``place`` gives the
        number of the query head (``batch * heads_q + head``) and the query row of a row."""
        b, engine = self.b, self.engine
        with b.loop(b.const(0, i32), self.rows, name="r") as r:
            head, row = place(r)
            with b.loop(first // self.span * self.span, last, self.span, name="keys") as at:
                to = engine.index(r) * self.stride + engine.index(at)
                for j, x in enumerate(self.dropout.vectors(engine, head, row, key0 + at, self.scale)):
                    b.store(self.factors, to + j * engine.lanes, x)

    def load(self, row: Value | int, key: Value) -> Value:
        """A vector of factors of a row, from a key of the block on; both i64."""
        return self.b.load(self.factors, key + row * self.stride, self.engine.lanes)
