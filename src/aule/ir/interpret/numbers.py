"""How NumPy computes each operation, exactly as ``ops.py`` says. Used by the interpreter.

A value in registers is an array with one number per lane (a vector: one row per vector lane). NumPy has no bf16, so
bf16 lives in float32 arrays that hold only bf16 numbers, rounded after every operation: float32 keeps more than twice
the digits of bf16, so rounding twice gives the same as rounding once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.errors import KernelError
from aule.ir.types import Scalar, ValueType, Vector, element

Array = npt.NDArray[Any]
Function = Callable[..., Array]

_DTYPES = {"bool": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64} | {
    f"{kind}{bits}": np.dtype(f"{kind}{bits // 8}").type for kind in "iu" for bits in (8, 16, 32, 64)
}


def register_dtype(elem: Scalar) -> np.dtype[Any]:
    """NumPy's type of a number in a register."""
    return np.dtype(np.float32 if elem.name == "bf16" else _DTYPES[elem.name])


def memory_dtype(elem: Scalar) -> np.dtype[Any]:
    """NumPy's type of a number in memory: bf16 is its bits."""
    return np.dtype(np.uint16 if elem.name == "bf16" else _DTYPES[elem.name])


def from_memory(elem: Scalar, data: Array) -> Array:
    """Registers from memory."""
    return (data.astype(np.uint32) << np.uint32(16)).view(np.float32) if elem.name == "bf16" else data


def to_memory(elem: Scalar, value: Array) -> Array:
    """Memory from registers."""
    return (value.view(np.uint32) >> np.uint32(16)).astype(np.uint16) if elem.name == "bf16" else value


def round_bf16(value: Array) -> Array:
    """Round float32 or float64 to the nearest bf16, ties to even; the result is float32."""
    if value.dtype == np.float64:
        value = _round_to_odd(value)
    bits = value.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    # The carry would turn some NaN into infinity.
    rounded = np.where(np.isnan(value), bits | np.uint32(0x400000), rounded) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def _round_to_odd(value: Array) -> Array:
    """float64 to float32 such that a further rounding to bf16 gives what one rounding would."""
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
# fmin and fmax return the number when the other operand is NaN, as the devices do.
_FLOAT: dict[str, Function] = _ANY | {
    "div": np.divide, "min": np.fmin, "max": np.fmax, "exp2": np.exp2, "log2": np.log2, "sqrt": np.sqrt,
    "rsqrt": _rsqrt, "rcp": np.reciprocal, "floor": np.floor, "small": np.positive, "sin": np.sin, "cos": np.cos,
}  # fmt: skip


def function(opcode: str, elem: Scalar) -> Function:
    """The NumPy function of a unary, binary, ternary or comparing operation on operands of type ``elem``."""
    if opcode == "select":
        return np.where
    if opcode == "fma":
        return _FMA[elem.name]
    if opcode == "dot_pairs":
        return _dot_pairs
    plain = (_FLOAT if elem.is_float else _INTEGER)[opcode]
    if elem.name != "bf16" or opcode in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "min", "max"):
        return plain
    return lambda *args: round_bf16(plain(*args))


def _fma_f64(a: Array, b: Array, c: Array) -> Array:
    return a * b + c


def _fma_f32(a: Array, b: Array, c: Array) -> Array:
    # The product of two float32 is exact in float64.
    result: Array = (a.astype(np.float64) * b + c).astype(np.float32)
    return result


def _fma_f16(a: Array, b: Array, c: Array) -> Array:
    result: Array = (a.astype(np.float64) * b + c).astype(np.float16)
    return result


def _fma_bf16(a: Array, b: Array, c: Array) -> Array:
    return round_bf16(a.astype(np.float64) * b + c)


_FMA: dict[str, Function] = {"f64": _fma_f64, "f32": _fma_f32, "f16": _fma_f16, "bf16": _fma_bf16}


def _dot_pairs(a: Array, b: Array, c: Array) -> Array:
    """The second products first, as AVX512_BF16 has it; every product is exact, every sum rounded."""
    a, b = np.broadcast_arrays(a, b)
    high = np.uint32(0xFFFF0000)
    for first, second in ((a & high, b & high), (a << np.uint32(16), b << np.uint32(16))):
        c = _fma_f32(first.view(np.float32), second.view(np.float32), c)
    return c


def e4m3_halves(words: Array) -> Array:
    """A row of f16 for each byte."""
    magnitude = np.arange(128)
    exponent, mantissa = magnitude >> 3, magnitude & 7
    size = np.where(exponent > 0, (8 + mantissa) * np.exp2(exponent - 10.0), mantissa * 2.0**-9)
    size[127] = np.nan
    table = np.concatenate([size, -size]).astype(np.float16)
    result: Array = table[words >> (8 * np.arange(4, dtype=np.uint32))[:, None] & 0xFF]
    return result


def cast_function(source: Scalar, target: Scalar) -> Function:
    """Conversion of numbers from one element type to another."""
    if target.name == "bf16":
        if source.name in ("bf16", "f16", "f32"):
            return lambda x: round_bf16(x.astype(np.float32))
        return lambda x: round_bf16(x.astype(np.float64))
    dtype = register_dtype(target)
    return lambda x: x.astype(dtype)


def bitcast_function(source: ValueType, target: ValueType) -> Function:
    """The same bits as another type; lane 0 of a vector holds the lowest bits."""
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
        # Through 64 bits: the narrow types of NumPy 2 refuse what does not fit, and a kernel wraps.
        number = np.array([int(value)], np.int64 if int(value) < (1 << 63) else np.uint64).astype(register_dtype(elem))
    else:
        number = np.array([value], register_dtype(elem))
    return np.repeat(number, lanes)


def atomic_function(kind: str) -> Function:
    """``f(old, operand)`` of a read-modify-write."""
    if kind == "exchange":
        return lambda old, new: new
    table: dict[str, Function] = {
        "add": np.add, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    return table[kind]
