"""A SPIR-V module under construction: unique types and constants, and sections in the required order."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable

from aule.ir.constants import float_bits
from aule.ir.types import Fragment, Scalar, Vector, u32
from aule.render._spirv_ops import (
    MAGIC,
    AddressingModel,
    Capability,
    CooperativeMatrixUse,
    Decoration,
    ExecutionModel,
    FPEncoding,
    FunctionControl,
    MemoryModel,
    Op,
    Scope,
)

_VERSION_1_5 = 0x00010500
_USES = {
    "a": CooperativeMatrixUse.MatrixAKHR,
    "b": CooperativeMatrixUse.MatrixBKHR,
    "accumulator": CooperativeMatrixUse.MatrixAccumulatorKHR,
}


def literal(text: str) -> list[int]:
    """A string as words: UTF-8, zero-terminated, padded."""
    data = text.encode() + b"\0"
    data += b"\0" * (-len(data) % 4)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def constant_words(type_: Scalar, value: float | int | bool) -> tuple[int, ...]:
    """The words of a number: low word first, narrow integers sign-extended, narrow floats zero-extended."""
    number = float_bits(value, type_) if type_.is_float else int(value) & ((1 << type_.bits) - 1)
    if type_.bits == 64:
        return (number & 0xFFFFFFFF, number >> 32)
    if type_.kind == "int" and number >> (type_.bits - 1):
        number |= (0xFFFFFFFF << type_.bits) & 0xFFFFFFFF
    return (number,)


def _instruction(opcode: int, *operands: int) -> list[int]:
    """The words of an instruction: its length and opcode, then its operands."""
    return [(len(operands) + 1) << 16 | opcode, *operands]


class Module:
    """Collects a compute shader with one entry point.

    Attributes
    ----------
    code : list of int
        Words of the function's body, to which `emit` and `result` append.
    variables : list of int
        Words of local variables, which SPIR-V requires at the start of the function.
    """

    def __init__(self) -> None:
        self.code: list[int] = []
        self.variables: list[int] = []
        self.capabilities: dict[int, None] = {Capability.Shader: None}
        self._extensions: dict[str, None] = {}
        self._modes: list[int] = []
        self._names: list[int] = []
        self._decorations: list[int] = []
        self._globals: list[int] = []
        self._interface: list[int] = []
        self._known: dict[tuple[object, ...], int] = {}
        self._constants: dict[tuple[Scalar, tuple[int, ...]], int] = {}
        self._types: dict[Scalar | Vector | Fragment, int] = {}
        self._bound = 1
        self.main = self.id()
        self.glsl = self.id()

    # -- instructions ----------------------------------------------------------------------------------------------

    def id(self) -> int:
        number = self._bound
        self._bound += 1
        return number

    def emit(self, opcode: int, *operands: int) -> None:
        """Append an instruction without a result to the function's body."""
        self.code.append((len(operands) + 1) << 16 | opcode)
        self.code.extend(operands)

    def result(self, opcode: int, type_id: int, *operands: int) -> int:
        """Append an instruction with a result; returns its id."""
        number = self._bound
        self._bound += 1
        code = self.code
        code.append((len(operands) + 3) << 16 | opcode)
        code.append(type_id)
        code.append(number)
        code.extend(operands)
        return number

    def extended(self, number: int, type_id: int, *operands: int) -> int:
        """Append an instruction of GLSL.std.450; returns the id of its result."""
        return self.result(Op.ExtInst, type_id, self.glsl, number, *operands)

    def label(self, number: int) -> None:
        """Begin the basic block ``number``."""
        self.emit(Op.Label, number)

    # -- declarations ----------------------------------------------------------------------------------------------

    def capability(self, *numbers: int) -> None:
        for number in numbers:
            self.capabilities[number] = None

    def extension(self, name: str) -> None:
        self._extensions[name] = None

    def mode(self, number: int, *operands: int) -> None:
        """Declare an execution mode of the entry point."""
        self._modes += _instruction(Op.ExecutionMode, self.main, number, *operands)

    def name(self, target: int, text: str) -> None:
        """Set the name that a disassembler shows for an id."""
        self._names += _instruction(Op.Name, target, *literal(text))

    def member_name(self, target: int, member: int, text: str) -> None:
        self._names += _instruction(Op.MemberName, target, member, *literal(text))

    def decorate(self, target: int, decoration: int, *operands: int) -> None:
        self._decorations += _instruction(Op.Decorate, target, decoration, *operands)

    def decorate_member(self, target: int, member: int, decoration: int, *operands: int) -> None:
        self._decorations += _instruction(Op.MemberDecorate, target, member, decoration, *operands)

    def _declare(self, opcode: int, *operands: int) -> int:
        """Declare a type once."""
        key = (opcode, *operands)
        if key not in self._known:
            self._known[key] = self._fresh(opcode, *operands)
        return self._known[key]

    def _fresh(self, opcode: int, *operands: int) -> int:
        number = self.id()
        self._globals += _instruction(opcode, number, *operands)
        return number

    # -- types -----------------------------------------------------------------------------------------------------

    def type(self, type_: Scalar | Vector | Fragment) -> int:
        """The id of a register type; a vector has at most four lanes."""
        found = self._types.get(type_)
        if found is None:
            found = self._types[type_] = self._make_type(type_)
        return found

    def _make_type(self, type_: Scalar | Vector | Fragment) -> int:
        if isinstance(type_, Vector):
            return self._declare(Op.TypeVector, self.type(type_.elem), type_.lanes)
        if isinstance(type_, Fragment):
            shape = (Scope.Subgroup, type_.rows, type_.cols, _USES[type_.use])
            operands = [self.constant(u32, n) for n in shape]
            return self._declare(Op.TypeCooperativeMatrixKHR, self.type(type_.elem), *operands)
        if type_.kind == "bool":
            return self._declare(Op.TypeBool)
        if type_.name == "bf16":
            return self._declare(Op.TypeFloat, 16, FPEncoding.BFloat16KHR)
        if type_.is_float:
            return self._declare(Op.TypeFloat, type_.bits)
        return self._declare(Op.TypeInt, type_.bits, int(type_.is_signed))

    def void(self) -> int:
        return self._declare(Op.TypeVoid)

    def pointer(self, storage: int, target: int) -> int:
        return self._declare(Op.TypePointer, storage, target)

    def array(self, elem: int, length: int) -> int:
        """An array type without an explicit layout, for shared and private memory."""
        return self._declare(Op.TypeArray, elem, self.constant(u32, length))

    def strided_array(self, elem: int, length: int, stride: int) -> int:
        """An array type for blocks, with ``stride`` bytes per element."""
        # Distinct from the type of `array`: memory without an explicit layout must not have a stride.
        key = (Op.TypeArray, elem, length, stride)
        if key not in self._known:
            self._known[key] = self._fresh(Op.TypeArray, elem, self.constant(u32, length))
            self.decorate(self._known[key], Decoration.ArrayStride, stride)
        return self._known[key]

    def runtime_array(self, elem: int, stride: int) -> int:
        """An array type of unknown length, with ``stride`` bytes per element."""
        key = (Op.TypeRuntimeArray, elem)
        if key not in self._known:
            self.decorate(self._declare(*key), Decoration.ArrayStride, stride)
        return self._known[key]

    def pair(self, member: int) -> int:
        """A struct type of two equal members, the result of instructions with two results."""
        return self._declare(Op.TypeStruct, member, member)

    def block(self, members: Iterable[int], offsets: Iterable[int]) -> int:
        """A new struct type for an interface block."""
        number = self._fresh(Op.TypeStruct, *members)
        self.decorate(number, Decoration.Block)
        for i, offset in enumerate(offsets):
            self.decorate_member(number, i, Decoration.Offset, offset)
        return number

    # -- constants and variables -----------------------------------------------------------------------------------

    def constant(self, type_: Scalar, value: float | int | bool) -> int:
        """A constant, declared once."""
        words = (int(bool(value)),) if type_.kind == "bool" else constant_words(type_, value)
        key = (type_, words)
        found = self._constants.get(key)
        if found is None:
            type_id = self.type(type_)
            found = self.id()
            if type_.kind == "bool":
                self._globals += _instruction(Op.ConstantTrue if value else Op.ConstantFalse, type_id, found)
            else:
                self._globals += _instruction(Op.Constant, type_id, found, *words)
            self._constants[key] = found
        return found

    def constant_vector(self, type_: Vector, constant: int) -> int:
        """A vector with one constant in every lane."""
        key = (Op.ConstantComposite, type_, constant)
        if key not in self._known:
            type_id = self.type(type_)
            number = self._known[key] = self.id()
            self._globals += _instruction(Op.ConstantComposite, type_id, number, *[constant] * type_.lanes)
        return self._known[key]

    def global_variable(self, storage: int, target: int) -> int:
        """A variable outside the function, part of the entry point's interface."""
        pointer = self.pointer(storage, target)
        number = self.id()
        self._globals += _instruction(Op.Variable, pointer, number, storage)
        self._interface.append(number)
        return number

    def local_variable(self, storage: int, target: int) -> int:
        """A variable of the function."""
        pointer = self.pointer(storage, target)
        number = self.id()
        self.variables += _instruction(Op.Variable, pointer, number, storage)
        return number

    # -- assembly --------------------------------------------------------------------------------------------------

    def assemble(self, entry: str, memory_model: int = MemoryModel.GLSL450) -> bytes:
        """The bytes of the module, with the body as the function of the entry point."""
        void = self.void()
        function_type = self._declare(Op.TypeFunction, void)
        words = [MAGIC, _VERSION_1_5, 0, 0, 0]
        for number in sorted(self.capabilities):
            words += _instruction(Op.Capability, number)
        for name in sorted(self._extensions):
            words += _instruction(Op.Extension, *literal(name))
        words += _instruction(Op.ExtInstImport, self.glsl, *literal("GLSL.std.450"))
        words += _instruction(Op.MemoryModel, AddressingModel.Logical, memory_model)
        words += _instruction(Op.EntryPoint, ExecutionModel.GLCompute, self.main, *literal(entry), *self._interface)
        words += self._modes + self._names + self._decorations + self._globals
        words += _instruction(Op.Function, void, self.main, FunctionControl.None_, function_type)
        words += _instruction(Op.Label, self.id()) + self.variables + self.code
        words += _instruction(Op.Return) + _instruction(Op.FunctionEnd)
        words[3] = self._bound
        data = array("I", words)
        if sys.byteorder == "big":
            data.byteswap()
        return data.tobytes()
