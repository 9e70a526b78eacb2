"""A user's mask function on the CPU: a kernel runs it before the main kernel and stores how much of each tile it keeps.

A tile is what the main kernel multiplies at a time, a few rows with a panel of keys. The classes of the tiles of one
block of rows and one block of keys lie together, after a class for the entire block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import Vector, f32, i32, i64, u8
from aule.ops.attention.cpu.config import CpuShape
from aule.ops.attention.prepass.mask_kernels import ALL, NONE, SOME
from aule.ops.attention.prepass.mask_prepass import function_varies, tile_maps
from aule.ops.attention.problem import AttentionProblem
from aule.ops.scores.band import Reach
from aule.ops.scores.config import ScoreConfig
from aule.ops.scores.functions.emit import MASK_FUNCTION, Emitter
from aule.ops.scores.functions.program import ScoreFunction
from aule.ops.scores.modifiers import Site
from aule.ops.scores.parameters import Parameters
from aule.ops.shared.plan import Step
from aule.target import Target
from aule.tile.vector.engine import Vectors


@dataclass(frozen=True)
class CpuTilesConfig:
    """The kernel that classifies the tiles of a mask function for a kernel with these block sizes."""

    function: ScoreFunction
    shape: CpuShape


def plan_classes(
    problem: AttentionProblem, shape: CpuShape, scalars: dict[str, int | float]
) -> tuple[Step, dict[str, int], dict[str, int]]:
    """The launch that classifies tiles, its workspace, and the scalars by which kernels find the classes."""
    assert problem.mask_mod is not None
    found = tile_maps(problem, shape, False, [*function_varies(problem), True, True])
    config = CpuTilesConfig(problem.mask_mod.program, shape)
    step = Step(config, build_classes, (found["listed"], 1, 1), {**scalars, **found})
    return step, {"mask_tiles": -(-found["looked_at"] * _block_size(shape) // 4)}, found


def _block_size(shape: CpuShape) -> int:
    """Classes of a block: that of the block, and those of its tiles."""
    return 1 + -(-shape.block_q // shape.rows) * (shape.block_kv // shape.panel)


def build_classes(config: CpuTilesConfig, target: Target) -> KernelIR:
    """Trace the kernel that classifies tiles; a task has a block of rows."""
    b, shape = Builder("attention_function_tiles_cpu", workgroup=1), config.shape
    p = Parameters(b, ScoreConfig(dtype="f32", head_dim=1, value_dim=1))
    number, blocks, heads = b.group_id(0), p.number("own_blocks"), p.number("map_heads")
    which, block = number // blocks, number % blocks
    batch, head = which // heads, which % heads
    seq_q, seq_kv = p.number("seq_q"), p.number("seq_kv")
    row0 = block * shape.block_q
    engine, function = Vectors(b, f32, shape.lanes), Emitter(p, config.function, MASK_FUNCTION, 1.0)
    classes = b.buffer("mask_tiles_ptr", u8, "write")
    zero, count = b.const(0, i32), b.min(seq_q - row0, shape.block_q)

    def kept(row: Value, key: Value) -> Value:
        """How many places of a tile are kept. Rows and keys past the end repeat the last."""
        rows = [b.min(row0 + row + r, seq_q - 1) for r in range(shape.rows)]
        total = b.splat(zero, shape.lanes)
        for j in range(shape.panel_vectors):
            column = b.min(engine.lane_numbers(key + j * shape.lanes), seq_kv - 1)
            for at in rows:
                keeps = function.keeps(Site(batch, head, at, column, at))
                if not isinstance(keeps.type, Vector):
                    keeps = b.splat(keeps, shape.lanes)
                total = total + b.select(keeps, b.splat(b.const(1, i32), shape.lanes), b.splat(zero, shape.lanes))
        return engine.reduce("add", total)

    with b.loop(zero, p.number("other_tiles"), name="block") as other:
        key0 = other * shape.block_kv
        start = engine.index(number * p.number("other_tiles") + other) * _block_size(shape)
        lowest, highest = b.var(b.const(ALL, i32), "lowest"), b.var(b.const(NONE, i32), "highest")
        with b.loop(zero, count, shape.rows, name="row") as row:
            to = start + 1 + engine.index(row // shape.rows) * (shape.block_kv // shape.panel)
            with b.loop(zero, shape.block_kv // shape.panel, name="panel") as panel:
                found = _class_of(b, kept(row, key0 + panel * shape.panel), shape)
                b.store(classes, to + engine.index(panel), b.cast(found, u8))
                lowest.value, highest.value = b.min(lowest.value, found), b.max(highest.value, found)
        some = b.select(b.eq(highest.value, NONE), b.const(NONE, i32), b.const(SOME, i32))
        found = b.select(b.eq(lowest.value, ALL), b.const(ALL, i32), some)
        b.store(classes, start, b.cast(found, u8))
    return b.finish()


def _class_of(b: Builder, kept: Value, shape: CpuShape) -> Value:
    some = b.select(b.eq(kept, 0), b.const(NONE, i32), b.const(SOME, i32))
    return b.select(b.eq(kept, shape.rows * shape.panel), b.const(ALL, i32), some)


class BlockClasses:
    """The classes of the tiles of one block of rows and one block of keys."""

    def __init__(self, p: Parameters, shape: CpuShape, batch: Value, head: Value, row0: Value, key0: Value) -> None:
        self.b, self.shape = p.b, shape
        b = self.b
        which = batch * p.number("map_batch") + head * p.number("map_head")
        block = which * p.number("own_blocks") + row0 // shape.block_q
        number = block * p.number("other_tiles") + key0 // shape.block_kv
        self.start = b.cast(number, i64) * _block_size(shape)
        self.buffer = p.buffer("mask_tiles", u8)
        self.kind = b.cast(b.load(self.buffer, self.start), i32)
        """How much of the block is kept."""

    def of(self, row: Value, panel: Value) -> Value:
        """The class of the rows from ``row`` on with the keys from ``panel`` on, both counted in the block."""
        b, shape = self.b, self.shape
        group = b.cast(row // shape.rows, i64) * (shape.block_kv // shape.panel)
        at = self.start + 1 + group + b.cast(panel // shape.panel, i64)
        return b.cast(b.load(self.buffer, at), i32)

    def narrowed(self, row: Value, low: Value, high: Value) -> tuple[Value, Value]:
        """The part of the keys ``low .. high - 1`` in which the rows from ``row`` on keep any; it may be empty."""
        b, panel = self.b, self.shape.panel
        first, end = b.var(high, "first"), b.var(low, "end")
        with b.loop(low // panel * panel, high, panel, name="panel") as at, b.if_(b.ne(self.of(row, at), NONE)):
            first.value, end.value = b.min(first.value, at), at + panel
        return b.max(low, first.value), b.min(high, end.value)

    def narrowed_rows(self, key: Value, count: int, low: Value, high: Value) -> tuple[Value, Value]:
        """The part of the rows ``low .. high - 1`` that keep any of ``count`` keys from ``key`` on; maybe empty."""
        b, rows = self.b, self.shape.rows
        assert count <= self.shape.panel, "in two panels at most"
        last = b.min(key + (count - 1), self.shape.block_kv - 1)
        first, end = b.var(high, "first"), b.var(low, "end")
        with (
            b.loop(low // rows * rows, high, rows, name="row") as at,
            b.if_(b.ne(self.of(at, key) | self.of(at, last), NONE)),
        ):
            first.value, end.value = b.min(first.value, at), at + rows
        return b.max(low, first.value), b.min(high, end.value)

    def each(self, row: Value, panel: Value, reach: Reach, take: Callable[[Reach], None]) -> None:
        """``take`` a tile if any of it is kept, with a reach that says whether all is; the caller adds what else is
        to be done with ``else_``."""
        b, kind = self.b, self.of(row, panel)
        with b.if_(b.ne(kind, NONE)):
            full_end = b.select(b.eq(kind, ALL), reach.full_end, b.const(0, i32))
            take(replace(reach, full_end=full_end))
