"""The simt forward kernel: FlashAttention with plain arithmetic, for every GPU.

One workgroup computes one block of query rows of one head. `flash_forward` is the algorithm, `_Stream` brings Q, K and
V through shared memory to the two products, and `forward_block.Block` has the parameters and the scores' modifiers.
"""

from __future__ import annotations

from contextlib import nullcontext

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import bool_, f32, i32
from aule.ops.attention.config import ForwardConfig
from aule.ops.attention.simt.forward_block import Block
from aule.ops.combine.pieces import pieces
from aule.ops.scores.rotated_operands import quad_angles
from aule.ops.softmax.online_softmax import LAG, Maximum, finish, raise_maximum
from aule.target import Target
from aule.tile.common.math import fold, is_finite
from aule.tile.common.matrix import Matrix
from aule.tile.common.rotary import Rotary
from aule.tile.simt.engine import Simt
from aule.tile.simt.register_tile import RegisterTile
from aule.tile.simt.row_state import RowState
from aule.tile.simt.shape import wave_size
from aule.tile.simt.staging import Row


def build_forward_simt(config: ForwardConfig, target: Target, name: str) -> KernelIR:
    """Trace the forward kernel of a configuration for a target."""
    b = Builder(name, config.shape.threads, wave_size(target, config.shape), config.shape.registers, arithmetic="quick")

    def compute(block: Block) -> None:
        flash_forward(b, config, Simt(b, target, config.shape, config.head_dim, config.value_dim), block)

    if config.pieces:
        with pieces(b) as piece:
            compute(Block(b, config, piece))
        return b.finish()
    block = Block(b, config)
    with b.if_(block.exists):
        compute(block)
    return b.finish()


def flash_forward(b: Builder, config: ForwardConfig, engine: Simt, block: Block) -> None:
    """``O = softmax(Q K^T) V`` for one block of rows, with the running maximum m and sum l of the paper."""
    zero, maximum = b.const(0.0, f32), Maximum(b)
    m_start, l_start = block.start(maximum, engine.tx)
    m, l = engine.common_rows("m", m_start), engine.own_rows("l", l_start)
    S, O = engine.score_tile(zero), engine.output_tile(config.value_dim, zero)
    stream = _Stream(b, config, engine, block)

    with b.loop(block.first_tile, block.last_tile, name="tile") as place:
        tile, edge = block.tile(place), block.is_edge(place)
        b.comment("S = Q K^T")
        S.fill(zero)
        stream.scores(S, tile)
        block.modify(S, tile, edge)

        b.comment("online softmax: P = exp2(S - m), l = l + sum P; m follows the maximum once that is far ahead")
        p = _softmax(engine, S, O, m, l)
        p = block.drop(S, p, tile)

        b.comment("O = O + P V")
        stream.values(S, O, p, place, edge)

    b.comment("O / l, and the log-sum-exp")
    _store(engine, block, O, m, l)
    # A driver takes the last condition of a kernel for uniform unless a barrier follows: it would store rows past the
    # end, too.
    b.barrier()
    if block.partials is not None:
        block.combine_pieces(block.partials)


def _softmax(engine: Simt, S: RegisterTile, O: RegisterTile, m: RowState, l: RowState) -> list[list[Value]]:
    """P of a tile of scores. l is that of a thread's own columns until the end."""
    b, maximum = engine.b, Maximum(engine.b)
    s, current = S.values(), [b.var(x, "m") for x in m.load()]
    highest = [fold(b, "max", row) for row in s]
    lagging = [maximum.lead(high, low.value) > LAG for high, low in zip(highest, current, strict=True)]
    with b.if_(engine.any_of_rows(fold(b, "or", lagging))):
        alpha: list[Value] = []
        for r, high in enumerate(engine.reduce_rows("max", highest)):
            alpha.append(raise_maximum(maximum, current[r], high))
            for o in O.vars[r]:
                o.value = o.value * alpha[r]
        m.store([x.value for x in current])
        l.store([x * y for x, y in zip(l.load(), alpha, strict=True)])
    p = [[maximum.weight(x, low.value) for x in row] for row, low in zip(s, current, strict=True)]
    l.store([x + fold(b, "add", row) for x, row in zip(l.load(), p, strict=True)])
    return p


def _store(engine: Simt, block: Block, O: RegisterTile, m: RowState, l: RowState) -> None:
    """Store O / l and the log-sum-exp, or the partial result of a piece of the block."""
    b, maximum = engine.b, Maximum(engine.b)
    total, maxima = engine.reduce_rows("add", l.load()), m.load()
    first, out = block.row0, block.o
    if block.partials is not None:
        first, out = b.const(0, i32), block.partials.matrix(block.rows)
    for r, row in enumerate(O.values()):
        end = finish(maximum, total[r])
        inverse = end.inverse if block.keep_scale is None else end.inverse * block.keep_scale
        at = first + O.row(r)
        with b.if_(at < out.rows):
            for c in range(0, len(row), O.strip):
                strip = [x * inverse for x in row[c : c + O.strip]]
                out.store(b, at, O.col(c), strip, engine.value_cols)
            if block.partials is not None:
                lse = end.log2_sum(maxima[r])
                with b.if_(b.eq(engine.tx, 0)):
                    block.partials.store_lse(at, lse)
            elif block.lse is not None:
                lse = end.log_sum_exp(maxima[r])
                with b.if_(b.eq(engine.tx, 0)):
                    b.store(block.lse, block.lse_base + b.cast(at, block.index), lse)


class _Stream:
    """Brings chunks of Q, K and V through the engine's stages, each prefetched one step ahead."""

    def __init__(self, b: Builder, config: ForwardConfig, engine: Simt, block: Block) -> None:
        self.b, self.config, self.engine, self.block = b, config, engine, block
        self.stager = engine.stager(block.k.elem, quad_angles(config))
        self.flags = b.shared("value_flags", i32, 2)
        if engine.q is not None:
            engine.load_resident(engine.q, block.q, block.row0, block.scale)
        with b.if_(b.eq(engine.thread, 0)):
            b.store(self.flags, 0, 0)
            b.store(self.flags, 1, 0)
        b.barrier()
        self.q_starts = [] if engine.q is not None else engine.row_starts(engine.q_chunk, block.q, block.row0)
        with b.if_(block.first_tile < block.last_tile):
            self._fetch_k(self._k_starts(block.tile(block.first_tile)), b.const(0, i32))

    def scores(self, S: RegisterTile, tile: Value) -> None:
        """``S = Q K^T``, chunk by chunk of the head dimension."""
        b, engine, shape = self.b, self.engine, self.config.shape
        chunks = engine.head_cols // shape.chunk_k
        k_starts = self._k_starts(tile)
        with b.loop(0, chunks, name="chunk") as chunk:
            first = 0
            if engine.q is None:
                rotated = self._rotated(self.block.q, chunk)
                engine.commit(self.stager, 0, engine.q_chunk, self.block.scale, rotated=rotated)
                first = engine.q_chunk.per_thread(shape.threads)
            engine.commit(self.stager, first, engine.k_chunk, rotated=self._rotated(self.block.k, chunk))
            b.barrier()

            def fetch(chunk: Value = chunk) -> None:
                with b.if_(chunk + 1 < chunks):
                    self._fetch_k(k_starts, chunk + 1)
                if not shape.late_values:
                    with b.else_():
                        self._fetch_v(tile, b.const(0, i32))

            engine.multiply_scores(S, self.stager.offset.value, chunk, fetch)
            self.stager.advance()
        if shape.late_values:
            self._fetch_v(tile, b.const(0, i32))

    def values(self, S: RegisterTile, O: RegisterTile, p: list[list[Value]], place: Value, edge: Value) -> None:
        """``O += P V`` of the tile in a place.

        Inf or NaN in V of a key whose weight is zero must not reach O. Only edge tiles have such keys; there each step
        checks its values as they come in, and a step with any takes a slow product.
        """
        b = self.b
        if self.config.everywhere:
            self._products(S, O, p, place, b.const(True, bool_))
        elif self.config.shape.edge_loop:
            with b.if_(edge):
                self._products(S, O, p, place, b.const(True, bool_))
            with b.else_():
                self._products(S, O, p, place, None)
        else:
            self._products(S, O, p, place, edge)

    def _products(
        self, S: RegisterTile, O: RegisterTile, p: list[list[Value]], place: Value, guarded: Value | None
    ) -> None:
        """``O += P V``, chunk by chunk of the keys, P a part at a time through shared memory; the first part before the
        loop, which frees its registers. ``guarded`` is the condition under which V is checked for Inf and NaN, or None
        for never."""
        b, engine, shape = self.b, self.engine, self.config.shape
        parts, width, chunks = shape.block_kv // shape.part, shape.part_cols, shape.part // shape.chunk_v
        engine.store_p(S, [row[:width] for row in p])
        if parts == 1:
            with b.loop(0, chunks, name="chunk") as chunk:
                self._accumulate(O, place, chunk, chunk, chunks, guarded)
            return
        with b.loop(0, parts, name="part") as part:
            if chunks == 1:
                self._accumulate(O, place, b.const(0, i32), part, parts, guarded)
            else:
                with b.loop(0, chunks, name="chunk") as chunk:
                    self._accumulate(O, place, chunk, part * chunks + chunk, parts * chunks, guarded)
            engine.rows_barrier()  # everyone has read this part
            for i in range(1, parts):
                with b.if_(b.eq(part, i - 1)):
                    engine.store_p(S, [row[i * width : (i + 1) * width] for row in p])

    def _accumulate(
        self, O: RegisterTile, place: Value, chunk: Value, number: Value, count: int, guarded: Value | None
    ) -> None:
        """One chunk of ``O += P V``: the ``chunk``-th of the current part of P, the ``number``-th of the tile."""
        b, engine = self.b, self.engine
        quads = engine.commit(self.stager, 0, engine.v_chunk)
        step = self.stager.step.value
        if guarded is not None:
            with nullcontext() if guarded.constant else b.if_(guarded):
                self._flag_nonfinite(quads, step)
        b.barrier()

        def fetch() -> None:
            with b.if_(number + 1 < count):
                self._fetch_v(self.block.tile(place), number + 1)
            with b.else_():
                following = place + 1
                if self.config.full_tiles:  # rows past the end are not replaced: fetch the last tile again
                    following = b.min(following, self.block.last_tile - 1)
                self._fetch_k(self._k_starts(self.block.tile(following)), b.const(0, i32))

        if guarded is None:
            engine.multiply_values(O, self.stager.offset.value, chunk, fetch)
        else:
            fetch()
            with b.if_(b.eq(b.load(self.flags, step & 1), step + 1)):
                engine.multiply_values_guarded(O, self.stager.offset.value, chunk)
            with b.else_():
                engine.multiply_values(O, self.stager.offset.value, chunk)
        self.stager.advance()

    def _flag_nonfinite(self, quads: list[tuple[Value, Value | None]], step: Value) -> None:
        """Flag a step with Inf or NaN to the workgroup. Steps alternate between two flags, as with stages."""
        b = self.b
        bad = []
        for quad, inside in quads:
            nonfinite = fold(b, "or", [~is_finite(b, x) for x in b.unpack(quad)])
            bad.append(nonfinite if inside is None else nonfinite & inside)
        with b.if_(fold(b, "or", bad)):
            b.atomic("max", self.flags, step & 1, step + 1)

    def _rotated(self, source: Matrix, chunk: Value) -> tuple[Rotary, Value, int] | None:
        if source.rotary is None:
            return None
        return source.rotary, chunk * self.config.shape.chunk_k, self.engine.head_cols

    def _k_starts(self, tile: Value) -> list[Row]:
        return self.engine.row_starts(self.engine.k_chunk, self.block.k, tile * self.config.shape.block_kv)

    def _fetch_k(self, k_starts: list[Row], chunk: Value) -> None:
        engine, block, shape = self.engine, self.block, self.config.shape
        col, first = chunk * shape.chunk_k, 0
        if engine.q is None:
            engine.fetch(self.stager, 0, engine.q_chunk, block.q, self.q_starts, col, engine.head_cols)
            first = engine.q_chunk.per_thread(shape.threads)
        engine.fetch(self.stager, first, engine.k_chunk, block.k, k_starts, col, engine.head_cols)

    def _fetch_v(self, tile: Value, chunk: Value) -> None:
        engine, shape = self.engine, self.config.shape
        row, order = tile * shape.block_kv, engine.value_order(chunk)
        if order is None:
            row = row + chunk * shape.chunk_v
        starts = engine.row_starts(engine.v_chunk, self.block.v, row, order)
        engine.fetch(self.stager, 0, engine.v_chunk, self.block.v, starts, self.b.const(0, i32), engine.value_cols)
