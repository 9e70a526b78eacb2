"""The forward kernel over warpgroups: the matrix units work while softmax is computed.

Q, K and V lie in shared memory, from where products read them. Two products run at a time, the scores of a tile and O's
share of the tile before; as soon as the scores are there, their softmax is computed while the other product still runs.

Edge tiles come first. Where they are few, they have a loop of their own, one product after the other, which keeps Inf
and NaN in V of dropped keys from O; the main loop has no code for that. Where they are many (``config.one_loop``), one
loop takes all tiles, with a window in the order of the keys. It only looks for Inf and NaN, and a block that has any is
computed again, guarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import PANEL, f32, i32, i64, u32, u64
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.fragment.tile_order import TilePlace
from aule.ops.attention.prepass.tile_list import TileList
from aule.ops.attention.warpgroup.forward_scores import TileScores
from aule.ops.combine.pieces import piece_of
from aule.ops.scores.parameters import Parameters
from aule.ops.shared.parameters import workgroup_number
from aule.ops.shared.tickets import when_last
from aule.ops.softmax.online_softmax import LAG, SoftmaxState
from aule.target import Target
from aule.tile.common.math import fold
from aule.tile.common.matrix import Matrix, divmod_const, padded
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import FragmentTile
from aule.tile.fragment.nonfinite import added, sorted_out
from aule.tile.fragment.shape import RUN
from aule.tile.fragment.transfer import Transfer
from aule.tile.warpgroup.engine import ROWS, PanelFactor, PanelShape, Warpgroups


def build_forward_warpgroup(config: FragmentConfig, target: Target, name: str) -> KernelIR:
    """Trace the forward kernel of a configuration for a target with warpgroup products, for blocks, or for blocks of
    which some are divided into pieces."""
    b = Builder(name, config.shape.threads, config.shape.lanes, config.shape.registers)
    p = Parameters(b, config, i64 if config.index64 else i32)
    piece = piece_of(p, workgroup_number(b)) if config.pieces else None
    kernel = Forward(b, config, target, piece, parameters=p)
    with b.if_(kernel.exists):
        kernel.run()
    return b.finish()


@dataclass(frozen=True)
class State:
    """S and P of a tile, O, and the softmax states of its rows."""

    S: FragmentTile
    O: FragmentTile
    P: list[Var]
    rows: list[SoftmaxState]


class Forward(TileScores):
    """A block of rows, and the passes over its tiles."""

    def _lay_out(self, target: Target) -> Warpgroups:
        b, config, shape = self.b, self.config, self.shape
        engine = Warpgroups(b, target, shape, config.factor or config.dtype)
        self.q_panels = PanelShape(shape.block_q, config.head_dim)
        self.k_panels = PanelShape(shape.block_kv, config.head_dim)
        self.v_panels = PanelShape(shape.block_kv, config.value_dim)
        self.k_size, self.v_size = self.k_panels.elements, self.v_panels.elements
        self._make_memory(engine)
        self.k_depth = padded(config.head_dim, SIZE) // SIZE
        self.keys = engine.panels(self.k, shape.block_kv, self.memory)
        # Products of guarded tiles read entire panels.
        self.values = engine.panels(self.v, shape.block_kv, self.memory, padded(config.value_dim, PANEL))
        assert self.keys.direct and self.values.direct, "only rows that are copied unchanged come here"
        return engine

    def _make_memory(self, engine: Warpgroups) -> None:
        """Divide up shared memory: Q, then the stages of K, then those of V."""
        b, config, shape = self.b, self.config, self.shape
        self.memory = b.shared("tiles", engine.elem, shape.tile_elements(config.head_dim, config.value_dim))
        self.mbarrier = b.shared("mbarrier", u64, 1)
        b.mbarrier_init(self.mbarrier)
        self.q_start = b.const(0, i32)
        self.k_start = b.const(self.q_panels.elements, i32)
        self.v_start = self.k_start + shape.stages * self.k_size

    def _order_tiles(self) -> None:
        b = self.b
        self.tile_list = None
        self.listed_before: Value | int = 0
        """Tiles of the list that other pieces have."""
        self.ascending = self.config.one_loop and self.config.left and not self.config.tiles_listed
        self.found = b.var(b.const(0, u32), "found")
        """Nonzero if this thread has seen Inf or NaN in V of an edge tile."""
        if not self.config.tiles_listed:
            super()._order_tiles()
            self.edges, self.count = self.tiles.edges, self.tiles.count
            return
        self.tile_list = TileList(self.p, self.scores.batch, self.head, self.block, self.shape)
        self.edges, self.count = self.tile_list.partial, self.tile_list.count
        if self.piece is not None:
            first, last = self.piece.tiles(b.const(0, i32), self.count)
            self.listed_before = first
            self.edges, self.count = b.min(b.max(self.edges - first, 0), last - first), last - first
        # A tile's number is fetched a step before its keys are.
        self.coming = [b.var(self._tile(b.const(i, i32)), "coming") for i in range(self.shape.stages)]

    def _tile(self, i: Value) -> Value:
        """The ``i``-th tile in the order in which they are worked on."""
        b = self.b
        if self.tile_list is not None:
            return self.tile_list.tile(i + self.listed_before)
        left, inner = self.tiles.first + i, self.tiles.inner
        if self.ascending:
            return left
        right = b.select(i < self.edges, left + inner, self.tiles.inner_first + (i - self.edges))
        return b.select(left < self.tiles.inner_first, left, right)

    def _is_edge(self, i: Value) -> Value:
        """Whether rows may drop keys of the ``i``-th tile, in one loop."""
        if not self.ascending:
            return i < self.edges
        return (self.tiles.first + i < self.tiles.inner_first) | (self.tiles.first + i >= self.tiles.inner_last)

    def _upcoming(self, i: Value) -> list[Value]:
        """The ``i``-th tile and those after it for which there are stages. Call once for each ``i``, in order; edge
        tiles only in one loop."""
        stages = self.shape.stages
        if not self.config.one_loop:
            return [i + (self.tiles.inner_first - self.edges + n) for n in range(stages)]
        if self.tile_list is None:
            return [self._tile(i + n) for n in range(stages)]
        tiles = [x.value for x in self.coming]
        for variable, tile in zip(self.coming, [*tiles[1:], self._tile(i + stages)], strict=True):
            variable.value = tile
        return tiles

    # -- the algorithm ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Pass over the keys and store the block's rows."""
        b, engine, config, shape = self.b, self.engine, self.config, self.shape
        rows = self._start_rows()
        O, S = engine.tile(SIZE, config.value_dim), engine.tile(SIZE, shape.block_kv)
        empty = b.fragment_fill(engine.left, 0.0)
        P = [b.var(empty) for _ in range(shape.block_kv // SIZE)]
        state = State(S, O, P, rows)
        self._count_sink(rows)
        zero = b.const(0, i32)
        self._load_queries()
        with b.if_(self.count > 0):
            self._start_tile(self._tile(zero), zero, full=False)
        if config.one_loop:
            with b.if_(self.count > 0):
                self._pass_over(state, zero)
            with b.if_(b.workgroup_any(b.ne(self.found.value, 0))):
                self._repeat(state)
        else:
            self._pass_guarded(state, self.edges)
            with b.if_(self.edges < self.count):
                self._pass_over(state, self.edges)
        self._finish(O, rows)

    def _pass_over(self, state: State, start: Value) -> None:
        """The tiles from the ``start``-th on, which is prefetched.

        Warpgroups meet once a tile, in two halves: a thread arrives when it has the scores of a tile and its copies for
        the next one, and waits before it starts the next scores. So warpgroups may be half a tile apart, and one
        multiplies while the other computes softmax. With two stages a copy has the time of one product to arrive; with
        three, a tile more.
        """
        b, stages = self.b, self.shape.stages
        tiles = self._upcoming(start)
        k_slot, v_slot = b.var(start & 1, "k_slot"), b.var(start & 1, "v_slot")
        self._prefetch_second(tiles, start, k_slot)
        self._prefetch(tiles, start, k_slot.value, v_slot.value, begun=True)
        b.warpgroup_fence()
        self._start_scores(state.S, k_slot.value)
        bits = self._mask_bits(tiles[0], start)
        b.warpgroup_wait()
        self._arrive(start, v_slot.value)
        row_terms = self._modify_tile(state.S, tiles[0], start, bits)
        self._softmax(state, tiles[0], row_terms)
        with b.loop(start + 1, self.count, name="tile") as i:
            tiles = self._upcoming(i)
            b.comment("S = Q K^T, and O = O + P V of the tile before")
            b.mbarrier_wait(self.mbarrier, 0, (i - (start + 1)) & 1)
            before = v_slot.value
            k_slot.value, v_slot.value = self._slot(k_slot.value, stages), self._slot(before, stages + 1)
            b.warpgroup_fence()
            self._start_scores(state.S, k_slot.value)
            self._start_values(state, self._memory_of(before)[1])
            # Everyone has read what the copies overwrite: K of the tile before, and V of the third before.
            self._prefetch(tiles, i, k_slot.value, v_slot.value)
            bits = self._mask_bits(tiles[0], i)
            b.warpgroup_wait(1)
            self._arrive(i, v_slot.value)
            row_terms = self._modify_tile(state.S, tiles[0], i, bits)
            self._softmax(state, tiles[0], row_terms, running=True)
        b.mbarrier_wait(self.mbarrier, 0, (self.count - (start + 1)) & 1)
        b.warpgroup_fence()
        self._start_values(state, self._memory_of(v_slot.value)[1])
        b.warpgroup_wait()

    def _pass_guarded(self, state: State, end: Value) -> None:
        """The tiles up to the ``end``-th, one product after the other, with Inf and NaN of dropped keys kept from O."""
        b = self.b
        with b.loop(0, end, name="edge") as i:
            at = TilePlace(self._tile(i), i & 1, self._tile(i + 1), i + 1 < self.count)
            key0, v_at = at.tile * self.shape.block_kv, self._memory_of(at.stage)[1]
            nonfinite = self._await_keys(at, full=False)
            assert nonfinite is not None
            b.warpgroup_fence()
            self._start_scores(state.S, at.stage)
            bits = self._mask_bits(at.tile, i)
            b.warpgroup_wait()
            row_terms = self._modify_everywhere(state.S, key0)
            self._modify_edge(state.S, key0, bits)
            self._softmax(state, at.tile, row_terms)
            with b.if_(nonfinite):
                self._multiply_nonfinite(state.O, state.P, key0, v_at)
            with b.else_():
                b.warpgroup_fence()
                self._start_values(state, v_at)
                b.warpgroup_wait()

    def _repeat(self, state: State) -> None:
        self._clear(state.O, state.rows)
        self._count_sink(state.rows)
        zero = self.b.const(0, i32)
        self._start_tile(self._tile(zero), zero, full=False)
        self._pass_guarded(state, self.count)

    def _clear(self, O: FragmentTile, rows: list[SoftmaxState]) -> None:
        """O and the states of its rows as before the first key."""
        for variable in O.vars[0]:
            variable.value = self.b.fragment_fill(self.engine.accumulator, 0.0)
        for row in rows:
            row.m.value, row.l.value = self.lowest, self.b.const(0.0, f32)

    def _count_sink(self, rows: list[SoftmaxState]) -> None:
        """Count the sink before the first tile, in the first piece if there are several."""
        if not self.config.sinks:
            return
        with nullcontext() if self.piece is None else self.b.if_(self.b.eq(self.piece.part, 0)):
            self._start_from_sink(rows)

    def _finish(self, O: FragmentTile, rows: list[SoftmaxState]) -> None:
        """Store the block's rows. Of several pieces the last to finish does that; the others leave their results."""
        b, piece = self.b, self.piece
        if piece is None:
            self._store_rows(O, rows)
            return
        missing = b.var(piece.parts - 1, "missing")

        def merge() -> None:
            missing.value = b.const(0, i32)
            self._clear(O, rows)
            self._merge_pieces(O, rows)

        with b.if_(piece.parts > 1):
            super()._finish(O, rows)
            when_last(self.p, piece.place, piece.parts, b.thread_id(), merge)
        with b.if_(b.eq(missing.value, 0)):
            self._store_rows(O, rows)

    def _softmax(self, state: State, tile: Value, row_terms: list[Value], running: bool = False) -> None:
        """P of a tile's scores, to each row of which its term is still to be added; ``running`` while a product adds to
        O, which is rescaled after it."""
        b, engine, O, rows = self.b, self.engine, state.O, state.rows
        b.comment("online softmax: P = exp2(S + base), l = l + sum P")
        s = state.S.values()
        highest = _plus(self._highest(s), row_terms)
        lagging = [row.lags(high, LAG) for row, high in zip(rows, highest, strict=True)]
        follows = engine.any_of_rows(fold(b, "or", lagging))
        alphas = [b.var(b.const(1.0, f32), "alpha") for _ in rows]
        with b.if_(follows):
            for row, high, alpha in zip(rows, engine.reduce_rows("max", highest), alphas, strict=True):
                row.follow(high, alpha)
        m = _plus([row.m.value for row in rows], row_terms)
        drawn = self._draw(tile if self.dropout is None else self._after(tile, highest[0]))
        p: list[list[Value]] = [[] for _ in s]
        for k in range(self.shape.block_kv // SIZE):
            part = self._weigh(s, rows, m, k)
            if drawn is not None:
                part = self._drop(drawn, part, k)
            for row_weights, more in zip(p, part, strict=True):
                row_weights += more
        if running:
            b.warpgroup_wait()
        with b.if_(follows):
            factors = [alpha.value for alpha in alphas]
            O.map(lambda x, r, c: x * factors[r])
        for variable, fragment in zip(state.P, engine.pack(p, engine.left, "weights")[0], strict=True):
            variable.value = fragment

    def _after(self, tile: Value, score: Value) -> Value:
        """The number of a tile, made to depend on a score by adding a zero that the compiler cannot know. Otherwise it
        draws random numbers between the products for the scores, which then start late."""
        b = self.b
        return tile + (b.bitcast(score, i32) & b.min(self.scores.seq_kv, 0))

    # -- prefetch --------------------------------------------------------------------------------------------------

    def _load_queries(self) -> None:
        """Prefetch the block's rows of Q; they arrive with the first keys."""
        transfer = self.engine.panels(self.q, self.shape.block_q, self.memory)
        transfer.clear_padding(self.q_start, 1)
        transfer.start(self.row0, self.q_start)
        self._clear_padding()

    def _clear_padding(self) -> None:
        self.keys.clear_padding(self.k_start, self.shape.stages)
        self.values.clear_padding(self.v_start, self.shape.stages + 1)

    def _slot(self, slot: Value, slots: int) -> Value:
        """The slot of K or V after ``slot``."""
        if slots & (slots - 1) == 0:
            return (slot + 1) & (slots - 1)
        return self.b.select(self.b.eq(slot, slots - 1), self.b.const(0, i32), slot + 1)

    def _prefetch_second(self, tiles: list[Value], start: Value, k_slot: Var) -> None:
        """Wait for Q and K of the first tile, and with three stages prefetch K of the second."""
        stages = self.shape.stages
        early = stages > 2 and self.config.one_loop  # nobody has read anything yet
        if early:
            self._fetch_next(self.keys, tiles[1], start + 1, self._slot(k_slot.value, stages))
        self._meet(2 if early else 1)
        if stages > 2 and not early:
            self._fetch_next(self.keys, tiles[1], start + 1, self._slot(k_slot.value, stages))

    def _prefetch(self, tiles: list[Value], i: Value, k_slot: Value, v_slot: Value, begun: bool = False) -> None:
        """Start copying what is missing while the ``i``-th tile, which lies in these slots, is worked on: K of the last
        tile for which there is a stage, and V of the one before that. ``begun``: the ``i``-th tile's V is
        prefetched."""
        stages = self.shape.stages
        for _ in range(stages - 1):
            k_slot = self._slot(k_slot, stages)
        self._fetch_next(self.keys, tiles[-1], i + (stages - 1), k_slot)
        if stages > 2:
            self._fetch_next(self.values, tiles[1], i + 1, self._slot(v_slot, stages + 1))
        elif not begun:
            self._fetch(self.values, tiles[0], v_slot, i)

    def _fetch_next(self, transfer: Transfer, tile: Value, i: Value, slot: Value) -> None:
        """Start copying the ``i``-th tile, if there is one. With three stages, waits count groups of copies, so an
        empty group stands for a missing tile."""
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
            transfer.start(row, to, full=not config.everywhere)
            return
        by_rows = self.ascending or config.tiles_listed
        with b.if_(row + block > self.scores.seq_kv if by_rows else i < self.edges):
            transfer.start(row, to)
        with b.else_():
            transfer.start(row, to, full=True)

    def _meet(self, pending: int) -> None:
        """Wait for the copies of all threads but for the latest ``pending`` groups, which bring V first."""
        self.b.async_wait(pending)
        self.b.warpgroup_publish()
        self.b.barrier()

    def _arrive(self, i: Value, v_slot: Value) -> None:
        """Tell the others that this thread's copies for the next tile are there and that it has read this one's K. In
        one loop for all tiles, V of edge tiles is checked for Inf and NaN."""
        b = self.b
        b.async_wait(0 if self.shape.stages == 2 else 2)
        if self.config.one_loop:
            with nullcontext() if self.config.everywhere else b.if_(self._is_edge(i)):
                self._check_own_values(self._memory_of(v_slot)[1], self.found)
        b.warpgroup_publish()
        b.mbarrier_arrive(self.mbarrier)

    def _publish(self) -> None:
        self.b.warpgroup_publish()

    # -- products and results --------------------------------------------------------------------------------------

    def _start_scores(self, S: FragmentTile, slot: Value) -> None:
        k_at, _ = self._memory_of(slot)
        rows = self.q_start + self.engine.group * (ROWS * PANEL)
        queries = PanelFactor(self.memory, rows, self.q_panels)
        keys = PanelFactor(self.memory, k_at, self.k_panels, transposed=True)
        self.engine.start_product(S.vars[0], queries, keys, self.k_depth, fresh=True)
        self.b.warpgroup_commit()

    def _start_values(self, state: State, v_at: Value) -> None:
        values = PanelFactor(self.memory, v_at, self.v_panels)
        self.engine.start_product(state.O.vars[0], [x.value for x in state.P], values, len(state.P))
        self.b.warpgroup_commit()

    def _multiply_nonfinite(self, O: FragmentTile, P: Sequence[Var], key0: Value, v_at: Value) -> None:
        """``O += P V`` where a key of weight zero adds nothing even if its value is Inf or NaN; a panel at a time."""
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
                # All of a panel, though its last columns may be padding: with products of different widths the
                # compiler waits for each product of the kernel.
                engine.start_product(part, [x.value for x in P], values, len(P), fresh=True)
                b.warpgroup_commit()
                b.warpgroup_wait()
                for variable, x in zip(columns, part, strict=False):
                    variable.value = added(engine, variable.value, x.value, kind)

    def _store(self, O: FragmentTile, values: list[list[Value]], out: Matrix) -> None:
        """Store O through shared memory, from where rows are stored 16 bytes at a time, if that is faster."""
        b, engine = self.b, self.engine
        faster = self.config.one_loop or out.cols <= 2 * PANEL
        if not (faster and out.aligned and out.col_stride is None):
            super()._store(O, values, out)
            return
        panels, none = PanelShape(self.shape.block_q, out.cols), b.const(0, i32)
        b.async_wait(0)  # without a tile the copy of Q may still be running
        b.barrier()  # nobody reads the memory any more
        factors = engine.pack(values, engine.left)[0]
        engine.put_factors(self.memory, self.q_start, panels, self.subgroup_row, none, factors)
        b.subgroup_barrier()
        across = out.cols // RUN
        with b.loop(b.lane_id(), SIZE * across, self.shape.lanes, name="run") as i:
            row, run = divmod_const(b, i, across)
            row, col = self.subgroup_row + row, run * RUN
            with b.if_(self.row0 + row < out.rows):
                to = out.row_start(b, self.row0 + row) + out.index(b, col)
                b.store(out.buffer, to, b.load(self.memory, self.q_start + panels.offset(row, col), RUN))


def _plus(values: list[Value], terms: list[Value]) -> list[Value]:
    """Values with the terms of their rows added, if there are any."""
    return [x + term for x, term in zip(values, terms, strict=True)] if terms else values
