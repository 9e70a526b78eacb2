"""The forward kernel for products of warpgroups: that of `forward_fragment` with the matrix units at work while
softmax is computed.

Q, K and V lie in shared memory, from where products fetch them by themselves. Over the tiles in which no row drops a
key, two products are started at a time, the scores of a tile and O's share of the tile before; as soon as the scores
are there, their softmax is computed while the other product is still running. Tiles at the edges of the band, which may
need modifying and guarding, go one product after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import PANEL, f32, i32, u64
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.forward_fragment import LAG, FragmentForward, Place
from aule.target import Target
from aule.tile.arrangement import SIZE
from aule.tile.fragment import FragmentTile
from aule.tile.math import NEG_INF, fold
from aule.tile.simt import padded
from aule.tile.warpgroup import ROWS, PanelFactor, PanelShape, Warpgroups


def build_forward_warpgroup(config: FragmentConfig, target: Target, name: str) -> KernelIR:
    """Trace the forward kernel of a configuration for a target with products of warpgroups."""
    b = Builder(name, config.shape.threads, config.shape.lanes, config.shape.registers)
    kernel = _Forward(b, config, target)
    with b.if_(kernel.exists):
        kernel.run()
    return b.finish()


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
        self.v_start = self.k_start + 2 * self.k_size
        self.k_depth = padded(config.head_dim, SIZE) // SIZE
        self.keys = engine.panels(self.k, shape.block_kv, self.memory)
        self.values = engine.panels(self.v, shape.block_kv, self.memory)
        assert self.keys.direct and self.values.direct, "rows that are not copied as they are go through fragments"
        return engine

    # -- the algorithm ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        b, engine, config, shape = self.b, self.engine, self.config, self.shape
        zero = b.const(0.0, f32)
        base, l = engine.row_vars(self.lowest), engine.row_vars(zero)
        if config.sinks:
            self._start_from_sink(base, l)
        O, S = engine.tile(SIZE, config.value_dim), engine.tile(SIZE, shape.block_kv)
        empty = b.fragment_fill(engine.left, 0.0)
        P = [b.var(empty) for _ in range(shape.block_kv // SIZE)]
        self._load_queries()
        start = self._edge(b.const(-1, i32))
        with b.if_(start.more):
            self._start_tile(start.next, b.const(0, i32), whole=False)
        with b.loop(0, self.edges, name="edge") as i:
            self._pass_edge(self._edge(i), S, O, P, base, l)
        if not config.everywhere:
            with b.if_(self.inner_first < self.inner_last):
                self._pass_inner(S, O, P, base, l)
        self._finish(O, base, l)

    def _pass_edge(
        self, at: Place, S: FragmentTile, O: FragmentTile, P: list[Var], base: list[Var], l: list[Var]
    ) -> None:
        """One tile of keys of which rows may drop some."""
        b = self.b
        wild = self._arrive_keys(at, whole=False)
        assert wild is not None
        b.warpgroup_fence()
        self._start_scores(S, at.stage)
        b.warpgroup_wait()
        p = self._weights(S, at.tile * self.shape.block_kv, O, base, l, whole=False)
        self._pack(p, P)
        _, v_at = self._memory_of(at.stage)
        with b.if_(wild):
            self._multiply_wild(O, P, at.tile * self.shape.block_kv, v_at)
        with b.else_():
            b.warpgroup_fence()
            self._start_output(O, P, v_at)
            b.warpgroup_wait()

    def _pass_inner(self, S: FragmentTile, O: FragmentTile, P: list[Var], base: list[Var], l: list[Var]) -> None:
        """The tiles of keys of which no row drops any.

        Warpgroups meet once a tile, in two halves: a thread arrives when the scores of a tile are there and so is what
        it has fetched for the next one, and waits before the next scores. So half a tile may lie between two
        warpgroups, and one multiplies while the other computes softmax.
        """
        b, block = self.b, self.shape.block_kv
        first = self._inner(self.inner_first)
        self._meet()
        with b.if_(first.more):
            self.keys.start(first.next * block, self._memory_of(first.stage ^ 1)[0], whole=True)
        b.warpgroup_fence()
        self._start_scores(S, first.stage)
        b.warpgroup_wait()
        self._arrive()
        self._pack(self._weights(S, first.tile * block, O, base, l, whole=True), P)
        place = b.var(first.stage, "v_stage")  # of the tile before, among V's three
        with b.loop(self.inner_first + 1, self.inner_last, name="tile") as tile:
            at = self._inner(tile)
            b.comment("S = Q K^T, and O = O + P V of the tile before")
            b.warpgroup_await(self.meeting, 0, (tile - (self.inner_first + 1)) & 1)
            before = place.value
            now = b.select(b.eq(before, 2), b.const(0, i32), before + 1)
            place.value = now
            b.warpgroup_fence()
            self._start_scores(S, at.stage)
            self._start_output(O, P, self.v_start + before * self.v_size)
            # All have read what lay here: K of the tile before, and V of the third before.
            with b.if_(at.more):
                self.keys.start(at.next * block, self._memory_of(at.stage ^ 1)[0], whole=True)
            self.values.start(tile * block, self.v_start + now * self.v_size, whole=True)
            b.warpgroup_wait(1)
            self._arrive()
            self._pack(self._weights(S, tile * block, O, base, l, whole=True, running=True), P)
        b.warpgroup_await(self.meeting, 0, (self.inner_last - (self.inner_first + 1)) & 1)
        b.warpgroup_fence()
        self._start_output(O, P, self.v_start + place.value * self.v_size)
        b.warpgroup_wait()

    def _arrive(self) -> None:
        """What this thread has fetched is there, and what it has read may be overwritten."""
        self.b.async_wait(0)
        self.b.warpgroup_publish()
        self.b.warpgroup_arrive(self.meeting)

    def _start_scores(self, S: FragmentTile, stage: Value) -> None:
        k_at, _ = self._memory_of(stage)
        rows = self.engine.group * (ROWS * PANEL)
        queries = PanelFactor(self.memory, rows, self.q_panels)
        keys = PanelFactor(self.memory, k_at, self.k_panels, transposed=True)
        self.engine.start_product(S.vars[0], queries, keys, self.k_depth, fresh=True)
        self.b.warpgroup_commit()

    def _start_output(self, O: FragmentTile, P: Sequence[Var], v_at: Value) -> None:
        values = PanelFactor(self.memory, v_at, self.v_panels)
        self.engine.start_product(O.vars[0], [x.value for x in P], values, len(P))
        self.b.warpgroup_commit()

    def _weights(
        self, S: FragmentTile, key0: Value, O: FragmentTile, base: list[Var], l: list[Var], whole: bool,
        running: bool = False,
    ) -> list[list[Value]]:  # fmt: skip
        """P of a tile whose scores are there; ``running`` while a product still adds to O."""
        b, engine = self.b, self.engine
        self._modify(S, key0, whole)
        b.comment("online softmax: P = exp2(S + base), l = l + sum P")
        s = S.values()
        highest = [fold(b, "max", row) for row in s]
        if self.config.folded:
            highest = [x * self.scale for x in highest]
        grown = [high + low.value > LAG for high, low in zip(highest, base, strict=True)]
        follows = b.subgroup_any(fold(b, "or", grown))
        alphas = [b.var(b.const(1.0, f32), "alpha") for _ in base]
        with b.if_(follows):
            for high, low, total, alpha in zip(engine.reduce_rows("max", highest), base, l, alphas, strict=True):
                new = b.min(low.value, -high)
                alpha.value = b.exp2(new - low.value)
                low.value = new
                total.value = total.value * alpha.value
        p: list[list[Value]] = [[] for _ in s]
        for k in range(self.shape.block_kv // SIZE):
            part = self._weigh(s, base, l, k)
            if self.dropout is not None:
                part = self._drop(self.dropout, part, S, key0, k)
            for row, more in zip(p, part, strict=True):
                row += more
        if running:
            b.warpgroup_wait()
        with b.if_(follows):
            factors = [alpha.value for alpha in alphas]
            O.map(lambda x, r, c: x * factors[r])
        return p

    def _pack(self, p: list[list[Value]], P: Sequence[Var]) -> None:
        for variable, fragment in zip(P, self.engine.pack(p, self.engine.left, "weights")[0], strict=True):
            variable.value = fragment

    # -- memory ----------------------------------------------------------------------------------------------------

    def _load_queries(self) -> None:
        """Begin to bring in the block's rows of Q; they arrive with the first keys."""
        start = self.b.const(0, i32)
        transfer = self.engine.panels(self.q, self.shape.block_q, self.memory)
        transfer.clear_padding(start, 1)
        transfer.start(self.row0, start)
        self._clear_padding()

    def _clear_padding(self) -> None:
        self.keys.clear_padding(self.k_start, 2)
        self.values.clear_padding(self.v_start, 3)

    def _meet(self) -> None:
        """What is on its way arrives, for all; but for V, whose copies are the latest."""
        self.b.async_wait(1)
        self.b.warpgroup_publish()
        self.b.barrier()

    def _arrived(self) -> None:
        self.b.warpgroup_publish()

    # -- products with V that is not finite --------------------------------------------------------------------------

    def _multiply_wild(self, O: FragmentTile, P: Sequence[Var], key0: Value, v_at: Value) -> None:
        """As `_multiply_guarded`, a panel at a time."""
        b, engine = self.b, self.engine
        part = [b.var(b.fragment_fill(engine.accumulator, 0.0)) for _ in range(PANEL // SIZE)]
        with b.loop(0, 3, name="kind") as kind:
            b.barrier()
            self.values.rewrite(key0, v_at, lambda run: self._rewritten(run, kind))
            b.warpgroup_publish()
            b.barrier()
            infinite = b.select(b.eq(kind, 1), b.const(float("inf"), f32), b.const(NEG_INF, f32))
            for col in range(0, padded(self.config.value_dim, SIZE), PANEL):
                columns = O.vars[0][col // SIZE : (col + PANEL) // SIZE]
                values = PanelFactor(self.memory, v_at, self.v_panels, col=col)
                b.warpgroup_fence()
                engine.start_product(part[: len(columns)], [x.value for x in P], values, len(P), fresh=True)
                b.warpgroup_commit()
                b.warpgroup_wait()
                for variable, x in zip(columns, part, strict=False):
                    variable.value = self._added(variable.value, x.value, kind, infinite)
