"""Writes into a cache with NumPy, if no kernel can run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.ops.kvcache.problem import QUANTISED, TINY, AppendProblem
from aule.ops.rope.tables import Rope, rotate
from aule.ops.shared.elements import as_float, stored
from aule.view import TensorView

Array = npt.NDArray[Any]


def append(problem: AppendProblem, views: Mapping[str, TensorView]) -> None:
    """Write new rows into the caches. ``views`` are host arrays, as for `append_problem`."""
    pages, page = views["k_cache"].shape[:2]
    slots, positions = views["places"].storage
    valid = (slots >= 0) & (slots < pages * page)
    slots, positions = slots[valid], positions[valid]
    for name in ("k", "v") if problem.value_dim else ("k",):
        view = views[name]
        rows: Array = view.storage.reshape(problem.tokens, *view.shape[2:])[valid]
        to = slots // page, slots % page
        cache: Array = views[f"{name}_cache"].storage
        rotated = name == "k" and problem.rotary_dim
        if not rotated and problem.quantize is None:
            cache[to] = rows
            continue
        values = np.ascontiguousarray(as_float(rows, problem.dtype), np.float32)
        if rotated:
            cos, sin = (as_float(views[angle].storage, views[angle].dtype) for angle in ("cos", "sin"))
            at = np.clip(positions, 0, len(cos) - 1)
            rope = Rope("f32", problem.rotary_dim, problem.interleaved)
            values = rotate(rope, values, cos[at][:, None], sin[at][:, None])
        if problem.quantize is None:
            cache[to] = stored(values, problem.dtype)
        else:
            cache[to], views[f"{name}_scale"].storage[to] = quantised(values, problem.quantize)


def quantised(values: Array, quantize: str) -> tuple[Array, Array]:
    """Quantise rows to int8 or fp8 e4m3 bits; returns them and their scales."""
    elem, limit = QUANTISED[quantize]
    with np.errstate(all="ignore"):
        largest = np.abs(values).max(-1, initial=0)
        nonfinite, tiny = ~np.isfinite(largest), largest < TINY
        scaled = values * (np.float32(limit) / largest)[..., None]
        scaled[nonfinite | tiny] = 0
        scales = np.where(tiny, 0, largest / np.float32(limit)).astype(np.float32)
    scales[nonfinite] = np.nan
    if elem == "i8":
        return np.clip(np.floor(scaled + np.float32(0.5)), -127, 127).astype(np.int8), scales
    return _e4m3(scaled), scales


def _e4m3(values: Array) -> Array:
    """Round numbers within ±448 to fp8 e4m3 bits, to nearest with ties to even."""
    bits = values.view(np.uint32)
    size, magnitude = bits & np.uint32(0x7FFFFFFF), np.abs(values)
    # `append.py` explains the arithmetic.
    normal = (size + np.uint32(0x7FFFF) + (size >> np.uint32(20) & np.uint32(1)) >> np.uint32(20)) - np.uint32(960)
    small = (magnitude + np.float32(16384)).view(np.uint32) - np.uint32(0x46800000)
    code: Array = np.where(magnitude < 2.0**-6, small, np.minimum(normal, 0x7E)) | (bits >> np.uint32(24)) & np.uint32(
        0x80
    )
    return code.astype(np.uint8)


def copy_pages(pairs: Array, arrays: Mapping[str, Array]) -> None:
    """Copy pages of arrays ``[layers, pages, ...]``; ``pairs`` as for `plan_copy`."""
    for array in arrays.values():
        array[:, pairs[:, 1]] = array[:, pairs[:, 0]]
