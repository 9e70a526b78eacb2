"""Rows of Q and O on their way into and out of a forward kernel for matrix units, in few instructions.

Registers leave two subgroups to a scheduler there, so that an instruction before the loop over the keys or behind it
takes some five cycles, and four hundred of them are a hundredth of a block with 2048 keys (H200, d128).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from aule.ir import Value
from aule.ir.types import Vector, i32
from aule.tile.arrangement import SIZE
from aule.tile.fragment import Fragments
from aule.tile.fragment_shape import RUN, row_stride
from aule.tile.matrix import Matrix, divmod_const
from aule.tile.transfer import Transfer

Columns = tuple[int, int, Value]
"""From the first up to the last, and where in shared memory they begin."""


def dealt_out(transfer: Transfer) -> bool:
    """Whether it can bring in `QueryRows`: a thread's runs lie in one column, and wait in registers."""
    return transfer.regular and not transfer.direct and transfer.source.cols % SIZE == 0


class QueryRows:
    """Rows of Q that come in whole, so that places are a start and steps, and are dealt out by columns: to memory where
    they stay, and to memory through which they pass into registers."""

    def __init__(self, engine: Fragments, transfer: Transfer, subgroup_row: Value) -> None:
        """``transfer`` can be `dealt_out`, and has been started."""
        self.b, self.engine, self.transfer, self.subgroup_row = engine.b, engine, transfer, subgroup_row
        elem = transfer.source.elem
        self.runs = [engine.incoming(self.b.bitcast(x.value, Vector(elem, RUN))) for x in transfer.registers]

    def fragments(self, passing_start: Value, width: int) -> Callable[[int], list[Value]]:
        """What gives the fragments of 16 columns, one for each 16 rows. Columns that do not stay pass at
        ``passing_start``, ``width`` of them at a time. A barrier is to follow."""
        b, shape = self.b, self.engine.shape
        cols = self.transfer.source.cols
        stays = shape.q_columns(cols)
        waiting: list[Columns] = [(0, stays, b.const(0, i32))] if stays else []
        kept = self._load(waiting[0]) if stays else None
        held: list[list[Value]] = []
        for first in range(stays, cols, width):
            passing = (first, min(first + width, cols), passing_start)
            self._put([*waiting, passing])
            waiting = []
            b.barrier()
            held += [self._load(passing)(k) for k in range(first // SIZE, passing[1] // SIZE)]
            b.barrier()  # everyone has read it: the memory is free again
        if waiting:
            self._put(waiting)
        return lambda k: kept(k) if kept is not None and k * SIZE < stays else held[k - stays // SIZE]

    def _load(self, columns: Columns) -> Callable[[int], list[Value]]:
        engine, (first, end, start) = self.engine, columns
        stride, rows = row_stride(end - first), range(0, engine.shape.rows, engine.way.height)
        own = start + self.subgroup_row * stride
        return lambda k: [engine.load_left(self.transfer.memory, own, stride, row, k * SIZE - first) for row in rows]

    def _put(self, places: list[Columns]) -> None:
        """Store what this thread has of columns that follow each other. All of its runs lie in one column."""
        b, transfer = self.b, self.transfer
        at, step = b.const(0, i32), b.const(0, i32)
        for first, end, start in reversed(places):
            stride, inside = row_stride(end - first), transfer.col < end
            at = b.select(inside, start + transfer.row * stride + (transfer.col - first), at)
            step = b.select(inside, b.const(transfer.step * stride, i32), step)
        with b.if_((transfer.col >= places[0][0]) & (transfer.col < places[-1][1])):
            for i, run in enumerate(self.runs):
                b.store(transfer.memory, at + step * i, run)


def goes_in_runs(engine: Fragments, out: Matrix) -> bool:
    """Whether O can be stored by `store_runs`."""
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
    """Store a lane's elements of O by way of ``room`` elements of shared memory, which nobody reads any more: there
    neighbouring lanes find neighbouring runs.

    Parameters
    ----------
    row0, subgroup_row : Value
        The block's first row, and the subgroup's in it.
    """
    b, shape = engine.b, engine.shape
    width = out.cols
    while shape.block_q * row_stride(width) > room:
        width = -(-width // (2 * SIZE)) * SIZE
    stride = row_stride(width)
    own = subgroup_row * stride  # no other subgroup comes there
    per = len(values[0]) * SIZE // out.cols  # elements that a lane has of 16 columns
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
            inside = None if out.whole else at < out.rows
            if i + shape.lanes > count:
                inside = engine.lane + i < count if inside is None else inside & (engine.lane + i < count)
            with nullcontext() if inside is None else b.if_(inside):
                line = out.base + out.index(b, at) * out.row_stride
                found = b.load(memory, own + row * stride + run * RUN, RUN)
                b.store(out.buffer, line + out.index(b, run * RUN + first), found)
