"""Constant folding with the semantics of kernels, for the builder, passes and renderers.

Integers wrap, division truncates, and operations that the language leaves undefined are not folded.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from aule.ir.types import Scalar, f32

_DIGITS = {"bf16": 8, "f16": 11, "f32": 24, "f64": 53}
"""Significand bits of the floating-point types."""
_FORMATS = {"f16": ">e", "f32": ">f", "f64": ">d"}
"""Codes of `struct`."""


def _quotient(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


COMPARE: dict[str, Callable[[int, int], bool]] = {
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": _quotient,
    "rem": lambda x, y: x - y * _quotient(x, y),
    "min": min,
    "max": max,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "shl": lambda x, y: x << y,
    "shr": lambda x, y: x >> y,
}


def computed(opcode: str, x: int, y: int, elem: Scalar) -> int | None:
    """Fold an operation on two integers, without wrapping the result; None if it cannot be folded."""
    if opcode not in _ARITHMETIC:
        return None
    if (opcode in ("div", "rem") and y == 0) or (opcode in ("shl", "shr") and not 0 <= y < elem.bits):
        return None
    return _ARITHMETIC[opcode](x, y)


def wrap(value: int, elem: Scalar) -> int:
    """Wrap an integer to the range of its type."""
    value &= (1 << elem.bits) - 1
    return value - (1 << elem.bits) if elem.is_signed and value >> (elem.bits - 1) else value


def exact(value: float | int | bool, elem: Scalar) -> bool:
    """True if a type represents an integral value or an infinity exactly."""
    if not math.isfinite(value) or value != int(value):
        return math.isinf(value) and elem.is_float
    if elem.is_float:
        return abs(value) <= 1 << _DIGITS[elem.name]
    return wrap(int(value), elem) == value


def float_bits(value: float, elem: Scalar) -> int:
    """The bits of a number rounded to a floating-point type: to nearest even; too large numbers become infinite."""
    if elem.name == "bf16":
        bits = float_bits(value, f32)
        return bits >> 16 | 0x40 if math.isnan(value) else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    try:
        data = struct.pack(_FORMATS[elem.name], value)
    except OverflowError:
        data = struct.pack(_FORMATS[elem.name], math.copysign(math.inf, value))
    return int.from_bytes(data, "big")
