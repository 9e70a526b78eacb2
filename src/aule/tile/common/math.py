"""Mathematical functions built from operations of the kernel language."""

from __future__ import annotations

import math

from aule.ir import Builder, Value
from aule.ir.types import Scalar, Vector, bf16, element, f16, f32, f64, i8, i16, u16, u32

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
ROOT_HALF = 0.7071067811865476
ROOT_TWO_PI_INVERSE = 0.3989422804014327
LOWEST = -3.4028234663852886e38
"""The lowest finite float32."""
NEG_INF = float("-inf")
EXPONENTS = {f16: 0x7C00, bf16: 0x7F80, f32: 0x7F800000}
"""The exponent bits, all of which are set in Inf and NaN."""


def lowest(elem: Scalar) -> float:
    """The lowest finite number of a type."""
    return -1.7976931348623157e308 if elem == f64 else LOWEST


def fold(b: Builder, kind: str, values: list[Value]) -> Value:
    """Combine values in a tree, so that the chain of dependent operations is short."""
    while len(values) > 1:
        pairs = [b.binary(kind, x, y) for x, y in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def fold_lanes(b: Builder, kind: str, vector: Value) -> Value:
    """Combine the lanes of a vector, halves first."""
    lanes = vector.type.lanes if isinstance(vector.type, Vector) else 1
    while lanes > 1:
        lanes //= 2
        low = b.permute(vector, None, tuple(range(lanes)))
        high = b.permute(vector, None, tuple(range(lanes, 2 * lanes)))
        vector = b.binary(kind, low, high)
    return vector


def tanh(b: Builder, x: Value) -> Value:
    """Hyperbolic tangent to a few ulp.

    From 0.6 on ``1 - 2 / (exp(2|x|) + 1)`` loses nothing; below, where it would cancel, a polynomial serves, or in fp64
    a fraction. Hardware tanh may have 11 bits, too few: an error in a score is multiplied by the cap.
    """
    size = b.abs(x)
    far = b.fma(b.rcp(b.exp2(size * (2.0 * LOG2E)) + 1.0), -2.0, 1.0)
    square = x * x
    if element(x.type) == f64:
        # Lambert's continued fraction: relative error below 1e-17 for |x| <= 0.6.
        fraction = square * 0.0 + 17.0
        for odd in range(15, 0, -2):
            fraction = square / fraction + float(odd)
        near = x / fraction
    else:
        # Minimax polynomial of tanh(x) / x: relative error 2.5e-9 for |x| <= 0.6.
        factor = b.fma(square, _TANH[-1], _TANH[-2])
        for coefficient in _TANH[-3::-1]:
            factor = b.fma(factor, square, coefficient)
        near = factor * x
    return b.select(size < 0.6, near, b.select(x < 0.0, -far, far))


_TANH = (1.0, -0.33333284, 0.13331686, -0.053768493, 0.020753028, -0.0058515524)


def from_e4m3(b: Builder, x: Value) -> Value:
    """fp8 e4m3 in bytes (u8) as float32; a scalar or a vector. Exact, including subnormal numbers and NaN."""

    def shaped(elem: Scalar) -> Scalar | Vector:
        return Vector(elem, x.type.lanes) if isinstance(x.type, Vector) else elem

    # Sign-extended and shifted, a byte has sign, exponent (4 bits) and fraction (3 bits) where fp16 has them, with bias
    # 7 instead of 15. Conversions of fp16 keep subnormal numbers in every processor mode.
    bits = b.cast(b.cast(b.bitcast(x, shaped(i8)), i16) << 7, u16) & 0xBF80
    number = b.cast(b.bitcast(bits, shaped(f16)), f32) * 256.0
    return b.select(b.eq(x & 0x7F, 0x7F), b.const(float("nan"), f32), number)


def is_finite(b: Builder, x: Value) -> Value:
    """Whether a number is neither Inf nor NaN, by its bits: drivers may assume that floats are finite."""
    return (b.bitcast(x, u32) & 0x7F800000) < 0x7F800000


def sigmoid(b: Builder, x: Value) -> Value:
    """``1 / (1 + exp(-x))``."""
    return b.rcp(b.exp2(x * -LOG2E) + 1.0)


def normal(b: Builder, x: Value) -> tuple[Value, Value]:
    """The normal distribution function, and ``exp(-x**2 / 2)``, its density up to a factor.

    fp32 uses Abramowitz and Stegun 7.1.26, fp64 a series and a continued fraction. Absolute errors are below 3e-7 and
    1e-15.
    """
    bell = b.exp2(x * x * (-0.5 * LOG2E))
    size = b.abs(x)
    if element(x.type) == f64:
        tail = _normal_tail(b, size, bell)
    else:
        t = b.rcp(size * (0.3275911 * ROOT_HALF) + 1.0)
        series = t * 0.0 + 1.061405429
        for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
            series = b.fma(series, t, coefficient)
        tail = series * t * bell * 0.5
    return b.select(x < 0.0, tail, 1.0 - tail), bell


def erf(b: Builder, x: Value) -> Value:
    """The error function, with relative errors below 1e-6 in fp32 and 1e-13 in fp64.

    Near zero, where `normal` would cancel, a Taylor series.
    """
    square, terms = x * x, len(_ERF) if element(x.type) == f64 else 6
    near = square * 0.0 + _ERF[terms - 1]
    for coefficient in _ERF[terms - 2 :: -1]:
        near = b.fma(near, square, coefficient)
    below, _ = normal(b, x * (2.0 * ROOT_HALF))
    return b.select(b.abs(x) < 0.5, near * x, below * 2.0 - 1.0)


_ERF = tuple((-1) ** n * 2.0 / (math.sqrt(math.pi) * math.factorial(n) * (2 * n + 1)) for n in range(13))


def _normal_tail(b: Builder, x: Value, bell: Value) -> Value:
    """The probability of exceeding a number >= 0, in fp64.

    Below 3 one half minus a series of positive terms, ``x + x**3/3 + x**5/(3*5) ...``; above, where the tail is small
    against one half, Laplace's continued fraction.
    """
    near = b.min(x, 3.0)
    square = near * near
    total = square * 0.0 + 1.0
    for odd in range(81, 1, -2):
        total = b.fma(square / float(odd), total, 1.0)
    below = 0.5 - near * total * bell * ROOT_TWO_PI_INVERSE
    far = b.max(x, 3.0)
    fraction = far
    for n in range(80, 0, -1):
        fraction = far + float(n) / fraction
    return b.select(x < 3.0, below, bell * ROOT_TWO_PI_INVERSE / fraction)


def overflowing(b: Builder, word: Value, elem: Scalar) -> Value:
    """Nonzero if the fp32 number in a word, or one of its two of 16 bits, is Inf or NaN."""
    each = 0x10001 if elem.bits == 16 else 1
    exponent = EXPONENTS[elem]
    # An exponent of all ones carries into the sign bit, which the mask has cleared.
    return ((word & exponent * each) + (exponent & -exponent) * each) & (each << (elem.bits - 1))
