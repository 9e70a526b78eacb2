"""A subgroup that copies rows into panels by itself, while others compute.

A lane has dozens of runs, so they are copied by loops on the device. If a step of all lanes fills whole rows, a lane
stays in its column, and the order of runs within a row repeats after eight rows: then addresses are a start and
constant steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from aule.ir import Builder, Value
from aule.ir.types import PANEL, Scalar
from aule.tile.common.matrix import Matrix, divmod_const
from aule.tile.fragment.shape import RUN, FragmentShape
from aule.tile.warpgroup.engine import PanelTransfer

_ORDER = 8
"""Rows after which the order of runs repeats."""


class Copier:
    """The lanes of a subgroup as the threads of a transfer."""

    def __init__(self, b: Builder, shape: FragmentShape, elem: Scalar) -> None:
        self.b, self.elem, self.shape = b, elem, replace(shape, subgroups=1)
        self.thread = b.lane_id()

    def incoming(self, run: Value) -> Value:
        """Rows are copied as they are."""
        return run

    def panels(self, source: Matrix, rows: int, memory: Value, panel_rows: int = 0) -> CopierTransfer:
        """A transfer of ``rows`` rows at a time into panels, which may have more rows."""
        return CopierTransfer(self, source, rows, memory, True, panel_rows=panel_rows)


class CopierTransfer(PanelTransfer):
    """Copies of a subgroup; ``start`` also closes their group."""

    def start(self, first: Value, target: Value, full: bool = False) -> None:
        b, source = self.b, self.source
        if full and self._cycle and source.even:
            row_stride = source.row_stride
            begin = source.base + (source.index(b, first) + source.index(b, self.row)) * row_stride
            at = b.var(begin + source.index(b, self.col), "at")
            with self._cycles(target) as places:
                for i, place in enumerate(places):
                    b.async_copy(self.memory, place, source.buffer, at.value + row_stride * (i * self.step), RUN)
                at.value = at.value + row_stride * (len(places) * self.step)
        else:

            def copy(row: Value, col: Value) -> None:
                index = source.row_start(b, first + row) + source.index(b, col)
                exists = None if full else first + row < source.rows
                b.async_copy(self.memory, target + self.address(row, col), source.buffer, index, RUN, exists)

            self._each_run(copy)
        b.async_commit()

    def own_runs(self, target: Value, f: Callable[[Value], None]) -> None:
        b = self.b
        if not self._cycle:
            self._each_run(lambda row, col: f(b.load(self.memory, target + self.address(row, col), RUN)))
            return
        with self._cycles(target) as places:
            for place in places:
                f(b.load(self.memory, place, RUN))

    @property
    def _cycle(self) -> int:
        """Runs of a lane after which the order within rows repeats; 0 if a step does not fill whole rows."""
        lanes = self.engine.shape.lanes
        if lanes * RUN % self.cols or (_ORDER % self.step and self.step % _ORDER):
            return 0
        cycle = max(_ORDER // self.step, 1)
        return cycle if self.count % cycle == 0 and self.runs % lanes == 0 else 0

    @contextmanager
    def _cycles(self, target: Value) -> Iterator[list[Value]]:
        """Loop over cycles; gives where this lane's runs of one lie."""
        b, cycle = self.b, self._cycle
        own = [target + self.address(self.row + i * self.step, self.col) for i in range(cycle)]
        with b.loop(0, self.count // cycle, unroll=1, name="cycle") as number:
            yield [place + number * (cycle * self.step * PANEL) for place in own]

    def _each_run(self, f: Callable[[Value, Value], None]) -> None:
        """Call ``f`` with row and column of this lane's runs, in a loop."""
        b, lanes = self.b, self.engine.shape.lanes
        with b.loop(0, self.count, unroll=1, name="run") as i:
            number = self.engine.thread + i * lanes
            row, run = divmod_const(b, number, self.cols // RUN)
            with b.if_(number < self.runs) if self.runs % lanes else nullcontext():
                f(row, run * RUN)
