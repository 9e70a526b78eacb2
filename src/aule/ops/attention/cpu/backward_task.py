"""A task of the CPU's backward kernel: its operands, its arrays, and its partial sum of dQ."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, Scalar, i32, i64
from aule.ops.attention.cpu.config import CpuBackwardConfig
from aule.ops.attention.cpu.scores import DropoutFactors
from aule.ops.scores.band import Scores
from aule.ops.scores.parameters import Parameters
from aule.ops.scores.rotated_operands import rotary_of, rotating
from aule.tile.common.matrix import Matrix
from aule.tile.vector.engine import Operand, Vectors
from aule.tile.vector.rope import MatrixRow, array_rows, rotate_row, rotate_rows


@dataclass(frozen=True)
class KeyBlock:
    """A block of keys.

    Attributes
    ----------
    key0, count : Value
        First key, and number of keys.
    rows : Operand
        K by rows, for ``dS K``.
    nonfinite : Value or None
        Whether K holds Inf or NaN that zeros of dS must hide; None if no key is ever dropped.
    """

    key0: Value
    count: Value
    rows: Operand
    nonfinite: Value | None


@dataclass(frozen=True)
class RowBlock:
    """A block of rows of a query head: its first row, and the number of rows."""

    head: Value
    row0: Value
    count: Value


class BackwardTask:
    """Some of the key blocks of a head of K and V, and all rows of the query heads that share it."""

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
        self.k = self.matrix("k", self.kv_head, self.scores.seq_kv, config.head_dim, config.unit[1])
        self.v = self.matrix("v", self.kv_head, self.scores.seq_kv, config.value_dim, config.unit[2])
        self.head_cols, self.value_cols = shape.padded(config.head_dim), shape.padded(config.value_dim)
        self._allocate()
        self.dropout: DropoutFactors | None = None
        dropout = self.scores.dropout()
        if dropout is not None:
            self.dropout = DropoutFactors(b, config, self.engine, dropout, number("keep_scale", work))
        self.zero = b.const(0, i64)
        if config.operands:
            self.dq_parts = self.p.buffer("dq_parts", work, "readwrite")

    def _allocate(self) -> None:
        b, config, shape, work = self.b, self.config, self.shape, self.config.work
        factor, step = config.factor, config.step
        self.head_steps, self.value_steps = -(-config.head_dim // step), -(-config.value_dim // step)
        self.k_panels = b.private("k_panels", factor, shape.block_kv * self.head_steps)
        self.v_panels = b.private("v_panels", factor, shape.block_kv * self.value_steps)
        self.dk = b.private("dk", work, shape.block_kv * self.head_cols)
        self.dv = b.private("dv", work, shape.block_kv * self.value_cols)
        # Q and dO as the gradients read them, and as the scores do.
        self.q = self.q_rows = b.private("q", factor, shape.block_q * self.head_cols // step)
        self.do = self.do_rows = b.private("do", factor, shape.block_q * self.value_cols // step)
        self.p_scores = b.private("p", factor, shape.block_q * shape.block_kv // step)
        self.ds = b.private("ds", factor, shape.block_q * shape.block_kv // step)
        # A few rows of P and dS while they are computed, and dS as dQ reads it.
        self.p_panel, self.ds_panel, self.ds_rows = self.p_scores, self.ds, self.ds
        if config.pairs:
            self.q_rows = b.private("q_rows", factor, shape.block_q * self.head_cols // step)
            self.do_rows = b.private("do_rows", factor, shape.block_q * self.value_cols // step)
            self.p_panel = b.private("p_panel", work, shape.rows * shape.panel)
            self.ds_panel = b.private("ds_panel", work, shape.rows * shape.panel)
            self.ds_rows = b.private("ds_rows", factor, shape.rows * shape.block_kv // step)

    def matrix(self, name: str, head: Value, rows: Value, cols: int, unit: bool) -> Matrix:
        found = self.p.matrix(name, self.batch, head, rows, cols, unit, first=self.scores.extent.first(name))
        return rotating(self.p, name, found, self.batch, self.scores.shift)

    def steps(self, count: Value) -> Value:
        """Steps of a product over ``count`` keys or rows; the last may be partly used."""
        step = self.config.step
        return self.engine.index(count if step == 1 else (count + (step - 1)) // step)

    # -- operands ------------------------------------------------------------------------------------------------------

    def load_keys(self, key0: Value, count: Value) -> KeyBlock:
        """Pack K and V of a block into panels, prepare K by rows, and set dK = dV = 0."""
        b, config, engine, shape = self.b, self.config, self.engine, self.shape
        k, first = self.k, key0
        if config.rope is not None:
            array = b.private("k_rotated", self._rotated_elem, shape.block_kv * self.head_cols)
            k, first = rotate_rows(engine, self.k, key0, count, array, self.head_cols), b.const(0, i32)
        with b.loop(b.const(0, i32), count, shape.panel, name="panel") as panel:
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
            copy = engine.copy_paired_rows if config.pairs else engine.copy_rows
            copy(k, first, count, scratch, self.zero, self.head_cols)
            rows = Operand(scratch, self.zero, 0, self.head_cols)
        nonfinite = None
        if config.may_drop:
            vectors = shape.vectors(config.head_dim)
            nonfinite = engine.has_nonfinite(rows, vectors, self.zero, self.steps(count))
        return KeyBlock(key0, count, rows, nonfinite)

    @property
    def _rotated_elem(self) -> Scalar:
        """Element type of rotated rows; pairs are made from the type of Q and K."""
        return SCALARS[self.config.dtype] if self.config.pairs else self.config.work

    def load_rows(self, rows: RowBlock) -> None:
        """Load Q' and dO of a block of rows, up to a full group of rows.

        Extra rows repeat the last; with pairs of rows they are zero.
        """
        config, engine, shape = self.config, self.engine, self.shape
        padded = (rows.count + (shape.rows - 1)) // shape.rows * shape.rows
        q = self.matrix("q", rows.head, self.scores.seq_q, config.head_dim, config.unit[0])
        do = self.matrix("do", rows.head, self.scores.seq_q, config.value_dim, config.unit[3])
        if config.pairs:
            first = rows.row0
            if config.rope is not None:
                array = self.b.private("q_rotated", self._rotated_elem, shape.block_q * self.head_cols)
                q = rotate_rows(engine, q, rows.row0, rows.count, array, self.head_cols)
                first = self.b.const(0, i32)
            for source, at, row_pairs, column_pairs, cols in (
                (q, first, self.q, self.q_rows, self.head_cols),
                (do, rows.row0, self.do, self.do_rows, self.value_cols),
            ):
                engine.copy_paired_rows(source, at, padded, row_pairs, self.zero, cols)
                engine.copy_paired_columns(source, at, padded, column_pairs, self.zero, cols // 2)
            return
        scale = self.p.number("scale", config.work)
        if config.rope is not None:
            rotate_rows(engine, q, rows.row0, padded, self.q, self.head_cols, scale)
        else:
            engine.copy_rows(q, rows.row0, padded, self.q, self.zero, self.head_cols, scale)
        engine.copy_rows(do, rows.row0, padded, self.do, self.zero, self.value_cols)

    # -- partial sums of dQ --------------------------------------------------------------------------------------------

    def dq_row(self, head: Value, row: Value) -> Value:
        """Index of a row of this task's partial sum of dQ."""
        engine, seq_q = self.engine, self.scores.seq_q
        first_q = self.scores.extent.first_q
        if first_q is not None:
            total = self.p.number("total_q", i64)
            number = engine.index(head * self.splits + self.split)
            return (number * total + engine.index(first_q + row)) * self.head_cols
        number = (self.batch * self.heads + head) * self.splits + self.split
        return (engine.index(number) * engine.index(seq_q) + engine.index(row)) * self.head_cols

    def clear_dq(self) -> None:
        b, engine = self.b, self.engine
        with b.loop(b.const(0, i32), self.group, name="member") as member:
            start = self.dq_row(self.kv_head * self.group + member, b.const(0, i32))
            length = engine.index(self.scores.seq_q) * self.head_cols
            with b.loop(self.zero, length, engine.lanes, name="i") as i:
                b.store(self.dq_parts, start + i, engine.const(0.0), align=1)

    def rotate_dq_back(self) -> None:
        """Rotate this task's finished partial sum of dQ back; rotation is linear, so the sums may be added later."""
        b, engine, scores, dim = self.b, self.engine, self.scores, self.config.head_dim
        rotary = rotary_of(self.p, "dq", self.batch, scores.shift)
        with b.loop(b.const(0, i32), self.group, name="member") as member:
            head = self.kv_head * self.group + member
            with b.loop(b.const(0, i32), scores.seq_q, name="row") as number:
                part = array_rows(engine, self.dq_parts, scores.seq_q, dim, self.head_cols)
                row = MatrixRow(part, self.dq_row(head, number))
                rotate_row(engine, rotary, number, row, row, back=True)
