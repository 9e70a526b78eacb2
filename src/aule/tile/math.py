"""Functions that the kernel language builds from its operations."""

from __future__ import annotations

from aule.ir import Builder, Value
from aule.ir.types import Scalar, Vector, bf16, element, f16, f32, f64, i8, i16, u16, u32

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LOWEST = -3.4028234663852886e38
"""The lowest finite float32."""
NEG_INF = float("-inf")
EXPONENTS = {f16: 0x7C00, bf16: 0x7F80, f32: 0x7F800000}
"""The bits of an exponent, all of which are set in Inf and NaN."""


def lowest(elem: Scalar) -> float:
    """The lowest finite number of a type that scores are computed in."""
    return -1.7976931348623157e308 if elem == f64 else LOWEST


def fold(b: Builder, kind: str, values: list[Value]) -> Value:
    """Combine values two by two, so that the chain of dependent operations is short."""
    while len(values) > 1:
        pairs = [b.binary(kind, x, y) for x, y in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def tanh(b: Builder, x: Value) -> Value:
    """Hyperbolic tangent to a few ulp.

    From 0.6 on ``1 - 2 / (exp(2|x|) + 1)`` loses nothing; below, where it would cancel, a fraction of two polynomials
    serves. Hardware tanh (11 bits on NVIDIA) is not good enough: an
    error in a score is multiplied by the cap.
    """
    size = b.abs(x)
    far = 1.0 - 2.0 * b.rcp(b.exp2(size * (2.0 * LOG2E)) + 1.0)
    square = x * x
    if element(x.type) == f64:
        # Lambert's continued fraction to its end in fp64: relative error below 1e-17 for |x| <= 0.6.
        fraction = square * 0.0 + 17.0
        for odd in range(15, 0, -2):
            fraction = square / fraction + float(odd)
        near = x / fraction
    else:
        # The same, cut after the ninth: relative error below 1e-8 for |x| <= 0.6.
        numerator = ((square + 105.0) * square + 945.0) * x
        denominator = (square * 15.0 + 420.0) * square + 945.0
        near = numerator / denominator
    return b.select(size < 0.6, near, b.select(x < 0.0, -far, far))


def from_e4m3(b: Builder, x: Value) -> Value:
    """Bytes (u8) that hold fp8 e4m3, as float32; a scalar or a vector. Exact, subnormal numbers and NaN included."""

    def shaped(elem: Scalar) -> Scalar | Vector:
        return Vector(elem, x.type.lanes) if isinstance(x.type, Vector) else elem

    # Widened with its sign and shifted, a byte has the sign, four bits of exponent and three of the fraction where fp16
    # has them; the bias is 7 instead of 15. Conversions of fp16 keep subnormal numbers in every mode of a processor.
    bits = b.cast(b.cast(b.bitcast(x, shaped(i8)), i16) << 7, u16) & 0xBF80
    number = b.cast(b.bitcast(bits, shaped(f16)), f32) * 256.0
    return b.select(b.eq(x & 0x7F, 0x7F), b.const(float("nan"), f32), number)


def is_finite(b: Builder, x: Value) -> Value:
    """False for Inf and NaN, by the bits: drivers may assume that floats are finite."""
    return (b.bitcast(x, u32) & 0x7F800000) < 0x7F800000


def overflowing(b: Builder, word: Value, elem: Scalar) -> Value:
    """Other than 0 where the fp32 number of a word, or one of its two of 16 bits, is Inf or NaN."""
    each = 0x10001 if elem.bits == 16 else 1
    exponent = EXPONENTS[elem]
    # An exponent of ones carries into the bit of the sign, which the mask has cleared.
    return ((word & exponent * each) + (exponent & -exponent) * each) & (each << (elem.bits - 1))
