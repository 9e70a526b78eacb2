"""Copies of Q and K into shared memory by crews that do nothing else."""

from __future__ import annotations

from aule.ir import Builder, Value
from aule.ir.types import PANEL, i32
from aule.ops.decode.variables import assign, values
from aule.ops.decode.warpgroup.memory import Memory
from aule.ops.decode.work_range import WorkRange
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.shape import RUN

_ROWS_AT_ONCE = 32 * RUN // PANEL
"""Rows of a panel that a subgroup fills with one run of each lane."""
_ROWS = 32
"""Rows of a subgroup."""


class Copies:
    """The copies of two crews of two subgroups, of the left half of K and the columns that are not values, and of the
    right half. A subgroup copies half of the rows, and a lane the same run of eight of them from each panel."""

    def __init__(self, b: Builder, work: WorkRange, memory: Memory) -> None:
        self.b, self.work, self.memory, self.config = b, work, memory, memory.config
        self.crew = (b.subgroup_id() >> 1) & 1
        self.first_row = (b.subgroup_id() & 1) * _ROWS
        lane = b.lane_id()
        self.col = (lane & (PANEL // RUN - 1)) * RUN
        row = self.first_row + (lane >> 3)
        self.rows = [row + i for i in range(0, _ROWS, _ROWS_AT_ONCE)]
        self.places = [memory.k_panels.offset(row, self.col) for row in self.rows]
        values, every = memory.config.value_dim // PANEL, memory.config.head_dim // PANEL
        self.halves = [*range(values // 2), *range(values, every)], [*range(values // 2, values)]
        """The panels of each crew."""

    def run(self) -> None:
        """Copy Q and all steps of K."""
        b, work = self.b, self.work
        with b.if_(work.first < work.end):
            with b.if_(b.eq(self.crew, 0)):
                self._run(0)
            with b.else_():
                self._run(1)

    def _run(self, half: int) -> None:
        """Copy a crew's panels."""
        b, work, memory, panels = self.b, self.work, self.memory, self.halves[half]
        self._copy_queries(panels)
        pages = [b.var(page, "page") for page in self._pages(work.first)]
        number = b.var(b.const(0, i32), "number")
        with b.loop(work.first, work.end, work.stride, name="key") as key0:
            n = number.value
            starts = self._key_starts(key0, values(pages))
            exist = [key0 + row < work.end for row in self.rows]
            memory.emptied[half].wait_before(n)
            self._copy(work.k.buffer, starts, exist, memory.keys_at(n), panels)
            b.async_commit()
            assign(pages, self._pages(key0 + work.stride))
            b.async_wait(0)
            b.warpgroup_publish()
            memory.filled[half].arrive(n)
            number.value = n + 1

    def _copy_queries(self, panels: list[int]) -> None:
        """Copy rows of Q; those past the last become zeros."""
        work = self.work
        starts = [work.row_start("q", work.q, *work.own_query(row)) for row in self.rows]
        exist = [work.row0 + row < work.rows for row in self.rows]
        self._copy(work.q.buffer, starts, exist, self.b.const(0, i32), panels)

    def _copy(self, source: Value, starts: list[Value], exist: list[Value], at: Value, panels: list[int]) -> None:
        """Copy this lane's runs of some panels of a tile; rows that do not exist become zeros."""
        b, stride = self.b, self.memory.k_panels.stride
        for start, exists, place in zip(starts, exist, self.places, strict=True):
            for panel in panels:
                to, index = at + place + panel * stride, start + self.work.k.index(b, self.col) + panel * PANEL
                b.async_copy(self.memory.tiles, to, source, index, RUN, exists)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _pages(self, key0: Value) -> list[Value]:
        """Page numbers of this lane's keys of a step, one for each 16 rows if these lie in one page; none if the cache
        is contiguous."""
        if not self.config.page_shared:
            return self.work.page_numbers(self._existing([key0 + row for row in self.rows]))
        firsts = [key0 + self.first_row + i for i in range(0, _ROWS, SIZE)]
        return self.work.page_numbers(self._existing(firsts))

    def _key_starts(self, key0: Value, pages: list[Value]) -> list[Value]:
        """Where this lane's keys of a step begin."""
        keys = self._existing([key0 + row for row in self.rows])
        if self.config.page_shared:
            pages = [page for page in pages for _ in range(SIZE // _ROWS_AT_ONCE)]
        return [self.work.k.base + start for start in self.work.key_starts("k", keys, pages)]

    def _existing(self, keys: list[Value]) -> list[Value]:
        """Keys, with the last one for those past the end."""
        return [self.b.min(key, self.work.end - 1) for key in keys]
