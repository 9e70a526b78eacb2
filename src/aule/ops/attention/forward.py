"""The forward kernel: FlashAttention over tiles, written once for every device.

One workgroup computes one block of query rows of one head. `flash_forward` is the algorithm; what stands around it
declares parameters and finds the block's place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, Scalar, bool_, f32, i32, i64, u8, u32
from aule.ops.attention import modifiers as mod
from aule.ops.attention.config import ForwardConfig, FragmentConfig
from aule.ops.attention.dropout import Dropout
from aule.ops.attention.forward_fragment import LAG, build_forward_fragment
from aule.ops.attention.forward_warpgroup import build_forward_warpgroup
from aule.ops.attention.forward_whole import build_forward_whole
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.rotating import declare_tables, quad_angles, rotating
from aule.ops.attention.scores import Extent, block_of
from aule.ops.attention.tail import Parts, Piece, pieces
from aule.target import Target
from aule.tile.math import LN2, LOG2E, LOWEST, NEG_INF, fold, is_finite
from aule.tile.matrix import Matrix
from aule.tile.rotary import Rotary
from aule.tile.simt import RegisterTile, Row, Simt
from aule.tile.simt_shape import wave_size

KERNEL_NAME = "flash_attention"


def build_forward(config: ForwardConfig | FragmentConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the forward kernel of a configuration for a target."""
    if isinstance(config, FragmentConfig):
        build = build_forward_warpgroup if config.shape.warpgroups else build_forward_fragment
        build = build_forward_whole if config.whole else build
        return build(config, target, name)
    b = Builder(name, config.shape.threads, wave_size(target, config.shape), config.shape.registers, arithmetic="quick")

    def work(block: _Block) -> None:
        flash_forward(b, config, Simt(b, target, config.shape, config.head_dim, config.value_dim), block)

    if config.tail:
        with pieces(b) as piece:
            work(_Block(b, config, piece))
        return b.finish()
    block = _Block(b, config)
    with b.if_(block.exists):
        work(block)
    return b.finish()


def flash_forward(b: Builder, config: ForwardConfig, engine: Simt, block: _Block) -> None:
    """``O = softmax(Q K^T) V`` for one block of rows, with the running maximum m and sum l of the paper. What is
    subtracted as m may lag behind the maximum by `LAG` powers of two, so that O is rarely multiplied through."""
    zero = b.const(0.0, f32)
    start, weight = block.start(engine.tx)
    m, l = engine.common_rows("m", start), engine.own_rows("l", weight)
    S, O = engine.score_tile(zero), engine.output_tile(config.value_dim, zero)
    stream = _Stream(b, config, engine, block)

    with b.loop(block.first_tile, block.last_tile, name="tile") as tile:
        partial = stream.partial(tile)
        b.comment("S = Q K^T")
        S.fill(zero)
        stream.scores(S, tile)

        for modifier in block.modifiers:
            if modifier.everywhere:
                block.modify(S, modifier, tile)
            else:
                with b.if_(partial):
                    block.modify(S, modifier, tile)

        b.comment("online softmax: P = exp2(S - m), l = l + sum P; m follows the maximum once that is far ahead")
        s, base = S.values(), [b.var(x, "m") for x in m.load()]
        highest = [fold(b, "max", row) for row in s]
        ahead = [high - low.value > LAG for high, low in zip(highest, base, strict=True)]
        with b.if_(engine.any_of_rows(fold(b, "or", ahead))):
            alpha: list[Value] = []
            for r, high in enumerate(engine.reduce_rows("max", highest)):
                m_new = b.max(base[r].value, high)
                alpha.append(b.exp2(base[r].value - m_new))
                base[r].value = m_new
                for o in O.vars[r]:
                    o.value = o.value * alpha[r]
            m.store([x.value for x in base])
            l.store([x * y for x, y in zip(l.load(), alpha, strict=True)])
        p = [[b.exp2(x - low.value) for x in row] for row, low in zip(s, base, strict=True)]
        # Of this thread's columns alone until the end.
        l.store([x + fold(b, "add", row) for x, row in zip(l.load(), p, strict=True)])

        if block.dropout is not None:
            p = block.drop(block.dropout, S, p, tile)

        b.comment("O = O + P V")
        stream.values(S, O, p, tile, partial)

    b.comment("O / l, and the log-sum-exp")
    total, maxima = engine.reduce_rows("add", l.load()), m.load()
    first, out = (block.row0, block.o) if block.parts is None else (b.const(0, i32), block.parts.matrix(block.rows))
    for r, row in enumerate(O.values()):
        nothing = b.eq(total[r], 0.0)  # such a row gives zeros; one with a NaN score has a NaN sum and stays NaN
        inverse = b.select(nothing, zero, b.rcp(total[r]))
        if block.keep_scale is not None:
            inverse = inverse * block.keep_scale
        at = first + O.row(r)
        with b.if_(at < out.rows):
            for c in range(0, len(row), O.strip):
                strip = [x * inverse for x in row[c : c + O.strip]]
                out.store(b, at, O.col(c), strip, engine.value_cols)
            if block.parts is not None:
                weight = b.select(nothing, b.const(NEG_INF, f32), maxima[r] + b.log2(total[r]))
                with b.if_(b.eq(engine.tx, 0)):
                    block.parts.store_lse(at, weight)
            elif block.lse is not None:
                lse = b.select(nothing, b.const(NEG_INF, f32), (maxima[r] + b.log2(total[r])) * LN2)
                with b.if_(b.eq(engine.tx, 0)):
                    b.store(block.lse, block.lse_base + b.cast(at, block.index), lse)
    # PoCL 3.1 takes the last condition before a kernel's end for one on which all threads agree, unless a barrier
    # comes after it: rows past the end would be stored too.
    b.barrier()
    if block.parts is not None:
        block.add_up(block.parts)


class _Stream:
    """The order in which chunks of Q, K and V pass through the engine's stages, each fetched one step ahead."""

    def __init__(self, b: Builder, config: ForwardConfig, engine: Simt, block: _Block) -> None:
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
            self._fetch_k(self._k_starts(block.first_tile), b.const(0, i32))

    def partial(self, tile: Value) -> Value:
        """Whether some key of the tile is out of the band for some row."""
        return (tile < self.block.first_full) | (tile >= self.block.last_full)

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
                if not shape.late:
                    with b.else_():
                        self._fetch_v(tile, b.const(0, i32))

            engine.multiply_scores(S, self.stager.offset.value, chunk, fetch)
            self.stager.advance()
        if shape.late:
            self._fetch_v(tile, b.const(0, i32))

    def values(self, S: RegisterTile, O: RegisterTile, p: list[list[Value]], tile: Value, partial: Value) -> None:
        """``O += P V``.

        Inf or NaN in a value whose weight is zero must not reach O. Tiles without dropped keys cannot have such; in
        the others each step's values are looked over on their way in, and a step that has any takes the slow product.
        """
        b = self.b
        if self.config.everywhere:
            self._products(S, O, p, tile, b.const(True, bool_))
        elif self.config.shape.apart:
            with b.if_(partial):
                self._products(S, O, p, tile, b.const(True, bool_))
            with b.else_():
                self._products(S, O, p, tile, None)
        else:
            self._products(S, O, p, tile, partial)

    def _products(
        self, S: RegisterTile, O: RegisterTile, p: list[list[Value]], tile: Value, guarded: Value | None
    ) -> None:
        """``O += P V``, chunk by chunk of the keys, P a part at a time through shared memory: the first before the
        loop, which then need not keep its registers. ``guarded`` is the condition under which values are looked over,
        None where they never are."""
        b, engine, shape = self.b, self.engine, self.config.shape
        parts, width, chunks = shape.block_kv // shape.part, shape.part_cols, shape.part // shape.chunk_v
        engine.store_p(S, [row[:width] for row in p])
        if parts == 1:
            with b.loop(0, chunks, name="chunk") as chunk:
                self._accumulate(O, tile, chunk, chunk, chunks, guarded)
            return
        with b.loop(0, parts, name="part") as part:
            if chunks == 1:
                self._accumulate(O, tile, b.const(0, i32), part, parts, guarded)
            else:
                with b.loop(0, chunks, name="chunk") as chunk:
                    self._accumulate(O, tile, chunk, part * chunks + chunk, parts * chunks, guarded)
            engine.rows_barrier()  # everyone has read this part
            for i in range(1, parts):
                with b.if_(b.eq(part, i - 1)):
                    engine.store_p(S, [row[i * width : (i + 1) * width] for row in p])

    def _accumulate(
        self, O: RegisterTile, tile: Value, chunk: Value, number: Value, count: int, guarded: Value | None
    ) -> None:
        """One chunk of ``O += P V``: the ``chunk``-th of the part of P in shared memory, ``number``-th of the tile."""
        b, engine = self.b, self.engine
        quads = engine.commit(self.stager, 0, engine.v_chunk)
        step = self.stager.step.value
        if guarded is not None:
            with nullcontext() if guarded.constant else b.if_(guarded):
                self._flag_wild(quads, step)
        b.barrier()

        def fetch() -> None:
            with b.if_(number + 1 < count):
                self._fetch_v(tile, number + 1)
            with b.else_():
                following = tile + 1
                if self.config.whole:  # the last tile's again, since rows past the end are not replaced
                    following = b.min(following, self.block.last_tile - 1)
                self._fetch_k(self._k_starts(following), b.const(0, i32))

        if guarded is None:
            engine.multiply_values(O, self.stager.offset.value, chunk, fetch)
        else:
            fetch()
            with b.if_(b.eq(b.load(self.flags, step & 1), step + 1)):
                engine.multiply_values_guarded(O, self.stager.offset.value, chunk)
            with b.else_():
                engine.multiply_values(O, self.stager.offset.value, chunk)
        self.stager.advance()

    def _flag_wild(self, quads: list[tuple[Value, Value | None]], step: Value) -> None:
        """Tell the workgroup when this step brings in Inf or NaN. Steps take turns with two flags, as with stages."""
        b = self.b
        bad = []
        for quad, inside in quads:
            wild = fold(b, "or", [~is_finite(b, x) for x in b.unpack(quad)])
            bad.append(wild if inside is None else wild & inside)
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


class _Block:
    """The parameters of the kernel, and the place of this workgroup's block in the problem.

    Parameters are declared in this order: buffers q, k, v, o, then mask, bias, alibi, sinks, seed, cos, sin, lse where
    present;
    then for each of them its strides and offset; then lengths and numbers. `plan.py` fills them in by name.
    """

    def __init__(self, b: Builder, config: ForwardConfig, piece: Piece | None = None) -> None:
        self.b, self.config = b, config
        self.index: Scalar = i64 if config.index64 else i32
        p = self.p = Parameters(b, config, self.index)
        elem = SCALARS[config.dtype]
        q, k, v = (p.buffer(name, elem) for name in "qkv")
        o = p.buffer("o", elem, "write")
        mask = p.buffer("mask", _stored(config.mask)) if config.mask else None
        bias = p.buffer("bias", _stored(config.bias)) if config.bias else None
        slopes = p.buffer("alibi", f32) if config.alibi else None
        sinks = p.buffer("sinks", f32) if config.sinks else None
        seed = p.buffer("seed", u32) if config.dropout else None
        if config.rope is not None:
            declare_tables(p)
        self.lse = p.buffer("lse", f32, "write") if config.lse else None

        if not config.packed:
            self.seq_q, self.seq_kv = p.number("seq_q"), p.number("seq_kv")
        heads, group = p.number("heads_q"), p.number("group")
        blocks, total = p.number("blocks_q"), p.number("blocks")
        if not config.packed:
            self.shift = p.number("shift")
        left = p.number("left") if config.left else None
        right = p.number("right") if config.right else None
        self.scale = p.number("scale", f32)
        cap = p.number("softcap", f32) if config.softcap else None

        # Workgroups are counted along x and then y: a driver may allow no more than 65535 along one axis.
        number = b.group_id(0) + b.group_id(1) * b.group_count(0) if piece is None else piece.number
        self.exists = number < total
        head_number, block = block_of(b, config, number, blocks, total, total // blocks)
        self.row0 = block * config.shape.block_q
        self.batch, self.head = head_number // heads, head_number % heads
        kv_head = self.head // group
        self.extent: Extent | None = None
        if config.packed:
            self.extent = Extent.of(p, self.batch)
            self.seq_q, self.seq_kv, self.shift = self.extent.seq_q, self.extent.seq_kv, self.extent.shift
            self.exists = self.exists & (self.row0 < self.seq_q)

        self.q = self._matrix("q", q, self.head, self.seq_q, config.head_dim, 0)
        self.k = self._matrix("k", k, kv_head, self.seq_kv, config.head_dim, 1)
        if config.rope is not None:
            self.q = rotating(p, "q", self.q, self.batch, self.shift)
            self.k = rotating(p, "k", self.k, self.batch, self.shift)
        self.v = self._matrix("v", v, kv_head, self.seq_kv, config.value_dim, 2)
        self.o = self._matrix("o", o, self.head, self.seq_q, config.value_dim, 3)
        if self.extent is not None:
            self.lse_base = self.extent.row_base(p, head_number, self.head)
        else:
            self.lse_base = b.cast(head_number, self.index) * b.cast(self.seq_q, self.index)

        self.modifiers: list[mod.Modifier] = []
        if cap is not None:
            self.modifiers.append(mod.softcap(cap))
        if mask is not None and config.mask != "bool":
            self.modifiers.append(mod.additive(self._reader("mask", mask)))
        if bias is not None:
            self.modifiers.append(mod.additive(self._reader("bias", bias)))
        if slopes is not None:
            slope = b.load(slopes, p.number("alibi_offset", self.index) + self._strided("alibi", self.batch, self.head))
            self.modifiers.append(mod.alibi(slope * LOG2E))
        if mask is not None and config.mask == "bool":
            self.modifiers.append(mod.boolean(self._reader("mask", mask)))
        self.modifiers.append(mod.band(self.seq_kv, left, right))
        self.sink: Value | None = None
        if sinks is not None and piece is None:  # what adds up pieces counts it
            self.sink = b.load(sinks, p.number("sinks_offset", self.index) + self._strided("sinks", self.head))
        self.dropout: Dropout | None = None
        self.keep_scale: Value | None = None
        if seed is not None:
            self.head_number, self.keep_scale = head_number, p.number("keep_scale", f32)
            self.dropout = Dropout(b, p.number("dropout_limit", u32), seed, p.number("seed_offset", self.index))
        self._find_tiles(left, right)
        self.parts: Parts | None = None
        if piece is not None:
            self.parts = Parts(p, config, piece)
            self.first_tile, self.last_tile = piece.first, piece.last

    def _matrix(self, name: str, buffer: Value, head: Value, rows: Value, cols: int, number: int) -> Matrix:
        b, batch = self.b, self.batch if self.extent is None else self.b.const(0, i32)
        base = self.p.number(f"{name}_offset", self.index) + self._strided(name, batch, head)
        whole = self.config.whole
        row_stride = b.const(cols, self.index) if whole else self.p.number(f"{name}_row_stride", self.index)
        if self.extent is not None:
            first = self.extent.first(name)
            assert first is not None
            base = base + b.cast(first, self.index) * row_stride
        col_stride = None if self.config.unit[number] else self.p.number(f"{name}_col_stride", self.index)
        return Matrix(buffer, base, rows, cols, row_stride, col_stride, self.config.aligned[number], whole=whole)

    def _strided(self, name: str, *indices: Value) -> Value:
        """The dot product of indices with strides that are parameters of their own."""
        b = self.b
        terms = [b.cast(i, self.index) * self.p.number(f"{name}_stride{n}", self.index) for n, i in enumerate(indices)]
        return fold(b, "add", terms)

    def _reader(self, name: str, buffer: Value) -> Callable[[mod.Site], Value]:
        """Reads element (batch, head, row, column) of a mask or bias; rows and columns past the end read the last."""
        b = self.b
        base = self.p.number(f"{name}_offset", self.index) + self._strided(name, self.batch, self.head)
        row_stride, col_stride = (
            self.p.number(f"{name}_row_stride", self.index),
            self.p.number(f"{name}_col_stride", self.index),
        )

        def read(site: mod.Site) -> Value:
            row = b.cast(b.min(site.row, self.seq_q - 1), self.index)
            column = b.cast(b.min(site.column, self.seq_kv - 1), self.index)
            return b.load(buffer, base + row * row_stride + column * col_stride)

        return read

    def _find_tiles(self, left: Value | None, right: Value | None) -> None:
        """The tiles that hold any kept key of the block, and those among them where all keys are kept for all rows."""
        b, width = self.b, self.config.shape.block_kv
        nearest = self.row0 + self.shift
        furthest = b.min(self.row0 + self.config.shape.block_q, self.seq_q) - 1 + self.shift
        end, full_end = self.seq_kv, self.seq_kv
        if right is not None:
            end = b.max(b.min(end, furthest + right + 1), 0)
            full_end = b.max(b.min(full_end, nearest + right + 1), 0)
        self.first_tile, self.first_full = b.const(0, i32), b.const(0, i32)
        if left is not None:
            self.first_tile = b.max(nearest - left, 0) // width
            self.first_full = (b.max(furthest - left, 0) + (width - 1)) // width
        self.last_tile = (end + (width - 1)) // width
        self.last_full = full_end // width

    @property
    def rows(self) -> Value:
        """Rows that the block has."""
        return self.b.min(self.seq_q - self.row0, self.config.shape.block_q)

    def add_up(self, parts: Parts) -> None:
        """Add up the block's pieces if this was the last of them."""
        extent = Extent(self.seq_q, self.seq_kv, self.shift, None, None)
        parts.finish(self.row0, self.rows, self.batch, self.head, extent)

    def modify(self, S: RegisterTile, modifier: mod.Modifier, tile: Value) -> None:
        """Run a modifier over a tile of scores."""
        b = self.b
        rows = [self.row0 + S.row(r) for r in range(len(S.vars))]
        columns = [tile * self.config.shape.block_kv + S.col(c) for c in range(len(S.vars[0]))]
        positions = [row + self.shift for row in rows]

        def at(r: int, c: int) -> mod.Site:
            return mod.Site(self.batch, self.head, rows[r], columns[c], positions[r])

        S.map(lambda s, r, c: modifier.apply(b, s, at(r, c)))

    def drop(self, dropout: Dropout, S: RegisterTile, p: list[list[Value]], tile: Value) -> list[list[Value]]:
        """The weights of a tile with zeros for those that are dropped."""
        b, zero = self.b, self.b.const(0.0, f32)
        result: list[list[Value]] = []
        for r, weights in enumerate(p):
            row = self.row0 + S.row(r)
            keep: list[Value] = []
            for c in range(0, len(weights), S.strip):
                column = tile * self.config.shape.block_kv + S.col(c)
                keep += dropout.strip(self.head_number, row, column, S.strip)
            result.append([b.select(kept, x, zero) for kept, x in zip(keep, weights, strict=True)])
        return result

    def start(self, tx: Value) -> tuple[Value, Value]:
        """m and l before the first tile. The sink is a key without a value, which one thread of a row counts."""
        b, zero = self.b, self.b.const(0.0, f32)
        if self.sink is None:
            return b.const(LOWEST, f32), zero
        sink = self.sink * LOG2E
        start = b.max(sink, LOWEST)
        return start, b.select(b.eq(tx, 0), b.exp2(sink - start), zero)


def _stored(dtype: str) -> Scalar:
    return u8 if dtype == "bool" else SCALARS[dtype]
