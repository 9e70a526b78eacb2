"""Interpreted operations of single lanes: leaves, arithmetic, vectors, memory, variables and control."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aule.errors import KernelError
from aule.ir.interpret.machine import Compiler, Machine, Step, nothing, run
from aule.ir.interpret.memory import Memory
from aule.ir.interpret.numbers import (
    Array,
    atomic_function,
    bitcast_function,
    cast_function,
    constant,
    e4m3_halves,
    function,
    memory_dtype,
)
from aule.ir.kernel import Op
from aule.ir.types import Fragment, Pointer, Scalar, Vector, element, lanes_of

# Leaves do not change while a batch runs, so their registers are filled beforehand.


def _const(m: Machine, op: Op) -> None:
    assert isinstance(op.output.type, Scalar)
    m.put(op.output, constant(op.attrs["value"], op.output.type, m.lanes.count))


def _thread_index(m: Machine, op: Op) -> None:
    thread, size = m.lanes.thread, m.lanes.subgroup_size
    index = {"thread_id": thread, "lane_id": thread % size, "subgroup_id": thread // size}[op.opcode]
    m.put(op.output, index.astype(np.int32))


def _group_id(m: Machine, op: Op) -> None:
    m.group_ids.append((m.result(op), op.attrs["axis"]))


def _group_count(m: Machine, op: Op) -> None:
    m.put(op.output, np.full(m.lanes.count, m.lanes.grid[op.attrs["axis"]], np.int32))


# Arithmetic.


def _arithmetic(m: Machine, op: Op) -> Step:
    # The last operand: the first of a select is a bool.
    return m.apply(op, function(op.opcode, element(op.args[-1].type)))


def _div(m: Machine, op: Op) -> Step:
    compute = _arithmetic(m, op)
    elem = element(op.args[0].type)
    if elem.is_float or op.args[1].constant:
        return compute
    return _guarded(m, op, compute, lambda right: right == 0, "division by zero")


def _rem(m: Machine, op: Op) -> Step:
    compute = _div(m, op)
    if m.kernel.arithmetic == "exact" or not element(op.args[0].type).is_signed:
        return compute
    for place in (0, 1):  # devices disagree on the result
        if op.args[place].constant is None or op.args[place].constant < 0:
            compute = _guarded(
                m, op, compute, lambda x: x < 0, "remainder of negative numbers in a quick kernel", place
            )
    return compute


def _shift(m: Machine, op: Op) -> Step:
    compute = _arithmetic(m, op)
    bits = element(op.args[0].type).bits
    count = op.args[1].constant
    if count is not None and 0 <= count < bits:
        return compute
    return _guarded(m, op, compute, lambda right: (right < 0) | (right >= bits), f"shift by {bits} bits or more")


def _guarded(m: Machine, op: Op, compute: Step, wrong: Callable[[Array], Array], message: str, place: int = 1) -> Step:
    """Wrap a step to report lanes in which an operand (by default the second) makes the result undefined."""
    lanes, registers, right = m.lanes, m.registers, m.slot(op.args[place])

    def step() -> None:
        bad = wrong(registers[right])
        if lanes.mask is not None:
            bad = bad & lanes.mask
        if bad.any():
            raise lanes.error(op, int(np.argwhere(bad)[0][-1]), message)
        compute()

    return step


def _cast(m: Machine, op: Op) -> Step:
    return m.apply(op, cast_function(element(op.args[0].type), element(op.output.type)))


def _bitcast(m: Machine, op: Op) -> Step:
    source, target = op.args[0].type, op.output.type
    assert isinstance(source, Scalar | Vector) and isinstance(target, Scalar | Vector)
    return m.apply(op, bitcast_function(source, target))


# Vectors: a row per vector lane.


def _make_vector(m: Machine, op: Op) -> Step:
    return m.apply(op, lambda *parts: np.stack(parts))


def _splat(m: Machine, op: Op) -> Step:
    assert isinstance(op.output.type, Vector)
    shape = (op.output.type.lanes, m.lanes.count)
    return m.apply(op, lambda x: np.broadcast_to(x, shape))


def _extract(m: Machine, op: Op) -> Step:
    lane = op.attrs["lane"]
    return m.apply(op, lambda x: x[lane])


def _permute(m: Machine, op: Op) -> Step:
    lanes = op.attrs["lanes"]
    rows = lanes[0] if len(lanes) == 1 else list(lanes)
    return m.apply(op, lambda *vectors: np.concatenate(vectors)[rows])


# Memory.


def _private(m: Machine, op: Op) -> Step:
    assert isinstance(op.output.type, Pointer) and op.output.type.length is not None
    lanes, elem, length = m.lanes, op.output.type.elem, op.output.type.length
    data = np.empty(lanes.count * length, memory_dtype(elem))
    base = np.arange(lanes.count) * length
    memory = Memory(lanes, op.attrs["name"], elem, data, length, base=base, private=m.sanitize)
    m.memory[op.output] = memory
    return lambda: memory.forget(lanes.active)


def _load(m: Machine, op: Op) -> Step:
    memory, lanes, registers = m.memory[op.args[0]], m.lanes, m.registers
    index, result, align = m.slot(op.args[1]), m.result(op), op.attrs["align"]
    count = lanes_of(op.output.type)

    def step() -> None:
        active = lanes.active
        address = memory.addresses(op, registers[index], active, count, align)
        registers[result] = _scatter(memory.read(op, address, active), active, lanes.count)

    return step


def _gather(value: Array, active: Array | None) -> Array:
    """Values of the active lanes."""
    return value if active is None else value[..., active]


def _scatter(value: Array, active: Array | None, count: int) -> Array:
    """Values of the active lanes in an array of all ``count`` lanes, with zeros elsewhere."""
    if active is None:
        return value
    out = np.zeros((*value.shape[:-1], count), value.dtype)
    out[..., active] = value
    return out


def _cluster_addresses(m: Machine, op: Op, number: int, count: int, align: int) -> Array:
    """Addresses of an access to other workgroups of the cluster; the register ``number`` holds their numbers."""
    memory, lanes, registers, cluster = m.memory[op.args[0]], m.lanes, m.registers, m.kernel.cluster
    active = lanes.active
    who = _gather(registers[number], active)
    if who.size and (int(who.min()) < 0 or int(who.max()) >= cluster):
        where = int(np.flatnonzero((who < 0) | (who >= cluster))[0])
        lane = where if active is None else int(active[where])
        raise lanes.error(op, lane, f"no workgroup {int(who[where])} in a cluster of {cluster}")
    address = memory.addresses(op, registers[m.slot(op.args[1])], active, count, align)
    result: Array = address + (who - _gather(lanes.slot, active) % cluster) * memory.length
    return result


def _cluster_load(m: Machine, op: Op) -> Step:
    memory, lanes, registers = m.memory[op.args[0]], m.lanes, m.registers
    number, result, align = m.slot(op.args[2]), m.result(op), op.attrs["align"]
    count = lanes_of(op.output.type)

    def step() -> None:
        active, address = lanes.active, _cluster_addresses(m, op, number, count, align)
        registers[result] = _scatter(memory.cluster_read(op, address, active), active, lanes.count)

    return step


def _cluster_post(m: Machine, op: Op) -> Step:
    memory, lanes, registers = m.memory[op.args[0]], m.lanes, m.registers
    source, number = m.slot(op.args[2]), m.slot(op.args[3])

    def step() -> None:
        active, address = lanes.active, _cluster_addresses(m, op, number, 1, 1)
        memory.cluster_post(op, address, _gather(registers[source], active), active)

    return step


def _store(m: Machine, op: Op) -> Step:
    memory, lanes, registers = m.memory[op.args[0]], m.lanes, m.registers
    index, source, align = m.slot(op.args[1]), m.slot(op.args[2]), op.attrs["align"]
    count = lanes_of(op.args[2].type)

    def step() -> None:
        active = lanes.active
        address = memory.addresses(op, registers[index], active, count, align)
        memory.write(op, address, _gather(registers[source], active), active)

    return step


def _atomic(m: Machine, op: Op) -> Step:
    memory, lanes, registers = m.memory[op.args[0]], m.lanes, m.registers
    index, source, result = m.slot(op.args[1]), m.slot(op.args[2]), m.result(op)
    merge = atomic_function(op.attrs["kind"])
    count = lanes_of(op.args[2].type)
    fences = m.fences if op.attrs["ordered"] else None

    def step() -> None:
        active = lanes.active
        if fences is not None:
            fences.fence()
        address = memory.addresses(op, registers[index], active, count, count)
        value = _gather(registers[source], active)
        # The elements of a vector are updated separately.
        rows = zip(np.atleast_2d(address), np.atleast_2d(value), strict=True)
        old = np.stack([memory.atomic(op, place, x, active, merge) for place, x in rows]).reshape(value.shape)
        registers[result] = _scatter(old, active, lanes.count)
        if fences is not None:
            fences.fence()

    return step


# Asynchronous copies: data is read at once, but written only by the wait for its group, as late as a device might.
# Groups are counted once for the batch, so all threads of a workgroup must take part.


def _async_copy(m: Machine, op: Op) -> Step:
    target, source = m.memory[op.args[0]], m.memory[op.args[2]]
    lanes, registers, count = m.lanes, m.registers, op.attrs["lanes"]
    to, index = m.slot(op.args[1]), m.slot(op.args[3])
    exists = m.slot(op.args[4]) if len(op.args) > 4 else None

    def step() -> None:
        active = lanes.active
        value = source.read(op, source.addresses(op, registers[index], active, count, count), active)
        if exists is not None:
            kept = registers[exists] if active is None else registers[exists].take(active)
            value = np.where(kept, value, np.zeros((), value.dtype))
        address = target.addresses(op, registers[to], active, count, count)
        target.start_copy(op, address, active)
        m.copies[-1].append(lambda: target.finish_copy(op, address, value, active))

    return step


def _async_commit(m: Machine, op: Op) -> Step:
    def step() -> None:
        m.lanes.full_groups(op)
        m.copies.append([])

    return step


def _async_wait(m: Machine, op: Op) -> Step:
    pending = op.attrs["pending"]

    def step() -> None:
        m.lanes.full_groups(op)
        while len(m.copies) > pending + 1:
            run(m.copies.pop(0))

    return step


# Variables. Arrays in registers are never changed in place, so a variable can share the array it is set to.


def _var(m: Machine, op: Op) -> Step:
    return m.apply(op, lambda x: x)


def _get(m: Machine, op: Op) -> Step:
    read, variable = m.apply(op, lambda x: x), m.slot(op.args[0])

    def step() -> None:
        _require_finished(m, op, variable)
        read()

    return step


def _require_finished(m: Machine, op: Op, variable: int) -> None:
    """Raise an error if an unfinished warpgroup product accumulates into a variable."""
    if any(variable in product.variables for group in m.products for product in group):
        raise m.lanes.error(op, 0, "a variable that a product is still computing")


def _set(m: Machine, op: Op) -> Step:
    lanes, registers = m.lanes, m.registers
    variable, source = (m.slot(arg) for arg in op.args)
    fragment = isinstance(op.args[1].type, Fragment)

    def step() -> None:
        _require_finished(m, op, variable)
        mask = lanes.mask
        if mask is None:
            registers[variable] = registers[source]
            return
        if fragment:
            lanes.full_subgroups(op)
            mask = mask[lanes.first][:, None, None]
        registers[variable] = np.where(mask, registers[source], registers[variable])

    return step


# Control.


def _if(m: Machine, op: Op) -> Step:
    lanes, registers, condition = m.lanes, m.registers, m.slot(op.args[0])
    then, otherwise = (m.block(block) for block in op.blocks)

    def step() -> None:
        outer, yes = lanes.mask, registers[condition]
        if yes.all():
            run(then)
            return
        if not yes.any():
            run(otherwise)
            return
        taken = yes if outer is None else outer & yes
        left = ~yes if outer is None else outer & ~yes
        for mask, block in ((taken, then), (left, otherwise)):
            if block and mask.any():
                lanes.enter(mask)
                run(block)
        lanes.enter(outer)

    return step


def _loop(m: Machine, op: Op) -> Step:
    lanes, registers, index = m.lanes, m.registers, m.slot(op.attrs["index"])
    start, stop, step_ = (m.slot(arg) for arg in op.args)
    body = m.block(op.blocks[0])

    def step() -> None:
        outer = lanes.mask
        i, end, by = registers[start], registers[stop], registers[step_]
        wrong = by <= 0 if outer is None else (by <= 0) & outer
        if wrong.any():
            raise lanes.error(op, int(np.flatnonzero(wrong)[0]), "loop with a step that is not positive")
        running = i < end
        while True:
            if not running.all():
                mask = running if outer is None else outer & running
                if not mask.any():
                    break
                lanes.enter(mask)
            registers[index] = i
            run(body)
            previous, i = i, i + by
            running = running & (i < end)
            if (running & (i < previous)).any():
                _overflow(m, op, running & (i < previous), outer)
        lanes.enter(outer)

    return step


def _repeat(m: Machine, op: Op) -> Step:
    lanes, registers, done = m.lanes, m.registers, m.slot(op.args[0])
    body = m.block(op.blocks[0])

    def step() -> None:
        outer = lanes.mask
        waiting = np.ones(lanes.count, np.bool_) if outer is None else outer
        while waiting.any():
            lanes.enter(waiting)
            run(body)
            still = waiting & (registers[done] == 0)
            # All workgroups of a cluster run together: if none got on, none ever will.
            if still.any() and (still == waiting).all():
                raise lanes.error(op, int(np.flatnonzero(still)[0]), "wait for what no workgroup of the cluster leaves")
            waiting = still
        lanes.enter(outer)

    return step


def _overflow(m: Machine, op: Op, wrapped: Array, outer: Array | None) -> None:
    """Raise an error if a loop index overflowed before the loop ended: on a device, an endless loop."""
    if outer is not None:
        wrapped = wrapped & outer
    if wrapped.any():
        raise m.lanes.error(op, int(np.flatnonzero(wrapped)[0]), "loop whose index overflows before it stops")


# Specific to one language.


def _intrinsic(m: Machine, op: Op) -> Step:
    raise KernelError(
        f"kernel {m.kernel.name}: the interpreter cannot run an intrinsic of {op.attrs['language']} "
        f"({op.attrs['code']!r} at {op.where}); interpret the portable variant of the kernel"
    )


COMPILERS: dict[str, Compiler] = {
    "const": _const, "thread_id": _thread_index, "lane_id": _thread_index, "subgroup_id": _thread_index,
    "group_id": _group_id, "group_count": _group_count,
    "unary": _arithmetic, "binary": _arithmetic, "compare": _arithmetic, "ternary": _arithmetic,
    "div": _div, "rem": _rem, "shl": _shift, "shr": _shift, "cast": _cast, "bitcast": _bitcast,
    "e4m3_halves": lambda m, op: m.apply(op, e4m3_halves),
    "make_vector": _make_vector, "splat": _splat, "extract": _extract, "permute": _permute,
    "private": _private, "load": _load, "load_streaming": _load, "prefetch": nothing, "store": _store,
    "store_streaming": _store, "atomic": _atomic,
    "cluster_load": _cluster_load, "cluster_post": _cluster_post,
    "async_copy": _async_copy, "async_copy_or_zero": _async_copy,
    "async_commit": _async_commit, "async_wait": _async_wait,
    "var": _var, "get": _get, "set": _set, "loop": _loop, "repeat": _repeat, "if": _if,
    "intrinsic": _intrinsic, "comment": nothing,
}  # fmt: skip
"""Compilers by opcode, or else by category."""
