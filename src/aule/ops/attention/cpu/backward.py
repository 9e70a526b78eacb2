"""The backward kernel for CPUs: dQ, dK and dV in one pass over the scores.

A task takes some of the key blocks of a head of K and V. For each it loops over the rows of Q that reach the block, of
all query heads that share it, computes ``P = exp(S - lse)`` and ``dS = P * (dO V^T - delta)``, and from these

    dV += P^T dO        dK += dS^T Q        dQ += dS K

dK and dV of a block belong to one task. dQ does not: every task of a head leaves a partial sum, and `build_dq_sum` adds
them up in a fixed order. So results do not depend on the order in which tasks run.

With Q' the scaled Q of the forward pass, ``dS^T Q'`` is dK up to a factor.

With pairs of bf16, a step of a product covers two elements of the summed dimension, so operands are paired along it:
Q, K, V and dO by columns for the scores; Q and dO by rows and K by keys for the gradients; P and dS by rows, and dS by
keys for dQ. Q is then not scaled, which would round it, but the scores are.
"""

from __future__ import annotations

from contextlib import nullcontext

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import i32, i64
from aule.ops.attention.cpu.backward_panel import Panel
from aule.ops.attention.cpu.backward_task import BackwardTask, KeyBlock, RowBlock
from aule.ops.attention.cpu.config import CpuBackwardConfig
from aule.ops.attention.cpu.function_tiles import BlockClasses
from aule.ops.attention.prepass.mask_kernels import NONE
from aule.ops.scores.band import Reach
from aule.ops.scores.rotated_operands import rotary_of
from aule.target import Target
from aule.tile.vector.engine import Operand
from aule.tile.vector.rope import MatrixRow, array_rows, rotate_row


def build_backward(config: CpuBackwardConfig, target: Target) -> KernelIR:
    """Trace the kernel of the gradients of q, k and v, or of the scores alone."""
    b = Builder("flash_attention_backward_cpu", workgroup=1)
    _Backward(b, config).run()
    return b.finish()


class _Backward:
    def __init__(self, b: Builder, config: CpuBackwardConfig) -> None:
        self.b, self.config, self.shape = b, config, config.shape
        self.task = BackwardTask(b, config)
        self.engine, self.scores = self.task.engine, self.task.scores
        self.classes: BlockClasses | None = None  # of the block that is traced, if tiles are classified

    # -- the algorithm -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trace the loops over key blocks, query heads and row blocks."""
        b, shape, scores = self.b, self.shape, self.scores
        if self.config.operands:
            self.task.clear_dq()
        # Every n-th block rather than a range: with a causal mask the first blocks have the most rows.
        blocks = self.task.p.number("blocks_kv")
        if self.config.packed:
            blocks = (scores.seq_kv + (shape.block_kv - 1)) // shape.block_kv
        with b.loop(self.task.split, blocks, self.task.splits, name="block") as number:
            key0 = number * shape.block_kv
            keys = self.task.load_keys(key0, b.min(shape.block_kv, scores.seq_kv - key0))
            first, end = scores.rows_reaching(key0, key0 + keys.count)
            with b.loop(b.const(0, i32), self.task.group, name="member") as member:
                head = self.task.kv_head * self.task.group + member
                begin, stop = first // shape.block_q, (end + (shape.block_q - 1)) // shape.block_q
                with b.loop(begin, stop, name="rows") as block:
                    row0 = block * shape.block_q
                    rows = RowBlock(head, row0, b.min(shape.block_q, scores.seq_q - row0))
                    if self.config.tiles_listed:
                        self.classes = BlockClasses(self.task.p, shape, self.task.batch, head, row0, key0)
                    with nullcontext() if self.classes is None else b.if_(b.ne(self.classes.kind, NONE)):
                        self.task.load_rows(rows)
                        self._score_gradients(rows, keys)
                        if self.config.operands:
                            self._key_gradients(rows, keys)
            if self.config.operands:
                self._store_keys(keys)
        if self.config.rope is not None and self.config.operands:
            self.task.rotate_dq_back()

    # -- P, dS and dQ --------------------------------------------------------------------------------------------------

    def _score_gradients(self, rows: RowBlock, keys: KeyBlock) -> None:
        """Compute P and dS of a block of rows, a few rows at a time, and add ``dS K`` to dQ."""
        b, shape, scores, row0, key0 = self.b, self.shape, self.scores, rows.row0, keys.key0
        with b.loop(b.const(0, i32), rows.count, shape.rows, name="group") as row:
            last = b.min(row0 + row + shape.rows, scores.seq_q) - 1
            reach = scores.reach(row0 + row + scores.shift, last + scores.shift)
            low = b.max(reach.first - key0, 0)
            high = b.min(reach.end - key0, shape.block_kv)
            if self.classes is not None:
                low, high = self.classes.narrowed(row, low, high)
            first = b.min(low // shape.panel * shape.panel, shape.block_kv)
            end = b.max((high + (shape.panel - 1)) // shape.panel * shape.panel, first)
            self._clear_scores(row, b.const(0, i32), first)
            self._clear_scores(row, end, b.const(shape.block_kv, i32))
            if self.task.dropout is not None:

                def query(r: Value, row: Value = row) -> tuple[Value, Value]:
                    return self.task.batch * self.task.heads + rows.head, b.min(row0 + row + r, scores.seq_q - 1)

                self.task.dropout.fill(query, key0, first, end)
            with b.loop(first, end, shape.panel, name="panel") as panel:
                self._panel(rows, row, key0, panel, reach)
            if self.config.operands:
                with b.if_(low < high):
                    self._query_gradients(rows, row, keys, low, high)

    def _panel(self, rows: RowBlock, row: Value, key0: Value, panel: Value, reach: Reach) -> None:
        """P and dS of a few rows and a panel: zeros if a mask function keeps none of them."""
        if self.classes is None:
            Panel(self.task, rows, row, key0, panel, reach).run()
            return
        self.classes.each(row, panel, reach, lambda found: Panel(self.task, rows, row, key0, panel, found).run())
        with self.b.else_():
            self._clear_scores(row, panel, panel + self.shape.panel)

    def _clear_scores(self, row: Value, first: Value, end: Value) -> None:
        """Set P = dS = 0 for panels without a kept key: the products with the full block read them."""
        b, engine, shape, config = self.b, self.engine, self.shape, self.config
        zero = b.splat(b.const(0, config.factor), shape.lanes)
        with b.loop(engine.index(first), engine.index(end), shape.lanes, name="i") as i:
            for r in range(shape.rows // config.step):
                at = (engine.index(row) // config.step + r) * shape.block_kv + i
                b.store(self.task.p_scores, at, zero)
                b.store(self.task.ds, at, zero)

    def _query_gradients(self, rows: RowBlock, row: Value, keys: KeyBlock, low: Value, high: Value) -> None:
        """Compute ``dQ += dS K`` of a few rows and keys ``low .. high - 1``. Rows past the last are not stored."""
        b, engine, shape, config = self.b, self.engine, self.shape, self.config
        step, count = config.step, rows.count
        begin, end = engine.index(low if step == 1 else low // step), self.task.steps(high)
        piece, pieces = engine.pieces(shape.unit, shape.rows, config.head_dim, config.pairs)
        with b.loop(b.const(0, i32), shape.rows, piece, name="r") as r, b.if_(row + r < count):
            query_rows = (b.min(rows.row0 + row + r + i, self.scores.seq_q - 1) for i in range(piece))
            starts = [self.task.dq_row(rows.head, query_row) for query_row in query_rows]
            stride = shape.block_kv // step
            ds = Operand(self.task.ds_rows, engine.index(r if config.pairs else row + r) * stride, stride, 1)
            for col, widths in engine.each_piece(pieces):
                c = engine.accumulators(piece, widths)
                k = Operand(keys.rows.pointer, keys.rows.base + col, 0, keys.rows.step)
                engine.multiply_guarded(c, ds, k, begin, end, keys.nonfinite)
                for i, (start, variables) in enumerate(zip(starts, c, strict=True)):
                    with b.if_(row + r + i < count):
                        for j, (variable, lanes) in enumerate(zip(variables, widths, strict=True)):
                            at = start + (col + j * shape.lanes)
                            old = b.load(self.task.dq_parts, at, lanes, align=1)
                            b.store(self.task.dq_parts, at, old + variable.value, align=1)

    # -- dK and dV -----------------------------------------------------------------------------------------------------

    def _key_gradients(self, rows: RowBlock, keys: KeyBlock) -> None:
        """Compute ``dV += P^T dO`` and ``dK += dS^T Q'``, in pieces of keys that stay in registers."""
        b, config, engine, shape, key0 = self.b, self.config, self.engine, self.shape, keys.key0
        products = (
            (self.task.dv, self.task.p_scores, self.task.do, self.task.value_cols, config.value_dim),
            (self.task.dk, self.task.ds, self.task.q, self.task.head_cols, config.head_dim),
        )
        for target, left, right, cols, dim in products:
            piece, pieces = engine.pieces(shape.unit, shape.rows, dim, config.pairs)
            with b.loop(b.const(0, i32), keys.count, piece, name="key") as key:
                first, end = self.scores.rows_reaching(key0 + key, key0 + key + piece)
                begin = b.max(first - rows.row0, 0)
                if self.classes is not None:
                    begin, end = self.classes.narrowed_rows(key, piece, begin, b.min(end - rows.row0, rows.count))
                begin = engine.index(begin if config.step == 1 else begin // config.step)
                stop = self.task.steps(b.min(end - rows.row0, rows.count) if self.classes is None else end)
                at = engine.index(key)
                for col, widths in engine.each_piece(pieces):
                    span = range(len(widths))
                    places = [[at * cols + (col + (i * cols + j * shape.lanes)) for j in span] for i in range(piece)]
                    c = [[b.var(b.load(target, row[j], widths[j])) for j in span] for row in places]
                    a = Operand(left, at, 1, shape.block_kv)
                    x = Operand(right, b.coerce(col, i64), 0, cols)
                    engine.multiply(c, a, x, begin, stop)
                    for row, variables in zip(places, c, strict=True):
                        for place, variable in zip(row, variables, strict=True):
                            b.store(target, place, variable.value)

    def _store_keys(self, keys: KeyBlock) -> None:
        """Store dK and dV of a block in the type of K and V."""
        b, config, engine, key0 = self.b, self.config, self.engine, keys.key0
        factor = self.task.p.number("dk_factor", config.work)
        for name, array, cols, dim in (
            ("dk", self.task.dk, self.task.head_cols, config.head_dim),
            ("dv", self.task.dv, self.task.value_cols, config.value_dim),
        ):
            seq_kv, first = self.scores.seq_kv, self.scores.extent.first(name)
            out = self.task.p.result(name, self.task.batch, self.task.kv_head, seq_kv, dim, True, first=first)
            with b.loop(b.const(0, i32), keys.count, name="key") as key:
                start = out.row_start(b, key0 + key)
                if name == "dk" and config.rope is not None:
                    rotary = rotary_of(self.task.p, name, self.task.batch, self.scores.shift)
                    matrix = array_rows(engine, array, keys.count, dim, cols)
                    row = MatrixRow(matrix, engine.index(key) * cols)
                    rotate_row(engine, rotary, key0 + key, row, MatrixRow(out, start), factor, back=True)
                else:
                    for col, width in engine.columns(dim):
                        x = b.load(array, engine.index(key) * cols + col, engine.lanes)
                        engine.write(out, start, col, x * factor if name == "dk" else x, width)
