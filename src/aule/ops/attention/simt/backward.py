"""The simt backward kernels: FlashAttention's gradients with plain arithmetic, for every GPU.

One kernel computes dQ: a workgroup has a block of query rows and passes over the keys. Another computes dK and dV: a
workgroup has a block of keys and passes over the query rows of all heads that share them. Both recompute the scores, in
the base-2 log domain:

    P = exp2(S - lse)    dS = P * (dO V^T - delta)    dQ = dS K    dV = P^T dO    dK = dS^T Q

With Q' the scaled Q of the forward pass, ``dS^T Q'`` is dK up to a factor. Workgroups share no sums, so results are
deterministic. That takes seven products. With ``config.sums`` the second kernel alone also adds its keys' share of dQ
to sums in memory, which takes five.

The kernels before and after these are in `backward_rows.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, f32, i32
from aule.ops.attention.backward_block import BackwardBlock
from aule.ops.attention.config import BackwardConfig
from aule.ops.attention.prepass.tile_list import tile_at
from aule.ops.scores.band import Place
from aule.ops.scores.rotated_operands import quad_angles
from aule.target import Target
from aule.tile.common.math import LOG2E
from aule.tile.common.matrix import QUAD, Matrix, padded
from aule.tile.simt.atomic_sums import TileSums
from aule.tile.simt.bank_padding import BankPadding
from aule.tile.simt.engine import Simt
from aule.tile.simt.register_tile import RegisterTile
from aule.tile.simt.rope import rotate_back
from aule.tile.simt.shape import wave_size
from aule.tile.simt.staging import Chunk, Stager


def build_backward(config: BackwardConfig, target: Target) -> KernelIR:
    """Trace the kernel of dQ, that of dK and dV, or that of dS."""
    name = f"flash_attention_backward_{config.of}"
    b = Builder(name, config.shape.threads, wave_size(target, config.shape), config.shape.registers, arithmetic="quick")
    kernel = (_Keys if config.of == "keys" else _Queries)(b, config, target)
    with b.if_(kernel.exists):
        kernel.run()
    return b.finish()


@dataclass(frozen=True)
class _Phase:
    """One product of a tile, fed through the engine's stages chunk by chunk."""

    chunks: int
    fetch: Callable[[Value], None]
    commit: Callable[[Value], None]
    multiply: Callable[[Value], None]


class _Kernel(BackwardBlock):
    """What both kernels share: parameters, the engine, and products whose operands are prefetched one chunk ahead."""

    vector_width = QUAD

    def __init__(self, b: Builder, config: BackwardConfig, target: Target) -> None:
        super().__init__(b, config)
        self.config, self.shape = config, config.shape
        widest = max(config.head_dim, config.value_dim)
        sizes = self.shape.backward_elements(widest, config.sums)
        self.engine = Simt(b, target, self.shape, widest, widest, sizes)
        engine, threads = self.engine, self.shape.threads
        first = engine.k_chunk.per_thread(threads)
        if not self.shape.resident_q:
            first += engine.q_chunk.per_thread(threads)
        chunks = [engine.row_chunk(dim) for dim in (config.head_dim, config.value_dim)]
        quads = max(first, *(chunk.per_thread(threads) for chunk in chunks))
        elem, angles = SCALARS[config.dtype], quad_angles(config)
        self.stager = Stager(engine, elem, quads, engine.stage, engine.stage_size, angles)

    # -- products ------------------------------------------------------------------------------------------------------

    def outer(
        self, tile: RegisterTile, left: Matrix, row: Value, right: Matrix, column: Value,
        scales: tuple[Value | None, Value | None] = (None, None), resident: Value | None = None,
    ) -> _Phase:  # fmt: skip
        """``tile += left right^T``, of the rows from ``row`` and the rows from ``column`` on. ``resident`` is the
        shared memory of the left rows, if they stay there."""
        engine, shape, stager = self.engine, self.shape, self.stager
        cols = padded(left.cols, shape.chunk_k)
        second = 0 if resident is not None else engine.q_chunk.per_thread(shape.threads)
        left_starts = [] if resident is not None else engine.row_starts(engine.q_chunk, left, row)
        right_starts = engine.row_starts(engine.k_chunk, right, column)

        def fetch(chunk: Value) -> None:
            engine.fetch(stager, 0, engine.q_chunk, left, left_starts, chunk * shape.chunk_k, cols)
            engine.fetch(stager, second, engine.k_chunk, right, right_starts, chunk * shape.chunk_k, cols)

        def commit(chunk: Value) -> None:
            operands = [(second, engine.k_chunk, right, scales[1])]
            if resident is None:
                operands.insert(0, (0, engine.q_chunk, left, scales[0]))
            for first, piece, source, scale in operands:
                rotated = None if source.rotary is None else (source.rotary, chunk * shape.chunk_k, cols)
                engine.commit(stager, first, piece, scale, rotated=rotated)

        def multiply(chunk: Value) -> None:
            engine.multiply_chunks(tile, resident, stager.offset.value, chunk)

        return _Phase(cols // shape.chunk_k, fetch, commit, multiply)

    def load_own(self, first: Matrix, second: Matrix, row: Value, scale: Value | None = None) -> None:
        """Load the block's own rows if they are resident; the barrier of the first chunk makes them visible."""
        if self.engine.q is not None and self.engine.own is not None:
            self.engine.load_resident(self.engine.q, first, row, scale)
            self.engine.load_resident(self.engine.own, second, row)

    def inner(
        self, tile: RegisterTile, right: Matrix, row: Value, scale: Value | None = None, finite: bool = False
    ) -> _Phase:
        """``tile += P right`` of the rows from ``row`` on, with P from `Simt.store_p`."""
        piece, first = self.engine.row_chunk(right.cols), self.b.const(0, i32)
        return self._rows(tile, right, row, piece, first, scale, finite)

    def across(self, tile: RegisterTile, right: Matrix, row: Value, sums: TileSums, part: int) -> _Phase:
        """``tile += P^T right`` of one part of the columns of the rows from ``row`` on, with P from
        `Simt.store_p_transposed`. Inf and NaN count as zero."""
        piece = Chunk(self.shape.chunk_v, sums.part_cols, 0, BankPadding(sums.part_cols))
        first = self.b.const(part * sums.part_cols, i32)
        return self._rows(tile, right, row, piece, first, None, True, transposed=True)

    def _rows(
        self, tile: RegisterTile, right: Matrix, row: Value, piece: Chunk, first: Value, scale: Value | None,
        finite: bool, transposed: bool = False,
    ) -> _Phase:  # fmt: skip
        """``tile += P right``, or ``P^T right`` if ``transposed``, of the columns from ``first`` on."""
        engine, shape, stager = self.engine, self.shape, self.stager
        cols = shape.value_cols(right.cols)
        padding = shape.transposed_padding if transposed else shape.p_padding
        rows = shape.block_q if transposed else shape.block_kv

        def fetch(chunk: Value) -> None:
            starts = engine.row_starts(piece, right, row + chunk * shape.chunk_v)
            engine.fetch(stager, 0, piece, right, starts, first, cols)

        def commit(chunk: Value) -> None:
            rotated = None if right.rotary is None else (right.rotary, first, cols)
            engine.commit(stager, 0, piece, scale, finite, rotated)

        def multiply(chunk: Value) -> None:
            engine.multiply_rows(tile, padding, stager.offset.value, piece.cols, chunk)

        return _Phase(rows // shape.chunk_v, fetch, commit, multiply)

    def run_phase(self, phase: _Phase, then: Callable[[], None]) -> None:
        """All chunks of a product, the first of which is prefetched; ``then`` prefetches what comes next."""
        b = self.b
        with b.loop(0, phase.chunks, name="chunk") as chunk:
            phase.commit(chunk)
            b.barrier()
            with b.if_(chunk + 1 < phase.chunks):
                phase.fetch(chunk + 1)
            with b.else_():
                then()
            phase.multiply(chunk)
            self.stager.advance()

    # -- scores --------------------------------------------------------------------------------------------------------

    def weigh(
        self, S: RegisterTile, head: Value, place: Place, partial: Value, lse: Callable[[int, int], Value]
    ) -> RegisterTile | None:
        """Replace S by P, with ``lse`` of each element. Returns the derivative of the softcap, if there is one."""
        b, slope = self.b, None
        bent = self.scores.modify(S, head, place, partial)
        if bent is not None:
            slope = self.engine.score_tile(b.const(0.0, f32))
            slope.assign(bent)
        S.map(lambda s, r, c: b.exp2(s - lse(r, c)))
        return slope

    def kept(self, head: Value, place: Place, strip: int, transposed: bool) -> list[list[Value]] | None:
        """Which weights of a tile dropout keeps; None without dropout. ``strip`` consecutive keys are in consecutive
        registers, along a column of the tile if it is ``transposed``."""
        dropout = self.scores.dropout()
        if dropout is None:
            return None
        rows, cols = range(self.shape.rows), range(self.shape.block_kv // self.shape.threads_x)
        head_number = self.scores.batch * self.heads + head
        result: list[list[Value]] = [[] for _ in (cols if transposed else rows)]
        for i, found in enumerate(result):
            for first in range(0, len(rows) if transposed else len(cols), strip):
                row, key = place(first, i) if transposed else place(i, first)
                found += dropout.strip(head_number, row, key, strip)
        return [[result[c][r] for c in cols] for r in rows] if transposed else result

    def differentiate(
        self,
        P: RegisterTile,
        dP: RegisterTile,
        delta: Callable[[int, int], Value],
        slope: RegisterTile | None,
        kept: list[list[Value]] | None,
        store_ds: Callable[[Value, int, int], None] | None = None,
    ) -> None:
        """Replace dP by dS, given the derivative ``slope`` of the softcap and the weights that dropout ``kept``.

        ``store_ds`` receives the gradient of the scores after the softcap. Where the weight is zero, dS is zero even if
        dP or slope is Inf or NaN, as V and K of a dropped key may be.
        """
        b = self.b
        if kept is not None:
            scale = self.p.number("keep_scale", f32)
            dP.map(lambda dp, r, c: b.select(kept[r][c], dp * scale, b.const(0.0, f32)))
        weights = P.values()
        bends = None if slope is None else slope.values()

        def apply(dp: Value, r: int, c: int) -> Value:
            p, zero = weights[r][c], b.const(0.0, f32)
            dropped = b.eq(p, 0.0)
            ds = p * (dp - delta(r, c))
            if store_ds is not None:
                store_ds(b.select(dropped, zero, ds), r, c)
            return b.select(dropped, zero, ds if bends is None else ds * bends[r][c])

        dP.map(apply)

    def row_numbers(self, head: Value, row: Value) -> tuple[Value, Value]:
        """Log-sum-exp (base 2) and delta of a query row. A row past the end, or one that keeps no key, gets a
        log-sum-exp of +inf, so that its weights are 0."""
        b = self.b
        lse, delta, empty = self.lse_and_delta(head, row)
        return b.select(empty, b.const(float("inf"), f32), lse * LOG2E), delta

    def store(self, tile: RegisterTile, out: Matrix, row0: Value, factor: Value | None) -> None:
        b = self.b
        if out.rotary is not None:
            rotate_back(self.engine, tile, out, row0, self.shape.value_cols(out.cols))
        for r, row in enumerate(tile.values()):
            at = row0 + tile.row(r)
            with b.if_(at < out.rows):
                for c in range(0, len(row), tile.strip):
                    strip = [x if factor is None else x * factor for x in row[c : c + tile.strip]]
                    out.store(b, at, tile.col(c), strip, self.shape.value_cols(out.cols))
        # A driver takes the last condition of a kernel for uniform unless a barrier follows.
        b.barrier()


class _Queries(_Kernel):
    """dQ or dS of a block of query rows."""

    def __init__(self, b: Builder, config: BackwardConfig, target: Target) -> None:
        super().__init__(b, config, target)
        self.own_rows()
        scores = self.scores
        self.q = self.matrix("q", self.head, scores.seq_q, config.head_dim, 0)
        self.k = self.matrix("k", self.kv_head, scores.seq_kv, config.head_dim, 1)
        self.v = self.matrix("v", self.kv_head, scores.seq_kv, config.value_dim, 2)
        self.do = self.matrix("do", self.head, scores.seq_q, config.value_dim, 3)
        self.dq = None if config.of == "scores" else self.gradient("dq", self.head, scores.seq_q, config.head_dim)

    def run(self) -> None:
        b, engine, shape, scores, row0 = self.b, self.engine, self.shape, self.scores, self.row0
        zero = b.const(0.0, f32)
        first_chunk = b.const(0, i32)
        S, dP = engine.score_tile(zero), engine.score_tile(zero)
        dQ = engine.output_tile(self.config.head_dim, zero)
        numbers = [self.row_numbers(self.head, row0 + engine.row(r)) for r in range(shape.rows)]
        reach, width = scores.reach_of_rows(row0, shape.block_q), shape.block_kv
        first, last = reach.first // width, (reach.end + (width - 1)) // width
        tiles = self.listed(self.head)
        if tiles is not None:
            first, last = first_chunk, tiles.count

        def products(tile: Value) -> tuple[_Phase, _Phase, _Phase]:
            key0 = tile * width
            return (
                self.outer(S, self.q, row0, self.k, key0, (self.scale, None), engine.q),
                self.outer(dP, self.do, row0, self.v, key0, resident=engine.own),
                self.inner(dQ, self.k, key0, finite=True),
            )

        self.load_own(self.q, self.do, row0, self.scale)
        with b.if_(first < last):
            products(tile_at(tiles, first))[0].fetch(first_chunk)
        with b.loop(first, last, name="tile") as place_in_order:
            tile = tile_at(tiles, place_in_order)
            score, weight, result = products(tile)
            key0 = tile * width
            if tiles is None:
                partial = (key0 < reach.full_first) | (key0 + width > reach.full_end)
            else:
                partial = place_in_order < tiles.partial
            b.comment("P = exp2(Q K^T - lse)")
            S.fill(zero)
            self.run_phase(score, lambda: weight.fetch(first_chunk))

            def place(r: int, c: int) -> tuple[Value, Value]:
                return row0 + S.row(r), key0 + S.col(c)

            slope = self.weigh(S, self.head, place, partial, lambda r, c: numbers[r][0])
            b.comment("dS = P * (dO V^T - delta)")
            dP.fill(zero)

            def next_tile() -> None:
                products(tile_at(tiles, place_in_order + 1))[0].fetch(first_chunk)

            self.run_phase(weight, next_tile if self.dq is None else lambda: result.fetch(first_chunk))
            store_ds = self._ds_store(S, key0) if self.config.scores else None
            kept = self.kept(self.head, place, S.strip, transposed=False)
            self.differentiate(S, dP, lambda r, c: numbers[r][1], slope, kept, store_ds)
            if self.dq is not None:
                b.comment("dQ = dQ + dS K")
                engine.store_p(S, dP.values())
                self.run_phase(result, next_tile)
        if self.dq is None:
            b.barrier()  # as at the end of `store`
        else:
            self.store(dQ, self.dq, row0, self.p.number("dq_factor", f32))

    def _ds_store(self, S: RegisterTile, key0: Value) -> Callable[[Value, int, int], None]:
        """A function that stores dS of the rows and keys that exist."""
        b, scores = self.b, self.scores
        out = self.p.buffer("ds", f32, "write")
        base = self.p.strided("ds", scores.batch, self.head)
        step = self.p.number("ds_row_stride", self.index)

        def store(ds: Value, r: int, c: int) -> None:
            row, key = self.row0 + S.row(r), key0 + S.col(c)
            with b.if_((row < scores.seq_q) & (key < scores.seq_kv)):
                b.store(out, base + b.cast(row, self.index) * step + b.cast(key, self.index), ds)

        return store


class _Keys(_Kernel):
    """dK and dV of a block of keys. Tiles are transposed: their rows are keys, their columns query rows."""

    def __init__(self, b: Builder, config: BackwardConfig, target: Target) -> None:
        super().__init__(b, config, target)
        self.own_keys()
        scores = self.scores
        self.k = self.matrix("k", self.kv_head, scores.seq_kv, config.head_dim, 1)
        self.v = self.matrix("v", self.kv_head, scores.seq_kv, config.value_dim, 2)
        self.dk = self.gradient("dk", self.kv_head, scores.seq_kv, config.head_dim)
        self.dv = self.gradient("dv", self.kv_head, scores.seq_kv, config.value_dim)

    def run(self) -> None:
        b, engine, key0 = self.b, self.engine, self.row0
        zero = b.const(0.0, f32)
        S, dP = engine.score_tile(zero), engine.score_tile(zero)
        dK = engine.output_tile(self.config.head_dim, zero)
        dV = engine.output_tile(self.config.value_dim, zero)
        first, last, end = self.row_tiles()
        self.load_own(self.k, self.v, key0)
        with b.loop(b.const(0, i32), self.group, name="member") as member:
            self._pass(self.kv_head * self.group + member, first, last, end, S, dP, dK, dV)
        self.store(dV, self.dv, key0, self.p.number("keep_scale", f32) if self.config.dropout else None)
        self.store(dK, self.dk, key0, self.p.number("dk_factor", f32))

    def _pass(
        self, head: Value, first: Value, last: Value, end: Value,
        S: RegisterTile, dP: RegisterTile, dK: RegisterTile, dV: RegisterTile,
    ) -> None:  # fmt: skip
        """Add the share of one query head's rows to the block's dK and dV."""
        b, engine, shape, scores, key0 = self.b, self.engine, self.shape, self.scores, self.row0
        zero, first_chunk, width = b.const(0.0, f32), b.const(0, i32), shape.block_kv
        tiles = self.listed(head)
        if tiles is not None:
            first, last = first_chunk, tiles.count
        q = self.matrix("q", head, scores.seq_q, self.config.head_dim, 0)
        do = self.matrix("do", head, scores.seq_q, self.config.value_dim, 3)

        def products(tile: Value) -> tuple[_Phase, _Phase, _Phase, _Phase]:
            row0 = tile * width
            return (
                self.outer(S, self.k, key0, q, row0, (None, self.scale), engine.q),
                self.outer(dP, self.v, key0, do, row0, resident=engine.own),
                self.inner(dV, do, row0),
                self.inner(dK, q, row0, self.scale),
            )

        with b.if_(first < last):
            products(tile_at(tiles, first))[0].fetch(first_chunk)
        with b.loop(first, last, name="tile") as place_in_order:
            tile = tile_at(tiles, place_in_order)
            score, weight, values, keys = products(tile)
            row0 = tile * width
            if tiles is None:
                reach = scores.reach(row0 + scores.shift, b.min(row0 + width, scores.seq_q) - 1 + scores.shift)
                # Keys past the end matter only for the sums of dQ.
                past = key0 + shape.block_q if self.config.sums else end
                partial = (key0 < reach.full_first) | (past > reach.full_end)
            else:
                partial = place_in_order < tiles.partial
            b.comment("P^T = exp2(K Q^T - lse)")
            S.fill(zero)
            self.run_phase(score, lambda: weight.fetch(first_chunk))
            columns = [row0 + S.col(c) for c in range(len(S.vars[0]))]
            numbers = [self.row_numbers(head, row) for row in columns]

            def place(r: int, c: int) -> tuple[Value, Value]:
                return columns[c], key0 + S.row(r)

            slope = self.weigh(S, head, place, partial, lambda r, c: numbers[c][0])
            b.comment("dS^T = P^T * (V dO^T - delta)")
            dP.fill(zero)
            self.run_phase(weight, lambda: values.fetch(first_chunk))
            kept = self.kept(head, place, shape.row_strip, transposed=True)
            self.differentiate(S, dP, lambda r, c: numbers[c][1], slope, kept)
            if kept is not None:
                S.map(lambda p, r, c: b.select(kept[r][c], p, zero))
            b.comment("dV = dV + P^T dO")
            engine.store_p(S, S.values())
            self.run_phase(values, lambda: keys.fetch(first_chunk))
            b.comment("dK = dK + dS^T Q")
            b.barrier()  # everyone has read P
            engine.store_p(S, dP.values())

            def next_tile() -> None:
                products(tile_at(tiles, place_in_order + 1))[0].fetch(first_chunk)

            if self.config.sums:
                self._add_to_sums(head, tile, dP, keys, next_tile)
            else:
                self.run_phase(keys, next_tile)

    def _add_to_sums(
        self, head: Value, tile: Value, dP: RegisterTile, before: _Phase, then: Callable[[], None]
    ) -> None:
        """Finish the product ``before``, and add ``dS K`` of the block's keys to the sums of dQ, part by part."""
        b, engine = self.b, self.engine
        sums = TileSums(self.shape, self.config.head_dim)
        memory = self.p.buffer("dq_sum", f32, "readwrite")
        number = (self.scores.batch * self.heads + head) * self.p.number("row_tiles") + tile
        start = sums.start(engine, number, self.index)
        dQ = sums.tile(engine, b.const(0.0, f32))
        phases = [self.across(dQ, self.k, self.row0, sums, part) for part in range(sums.parts)]
        first_chunk = b.const(0, i32)
        self.run_phase(before, lambda: phases[0].fetch(first_chunk))
        b.comment("dQ = dQ + dS K")
        b.barrier()  # everyone has read dS^T
        engine.store_p_transposed(dP, dP.values())
        nexts: list[Callable[[], None]] = [functools.partial(phase.fetch, first_chunk) for phase in phases[1:]]
        for part, (phase, following) in enumerate(zip(phases, [*nexts, then], strict=True)):
            dQ.fill(b.const(0.0, f32))
            self.run_phase(phase, following)
            sums.add(engine, dQ, part, memory, start)
