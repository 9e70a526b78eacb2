"""Interpreted matrix fragments: one full matrix per subgroup; a layout maps each lane's components to elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aule.errors import KernelError
from aule.ir.interpret.collective import collective
from aule.ir.interpret.machine import Compiler, Machine, Step
from aule.ir.interpret.numbers import Array, cast_function, register_dtype
from aule.ir.kernel import Op, Value
from aule.ir.types import Fragment, f32, f64, i64


def _fragment(m: Machine, op: Op, value: Value) -> Fragment:
    type_, size = value.type, m.lanes.subgroup_size
    assert isinstance(type_, Fragment)
    if m.lanes.workgroup % size or type_.rows * type_.cols % size:
        raise KernelError(
            f"kernel {m.kernel.name}: {type_} over subgroups of {size} in workgroups of {m.lanes.workgroup}: "
            f"expected full subgroups and as many elements in every lane ({op.where})"
        )
    return type_


def _uniform(m: Machine, op: Op, value: Array) -> Array:
    """One number per subgroup of an operand that must be equal in all its lanes."""
    one = value.take(m.lanes.first)
    differs = value != one.take(m.lanes.subgroup)
    if m.lanes.mask is not None:
        differs &= m.lanes.mask
    if differs.any():
        message = "operand of a fragment operation that differs between the lanes of a subgroup"
        raise m.lanes.error(op, int(np.flatnonzero(differs)[0]), message)
    return one


def _fragment_fill(m: Machine, op: Op) -> Step:
    type_ = _fragment(m, op, op.output)
    shape = (len(m.lanes.first), type_.rows, type_.cols)
    fill = m.apply(op, lambda x: np.broadcast_to(_uniform(m, op, x)[:, None, None], shape))
    return collective(m, op, fill)


def _addresses(m: Machine, op: Op, type_: Fragment) -> Callable[[], tuple[Array, Array]]:
    """Make a function that returns the addresses of a matrix, a column per active subgroup, and their first lanes."""
    memory, lanes, registers = m.memory[op.args[0]], m.lanes, m.registers
    index, stride = m.slot(op.args[1]), m.slot(op.args[2])
    row, column = np.indices((type_.rows, type_.cols)).reshape(2, -1, 1)
    major, minor = (row, column) if op.attrs["layout"] == "row" else (column, row)

    def addresses() -> tuple[Array, Array]:
        running = lanes.full_subgroups(op)
        start, step = (_uniform(m, op, registers[slot].astype(np.int64)) for slot in (index, stride))
        first = lanes.first
        if running is not None:
            start, step, first = start[running], step[running], first[running]
        return memory.matrix_addresses(op, start + major * step + minor, first), first

    return addresses


def _fragment_load(m: Machine, op: Op) -> Step:
    type_ = _fragment(m, op, op.output)
    memory, lanes, registers, result = m.memory[op.args[0]], m.lanes, m.registers, m.result(op)
    addresses, dtype = _addresses(m, op, type_), register_dtype(type_.elem)

    def step() -> None:
        address, first = addresses()
        value = memory.read(op, address, first, collective=True)
        matrices = np.zeros((len(lanes.first), type_.rows, type_.cols), dtype)
        matrices[lanes.subgroup[first]] = value.T.reshape(-1, type_.rows, type_.cols)
        registers[result] = matrices

    return step


def _fragment_store(m: Machine, op: Op) -> Step:
    type_ = _fragment(m, op, op.args[3])
    memory, lanes, registers, source = m.memory[op.args[0]], m.lanes, m.registers, m.slot(op.args[3])
    addresses = _addresses(m, op, type_)

    def step() -> None:
        address, first = addresses()
        value = registers[source][lanes.subgroup[first]]
        memory.write(op, address, value.reshape(len(first), -1).T, first, collective=True)

    return step


def _fragment_mma(m: Machine, op: Op) -> Step:
    type_ = _fragment(m, op, op.output)
    exact = f64 if type_.elem == f64 else f32 if type_.elem.is_float else i64
    wide, narrow = register_dtype(exact), cast_function(exact, type_.elem)
    multiply = m.apply(op, lambda a, b, c: narrow(a.astype(wide) @ b.astype(wide) + c.astype(wide)))
    return collective(m, op, multiply)


# Components. Without a layout for fragments of that use, lane L of n holds elements L*c ... L*c+c-1 of the matrix in
# row-major order, c = rows * cols / n.


def _elements(m: Machine, op: Op, type_: Fragment) -> Array:
    """Row-major number of each lane's elements: a row per lane, a column per component."""
    size, layout = m.lanes.subgroup_size, m.layouts.get(type_.use)
    if layout is None:
        return np.arange(type_.rows * type_.cols).reshape(size, -1)
    if layout.lanes != size:
        raise KernelError(f"kernel {m.kernel.name}: {type_} lies over {layout.lanes} lanes, got {size} ({op.where})")
    rows, cols = np.array(
        [[layout.place(lane, part) for part in range(layout.parts)] for lane in range(size)]
    ).transpose(2, 0, 1)
    if rows.max() >= type_.rows or cols.max() >= type_.cols:
        raise KernelError(f"kernel {m.kernel.name}: the layout of {type_} reaches beyond it ({op.where})")
    elements: Array = rows * type_.cols + cols
    return elements


def _fragment_length(m: Machine, op: Op) -> Step:
    components = _elements(m, op, _fragment(m, op, op.args[0])).shape[1]
    return collective(m, op, m.apply(op, lambda x: np.full(m.lanes.count, components, np.int32)))


def _fragment_get(m: Machine, op: Op) -> Step:
    type_ = _fragment(m, op, op.args[0])
    at = _component(m, op, type_)
    return collective(m, op, m.apply(op, lambda x: x.reshape(len(x), -1)[:, at].ravel()))


def _fragment_set(m: Machine, op: Op) -> Step:
    type_ = _fragment(m, op, op.args[0])
    at = _component(m, op, type_)

    def replace(old: Array, new: Array) -> Array:
        return _scattered(m, op, old, at, new.reshape(len(old), -1))

    return collective(m, op, m.apply(op, replace))


def _fragment_pack(m: Machine, op: Op) -> Step:
    type_ = _fragment(m, op, op.output)
    elements, dtype = _elements(m, op, type_), register_dtype(type_.elem)
    shape = (len(m.lanes.first), type_.rows, type_.cols)
    if len(op.args) != elements.shape[1]:
        message = f"{type_} has {elements.shape[1]} components in each lane, got {len(op.args)}"
        raise KernelError(f"kernel {m.kernel.name}: {message} ({op.where})")

    def pack(*parts: Array) -> Array:
        values = np.stack(parts, axis=1).reshape(shape[0], -1)
        return _scattered(m, op, np.zeros(shape, dtype), elements.ravel(), values)

    return collective(m, op, m.apply(op, pack))


def _scattered(m: Machine, op: Op, old: Array, at: Array, values: Array) -> Array:
    """Replace elements of a matrix per subgroup. Lanes that hold the same element must agree on it."""
    new = old.reshape(len(old), -1).copy()
    new[:, at] = values
    differs = (new[:, at] != values) & ~((values != values) & (new[:, at] != new[:, at]))  # NaN equals NaN here
    running = m.lanes.full_subgroups(op)
    if running is not None:
        absent = np.ones(len(old), bool)
        absent[running] = False
        differs[absent] = False
    if differs.any():
        subgroup, place = np.argwhere(differs)[0]
        lane = int(m.lanes.first[subgroup]) + int(place) * m.lanes.subgroup_size // len(at)
        raise m.lanes.error(op, lane, "copies of an element of a fragment that differ between lanes")
    return new.reshape(old.shape)


def _component(m: Machine, op: Op, type_: Fragment) -> Array:
    """Row-major number of the element that each lane holds in the operation's component."""
    elements, component = _elements(m, op, type_), op.attrs["component"]
    if component >= elements.shape[1]:
        message = f"{type_} has {elements.shape[1]} components in each lane, got component {component}"
        raise KernelError(f"kernel {m.kernel.name}: {message} ({op.where})")
    at: Array = elements[:, component]
    return at


COMPILERS: dict[str, Compiler] = {
    "fragment_fill": _fragment_fill, "fragment_load": _fragment_load, "fragment_store": _fragment_store,
    "fragment_mma": _fragment_mma, "fragment_length": _fragment_length, "fragment_get": _fragment_get,
    "fragment_set": _fragment_set, "fragment_pack": _fragment_pack,
}  # fmt: skip
