"""Lines, names, types and constants of LLVM IR, shared by all parts of the LLVM renderer."""

from __future__ import annotations

import numpy as np

from aule.errors import KernelError
from aule.ir.constants import float_bits
from aule.ir.kernel import Op, Value
from aule.ir.types import Pointer, Scalar, Type, Vector, element, f16, f32, f64

_FLOATS = {"f16": "half", "f32": "float", "f64": "double"}


class Emitter:
    """Collects the lines of one function.

    Names never clash: a temporary is ``%v0``, a named value has a numeric suffix after a dot, and the names of kernels
    and parameters have no dots.

    Attributes
    ----------
    label : str
        The current basic block.
    needs : set of str
        Processor features that the code relies on.
    helpers : dict
        Functions that the code calls, by name.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.allocas: list[str] = []
        self.metadata: list[str] = []
        self.label = "entry"
        self.needs: set[str] = set()
        self.helpers: dict[str, list[str]] = {}
        self._values: dict[Value, str] = {}
        self._count = 0

    def line(self, text: str) -> None:
        self.lines.append("  " + text)

    def emit(self, instruction: str, hint: str = "") -> str:
        """Append an instruction with a result; returns the result's name."""
        name = self.name(hint)
        self.line(f"{name} = {instruction}")
        return name

    def name(self, hint: str = "") -> str:
        """A new name for a value."""
        name = f"%{hint}.{self._count}" if hint else f"%v{self._count}"
        self._count += 1
        return name

    def labels(self, *hints: str) -> list[str]:
        """New names for related basic blocks, with a common number."""
        self._count += 1
        return [f"{hint}.{self._count - 1}" for hint in hints]

    def start(self, label: str) -> None:
        """Start a basic block. The previous one must end in a branch."""
        self.lines.append(f"{label}:")
        self.label = label

    def alloca(self, type_: str, align: int, hint: str) -> str:
        """Reserve stack memory, in the entry block, where LLVM promotes it to registers."""
        name = self.name(hint)
        self.allocas.append(f"  {name} = alloca {type_}, align {align}")
        return name

    def bind(self, value: Value, text: str) -> None:
        """Set the name or constant of a value."""
        self._values[value] = text

    def operand(self, value: Value) -> str:
        """The name or constant of a value."""
        return self._values[value]

    def typed(self, value: Value) -> str:
        """The type and the name or constant of a value."""
        return f"{llvm_type(value.type)} {self._values[value]}"


def llvm_type(type_: Type) -> str:
    """The LLVM type of an IR type; LLVM's integers have no sign."""
    if isinstance(type_, Vector):
        return f"<{type_.lanes} x {llvm_type(type_.elem)}>"
    if isinstance(type_, Pointer):
        return "ptr"
    elem = element(type_)
    return _FLOATS.get(elem.name, f"i{elem.bits}")


def literal(value: float | int | bool, elem: Scalar) -> str:
    """A literal. Floats are written as bits, the only form that LLVM accepts for all of them."""
    if not elem.is_float:
        return str(value).lower() if isinstance(value, bool) else str(value)
    if elem == f16:
        return f"0xH{float_bits(value, f16):04X}"
    if elem == f32:  # written as the f64 of the same value
        with np.errstate(over="ignore"):
            value = float(np.float32(value))
    return f"0x{float_bits(value, f64):016X}"


def constant(value: float | int, type_: Scalar | Vector) -> str:
    """A constant in every lane."""
    text = literal(value, element(type_))
    return f"splat ({llvm_type(type_.elem)} {text})" if isinstance(type_, Vector) else text


def suffix(type_: Scalar | Vector) -> str:
    """The suffix for a type in the name of an intrinsic: ``v16f32``, ``i32``."""
    elem = element(type_)
    name = f"{'f' if elem.is_float else 'i'}{elem.bits}"
    return f"v{type_.lanes}{name}" if isinstance(type_, Vector) else name


def refuse(op: Op, expected: str, got: object, remedy: str) -> KernelError:
    """The error for an operation that cannot be rendered."""
    where = f" ({op.where})" if op.where is not None else ""
    return KernelError(f"[llvm {op.opcode}] expected {expected}, got {got}; {remedy}{where}")
