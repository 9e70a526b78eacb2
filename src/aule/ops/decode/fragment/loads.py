"""Loads of keys and values by the decoding kernel on matrix units, and their prefetch."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Value, Var
from aule.ir.types import f32, i32, u32
from aule.ops.decode.config import FragmentDecodeShape
from aule.ops.decode.variables import assign, values
from aule.ops.decode.work_range import WorkRange
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.direct import Direct
from aule.tile.fragment.engine import Components

Scales = list[list[tuple[Value, Value]]]
"""Scales of K and V, by block and key."""


class KeyLoads:
    """Loads of a lane: its keys in each step, and its columns of them.

    Parameters
    ----------
    keys, values : Direct
        Layout of K and V over lanes.
    """

    def __init__(
        self, work: WorkRange, engine: Components, keys: Direct, values: Direct, shape: FragmentDecodeShape
    ) -> None:
        self.work, self.b, self.config, self.engine = work, work.b, work.config, engine
        self.keys, self.values, self.shape = keys, values, shape
        self.key_runs = shape.blocks * len(engine.part_rows) * keys.pieces
        """Runs of K that a lane holds of a step."""
        self.value_runs = shape.blocks * len(engine.part_cols) * values.pieces
        """Runs of V that a lane holds of a step."""

    # -- keys of a lane ------------------------------------------------------------------------------------------------

    def subgroup_start(self, start: Value) -> Value:
        """This subgroup's first key of a step."""
        return start + self.engine.subgroup * self.shape.subgroup_step

    def score_keys(self, start: Value) -> list[list[Value]]:
        """Keys of which this lane holds K and scores, by block; they may be past the end."""
        return self._lane_keys(start, self.engine.lane_row, self.engine.part_rows)

    def value_keys(self, start: Value) -> list[list[Value]]:
        """Keys of which this lane holds V, by block; they may be past the end."""
        return self._lane_keys(start, self.engine.lane_col, self.engine.part_cols)

    def _lane_keys(self, start: Value, lane: Value, parts: list[int]) -> list[list[Value]]:
        first = self.subgroup_start(start) + lane
        return [[first + (i * SIZE + part) for part in parts] for i in range(self.shape.blocks)]

    def _existing(self, keys: list[list[Value]], end: Value | None) -> list[list[Value]]:
        """Keys by block; those past the end are replaced by the last."""
        last = (self.work.end if end is None else end) - 1
        return [[self.b.min(key, last) for key in block] for block in keys]

    # -- pages ---------------------------------------------------------------------------------------------------------

    def page_variables(self) -> list[Var]:
        """Variables for a step's page numbers; none if the cache is contiguous."""
        each = 1 if self.config.page_shared else len(self.engine.part_rows) + len(self.engine.part_cols)
        lookups = 0 if self.config.paging == "none" else self.shape.blocks * each
        return [self.b.var(self.b.const(0, i32), "page") for _ in range(lookups)]

    def pages(self, start: Value, end: Value | None = None) -> list[Value]:
        """Page numbers of a step's keys; one for each block if it lies in one page."""
        if self.config.page_shared:
            first = self.subgroup_start(start)
            wanted = [[first + i * SIZE for i in range(self.shape.blocks)]]
        else:
            wanted = [*self.score_keys(start), *self.value_keys(start)]
        return [number for block in self._existing(wanted, end) for number in self.work.page_numbers(block)]

    def _pages_by_block(self, name: str, pages: list[Value]) -> list[list[Value]]:
        """Page numbers of K or V out of those of `pages`."""
        blocks, key_parts = self.shape.blocks, len(self.engine.part_rows)
        if not pages:
            return [[]] * blocks
        if self.config.page_shared:
            return [[page] for page in pages]
        first, each = (0, key_parts) if name == "k" else (key_parts * blocks, len(self.engine.part_cols))
        return [pages[first + i * each : first + (i + 1) * each] for i in range(blocks)]

    # -- K, V and scales -----------------------------------------------------------------------------------------------

    def load(self, name: str, start: Value, pages: list[Value], end: Value | None = None) -> list[Value]:
        """Load this lane's runs of K or V of a step, by block, key and piece."""
        layout, matrix, keys = self.values, self.work.v, self.value_keys
        if name == "k":
            layout, matrix, keys = self.keys, self.work.k, self.score_keys
        found = []
        for block, numbers in zip(self._existing(keys(start), end), self._pages_by_block(name, pages), strict=True):
            for at in self.work.key_starts(name, block, numbers):
                found += layout.load(matrix, matrix.base + at)
        return found

    def scales(self, start: Value, pages: list[Value], end: Value | None = None) -> list[Value]:
        """Load the scales of K and V of the keys of this lane's scores; none unless the cache is quantised."""
        if not self.config.quantised:
            return []
        keys = self._existing(self.score_keys(start), end)
        by_block = zip(keys, self._pages_by_block("k", pages), strict=True)
        found = [self.work.scales(block, numbers) for block, numbers in by_block]
        return [x for block in found for pair in block for x in pair]

    def scale_variables(self) -> list[Var]:
        count = 2 * self.shape.blocks * len(self.engine.part_rows) if self.config.quantised else 0
        return [self.b.var(self.b.const(0.0, f32), "scale") for _ in range(count)]

    def scales_by_block(self, scales: list[Value]) -> Scales:
        """Group the result of `scales` by block and key."""
        pairs, each = list(zip(scales[::2], scales[1::2], strict=True)), len(self.engine.part_rows)
        return [pairs[i : i + each] for i in range(0, len(pairs), each)]


@dataclass(frozen=True)
class Step:
    """Values that a lane has loaded for a step of keys.

    Attributes
    ----------
    start : Value
        First key of the workgroup's step.
    k, v : list
        Runs of K and V by block, key and piece.
    scales : list
        Scales of K and V by block and key; empty unless quantised.
    """

    start: Value
    k: list[Value]
    v: list[Var]
    scales: Scales


class Prefetch:
    """Loads of the next step, in flight while a step is computed.

    K and the scales are a step ahead, and so is V of a quantised cache if the shape says so; page numbers are two
    steps ahead.

    Parameters
    ----------
    early_values : bool
        V and scales of the first step are loaded before the sequence's length is known, too.
    """

    def __init__(self, loads: KeyLoads, early_values: bool) -> None:
        self.b, self.loads, self.work, self.early_values = loads.b, loads, loads.work, early_values
        b, config = loads.b, loads.config
        self.k = [b.var(b.splat(b.const(0, u32), loads.keys.words), "k") for _ in range(loads.key_runs)]
        self.values_ahead = config.quantised and loads.shape.ahead
        runs = loads.value_runs if self.values_ahead else 0
        self.v = [b.var(b.splat(b.const(0, u32), loads.values.words), "v") for _ in range(runs)]
        self.pages, self.scales = loads.page_variables(), loads.scale_variables()

    def load_early(self) -> None:
        """Load the first step before the sequence's length is known, if there is no window.

        Keys past the sequence's end do no harm: its cache has room for them, and they are never used.
        """
        if not self.loads.config.left:
            self._load(self.work.expected_first, self.work.p.number("seq_kv"), self.early_values)

    def load_first(self) -> None:
        """Load the rest of the first step, except for V, and the page numbers of the second."""
        work, loads = self.work, self.loads
        self.next_pages = loads.page_variables()
        if loads.config.left:
            self._load(work.first, work.end, with_values=False)
        with self.b.if_(work.first < work.end):
            if not self.early_values:
                assign(self.scales, loads.scales(work.first, values(self.pages)))
            assign(self.next_pages, loads.pages(work.first + work.stride))

    def load_first_values(self) -> None:
        """Load V of the first step, if values are a step ahead and not loaded yet."""
        work = self.work
        if self.values_ahead and not self.early_values:
            with self.b.if_(work.first < work.end):
                assign(self.v, self.loads.load("v", work.first, values(self.pages)))

    def next_step(self, start: Value) -> Step:
        """Return the values of the step at ``start`` and begin the loads of the next one."""
        b, work, loads = self.b, self.work, self.loads
        later = start + work.stride
        v = values(self.v) if self.values_ahead else loads.load("v", start, values(self.pages))
        k, variables = values(self.k), [b.var(run, "v") for run in v]
        step = Step(start, k, variables, loads.scales_by_block(values(self.scales)))
        # The condition also keeps the loads here: without it a compiler moves loads of bytes below the first product,
        # into the registers that it frees, and the product with V has to wait.
        with b.if_(later < work.end):
            assign(self.k, loads.load("k", later, values(self.next_pages)))
            assign(self.scales, loads.scales(later, values(self.next_pages)))
            if self.values_ahead:
                assign(self.v, loads.load("v", later, values(self.next_pages)))
            assign(self.pages, values(self.next_pages))
            assign(self.next_pages, loads.pages(later + work.stride))
        return step

    def _load(self, start: Value, end: Value, with_values: bool) -> None:
        loads = self.loads
        with self.b.if_(start < end):
            assign(self.pages, loads.pages(start, end))
            pages = values(self.pages)
            assign(self.k, loads.load("k", start, pages, end))
            if with_values:
                assign(self.scales, loads.scales(start, pages, end))
            if with_values and self.values_ahead:
                assign(self.v, loads.load("v", start, pages, end))
