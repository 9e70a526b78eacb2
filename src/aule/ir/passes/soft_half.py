"""Replaces fp16 and bf16 by their bits as u16, where a language or device lacks such registers.

bf16 is the upper half of f32, so reading it is one shift. Arithmetic is done in f32 and rounded back: f32 has more than
twice the precision of either, so rounding twice equals rounding once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aule.ir.builder import Builder
from aule.ir.constants import float_bits
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.ops import OPS
from aule.ir.passes.rewrite import Lowered, Rewriter
from aule.ir.types import (
    Fragment,
    Pointer,
    Scalar,
    ValueType,
    Vector,
    element,
    f16,
    f32,
    lanes_of,
    u16,
    u32,
    vector_type,
    with_element,
)

Convert = Callable[[Builder, Value], Value]
"""Emits a language's own conversion."""


def soft_half(
    kernel: KernelIR,
    soft: Iterable[Scalar],
    half_to_float: Convert | None = None,
    float_to_bfloat: Convert | None = None,
    pairs: bool = False,
) -> KernelIR:
    """Replace registers and memory of the types in ``soft`` (f16, bf16) by their bits.

    A language's own conversions, if given, replace integer arithmetic: ``half_to_float`` takes a u32 with fp16 bits in
    its low half to f32, exactly (scalars); ``float_to_bfloat`` rounds f32 to a u16 of the same shape. With ``pairs``,
    vectors of bf16 are converted in words of two, for compilers that do not remove the shifts of single halves.
    """
    return _SoftHalf(kernel, frozenset(soft), half_to_float, float_to_bfloat, pairs).run()


class _SoftHalf(Rewriter):
    def __init__(
        self,
        kernel: KernelIR,
        soft: frozenset[Scalar],
        half_to_float: Convert | None,
        float_to_bfloat: Convert | None,
        pairs: bool,
    ) -> None:
        super().__init__(kernel)
        self._soft = soft
        self._pairs = pairs
        self._half_to_float = half_to_float
        self._float_to_bfloat = float_to_bfloat
        for opcode, info in OPS.items():
            if info.category in ("unary", "binary", "compare") or opcode == "fma":
                self.hooks[opcode] = self._arithmetic
        self.hooks |= {
            "const": self._const, "cast": self._cast, "bitcast": self._bitcast,
            "neg": lambda op: self._sign(op, "xor", 0x8000), "abs": lambda op: self._sign(op, "and", 0x7FFF),
        }  # fmt: skip

    def register(self, type_: ValueType) -> ValueType:
        return with_element(type_, u16) if self._is_soft(type_) else type_

    def memory(self, pointer: Pointer) -> Pointer:
        return Pointer(u16, pointer.space, pointer.length) if pointer.elem in self._soft else pointer

    def _is_soft(self, type_: object) -> bool:
        # Elements of fragments are left to the matrix unit.
        return isinstance(type_, Scalar | Vector) and element(type_) in self._soft

    def _const(self, op: Op) -> Lowered | None:
        if not self._is_soft(op.output.type):
            return self.clone(op)
        return self.b.const(float_bits(op.attrs["value"], element(op.output.type)), u16)

    def _arithmetic(self, op: Op) -> Lowered | None:
        if not self._is_soft(op.args[0].type):
            return self.clone(op)
        args = tuple(self._widen(a) for a in op.args)
        if OPS[op.opcode].category == "compare":
            return self.b.binary(op.opcode, *args)
        result = self.b.emit(op.opcode, args, args[0].type)
        return self._narrow(result, element(op.output.type))

    def _sign(self, op: Op, opcode: str, bits: int) -> Lowered | None:
        if not self._is_soft(op.args[0].type):
            return self.clone(op)
        return self.b.binary(opcode, self.value(op.args[0]), bits)

    def _cast(self, op: Op) -> Lowered | None:
        source, target = op.args[0], op.output.type
        if isinstance(target, Fragment) or not (self._is_soft(source.type) or self._is_soft(target)):
            return self.clone(op)
        value = self._widen(source) if self._is_soft(source.type) else self.value(source)
        if not self._is_soft(target):
            return self.b.cast(value, element(target))
        # Integers beyond 2**24 and f64 are rounded twice, first to f32: the error is below 0.51 ulp.
        return self._narrow(self.b.cast(value, f32), element(target))

    def _bitcast(self, op: Op) -> Lowered | None:
        assert isinstance(op.output.type, Scalar | Vector)
        return self.b.bitcast(self.value(op.args[0]), self.register(op.output.type))

    def _widen(self, old: Value) -> Value:
        if self._pairs and element(old.type) != f16 and lanes_of(old.type) > 1 and not _made_of_scalars(old):
            return pairs_to_floats(self.b, self.value(old))
        bits = self.b.cast(self.value(old), u32)
        if element(old.type) != f16:
            return self.b.bitcast(bits << 16, vector_type(f32, lanes_of(bits.type)))
        if self._half_to_float is None:
            return half_to_float(self.b, bits)
        return self.b.vector([self._half_to_float(self.b, lane) for lane in self.b.unpack(bits)])

    def _narrow(self, value: Value, elem: Scalar) -> Value:
        if elem != f16 and self._float_to_bfloat is not None:
            return self._float_to_bfloat(self.b, value)
        return self.b.cast(float_to_half(self.b, value) if elem == f16 else float_to_bfloat(self.b, value), u16)


def float_to_bfloat(b: Builder, value: Value) -> Value:
    """f32 to bf16 bits in a u32 of the same shape: nearest, ties to even; NaN stays NaN."""
    bits = b.bitcast(value, vector_type(u32, lanes_of(value.type)))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding could turn a NaN into infinity by a carry; setting the top mantissa bit cannot.
    return b.select((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)


def pairs_to_floats(b: Builder, bits: Value) -> Value:
    """Convert a vector of bf16 bits to f32 exactly, with one operation per element."""
    lanes = lanes_of(bits.type)
    words = b.bitcast(bits, vector_type(u32, lanes // 2))
    halves = [b.unpack(b.bitcast(half, vector_type(f32, lanes // 2))) for half in (words << 16, words & 0xFFFF0000)]
    return b.vector([x for pair in zip(*halves, strict=True) for x in pair])


def _made_of_scalars(value: Value) -> bool:
    """True if a vector was made of single elements, which are not packed in words."""
    return value.op is not None and value.op.opcode in ("make_vector", "splat", "permute")


def float_to_half(b: Builder, value: Value) -> Value:
    """f32 to fp16 bits in a u32 of the same shape: nearest, ties to even, through subnormals and infinities."""
    bits = b.bitcast(value, vector_type(u32, lanes_of(value.type)))
    magnitude = bits & 0x7FFFFFFF
    # Normal: rebias the exponent by 112 and round off 13 bits; a carry moves into the exponent, up to infinity.
    normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    # Subnormal: the mantissa with its hidden bit, shifted to units of 2**-24. A shift of 25 or more gives zero.
    mantissa = (magnitude & 0x7FFFFF) | 0x800000
    # The exponent is below 113 where this result is selected; the minimum avoids wrapping elsewhere.
    shift = b.min(_all(b, 126, bits) - b.min(magnitude >> 23, 112), 25)
    truncated = mantissa >> shift
    half = b.binary("shl", _all(b, 1, bits), shift - 1)
    subnormal = (mantissa + (half - 1) + (truncated & 1)) >> shift
    finite = b.select(magnitude < 0x38800000, subnormal, normal)
    special = b.select(magnitude > 0x7F800000, ((magnitude >> 13) & 0x3FF) | 0x7E00, _all(b, 0x7C00, bits))
    return ((bits >> 16) & 0x8000) | b.select(magnitude >= 0x47800000, special, finite)


def half_to_float(b: Builder, bits: Value) -> Value:
    """fp16 bits in a u32 to f32 of the same shape, exactly."""
    type_ = vector_type(f32, lanes_of(bits.type))
    magnitude = bits & 0x7FFF
    normal = (magnitude << 13) + b.select(magnitude >= 0x7C00, _all(b, 0x70000000, bits), _all(b, 0x38000000, bits))
    # A subnormal is a multiple of 2**-24; both steps are exact.
    subnormal = b.bitcast(b.cast(magnitude, f32) * 2.0**-24, bits.type)  # type: ignore[arg-type]
    return b.bitcast(((bits & 0x8000) << 16) | b.select(magnitude < 0x400, subnormal, normal), type_)


def _all(b: Builder, value: int, like: Value) -> Value:
    return b.splat(b.const(value, u32), lanes_of(like.type))
