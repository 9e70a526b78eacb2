"""The second kernel of a split sequence: adds up what workgroups made of its parts, weighted by their log-sum-exps."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, Scalar, f32, i32, i64
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.scores import Extent
from aule.ops.decode.config import ReduceConfig
from aule.target import Target
from aule.tile.math import LN2, LOG2E, LOWEST, NEG_INF, fold
from aule.tile.matrix import QUAD, Matrix

KERNEL_NAME = "decode_reduce"

_AT_ONCE = 4
"""Parts that a thread loads before it uses any."""


def build_reduce(config: ReduceConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the kernel: one workgroup for each query row."""
    b = Builder(name, config.threads)
    index: Scalar = i64 if config.index64 else i32
    p = Parameters(b, config, index)
    number = b.group_id(0) + b.group_id(1) * b.group_count(0)
    exists = number < p.number("blocks")
    tokens, heads = p.number("tokens"), p.number("heads_q")
    head_number = number // tokens
    token = number - head_number * tokens
    batch = b.min(head_number // heads, p.number("batches") - 1)
    head = head_number - head_number // heads * heads
    extent = Extent.of(p, batch)
    if config.packed:  # sequences of more rows than that have no parts
        exists = exists & (token < extent.seq_q) & (extent.seq_q <= tokens)
    row = _Row(number, batch, head, token, extent)
    with b.if_(exists):
        for first in range(0, config.value_dim, config.quads * QUAD):
            _reduce(b, config, p, row, first)
    return b.finish()


@dataclass(frozen=True)
class _Row:
    """A query row: its number among those with parts, and whose it is."""

    number: Value
    batch: Value
    head: Value
    token: Value
    extent: Extent


def _reduce(b: Builder, config: ReduceConfig, p: Parameters, row: _Row, first_column: int) -> None:
    """As many columns of a row as threads hold."""
    index = p.index
    thread = b.thread_id()
    slot, quad = thread // config.quads, thread % config.quads
    splits = p.number("splits")
    parts, part_lse = p.buffer("part", f32), p.buffer("part_lse", f32)
    first = b.cast(row.number, index) * b.cast(splits, index)
    column = quad * QUAD + first_column
    whole = Matrix(
        parts, first * config.value_dim, b.const(0, i32), config.value_dim, b.const(config.value_dim, index), None,
        config.value_dim % QUAD == 0,
    )  # fmt: skip
    base, total = b.var(b.const(LOWEST, f32), "m"), b.var(b.const(0.0, f32), "l")
    acc = [b.var(b.const(0.0, f32), "o") for _ in range(QUAD)]
    padded = -(-config.value_dim // QUAD) * QUAD
    with b.loop(slot, splits, config.slots * _AT_ONCE, name="split") as start:
        places = [start + i * config.slots for i in range(_AT_ONCE)]
        near = [b.min(place, splits - 1) for place in places]
        found = [b.load(part_lse, first + b.cast(place, index)) for place in near]
        values = [
            whole.load_quad(b, whole.base + b.cast(place, index) * whole.row_stride, column, padded) for place in near
        ]
        lse = [b.select(place < splits, x, b.const(NEG_INF, f32)) for place, x in zip(places, found, strict=True)]
        new = fold(b, "max", [base.value, *lse])
        old = b.exp2(base.value - new)
        weights = [b.exp2(x - new) for x in lse]
        base.value, total.value = new, b.fma(total.value, old, fold(b, "add", list(weights)))
        for c, variable in enumerate(acc):
            sum_ = variable.value * old
            for weight, quad_values in zip(weights, values, strict=True):
                # A part without keys was never written: whatever is there must not count.
                sum_ = b.select(b.eq(weight, 0.0), sum_, b.fma(weight, b.extract(quad_values, c), sum_))
            variable.value = sum_

    bases, totals, sums = base.value, total.value, [x.value for x in acc]
    if config.slots > 1:
        bases, totals, sums = _joined(b, config, slot, quad, bases, totals, sums)
    if config.sinks:
        sink = b.load(p.buffer("sinks", f32), p.strided("sinks", row.head)) * LOG2E
        new = b.max(bases, sink)
        old = b.exp2(bases - new)
        bases, totals, sums = new, b.fma(totals, old, b.exp2(sink - new)), [x * old for x in sums]
    nothing = b.eq(totals, 0.0)
    factor = b.select(nothing, b.const(0.0, f32), b.rcp(totals))
    o = Matrix(
        p.buffer("o", SCALARS[config.dtype], "write"),
        p.strided("o", b.const(0, i32) if config.packed else row.batch, row.head),
        b.const(0, i32),
        config.value_dim,
        p.number("o_row_stride", index),
        None if config.unit[3] else p.number("o_col_stride", index),
        config.aligned,
    )
    with b.if_(b.eq(slot, 0)):
        token = row.token if row.extent.first_q is None else row.extent.first_q + row.token
        o.store(b, token, column, [x * factor for x in sums], padded)
        if config.lse:
            with b.if_(b.eq(column, 0)):
                lse2 = b.select(nothing, b.const(NEG_INF, f32), bases + b.log2(totals))
                at = row.extent.row_base(p, row.batch * p.number("heads_q") + row.head, row.head)
                b.store(p.buffer("lse", f32, "write"), at + b.cast(row.token, index), lse2 * LN2)
    # See `aule.ops.attention.forward`: PoCL 3.1 needs a barrier behind the last condition.
    b.barrier()


def _joined(
    b: Builder, config: ReduceConfig, slot: Value, quad: Value, base: Value, total: Value, sums: list[Value]
) -> tuple[Value, Value, list[Value]]:
    """The sums of all slots; the same in each of them."""
    maxima, weights = (b.shared(name, f32, config.slots) for name in ("maxima", "weights"))
    memory = b.shared("sums", f32, config.slots * config.quads * QUAD)
    with b.if_(b.eq(quad, 0)):
        b.store(maxima, slot, base)
        b.store(weights, slot, total)
    b.store(memory, (slot * config.quads + quad) * QUAD, b.vector(sums))
    b.barrier()
    found = [b.load(maxima, i) for i in range(config.slots)]
    highest = fold(b, "max", list(found))
    all_sums, all_total = [b.const(0.0, f32)] * QUAD, b.const(0.0, f32)
    for i, x in enumerate(found):
        factor = b.exp2(x - highest)
        all_total = b.fma(factor, b.load(weights, i), all_total)
        part = b.unpack(b.load(memory, (quad + i * config.quads) * QUAD, QUAD))
        all_sums = [b.fma(factor, x, y) for x, y in zip(part, all_sums, strict=True)]
    return highest, all_total, all_sums
