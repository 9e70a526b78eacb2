"""The forward kernel for CPUs: FlashAttention over the vector engine.

One task holds a block of query rows with their part of O, the running maximum m and sum l, and passes over the keys
block by block. Within a block it takes a few rows at a time: their scores with the block's panels of K, softmax, and
``O = O * alpha + P V``. Only panels that hold a kept key are multiplied, and ``P V`` stops at the last one.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import f32, i32, i64, u32
from aule.ops.attention.cpu.config import CpuConfig
from aule.ops.attention.cpu.keep import Keep
from aule.ops.attention.cpu.modify import modify
from aule.ops.attention.cpu.pack import pack_rotated, packed_keys
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.rotating import rotary_of, rotating
from aule.ops.attention.scores import Reach, Scores
from aule.target import Target
from aule.tile.math import LN2, LOG2E, NEG_INF, lowest
from aule.tile.matrix import Matrix
from aule.tile.rotated_vector import rows_in, turn_row
from aule.tile.vector import Operand, Vectors

KERNEL_NAME = "flash_attention_cpu"
TOGETHER = (4, 2, 1)
"""How many rows softmax takes at a time: as many as divide the rows there are. With one, it waits for the lanes of its
vectors to be combined (Zen 4, bf16, d64: 2.7%)."""

AHEAD = 64
"""Keys that are fetched into the cache ahead of where they are read, when rows are few. One thread on Zen 4, 64 heads
of 4096 keys, d128: 12.2 -> 17.2 GB/s in fp32 and 10.4 -> 17.1 in bf16; 16 keys ahead gave as much or less."""


LONG_ROW = 256
"""Bytes of a row of K from which few rows of Q take it row by row, if they stay in registers. Rows of 128 bytes are 3
to 4% slower that way (docs/performance.md, "Decoding on the CPU")."""


def build_forward(config: CpuConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the forward kernel of a configuration."""
    b = Builder(name, workgroup=1)
    forward = Forward(b, config)
    if config.packed:
        with b.if_(forward.count > 0):  # sequences have as many tasks as the longest needs
            forward.run()
    else:
        forward.run()
    return b.finish()


class Forward:
    """The kernel as it is traced. Decoding has another place for its keys and its own order of rows, and is a subclass:
    `find_place`, `place`, `reach`, `bring`, `take`, `values_in_place`, `scale_scores`, `weigh` and `finish` are what it
    may replace."""

    def __init__(self, b: Builder, config: CpuConfig) -> None:
        self.b, self.config, self.shape = b, config, config.shape
        self.engine = Vectors(b, config.work, config.shape.lanes)
        self.p = Parameters(b, config)
        # So few rows read K and V faster than these come by themselves.
        self.ahead = AHEAD if config.panels == "none" else 0
        self.ways = 1
        self.all_rows = False  # whether S, P and alpha are those of all rows, or of a few
        self.find_place()
        shape, work = self.shape, config.work
        self.padded = shape.padded(config.value_dim)
        self.groups = (self.count + (shape.rows - 1)) // shape.rows
        self.q_pairs = config.pairs or config.key_pairs
        self.head_cols = shape.padded(config.head_dim) // (2 if self.q_pairs else 1)
        if config.key_pairs:  # as wide as vectors of pairs
            self.head_cols = shape.padded(self.head_cols)
        self.head_steps = -(-config.head_dim // config.step)
        self.q = b.private("q", u32 if self.q_pairs else work, shape.block_q * self.head_cols)
        kept = shape.block_q if self.all_rows else shape.rows
        self.s = b.private("s", work, kept * shape.block_kv)
        # P replaces S, except where it is rounded to pairs.
        self.weights = b.private("p", u32, kept * shape.block_kv // 2) if config.pairs else self.s
        self.o = b.private("o", work, shape.block_q * self.padded)
        self.m = b.private("m", work, shape.block_q)
        self.l = b.private("l", work, shape.block_q)
        self.alpha = b.private("alpha", work, kept)
        self.keep: Keep | None = None
        dropout = self.scores.dropout()
        if dropout is not None:
            self.keep = Keep(b, config, self.engine, dropout, self.p.number("keep_scale", work))

    # -- place ---------------------------------------------------------------------------------------------------------

    def find_place(self) -> None:
        """Which rows and keys this task has, and where its operands are."""
        b, config, number = self.b, self.config, self.p.number
        self.heads, self.heads_kv, group = number("heads_q"), number("heads_kv"), number("group")
        self.task = b.group_id(0)
        if not config.packed:
            self._lengths()  # declared first
        zero = b.const(0, i32)
        if config.grouped:
            splits = number("splits")
            kv_number, self.split = self.task // splits, self.task % splits
            self.batch, kv_head = kv_number // self.heads_kv, kv_number % self.heads_kv
            seq_q, seq_kv = self._lengths()
            self.first_head, self.row0, self.count = kv_head * group, zero, group * seq_q
            self.part_rows = self.count
            self.split_first, self.split_end = zero, seq_kv
            if config.split:
                self.split_first = self.split * number("split_keys")
                self.split_end = b.min(seq_kv, self.split_first + number("split_keys"))
        else:
            # The last rows come first: with a causal mask they have the most work.
            blocks = number("blocks_q")
            head_number = self.task // blocks
            self.row0 = (blocks - 1 - self.task % blocks) * self.shape.block_q
            if config.packed:  # lengths depend on it
                self.batch = head_number // self.heads
            seq_q, seq_kv = self._lengths()
            self.split_first, self.split_end = zero, seq_kv
            self.count = b.min(seq_q - self.row0, self.shape.block_q)
            self.batch, self.first_head = head_number // self.heads, head_number % self.heads
            kv_head = self.first_head // group
            kv_number = self.batch * self.heads_kv + kv_head
        self.kv_number, self.kv_head = kv_number, kv_head
        if not config.packed:
            self.scores = Scores(self.p, self.batch)
        first = self.scores.extent.first_kv
        self.k: Matrix | None = None
        self.v: Matrix | None = None
        if config.panels != "workspace":
            k = self.p.matrix("k", self.batch, kv_head, seq_kv, config.head_dim, config.unit[1], first=first)
            self.k = rotating(self.p, "k", k, self.batch, self.scores.shift)
        if config.values != "workspace":
            self.v = self.p.matrix("v", self.batch, kv_head, seq_kv, config.value_dim, config.unit[2], first=first)

    def _lengths(self) -> tuple[Value, Value]:
        """seq_q and seq_kv of this task, which packed sequences have each their own."""
        if self.config.packed:
            self.scores = Scores(self.p, self.batch)
            return self.scores.seq_q, self.scores.seq_kv
        return self.p.number("seq_q"), self.p.number("seq_kv")

    def place(self, row: Value) -> tuple[Value, Value]:
        """Query head and query row of a row of this task."""
        if not self.config.grouped:
            return self.first_head, self.row0 + row
        seq_q = self.scores.seq_q
        return self.first_head + row // seq_q, row % seq_q

    def _numbered(self, row: Value, r: Value) -> tuple[Value, Value]:
        """The same of row ``row + r``, the head counted over all batches; rows past the last repeat it."""
        head, at = self.place(self.b.min(row + r, self.count - 1))
        return self.batch * self.heads + head, at

    def reach(self, row: Value, rows: int) -> Reach:
        """Keys of some consecutive rows of this task."""
        b, shift = self.b, self.scores.shift
        if self.config.grouped:
            return self.scores.reach(shift, self.scores.seq_q - 1 + shift)
        last = b.min(self.row0 + row + rows, self.scores.seq_q) - 1
        return self.scores.reach(self.row0 + row + shift, last + shift)

    # -- the algorithm -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        b, shape = self.b, self.shape
        self._start()
        mine = self.reach(b.const(0, i32), shape.block_q)
        first = b.max(mine.first, self.split_first)
        end = b.min(mine.end, self.split_end)
        with b.loop(first // shape.block_kv, (end + (shape.block_kv - 1)) // shape.block_kv, name="block") as block:
            key0 = block * shape.block_kv
            panels, values = self.bring(key0)
            self.take(key0, panels, values, self._wild(mine, key0, values))
        self.finish()

    def take(self, key0: Value, panels: Operand | None, values: Operand, wild: Value | None) -> None:
        """All rows of this task, a few at a time, with a block of keys."""
        b, shape = self.b, self.shape
        with b.loop(b.const(0, i32), self.groups, name="group") as group:
            row = group * shape.rows
            reach = self.reach(row, shape.rows)
            low = b.max(b.max(reach.first, self.split_first) - key0, 0)
            high = b.min(b.min(reach.end, self.split_end) - key0, shape.block_kv)
            with b.if_(low < high):
                first_panel = low // shape.panel * shape.panel
                last_panel = (high + (shape.panel - 1)) // shape.panel * shape.panel
                with b.loop(first_panel, last_panel, shape.panel, name="panel") as panel:
                    self.multiply_scores(row, key0, panels, panel, reach)
                if self.keep is not None:
                    self.keep.fill(functools.partial(self._numbered, row), key0, first_panel, last_panel)
                self.softmax(row, first_panel, last_panel)
                self.multiply_values(row, values, low, high, wild, scaled=False)

    def _start(self) -> None:
        """Q, scaled; O = 0, l = 0, and m as low as can be, or both from the sink, which is a key without a value."""
        b, config, engine, shape = self.b, self.config, self.engine, self.shape
        scale = self.p.number("scale", config.work)
        with b.loop(b.const(0, i32), self.groups * shape.rows, name="row") as row:
            head, at = self.place(b.min(row, self.count - 1))
            first = self.scores.extent.first_q
            q = self.p.matrix("q", self.batch, head, self.scores.seq_q, config.head_dim, config.unit[0], first=first)
            start = q.row_start(b, at)
            if config.rope is not None:
                q, start = self._rotated(q, at, start)
            for col in range(0, self.head_cols * (2 if self.q_pairs else 1), shape.lanes):
                width = max(min(shape.lanes, config.head_dim - col), 0)  # zeros behind the last
                to = engine.index(row) * self.head_cols + (col // 2 if self.q_pairs else col)
                if self.q_pairs:  # exact; scores are scaled instead
                    b.store(self.q, to, engine.pairs(engine.read_raw(q, start, col, width)))
                else:
                    b.store(self.q, to, engine.read(q, start, col, width) * scale)
            for col, _ in engine.columns(config.value_dim):
                b.store(self.o, engine.index(row) * self.padded + col, engine.const(0.0), align=1)
            m, l = b.const(lowest(config.work), config.work), b.const(0.0, config.work)
            if config.sinks:
                sink = b.cast(b.load(self.p.buffer("sinks", f32), self.p.strided("sinks", head)), config.work) * LOG2E
                m = b.max(sink, m)
                l = b.exp2(sink - m)
                if config.split:  # one of the tasks that share a row counts it
                    counts = b.eq(self.split, 0)
                    l = b.select(counts, l, b.const(0.0, config.work))
            b.store(self.m, row, m)
            b.store(self.l, row, l)

    def _rotated(self, q: Matrix, row: Value, start: Value) -> tuple[Matrix, Value]:
        """A row of Q, rotated, in an array, and where it begins there."""
        b, config, engine = self.b, self.config, self.engine
        rotary = rotary_of(self.p, "q", self.batch, self.scores.shift)
        array = b.private("q_row", q.elem if self.q_pairs else config.work, config.head_dim)
        result, zero = rows_in(engine, array, b.const(1, i32), config.head_dim, config.head_dim), b.const(0, i64)
        turn_row(engine, rotary, row, q, start, result, zero)
        return result, zero

    def bring(self, key0: Value) -> tuple[Operand | None, Operand]:
        """The block's panels of K, where it has any, and its rows of V."""
        b, config, engine, shape = self.b, self.config, self.engine, self.shape
        zero = b.const(0, i64)
        at = engine.index(key0)
        if config.packed:
            at_packed = packed_keys(self.p, engine, self.scores.extent, shape.block_kv, self.batch, self.kv_head) + at
        else:
            padded_keys = engine.index((self.scores.seq_kv + (shape.block_kv - 1)) // shape.block_kv * shape.block_kv)
        panels: Operand | None = None
        if self.k is None:
            place = at_packed if config.packed else engine.index(self.kv_number) * padded_keys + at
            panels = Operand(self.p.buffer("panels", config.factor), place * self.head_steps, 0, shape.panel)
        elif config.panels == "scratch":
            scratch = b.private("panels", config.factor, shape.block_kv * self.head_steps)
            with b.loop(
                b.const(0, i32), b.min(shape.block_kv, self.scores.seq_kv - key0), shape.panel, name="panel"
            ) as panel:
                to = engine.index(panel) * self.head_steps
                pack = engine.pack_panel if self.k.rotary is None else functools.partial(pack_rotated, engine)
                pack(self.k, key0 + panel, shape.panel, scratch, to)
            panels = Operand(scratch, zero, 0, shape.panel)
        if self.v is None:
            place = at_packed if config.packed else engine.index(self.kv_number) * padded_keys + at
            base = place // config.step * self.padded
            return panels, Operand(self.p.buffer("values", config.factor), base, 0, self.padded)
        if config.values == "direct":
            return panels, self.values_in_place(self.v, key0)
        scratch = b.private("values", config.factor, shape.block_kv // config.step * self.padded)
        count = b.min(shape.block_kv, self.scores.seq_kv - key0)
        bring = engine.pair_rows if config.pairs else engine.copy_rows
        bring(self.v, key0, count, scratch, zero, self.padded)
        return panels, Operand(scratch, zero, 0, self.padded)

    def values_in_place(self, v: Matrix, key0: Value) -> Operand:
        """The rows of V from a key on, where they are."""
        start = v.base + self.engine.index(key0) * v.row_stride
        return Operand(v.buffer, start, 0, v.row_stride, ahead=self.ahead)

    def _wild(self, mine: Reach, key0: Value, values: Operand) -> Value | None:
        """Whether V of this block holds Inf or NaN that a dropped key's weight of zero must not let through; None when
        no key is ever dropped."""
        b, config, shape = self.b, self.config, self.shape
        if not (config.everywhere or config.left or config.right):
            return None
        flag = b.var(b.const(0, i32), "wild")
        dropped = (key0 < mine.full_first) | (key0 + shape.block_kv > mine.full_end)
        if config.everywhere:
            dropped = b.eq(key0, key0)
        with b.if_(dropped):
            count = self._steps(b.min(shape.block_kv, self.scores.seq_kv - key0))
            found = self.engine.has_wild(values, shape.vectors(config.value_dim), b.const(0, i64), count)
            flag.value = b.select(found, b.const(1, i32), b.const(0, i32))
        return b.ne(flag.value, 0)

    def _steps(self, keys: Value) -> Value:
        """So many keys as steps of a product, the last perhaps not whole."""
        step = self.config.step
        return self.engine.index(keys if step == 1 else (keys + (step - 1)) // step)

    def multiply_scores(self, row: Value, key0: Value, panels: Operand | None, panel: Value, reach: Reach) -> None:
        """``S = Q K^T`` of a few rows and a panel, and what the modifiers make of it."""
        engine, shape = self.engine, self.shape
        q = Operand(self.q, engine.index(row) * self.head_cols, self.head_cols, 1)
        key = key0 + panel
        c = engine.accumulators(shape.rows, shape.panel_vectors)
        if panels is None:
            assert self.k is not None
            whole = self._whole_rows(self.k)
            for j in range(shape.panel_vectors):
                dots = engine.dots(q, shape.rows, self.k, key + j * shape.lanes, self.ahead, whole)
                for variables, x in zip(c, dots, strict=True):
                    variables[j].value = x
        else:
            steps = self.head_steps
            at = Operand(panels.pointer, panels.base + engine.index(panel) * steps, 0, shape.panel)
            engine.multiply(c, q, at, 0, steps, unroll=4)
        self.finish_scores(c, row, key0, panel, reach)

    def finish_scores(self, c: list[list[Var]], row: Value, key0: Value, panel: Value, reach: Reach) -> None:
        """What the modifiers make of the products of a few rows and a panel goes to S."""
        b, config, engine, shape, key = self.b, self.config, self.engine, self.shape, key0 + panel
        self.scale_scores(c, panel)
        partial = (key < reach.full_first) | (key + shape.panel > reach.full_end)
        places = [self.place(b.min(row + r, self.count - 1)) for r in range(shape.rows)]
        kinds = {"mask": config.mask_columns, "bias": config.bias_columns}
        modify(self.scores, engine, c, places, key, partial, kinds)
        first = self._kept(row) * shape.block_kv + engine.index(panel)
        for r, variables in enumerate(c):
            for j, variable in enumerate(variables):
                b.store(self.s, first + (r * shape.block_kv + j * shape.lanes), variable.value)

    def _kept(self, row: Value) -> Value:
        """Which row of S, P and alpha belongs to a row."""
        return self.engine.index(row) if self.all_rows else self.b.const(0, i64)

    def _whole_rows(self, k: Matrix) -> int:
        """Whether K is read row by row: how many rows are to have instructions of their own, which hardware tells
        apart to fetch ahead of each; else 0."""
        vectors = self.shape.rows * self.head_cols // self.shape.lanes
        fits = 2 * vectors <= self.shape.unit.registers
        return self.ways if fits and k.cols * k.elem.bytes >= LONG_ROW else 0

    def scale_scores(self, c: list[list[Var]], panel: Value) -> None:
        """What products of the keys of a panel are still to be multiplied with."""
        if not self.q_pairs:
            return
        scale = self.b.splat(self.p.number("scale", self.config.work), self.shape.lanes)
        for variable in (variable for variables in c for variable in variables):
            variable.value = variable.value * scale

    def weigh(self, p: Value, row: Value, key: Value) -> Value:
        """What a row's vector of P from a key of the block on is for V, once it is summed."""
        return p if self.keep is None else p * self.keep.load(row, key)

    def softmax(self, row: Value, first: Value, last: Value) -> None:
        """P = exp2(S - m) in place of S, l = l * alpha + sum P; alpha is what O is still to be multiplied with."""
        b, engine, shape = self.b, self.engine, self.shape
        begin, end = engine.index(first), engine.index(last)
        together = next(n for n in TOGETHER if shape.rows % n == 0)
        with b.loop(b.const(0, i64), shape.rows, together, name="r") as r:
            bases = [(self._kept(row) + r + i) * shape.block_kv for i in range(together)]
            offsets = range(0, shape.panel, shape.lanes)
            highest = [[b.var(engine.const(NEG_INF)) for _ in offsets] for _ in bases]
            with b.loop(begin, end, shape.panel, name="panel") as panel:
                for base, variables in zip(bases, highest, strict=True):
                    for j, variable in zip(offsets, variables, strict=True):
                        variable.value = b.max(variable.value, b.load(self.s, base + panel + j, shape.lanes))
            tops = [functools.reduce(b.max, [x.value for x in variables]) for variables in highest]
            maxima = []
            for i, top in enumerate(tops):
                at = engine.index(row) + r + i
                m_old = b.load(self.m, at)
                m = b.max(m_old, engine.reduce("max", top))
                b.store(self.m, at, m)
                b.store(self.alpha, self._kept(row) + r + i, b.exp2(m_old - m))
                maxima.append(m)
            sums = [[b.var(engine.const(0.0)) for _ in offsets] for _ in bases]
            with b.loop(begin, end, shape.panel, name="panel") as panel:
                for i, (base, m, variables) in enumerate(zip(bases, maxima, sums, strict=True)):
                    for j, variable in zip(offsets, variables, strict=True):
                        place = base + panel + j
                        p = b.exp2(b.load(self.s, place, shape.lanes) - m)
                        variable.value = variable.value + p
                        p = self.weigh(p, r + i, panel + j)
                        if self.config.pairs:
                            b.store(self.weights, place >> 1, engine.pairs(p))
                        else:
                            b.store(self.weights, place, p)
            for i, variables in enumerate(sums):
                total = engine.reduce("add", functools.reduce(operator.add, [x.value for x in variables]))
                at = engine.index(row) + r + i
                b.store(self.l, at, b.fma(b.load(self.l, at), b.load(self.alpha, self._kept(row) + r + i), total))

    def multiply_values(
        self, row: Value, values: Operand, low: Value, high: Value, wild: Value | None, scaled: bool
    ) -> None:
        """``O = O * alpha + P V``, or, where O is scaled already, ``O = O + P V``: in pieces that stay in registers."""
        b, engine, shape = self.b, self.engine, self.shape
        rows, pieces = engine.pieces(shape.unit, shape.rows, self.config.value_dim, self.config.pairs)
        step = self.config.step
        begin, end = engine.index(low if step == 1 else low // step), self._steps(high)
        with b.loop(b.const(0, i64), shape.rows, rows, name="r") as r:
            for first, widths in pieces:
                at = (engine.index(row) + r) * self.padded + first * shape.lanes
                c = []
                for i in range(rows):
                    places = [at + (i * self.padded + j * shape.lanes) for j in range(len(widths))]
                    olds = [b.load(self.o, place, width) for place, width in zip(places, widths, strict=True)]
                    if not scaled:
                        alpha = b.load(self.alpha, self._kept(row) + r + i)
                        olds = [old * alpha for old in olds]
                    c.append([b.var(old) for old in olds])
                kept = (self._kept(row) + r) * (shape.block_kv // step)
                v = replace(values, base=values.base + first * shape.lanes)
                engine.multiply_guarding(c, Operand(self.weights, kept, shape.block_kv // step, 1), v, begin, end, wild)
                for i, variables in enumerate(c):
                    for j, variable in enumerate(variables):
                        b.store(self.o, at + (i * self.padded + j * shape.lanes), variable.value)

    def scale(self) -> None:
        """``O = O * alpha`` for all rows."""
        b, engine = self.b, self.engine
        with b.loop(b.const(0, i32), self.count, name="row") as row:
            alpha = b.load(self.alpha, engine.index(row))
            for col, _ in engine.columns(self.config.value_dim):
                at = engine.index(row) * self.padded + col
                b.store(self.o, at, b.load(self.o, at, engine.lanes) * alpha)

    def finish(self) -> None:
        """Store what was found for the rows."""
        with self.b.loop(self.b.const(0, i32), self.count, name="row") as row:
            if self.config.split:
                self._leave_partial(row)
            else:
                self._store(row)

    def _leave_partial(self, row: Value) -> None:
        """O, m and l as they are, for `combine_parts`."""
        b, config, engine, shape = self.b, self.config, self.engine, self.shape
        partial = self.p.buffer("partial", config.work, "readwrite")  # decoding combines them in the same launch
        number = engine.index(self.task) * engine.index(self.part_rows) + engine.index(row)
        to = number * (self.padded + shape.lanes)
        for col, _ in engine.columns(config.value_dim):
            x = b.load(self.o, engine.index(row) * self.padded + col, shape.lanes)
            b.store(partial, to + col, x, align=1)
        b.store(partial, to + self.padded, b.load(self.m, row))
        b.store(partial, to + (self.padded + 1), b.load(self.l, row))

    def _store(self, row: Value) -> None:
        b, engine = self.b, self.engine
        columns = [
            (col, width, b.load(self.o, engine.index(row) * self.padded + col, engine.lanes))
            for col, width in engine.columns(self.config.value_dim)
        ]
        self.store_row(row, columns, b.load(self.m, row), b.load(self.l, row))

    def store_row(self, row: Value, columns: list[tuple[int, int, Value]], m: Value, l: Value) -> None:
        """O / l and the log-sum-exp of a row of this task; ``columns`` as in the function `store_row`."""
        b, config, engine = self.b, self.config, self.engine
        head, at = self.place(row)
        seq_q, unit, first = self.scores.seq_q, config.unit[3], self.scores.extent.first_q
        o = self.p.matrix("o", self.batch, head, seq_q, config.value_dim, unit, access="write", first=first)
        lse = store_row(b, engine, o, at, columns, m, l)
        if config.lse:
            base = self.scores.extent.row_base(self.p, self.batch * self.heads + head, head)
            to = base + engine.index(at)
            b.store(self.p.buffer("lse", config.work, "write"), to, lse)


def store_row(
    b: Builder, engine: Vectors, o: Matrix, row: Value, columns: list[tuple[int, int, Value]], m: Value, l: Value
) -> Value:
    """Store a row of O / l, given as vectors with their first column and how many lanes count. Returns its
    log-sum-exp."""
    nothing = b.eq(l, 0.0)  # such a row gives zeros; one with a NaN score has a NaN sum and stays NaN
    inverse = b.select(nothing, b.const(0.0, engine.work), b.rcp(l))
    start = o.row_start(b, row)
    for col, width, x in columns:
        engine.write(o, start, col, x * inverse, width)
    return b.select(nothing, b.const(NEG_INF, engine.work), (m + b.log2(l)) * LN2)
