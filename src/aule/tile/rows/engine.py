"""The row engine: kernels that read rows, reduce each of them, and write rows, on GPUs and CPUs alike.

A kernel is a function of a `Part`, some neighbouring columns of a row, and is traced for every part of a thread:

    rows = Rows(b, target, shape, work, count)
    passes = Passes(rows, pass_shape, length)

    def body() -> None:
        x, y = rows.source(x_array), rows.source(y_array)
        scale = passes.sum(lambda p: p[x] * p[x]).map(lambda s: rsqrt(s))
        passes.each(lambda p: p.store(y, p[x] * p[scale]))

    rows.run(body)

On a GPU several threads share a row, and a subgroup may hold several rows. A row that fits stays in registers
(`PassShape.parts`), so it is read once however many passes the kernel makes; a longer one is read from the cache in
each pass. On a CPU one thread has a row, a part is a vector, and passes read the row from the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aule.ir import Builder, Value
from aule.ir.types import Scalar, element, i32
from aule.target import Target
from aule.tile.common.matrix import divmod_const
from aule.tile.rows.parts import PerRow, RowArray, Source
from aule.tile.rows.reductions import RowReductions
from aule.tile.rows.shape import RowShape

if TYPE_CHECKING:
    from aule.tile.rows.prefetch import BlockPrefetch


class Rows(RowReductions):
    """The rows of a workgroup; ``work`` is the type computed in, ``count`` the number of all rows (i32)."""

    def __init__(self, b: Builder, target: Target, shape: RowShape, work: Scalar, count: Value) -> None:
        self.count = count
        smallest = min(target.subgroup_sizes, default=target.subgroup_size)
        slot, lane = b.const(0, i32), b.thread_id()
        if shape.slots > 1 or shape.threads == 1:
            slot, lane = divmod_const(b, b.thread_id(), shape.threads)
        self.group, self.groups = b.group_id(0), b.group_count(0)
        """This workgroup's (or cluster's) number, and how many there are."""
        if not (shape.loops or shape.group_is_block):  # the grid may have two axes
            self.group, self.groups = self.group + b.group_id(1) * self.groups, self.groups * b.group_count(1)
        if shape.cluster > 1:
            self.group, number = divmod_const(b, self.group, shape.cluster)
            self.groups = self.groups // shape.cluster
            lane = lane + number * shape.threads
        self.final_barrier = target.ends_with_barrier
        self.numbers: tuple[Value, ...] = ()
        """Numbers of this thread's rows; all exist."""
        self.exists: tuple[Value | None, ...] = ()
        """Whether each row exists; None if it must. A row that does not repeats the last row, and is not stored."""
        super().__init__(b, shape, work, min(max(smallest, 1), shape.threads), slot, lane, target.host)
        self.scratch: Value | None = None
        """Shared memory in which slots add up their `ColumnSums`."""

    def run(self, body: Callable[[], None], *prefetches: BlockPrefetch) -> None:
        """Trace ``body`` for the rows of this workgroup."""
        b, shape = self.b, self.shape
        if shape.group_is_block:
            self.enter(self.group, body)
            return
        blocks = (self.count + (shape.block - 1)) // shape.block
        if not shape.loops:
            with b.if_(self.group < blocks):
                self.enter(self.group, body)
            return
        first, last, step = self.group, blocks, self.groups
        if self.vectors:  # neighbouring rows: the core's prefetcher follows, and cores share no cache lines
            each = (blocks + (step - 1)) // step
            first, last, step = first * each, b.min(first * each + each, blocks), b.const(1, i32)
        for prefetch in prefetches:
            prefetch.start(first, last, step)
        if self.cluster_exchange is not None:
            self.cluster_exchange.clear()
        stage = b.var(b.const(0, i32), "turn")
        with b.loop(first, last, step, name="block") as block:
            self.stage = stage.value
            for prefetch in prefetches:
                prefetch.advance(block, last, step)
            self.enter(block, body)
            stage.value = self.wrapped(self.stage + 1)

    def wrapped(self, stage: Value) -> Value:
        """A stage number that may be past the ring's end, wrapped around."""
        return self.b.select(stage < self.stages, stage, stage - self.stages)

    def finish(self) -> None:
        """Emit the barriers that a kernel ends with."""
        if self.final_barrier:
            self.b.barrier()
        if self.shape.cluster > 1 or self.shape.sums_cluster > 1:
            self.b.cluster_barrier()  # no workgroup may end while others read its shared memory

    def enter(self, block: Value, body: Callable[[], None]) -> None:
        """Call ``body`` with `numbers` and `exists` set to the rows of a block."""
        b, shape = self.b, self.shape
        first = (block * shape.slots + self.slot) * shape.batch
        numbers = [first + i for i in range(shape.batch)]
        if shape.exact or shape.block == 1:
            self.numbers, self.exists = tuple(numbers), (None,) * shape.batch
        else:
            self.numbers = tuple(b.min(number, self.count - 1) for number in numbers)
            self.exists = tuple(number < self.count for number in numbers)
        body()

    # -- operands ------------------------------------------------------------------------------------------------------

    def source(self, array: RowArray, shift: Value | int = 0) -> Source:
        """This thread's rows of an array, from column ``shift`` on."""
        return Source(array, tuple(self.shifted(array, array.start(number), shift) for number in self.numbers))

    def shifted(self, array: RowArray, start: Value, shift: Value | int) -> Value:
        """The index of column ``shift`` of the row that begins at ``start``."""
        if isinstance(shift, int) and shift == 0:
            return start
        step = self.b.cast(self.b.coerce(shift, i32), element(start.type))
        return start + (step if array.stride is None else step * array.stride)

    def per_row(self, f: Callable[[Value], Value]) -> PerRow:
        """Apply ``f`` to the number of each row."""
        return PerRow(tuple(f(number) for number in self.numbers))

    def put(self, array: RowArray, numbers: PerRow) -> None:
        """Store one value per existing row, at the row's start; one thread of the row does so."""
        b = self.b
        for number, exists, value in zip(self.numbers, self.exists, numbers.values, strict=True):
            first = b.eq(self.lane, 0)
            with b.if_(first if exists is None else first & exists):
                b.store(array.buffer, array.start(number), b.cast(value, element(array.buffer.type)))

    def get(self, array: RowArray) -> PerRow:
        """Load what `put` has stored."""
        return self.per_row(lambda number: self.b.load(array.buffer, array.start(number)))
