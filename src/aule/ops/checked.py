"""Options of a call as numbers, flags and names, or errors that say what was wrong."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from aule.errors import InvalidArgumentError

LARGEST = 1e38
"""What numbers that kernels have as float32, some of them times log2(e), stay within."""

_TEXT = (str, bytes, bytearray)
_NO_VALUE = (TypeError, ValueError, RuntimeError)
"""What Python, NumPy and PyTorch raise where something has no such value; the last for a tensor of several."""


def checked_number(op: str, name: str, value: Any) -> float:
    """A number as a float; text is none, though Python's float takes it."""
    try:
        if not isinstance(value, _TEXT):
            return float(value)
    except OverflowError:  # an int that no float has: bounds are the caller's
        return math.inf if value > 0 else -math.inf
    except _NO_VALUE:
        pass
    raise InvalidArgumentError(
        f"[{op}] expected {name} to be a number or None, got {type(value).__name__}; pass a Python float"
    )


def number_or_nan(value: Any) -> float:
    """A number as a float, and NaN for what is none, text included: callers refuse it together with what is outside of
    their bounds."""
    try:
        return math.nan if isinstance(value, _TEXT) else float(value)
    except (*_NO_VALUE, OverflowError):
        return math.nan


def checked_integer(op: str, name: str, value: Any, remedy: str) -> int:
    """An integer of any kind. bool is one to Python, but window=True is a slip, not a window of one key."""
    if not isinstance(value, (bool, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InvalidArgumentError(f"[{op}] expected {name} to be an int or None, got {value!r}; {remedy}")


def checked_flag(op: str, name: str, value: Any) -> bool:
    """A truth value: text is always true, and an array has none."""
    try:
        if not isinstance(value, _TEXT):
            return bool(value)
    except _NO_VALUE:
        pass
    remedy = "pass a bool, and a mask as mask=" if name == "causal" else "pass a bool"
    raise InvalidArgumentError(f"[{op}] expected {name} to be True or False, got {type(value).__name__}; {remedy}")


def checked_choice(op: str, name: str, value: Any, choices: Sequence[str], remedy: str) -> str:
    """One of some names."""
    if isinstance(value, str) and value in choices:
        return value
    *most, last = (repr(choice) for choice in choices)
    raise InvalidArgumentError(f"[{op}] expected {name} {', '.join(most)} or {last}, got {value!r}; {remedy}")


def not_plain(op: str, options: Any) -> InvalidArgumentError:
    """The error for options none of which is wrong by itself, but some of which are no plain values."""
    return InvalidArgumentError(f"[{op}] expected numbers, flags and names as options, got {options}; convert them")
