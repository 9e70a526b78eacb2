"""Converts array elements for computing with NumPy, which lacks bf16: its bits are kept as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def as_float(array: Array, dtype: str) -> Array:
    """Convert fp16 and bf16 to float32; the rest is unchanged."""
    if dtype == "bf16":
        bits: Array = array.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    return array.astype(np.float32) if dtype == "f16" else array


def stored(values: Array, dtype: str) -> Array:
    """Convert float32 to the bits of bf16 if that is the dtype, to nearest with ties to even; else unchanged."""
    if dtype != "bf16":
        return values
    bits = values.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    stored: Array = np.where(np.isnan(values), np.uint32(0x7FC0), nearest)
    return stored.astype(np.uint16)
