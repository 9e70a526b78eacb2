"""What happens to scores between the products of the warpgroup forward kernel.

Edge tiles come first; with a mask they are the first ones of a list (`mask_prepass`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from aule.ir import Value, Var
from aule.ir.types import SCALARS, f32, i32, u32
from aule.ops.attention.fragment.forward_memory import TileMemory
from aule.ops.attention.prepass.tile_list import TileList, keep, words
from aule.tile.common.math import LOG2E, NEG_INF
from aule.tile.fragment.engine import FragmentTile
from aule.tile.warpgroup.engine import Warpgroups


class TileScores(TileMemory):
    """A block whose scores are modified in registers, tile by tile."""

    engine: Warpgroups
    tile_list: TileList | None
    edges: Value
    """How many edge tiles there are; they come first unless tiles are ``ascending``."""
    ascending: bool
    """Tiles come in the order of their keys."""

    def _mask_bits(self, tile: Value, i: Value) -> list[Var]:
        """The keys of a tile that a boolean mask keeps, as bits; fetched only for edge tiles."""
        b = self.b
        if self.tile_list is None or self.config.mask != "bits":
            return []
        found = [b.var(b.const(0xFFFFFFFF, u32), "bits") for _ in range(words(self.shape.block_kv))]
        with b.if_(i < self.edges):
            for variable, word in zip(found, self.tile_list.bits(tile, self.engine.subgroup), strict=True):
                variable.value = word
        return found

    def _modify_tile(self, S: FragmentTile, tile: Value, i: Value, bits: list[Var]) -> list[Value]:
        """Run all modifiers over the scores of the ``i``-th tile. Returns as `_modify_everywhere`."""
        key0 = tile * self.shape.block_kv
        row_terms = self._modify_everywhere(S, key0)
        if self.config.one_loop:
            always = self.ascending or self.config.everywhere  # each modifier asks for itself
            with nullcontext() if always else self.b.if_(i < self.edges):
                self._modify_edge(S, key0, bits)
        return row_terms

    def _modify_everywhere(self, S: FragmentTile, key0: Value) -> list[Value]:
        """Run the modifiers that every tile needs. Returns what is still to be added to the scores of each row, or
        nothing."""
        if self.config.linear:
            return self._add_distances(S, key0)
        if not self.config.folded:
            S.map(lambda s, r, c: s * self.scale)
        self._apply([m for m in self.modifiers if m.everywhere], S, key0)
        return []

    def _add_distances(self, S: FragmentTile, key0: Value) -> list[Value]:
        """Add ALiBi's distances where no key is to the right of its row: a term for each column here, and a term for
        each row, which is returned."""
        b, engine, scores = self.b, self.engine, self.scores
        slope = b.load(self.p.buffer("alibi", f32), self.p.strided("alibi", scores.batch, self.head)) * LOG2E
        columns = [slope * float(engine.behind(c)) for c in range(len(S.values()[0]))]
        S.map(lambda s, r, c: b.fma(s, self.scale, columns[c]))
        start = key0 + engine.lane_col - (self.row0 + self.subgroup_row + scores.shift)
        return [slope * b.cast(start - S.row(r), f32) for r in range(engine.rows_held)]

    def _modify_edge(self, S: FragmentTile, key0: Value, bits: list[Var]) -> None:
        """Run the modifiers that only edge tiles need."""
        self._apply([m for m in self.modifiers[:-1] if not m.everywhere], S, key0)
        for name in self.config.pairs:
            self._add_pairs(name, S, key0)
        if bits:
            keep(S, [x.value for x in bits], NEG_INF)
        self._drop_outside(S, key0)

    def _add_pairs(self, name: str, S: FragmentTile, key0: Value) -> None:
        """Add a mask or bias that is read two keys at a time."""
        b, scores, engine, index = self.b, self.scores, self.engine, self.index
        dtype = self.config.mask if name == "mask" else self.config.bias
        assert dtype is not None and engine.run == 2
        buffer, base = self.p.buffer(name, SCALARS[dtype]), self.p.strided(name, scores.batch, self.head)
        row_stride = self.p.number(f"{name}_row_stride", index)
        rows = [b.min(self.row0 + self.subgroup_row + S.row(r), scores.seq_q - 1) for r in range(engine.rows_held)]
        starts = [base + b.cast(row, index) * row_stride for row in rows]
        first = key0 + engine.lane_col
        pair: list[Value] = []

        def add(place: Callable[[int], Value]) -> None:
            def each(s: Value, r: int, c: int) -> Value:
                if c % 2 == 0:
                    pair[:] = b.unpack(b.load(buffer, starts[r] + place(engine.behind(c)), 2))
                return self.config.add(b, s, pair[c % 2])

            S.map(each)

        with b.if_(key0 + self.shape.block_kv <= scores.seq_kv):
            add(lambda column: b.cast(first, index) + column)
        with b.else_():
            # Any pair will do for keys past the end.
            add(lambda column: b.cast(b.min(first + column, scores.seq_kv - 2), index))

    def _drop_outside(self, S: FragmentTile, key0: Value) -> None:
        """Drop keys past the end or outside the band: the last modifier, but each side only where this subgroup's rows
        drop some, and by comparisons with column numbers known while tracing."""
        b, scores, engine, block = self.b, self.scores, self.engine, self.shape.block_kv
        start, dropped = key0 + engine.lane_col, b.const(NEG_INF, f32)
        # The shuffle tells the compiler that all lanes have the same value.
        nearest = self.row0 + b.shuffle(engine.subgroup, b.const(0, i32)) * self.shape.rows + scores.shift
        own = self.row0 + self.subgroup_row + scores.shift - start
        end = scores.seq_kv - 1
        with b.if_(key0 + (block - 1) > (end if scores.right is None else b.min(end, nearest + scores.right))):
            last = [end - start] * engine.rows_held
            if scores.right is not None:
                last = [b.min(x, own + S.row(r) + scores.right) for r, x in enumerate(last)]
            S.map(lambda s, r, c: b.select(last[r] >= engine.behind(c), s, dropped))
        if scores.left is not None:
            with b.if_(key0 < nearest + (self.shape.rows - 1) - scores.left):
                first = [own + S.row(r) - scores.left for r in range(engine.rows_held)]
                S.map(lambda s, r, c: b.select(first[r] <= engine.behind(c), s, dropped))
