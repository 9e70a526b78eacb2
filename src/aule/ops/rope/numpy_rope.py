"""Rotations and their gradients in NumPy, in the arrays' precision: the reference for float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aule.ops.norm.numpy_norm import norm, norm_gradient
from aule.ops.norm.problem import NormProblem
from aule.ops.rope.problem import RopeProblem
from aule.ops.shared.elements import Array


def rope(problem: RopeProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]) -> dict[str, Array]:
    """``y``, or ``dx`` of the gradient."""
    if problem.inverse:
        return {"dx": _rotated(problem, arrays, arrays["dy"])}
    return {"y": _rotated(problem, arrays, arrays["x"])}


def norm_rope(problem: RopeProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]) -> dict[str, Array]:
    """``y`` of a norm and a rotation."""
    return {"y": _rotated(problem, arrays, norm(_norm(problem), _norm_arrays(arrays), ("y",))["y"])}


def norm_rope_gradient(problem: RopeProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]) -> dict[str, Array]:
    """``dx`` and ``dweight`` of a norm and a rotation."""
    dy = _rotated(problem, arrays, arrays["dy"])
    return norm_gradient(_norm(problem), {**_norm_arrays(arrays), "dy": dy}, wanted)


def _norm(problem: RopeProblem) -> NormProblem:
    assert problem.eps is not None
    return NormProblem(problem.dtype, problem.shape, problem.eps, center=False)


def _norm_arrays(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: arrays[name] for name in ("x", "weight") if name in arrays}


def _rotated(problem: RopeProblem, arrays: Mapping[str, Array], x: Array) -> Array:
    cos, sin = arrays["cos"], arrays["sin"]
    if problem.positions:
        at = np.clip(arrays["position_ids"], 0, problem.positions - 1)
        cos, sin = cos[at], sin[at]
    if problem.inverse:
        sin = -sin
    n = problem.pairs
    first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if problem.interleaved else (slice(n), slice(n, 2 * n))
    a, b = x[..., first], x[..., second]
    y = x.copy()
    y[..., first] = a * cos - b * sin
    y[..., second] = b * cos + a * sin
    return y
