"""Teams: a few neighbouring lanes that hold one vector together and exchange numbers by shuffles or shared memory.

`Team.reduce` sums a list of numbers over the lanes, but gives each lane only its share of the sums: with n numbers and
L lanes that takes about n exchanges instead of n log L. Between it and `Team.spread`, which gives every lane all of
them, each number is processed once, not in every lane. Lane t owns number ``t * n // L`` and, if there are more
numbers than lanes, the ``n // L - 1`` after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aule.ir import Builder, Value
from aule.ir.types import f32
from aule.tile.common.math import fold


class Team:
    """The lanes of one team.

    Parameters
    ----------
    lanes : int
        A power of two.
    subgroup : int
        Lanes of a subgroup, a multiple of ``lanes``; 0 without subgroups.
    threads : int
        Threads of the workgroup; without subgroups all of them must take part in every exchange.
    numbers : int
        The most numbers that are exchanged at once.
    branches : bool
        Lanes may exchange under a condition that is uniform only in their subgroup.
    """

    def __init__(
        self, b: Builder, lanes: int, subgroup: int, threads: int, numbers: int, branches: bool = True
    ) -> None:
        self.b, self.lanes, self.subgroup, self.threads = b, lanes, subgroup, threads
        self.branches = branches and subgroup > 0
        self.thread = b.thread_id()
        self.lane = self.thread & (lanes - 1)
        """This thread's lane in its team."""
        self._memory = None
        if lanes > 1 and not subgroup:
            self._memory = b.shared("exchange", f32, threads * numbers)
        # The team's first lane in the subgroup, or in the workgroup if numbers pass through shared memory.
        self._first = ((self.thread & (subgroup - 1)) if subgroup else self.thread) - self.lane

    def owned(self, numbers: int) -> Value:
        """The first of the numbers that this lane owns."""
        share = numbers // self.lanes
        if share >= 1:
            return self.lane * share
        return self.lane >> ((self.lanes // numbers).bit_length() - 1)

    def reduce(self, values: list[Value]) -> list[Value]:
        """This lane's share of the sums over the team of a power of two of numbers."""
        b, n = self.b, len(values)
        if self.lanes == 1:
            return values
        if self._memory is not None:
            self._publish(values)
            first, share = self.owned(n), max(n // self.lanes, 1)
            sums = []
            for i in range(share):
                at = [(first + i) * self.threads + (self._first + lane) for lane in range(self.lanes)]
                sums.append(fold(b, "add", [b.load(self._memory, x) for x in at]))
            b.barrier()
            return sums
        mask = self.lanes // 2
        while mask:
            if len(values) == 1:
                values = [values[0] + b.shuffle_xor(values[0], mask)]
            else:
                half = len(values) // 2
                upper = b.ne(self.lane & mask, 0)
                mine = [b.select(upper, values[i + half], values[i]) for i in range(half)]
                sent = [b.select(upper, values[i], values[i + half]) for i in range(half)]
                values = [x + b.shuffle_xor(y, mask) for x, y in zip(mine, sent, strict=True)]
            mask //= 2
        return values

    def spread(self, owned: list[Value], numbers: int) -> list[Value]:
        """All numbers, from each lane's share of them."""
        b = self.b
        if self.lanes == 1:
            return owned
        share = max(numbers // self.lanes, 1)
        places = [(i * self.lanes // numbers, i % share if numbers >= self.lanes else 0) for i in range(numbers)]
        if self._memory is not None:
            self._publish(owned)
            found = [b.load(self._memory, slot * self.threads + self._first + lane) for lane, slot in places]
            b.barrier()
            return found
        return [b.shuffle(owned[slot], self._first + lane) for lane, slot in places]

    def combine(self, kind: str, value: Value, first: int, lanes: int) -> Value:
        """Combine a number ("add" or "max") over the lanes that differ in the bits from ``first`` up to ``lanes``; each
        gets the result. They may belong to several teams of the subgroup."""
        b = self.b
        if self._memory is not None and first < lanes:
            self._publish([value])
            others = [self._first + (self.lane ^ mask) for mask in range(0, lanes, first)]
            value = fold(b, kind, [b.load(self._memory, other) for other in others])
            b.barrier()
            return value
        mask = first
        while mask < lanes:
            value = b.binary(kind, value, b.shuffle_xor(value, mask))
            mask *= 2
        return value

    @contextmanager
    def where_any(self, condition: Value) -> Iterator[None]:
        """Run the body, which may exchange, only if a condition holds in some lane; without branches always."""
        if not self.branches:
            yield
            return
        with self.b.if_(self.b.subgroup_any(condition)):
            yield

    def _publish(self, values: list[Value]) -> None:
        assert self._memory is not None
        for i, value in enumerate(values):
            self.b.store(self._memory, self.thread + i * self.threads, value)
        self.b.barrier()
