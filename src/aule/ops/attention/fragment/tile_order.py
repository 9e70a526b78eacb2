"""The order in which a workgroup on matrix units takes its tiles of keys."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, Value
from aule.ir.types import i32
from aule.ops.attention.prepass.tile_list import TileList
from aule.ops.combine.pieces import Piece
from aule.ops.scores.band import Reach
from aule.tile.common.matrix import divmod_const


@dataclass(frozen=True)
class TilePlace:
    """A tile, its stage, the next tile, and whether there is one."""

    tile: Value
    stage: Value
    next: Value
    more: Value


@dataclass(frozen=True)
class TileOrder:
    """Edge tiles, in which some row drops keys, come first, on both sides of the band; then the inner ones, whose loop
    has no code for dropped keys.

    Attributes
    ----------
    first : Value
        The first tile of all.
    inner_first, inner_last : Value
        The inner tiles are ``inner_first .. inner_last - 1``.
    edges : Value
        The number of edge tiles.
    """

    b: Builder
    first: Value
    inner_first: Value
    inner_last: Value
    edges: Value

    @staticmethod
    def of(b: Builder, reach: Reach, width: int, everywhere: bool, piece: Piece | None) -> TileOrder:
        """The order for rows with a reach, or for a piece of them; with ``everywhere`` all tiles are edge tiles."""
        first = divmod_const(b, reach.first, width)[0]
        last = b.max(divmod_const(b, reach.end + (width - 1), width)[0], first)
        if piece is not None:
            first, last = piece.tiles(first, last)
        inner_first = inner_last = last
        if not everywhere:
            inner_first = divmod_const(b, reach.full_first + (width - 1), width)[0]
            inner_first = b.min(b.max(inner_first, first), last)
            inner_last = b.max(divmod_const(b, reach.full_end, width)[0], inner_first)
            if piece is not None:
                inner_last = b.min(inner_last, last)
        return TileOrder(b, first, inner_first, inner_last, last - first - (inner_last - inner_first))

    @property
    def inner(self) -> Value:
        """The number of inner tiles."""
        return self.inner_last - self.inner_first

    @property
    def count(self) -> Value:
        return self.edges + self.inner

    def edge(self, i: Value) -> TilePlace:
        """The ``i``-th edge tile, in one of two stages; after the last come the inner tiles."""
        more = (i + 1 < self.edges) | (self.inner_first < self.inner_last)
        return TilePlace(self._at_edge(i), i & 1, self._at_edge(i + 1), more)

    def _at_edge(self, i: Value) -> Value:
        b, left = self.b, self.first + i
        right = b.select(i < self.edges, left + self.inner, self.inner_first)
        return b.select(left < self.inner_first, left, right)

    def inside(self, tile: Value) -> TilePlace:
        """An inner tile; stages go on alternating."""
        return TilePlace(tile, (tile + (self.edges - self.inner_first)) & 1, tile + 1, tile + 1 < self.inner_last)

    def tile(self, i: Value) -> Value:
        """The ``i``-th of all tiles."""
        return self.b.select(i < self.edges, self.edge(i).tile, self.inner_first + (i - self.edges))


@dataclass(frozen=True)
class ListedOrder(TileOrder):
    """The order of listed tiles: partly dropped tiles are the edge tiles. Inner tiles go by their place in the list."""

    tiles: TileList

    @staticmethod
    def over(b: Builder, tiles: TileList) -> ListedOrder:
        """The order of a list."""
        return ListedOrder(b, b.const(0, i32), tiles.partial, tiles.count, tiles.partial, tiles)

    def edge(self, i: Value) -> TilePlace:
        return TilePlace(self.tiles.tile(i), i & 1, self.tiles.tile(i + 1), i + 1 < self.tiles.count)

    def inside(self, tile: Value) -> TilePlace:
        return self.edge(tile)

    def tile(self, i: Value) -> Value:
        return self.tiles.tile(i)
