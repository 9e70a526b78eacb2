"""A launch of the interpreter: registers, memory and compiled operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aule.artifact import Param
from aule.errors import KernelError
from aule.ir.interpret.fences import Fences
from aule.ir.interpret.lanes import Lanes, SanitizerError
from aule.ir.interpret.memory import Memory, flat_buffer
from aule.ir.interpret.numbers import Array, constant, memory_dtype
from aule.ir.interpret.order import Order, Phases
from aule.ir.interpret.shadow import Shadow
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.ops import OPS
from aule.ir.types import SCALARS, Pointer
from aule.target import FragmentLayout

if TYPE_CHECKING:
    from aule.ir.interpret.roles import Crew

_BATCH_LANES = 1024
"""Lanes per batch, if the grid has that many: enough to amortise NumPy's overhead per call."""

Step = Callable[[], None]
Compiler = Callable[["Machine", Op], "Step | None"]
"""Compiles an operation to a step, or to None if there is nothing to do at run time."""


class Product(NamedTuple):
    """An unfinished warpgroup product: its variables, and the checks to run when it is waited for."""

    op: Op
    variables: tuple[int, ...]
    checks: list[Step]


class MBarrier(NamedTuple):
    """State of an mbarrier, per workgroup of the batch."""

    arrived: Array
    """Time of the arrivals; 0 before them and after the wait."""
    waited: Array
    """Number of waits so far."""

    @classmethod
    def of(cls, groups: int) -> MBarrier:
        """A barrier without arrivals."""
        return cls(np.zeros(groups, np.int64), np.zeros(groups, np.int64))


class Machine:
    """State of a launch. Registers are a list with a slot per value; their arrays are never changed in place.

    Attributes
    ----------
    lanes : Lanes
        The lanes of a batch.
    memory : dict
        The memory behind each pointer.
    group_ids : list
        (slot, axis) of registers that hold the workgroup's index along an axis, filled for every batch.
    fences : Fences or None
        Order between workgroups, if the kernel has fences and the sanitizer is on.
    layouts : mapping
        Layout of fragments over a subgroup, by use.
    copies, products : list
        Groups of unfinished copies and products, oldest first; the last group is still open.
    mbarriers : dict
        mbarriers by the shared array that holds them.
    order : Order or None
        Order between subgroups, if the kernel has roles.
    crew : Crew or None
        The crew that runs, in a block of ``roles``.
    """

    def __init__(
        self, kernel: KernelIR, grid: tuple[int, int, int], subgroup_size: int, sanitize: bool,
        compilers: Mapping[str, Compiler], layouts: Mapping[str, FragmentLayout],
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self.total = grid[0] * grid[1] * grid[2]
        self.sanitize = sanitize
        self.compilers = compilers
        self.layouts = layouts
        if grid[0] % kernel.cluster:
            raise KernelError(f"kernel {kernel.name}: expected a grid of clusters of {kernel.cluster}, got {grid}")
        cluster_lanes = kernel.cluster * kernel.workgroup
        has_roles = any(op.opcode == "roles" for op in kernel.walk())
        together = 1 if has_roles else max(1, _BATCH_LANES // cluster_lanes)  # crews of one workgroup run at a time
        batches = -(-self.total // (kernel.cluster * together))
        groups = -(-self.total // (kernel.cluster * batches)) * kernel.cluster
        self.lanes = Lanes(kernel, grid, groups, subgroup_size)
        self.order = Order(self.lanes) if has_roles else None
        self.crew: Crew | None = None
        self.fences: Fences | None = None
        if sanitize and any(op.opcode == "device_fence" or op.attrs.get("ordered") for op in kernel.walk()):
            self.fences = Fences(self.lanes, self.total)
        self.registers: list[Any] = []
        self.memory: dict[Value, Memory] = {}
        self.shadows: list[Shadow] = []
        self.group_ids: list[tuple[int, int]] = []
        self.copies: list[list[Step]] = [[]]
        self.products: list[list[Product]] = [[]]
        self.mbarriers: dict[Value, MBarrier] = {}
        self.phases: dict[tuple[Value, int], Phases] = {}
        """mbarriers of a kernel with roles, by shared array and index."""
        self.scalars: dict[str, int | float] = {}
        """Values of the scalar parameters."""
        self._slots: dict[Value, int] = {}

    def run(self, args: Sequence[Any]) -> None:
        """Bind the arguments, compile, and run all workgroups."""
        for param, arg in zip(self.kernel.params, args, strict=True):
            self._bind(param, arg)
        for array in self.kernel.shared:
            self._share(array)
        body = self.block(self.kernel.body)
        lanes = self.lanes
        for first in range(0, self.total, lanes.groups):
            lanes.begin(first, self.total)
            for memory in self.memory.values():
                memory.begin()
            self.copies, self.products = [[]], [[]]
            if self.order is not None:
                self.order.begin()
            for shadow in self.shadows:
                shadow.begin()
            for slot, axis in self.group_ids:
                self.registers[slot] = lanes.coordinates(lanes.group)[axis].astype(np.int32)
            run(body)
            if any(phases.unfinished() for phases in self.phases.values()):
                name = self.kernel.name
                raise SanitizerError(
                    f"kernel {name}: a workgroup ends before tensor copies for which nobody has waited"
                )
            for shadow in self.shadows:
                shadow.check()
                shadow.end()

    # -- parameters and memory -------------------------------------------------------------------------------------

    def _bind(self, param: Param, arg: Any) -> None:
        kernel, value, elem = self.kernel.name, self.kernel.values[param.name], SCALARS[param.dtype]
        if param.kind == "scalar":
            number = arg.item() if isinstance(arg, np.ndarray | np.generic) and arg.ndim == 0 else arg
            if not isinstance(number, int | float) or (elem.is_int and number != int(number)):
                raise KernelError(f"kernel {kernel}: scalar {param.name}: expected a number for {elem}, got {arg!r}")
            register = constant(number, elem, self.lanes.count)
            if elem.is_int and int(register[0]) != number:
                raise KernelError(f"kernel {kernel}: scalar {param.name}: {number} does not fit into {elem}")
            self.put(value, register)
            self.scalars[param.name] = number
            return
        data = flat_buffer(kernel, param.name, elem, arg)
        if param.access != "read" and not data.flags.writeable:
            raise KernelError(f"kernel {kernel}: buffer {param.name} is written, got a read-only array")
        shadow = None
        if self.sanitize and param.access != "read":
            teams = self.total + self.lanes.groups
            shadow = self._shadow(
                Shadow(self.lanes, param.name, data.size, data.size, shared=False, teams=teams, fences=self.fences)
            )
        self.memory[value] = Memory(self.lanes, param.name, elem, data, data.size, shadow=shadow)

    def _share(self, array: Value) -> None:
        assert isinstance(array.type, Pointer) and array.type.length is not None
        length, lanes, elem = array.type.length, self.lanes, array.type.elem
        size = length * lanes.groups
        shadow = None
        if self.sanitize:
            teams = len(lanes.first)
            shadow = self._shadow(Shadow(lanes, array.hint, size, length, shared=True, teams=teams, fences=self.order))
        data = np.empty(size, memory_dtype(elem))
        self.memory[array] = Memory(lanes, array.hint, elem, data, length, base=lanes.slot * length, shadow=shadow)

    def _shadow(self, shadow: Shadow) -> Shadow:
        self.shadows.append(shadow)
        return shadow

    # -- registers -------------------------------------------------------------------------------------------------

    def slot(self, value: Value) -> int:
        """The register slot of a value."""
        slot = self._slots.get(value)
        if slot is None:
            slot = self._slots[value] = len(self.registers)
            self.registers.append(None)
        return slot

    def put(self, value: Value, content: Array) -> None:
        """Set a register at compile time."""
        self.registers[self.slot(value)] = content

    def result(self, op: Op) -> int:
        """The register slot of an operation's result."""
        return self.slot(op.output)

    # -- compilation -----------------------------------------------------------------------------------------------

    def block(self, block: list[Op]) -> list[Step]:
        """Compile the operations of a block."""
        steps = []
        for op in block:
            compiler = self.compilers.get(op.opcode) or self.compilers[OPS[op.opcode].category]
            step = compiler(self, op)
            if step is not None:
                steps.append(step)
        return steps

    def apply(self, op: Op, call: Callable[..., Array]) -> Step:
        """Make a step that computes the result from the operands."""
        registers, result = self.registers, self.result(op)
        slots = [self.slot(arg) for arg in op.args]
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
        if len(slots) == 3:
            a, b, c = slots

            def ternary() -> None:
                registers[result] = call(registers[a], registers[b], registers[c])

            return ternary

        def step() -> None:
            registers[result] = call(*[registers[slot] for slot in slots])

        return step


def nothing(m: Machine, op: Op) -> None:
    """Compile an operation that has no effect in the interpreter."""


def run(steps: list[Step]) -> None:
    """Run compiled operations in order."""
    for step in steps:
        step()
