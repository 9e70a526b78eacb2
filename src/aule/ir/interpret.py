"""The interpreter: any kernel on NumPy, with a sanitizer.

It is the oracle when a backend disagrees, and finds what a device would only sometimes stumble over: races, accesses
out of bounds or misaligned, reads of memory that was never written, barriers that not every thread reaches. Each report
names the line of Python that emitted the operation.

Operations are compiled to closures once; then workgroups run in batches, every lane of a batch in lockstep as one
element of a NumPy array. Lanes that do not take a branch are masked: they neither write nor fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aule.artifact import Param
from aule.errors import KernelError
from aule.ir._memory import Memory, flat_buffer
from aule.ir._numbers import (
    Array,
    atomic_function,
    bitcast_function,
    cast_function,
    constant,
    function,
    memory_dtype,
    register_dtype,
)
from aule.ir._shadow import Lanes, SanitizerError, Shadow
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.ops import OPS
from aule.ir.types import SCALARS, Fragment, Pointer, Scalar, Vector, element
from aule.ir.verify import verify_structure

__all__ = ["SanitizerError", "interpret"]

_BATCH_LANES = 1024
"""Lanes that run in lockstep, if the grid has that many: enough to make NumPy's cost per call small."""

Step = Callable[[], None]


def interpret(
    kernel: KernelIR,
    grid: tuple[int, int, int],
    args: Sequence[Any],
    *,
    subgroup_size: int | None = None,
    sanitize: bool = True,
) -> None:
    """Run a kernel on NumPy arrays, which it changes in place.

    Parameters
    ----------
    kernel : KernelIR
        Must pass `verify`; only the rule about barriers in divergent control flow is checked while running instead.
    grid : tuple of int
        Workgroups along the three axes.
    args : sequence
        One argument per parameter: contiguous arrays of the buffer's element type (bf16 as ``uint16`` bits or
        ``ml_dtypes.bfloat16``) and numbers.
    subgroup_size : int, optional
        Lanes of a subgroup; the kernel's own by default, 32 when it has none.
    sanitize : bool
        Look for races and for reads of memory that was never written. Bounds, alignment and divergence are checked
        in any case.

    Raises
    ------
    SanitizerError
        The kernel did something that is not defined; the message says which thread did what in which line.
    KernelError
        The kernel breaks a rule, the arguments do not fit, or an operation exists in one language only.
    """
    verify_structure(kernel)
    size = subgroup_size or kernel.subgroup_size or 32
    if kernel.subgroup_size not in (0, size):
        raise KernelError(f"kernel {kernel.name}: written for subgroups of {kernel.subgroup_size}, got {size}")
    if len(grid) != 3 or any(n < 0 for n in grid):
        raise KernelError(f"kernel {kernel.name}: expected a grid of three numbers, got {grid}")
    if len(args) != len(kernel.params):
        names = ", ".join(p.name for p in kernel.params)
        raise KernelError(f"kernel {kernel.name}: expected {len(kernel.params)} arguments ({names}), got {len(args)}")
    total = grid[0] * grid[1] * grid[2]
    if total:
        with np.errstate(all="ignore"):
            _Machine(kernel, grid, total, size, sanitize).run(args)


class _Machine:
    """One launch: registers, memory and the compiled operations."""

    def __init__(self, kernel: KernelIR, grid: tuple[int, int, int], total: int, subgroup_size: int, sanitize: bool):
        batches = -(-total // max(1, _BATCH_LANES // kernel.workgroup))
        self.kernel = kernel
        self.total = total
        self.sanitize = sanitize
        self.lanes = Lanes(kernel, grid, -(-total // batches), subgroup_size)
        self.slots: dict[Value, int] = {}
        self.registers: list[Any] = []
        self.memory: dict[Value, Memory] = {}
        self.shadows: list[Shadow] = []
        self.group_ids: list[tuple[int, int]] = []

    def run(self, args: Sequence[Any]) -> None:
        for param, arg in zip(self.kernel.params, args, strict=True):
            self._bind(param, arg)
        for array in self.kernel.shared:
            self._shared(array)
        body = self._block(self.kernel.body)
        lanes = self.lanes
        for first in range(0, self.total, lanes.groups):
            lanes.begin(first, self.total)
            for memory in self.memory.values():
                memory.begin()
            for shadow in self.shadows:
                shadow.begin()
            for slot, axis in self.group_ids:
                self.registers[slot] = lanes.coordinates(lanes.group)[axis].astype(np.int32)
            _run(body)
            for shadow in self.shadows:
                shadow.check()

    # -- parameters and memory -------------------------------------------------------------------------------------

    def _bind(self, param: Param, arg: Any) -> None:
        kernel, value, elem = self.kernel.name, self.kernel.values[param.name], SCALARS[param.dtype]
        if param.kind == "scalar":
            number = arg.item() if isinstance(arg, np.ndarray | np.generic) and arg.ndim == 0 else arg
            if not isinstance(number, int | float) or (elem.is_int and number != int(number)):
                raise KernelError(f"kernel {kernel}: scalar {param.name}: expected a number for {elem}, got {arg!r}")
            lane = constant(number, elem, self.lanes.count)
            if elem.is_int and int(lane[0]) != number:
                raise KernelError(f"kernel {kernel}: scalar {param.name}: {number} does not fit into {elem}")
            self._put(value, lane)
            return
        data = flat_buffer(kernel, param.name, elem, arg)
        if param.access != "read" and not data.flags.writeable:
            raise KernelError(f"kernel {kernel}: buffer {param.name} is written, got a read-only array")
        shadow = None
        if self.sanitize and param.access != "read":
            teams = self.total + self.lanes.groups
            shadow = self._shadow(Shadow(self.lanes, param.name, data.size, data.size, shared=False, teams=teams))
        self.memory[value] = Memory(self.lanes, param.name, elem, data, data.size, shadow=shadow)

    def _shared(self, array: Value) -> None:
        assert isinstance(array.type, Pointer) and array.type.length is not None
        length, lanes, elem = array.type.length, self.lanes, array.type.elem
        size = length * lanes.groups
        shadow = None
        if self.sanitize:
            shadow = self._shadow(Shadow(lanes, array.hint, size, length, shared=True, teams=len(lanes.first)))
        data = np.empty(size, memory_dtype(elem))
        self.memory[array] = Memory(lanes, array.hint, elem, data, length, base=lanes.slot * length, shadow=shadow)

    def _shadow(self, shadow: Shadow) -> Shadow:
        self.shadows.append(shadow)
        return shadow

    # -- registers -------------------------------------------------------------------------------------------------

    def _slot(self, value: Value) -> int:
        slot = self.slots.get(value)
        if slot is None:
            slot = self.slots[value] = len(self.registers)
            self.registers.append(None)
        return slot

    def _put(self, value: Value, content: Any) -> None:
        self.registers[self._slot(value)] = content

    def _result(self, op: Op) -> int:
        assert op.result is not None
        return self._slot(op.result)

    # -- compilation -----------------------------------------------------------------------------------------------

    def _block(self, block: list[Op]) -> list[Step]:
        steps = []
        for op in block:
            by_category = f"_category_{OPS[op.opcode].category}"
            step = getattr(self, f"_{op.opcode}", None) or getattr(self, by_category)
            step = step(op)
            if step is not None:
                steps.append(step)
        return steps

    def _apply(self, op: Op, call: Callable[..., Array]) -> Step:
        """A step that computes the result from the operands, lane by lane."""
        registers, result = self.registers, self._result(op)
        slots = [self._slot(arg) for arg in op.args]
        if len(slots) == 1:
            (a,) = slots

            def unary() -> None:
                registers[result] = call(registers[a])

            return unary
        if len(slots) == 2:
            a, b = slots

            def binary() -> None:
                registers[result] = call(registers[a], registers[b])

            return binary

        def step() -> None:
            registers[result] = call(*[registers[slot] for slot in slots])

        return step

    # Leaves never change while a batch runs, so they are registers that are filled beforehand.

    def _const(self, op: Op) -> None:
        assert op.result is not None and isinstance(op.result.type, Scalar)
        self._put(op.result, constant(op.attrs["value"], op.result.type, self.lanes.count))

    def _thread_id(self, op: Op) -> None:
        self.registers[self._result(op)] = self.lanes.thread.astype(np.int32)

    def _lane_id(self, op: Op) -> None:
        self.registers[self._result(op)] = (self.lanes.thread % self.lanes.subgroup_size).astype(np.int32)

    def _subgroup_id(self, op: Op) -> None:
        self.registers[self._result(op)] = (self.lanes.thread // self.lanes.subgroup_size).astype(np.int32)

    def _group_id(self, op: Op) -> None:
        self.group_ids.append((self._result(op), op.attrs["axis"]))

    def _group_count(self, op: Op) -> None:
        self.registers[self._result(op)] = np.full(self.lanes.count, self.lanes.grid[op.attrs["axis"]], np.int32)

    # Arithmetic.

    def _category_unary(self, op: Op) -> Step:
        return self._apply(op, function(op.opcode, element(op.args[0].type)))

    _category_binary = _category_compare = _category_unary

    def _category_ternary(self, op: Op) -> Step:
        return self._apply(op, function(op.opcode, element(op.args[1].type)))

    def _div(self, op: Op) -> Step:
        compute = self._category_binary(op)
        elem = element(op.args[0].type)
        if elem.is_float or op.args[1].constant:
            return compute
        return self._guarded(op, compute, lambda right: right == 0, "division by zero")

    _rem = _div

    def _shl(self, op: Op) -> Step:
        compute = self._category_binary(op)
        bits = element(op.args[0].type).bits
        count = op.args[1].constant
        if count is not None and 0 <= count < bits:
            return compute
        return self._guarded(op, compute, lambda right: (right < 0) | (right >= bits), f"shift by {bits} bits or more")

    _shr = _shl

    def _guarded(self, op: Op, compute: Step, wrong: Callable[[Array], Array], message: str) -> Step:
        """Report lanes whose second operand leaves the result undefined."""
        lanes, registers, right = self.lanes, self.registers, self._slot(op.args[1])

        def step() -> None:
            bad = wrong(registers[right])
            if lanes.mask is not None:
                bad = bad & lanes.mask
            if bad.any():
                raise lanes.error(op, int(np.argwhere(bad)[0][-1]), message)
            compute()

        return step

    def _cast(self, op: Op) -> Step:
        assert op.result is not None
        return self._apply(op, cast_function(element(op.args[0].type), element(op.result.type)))

    def _bitcast(self, op: Op) -> Step:
        assert op.result is not None
        source, target = op.args[0].type, op.result.type
        assert isinstance(source, Scalar | Vector) and isinstance(target, Scalar | Vector)
        return self._apply(op, bitcast_function(source, target))

    # Vectors: a row per vector lane.

    def _make_vector(self, op: Op) -> Step:
        return self._apply(op, lambda *parts: np.stack(parts))

    def _splat(self, op: Op) -> Step:
        assert op.result is not None and isinstance(op.result.type, Vector)
        shape = (op.result.type.lanes, self.lanes.count)
        return self._apply(op, lambda x: np.broadcast_to(x, shape))

    def _extract(self, op: Op) -> Step:
        lane = op.attrs["lane"]
        return self._apply(op, lambda x: x[lane])

    # Memory.

    def _private(self, op: Op) -> Step:
        assert op.result is not None and isinstance(op.result.type, Pointer) and op.result.type.length is not None
        lanes, elem, length = self.lanes, op.result.type.elem, op.result.type.length
        data = np.empty(lanes.count * length, memory_dtype(elem))
        base = np.arange(lanes.count) * length
        memory = Memory(lanes, op.attrs["name"], elem, data, length, base=base, private=self.sanitize)
        self.memory[op.result] = memory
        return lambda: memory.forget(lanes.active)

    def _load(self, op: Op) -> Step:
        assert op.result is not None
        memory, lanes, registers = self.memory[op.args[0]], self.lanes, self.registers
        index, result, align = self._slot(op.args[1]), self._result(op), op.attrs["align"]
        count = op.result.type.lanes if isinstance(op.result.type, Vector) else 1
        shape = (lanes.count,) if count == 1 else (count, lanes.count)
        dtype = register_dtype(memory.elem)

        def step() -> None:
            active = lanes.active
            address = memory.addresses(op, registers[index], active, count, align)
            value = memory.read(op, address, active)
            if active is not None:
                whole = np.zeros(shape, dtype)
                whole[..., active] = value
                value = whole
            registers[result] = value

        return step

    def _store(self, op: Op) -> Step:
        memory, lanes, registers = self.memory[op.args[0]], self.lanes, self.registers
        index, source, align = self._slot(op.args[1]), self._slot(op.args[2]), op.attrs["align"]
        type_ = op.args[2].type
        count = type_.lanes if isinstance(type_, Vector) else 1

        def step() -> None:
            active = lanes.active
            address = memory.addresses(op, registers[index], active, count, align)
            value = registers[source] if active is None else registers[source][..., active]
            memory.write(op, address, value, active)

        return step

    def _atomic(self, op: Op) -> Step:
        memory, lanes, registers = self.memory[op.args[0]], self.lanes, self.registers
        index, source, result = self._slot(op.args[1]), self._slot(op.args[2]), self._result(op)
        merge = atomic_function(op.attrs["kind"])

        def step() -> None:
            active = lanes.active
            address = memory.addresses(op, registers[index], active, 1, 1)
            value = registers[source] if active is None else registers[source][active]
            old = memory.atomic(op, address, value, active, merge)
            if active is not None:
                whole = np.zeros(lanes.count, old.dtype)
                whole[active] = old
                old = whole
            registers[result] = old

        return step

    # Variables. Arrays in registers are never changed, so a variable can hold the array it was given.

    def _var(self, op: Op) -> Step:
        return self._apply(op, lambda x: x)

    _get = _var

    def _set(self, op: Op) -> Step:
        lanes, registers = self.lanes, self.registers
        variable, source = (self._slot(arg) for arg in op.args)
        fragment = isinstance(op.args[1].type, Fragment)

        def step() -> None:
            mask = lanes.mask
            if mask is None:
                registers[variable] = registers[source]
                return
            if fragment:
                lanes.whole_subgroups(op)
                mask = mask[lanes.first][:, None, None]
            registers[variable] = np.where(mask, registers[source], registers[variable])

        return step

    # Control.

    def _if(self, op: Op) -> Step:
        lanes, registers, condition = self.lanes, self.registers, self._slot(op.args[0])
        then, otherwise = (self._block(block) for block in op.blocks)

        def step() -> None:
            outer, yes = lanes.mask, registers[condition]
            if yes.all():
                _run(then)
                return
            if not yes.any():
                _run(otherwise)
                return
            taken = yes if outer is None else outer & yes
            left = ~yes if outer is None else outer & ~yes
            for mask, block in ((taken, then), (left, otherwise)):
                if block and mask.any():
                    lanes.enter(mask)
                    _run(block)
            lanes.enter(outer)

        return step

    def _loop(self, op: Op) -> Step:
        lanes, registers, index = self.lanes, self.registers, self._slot(op.attrs["index"])
        start, stop, step_ = (self._slot(arg) for arg in op.args)
        body = self._block(op.blocks[0])

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
                _run(body)
                i = i + by
                running = running & (i < end)
            lanes.enter(outer)

        return step

    # Synchronisation and subgroups.

    def _barrier(self, op: Op) -> Step:
        lanes, shadows, all_memory = self.lanes, self.shadows, op.attrs["global_memory"]
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

    def _subgroup_barrier(self, op: Op) -> Step:
        lanes, shadows = self.lanes, self.shadows

        def step() -> None:
            teams = lanes.whole_subgroups(op)
            for shadow in shadows:
                if shadow.shared:
                    shadow.synchronise(op, teams, False)

        return step

    def _collective(self, op: Op, step: Step) -> Step:
        """All lanes of a subgroup take part, or none."""
        lanes = self.lanes

        def checked() -> None:
            if lanes.mask is not None:
                lanes.whole_subgroups(op)
            step()

        return checked

    def _shuffle(self, op: Op) -> Step:
        lanes, registers, result = self.lanes, self.registers, self._result(op)
        source, other = (self._slot(arg) for arg in op.args)

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

        return self._collective(op, step)

    def _shuffle_xor(self, op: Op) -> Step:
        lanes, mask = self.lanes, op.attrs["mask"]
        lane = (lanes.thread % lanes.subgroup_size) ^ mask
        missing = lane >= lanes.size
        if missing.any():
            where = int(np.flatnonzero(missing)[0])
            raise lanes.error(op, where, f"shuffle from lane {int(lane[where])}, which does not exist")
        source = lanes.start + lane
        return self._collective(op, self._apply(op, lambda x: x.take(source)))

    def _reduce(self, op: Op, merge: np.ufunc) -> Step:
        first, subgroup = self.lanes.first, self.lanes.subgroup
        return self._collective(op, self._apply(op, lambda x: merge.reduceat(x, first, dtype=x.dtype).take(subgroup)))

    def _subgroup_reduce(self, op: Op) -> Step:
        merge = {"add": np.add, "min": np.fmin, "max": np.fmax}[op.attrs["kind"]]
        return self._reduce(op, merge)

    def _subgroup_any(self, op: Op) -> Step:
        return self._reduce(op, np.logical_or)

    def _subgroup_all(self, op: Op) -> Step:
        return self._reduce(op, np.logical_and)

    # Fragments: whole matrices, one per subgroup; see _fragment_get for who holds which element.

    def _fragment(self, op: Op, value: Value) -> Fragment:
        type_, size = value.type, self.lanes.subgroup_size
        assert isinstance(type_, Fragment)
        if self.lanes.workgroup % size or type_.rows * type_.cols % size:
            raise KernelError(
                f"kernel {self.kernel.name}: {type_} over subgroups of {size} in workgroups of {self.lanes.workgroup}: "
                f"expected full subgroups and as many elements in every lane ({op.where})"
            )
        return type_

    def _uniform(self, op: Op, value: Array) -> Array:
        """An operand that is the same in all lanes of a subgroup: one number per subgroup."""
        one = value.take(self.lanes.first)
        differs = value != one.take(self.lanes.subgroup)
        if self.lanes.mask is not None:
            differs &= self.lanes.mask
        if differs.any():
            message = "operand of a fragment operation that differs between the lanes of a subgroup"
            raise self.lanes.error(op, int(np.flatnonzero(differs)[0]), message)
        return one

    def _fragment_fill(self, op: Op) -> Step:
        assert op.result is not None
        type_ = self._fragment(op, op.result)
        shape = (len(self.lanes.first), type_.rows, type_.cols)
        fill = self._apply(op, lambda x: np.broadcast_to(self._uniform(op, x)[:, None, None], shape))
        return self._collective(op, fill)

    def _places(self, op: Op, type_: Fragment) -> Callable[[], tuple[Array, Array]]:
        """Addresses of a matrix in memory, a column per active subgroup, and the first lanes of those."""
        memory, lanes, registers = self.memory[op.args[0]], self.lanes, self.registers
        index, stride = self._slot(op.args[1]), self._slot(op.args[2])
        row, column = np.indices((type_.rows, type_.cols)).reshape(2, -1, 1)
        major, minor = (row, column) if op.attrs["layout"] == "row" else (column, row)

        def places() -> tuple[Array, Array]:
            running = lanes.whole_subgroups(op)
            start, step = (self._uniform(op, registers[slot].astype(np.int64)) for slot in (index, stride))
            first = lanes.first
            if running is not None:
                start, step, first = start[running], step[running], first[running]
            return memory.matrix_addresses(op, start + major * step + minor, first), first

        return places

    def _fragment_load(self, op: Op) -> Step:
        assert op.result is not None
        type_ = self._fragment(op, op.result)
        memory, lanes, registers, result = self.memory[op.args[0]], self.lanes, self.registers, self._result(op)
        places, dtype = self._places(op, type_), register_dtype(type_.elem)

        def step() -> None:
            address, first = places()
            value = memory.read(op, address, first, collective=True)
            whole = np.zeros((len(lanes.first), type_.rows, type_.cols), dtype)
            whole[lanes.subgroup[first]] = value.T.reshape(-1, type_.rows, type_.cols)
            registers[result] = whole

        return step

    def _fragment_store(self, op: Op) -> Step:
        type_ = self._fragment(op, op.args[3])
        memory, lanes, registers, source = self.memory[op.args[0]], self.lanes, self.registers, self._slot(op.args[3])
        places = self._places(op, type_)

        def step() -> None:
            address, first = places()
            value = registers[source][lanes.subgroup[first]]
            memory.write(op, address, value.reshape(len(first), -1).T, first, collective=True)

        return step

    def _fragment_mma(self, op: Op) -> Step:
        assert op.result is not None
        type_ = self._fragment(op, op.result)
        wide = np.float64 if type_.elem.name == "f64" else np.float32 if type_.elem.is_float else np.int64
        exact = SCALARS["f64" if wide is np.float64 else "f32" if wide is np.float32 else "i64"]
        narrow = cast_function(exact, type_.elem)
        multiply = self._apply(op, lambda a, b, c: narrow(a.astype(wide) @ b.astype(wide) + c.astype(wide)))
        return self._collective(op, multiply)

    def _fragment_get(self, op: Op) -> Step:
        """Lane L of n holds elements L*c ... L*c+c-1 of the matrix in row-major order, c = rows * cols / n."""
        type_ = self._fragment(op, op.args[0])
        held, component = self._component(op, type_)
        return self._collective(op, self._apply(op, lambda x: x.reshape(-1, held)[:, component]))

    def _fragment_set(self, op: Op) -> Step:
        type_ = self._fragment(op, op.args[0])
        held, component = self._component(op, type_)

        def replace(old: Array, new: Array) -> Array:
            value = old.copy()
            value.reshape(-1, held)[:, component] = new
            return value

        return self._collective(op, self._apply(op, replace))

    def _component(self, op: Op, type_: Fragment) -> tuple[int, int]:
        held, component = type_.rows * type_.cols // self.lanes.subgroup_size, op.attrs["component"]
        if component >= held:
            message = f"{type_} has {held} components in each lane, got component {component}"
            raise KernelError(f"kernel {self.kernel.name}: {message} ({op.where})")
        return held, component

    # What only one language has.

    def _intrinsic(self, op: Op) -> Step:
        raise KernelError(
            f"kernel {self.kernel.name}: the interpreter cannot run an intrinsic of {op.attrs['language']} "
            f"({op.attrs['code']!r} at {op.where}); interpret the portable variant of the kernel"
        )

    def _comment(self, op: Op) -> None:
        return None


def _run(steps: list[Step]) -> None:
    for step in steps:
        step()
