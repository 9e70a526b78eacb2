"""A product on the arithmetic units of any GPU, in fp32, by the simt engine's first product: both factors come in step
by step, one step ahead."""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import f32, i32, i64
from aule.ops.linear.config import ProductConfig
from aule.ops.linear.factors import Factor, Panel, Stored
from aule.ops.linear.results import column_bias, tile_of
from aule.ops.parameters import Parameters
from aule.target import Target
from aule.tile.matrix import QUAD
from aule.tile.simt import RegisterTile, Simt
from aule.tile.simt_shape import SimtShape, wave_size

_GROUP = 8
"""Tiles above each other that are worked on at the same time; not measured."""


def build_product_simt(config: ProductConfig, target: Target) -> KernelIR:
    """Trace the kernel."""
    shape = config.blocks
    assert isinstance(shape, SimtShape)
    b = Builder(config.name, shape.threads, wave_size(target, shape), shape.registers, arithmetic="quick")
    p = Parameters(b, i64 if config.index64 else i32)
    m, n, k = (p.number(name) for name in "mnk")
    row0, col0 = tile_of(b, m, n, shape.block_q, shape.block_kv, _GROUP)
    sizes = shape.shared_elements(shape.chunk_k, QUAD, subgroups=True)  # no row is reduced
    engine = Simt(b, target, shape, shape.chunk_k, QUAD, sizes)
    left = Factor(p, config.left, m, k, f32, config.whole)
    right = Factor(p, config.right, n, k, f32, config.whole)
    # In shared memory the summed dimension is outermost: runs along it are stored element by element.
    ways = []
    for factor, outer, first, chunk in (
        (left, shape.block_q, row0, engine.q_chunk),
        (right, shape.block_kv, col0, engine.k_chunk),
    ):
        rows, cols = (shape.chunk_k, outer) if factor.across else (outer, shape.chunk_k)
        ways.append((Panel(factor, engine.thread, shape.threads, rows, cols, QUAD, first), chunk))

    def fetch(start: Value) -> None:
        for panel, _ in ways:
            for i in range(panel.count):
                panel.fetch(i, start)

    def put(start: Value, stage: Value) -> None:
        for panel, chunk in ways:
            for i in range(panel.count):
                row, col = panel.place(i)
                value = panel.value(i, start)
                at = stage * engine.stage_size + chunk.start
                if panel.factor.across:
                    b.store(engine.stage, at + chunk.pitch.at(row) + col, value)
                    continue
                for e, x in enumerate(b.unpack(value)):
                    b.store(engine.stage, at + chunk.pitch.at(col) + e * chunk.pitch.stride + row, x)

    zero = b.const(0.0, f32)
    tile = RegisterTile(engine, shape.rows, shape.block_kv // shape.threads_x, shape.strip(shape.block_kv), zero)
    steps = (k + (shape.chunk_k - 1)) // shape.chunk_k
    fetch(b.const(0, i32))
    put(b.const(0, i32), b.const(0, i32))
    b.barrier()
    with b.loop(0, steps, name="step") as step:
        following = b.min(step + 1, steps - 1) * shape.chunk_k
        fetch(following)
        engine.multiply_scores(tile, (step & 1) * engine.stage_size, step)
        put(following, (step + 1) & 1)
        b.barrier()
    out = Stored(p, config.out, "write")
    values = tile.values()
    columns = [col0 + tile.col(c) for c in range(len(values[0]))]
    if config.bias is not None:
        added = column_bias(p, config.bias, columns, n, f32)
        values = [[x + y for x, y in zip(row, added, strict=True)] for row in values]
    run = tile.strip if config.out.aligned else 1
    for r, row in enumerate(values):
        at = row0 + tile.row(r)
        with b.if_(at < m):
            start = out.start(at)
            for c in range(0, len(row), run):
                with b.if_(columns[c] < n):
                    b.store(out.buffer, out.index(start, columns[c]), b.cast(b.vector(row[c : c + run]), out.elem))
    return b.finish()
