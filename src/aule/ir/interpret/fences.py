"""What fences of the device order between workgroups: the part of the sanitizer that follows atomics.

A workgroup *has seen* another up to a time: accesses before that are ordered before its own. A fence takes along what
its workgroup has seen, and has done before its last barrier over global memory. The thread's next atomics leave that at
the element they change; those of other threads find it there, their fence makes it theirs, and a barrier their
workgroup's. Whatever of this a kernel leaves out, the order is missing and the race is reported.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aule.ir.interpret.lanes import Lanes
from aule.ir.interpret.numbers import Array


class Fences:
    """The order between the workgroups of a launch.

    Parameters
    ----------
    teams : int
        Workgroups.
    """

    def __init__(self, lanes: Lanes, teams: int) -> None:
        self.lanes, self.teams = lanes, teams
        self._seen: dict[int, Array] = {}
        """By workgroup: the time up to which it has seen each other one."""
        self._settled = np.zeros(teams, np.int64)
        """Time of each workgroup's last barrier over global memory."""
        self._released: dict[int, Array] = {}
        """By thread: what its last fence took along."""
        self._left: dict[tuple[str, int], Array] = {}
        """By buffer and element: what atomics left there."""
        self._found: dict[int, Array] = {}
        """By thread: what its atomics found and no fence has made its own."""
        self._acquired: dict[int, Array] = {}
        """By workgroup: what fences of its threads have made theirs since its last barrier."""

    def barrier(self, teams: Array) -> None:
        """Workgroups go on together after a barrier over global memory."""
        self._settled[teams] = len(self.lanes.history)
        for team in teams.tolist():
            _add(self._seen, team, self._acquired.pop(team, None))

    def fence(self) -> None:
        """The threads that run now have a fence."""
        for lane, team in self._running():
            _add(self._acquired, team, self._found.pop(lane, None))
            known = self._seen.get(team)
            self._released[lane] = np.zeros(self.teams, np.int64) if known is None else known.copy()
            self._released[lane][team] = self._settled[team]

    def atomic(self, name: str, address: Array) -> None:
        """The threads that run now change elements of a buffer, one after the other."""
        for (lane, _), element in zip(self._running(), address.tolist(), strict=True):
            _add(self._found, lane, self._left.get((name, element)))
            _add(self._left, (name, element), self._released.get(lane))

    def orders(self, time: Array, before: Array, after: Array) -> Array:
        """Whether what workgroups ``before`` did at a time comes before what workgroups ``after`` do now."""
        time, before, after = np.broadcast_arrays(time, before, after)
        ordered = np.zeros(time.shape, np.bool_)
        for team in np.unique(after).tolist():
            known = self._seen.get(team)
            if known is not None:
                mine = (after == team) & (before >= 0)
                ordered[mine] = time[mine] < known[before[mine]]
        return ordered

    def _running(self) -> list[tuple[int, int]]:
        """Number and workgroup of each thread that runs."""
        active = slice(None) if self.lanes.active is None else self.lanes.active
        return list(zip(self.lanes.lane_id[active].tolist(), self.lanes.group[active].tolist(), strict=True))


def _add(clocks: dict[Any, Array], key: Any, more: Array | None) -> None:
    if more is not None:
        known = clocks.get(key)
        clocks[key] = more if known is None else np.maximum(known, more)
