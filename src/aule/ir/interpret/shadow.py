"""Shadow memory of the interpreter's sanitizer: who accessed each element last, and when.

Every access to shared memory, and to a global buffer that is written, gets a time. An earlier access is *ordered*
before a later one if the same lane did both, or if both lanes took part in a barrier in between; between workgroups,
`fences.py` decides. Two accesses of one element by two lanes are a race if they are not ordered, not both reads and not
both atomic. It is reported even if the interpreter's lockstep execution happens to give the right result.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np

from aule.ir.interpret.fences import Fences
from aule.ir.interpret.lanes import Lanes, SanitizerError
from aule.ir.interpret.numbers import Array
from aule.ir.interpret.order import Order
from aule.ir.kernel import Op

_SEVERAL = -1
"""Writer of an element that several lanes updated atomically, or that a subgroup stored together."""
_COLLECTIVE = -2
"""Accessor of elements that a subgroup accesses together: the lane of each element is unknown, so it equals no lane."""
_COPY = -3
"""Writer of elements that a tensor copy brings."""
_PENDING_LIMIT = 1 << 22
"""Number of recorded reads above which repeated ones are dropped, to bound memory in long loops without barriers."""


class _Party(NamedTuple):
    """The lanes of one access: their numbers, their teams, and the times before which accesses are ordered for them."""

    lane: Array
    team: Array
    outer: Array
    sync: Array


class _Record:
    """Time, lane and team of the last plain (or last atomic) write of each element."""

    def __init__(self, size: int) -> None:
        self.time = np.zeros(size, np.int64)
        self.lane = np.zeros(size, np.int64)
        self.team = np.zeros(size, np.int64)

    def unordered(self, time: Array, address: Array, party: _Party) -> Array | None:
        """Mask of writes at ``time`` that are not ordered before an access by the party; None if all are."""
        unordered: Array = time >= party.outer
        if not unordered.any():
            return None
        unordered &= self.lane.take(address) != party.lane
        unordered &= (self.team.take(address) != party.team) | (time >= party.sync)
        return unordered if unordered.any() else None

    def note(self, now: int, address: Array, party: _Party, collective: bool) -> Array:
        """Record an access; returns where another lane of the same operation accessed the same element."""
        self.time[address] = now
        self.team[address] = party.team
        self.lane[address] = _SEVERAL if collective else party.lane
        # If lanes of this operation share an element, only the last one still finds itself recorded.
        recorded, own = (self.team, party.team) if collective else (self.lane, party.lane)
        collided: Array = recorded.take(address) != own
        return collided


class Shadow:
    """Last writes and recent reads of every element of a shared array or a global buffer.

    Lanes belong to *teams* whose barriers order them: subgroups for shared memory, workgroups for global memory. A
    barrier of the workgroup orders everything in shared memory, so accesses before the time ``outer`` are ignored
    there. For global memory, ``fences`` knows the order between workgroups if the kernel has fences; for shared memory,
    that between subgroups if the kernel has roles.
    """

    def __init__(
        self, lanes: Lanes, name: str, size: int, length: int, *, shared: bool, teams: int,
        fences: Fences | Order | None = None,
    ) -> None:  # fmt: skip
        self.lanes, self.fences = lanes, fences
        self.name = name
        self.size = size
        self.length = length
        self.shared = shared
        self.space = "shared" if shared else "global"
        self.writes = _Record(size)
        self.atomics: _Record | None = None
        self.outer = np.ones(teams, np.int64)
        self.sync = np.ones(teams, np.int64)
        self.pending: list[tuple[Any, Array, Array, Array]] = []
        self.pending_size = 0
        # A write can only race with reads of the same workgroup in shared memory, and with any read in global memory.
        self.domain = np.arange(teams) // lanes.subgroups if shared else np.zeros(teams, np.int64)
        self.dirty = np.zeros(int(self.domain[-1]) + 1, np.bool_)
        self.cluster_sync = np.ones(teams, np.int64)
        """Time of each team's last cluster barrier."""
        self.cluster_access = np.zeros(size, np.int64)
        """Time of each element's last access from the cluster (``cluster_load``, ``cluster_post``)."""

    def begin(self) -> None:
        """Start a new batch of workgroups: shared memory is undefined again, buffers keep their records."""
        if self.shared:
            for record in self._records():
                record.time.fill(0)
            self.pending.clear()
            self.pending_size = 0
            self.cluster_access.fill(0)
        self._refresh()

    def _records(self) -> list[_Record]:
        return [self.writes] if self.atomics is None else [self.writes, self.atomics]

    def _refresh(self) -> None:
        team = self.lanes.subgroup if self.shared else self.lanes.group
        self.everyone = _Party(self.lanes.lane_id, team, self.outer.take(team), self.sync.take(team))

    def _party(self, active: Array | None, collective: bool) -> _Party:
        party = self.everyone if active is None else _Party(*[part.take(active) for part in self.everyone])
        return party._replace(lane=np.full_like(party.lane, _COLLECTIVE)) if collective else party

    # -- accesses --------------------------------------------------------------------------------------------------

    def read(self, op: Op, address: Array, active: Array | None, collective: bool = False) -> None:
        """Check and record a load. ``address`` has a column per active lane."""
        party = self._party(active, collective)
        self.require_written(op, address, active)
        for record in self._records():
            self._ordered(record, op, "reads", address, party)
        self.pending.append((self.lanes.tick(op), address, party.lane, party.team))
        self.pending_size += address.size
        if self.pending_size > _PENDING_LIMIT:
            self._compact()

    def write(self, op: Op, address: Array, active: Array | None, collective: bool = False) -> None:
        """Check and record a store."""
        party = self._party(active, collective)
        for record in self._records():
            self._ordered(record, op, "writes", address, party)
        if self.shared:
            self._check_cluster_access(op, address, self.cluster_sync.take(party.team))
        collided = self.writes.note(self.lanes.tick(op), address, party, collective)
        if collided.any():
            self._race(self.writes, op, "writes", address, collided, party)
        self.dirty[self.domain.take(party.team)] = True

    def copy(self, op: Op, address: Array, active: Array, copies: int) -> None:
        """Check a tensor copy as a store of the lane that starts it, and record it as one by the subgroup ``copies``,
        which stands for all copies that arrive at its mbarrier (`Order`)."""
        self.write(op, address, active)
        self.writes.lane[address], self.writes.team[address] = _COPY, copies

    def cluster_read(self, op: Op, address: Array, active: Array | None) -> None:
        """Check and record a load from any workgroup of the cluster, which only cluster barriers order."""
        party = self._party(active, False)
        self.require_written(op, address, active)
        wrong = self.writes.time.take(address) >= self.cluster_sync.take(party.team)
        if wrong.any():
            self._race(self.writes, op, "reads", address, wrong, party)
        self.cluster_access[address] = self.lanes.tick(op)

    def cluster_update(self, op: Op, address: Array, active: Array | None) -> None:
        """Check and record an atomic on memory of any workgroup of the cluster.

        Only cluster barriers order it with stores, and with the end of the owning workgroup.
        """
        party = self._party(active, False)
        wrong = self.writes.time.take(address) >= self.cluster_sync.take(party.team)
        if wrong.any():
            self._race(self.writes, op, "updates", address, wrong, party)
        self.update(op, address, active)
        self.cluster_access[address] = len(self.lanes.history) - 1

    def update(self, op: Op, address: Array, active: Array | None) -> None:
        """Check and record an atomic. An element updated by several lanes is recorded as `_SEVERAL`."""
        party = self._party(active, False)
        self.require_written(op, address, active)
        self._ordered(self.writes, op, "updates", address, party)
        if self.atomics is None:
            self.atomics = _Record(self.size)
        record = self.atomics
        before = record.unordered(record.time.take(address), address, party)
        several_lanes = [] if before is None else [address[before]]
        several_teams = [] if before is None else [address[before & (record.team.take(address) != party.team)]]
        collided = record.note(self.lanes.tick(op), address, party, False)
        several_lanes.append(address[collided])
        several_teams.append(address[record.team.take(address) != party.team])
        for elements in several_lanes:
            record.lane[elements] = _SEVERAL
        for elements in several_teams:
            record.team[elements] = _SEVERAL
        if self.fences is not None:
            self.fences.atomic(self.name, address)
        self.dirty[self.domain.take(party.team)] = True

    def require_written(self, op: Op, address: Array, active: Array | None) -> None:
        """Raise an error if shared memory is read before its first write."""
        if not self.shared:
            return
        time = self.writes.time.take(address)
        if not time.all():
            where = tuple(np.argwhere(time == 0)[0])
            lane = int(where[-1] if active is None else active[where[-1]])
            place = self._place(address[where])
            raise self.lanes.error(op, lane, f"read of shared memory that was never written: {place}")

    def _ordered(self, record: _Record, op: Op, verb: str, address: Array, party: _Party) -> None:
        time = record.time.take(address)
        unordered = record.unordered(time, address, party)
        if unordered is not None and self.fences is not None:
            unordered &= ~self.fences.orders(time, record.team.take(address), party.team)
        if unordered is not None and unordered.any():
            self._race(record, op, verb, address, unordered, party)

    # -- barriers --------------------------------------------------------------------------------------------------

    def synchronise(self, op: Op, teams: Array | None, everything: bool, since: int | None = None) -> None:
        """Record a barrier of ``teams`` (None: all of the batch).

        Parameters
        ----------
        everything : bool
            All lanes of the workgroup took part, so every access before it is ordered before every one after it.
        since : int, optional
            Order only accesses before that time.
        """
        self.check()
        now = self.lanes.tick(op) if since is None else since
        if teams is None:
            teams = np.unique(self.everyone.team)
        self.sync[teams] = now
        if everything and self.shared:
            self.outer[teams] = now
            self._prune()
        self._refresh()

    def cluster_barrier(self, teams: Array | None) -> None:
        """Record a cluster barrier of ``teams`` (None: all of the batch)."""
        self.cluster_sync[slice(None) if teams is None else teams] = len(self.lanes.history) - 1

    def end(self) -> None:
        """End the batch: shared memory goes away, so a barrier must follow the last access from the cluster."""
        if self.shared:
            length = self.length * self.lanes.kernel.cluster  # all workgroups of a cluster end together
            last = np.repeat(self.cluster_sync[:: self.lanes.subgroups * self.lanes.kernel.cluster], length)
            late = self.cluster_access >= last[: self.size]
            if (self.cluster_access > 0).any() and late.any():
                address = int(np.flatnonzero(late)[0])
                self._too_early(self._op(self.cluster_access[address]), address, "it ends")

    def _check_cluster_access(self, op: Op, address: Array, synced: Array) -> None:
        """Require a cluster barrier between accesses from the cluster and a store."""
        late = self.cluster_access.take(address) >= synced
        if late.any():
            where = tuple(np.argwhere(late)[0])
            read = self._op(self.cluster_access[address[where]])
            self._too_early(read, address[where], f"it is written in {self.lanes.site(op)}")

    def _too_early(self, read: Op, address: Any, what: str) -> NoReturn:
        raise SanitizerError(
            f"kernel {self.lanes.kernel.name}: race in {self.space} memory on {self._place(address)}: {what}, and "
            f"{self.lanes.site(read)} reads it from a workgroup of the cluster; no barrier of clusters orders the two"
        )

    def _prune(self) -> None:
        """Forget reads that a barrier of the workgroup has ordered before everything that follows."""
        pending, self.pending, self.pending_size = self.pending, [], 0
        for read, address, lane, team in pending:
            keep = read >= self.outer.take(team)
            if keep.all():
                self.pending.append((read, address, lane, team))
            elif keep.any():
                times = read if np.ndim(read) == 0 else read[keep]
                self.pending.append((times, address[..., keep], lane[keep], team[keep]))
        self.pending_size = sum(entry[1].size for entry in self.pending)

    def check(self) -> None:
        """Check for writes that follow a read without being ordered with it.

        Called before every barrier. Between two barriers, checking the last write of an element is enough: writes by
        two lanes would have been a race themselves.
        """
        if not self.dirty.any():
            return
        dirty = self.dirty.take(self.domain)
        self.dirty.fill(False)
        for read, address, lane, team in self.pending:
            if not dirty.take(team).any():
                continue
            for record in self._records():
                time = record.time.take(address)
                late = time > read
                if not late.any():
                    continue
                late &= (read >= self.outer.take(team)) & (record.lane.take(address) != lane)
                late &= (record.team.take(address) != team) | (read >= self.sync.take(team))
                if self.fences is not None:
                    late &= ~self.fences.orders(read, team, record.team.take(address))
                if late.any():
                    where = tuple(np.argwhere(late)[0])
                    reader = self._op(read if np.ndim(read) == 0 else read[where])
                    who = self._who(lane[where[-1]], team[where[-1]])
                    self._report(address[where], record, f"{who} reads it before in {self.lanes.site(reader)}")

    def _compact(self) -> None:
        """Keep only the last read of each element by each lane: whatever orders it orders the earlier ones too."""
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
        # The rest does not count: it is bounded by elements times lanes, and compacting it again would gain nothing.
        self.pending_size = 0

    # -- reports ---------------------------------------------------------------------------------------------------

    def _op(self, time: Any) -> Op:
        op = self.lanes.history[int(time)]
        assert op is not None
        return op

    def _place(self, address: Any) -> str:
        return f"{self.name}[{int(address) % self.length}]"

    def _who(self, lane: Any, team: Any) -> str:
        if lane >= 0:
            return self.lanes.who_id(int(lane))
        if lane == _COPY:
            return "a tensor copy"
        if team < 0:
            return "one of several threads"
        if not self.shared:
            return f"a thread of workgroup {self.lanes.coordinates(int(team))}"
        slot, subgroup = divmod(int(team), self.lanes.subgroups)
        group = int(self.lanes.group[slot * self.lanes.workgroup])
        return f"a thread of subgroup {subgroup} of workgroup {self.lanes.coordinates(group)}"

    def _race(self, record: _Record, op: Op, verb: str, address: Array, wrong: Array, party: _Party) -> NoReturn:
        where = tuple(np.argwhere(wrong)[0])
        who = self._who(party.lane[where[-1]], party.team[where[-1]])
        self._report(address[where], record, f"{who} {verb} it in {self.lanes.site(op)}")

    def _report(self, address: Any, record: _Record, other: str) -> NoReturn:
        """Raise the error for ``other``, which races with the recorded write."""
        verb = "writes" if record is self.writes else "updates"
        who = self._who(record.lane[address], record.team[address])
        raise SanitizerError(
            f"kernel {self.lanes.kernel.name}: race in {self.space} memory on {self._place(address)}: {other}, and "
            f"{who} {verb} it in {self.lanes.site(self._op(record.time[address]))}; no barrier orders the two"
        )
