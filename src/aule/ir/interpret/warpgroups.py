"""Interpreted warpgroup products and mbarriers.

Products run at once, but count as unfinished until the wait for their group: reading a variable before that, or
changing the memory of a factor, is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aule.errors import KernelError
from aule.ir.interpret.machine import Compiler, Machine, MBarrier, Product, Step, nothing, run
from aule.ir.interpret.memory import Memory
from aule.ir.interpret.numbers import Array
from aule.ir.interpret.order import Phases
from aule.ir.kernel import Op, Value
from aule.ir.types import Panels

SUBGROUPS = 4
_ROWS = _DEPTH = 16


@dataclass(frozen=True)
class _Factor:
    """A factor in shared memory; ``offsets`` are those of its elements from the index, row-major."""

    memory: Memory
    slot: int
    offsets: Array

    @classmethod
    def of(cls, m: Machine, pointer: Value, index: Value, panels: Panels, rows: int, cols: int) -> _Factor:
        row, col = np.indices((rows, cols))
        if panels.layout == "column":
            row, col = col, row
        return cls(m.memory[pointer], m.slot(index), panels.offset(row + panels.row, col + panels.col))


def _warpgroup_mma(m: Machine, op: Op) -> Step:
    lanes, registers = m.lanes, m.registers
    if lanes.subgroup_size != 32 or lanes.workgroup % 128:
        raise KernelError(f"kernel {m.kernel.name}: expected whole warpgroups of 128 threads ({op.where})")
    in_memory = op.attrs["left"] is not None
    variables = tuple(m.slot(x) for x in op.args[4 if in_memory else 3 :])
    cols = _ROWS * len(variables)
    factors = [_Factor.of(m, op.args[0], op.args[1], op.attrs["right"], _DEPTH, cols)]
    if in_memory:
        left = op.attrs["left"]
        factors.append(_Factor.of(m, op.args[2], op.args[3], left, SUBGROUPS * _ROWS, _DEPTH))
    fragment = None if in_memory else m.slot(op.args[2])

    def unchanged(factor: _Factor, address: Array, first: Array, value: Array) -> Step:
        def check() -> None:
            if not np.array_equal(factor.memory.read(op, address, first, collective=True), value, equal_nan=True):
                raise lanes.error(op, int(first[0]), "shared memory that was written while a product was reading it")

        return check

    def step() -> None:
        running = lanes.full_subgroups(op)
        groups = np.arange(len(lanes.first) // SUBGROUPS)
        if running is not None:
            arrived = np.isin(np.arange(len(lanes.first)), running).reshape(-1, SUBGROUPS)
            if (arrived.any(axis=1) != arrived.all(axis=1)).any():
                raise lanes.error(op, int(lanes.first[running[0]]), "product of a warpgroup that not all of it takes")
            groups = np.flatnonzero(arrived.all(axis=1))
        subgroups = (groups[:, None] * SUBGROUPS + np.arange(SUBGROUPS)).ravel()
        first = lanes.first[groups * SUBGROUPS]
        reads = []
        for factor in factors:
            start = _uniform(m, op, registers[factor.slot].astype(np.int64), groups)
            if (start % 512).any():
                raise lanes.error(op, int(first[0]), "a factor that does not start at a multiple of 512 elements")
            offsets = factor.offsets.reshape(-1, 1) + start
            address = factor.memory.matrix_addresses(op, offsets, first)
            reads.append((factor, address, first, factor.memory.read(op, address, first, collective=True)))
        right = reads[0][3].T.reshape(-1, _DEPTH, cols)
        if fragment is None:
            left = reads[1][3].T.reshape(-1, SUBGROUPS * _ROWS, _DEPTH)
        else:
            left = registers[fragment][subgroups].reshape(-1, SUBGROUPS * _ROWS, _DEPTH)
        product = left.astype(np.float32) @ right.astype(np.float32)
        blocks = product.reshape(-1, _ROWS, len(variables), _ROWS).transpose(2, 0, 1, 3)
        for slot, block in zip(variables, blocks, strict=True):
            total = registers[slot].copy()
            total[subgroups] = block if op.attrs["fresh"] else total[subgroups] + block
            registers[slot] = total
        m.products[-1].append(Product(op, variables, [unchanged(*read) for read in reads]))

    return step


def _uniform(m: Machine, op: Op, value: Array, groups: Array) -> Array:
    """One number per warpgroup of an operand that must be equal in all its lanes."""
    rows = value.reshape(-1, 32 * SUBGROUPS)[groups]
    if (rows != rows[:, :1]).any():
        raise m.lanes.error(op, int(groups[0]) * 128, "operand that differs between the lanes of a warpgroup")
    result: Array = rows[:, 0]
    return result


def _warpgroup_commit(m: Machine, op: Op) -> Step:
    return lambda: m.products.append([])


def _warpgroup_wait(m: Machine, op: Op) -> Step:
    pending = op.attrs["pending"]

    def step() -> None:
        while len(m.products) > pending + 1:
            for product in m.products.pop(0):
                run(product.checks)

    return step


# An mbarrier of a kernel without roles is a barrier of the workgroup.


def _mbarrier_init(m: Machine, op: Op) -> Step:
    if m.order is not None:
        return _phases_begin(m, op)
    if op.attrs["threads"] not in (0, m.lanes.workgroup):
        raise KernelError(f"kernel {m.kernel.name}: expected all threads to arrive at an mbarrier ({op.where})")
    return lambda: m.mbarriers.update({op.args[0]: MBarrier.of(m.lanes.groups)})


def _slots(m: Machine, op: Op) -> Array:
    """Slots of the workgroups that take part."""
    slots = m.lanes.full_groups(op)
    return np.arange(m.lanes.groups) if slots is None else slots


def _mbarrier_arrive(m: Machine, op: Op) -> Step:
    if m.order is not None:
        return _phase_arrive(m, op)

    def step() -> None:
        barrier, slots = m.mbarriers[op.args[0]], _slots(m, op)
        if barrier.arrived[slots].any():
            raise m.lanes.error(op, int(slots[0]) * m.lanes.workgroup, "a second arrival without a wait in between")
        barrier.arrived[slots] = m.lanes.tick(op)

    return step


def _mbarrier_wait(m: Machine, op: Op) -> Step:
    """Order only what came before the arrivals; there is no waiting, since all lanes run in lockstep."""
    if m.order is not None:
        return _phase_wait(m, op)
    lanes, registers, parity = m.lanes, m.registers, m.slot(op.args[2])

    def step() -> None:
        barrier, slots = m.mbarriers[op.args[0]], _slots(m, op)
        times = barrier.arrived[slots].copy()
        first = slots * lanes.workgroup
        if (times == 0).any():
            raise lanes.error(op, int(first[0]), "a wait for an mbarrier at which no thread has arrived")
        if (registers[parity][first] != barrier.waited[slots] % 2).any():
            raise lanes.error(op, int(first[0]), "a wait for the other parity of an mbarrier")
        barrier.arrived[slots] = 0
        barrier.waited[slots] += 1
        for time in np.unique(times):
            teams = (slots[times == time][:, None] * lanes.subgroups + np.arange(lanes.subgroups)).ravel()
            for shadow in m.shadows:
                if shadow.shared:
                    shadow.synchronise(op, teams, True, since=int(time))

    return step


# mbarriers of kernels with roles: a crew waits while others run.


def _phases_begin(m: Machine, op: Op) -> Step:
    threads, index = op.attrs["threads"] or m.lanes.workgroup, m.slot(op.args[1])
    return lambda: m.phases.update({(op.args[0], int(m.registers[index][0])): Phases(threads)})


def phases_of(m: Machine, op: Op, subgroups: Array, place: int = 0) -> tuple[Phases, int]:
    """The mbarrier of an operation, whose pointer is operand ``place``, and its index."""
    number = same(m, op, m.slot(op.args[place + 1]), subgroups)
    found = m.phases.get((op.args[place], number))
    if found is None:
        raise m.lanes.error(op, int(m.lanes.first[subgroups[0]]), f"no mbarrier was initialised at index {number}")
    return found, number


def same(m: Machine, op: Op, slot: int, subgroups: Array) -> int:
    """A number that must be equal in all lanes of some subgroups."""
    lanes = m.lanes
    found = np.unique(m.registers[slot][np.isin(lanes.subgroup, subgroups)])
    if len(found) > 1:
        raise lanes.error(op, int(lanes.first[subgroups[0]]), "operand that differs between the lanes of a crew")
    return int(found[0])


def _phase_arrive(m: Machine, op: Op) -> Step:
    lanes, order = m.lanes, m.order
    assert order is not None

    def step() -> None:
        subgroups = lanes.subgroups_of(op)
        lanes.tick(op)
        if not phases_of(m, op, subgroups)[0].arrive(len(subgroups) * lanes.subgroup_size, order.left(subgroups)):
            raise lanes.error(op, int(lanes.first[subgroups[0]]), "more arrivals at an mbarrier than it has threads")

    return step


def _phase_wait(m: Machine, op: Op) -> Step:
    lanes, order = m.lanes, m.order
    assert order is not None

    def step() -> None:
        subgroups = lanes.subgroups_of(op)
        barrier, parity = phases_of(m, op, subgroups)[0], same(m, op, m.slot(op.args[2]), subgroups)
        lane = int(lanes.first[subgroups[0]])
        if not barrier.has_ended(parity):
            if m.crew is None:
                raise lanes.hang(f"{lanes.who(lane)} waits for {barrier.missing()} in {lanes.site(op)}")
            m.crew.wait(op, barrier, parity)
        if not barrier.wait(subgroups):
            ended = barrier.ended - 1
            raise lanes.error(op, lane, f"a wait for the wrong phase of an mbarrier: {ended} has ended last")
        for shadow in m.shadows:
            if shadow.shared:
                shadow.check()
        lanes.tick(op)
        if barrier.last is not None:
            order.found(subgroups, barrier.last)

    return step


COMPILERS: dict[str, Compiler] = {
    "warpgroup_mma": _warpgroup_mma, "warpgroup_commit": _warpgroup_commit, "warpgroup_wait": _warpgroup_wait,
    "warpgroup_fence": nothing, "warpgroup_publish": nothing,
    "mbarrier_init": _mbarrier_init, "mbarrier_arrive": _mbarrier_arrive, "mbarrier_wait": _mbarrier_wait,
}  # fmt: skip
