"""Where the keys of a step of the kernel for matrix units lie, and the loads of K and V from there."""

from __future__ import annotations

from collections.abc import Sequence

from aule.ir import Value, Var
from aule.ir.types import f32, i32
from aule.ops.decode.config import FragmentDecodeShape
from aule.ops.decode.place import Place
from aule.tile.arrangement import SIZE
from aule.tile.direct import Direct
from aule.tile.fragment import Components
from aule.tile.matrix import Matrix

Scales = list[list[tuple[Value, Value]]]
"""Of K and V, by block and key."""


class Fetch:
    """The keys of one workgroup, by steps, and the loads of a lane.

    Parameters
    ----------
    keys, values : Direct
        How lanes hold K and V.
    """

    def __init__(
        self, place: Place, engine: Components, keys: Direct, values: Direct, shape: FragmentDecodeShape
    ) -> None:
        self.place, self.b, self.config, self.engine = place, place.b, place.config, engine
        self.keys, self.values, self.shape = keys, values, shape
        self.key_runs = shape.blocks * len(engine.part_rows) * keys.pieces
        """Runs of K that a lane holds of a step."""
        self.value_runs = shape.blocks * len(engine.part_cols) * values.pieces

    # -- where keys lie --------------------------------------------------------------------------------------------

    def at(self, start: Value) -> Value:
        """This subgroup's first key of a step."""
        return start + self.engine.subgroup * self.shape.stretch

    def down_keys(self, start: Value) -> list[list[Value]]:
        """Keys of which this lane holds K, and scores, by block; they may be past the end."""
        return self._wanted(start, self.engine.lane_row, self.engine.part_rows)

    def across_keys(self, start: Value) -> list[list[Value]]:
        """Keys of which this lane holds V, likewise."""
        return self._wanted(start, self.engine.lane_col, self.engine.part_cols)

    def _wanted(self, start: Value, lane: Value, parts: list[int]) -> list[list[Value]]:
        first = self.at(start) + lane
        return [[first + (i * SIZE + part) for part in parts] for i in range(self.shape.blocks)]

    def _read(self, keys: list[list[Value]], end: Value | None) -> list[list[Value]]:
        """The same, the last one instead of those past the end."""
        last = (self.place.end if end is None else end) - 1
        return [[self.b.min(key, last) for key in block] for block in keys]

    # -- pages -----------------------------------------------------------------------------------------------------

    def page_variables(self) -> list[Var]:
        """For the page numbers of a step; none where there are no pages."""
        each = 1 if self.config.whole else len(self.engine.part_rows) + len(self.engine.part_cols)
        lookups = 0 if self.config.paging == "none" else self.shape.blocks * each
        return [self.b.var(self.b.const(0, i32), "page") for _ in range(lookups)]

    def pages(self, start: Value, end: Value | None = None) -> list[Value]:
        """Numbers of the pages of a step's keys, one for each block where that lies in one page."""
        if self.config.whole:
            first = self.at(start)
            wanted = [[first + i * SIZE for i in range(self.shape.blocks)]]
        else:
            wanted = [*self.down_keys(start), *self.across_keys(start)]
        return [number for block in self._read(wanted, end) for number in self.place.page_numbers(block)]

    def _down_pages(self, pages: list[Value]) -> list[list[Value]]:
        """Pages of K by block."""
        return self._by_block(pages, 0, len(self.engine.part_rows))

    def _across_pages(self, pages: list[Value]) -> list[list[Value]]:
        """Pages of V by block."""
        return self._by_block(pages, len(self.engine.part_rows) * self.shape.blocks, len(self.engine.part_cols))

    def _by_block(self, pages: list[Value], first: int, each: int) -> list[list[Value]]:
        blocks = self.shape.blocks
        if not pages:
            return [[]] * blocks
        if self.config.whole:
            return [[page] for page in pages]
        return [pages[first + i * each : first + (i + 1) * each] for i in range(blocks)]

    # -- loads -----------------------------------------------------------------------------------------------------

    def load_keys(self, start: Value, pages: list[Value], end: Value | None = None) -> list[Value]:
        """The runs that this lane holds of K of keys that exist, by block, key and piece."""
        keys = self._read(self.down_keys(start), end)
        return self._load(self.keys, "k", self.place.k, keys, self._down_pages(pages))

    def load_values(self, start: Value, pages: list[Value], end: Value | None = None) -> list[Value]:
        """The same of V."""
        keys = self._read(self.across_keys(start), end)
        return self._load(self.values, "v", self.place.v, keys, self._across_pages(pages))

    def _load(
        self, way: Direct, name: str, matrix: Matrix, keys: list[list[Value]], pages: list[list[Value]]
    ) -> list[Value]:
        found = []
        for block, numbers in zip(keys, pages, strict=True):
            for start in self.place.key_starts(name, block, numbers):
                found += way.load(matrix, matrix.base + start)
        return found

    # -- scales ----------------------------------------------------------------------------------------------------

    def scales(self, start: Value, pages: list[Value], end: Value | None = None) -> Scales:
        """Scales of K and V, for the keys of which this lane has scores; none where nothing is quantised."""
        if not self.config.quantised:
            return []
        keys = self._read(self.down_keys(start), end)
        by_block = zip(keys, self._down_pages(pages), strict=True)
        return [self.place.scales(block, numbers) for block, numbers in by_block]

    def scale_variables(self) -> list[Var]:
        """For the scales of a step."""
        count = 2 * self.shape.blocks * len(self.engine.part_rows) if self.config.quantised else 0
        return [self.b.var(self.b.const(0.0, f32), "scale") for _ in range(count)]

    def by_block(self, scales: list[Value]) -> Scales:
        """Scales as `scales` gave them, from `flat`."""
        pairs, held = list(zip(scales[::2], scales[1::2], strict=True)), len(self.engine.part_rows)
        return [pairs[i : i + held] for i in range(0, len(pairs), held)]


def flat(scales: Scales) -> list[Value]:
    """One after the other."""
    return [x for block in scales for pair in block for x in pair]


def values(variables: Sequence[Var]) -> list[Value]:
    """What variables hold now."""
    return [x.value for x in variables]


def assign(variables: Sequence[Var], values: Sequence[Value]) -> None:
    """Set variables."""
    for variable, value in zip(variables, values, strict=True):
        variable.value = value
