"""The IR itself: a kernel is a list of operations, some of which hold blocks of further operations.

Values are assigned once. What changes is a variable (`Ref`), read by ``get`` and written by ``set``: renderers stay
simple and every driver rebuilds SSA anyway. ``ops.py`` is the written specification of the operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from aule.artifact import Param
from aule.ir.types import Pointer, Type

if TYPE_CHECKING:
    from aule.ir.builder import Builder

Arithmetic = Literal["exact", "quick", "fused"]
"""See `KernelIR`."""


@dataclass(frozen=True)
class Location:
    """The line of Python that emitted an operation."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Value:
    """The result of an operation, a parameter, or the index of a loop. Operators emit operations."""

    __slots__ = ("builder", "hint", "op", "type")

    def __init__(self, type_: Type, op: Op | None = None, hint: str = "", builder: Builder | None = None) -> None:
        self.type = type_
        self.op = op
        self.hint = hint
        self.builder = builder

    @property
    def constant(self) -> Any:
        """The Python number of a ``const``; None for everything else."""
        return self.op.attrs["value"] if self.op is not None and self.op.opcode == "const" else None

    def _emit(self, opcode: str, other: Any, swap: bool = False) -> Value:
        assert self.builder is not None
        return self.builder.binary(opcode, other, self) if swap else self.builder.binary(opcode, self, other)

    def __add__(self, other: Any) -> Value:
        return self._emit("add", other)

    def __radd__(self, other: Any) -> Value:
        return self._emit("add", other, True)

    def __sub__(self, other: Any) -> Value:
        return self._emit("sub", other)

    def __rsub__(self, other: Any) -> Value:
        return self._emit("sub", other, True)

    def __mul__(self, other: Any) -> Value:
        return self._emit("mul", other)

    def __rmul__(self, other: Any) -> Value:
        return self._emit("mul", other, True)

    def __truediv__(self, other: Any) -> Value:
        return self._emit("div", other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._emit("div", other, True)

    def __floordiv__(self, other: Any) -> Value:
        """Integer division that truncates, as every target's does."""
        return self._emit("div", other)

    def __rfloordiv__(self, other: Any) -> Value:
        return self._emit("div", other, True)

    def __mod__(self, other: Any) -> Value:
        return self._emit("rem", other)

    def __rmod__(self, other: Any) -> Value:
        return self._emit("rem", other, True)

    def __and__(self, other: Any) -> Value:
        return self._emit("and", other)

    def __rand__(self, other: Any) -> Value:
        return self._emit("and", other, True)

    def __or__(self, other: Any) -> Value:
        return self._emit("or", other)

    def __ror__(self, other: Any) -> Value:
        return self._emit("or", other, True)

    def __xor__(self, other: Any) -> Value:
        return self._emit("xor", other)

    def __rxor__(self, other: Any) -> Value:
        return self._emit("xor", other, True)

    def __lshift__(self, other: Any) -> Value:
        return self._emit("shl", other)

    def __rlshift__(self, other: Any) -> Value:
        return self._emit("shl", other, True)

    def __rshift__(self, other: Any) -> Value:
        return self._emit("shr", other)

    def __rrshift__(self, other: Any) -> Value:
        return self._emit("shr", other, True)

    def __lt__(self, other: Any) -> Value:
        return self._emit("lt", other)

    def __le__(self, other: Any) -> Value:
        return self._emit("le", other)

    def __gt__(self, other: Any) -> Value:
        return self._emit("gt", other)

    def __ge__(self, other: Any) -> Value:
        return self._emit("ge", other)

    # ``==`` stays identity, so that values can be dictionary keys; kernels write b.eq(x, y).

    def __neg__(self) -> Value:
        assert self.builder is not None
        return self.builder.unary("neg", self)

    def __invert__(self) -> Value:
        assert self.builder is not None
        return self.builder.unary("not", self)

    def __bool__(self) -> bool:
        raise TypeError("a traced value has no truth at trace time; use b.if_(...) or b.select(...)")

    def __repr__(self) -> str:
        return f"Value({self.hint or '?'}: {self.type})"


@dataclass(eq=False, slots=True)
class Op:
    """One operation."""

    opcode: str
    args: tuple[Value, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    result: Value | None = None
    blocks: tuple[list[Op], ...] = ()
    where: Location | None = None


@dataclass(eq=False)
class KernelIR:
    """A whole kernel.

    Attributes
    ----------
    params : tuple of Param
        Buffers and scalars in calling order.
    values : dict
        The `Value` of each parameter, by name.
    shared : tuple of Value
        Shared arrays (`Pointer` values with a length); their ``hint`` is their name.
    workgroup : int
        Threads of a workgroup, which is one-dimensional.
    subgroup_size : int
        Size the kernel was written for; 0 when any will do.
    max_registers : int
        Registers a thread may use, for languages that can say so; 0 leaves it to the driver.
    cluster : int
        Workgroups, neighbours along the first axis, that run at the same time and may read each other's shared memory;
        the grid's first axis is a multiple of it.
    arithmetic : {"exact", "quick", "fused"}
        What is computed where a device's own way is not right for every number. A ``quick`` kernel has no remainders
        of negative numbers, lets a compiler leave out a cast to f16 and back, and cuts bf16 off from 2**110 on, a NaN
        whose payload is in its lower half included; ``fused`` is the same with one operation less for bf16, and maybe
        more registers.
    """

    name: str
    params: tuple[Param, ...]
    values: dict[str, Value]
    shared: tuple[Value, ...]
    workgroup: int
    body: list[Op]
    subgroup_size: int = 0
    max_registers: int = 0
    cluster: int = 1
    arithmetic: Arithmetic = "exact"

    @property
    def shared_bytes(self) -> int:
        """Shared memory of all arrays, each aligned to 16 bytes."""
        total = 0
        for array in self.shared:
            assert isinstance(array.type, Pointer) and array.type.length is not None
            total += -(-array.type.elem.bytes * array.type.length // 16) * 16
        return total

    def walk(self) -> Iterator[Op]:
        """Every operation, outer before inner, in program order."""
        yield from walk(self.body)

    def __str__(self) -> str:
        from aule.ir.text import text

        return text(self)


def walk(block: list[Op]) -> Iterator[Op]:
    """Every operation of a block and of the blocks inside it."""
    for op in block:
        yield op
        for inner in op.blocks:
            yield from walk(inner)
