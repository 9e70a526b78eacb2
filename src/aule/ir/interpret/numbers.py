"""NumPy implementations of the operations of ``ops.py``, for the interpreter.

A value in registers is an array with one number per lane (a vector: one row per vector lane). NumPy lacks bf16, so bf16
values are float32 arrays, rounded to bf16 after every operation: float32 has more than twice the digits of bf16, so
rounding twice gives the same as rounding once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.errors import KernelError
from aule.ir.types import Scalar, ValueType, Vector, element, f32, f64

Array = npt.NDArray[Any]
Function = Callable[..., Array]

_DTYPES = {"bool": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64} | {
    f"{kind}{bits}": np.dtype(f"{kind}{bits // 8}").type for kind in "iu" for bits in (8, 16, 32, 64)
}


def register_dtype(elem: Scalar) -> np.dtype[Any]:
    """NumPy dtype of a number in a register."""
    return np.dtype(np.float32 if elem.name == "bf16" else _DTYPES[elem.name])


def memory_dtype(elem: Scalar) -> np.dtype[Any]:
    """NumPy dtype of a number in memory; bf16 is stored as bits."""
    return np.dtype(np.uint16 if elem.name == "bf16" else _DTYPES[elem.name])


def from_memory(elem: Scalar, data: Array) -> Array:
    """Convert numbers from their form in memory to that in registers."""
    return (data.astype(np.uint32) << np.uint32(16)).view(np.float32) if elem.name == "bf16" else data


def to_memory(elem: Scalar, value: Array) -> Array:
    """Convert numbers from their form in registers to that in memory."""
    return (value.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if elem.name == "bf16" else value


def round_bf16(value: Array) -> Array:
    """Round float32 or float64 to the nearest bf16, ties to even; the result is float32."""
    if value.dtype == np.float64:
        value = _round_to_odd(value)
    bits = value.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    # The carry would turn some NaNs into infinity.
    rounded = np.where(np.isnan(value), bits | np.uint32(0x400000), rounded) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def _round_to_odd(value: Array) -> Array:
    """Round float64 to float32 so that rounding again to bf16 equals a single rounding."""
    near = value.astype(np.float32)
    inexact = np.isfinite(near) & (near.astype(np.float64) != value)
    toward_zero = np.where(np.abs(near.astype(np.float64)) > np.abs(value), np.nextafter(near, np.float32(0)), near)
    return np.where(inexact, (toward_zero.view(np.uint32) | np.uint32(1)).view(np.float32), near)


def _divide_integers(a: Array, b: Array) -> Array:
    return (a - np.fmod(a, b)) // b


def _high_product(a: Array, b: Array) -> Array:
    result: Array = ((a.astype(np.uint64) * b) >> np.uint64(32)).astype(np.uint32)
    return result


def _rsqrt(x: Array) -> Array:
    return np.reciprocal(np.sqrt(x))


_ANY: dict[str, Function] = {
    "neg": np.negative, "abs": np.abs, "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_INTEGER: dict[str, Function] = _ANY | {
    "not": np.invert, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift, "div": _divide_integers, "rem": np.fmod,
    "min": np.minimum, "max": np.maximum, "mulhi": _high_product,
}  # fmt: skip
# fmin and fmax return the number if the other operand is NaN, as devices do.
_FLOAT: dict[str, Function] = _ANY | {
    "div": np.divide, "min": np.fmin, "max": np.fmax, "exp2": np.exp2, "log2": np.log2, "sqrt": np.sqrt,
    "rsqrt": _rsqrt, "rcp": np.reciprocal, "floor": np.floor, "small": np.positive, "sin": np.sin, "cos": np.cos,
}  # fmt: skip


def function(opcode: str, elem: Scalar) -> Function:
    """The NumPy function of a unary, binary, ternary or compare operation on operands of type ``elem``."""
    if opcode == "select":
        return np.where
    if opcode == "fma":
        return _fma(elem)
    if opcode == "dot_pairs":
        return _dot_pairs
    plain = (_FLOAT if elem.is_float else _INTEGER)[opcode]
    if elem.name != "bf16" or opcode in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "min", "max"):
        return plain
    return lambda *args: round_bf16(plain(*args))


def _fma(elem: Scalar) -> Function:
    if elem.name == "f64":
        return lambda a, b, c: a * b + c
    narrow = cast_function(f64, elem)
    return lambda a, b, c: narrow(a.astype(np.float64) * b + c)  # the product of two float32 is exact in float64


def _dot_pairs(a: Array, b: Array, c: Array) -> Array:
    """Add the product of the high halves first, as AVX512_BF16 does; products are exact, sums are rounded."""
    a, b = np.broadcast_arrays(a, b)
    high, fma = np.uint32(0xFFFF0000), _fma(f32)
    for first, second in ((a & high, b & high), (a << np.uint32(16), b << np.uint32(16))):
        c = fma(first.view(np.float32), second.view(np.float32), c)
    return c


def e4m3_halves(words: Array) -> Array:
    """Convert the e4m3 bytes of words to f16: a row per byte."""
    magnitude = np.arange(128)
    exponent, mantissa = magnitude >> 3, magnitude & 7
    size = np.where(exponent > 0, (8 + mantissa) * np.exp2(exponent - 10.0), mantissa * 2.0**-9)
    size[127] = np.nan
    table = np.concatenate([size, -size]).astype(np.float16)
    result: Array = table[words >> (8 * np.arange(4, dtype=np.uint32))[:, None] & 0xFF]
    return result


def cast_function(source: Scalar, target: Scalar) -> Function:
    """The function that converts numbers from one element type to another."""
    if target.name == "bf16":
        if source.name in ("bf16", "f16", "f32"):
            return lambda x: round_bf16(x.astype(np.float32))
        return lambda x: round_bf16(x.astype(np.float64))
    dtype = register_dtype(target)
    return lambda x: x.astype(dtype)


def bitcast_function(source: ValueType, target: ValueType) -> Function:
    """The function that reinterprets bits as another type; lane 0 of a vector holds the lowest bits."""
    elem_in, elem_out = element(source), element(target)
    dtype = memory_dtype(elem_out)
    vector = isinstance(target, Vector)

    def run(value: Array) -> Array:
        rows = to_memory(elem_in, value).reshape(-1, value.shape[-1])
        bits = np.ascontiguousarray(rows.T).view(dtype).T
        result = from_memory(elem_out, np.ascontiguousarray(bits))
        return result if vector else result[0]

    return run


def constant(value: float | int | bool, elem: Scalar, lanes: int) -> Array:
    """A constant or a scalar argument, in every lane."""
    if elem.is_int and not -(1 << 63) <= int(value) < (1 << 64):
        raise KernelError(f"expected a number of type {elem}, got {value}")
    if elem.name == "bf16":
        number = round_bf16(np.array([value], np.float64))
    elif elem.is_int:
        # Through 64 bits: kernels wrap, but NumPy 2 refuses numbers that do not fit a narrow type.
        number = np.array([int(value)], np.int64 if int(value) < (1 << 63) else np.uint64).astype(register_dtype(elem))
    else:
        number = np.array([value], register_dtype(elem))
    return np.repeat(number, lanes)


def atomic_function(kind: str) -> Function:
    """The function ``f(old, operand)`` of an atomic."""
    if kind == "exchange":
        return lambda old, new: new
    return _INTEGER[kind]
