"""The end of a split sequence without fences: some workgroups wait for the parts of others and add them up.

These are the last of those that make the parts of a block of rows, or all of them, or workgroups of a launch of their
own (`trail.py`); each has some of the columns. A device need not begin a workgroup before another one ends, so there
are no more that wait than it has room for beside others (`shapes.choose_waiters`, `shapes.choose_trail`).

Parts are left in words that are zero until then, and a word that is not zero is there: a number that is zero is left as
the negative zero. Each word speaks for itself, so nothing has to be ordered: neither fence nor ticket, and parts are
read as soon as they have come. Whoever has read a word sets it back to zero, as it was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from aule.ir import Builder, Value
from aule.ir.types import bool_, f32, i32, u32
from aule.ops.decode.result import Result
from aule.tile.math import LOWEST, fold, posted_words
from aule.tile.matrix import QUAD

PAIR = 2
TRAIL_BYTES = 4 * (QUAD + PAIR)
"""Shared memory of a thread that puts together what it found with that of others."""
Store = Callable[[Value, Value, Value, list[Value]], None]
"""Takes the first of four columns, counted through all rows, the row's maximum and sum of weights, and the sums."""


def awaited_words(columns: int, parts: int) -> int:
    """Words of one block of rows, for ``columns`` of all of its rows; each four have a maximum and a sum as well."""
    return parts * (columns + columns // QUAD * PAIR)


def span_of(places: int, waiters: int, threads: int) -> int:
    """Fours of columns, of so many, that each workgroup of those that wait adds up at a time: a power of two."""
    return min(1 << (-(-places // waiters) - 1).bit_length(), threads)


class PostedParts:
    """The parts of the workgroup's rows, of which this one leaves one.

    Parameters
    ----------
    columns : int
        Of all rows that a workgroup has room for.
    """

    def __init__(self, result: Result, columns: int) -> None:
        self.b, self.place, self.config = result.b, result.place, result.config
        p = result.p
        self._columns, self._part_words = columns, columns + columns // QUAD * PAIR
        self._words = p.buffer("tickets", i32, "readwrite")
        self._start = self.place.block_of_rows * (p.number("splits") * self._part_words)

    def leave(self, column: Value, highest: Value, total: Value, values: list[Value]) -> None:
        """Leave four columns of this workgroup's part."""
        quad, pair = self._at(self.place.part, column)
        self.b.post(self._words, quad, self.b.vector(posted_words(self.b, values)))
        self.b.post(self._words, pair, self.b.vector(posted_words(self.b, [highest, total])))

    def _at(self, part: Value, column: Value) -> tuple[Value, Value]:
        first = self._start + part * self._part_words
        return first + column, first + ((column >> 1) + self._columns)


class AwaitedParts(PostedParts):
    """The same in workgroups that wait for all of them.

    Parameters
    ----------
    across : bool
        Neighbouring lanes have neighbouring columns, and what they found of their parts is put together in shared
        memory; else they have parts of the same columns, and exchange it.
    """

    def __init__(
        self, result: Result, columns: int, thread: Value, threads: int, lanes: int = 0, across: bool = False
    ) -> None:
        super().__init__(result, columns)
        self.thread = thread
        places = columns // QUAD
        self._span = span_of(places, self.config.waiters, threads)
        """Fours of columns that a workgroup adds up at a time."""
        self._slots = threads // self._span
        """Lanes for each of them, which share its parts."""
        self._across, self._threads = across, threads
        fits = self._span * self._slots == threads and (across or self._slots <= lanes)
        assert fits, (places, threads, self.config.waiters)

    def add_up(self, columns: Value, store: Store) -> None:
        """In workgroups that wait, add up this one's share of the columns of all parts, and store them.

        Parameters
        ----------
        columns : Value
            Of the rows that there are.
        """
        b, parts = self.b, self.place.parts
        if self.config.everyone:
            self._add_share(self.place.part, parts, columns, store)
            return
        if not self.config.makes_parts:
            self._add_share(self.place.part, b.const(self.config.waiters, i32), columns, store)
            return
        waiters = b.min(parts, self.config.waiters)
        number = self.place.part - (parts - waiters)
        with b.if_(number >= 0):
            self._add_share(number, waiters, columns, store)

    def _add_share(self, number: Value, waiters: Value, columns: Value, store: Store) -> None:
        """The share of one of those that wait."""
        b, parts, slots, at_once = self.b, self.place.parts, self._slots, self.config.at_once
        if self._across:
            mine, slot = self.thread & (self._span - 1), self.thread >> (self._span.bit_length() - 1)
        else:
            slot, mine = self.thread & (slots - 1), self.thread >> (slots.bit_length() - 1)
        with b.loop(number * self._span, self._columns // QUAD, waiters * self._span, name="place") as first:
            column = (first + mine) * QUAD
            there = column < columns
            column = b.min(column, columns - QUAD)
            if self.config.at_one_go:
                sums = self._await(slot, there, column)
            else:
                kept = [b.var(b.const(x, f32), "sum") for x in (LOWEST, *[0.0] * (1 + QUAD))]
                with b.loop(0, parts, slots * at_once, name="split") as start:
                    before = [x.value for x in kept]
                    for variable, x in zip(kept, self._await(start + slot, there, column, before), strict=True):
                        variable.value = x
                sums = [x.value for x in kept]
            if self._across:
                again = self._columns // QUAD > self.config.waiters * self._span
                self._put_together(sums, mine, there & b.eq(slot, 0), column, store, again)
            else:
                highest, total, *values = self._gathered(sums)
                with b.if_(there & b.eq(slot, 0)):
                    store(column, highest, total, values)

    def _put_together(
        self, sums: list[Value], mine: Value, chosen: Value, column: Value, store: Store, again: bool
    ) -> None:
        """What the threads of a place found, in shared memory; chosen ones of them store it."""
        b, slots, span = self.b, self._slots, self._span
        if slots == 1:
            with b.if_(chosen):
                store(column, sums[0], sums[1], sums[2:])
            return
        pairs = b.shared("found_pairs", f32, self._threads * PAIR)
        quads = b.shared("found_quads", f32, self._threads * QUAD)
        b.store(pairs, self.thread * PAIR, b.vector(sums[:PAIR]))
        b.store(quads, self.thread * QUAD, b.vector(sums[PAIR:]))
        b.barrier()
        with b.if_(chosen):
            found = []
            for i in range(slots):
                at = mine + i * span
                pair, quad = b.load(pairs, at * PAIR, PAIR), b.load(quads, at * QUAD, QUAD)
                found.append([*b.unpack(pair), *b.unpack(quad)])
            highest, total, *values = self._weighted(found)
            store(column, highest, total, values)
        if again:
            b.barrier()

    def _gathered(self, sums: list[Value]) -> list[Value]:
        """What the lanes of a place found, together."""
        b, masks = self.b, [1 << i for i in range(self._slots.bit_length() - 1)]
        if not masks:
            return sums
        highest = sums[0]
        for mask in masks:
            highest = b.max(highest, b.shuffle_xor(highest, mask))
        factor = b.exp2(sums[0] - highest)
        rest = [x * factor for x in sums[1:]]
        for mask in masks:
            rest = [x + b.shuffle_xor(x, mask) for x in rest]
        return [highest, *rest]

    def _await(self, start: Value, there: Value, column: Value, before: Sequence[Value] = ()) -> list[Value]:
        """Wait for some parts of four columns, from ``start`` on in steps of the slots, and add them to what there was
        before; their maximum, their sum of weights, and their sums."""
        b, zero = self.b, self.b.const(0, i32)
        step = self._slots * self._part_words
        quad, pair = self._at(start, column)
        items = [
            _Item(b, there & (start + i * self._slots < self.place.parts), quad + i * step, pair + i * step)
            for i in range(self.config.at_once)
        ]
        for item in items:
            with b.if_(item.exists):
                item.read(self._words)
        done = b.var(zero, "done")
        with b.repeat(done):
            there_all = b.const(True, bool_)
            for item in items:
                missing = item.exists & b.eq(item.least(), 0)
                # Who waits where others are still reading their keys reads no more than it must; who has nothing else
                # to do would wait for each in turn.
                with b.if_(missing & there_all if self.config.makes_parts else missing):
                    item.read(self._words)
                there_all = there_all & ~missing
            done.value = b.select(b.subgroup_all(there_all), b.const(1, i32), zero)
        for item in items:
            with b.if_(item.exists):
                item.clear(self._words)
        # What does not exist is zero, and its maximum counts for nothing.
        found = [[b.select(item.exists, item.numbers[0], b.const(LOWEST, f32)), *item.numbers[1:]] for item in items]
        found = [list(before), *found] if before else found
        return self._weighted(found)

    def _weighted(self, found: list[list[Value]]) -> list[Value]:
        """The maximum, the sum of weights and the sums of several together."""
        b = self.b
        if len(found) == 1:
            return found[0]
        highest = fold(b, "max", [x[0] for x in found])
        sums = [b.const(0.0, f32)] * (1 + QUAD)
        for maximum, *rest in found:
            weight = b.exp2(maximum - highest)
            sums = [b.fma(weight, x, y) for x, y in zip(rest, sums, strict=True)]
        return [highest, *sums]


class _Item:
    """Four columns of a part, with their row's maximum and sum of weights, on their way."""

    def __init__(self, b: Builder, exists: Value, quad: Value, pair: Value) -> None:
        self.b, self.exists, self._places = b, exists, ((pair, PAIR), (quad, QUAD))
        zero = b.const(0, i32)
        self._found = [b.var(b.splat(zero, width), "found") for _, width in self._places]

    def read(self, words: Value) -> None:
        for variable, (place, width) in zip(self._found, self._places, strict=True):
            variable.value = self.b.peek(words, place, width)

    def clear(self, words: Value) -> None:
        for place, width in self._places:
            self.b.post(words, place, self.b.splat(self.b.const(0, i32), width))

    def least(self) -> Value:
        """0 where a word is not there."""
        found = [self.b.bitcast(x, u32) for variable in self._found for x in self.b.unpack(variable.value)]
        return fold(self.b, "min", found)

    @cached_property
    def numbers(self) -> list[Value]:
        """The maximum, the sum and the columns; asked for when all of it is there."""
        return [self.b.bitcast(x, f32) for variable in self._found for x in self.b.unpack(variable.value)]
