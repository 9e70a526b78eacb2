"""Combines partial results on the CPU. Tasks that share a row's keys leave them in the workspace ``partial``."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, i32
from aule.ops.scores.config import ScoreConfig
from aule.ops.scores.parameters import Parameters
from aule.ops.softmax.online_softmax import NaturalMaximum, finish
from aule.target import Target
from aule.tile.common.math import lowest
from aule.tile.common.matrix import Matrix
from aule.tile.vector.engine import Vectors, work_type

KERNEL_NAME = "attention_combine"

Columns = list[tuple[int, int, Value]]
"""A row of O as vectors, each with its first column and its lanes in use."""


@dataclass(frozen=True)
class CombineConfig:
    """The kernel that combines the partial results of each row.

    Attributes
    ----------
    lanes : int
        Elements of a vector.
    unit : bool
        Rows of o have stride 1.
    """

    dtype: str
    value_dim: int
    lanes: int
    lse: bool
    unit: bool


@dataclass(frozen=True)
class PartialLayout:
    """A row's partial result in memory: O, not yet divided by l and padded to full vectors, then a vector with m and l.

    Attributes
    ----------
    maximum, sum : int
        Offsets of m and l.
    size : int
        Elements of a partial result.
    """

    value_dim: int
    lanes: int

    @property
    def maximum(self) -> int:
        return -(-self.value_dim // self.lanes) * self.lanes

    @property
    def sum(self) -> int:
        return self.maximum + 1

    @property
    def size(self) -> int:
        return self.maximum + self.lanes


def build_combine(config: CombineConfig, target: Target) -> KernelIR:
    """Trace the kernel: one task for each row of each query head."""
    b = Builder(KERNEL_NAME, workgroup=1)
    work = work_type(SCALARS[config.dtype])
    p = Parameters(b, ScoreConfig(dtype=config.dtype, head_dim=1, value_dim=config.value_dim))
    engine = Vectors(b, work, config.lanes)
    heads, heads_kv, group = p.number("heads_q"), p.number("heads_kv"), p.number("group")
    seq_q, splits = p.number("seq_q"), p.number("splits")
    head_number, row = b.group_id(0) // seq_q, b.group_id(0) % seq_q
    batch, head = head_number // heads, head_number % heads
    task_rows = group * seq_q
    row_of_task = head % group * seq_q + row
    first_task = (batch * heads_kv + head // group) * splits
    first = engine.index(first_task) * engine.index(task_rows) + engine.index(row_of_task)
    columns, m, l = combine_partials(p, engine, first, engine.index(task_rows), splits, config.value_dim)
    o = p.result("o", batch, head, seq_q, config.value_dim, config.unit)
    lse = store_row(engine, o, row, columns, m, l)
    if config.lse:
        to = engine.index(head_number) * engine.index(seq_q) + engine.index(row)
        b.store(p.buffer("lse", work, "write"), to, lse)
    return b.finish()


def combine_partials(
    p: Parameters, engine: Vectors, first: Value, step: Value, splits: Value, value_dim: int
) -> tuple[Columns, Value, Value]:
    """Combine the partial results ``first``, ``first + step``, ... of a row into its O, m and l.

    They are read in the order of their keys, so that the result does not depend on the order in which tasks finish.
    """
    b, work, lanes, form = p.b, engine.work, engine.lanes, NaturalMaximum(p.b)
    partial = p.buffer("partial", work)
    columns, layout = engine.columns(value_dim), PartialLayout(value_dim, lanes)
    m, l = b.var(b.const(lowest(work), work)), b.var(b.const(0.0, work))
    sums = [b.var(engine.const(0.0)) for _ in columns]
    with b.loop(b.const(0, i32), splits, name="split") as split:
        at = (first + engine.index(split) * step) * layout.size
        m_part, l_part = b.load(partial, at + layout.maximum), b.load(partial, at + layout.sum)
        m_new = form.larger(m.value, m_part)
        old, new = form.factor(m.value, m_new), form.factor(m_part, m_new)
        m.value = m_new
        l.value = l.value * old + l_part * new
        for (col, _), total in zip(columns, sums, strict=True):
            part = b.load(partial, at + col, lanes, align=1)
            total.value = total.value * old + part * new
    found = [(col, width, total.value) for (col, width), total in zip(columns, sums, strict=True)]
    return found, m.value, l.value


def store_row(engine: Vectors, o: Matrix, row: Value, columns: Columns, m: Value, l: Value) -> Value:
    """Store a row of O / l and return its log-sum-exp."""
    end = finish(NaturalMaximum(engine.b), l)
    inverse, start = end.inverse, o.row_start(engine.b, row)
    for col, width, x in columns:
        engine.write(o, start, col, x * inverse, width)
    return end.log_sum_exp(m)
