"""Emitter shared by all parts of the PTX renderer: lines, registers, and the registers of each IR value.

Register classes: ``%p`` predicates, ``%h`` 16 bits (and 8-bit integers, extended), ``%r`` 32-bit integers, ``%f`` f32,
``%rd`` 64-bit integers and addresses, ``%fd`` f64.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aule.errors import KernelError
from aule.ir.constants import float_bits, wrap
from aule.ir.kernel import Op, Value
from aule.ir.types import Scalar, element, f32, f64

_VERSIONS = {
    "60": "6.0", "61": "6.0", "62": "6.0", "70": "6.0", "72": "6.1",
    "75": "6.3", "80": "7.0", "86": "7.1", "87": "7.4", "88": "9.0", "89": "7.8", "90": "7.8", "90a": "8.0",
    "100": "8.6", "100a": "8.6", "101": "8.6", "101a": "8.6", "103": "8.8", "103a": "8.8", "110": "9.0", "110a": "9.0",
    "120": "8.7", "120a": "8.7", "121": "8.8", "121a": "8.8",
}  # fmt: skip
"""The first PTX version for each architecture that has ``shfl.sync``: an old version works with old drivers."""
_NEWEST = "9.0"

_REGISTERS = {
    "bool": "p", "i8": "h", "u8": "h", "i16": "h", "u16": "h", "f16": "h", "bf16": "h", "i32": "r", "u32": "r",
    "f32": "f", "i64": "rd", "u64": "rd", "f64": "fd",
}  # fmt: skip
DECLARED = {"p": "pred", "h": "b16", "r": "b32", "f": "f32", "rd": "b64", "fd": "f64"}

Sum = tuple[str | None, int]
"""An integer as a register plus a constant; no register for a plain constant."""


@dataclass(frozen=True)
class Arch:
    """An NVIDIA instruction set: ``name`` as in ``.target``, its number (80, 90 ...) and the PTX version to declare."""

    name: str
    number: int
    version: str

    @classmethod
    def parse(cls, name: str) -> Arch:
        """Parse ``sm_90``, ``sm_90a`` ...; sm_60 is the oldest supported."""
        match = re.fullmatch(r"sm_(\d+)([af]?)", name)
        if match is None or int(match[1]) < 60:
            raise KernelError(f"[ptx] expected target.arch sm_60 or newer, got {name!r}; give the device's own")
        return cls(name, int(match[1]), _VERSIONS.get(match[1] + match[2], _NEWEST))


class Emitter:
    """Collects the lines of a kernel and tracks the register of each value.

    Integers (i32, i64) that are a register plus a non-negative constant are not added until they are needed in a
    register: memory operations take the constant as an immediate offset instead. Results computed on demand are
    recorded in ``scopes``, one dictionary per open block, so that they are reused only where they are sure to be
    computed.
    """

    def __init__(self, arch: Arch) -> None:
        self.arch = arch
        self.lines: list[str] = []
        self.scopes: list[dict[object, str]] = [{}]
        self.truth: dict[Value, bool] = {}
        self.pairs: dict[tuple[str, str], str] = {}
        """32-bit registers by the two halves they were split into."""
        self.masked: dict[str, tuple[str, str]] = {}
        """Operands (register, constant) of the ``and`` that computed each register."""
        self._lanes: dict[Value, tuple[str, ...]] = {}
        self._sums: dict[Value, Sum] = {}
        self._counts = dict.fromkeys(DECLARED, 0)
        self._labels = 0

    # -- lines and registers ---------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("\t" + text)

    def device_fence(self) -> None:
        """Order this thread's accesses to memory before and after, as seen by the device."""
        self.line("fence.acq_rel.gpu;" if self.arch.number >= 70 else "membar.gl;")

    def label(self) -> int:
        """A new number for labels."""
        self._labels += 1
        return self._labels

    def new(self, register_class: str) -> str:
        """A new register of a class (``r``, ``rd`` ...)."""
        number = self._counts[register_class]
        self._counts[register_class] = number + 1
        return f"%{register_class}{number}"

    def new_for(self, elem: Scalar) -> str:
        """A new register for a scalar type."""
        return self.new(_REGISTERS[elem.name])

    def emit(self, instruction: str, register_class: str, *operands: str) -> str:
        """Append an instruction whose result goes to a new register."""
        result = self.new(register_class)
        self.lines.append(f"\t{instruction} {result}, {', '.join(operands)};")
        return result

    def once(self, key: object, instruction: str, register_class: str, *operands: str) -> str:
        """Append an instruction, unless this or an enclosing block has already done so under ``key``."""
        for scope in self.scopes:
            if key in scope:
                return scope[key]
        result = self.scopes[-1][key] = self.emit(instruction, register_class, *operands)
        return result

    def declarations(self) -> list[str]:
        """The ``.reg`` lines."""
        return [f"\t.reg .{DECLARED[c]} %{c}<{n}>;" for c, n in self._counts.items() if n]

    # -- values ----------------------------------------------------------------------------------------------------

    def bind(self, value: Value, lanes: tuple[str, ...]) -> None:
        """Set the operands (registers or immediates) of a value. Unrolled loops bind their values again."""
        self._lanes[value] = lanes
        self._sums.pop(value, None)
        self.truth.pop(value, None)

    def bind_integer(self, value: Value, total: int) -> None:
        """Bind an integer value to a constant."""
        assert isinstance(value.type, Scalar)
        total = wrap(total, value.type)
        self._lanes[value] = (str(total),)
        self._sums[value] = (None, total)

    def bind_sum(self, value: Value, register: str, offset: int) -> None:
        """Bind an i32 or i64 value to a register plus a constant."""
        if offset == 0:
            self.bind(value, (register,))
        else:
            self._lanes.pop(value, None)
            self._sums[value] = (register, offset)

    def bind_same(self, value: Value, other: Value) -> None:
        """Bind a value to whatever another is bound to."""
        truth = self.truth.get(other)
        if truth is not None:
            self.bind_truth(value, truth)
        elif other in self._sums:
            register, offset = self._sums[other]
            if register is None:
                self.bind_integer(value, offset)
            else:
                self.bind_sum(value, register, offset)
        else:
            self.bind(value, self._lanes[other])

    def bind_truth(self, value: Value, truth: bool) -> None:
        """Bind a bool value to a constant."""
        self.bind(value, (self.once(("pred", truth), "mov.pred", "p", str(int(truth))),))
        self.truth[value] = truth

    def sum(self, value: Value) -> Sum:
        """An integer value as a register plus a constant."""
        known = self._sums.get(value)
        return known if known is not None else (self._lanes[value][0], 0)

    def integer(self, value: Value) -> int | None:
        """The number of an integer value that is constant; None for others."""
        known = self._sums.get(value)
        return known[1] if known is not None and known[0] is None else None

    def operands(self, value: Value) -> tuple[str, ...]:
        """The operand of each lane of a value: a register, or an immediate for a constant."""
        lanes = self._lanes.get(value)
        if lanes is not None:
            return lanes
        if value not in self._sums:
            raise KernelError(f"[ptx] {value!r} is used where it is not defined; run ir.verify on the kernel")
        register, offset = self._sums[value]
        assert register is not None
        elem = element(value.type)
        add = f"add.s{elem.bits}"
        return (self.once((add, register, str(offset)), add, _REGISTERS[elem.name], register, str(offset)),)

    def registers(self, value: Value) -> tuple[str, ...]:
        """The register of each lane of a value; constants are moved into registers."""
        lanes = self.operands(value)
        if all(x[0] == "%" for x in lanes):
            return lanes
        cls = _REGISTERS[element(value.type).name]
        return tuple(x if x[0] == "%" else self.once((cls, x), f"mov.{DECLARED[cls]}", cls, x) for x in lanes)

    def joined(self, low: str, high: str) -> str:
        """Join two 16-bit registers; reuses the 32-bit register if they were split from one."""
        pair = self.pairs.get((low, high))
        return pair or self.emit("mov.b32", "r", f"{{{low}, {high}}}")

    def half(self, bits: int) -> str:
        """A 16-bit constant in a register: f16 instructions take no immediates."""
        return self.once(("half", bits), "mov.b16", "h", f"0x{bits:04X}")


def move_type(elem: Scalar) -> str:
    """The type that ``mov`` and ``selp`` use for a scalar."""
    return DECLARED[_REGISTERS[elem.name]]


def register_class(elem: Scalar) -> str:
    """The register class of a scalar type."""
    return _REGISTERS[elem.name]


def f32_text(value: float) -> str:
    return f"0f{float_bits(value, f32):08X}"


def f64_text(value: float) -> str:
    return f"0d{float_bits(value, f64):016X}"


def refuse(op: Op, expected: str, got: object, remedy: str) -> KernelError:
    """The error for an operation that cannot be rendered."""
    where = f" ({op.where})" if op.where is not None else ""
    return KernelError(f"[ptx {op.opcode}] expected {expected}, got {got}; {remedy}{where}")
