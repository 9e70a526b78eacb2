"""Operations that lanes do together: barriers, subgroup operations and matrix fragments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aule.errors import KernelError
from aule.ir.interpret.machine import Compiler, Machine, Step
from aule.ir.interpret.numbers import Array, cast_function, register_dtype
from aule.ir.kernel import Op, Value
from aule.ir.types import SCALARS, Fragment

# Synchronisation and subgroups.


def _barrier(m: Machine, op: Op) -> Step:
    return _synchronise(m, op, op.attrs["global_memory"])


def _synchronise(m: Machine, op: Op, all_memory: bool) -> Step:
    lanes, shadows = m.lanes, m.shadows
    subgroups = np.arange(lanes.subgroups)

    def step() -> None:
        slots = lanes.whole_groups(op)
        for shadow in shadows:
            if shadow.shared:
                teams = None if slots is None else (slots[:, None] * lanes.subgroups + subgroups).ravel()
                shadow.synchronise(op, teams, True)
            elif all_memory:
                teams = None if slots is None else lanes.group[slots * lanes.workgroup]
                shadow.synchronise(op, teams, True)

    return step


def _workgroup_any(m: Machine, op: Op) -> Step:
    lanes, registers, source, result = m.lanes, m.registers, m.slot(op.args[0]), m.result(op)
    wait = _synchronise(m, op, False)

    def step() -> None:
        wait()
        value = registers[source] if lanes.mask is None else registers[source] & lanes.mask
        found = value.reshape(-1, lanes.workgroup).any(axis=1)
        registers[result] = np.repeat(found, lanes.workgroup)

    return step


def _subgroup_barrier(m: Machine, op: Op) -> Step:
    lanes, shadows = m.lanes, m.shadows

    def step() -> None:
        teams = lanes.whole_subgroups(op)
        for shadow in shadows:
            if shadow.shared:
                shadow.synchronise(op, teams, False)

    return step


def _collective(m: Machine, op: Op, step: Step) -> Step:
    """All lanes of a subgroup take part, or none."""
    lanes = m.lanes

    def checked() -> None:
        if lanes.mask is not None:
            lanes.whole_subgroups(op)
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

    return _collective(m, op, step)


def _shuffle_xor(m: Machine, op: Op) -> Step:
    lanes, mask = m.lanes, op.attrs["mask"]
    lane = (lanes.thread % lanes.subgroup_size) ^ mask
    missing = lane >= lanes.size
    if missing.any():
        where = int(np.flatnonzero(missing)[0])
        raise lanes.error(op, where, f"shuffle from lane {int(lane[where])}, which does not exist")
    source = lanes.start + lane
    return _collective(m, op, m.apply(op, lambda x: x.take(source)))


def _reduce(m: Machine, op: Op, merge: np.ufunc) -> Step:
    first, subgroup = m.lanes.first, m.lanes.subgroup
    return _collective(m, op, m.apply(op, lambda x: merge.reduceat(x, first, dtype=x.dtype).take(subgroup)))


def _subgroup_reduce(m: Machine, op: Op) -> Step:
    merge = {"add": np.add, "min": np.fmin, "max": np.fmax}[op.attrs["kind"]]
    return _reduce(m, op, merge)


def _subgroup_any(m: Machine, op: Op) -> Step:
    return _reduce(m, op, np.logical_or)


def _subgroup_all(m: Machine, op: Op) -> Step:
    return _reduce(m, op, np.logical_and)


# Fragments: whole matrices, one per subgroup; see _fragment_get for who holds which element.


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
    """An operand that is the same in all lanes of a subgroup: one number per subgroup."""
    one = value.take(m.lanes.first)
    differs = value != one.take(m.lanes.subgroup)
    if m.lanes.mask is not None:
        differs &= m.lanes.mask
    if differs.any():
        message = "operand of a fragment operation that differs between the lanes of a subgroup"
        raise m.lanes.error(op, int(np.flatnonzero(differs)[0]), message)
    return one


def _fragment_fill(m: Machine, op: Op) -> Step:
    assert op.result is not None
    type_ = _fragment(m, op, op.result)
    shape = (len(m.lanes.first), type_.rows, type_.cols)
    fill = m.apply(op, lambda x: np.broadcast_to(_uniform(m, op, x)[:, None, None], shape))
    return _collective(m, op, fill)


def _places(m: Machine, op: Op, type_: Fragment) -> Callable[[], tuple[Array, Array]]:
    """Addresses of a matrix in memory, a column per active subgroup, and the first lanes of those."""
    memory, lanes, registers = m.memory[op.args[0]], m.lanes, m.registers
    index, stride = m.slot(op.args[1]), m.slot(op.args[2])
    row, column = np.indices((type_.rows, type_.cols)).reshape(2, -1, 1)
    major, minor = (row, column) if op.attrs["layout"] == "row" else (column, row)

    def places() -> tuple[Array, Array]:
        running = lanes.whole_subgroups(op)
        start, step = (_uniform(m, op, registers[slot].astype(np.int64)) for slot in (index, stride))
        first = lanes.first
        if running is not None:
            start, step, first = start[running], step[running], first[running]
        return memory.matrix_addresses(op, start + major * step + minor, first), first

    return places


def _fragment_load(m: Machine, op: Op) -> Step:
    assert op.result is not None
    type_ = _fragment(m, op, op.result)
    memory, lanes, registers, result = m.memory[op.args[0]], m.lanes, m.registers, m.result(op)
    places, dtype = _places(m, op, type_), register_dtype(type_.elem)

    def step() -> None:
        address, first = places()
        value = memory.read(op, address, first, collective=True)
        whole = np.zeros((len(lanes.first), type_.rows, type_.cols), dtype)
        whole[lanes.subgroup[first]] = value.T.reshape(-1, type_.rows, type_.cols)
        registers[result] = whole

    return step


def _fragment_store(m: Machine, op: Op) -> Step:
    type_ = _fragment(m, op, op.args[3])
    memory, lanes, registers, source = m.memory[op.args[0]], m.lanes, m.registers, m.slot(op.args[3])
    places = _places(m, op, type_)

    def step() -> None:
        address, first = places()
        value = registers[source][lanes.subgroup[first]]
        memory.write(op, address, value.reshape(len(first), -1).T, first, collective=True)

    return step


def _fragment_mma(m: Machine, op: Op) -> Step:
    assert op.result is not None
    type_ = _fragment(m, op, op.result)
    wide = np.float64 if type_.elem.name == "f64" else np.float32 if type_.elem.is_float else np.int64
    exact = SCALARS["f64" if wide is np.float64 else "f32" if wide is np.float32 else "i64"]
    narrow = cast_function(exact, type_.elem)
    multiply = m.apply(op, lambda a, b, c: narrow(a.astype(wide) @ b.astype(wide) + c.astype(wide)))
    return _collective(m, op, multiply)


def _fragment_get(m: Machine, op: Op) -> Step:
    """Lane L of n holds elements L*c ... L*c+c-1 of the matrix in row-major order, c = rows * cols / n."""
    type_ = _fragment(m, op, op.args[0])
    held, component = _component(m, op, type_)
    return _collective(m, op, m.apply(op, lambda x: x.reshape(-1, held)[:, component]))


def _fragment_set(m: Machine, op: Op) -> Step:
    type_ = _fragment(m, op, op.args[0])
    held, component = _component(m, op, type_)

    def replace(old: Array, new: Array) -> Array:
        value = old.copy()
        value.reshape(-1, held)[:, component] = new
        return value

    return _collective(m, op, m.apply(op, replace))


def _fragment_pack(m: Machine, op: Op) -> Step:
    assert op.result is not None
    type_ = _fragment(m, op, op.result)
    shape = (len(m.lanes.first), type_.rows, type_.cols)
    held = type_.rows * type_.cols // m.lanes.subgroup_size
    if len(op.args) != held:
        message = f"{type_} has {held} components in each lane, got {len(op.args)}"
        raise KernelError(f"kernel {m.kernel.name}: {message} ({op.where})")
    return _collective(m, op, m.apply(op, lambda *parts: np.stack(parts, axis=1).reshape(shape)))


def _component(m: Machine, op: Op, type_: Fragment) -> tuple[int, int]:
    held, component = type_.rows * type_.cols // m.lanes.subgroup_size, op.attrs["component"]
    if component >= held:
        message = f"{type_} has {held} components in each lane, got component {component}"
        raise KernelError(f"kernel {m.kernel.name}: {message} ({op.where})")
    return held, component


COMPILERS: dict[str, Compiler] = {
    "barrier": _barrier, "workgroup_any": _workgroup_any, "subgroup_barrier": _subgroup_barrier,
    "shuffle": _shuffle, "shuffle_xor": _shuffle_xor,
    "subgroup_reduce": _subgroup_reduce, "subgroup_any": _subgroup_any, "subgroup_all": _subgroup_all,
    "fragment_fill": _fragment_fill, "fragment_load": _fragment_load, "fragment_store": _fragment_store,
    "fragment_mma": _fragment_mma, "fragment_get": _fragment_get, "fragment_set": _fragment_set,
    "fragment_pack": _fragment_pack,
}  # fmt: skip
