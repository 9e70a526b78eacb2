"""A product on any GPU, in fp32, by the simt engine's score product. Both factors are loaded one step ahead."""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import f32, i32, i64
from aule.ops.linear.config import ProductConfig
from aule.ops.linear.factors import Factor, RegisterPanel, Stored
from aule.ops.linear.results import tile_of, with_bias
from aule.ops.shared.parameters import Parameters
from aule.target import Target
from aule.tile.common.matrix import QUAD
from aule.tile.simt.engine import Simt
from aule.tile.simt.shape import SimtShape, wave_size

_GROUP = 8
"""Tiles above each other that are computed at the same time; not measured."""


def build_product_simt(config: ProductConfig, shape: SimtShape, target: Target) -> KernelIR:
    """Trace the kernel."""
    b = Builder(config.name, shape.threads, wave_size(target, shape), shape.registers, arithmetic="quick")
    p = Parameters(b, i64 if config.index64 else i32)
    m, n, k = (p.number(name) for name in "mnk")
    row0, col0 = tile_of(b, m, n, shape.block_q, shape.block_kv, _GROUP)
    sizes = shape.shared_elements(shape.chunk_k, QUAD, subgroups=True)  # no row is reduced
    engine = Simt(b, target, shape, shape.chunk_k, QUAD, sizes)
    left = Factor(p, config.left, m, k, f32, config.full_steps)
    right = Factor(p, config.right, n, k, f32, config.full_steps)
    # In shared memory the summed dimension is outermost: runs along it are stored element by element.
    panels = []
    for factor, outer, first, chunk in (
        (left, shape.block_q, row0, engine.q_chunk),
        (right, shape.block_kv, col0, engine.k_chunk),
    ):
        rows, cols = (shape.chunk_k, outer) if factor.depth_major else (outer, shape.chunk_k)
        panels.append((RegisterPanel(factor, engine.thread, shape.threads, rows, cols, QUAD, first), chunk))

    def fetch(start: Value) -> None:
        for panel, _ in panels:
            panel.fetch_all(start)

    def put(start: Value, stage: Value) -> None:
        for panel, chunk in panels:
            for i in range(panel.count):
                row, col = panel.place(i)
                value = panel.value(i, start)
                at = stage * engine.stage_size + chunk.start
                if panel.factor.depth_major:
                    b.store(engine.stage, at + chunk.padding.at(row) + col, value)
                    continue
                for e, x in enumerate(b.unpack(value)):
                    b.store(engine.stage, at + chunk.padding.at(col) + e * chunk.padding.stride + row, x)

    tile = engine.score_tile(b.const(0.0, f32))
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
    values, columns = with_bias(p, config, tile, (row0, col0))
    run = tile.strip if config.out.aligned else 1
    for r, row in enumerate(values):
        at = row0 + tile.row(r)
        with b.if_(at < m):
            start = out.start(at)
            for c in range(0, len(row), run):
                with b.if_(columns[c] < n):
                    b.store(out.buffer, out.index(start, columns[c]), b.cast(b.vector(row[c : c + run]), out.elem))
    return b.finish()
