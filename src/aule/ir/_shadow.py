"""Who runs, and who touched which element of memory: the bookkeeping behind the interpreter's sanitizer.

Every access of shared memory, and of a global buffer that is written, gets a time. An earlier access is *ordered*
before a later one when the same lane did both, or when a barrier that both lanes took part in came between. Two
accesses of one element by two lanes, at least one of them a plain write and neither ordered before the other, are a
race, whatever the lockstep of this interpreter made of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aule.errors import KernelError
from aule.ir._numbers import Array
from aule.ir.kernel import KernelIR, Op
from aule.ir.text import line

_SEVERAL = -1
"""Writer of an element that several lanes updated atomically, or that a subgroup stored together."""
_COLLECTIVE = -2
"""A subgroup that accesses memory together: which lane touches which element is not known, so it equals no lane."""
_PENDING_LIMIT = 1 << 22
"""Remembered reads after which repeated ones are dropped, so that a long loop without barriers stays in memory."""


class SanitizerError(KernelError):
    """The interpreter saw a kernel do something that is not defined."""


class Lanes:
    """The lanes of a batch of workgroups that run in lockstep.

    Attributes
    ----------
    count : int
        Lanes of a batch.
    mask, active : ndarray or None
        Lanes that run now, as bools and as numbers; None when all do.
    first : ndarray
        The first lane of each subgroup.
    subgroup : ndarray
        Number of each lane's subgroup in the batch.
    group : ndarray
        Number of each lane's workgroup in the launch.
    history : list of Op
        Accesses and barriers so far; a time is an index into it. Time 0 is "never".
    """

    def __init__(self, kernel: KernelIR, grid: tuple[int, int, int], groups: int, subgroup_size: int) -> None:
        self.kernel = kernel
        self.grid = grid
        self.groups = groups
        self.subgroup_size = subgroup_size
        self.workgroup = kernel.workgroup
        self.count = groups * kernel.workgroup
        self.thread = np.tile(np.arange(kernel.workgroup), groups)
        self.slot = np.repeat(np.arange(groups), kernel.workgroup)
        self.subgroups = -(-kernel.workgroup // subgroup_size)
        self.subgroup = self.slot * self.subgroups + self.thread // subgroup_size
        self.first = np.flatnonzero(self.thread % subgroup_size == 0)
        self.start = self.first.take(self.subgroup)
        self.size = np.bincount(self.subgroup).take(self.subgroup)
        self.history: list[Op | None] = [None]
        self.group = self.slot
        self.lane_id = self.group * self.workgroup + self.thread
        self.mask: Array | None = None
        self.active: Array | None = None

    def begin(self, first_group: int, total: int) -> None:
        """Start the batch of workgroups from ``first_group`` on; those past the end of the launch do not run."""
        self.group = self.slot + first_group
        self.lane_id = self.group * self.workgroup + self.thread
        exists = self.group < total
        self.enter(None if exists.all() else exists)

    def enter(self, mask: Array | None) -> None:
        """Run with these lanes from now on."""
        self.mask = mask
        self.active = None if mask is None else np.flatnonzero(mask)

    def tick(self, op: Op) -> int:
        """The time of a new access."""
        self.history.append(op)
        return len(self.history) - 1

    def whole_groups(self, op: Op) -> Array | None:
        """Slots of the workgroups that arrive at a barrier (None: all); an error when one arrives in part."""
        if self.mask is None:
            return None
        arrived = self.mask.reshape(self.groups, self.workgroup)
        some, every = arrived.any(axis=1), arrived.all(axis=1)
        if (some != every).any():
            slot = int(np.flatnonzero(some != every)[0])
            absent = slot * self.workgroup + int(np.flatnonzero(~arrived[slot])[0])
            raise self.error(op, absent, "barrier in divergent control flow: this thread does not arrive, others do")
        return np.flatnonzero(every)

    def whole_subgroups(self, op: Op) -> Array | None:
        """Subgroups that arrive at a subgroup operation (None: all); an error when one arrives in part."""
        if self.mask is None:
            return None
        some = np.logical_or.reduceat(self.mask, self.first)
        every = np.logical_and.reduceat(self.mask, self.first)
        if (some != every).any():
            broken = int(np.flatnonzero(some != every)[0])
            absent = int(np.flatnonzero((self.subgroup == broken) & ~self.mask)[0])
            message = "subgroup operation in divergent control flow: this thread does not take part, others of its " \
                      "subgroup do"  # fmt: skip
            raise self.error(op, absent, message)
        return np.flatnonzero(every)

    def error(self, op: Op, lane: int, message: str) -> SanitizerError:
        """An error that names the kernel, the operation, the lane and the line of Python."""
        return SanitizerError(f"kernel {self.kernel.name}: {message}; {self.site(op)}, {self.who(lane)}")

    def site(self, op: Op) -> str:
        """An operation and where it was emitted."""
        return f"`{line(self.kernel, op)}` at {op.where}"

    def who(self, lane: int) -> str:
        """A lane of the batch, by the numbers a kernel knows."""
        return self.who_id(int(self.lane_id[lane]))

    def who_id(self, lane_id: int) -> str:
        """A lane by its number in the launch."""
        group, thread = divmod(lane_id, self.workgroup)
        return f"thread {thread} of workgroup {self.coordinates(group)}"

    def coordinates(self, group: Any) -> tuple[Any, Any, Any]:
        """Position in the grid of a workgroup, or of an array of them."""
        x, y, _ = self.grid
        return group % x, group // x % y, group // (x * y)


class Shadow:
    """Last write and recent reads of every element of one shared array or one global buffer.

    Lanes belong to *teams* whose barriers order them: subgroups for shared memory, workgroups for global memory. A
    barrier of the workgroup orders everything in shared memory, so there times before ``outer`` do not count.
    """

    def __init__(self, lanes: Lanes, name: str, size: int, length: int, *, shared: bool, teams: int) -> None:
        self.lanes = lanes
        self.name = name
        self.length = length
        self.shared = shared
        self.space = "shared" if shared else "global"
        self.time = np.zeros(size, np.int64)
        self.lane = np.zeros(size, np.int64)
        self.team = np.zeros(size, np.int64)
        self.outer = np.ones(teams, np.int64)
        self.sync = np.ones(teams, np.int64)
        self.pending: list[tuple[Any, Array, Array, Array]] = []
        self.pending_size = 0
        self.dirty = False

    def begin(self) -> None:
        """A new batch of workgroups starts: its shared memory holds nothing, buffers keep what was written."""
        if self.shared:
            self.time.fill(0)
            self.pending.clear()
            self.pending_size = 0
        self._refresh()

    def _refresh(self) -> None:
        team = self.lanes.subgroup if self.shared else self.lanes.group
        self.all_lanes = (self.lanes.lane_id, team, self.outer.take(team), self.sync.take(team))

    def _by_lane(self, active: Array | None, collective: bool) -> tuple[Array, Array, Array, Array]:
        lane, team, outer, sync = self.all_lanes
        if active is not None:
            lane, team, outer, sync = (a.take(active) for a in (lane, team, outer, sync))
        return (np.full_like(lane, _COLLECTIVE) if collective else lane), team, outer, sync

    # -- accesses --------------------------------------------------------------------------------------------------

    def read(self, op: Op, address: Array, active: Array | None, collective: bool = False) -> None:
        """Check and note a load. ``address`` has a column per active lane."""
        time = self.time.take(address)
        lane, team, outer, sync = self._by_lane(active, collective)
        self.require_written(op, address, active, time)
        unordered = self._unordered(time, address, lane, team, outer, sync)
        if unordered is not None:
            self._race(op, "reads", address, np.argwhere(unordered)[0], lane, team)
        now = self.lanes.tick(op)
        self.pending.append((now, address, lane, team))
        self.pending_size += address.size
        if self.pending_size > _PENDING_LIMIT:
            self._compact()

    def require_written(self, op: Op, address: Array, active: Array | None, time: Array) -> None:
        """Shared memory starts undefined; ``time`` is that of the last write of each address."""
        if self.shared and not time.all():
            where = tuple(np.argwhere(time == 0)[0])
            lane = int(where[-1] if active is None else active[where[-1]])
            place = f"{self.name}[{int(address[where]) % self.length}]"
            raise self.lanes.error(op, lane, f"read of shared memory that was never written: {place}")

    def write(
        self, op: Op, address: Array, active: Array | None, collective: bool = False, atomic: bool = False
    ) -> None:
        """Check and note a store or an atomic."""
        time = self.time.take(address)
        lane, team, outer, sync = self._by_lane(active, collective)
        unordered = self._unordered(time, address, lane, team, outer, sync)
        mixed_lane = mixed_team = None
        if unordered is not None:
            if atomic:
                plain = [t for t in np.unique(time[unordered]) if self._op(t).opcode != "atomic"]
                unordered_plain = unordered & np.isin(time, plain)
                if unordered_plain.any():
                    self._race(op, "updates", address, np.argwhere(unordered_plain)[0], lane, team)
                mixed_lane = address[unordered]
                mixed_team = address[unordered & (self.team.take(address) != team)]
            else:
                self._race(op, "writes", address, np.argwhere(unordered)[0], lane, team)
        now = self.lanes.tick(op)
        self.time[address] = now
        self.team[address] = team
        self.lane[address] = np.full_like(lane, _SEVERAL) if collective else lane
        self.dirty = True
        # Lanes that hit the same element in this very operation: only the last one still finds itself there.
        other = self.team.take(address) != team if collective else self.lane.take(address) != lane
        if other.any():
            if not atomic:
                self._race(op, "writes", address, np.argwhere(other)[0], lane, team)
            elsewhere = address[self.team.take(address) != team]
            self.lane[address[other]] = _SEVERAL
            self.team[elsewhere] = _SEVERAL
        if mixed_lane is not None and mixed_team is not None:
            self.lane[mixed_lane] = _SEVERAL
            self.team[mixed_team] = _SEVERAL

    def _unordered(
        self, time: Array, address: Array, lane: Array, team: Array, outer: Array, sync: Array
    ) -> Array | None:
        """Where the last write is not ordered before an access by these lanes; None when it is everywhere."""
        unordered: Array = time >= outer
        if not unordered.any():
            return None
        unordered &= self.lane.take(address) != lane
        unordered &= (self.team.take(address) != team) | (time >= sync)
        return unordered if unordered.any() else None

    # -- barriers --------------------------------------------------------------------------------------------------

    def synchronise(self, op: Op, teams: Array | None, everything: bool) -> None:
        """A barrier: ``teams`` (None: all of the batch) go on together.

        Parameters
        ----------
        everything : bool
            All of the workgroup's lanes took part, so what came before is ordered before whatever comes.
        """
        self.check()
        now = self.lanes.tick(op)
        if teams is None:
            teams = np.unique(self.all_lanes[1])
            if everything and self.shared:
                self.pending.clear()
                self.pending_size = 0
        self.sync[teams] = now
        if everything and self.shared:
            self.outer[teams] = now
        self._refresh()

    def check(self) -> None:
        """Look for writes that came after a read they are not ordered with.

        Called before every barrier. Between two barriers the last write of an element stands for all of them, as
        writes by two lanes would have been a race themselves.
        """
        if not self.dirty:
            return
        self.dirty = False
        for read, address, lane, team in self.pending:
            time = self.time.take(address)
            late = time > read
            if not late.any():
                continue
            late &= (read >= self.outer.take(team)) & (self.lane.take(address) != lane)
            late &= (self.team.take(address) != team) | (read >= self.sync.take(team))
            if late.any():
                where = tuple(np.argwhere(late)[0])
                then = int(read if np.ndim(read) == 0 else read[where])
                writer, reader = self._op(time[where]), self._op(then)
                self._report(
                    address[where],
                    f"{self._writer(address[where])} writes it in {self.lanes.site(writer)}",
                    f"{self._who(lane[where[-1]], team[where[-1]])} reads it before in {self.lanes.site(reader)}",
                )

    def _compact(self) -> None:
        """Keep the last read of each element by each lane: earlier ones are ordered with less, never with more."""
        self.check()
        parts = [
            [np.broadcast_to(part, address.shape).ravel() for part in (read, address, lane, team)]
            for read, address, lane, team in self.pending
        ]
        read, address, lane, team = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((read, team, lane, address))
        key = np.stack([address, lane, team])[:, order]
        last = np.append((key[:, 1:] != key[:, :-1]).any(axis=0), True)
        keep = order[last]
        keep = keep[read[keep] >= self.outer.take(team[keep])]
        self.pending = [(read[keep], address[keep], lane[keep], team[keep])]
        # What is left counts as nothing: it is bounded by elements times lanes, and compacting again gains nothing.
        self.pending_size = 0

    # -- reports ---------------------------------------------------------------------------------------------------

    def _op(self, time: Any) -> Op:
        op = self.lanes.history[int(time)]
        assert op is not None
        return op

    def _writer(self, address: Any) -> str:
        return self._who(self.lane[address], self.team[address])

    def _who(self, lane: Any, team: Any) -> str:
        if lane >= 0:
            return self.lanes.who_id(int(lane))
        if team < 0:
            return "several threads"
        if not self.shared:
            return f"a thread of workgroup {self.lanes.coordinates(int(team))}"
        slot, subgroup = divmod(int(team), self.lanes.subgroups)
        group = int(self.lanes.group[slot * self.lanes.workgroup])
        return f"a thread of subgroup {subgroup} of workgroup {self.lanes.coordinates(group)}"

    def _race(self, op: Op, verb: str, address: Array, where: Any, lane: Array, team: Array) -> None:
        where = tuple(where)
        element = address[where]
        self._report(
            element,
            f"{self._who(lane[where[-1]], team[where[-1]])} {verb} it in {self.lanes.site(op)}",
            f"{self._writer(element)} writes it in {self.lanes.site(self._op(self.time[element]))}",
        )

    def _report(self, address: Any, one: str, other: str) -> None:
        place = f"{self.name}[{int(address) % self.length}]"
        raise SanitizerError(
            f"kernel {self.lanes.kernel.name}: race in {self.space} memory on {place}: {one}, and {other}; "
            "no barrier orders the two"
        )
