"""Combines the results of attention to two disjoint sets of keys with NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def merge(o_a: Array, lse_a: Array, o_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Compute `aule.merge_states` of float arrays; ``lse`` has the shape of ``o`` without the last axis."""
    with np.errstate(all="ignore"):
        lse = np.logaddexp(lse_a, lse_b)
        # A row without keys on either side: exp(-inf + inf) would be NaN.
        level = np.where(lse == -np.inf, 0, lse)
        weight_a, weight_b = np.exp(lse_a - level)[..., None], np.exp(lse_b - level)[..., None]
        # Select rather than multiply by 0: a side without keys may hold NaN.
        return np.where(weight_a != 0, o_a * weight_a, 0) + np.where(weight_b != 0, o_b * weight_b, 0), lse
