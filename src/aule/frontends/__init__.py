"""Front ends, one per kind of array, tried in order (ADD A FRONT END HERE).

A front end is a module with ``accepts(array) -> bool`` and ``flash_attention``, ``flash_attention_varlen``,
``flex_attention``, ``max_scores``, ``decode``, ``merge_states``, ``row_op`` (every row operation), ``launch`` and
``to_precision``; `aule.frontends.dlpack` is the shortest. `front_end` imports only those that the array could belong
to: a tensor exists only when torch is loaded.
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
    from aule.frontends.torch import entry

    return entry


def _dlpack() -> ModuleType:
    from aule.frontends import dlpack

    return dlpack


FRONT_ENDS: tuple[tuple[Callable[[], ModuleType], str | None], ...] = (
    (_numpy, None),
    (_torch, "torch"),
    (_dlpack, None),
)
"""Functions that import each front end, and the framework that must be loaded for it to apply. They use import
statements because PyTorch's compiler can trace these, but not importlib."""

by_type: dict[type, ModuleType] = {}
"""Front ends found so far."""


def front_end(array: object, op: str = "flash_attention") -> ModuleType:
    """The front end of an array, found once per type. ``op`` is the public function, for messages."""
    found = by_type.get(type(array))
    if found is None:
        found = by_type[type(array)] = _find(array, op)
    return found


def maker(device: object, dtype: object, op: str) -> ModuleType:
    """The front end of new arrays: PyTorch's if a device or a dtype of torch is named, else NumPy's."""
    if device is None and type(dtype).__module__ != "torch":
        return _numpy()
    try:
        return _torch()
    except ModuleNotFoundError as error:
        raise without_torch(op, error) from None


def mask_evaluator(block_mask: Any) -> Any:
    """The function of a `BlockMask` on NumPy arrays."""
    if "torch" in sys.modules:
        from aule.frontends.torch.flex import masks

        return masks.mask_evaluator(block_mask)
    from aule.frontends import numpy_flex

    return numpy_flex.mask_evaluator(block_mask)


def without_torch(op: str, error: ModuleNotFoundError) -> Exception:
    """The error for a missing torch; an error about another module is returned unchanged."""
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
