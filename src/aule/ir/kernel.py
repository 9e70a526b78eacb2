"""Data structures of the IR: a kernel is a list of operations, some of which contain blocks of operations.

Values are assigned once. Mutable state is a variable (`Ref`), read by ``get`` and written by ``set``: this keeps
renderers simple, and drivers rebuild SSA anyway. ``ops.py`` specifies the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from aule.artifact import Param, TensorMap
from aule.ir.types import Pointer, Scalar, Type, element

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


_Method: TypeAlias = "Callable[[Value, Any], Value]"


def _operator(opcode: str) -> tuple[_Method, _Method]:
    """The methods of `Value` that emit ``self op other`` and ``other op self``."""

    def method(self: Value, other: Any) -> Value:
        assert self.builder is not None
        return self.builder.binary(opcode, self, other)

    def reflected(self: Value, other: Any) -> Value:
        assert self.builder is not None
        return self.builder.binary(opcode, other, self)

    return method, reflected


class Value:
    """The result of an operation, a parameter, or a loop index. Python operators emit operations."""

    __slots__ = ("builder", "hint", "op", "type")

    def __init__(self, type_: Type, op: Op | None = None, hint: str = "", builder: Builder | None = None) -> None:
        self.type = type_
        self.op = op
        self.hint = hint
        self.builder = builder

    @property
    def constant(self) -> Any:
        """The number of a ``const``; None for every other value."""
        return self.op.attrs["value"] if self.op is not None and self.op.opcode == "const" else None

    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub")
    __mul__, __rmul__ = _operator("mul")
    __truediv__, __rtruediv__ = _operator("div")
    __floordiv__, __rfloordiv__ = _operator("div")  # truncates, as on every target
    __mod__, __rmod__ = _operator("rem")
    __and__, __rand__ = _operator("and")
    __or__, __ror__ = _operator("or")
    __xor__, __rxor__ = _operator("xor")
    __lshift__, __rlshift__ = _operator("shl")
    __rshift__, __rrshift__ = _operator("shr")
    __lt__ = _operator("lt")[0]
    __le__ = _operator("le")[0]
    __gt__ = _operator("gt")[0]
    __ge__ = _operator("ge")[0]
    __eq__ = _operator("eq")[0]  # type: ignore[assignment]
    __ne__ = _operator("ne")[0]  # type: ignore[assignment]
    __hash__ = object.__hash__  # dictionaries and sets find a value by identity before they compare it

    def __neg__(self) -> Value:
        assert self.builder is not None
        return self.builder.unary("neg", self)

    def __invert__(self) -> Value:
        assert self.builder is not None
        return self.builder.unary("not", self)

    def __bool__(self) -> bool:
        self._fail(
            "branch on a value that the kernel computes; use b.if_(...) or b.select(...), and & and | instead of `and` "
            "and `or`"
        )

    def __index__(self) -> int:
        self._fail("count with a value that the kernel computes; use b.loop(...) instead of range")

    def __getitem__(self, index: object) -> NoReturn:
        self._fail("index what only the kernel has; use b.load(buffer, index)")

    def __setitem__(self, index: object, value: object) -> NoReturn:
        self._fail("assign to what only the kernel has; use b.store(buffer, index, value)")

    def _fail(self, what: str) -> NoReturn:
        where = "" if self.builder is None else f" (at {self.builder.location()})"
        raise TypeError(f"Python cannot {what}{where}")

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

    @property
    def output(self) -> Value:
        """The result of an operation that always has one."""
        assert self.result is not None
        return self.result


@dataclass(eq=False)
class KernelIR:
    """A kernel.

    Attributes
    ----------
    params : tuple of Param
        Buffers and scalars in calling order.
    values : dict
        The `Value` of each parameter, by name.
    shared : tuple of Value
        Shared arrays (`Pointer` values with a length); their ``hint`` is their name.
    workgroup : int
        Threads per workgroup; workgroups are one-dimensional.
    subgroup_size : int
        Subgroup size that the kernel relies on; 0 if any will do.
    max_registers : int
        Register limit per thread, for languages that have one; 0 leaves it to the driver.
    cluster : int
        Workgroups per cluster: neighbours along the first axis that run at the same time and can access each other's
        shared memory. The grid's first axis must be a multiple of it.
    arithmetic : {"exact", "quick", "fused"}
        Whether to work around device instructions that are wrong for some inputs. ``exact`` does. A ``quick`` kernel
        has no remainders of negative numbers, allows a compiler to drop a cast to f16 and back, and truncates instead
        of rounding to bf16 from 2**110 on (and NaNs whose payload is in the lower half). ``fused`` is ``quick`` with
        one operation less per rounding to bf16, but possibly more registers.
    maps : tuple of TensorMap
        Tensors from which boxes are copied to shared memory.
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
    maps: tuple[TensorMap, ...] = ()

    @property
    def shared_offsets(self) -> dict[Value, int]:
        """Byte offset of each shared array; arrays are aligned to 16 bytes."""
        offset, offsets = 0, {}
        for array in self.shared:
            offsets[array] = offset
            offset += _aligned_bytes(array)
        return offsets

    @property
    def shared_bytes(self) -> int:
        """Total bytes of the shared arrays, each aligned to 16 bytes."""
        return sum(_aligned_bytes(array) for array in self.shared)

    def elements(self) -> set[Scalar]:
        """Element types of all registers, buffers and arrays."""
        values = (*self.values.values(), *self.shared, *(op.result for op in self.walk() if op.result is not None))
        return {element(value.type) for value in values}

    def alignments(self) -> dict[Value, int]:
        """The largest ``align`` of the loads and stores of each pointer, in elements."""
        aligned: dict[Value, int] = {}
        for op in self.walk():
            if op.opcode in ("load", "load_streaming", "store", "store_streaming"):
                aligned[op.args[0]] = max(aligned.get(op.args[0], 1), op.attrs["align"])
        return aligned

    def walk(self) -> Iterator[Op]:
        """All operations in program order, an outer one before those in its blocks."""
        yield from walk(self.body)

    def __str__(self) -> str:
        from aule.ir.text import text

        return text(self)


def _aligned_bytes(array: Value) -> int:
    assert isinstance(array.type, Pointer) and array.type.length is not None
    return -(-array.type.elem.bytes * array.type.length // 16) * 16


def walk(block: list[Op]) -> Iterator[Op]:
    """All operations of a block and of nested blocks."""
    for op in block:
        yield op
        for inner in op.blocks:
            yield from walk(inner)
