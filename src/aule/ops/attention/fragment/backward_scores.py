"""What the backward kernels on matrix units share: parameters, scores between the products, and results.

A workgroup *owns* rows of two matrices and passes over the rows of two *others* (`backward.py` has the products).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import log2
from typing import Literal

from aule.ir import Builder, Value, Var
from aule.ir.types import bf16, f32, i32, u16, u32
from aule.ops.attention.backward_block import BackwardBlock
from aule.ops.attention.config import FragmentBackwardConfig
from aule.ops.combine.pieces import Passes, Piece, combine_tiles, piece_of
from aule.ops.scores.band import Place
from aule.ops.scores.tile_dropout import TileDropout
from aule.target import Target
from aule.tile.common.math import LOG2E, NEG_INF
from aule.tile.common.matrix import Matrix, divmod_const, padded
from aule.tile.fragment.arrangement import SIZE, added_together, number_in_block
from aule.tile.fragment.engine import Fragments, FragmentTile
from aule.tile.fragment.rope import rotated_back
from aule.tile.fragment.shape import RUN


class GradientKernel(BackwardBlock):
    """The workgroup's own rows, scores and their gradients, and results."""

    vector_width = RUN
    own: tuple[Matrix, Matrix]
    memory: Value

    def __init__(self, b: Builder, config: FragmentBackwardConfig, target: Target, engine: Fragments) -> None:
        super().__init__(b, config)
        self.config, self.shape, self.engine = config, config.shape, engine
        self.together = added_together(target)
        # The subgroup's first row, and its number among those that share rows.
        down, self.part = divmod_const(b, engine.subgroup, self.shape.columns)
        self.subgroup_row = down * self.shape.rows
        # Its rows and columns of the scores, and their first row and column.
        by_rows, by_cols = self.shape.score_cut
        self.score_rows, self.own_width = self.shape.rows // by_rows, self.shape.block_kv // by_cols
        self.score_row = engine.subgroup * self.score_rows if by_rows > 1 else self.subgroup_row
        cut, self.depth_part = divmod_const(b, self.part, self.shape.depth_parts)
        self.score_col = cut * self.own_width if by_cols > 1 else b.const(0, i32)
        dims = config.head_dim, config.value_dim
        self.depths = tuple(padded(dim, SIZE) // SIZE for dim in dims)
        self.widths = tuple(self.shape.result_columns(dim) for dim in dims)

    def finite(self, run: Value) -> Value:
        """A run with zeros for Inf and NaN: dS of a dropped key is 0, and 0 times either is NaN. If a row keeps the
        key, its log-sum-exp is NaN already."""
        b, elem = self.b, self.engine.elem
        exponent = 0x7F80 if elem == bf16 else 0x7C00
        parts = []
        for x in b.unpack(run):
            word = b.cast(b.bitcast(x, u16), u32)
            parts.append(b.select((word & 0x7FFF) < exponent, x, b.const(0, elem)))
        return b.vector(parts)

    def weigh(
        self,
        S: FragmentTile,
        head: Value,
        place: Place,
        partial: Value | None,
        base: Callable[[int, int], Value],
    ) -> list[list[Value]] | None:
        """Replace S by P, with ``base`` to be added to each scaled score. ``partial`` is whether rows may drop keys of
        the tile, or None without modifiers. Returns the derivative of the softcap, if there is one."""
        b, config = self.b, self.config
        if not config.folded:
            S.map(lambda s, r, c: s * self.scale)
        slope = None if partial is None else self.scores.modify(S, head, place, partial)
        if config.folded:
            S.map(lambda s, r, c: b.exp2(b.fma(s, self.scale, base(r, c))))
        else:
            S.map(lambda s, r, c: b.exp2(s + base(r, c)))
        return slope

    def differentiate(
        self,
        p: list[list[Value]],
        dp: list[list[Value]],
        delta: Callable[[int, int], Value] | None,
        slope: list[list[Value]] | None,
        kept: list[list[Value]] | None,
        guarded: bool = True,
    ) -> list[list[Value]]:
        """Compute dS from P and dP, given the derivative ``slope`` of the softcap and the weights that dropout
        ``kept``.

        ``delta`` is None if dP has it subtracted. If ``guarded``, a weight of zero gives zero even if dP or slope is
        Inf or NaN, as V and K of dropped keys may be.
        """
        b, zero = self.b, self.b.const(0.0, f32)
        result = []
        for r, (weights, row) in enumerate(zip(p, dp, strict=True)):
            line = []
            for c, (weight, x) in enumerate(zip(weights, row, strict=True)):
                if kept is not None:
                    x = b.select(kept[r][c], x * self.p.number("keep_scale", f32), zero)
                ds = weight * (x if delta is None else x - delta(r, c))
                if slope is not None:
                    ds = ds * slope[r][c]
                line.append(b.select(b.eq(weight, 0.0), zero, ds) if guarded else ds)
            result.append(line)
        return result

    def kept(
        self, head: Value, place: Place, rows: int, cols: int, keys: Literal["columns", "rows"]
    ) -> list[list[Value]] | None:
        """Which weights of a tile dropout keeps; None without dropout."""
        dropout = self.scores.dropout()
        if dropout is None:
            return None
        tile = TileDropout(dropout, self.engine, rows, cols, keys)
        return tile.draw(self.scores.batch * self.heads + head, place).kept()

    def row_numbers(self, head: Value, row: Value) -> tuple[Value, Value]:
        """What is added to the scaled scores of a query row (minus its log-sum-exp), and its delta. For a row past the
        end, or one that keeps no key, the first is -inf, so that its weights are 0."""
        b = self.b
        lse, delta, empty = self.lse_and_delta(head, row)
        base = lse * -LOG2E
        if self.engine.excess > 1.0:  # P and dS have it and lose it when they become factors
            base = base + log2(self.engine.excess)
        return b.select(empty, b.const(NEG_INF, f32), base), delta

    def result_width(self, which: int) -> int:
        """Columns of a result that one subgroup computes."""
        return self.widths[which] // self.shape.columns

    def result_block(self, i: int) -> Value:
        """Where the ``i``-th block of a subgroup's result rows begins among the shared rows: its own rows of scores
        come first, as it has these factors in registers."""
        return (self.part ^ i) * self.score_rows

    def result_row(self, r: int) -> Value:
        """This lane's ``r``-th row of a result, among those of the subgroup."""
        if self.score_rows == self.shape.rows:
            return self.engine.row(r)
        block, below = divmod(self.engine.below(r), self.score_rows)
        return self.result_block(block) + self.engine.lane_row + below

    def store(self, tile: FragmentTile, out: Matrix, factor: Value | None, which: int) -> None:
        b, run = self.b, self.engine.run
        first = self.part * self.result_width(which)
        if out.rotary is None:
            values = tile.values()
        else:
            place = (self.row0, self.subgroup_row, first)
            values = rotated_back(self.engine, self.memory, tile, out, place, self.result_row, self.widths[which])
        for r, row in enumerate(values):
            at = self.row0 + self.subgroup_row + self.result_row(r)
            with b.if_(at < out.rows):
                for c in range(0, len(row), run):
                    strip = [x if factor is None else x * factor for x in row[c : c + run]]
                    out.store(b, at, first + tile.col(c), strip, self.widths[which])


class KeysKernel(GradientKernel):
    """dK and dV of a block of keys. Tiles are transposed: their rows are keys, their columns query rows."""

    piece: Piece | None
    """The workgroup's piece of the block, if several workgroups may share one."""
    passes: Passes | None
    """The piece's share of the passes over query heads."""
    numbers: Value
    """`row_numbers` of the query rows of a tile, in shared memory."""

    def open_block(self) -> None:
        """Find the workgroup's keys and open its matrices."""
        b, config = self.b, self.config
        self.piece = piece_of(self.p, self.task) if config.shared_blocks else None
        if self.piece is not None:
            self.exists = self.task < self.p.number("workgroups")
        self.own_keys(None if self.piece is None else self.piece.number)
        self.passes = None if self.piece is None else Passes(b, self.piece, self.group, self.p.number("pass_tiles"))
        scores = self.scores
        self.own = (
            self.matrix("k", self.kv_head, scores.seq_kv, config.head_dim, 1),
            self.matrix("v", self.kv_head, scores.seq_kv, config.value_dim, 2),
        )
        self.numbers = b.shared("numbers", f32, self.shape.row_numbers)

    def members(self) -> tuple[Value, Value]:
        """The query heads of the key head that the workgroup passes over: the first, and the one after the last."""
        return (self.b.const(0, i32), self.group) if self.passes is None else self.passes.members()

    def own_tiles(self, member: Value, first: Value, last: Value) -> tuple[Value, Value]:
        """The workgroup's share of the tiles of a pass."""
        return (first, last) if self.passes is None else self.passes.tiles(member, first, last)

    def finish(self, dK: FragmentTile, dV: FragmentTile) -> None:
        """Store the results, when all pieces of the block are there. The next launch may prepare meanwhile."""
        self.b.launch_next()
        if self.piece is None:
            self.store_results(dK, dV)
        else:
            combine_tiles(self.p, self.piece, self.shape.threads, [dK, dV], lambda: self.store_results(dK, dV))

    def numbers_at(self, tile: Value) -> Value:
        """Index of the numbers of a tile's rows."""
        b = self.b
        return (tile & 1) * (2 * self.shape.block_kv) if self.shape.stages > 1 else b.const(0, i32)

    def fetch_numbers(self, head: Value, tile: Value, fetched: list[Var]) -> None:
        """Fetch the numbers of a tile's rows, one row to a thread; `put_numbers` stores them for all."""
        b, width = self.b, self.shape.block_kv
        with b.if_(self.engine.thread < width):
            row = tile * width + self.engine.thread
            for variable, x in zip(fetched, self.row_numbers(head, row), strict=True):
                variable.value = x

    def put_numbers(self, tile: Value, fetched: list[Var]) -> None:
        b, width = self.b, self.shape.block_kv
        with b.if_(self.engine.thread < width):
            for i, variable in enumerate(fetched):
                b.store(self.numbers, self.numbers_at(tile) + i * width + self.engine.thread, variable.value)

    def columns(self, S: FragmentTile, start: Value) -> list[Value]:
        """The numbers of this lane's columns, from shared memory."""
        b, run = self.b, self.engine.run
        result: list[Value] = []
        for c in range(0, len(self.engine.part_cols) * len(S.vars[0]), run):
            result += b.unpack(b.load(self.numbers, start + S.col(c), run))
        return result

    def partial(self, row0: Value, key0: Value, keys: int, end: Value) -> Value:
        """Whether some of a tile's rows may drop some of ``keys`` keys from ``key0`` on."""
        reach = self.scores.reach_of_rows(row0, self.shape.block_kv)
        # Keys past the end matter only for the sums of dQ.
        past = key0 + keys if self.config.sums else end
        return (key0 < reach.full_first) | (past > reach.full_end)

    def dropped(self, p: list[list[Value]], kept: list[list[Value]] | None) -> list[list[Value]]:
        """P with zeros for weights that dropout drops."""
        if kept is None:
            return p
        b, zero = self.b, self.b.const(0.0, f32)
        return [[b.select(keep, x, zero) for keep, x in zip(*row, strict=True)] for row in zip(kept, p, strict=True)]

    def row_tiles(self) -> tuple[Value, Value, Value]:
        """As for all backward kernels; but all tiles if dQ is stored, since rows that keep no key have some, too."""
        first, last, end = super().row_tiles()
        if self.config.one_block:
            first, last = self.b.const(0, i32), (self.scores.seq_q + (self.block_kv - 1)) // self.block_kv
        return first, last, end

    def put_queries(self, tile: FragmentTile, head: Value, row: Value, col: Value, limited: bool = False) -> None:
        """Store a tile of dQ, whose rows begin at query ``row``, or add it to the sums of dQ; ``limited`` if it may
        have too many columns."""
        if not self.config.one_block:
            self._add_to_sums(tile, head, row, col, limited)
            return
        run, factor = self.engine.run, self.p.number("dq_factor", f32)
        out = self.gradient("dq", head, self.scores.seq_q, self.config.head_dim)
        width = (self.depths[0] + limited) * SIZE
        for r, values in enumerate(tile.values()):
            at = row + tile.row(r)
            with self.b.if_(at < out.rows):
                for c in range(0, len(values), run):
                    strip = [x * factor for x in values[c : c + run]]
                    out.store(self.b, at, col + tile.col(c), strip, width)

    def _add_to_sums(self, tile: FragmentTile, head: Value, row: Value, col: Value, limited: bool) -> None:
        """Add a tile to the sums of dQ.

        Sums lie as fragments do, so that the lanes of a subgroup add to neighbouring memory; `build_round` sorts them.
        The sums have room for rows past the end, which add zeros.
        """
        b, scores, arrangement, run = self.b, self.scores, self.engine.arrangement, self.together
        sums = self.p.buffer("dq_sum", f32, "readwrite")
        above = (scores.batch * self.heads + head) * self.p.number("row_tiles") + (row >> 4)
        block = b.cast(above, self.index) * self.depths[0] + b.cast(col >> 4, self.index)
        start = block * (SIZE * SIZE) + b.cast(b.lane_id() * run, self.index)

        def add(i: int, j: int, fragment: Value) -> None:
            (down, top), (right, left) = divmod(i * arrangement.height, SIZE), divmod(j * arrangement.width, SIZE)
            first = (down * self.depths[0] + right) * SIZE * SIZE
            for part in range(0, arrangement.results.parts, run):
                strip = [b.fragment_get(fragment, part + k) for k in range(run)]
                b.atomic("add", sums, start + (first + number_in_block(arrangement, top, left, part)), b.vector(strip))

        for i, variables in enumerate(tile.vars):
            for j, variable in enumerate(variables):
                with b.if_(col + j * arrangement.width < self.depths[0] * SIZE) if limited else nullcontext():
                    add(i, j, variable.value)

    def store_results(self, dK: FragmentTile, dV: FragmentTile) -> None:
        config, scores = self.config, self.scores
        factor = self.p.number("keep_scale", f32) if config.dropout else None
        self.store(dV, self.gradient("dv", self.kv_head, scores.seq_kv, config.value_dim), factor, 1)
        out = self.gradient("dk", self.kv_head, scores.seq_kv, config.head_dim)
        self.store(dK, out, self.p.number("dq_factor", f32), 0)
