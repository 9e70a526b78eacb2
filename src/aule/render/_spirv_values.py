"""Values in registers in SPIR-V: arithmetic, vectors and conversions.

SPIR-V vectors have at most four lanes. A wider vector is held as several of four, its *parts*; operations map over the
parts of their operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from aule.errors import KernelError
from aule.ir.kernel import Arithmetic, Value
from aule.ir.types import (
    Fragment,
    Scalar,
    ValueType,
    Vector,
    bf16,
    bool_,
    element,
    f16,
    f32,
    i32,
    lanes_of,
    u32,
    u64,
    vector_type,
)
from aule.render._spirv_module import Module
from aule.render._spirv_ops import Decoration, FPRoundingMode, Glsl, Op

Parts = tuple[int, ...]
"""The ids of the parts of a value."""
Rounding = Literal["default", "decorate", "software"]
"""Means by which a conversion to f16 rounds to nearest even: default, decoration, or integer arithmetic."""

# By opcode and kind of element.
_INSTRUCTIONS: dict[str, dict[str, int]] = {
    "neg": {"float": Op.FNegate, "int": Op.SNegate, "uint": Op.SNegate},
    "not": {"bool": Op.LogicalNot, "int": Op.Not, "uint": Op.Not},
    "add": {"float": Op.FAdd, "int": Op.IAdd, "uint": Op.IAdd},
    "sub": {"float": Op.FSub, "int": Op.ISub, "uint": Op.ISub},
    "mul": {"float": Op.FMul, "int": Op.IMul, "uint": Op.IMul},
    "div": {"float": Op.FDiv, "int": Op.SDiv, "uint": Op.UDiv},
    "rem": {"int": Op.SRem, "uint": Op.UMod},
    "and": {"bool": Op.LogicalAnd, "int": Op.BitwiseAnd, "uint": Op.BitwiseAnd},
    "or": {"bool": Op.LogicalOr, "int": Op.BitwiseOr, "uint": Op.BitwiseOr},
    "xor": {"bool": Op.LogicalNotEqual, "int": Op.BitwiseXor, "uint": Op.BitwiseXor},
    "shl": {"int": Op.ShiftLeftLogical, "uint": Op.ShiftLeftLogical},
    "shr": {"int": Op.ShiftRightArithmetic, "uint": Op.ShiftRightLogical},
    "lt": {"float": Op.FOrdLessThan, "int": Op.SLessThan, "uint": Op.ULessThan},
    "le": {"float": Op.FOrdLessThanEqual, "int": Op.SLessThanEqual, "uint": Op.ULessThanEqual},
    "gt": {"float": Op.FOrdGreaterThan, "int": Op.SGreaterThan, "uint": Op.UGreaterThan},
    "ge": {"float": Op.FOrdGreaterThanEqual, "int": Op.SGreaterThanEqual, "uint": Op.UGreaterThanEqual},
    "eq": {"float": Op.FOrdEqual, "int": Op.IEqual, "uint": Op.IEqual, "bool": Op.LogicalEqual},
    "ne": {"float": Op.FUnordNotEqual, "int": Op.INotEqual, "uint": Op.INotEqual, "bool": Op.LogicalNotEqual},
}
_EXTENDED: dict[str, dict[str, int]] = {
    "abs": {"float": Glsl.FAbs, "int": Glsl.SAbs},
    "min": {"float": Glsl.FMin, "int": Glsl.SMin, "uint": Glsl.UMin},
    "max": {"float": Glsl.FMax, "int": Glsl.SMax, "uint": Glsl.UMax},
    "exp2": {"float": Glsl.Exp2},
    "log2": {"float": Glsl.Log2},
    "sqrt": {"float": Glsl.Sqrt},
    "rsqrt": {"float": Glsl.InverseSqrt},
    "floor": {"float": Glsl.Floor},
    "sin": {"float": Glsl.Sin},
    "cos": {"float": Glsl.Cos},
    "fma": {"float": Glsl.Fma},
}
_SINGLE_ONLY = {"exp2", "log2", "sin", "cos"}
"""Operations that GLSL.std.450 has for 16 and 32 bits only."""

ARITHMETIC = frozenset(_INSTRUCTIONS) | frozenset(_EXTENDED) | {"rcp", "mulhi", "small"}
"""Operations that `Registers.arithmetic` supports."""


def register(value: Value) -> ValueType:
    """The type of a value in registers."""
    assert isinstance(value.type, Scalar | Vector | Fragment)
    return value.type


def register_element(elem: Scalar, computable: frozenset[Scalar]) -> Scalar:
    """The register type of an element of memory.

    8- and 16-bit types without arithmetic are converted at the load: SPIR-V does not even allow building vectors of
    them.
    """
    if elem.bits not in (8, 16) or elem in computable or elem == bf16:
        return elem
    return f32 if elem.is_float else i32 if elem.is_signed else u32


def part_types(type_: ValueType) -> list[ValueType]:
    """The types of the parts that hold a value."""
    if isinstance(type_, Vector) and type_.lanes > 4:
        return [Vector(type_.elem, 4)] * (type_.lanes // 4)
    return [type_]


def conversion(source: Scalar, target: Scalar) -> int:
    """The instruction that converts one element type to another."""
    if source.is_float and target.is_float:
        return Op.FConvert
    if source.is_float:
        return Op.ConvertFToS if target.is_signed else Op.ConvertFToU
    if target.is_float:
        return Op.ConvertSToF if source.is_signed else Op.ConvertUToF
    if source.bits == target.bits:
        return Op.Bitcast
    return Op.SConvert if source.is_signed else Op.UConvert


class Registers:
    """Emits computations on values in parts; for ``arithmetic`` see `KernelIR`."""

    def __init__(self, module: Module, arithmetic: Arithmetic = "exact") -> None:
        self.m = module
        self.exact, self.fused = arithmetic == "exact", arithmetic == "fused"

    # -- constants -------------------------------------------------------------------------------------------------

    def constant(self, type_: Scalar | Vector, value: float | int | bool) -> int:
        """A constant in every lane of a part."""
        number = self.m.constant(type_ if isinstance(type_, Scalar) else type_.elem, value)
        return number if isinstance(type_, Scalar) else self.m.constant_vector(type_, number)

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def arithmetic(self, opcode: str, type_: ValueType, result: ValueType, operands: Sequence[Parts]) -> Parts:
        """Emit an operation lane by lane; ``type_`` is the type of the operands."""
        kind = element(type_).kind
        if opcode == "rcp":
            return self._map(result, lambda t, x: self.m.result(Op.FDiv, self.m.type(t), self._one(t), x), operands)
        if opcode == "mulhi":
            return self._map(result, self._high_product, operands)
        if opcode == "rem" and kind == "int" and self.exact:
            return self._map(result, self._signed_remainder, operands)
        if opcode == "small" or (opcode == "abs" and kind == "uint"):
            return operands[0]
        number = _EXTENDED.get(opcode, {}).get(kind)
        if number is not None:
            if opcode in _SINGLE_ONLY and element(type_).bits == 64:
                raise KernelError(f"[spirv] expected f16 or f32 for {opcode}, got f64; compute it in f32")
            return self._map(result, lambda t, *x: self.m.extended(number, self.m.type(t), *x), operands)
        instruction = _INSTRUCTIONS.get(opcode, {}).get(kind)
        if instruction is None:
            raise KernelError(f"[spirv] {opcode} is not defined for {type_}")
        return self._map(result, lambda t, *x: self.m.result(instruction, self.m.type(t), *x), operands)

    def select(self, result: ValueType, condition_type: ValueType, operands: Sequence[Parts]) -> Parts:
        """``operands[1]`` where ``operands[0]`` holds, else ``operands[2]``."""
        condition, yes, no = operands
        if isinstance(condition_type, Scalar) and isinstance(result, Vector):
            # A scalar condition for vectors is legal from SPIR-V 1.4 on, but may be untested in drivers.
            condition = self.splat(Vector(bool_, result.lanes), condition[0])
        return self._map(result, lambda t, *x: self.m.result(Op.Select, self.m.type(t), *x), (condition, yes, no))

    def _map(self, result: ValueType, emit: Callable[..., int], operands: Sequence[Parts]) -> Parts:
        return tuple(emit(t, *(x[i] for x in operands)) for i, t in enumerate(part_types(result)))

    def _signed_remainder(self, type_: ValueType, left: int, right: int) -> int:
        """Signed remainder by division: Vulkan leaves OpSRem undefined for negative operands."""
        number = self.m.type(type_)
        multiple = self.m.result(Op.IMul, number, self.m.result(Op.SDiv, number, left, right), right)
        return self.m.result(Op.ISub, number, left, multiple)

    def _high_product(self, type_: ValueType, left: int, right: int) -> int:
        """High word of a product by OpUMulExtended, which needs no 64-bit integers."""
        word = self.m.type(type_)
        both = self.m.result(Op.UMulExtended, self.m.pair(word), left, right)
        return self.m.result(Op.CompositeExtract, word, both, 1)

    def products(self, result: ValueType, operands: Sequence[Parts]) -> tuple[Parts, Parts]:
        """Low and high words of products of u32, by 64-bit multiplication."""
        both: list[tuple[int, int]] = []
        for i, type_ in enumerate(part_types(result)):
            wide, word = vector_type(u64, lanes_of(type_)), self.m.type(type_)
            left, right = (self.m.result(Op.UConvert, self.m.type(wide), x[i]) for x in operands)
            product = self.m.result(Op.IMul, self.m.type(wide), left, right)
            high = self.m.result(Op.ShiftRightLogical, self.m.type(wide), product, self.constant(wide, 32))
            both.append((self.m.result(Op.UConvert, word, product), self.m.result(Op.UConvert, word, high)))
        return tuple(low for low, _ in both), tuple(high for _, high in both)

    def _one(self, type_: ValueType) -> int:
        assert isinstance(type_, Scalar | Vector)
        return self.constant(type_, 1.0)

    # -- vectors ---------------------------------------------------------------------------------------------------

    def splat(self, type_: Vector, scalar: int) -> Parts:
        """A scalar in every lane."""
        first, *rest = part_types(type_)
        part = self.m.result(Op.CompositeConstruct, self.m.type(first), *[scalar] * min(type_.lanes, 4))
        return (part,) * (1 + len(rest))

    def join(self, elem: Scalar, pieces: Sequence[tuple[int, int]]) -> Parts:
        """Join pieces ``(id, lanes)``, scalars or vectors of up to four lanes, in order."""
        lanes = sum(n for _, n in pieces)
        if len(pieces) == 1 or all(n == 4 for _, n in pieces):
            return tuple(number for number, _ in pieces)
        parts: list[int] = []
        current: list[int] = []
        filled, width = 0, min(lanes, 4)
        for number, n in pieces:
            current.append(number)
            filled += n
            if filled == width:
                parts.append(self.m.result(Op.CompositeConstruct, self.m.type(Vector(elem, width)), *current))
                current, filled = [], 0
        return tuple(parts)

    def cut(self, type_: ValueType, parts: Parts, start: int, count: int) -> int:
        """``count`` lanes from lane ``start`` on, all within one part."""
        if isinstance(type_, Scalar):
            return parts[0]
        part, lane = parts[start // 4], start % 4
        width = min(lanes_of(type_), 4)
        if count == width:
            return part
        elem = element(type_)
        if count == 1:
            return self.m.result(Op.CompositeExtract, self.m.type(elem), part, lane)
        lanes = range(lane, lane + count)
        return self.m.result(Op.VectorShuffle, self.m.type(Vector(elem, count)), part, part, *lanes)

    # -- conversion ------------------------------------------------------------------------------------------------

    def cast(
        self, source: ValueType, result: ValueType, parts: Parts, rounding: Rounding = "default", small: bool = False
    ) -> Parts:
        """Convert numbers lane by lane; ``small`` as in ``ops.OPS["small"]``."""
        return tuple(
            self._convert(element(source), t, part, rounding, small)
            for t, part in zip(part_types(result), parts, strict=True)
        )

    def _convert(self, source: Scalar, type_: ValueType, part: int, rounding: Rounding, small: bool = False) -> int:
        assert isinstance(type_, Scalar | Vector)
        target, lanes = element(type_), lanes_of(type_)
        if source.kind == "bool":
            # Narrow types may lack arithmetic, so select between 32-bit numbers and convert.
            wide = target if target.bits >= 32 else (f32 if target.is_float else u32)
            over = vector_type(wide, lanes)
            yes, no = self.constant(over, 1), self.constant(over, 0)
            part = self.m.result(Op.Select, self.m.type(over), part, yes, no)
            return part if wide == target else self._convert(wide, type_, part, "default")
        if target == f16 and source != f16:
            if source != f32:
                # Exact for every integer that does not overflow f16; f64 is rounded twice.
                part = self._convert(source, vector_type(f32, lanes), part, "default")
            if rounding == "software":
                return self._round_to_half(part, lanes)
            part = self.m.result(Op.FConvert, self.m.type(type_), part)
            if rounding == "decorate":
                self.m.decorate(part, Decoration.FPRoundingMode, FPRoundingMode.RTE)
            return part
        if target == bf16:
            return self.m.result(Op.FConvert, self.m.type(type_), self._round_to_bfloat(part, lanes, small))
        narrow_source = source.is_int and source.bits < 32
        if (narrow_source and target.bits < 32) or (narrow_source and target.is_float):
            part, source = self._to_word(source, part, lanes, source.is_signed)
        elif source.is_float and target.is_int and target.bits < 32:
            part, source = self._to_word(source, part, lanes, target.is_signed)
        return self._cast_part(source, type_, part, target)

    def _to_word(self, source: Scalar, part: int, lanes: int, signed: bool) -> tuple[int, Scalar]:
        """Convert to 32-bit integers, so that 8- and 16-bit types need no arithmetic of their own."""
        word = i32 if signed else u32
        return self._cast_part(source, vector_type(word, lanes), part, word), word

    def _cast_part(self, source: Scalar, type_: ValueType, part: int, target: Scalar) -> int:
        """Emit a conversion instruction, or two to widen an unsigned to a signed integer."""
        type_id = self.m.type(type_)
        if source == target:
            return part
        instruction = conversion(source, target)
        if instruction != Op.UConvert or not target.is_signed:
            return self.m.result(instruction, type_id, part)
        # OpUConvert only gives unsigned integers.
        unsigned = Scalar(f"u{target.bits}", "uint", target.bits)
        over = Vector(unsigned, type_.lanes) if isinstance(type_, Vector) else unsigned
        return self.m.result(Op.Bitcast, type_id, self.m.result(Op.UConvert, self.m.type(over), part))

    def _round_to_half(self, part: int, lanes: int) -> int:
        """Round f32 to f16, to nearest even, by integer arithmetic: drivers may truncate in OpFConvert."""
        words, flags, floats = vector_type(u32, lanes), vector_type(bool_, lanes), vector_type(f32, lanes)
        word, flag = self.m.type(words), self.m.type(flags)

        def c(value: int) -> int:
            return self.constant(words, value)

        def do(instruction: int, *operands: int) -> int:
            return self.m.result(instruction, word, *operands)

        bits = do(Op.Bitcast, part)
        magnitude = do(Op.BitwiseAnd, bits, c(0x7FFFFFFF))
        # Normal numbers: add half of the last remaining bit (less one if it is even), drop 13 bits and rebias.
        odd = do(Op.BitwiseAnd, do(Op.ShiftRightLogical, magnitude, c(13)), c(1))
        normal = do(Op.IAdd, do(Op.IAdd, magnitude, odd), c(0xFFF - 0x38000000))
        normal = self.m.extended(Glsl.UMin, word, do(Op.ShiftRightLogical, normal, c(13)), c(0x7C00))
        # Below 2^-14: adding 0.5 in f32 rounds to multiples of 2^-24, the smallest f16.
        single = self.m.type(floats)
        small = self.m.result(Op.FAdd, single, self.m.result(Op.Bitcast, single, magnitude), self.constant(floats, 0.5))
        small = do(Op.ISub, do(Op.Bitcast, small), c(0x3F000000))
        is_small = self.m.result(Op.ULessThan, flag, magnitude, c(0x38800000))
        is_nan = self.m.result(Op.UGreaterThan, flag, magnitude, c(0x7F800000))
        half = do(Op.Select, is_nan, c(0x7E00), do(Op.Select, is_small, small, normal))
        sign = do(Op.BitwiseAnd, do(Op.ShiftRightLogical, bits, c(16)), c(0x8000))
        half = do(Op.BitwiseOr, half, sign)
        pieces = []
        for lane in range(lanes):
            bits = half if lanes == 1 else self.m.result(Op.CompositeExtract, self.m.type(u32), half, lane)
            pair = self.m.result(Op.Bitcast, self.m.type(Vector(f16, 2)), bits)
            pieces.append((self.m.result(Op.CompositeExtract, self.m.type(f16), pair, 0), 1))
        return self.join(f16, pieces)[0]

    def _round_to_bfloat(self, part: int, lanes: int, small: bool) -> int:
        """Round f32 to nearest even with 8 bits, for an OpFConvert that may truncate, as NVIDIA's does.

        This is the upper part of Veltkamp's splitting: one product and two subtractions, cheaper than integers. The
        fused form rounds x - 2**16 x and adds 2**16 x again: the larger number's last bit is the last of the eight bits
        of x. From 2**110 on, where the product could overflow, and for NaN, the number is not changed; numbers that are
        known to be ``small`` skip that test.
        """
        floats = vector_type(f32, lanes)
        single, flag = self.m.type(floats), self.m.type(vector_type(bool_, lanes))

        def exact(instruction: int, left: int, right: int) -> int:
            # Without the decoration, NVIDIA's compiler simplifies t - (t - x) to x.
            result = self.m.result(instruction, single, left, right)
            self.m.decorate(result, Decoration.NoContraction)
            return result

        if self.fused or small:
            scaled = exact(Op.FMul, part, self.constant(floats, -65535.0))
            upper = self.m.extended(Glsl.Fma, single, part, self.constant(floats, 65536.0), scaled)
            self.m.decorate(upper, Decoration.NoContraction)
        else:
            scaled = exact(Op.FMul, part, self.constant(floats, 65537.0))
            upper = exact(Op.FSub, scaled, exact(Op.FSub, scaled, part))
        if small:
            return upper
        magnitude = self.m.extended(Glsl.FAbs, single, part)
        limited = self.m.result(Op.FOrdLessThan, flag, magnitude, self.constant(floats, 2.0**110))
        return self.m.result(Op.Select, single, limited, upper, part)

    def bitcast(self, source: ValueType, result: ValueType, parts: Parts) -> Parts:
        """Reinterpret bits as another type of the same size."""
        assert isinstance(source, Scalar | Vector) and isinstance(result, Scalar | Vector)
        if element(source) == element(result):
            return parts
        from_bits, to_bits = element(source).bits, element(result).bits
        if {from_bits, to_bits} == {8, 64}:
            # A direct bitcast would need a vector of eight lanes.
            words = Vector(u32, from_bits * lanes_of(source) // 32)
            return self.bitcast(words, result, self.bitcast(source, words, parts))
        # Pieces that have at most four lanes on both sides.
        bits = min(4 * from_bits, 4 * to_bits, from_bits * lanes_of(source))
        take, give = bits // from_bits, bits // to_bits
        type_id = self.m.type(vector_type(element(result), give))
        pieces = [self.cut(source, parts, start, take) for start in range(0, lanes_of(source), take)]
        return self.join(element(result), [(self.m.result(Op.Bitcast, type_id, p), give) for p in pieces])
