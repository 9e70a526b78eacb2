"""A linear layer behind a normalisation and its gradient on NumPy: the reference when arrays are float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.ops.linear.problem import LayerNormLinearProblem
from aule.ops.norm.numpy_norm import norm, norm_gradient

Array = npt.NDArray[Any]
_NORM = {"x": "x", "weight_norm": "weight", "bias_norm": "bias"}
"""Our names of the normalisation's operands, and its own."""


def layer_norm_linear(
    problem: LayerNormLinearProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]
) -> dict[str, Array]:
    """``y``."""
    y = _normalised(problem, arrays) @ arrays["weight"].T
    return {name: y + arrays["bias"] if "bias" in arrays else y for name in wanted}


def layer_norm_linear_gradient(
    problem: LayerNormLinearProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]
) -> dict[str, Array]:
    """Those of ``dx``, ``dweight_norm``, ``dbias_norm``, ``dweight`` and ``dbias`` that are wanted."""
    dy = arrays["dy"]
    flat = dy.reshape(-1, problem.features)
    results = {}
    inner = {theirs: arrays[ours] for ours, theirs in _NORM.items() if ours in arrays} | {"dy": dy @ arrays["weight"]}
    found = norm_gradient(problem.norm, inner, tuple(f"d{_NORM[x[1:]]}" for x in wanted if x[1:] in _NORM))
    for ours, theirs in _NORM.items():
        if f"d{ours}" in wanted:
            results[f"d{ours}"] = found[f"d{theirs}"]
    if "dweight" in wanted:
        results["dweight"] = flat.T @ _normalised(problem, arrays).reshape(-1, problem.length)
    if "dbias" in wanted:
        results["dbias"] = np.sum(flat, axis=0)
    return results


def _normalised(problem: LayerNormLinearProblem, arrays: Mapping[str, Array]) -> Array:
    given = {theirs: arrays[ours] for ours, theirs in _NORM.items() if ours in arrays}
    return norm(problem.norm, given, ("y",))["y"]
