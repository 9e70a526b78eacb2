"""Score modifiers and dropout on vectors of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from aule.ir import Builder, Value, Var
from aule.ir.types import i32
from aule.ops.attention.cpu.config import CpuScoreConfig
from aule.ops.scores import modifiers as mod
from aule.ops.scores.band import Scores
from aule.ops.scores.config import Columns
from aule.ops.softmax.dropout import VECTORS, Dropout
from aule.tile.vector.engine import Vectors


def modify(
    scores: Scores,
    engine: Vectors,
    c: list[list[Var]],
    queries: Sequence[tuple[Value, Value]],
    key: Value,
    partial: Value,
    kinds: dict[str, Columns],
    slope: Callable[[int, int, Value], None] | None = None,
) -> None:
    """Apply the modifiers to vectors of scores ``c`` of some rows with the keys from ``key`` on, in place.

    ``queries`` are query head and query row of each row, ``kinds`` the layouts of mask and bias along a row. Keys may
    be outside of some row's band only if ``partial``. ``slope`` is called with row, vector and each derivative of the
    scores by what they were before a modifier, unless it is 1.
    """
    b = scores.b
    columns = [engine.lane_numbers(key + j * engine.lanes) for j in range(len(c[0]))]
    chains = [scores.modifiers(head, kinds) for head, _ in queries]

    def apply(number: int) -> None:
        for r, ((head, row), chain, variables) in enumerate(zip(queries, chains, c, strict=True)):
            modifier = chain[number]
            for j, (variable, column) in enumerate(zip(variables, columns, strict=True)):
                site = mod.Site(scores.batch, head, row, column, row + scores.shift)
                before = variable.value
                variable.value = modifier.apply(b, before, site)
                if modifier.slope is not None and slope is not None:
                    slope(r, j, modifier.slope(b, before, variable.value, site))

    for number, modifier in enumerate(chains[0]):
        with nullcontext() if modifier.everywhere else b.if_(partial):
            apply(number)


class DropoutFactors:
    """Dropout factors of ``shape.rows`` rows with the keys of a block, made before the weights: 0 for dropped weights,
    ``scale`` for the others."""

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
