"""The forward kernel for products of warpgroups: that of `forward_fragment` with the matrix units at work while
softmax is computed.

Q, K and V lie in shared memory, from where products fetch them by themselves. Two products are started at a time, the
scores of a tile and O's share of the tile before; as soon as the scores are there, their softmax is computed while the
other product is still running.

Tiles in which rows may drop keys come first: those at the edges of the band, or with a mask the first ones of a list
(`mask_tiles`). Where they are few, they have a loop of their own, one product after the other, that sees to Inf and NaN
in V of dropped keys; the other loop has no code for any of that. Where they are many (``config.one_loop``) there is one
loop for all, with a window in the order of the keys, which only looks for Inf and NaN, and in the rare block that has
any, all is computed again with care.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import PANEL, SCALARS, f32, i32, u32, u64
from aule.ops.attention import modifiers as mod
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.forward_fragment import LAG, FragmentForward
from aule.ops.attention.mask_tiles import TileList, keep, words
from aule.ops.attention.tile_order import Place
from aule.target import Target
from aule.tile.arrangement import SIZE
from aule.tile.fragment import FragmentTile
from aule.tile.fragment_shape import RUN
from aule.tile.math import LOG2E, NEG_INF, fold
from aule.tile.matrix import Matrix, divmod_const, padded
from aule.tile.transfer import Transfer
from aule.tile.warpgroup import ROWS, PanelFactor, PanelShape, Warpgroups
from aule.tile.wild import added, sorted_out


def build_forward_warpgroup(config: FragmentConfig, target: Target, name: str) -> KernelIR:
    """Trace the forward kernel of a configuration for a target with products of warpgroups."""
    b = Builder(name, config.shape.threads, config.shape.lanes, config.shape.registers)
    kernel = _Forward(b, config, target)
    with b.if_(kernel.exists):
        kernel.run()
    return b.finish()


@dataclass(frozen=True)
class _State:
    """Scores and weights of a tile, and what is summed up."""

    S: FragmentTile
    O: FragmentTile
    P: list[Var]
    base: list[Var]
    l: list[Var]


class _Forward(FragmentForward):
    engine: Warpgroups

    def _lay_out(self, target: Target) -> Warpgroups:
        b, config, shape = self.b, self.config, self.shape
        engine = Warpgroups(b, target, shape, config.factor or config.dtype)
        self.q_panels = PanelShape(shape.block_q, config.head_dim)
        self.k_panels = PanelShape(shape.block_kv, config.head_dim)
        self.v_panels = PanelShape(shape.block_kv, config.value_dim)
        self.k_size, self.v_size = self.k_panels.elements, self.v_panels.elements
        self.memory = b.shared("tiles", engine.elem, shape.tile_elements(config.head_dim, config.value_dim))
        self.meeting = b.shared("meeting", u64, 1)
        b.warpgroup_meeting(self.meeting)
        self.k_start = b.const(self.q_panels.elements, i32)
        self.v_start = self.k_start + shape.stages * self.k_size
        self.k_depth = padded(config.head_dim, SIZE) // SIZE
        self.keys = engine.panels(self.k, shape.block_kv, self.memory)
        self.values = engine.panels(self.v, shape.block_kv, self.memory)
        assert self.keys.direct and self.values.direct, "rows that are not copied as they are go through fragments"
        return engine

    def _order_tiles(self) -> None:
        self.listed: TileList | None = None
        self.ascending = self.config.one_loop and self.config.left and not self.config.listed
        """Tiles are in the order of the keys; otherwise those of which rows may drop keys come first."""
        self.found = self.b.var(self.b.const(0, u32), "found")
        """Whether V of a tile with dropped keys has Inf or NaN, as far as this thread knows."""
        if not self.config.listed:
            super()._order_tiles()
            self.edges, self.count = self.tiles.edges, self.tiles.count
            return
        self.listed = TileList(self.p, self.scores.batch, self.head, self.block, self.shape)
        self.edges, self.count = self.listed.partial, self.listed.count
        # A tile's number is fetched a turn before its keys are.
        self.coming = [self.b.var(self._tile(self.b.const(i, i32)), "coming") for i in range(self.shape.stages)]

    def _tile(self, i: Value) -> Value:
        """The ``i``-th tile in the order in which they are worked on."""
        b = self.b
        if self.listed is not None:
            return self.listed.tile(i)
        left, inner = self.tiles.first + i, self.tiles.inner
        if self.ascending:
            return left
        right = b.select(i < self.edges, left + inner, self.tiles.inner_first + (i - self.edges))
        return b.select(left < self.tiles.inner_first, left, right)

    def _at_edge(self, i: Value) -> Value:
        """Whether rows may drop keys of the ``i``-th tile of one loop."""
        if not self.ascending:
            return i < self.edges
        return (self.tiles.first + i < self.tiles.inner_first) | (self.tiles.first + i >= self.tiles.inner_last)

    def _upcoming(self, i: Value) -> list[Value]:
        """The ``i``-th tile and those behind it for which there are stages, as `_pass_over` asks for them: in order,
        and of tiles at the edges only in one loop."""
        stages = self.shape.stages
        if not self.config.one_loop:
            return [i + (self.tiles.inner_first - self.edges + n) for n in range(stages)]
        if self.listed is None:
            return [self._tile(i + n) for n in range(stages)]
        tiles = [x.value for x in self.coming]
        for variable, tile in zip(self.coming, [*tiles[1:], self._tile(i + stages)], strict=True):
            variable.value = tile
        return tiles

    # -- the algorithm ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        b, engine, config, shape = self.b, self.engine, self.config, self.shape
        base, l = engine.row_vars(self.lowest), engine.row_vars(b.const(0.0, f32))
        O, S = engine.tile(SIZE, config.value_dim), engine.tile(SIZE, shape.block_kv)
        empty = b.fragment_fill(engine.left, 0.0)
        P = [b.var(empty) for _ in range(shape.block_kv // SIZE)]
        state = _State(S, O, P, base, l)
        if config.sinks:
            self._start_from_sink(base, l)
        zero = b.const(0, i32)
        self._load_queries()
        with b.if_(self.count > 0):
            self._start_tile(self._tile(zero), zero, whole=False)
        if config.one_loop:
            with b.if_(self.count > 0):
                self._pass_over(state, zero)
            with b.if_(b.workgroup_any(b.ne(self.found.value, 0))):
                self._repeat(state)
        else:
            self._pass_with_care(state, self.edges)
            with b.if_(self.edges < self.count):
                self._pass_over(state, self.edges)
        self._finish(O, base, l)

    def _pass_with_care(self, state: _State, end: Value) -> None:
        """The tiles up to the ``end``-th, one product after the other. Their rows may drop keys, whose V, Inf or NaN
        included, is kept from O."""
        b = self.b
        with b.loop(0, end, name="edge") as i:
            at = Place(self._tile(i), i & 1, self._tile(i + 1), i + 1 < self.count)
            key0, v_at = at.tile * self.shape.block_kv, self._memory_of(at.stage)[1]
            wild = self._arrive_keys(at, whole=False)
            assert wild is not None
            b.warpgroup_fence()
            self._start_scores(state.S, at.stage)
            bits = self._bits(at.tile, i)
            b.warpgroup_wait()
            further = self._modify_everywhere(state.S, key0)
            self._modify_partly(state.S, key0, bits)
            self._weigh_tile(state, at.tile, further)
            with b.if_(wild):
                self._multiply_wild(state.O, state.P, key0, v_at)
            with b.else_():
                b.warpgroup_fence()
                self._start_output(state, v_at)
                b.warpgroup_wait()

    def _repeat(self, state: _State) -> None:
        """All of it again, with care."""
        b = self.b
        for variable in state.O.vars[0]:
            variable.value = b.fragment_fill(self.engine.accumulator, 0.0)
        for low, total in zip(state.base, state.l, strict=True):
            low.value, total.value = self.lowest, b.const(0.0, f32)
        if self.config.sinks:
            self._start_from_sink(state.base, state.l)
        zero = b.const(0, i32)
        self._start_tile(self._tile(zero), zero, whole=False)
        self._pass_with_care(state, self.count)

    def _pass_over(self, state: _State, start: Value) -> None:
        """The tiles from the ``start``-th on, which is on its way.

        Warpgroups meet once a tile, in two halves: a thread arrives when the scores of a tile are there and so is what
        it has fetched for the next one, and waits before the next scores. So half a tile may lie between two
        warpgroups, and one multiplies while the other computes softmax. With two stages, what is fetched has the time
        of one product to arrive; with three, that of a tile more.
        """
        b, stages = self.b, self.shape.stages
        tiles = self._upcoming(start)
        k_slot, v_slot = b.var(start & 1, "k_slot"), b.var(start & 1, "v_slot")
        early = stages > 2 and self.config.one_loop  # nobody has read anything yet
        if early:
            self._fetch_next(self.keys, tiles[1], start + 1, self._slot(k_slot.value, stages))
        self._meet(2 if early else 1)
        if stages > 2 and not early:
            self._fetch_next(self.keys, tiles[1], start + 1, self._slot(k_slot.value, stages))
        self._fetch_ahead(tiles, start, k_slot.value, v_slot.value, begun=True)
        b.warpgroup_fence()
        self._start_scores(state.S, k_slot.value)
        bits = self._bits(tiles[0], start)
        b.warpgroup_wait()
        self._arrive(start, v_slot.value)
        further = self._modify_tile(state.S, tiles[0], start, bits)
        self._weigh_tile(state, tiles[0], further)
        with b.loop(start + 1, self.count, name="tile") as i:
            tiles = self._upcoming(i)
            b.comment("S = Q K^T, and O = O + P V of the tile before")
            b.warpgroup_await(self.meeting, 0, (i - (start + 1)) & 1)
            before = v_slot.value
            k_slot.value, v_slot.value = self._slot(k_slot.value, stages), self._slot(before, stages + 1)
            b.warpgroup_fence()
            self._start_scores(state.S, k_slot.value)
            self._start_output(state, self._memory_of(before)[1])
            # All have read what lies there: K of the tile before, and V of the third before.
            self._fetch_ahead(tiles, i, k_slot.value, v_slot.value)
            bits = self._bits(tiles[0], i)
            b.warpgroup_wait(1)
            self._arrive(i, v_slot.value)
            further = self._modify_tile(state.S, tiles[0], i, bits)
            self._weigh_tile(state, tiles[0], further, running=True)
        b.warpgroup_await(self.meeting, 0, (self.count - (start + 1)) & 1)
        b.warpgroup_fence()
        self._start_output(state, self._memory_of(v_slot.value)[1])
        b.warpgroup_wait()

    def _slot(self, slot: Value, slots: int) -> Value:
        """Which of so many places of K or V comes after one."""
        if slots & (slots - 1) == 0:
            return (slot + 1) & (slots - 1)
        return self.b.select(self.b.eq(slot, slots - 1), self.b.const(0, i32), slot + 1)

    def _fetch_ahead(self, tiles: list[Value], i: Value, k_slot: Value, v_slot: Value, begun: bool = False) -> None:
        """Begin to bring in what is missing while the ``i``-th tile, which lies in these places, is worked on: K of the
        last for which there is a stage, and V of the one before that; ``begun`` when the ``i``-th tile's V is on its
        way."""
        stages = self.shape.stages
        for _ in range(stages - 1):
            k_slot = self._slot(k_slot, stages)
        self._fetch_next(self.keys, tiles[-1], i + (stages - 1), k_slot)
        if stages > 2:
            self._fetch_next(self.values, tiles[1], i + 1, self._slot(v_slot, stages + 1))
        elif not begun:
            self._fetch(self.values, tiles[0], v_slot, i)

    def _fetch_next(self, transfer: Transfer, tile: Value, i: Value, slot: Value) -> None:
        """Begin to bring in the ``i``-th tile, if there is one. Where some copies may stay under way, it counts in any
        case."""
        b = self.b
        with b.if_(i < self.count):
            self._fetch(transfer, tile, slot, i)
        if self.shape.stages > 2:
            with b.else_():
                b.async_commit()

    def _fetch(self, transfer: Transfer, tile: Value, slot: Value, i: Value) -> None:
        b, config, block = self.b, self.config, self.shape.block_kv
        row, to = tile * block, self._memory_of(slot)[transfer is self.values]
        if config.everywhere or not config.one_loop:
            transfer.start(row, to, whole=not config.everywhere)
            return
        by_rows = self.ascending or config.listed
        with b.if_(row + block > self.scores.seq_kv if by_rows else i < self.edges):
            transfer.start(row, to)
        with b.else_():
            transfer.start(row, to, whole=True)

    def _arrive(self, i: Value, v_slot: Value) -> None:
        """What the next tile needs of this thread's copies is there, and what it has read may be overwritten. In one
        loop for all tiles, V of those with dropped keys is looked over: 0 times Inf or NaN is NaN."""
        b = self.b
        b.async_wait(0 if self.shape.stages == 2 else 2)
        if self.config.one_loop:
            with nullcontext() if self.config.everywhere else b.if_(self._at_edge(i)):
                self._look_over(self._memory_of(v_slot)[1], self.found)
        b.warpgroup_publish()
        b.warpgroup_arrive(self.meeting)

    # -- between the products --------------------------------------------------------------------------------------

    def _bits(self, tile: Value, i: Value) -> list[Var]:
        """What a boolean mask keeps of a tile, fetched only where it drops some."""
        b = self.b
        if self.listed is None or self.config.mask != "bits":
            return []
        found = [b.var(b.const(0xFFFFFFFF, u32), "bits") for _ in range(words(self.shape.block_kv))]
        with b.if_(i < self.edges):
            for variable, word in zip(found, self.listed.bits(tile, self.engine.subgroup), strict=True):
                variable.value = word
        return found

    def _modify_tile(self, S: FragmentTile, tile: Value, i: Value, bits: list[Var]) -> list[Value]:
        key0 = tile * self.shape.block_kv
        further = self._modify_everywhere(S, key0)
        if self.config.one_loop:
            asks = self.ascending or self.config.everywhere  # subgroup by subgroup, or not at all
            with nullcontext() if asks else self.b.if_(i < self.edges):
                self._modify_partly(S, key0, bits)
        return further

    def _modify_everywhere(self, S: FragmentTile, key0: Value) -> list[Value]:
        """What every tile needs. Returns what is still to be added to all scores of each of this lane's rows, if
        anything is."""
        if self.config.linear:
            return self._add_distances(S, key0)
        if not self.config.folded:
            S.map(lambda s, r, c: s * self.scale)
        self._apply([m for m in self.modifiers if m.everywhere], S, key0)
        return []

    def _add_distances(self, S: FragmentTile, key0: Value) -> list[Value]:
        """ALiBi where no key is to the right of its row: what a column adds is the same in all rows but for a number of
        the row, which softmax adds to its base."""
        b, engine, scores = self.b, self.engine, self.scores
        slope = b.load(self.p.buffer("alibi", f32), self.p.strided("alibi", scores.batch, self.head)) * LOG2E
        columns = [slope * float(engine.behind(c)) for c in range(len(S.values()[0]))]
        S.map(lambda s, r, c: b.fma(s, self.scale, columns[c]))
        start = key0 + engine.lane_col - (self.row0 + self.subgroup_row + scores.shift)
        return [slope * b.cast(start - S.row(r), f32) for r in range(engine.rows_held)]

    def _modify_partly(self, S: FragmentTile, key0: Value, bits: list[Var]) -> None:
        """What only tiles with dropped keys need."""
        self._apply([m for m in self.modifiers[:-1] if not m.everywhere], S, key0)
        for name in self.config.pairs:
            self._add_pairs(name, S, key0)
        if bits:
            keep(S, [x.value for x in bits], NEG_INF)
        self._drop_outside(S, key0)

    def _add_pairs(self, name: str, S: FragmentTile, key0: Value) -> None:
        """Add a mask or bias of which neighbouring keys are read together."""
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
                return mod.added(b, s, pair[c % 2])

            S.map(each)

        with b.if_(key0 + self.shape.block_kv <= scores.seq_kv):
            add(lambda column: b.cast(first, index) + column)
        with b.else_():
            # Of keys past the end any pair will do.
            add(lambda column: b.cast(b.min(first + column, scores.seq_kv - 2), index))

    def _drop_outside(self, S: FragmentTile, key0: Value) -> None:
        """Keep keys that exist and are in the band: as the last of the modifiers, but only where this subgroup's rows
        may drop some, each side for itself, and by comparisons with what is known while tracing."""
        b, scores, engine, block = self.b, self.scores, self.engine, self.shape.block_kv
        start, dropped = key0 + engine.lane_col, b.const(NEG_INF, f32)
        # The same for all lanes, but only a lane's word tells ptxas so.
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

    def _start_scores(self, S: FragmentTile, slot: Value) -> None:
        k_at, _ = self._memory_of(slot)
        rows = self.engine.group * (ROWS * PANEL)
        queries = PanelFactor(self.memory, rows, self.q_panels)
        keys = PanelFactor(self.memory, k_at, self.k_panels, transposed=True)
        self.engine.start_product(S.vars[0], queries, keys, self.k_depth, fresh=True)
        self.b.warpgroup_commit()

    def _start_output(self, state: _State, v_at: Value) -> None:
        values = PanelFactor(self.memory, v_at, self.v_panels)
        self.engine.start_product(state.O.vars[0], [x.value for x in state.P], values, len(state.P))
        self.b.warpgroup_commit()

    def _weigh_tile(self, state: _State, tile: Value, further: list[Value], running: bool = False) -> None:
        """P of a tile whose scores are there but for what is ``further`` to be added to rows; ``running`` while a
        product still adds to O."""
        b, engine, S, O, base, l = self.b, self.engine, state.S, state.O, state.base, state.l
        b.comment("online softmax: P = exp2(S + base), l = l + sum P")
        s = S.values()
        highest = [fold(b, "max", row) for row in s]
        if self.config.folded:
            highest = [x * self.scale for x in highest]
        highest = [x + more for x, more in zip(highest, further, strict=True)] if further else highest
        grown = [high + low.value > LAG for high, low in zip(highest, base, strict=True)]
        follows = b.subgroup_any(fold(b, "or", grown))
        alphas = [b.var(b.const(1.0, f32), "alpha") for _ in base]
        with b.if_(follows):
            for high, low, total, alpha in zip(engine.reduce_rows("max", highest), base, l, alphas, strict=True):
                new = b.min(low.value, -high)
                alpha.value = b.exp2(new - low.value)
                low.value = new
                total.value = total.value * alpha.value
        lows = [low.value for low in base]
        lows = [low + more for low, more in zip(lows, further, strict=True)] if further else lows
        drawn = self._draw(tile if self.dropout is None else self._behind(tile, highest[0]))
        p: list[list[Value]] = [[] for _ in s]
        for k in range(self.shape.block_kv // SIZE):
            part = self._weigh(s, lows, l, k)
            if drawn is not None:
                part = self._drop(drawn, part, k)
            for row, more in zip(p, part, strict=True):
                row += more
        if running:
            b.warpgroup_wait()
        with b.if_(follows):
            factors = [alpha.value for alpha in alphas]
            O.map(lambda x, r, c: x * factors[r])
        for variable, fragment in zip(state.P, engine.pack(p, engine.left, "weights")[0], strict=True):
            variable.value = fragment

    def _behind(self, tile: Value, score: Value) -> Value:
        """The number of a tile, with a zero of a score added that no compiler knows. Without it ptxas draws between the
        products for the scores, which then start late: 1.55 in place of 1.46 ms (H200, d128, S 4096)."""
        b = self.b
        return tile + (b.bitcast(score, i32) & b.min(self.scores.seq_kv, 0))

    # -- memory ----------------------------------------------------------------------------------------------------

    def _load_queries(self) -> None:
        """Begin to bring in the block's rows of Q; they arrive with the first keys."""
        start = self.b.const(0, i32)
        transfer = self.engine.panels(self.q, self.shape.block_q, self.memory)
        transfer.clear_padding(start, 1)
        transfer.start(self.row0, start)
        self._clear_padding()

    def _clear_padding(self) -> None:
        self.keys.clear_padding(self.k_start, self.shape.stages)
        self.values.clear_padding(self.v_start, self.shape.stages + 1)

    def _meet(self, pending: int) -> None:
        """What is on its way arrives, for all; but for the latest copies, V first of all."""
        self.b.async_wait(pending)
        self.b.warpgroup_publish()
        self.b.barrier()

    def _arrived(self) -> None:
        self.b.warpgroup_publish()

    def _store(self, O: FragmentTile, values: list[list[Value]], out: Matrix) -> None:
        """By way of shared memory, from where whole rows go 16 bytes at a time. H200, d64, S 512 full 0.188 against
        0.205 ms, S 4096 causal 0.334 against 0.349; TFLOPS at d128, S 2048 full, 547 against 531 in one run and 533
        against 531 in another, at d256 causal 414 against 427."""
        b, engine = self.b, self.engine
        wins = self.config.one_loop or out.cols <= 2 * PANEL
        if not (wins and out.aligned and out.col_stride is None):
            super()._store(O, values, out)
            return
        panels, none = PanelShape(self.shape.block_q, out.cols), b.const(0, i32)
        b.async_wait(0)  # without a tile Q may still be on its way
        b.barrier()  # nobody reads the memory any more
        engine.put_factors(self.memory, none, panels, self.subgroup_row, none, engine.pack(values, engine.left)[0])
        b.subgroup_barrier()
        across = out.cols // RUN
        with b.loop(b.lane_id(), SIZE * across, self.shape.lanes, name="run") as i:
            row, run = divmod_const(b, i, across)
            row, col = self.subgroup_row + row, run * RUN
            with b.if_(self.row0 + row < out.rows):
                to = out.row_start(b, self.row0 + row) + out.index(b, col)
                b.store(out.buffer, to, b.load(self.memory, panels.offset(row, col), RUN))

    # -- products with V that is not finite --------------------------------------------------------------------------

    def _multiply_wild(self, O: FragmentTile, P: Sequence[Var], key0: Value, v_at: Value) -> None:
        """As `_multiply_guarded`, a panel at a time."""
        b, engine = self.b, self.engine
        part = [b.var(b.fragment_fill(engine.accumulator, 0.0)) for _ in range(PANEL // SIZE)]
        with b.loop(0, 3, name="kind") as kind:
            b.barrier()
            self.values.rewrite(key0, v_at, lambda run: sorted_out(b, engine.elem, run, kind))
            b.warpgroup_publish()
            b.barrier()
            for col in range(0, padded(self.config.value_dim, SIZE), PANEL):
                columns = O.vars[0][col // SIZE : (col + PANEL) // SIZE]
                values = PanelFactor(self.memory, v_at, self.v_panels, col=col)
                b.warpgroup_fence()
                engine.start_product(part[: len(columns)], [x.value for x in P], values, len(P), fresh=True)
                b.warpgroup_commit()
                b.warpgroup_wait()
                for variable, x in zip(columns, part, strict=False):
                    variable.value = added(engine, variable.value, x.value, kind)
