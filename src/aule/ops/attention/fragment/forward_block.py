"""What the forward kernels on matrix units share: a workgroup's block of query rows, softmax in registers, and results.

Two things differ from the simt kernel:

* The scale is part of the exponent, ``exp2(scale S - m)``, unless modifiers need scaled scores (``config.folded``).
  Multiplied into Q it would be rounded again.
* m is stored negated, as the addend of that exponent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import log2

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, Scalar, f32, i32, i64
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.fragment.tile_order import ListedOrder, TileOrder
from aule.ops.attention.prepass.tile_list import TileList
from aule.ops.combine.pieces import LanePartials, Piece, lane_numbers
from aule.ops.scores.band import Scores, block_of
from aule.ops.scores.modifiers import Modifier
from aule.ops.scores.pages import PagedMatrix, Pages
from aule.ops.scores.parameters import Parameters
from aule.ops.scores.rotated_operands import rotating
from aule.ops.scores.tile_dropout import Draw, TileDropout
from aule.ops.shared.parameters import workgroup_number
from aule.ops.shared.tickets import when_last
from aule.ops.softmax.online_softmax import NegatedMaximum, SoftmaxState, finish, from_sink
from aule.target import Target
from aule.tile.common.math import LOWEST, fold
from aule.tile.common.matrix import Matrix, divmod_const
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Fragments, FragmentTile


class ForwardBlock(ABC):
    """A workgroup's block of query rows: its operands, its tiles of keys, softmax and the results.

    Subclasses lay out shared memory (`_lay_out`) and pass over the keys (`run`). ``number`` is that of the block, by
    default the workgroup's; ``parameters`` those of the kernel, if it has several such objects.
    """

    def __init__(
        self, b: Builder, config: FragmentConfig, target: Target, piece: Piece | None = None,
        number: Value | None = None, parameters: Parameters | None = None,
    ) -> None:  # fmt: skip
        self.b, self.config, self.target, shape = b, config, target, config.shape
        self.shape = shape
        self.index: Scalar = i64 if config.index64 else i32
        p = self.p = parameters or Parameters(b, config, self.index)
        self.heads, self.blocks = p.number("heads_q"), p.number("blocks_q")
        if number is None:
            number = workgroup_number(b) if piece is None else piece.number
        self.exists = number < p.number("blocks")
        self.head_number, self.block = self._find_block(number)
        self.row0 = self.block * shape.block_q
        batch, self.head, self.kv_head = self._find_heads()
        scores = self.scores = Scores(p, batch)
        if config.packed:
            self.exists = self.exists & (self.row0 < scores.seq_q)
        if config.packed and config.lens:  # the decoding kernels take sequences with few rows
            self.exists = self.exists & (scores.seq_q > p.number("few_tokens"))
        self.piece = piece
        self.scale = p.number("scale", f32)
        self.lowest = b.const(-LOWEST, f32)
        """-m of a row that has seen no key."""
        self.q = self._matrix("q", self.head, scores.seq_q, config.head_dim, 0)
        self.k = self._matrix("k", self.kv_head, scores.seq_kv, config.head_dim, 1)
        self.v = self._matrix("v", self.kv_head, scores.seq_kv, config.value_dim, 2)
        p.buffer("o", SCALARS[config.dtype], "write")  # callers rely on the order: o is the fourth, lse the last
        self.modifiers = scores.modifiers(self.head, {n: "any" for n in ("mask", "bias") if n not in config.pairs})
        self.q, self.k = (rotating(p, name, m, batch, scores.shift) for name, m in (("q", self.q), ("k", self.k)))

        self.dropout = scores.dropout()
        self.engine = self._lay_out(target)
        self.maximum = NegatedMaximum(b, log2(self.engine.excess))
        # The subgroup's first row, and its number among those that share rows.
        down, self.part = divmod_const(b, self.engine.subgroup, shape.columns)
        self.subgroup_row = down * shape.rows
        self._order_tiles()

    # -- the block -------------------------------------------------------------------------------------------------

    def _find_block(self, number: Value) -> tuple[Value, Value]:
        """The head of a workgroup, and the number of its block of rows."""
        p, config = self.p, self.config
        # Warpgroups are fast enough to need K and V of all heads at the memory's speed. Those that stay take blocks in
        # turns, which is fair if neighbours are about as long.
        sections = config.right and (self.shape.copiers or not self.shape.warpgroups)
        together = p.number("heads_together") if sections else None
        return block_of(self.b, config, number, self.blocks, p.number("blocks"), together)

    def _find_heads(self) -> tuple[Value, Value, Value]:
        """The batch of the head, its number in the batch, and the number of its key head."""
        batch, head = self.head_number // self.heads, self.head_number % self.heads
        return batch, head, head // self.p.number("group")

    def _matrix(self, name: str, head: Value, rows: Value, cols: int, number: int) -> Matrix:
        b, p, config, batch = self.b, self.p, self.config, self.scores.batch
        unit, aligned = config.unit[number], config.aligned[number]
        if config.paging != "none" and name != "q":
            pool = p.matrix(name, b.const(0, i32), head, rows, cols, unit, aligned=aligned)
            return PagedMatrix(**vars(pool), pages=Pages(p, batch), page_stride=p.number(f"{name}_stride0", self.index))
        first = self.scores.extent.first(name)
        return p.matrix(name, batch, head, rows, cols, unit, aligned=aligned, first=first)

    @abstractmethod
    def _lay_out(self, target: Target) -> Fragments:
        """Create the engine and divide up shared memory."""

    def _order_tiles(self) -> None:
        if self.config.tiles_listed:
            tiles = TileList(self.p, self.scores.batch, self.head, self.block, self.shape)
            self.tiles: TileOrder = ListedOrder.over(self.b, tiles)
            return
        reach = self.scores.reach_of_rows(self.row0, self.shape.block_q)
        self.tiles = TileOrder.of(self.b, reach, self.shape.block_kv, self.config.everywhere, self.piece)

    def _own_columns(self, dim: int) -> int:
        """Columns of a matrix that a subgroup works on."""
        return self.shape.result_columns(dim) // self.shape.columns

    # -- softmax ---------------------------------------------------------------------------------------------------

    def _start_rows(self) -> list[SoftmaxState]:
        """States of this lane's rows before the first key."""
        engine = self.engine
        m, l = engine.row_vars(self.lowest), engine.row_vars(self.b.const(0.0, f32))
        return [SoftmaxState(self.maximum, *row) for row in zip(m, l, strict=True)]

    def _start_output(self, combining: bool = False) -> tuple[FragmentTile, list[SoftmaxState]]:
        """O and the states of its rows before the first key. A sink is counted once: when pieces are combined, if there
        are any."""
        rows = self._start_rows()
        O = self.engine.tile(self.shape.rows, self._own_columns(self.config.value_dim))
        if self.config.sinks and (self.piece is None or combining):
            self._start_from_sink(rows)
        return O, rows

    def _start_from_sink(self, rows: list[SoftmaxState]) -> None:
        """Count the sink before the first tile."""
        sink = self.b.load(self.p.buffer("sinks", f32), self.p.strided("sinks", self.head))
        m, l = from_sink(self.maximum, sink, self.engine.lane_col)
        for row in rows:
            row.m.value, row.l.value = m, l

    def _apply(self, modifiers: list[Modifier], S: FragmentTile, key0: Value) -> None:
        rows = [self.row0 + self.subgroup_row + S.row(r) for r in range(len(self.engine.part_rows) * len(S.vars))]
        columns = [key0 + S.col(c) for c in range(len(self.engine.part_cols) * len(S.vars[0]))]
        for modifier in modifiers:
            self.scores.apply(modifier, S, self.head, lambda r, c: (rows[r], columns[c]))

    def _highest(self, s: list[list[Value]]) -> list[Value]:
        """The largest scaled score of each row, of this lane's columns."""
        highest = [fold(self.b, "max", row) for row in s]
        return [x * self.scale for x in highest] if self.config.folded else highest

    def _weigh(self, s: list[list[Value]], rows: list[SoftmaxState], m: list[Value], k: int) -> list[list[Value]]:
        """P of the ``k``-th 16 keys, added to l."""
        width, scale = self.engine.factor_cols, self.scale if self.config.folded else None
        return [
            state.weigh(row[k * width : (k + 1) * width], m_row, scale)
            for row, state, m_row in zip(s, rows, m, strict=True)
        ]

    def _draw(self, tile: Value) -> Draw | None:
        """Which weights of a tile dropout keeps; None without dropout."""
        if self.dropout is None:
            return None
        engine = self.engine
        row, key0 = self.row0 + self.subgroup_row, tile * self.shape.block_kv
        cols = self.shape.block_kv // SIZE * engine.factor_cols
        draws = TileDropout(self.dropout, engine, engine.rows_held, cols)
        return draws.draw(self.head_number, lambda r, c: (row + engine.row(r), key0 + engine.col(c)))

    def _drop(self, drawn: Draw, p: list[list[Value]], k: int) -> list[list[Value]]:
        """P of the ``k``-th 16 keys with zeros for dropped weights."""
        b, first = self.b, k * self.engine.factor_cols
        zero = b.const(0.0, f32)
        return [
            [b.select(drawn.keeps(r, first + c), x, zero) for c, x in enumerate(weights)] for r, weights in enumerate(p)
        ]

    # -- results ---------------------------------------------------------------------------------------------------

    def _finish(self, O: FragmentTile, rows: list[SoftmaxState]) -> None:
        """Store the block's rows, or the partial result of a piece."""
        if self.piece is None:
            self._store_rows(O, rows)
        else:
            state = [row.m for row in rows] + [row.l for row in rows]
            self._partials.store([x for row in O.values() for x in row] + [x.value for x in state])

    def _store_rows(self, O: FragmentTile, rows: list[SoftmaxState]) -> None:
        b, engine, config = self.b, self.engine, self.config
        b.comment("O / l, and the log-sum-exp")
        extent, seq_q = self.scores.extent, self.scores.seq_q
        unit, aligned, first = config.unit[3], config.aligned[3], extent.first("o")
        out = self.p.result("o", self.scores.batch, self.head, seq_q, config.value_dim, unit, aligned, first)
        totals = engine.reduce_rows("add", [row.l.value for row in rows])
        lse_base = extent.row_base(self.p, self.head_number, self.head)
        values = O.values()
        for r, row in enumerate(values):
            end = finish(self.maximum, totals[r])
            inverse = end.inverse
            if engine.excess > 1.0:  # l has it, the factors have lost it
                inverse = inverse * engine.excess
            if config.dropout:
                inverse = inverse * self.p.number("keep_scale", f32)
            values[r] = [x * inverse for x in row]
            at = self.row0 + self.subgroup_row + O.row(r)
            if config.lse:
                lse = end.log_sum_exp(rows[r].m)
                writes = b.eq(engine.lane_col, 0) & (at < seq_q)
                if self.shape.columns > 1:
                    writes = writes & b.eq(self.part, 0)
                with b.if_(writes):
                    b.store(self.p.buffer("lse", f32, "write"), lse_base + b.cast(at, self.index), lse)
        self._store(O, values, out)

    def _store(self, O: FragmentTile, values: list[list[Value]], out: Matrix) -> None:
        """Store this lane's elements of O."""
        b, run, width = self.b, self.engine.run, self.shape.result_columns(out.cols)
        first = self.part * self._own_columns(out.cols) if self.shape.columns > 1 else 0
        for r, row in enumerate(values):
            at = self.row0 + self.subgroup_row + O.row(r)
            with b.if_(at < out.rows):
                for c in range(0, len(row), run):
                    out.store(b, at, O.col(c) + first, row[c : c + run], width)

    # -- pieces of a block -----------------------------------------------------------------------------------------

    @property
    def _partials(self) -> LanePartials:
        """Memory for the partial results of pieces: O, m and l of each lane."""
        assert self.piece is not None
        count = lane_numbers(self.shape, self.config.value_dim, self.target)
        return LanePartials(self.p, self.piece, self.shape.threads, count)

    def combine_pieces(self) -> None:
        """Combine the block's pieces if this was the last of them to finish."""
        assert self.piece is not None
        when_last(self.p, self.piece.place, self.piece.parts, self.b.thread_id(), self._combine)

    def _combine(self) -> None:
        """Merge the block's pieces and store its rows."""
        O, rows = self._start_output(combining=True)
        self._merge_pieces(O, rows)
        self._store_rows(O, rows)

    def _merge_pieces(self, O: FragmentTile, rows: list[SoftmaxState]) -> None:
        """Merge what lanes in the same place have left of the block's pieces."""
        b = self.b
        assert self.piece is not None
        with b.loop(0, self.piece.parts, name="part") as part:
            left = iter(self._partials.load(part))
            values = [[next(left) for _ in row] for row in O.values()]
            m, l = ([next(left) for _ in rows] for _ in range(2))
            factors = [row.merge(*other) for row, *other in zip(rows, m, l, strict=True)]
            O.map(lambda x, r, c: b.fma(x, factors[r][0], values[r][c] * factors[r][1]))
