"""Numbers that a simt kernel has for each row of its block, such as m and l of the paper, from tile to tile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from aule.ir import Value
from aule.ir.types import f32

if TYPE_CHECKING:
    from aule.tile.simt import Simt


class RowVariables:
    """A number for each row this thread works on, in registers."""

    def __init__(self, engine: Simt, init: Value) -> None:
        self.vars = [engine.b.var(init) for _ in range(engine.shape.rows)]

    def load(self) -> list[Value]:
        return [x.value for x in self.vars]

    def store(self, values: Sequence[Value]) -> None:
        for variable, value in zip(self.vars, values, strict=True):
            variable.value = value


class KeptRows:
    """The same in shared memory: what is used once a tile leaves its registers to the products in between."""

    def __init__(self, engine: Simt, name: str, init: Value, common: bool) -> None:
        """``common`` numbers are the same in all threads of a row, of which one stores them, as seldom as it can.
        Between that and the next load there is a barrier. Others are the thread's own."""
        shape = engine.shape
        self.engine, self.common, self.strip = engine, common, shape.row_strip
        strips = range(shape.rows // self.strip)
        if common:
            self.places = [engine.row(i * self.strip) for i in strips]
        else:
            self.places = [(engine.thread + i * shape.threads) * self.strip for i in strips]
        self.memory = engine.b.shared(name, f32, shape.block_q if common else shape.threads * shape.rows)
        self.store([init] * shape.rows)

    def load(self) -> list[Value]:
        b = self.engine.b
        return [x for place in self.places for x in b.unpack(b.load(self.memory, place, self.strip))]

    def store(self, values: Sequence[Value]) -> None:
        b = self.engine.b
        if self.common and self.engine.rows_scratch is None:
            b.subgroup_barrier()  # everyone has loaded them; the scratch has barriers of its own
        with b.if_(b.eq(self.engine.tx, 0)) if self.common else nullcontext():
            for i, place in enumerate(self.places):
                b.store(self.memory, place, b.vector(list(values[i * self.strip : (i + 1) * self.strip])))
