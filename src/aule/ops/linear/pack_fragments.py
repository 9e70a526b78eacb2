"""The kernel that puts the left factor of a product into the order of fragments, normalised if need be.

Blocks of 16 x 16 lie one after the other, each as the lanes of a subgroup hold it, 16 bytes per lane: first the four of
64 rows of the result, then those of the next 16 of the depth, then the next 64 rows. So a subgroup reads its part of a
step as one piece of 2 KiB, and each of its loads takes four full lines.
"""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, Fragment, i32, i64
from aule.ops.linear.config import FactorConfig
from aule.ops.linear.factors import Factor, RegisterPanel
from aule.ops.shared.parameters import Parameters
from aule.target import Target
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Fragments, fitted
from aule.tile.fragment.shape import RUN, FragmentShape, row_stride

PANEL = 64
"""Rows of the result that lie together."""
BLOCKS = PANEL // SIZE
LANES = 32
RUNS = BLOCKS * LANES
"""Runs of 8 elements of a panel's step."""
_WORDS = (0, 2, 1, 3)
"""Order of a lane's words of two components: that in which the driver's compiler wants registers. Any other is correct,
but costs moves."""


@dataclass(frozen=True)
class FragmentsConfig:
    """Configuration of the kernel: the stored left factor, and the type computed in."""

    name: str
    work: str
    factor: FactorConfig
    index64: bool


def build_pack_fragments(config: FragmentsConfig, target: Target) -> KernelIR:
    """Trace the kernel: a workgroup has 64 of the depth of a panel. Rows past the end repeat existing ones."""
    shape = fitted(FragmentShape(PANEL, PANEL, BLOCKS, 1, False), target)
    assert shape.lanes == LANES
    b = Builder(config.name, shape.threads, subgroup_size=shape.lanes, arithmetic="quick")
    p = Parameters(b, i64 if config.index64 else i32)
    k = p.number("k")
    factor = Factor(p, config.factor, p.number("m"), k, SCALARS[config.work], full_steps=True)
    engine = Fragments(b, target, shape, config.factor.stored.dtype)
    number, parts = b.group_id(0) + b.group_id(1) * b.group_count(0), k // PANEL
    panel, part = number // parts, number % parts
    loaded = RegisterPanel(factor, engine.thread, shape.threads, PANEL, PANEL, RUN, panel * PANEL)
    stride, start = row_stride(PANEL), part * PANEL
    memory = b.shared("block", engine.elem, PANEL * stride)
    loaded.fetch_all(start)
    for i in range(loaded.count):
        row, col = loaded.place(i)
        value = loaded.factor_value(i, start)
        b.store(memory, row * stride + col, value)
    b.barrier()
    # Each subgroup has 16 of the depth.
    own = engine.subgroup * (SIZE * stride if factor.depth_major else SIZE)
    out = p.buffer("fragments", engine.elem, "write")
    step = b.cast(panel, p.index) * b.cast(k // SIZE, p.index) + b.cast(part * BLOCKS + engine.subgroup, p.index)
    for i in range(BLOCKS):
        fragment = engine.load_left(memory, own, stride, i * SIZE, 0, factor.depth_major)
        found = [b.fragment_get(fragment, 2 * word + half) for word in _WORDS for half in (0, 1)]
        run = step * RUNS + (b.cast(engine.lane, p.index) + i * LANES)
        b.store(out, run * RUN, b.vector(found))
    return b.finish()


def left_fragment(b: Builder, type_: Fragment, run: Value) -> Value:
    """A fragment from a lane's 16 bytes of it."""
    given, parts = b.unpack(run), [run] * RUN
    for place, word in enumerate(_WORDS):
        parts[2 * word : 2 * word + 2] = given[2 * place : 2 * place + 2]
    return b.fragment_pack(type_, parts)
