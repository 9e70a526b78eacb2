"""The forward kernel on matrix units: FlashAttention with S, P and O in registers.

A subgroup holds its rows of S, P and O in registers; only K and V pass through shared memory. Edge tiles have a loop of
their own, in which a tile with Inf or NaN in V takes a slow product. Where scores are computed a tile ahead
(``shape.prefetch_scores``), edge tiles are checked before the first tile instead, and a block that has Inf or NaN there
takes a slow pass.
"""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import i32, u32
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.fragment.forward_memory import TileMemory
from aule.ops.attention.fragment.forward_rows import QueryRows, can_deal_out, can_store_runs, store_runs
from aule.ops.attention.fragment.tile_order import TilePlace
from aule.ops.combine.pieces import pieces
from aule.ops.softmax.online_softmax import LAG, SoftmaxState, follow
from aule.target import Target
from aule.tile.common.matrix import Matrix, divmod_const, padded
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Fragments, FragmentTile
from aule.tile.fragment.nonfinite import added, check_finite, sorted_out
from aule.tile.fragment.partial_sums import PartialSums
from aule.tile.fragment.rope import transfer_of
from aule.tile.fragment.shape import RUN, row_stride

LeftFactors = Callable[[int], list[Value]]
"""Gives the left factors of the k-th 16 columns, one for each 16 rows."""

_CHECKED_TOGETHER = 4
"""Edge tiles whose V is fetched together before it is checked; a causal mask has about as many."""


def build_forward_fragment(
    config: FragmentConfig, target: Target, name: str, kind: type[FragmentForward] | None = None
) -> KernelIR:
    """Trace the forward kernel of a configuration for a target with matrix units, for blocks or for pieces of blocks;
    ``kind`` if it is a special one."""
    kind = kind or FragmentForward
    b = Builder(name, config.shape.threads, config.shape.lanes, config.shape.registers, arithmetic="quick")
    if config.pieces:
        with pieces(b) as piece:
            kernel = kind(b, config, target, piece)
            kernel.run()
            kernel.combine_pieces()
        return b.finish()
    kernel = kind(b, config, target)
    with b.if_(kernel.exists):
        kernel.run()
    return b.finish()


class FragmentForward(TileMemory):
    """The forward pass of one workgroup."""

    def _lay_out(self, target: Target) -> Fragments:
        b, config, shape = self.b, self.config, self.shape
        engine = Fragments(b, target, shape, config.factor or config.dtype)
        q, self.k_size, self.v_size = shape.shared_elements(config.head_dim, config.value_dim)
        self.memory = b.shared("tiles", engine.elem, shape.tile_elements(config.head_dim, config.value_dim))
        self.k_start = b.const(q, i32)
        self.v_start = self.k_start + shape.stages * self.k_size
        k_width, v_width = (shape.result_columns(dim) for dim in (config.head_dim, config.value_dim))
        self.k_stride, self.v_stride = row_stride(k_width), row_stride(v_width)
        self.k_depth = k_width // (SIZE * shape.depth_parts)
        self.keys = transfer_of(engine, self.k, shape.block_kv, self.memory, width=k_width)
        self.values = engine.transfer(self.v, shape.block_kv, self.memory, width=v_width)
        self.partial_sums = PartialSums(engine) if shape.depth_parts > 1 else None
        if self.partial_sums is not None:
            alike = shape.columns == shape.depth_parts and shape.resident_q and not shape.register_columns
            assert alike and not shape.prefetch_scores, shape
        return engine

    # -- the algorithm ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Pass over the keys and store the block's rows."""
        b = self.b
        if not self.shape.prefetch_scores or self.config.everywhere:
            self._pass_all()
            return
        # Code for Inf and NaN between the products takes registers, so that the compiler reads fragments one by one.
        # It has a pass of its own.
        with b.if_(self._nonfinite_edges()):
            self._pass_guarded()
        with b.else_():
            self.values_finite = True
            self._pass_all()

    def _pass_all(self) -> None:
        """Pass over all tiles, edge tiles in a loop of their own."""
        b, prefetched = self.b, None
        O, rows, q = self._begin()
        if self.shape.prefetch_scores:
            prefetched = self.engine.tile(self.shape.rows, self.shape.block_kv)
            start = self.tiles.edge(b.const(-1, i32))
            with b.if_(start.more):
                self._prefetch_scores(prefetched, start.next, q, full=False)

        def take(at: TilePlace, full: bool) -> None:
            if prefetched is None:
                self._pass(at, q, O, rows, full)
            else:
                self._add_values(at, prefetched, O, rows, self._await_values(at, full), full)
                self._prefetch_scores(prefetched, self._following(at), q, full)

        with b.loop(0, self.tiles.edges, name="edge") as i:
            take(self.tiles.edge(i), full=False)
        if not self.config.everywhere:
            with b.loop(self.tiles.inner_first, self.tiles.inner_last, name="tile") as tile:
                take(self.tiles.inside(tile), full=True)
        self._finish(O, rows)

    def _pass_guarded(self) -> None:
        """Pass over all tiles in one loop, with a slow product for Inf and NaN; rarely used, so in little code."""
        b = self.b
        O, rows, q = self._begin()
        count, tile = self.tiles.count, self.tiles.tile
        with b.loop(0, count, name="tile") as i:
            at = TilePlace(tile(i), b.const(0, i32), tile(i + 1), i + 1 < count)
            self._pass(at, q, O, rows, full=False)
        self._finish(O, rows)

    def _begin(self) -> tuple[FragmentTile, list[SoftmaxState], LeftFactors]:
        """O, the states of its rows and Q before the first tile, whose K is prefetched."""
        b = self.b
        O, rows = self._start_output()
        q = self._load_q()
        start = self.tiles.edge(b.const(-1, i32))
        with b.if_(start.more):
            self._start_tile(start.next, b.const(0, i32), full=False)
        return O, rows, q

    def _nonfinite_edges(self) -> Value:
        """Whether V holds Inf or NaN in an edge tile."""
        b = self.b
        found = b.var(b.const(0, u32), "found")
        with b.loop(0, self.tiles.edges, _CHECKED_TOGETHER, name="edge") as i:
            tiles = [self.tiles.edge(b.min(i + n, self.tiles.edges - 1)).tile for n in range(_CHECKED_TOGETHER)]
            runs = [run for tile in tiles for run in self.values.runs_of(tile * self.shape.block_kv)]
            for run in runs:
                check_finite(self.b, self.engine.elem, run, found)
        return b.workgroup_any(b.ne(found.value, 0))

    def _pass(self, at: TilePlace, q: LeftFactors, O: FragmentTile, rows: list[SoftmaxState], full: bool) -> None:
        nonfinite = self._await_keys(at, full)
        S = self._scores_of(q, self._memory_of(at.stage)[0])
        if self.partial_sums is not None:
            self.partial_sums.put(S)
        if self.shape.stages == 1:
            nonfinite = self._await_values(at, full)
        elif self.partial_sums is not None:
            self.b.barrier()
        if self.partial_sums is not None:
            self.partial_sums.add(S)
        self._add_values(at, S, O, rows, nonfinite, full)

    def _prefetch_scores(self, S: FragmentTile, tile: Value, q: LeftFactors, full: bool) -> None:
        """Compute the scores of a tile whose K is prefetched, and prefetch its V."""
        self._await_only_keys(tile, full)
        for variables, new in zip(S.vars, self._scores_of(q, self.k_start).vars, strict=True):
            for variable, made in zip(variables, new, strict=True):
                variable.value = made.value

    def _scores_of(self, q: LeftFactors, k_at: Value) -> FragmentTile:
        b, engine, width = self.b, self.engine, self.engine.arrangement.width
        b.comment("S = Q K^T")
        S = engine.tile(self.shape.rows, self.shape.block_kv)
        k_at = k_at + self._first_column(self.config.head_dim)
        engine.multiply(
            S,
            q,
            lambda k, j: engine.load_right(self.memory, k_at, self.k_stride, k * SIZE, j * width, transposed=True),
            self.k_depth,
            self.shape.sync_every,
        )
        return S

    def _add_values(
        self, at: TilePlace, S: FragmentTile, O: FragmentTile, rows: list[SoftmaxState], nonfinite: Value | None,
        full: bool,
    ) -> None:  # fmt: skip
        """Softmax of a tile's scores, and ``O += P V``."""
        b, engine = self.b, self.engine
        key0 = at.tile * self.shape.block_kv
        _, v_at = self._memory_of(at.stage)
        self._modify(S, key0, full)
        b.comment("online softmax: P = exp2(S + base), l = l + sum P")
        s = S.values()
        follow(engine, rows, self._highest(s), LAG, lambda alpha: O.map(lambda x, r, c: x * alpha[r]))
        drawn = self._draw(at.tile)
        b.comment("O = O + P V")

        def weights(k: int) -> list[Value]:
            p = self._weigh(s, rows, [row.m.value for row in rows], k)
            if drawn is not None:
                p = self._drop(drawn, p, k)
            return [blocks[0] for blocks in engine.pack(p, engine.left, "enlarged")]

        if full or self.values_finite:
            self._multiply_values(O, weights, v_at)
            return
        factors = [weights(k) for k in range(self.shape.block_kv // SIZE)]
        assert nonfinite is not None
        with b.if_(nonfinite):
            self._multiply_nonfinite(O, factors, key0, v_at)
        with b.else_():
            self._multiply_values(O, lambda k: factors[k], v_at)

    def _modify(self, S: FragmentTile, key0: Value, full: bool) -> None:
        if not self.config.folded:
            S.map(lambda s, r, c: s * self.scale)
        self._apply([m for m in self.modifiers if m.everywhere or not full], S, key0)

    def _first_column(self, dim: int) -> Value | int:
        """The first of the subgroup's columns of a matrix."""
        return self.part * self._own_columns(dim) if self.shape.columns > 1 else 0

    # -- products with V -------------------------------------------------------------------------------------------

    def _multiply_values(self, O: FragmentTile, factors: LeftFactors, v_at: Value) -> None:
        engine, width = self.engine, self.engine.arrangement.width
        v_at = v_at + self._first_column(self.config.value_dim)
        engine.multiply(
            O,
            factors,
            lambda k, j: engine.load_right(self.memory, v_at, self.v_stride, k * SIZE, j * width),
            self.shape.block_kv // SIZE,
        )

    def _multiply_nonfinite(self, O: FragmentTile, factors: list[list[Value]], key0: Value, v_at: Value) -> None:
        """``O += P V`` where a key of weight zero adds nothing even if its value is Inf or NaN. Slow."""
        b, engine, width = self.b, self.engine, self.engine.arrangement.width
        own = v_at + self._first_column(self.config.value_dim)
        with b.loop(0, 3, name="kind") as kind:
            b.barrier()
            self.values.rewrite(key0, v_at, lambda run: sorted_out(b, engine.elem, run, kind))
            b.barrier()
            for j in range(len(O.vars[0])):
                part = [b.fragment_fill(engine.accumulator, 0.0) for _ in O.vars]
                for k in range(self.shape.block_kv // SIZE):
                    right = engine.load_right(self.memory, own, self.v_stride, k * SIZE, j * width)
                    part = [engine.multiply_add(factors[k][i], right, x) for i, x in enumerate(part)]
                for row, x in zip(O.vars, part, strict=True):
                    row[j].value = added(engine, row[j].value, x, kind)

    # -- rows of Q and O -------------------------------------------------------------------------------------------

    def _load_q(self) -> LeftFactors:
        """Bring in the block's rows of Q, some to stay in shared memory, the others in registers."""
        b, engine, shape = self.b, self.engine, self.shape
        if shape.columns > 1:
            return self._load_columns_of_q()
        if shape.prefetch_scores and self.q.rotary is None:
            transfer = engine.transfer(self.q, shape.block_q, self.memory)
            if can_deal_out(transfer):
                transfer.start(self.row0, b.const(0, i32), self.config.full_tiles)
                self._clear_padding()
                width = max(shape.piece(self.q.cols, self.v.cols), SIZE)  # if any pass
                return QueryRows(engine, transfer, self.subgroup_row).fragments(self.k_start, width)
        stays = shape.q_columns(self.q.cols)
        load = self._bring_columns(0, min(stays, self.q.cols), b.const(0, i32)) if stays else None
        fragments: list[list[Value]] = []
        if stays < self.q.cols:
            piece = shape.piece(self.q.cols, self.v.cols)
            for first in range(stays, self.q.cols, piece):
                end = min(first + piece, self.q.cols)
                passing = self._bring_columns(first, end, self.k_start)
                b.barrier()
                fragments += [passing(k) for k in range(first // SIZE, -(-end // SIZE))]
                b.barrier()  # everyone has read it: the memory is free again
        self._clear_padding()  # the first barrier of the loop shows the rest of Q, too
        return lambda k: load(k) if load is not None and k * SIZE < stays else fragments[k - stays // SIZE]

    def _load_columns_of_q(self) -> LeftFactors:
        """Bring in the block's rows of Q. Each subgroup keeps its columns in registers; all have as many pass through
        shared memory at a time."""
        b, engine, shape, cols = self.b, self.engine, self.shape, self.q.cols
        own, piece = self._own_columns(cols), max(shape.piece(cols, self.v.cols), SIZE)
        pieces = -(-own // piece)
        width = padded(-(-own // pieces), SIZE)
        fragments: list[list[Value]] = []
        for first in range(0, own, width):
            end = min(first + width, own)
            size = shape.block_q * row_stride(end - first)
            for part in range(shape.columns):
                low, high = part * own + first, min(part * own + end, cols)
                start = self.k_start + part * size
                if low < high:
                    self._bring_columns(low, high, start, end - first)
                else:
                    self._clear_rows(start, end - first)
            b.barrier()
            at = self.k_start + self.part * size + self.subgroup_row * row_stride(end - first)
            rows = range(0, shape.rows, engine.arrangement.height)
            for col in range(0, end - first, SIZE):
                fragments.append([engine.load_left(self.memory, at, row_stride(end - first), r, col) for r in rows])
            b.barrier()  # everyone has read it: the memory is free again
        self._clear_padding()
        return lambda k: fragments[k]

    def _clear_rows(self, start: Value, width: int) -> None:
        """Store zeros in place of the block's rows of ``width`` columns."""
        b, threads, each = self.b, self.shape.threads, width // RUN
        zero = b.splat(b.const(0, self.engine.elem), RUN)
        for first in range(0, self.shape.block_q * each, threads):
            row, run = divmod_const(b, self.engine.thread + first, each)
            with b.if_(row < self.shape.block_q):
                b.store(self.memory, start + row * row_stride(width) + run * RUN, zero)

    def _bring_columns(self, first: int, end: int, start: Value, width: int = 0) -> LeftFactors:
        """Bring some columns of the block's rows of Q into shared memory from ``start`` on, ``width`` with padding."""
        b, engine, shape = self.b, self.engine, self.shape
        transfer = transfer_of(engine, self.q.columns(b, first, end), shape.block_q, self.memory, width=width)
        transfer.clear_padding(start, 1)
        transfer.start(self.row0, start)
        transfer.finish(start)
        own, stride = start + self.subgroup_row * transfer.stride, transfer.stride
        rows = range(0, shape.rows, engine.arrangement.height)
        return lambda k: [engine.load_left(self.memory, own, stride, row, k * SIZE - first) for row in rows]

    def _store(self, O: FragmentTile, values: list[list[Value]], out: Matrix) -> None:
        b, engine = self.b, self.engine
        if not (self.shape.prefetch_scores and can_store_runs(engine, out)):
            super()._store(O, values, out)
            return
        room = self.shape.tile_elements(self.config.head_dim, self.config.value_dim)
        b.barrier()  # everyone has read K and V
        store_runs(engine, values, out, self.row0, self.subgroup_row, self.memory, room)
        if self.piece is not None:
            b.barrier()  # another piece may follow
