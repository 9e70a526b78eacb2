"""Per-row state (m, l) of the simt kernels, from tile to tile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from aule.ir import Value
from aule.ir.types import f32

if TYPE_CHECKING:
    from aule.tile.simt.engine import Simt


class RegisterRowState:
    """A number for each row of this thread, in registers."""

    def __init__(self, engine: Simt, init: Value) -> None:
        self.vars = [engine.b.var(init) for _ in range(engine.shape.rows)]

    def load(self) -> list[Value]:
        return [x.value for x in self.vars]

    def store(self, values: Sequence[Value]) -> None:
        for variable, value in zip(self.vars, values, strict=True):
            variable.value = value


class SharedRowState:
    """A number for each row of this thread, in shared memory: it takes no registers from the products.

    ``common`` numbers are the same in all threads of a row, and one of them stores them. A barrier must lie between a
    store and the next load. Other numbers are the thread's own.
    """

    def __init__(self, engine: Simt, name: str, init: Value, common: bool) -> None:
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
            b.subgroup_barrier()  # everyone has loaded them; without subgroups `reduce_rows` has had a barrier
        with b.if_(b.eq(self.engine.tx, 0)) if self.common else nullcontext():
            for i, place in enumerate(self.places):
                b.store(self.memory, place, b.vector(list(values[i * self.strip : (i + 1) * self.strip])))


RowState = RegisterRowState | SharedRowState
