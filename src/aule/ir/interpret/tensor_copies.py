"""Interpreted tensor copies: boxes of a tensor in global memory that arrive at an mbarrier.

A copy writes at once, but counts as an access that only a wait for its mbarrier's phase orders (`Order`). So reading
too early, and overwriting what others still read, are races.
"""

from __future__ import annotations

import numpy as np

from aule.ir.interpret.machine import Compiler, Machine, Step
from aule.ir.interpret.numbers import Array
from aule.ir.interpret.warpgroups import phases_of, same
from aule.ir.kernel import Op

_ALIGNMENT = 128


def _one_subgroup(m: Machine, op: Op) -> Array:
    """The subgroup that runs an operation, as an array; an error if there are several."""
    subgroups = m.lanes.subgroups_of(op)
    if len(subgroups) != 1:
        raise m.lanes.error(op, int(m.lanes.first[subgroups[0]]), "several subgroups where one must be chosen")
    return subgroups


def _mbarrier_expect(m: Machine, op: Op) -> Step:
    order = m.order
    assert order is not None

    def step() -> None:
        subgroups = _one_subgroup(m, op)
        m.lanes.tick(op)
        phases, _ = phases_of(m, op, subgroups)
        if not phases.arrive(1, order.left(subgroups), op.attrs["bytes"]):
            lane = int(m.lanes.first[subgroups[0]])
            raise m.lanes.error(op, lane, "more arrivals at an mbarrier than it has threads")

    return step


def _tensor_copy(m: Machine, op: Op) -> Step:
    lanes, order, kernel = m.lanes, m.order, m.kernel
    assert order is not None
    source = next(x for x in kernel.maps if x.name == op.attrs["map"])
    offset, sizes, strides = source.described(m.scalars)
    tensor, shared = m.memory[kernel.values[source.buffer]], m.memory[op.args[0]]
    start, size = kernel.shared_offsets[op.args[0]], shared.elem.bytes
    slots = [m.slot(arg) for arg in op.args[4:]]
    # Places of the elements within a box, the first axis innermost.
    places = np.indices(source.box[::-1]).reshape(len(source.box), -1)[::-1]

    def step() -> None:
        subgroups = _one_subgroup(m, op)
        lane = lanes.first[subgroups]
        to = same(m, op, m.slot(op.args[1]), subgroups)
        if (start + to * size) % _ALIGNMENT:
            raise lanes.error(op, int(lane[0]), f"a box that does not start at a multiple of {_ALIGNMENT} bytes")
        first = np.array([same(m, op, slot, subgroups) for slot in slots])
        at = places + first[:, None]
        inside = ((at >= 0) & (at < np.array(sizes)[:, None])).all(axis=0)
        index = offset + (at[:, inside] * np.array(strides)[:, None]).sum(axis=0)
        values = np.zeros((places.shape[1], 1), np.float32)
        values[inside] = tensor.read(op, tensor.matrix_addresses(op, index[:, None], lane), lane)
        bytes_ = start + (to + np.arange(places.shape[1])) * size
        if source.swizzle:
            bytes_ ^= (bytes_ >> 7 & source.swizzle // 16 - 1) << 4
        phases, number = phases_of(m, op, subgroups, place=2)
        copies = order.copies[op.args[2]] + number
        address = shared.matrix_addresses(op, (bytes_ - start)[:, None] // size, lane)
        order.started(subgroups, copies)
        shared.copy(op, address, values, lane, copies)
        phases.bring(source.box_elements * size, order.brought(copies))

    return step


COMPILERS: dict[str, Compiler] = {"mbarrier_expect": _mbarrier_expect, "tensor_copy": _tensor_copy}
