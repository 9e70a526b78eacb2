"""The decoding kernel for CPUs: the forward kernel over a cache that may be paged and quantised.

A task has a block of the rows that share a key head of a sequence, or the rows of several key heads that are neighbours
in memory, and a split of the keys. Before it works on a block of keys it looks up where each of them is; from there on
pages are like a contiguous cache. Up to eight rows multiply K in place; more rows pack it. A key is read once for all
rows of a block. If keys are split, the last task of a block of rows combines the partial results.

Scales of a quantised cache are never applied to its elements: those of K multiply the scores, those of V the weights.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import f32, i32, i64
from aule.ops.attention.cpu.forward import Forward
from aule.ops.combine.cpu import combine_partials
from aule.ops.decode.cpu.config import CpuDecodeConfig
from aule.ops.decode.cpu.task import DecodeTask
from aule.ops.shared.tickets import when_last
from aule.target import Target
from aule.tile.common.matrix import Matrix, PlacedMatrix, divmod_const
from aule.tile.vector.dots import dot_product_group, dot_products_from_groups
from aule.tile.vector.engine import Operand

KERNEL_NAME = "decode_attention_cpu"
RUN = 8
"""Key offsets that are stored at once. Pages of a power of two of at least so many keys are looked up by runs."""


def build_decode(config: CpuDecodeConfig, target: Target) -> KernelIR:
    """Trace the kernel of a configuration."""
    b = Builder(KERNEL_NAME, workgroup=1)
    decode = _Decode(b, config)
    with b.if_(decode.count > 0):
        decode.run()
    return b.finish()


class _Decode(Forward):
    config: CpuDecodeConfig
    task: DecodeTask

    def locate(self) -> DecodeTask:
        return DecodeTask(self.p, self.config)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def open_cache(self) -> tuple[Matrix | None, Matrix | None]:
        b, config, shape = self.b, self.config, self.shape
        self.unroll_rows, self.all_rows = config.interleave, config.heads > 1
        k = v = None
        self.noted = shape.block_kv + -(-self.ahead // shape.panel) * shape.panel  # keys of which offsets are noted
        if config.page:
            self.offsets = {name: b.private(f"{name}_places", i64, self.noted) for name in "kv"}
        else:
            k, v = self._matrix("k"), self._matrix("v")
        if config.quantised:
            self.scales = {name: b.private(f"{name}_scales", config.work, self.noted) for name in "kv"}
        return k, v

    def _matrix(self, name: str, key0: Value | None = None) -> Matrix:
        """This task's head of K or V; if paged, the keys from ``key0`` on, after `_note_block`."""
        config, p, task = self.config, self.p, self.task
        buffer, seq_kv = p.buffer(name, config.stored), self.scores.seq_kv
        cols, unit = (config.head_dim, config.unit[1]) if name == "k" else (config.value_dim, config.unit[2])
        row_stride = p.number(f"{name}_row_stride", i64)
        col_stride = None if unit else p.number(f"{name}_col_stride", i64)
        if key0 is None:
            base = p.strided(name, task.batch, task.kv_head)
            return Matrix(buffer, base, seq_kv, cols, row_stride, col_stride, False)
        zero = self.b.const(0, i64)
        return PlacedMatrix(buffer, zero, seq_kv, cols, row_stride, col_stride, False, self.offsets[name], key0)

    def stage_block(self, key0: Value) -> tuple[Operand | None, Operand]:
        if self.config.page or self.config.quantised:
            self._note_block(key0)
        if self.config.page:
            self.k, self.v = self._matrix("k", key0), self._matrix("v", key0)
        return super().stage_block(key0)

    def values_in_place(self, v: Matrix, key0: Value) -> Operand:
        if isinstance(v, PlacedMatrix):
            return Operand(v.buffer, v.base, 0, 0, v.places, self.ahead)
        return super().values_in_place(v, key0)

    # -- offsets and scales of a block's keys --------------------------------------------------------------------------

    def _note_block(self, key0: Value) -> None:
        """Note offsets and scales of a block's keys, and of those that are prefetched; of several heads, the first's.

        What is noted for keys past the end belongs to other keys.
        """
        b, shape = self.b, self.shape
        keys = b.min(shape.block_kv, self.scores.seq_kv - key0)
        keys = (keys + (shape.panel - 1)) // shape.panel * shape.panel
        self._note_keys(key0, keys + (self.noted - shape.block_kv))

    def _note_keys(self, key0: Value, count: Value) -> None:
        """Note offsets and scales of ``count`` keys, rounded up to full runs."""
        b, page, seq_kv = self.b, self.config.page, self.scores.seq_kv
        if page < RUN or page & (page - 1):
            with b.loop(b.const(0, i32), count, name="key") as i:
                key = b.min(key0 + i, seq_kv - 1)
                number, slot = divmod_const(b, key, page) if page else (key, key)
                self._note(i, 1, self._page(number) if page else self.task.batch, slot)
            return
        run, interleave = self._run, self.config.interleave
        last = (seq_kv - 1) // run * run

        def found(key: Value) -> tuple[Value, Value]:
            number, slot = divmod_const(b, b.min(key, last), page)
            return self._page(number), slot

        with b.loop(b.const(0, i32), count, interleave * run, name="key") as i:
            runs = [found(key0 + i + n * run) for n in range(interleave)]
            if interleave > 1:
                with b.if_(key0 + i + interleave * run <= seq_kv):
                    self._note_interleaved(i, run, runs)
            with b.else_() if interleave > 1 else nullcontext():
                for n, (number, slot) in enumerate(runs):
                    self._note(i + n * run, run, number, slot)

    @property
    def _run(self) -> int:
        """Keys of a page that are looked up together; a block is a multiple of it."""
        return min(self.config.page, max(self.shape.panel, RUN))

    def _page(self, number: Value) -> Value:
        """A page of this sequence, clamped to those of the pool."""
        b, p = self.b, self.p
        page = b.load(p.buffer("tables", i32), p.strided("tables", self.task.batch, number))
        return b.max(b.min(page, p.number("pages") - 1), 0)

    def _note(self, to: Value, count: int, page: Value, slot: Value) -> None:
        """Note offsets and scales of ``count`` keys of a page: one, or a multiple of `RUN`."""
        b, p, index, kv_head = self.b, self.p, self.engine.index, self.task.kv_head
        for name in "kv":
            if self.config.page:
                stride = p.number(f"{name}_row_stride", i64)
                start = p.strided(name, page, kv_head) + index(slot) * stride
                if count == 1:
                    b.store(self.offsets[name], index(to), start)
                else:
                    steps = b.vector([b.const(i, i64) for i in range(RUN)]) * stride
                    with b.loop(b.const(0, i64), count, RUN, unroll=2, name="i") as i:
                        b.store(self.offsets[name], index(to) + i, steps + (start + i * stride))
            if self.config.quantised:
                scale, stride = p.buffer(f"{name}_scale", f32), p.number(f"{name}_scale_row_stride", i64)
                start = p.strided(f"{name}_scale", page, kv_head) + index(slot) * stride
                with b.loop(b.const(0, i64), count, name="i") as i:
                    x = b.load(scale, start + i * stride)
                    b.store(self.scales[name], index(to) + i, b.cast(x, self.config.work))

    def _note_interleaved(self, to: Value, count: int, runs: list[tuple[Value, Value]]) -> None:
        """Note the offsets of several runs of ``count`` keys interleaved: all first keys, then all second ones.

        Their pages are then read side by side, so that their cache misses overlap. The order of keys does not matter
        here.
        """
        b, p, index = self.b, self.p, self.engine.index
        for name in "kv":
            stride = p.number(f"{name}_row_stride", i64)
            starts = b.vector([p.strided(name, page, self.task.kv_head) + index(slot) * stride for page, slot in runs])
            for i in range(count):
                b.store(self.offsets[name], index(to) + i * len(runs), starts + stride * i, align=1)

    # -- several heads -------------------------------------------------------------------------------------------------

    def process_block(self, key0: Value, panels: Operand | None, values: Operand, nonfinite: Value | None) -> None:
        """Attend to a block of keys; with several heads, in about the order in which keys and values lie in memory.

        Several heads first compute all scores of the block, then use all of its values, some keys of every head before
        the next keys.
        """
        if self.config.heads == 1:
            super().process_block(key0, panels, values, nonfinite)
            return
        b, shape = self.b, self.shape
        zero, high = b.const(0, i32), b.min(self.task.end_key - key0, shape.block_kv)
        last = (high + (shape.panel - 1)) // shape.panel * shape.panel
        keys = self.config.interleave * self._run if self.config.heads_outermost else self.config.head_keys
        if self.config.heads_outermost:  # a head's keys of several pages
            with b.loop(zero, last, keys, name="key") as first, b.loop(zero, self.groups, name="head") as head:
                self._score_head(head, key0, first, b.min(first + keys, last))
        else:
            with b.loop(zero, last, shape.panel, name="panel") as panel:
                self._score_heads(key0, panel)
        with b.loop(zero, self.groups, name="head") as head:
            self.softmax(head * shape.rows, zero, last)
        self.rescale_outputs()
        with b.loop(zero, high, keys, name="key") as first, b.loop(zero, self.groups, name="head") as head:
            v = replace(values, base=self._head_base(values.base, "v", head))
            with b.loop(first, b.min(first + keys, high), self.config.some_keys, name="some") as low:
                end = b.min(low + self.config.some_keys, high)
                self.multiply_values(head * shape.rows, v, low, end, nonfinite, rescale=False)

    def _score_head(self, head: Value, key0: Value, first: Value, last: Value) -> None:
        """Compute the scores of one of several heads with panels ``first .. last`` of the block."""
        k = self.k
        assert k is not None
        self.k = replace(k, base=self._head_base(k.base, "k", head))
        with self.b.loop(first, last, self.shape.panel, name="panel") as panel:
            reach = self.task.reach(self.b.const(0, i32), self.shape.rows)
            self.multiply_scores(head * self.shape.rows, key0, None, panel, reach)
        self.k = k

    def _score_heads(self, key0: Value, panel: Value) -> None:
        """Compute the scores of all heads with a panel, a group of keys of every head before the next group."""
        b, engine, shape, k = self.b, self.engine, self.shape, self.k
        assert k is not None
        zero, rows, span = b.const(0, i32), shape.rows, shape.lanes // shape.rows
        dots = b.private("dots_of_heads", self.config.work, shape.block_q * shape.lanes)
        with b.loop(zero, rows, name="part") as group, b.loop(zero, self.groups, name="head") as head:
            q = Operand(self.q, engine.index(head * rows) * self.head_cols, self.head_cols, 1)
            k_head = replace(k, base=self._head_base(k.base, "k", head))
            products = dot_product_group(engine, q, rows, k_head, key0 + panel + group * span, self.ahead)
            b.store(dots, engine.index(head * rows + group) * shape.lanes, products)
        reach = self.task.reach(zero, rows)
        with b.loop(zero, self.groups, name="head") as head:
            row = head * rows
            groups = [b.load(dots, engine.index(row + i) * shape.lanes, shape.lanes) for i in range(rows)]
            c = [[b.var(x)] for x in dot_products_from_groups(engine, groups)]
            self.finish_scores(c, row, key0, panel, reach)

    def _head_base(self, base: Value, name: str, head: Value) -> Value:
        """Index for one of several heads that corresponds to ``base`` of the first."""
        return base + self.engine.index(head) * self.p.number(f"{name}_stride1", i64)

    # -- scales --------------------------------------------------------------------------------------------------------

    def scale_scores(self, c: list[list[Var]], panel: Value) -> None:
        super().scale_scores(c, panel)
        if not self.config.quantised:
            return
        b, lanes = self.b, self.shape.lanes
        for j in range(self.shape.panel_vectors):
            scale = b.load(self.scales["k"], self.engine.index(panel) + j * lanes, lanes)
            for variables in c:
                variables[j].value = variables[j].value * scale

    def scale_weights(self, p: Value, row: Value, key: Value) -> Value:
        if not self.config.quantised:
            return p
        scale = self.b.load(self.scales["v"], key, self.shape.lanes)
        # The scale of a dropped key may be NaN.
        return self.b.select(self.b.eq(p, 0.0), p, p * scale)

    # -- splits --------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        super().finish()
        if self.config.split:
            when_last(self.p, self.task.block, self.task.splits, self.b.const(0, i32), self._combine)

    def _combine(self) -> None:
        b, engine, block_q = self.b, self.engine, self.shape.block_q
        with b.loop(b.const(0, i32), self.count, name="row") as row:
            first = engine.index(self.task.block * self.task.splits) * block_q + engine.index(row)
            step, value_dim = b.const(block_q, i64), self.config.value_dim
            columns, m, l = combine_partials(self.p, engine, first, step, self.task.splits, value_dim)
            self.store_row(row, columns, m, l)
