"""Order between workgroups by device fences and atomics, tracked with vector clocks for the sanitizer.

A *clock* holds, for each workgroup, the time up to which its accesses are ordered before something. It travels so:

1. A fence of a thread releases the clock of its workgroup: what the workgroup has seen of others, and what it did
   itself before its last barrier over global memory.
2. The thread's next atomics leave the released clock at the element they change.
3. An atomic of another thread on that element finds the clock, that thread's next fence acquires it, and the next
   barrier over global memory makes it part of what its workgroup has seen.

If a kernel leaves out one of these steps, the accesses stay unordered and the race is reported.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aule.ir.interpret.lanes import Lanes
from aule.ir.interpret.numbers import Array


class Fences:
    """Vector clocks of the workgroups of a launch; ``teams`` is their number."""

    def __init__(self, lanes: Lanes, teams: int) -> None:
        self.lanes, self.teams = lanes, teams
        self._seen: dict[int, Array] = {}
        """Clock per workgroup: the time up to which it has seen each other workgroup."""
        self._settled = np.zeros(teams, np.int64)
        """Time of each workgroup's last barrier over global memory."""
        self._released: dict[int, Array] = {}
        """Clock per thread that its last fence released."""
        self._left: dict[tuple[str, int], Array] = {}
        """Clock per buffer and element that atomics left there."""
        self._found: dict[int, Array] = {}
        """Clock per thread that its atomics found and no fence has acquired yet."""
        self._acquired: dict[int, Array] = {}
        """Clock per workgroup that fences of its threads have acquired since its last barrier."""

    def barrier(self, teams: Array) -> None:
        """Record a barrier over global memory of some workgroups."""
        self._settled[teams] = len(self.lanes.history)
        for team in teams.tolist():
            _add(self._seen, team, self._acquired.pop(team, None))

    def fence(self) -> None:
        """Record a fence of the active threads."""
        for lane, team in self._running():
            _add(self._acquired, team, self._found.pop(lane, None))
            known = self._seen.get(team)
            self._released[lane] = np.zeros(self.teams, np.int64) if known is None else known.copy()
            self._released[lane][team] = self._settled[team]

    def atomic(self, name: str, address: Array) -> None:
        """Record an atomic of the active threads, one after the other, on elements of a buffer."""
        for (lane, _), element in zip(self._running(), address.tolist(), strict=True):
            _add(self._found, lane, self._left.get((name, element)))
            _add(self._left, (name, element), self._released.get(lane))

    def orders(self, time: Array, before: Array, after: Array) -> Array:
        """True where an access by workgroup ``before`` at ``time`` is ordered before workgroup ``after`` now."""
        time, before, after = np.broadcast_arrays(time, before, after)
        ordered = np.zeros(time.shape, np.bool_)
        for team in np.unique(after).tolist():
            known = self._seen.get(team)
            if known is not None:
                own = (after == team) & (before >= 0)
                ordered[own] = time[own] < known[before[own]]
        return ordered

    def _running(self) -> list[tuple[int, int]]:
        """(thread, workgroup) of each active lane."""
        active = slice(None) if self.lanes.active is None else self.lanes.active
        return list(zip(self.lanes.lane_id[active].tolist(), self.lanes.group[active].tolist(), strict=True))


def _add(clocks: dict[Any, Array], key: Any, more: Array | None) -> None:
    if more is not None:
        known = clocks.get(key)
        clocks[key] = more if known is None else np.maximum(known, more)
