"""The lanes of a batch of workgroups, which of them are active, and how error messages name them."""

from __future__ import annotations

from typing import Any

import numpy as np

from aule.errors import KernelError
from aule.ir.interpret.numbers import Array
from aule.ir.kernel import KernelIR, Op
from aule.ir.text import line


class SanitizerError(KernelError):
    """The interpreter found undefined behaviour in a kernel."""


class Lanes:
    """The lanes of a batch of workgroups that run in lockstep.

    Attributes
    ----------
    count : int
        Lanes per batch.
    mask, active : ndarray or None
        Active lanes, as bools and as indices; None if all are active.
    crew : ndarray or None
        Lanes that count as the workgroup in a block of ``roles``, as bools.
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
        self.crew: Array | None = None

    def begin(self, first_group: int, total: int) -> None:
        """Start the batch of workgroups from ``first_group`` on; those past the end of the launch are inactive."""
        self.group = self.slot + first_group
        self.lane_id = self.group * self.workgroup + self.thread
        exists = self.group < total
        self.enter(None if exists.all() else exists)

    def enter(self, mask: Array | None) -> None:
        """Set the active lanes."""
        self.mask = mask
        self.active = None if mask is None else np.flatnonzero(mask)

    def tick(self, op: Op) -> int:
        """Record an access or barrier; returns its time."""
        self.history.append(op)
        return len(self.history) - 1

    def full_groups(self, op: Op) -> Array | None:
        """Slots of the workgroups that arrive at a barrier (None: all); an error if only some threads of one do."""
        if self.mask is None:
            return None
        arrived = self.mask.reshape(self.groups, self.workgroup)
        if self.crew is not None:  # others need not arrive
            arrived = arrived | ~self.crew & arrived.any(axis=1, keepdims=True)
        some, every = arrived.any(axis=1), arrived.all(axis=1)
        if (some != every).any():
            slot = int(np.flatnonzero(some != every)[0])
            absent = slot * self.workgroup + int(np.flatnonzero(~arrived[slot])[0])
            raise self.error(op, absent, "barrier in divergent control flow: this thread does not arrive, others do")
        return np.flatnonzero(every)

    def subgroups_of(self, op: Op) -> Array:
        """Subgroups of the workgroup that take part in an operation; an error if only some lanes of one do."""
        running = self.full_subgroups(op)
        return np.arange(self.subgroups) if running is None else running

    def full_clusters(self, op: Op) -> Array | None:
        """Slots of the workgroups that arrive at a cluster barrier (None: all); an error if part of a cluster does."""
        slots = self.full_groups(op)
        if slots is None:
            return None
        cluster = self.kernel.cluster
        arrived = np.zeros(self.groups, np.bool_)
        arrived[slots] = True
        some = np.repeat(arrived.reshape(-1, cluster).any(axis=1), cluster)
        if (some != arrived).any():
            absent = int(np.flatnonzero(some != arrived)[0]) * self.workgroup
            raise self.error(op, absent, "barrier of a cluster: this workgroup does not arrive, others do")
        return slots

    def full_subgroups(self, op: Op) -> Array | None:
        """Subgroups that arrive at a subgroup operation (None: all); an error if only some lanes of one do."""
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
        """Make an error that names the kernel, the operation, the lane and the line of Python."""
        return SanitizerError(f"kernel {self.kernel.name}: {message}; {self.site(op)}, {self.who(lane)}")

    def hang(self, what: str) -> SanitizerError:
        """Make an error for threads that would wait for ever."""
        return SanitizerError(f"kernel {self.kernel.name}: no thread can go on: {what}")

    def site(self, op: Op) -> str:
        """An operation and where it was emitted."""
        return f"`{line(self.kernel, op)}` at {op.where}"

    def who(self, lane: int) -> str:
        """Name a lane of the batch by its thread and workgroup."""
        return self.who_id(int(self.lane_id[lane]))

    def who_id(self, lane_id: int) -> str:
        """Name a lane, given its number in the launch, by its thread and workgroup."""
        group, thread = divmod(lane_id, self.workgroup)
        return f"thread {thread} of workgroup {self.coordinates(group)}"

    def coordinates(self, group: Any) -> tuple[Any, Any, Any]:
        """Grid position of a workgroup, or of an array of workgroups."""
        x, y, _ = self.grid
        return group % x, group // x % y, group // (x * y)
