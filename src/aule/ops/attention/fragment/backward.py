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
from aule.ops.attention.fragment.backward_scores import GradientKernel, KeysKernel
from aule.ops.attention.prepass.tile_list import TileList, tile_at
from aule.target import Target
from aule.tile.common.matrix import Matrix, divmod_const
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Fragments, FragmentTile
from aule.tile.fragment.partial_sums import PartialSums
from aule.tile.fragment.rope import exchange_bytes, transfer_of
from aule.tile.fragment.shape import RUN, row_stride
from aule.tile.fragment.transfer import Transfer

_BLOCKS_AT_ONCE = 4
"""Blocks of 16 x 16 of dQ that a subgroup multiplies at a time if it holds a lot of dK and dV, as for wide heads."""

Body = Callable[[Value, tuple[Value, Value], Callable[[], None], Callable[[], None]], None]
"""Takes a tile, where its two matrices lie, and the two calls of `_Kernel.pass_over`."""


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


class _Kernel(GradientKernel):
    """Shared memory, and the pass of the workgroup's own rows over the others."""

    def __init__(self, b: Builder, config: FragmentBackwardConfig, target: Target) -> None:
        super().__init__(b, config, target, Fragments(b, target, config.shape, config.dtype))
        dims = config.head_dim, config.value_dim
        self.strides = tuple(row_stride(width) for width in self.widths)
        rows, width = self.shape.block_q, self.shape.block_kv
        self.own_start = (b.const(0, i32), b.const(rows * self.strides[0], i32))
        in_memory = 0 if self.shape.owns_in_registers else 1 if self.shape.resident_q else 2
        self.other_start = rows * sum(self.strides[:in_memory])
        self.resident: tuple[list[list[Value]], list[list[Value]]] = ([], [])
        # The first owned matrix as right factors, by row and column of blocks, if it is in no memory.
        self.right_factors: list[list[Value]] = []
        self.stage_size = width * sum(self.strides)
        # dS and P, by key, where they pass through shared memory.
        self.scores_stride = row_stride(width)
        self.ds_start = self.other_start + self.shape.stages * self.stage_size
        self.p_start = self.ds_start + rows * self.scores_stride
        self.size = self.shape.backward_elements(*dims, config.sums)
        if config.rope is not None:
            self.size = max(self.size, exchange_bytes(rows, self.widths[0]) // 2)
        self.memory = b.shared("tiles", self.engine.elem, self.size)
        self.partial_sums = PartialSums(self.engine) if self.shape.depth_parts > 1 else None

    def transfer(self, matrix: Matrix) -> Transfer:
        """A transfer of the others' rows. With one stage they wait in registers until everyone has read the last."""
        copies, width = self.shape.stages == 2, self.shape.result_columns(matrix.cols)
        return transfer_of(self.engine, matrix, self.shape.block_kv, self.memory, copies, width)

    # -- memory --------------------------------------------------------------------------------------------------------

    def load_own(self) -> None:
        """Load the rows that the workgroup owns; the first barrier of the loop makes them visible."""
        b, (first, second) = self.b, self.own
        if self.shape.owns_in_registers:
            for which in range(2):
                self._load_columns(which)
            return
        transfer = self._bring(first, self.own_start[0], self.widths[0])
        if self.config.sums:
            transfer.rewrite_own(self.own_start[0], self.finite)
        if self.shape.resident_q:
            self._load_resident(second, self.own_start[1])
        else:
            self._bring(second, self.own_start[1], self.widths[1])
        if self.shape.register_columns:
            if not self.shape.resident_q:
                b.barrier()
            count = min(self.shape.register_columns // SIZE, self.depths[0])
            self.resident[0].extend([self.left(0, k) for k in range(count)])

    def _bring(self, matrix: Matrix, start: Value, width: int = 0) -> Transfer:
        transfer = transfer_of(self.engine, matrix, self.shape.block_q, self.memory, width=width)
        transfer.clear_padding(start, 1)
        transfer.start(self.row0, start)
        transfer.finish(start)
        return transfer

    def _load_columns(self, which: int) -> None:
        """Load the subgroup's columns of an owned matrix into registers, through memory that later holds the others."""
        b, engine, shape = self.b, self.engine, self.shape
        assert shape.subgroups == shape.columns == shape.depth_parts, shape
        start, stride, width = b.const(0, i32), self.strides[which], self.result_width(which)
        transfer = self._bring(self.own[which], start, self.widths[which])
        if which == 0 and self.config.sums:
            transfer.rewrite_own(start, self.finite)
        b.barrier()
        at, rows = start + self._depth_start(which), range(0, shape.rows, engine.arrangement.height)
        for col in range(0, width, SIZE):
            self.resident[which].append([engine.load_left(self.memory, at, stride, row, col) for row in rows])
        if which == 0 and self.config.sums:
            cols = range(0, width, engine.arrangement.width)
            for row in range(0, shape.rows, SIZE):
                self.right_factors.append([engine.load_right(self.memory, at, stride, row, col) for col in cols])
        b.barrier()  # everyone has read it: the memory is free again

    def _load_resident(self, matrix: Matrix, start: Value) -> None:
        """Load rows into registers, through memory that later holds the others; as many columns at a time as fit."""
        b, engine, shape = self.b, self.engine, self.shape
        room = self.size - shape.block_q * self.strides[0]
        piece = (room // shape.block_q - RUN) // SIZE * SIZE
        for first in range(0, matrix.cols, piece):
            transfer = self._bring(matrix.columns(b, first, min(first + piece, matrix.cols)), start)
            own = start + self.score_row * transfer.stride
            b.barrier()
            for col in range(0, transfer.source.cols, SIZE):
                rows = range(0, self.score_rows, engine.arrangement.height)
                self.resident[1].append([engine.load_left(self.memory, own, transfer.stride, r, col) for r in rows])
            b.barrier()

    def stage(self, i: Value) -> tuple[Value, Value]:
        """Where the two other matrices lie for tile number ``i``."""
        start = self.b.const(self.other_start, i32)
        if self.shape.stages == 2:
            start = start + (i & 1) * self.stage_size
        return start, start + self.shape.block_kv * self.strides[0]

    def left(self, which: int, k: int) -> list[Value]:
        """Fragments of 16 columns of an owned matrix, one for each 16 rows of the subgroup."""
        if k < len(self.resident[which]):
            return self.resident[which][k]
        stride = self.strides[which]
        start = self.own_start[which] + self.score_row * stride + self._depth_start(which)
        rows = range(0, self.score_rows, self.engine.arrangement.height)
        return [self.engine.load_left(self.memory, start, stride, row, k * SIZE) for row in rows]

    # -- one tile ------------------------------------------------------------------------------------------------------

    def scores_of(self, which: int, at: Value, start: list[Value] | None = None) -> FragmentTile:
        """``own other^T``, this subgroup's part; sums start at ``start`` of a lane's columns, or 0."""
        b, engine, stride, cols = self.b, self.engine, self.strides[which], self.engine.arrangement.width
        tile = engine.tile(self.score_rows, self.own_width)
        if start is not None:
            tile.map(lambda _, r, c: start[c])
        at = at + self.score_col * stride + self._depth_start(which)
        parts = self.shape.depth_parts
        engine.multiply(
            tile,
            lambda k: self.left(which, k),
            lambda k, j: engine.load_right(self.memory, at, stride, k * SIZE, j * cols, transposed=True),
            self.depths[which] if parts == 1 else self.widths[which] // (SIZE * parts),
        )
        if self.partial_sums is not None:
            if which == 1:
                b.barrier()  # everyone has read the parts of S
            self.partial_sums.put(tile)
            b.barrier()
            self.partial_sums.add(tile)
        return tile

    def _depth_start(self, which: int) -> Value | int:
        """The first column of the subgroup's part of a product's depth."""
        parts = self.shape.depth_parts
        return 0 if parts == 1 else self.depth_part * (self.widths[which] // parts)

    def accumulate(self, result: FragmentTile, left: Callable[[int], list[Value]], which: int, at: Value) -> None:
        """``result += left other``, this subgroup's columns; ``left`` gives a column of fragments."""
        engine, stride, cols = self.engine, self.strides[which], self.engine.arrangement.width
        at = at + self.part * self.result_width(which)
        engine.multiply(
            result,
            left,
            lambda k, j: engine.load_right(self.memory, at, stride, k * SIZE, j * cols),
            self.shape.block_kv // SIZE,
        )

    def packed(self, values: list[list[Value]]) -> Callable[[int], list[Value]]:
        """This lane's elements as left factors, a column of fragments at a time."""
        factors = self.engine.pack(values, self.engine.left, "enlarged")
        return lambda k: [row[k] for row in factors]

    def _share(self, values: list[list[Value]], start: int, exist: list[Value] | None = None, by: int = 0) -> None:
        """Store P^T or dS^T (or dS) for all subgroups, with zeros for keys that do not ``exist``; of the subgroups that
        have the same scores, the one whose part of the depth is number ``by``. The barrier before this tile's scores
        came after its last readers."""
        own = start + self.score_row * self.scores_stride + self.score_col
        with self.b.if_(self.b.eq(self.depth_part, by)) if self.shape.depth_parts > 1 else nullcontext():
            self.engine.put(self.memory, own, self.scores_stride, values, "enlarged", exist)

    def _shared_factors(self, start: int, values: list[list[Value]]) -> Callable[[int], list[Value]]:
        """The subgroup's rows of what `_share` stored, as left factors. Rows that it has computed entirely come first,
        from registers."""
        stride, height = self.scores_stride, self.engine.arrangement.height
        if self.score_rows == self.shape.rows:
            own, rows = start + self.subgroup_row * stride, range(0, self.shape.rows, height)
            return lambda k: [self.engine.load_left(self.memory, own, stride, row, k * SIZE) for row in rows]
        mine, parts = self.packed(values), range(1, self.shape.columns)
        others = [start + (self.subgroup_row + self.result_block(i)) * stride for i in parts]
        return lambda k: mine(k) + [
            self.engine.load_left(self.memory, at, stride, row, k * SIZE)
            for at in others for row in range(0, self.score_rows, height)
        ]  # fmt: skip

    # -- the pass over tiles -------------------------------------------------------------------------------------------

    def pass_over(
        self,
        transfers: tuple[Transfer, Transfer],
        limits: tuple[Value, ...],
        bodies: tuple[Body, ...],
        arrive: Callable[[Value, tuple[Value, Value]], None],
        start: Callable[[Value], None] | None = None,
        tiles: TileList | None = None,
    ) -> None:
        """Pass over all tiles, whose rows ``transfers`` fetch. What is called with a tile gets its place in the list of
        ``tiles``, if there is one.

        Parameters
        ----------
        limits, bodies : tuple
            Each body takes the tiles between two limits. It calls its third argument when there are registers for the
            next tile's rows, and its last when this tile's rows have been read (no-ops unless ``shape.late_fetch``).
        arrive : callable
            May change the rows that a thread has fetched before others see them.
        start : callable, optional
            Fetches more for a tile.
        """
        b, width, late = self.b, self.shape.block_kv, self.shape.late_fetch
        first, last = limits[0], limits[-1]

        def fetch(tile: Value) -> None:
            at = self.stage(tile)
            for transfer, place in zip(transfers, at, strict=True):
                transfer.start(tile_at(tiles, tile) * width, place)
            if start is not None:
                start(tile)

        def put(tile: Value) -> None:
            at = self.stage(tile)
            for transfer, place in zip(transfers, at, strict=True):
                transfer.finish(place)
            arrive(tile, at)

        for stage in range(self.shape.stages):
            for transfer, place in zip(transfers, self.stage(b.const(stage, i32)), strict=True):
                transfer.clear_padding(place, 1)
        with b.if_(first < last):
            fetch(first)
            if late:
                put(first)
        for low, high, body in zip(limits, limits[1:], bodies, strict=False):
            with b.loop(low, high, name="tile") as tile:

                def fetch_next(tile: Value = tile) -> None:
                    # The last tile is fetched again; a branch would cost moves of all prefetched registers.
                    fetch(b.min(tile + 1, last - 1))

                def put_next(tile: Value = tile) -> None:
                    b.barrier()  # everyone has read this one's
                    put(tile)  # the one stage that there is

                if late:
                    b.barrier()
                    body(tile, self.stage(tile), fetch_next, put_next)
                else:
                    if self.shape.stages == 1:
                        b.barrier()  # everyone is done with the tile before
                    put(tile)
                    b.barrier()
                    with b.if_(tile + 1 < last):
                        fetch(tile + 1)
                    body(tile, self.stage(tile), lambda: None, lambda: None)
        b.barrier()  # the next passage begins with the same memory


class _Queries(_Kernel):
    """dQ or dS of a block of query rows."""

    def __init__(self, b: Builder, config: FragmentBackwardConfig, target: Target) -> None:
        super().__init__(b, config, target)
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
                self._share(ds, self.ds_start)
                b.barrier()
            factors = self._shared_factors(self.ds_start, ds) if shared else self.packed(ds)
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


class _Keys(_Kernel, KeysKernel):
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
                self._share(ds, self.ds_start, [key < end for key in keys] if plain and not full else None)
            if shared:
                self._share(p, self.p_start, by=shape.depth_parts - 1)
                b.barrier()
            p_factors = self._shared_factors(self.p_start, p) if shared else self.packed(p)
            ds_factors = self._shared_factors(self.ds_start, ds) if shared else self.packed(ds)
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
