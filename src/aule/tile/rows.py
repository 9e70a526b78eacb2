"""The row engine: kernels that read rows, combine what is in each, and write rows, on GPUs and CPUs alike.

A kernel is a function of the `Part`, some neighbouring columns of a row, and is traced for every part a thread has:

    rows = Rows(b, target, shape, work, count)

    def body() -> None:
        x, y = rows.source(x_array), rows.source(y_array)
        total = span.sum(lambda p: p[x] * p[x])
        scale = total.map(lambda s: rsqrt(s))
        span.each(lambda p: p.store(y, p[x] * p[scale]))

    rows.run(body)

On a GPU some threads share a row, or some rows a subgroup. A row that fits stays in registers (`SpanShape.parts`), so
that it is read once however often the kernel passes over it; one that does not is read again in each pass, from the
cache. On a CPU a row belongs to one thread, a part is a vector, and passes read it from the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aule.ir import Builder, Value
from aule.ir.types import Scalar, Vector, element, i32
from aule.target import Target
from aule.tile.mail import Mail
from aule.tile.math import fold, fold_lanes
from aule.tile.matrix import divmod_const

if TYPE_CHECKING:
    from aule.tile.early import Ahead

Through = Literal["shared", "registers", "parked", "parked alone"]

Combine = Callable[..., "list[PerRow]"]
"""From a kind and numbers of rows that lanes have to those of all of them together."""
NEUTRAL = {"add": 0.0, "max": float("-inf")}
_READ_AT_ONCE = 32
"""Partial results that every thread combines by itself, where shuffles do not; of more, some make fewer first."""


@dataclass(frozen=True)
class RowShape:
    """How rows lie over the threads of a workgroup.

    Attributes
    ----------
    threads : int
        That share a row: a power of two; or, where one row is all of a workgroup, a multiple of the subgroup size, of
        no more subgroups than one has lanes. 1 on a CPU.
    slots : int
        Rows side by side in a workgroup.
    batch : int
        Rows that a thread takes at once: their loads are under way together, and their reductions share barriers.
    loops : bool
        Workgroups take one block of rows after the other, instead of one each.
    exact : bool
        All blocks are whole: ``slots * batch`` divides the number of rows.
    resident : int
        Workgroups for each of a device's units, in kernels that loop.
    ahead : int
        Blocks that are on their way while one is worked on (`aule.tile.early`), in kernels that loop.
    through : str
        Where they are on their way to: ``shared`` memory (`aule.tile.stages`), or, with one block ahead, ``registers``
        (`aule.tile.carried`), from where one array is ``parked`` in shared memory when its turn comes, or the only one
        that comes ahead (`aule.tile.parked`).
    cluster : int
        Workgroups, a power of two, that share a row, each with ``threads`` of it: a power of two as well, of no more
        subgroups in all than one has lanes (`Target.max_cluster`).
    mail : int
        In kernels that loop, with one row at a time: how many numbers of it those exchange, all at once and by mail
        (`aule.tile.mail`); 0 where they meet at barriers.
    registers : int
        Of a thread at most, where a compiler can be told; 0 leaves it to that.
    landed : bool
        In kernels that do not loop: rows are copied to shared memory, past the registers, and each pass reads them
        there. Where registers decide, more workgroups fit.
    numbered : bool
        In kernels that do not loop: a workgroup's number along the first axis is that of its block, and there are as
        many of either. So it starts without asking how many.
    gather : int
        In kernels that loop, with rows on their way to shared memory: 2 where the two workgroups of a cluster add up
        their sums of columns before they leave them.
    """

    threads: int = 1
    slots: int = 1
    batch: int = 1
    loops: bool = False
    exact: bool = False
    resident: int = 1
    ahead: int = 0
    through: Through = "shared"
    cluster: int = 1
    mail: int = 0
    registers: int = 0
    landed: bool = False
    numbered: bool = False
    gather: int = 1

    @property
    def workgroup(self) -> int:
        return self.threads * self.slots

    @property
    def block(self) -> int:
        """Rows that a workgroup has at a time."""
        return self.slots * self.batch


@dataclass(frozen=True)
class RowArray:
    """An array of rows in memory.

    Attributes
    ----------
    start : callable
        From the number of a row to the index of its first element.
    stride : Value or None
        Elements from one column to the next; None means 1.
    aligned : bool
        Every part of a row starts at a multiple of its width, or of 16 bytes where it has more.
    stream : bool
        What is stored goes past the caches.
    """

    buffer: Value
    start: Callable[[Value], Value]
    stride: Value | None = None
    aligned: bool = False
    stream: bool = False


@dataclass(frozen=True, eq=False)
class Source:
    """The rows of an array that a thread has, or some columns of them: where each begins."""

    array: RowArray
    starts: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Columns:
    """An array of one number per column, the same for every row."""

    array: RowArray
    start: Value


@dataclass(frozen=True, eq=False)
class PerRow:
    """A number for each row that a thread has."""

    values: tuple[Value, ...]

    def map(self, f: Callable[..., Value], *others: PerRow) -> PerRow:
        """``f`` of the numbers of each row, of this one and of others."""
        return PerRow(tuple(f(*row) for row in zip(self.values, *(x.values for x in others), strict=True)))


class Rows:
    """The rows of a workgroup.

    Parameters
    ----------
    work : Scalar
        The type that is computed in.
    count : Value
        i32, how many rows there are.
    """

    def __init__(self, b: Builder, target: Target, shape: RowShape, work: Scalar, count: Value) -> None:
        self.b, self.shape, self.work, self.count = b, shape, work, count
        smallest = min(target.subgroup_sizes, default=target.subgroup_size)
        self.lanes = min(max(smallest, 1), shape.threads)
        """Threads of a row that exchange registers."""
        self.slot, self.lane = b.const(0, i32), b.thread_id()
        if shape.slots > 1 or shape.threads == 1:
            self.slot, self.lane = divmod_const(b, b.thread_id(), shape.threads)
        self.group, self.groups = b.group_id(0), b.group_count(0)
        """Which of the blocks that are worked on at a time is this workgroup's, and how many such there are."""
        if not (shape.loops or shape.numbered):  # they may lie along two axes
            self.group, self.groups = self.group + b.group_id(1) * self.groups, self.groups * b.group_count(1)
        if shape.cluster > 1:
            self.group, number = divmod_const(b, self.group, shape.cluster)
            self.groups = self.groups // shape.cluster
            self.lane = self.lane + number * shape.threads
        self.vectors = target.backend == "cpu"
        self.closes = target.backend == "opencl"
        self.numbers: tuple[Value, ...] = ()
        """Of the rows this thread has, each an existing one."""
        self.exists: tuple[Value | None, ...] = ()
        """Whether they count; None where they are sure to. A row that does not repeats the last, and is not stored."""
        self.turn = b.const(0, i32)
        """Which of their blocks workgroups that loop are at, in a ring: neighbours do not share memory."""
        self._turns = max(shape.ahead + 1, 2) if shape.loops else 1
        self._exchanges = 0
        self._mail: Mail | None = None
        if shape.mail:
            self._mail = Mail(
                b,
                self.lanes,
                cluster=shape.cluster,
                parts=shape.threads // self.lanes,
                slots=shape.slots,
                boxes=self._turns,
                numbers=shape.mail,
            )
        self.scratch: Value | None = None
        """Shared memory in which `ColumnSums` are added up."""

    def run(self, body: Callable[[], None], *early: Ahead) -> None:
        """Trace ``body`` for the rows of this workgroup, which come ``early`` where that is given."""
        b, shape = self.b, self.shape
        if shape.numbered:
            self.take(self.group, body)
            return
        blocks = (self.count + (shape.block - 1)) // shape.block
        if shape.loops:
            first, last, step = self.group, blocks, self.groups
            if self.vectors:  # neighbouring rows: a core reads ahead, and does not share lines with another
                each = (blocks + (step - 1)) // step
                first, last, step = first * each, b.min(first * each + each, blocks), b.const(1, i32)
            for coming in early:
                coming.start(first, last, step)
            if self._mail is not None:
                self._mail.open()
            turn = b.var(b.const(0, i32), "turn")
            with b.loop(first, last, step, name="block") as block:
                self.turn = turn.value
                for coming in early:
                    coming.advance(block, last, step)
                self.take(block, body)
                turn.value = self.turned(self.turn + 1)
        else:
            with b.if_(self.group < blocks):
                self.take(self.group, body)

    def turned(self, stage: Value) -> Value:
        """A number of a stage that may have gone once around the ring."""
        return self.b.select(stage < self._turns, stage, stage - self._turns)

    def finish(self) -> None:
        """What a kernel ends with: PoCL 3.1 takes the last condition before its end for one on which all threads
        agree."""
        if self.closes:
            self.b.barrier()
        if self.shape.cluster > 1 or self.shape.gather > 1:
            self.b.cluster_barrier()  # nobody ends while others read

    def take(self, block: Value, body: Callable[[], None]) -> None:
        """Call ``body`` with the rows of a block."""
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
        """The rows of an array, from column ``shift`` on."""
        return Source(array, tuple(self.shifted(array, array.start(number), shift) for number in self.numbers))

    def shifted(self, array: RowArray, start: Value, shift: Value | int) -> Value:
        """Where column ``shift`` of the row that begins at ``start`` is."""
        if isinstance(shift, int) and shift == 0:
            return start
        step = self.b.cast(self.b.coerce(shift, i32), element(start.type))
        return start + (step if array.stride is None else step * array.stride)

    def per_row(self, f: Callable[[Value], Value]) -> PerRow:
        """A number from the number of each row."""
        return PerRow(tuple(f(number) for number in self.numbers))

    def put(self, array: RowArray, numbers: PerRow) -> None:
        """Store a number for each row that exists at its start in an array; one of its threads does so."""
        b = self.b
        for number, exists, value in zip(self.numbers, self.exists, numbers.values, strict=True):
            first = b.eq(self.lane, 0)
            with b.if_(first if exists is None else first & exists):
                b.store(array.buffer, array.start(number), b.cast(value, element(array.buffer.type)))

    def get(self, array: RowArray) -> PerRow:
        """What `put` has stored."""
        return self.per_row(lambda number: self.b.load(array.buffer, array.start(number)))

    # -- reductions ----------------------------------------------------------------------------------------------------

    def reduce(self, kind: str, partials: Sequence[PerRow]) -> list[PerRow]:
        """Combine what the threads of a row have, all in one exchange; every thread gets the results."""
        values = [x for partial in partials for x in partial.values]
        if self.shape.threads * self.shape.cluster > self.lanes:
            values = self._exchange(kind, values)
        else:
            values = self._dealt(self._gathered(kind, values, 1, self.lanes), len(values), 1, self.lanes)
        return self._by_row(values)

    def _gathered(self, kind: str, values: list[Value], first: int, last: int) -> list[Value]:
        """Combine over the lanes whose numbers differ in the bits from ``first`` to below ``last``.

        Of two values a lane goes on with one and hands the other over, so that four over 32 lanes take 6 shuffles, not
        20. Value ``n * i + j`` of n lanes is the j-th lane's i-th in the end.
        """
        b, mask = self.b, first
        while mask < last:
            upper = b.ne(self.lane & mask, 0) if len(values) > 1 else None
            kept = []
            for pair in (values[i : i + 2] for i in range(0, len(values), 2)):
                if upper is None or len(pair) == 1:
                    mine = given = pair[0]
                else:
                    mine, given = b.select(upper, pair[1], pair[0]), b.select(upper, pair[0], pair[1])
                kept.append(b.binary(kind, mine, b.shuffle_xor(given, mask)))
            values, mask = kept, mask * 2
        return values

    def _dealt(self, values: list[Value], count: int, first: int, last: int) -> list[Value]:
        """Let all lanes have what `_gathered` has left to one each: ``count`` values."""
        b, mask = self.b, last
        counts = [count]  # of values before each of its steps
        while mask > first:
            counts.append(-(-counts[-1] // 2))
            mask //= 2
        for before in reversed(counts[:-1]):
            last //= 2
            if before == 1:
                continue
            upper = b.ne(self.lane & last, 0)
            spread: list[Value] = []
            for i, mine in enumerate(values):
                if 2 * i + 1 == before:  # it had no other, and both lanes have it
                    spread.append(mine)
                    continue
                other = b.shuffle_xor(mine, last)
                spread += [b.select(upper, other, mine), b.select(upper, mine, other)]
            values = spread
        return values

    @property
    def meets(self) -> bool:
        """Whether a row has several subgroups, of which each can read what all have left by one load a lane."""
        return 1 < self.lanes < self.shape.threads * self.shape.cluster <= self.lanes * self.lanes

    @property
    def merges(self) -> bool:
        """Whether `merged` can be: all threads of a row have as much of it, and their number is a power of two."""
        threads = self.shape.threads
        even = self.shape.cluster == 1 and threads & (threads - 1) == 0
        return even and 1 < self.lanes <= threads <= self.lanes * self.lanes

    def merged(self, mean: PerRow, squares: PerRow, count: int) -> tuple[PerRow, PerRow]:
        """From the mean of ``count`` columns that each thread has, and the sum of squares about it, to those of the
        row, in one exchange. What two that meet have is of both, so nothing is lost where means are large."""
        b, lanes, parts = self.b, self.lanes, self.shape.threads // self.lanes
        pairs = list(zip(mean.values, squares.values, strict=True))
        pairs = [self._met(pair, count, lanes) for pair in pairs]
        if parts > 1:
            values = [x for pair in pairs for x in pair]
            size = len(values) * parts
            number, lane = divmod_const(b, self.lane, lanes)
            scratch = b.shared(f"row_moments_{self._exchanges}", self.work, self._turns * self.shape.slots * size)
            self._exchanges += 1
            mine = (self.turn * self.shape.slots + self.slot) * size
            with b.if_(b.eq(lane, 0)):
                for i, x in enumerate(values):
                    b.store(scratch, mine + i * parts + number, x)
            b.barrier()
            place = lane & (parts - 1)
            values = [b.load(scratch, mine + i * parts + place) for i in range(len(values))]
            pairs = list(zip(values[::2], values[1::2], strict=True))
            pairs = [self._met(pair, count * lanes, parts) for pair in pairs]
        means, sums = zip(*pairs, strict=True)
        return PerRow(means), PerRow(sums)

    def _met(self, pair: tuple[Value, Value], count: int, lanes: int) -> tuple[Value, Value]:
        """Mean and squares of ``lanes`` lanes together, of which each has those of ``count`` columns."""
        b, (mean, squares), mask = self.b, pair, 1
        while mask < lanes:
            other, more = b.shuffle_xor(mean, mask), b.shuffle_xor(squares, mask)
            apart = other - mean
            mean, squares = (mean + other) * 0.5, b.fma(apart * (0.5 * count), apart, squares + more)
            mask, count = mask * 2, count * 2
        return mean, squares

    def within(self, kind: str, partial: PerRow) -> PerRow:
        """Combine over the subgroup."""
        values = list(partial.values)
        return PerRow(tuple(self._dealt(self._gathered(kind, values, 1, self.lanes), len(values), 1, self.lanes)))

    def meet(self, known: PerRow, partials: Sequence[PerRow]) -> tuple[list[PerRow], Combine]:
        """Where a row `meets`: what each of its subgroups knows, and sums over each; this lane gets those of one of
        them. And what combines such values of lanes, so that every subgroup counts once."""
        b, shape, parts = self.b, self.shape, self.shape.threads // self.lanes
        # It is the sum of as many parts of it as there are lanes, without an error.
        partials = [known.map(lambda x: x * (1.0 / self.lanes)), *partials]
        values = [value for partial in partials for value in partial.values]
        scratch, mine, lane = self._leave("add", values)
        width = 1 << (parts * shape.cluster - 1).bit_length()
        place = lane & (width - 1)
        if shape.cluster > 1:
            b.cluster_barrier()
            group, part = divmod_const(b, place, parts)
            found = [b.cluster_load(scratch, mine + i * parts + part, group) for i in range(len(values))]
        else:
            b.barrier()
            at = b.min(place, parts - 1) if parts < width else place
            found = [b.load(scratch, mine + i * parts + at) for i in range(len(values))]

        def combine(kind: str, *numbers: PerRow) -> list[PerRow]:
            values = [value for number in numbers for value in number.values]
            if parts * shape.cluster < width:
                values = [b.select(place < parts, x, NEUTRAL[kind]) for x in values]
            values = self._dealt(self._gathered(kind, values, 1, width), len(values), 1, width)
            return self._by_row(values)

        return self._by_row(found), combine

    def _by_row(self, values: list[Value]) -> list[PerRow]:
        """Numbers of the first row, of the second ..., of all that there are."""
        batch = self.shape.batch
        return [PerRow(tuple(values[i : i + batch])) for i in range(0, len(values), batch)]

    def _leave(self, kind: str, values: list[Value]) -> tuple[Value, Value, Value]:
        """Combine over each subgroup and leave that in shared memory: the memory, where a row's begins, of each value
        what all subgroups have, and the number of the lane."""
        b, parts, count = self.b, self.shape.threads // self.lanes, len(values)
        number, lane = divmod_const(b, b.thread_id() if self.shape.cluster > 1 else self.lane, self.lanes)
        name = f"row_{kind}_{self._exchanges}"
        self._exchanges += 1
        scratch = b.shared(name, self.work, self._turns * self.shape.slots * count * parts)
        mine = (self.turn * self.shape.slots + self.slot) * (count * parts)
        for i, x in enumerate(self._gathered(kind, values, 1, self.lanes)):
            to = mine + (lane + i * self.lanes) * parts + number
            have = count - i * self.lanes
            with b.if_(lane < have) if have < self.lanes else nullcontext():
                b.store(scratch, to, x)
        return scratch, mine, lane

    def _exchange(self, kind: str, values: list[Value]) -> list[Value]:
        """Combine over the subgroups of a row through shared memory."""
        if self._mail is not None:
            return self._by_mail(kind, values)
        b, parts, count = self.b, self.shape.threads // self.lanes, len(values)
        scratch, mine, lane = self._leave(kind, values)
        if self.shape.cluster > 1:
            b.cluster_barrier()
            return self._read_cluster(kind, scratch, mine, lane, count)
        b.barrier()
        if parts <= self.lanes and parts not in (2, 4):
            # Each subgroup reads them all, a lane one of as many values as fit: fewer registers than if every thread
            # did so.
            width = 1 << (parts - 1).bit_length()
            share, place = divmod_const(b, lane, width)
            found: list[Value] = []
            while len(found) < count:
                fitting = min(self.lanes // width, 1 << ((count - len(found)).bit_length() - 1))
                which = (share & (fitting - 1)) + len(found)
                x = b.load(scratch, mine + which * parts + b.min(place, parts - 1))
                if parts < width:
                    x = b.select(place < parts, x, NEUTRAL[kind])
                found += self._dealt(self._gathered(kind, [x], 1, width), fitting, width, width * fitting)
            return found
        left = parts
        if parts > _READ_AT_ONCE:
            left = parts // _READ_AT_ONCE
            total = [b.var(b.const(NEUTRAL[kind], self.work)) for _ in values]
            with b.if_(self.lane < left):
                for i, variable in enumerate(total):
                    start = mine + i * parts + self.lane * _READ_AT_ONCE
                    variable.value = self._read(kind, scratch, start, _READ_AT_ONCE)
            b.barrier()
            with b.if_(self.lane < left):
                for i, variable in enumerate(total):
                    b.store(scratch, mine + i * parts + self.lane, variable.value)
            b.barrier()
        return [self._read(kind, scratch, mine + i * parts, left) for i in range(count)]

    def _by_mail(self, kind: str, values: list[Value]) -> list[Value]:
        """Combine over the subgroups of a row, all in one exchange of a block."""
        mail, count = self._mail, len(values)
        assert mail is not None and count == mail.numbers and not self._exchanges, (count, self._exchanges)
        self._exchanges += 1
        mail.send(self._gathered(kind, values, 1, self.lanes)[0], self.turn)
        found, width = mail.take(self.turn), mail.senders
        return self._dealt(self._gathered(kind, [found], count, width * count), count, 1, count)

    def _read_cluster(self, kind: str, scratch: Value, mine: Value, lane: Value, count: int) -> list[Value]:
        """Combine what all subgroups of a cluster have left, each in memory of its workgroup."""
        b, parts = self.b, self.shape.threads // self.lanes
        width = parts * self.shape.cluster
        share, place = divmod_const(b, lane, width)
        group, part = divmod_const(b, place, parts)
        found: list[Value] = []
        while len(found) < count:
            fitting = min(self.lanes // width, 1 << ((count - len(found)).bit_length() - 1))
            which = (share & (fitting - 1)) + len(found)
            x = b.cluster_load(scratch, mine + which * parts + part, group)
            found += self._dealt(self._gathered(kind, [x], 1, width), fitting, width, width * fitting)
        return found

    def _read(self, kind: str, scratch: Value, start: Value, count: int) -> Value:
        b = self.b
        width = min(count, 4)
        words = [b.load(scratch, start + i, width) for i in range(0, count, width)]
        return fold(b, kind, [x for word in words for x in b.unpack(word)])

    def combine(self, kind: str, vector: Value) -> Value:
        """Combine the lanes of a vector."""
        if self.vectors or not isinstance(vector.type, Vector):
            return fold_lanes(self.b, kind, vector)
        return fold(self.b, kind, self.b.unpack(vector))
