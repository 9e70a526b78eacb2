"""Reductions over the threads that share a row: by shuffles in a subgroup, through shared memory between subgroups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from aule.ir import Builder, Value
from aule.ir.types import Scalar, Vector, i32
from aule.tile.common.math import fold, fold_lanes
from aule.tile.common.matrix import divmod_const
from aule.tile.rows.cluster_exchange import ClusterExchange
from aule.tile.rows.parts import PerRow
from aule.tile.rows.shape import RowShape

CombineLanes = Callable[..., list[PerRow]]
"""Takes a kind of reduction and values per row that differ by lane; returns them combined over the lanes."""
NEUTRAL = {"add": 0.0, "max": float("-inf")}
_READ_AT_ONCE = 32
"""Partial results that each thread reads itself, without shuffles; more are first reduced to fewer."""


class RowReductions:
    """Reductions over the threads of a row, in the type ``work``.

    ``lanes`` threads of a row can exchange registers. ``slot`` says which of the workgroup's rows this thread shares,
    and ``lane`` is its number there. With ``vectors`` parts are vectors of a CPU.
    """

    def __init__(
        self, b: Builder, shape: RowShape, work: Scalar, lanes: int, slot: Value, lane: Value, vectors: bool
    ) -> None:
        self.b, self.shape, self.work = b, shape, work
        self.lanes, self.slot, self.lane, self.vectors = lanes, slot, lane, vectors
        self.stage = b.const(0, i32)
        """The current block's place in a ring, so that successive blocks use different shared memory."""
        self.stages = max(shape.prefetch + 1, 2) if shape.loops else 1
        self._exchanges = 0
        self.cluster_exchange = ClusterExchange(b, shape, lanes, self.stages) if shape.cluster_exchange else None

    @property
    def subgroups(self) -> int:
        """Subgroups of a row in a workgroup."""
        return self.shape.threads // self.lanes

    def reduce(self, kind: str, partials: Sequence[PerRow]) -> list[PerRow]:
        """Reduce over the threads of each row, all values in one exchange; every thread gets the results."""
        values = [x for partial in partials for x in partial.values]
        if self.shape.threads * self.shape.cluster > self.lanes:
            return self._by_row(self._exchange(kind, values))
        return self._by_row(self._reduce_lanes(kind, values, self.lanes))

    def reduce_subgroup(self, kind: str, partial: PerRow) -> PerRow:
        return PerRow(tuple(self._reduce_lanes(kind, list(partial.values), self.lanes)))

    def combine(self, kind: str, vector: Value) -> Value:
        """Reduce the lanes of a vector."""
        if self.vectors or not isinstance(vector.type, Vector):
            return fold_lanes(self.b, kind, vector)
        return fold(self.b, kind, self.b.unpack(vector))

    # -- lanes of a subgroup -------------------------------------------------------------------------------------------

    def _reduce_lanes(self, kind: str, values: list[Value], width: int) -> list[Value]:
        """Reduce over groups of ``width`` lanes; every lane gets the results."""
        return self._all_gather(self._reduce_scatter(kind, values, 1, width), len(values), 1, width)

    def _reduce_scatter(self, kind: str, values: list[Value], first: int, last: int) -> list[Value]:
        """Reduce over the lanes whose numbers differ in the bits from ``first`` to below ``last``.

        Of each pair of values a lane keeps one and hands over the other, so four values over 32 lanes take 6 shuffles,
        not 20. In the end lane j of n has values ``j, n + j, 2n + j ...``.
        """
        b, mask = self.b, first
        while mask < last:
            upper = b.ne(self.lane & mask, 0) if len(values) > 1 else None
            reduced = []
            for pair in (values[i : i + 2] for i in range(0, len(values), 2)):
                if upper is None or len(pair) == 1:
                    mine = given = pair[0]
                else:
                    mine, given = b.select(upper, pair[1], pair[0]), b.select(upper, pair[0], pair[1])
                reduced.append(b.binary(kind, mine, b.shuffle_xor(given, mask)))
            values, mask = reduced, mask * 2
        return values

    def _all_gather(self, values: list[Value], count: int, first: int, last: int) -> list[Value]:
        """Give all lanes the ``count`` values that `_reduce_scatter` has left one lane each."""
        b, mask = self.b, last
        counts = [count]  # values before each step of `_reduce_scatter`
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
                if 2 * i + 1 == before:  # an unpaired value, which both lanes have
                    spread.append(mine)
                    continue
                other = b.shuffle_xor(mine, last)
                spread += [b.select(upper, other, mine), b.select(upper, mine, other)]
            values = spread
        return values

    # -- mean and variance ---------------------------------------------------------------------------------------------

    @property
    def can_merge_moments(self) -> bool:
        """Whether `merge_moments` applies: a power of two of threads share a row, in full subgroups."""
        threads = self.shape.threads
        even = self.shape.cluster == 1 and threads & (threads - 1) == 0
        return even and 1 < self.lanes <= threads <= self.lanes * self.lanes

    def merge_moments(self, mean: PerRow, squares: PerRow, count: int | Value) -> tuple[PerRow, PerRow]:
        """Mean and squared deviations of each row, from those of the ``count`` columns of each thread, in one exchange.

        Deviations are from the mean of what is merged, or one of the merged means, so a large mean costs no digits. If
        threads have different numbers of columns, ``count`` is a value of the type computed in; a thread with none has
        no deviations.
        """
        b, lanes, subgroups = self.b, self.lanes, self.subgroups
        pairs = list(zip(mean.values, squares.values, strict=True))
        rows: list[tuple[Value, ...]]
        if isinstance(count, Value):
            first = b.lane_id() & -lanes
            rows = [self._merge_weighted(x, y, count, b.shuffle(x, first), lanes) for x, y in pairs]
        else:
            rows = [self._merge_lanes(pair, count, lanes) for pair in pairs]
        if subgroups > 1:
            values = [x for row in rows for x in row]
            number, lane = divmod_const(b, self.lane, lanes)
            scratch, mine = self._exchange_memory("moments", len(values) * subgroups)
            with b.if_(b.eq(lane, 0)):
                for i, x in enumerate(values):
                    b.store(scratch, mine + i * subgroups + number, x)
            b.barrier()
            place = lane & (subgroups - 1)
            found = [b.load(scratch, mine + i * subgroups + place) for i in range(len(values))]
            each = len(values) // len(rows)
            merged = [found[i : i + each] for i in range(0, len(values), each)]
            if isinstance(count, Value):
                firsts = [b.load(scratch, mine + i * subgroups) for i in range(0, len(values), each)]
                triples = zip(merged, firsts, strict=True)
                rows = [self._merge_weighted(x, y, n, first, subgroups) for (x, y, n), first in triples]
            else:
                rows = [self._merge_lanes((x, y), count * lanes, subgroups) for x, y in merged]
        return PerRow(tuple(row[0] for row in rows)), PerRow(tuple(row[1] for row in rows))

    def _merge_lanes(self, pair: tuple[Value, Value], count: int, lanes: int) -> tuple[Value, Value]:
        """Merge mean and squared deviations over ``lanes`` lanes with ``count`` columns each."""
        b, (mean, squares), mask = self.b, pair, 1
        while mask < lanes:
            other, more = b.shuffle_xor(mean, mask), b.shuffle_xor(squares, mask)
            difference = other - mean
            mean, squares = (mean + other) * 0.5, b.fma(difference * (0.5 * count), difference, squares + more)
            mask, count = mask * 2, count * 2
        return mean, squares

    def _merge_weighted(
        self, mean: Value, squares: Value, count: Value, near: Value, lanes: int
    ) -> tuple[Value, Value, Value]:
        """Merge mean and squared deviations over lanes with any number of columns each, by sums of differences
        from ``near``, one of the means; and their number of columns."""
        b = self.b
        difference = mean - near
        weighted = difference * count
        moved = b.fma(weighted, difference, squares)
        first, second, total = self._reduce_lanes("add", [weighted, moved, count], lanes)
        share = first * b.rcp(b.max(total, 1.0))
        return near + share, b.max(second - first * share, 0.0), total

    # -- subgroups of a row --------------------------------------------------------------------------------------------

    @property
    def can_exchange_subgroups(self) -> bool:
        """Whether `exchange_subgroups` applies: a row has several subgroups, at most one per lane of a subgroup."""
        return 1 < self.lanes < self.shape.threads * self.shape.cluster <= self.lanes * self.lanes

    def exchange_subgroups(self, known: PerRow, partials: Sequence[PerRow]) -> tuple[list[PerRow], CombineLanes]:
        """Let each lane read the results of one of the row's subgroups: ``known``, which all lanes of that subgroup
        have, and ``partials``, summed over it. The returned function combines such values over lanes, with every
        subgroup counted once."""
        b, shape, subgroups = self.b, self.shape, self.subgroups
        # Published as a sum over lanes like the others; dividing by a power of two is exact.
        partials = [known.map(lambda x: x * (1.0 / self.lanes)), *partials]
        values = [value for partial in partials for value in partial.values]
        scratch, mine, lane = self._publish("add", values)
        width = 1 << (subgroups * shape.cluster - 1).bit_length()
        place = lane & (width - 1)
        if shape.cluster > 1:
            b.cluster_barrier()
            group, subgroup = divmod_const(b, place, subgroups)
            found = [b.cluster_load(scratch, mine + i * subgroups + subgroup, group) for i in range(len(values))]
        else:
            b.barrier()
            at = b.min(place, subgroups - 1) if subgroups < width else place
            found = [b.load(scratch, mine + i * subgroups + at) for i in range(len(values))]

        def combine(kind: str, *numbers: PerRow) -> list[PerRow]:
            values = [value for number in numbers for value in number.values]
            if subgroups * shape.cluster < width:
                values = [b.select(place < subgroups, x, NEUTRAL[kind]) for x in values]
            return self._by_row(self._reduce_lanes(kind, values, width))

        return self._by_row(found), combine

    def _by_row(self, values: list[Value]) -> list[PerRow]:
        """Group a flat list of values, batch after batch, into values per row."""
        batch = self.shape.batch
        return [PerRow(tuple(values[i : i + batch])) for i in range(0, len(values), batch)]

    def _exchange_memory(self, name: str, size: int) -> tuple[Value, Value]:
        """Shared memory for one more exchange, ``size`` values per row, and where this row's begins."""
        scratch = self.b.shared(f"row_{name}_{self._exchanges}", self.work, self.stages * self.shape.slots * size)
        self._exchanges += 1
        return scratch, (self.stage * self.shape.slots + self.slot) * size

    def _publish(self, kind: str, values: list[Value]) -> tuple[Value, Value, Value]:
        """Reduce over each subgroup and store the results in shared memory, for each value those of all subgroups:
        the memory, where this row's begins, and the lane's number."""
        b, subgroups, count = self.b, self.subgroups, len(values)
        number, lane = divmod_const(b, b.thread_id() if self.shape.cluster > 1 else self.lane, self.lanes)
        scratch, mine = self._exchange_memory(kind, count * subgroups)
        for i, x in enumerate(self._reduce_scatter(kind, values, 1, self.lanes)):
            to = mine + (lane + i * self.lanes) * subgroups + number
            left = count - i * self.lanes
            with b.if_(lane < left) if left < self.lanes else nullcontext():
                b.store(scratch, to, x)
        return scratch, mine, lane

    def _exchange(self, kind: str, values: list[Value]) -> list[Value]:
        """Reduce over the subgroups of a row through shared memory."""
        if self.cluster_exchange is not None:
            return self._exchange_cluster(self.cluster_exchange, kind, values)
        b, subgroups, count = self.b, self.subgroups, len(values)
        scratch, mine, lane = self._publish(kind, values)
        if self.shape.cluster > 1:
            b.cluster_barrier()
            width = subgroups * self.shape.cluster
            share, place = divmod_const(b, lane, width)
            group, subgroup = divmod_const(b, place, subgroups)

            def load_cluster(which: Value) -> Value:
                return b.cluster_load(scratch, mine + which * subgroups + subgroup, group)

            return self._reduce_published(kind, count, width, share, load_cluster)
        b.barrier()
        if subgroups <= self.lanes and subgroups not in (2, 4):
            # Each lane reads one value; if every thread read them all, that would take more registers.
            width = 1 << (subgroups - 1).bit_length()
            share, place = divmod_const(b, lane, width)

            def load(which: Value) -> Value:
                x = b.load(scratch, mine + which * subgroups + b.min(place, subgroups - 1))
                return b.select(place < subgroups, x, NEUTRAL[kind]) if subgroups < width else x

            return self._reduce_published(kind, count, width, share, load)
        left = subgroups
        if subgroups > _READ_AT_ONCE:
            left = subgroups // _READ_AT_ONCE
            total = [b.var(b.const(NEUTRAL[kind], self.work)) for _ in values]
            with b.if_(self.lane < left):
                for i, variable in enumerate(total):
                    start = mine + i * subgroups + self.lane * _READ_AT_ONCE
                    variable.value = self._fold(kind, scratch, start, _READ_AT_ONCE)
            b.barrier()
            with b.if_(self.lane < left):
                for i, variable in enumerate(total):
                    b.store(scratch, mine + i * subgroups + self.lane, variable.value)
            b.barrier()
        return [self._fold(kind, scratch, mine + i * subgroups, left) for i in range(count)]

    def _reduce_published(
        self, kind: str, count: int, width: int, share: Value, load: Callable[[Value], Value]
    ) -> list[Value]:
        """Reduce ``count`` values over ``width`` subgroups: each lane loads one subgroup's of one value at a time, and
        groups of ``width`` lanes, numbered by ``share``, load different values."""
        found: list[Value] = []
        while len(found) < count:
            fitting = min(self.lanes // width, 1 << ((count - len(found)).bit_length() - 1))
            x = load((share & (fitting - 1)) + len(found))
            found += self._all_gather(self._reduce_scatter(kind, [x], 1, width), fitting, width, width * fitting)
        return found

    def _exchange_cluster(self, exchange: ClusterExchange, kind: str, values: list[Value]) -> list[Value]:
        """Reduce over the subgroups of a cluster, in the only exchange of a block."""
        count = len(values)
        assert count == exchange.values and not self._exchanges, (count, self._exchanges)
        self._exchanges += 1
        exchange.send(self._reduce_scatter(kind, values, 1, self.lanes)[0], self.stage)
        found, width = exchange.receive(self.stage), exchange.senders
        return self._all_gather(self._reduce_scatter(kind, [found], count, width * count), count, 1, count)

    def _fold(self, kind: str, scratch: Value, start: Value, count: int) -> Value:
        """Reduce ``count`` neighbouring values in shared memory."""
        b = self.b
        width = min(count, 4)
        words = [b.load(scratch, start + i, width) for i in range(0, count, width)]
        return fold(b, kind, [x for word in words for x in b.unpack(word)])
