"""Printer for the parts of C that OpenCL C and MSL share, but WGSL does not."""

from __future__ import annotations

import math
from typing import ClassVar

from aule.ir.constants import wrap
from aule.ir.kernel import Value
from aule.ir.types import Pointer, Scalar, ValueType, Vector, f64
from aule.render.clike import Expr, Printer, decimal


class CPrinter(Printer):
    """Prints types, literals, pointers and casts of C."""

    type_names: ClassVar[dict[str, str]] = {
        "bool": "bool", "i8": "char", "i16": "short", "i32": "int", "i64": "long", "u8": "uchar", "u16": "ushort",
        "u32": "uint", "u64": "ulong", "f16": "half", "f32": "float",
    }  # fmt: skip

    def declare(self, type_: ValueType, name: str, init: str | None, mutable: bool = False) -> str:
        const = "" if mutable else "const "
        return f"{const}{self.type_name(type_)} {name}{'' if init is None else f' = {init}'};"

    def narrowed(self, type_: ValueType, text: str, atom: bool = False) -> Expr:
        """The result of arithmetic, cast back from int: C promotes small integers, the IR wraps in their width."""
        if isinstance(type_, Scalar) and type_.is_int and type_.bits < 32:
            return Expr(f"({self.type_name(type_)})({text})")
        return Expr(text, atom)

    def typed(self, value: Value) -> str:
        """A value with its own size: C promotes the result of `&` and others on small integers to int."""
        assert isinstance(value.type, Scalar | Vector)
        atom = self._text[value].atom
        return self.bare(value) if atom else self.narrowed(value.type, self.bare(value)).text

    def extreme(self, code: str, elem: Scalar) -> str:
        """The function for ``min`` or ``max``: fmin and fmax for floats, since min and max may mishandle infinities."""
        return f"f{code}" if elem.is_float else code

    def literal(self, value: float | int | bool, type_: Scalar) -> Expr:
        if type_.kind == "bool":
            return Expr("true" if value else "false")
        if type_.is_int:
            return self._integer(int(value), type_)
        number = float(value)
        if math.isnan(number):
            text = "NAN"
        elif math.isinf(number):
            text = "INFINITY" if number > 0 else "-INFINITY"
        elif type_ == f64:
            return Expr(repr(number), number >= 0)
        else:
            text = decimal(number, type_) + "f"
        return Expr(text, not text.startswith("-"))

    def _integer(self, value: int, type_: Scalar) -> Expr:
        value = wrap(value, type_)
        if type_.bits < 32:
            return Expr(f"({self.type_name(type_)}){value}" if value >= 0 else f"({self.type_name(type_)})({value})")
        suffix = ("" if type_.is_signed else "u") + ("L" if type_.bits == 64 else "")
        if value == -(1 << (type_.bits - 1)):
            # The literal without its minus sign does not fit.
            return Expr(f"(-{-value - 1}{suffix} - 1)")
        return Expr(f"{value}{suffix}", value >= 0)

    def private(self, array: Value) -> str:
        assert isinstance(array.type, Pointer)
        return f"{self.type_name(array.type.elem)} {self.bare(array)}[{array.type.length}];"

    def address(self, pointer: Value, index: Value) -> str:
        """The pointer to an element."""
        if index.constant == 0:
            return self.operand(pointer)
        return f"{self.operand(pointer)} + {self.operand(index)}"

    def element_of(self, pointer: Value, index: Value, add: int = 0) -> str:
        """An element as an lvalue."""
        return f"{self.operand(pointer)}[{self.offset(index, add)}]"

    def widest(self, pointer: Value) -> int:
        """Bytes of the widest aligned vector access of an array; 0 if all are scalars."""
        sizes = [0]
        for op in self.users(pointer):
            value = op.result if op.opcode == "load" else op.args[2] if op.opcode == "store" else None
            if value is not None and isinstance(value.type, Vector) and op.attrs["align"] % value.type.lanes == 0:
                sizes.append(value.type.bytes)
        return max(sizes)
