"""Interpreted operations that lanes execute together: barriers and subgroup operations."""

from __future__ import annotations

import numpy as np

from aule.ir.interpret.machine import Compiler, Machine, Step, nothing
from aule.ir.kernel import Op

_MERGES = {
    "add": np.add, "min": np.fmin, "max": np.fmax, "subgroup_any": np.logical_or, "subgroup_all": np.logical_and,
}  # fmt: skip
"""Function that merges the values of two lanes, by the kind of reduction."""


def _barrier(m: Machine, op: Op) -> Step:
    return _synchronise(m, op, op.attrs["global_memory"])


def _cluster_barrier(m: Machine, op: Op) -> Step:
    return _synchronise(m, op, False, clusters=True)


def _synchronise(m: Machine, op: Op, all_memory: bool, clusters: bool = False) -> Step:
    lanes, shadows = m.lanes, m.shadows
    subgroups = np.arange(lanes.subgroups)

    def step() -> None:
        slots = lanes.full_clusters(op) if clusters else lanes.full_groups(op)
        if lanes.crew is not None:
            _meet(m, op)
            return
        for shadow in shadows:
            if shadow.shared:
                teams = None if slots is None else (slots[:, None] * lanes.subgroups + subgroups).ravel()
                shadow.synchronise(op, teams, True)
                if clusters:
                    shadow.cluster_barrier(teams)
            elif all_memory:
                teams = None if slots is None else lanes.group[slots * lanes.workgroup]
                shadow.synchronise(op, teams, True)
        if m.fences is not None and all_memory:
            m.fences.barrier(np.unique(lanes.group) if slots is None else lanes.group[slots * lanes.workgroup])

    return step


def _meet(m: Machine, op: Op) -> None:
    """Order accesses to shared memory between the subgroups of a crew."""
    assert m.order is not None
    subgroups = m.lanes.subgroups_of(op)
    for shadow in m.shadows:
        if shadow.shared:
            shadow.check()
    m.lanes.tick(op)
    m.order.found(subgroups, m.order.left(subgroups))


def _device_fence(m: Machine, op: Op) -> Step | None:
    return None if m.fences is None else m.fences.fence


def _workgroup_any(m: Machine, op: Op) -> Step:
    lanes, registers, source, result = m.lanes, m.registers, m.slot(op.args[0]), m.result(op)
    wait = _synchronise(m, op, op.attrs["global_memory"])

    def step() -> None:
        wait()
        value = registers[source] if lanes.mask is None else registers[source] & lanes.mask
        found = value.reshape(-1, lanes.workgroup).any(axis=1)
        registers[result] = np.repeat(found, lanes.workgroup)

    return step


def _subgroup_barrier(m: Machine, op: Op) -> Step:
    lanes, shadows = m.lanes, m.shadows

    def step() -> None:
        teams = lanes.full_subgroups(op)
        for shadow in shadows:
            if shadow.shared:
                shadow.synchronise(op, teams, False)

    return step


def collective(m: Machine, op: Op, step: Step) -> Step:
    """Wrap a step to check that either all lanes of a subgroup take part, or none."""
    lanes = m.lanes

    def checked() -> None:
        if lanes.mask is not None:
            lanes.full_subgroups(op)
        step()

    return checked


def _shuffle(m: Machine, op: Op) -> Step:
    lanes, registers, result = m.lanes, m.registers, m.result(op)
    source, other = (m.slot(arg) for arg in op.args)

    def step() -> None:
        lane = registers[other].astype(np.int64)
        wrong = (lane < 0) | (lane >= lanes.size)
        if wrong.any():
            bad = wrong if lanes.mask is None else wrong & lanes.mask
            if bad.any():
                where = int(np.flatnonzero(bad)[0])
                raise lanes.error(op, where, f"shuffle from lane {int(lane[where])}, which does not exist")
            lane = np.where(wrong, 0, lane)
        registers[result] = registers[source].take(lanes.start + lane)

    return collective(m, op, step)


def _shuffle_xor(m: Machine, op: Op) -> Step:
    lanes, mask = m.lanes, op.attrs["mask"]
    lane = (lanes.thread % lanes.subgroup_size) ^ mask
    missing = lane >= lanes.size
    if missing.any():
        where = int(np.flatnonzero(missing)[0])
        raise lanes.error(op, where, f"shuffle from lane {int(lane[where])}, which does not exist")
    source = lanes.start + lane
    return collective(m, op, m.apply(op, lambda x: x.take(source)))


def _reduce(m: Machine, op: Op) -> Step:
    first, subgroup, merge = m.lanes.first, m.lanes.subgroup, _MERGES[op.attrs.get("kind", op.opcode)]
    return collective(m, op, m.apply(op, lambda x: merge.reduceat(x, first, dtype=x.dtype).take(subgroup)))


COMPILERS: dict[str, Compiler] = {
    "barrier": _barrier, "device_fence": _device_fence, "workgroup_any": _workgroup_any,
    "launch_next": nothing, "launch_await": nothing, "cluster_barrier": _cluster_barrier,
    "subgroup_barrier": _subgroup_barrier,
    "shuffle": _shuffle, "shuffle_xor": _shuffle_xor,
    "subgroup_reduce": _reduce, "subgroup_any": _reduce, "subgroup_all": _reduce,
}  # fmt: skip
