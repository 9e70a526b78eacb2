"""A linear layer after a normalisation, and its gradient, in NumPy: the reference for float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aule.ops.linear.problem import LayerNormLinearProblem
from aule.ops.norm.numpy_norm import norm, norm_gradient
from aule.ops.shared.elements import Array

_NORM = {"x": "x", "weight_norm": "weight", "bias_norm": "bias"}
"""Our names of the normalisation's operands, and the names it uses itself."""


def layer_norm_linear(
    problem: LayerNormLinearProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]
) -> dict[str, Array]:
    """``y``."""
    y = _normalised(problem, arrays) @ arrays["weight"].T
    return {name: y + arrays["bias"] if "bias" in arrays else y for name in wanted}


def layer_norm_linear_gradient(
    problem: LayerNormLinearProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]
) -> dict[str, Array]:
    """The wanted of ``dx``, ``dweight_norm``, ``dbias_norm``, ``dweight`` and ``dbias``."""
    dy = arrays["dy"]
    flat = dy.reshape(-1, problem.features)
    names = {f"d{ours}": f"d{theirs}" for ours, theirs in _NORM.items() if f"d{ours}" in wanted}
    inner = _norm_arrays(arrays) | {"dy": dy @ arrays["weight"]}
    found = norm_gradient(problem.norm, inner, tuple(names.values()))
    results = {ours: found[theirs] for ours, theirs in names.items()}
    if "dweight" in wanted:
        results["dweight"] = flat.T @ _normalised(problem, arrays).reshape(-1, problem.length)
    if "dbias" in wanted:
        results["dbias"] = np.sum(flat, axis=0)
    return results


def _normalised(problem: LayerNormLinearProblem, arrays: Mapping[str, Array]) -> Array:
    return norm(problem.norm, _norm_arrays(arrays), ("y",))["y"]


def _norm_arrays(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {theirs: arrays[ours] for ours, theirs in _NORM.items() if ours in arrays}
