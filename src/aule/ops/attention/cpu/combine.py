"""Puts together what the tasks that share a row's keys have left."""

from __future__ import annotations

from aule.ir import Builder, KernelIR
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
    padded = shape.padded(config.value_dim)
    partial = p.buffer("partial", work)
    rows = group * seq_q
    mine = head % group * seq_q + row
    task0 = (batch * heads_kv + head // group) * splits

    m, l = b.var(b.const(lowest(work), work)), b.var(b.const(0.0, work))
    sums = [b.var(engine.const(0.0)) for _ in engine.columns(config.value_dim)]
    with b.loop(b.const(0, i32), splits, name="split") as split:
        at = (engine.index(task0 + split) * engine.index(rows) + engine.index(mine)) * (padded + shape.lanes)
        m_part, l_part = b.load(partial, at + padded), b.load(partial, at + (padded + 1))
        m_new = b.max(m.value, m_part)
        old, new = b.exp2(m.value - m_new), b.exp2(m_part - m_new)
        m.value = m_new
        l.value = l.value * old + l_part * new
        for (col, _), total in zip(engine.columns(config.value_dim), sums, strict=True):
            part = b.load(partial, at + col, shape.lanes, align=1)
            total.value = total.value * old + part * new
    o = p.matrix("o", batch, head, seq_q, config.value_dim, config.unit, access="write")
    columns = [
        (col, width, total.value) for (col, width), total in zip(engine.columns(config.value_dim), sums, strict=True)
    ]
    lse = store_row(b, engine, o, row, columns, m.value, l.value)
    if config.lse:
        to = engine.index(number) * engine.index(seq_q) + engine.index(row)
        b.store(p.buffer("lse", work, "write"), to, lse)
    return b.finish()
