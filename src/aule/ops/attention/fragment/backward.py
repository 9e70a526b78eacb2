"""The backward kernels on matrix units, with scores and their gradients in registers.

Both have the same form. A workgroup *owns* rows of two matrices and passes over the rows of two *others*:

    dQ        owns Q and dO, passes over K and V:     S = Q K^T     dP = dO V^T     dQ = dS K
    dK, dV    owns K and V, passes over Q and dO:     S = K Q^T     dP = V dO^T     dK = dS Q     dV = P dO

A subgroup has its own rows of S and dP, which become left factors without leaving registers. Where results take too
many registers, several subgroups may share rows instead (``shape.columns``): P and dS then pass through shared memory,
but every fragment that is read from there serves more rows. Wide heads have so many subgroups to a row that they divide
the depth of the products for scores, too (``shape.depth_parts``).

Workgroups share no sums, so results are deterministic. That takes seven products. With ``config.sums`` the second
kernel alone also adds its keys' share of dQ to sums in memory, which takes five.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import f32, i32
from aule.ops.attention.config import FragmentBackwardConfig
from aule.ops.attention.fragment.backward_scores import KeysKernel
from aule.ops.attention.fragment.backward_tiles import Body, TileKernel
from aule.ops.attention.prepass.tile_list import tile_at
from aule.target import Target
from aule.tile.common.matrix import divmod_const
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import FragmentTile

_BLOCKS_AT_ONCE = 4
"""Blocks of 16 x 16 of dQ that a subgroup multiplies at a time if it holds a lot of dK and dV, as for wide heads."""


def build_backward_fragment(config: FragmentBackwardConfig, target: Target) -> KernelIR:
    """Trace the kernel of dQ, that of dK and dV, or that of dS."""
    name = f"flash_attention_backward_{config.of}"
    b = Builder(name, config.shape.threads, config.shape.lanes, config.shape.registers, arithmetic="quick")
    if target.overlap:
        b.launch_await()
    kernel = (_Keys if config.of == "keys" else _Queries)(b, config, target)
    with b.if_(kernel.exists):
        kernel.run()
    return b.finish()


class _Queries(TileKernel):
    """dQ or dS of a block of query rows."""

    def __init__(self, b: Builder, config: FragmentBackwardConfig, target: Target) -> None:
        super().__init__(b, config, target)
        assert config.shape.score_cut[0] == 1, "a subgroup needs scores of all of its rows"
        self.own_rows()
        scores = self.scores
        self.own = (
            self.matrix("q", self.head, scores.seq_q, config.head_dim, 0),
            self.matrix("do", self.head, scores.seq_q, config.value_dim, 3),
        )
        self.other = (
            self.matrix("k", self.kv_head, scores.seq_kv, config.head_dim, 1),
            self.matrix("v", self.kv_head, scores.seq_kv, config.value_dim, 2),
        )

    def run(self) -> None:
        b, engine, shape, scores = self.b, self.engine, self.shape, self.scores
        dQ = None if self.config.of == "scores" else engine.tile(shape.rows, self.result_width(0))
        shared = shape.columns > 1
        own_row = self.row0 + self.subgroup_row
        rows = [own_row + engine.row(r) for r in range(engine.rows_held)]
        numbers = [self.row_numbers(self.head, row) for row in rows]
        reach, width = scores.reach_of_rows(self.row0, shape.block_q), shape.block_kv
        first, last = reach.first // width, (reach.end + (width - 1)) // width
        tiles = self.listed(self.head)
        if tiles is not None:
            first, last = b.const(0, i32), tiles.count
        keys, values = (self.transfer(matrix) for matrix in self.other)
        self.load_own()

        def partial(tile: Value) -> Value:
            if tiles is not None:
                return tile < tiles.partial
            return (tile * width < reach.full_first) | (tile * width + width > reach.full_end)

        def arrive(tile: Value, at: tuple[Value, Value]) -> None:
            if self.config.everywhere:
                keys.rewrite_own(at[0], self.finite)
            else:
                with b.if_(partial(tile)):
                    keys.rewrite_own(at[0], self.finite)

        def body(
            tile: Value, at: tuple[Value, Value], fetch_next: Callable[[], None], put_next: Callable[[], None]
        ) -> None:
            b.comment("P = exp2(Q K^T - lse)")
            S = self.scores_of(0, at[0])
            number = tile_at(tiles, tile)

            def place(r: int, c: int) -> tuple[Value, Value]:
                return rows[r], number * width + self.score_col + S.col(c)

            slope = self.weigh(S, self.head, place, partial(tile), lambda r, c: numbers[r][0])
            b.comment("dS = P * (dO V^T - delta)")
            dP = self.scores_of(1, at[1])
            p = S.values()
            kept = self.kept(self.head, place, len(p), len(p[0]), "columns")
            slope = slope if dQ is not None else None  # dS is the gradient of the modified scores
            ds = self.differentiate(p, dP.values(), lambda r, c: numbers[r][1], slope, kept)
            if dQ is None:
                fetch_next()
                with b.if_(b.eq(self.depth_part, 0)) if shape.depth_parts > 1 else nullcontext():
                    self.store_scores(ds, rows, number * width + self.score_col)
                put_next()
                return
            if shared:
                self.share(ds, self.ds_start)
                b.barrier()
            factors = self.shared_factors(self.ds_start, ds) if shared else self.packed(ds)
            fetch_next()
            b.comment("dQ = dQ + dS K")
            self.accumulate(dQ, factors, 0, at[0])
            put_next()

        self.pass_over((keys, values), (first, last), (body,), arrive, tiles=tiles)
        if dQ is not None:
            out = self.gradient("dq", self.head, scores.seq_q, self.config.head_dim)
            self.store(dQ, out, self.p.number("dq_factor", f32), 0)

    def store_scores(self, ds: list[list[Value]], rows: list[Value], key0: Value) -> None:
        """Store dS of the rows and keys that exist. Rows of ``ds`` begin at multiples of a lane's run."""
        b, engine, scores, run = self.b, self.engine, self.scores, self.engine.run
        out, base = self.p.buffer("ds", f32, "write"), self.p.strided("ds", scores.batch, self.head)
        step, seq_kv = self.p.number("ds_row_stride", self.index), scores.seq_kv
        inverse = 1.0 / engine.excess  # P has it

        def store(values: list[Value], start: Value, full: bool) -> None:
            for c in range(0, len(values), run):
                key = key0 + engine.col(c)
                strip = [x * inverse if engine.excess > 1.0 else x for x in values[c : c + run]]
                if full:
                    b.store(out, start + b.cast(key, self.index), b.vector(strip) if run > 1 else strip[0])
                    continue
                for i, x in enumerate(strip):
                    with b.if_(key + i < seq_kv):
                        b.store(out, start + b.cast(key + i, self.index), x)

        for row, values in zip(rows, ds, strict=True):
            start = base + b.cast(row, self.index) * step
            with b.if_(row < scores.seq_q):
                with b.if_(key0 + self.own_width <= seq_kv):
                    store(values, start, True)
                with b.else_():
                    store(values, start, False)


class _Keys(TileKernel, KeysKernel):
    """dK and dV of a block of keys."""

    def __init__(self, b: Builder, config: FragmentBackwardConfig, target: Target) -> None:
        super().__init__(b, config, target)
        self.open_block()

    def run(self) -> None:
        b, shape = self.b, self.shape
        dK, dV = (self.engine.tile(shape.rows, self.result_width(which)) for which in (0, 1))
        first, last, end = self.row_tiles()
        self.load_own()
        with b.loop(*self.members(), name="member") as member:
            self._pass(member, first, last, end, dK, dV)
        self.finish(dK, dV)

    def _pass(self, member: Value, first: Value, last: Value, end: Value, dK: FragmentTile, dV: FragmentTile) -> None:
        """Add the share of one query head's rows to the block's dK and dV."""
        b, engine, shape, scores, config = self.b, self.engine, self.shape, self.scores, self.config
        head, width = self.kv_head * self.group + member, shape.block_kv
        queries = self.transfer(self.matrix("q", head, scores.seq_q, config.head_dim, 0))
        results = self.transfer(self.matrix("do", head, scores.seq_q, config.value_dim, 3))
        fetched: list[Var] = [b.var(b.const(0.0, f32)) for _ in range(2)]
        own_key = self.row0 + self.score_row
        tiles = self.listed(head)
        if tiles is not None:
            first, last = b.const(0, i32), tiles.count
        first, last = self.own_tiles(member, first, last)

        def body(
            tile: Value, at: tuple[Value, Value], fetch_next: Callable[[], None], put_next: Callable[[], None],
            plain: bool = config.keeps_all, full: bool = False,
        ) -> None:  # fmt: skip
            row0 = tile_at(tiles, tile) * width
            # If every key is kept, only keys past the end must not be added to dQ, and a compiler can interleave the
            # two products for scores with what lies between them.
            partial = None if plain else self.partial(row0, self.row0, shape.block_q, end)
            if tiles is not None:
                partial = tile < tiles.partial
            b.comment("P^T = exp2(K Q^T - lse)")
            S = self.scores_of(0, at[0])
            base, delta = (self.columns(S, self.numbers_at(tile) + (self.score_col + i * width)) for i in range(2))
            columns = [row0 + self.score_col + S.col(c) for c in range(len(base))]
            keys = [own_key + S.row(r) for r in range(len(S.vars) * len(engine.part_rows))]

            def place(r: int, c: int) -> tuple[Value, Value]:
                return columns[c], keys[r]

            slope = self.weigh(S, head, place, partial, lambda r, c: base[c])
            b.comment("dS^T = P^T * (V dO^T - delta)")
            offset = shape.start_at_delta and not config.dropout  # dropout scales dP alone
            dP = self.scores_of(1, at[1], [-x for x in delta] if offset else None)
            p = S.values()
            kept = self.kept(head, place, len(p), len(p[0]), "rows")
            less = None if offset else lambda r, c: delta[c]
            ds = self.differentiate(p, dP.values(), less, slope, kept, guarded=not plain)
            p = self.dropped(p, kept)
            shared = shape.columns > 1
            if config.sums or shared:
                self.share(ds, self.ds_start, [key < end for key in keys] if plain and not full else None)
            if shared:
                self.share(p, self.p_start, by=shape.depth_parts - 1)
                b.barrier()
            p_factors = self.shared_factors(self.p_start, p) if shared else self.packed(p)
            ds_factors = self.shared_factors(self.ds_start, ds) if shared else self.packed(ds)
            fetch_next()
            b.comment("dV = dV + P^T dO")
            self.accumulate(dV, p_factors, 1, at[1])
            b.comment("dK = dK + dS^T Q")
            self.accumulate(dK, ds_factors, 0, at[0])
            put_next()  # dQ's product needs neither Q nor dO, nor their registers
            if config.sums:
                if not (shared or shape.late_fetch):
                    b.barrier()
                self._pass_queries(head, row0)

        limits: tuple[Value, ...] = (first, last)
        bodies: tuple[Body, ...] = (body,)
        if shape.edge_loop and config.drops_later:
            assert scores.right is not None
            # From this row on, rows keep all of the block's keys, if these exist.
            past = self.row0 + shape.block_q
            row = b.max(past - 1 - scores.right - scores.shift, 0)
            middle = b.min(b.max((row + (width - 1)) // width, first), last)
            limits = (first, b.select(past > scores.seq_kv, last, middle), last)
            bodies = (body, functools.partial(body, plain=True, full=True))
        self.pass_over(
            (queries, results), limits, bodies,
            lambda tile, at: self.put_numbers(tile, fetched),
            lambda tile: self.fetch_numbers(head, tile_at(tiles, tile), fetched), tiles,
        )  # fmt: skip

    def _pass_queries(self, head: Value, row0: Value) -> None:
        """Add ``dS K`` of the block's keys to dQ. Subgroups divide the tile's rows and columns so that each
        has the least to multiply, and then the least to read."""
        b, shape = self.b, self.shape
        # Wide heads: columns past the end, which are zeros, are divided, too.
        wide = shape.depth_parts > 1
        depth = self.widths[0] // SIZE if wide else self.depths[0]
        blocks = shape.block_kv // SIZE

        def across(down: int) -> int:
            return next(n for n in range(shape.subgroups // down, 0, -1) if depth % n == 0)

        def cost(down: int) -> tuple[int, int, int]:
            rows, cols = blocks // down, depth // across(down)
            return rows * cols, rows + cols, -down

        # Subgroups with columns of K in registers have these columns of dQ.
        most = 1 if shape.owns_in_registers else min(blocks, shape.subgroups)
        down = min((n for n in range(1, most + 1) if blocks % n == 0), key=cost)
        part, block = divmod_const(b, self.engine.subgroup, down)
        rows, cols = blocks // down, depth // across(down)
        with b.if_(part < across(down)) if down * across(down) < shape.subgroups else nullcontext():
            pieces = -(-rows * cols // _BLOCKS_AT_ONCE) if wide else 1
            for i in range(pieces):
                start, end = (cols * n // pieces for n in (i, i + 1))
                self._put_blocks(head, row0, block * (rows * SIZE), part * (cols * SIZE), rows, (start, end))

    def _put_blocks(self, head: Value, row0: Value, row: Value, part: Value, rows: int, cols: tuple[int, int]) -> None:
        """Compute ``rows`` blocks of 16 x 16 of the tile, from its ``row`` on, in the columns of blocks ``cols`` of the
        subgroup's, which begin at ``part``."""
        engine, arrangement = self.engine, self.engine.arrangement
        col = part + cols[0] * SIZE
        ds_start, k_start = self.ds_start + row, self.own_start[0] + col
        tile = engine.tile(rows * SIZE, (cols[1] - cols[0]) * SIZE)
        first = cols[0] * SIZE // arrangement.width

        def right(k: int, j: int) -> Value:
            if self.right_factors:
                return self.right_factors[k][first + j]
            return engine.load_right(self.memory, k_start, self.strides[0], k * SIZE, j * arrangement.width)

        engine.multiply(
            tile,
            lambda k: [
                engine.load_left(self.memory, ds_start, self.scores_stride, i, k * SIZE, transposed=True)
                for i in range(0, rows * SIZE, arrangement.height)
            ],
            right,
            self.shape.block_q // SIZE,
        )
        padding = self.shape.depth_parts > 1 and self.widths[0] > self.depths[0] * SIZE
        self.put_queries(tile, head, row0 + row, col, limited=padding)
