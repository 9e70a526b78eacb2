"""Sums in global memory to which simt kernels add tiles with atomics.

A result ``[block_kv, dim]`` of the engine is computed in parts of its columns that fit into registers. In memory it
has the order of registers and threads: neighbouring lanes add to neighbouring elements, so a subgroup's additions of
one register are one transaction. `TileSums.place` returns the place of an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, Value
from aule.ir.types import Scalar
from aule.tile.common.matrix import divmod_const
from aule.tile.simt.engine import Simt
from aule.tile.simt.register_tile import RegisterTile
from aule.tile.simt.shape import LANES_PER_COLUMN, SimtShape

_MOST_ELEMENTS = 64
"""Elements of a part that one thread may hold, beside the results that stay in registers."""


def _widest(n: int) -> int:
    return next(w for w in (4, 2, 1) if n % w == 0)


@dataclass(frozen=True)
class TileSums:
    """Sums of ``dim`` columns by tiles of ``shape.block_kv`` rows."""

    shape: SimtShape
    dim: int

    @property
    def rows(self) -> int:
        """Rows of a tile that one thread holds."""
        return self.shape.block_kv // self.shape.threads_y

    @property
    def parts(self) -> int:
        """Parts in which the columns are computed."""
        cols = self.shape.value_cols(self.dim) // self.shape.threads_x
        return next(
            n for n in range(1, cols + 1) if cols % n == 0 and (self.rows * cols // n <= _MOST_ELEMENTS or n == cols)
        )

    @property
    def part_cols(self) -> int:
        """Columns of a part."""
        return self.shape.value_cols(self.dim) // self.parts

    @property
    def cols(self) -> int:
        """Columns of a part that one thread holds."""
        return self.part_cols // self.shape.threads_x

    @property
    def tile_size(self) -> int:
        """Elements of a tile, with the padding of its columns."""
        return self.shape.block_kv * self.shape.value_cols(self.dim)

    def tile(self, engine: Simt, init: Value) -> RegisterTile:
        """Registers of one part."""
        return RegisterTile(engine, self.rows, self.cols, _widest(self.cols), init, _widest(self.rows))

    def add(self, engine: Simt, tile: RegisterTile, part: int, memory: Value, start: Value) -> None:
        """Add a part to the sums of the tile that begins at ``start``."""
        b, threads = engine.b, self.shape.threads
        for r, row in enumerate(tile.values()):
            for c, x in enumerate(row):
                register = (part * self.rows + r) * self.cols + c
                b.atomic("add", memory, start + register * threads, x)

    def start(self, engine: Simt, tile: Value, index: Scalar) -> Value:
        """Where this thread's elements of tile number ``tile`` begin."""
        return engine.b.cast(tile, index) * self.tile_size + engine.b.cast(engine.thread, index)

    def place(self, b: Builder, row: Value, col: Value) -> Value:
        """Where in its tile an element is."""
        shape, strip, row_strip = self.shape, _widest(self.cols), _widest(self.rows)
        down, below = divmod_const(b, row, shape.threads_y * row_strip)
        ty, r = divmod_const(b, below, row_strip)
        part, within = divmod_const(b, col, self.part_cols)
        across, beside = divmod_const(b, within, shape.threads_x * strip)
        tx, c = divmod_const(b, beside, strip)
        pair, parity = divmod_const(b, ty, LANES_PER_COLUMN)
        thread = (pair * shape.threads_x + tx) * LANES_PER_COLUMN + parity
        register = part * (self.rows * self.cols) + (down * row_strip + r) * self.cols + (across * strip + c)
        return register * shape.threads + thread
