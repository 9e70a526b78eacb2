"""One subgroup that copies for the forward kernel whose workgroups stay, by tensor copies (TMA).

It starts a copy for each panel of a tile. The device computes addresses, sets to zero what is outside of the operand,
and arrives at the slot's mbarrier.
"""

from __future__ import annotations

from aule.ir import Builder, Value
from aule.ir.types import PANEL, i32
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.fragment.forward_block import ForwardBlock
from aule.ops.attention.warpgroup.forward_slots import Place, Slots
from aule.target import Target
from aule.tile.fragment.engine import Fragments
from aule.tile.warpgroup.engine import Warpgroups


class _TensorCopies(ForwardBlock):
    """The copies of a block."""

    def __init__(self, b: Builder, config: FragmentConfig, target: Target, number: Value, slots: Slots) -> None:
        self.slots = slots
        super().__init__(b, config, target, number=number, parameters=slots.parameters)

    def _lay_out(self, target: Target) -> Fragments:
        """Copies need no engine."""
        return Warpgroups(self.b, target, self.shape, self.config.factor or self.config.dtype)

    def run(self, turn: Value, done: Value) -> None:
        """Start all copies, in the order in which they are needed.

        K of the first tile comes before Q, whose only slot may be in use until the last block is stored.
        """
        b, count = self.b, self.tiles.count
        with b.if_(count > 0):
            self._copy("k", done, self._first_key(b.const(0, i32)))
        self._copy("q", turn, self.row0)
        with b.loop(0, count, name="tile") as i:
            self._copy("v", done + i, self._first_key(i))
            with b.if_(i + 1 < count):
                self._copy("k", done + i + 1, self._first_key(i + 1))

    def _first_key(self, i: Value) -> Value:
        return self.tiles.tile(i) * self.shape.block_kv

    def _copy(self, kind: str, number: Value, row: Value) -> None:
        b, slots, tensor = self.b, self.slots, self.slots.tensors[kind]
        place, head = Place(slots, kind, number), self.head if kind == "q" else self.kv_head
        place.await_empty()
        b.mbarrier_expect(slots.mbarriers, place.full, slots.sizes[kind] * slots.elem.bytes)
        for panel in range(slots.sizes[kind] // tensor.box_elements):
            to, at = place.start + panel * tensor.box_elements, (slots.mbarriers, place.full)
            b.tensor_copy(slots.memory, to, at, tensor, (panel * PANEL, row, head, self.scores.batch))


def copy_tensors(b: Builder, config: FragmentConfig, target: Target, slots: Slots) -> None:
    """All blocks of the workgroup, by the first of the copying subgroups."""
    turn, done = b.var(b.const(0, i32), "turn"), b.var(b.const(0, i32), "done")
    with b.if_(b.eq(b.subgroup_id(), config.shape.subgroups)), b.loop(*slots.blocks(), name="number") as number:
        block = _TensorCopies(b, config, target, number, slots)
        block.run(turn.value, done.value)
        turn.value, done.value = turn.value + 1, done.value + block.tiles.count
