"""Order between the subgroups of a workgroup with roles, by vector clocks, and the phases of its mbarriers.

An arrival leaves what its subgroup has done or seen at the mbarrier, and a wait for that phase adds it to what the
waiting subgroup has seen. Accesses to shared memory that no such chain orders are reported as races (`Shadow`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aule.ir.interpret.lanes import Lanes
from aule.ir.interpret.numbers import Array


class Order:
    """Which accesses to shared memory are ordered between the subgroups of a workgroup."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.seen = np.zeros((lanes.subgroups, lanes.subgroups), np.int64)
        """For each subgroup, the time before which accesses of each other one are ordered before what it does next."""

    def begin(self) -> None:
        """Start another workgroup."""
        self.seen.fill(0)

    def left(self, subgroups: Array) -> Array:
        """What some subgroups have done and seen."""
        clock: Array = self.seen[subgroups].max(axis=0)
        clock[subgroups] = len(self.lanes.history)
        return clock

    def found(self, subgroups: Array, clock: Array) -> None:
        """Order what a clock knows before everything that some subgroups do next."""
        self.seen[subgroups] = np.maximum(self.seen[subgroups], clock)

    def orders(self, time: Array, before: Array, after: Array) -> Array:
        """True where an access by subgroup ``before`` at ``time`` is ordered before subgroup ``after`` now."""
        time, before, after = np.broadcast_arrays(time, before, after)
        ordered: Array = (before >= 0) & (time < self.seen[after, before])
        return ordered

    def atomic(self, name: str, address: Array) -> None:
        """Ignore atomics: they order nothing in shared memory."""


@dataclass
class Phases:
    """The phases of an mbarrier in a workgroup with roles."""

    threads: int
    arrived: int = 0
    ended: int = 0
    """Phases that have ended."""
    clock: Array | None = None
    """What the threads that have arrived in this phase had done and seen."""
    last: Array | None = None
    """The same of the last phase that has ended."""
    waits: dict[int, int] = field(default_factory=dict)
    """The phase that each subgroup has waited for last."""

    def arrive(self, threads: int, clock: Array) -> bool:
        """Count some threads; False if they are too many for the phase."""
        self.arrived += threads
        self.clock = clock if self.clock is None else np.maximum(self.clock, clock)
        if self.arrived == self.threads:
            self.arrived, self.ended = 0, self.ended + 1
            self.last, self.clock = self.clock, None
        return self.arrived < self.threads

    def has_ended(self, parity: int) -> bool:
        """Whether the last phase of a parity has ended; that before the first one has."""
        return self.ended % 2 != parity

    def missing(self) -> str:
        """The phase that lasts, and how many threads have arrived."""
        return f"phase {self.ended} of an mbarrier, at which {self.arrived} of {self.threads} threads have arrived"

    def wait(self, subgroups: Array) -> bool:
        """Record that some subgroups have waited for the phase that has ended last; False if it was not their next."""
        now = self.ended - 1
        right = all(self.waits.get(i, min(now, 0) - 1) == now - 1 for i in subgroups.tolist())
        self.waits |= dict.fromkeys(subgroups.tolist(), now)
        return right
