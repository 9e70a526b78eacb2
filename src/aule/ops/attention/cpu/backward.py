"""The backward kernels for CPUs: dQ, dK and dV in one pass over the scores.

One task takes some of the key blocks of a head of K and V. For each it goes over the rows of Q that reach the block,
of all query heads that share it, and makes ``P = exp2(S - lse)``, ``dS = P * (dO V^T - delta)``, and from these

    dV += P^T dO        dK += dS^T Q        dQ += dS K

dK and dV of a block belong to one task. dQ does not: tasks leave it in parts, as many as there are tasks to a head,
which `build_gather` sums in a fixed order. So nothing depends on who comes first.

Scores are in the base-2 log domain. With Q' the scaled Q of the forward pass, ``dS^T Q'`` is dK up to a factor.

With pairs of bf16 a product takes two steps of its sum at a time, so its operands are paired along that dimension: Q,
K, V and dO along the head dimension for the scores, Q and dO by rows and K by keys for the gradients, P and dS by rows,
and dS once more by keys. Q is not scaled then (that would round it), but the scores are.
"""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import SCALARS, Scalar, i32, i64
from aule.ops.attention.config import ScoreConfig
from aule.ops.attention.cpu.config import CpuBackwardConfig, CpuDeltaConfig, GatherConfig
from aule.ops.attention.cpu.keep import Keep
from aule.ops.attention.cpu.modify import modify
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.rotating import rotary_of, rotating
from aule.ops.attention.scores import Reach, Scores
from aule.target import Target
from aule.tile.math import LOG2E
from aule.tile.matrix import Matrix
from aule.tile.rotated_vector import rotated_rows, rows_in, turn_row
from aule.tile.vector import Operand, Vectors, work_type


def build_backward(config: CpuBackwardConfig, target: Target) -> KernelIR:
    """Trace the kernel of the gradients."""
    b = Builder("flash_attention_backward_cpu", workgroup=1)
    _Backward(b, config).run()
    return b.finish()


class _Backward:
    def __init__(self, b: Builder, config: CpuBackwardConfig) -> None:
        self.b, self.config, self.shape = b, config, config.shape
        shape, work = config.shape, config.work
        self.engine = Vectors(b, work, shape.lanes)
        self.p = Parameters(b, config)
        number = self.p.number
        self.heads, self.heads_kv, self.group = number("heads_q"), number("heads_kv"), number("group")
        self.splits = number("splits")
        task = b.group_id(0)
        self.kv_number, self.split = task // self.splits, task % self.splits
        self.batch, self.kv_head = self.kv_number // self.heads_kv, self.kv_number % self.heads_kv
        self.scores = Scores(self.p, self.batch)
        self.k = self._matrix("k", self.kv_head, self.scores.seq_kv, config.head_dim, config.unit[1])
        self.v = self._matrix("v", self.kv_head, self.scores.seq_kv, config.value_dim, config.unit[2])
        self.head_cols, self.value_cols = shape.padded(config.head_dim), shape.padded(config.value_dim)
        factor, step = config.factor, config.step
        self.head_steps, self.value_steps = -(-config.head_dim // step), -(-config.value_dim // step)
        self.k_panels = b.private("k_panels", factor, shape.block_kv * self.head_steps)
        self.v_panels = b.private("v_panels", factor, shape.block_kv * self.value_steps)
        self.dk = b.private("dk", work, shape.block_kv * self.head_cols)
        self.dv = b.private("dv", work, shape.block_kv * self.value_cols)
        # Rows as the scores read them, and as the gradients do.
        self.q = self.q_rows = b.private("q", factor, shape.block_q * self.head_cols // step)
        self.do = self.do_rows = b.private("do", factor, shape.block_q * self.value_cols // step)
        self.p_scores = b.private("p", factor, shape.block_q * shape.block_kv // step)
        self.ds = b.private("ds", factor, shape.block_q * shape.block_kv // step)
        # A few rows of P and dS as they are made, and dS as dQ reads it.
        self.p_panel, self.ds_panel, self.ds_rows = self.p_scores, self.ds, self.ds
        if config.pairs:
            self.q_rows = b.private("q_rows", factor, shape.block_q * self.head_cols // step)
            self.do_rows = b.private("do_rows", factor, shape.block_q * self.value_cols // step)
            self.p_panel = b.private("p_panel", work, shape.rows * shape.panel)
            self.ds_panel = b.private("ds_panel", work, shape.rows * shape.panel)
            self.ds_rows = b.private("ds_rows", factor, shape.rows * shape.block_kv // step)
        self.keep: Keep | None = None
        dropout = self.scores.dropout()
        if dropout is not None:
            self.keep = Keep(b, config, self.engine, dropout, number("keep_scale", work))
        self.zero = b.const(0, i64)
        self.parts = self.p.buffer("dq_parts", work, "readwrite")

    def _matrix(self, name: str, head: Value, rows: Value, cols: int, unit: bool) -> Matrix:
        found = self.p.matrix(name, self.batch, head, rows, cols, unit, first=self.scores.extent.first(name))
        return rotating(self.p, name, found, self.batch, self.scores.shift)

    # -- the algorithm -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        b, shape = self.b, self.shape
        self._clear_parts()
        # Every so-manieth block, not a range: with a causal mask the first blocks have the most rows.
        blocks = self.p.number("blocks_kv")
        if self.config.packed:
            blocks = (self.scores.seq_kv + (shape.block_kv - 1)) // shape.block_kv
        with b.loop(self.split, blocks, self.splits, name="block") as block:
            key0 = block * shape.block_kv
            keys = b.min(shape.block_kv, self.scores.seq_kv - key0)
            k_rows, wild = self._bring(key0, keys)
            first, end = self.scores.rows_reaching(key0, key0 + keys)
            with b.loop(b.const(0, i32), self.group, name="member") as member:
                head = self.kv_head * self.group + member
                begin, stop = first // shape.block_q, (end + (shape.block_q - 1)) // shape.block_q
                with b.loop(begin, stop, name="rows") as rows:
                    row0 = rows * shape.block_q
                    count = b.min(shape.block_q, self.scores.seq_q - row0)
                    self._bring_rows(head, row0, count)
                    self._score_gradients(head, row0, count, key0, k_rows, wild)
                    self._key_gradients(row0, count, key0, keys)
            self._store_keys(key0, keys)
        if self.config.rope is not None:
            self._turn_parts()

    def _part(self, head: Value, row: Value) -> Value:
        """Where a row of this task's part of dQ begins."""
        engine, seq_q = self.engine, self.scores.seq_q
        first_q = self.scores.extent.first_q
        if first_q is not None:
            total = self.p.number("total_q", i64)
            number = engine.index(head * self.splits + self.split)
            return (number * total + engine.index(first_q + row)) * self.head_cols
        number = (self.batch * self.heads + head) * self.splits + self.split
        return (engine.index(number) * engine.index(seq_q) + engine.index(row)) * self.head_cols

    def _turn_parts(self) -> None:
        """This task's part of dQ, all of which it has by now, rotated back; its sum with the others' is linear."""
        b, engine, scores, dim = self.b, self.engine, self.scores, self.config.head_dim
        rotary = rotary_of(self.p, "dq", self.batch, scores.shift)
        with b.loop(b.const(0, i32), self.group, name="member") as member:
            head = self.kv_head * self.group + member
            with b.loop(b.const(0, i32), scores.seq_q, name="row") as row:
                part, start = rows_in(engine, self.parts, scores.seq_q, dim, self.head_cols), self._part(head, row)
                turn_row(engine, rotary, row, part, start, part, start, back=True)

    def _clear_parts(self) -> None:
        b, engine = self.b, self.engine
        with b.loop(b.const(0, i32), self.group, name="member") as member:
            start = self._part(self.kv_head * self.group + member, b.const(0, i32))
            length = engine.index(self.scores.seq_q) * self.head_cols
            with b.loop(self.zero, length, engine.lanes, name="i") as i:
                b.store(self.parts, start + i, engine.const(0.0), align=1)

    def _bring(self, key0: Value, keys: Value) -> tuple[Operand, Value | None]:
        """K and V of a block in panels, dK = dV = 0; K as rows, and whether a dropped key's rows hold Inf or NaN."""
        b, config, engine, shape = self.b, self.config, self.engine, self.shape
        k, first = self.k, key0
        if config.rope is not None:
            array = b.private("k_rotated", self._kept, shape.block_kv * self.head_cols)
            k, first = rotated_rows(engine, self.k, key0, keys, array, self.head_cols), b.const(0, i32)
        with b.loop(b.const(0, i32), keys, shape.panel, name="panel") as panel:
            at = engine.index(panel)
            engine.pack_panel(k, first + panel, shape.panel, self.k_panels, at * self.head_steps)
            engine.pack_panel(self.v, key0 + panel, shape.panel, self.v_panels, at * self.value_steps)
        for array, cols in ((self.dk, self.head_cols), (self.dv, self.value_cols)):
            with b.loop(self.zero, shape.block_kv * cols, engine.lanes, name="i") as i:
                b.store(array, i, engine.const(0.0))
        if config.direct_keys:
            start = self.k.base + engine.index(key0) * self.k.row_stride
            rows = Operand(self.k.buffer, start, 0, self.k.row_stride)
        elif config.rope is not None and not config.pairs:
            rows = Operand(k.buffer, self.zero, 0, self.head_cols)
        else:
            scratch = b.private("k_rows", config.factor, shape.block_kv // config.step * self.head_cols)
            bring = engine.pair_rows if config.pairs else engine.copy_rows
            bring(k, first, keys, scratch, self.zero, self.head_cols)
            rows = Operand(scratch, self.zero, 0, self.head_cols)
        if not (config.everywhere or config.left or config.right):
            return rows, None
        return rows, engine.has_wild(rows, shape.vectors(config.head_dim), self.zero, self._steps(keys))

    @property
    def _kept(self) -> Scalar:
        """What rotated rows are kept in: pairs are made of the type of Q and K."""
        return SCALARS[self.config.dtype] if self.config.pairs else self.config.work

    def _steps(self, count: Value) -> Value:
        """So many keys or rows as steps of a product, the last perhaps not whole."""
        step = self.config.step
        return self.engine.index(count if step == 1 else (count + (step - 1)) // step)

    def _bring_rows(self, head: Value, row0: Value, count: Value) -> None:
        """Q', scaled, and dO of a block of rows; rows up to a whole group repeat the last, or, in pairs of rows, are
        zero."""
        config, engine, shape = self.config, self.engine, self.shape
        padded = (count + (shape.rows - 1)) // shape.rows * shape.rows
        q = self._matrix("q", head, self.scores.seq_q, config.head_dim, config.unit[0])
        do = self._matrix("do", head, self.scores.seq_q, config.value_dim, config.unit[3])
        if config.pairs:
            first = row0
            if config.rope is not None:
                array = self.b.private("q_rotated", self._kept, shape.block_q * self.head_cols)
                q, first = rotated_rows(engine, q, row0, count, array, self.head_cols), self.b.const(0, i32)
            for source, at, pairs, rows, cols in (
                (q, first, self.q, self.q_rows, self.head_cols),
                (do, row0, self.do, self.do_rows, self.value_cols),
            ):
                engine.pair_rows(source, at, padded, pairs, self.zero, cols)
                engine.copy_row_pairs(source, at, padded, rows, self.zero, cols // 2)
            return
        scale = self.p.number("scale", config.work)
        if config.rope is not None:
            rotated_rows(engine, q, row0, padded, self.q, self.head_cols, scale)
        else:
            engine.copy_rows(q, row0, padded, self.q, self.zero, self.head_cols, scale)
        engine.copy_rows(do, row0, padded, self.do, self.zero, self.value_cols)

    def _score_gradients(
        self, head: Value, row0: Value, count: Value, key0: Value, k_rows: Operand, wild: Value | None
    ) -> None:
        """P and dS of a block of rows, a few rows at a time, and what dS brings to dQ."""
        b, shape, scores = self.b, self.shape, self.scores
        with b.loop(b.const(0, i32), count, shape.rows, name="group") as row:
            last = b.min(row0 + row + shape.rows, scores.seq_q) - 1
            reach = scores.reach(row0 + row + scores.shift, last + scores.shift)
            low = b.max(reach.first - key0, 0)
            high = b.min(reach.end - key0, shape.block_kv)
            first = b.min(low // shape.panel * shape.panel, shape.block_kv)
            end = b.max((high + (shape.panel - 1)) // shape.panel * shape.panel, first)
            self._clear_scores(row, b.const(0, i32), first)
            self._clear_scores(row, end, b.const(shape.block_kv, i32))
            if self.keep is not None:

                def place(r: Value, row: Value = row) -> tuple[Value, Value]:
                    return self.batch * self.heads + head, b.min(row0 + row + r, scores.seq_q - 1)

                self.keep.fill(place, key0, first, end)
            with b.loop(first, end, shape.panel, name="panel") as panel:
                self._panel(head, row0, row, key0, panel, reach)
            with b.if_(low < high):
                self._query_gradients(head, row0, row, count, k_rows, low, high, wild)

    def _clear_scores(self, row: Value, first: Value, end: Value) -> None:
        """P = dS = 0 where no key is kept: the products with whole blocks read it."""
        b, engine, shape, config = self.b, self.engine, self.shape, self.config
        zero = b.splat(b.const(0, config.factor), shape.lanes)
        with b.loop(engine.index(first), engine.index(end), shape.lanes, name="i") as i:
            for r in range(shape.rows // config.step):
                at = (engine.index(row) // config.step + r) * shape.block_kv + i
                b.store(self.p_scores, at, zero)
                b.store(self.ds, at, zero)

    def _panel(self, head: Value, row0: Value, row: Value, key0: Value, panel: Value, reach: Reach) -> None:
        """P and dS of a few rows with one panel."""
        b, config, engine, shape = self.b, self.config, self.engine, self.shape
        at, width = engine.index(row), engine.index(panel)
        head_stride, value_stride = self.head_cols // config.step, self.value_cols // config.step
        q = Operand(self.q_rows, at * head_stride, head_stride, 1)
        k = Operand(self.k_panels, width * self.head_steps, 0, shape.panel)
        c = engine.accumulators(shape.rows, shape.panel_vectors)
        engine.multiply(c, q, k, 0, self.head_steps, unroll=4)
        if config.pairs:
            scale = b.splat(self.p.number("scale", config.work), shape.lanes)
            for variable in (variable for variables in c for variable in variables):
                variable.value = variable.value * scale

        key = key0 + panel
        rows = [b.min(row0 + row + r, self.scores.seq_q - 1) for r in range(shape.rows)]
        partial = (key < reach.full_first) | (key + shape.panel > reach.full_end)
        places = [at * shape.block_kv + (r * shape.block_kv) + width for r in range(shape.rows)]
        if config.pairs:
            places = [b.const(r * shape.panel, i64) for r in range(shape.rows)]

        def keep_slope(c: list[list[Var]]) -> None:
            """The softcap's derivative, 1 - tanh^2, waits where dS will be."""
            inverse = b.rcp(self.p.number("softcap", config.work))
            for place, variables in zip(places, c, strict=True):
                for j, variable in enumerate(variables):
                    bend = variable.value * inverse
                    b.store(self.ds_panel, place + j * shape.lanes, 1.0 - bend * bend)

        kinds = {"mask": config.mask_columns, "bias": config.bias_columns}
        modify(self.scores, engine, c, [(head, at_row) for at_row in rows], key, partial, kinds, keep_slope)
        number = self.scores.extent.row_base(self.p, self.batch * self.heads + head, head)
        lse_all = self.p.buffer("lse", config.work)
        for at_row, place, variables in zip(rows, places, c, strict=True):
            lse = b.load(lse_all, number + engine.index(at_row))
            # A row that keeps nothing has a log-sum-exp of -inf; its weights are 0, as with +inf.
            nothing = b.eq(lse, float("-inf"))
            lse = b.select(nothing, b.const(float("inf"), config.work), lse * LOG2E)
            for j, variable in enumerate(variables):
                b.store(self.p_panel, place + j * shape.lanes, b.exp2(variable.value - lse))
        if config.pairs and self.keep is None:  # still in registers; dropout changes it below
            self._pair_by_rows(self.p_panel, self.p_scores, row, panel)

        do = Operand(self.do_rows, at * value_stride, value_stride, 1)
        v = Operand(self.v_panels, width * self.value_steps, 0, shape.panel)
        c = engine.accumulators(shape.rows, shape.panel_vectors)
        engine.multiply(c, do, v, 0, self.value_steps, unroll=4)
        delta_all = self.p.buffer("delta", config.work)
        guarded = config.everywhere or config.left or config.right
        for r, (at_row, place, variables) in enumerate(zip(rows, places, c, strict=True)):
            delta = b.load(delta_all, number + engine.index(at_row))
            for j, variable in enumerate(variables):
                to = place + j * shape.lanes
                p = b.load(self.p_panel, to, shape.lanes)
                dp = variable.value
                if self.keep is not None:
                    factor = self.keep.load(r, width + j * shape.lanes)
                    dp = dp * factor
                    b.store(self.p_panel, to, p * factor)
                ds = p * (dp - delta)

                def kept(ds: Value, p: Value = p) -> Value:
                    """V of a dropped key may hold Inf or NaN, and K, by which the softcap's derivative does too."""
                    return b.select(b.eq(p, 0.0), engine.const(0.0), ds) if guarded else ds

                if config.scores:
                    self._keep_scores(head, at_row, key + j * shape.lanes, kept(ds))
                if config.softcap:
                    ds = ds * b.load(self.ds_panel, to, shape.lanes)
                ds = kept(ds)
                b.store(self.ds_panel, to, ds)
                if config.pairs:
                    by_keys = (width >> 1) + (r * shape.block_kv + j * shape.lanes) // 2
                    b.store(self.ds_rows, by_keys, engine.pairs(ds))
        if config.pairs and self.keep is not None:
            self._pair_by_rows(self.p_panel, self.p_scores, row, panel)
        if config.pairs:
            self._pair_by_rows(self.ds_panel, self.ds, row, panel)

    def _pair_by_rows(self, source: Value, target: Value, row: Value, panel: Value) -> None:
        """Round a panel of a few rows, rows paired. What a row past the last has here does not count: in the pairs of
        Q and dO it is zero."""
        b, engine, shape = self.b, self.engine, self.shape
        base = (engine.index(row) >> 1) * shape.block_kv + engine.index(panel)
        for r in range(0, shape.rows, 2):
            for j in range(shape.panel_vectors):
                pair = [b.load(source, (r + i) * shape.panel + j * shape.lanes, shape.lanes) for i in range(2)]
                b.store(target, base + (r // 2 * shape.block_kv + j * shape.lanes), engine.pair_up(*pair))

    def _keep_scores(self, head: Value, row: Value, key: Value, ds: Value) -> None:
        """Store a vector of dS where its keys exist. Rows that repeat the last store the same again."""
        b, engine, seq_kv = self.b, self.engine, self.scores.seq_kv
        out = self.p.buffer("ds", self.config.work, "write")
        start = self.p.strided("ds", self.batch, head) + engine.index(row) * self.p.number("ds_row_stride", i64)
        with b.if_(key + engine.lanes <= seq_kv):
            b.store(out, start + engine.index(key), ds, align=1)
        with b.else_():
            for i, x in enumerate(b.unpack(ds)):
                with b.if_(key + i < seq_kv):
                    b.store(out, start + engine.index(key + i), x)

    def _query_gradients(
        self, head: Value, row0: Value, row: Value, count: Value, k_rows: Operand, low: Value, high: Value,
        wild: Value | None,
    ) -> None:  # fmt: skip
        """``dQ += dS K`` of a few rows. Rows past the last are left out as they are stored."""
        b, engine, shape = self.b, self.engine, self.shape
        config, step = self.config, self.config.step
        begin, end = engine.index(low if step == 1 else low // step), self._steps(high)
        rows, pieces = engine.pieces(shape.unit, shape.rows, config.head_dim, config.pairs)
        with b.loop(b.const(0, i32), shape.rows, rows, name="r") as r, b.if_(row + r < count):
            starts = [self._part(head, b.min(row0 + row + r + i, self.scores.seq_q - 1)) for i in range(rows)]
            stride = shape.block_kv // step
            ds = Operand(self.ds_rows, engine.index(r if config.pairs else row + r) * stride, stride, 1)
            for first, widths in pieces:
                c = engine.accumulators(rows, widths)
                k = Operand(k_rows.pointer, k_rows.base + first * shape.lanes, 0, k_rows.step)
                engine.multiply_guarding(c, ds, k, begin, end, wild)
                for i, (start, variables) in enumerate(zip(starts, c, strict=True)):
                    with b.if_(row + r + i < count):
                        for j, (variable, lanes) in enumerate(zip(variables, widths, strict=True)):
                            at = start + (first + j) * shape.lanes
                            old = b.load(self.parts, at, lanes, align=1)
                            b.store(self.parts, at, old + variable.value, align=1)

    def _key_gradients(self, row0: Value, count: Value, key0: Value, keys: Value) -> None:
        """``dV += P^T dO`` and ``dK += dS^T Q'``, of the keys in pieces that stay in registers."""
        b, config, engine, shape, scores = self.b, self.config, self.engine, self.shape, self.scores
        products = (
            (self.dv, self.p_scores, self.do, self.value_cols, config.value_dim),
            (self.dk, self.ds, self.q, self.head_cols, config.head_dim),
        )
        for target, left, right, cols, dim in products:
            piece, pieces = engine.pieces(shape.unit, shape.rows, dim, config.pairs)
            with b.loop(b.const(0, i32), keys, piece, name="key") as key:
                first, end = scores.rows_reaching(key0 + key, key0 + key + piece)
                begin = b.max(first - row0, 0)
                begin = engine.index(begin if config.step == 1 else begin // config.step)
                stop = self._steps(b.min(end - row0, count))
                at = engine.index(key)
                for start, widths in pieces:
                    span = range(len(widths))
                    places = [[at * cols + (i * cols + (start + j) * shape.lanes) for j in span] for i in range(piece)]
                    c = [[b.var(b.load(target, row[j], widths[j])) for j in span] for row in places]
                    a = Operand(left, at, 1, shape.block_kv)
                    x = Operand(right, b.const(start * shape.lanes, i64), 0, cols)
                    engine.multiply(c, a, x, begin, stop)
                    for row, variables in zip(places, c, strict=True):
                        for place, variable in zip(row, variables, strict=True):
                            b.store(target, place, variable.value)

    def _store_keys(self, key0: Value, keys: Value) -> None:
        """dK and dV of a block, in the type of K and V."""
        b, config, engine = self.b, self.config, self.engine
        factor = self.p.number("dk_factor", config.work)
        for name, array, cols, dim in (
            ("dk", self.dk, self.head_cols, config.head_dim),
            ("dv", self.dv, self.value_cols, config.value_dim),
        ):
            seq_kv, first = self.scores.seq_kv, self.scores.extent.first(name)
            out = self.p.matrix(name, self.batch, self.kv_head, seq_kv, dim, True, "write", first=first)
            with b.loop(b.const(0, i32), keys, name="key") as key:
                start = out.row_start(b, key0 + key)
                if name == "dk" and config.rope is not None:
                    rotary = rotary_of(self.p, name, self.batch, self.scores.shift)
                    found, at = rows_in(engine, array, keys, dim, cols), engine.index(key) * cols
                    turn_row(engine, rotary, key0 + key, found, at, out, start, factor, back=True)
                else:
                    for col, width in engine.columns(dim):
                        x = b.load(array, engine.index(key) * cols + col, engine.lanes)
                        engine.write(out, start, col, x * factor if name == "dk" else x, width)


def build_delta(config: CpuDeltaConfig, target: Target) -> KernelIR:
    """Trace the kernel: one task for each query head."""
    b = Builder("attention_delta", workgroup=1)
    work = work_type(SCALARS[config.dtype])
    p = Parameters(b, ScoreConfig(dtype=config.dtype, head_dim=1, value_dim=config.value_dim))
    engine = Vectors(b, work, config.shape.lanes)
    heads, seq_q = p.number("heads_q"), p.number("seq_q")
    task = b.group_id(0)
    batch, head = task // heads, task % heads
    o = p.matrix("o", batch, head, seq_q, config.value_dim, config.unit[0])
    do = p.matrix("do", batch, head, seq_q, config.value_dim, config.unit[1])
    delta = p.buffer("delta", work, "write")
    with b.loop(b.const(0, i32), seq_q, name="row") as row:
        total = engine.const(0.0)
        o_start, do_start = o.row_start(b, row), do.row_start(b, row)
        for col, width in engine.columns(config.value_dim):
            total = b.fma(engine.read(o, o_start, col, width), engine.read(do, do_start, col, width), total)
        to = engine.index(task) * engine.index(seq_q) + engine.index(row)
        b.store(delta, to, engine.reduce("add", total))
    return b.finish()


def build_gather(config: GatherConfig, target: Target) -> KernelIR:
    """Trace the kernel: one task for each query head."""
    b = Builder("attention_gather", workgroup=1)
    shape, work = config.shape, work_type(SCALARS[config.dtype])
    p = Parameters(b, ScoreConfig(dtype=config.dtype, head_dim=config.head_dim, value_dim=1))
    engine = Vectors(b, work, shape.lanes)
    heads, seq_q, splits = p.number("heads_q"), p.number("seq_q"), p.number("splits")
    task = b.group_id(0)
    dq = p.matrix("dq", task // heads, task % heads, seq_q, config.head_dim, True, "write")
    parts = p.buffer("dq_parts", work)
    factor = p.number("dq_factor", work)
    cols = shape.padded(config.head_dim)
    step = engine.index(seq_q) * cols
    with b.loop(b.const(0, i32), seq_q, name="row") as row:
        at = engine.index(task * splits) * step + engine.index(row) * cols
        start = dq.row_start(b, row)
        for col, width in engine.columns(config.head_dim):
            total = b.var(engine.const(0.0))
            with b.loop(b.const(0, i32), splits, name="split") as split:
                part = b.load(parts, at + engine.index(split) * step + col, shape.lanes, align=1)
                total.value = total.value + part
            engine.write(dq, start, col, total.value * factor, width)
    return b.finish()
