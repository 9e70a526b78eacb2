"""The forward kernel for CPUs: FlashAttention on the vector engine.

A task holds a block of query rows with their O, running maximum m and sum l, and loops over the keys block by block.
Within a block it takes a few rows at a time: scores with the block's panels of K, softmax, and ``O = O * alpha + P V``.
Only panels that hold a kept key are multiplied, and ``P V`` ends at the last kept key.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import f32, i32, i64, u32
from aule.ops.attention.cpu.config import CpuConfig
from aule.ops.attention.cpu.function_tiles import BlockClasses
from aule.ops.attention.cpu.pack import pack_rotated, packed_keys
from aule.ops.attention.cpu.scores import DropoutFactors, modify
from aule.ops.attention.cpu.task import AttentionTask, Task
from aule.ops.attention.prepass.mask_kernels import ALL, NONE
from aule.ops.combine.cpu import Columns, PartialLayout, store_row
from aule.ops.scores.band import Reach
from aule.ops.scores.parameters import Parameters
from aule.ops.scores.rotated_operands import rotary_of, rotating
from aule.ops.softmax.online_softmax import NaturalMaximum
from aule.target import Target
from aule.tile.common.math import NEG_INF, lowest
from aule.tile.common.matrix import Matrix
from aule.tile.vector.dots import dot_products
from aule.tile.vector.engine import Operand, Vectors
from aule.tile.vector.rope import MatrixRow, array_rows, rotate_row

KERNEL_NAME = "flash_attention_cpu"


def build_forward(config: CpuConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the forward kernel of a configuration."""
    b = Builder(name, workgroup=1)
    forward = Forward(b, config)
    if config.packed:
        with b.if_(forward.task.count > 0):  # every sequence has as many tasks as the longest
            forward.run()
    else:
        forward.run()
    return b.finish()


class Forward:
    """The forward kernel while it is traced; decoding subclasses it.

    A subclass may replace `locate`, `open_cache`, `stage_block`, `process_block`, `values_in_place`, `scale_scores`,
    `scale_weights` and `finish`.
    """

    unroll_rows = 1
    """Rows of K that have instructions of their own if K is read row by row."""

    def __init__(self, b: Builder, config: CpuConfig) -> None:
        self.b, self.config, self.shape = b, config, config.shape
        self.engine = Vectors(b, config.work, config.shape.lanes)
        self.p = Parameters(b, config)
        self.form = NaturalMaximum(b)
        self.ahead = config.prefetch_keys if config.panels == "none" else 0
        self.classes: BlockClasses | None = None  # of the block of keys that is traced, if tiles are classified
        self.all_rows = False  # S, P and alpha are stored for all rows of the task, or for ``shape.rows`` of them
        self.task = self.locate()
        self.scores, self.count = self.task.scores, self.task.count
        self.k, self.v = self.open_cache()
        shape, work = self.shape, config.work
        self.padded = shape.padded(config.value_dim)
        self.groups = (self.count + (shape.rows - 1)) // shape.rows
        self.q_pairs = config.pairs or config.key_pairs
        self.head_cols = shape.padded(config.head_dim) // (2 if self.q_pairs else 1)
        if config.key_pairs:  # full vectors of pairs
            self.head_cols = shape.padded(self.head_cols)
        self.head_steps = -(-config.head_dim // config.step)
        self.q = b.private("q", u32 if self.q_pairs else work, shape.block_q * self.head_cols)
        score_rows = shape.block_q if self.all_rows else shape.rows
        self.s = b.private("s", work, score_rows * shape.block_kv)
        # P replaces S, unless it is rounded to pairs.
        self.weights = b.private("p", u32, score_rows * shape.block_kv // 2) if config.pairs else self.s
        self.o = b.private("o", work, shape.block_q * self.padded)
        self.m = b.private("m", work, shape.block_q)
        self.l = b.private("l", work, shape.block_q)
        self.alpha = b.private("alpha", work, score_rows)
        self.dropout: DropoutFactors | None = None
        dropout = self.scores.dropout()
        if dropout is not None:
            self.dropout = DropoutFactors(b, config, self.engine, dropout, self.p.number("keep_scale", work))

    def locate(self) -> Task:
        """Find the rows and keys of this task."""
        return AttentionTask(self.p, self.config)

    def open_cache(self) -> tuple[Matrix | None, Matrix | None]:
        """This task's head of K and of V; None if it reads them from the workspace."""
        config, task, first = self.config, self.task, self.scores.extent.first_kv
        seq_kv = self.scores.seq_kv
        k = v = None
        if config.panels != "workspace":
            k = self.p.matrix("k", task.batch, task.kv_head, seq_kv, config.head_dim, config.unit[1], first=first)
            k = rotating(self.p, "k", k, task.batch, self.scores.shift)
        if config.values != "workspace":
            v = self.p.matrix("v", task.batch, task.kv_head, seq_kv, config.value_dim, config.unit[2], first=first)
        return k, v

    # -- the algorithm -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trace the loop over the key blocks of the task."""
        b, shape, task = self.b, self.shape, self.task
        self._load_queries()
        reach = task.reach(b.const(0, i32), shape.block_q)
        first = b.max(reach.first, task.first_key)
        end = b.min(reach.end, task.end_key)
        with b.loop(first // shape.block_kv, (end + (shape.block_kv - 1)) // shape.block_kv, name="block") as block:
            key0 = block * shape.block_kv
            if self.config.tiles_listed:
                self.classes = BlockClasses(self.p, shape, task.batch, *task.query(b.const(0, i32)), key0)
            with nullcontext() if self.classes is None else b.if_(b.ne(self.classes.kind, NONE)):
                panels, values = self.stage_block(key0)
                self.process_block(key0, panels, values, self._nonfinite_values(reach, key0, values))
        self.finish()

    def process_block(self, key0: Value, panels: Operand | None, values: Operand, nonfinite: Value | None) -> None:
        """Attend from all rows of this task, a few at a time, to a block of keys."""
        b, shape, task = self.b, self.shape, self.task
        with b.loop(b.const(0, i32), self.groups, name="group") as group:
            row = group * shape.rows
            reach = task.reach(row, shape.rows)
            low = b.max(b.max(reach.first, task.first_key) - key0, 0)
            high = b.min(b.min(reach.end, task.end_key) - key0, shape.block_kv)
            if self.classes is not None:
                low, high = self.classes.narrowed(row, low, high)
            with b.if_(low < high):
                first_panel = low // shape.panel * shape.panel
                last_panel = (high + (shape.panel - 1)) // shape.panel * shape.panel
                with b.loop(first_panel, last_panel, shape.panel, name="panel") as panel:
                    self._score(row, key0, panels, panel, reach)
                if self.dropout is not None:
                    self.dropout.fill(partial(self._query_number, row), key0, first_panel, last_panel)
                self.softmax(row, first_panel, last_panel)
                self.multiply_values(row, values, low, high, nonfinite)

    def _score(self, row: Value, key0: Value, panels: Operand | None, panel: Value, reach: Reach) -> None:
        """Scores of a few rows and a panel: -inf if a mask function keeps none of them."""
        if self.classes is None:
            self.multiply_scores(row, key0, panels, panel, reach)
            return
        self.classes.each(row, panel, reach, partial(self.multiply_scores, row, key0, panels, panel))
        with self.b.else_():
            self._store_scores(row, panel, lambda r, j: self.engine.const(NEG_INF))

    def _query_number(self, row: Value, r: Value) -> tuple[Value, Value]:
        """Query head of row ``row + r``, counted over all batches, and its query row; rows past the last repeat it."""
        head, at = self.task.query(self.b.min(row + r, self.count - 1))
        return self.task.batch * self.p.number("heads_q") + head, at

    # -- Q, K and V ----------------------------------------------------------------------------------------------------

    def _load_queries(self) -> None:
        """Load Q, scaled; set O = 0, l = 0 and m to the lowest number, or m and l from the sink, a key without a
        value."""
        b, config, engine, shape = self.b, self.config, self.engine, self.shape
        scale = self.p.number("scale", config.work)
        with b.loop(b.const(0, i32), self.groups * shape.rows, name="row") as row:
            head, at = self.task.query(b.min(row, self.count - 1))
            first, seq_q = self.scores.extent.first_q, self.scores.seq_q
            q = self.p.matrix("q", self.task.batch, head, seq_q, config.head_dim, config.unit[0], first=first)
            source = MatrixRow(q, q.row_start(b, at))
            if config.rope is not None:
                source = self._rotated(source, at)
            for col in range(0, self.head_cols * (2 if self.q_pairs else 1), shape.lanes):
                width = max(min(shape.lanes, config.head_dim - col), 0)  # zeros after the last column
                to = engine.index(row) * self.head_cols + (col // 2 if self.q_pairs else col)
                if self.q_pairs:  # exact; scores are scaled instead
                    b.store(self.q, to, engine.pairs(engine.read_raw(source.matrix, source.start, col, width)))
                else:
                    b.store(self.q, to, engine.read(source.matrix, source.start, col, width) * scale)
            for col, _ in engine.columns(config.value_dim):
                b.store(self.o, engine.index(row) * self.padded + col, engine.const(0.0), align=1)
            m, l = b.const(lowest(config.work), config.work), b.const(0.0, config.work)
            if config.sinks:
                sink = b.cast(b.load(self.p.buffer("sinks", f32), self.p.strided("sinks", head)), config.work)
                m = self.form.larger(sink, m)
                l = self.form.weight(sink, m)
                if config.split:  # only the first split of a row counts the sink
                    l = b.select(b.eq(self.task.split, 0), l, b.const(0.0, config.work))
            b.store(self.m, row, m)
            b.store(self.l, row, l)

    def _rotated(self, source: MatrixRow, row: Value) -> MatrixRow:
        b, config, engine = self.b, self.config, self.engine
        rotary = rotary_of(self.p, "q", self.task.batch, self.scores.shift)
        array = b.private("q_row", source.matrix.elem if self.q_pairs else config.work, config.head_dim)
        copy = array_rows(engine, array, b.const(1, i32), config.head_dim, config.head_dim)
        result = MatrixRow(copy, b.const(0, i64))
        rotate_row(engine, rotary, row, source, result)
        return result

    def stage_block(self, key0: Value) -> tuple[Operand | None, Operand]:
        """Panels of K of a block, None if K is read in place, and rows of V, packed as the configuration says."""
        config, engine, workspace_key = self.config, self.engine, self._workspace_key(key0)
        panels: Operand | None = None
        if config.panels == "workspace":
            start = workspace_key() * self.head_steps
            panels = Operand(self.p.buffer("panels", config.factor), start, 0, self.shape.panel)
        elif config.panels == "scratch":
            panels = self._pack_keys(key0)
        if self.v is None:
            base = workspace_key() // config.step * self.padded
            return panels, Operand(self.p.buffer("values", config.factor), base, 0, self.padded)
        if config.values == "direct":
            return panels, self.values_in_place(self.v, key0)
        scratch = self.b.private("values", config.factor, self.shape.block_kv // config.step * self.padded)
        count = self.b.min(self.shape.block_kv, self.scores.seq_kv - key0)
        copy = engine.copy_paired_rows if config.pairs else engine.copy_rows
        copy(self.v, key0, count, scratch, self.b.const(0, i64), self.padded)
        return panels, Operand(scratch, self.b.const(0, i64), 0, self.padded)

    def _workspace_key(self, key0: Value) -> Callable[[], Value]:
        """Gives the number of a key among all keys of the workspace."""
        engine, task, block_kv = self.engine, self.task, self.shape.block_kv
        at = engine.index(key0)
        if self.config.packed:
            packed = packed_keys(self.p, engine, self.scores.extent, block_kv, task.batch, task.kv_head) + at
            return lambda: packed
        padded_keys = engine.index((self.scores.seq_kv + (block_kv - 1)) // block_kv * block_kv)

        def key() -> Value:
            assert isinstance(task, AttentionTask)
            return engine.index(task.kv_number) * padded_keys + at

        return key

    def _pack_keys(self, key0: Value) -> Operand:
        """Panels of K of a block, packed into an array of this task."""
        b, config, engine, shape = self.b, self.config, self.engine, self.shape
        assert self.k is not None
        scratch = b.private("panels", config.factor, shape.block_kv * self.head_steps)
        keys = b.min(shape.block_kv, self.scores.seq_kv - key0)
        with b.loop(b.const(0, i32), keys, shape.panel, name="panel") as panel:
            to = engine.index(panel) * self.head_steps
            pack = engine.pack_panel if self.k.rotary is None else partial(pack_rotated, engine)
            pack(self.k, key0 + panel, shape.panel, scratch, to)
        return Operand(scratch, b.const(0, i64), 0, shape.panel)

    def values_in_place(self, v: Matrix, key0: Value) -> Operand:
        start = v.base + self.engine.index(key0) * v.row_stride
        return Operand(v.buffer, start, 0, v.row_stride, ahead=self.ahead)

    def _nonfinite_values(self, reach: Reach, key0: Value, values: Operand) -> Value | None:
        """Whether V of this block holds Inf or NaN, if it has dropped keys: their zero weights must hide it. None if no
        key is ever dropped."""
        b, config, shape = self.b, self.config, self.shape
        if not config.may_drop:
            return None
        flag = b.var(b.const(0, i32), "wild")
        dropped = (key0 < reach.full_first) | (key0 + shape.block_kv > reach.full_end)
        if self.classes is not None:
            dropped = dropped | b.ne(self.classes.kind, ALL)
        if config.everywhere:
            dropped = b.eq(key0, key0)
        with b.if_(dropped):
            count = self._steps(b.min(shape.block_kv, self.scores.seq_kv - key0))
            found = self.engine.has_nonfinite(values, shape.vectors(config.value_dim), b.const(0, i64), count)
            flag.value = b.select(found, b.const(1, i32), b.const(0, i32))
        return b.ne(flag.value, 0)

    def _steps(self, keys: Value) -> Value:
        """Steps of a product over ``keys`` keys; the last may be partly used."""
        step = self.config.step
        return self.engine.index(keys if step == 1 else (keys + (step - 1)) // step)

    # -- S = Q K^T -----------------------------------------------------------------------------------------------------

    def multiply_scores(self, row: Value, key0: Value, panels: Operand | None, panel: Value, reach: Reach) -> None:
        """Compute ``S = Q K^T`` of a few rows and a panel, and apply the modifiers."""
        engine, shape = self.engine, self.shape
        q = Operand(self.q, engine.index(row) * self.head_cols, self.head_cols, 1)
        key = key0 + panel
        c = engine.accumulators(shape.rows, shape.panel_vectors)
        if panels is None:
            assert self.k is not None
            row_by_row = self.unroll_rows if self._reads_row_by_row(self.k) else 0
            for j in range(shape.panel_vectors):
                first = key + j * shape.lanes
                dots = dot_products(engine, q, shape.rows, self.k, first, self.ahead, row_by_row)
                for variables, x in zip(c, dots, strict=True):
                    variables[j].value = x
        else:
            steps = self.head_steps
            at = Operand(panels.pointer, panels.base + engine.index(panel) * steps, 0, shape.panel)
            engine.multiply(c, q, at, 0, steps, unroll=4)
        self.finish_scores(c, row, key0, panel, reach)

    def _reads_row_by_row(self, k: Matrix) -> bool:
        """Whether a few rows of Q are multiplied with K row by row: its rows are long, and Q stays in registers."""
        vectors = self.shape.rows * self.head_cols // self.shape.lanes
        fits = 2 * vectors <= self.shape.unit.registers
        return fits and k.cols * k.elem.bytes >= self.config.long_row

    def finish_scores(self, c: list[list[Var]], row: Value, key0: Value, panel: Value, reach: Reach) -> None:
        """Apply the modifiers to the products of a few rows and a panel, and store S."""
        b, config, engine, shape, key = self.b, self.config, self.engine, self.shape, key0 + panel
        self.scale_scores(c, panel)
        edge = (key < reach.full_first) | (key + shape.panel > reach.full_end)
        queries = [self.task.query(b.min(row + r, self.count - 1)) for r in range(shape.rows)]
        kinds = {"mask": config.mask_columns, "bias": config.bias_columns}
        modify(self.scores, engine, c, queries, key, edge, kinds)
        self._store_scores(row, panel, lambda r, j: c[r][j].value)

    def _store_scores(self, row: Value, panel: Value, score: Callable[[int, int], Value]) -> None:
        """Store S of a few rows and a panel; ``score`` gives a vector by row and number."""
        shape = self.shape
        first = self._score_row(row) * shape.block_kv + self.engine.index(panel)
        for r in range(shape.rows):
            for j in range(shape.panel_vectors):
                self.b.store(self.s, first + (r * shape.block_kv + j * shape.lanes), score(r, j))

    def _score_row(self, row: Value) -> Value:
        """Row of S, P and alpha that belongs to a row of the task."""
        return self.engine.index(row) if self.all_rows else self.b.const(0, i64)

    def scale_scores(self, c: list[list[Var]], panel: Value) -> None:
        """Multiply the products with a panel by the scale, if Q was not."""
        if not self.q_pairs:
            return
        scale = self.b.splat(self.p.number("scale", self.config.work), self.shape.lanes)
        for variable in (variable for variables in c for variable in variables):
            variable.value = variable.value * scale

    # -- softmax -------------------------------------------------------------------------------------------------------

    def softmax(self, row: Value, first: Value, last: Value) -> None:
        """Replace S by ``P = exp(S - m)``; ``l = l * alpha + sum P``. O is still to be multiplied by alpha."""
        b, engine, shape = self.b, self.engine, self.shape
        keys = engine.index(first), engine.index(last)
        count = math.gcd(shape.rows, self.config.softmax_rows)
        with b.loop(b.const(0, i64), shape.rows, count, name="r") as r:
            scores = [(self._score_row(row) + r + i) * shape.block_kv for i in range(count)]
            maxima = self._follow_maximum(row, r, scores, keys)
            self._weigh(row, r, scores, maxima, keys)

    def _follow_maximum(self, row: Value, r: Value, scores: list[Value], keys: tuple[Value, Value]) -> list[Value]:
        """Update m and alpha of the rows from ``row + r`` on, whose scores begin at ``scores``; returns m."""
        b, engine, shape = self.b, self.engine, self.shape
        offsets = range(0, shape.panel, shape.lanes)
        highest = [[b.var(engine.const(NEG_INF)) for _ in offsets] for _ in scores]
        with b.loop(*keys, shape.panel, name="panel") as panel:
            for start, variables in zip(scores, highest, strict=True):
                for j, variable in zip(offsets, variables, strict=True):
                    variable.value = b.max(variable.value, b.load(self.s, start + panel + j, shape.lanes))
        tops = [functools.reduce(b.max, [x.value for x in variables]) for variables in highest]
        maxima = []
        for i, top in enumerate(tops):
            at = engine.index(row) + r + i
            m_old = b.load(self.m, at)
            m = self.form.larger(m_old, engine.reduce(self.form.kind, top))
            b.store(self.m, at, m)
            b.store(self.alpha, self._score_row(row) + r + i, self.form.factor(m_old, m))
            maxima.append(m)
        return maxima

    def _weigh(self, row: Value, r: Value, scores: list[Value], maxima: list[Value], keys: tuple[Value, Value]) -> None:
        """Store P of the rows from ``row + r`` on, whose scores begin at ``scores``, and add their sums to l."""
        b, engine, shape = self.b, self.engine, self.shape
        offsets = range(0, shape.panel, shape.lanes)
        sums = [[b.var(engine.const(0.0)) for _ in offsets] for _ in scores]
        with b.loop(*keys, shape.panel, name="panel") as panel:
            for i, (start, m, variables) in enumerate(zip(scores, maxima, sums, strict=True)):
                for j, variable in zip(offsets, variables, strict=True):
                    place = start + panel + j
                    p = self.form.weight(b.load(self.s, place, shape.lanes), m)
                    variable.value = variable.value + p
                    p = self.scale_weights(p, r + i, panel + j)
                    if self.config.pairs:
                        b.store(self.weights, place >> 1, engine.pairs(p))
                    else:
                        b.store(self.weights, place, p)
        for i, variables in enumerate(sums):
            total = engine.reduce("add", functools.reduce(operator.add, [x.value for x in variables]))
            at = engine.index(row) + r + i
            b.store(self.l, at, b.fma(b.load(self.l, at), b.load(self.alpha, self._score_row(row) + r + i), total))

    def scale_weights(self, p: Value, row: Value, key: Value) -> Value:
        """What the product with V uses in place of a vector of P, which is summed before: dropout applies here."""
        return p if self.dropout is None else p * self.dropout.load(row, key)

    # -- O = O * alpha + P V -------------------------------------------------------------------------------------------

    def multiply_values(
        self, row: Value, values: Operand, low: Value, high: Value, nonfinite: Value | None, rescale: bool = True
    ) -> None:
        """Compute ``O = O * alpha + P V`` of a few rows and keys ``low .. high - 1``, without alpha if not ``rescale``,
        in pieces that stay in registers."""
        b, engine, shape = self.b, self.engine, self.shape
        rows, pieces = engine.pieces(shape.unit, shape.rows, self.config.value_dim, self.config.pairs)
        step = self.config.step
        begin, end = engine.index(low if step == 1 else low // step), self._steps(high)
        with b.loop(b.const(0, i64), shape.rows, rows, name="r") as r:
            for col, widths in engine.each_piece(pieces):
                at = (engine.index(row) + r) * self.padded + col
                c = []
                for i in range(rows):
                    places = [at + (i * self.padded + j * shape.lanes) for j in range(len(widths))]
                    olds = [b.load(self.o, place, width) for place, width in zip(places, widths, strict=True)]
                    if rescale:
                        alpha = b.load(self.alpha, self._score_row(row) + r + i)
                        olds = [old * alpha for old in olds]
                    c.append([b.var(old) for old in olds])
                p_start = (self._score_row(row) + r) * (shape.block_kv // step)
                p = Operand(self.weights, p_start, shape.block_kv // step, 1)
                v = replace(values, base=values.base + col)
                engine.multiply_guarded(c, p, v, begin, end, nonfinite)
                for i, variables in enumerate(c):
                    for j, variable in enumerate(variables):
                        b.store(self.o, at + (i * self.padded + j * shape.lanes), variable.value)

    def rescale_outputs(self) -> None:
        """Compute ``O = O * alpha`` for all rows."""
        b, engine = self.b, self.engine
        with b.loop(b.const(0, i32), self.count, name="row") as row:
            alpha = b.load(self.alpha, engine.index(row))
            for col, _ in engine.columns(self.config.value_dim):
                at = engine.index(row) * self.padded + col
                b.store(self.o, at, b.load(self.o, at, engine.lanes) * alpha)

    # -- results -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Store the rows' results, or their partial results if keys are split."""
        with self.b.loop(self.b.const(0, i32), self.count, name="row") as row:
            if self.config.split:
                self._store_partial(row)
            else:
                self._store_result(row)

    def _store_partial(self, row: Value) -> None:
        b, config, engine, task = self.b, self.config, self.engine, self.task
        layout = PartialLayout(config.value_dim, engine.lanes)
        partial = self.p.buffer("partial", config.work, "readwrite")  # decoding combines them in the same launch
        number = engine.index(task.number) * engine.index(task.partial_rows) + engine.index(row)
        to = number * layout.size
        for col, _ in engine.columns(config.value_dim):
            x = b.load(self.o, engine.index(row) * self.padded + col, engine.lanes)
            b.store(partial, to + col, x, align=1)
        b.store(partial, to + layout.maximum, b.load(self.m, row))
        b.store(partial, to + layout.sum, b.load(self.l, row))

    def _store_result(self, row: Value) -> None:
        b, engine = self.b, self.engine
        columns = [
            (col, width, b.load(self.o, engine.index(row) * self.padded + col, engine.lanes))
            for col, width in engine.columns(self.config.value_dim)
        ]
        self.store_row(row, columns, b.load(self.m, row), b.load(self.l, row))

    def store_row(self, row: Value, columns: Columns, m: Value, l: Value) -> None:
        """Store O / l and the log-sum-exp of a row of this task."""
        b, config, engine, batch, scores = self.b, self.config, self.engine, self.task.batch, self.scores
        head, at = self.task.query(row)
        first = scores.extent.first_q
        o = self.p.result("o", batch, head, scores.seq_q, config.value_dim, config.unit[3], first=first)
        lse = store_row(engine, o, at, columns, m, l)
        if config.lse:
            base = scores.extent.row_base(self.p, batch * self.p.number("heads_q") + head, head)
            b.store(self.p.buffer("lse", config.work, "write"), base + engine.index(at), lse)
