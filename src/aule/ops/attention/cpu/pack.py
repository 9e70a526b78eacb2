"""The kernel that packs K into panels and V into padded rows, once for all tasks of a head."""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import element, i32, u32
from aule.ops.attention.cpu.config import PackConfig
from aule.ops.scores.band import Extent
from aule.ops.scores.parameters import Parameters
from aule.ops.scores.rotated_operands import rotating
from aule.target import Target
from aule.tile.common.matrix import Matrix
from aule.tile.vector.engine import Vectors
from aule.tile.vector.rope import rotate_rows


def build_pack(config: PackConfig, target: Target) -> KernelIR:
    """Trace the kernel: one task for each block of keys of each head of K and V."""
    b = Builder("attention_pack", workgroup=1)
    p, shape, step = Parameters(b, config), config.shape, config.step
    engine = Vectors(b, config.work, shape.lanes)
    heads = p.number("heads_kv")
    if not config.packed:
        seq = p.number("seq_kv")
    blocks = p.number("blocks_kv")
    task = b.group_id(0)
    number, block = task // blocks, task % blocks
    batch, head = number // heads, number % heads
    key0 = block * shape.block_kv
    begin = None
    if config.packed:
        extent = Extent.of(p, batch)
        seq, begin = extent.seq_kv, extent.first_kv
        first = packed_keys(p, engine, extent, shape.block_kv, batch, head) + engine.index(key0)
    else:
        first = engine.index(number) * engine.index(blocks * shape.block_kv) + engine.index(key0)
    count = b.min(shape.block_kv, seq - key0)
    k = p.matrix("k", batch, head, seq, config.head_dim, config.unit[0], first=begin)
    panels = p.buffer("panels", config.factor, "write")
    with b.loop(b.const(0, i32), count, shape.panel, name="panel") as panel:
        to = (first + engine.index(panel)) * -(-config.head_dim // step)
        if config.rope is None:
            engine.pack_panel(k, key0 + panel, shape.panel, panels, to)
        else:
            shift = extent.shift if config.packed else p.number("shift")
            pack_rotated(engine, rotating(p, "k", k, batch, shift), key0 + panel, shape.panel, panels, to)
    if config.values:
        padded = shape.padded(config.value_dim)
        v = p.matrix("v", batch, head, seq, config.value_dim, config.unit[1], first=begin)
        values, to = p.buffer("values", config.factor, "write"), first // step * padded
        copy = engine.copy_paired_rows if config.pairs else engine.copy_rows
        copy(v, key0, count, values, to, padded)
    return b.finish()


def pack_rotated(engine: Vectors, k: Matrix, first: Value, panel: int, target: Value, to: Value) -> None:
    """Rotate keys and pack them into a panel, like `Vectors.pack_panel`."""
    b = engine.b
    elem = k.elem if element(target.type) == u32 else engine.work
    rows = b.private("rotated", elem, panel * k.cols)
    rotated = rotate_rows(engine, k, first, b.const(panel, i32), rows, k.cols)
    engine.pack_panel(rotated, b.const(0, i32), panel, target, to)


def packed_keys(p: Parameters, engine: Vectors, extent: Extent, block_kv: int, batch: Value, head: Value) -> Value:
    """Number of a packed sequence's first key among the keys of the workspace.

    Every sequence has room for a full last block, so it begins one block later for each sequence before it.
    """
    assert extent.first_kv is not None
    each = p.number("total_kv", p.index) + engine.index(p.number("batches") * block_kv)
    return engine.index(head) * each + engine.index(extent.first_kv) + engine.index(batch * block_kv)
