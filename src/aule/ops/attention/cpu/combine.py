"""Puts together what the tasks that share a row's keys have left."""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, i32
from aule.ops.attention.config import ScoreConfig
from aule.ops.attention.cpu.config import CombineConfig
from aule.ops.attention.cpu.forward import store_row
from aule.ops.attention.parameters import Parameters
from aule.target import Target
from aule.tile.math import lowest
from aule.tile.vector import Vectors, work_type

KERNEL_NAME = "attention_combine"


def build_combine(config: CombineConfig, target: Target) -> KernelIR:
    """Trace the kernel: one task for each row of each query head. The parts come in the order of their keys, so that
    the result does not depend on who finished first."""
    b = Builder(KERNEL_NAME, workgroup=1)
    shape, work = config.shape, work_type(SCALARS[config.dtype])
    p = Parameters(b, ScoreConfig(dtype=config.dtype, head_dim=1, value_dim=config.value_dim))
    engine = Vectors(b, work, shape.lanes)
    heads, heads_kv, group = p.number("heads_q"), p.number("heads_kv"), p.number("group")
    seq_q, splits = p.number("seq_q"), p.number("splits")
    number, row = b.group_id(0) // seq_q, b.group_id(0) % seq_q
    batch, head = number // heads, number % heads
    rows = group * seq_q
    mine = head % group * seq_q + row
    task0 = (batch * heads_kv + head // group) * splits
    part = engine.index(task0) * engine.index(rows) + engine.index(mine)
    columns, m, l = combine_parts(p, engine, part, engine.index(rows), splits, config.value_dim)
    o = p.matrix("o", batch, head, seq_q, config.value_dim, config.unit, access="write")
    lse = store_row(b, engine, o, row, columns, m, l)
    if config.lse:
        to = engine.index(number) * engine.index(seq_q) + engine.index(row)
        b.store(p.buffer("lse", work, "write"), to, lse)
    return b.finish()


def combine_parts(
    p: Parameters, engine: Vectors, first: Value, step: Value, splits: Value, value_dim: int
) -> tuple[list[tuple[int, int, Value]], Value, Value]:
    """A row of O, m and l from its parts: numbers ``first``, ``first + step`` and so on among those in ``partial``.
    O comes as `store_row` takes it."""
    b, work, lanes = p.b, engine.work, engine.lanes
    partial = p.buffer("partial", work)
    columns = engine.columns(value_dim)
    padded = len(columns) * lanes
    m, l = b.var(b.const(lowest(work), work)), b.var(b.const(0.0, work))
    sums = [b.var(engine.const(0.0)) for _ in columns]
    with b.loop(b.const(0, i32), splits, name="split") as split:
        at = (first + engine.index(split) * step) * (padded + lanes)
        m_part, l_part = b.load(partial, at + padded), b.load(partial, at + (padded + 1))
        m_new = b.max(m.value, m_part)
        old, new = b.exp2(m.value - m_new), b.exp2(m_part - m_new)
        m.value = m_new
        l.value = l.value * old + l_part * new
        for (col, _), total in zip(columns, sums, strict=True):
            part = b.load(partial, at + col, lanes, align=1)
            total.value = total.value * old + part * new
    found = [(col, width, total.value) for (col, width), total in zip(columns, sums, strict=True)]
    return found, m.value, l.value
