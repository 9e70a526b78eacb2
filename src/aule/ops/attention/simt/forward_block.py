"""The parameters of the simt forward kernel, and the place of a workgroup's block of query rows in the problem."""

from __future__ import annotations

from contextlib import nullcontext

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, Scalar, f32, i32, i64, u8, u32
from aule.ops.attention.config import ForwardConfig
from aule.ops.attention.prepass.tile_list import TileList, tile_at
from aule.ops.combine.pieces import Piece, RowPartials
from aule.ops.scores import modifiers as mod
from aule.ops.scores.band import Extent, Scores, block_of
from aule.ops.scores.parameters import Parameters
from aule.ops.scores.rotated_operands import declare_tables, rotating
from aule.ops.shared.parameters import workgroup_number
from aule.ops.softmax.online_softmax import Maximum, from_sink
from aule.tile.common.math import LOWEST, fold
from aule.tile.common.matrix import Matrix
from aule.tile.simt.register_tile import RegisterTile


class Block:
    """A workgroup's block of query rows: its operands, its tiles of keys and what happens to its scores.

    Attributes
    ----------
    exists : Value
        The launch may have more workgroups than blocks.
    first_tile, last_tile : Value
        The tiles ``first_tile .. last_tile - 1`` hold every key that some row keeps.
    first_full, last_full : Value
        In the tiles ``first_full .. last_full - 1`` every row keeps every key unless mask or bias drop some.
    tile_list : TileList or None
        The tiles that a mask function leaves; ``first_tile`` and ``last_tile`` then count along the list.
    partials : RowPartials or None
        Where results go if the workgroup has only a piece of the block's keys.
    """

    def __init__(self, b: Builder, config: ForwardConfig, piece: Piece | None = None) -> None:
        self.b, self.config = b, config
        self.index: Scalar = i64 if config.index64 else i32
        p = self.p = Parameters(b, config, self.index)
        self._declare()

        number = workgroup_number(b) if piece is None else piece.number
        blocks, total = p.number("blocks_q"), p.number("blocks")
        self.exists = number < total
        self.head_number, block = block_of(b, config, number, blocks, total, total // blocks)
        self.row0 = block * config.shape.block_q
        heads = p.number("heads_q")
        batch, self.head = self.head_number // heads, self.head_number % heads
        kv_head = self.head // p.number("group")
        scores = self.scores = Scores(p, batch)
        if config.packed:
            self.exists = self.exists & (self.row0 < scores.seq_q)

        self.q = self._matrix("q", self.head, scores.seq_q, config.head_dim, 0)
        self.k = self._matrix("k", kv_head, scores.seq_kv, config.head_dim, 1)
        self.q, self.k = (rotating(p, name, m, batch, scores.shift) for name, m in (("q", self.q), ("k", self.k)))
        self.v = self._matrix("v", kv_head, scores.seq_kv, config.value_dim, 2)
        self.o = self._matrix("o", self.head, scores.seq_q, config.value_dim, 3)
        self.lse_base = scores.extent.row_base(p, self.head_number, self.head)
        self.modifiers = scores.modifiers(self.head, {"mask": "any", "bias": "any"})
        self.sink: Value | None = None
        if config.sinks and piece is None:  # otherwise it is counted when pieces are combined
            self.sink = b.load(p.buffer("sinks", f32), p.strided("sinks", self.head))
        self.keep_scale = p.number("keep_scale", f32) if config.dropout else None
        self.dropout = scores.dropout()
        self.tile_list: TileList | None = None
        if config.tiles_listed:
            self.tile_list = TileList(p, batch, self.head, block, config.shape)
            self.first_tile, self.last_tile = b.const(0, i32), self.tile_list.count
        else:
            self._find_tiles()
        self.partials: RowPartials | None = None
        if piece is not None:
            self.partials = RowPartials(p, piece, config.shape.block_q, config.aligned[3])
            self.first_tile, self.last_tile = piece.tiles(self.first_tile, self.last_tile)

    def _declare(self) -> None:
        """Declare the buffers in an order on which callers rely, and the numbers that every kernel has."""
        p, config = self.p, self.config
        elem = SCALARS[config.dtype]
        for name in "qkv":
            p.buffer(name, elem)
        p.buffer("o", elem, "write")
        for name, dtype in (("mask", config.mask), ("bias", config.bias)):
            if dtype:
                p.buffer(name, u8 if dtype == "bool" else SCALARS[dtype])
        for name in ("alibi", "sinks"):
            if getattr(config, name):
                p.buffer(name, f32)
        if config.dropout:
            p.buffer("seed", u32)
        if config.rope is not None:
            declare_tables(p)
        self.lse = p.buffer("lse", f32, "write") if config.lse else None
        lengths = () if config.packed else ("seq_q", "seq_kv")
        shift = () if config.packed else ("shift",)
        sides = [side for side in ("left", "right") if getattr(config, side)]
        for name in (*lengths, "heads_q", "group", "blocks_q", "blocks", *shift, *sides):
            p.number(name)
        self.scale = p.number("scale", f32)
        if config.softcap:
            p.number("softcap", f32)

    def _matrix(self, name: str, head: Value, rows: Value, cols: int, number: int) -> Matrix:
        b, p, config, index = self.b, self.p, self.config, self.index
        first = self.scores.extent.first(name)
        batch = self.scores.batch if first is None else b.const(0, i32)
        base = p.number(f"{name}_offset", index)
        strides = [p.number(f"{name}_stride{axis}", index) for axis in (0, 1)]
        base = base + fold(b, "add", [b.cast(i, index) * s for i, s in zip((batch, head), strides, strict=True)])
        row_stride = b.const(cols, index) if config.full_tiles else p.number(f"{name}_row_stride", index)
        if first is not None:
            base = base + b.cast(first, index) * row_stride
        col_stride = None if config.unit[number] else p.number(f"{name}_col_stride", index)
        buffer, aligned = p.buffer(name, SCALARS[config.dtype]), config.aligned[number]
        return Matrix(buffer, base, rows, cols, row_stride, col_stride, aligned, in_bounds=config.full_tiles)

    def _find_tiles(self) -> None:
        b, scores, width = self.b, self.scores, self.config.shape.block_kv
        nearest = self.row0 + scores.shift
        furthest = b.min(self.row0 + self.config.shape.block_q, scores.seq_q) - 1 + scores.shift
        reach = scores.reach(nearest, furthest)
        self.first_tile, self.first_full = reach.first, reach.full_first
        if self.config.left:
            self.first_tile = reach.first // width
            self.first_full = (reach.full_first + (width - 1)) // width
        self.last_tile = (reach.end + (width - 1)) // width
        self.last_full = reach.full_end // width

    def tile(self, place: Value) -> Value:
        """The number of the tile in a place."""
        return tile_at(self.tile_list, place)

    def is_edge(self, place: Value) -> Value:
        """Whether the band, the end of the sequence or a mask function drops some key of the tile in a place."""
        if self.tile_list is not None:
            return place < self.tile_list.partial
        return (place < self.first_full) | (place >= self.last_full)

    @property
    def rows(self) -> Value:
        """Rows of the block that exist."""
        return self.b.min(self.scores.seq_q - self.row0, self.config.shape.block_q)

    # -- between the products --------------------------------------------------------------------------------------

    def start(self, maximum: Maximum, column: Value) -> tuple[Value, Value]:
        """Row state (m, l) before the first tile, in the thread with a column."""
        if self.sink is None:
            return self.b.const(LOWEST, f32), self.b.const(0.0, f32)
        return from_sink(maximum, self.sink, column)

    def modify(self, S: RegisterTile, tile: Value, edge: Value) -> None:
        """Run the modifiers over a tile of scores; those that only drop keys run only at an ``edge``."""
        for modifier in self.modifiers:
            with nullcontext() if modifier.everywhere else self.b.if_(edge):
                self._apply(S, modifier, tile)

    def _apply(self, S: RegisterTile, modifier: mod.Modifier, tile: Value) -> None:
        scores = self.scores
        rows = [self.row0 + S.row(r) for r in range(len(S.vars))]
        columns = [tile * self.config.shape.block_kv + S.col(c) for c in range(len(S.vars[0]))]
        positions = [row + scores.shift for row in rows]

        def site(r: int, c: int) -> mod.Site:
            return mod.Site(scores.batch, self.head, rows[r], columns[c], positions[r])

        S.map(lambda s, r, c: modifier.apply(self.b, s, site(r, c)))

    def drop(self, S: RegisterTile, p: list[list[Value]], tile: Value) -> list[list[Value]]:
        """P of a tile with zeros for the weights that dropout drops."""
        if self.dropout is None:
            return p
        b, zero = self.b, self.b.const(0.0, f32)
        result: list[list[Value]] = []
        for r, weights in enumerate(p):
            row = self.row0 + S.row(r)
            keep: list[Value] = []
            for c in range(0, len(weights), S.strip):
                column = tile * self.config.shape.block_kv + S.col(c)
                keep += self.dropout.strip(self.head_number, row, column, S.strip)
            result.append([b.select(kept, x, zero) for kept, x in zip(keep, weights, strict=True)])
        return result

    # -- results ---------------------------------------------------------------------------------------------------

    def combine_pieces(self, partials: RowPartials) -> None:
        """Combine the block's pieces if this was the last of them to finish."""
        scores = self.scores
        extent = Extent(scores.seq_q, scores.seq_kv, scores.shift, None, None)
        partials.finish(self.row0, self.rows, scores.batch, self.head, extent)
