"""Tiles in the registers of a workgroup of the simt engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aule.ir import Value
from aule.tile.common.variables import assign_vars, read_vars

if TYPE_CHECKING:
    from aule.tile.simt.engine import Simt


class RegisterTile:
    """A tile spread over the registers of a workgroup: each thread holds ``rows`` × ``cols`` variables."""

    def __init__(
        self, engine: Simt, rows: int, cols: int, strip: int, init: Value, row_strip: int | None = None
    ) -> None:
        """A thread holds ``strip`` consecutive columns and ``row_strip`` consecutive rows (by default the shape's)."""
        self.engine = engine
        self.strip = strip
        self.row_strip = engine.shape.row_strip if row_strip is None else row_strip
        self.vars = [[engine.b.var(init) for _ in range(cols)] for _ in range(rows)]

    def row(self, r: int) -> Value:
        """Row in the tile of this thread's register row ``r``."""
        return self.engine.row(r, self.row_strip)

    def col(self, c: int) -> Value:
        """Column in the tile of this thread's register column ``c``."""
        strip, lane = divmod(c, self.strip)
        return self.engine.tx * self.strip + (strip * self.engine.shape.threads_x * self.strip + lane)

    def values(self) -> list[list[Value]]:
        return read_vars(self.vars)

    def assign(self, values: Sequence[Sequence[Value]]) -> None:
        assign_vars(self.vars, values)

    def fill(self, value: Value) -> None:
        self.assign([[value] * len(row) for row in self.vars])

    def map(self, f: Callable[[Value, int, int], Value]) -> None:
        """Replace each element by ``f(value, r, c)``; ``r`` and ``c`` count registers (see `row`, `col`)."""
        self.assign([[f(x, r, c) for c, x in enumerate(row)] for r, row in enumerate(self.values())])
