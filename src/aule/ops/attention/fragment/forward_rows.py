"""Rows of Q in and rows of O out of a forward kernel on matrix units, in few instructions.

Registers leave room for few subgroups, so that instructions outside the loop over the keys are not hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from aule.ir import Value
from aule.ir.types import Vector, i32
from aule.tile.common.matrix import Matrix, divmod_const
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Fragments
from aule.tile.fragment.shape import RUN, row_stride
from aule.tile.fragment.transfer import Transfer

ColumnRange = tuple[int, int, Value]
"""The first column, the end, and where in shared memory they begin."""


def can_deal_out(transfer: Transfer) -> bool:
    """Whether a transfer can serve `QueryRows`: a thread's runs lie in one column and wait in registers."""
    return transfer.regular and not transfer.direct and transfer.source.cols % SIZE == 0


class QueryRows:
    """Rows of Q that are fetched entire, with constant steps between addresses, and dealt out by columns: some stay in
    shared memory, the others pass through it into registers.

    The transfer must be `can_deal_out` and started.
    """

    def __init__(self, engine: Fragments, transfer: Transfer, subgroup_row: Value) -> None:
        self.b, self.engine, self.transfer, self.subgroup_row = engine.b, engine, transfer, subgroup_row
        elem = transfer.source.elem
        self.runs = [engine.incoming(self.b.bitcast(x.value, Vector(elem, RUN))) for x in transfer.registers]

    def fragments(self, passing_start: Value, width: int) -> Callable[[int], list[Value]]:
        """A function that gives the fragments of 16 columns, one for each 16 rows. Columns that do not stay in shared
        memory pass at ``passing_start``, ``width`` at a time. A barrier must follow."""
        b, shape = self.b, self.engine.shape
        cols = self.transfer.source.cols
        stays = shape.q_columns(cols)
        waiting: list[ColumnRange] = [(0, stays, b.const(0, i32))] if stays else []
        resident = self._load(waiting[0]) if stays else None
        fragments: list[list[Value]] = []
        for first in range(stays, cols, width):
            passing = (first, min(first + width, cols), passing_start)
            self._put([*waiting, passing])
            waiting = []
            b.barrier()
            fragments += [self._load(passing)(k) for k in range(first // SIZE, passing[1] // SIZE)]
            b.barrier()  # everyone has read it: the memory is free again
        if waiting:
            self._put(waiting)
        return lambda k: resident(k) if resident is not None and k * SIZE < stays else fragments[k - stays // SIZE]

    def _load(self, columns: ColumnRange) -> Callable[[int], list[Value]]:
        engine, (first, end, start) = self.engine, columns
        stride, rows = row_stride(end - first), range(0, engine.shape.rows, engine.arrangement.height)
        own = start + self.subgroup_row * stride
        return lambda k: [engine.load_left(self.transfer.memory, own, stride, row, k * SIZE - first) for row in rows]

    def _put(self, places: list[ColumnRange]) -> None:
        """Store this thread's runs, which lie in one column, if the column is among consecutive ``places``."""
        b, transfer = self.b, self.transfer
        at, step = b.const(0, i32), b.const(0, i32)
        for first, end, start in reversed(places):
            stride, inside = row_stride(end - first), transfer.col < end
            at = b.select(inside, start + transfer.row * stride + (transfer.col - first), at)
            step = b.select(inside, b.const(transfer.step * stride, i32), step)
        with b.if_((transfer.col >= places[0][0]) & (transfer.col < places[-1][1])):
            for i, run in enumerate(self.runs):
                b.store(transfer.memory, at + step * i, run)


def can_store_runs(engine: Fragments, out: Matrix) -> bool:
    """Whether `store_runs` can store O."""
    return out.aligned and out.col_stride is None and out.elem == engine.elem and out.cols % SIZE == 0


def store_runs(
    engine: Fragments,
    values: list[list[Value]],
    out: Matrix,
    row0: Value,
    subgroup_row: Value,
    memory: Value,
    room: int,
) -> None:
    """Store a lane's elements of O through ``room`` elements of unused shared memory, from where neighbouring lanes
    store neighbouring runs. ``row0`` is the block's first row, and ``subgroup_row`` the subgroup's in it."""
    b, shape = engine.b, engine.shape
    width = out.cols
    while shape.block_q * row_stride(width) > room:
        width = -(-width // (2 * SIZE)) * SIZE
    stride = row_stride(width)
    own = subgroup_row * stride  # no other subgroup uses this part
    per = len(values[0]) * SIZE // out.cols  # elements of a lane in 16 columns
    for first in range(0, out.cols, width):
        if first:
            b.subgroup_barrier()
        cols = min(width, out.cols - first)
        across = cols // RUN
        engine.put(memory, own, stride, [row[first // SIZE * per : (first + cols) // SIZE * per] for row in values])
        b.subgroup_barrier()
        count = shape.rows * across
        for i in range(0, count, shape.lanes):
            row, run = divmod_const(b, engine.lane + i, across)
            at = row0 + subgroup_row + row
            inside = None if out.in_bounds else at < out.rows
            if i + shape.lanes > count:
                inside = engine.lane + i < count if inside is None else inside & (engine.lane + i < count)
            with nullcontext() if inside is None else b.if_(inside):
                line = out.base + out.index(b, at) * out.row_stride
                found = b.load(memory, own + row * stride + run * RUN, RUN)
                b.store(out.buffer, line + out.index(b, run * RUN + first), found)
