"""Sums of tiles over subgroups that multiply parts of a product's depth."""

from __future__ import annotations

from math import gcd

from aule.ir import Value, Var
from aule.ir.types import f32
from aule.tile.common.matrix import QUAD
from aule.tile.fragment.engine import Fragments, FragmentTile


class PartialSums:
    """Adds up tiles of subgroups whose numbers differ in the last bits, through shared memory.

    They hold the same elements in the same registers, so that a lane adds what the same lane of the others has. A
    barrier must come between `put` and `add`, and another one before the next `put`.
    """

    def __init__(self, engine: Fragments) -> None:
        """``engine.shape.depth_parts`` subgroups, a power of two, have a sum together."""
        self.engine, self.b = engine, engine.b
        self._memory = engine.b.shared("partials", f32, engine.shape.partial_scores)
        self._parts = engine.arrangement.results.parts
        self._run = gcd(self._parts, QUAD)

    def put(self, tile: FragmentTile) -> None:
        """Store this subgroup's part of a tile."""
        own = self._place(tile, self.engine.subgroup)
        for number, variable in enumerate(self._variables(tile)):
            for part in range(0, self._parts, self._run):
                strip = [self.b.fragment_get(variable.value, part + i) for i in range(self._run)]
                self.b.store(self._memory, own + self._offset(number, part), self.b.vector(strip))

    def add(self, tile: FragmentTile) -> None:
        """Add the parts of the other subgroups to a tile."""
        b, run = self.b, self._run
        others = [self._place(tile, self.engine.subgroup ^ i) for i in range(1, self.engine.shape.depth_parts)]
        for number, variable in enumerate(self._variables(tile)):
            sums = [b.fragment_get(variable.value, part) for part in range(self._parts)]
            for other in others:
                for part in range(0, self._parts, run):
                    more = b.unpack(b.load(self._memory, other + self._offset(number, part), run))
                    sums[part : part + run] = [x + y for x, y in zip(sums[part : part + run], more, strict=True)]
            variable.value = b.fragment_pack(self.engine.accumulator, sums)

    def _variables(self, tile: FragmentTile) -> list[Var]:
        return [variable for row in tile.vars for variable in row]

    def _place(self, tile: FragmentTile, subgroup: Value) -> Value:
        """Where a subgroup's lane finds its elements."""
        size = len(self._variables(tile)) * self._parts * self.engine.arrangement.lanes
        return subgroup * size + self.engine.lane * self._run

    def _offset(self, number: int, part: int) -> int:
        return (number * self._parts + part) * self.engine.arrangement.lanes
