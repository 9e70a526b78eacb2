"""Kernels over rows before and after the CPU's backward kernel: delta, and the sum of dQ's partial sums."""

from __future__ import annotations

from aule.ir import Builder, KernelIR
from aule.ir.types import SCALARS, i32
from aule.ops.attention.cpu.config import CpuDeltaConfig, DqSumConfig
from aule.ops.scores.config import ScoreConfig
from aule.ops.scores.parameters import Parameters
from aule.target import Target
from aule.tile.vector.engine import Vectors, work_type


def build_delta(config: CpuDeltaConfig, target: Target) -> KernelIR:
    """Trace the kernel of ``delta = sum of dO * O``: one task for each query head."""
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
        result = engine.reduce("add", total)
        if config.lse_gradient:
            result = result - b.load(p.buffer("dlse", work), to)
        b.store(delta, to, result)
    return b.finish()


def build_dq_sum(config: DqSumConfig, target: Target) -> KernelIR:
    """Trace the kernel that sums the partial sums of dQ in a fixed order: one task for each query head."""
    b = Builder("attention_gather", workgroup=1)
    shape, work = config.shape, work_type(SCALARS[config.dtype])
    p = Parameters(b, ScoreConfig(dtype=config.dtype, head_dim=config.head_dim, value_dim=1))
    engine = Vectors(b, work, shape.lanes)
    heads, seq_q, splits = p.number("heads_q"), p.number("seq_q"), p.number("splits")
    task = b.group_id(0)
    dq = p.result("dq", task // heads, task % heads, seq_q, config.head_dim, True)
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
