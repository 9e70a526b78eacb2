"""The decoding kernel for CPUs: the forward kernel over keys that are found in pages, and may be quantised.

One task has a block of the rows that share a key head of a sequence, or those of several key heads whose rows of a key
lie side by side, and a part of the keys. Before it works on a block of keys it looks up where each of them lies; from
there on pages are no different from a contiguous cache, and pages of any size cost about the same. Up to eight rows
multiply K as it lies there, more of them pack it. Either way a key is brought once for all rows of a block, so that
gathering pages beforehand would save nothing. Where keys are divided among tasks, the last one of a block of rows puts
their parts together.

The scales of a quantised cache never meet its elements: those of K are multiplied with the scores, those of V with P.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import f32, i32, i64
from aule.ops.attention.cpu.combine import combine_parts
from aule.ops.attention.cpu.forward import Forward
from aule.ops.attention.scores import Reach, Scores
from aule.ops.decode.cpu.config import CpuDecodeConfig
from aule.ops.decode.cpu.rows import Rows
from aule.ops.tickets import when_last
from aule.target import Target
from aule.tile.matrix import Matrix, PlacedMatrix, divmod_const
from aule.tile.vector import Operand

KERNEL_NAME = "decode_attention_cpu"
RUN = 8
"""Places that are stored at once: pages of so many keys, or of a larger power of two, are looked up as a whole."""
_VALUES, _SOME_VALUES = 32, 16
"""Keys whose values one of several heads takes before the next head does, where heads are neighbours, and those it
takes at a time: a piece of O is half as wide as a row of V, and the other half is soon to be read
(docs/performance.md, "Decoding on the CPU")."""


def build_decode(config: CpuDecodeConfig, target: Target) -> KernelIR:
    """Trace the kernel of a configuration."""
    b = Builder(KERNEL_NAME, workgroup=1)
    decode = _Decode(b, config)
    with b.if_(decode.count > 0):
        decode.run()
    return b.finish()


class _Decode(Forward):
    config: CpuDecodeConfig

    # -- place ---------------------------------------------------------------------------------------------------------

    def find_place(self) -> None:
        b, config, p, shape = self.b, self.config, self.p, self.shape
        self.heads = p.number("heads_q")
        self.task = b.group_id(0)
        self.splits = splits = p.number("splits")
        self.split, self.block = self.task % splits, self.task // splits
        self.rows = Rows.of(p, self.block, config.group, shape.block_q, config.heads, config.ragged)
        self.batch, self.kv_head, self.count = self.rows.batch, self.rows.kv_head, self.rows.count
        seq_kv = p.number("seq_kv")
        if config.lens:
            found = b.load(p.buffer("lens", i32), p.strided("lens", self.batch))
            seq_kv = b.max(b.min(found, seq_kv), 0)
        self.scores = Scores(p, self.batch, self.rows.extent(seq_kv))
        self.part_rows = b.const(shape.block_q, i32)
        self.split_first, self.split_end = b.const(0, i32), seq_kv
        if config.split:
            # Each sequence's own keys are shared out, and only those that any of the rows keeps.
            mine = self.reach(b.const(0, i32), shape.block_q)
            first = mine.first // shape.block_kv
            blocks = b.max((mine.end + (shape.block_kv - 1)) // shape.block_kv - first, 0)
            each = (blocks + splits - 1) // splits
            self.split_first = (first + self.split * each) * shape.block_kv
            self.split_end = b.min(seq_kv, self.split_first + each * shape.block_kv)
        self.ways = config.ways
        self.all_rows = config.heads > 1
        self.k = self.v = None
        self.found = shape.block_kv + -(-self.ahead // shape.panel) * shape.panel
        if config.page:
            self.places = {name: b.private(f"{name}_places", i64, self.found) for name in "kv"}
        else:
            self.k, self.v = self._matrix("k"), self._matrix("v")
        if config.quantised:
            self.scales = {name: b.private(f"{name}_scales", config.work, self.found) for name in "kv"}

    def place(self, row: Value) -> tuple[Value, Value]:
        return self.rows.place(row)

    def reach(self, row: Value, rows: int) -> Reach:
        b, shift, group = self.b, self.scores.shift, self.config.group
        first = self.rows.row0 + row if self.config.heads == 1 else b.const(0, i32)  # of a head
        last = b.min(first + rows, self.rows.seq_q * group) - 1
        return self.scores.reach(first // group + shift, last // group + shift)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _matrix(self, name: str, key0: Value | None = None) -> Matrix:
        """This task's head of K or V; in pages, once the keys from ``key0`` on were found."""
        config, p = self.config, self.p
        buffer, seq_kv = p.buffer(name, config.stored), self.scores.seq_kv
        cols, unit = (config.head_dim, config.unit[1]) if name == "k" else (config.value_dim, config.unit[2])
        row_stride = p.number(f"{name}_row_stride", i64)
        col_stride = None if unit else p.number(f"{name}_col_stride", i64)
        if key0 is None:
            base = p.strided(name, self.batch, self.kv_head)
            return Matrix(buffer, base, seq_kv, cols, row_stride, col_stride, False)
        zero = self.b.const(0, i64)
        return PlacedMatrix(buffer, zero, seq_kv, cols, row_stride, col_stride, False, self.places[name], key0)

    def bring(self, key0: Value) -> tuple[Operand | None, Operand]:
        if self.config.page or self.config.quantised:
            self._find_keys(key0)
        if self.config.page:
            self.k, self.v = self._matrix("k", key0), self._matrix("v", key0)
        return super().bring(key0)

    def take(self, key0: Value, panels: Operand | None, values: Operand, wild: Value | None) -> None:
        """Several heads: all scores of the block, then all of its values, and some keys of all heads before the next
        ones, which is about the order in which they lie in memory."""
        if self.config.heads == 1:
            super().take(key0, panels, values, wild)
            return
        b, shape = self.b, self.shape
        zero, high = b.const(0, i32), b.min(self.split_end - key0, shape.block_kv)
        last = (high + (shape.panel - 1)) // shape.panel * shape.panel
        each = self.ways * self._run if self.config.piled else _VALUES
        if self.config.piled:  # what several pages have of a head
            with b.loop(zero, last, each, name="key") as first, b.loop(zero, self.groups, name="head") as head:
                self._score_head(head, key0, first, b.min(first + each, last))
        else:
            with b.loop(zero, last, shape.panel, name="panel") as panel:
                self._score_heads(key0, panel)
        with b.loop(zero, self.groups, name="head") as head:
            self.softmax(head * shape.rows, zero, last)
        self.scale()
        with b.loop(zero, high, each, name="key") as first, b.loop(zero, self.groups, name="head") as head:
            v = replace(values, base=self._of_head(values.base, "v", head))
            with b.loop(first, b.min(first + each, high), _SOME_VALUES, name="some") as low:
                end = b.min(low + _SOME_VALUES, high)
                self.multiply_values(head * shape.rows, v, low, end, wild, scaled=True)

    def _score_head(self, head: Value, key0: Value, first: Value, last: Value) -> None:
        """The scores of one of several heads with some panels of the block."""
        k = self.k
        assert k is not None
        self.k = replace(k, base=self._of_head(k.base, "k", head))
        with self.b.loop(first, last, self.shape.panel, name="panel") as panel:
            reach = self.reach(self.b.const(0, i32), self.shape.rows)
            self.multiply_scores(head * self.shape.rows, key0, None, panel, reach)
        self.k = k

    def _score_heads(self, key0: Value, panel: Value) -> None:
        """The scores of all heads with the keys of a panel: as many keys at a time as a vector has room for, beside the
        rows of a head."""
        b, engine, shape, k = self.b, self.engine, self.shape, self.k
        assert k is not None
        zero, rows, span = b.const(0, i32), shape.rows, shape.lanes // shape.rows
        parts = b.private("dots_of_heads", self.config.work, shape.block_q * shape.lanes)
        with b.loop(zero, rows, name="part") as part, b.loop(zero, self.groups, name="head") as head:
            q = Operand(self.q, engine.index(head * rows) * self.head_cols, self.head_cols, 1)
            there = replace(k, base=self._of_head(k.base, "k", head))
            dots = engine.some_dots(q, rows, there, key0 + panel + part * span, self.ahead)
            b.store(parts, engine.index(head * rows + part) * shape.lanes, dots)
        reach = self.reach(zero, rows)
        with b.loop(zero, self.groups, name="head") as head:
            row = head * rows
            found = [b.load(parts, engine.index(row + i) * shape.lanes, shape.lanes) for i in range(rows)]
            self.finish_scores([[b.var(x)] for x in engine.dots_of(found)], row, key0, panel, reach)

    def _of_head(self, base: Value, name: str, head: Value) -> Value:
        """Where one of several heads has what the first of them has at ``base``."""
        return base + self.engine.index(head) * self.p.number(f"{name}_stride1", i64)

    def values_in_place(self, v: Matrix, key0: Value) -> Operand:
        if isinstance(v, PlacedMatrix):
            return Operand(v.buffer, v.base, 0, 0, v.places, self.ahead)
        return super().values_in_place(v, key0)

    def _find_keys(self, key0: Value) -> None:
        """Where the keys of a block lie, and their scales, up to a whole panel and what is fetched ahead; those past
        the end are others. Of several heads they are the first one's."""
        b, shape = self.b, self.shape
        count = b.min(shape.block_kv, self.scores.seq_kv - key0)
        whole = (count + (shape.panel - 1)) // shape.panel * shape.panel
        self._note_keys(key0, whole + (self.found - shape.block_kv))

    def _note_keys(self, key0: Value, whole: Value) -> None:
        """Note place and scale of ``whole`` keys, and perhaps of some more."""
        b, page = self.b, self.config.page
        seq_kv = self.scores.seq_kv
        if page < RUN or page & (page - 1):
            with b.loop(b.const(0, i32), whole, name="key") as i:
                key = b.min(key0 + i, seq_kv - 1)
                number, slot = divmod_const(b, key, page) if page else (key, key)
                self._note(i, 1, self._page(number) if page else self.batch, slot)
            return
        run = self._run
        last, ways = (seq_kv - 1) // run * run, self.ways

        def found(key: Value) -> tuple[Value, Value]:
            number, slot = divmod_const(b, b.min(key, last), page)
            return self._page(number), slot

        with b.loop(b.const(0, i32), whole, ways * run, name="key") as i:
            runs = [found(key0 + i + n * run) for n in range(ways)]
            if ways > 1:
                with b.if_(key0 + i + ways * run <= seq_kv):
                    self._note_in_turns(i, run, runs)
            with b.else_() if ways > 1 else nullcontext():
                for n, (number, slot) in enumerate(runs):
                    self._note(i + n * run, run, number, slot)

    @property
    def _run(self) -> int:
        """Keys of a page that are looked up together; a block is a whole number of them."""
        return min(self.config.page, max(self.shape.panel, RUN))

    def _note_in_turns(self, to: Value, count: int, runs: list[tuple[Value, Value]]) -> None:
        """Note the places of several runs of ``count`` keys, all first keys before all second ones: so their pages are
        read side by side, and while one comes from memory the others do, too. The order of keys matters to nobody
        here."""
        b, p, index = self.b, self.p, self.engine.index
        for name in "kv":
            stride = p.number(f"{name}_row_stride", i64)
            starts = b.vector([p.strided(name, page, self.kv_head) + index(slot) * stride for page, slot in runs])
            for i in range(count):
                b.store(self.places[name], index(to) + i * len(runs), starts + stride * i, align=1)

    def _page(self, number: Value) -> Value:
        """A page of this sequence; never one that the pool has not."""
        b, p = self.b, self.p
        page = b.load(p.buffer("tables", i32), p.strided("tables", self.batch, number))
        return b.max(b.min(page, p.number("pages") - 1), 0)

    def _note(self, to: Value, count: int, page: Value, slot: Value) -> None:
        """Note place and scale of ``count`` keys of a page, a whole number of runs or one."""
        b, p, index = self.b, self.p, self.engine.index
        for name in "kv":
            if self.config.page:
                stride = p.number(f"{name}_row_stride", i64)
                start = p.strided(name, page, self.kv_head) + index(slot) * stride
                if count == 1:
                    b.store(self.places[name], index(to), start)
                else:
                    steps = b.vector([b.const(i, i64) for i in range(RUN)]) * stride
                    with b.loop(b.const(0, i64), count, RUN, unroll=2, name="i") as i:
                        b.store(self.places[name], index(to) + i, steps + (start + i * stride))
            if self.config.quantised:
                scale, stride = p.buffer(f"{name}_scale", f32), p.number(f"{name}_scale_row_stride", i64)
                start = p.strided(f"{name}_scale", page, self.kv_head) + index(slot) * stride
                with b.loop(b.const(0, i64), count, name="i") as i:
                    x = b.load(scale, start + i * stride)
                    b.store(self.scales[name], index(to) + i, b.cast(x, self.config.work))

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

    def weigh(self, p: Value, row: Value, key: Value) -> Value:
        if not self.config.quantised:
            return p
        scale = self.b.load(self.scales["v"], key, self.shape.lanes)
        # A dropped key weighs nothing, whatever its scale is.
        return self.b.select(self.b.eq(p, 0.0), p, p * scale)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        super().finish()
        if self.config.split:
            when_last(self.p, self.block, self.splits, self.b.const(0, i32), self._put_together)

    def _put_together(self) -> None:
        """The rows from the parts that all tasks of the block have left, in the order of their keys, so that the result
        does not depend on who was the last."""
        b, engine, block_q = self.b, self.engine, self.shape.block_q
        with b.loop(b.const(0, i32), self.count, name="row") as row:
            first = engine.index(self.block * self.splits) * block_q + engine.index(row)
            step, value_dim = b.const(block_q, i64), self.config.value_dim
            columns, m, l = combine_parts(self.p, engine, first, step, self.splits, value_dim)
            self.store_row(row, columns, m, l)
