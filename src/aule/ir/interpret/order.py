"""Order between the subgroups of a workgroup with roles, by vector clocks, and the phases of its mbarriers.

An arrival leaves what its subgroup has done or seen at the mbarrier, and a wait for that phase adds it to what the
waiting subgroup has seen. Accesses to shared memory that no such chain orders are reported as races (`Shadow`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aule.ir.interpret.lanes import Lanes
from aule.ir.interpret.numbers import Array
from aule.ir.kernel import Value
from aule.ir.types import Pointer


class Order:
    """Which accesses to shared memory are ordered between the subgroups of a workgroup.

    Tensor copies count as further subgroups, one for each mbarrier: only a wait there orders them.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.copies: dict[Value, int] = {}
        """Number of the subgroup of copies that arrive at the first mbarrier of an array."""
        count = lanes.subgroups
        for op in lanes.kernel.walk():
            if op.opcode == "tensor_copy" and op.args[2] not in self.copies:
                self.copies[op.args[2]] = count
                assert isinstance(op.args[2].type, Pointer) and op.args[2].type.length is not None
                count += op.args[2].type.length
        self.seen = np.zeros((count, count), np.int64)
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

    def started(self, subgroups: Array, copies: int) -> None:
        """Order what a subgroup has done and seen before a copy that it starts."""
        self.found(np.array([copies]), self.left(subgroups))

    def brought(self, copies: int) -> Array:
        """What a wait for copies orders."""
        clock = np.zeros(len(self.seen), np.int64)
        clock[copies] = len(self.lanes.history)
        return clock

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
    """What the threads had done and seen when the last phase ended."""
    waits: dict[int, int] = field(default_factory=dict)
    """The phase that each subgroup has waited for last."""
    missing_bytes: int = 0
    """Bytes that copies are still to bring in this phase."""
    copied: int = -1
    """The last phase in which copies have arrived."""

    def arrive(self, threads: int, clock: Array, bytes_: int = 0) -> bool:
        """Count some threads, which announce bytes that copies will bring; False if they are too many for the phase."""
        self.arrived += threads
        self.missing_bytes += bytes_
        self._note(clock)
        return self.arrived <= self.threads

    def bring(self, bytes_: int, clock: Array) -> None:
        """Count bytes that a copy has brought, maybe before they were announced."""
        self.missing_bytes -= bytes_
        self.copied = self.ended
        self._note(clock)

    def _note(self, clock: Array) -> None:
        self.clock = clock if self.clock is None else np.maximum(self.clock, clock)
        if self.arrived == self.threads and not self.missing_bytes:
            self.arrived, self.ended = 0, self.ended + 1
            self.last, self.clock = self.clock, None

    def has_ended(self, parity: int) -> bool:
        """Whether the last phase of a parity has ended; that before the first one has."""
        return self.ended % 2 != parity

    def missing(self) -> str:
        """The phase that lasts, and how many threads and bytes have arrived."""
        bytes_ = f", and {abs(self.missing_bytes)} bytes are {'missing' if self.missing_bytes > 0 else 'too many'}"
        return (
            f"phase {self.ended} of an mbarrier, at which {self.arrived} of {self.threads} threads have arrived"
            f"{bytes_ if self.missing_bytes else ''}"
        )

    def unfinished(self) -> bool:
        """Whether copies may still be under way, because nobody has waited for them."""
        return bool(self.missing_bytes) or max(self.waits.values(), default=-1) < self.copied

    def wait(self, subgroups: Array) -> bool:
        """Record that some subgroups have waited for the phase that has ended last; False if it was not their next."""
        now = self.ended - 1
        right = all(self.waits.get(i, min(now, 0) - 1) == now - 1 for i in subgroups.tolist())
        self.waits |= dict.fromkeys(subgroups.tolist(), now)
        return right
