"""Who touched which element of memory: the bookkeeping behind the interpreter's sanitizer.

Every access of shared memory, and of a global buffer that is written, gets a time. An earlier access is *ordered*
before a later one when the same lane did both, or when a barrier that both lanes took part in came between; between
workgroups, where `fences.py` says so. Two accesses of one element by two lanes, not both reading, not both atomic and
neither ordered before the other, are a race, whatever the lockstep of this interpreter made of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np

from aule.ir.interpret.fences import Fences
from aule.ir.interpret.lanes import Lanes, SanitizerError
from aule.ir.interpret.numbers import Array
from aule.ir.kernel import Op

_SEVERAL = -1
"""Writer of an element that several lanes updated atomically, or that a subgroup stored together."""
_COLLECTIVE = -2
"""A subgroup that accesses memory together: which lane touches which element is not known, so it equals no lane."""
_PENDING_LIMIT = 1 << 22
"""Remembered reads after which repeated ones are dropped, so that a long loop without barriers stays in memory."""


class _Party(NamedTuple):
    """The lanes of one access: their numbers, their teams, and the times before which things are ordered for them."""

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
        """Where the write at ``time`` is not ordered before an access by the party; None when it is everywhere."""
        unordered: Array = time >= party.outer
        if not unordered.any():
            return None
        unordered &= self.lane.take(address) != party.lane
        unordered &= (self.team.take(address) != party.team) | (time >= party.sync)
        return unordered if unordered.any() else None

    def note(self, now: int, address: Array, party: _Party, collective: bool) -> Array:
        """Write down an access; returns where another lane of the same operation hit the same element."""
        self.time[address] = now
        self.team[address] = party.team
        self.lane[address] = _SEVERAL if collective else party.lane
        # Of lanes that meet in this very operation, only the last one still finds itself there.
        found, own = (self.team, party.team) if collective else (self.lane, party.lane)
        met: Array = found.take(address) != own
        return met


class Shadow:
    """Last writes and recent reads of every element of one shared array or one global buffer.

    Lanes belong to *teams* whose barriers order them: subgroups for shared memory, workgroups for global memory. A
    barrier of the workgroup orders everything in shared memory, so there times before ``outer`` do not count. Of global
    memory, ``fences`` know what is ordered between workgroups, where a kernel has fences.
    """

    def __init__(
        self, lanes: Lanes, name: str, size: int, length: int, *, shared: bool, teams: int, fences: Fences | None = None
    ) -> None:
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
        # Writes concern only reads of the same workgroup in shared memory, and all reads in global memory.
        self.domain = np.arange(teams) // lanes.subgroups if shared else np.zeros(teams, np.int64)
        self.dirty = np.zeros(int(self.domain[-1]) + 1, np.bool_)
        self.together = np.ones(teams, np.int64)
        """Time of each team's last barrier of its cluster."""
        self.others = np.zeros(size, np.int64)
        """When each element was last read by way of the cluster."""

    def begin(self) -> None:
        """A new batch of workgroups starts: its shared memory holds nothing, buffers keep what was written."""
        if self.shared:
            for record in self._records():
                record.time.fill(0)
            self.pending.clear()
            self.pending_size = 0
            self.others.fill(0)
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
        """Check and note a load. ``address`` has a column per active lane."""
        party = self._party(active, collective)
        self.require_written(op, address, active)
        for record in self._records():
            self._ordered(record, op, "reads", address, party)
        self.pending.append((self.lanes.tick(op), address, party.lane, party.team))
        self.pending_size += address.size
        if self.pending_size > _PENDING_LIMIT:
            self._compact()

    def write(self, op: Op, address: Array, active: Array | None, collective: bool = False) -> None:
        """Check and note a store."""
        party = self._party(active, collective)
        for record in self._records():
            self._ordered(record, op, "writes", address, party)
        if self.shared:
            self._require_read(op, address, self.together.take(party.team))
        met = self.writes.note(self.lanes.tick(op), address, party, collective)
        if met.any():
            self._race(self.writes, op, "writes", address, met, party)
        self.dirty[self.domain.take(party.team)] = True

    def read_other(self, op: Op, address: Array, active: Array | None) -> None:
        """Check and note a load from any workgroup of the cluster: only barriers of clusters order it."""
        party = self._party(active, False)
        self.require_written(op, address, active)
        wrong = self.writes.time.take(address) >= self.together.take(party.team)
        if wrong.any():
            self._race(self.writes, op, "reads", address, wrong, party)
        self.others[address] = self.lanes.tick(op)

    def update_other(self, op: Op, address: Array, active: Array | None) -> None:
        """Check and note an atomic on memory of any workgroup of the cluster: only barriers of clusters order it with
        stores, and with the end of that workgroup."""
        party = self._party(active, False)
        wrong = self.writes.time.take(address) >= self.together.take(party.team)
        if wrong.any():
            self._race(self.writes, op, "updates", address, wrong, party)
        self.update(op, address, active)
        self.others[address] = len(self.lanes.history) - 1

    def update(self, op: Op, address: Array, active: Array | None) -> None:
        """Check and note an atomic. Where lanes meet, the record names several, whom only a barrier orders."""
        party = self._party(active, False)
        self.require_written(op, address, active)
        self._ordered(self.writes, op, "updates", address, party)
        if self.atomics is None:
            self.atomics = _Record(self.size)
        record = self.atomics
        before = record.unordered(record.time.take(address), address, party)
        several = [] if before is None else [address[before]]
        apart = [] if before is None else [address[before & (record.team.take(address) != party.team)]]
        met = record.note(self.lanes.tick(op), address, party, False)
        several.append(address[met])
        apart.append(address[record.team.take(address) != party.team])
        for elements in several:
            record.lane[elements] = _SEVERAL
        for elements in apart:
            record.team[elements] = _SEVERAL
        if self.fences is not None:
            self.fences.atomic(self.name, address)
        self.dirty[self.domain.take(party.team)] = True

    def peek(self, op: Op, address: Array, active: Array | None) -> None:
        """Check a load that may meet atomics, and only those."""
        self._ordered(self.writes, op, "peeks at", address, self._party(active, False))

    def require_written(self, op: Op, address: Array, active: Array | None) -> None:
        """Shared memory starts undefined."""
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
        """A barrier: ``teams`` (None: all of the batch) go on together.

        Parameters
        ----------
        everything : bool
            All of the workgroup's lanes took part, so what came before is ordered before whatever comes.
        since : int, optional
            Only what came before that time is.
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

    def meet(self, teams: Array | None) -> None:
        """Clusters, all of the batch or those that these teams make up, have met."""
        self.together[slice(None) if teams is None else teams] = len(self.lanes.history) - 1

    def leave(self) -> None:
        """The workgroups of the batch end, and what others may still read goes with them."""
        if self.shared:
            length = self.length * self.lanes.kernel.cluster  # all of a cluster end together
            last = np.repeat(self.together[:: self.lanes.subgroups * self.lanes.kernel.cluster], length)
            late = self.others >= last[: self.size]
            if (self.others > 0).any() and late.any():
                address = int(np.flatnonzero(late)[0])
                self._too_early(self._op(self.others[address]), address, "it ends")

    def _require_read(self, op: Op, address: Array, met: Array) -> None:
        """What others of the cluster read is written again only behind a barrier."""
        late = self.others.take(address) >= met
        if late.any():
            where = tuple(np.argwhere(late)[0])
            read = self._op(self.others[address[where]])
            self._too_early(read, address[where], f"it is written in {self.lanes.site(op)}")

    def _too_early(self, read: Op, address: Any, what: str) -> NoReturn:
        raise SanitizerError(
            f"kernel {self.lanes.kernel.name}: race in {self.space} memory on {self._place(address)}: {what}, and "
            f"{self.lanes.site(read)} reads it from a workgroup of the cluster; no barrier of clusters orders the two"
        )

    def _prune(self) -> None:
        """Forget reads that a barrier of the workgroup has ordered before whatever comes."""
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
        """Look for writes that came after a read they are not ordered with.

        Called before every barrier. Between two barriers the last write of an element stands for all of them, as
        writes by two lanes would have been a race themselves.
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
        """Keep the last read of each element by each lane: earlier ones are ordered with more, never with less."""
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

    def _place(self, address: Any) -> str:
        return f"{self.name}[{int(address) % self.length}]"

    def _who(self, lane: Any, team: Any) -> str:
        if lane >= 0:
            return self.lanes.who_id(int(lane))
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
        """``other`` collides with the write that the record holds."""
        verb = "writes" if record is self.writes else "updates"
        who = self._who(record.lane[address], record.team[address])
        raise SanitizerError(
            f"kernel {self.lanes.kernel.name}: race in {self.space} memory on {self._place(address)}: {other}, and "
            f"{who} {verb} it in {self.lanes.site(self._op(record.time[address]))}; no barrier orders the two"
        )
