"""The list of tiles that a mask leaves to a block, which the prepass makes and the main kernel reads.

A list begins with the numbers of its partly dropped tiles and of all its tiles (`HEADER`); partly dropped tiles come
first. A boolean mask of these is stored as bits in the order in which lanes hold scores.
"""

from __future__ import annotations

from aule.ir import Value
from aule.ir.types import f32, i32, u32
from aule.ops.scores.parameters import Parameters
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Components, FragmentTile
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape

LANES = 32
HEADER = 2
WORD = 64
"""Columns whose bits of 16 rows fill one word of a lane."""


def words(cols: int) -> int:
    """Words that a lane's bits of 16 rows and ``cols`` columns take."""
    return -(-cols // WORD)


def bit_number(parts: Components, fragment: int, r: int, c: int) -> int:
    """The bit in a lane's word of its ``r``-th row and ``c``-th column of a fragment."""
    size = len(parts.part_rows) * len(parts.part_cols)
    assert size * WORD // SIZE == 32, "a lane has eight elements of a fragment"
    return fragment * size + r * len(parts.part_cols) + c


def first_classified(p: Parameters, which: Value, block: Value) -> Value:
    """Index of a block's first tile among the classified tiles; ``which`` is the number of its head's map."""
    row = p.b.cast(which * p.number("map_blocks") + block * p.number("block_step"), p.index)
    return row * p.b.cast(p.number("map_tiles"), p.index)


class TileList:
    """The list of tiles of one block of one head."""

    def __init__(
        self, p: Parameters, batch: Value, head: Value, block: Value, shape: FragmentShape | SimtShape
    ) -> None:
        self.p, self.b, self.shape = p, p.b, shape
        b = p.b
        which = batch * p.number("map_batch") + head * p.number("map_head")
        each = self._index(p.number("other_tiles") + HEADER)
        self.start = self._index(which * p.number("own_blocks") + block) * each
        order = p.buffer("mask_order", i32)
        self.partial, self.count = (b.load(order, self.start + i) for i in range(HEADER))
        """The number of partly dropped tiles, which come first, and of all tiles."""
        self.last = b.max(self.count, 1) - 1
        self.classified = first_classified(p, which, block)

    def tile(self, i: Value) -> Value:
        """The ``i``-th tile of the list; past its end the last one."""
        at = self.start + self._index(self.b.min(i, self.last) + HEADER)
        return self.b.load(self.p.buffer("mask_order", i32), at)

    def bits(self, tile: Value, row: Value) -> list[Value]:
        """Words of this lane's bits of 16 rows of a partly dropped tile, from ``16 row`` on."""
        b, each = self.b, words(self.shape.block_kv)
        place = (self.classified + self._index(tile * self.p.number("tile_step"))) * (self.shape.block_q // SIZE)
        start = (place + self._index(row)) * each * LANES + self._index(b.lane_id())
        buffer = self.p.buffer("mask_bits", u32)
        return [b.load(buffer, start + i * LANES) for i in range(each)]

    def _index(self, x: Value) -> Value:
        return self.b.cast(x, self.p.index)


def tile_at(tiles: TileList | None, place: Value) -> Value:
    """The number of the tile in a place of the order in which they are taken: the place itself unless they are
    listed."""
    return place if tiles is None else tiles.tile(place)


def keep(tile: FragmentTile, bits: list[Value], dropped: float) -> None:
    """Replace elements whose bit is not set by ``dropped``."""
    parts = tile.engine
    b, width = parts.b, len(parts.part_cols)

    def each(x: Value, r: int, c: int) -> Value:
        word, fragment = divmod(c // width, WORD // SIZE)
        kept = b.ne(bits[word] & (1 << bit_number(parts, fragment, r, c % width)), 0)
        return b.select(kept, x, b.const(dropped, f32))

    tile.map(each)
