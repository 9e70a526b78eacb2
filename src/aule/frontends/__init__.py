"""ADD A FRONT END HERE: kinds of arrays, tried in order.

A front end is a module with ``accepts(array) -> bool`` and one function per op. `front_end` imports none that the
array could not belong to: an array of torch exists only when torch is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from aule.errors import BackendUnavailableError, InvalidDtypeError


def _numpy() -> ModuleType:
    from aule.frontends import numpy

    return numpy


def _torch() -> ModuleType:
    from aule.frontends import torch

    return torch


def _dlpack() -> ModuleType:
    from aule.frontends import dlpack

    return dlpack


FRONT_ENDS: tuple[tuple[Callable[[], ModuleType], str | None], ...] = (
    (_numpy, None),
    (_torch, "torch"),
    (_dlpack, None),
)
"""What imports each front end, and the framework that must be loaded already for it to apply. By import statements,
because PyTorch's compiler follows a first call through them, but not through importlib."""


by_type: dict[type, ModuleType] = {}
"""Front ends found so far."""


def front_end(array: object, op: str = "flash_attention") -> ModuleType:
    """The front end that serves an array; found once per type. ``op`` is the public function, for messages."""
    found = by_type.get(type(array))
    if found is None:
        found = by_type[type(array)] = _find(array, op)
    return found


def maker(device: Any, dtype: Any, op: str) -> ModuleType:
    """The front end of new arrays: PyTorch's where a device or a dtype of it is named, else NumPy's."""
    if device is None and type(dtype).__module__ != "torch":
        return _numpy()
    try:
        return _torch()
    except ModuleNotFoundError as error:
        raise without_torch(op, error) from None


def without_torch(op: str, error: ModuleNotFoundError) -> Exception:
    """What to raise where PyTorch could not be imported; any other module that is missing is told as it is."""
    if error.name != "torch":
        return error
    return BackendUnavailableError("torch", f"[{op}] expected PyTorch, got no module named torch; pip install torch")


def _find(array: object, op: str) -> ModuleType:
    for load, framework in FRONT_ENDS:
        if framework is None or framework in sys.modules:
            candidate = load()
            if candidate.accepts(array):
                return candidate
    raise InvalidDtypeError(
        f"[{op}] expected NumPy arrays, torch tensors or arrays with __dlpack__, got "
        f"{type(array).__name__}; convert with numpy.asarray"
    )
