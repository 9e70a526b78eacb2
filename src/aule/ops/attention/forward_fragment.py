"""The forward kernel for matrix units: the same algorithm as `forward.py` in the schedule that they want.

A subgroup keeps its rows of S, P and O in registers; only K and V pass through shared memory. Three things differ from
the kernel for plain arithmetic:

* The scale is not multiplied into Q, which would be rounded again, but into the exponent,
  ``exp2(scale * S + base)``, where it costs nothing. Modifiers that add to scores want them scaled before
  (``config.folded``).
* The base, minus the largest score, follows the running maximum only when that has grown by more than `LAG` powers of
  two. P stays below 2^LAG, far from the limits of fp16, and O is multiplied through a few times in all instead of with
  every tile.
* Inf and NaN of dropped keys are searched for where keys are dropped; a tile that has any takes a slow product. Where
  scores are made a tile ahead, that is looked into before the first tile, and such a block takes a slow passage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import log2

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import SCALARS, Scalar, Vector, f32, i32, i64, u32
from aule.ops.attention import modifiers as mod
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.forward_rows import QueryRows, dealt_out, goes_in_runs, store_runs
from aule.ops.attention.pages import PagedMatrix, Pages
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.rotating import rotating
from aule.ops.attention.scores import Scores, block_of
from aule.ops.attention.tail import Leavings, Piece, lane_numbers, pieces
from aule.ops.attention.tile_dropout import Draw, TileDropout
from aule.ops.attention.tile_order import Place, TileOrder
from aule.ops.tickets import when_last
from aule.target import Target
from aule.tile.arrangement import SIZE
from aule.tile.fragment import Fragments, FragmentTile
from aule.tile.fragment_shape import RUN, row_stride
from aule.tile.math import LN2, LOG2E, LOWEST, NEG_INF, fold, overflowing
from aule.tile.matrix import Matrix, padded
from aule.tile.rotated_fragment import transfer_of
from aule.tile.wild import added, sorted_out

LAG = 8.0
"""How far, in powers of two, the maximum that is subtracted may lag behind."""

_LOOKED_AT = 4
"""Tiles of V that are looked at together before the first; a causal mask has so many edges, or half as many."""


def build_forward_fragment(config: FragmentConfig, target: Target, name: str) -> KernelIR:
    """Trace the forward kernel of a configuration for a target with matrix units."""
    return traced(FragmentForward, config, target, name)


def traced(kind: type[FragmentForward], config: FragmentConfig, target: Target, name: str) -> KernelIR:
    """Trace a kernel of this kind, of blocks or of pieces."""
    b = Builder(name, config.shape.threads, config.shape.lanes, config.shape.registers, arithmetic="quick")
    if config.tail:
        with pieces(b) as piece:
            kernel = kind(b, config, target, piece)
            kernel.run()
            kernel.add_up()
        return b.finish()
    kernel = kind(b, config, target)
    with b.if_(kernel.exists):
        kernel.run()
    return b.finish()


class FragmentForward:
    """The parameters of the kernel, the place of this workgroup's block, and the passage over the keys."""

    trusting = False
    """V is finite at the edges."""

    def __init__(self, b: Builder, config: FragmentConfig, target: Target, piece: Piece | None = None) -> None:
        self.b, self.config, self.target, shape = b, config, target, config.shape
        self.shape = shape
        self.index: Scalar = i64 if config.index64 else i32
        p = self.p = Parameters(b, config, self.index)
        self.heads, self.blocks = p.number("heads_q"), p.number("blocks_q")
        # Workgroups are counted along x and then y: a driver may allow no more than 65535 along one axis.
        number = b.group_id(0) + b.group_id(1) * b.group_count(0) if piece is None else piece.number
        self.exists = number < p.number("blocks")
        self.head_number, self.block = self._place(number)
        self.row0 = self.block * shape.block_q
        batch, self.head, kv_head = self._heads()
        scores = self.scores = Scores(p, batch)
        if config.packed:
            self.exists = self.exists & (self.row0 < scores.seq_q)
        if config.packed and config.lens:  # sequences of few rows are left to the kernels of decoding
            self.exists = self.exists & (scores.seq_q > p.number("few_tokens"))
        self.piece = piece
        self.scale = p.number("scale", f32)
        self.lowest = b.const(-LOWEST, f32)
        """What the base starts from."""

        def matrix(name: str, head: Value, rows: Value, cols: int, number: int) -> Matrix:
            unit, aligned = config.unit[number], config.aligned[number]
            if config.paging != "none" and name != "q":
                pool = p.matrix(name, b.const(0, i32), head, rows, cols, unit, aligned=aligned)
                fields = {field.name: getattr(pool, field.name) for field in dataclasses.fields(pool)}
                return PagedMatrix(**fields, pages=Pages(p, batch), page_stride=p.number(f"{name}_stride0", self.index))
            first = scores.extent.first(name)
            return p.matrix(name, batch, head, rows, cols, unit, aligned=aligned, first=first)

        self.q = matrix("q", self.head, scores.seq_q, config.head_dim, 0)
        self.k = matrix("k", kv_head, scores.seq_kv, config.head_dim, 1)
        self.v = matrix("v", kv_head, scores.seq_kv, config.value_dim, 2)
        p.buffer("o", SCALARS[config.dtype], "write")  # the fourth, as callers may rely on; the log-sum-exp is the last
        self.modifiers = scores.modifiers(self.head, {n: "any" for n in ("mask", "bias") if n not in config.pairs})
        self.q, self.k = (rotating(p, name, m, batch, scores.shift) for name, m in (("q", self.q), ("k", self.k)))

        self.dropout = scores.dropout()
        self.engine = self._lay_out(target)
        self.subgroup_row = self.engine.subgroup * shape.rows
        self._order_tiles()

    def _place(self, number: Value) -> tuple[Value, Value]:
        """The head of a workgroup, and which block of its rows it has."""
        p, config = self.p, self.config
        # Warpgroups are fast enough to want K and V of all heads at the memory's speed.
        together = None if self.shape.warpgroups or not config.right else p.number("heads_together")
        return block_of(self.b, config, number, self.blocks, p.number("blocks"), together)

    def _heads(self) -> tuple[Value, Value, Value]:
        """The batch of the head, its number there, and the number of its keys' head."""
        batch, head = self.head_number // self.heads, self.head_number % self.heads
        return batch, head, head // self.p.number("group")

    def _lay_out(self, target: Target) -> Fragments:
        """The engine, and where in shared memory things lie."""
        b, config, shape = self.b, self.config, self.shape
        engine = Fragments(b, target, shape, config.factor or config.dtype)
        q, k, v = shape.shared_elements(config.head_dim, config.value_dim)
        self.memory = b.shared("tiles", engine.elem, shape.tile_elements(config.head_dim, config.value_dim))
        self.k_start = b.const(q, i32)
        self.v_start = self.k_start + shape.stages * k
        self.k_size, self.v_size = k, v
        self.k_stride, self.v_stride = row_stride(config.head_dim), row_stride(config.value_dim)
        self.k_depth = padded(config.head_dim, SIZE) // SIZE
        self.keys = transfer_of(engine, self.k, shape.block_kv, self.memory)
        self.values = engine.transfer(self.v, shape.block_kv, self.memory)
        return engine

    def _order_tiles(self) -> None:
        b, shift = self.b, self.scores.shift
        last_row = b.min(self.row0 + self.shape.block_q, self.scores.seq_q) - 1
        reach = self.scores.reach(self.row0 + shift, last_row + shift)
        self.tiles = TileOrder.of(b, reach, self.shape.block_kv, self.config.everywhere, self.piece)

    # -- the algorithm ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        b = self.b
        if not self.shape.ahead or self.config.everywhere:
            self._pass_all()
            return
        # Where code for values that are not finite lies between products, the compiler has fewer registers for them,
        # and reads fragments one by one; so it has a passage of its own.
        with b.if_(self._wild_edges()):
            self._pass_carefully()
        with b.else_():
            self.trusting = True
            self._pass_all()

    def _pass_all(self) -> None:
        """All tiles, those at the edges in a loop of their own."""
        b, engine = self.b, self.engine
        O, base, l, q = self._begin()
        ahead = None
        if self.shape.ahead:
            ahead = engine.tile(self.shape.rows, self.shape.block_kv)
            start = self.tiles.edge(b.const(-1, i32))
            with b.if_(start.more):
                self._score_ahead(ahead, start.next, q, whole=False)

        def work(at: Place, whole: bool) -> None:
            if ahead is None:
                self._pass(at, q, O, base, l, whole)
            else:
                self._add_values(at, ahead, O, base, l, self._arrive_values(at, whole), whole)
                self._score_ahead(ahead, self._following(at), q, whole)

        with b.loop(0, self.tiles.edges, name="edge") as i:
            work(self.tiles.edge(i), whole=False)
        if not self.config.everywhere:
            with b.loop(self.tiles.inner_first, self.tiles.inner_last, name="tile") as tile:
                work(self.tiles.inside(tile), whole=True)
        self._finish(O, base, l)

    def _pass_carefully(self) -> None:
        """The same in one loop, for few workgroups and in little code."""
        b = self.b
        O, base, l, q = self._begin()
        count, tile = self.tiles.count, self.tiles.tile
        with b.loop(0, count, name="tile") as i:
            at = Place(tile(i), b.const(0, i32), tile(i + 1), i + 1 < count)
            self._pass(at, q, O, base, l, whole=False)
        self._finish(O, base, l)

    def _begin(self) -> tuple[FragmentTile, list[Var], list[Var], Callable[[int], list[Value]]]:
        """O, bases and sums before the first tile, and what gives Q's fragments; K of that tile is on its way."""
        b = self.b
        O, base, l = self._nothing()
        if self.config.sinks and self.piece is None:  # what adds up pieces counts it
            self._start_from_sink(base, l)
        q = self._load_q()
        start = self.tiles.edge(b.const(-1, i32))
        with b.if_(start.more):
            self._start_tile(start.next, b.const(0, i32), whole=False)
        return O, base, l, q

    def _nothing(self) -> tuple[FragmentTile, list[Var], list[Var]]:
        """O, bases and sums of no keys."""
        engine = self.engine
        base, l = engine.row_vars(self.lowest), engine.row_vars(self.b.const(0.0, f32))
        return engine.tile(self.shape.rows, self.config.value_dim), base, l

    def _wild_edges(self) -> Value:
        """Whether V holds Inf or NaN in a tile at the edges, where 0 times either would come into O."""
        b = self.b
        found = b.var(b.const(0, u32), "found")
        with b.loop(0, self.tiles.edges, _LOOKED_AT, name="edge") as i:
            # All of them are fetched before the first is looked at.
            tiles = [self.tiles.edge(b.min(i + n, self.tiles.edges - 1)).tile for n in range(_LOOKED_AT)]
            runs = [run for tile in tiles for run in self.values.runs_of(tile * self.shape.block_kv)]
            for run in runs:
                self._check(run, found)
        return b.workgroup_any(b.ne(found.value, 0))

    def _pass(
        self, at: Place, q: Callable[[int], list[Value]], O: FragmentTile, base: list[Var], l: list[Var], whole: bool
    ) -> None:
        """One tile of keys; ``whole`` when no row drops any of them."""
        wild = self._arrive_keys(at, whole)
        S = self._scores_of(q, self._memory_of(at.stage)[0])
        if self.shape.stages == 1:
            wild = self._arrive_values(at, whole)
        self._add_values(at, S, O, base, l, wild, whole)

    def _score_ahead(self, S: FragmentTile, tile: Value, q: Callable[[int], list[Value]], whole: bool) -> None:
        """Make the scores of a tile whose K is on its way, and send for its V."""
        self._land_keys(tile, whole)
        for variables, new in zip(S.vars, self._scores_of(q, self.k_start).vars, strict=True):
            for variable, made in zip(variables, new, strict=True):
                variable.value = made.value

    def _following(self, at: Place) -> Value:
        """The next tile, or the last once more: its scores are made for nothing, but a branch would cost moves of all
        that waits in registers, with every tile."""
        return self.b.select(at.more, at.next, at.tile)

    def _scores_of(self, q: Callable[[int], list[Value]], k_at: Value) -> FragmentTile:
        b, engine, width = self.b, self.engine, self.engine.way.width
        b.comment("S = Q K^T")
        S = engine.tile(self.shape.rows, self.shape.block_kv)
        engine.multiply(
            S,
            q,
            lambda k, j: engine.load_right(self.memory, k_at, self.k_stride, k * SIZE, j * width, transposed=True),
            self.k_depth,
            self.shape.paced,
        )
        return S

    def _add_values(
        self,
        at: Place,
        S: FragmentTile,
        O: FragmentTile,
        base: list[Var],
        l: list[Var],
        wild: Value | None,
        whole: bool,
    ) -> None:
        """From scores to O's share of a tile."""
        b, engine = self.b, self.engine
        key0 = at.tile * self.shape.block_kv
        _, v_at = self._memory_of(at.stage)
        self._modify(S, key0, whole)
        b.comment("online softmax: P = exp2(S + base), l = l + sum P")
        s = S.values()
        self._follow_maximum(s, O, base, l)
        drawn = self._draw(at.tile)
        b.comment("O = O + P V")

        def weights(k: int) -> list[Value]:
            p = self._weigh(s, [low.value for low in base], l, k)
            if drawn is not None:
                p = self._drop(drawn, p, k)
            return [blocks[0] for blocks in engine.pack(p, engine.left, "enlarged")]

        if whole or self.trusting:
            self._multiply_values(O, weights, v_at)
            return
        factors = [weights(k) for k in range(self.shape.block_kv // SIZE)]
        assert wild is not None
        with b.if_(wild):
            self._multiply_guarded(O, factors, key0, v_at)
        with b.else_():
            self._multiply_values(O, lambda k: factors[k], v_at)

    def _follow_maximum(self, s: list[list[Value]], O: FragmentTile, base: list[Var], l: list[Var]) -> None:
        """Where the maximum of a row has grown by too much, the base follows it, and what was summed up shrinks."""
        b = self.b
        highest = [fold(b, "max", row) for row in s]  # of this lane's columns alone until it matters
        if self.config.folded:
            highest = [x * self.scale for x in highest]
        grown = [high + low.value > LAG for high, low in zip(highest, base, strict=True)]
        with b.if_(b.subgroup_any(fold(b, "or", grown))):
            alphas = []
            for high, low, total in zip(self.engine.reduce_rows("max", highest), base, l, strict=True):
                new = b.min(low.value, self._lifted(-high))
                alpha = b.exp2(new - low.value)
                low.value = new
                total.value = total.value * alpha
                alphas.append(alpha)
            O.map(lambda x, r, c: x * alphas[r])

    def _lifted(self, base: Value) -> Value:
        """A base that makes weights as large as the engine wants them."""
        return base if self.engine.excess == 1.0 else base + log2(self.engine.excess)

    def _weigh(self, s: list[list[Value]], base: list[Value], l: list[Var], k: int) -> list[list[Value]]:
        """P of the ``k``-th 16 keys; their sum goes into l."""
        b, width = self.b, self.engine.factor_cols
        p: list[list[Value]] = []
        for row, low, total in zip(s, base, l, strict=True):
            part = row[k * width : (k + 1) * width]
            if self.config.folded:
                p.append([b.exp2(b.fma(x, self.scale, low)) for x in part])
            else:
                p.append([b.exp2(x + low) for x in part])
            total.value = total.value + fold(b, "add", p[-1])  # of this lane's columns alone until the end
        return p

    def _draw(self, tile: Value) -> Draw | None:
        """Which weights of a tile dropout keeps; None when all."""
        if self.dropout is None:
            return None
        engine = self.engine
        row, key0 = self.row0 + self.subgroup_row, tile * self.shape.block_kv
        cols = self.shape.block_kv // SIZE * engine.factor_cols
        draws = TileDropout(self.dropout, engine, engine.rows_held, cols)
        return draws.draw(self.head_number, lambda r, c: (row + engine.row(r), key0 + engine.col(c)))

    def _drop(self, drawn: Draw, p: list[list[Value]], k: int) -> list[list[Value]]:
        """Zeros in the place of dropped weights of the ``k``-th 16 keys."""
        b, first = self.b, k * self.engine.factor_cols
        zero = b.const(0.0, f32)
        return [
            [b.select(drawn.keeps(r, first + c), x, zero) for c, x in enumerate(weights)] for r, weights in enumerate(p)
        ]

    def _modify(self, S: FragmentTile, key0: Value, whole: bool) -> None:
        if not self.config.folded:
            S.map(lambda s, r, c: s * self.scale)
        self._apply([m for m in self.modifiers if m.everywhere or not whole], S, key0)

    def _apply(self, modifiers: list[mod.Modifier], S: FragmentTile, key0: Value) -> None:
        b, scores = self.b, self.scores
        rows = [self.row0 + self.subgroup_row + S.row(r) for r in range(len(self.engine.part_rows) * len(S.vars))]
        columns = [key0 + S.col(c) for c in range(len(self.engine.part_cols) * len(S.vars[0]))]

        def at(r: int, c: int) -> mod.Site:
            return mod.Site(scores.batch, self.head, rows[r], columns[c], rows[r] + scores.shift)

        for modifier in modifiers:
            S.map(lambda s, r, c: modifier.apply(b, s, at(r, c)))  # noqa: B023

    def _finish(self, O: FragmentTile, base: list[Var], l: list[Var]) -> None:
        """Store the block's rows, or what a piece comes to."""
        if self.piece is None:
            self._store_rows(O, base, l)
        else:
            self._leavings.store([x for row in O.values() for x in row] + [x.value for x in (*base, *l)])

    def _store_rows(self, O: FragmentTile, base: list[Var], l: list[Var]) -> None:
        b, engine, config = self.b, self.engine, self.config
        zero = b.const(0.0, f32)
        b.comment("O / l, and the log-sum-exp")
        batch, head = self.scores.batch, self.head
        unit, aligned = config.unit[3], config.aligned[3]
        extent = self.scores.extent
        seq_q, first = self.scores.seq_q, extent.first("o")
        out = self.p.matrix("o", batch, head, seq_q, config.value_dim, unit, "write", aligned, first)
        totals = engine.reduce_rows("add", [x.value for x in l])
        lse_base = extent.row_base(self.p, self.head_number, head)
        values = O.values()
        for r, row in enumerate(values):
            nothing = b.eq(totals[r], 0.0)  # such a row gives zeros; one with a NaN score has a NaN sum and stays NaN
            inverse = b.select(nothing, zero, b.rcp(totals[r]))
            if engine.excess > 1.0:  # the sum has it; the factors have lost it
                inverse = inverse * engine.excess
            if config.dropout:
                inverse = inverse * self.p.number("keep_scale", f32)
            values[r] = [x * inverse for x in row]
            at = self.row0 + self.subgroup_row + O.row(r)
            if config.lse:
                lse = b.select(nothing, b.const(NEG_INF, f32), (b.log2(totals[r]) - base[r].value) * LN2)
                with b.if_(b.eq(engine.lane_col, 0) & (at < seq_q)):
                    b.store(self.p.buffer("lse", f32, "write"), lse_base + b.cast(at, self.index), lse)
        self._store(O, values, out)

    @property
    def _leavings(self) -> Leavings:
        """Where lanes leave what they have of a piece: O, bases and sums."""
        assert self.piece is not None
        count = lane_numbers(self.shape, self.config.value_dim, self.target)
        return Leavings(self.p, self.piece, self.shape.threads, count)

    def add_up(self) -> None:
        """Add up the block's pieces if this was the last of them."""
        assert self.piece is not None
        when_last(self.p, self.piece.place, self.piece.parts, self.b.thread_id(), self._gather)

    def _gather(self) -> None:
        """Each lane adds up what lanes in its place have left, and stores rows as that of a whole block does."""
        b = self.b
        assert self.piece is not None
        O, base, l = self._nothing()
        if self.config.sinks:
            self._start_from_sink(base, l)
        with b.loop(0, self.piece.parts, name="part") as part:
            left = iter(self._leavings.load(part))
            values = [[next(left) for _ in row] for row in O.values()]
            bases, sums = ([next(left) for _ in base] for _ in range(2))
            own, others = [], []
            for low, total, other, more in zip(base, l, bases, sums, strict=True):
                new = b.min(low.value, other)
                own.append(b.exp2(new - low.value))
                others.append(b.exp2(new - other))
                low.value, total.value = new, b.fma(total.value, own[-1], more * others[-1])
            O.map(lambda x, r, c: b.fma(x, own[r], values[r][c] * others[r]))
        self._store_rows(O, base, l)

    def _store(self, O: FragmentTile, values: list[list[Value]], out: Matrix) -> None:
        """Store this lane's elements of O."""
        b, engine, run = self.b, self.engine, self.engine.run
        if self.shape.ahead and goes_in_runs(engine, out):
            room = self.shape.tile_elements(self.config.head_dim, self.config.value_dim)
            b.barrier()  # all have read K and V
            store_runs(engine, values, out, self.row0, self.subgroup_row, self.memory, room)
            if self.piece is not None:
                b.barrier()  # another piece may follow
            return
        for r, row in enumerate(values):
            at = self.row0 + self.subgroup_row + O.row(r)
            with b.if_(at < out.rows):
                for c in range(0, len(row), run):
                    out.store(b, at, O.col(c), row[c : c + run], padded(out.cols, SIZE))

    def _start_from_sink(self, base: list[Var], l: list[Var]) -> None:
        """The sink is a key without a value: it is counted before the first tile, by one lane of a row."""
        b = self.b
        sink = b.load(self.p.buffer("sinks", f32), self.p.strided("sinks", self.head)) * LOG2E
        start = self._lifted(-b.max(sink, LOWEST))
        weight = b.select(b.eq(self.engine.lane_col, 0), b.exp2(sink + start), b.const(0.0, f32))
        for low, total in zip(base, l, strict=True):
            low.value = start
            total.value = weight

    # -- memory ----------------------------------------------------------------------------------------------------

    def _load_q(self) -> Callable[[int], list[Value]]:
        """Bring in the block's rows of Q; returns what gives the fragments of 16 columns, one for each 16 rows."""
        b, engine, shape = self.b, self.engine, self.shape
        if shape.ahead and self.q.rotary is None:
            whole_rows = engine.transfer(self.q, shape.block_q, self.memory)
            if dealt_out(whole_rows):
                whole_rows.start(self.row0, b.const(0, i32), self.config.whole)
                self._clear_padding()
                width = max(shape.piece(self.q.cols, self.v.cols), SIZE)  # if any pass
                return QueryRows(engine, whole_rows, self.subgroup_row).fragments(self.k_start, width)
        stays, rows = shape.q_columns(self.q.cols), range(0, shape.rows, engine.way.height)

        def bring(first: int, end: int, start: Value) -> Callable[[int], list[Value]]:
            """The same for some of the columns, which come to lie in memory from ``start`` on."""
            transfer = transfer_of(engine, self.q.columns(b, first, end), shape.block_q, self.memory)
            transfer.clear_padding(start, 1)
            transfer.start(self.row0, start)
            transfer.finish(start)
            own = start + self.subgroup_row * transfer.stride
            return lambda k: [
                engine.load_left(self.memory, own, transfer.stride, row, k * SIZE - first) for row in rows
            ]

        load = bring(0, min(stays, self.q.cols), b.const(0, i32)) if stays else None
        fragments: list[list[Value]] = []
        if stays < self.q.cols:
            piece = shape.piece(self.q.cols, self.v.cols)
            for first in range(stays, self.q.cols, piece):
                end = min(first + piece, self.q.cols)
                passing = bring(first, end, self.k_start)
                b.barrier()
                fragments += [passing(k) for k in range(first // SIZE, -(-end // SIZE))]
                b.barrier()  # everyone has read it: the memory is free again
        self._clear_padding()  # the first barrier of the loop shows the rest of Q, too
        return lambda k: load(k) if load is not None and k * SIZE < stays else fragments[k - stays // SIZE]

    def _clear_padding(self) -> None:
        self.keys.clear_padding(self.k_start, self.shape.stages)
        self.values.clear_padding(self.v_start, self.shape.stages)

    def _memory_of(self, stage: Value) -> tuple[Value, Value]:
        """Where K and V of a stage lie."""
        if self.shape.stages == 1:
            return self.k_start, self.v_start
        return self.k_start + stage * self.k_size, self.v_start + stage * self.v_size

    def _start_tile(self, tile: Value, stage: Value, whole: bool) -> None:
        """Begin to fetch what the first product of a tile needs, and with more than one stage all of it."""
        k_at, v_at = self._memory_of(stage)
        self.keys.start(tile * self.shape.block_kv, k_at, whole)
        if self.shape.stages > 1:
            self.values.start(tile * self.shape.block_kv, v_at, whole)

    def _arrive_keys(self, at: Place, whole: bool) -> Value | None:
        """K of the tile is there for all; the next thing is on its way. Returns whether V is wild where it is known."""
        b = self.b
        if self.shape.stages == 1:
            self._land_keys(at.tile, whole)
            return None
        k_at, v_at = self._memory_of(at.stage)
        self.keys.finish(k_at)
        self.values.finish(v_at)
        wild = self._barrier(v_at, whole)
        with b.if_(at.more):
            self._start_tile(at.next, at.stage ^ 1, whole)
        return wild

    def _land_keys(self, tile: Value, whole: bool) -> None:
        """The same with one stage."""
        self.keys.finish(self.k_start)
        self.b.barrier()
        self.values.start(tile * self.shape.block_kv, self.v_start, whole)

    def _arrive_values(self, at: Place, whole: bool) -> Value | None:
        """The same for V, with one stage."""
        _, v_at = self._memory_of(at.stage)
        self.values.finish(v_at)
        wild = self._barrier(v_at, whole)
        if self.shape.ahead:
            self._start_tile(self._following(at), at.stage, whole)
            return wild
        with self.b.if_(at.more):
            self._start_tile(at.next, at.stage, whole)
        return wild

    def _barrier(self, v_at: Value, whole: bool) -> Value | None:
        """Wait for all; find out whether V of a tile that may have dropped keys holds Inf or NaN: 0 times either is
        NaN."""
        b = self.b
        if whole or self.trusting:
            b.barrier()
            return None
        found = b.var(b.const(0, u32), "found")
        self._look_over(v_at, found)
        self._arrived()
        return b.workgroup_any(b.ne(found.value, 0))

    def _arrived(self) -> None:
        """What this thread brought in is in shared memory; a barrier follows."""

    def _look_over(self, v_at: Value, found: Var) -> None:
        """Set bits of ``found`` where what this thread has brought in of V is Inf or NaN."""
        self.values.own_runs(v_at, lambda run: self._check(run, found))

    def _check(self, run: Value, found: Var) -> None:
        """The same for a run of elements."""
        b, elem = self.b, self.engine.elem
        for word in b.unpack(b.bitcast(run, Vector(u32, RUN * elem.bits // 32))):
            found.value = found.value | overflowing(b, word, elem)

    # -- products with V -------------------------------------------------------------------------------------------

    def _multiply_values(self, O: FragmentTile, factors: Callable[[int], list[Value]], v_at: Value) -> None:
        engine, width = self.engine, self.engine.way.width
        engine.multiply(
            O,
            factors,
            lambda k, j: engine.load_right(self.memory, v_at, self.v_stride, k * SIZE, j * width),
            self.shape.block_kv // SIZE,
        )

    def _multiply_guarded(self, O: FragmentTile, factors: list[list[Value]], key0: Value, v_at: Value) -> None:
        """The same product, in which a key of weight zero adds nothing even when its value is Inf or NaN."""
        b, engine = self.b, self.engine
        with b.loop(0, 3, name="kind") as kind:
            b.barrier()
            self.values.rewrite(key0, v_at, lambda run: sorted_out(b, engine.elem, run, kind))
            b.barrier()
            for j in range(len(O.vars[0])):
                part = [b.fragment_fill(engine.accumulator, 0.0) for _ in O.vars]
                for k in range(self.shape.block_kv // SIZE):
                    right = engine.load_right(self.memory, v_at, self.v_stride, k * SIZE, j * engine.way.width)
                    part = [engine.multiply_add(factors[k][i], right, x) for i, x in enumerate(part)]
                for row, x in zip(O.vars, part, strict=True):
                    row[j].value = added(engine, row[j].value, x, kind)
