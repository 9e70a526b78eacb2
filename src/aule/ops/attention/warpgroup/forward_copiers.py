"""Four subgroups that copy for the forward kernel whose workgroups stay, by asynchronous copies of 16 bytes.

Two take turns with K and two with V, so that each has a tile under way. They look for Inf and NaN in V of edge tiles.
Tensor copies (`forward_tensor_copies.py`) do the same without instructions for each run; this file goes when they have
been measured.
"""

from __future__ import annotations

from aule.ir import Builder, Value
from aule.ir.types import PANEL, i32, u32
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.fragment.forward_block import ForwardBlock
from aule.ops.attention.warpgroup.forward_slots import COPIERS, Place, Slots
from aule.target import Target
from aule.tile.fragment.engine import Fragments
from aule.tile.fragment.nonfinite import check_finite
from aule.tile.warpgroup.copier import Copier, CopierTransfer
from aule.tile.warpgroup.engine import Warpgroups


class _Copies(ForwardBlock):
    """The copies of a block."""

    def __init__(self, b: Builder, config: FragmentConfig, target: Target, number: Value, slots: Slots) -> None:
        self.slots = slots
        super().__init__(b, config, target, number=number, parameters=slots.parameters)

    def _lay_out(self, target: Target) -> Fragments:
        """Copiers need no engine but for where rows are."""
        engine = Warpgroups(self.b, target, self.shape, self.config.factor or self.config.dtype)
        self.copier = Copier(self.b, self.shape, engine.elem)
        return engine

    def run(self, turn: Value, done: Value) -> None:
        """Copy this subgroup's part of Q, and its share of the tiles of K or of V, every other one."""
        b, slots, shape = self.b, self.slots, self.shape
        me = b.subgroup_id() - shape.subgroups
        part = shape.block_q // COPIERS
        place = Place(slots, "q", turn)
        place.await_empty()
        queries = self.copier.panels(self.q, part, slots.memory, panel_rows=shape.block_q)
        first = me * part
        queries.start(self.row0 + first, place.start + first * PANEL)
        self._finish_copies()
        place.filled()
        with b.loop((me ^ done) & 1, self.tiles.count, 2, name="tile") as i:
            tile = self.tiles.tile(i)
            with b.if_(me < 2):
                place = Place(slots, "k", done + i)
                self._copy(place, self.copier.panels(self.k, shape.block_kv, slots.memory), tile)
                place.filled()
            with b.else_():
                place = Place(slots, "v", done + i)
                values = self.copier.panels(self.v, shape.block_kv, slots.memory)
                self._copy(place, values, tile)
                with b.if_(i < self.tiles.edges):
                    self._look(place, values)
                place.filled()

    def _copy(self, place: Place, rows: CopierTransfer, tile: Value) -> None:
        b, block = self.b, self.shape.block_kv
        place.await_empty()
        first = tile * block
        with b.if_(first + block > self.scores.seq_kv):
            rows.start(first, place.start)
        with b.else_():
            rows.start(first, place.start, full=True)
        self._finish_copies()

    def _finish_copies(self) -> None:
        self.b.async_wait(0)
        self.b.warpgroup_publish()

    def _look(self, place: Place, values: CopierTransfer) -> None:
        """Note whether V of an edge tile holds Inf or NaN."""
        b = self.b
        found = b.var(b.const(0, u32), "found")
        values.own_runs(place.start, lambda run: check_finite(b, self.slots.elem, run, found))
        bad = b.subgroup_any(b.ne(found.value, 0))
        with b.if_(b.eq(b.lane_id(), 0)):
            b.store(self.slots.nonfinite, place.slot, b.select(bad, b.const(1, u32), b.const(0, u32)))


def copy_by_subgroups(b: Builder, config: FragmentConfig, target: Target, slots: Slots) -> None:
    """The copiers: all blocks of the workgroup."""
    turn, done = b.var(b.const(0, i32), "turn"), b.var(b.const(0, i32), "done")
    with b.loop(*slots.blocks(), name="number") as number:
        block = _Copies(b, config, target, number, slots)
        block.run(turn.value, done.value)
        turn.value, done.value = turn.value + 1, done.value + block.tiles.count
