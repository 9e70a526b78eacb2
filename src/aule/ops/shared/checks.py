"""Checks options of a call and converts them to numbers, flags and names."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from aule.dtypes import either, usual_name
from aule.errors import InvalidArgumentError, InvalidDtypeError
from aule.view import TensorView

FLOAT_DTYPES = ("f32", "f16", "bf16", "f64")
"""dtypes of arrays of floating-point numbers."""

FLOATS = either(tuple(map(usual_name, FLOAT_DTYPES)))
"""The same, for messages."""

LARGEST = 1e38
"""Largest magnitude of numbers that kernels take as float32, some of them times log2(e)."""

_TEXT = (str, bytes, bytearray)
_NO_VALUE = (TypeError, ValueError, RuntimeError)
"""Errors of Python, NumPy and PyTorch for something that cannot be converted; PyTorch's is a RuntimeError."""


def wrong_kind(op: str, name: str, expected: str, like: str, got: object) -> InvalidDtypeError:
    """Make the error for an argument that is not the kind of array that the first one is."""
    converters = {"a NumPy array": "numpy.asarray", "a torch tensor": "torch.as_tensor"}
    remedy = f"convert it with {converters[expected]}" if expected in converters else "convert it first"
    if name == "weight" and isinstance(got, (int, tuple, list)):
        remedy = "rows are normalised along the last axis, so there is no normalized_shape"
    elif got is None:
        remedy = "pass it"
    elif name == "mask" and (callable(got) or hasattr(got, "mask_mod")):
        remedy = "call aule.flex_attention, which takes masks as functions"
    kind = expected if name == like else f"{expected} like {like}"
    return InvalidDtypeError(
        f"[{op}] expected {name} to be {kind}, got {'None' if got is None else type(got).__name__}; {remedy}"
    )


def checked_number(op: str, name: str, value: Any) -> float:
    """Convert a number to float; text is refused, though Python's float takes it."""
    try:
        if not isinstance(value, _TEXT):
            return float(value)
    except OverflowError:  # an int beyond all floats: bounds are the caller's
        return math.inf if value > 0 else -math.inf
    except _NO_VALUE:
        pass
    raise InvalidArgumentError(
        f"[{op}] expected {name} to be a number or None, got {type(value).__name__}; pass a Python float"
    )


def number_or_nan(value: Any) -> float:
    """Convert a number to float, anything else and text to NaN, which callers refuse like values out of bounds."""
    try:
        return math.nan if isinstance(value, _TEXT) else float(value)
    except (*_NO_VALUE, OverflowError):
        return math.nan


def checked_integer(op: str, name: str, value: Any, remedy: str) -> int:
    """Convert any kind of integer to int; bool is refused: window=True is a slip, not a window of one key."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InvalidArgumentError(f"[{op}] expected {name} to be an int or None, got {value!r}; {remedy}")


def checked_flag(op: str, name: str, value: Any) -> bool:
    """Convert to bool; text, which is always true, and arrays are refused."""
    try:
        if not isinstance(value, _TEXT):
            return bool(value)
    except _NO_VALUE:
        pass
    remedy = "pass a bool, and a mask as mask=" if name == "causal" else "pass a bool"
    raise InvalidArgumentError(f"[{op}] expected {name} to be True or False, got {type(value).__name__}; {remedy}")


def checked_choice(op: str, name: str, value: Any, choices: Sequence[str], remedy: str) -> str:
    """Check that a value is one of some names."""
    if isinstance(value, str) and value in choices:
        return value
    *most, last = (repr(choice) for choice in choices)
    raise InvalidArgumentError(f"[{op}] expected {name} {', '.join(most)} or {last}, got {value!r}; {remedy}")


def not_plain(op: str, options: Any) -> InvalidArgumentError:
    """The error for options that are valid one by one, but not all plain values."""
    return InvalidArgumentError(f"[{op}] expected numbers, flags and names as options, got {options}; convert them")


def checked_dropout(op: str, dropout_p: Any) -> float:
    """Check the chance to drop a weight."""
    value = math.nan if dropout_p is None else checked_number(op, "dropout_p", dropout_p)
    if not 0.0 <= value <= 1.0:
        raise InvalidArgumentError(f"[{op}] expected dropout_p in 0..1, got {dropout_p}; pass 0.0 for no dropout")
    return value


def checked_deterministic(op: str, deterministic: Any) -> bool:
    """Check the flag that asks for gradients with the same bits every time."""
    if not isinstance(deterministic, (bool, np.bool_)):
        raise InvalidArgumentError(
            f"[{op}] expected deterministic to be True or False, got {deterministic!r}; pass a bool"
        )
    return bool(deterministic)


def checked_seed(op: str, seed: Any) -> int | None:
    """Check a seed of 64 bits; None stands for a new one each time."""
    if seed is None:
        return None
    value = checked_integer(op, "seed", seed, "pass an int, or None for a new one each time")
    if not 0 <= value < 2**64:
        raise InvalidArgumentError(f"[{op}] expected a seed in 0..2**64-1, got {value}; reduce it modulo 2**64")
    return value


def checked_seed_words(op: str, view: TensorView | None) -> TensorView:
    """Check the operand that holds the two words of a seed."""
    if view is None or view.shape != (2,) or view.itemsize != 4:
        got = "None" if view is None else f"{view.dtype_name} {list(view.shape)}"
        raise InvalidArgumentError(f"[{op}] expected the two 32-bit words of a seed with dropout_p > 0, got {got}")
    return view
