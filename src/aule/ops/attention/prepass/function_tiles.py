"""The kernel that runs a user's mask function before the main kernel, tile by tile, and stores how much of each tile it
keeps. Nothing else of the mask is ever stored."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import i32, i64
from aule.ops.attention.prepass.mask_kernels import ALL, NONE, SOME, rectangle
from aule.ops.scores.config import ScoreConfig
from aule.ops.scores.functions.emit import MASK_FUNCTION, Emitter
from aule.ops.scores.functions.program import ScoreFunction
from aule.ops.scores.modifiers import Site
from aule.ops.scores.parameters import Parameters
from aule.ops.shared.parameters import workgroup_number
from aule.target import Target
from aule.tile.common.matrix import divmod_const

THREADS = 128
"""As many as every device has."""
_TOGETHER = 4
"""Rows whose values are loaded together."""


@dataclass(frozen=True)
class FunctionTilesConfig:
    """The kernel that classifies the tiles of a mask function.

    Attributes
    ----------
    own, other : int
        Rows and columns of a tile.
    transposed : bool
        Rows of a tile are keys.
    """

    function: ScoreFunction
    own: int
    other: int
    transposed: bool
    index64: bool


def build_function_tiles(config: FunctionTilesConfig, target: Target) -> KernelIR:
    """Trace the kernel that classifies tiles, one workgroup to a tile."""
    b = Builder("attention_function_tiles", THREADS)
    p = Parameters(b, ScoreConfig(dtype="f16", head_dim=1, value_dim=1), i64 if config.index64 else i32)
    number = workgroup_number(b)
    with b.if_(number < p.number("looked_at")):
        _classify(b, p, config, number)
    return b.finish()


def _classify(b: Builder, p: Parameters, config: FunctionTilesConfig, number: Value) -> None:
    tiles, blocks, heads = p.number("map_tiles"), p.number("map_blocks"), p.number("map_heads")
    block, tile = (number // tiles) % blocks, number % tiles
    which = number // (tiles * blocks)
    batch, head = which // heads, which % heads
    query0, key0, queries, keys = rectangle(config, block, tile)
    # Places outside of the tile or past the end repeat the last row or key, which changes nothing.
    last_row = b.min(query0 + queries, p.number("seq_q")) - 1
    last_key = b.min(key0 + keys, p.number("seq_kv")) - 1
    thread, function = b.thread_id(), Emitter(p, config.function, MASK_FUNCTION, 1.0)
    none, one = b.const(0, i32), b.const(1, i32)
    kept, dropped = b.var(none, "kept"), b.var(none, "dropped")
    # Neighbouring threads have neighbouring keys, and each a few rows at a time, which share what depends on the key.
    across = min(1 << (keys - 1).bit_length(), THREADS)
    down, right = divmod_const(b, thread, across)
    step = THREADS // across
    for first in range(0, keys, across):
        column = b.min(key0 + first + right, last_key)
        with b.loop(0, queries, step * _TOGETHER, name="row") as above:
            for i in range(_TOGETHER):
                row = b.min(query0 + above + down + i * step, last_row)
                keeps = function.keeps(Site(batch, head, row, column, row))
                kept.value = kept.value | b.select(keeps, one, none)
                dropped.value = dropped.value | b.select(keeps, none, one)
    keeps, drops = b.workgroup_any(b.ne(kept.value, 0)), b.workgroup_any(b.ne(dropped.value, 0))
    with b.if_(b.eq(thread, 0)):
        found = b.select(keeps, b.select(drops, b.const(SOME, i32), b.const(ALL, i32)), b.const(NONE, i32))
        b.store(p.buffer("mask_tiles", i32, "write"), b.cast(number, p.index), found)
