"""P and dS of the CPU's backward task."""

from __future__ import annotations

from functools import cached_property

from aule.ir import Value, Var
from aule.ir.types import Vector, i64
from aule.ops.attention.cpu.backward_task import BackwardTask, RowBlock
from aule.ops.attention.cpu.scores import modify
from aule.ops.scores.band import Reach
from aule.tile.common.math import LOG2E
from aule.tile.vector.engine import Operand


class Panel:
    """P and dS of a few rows with one panel of keys.

    ``P = exp(S - lse)`` and ``dS = P * (dO V^T - delta)`` are computed in ``p_panel`` and ``ds_panel``, which are the
    arrays that the gradients read unless these hold pairs.
    """

    def __init__(self, task: BackwardTask, rows: RowBlock, row: Value, key0: Value, panel: Value, reach: Reach) -> None:
        self.task, self.rows, self.row, self.key0, self.panel, self.reach = task, rows, row, key0, panel, reach
        self.b, self.p, self.config, self.scores = task.b, task.p, task.config, task.scores
        self.engine, self.shape = task.engine, task.shape
        self.row_index, self.panel_index = self.engine.index(row), self.engine.index(panel)
        self._sloped: set[tuple[int, int]] = set()

    @cached_property
    def _key(self) -> Value:
        return self.key0 + self.panel

    @cached_property
    def _query_rows(self) -> list[Value]:
        """Query rows of this panel; those past the last repeat it."""
        return [self.b.min(self.rows.row0 + self.row + r, self.scores.seq_q - 1) for r in range(self.shape.rows)]

    @cached_property
    def _starts(self) -> list[Value]:
        """Where each row of P and dS begins in ``p_panel`` and ``ds_panel``."""
        stride, rows = self.shape.block_kv, range(self.shape.rows)
        starts = [self.row_index * stride + (r * stride) + self.panel_index for r in rows]
        return [self.b.const(r * self.shape.panel, i64) for r in rows] if self.config.pairs else starts

    @cached_property
    def _row_base(self) -> Value:
        """Index of query row 0 in ``lse`` and ``delta``."""
        head_number = self.task.batch * self.task.heads + self.rows.head
        return self.scores.extent.row_base(self.p, head_number, self.rows.head)

    def run(self) -> None:
        config, task = self.config, self.task
        self._weights(self._products(task.q_rows, task.head_cols, task.k_panels, task.head_steps))
        if config.pairs and task.dropout is None:  # still in registers; dropout changes it below
            self._pair_by_rows(task.p_panel, task.p_scores)
        self._gradients(self._products(task.do_rows, task.value_cols, task.v_panels, task.value_steps))
        if config.pairs and task.dropout is not None:
            self._pair_by_rows(task.p_panel, task.p_scores)
        if config.pairs:
            self._pair_by_rows(task.ds_panel, task.ds)

    def _products(self, rows: Value, cols: int, panels: Value, steps: int) -> list[list[Var]]:
        """``Q K^T`` or ``dO V^T``."""
        engine, shape = self.engine, self.shape
        stride = cols // self.config.step
        left = Operand(rows, self.row_index * stride, stride, 1)
        right = Operand(panels, self.panel_index * steps, 0, shape.panel)
        c = engine.accumulators(shape.rows, shape.panel_vectors)
        engine.multiply(c, left, right, 0, steps, unroll=4)
        return c

    def _weights(self, c: list[list[Var]]) -> None:
        """Store ``P = exp(S - lse)``."""
        b, config, engine, shape = self.b, self.config, self.engine, self.shape
        if config.pairs:
            scale = b.splat(self.p.number("scale", config.work), shape.lanes)
            for variable in (variable for variables in c for variable in variables):
                variable.value = variable.value * scale
        key = self._key
        queries = [(self.rows.head, row) for row in self._query_rows]
        partial = (key < self.reach.full_first) | (key + shape.panel > self.reach.full_end)
        starts = self._starts
        kinds = {"mask": config.mask_columns, "bias": config.bias_columns}
        modify(self.scores, engine, c, queries, key, partial, kinds, self._store_slope)
        base, lse_all = self._row_base, self.p.buffer("lse", config.work)
        for row, start, variables in zip(self._query_rows, starts, c, strict=True):
            lse = b.load(lse_all, base + engine.index(row))
            # A row that keeps nothing has a log-sum-exp of -inf; its weights are 0, as with +inf.
            nothing = b.eq(lse, float("-inf"))
            lse = b.select(nothing, b.const(float("inf"), config.work), lse)
            for j, variable in enumerate(variables):
                b.store(self.task.p_panel, start + j * shape.lanes, b.exp2((variable.value - lse) * LOG2E))

    def _store_slope(self, row: int, vector: int, slope: Value) -> None:
        """Store a modifier's derivative where dS will be; those of several modifiers are multiplied."""
        b, to = self.b, self._starts[row] + vector * self.shape.lanes
        if not isinstance(slope.type, Vector):
            slope = b.splat(slope, self.shape.lanes)
        if (row, vector) in self._sloped:
            slope = slope * b.load(self.task.ds_panel, to, self.shape.lanes)
        self._sloped.add((row, vector))
        b.store(self.task.ds_panel, to, slope)

    def _gradients(self, c: list[list[Var]]) -> None:
        """Store ``dS = P * (dP - delta)``; with dropout, multiply dP and P by their factors first."""
        b, config, engine, lanes = self.b, self.config, self.engine, self.shape.lanes
        task, base, delta_all = self.task, self._row_base, self.p.buffer("delta", self.config.work)
        for r, (row, start, variables) in enumerate(zip(self._query_rows, self._starts, c, strict=True)):
            delta = b.load(delta_all, base + engine.index(row))
            for j, variable in enumerate(variables):
                to = start + j * lanes
                p = b.load(task.p_panel, to, lanes)
                dp = variable.value
                if task.dropout is not None:
                    factor = task.dropout.load(r, self.panel_index + j * lanes)
                    dp = dp * factor
                    b.store(task.p_panel, to, p * factor)
                ds = p * (dp - delta)
                if config.scores:
                    self._store_ds(row, self._key + j * lanes, self._zero_if_dropped(ds, p))
                if (r, j) in self._sloped:
                    ds = ds * b.load(task.ds_panel, to, lanes)
                ds = self._zero_if_dropped(ds, p)
                b.store(task.ds_panel, to, ds)
                if config.pairs:
                    by_keys = (self.panel_index >> 1) + (r * self.shape.block_kv + j * lanes) // 2
                    b.store(task.ds_rows, by_keys, engine.pairs(ds))

    def _zero_if_dropped(self, ds: Value, p: Value) -> Value:
        """dS, zero for dropped keys: their V, and through the softcap's derivative their K, may hold Inf or NaN."""
        if not self.config.may_drop:
            return ds
        return self.b.select(self.b.eq(p, 0.0), self.engine.const(0.0), ds)

    def _store_ds(self, row: Value, key: Value, ds: Value) -> None:
        """Store a vector of dS for keys that exist. Rows that repeat the last store the same again."""
        b, engine, seq_kv = self.b, self.engine, self.scores.seq_kv
        out = self.p.buffer("ds", self.config.work, "write")
        start = self.p.strided("ds", self.task.batch, self.rows.head)
        start = start + engine.index(row) * self.p.number("ds_row_stride", i64)
        with b.if_(key + engine.lanes <= seq_kv):
            b.store(out, start + engine.index(key), ds, align=1)
        with b.else_():
            for i, x in enumerate(b.unpack(ds)):
                with b.if_(key + i < seq_kv):
                    b.store(out, start + engine.index(key + i), x)

    def _pair_by_rows(self, source: Value, target: Value) -> None:
        """Round a panel to pairs of rows. Rows past the last do not count: Q and dO are zero there."""
        b, engine, shape = self.b, self.engine, self.shape
        base = (engine.index(self.row) >> 1) * shape.block_kv + engine.index(self.panel)
        for r in range(0, shape.rows, 2):
            for j in range(shape.panel_vectors):
                pair = [b.load(source, (r + i) * shape.panel + j * shape.lanes, shape.lanes) for i in range(2)]
                b.store(target, base + (r // 2 * shape.block_kv + j * shape.lanes), engine.pair_up(*pair))
