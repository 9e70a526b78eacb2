"""Normalisation and its gradient in NumPy, in the arrays' precision: the reference for float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aule.ops.norm.problem import NormProblem
from aule.ops.shared.elements import Array


def norm(problem: NormProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]) -> dict[str, Array]:
    """``y`` and, with a residual, ``h``, the sum that was normalised."""
    x = arrays["x"]
    if "residual" in arrays:
        x = x + arrays["residual"]
    scaled = _normalised(problem, x)[0]
    if "weight" in arrays:
        scaled = scaled * arrays["weight"]
    if "bias" in arrays:
        scaled = scaled + arrays["bias"]
    results = {"y": scaled, "h": x}
    return {name: results[name] for name in wanted}


def norm_gradient(problem: NormProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]) -> dict[str, Array]:
    """``dx`` and, if wanted, ``dweight`` and ``dbias``."""
    x, dy = arrays["h" if "h" in arrays else "x"], arrays["dy"]
    scaled, scale = _normalised(problem, x)
    inner = dy * arrays["weight"] if "weight" in arrays else dy
    across = inner - scaled * np.mean(inner * scaled, axis=-1, keepdims=True)
    if problem.center:
        across = across - np.mean(inner, axis=-1, keepdims=True)
    results = {"dx": across * scale}
    if "dh" in arrays:
        results["dx"] = results["dx"] + arrays["dh"]
    axes = tuple(range(x.ndim - 1))
    if "dweight" in wanted:
        results["dweight"] = np.sum(dy * scaled, axis=axes)
    if "dbias" in wanted:
        results["dbias"] = np.sum(dy, axis=axes)
    return {name: results[name] for name in wanted}


def _normalised(problem: NormProblem, x: Array) -> tuple[Array, Array]:
    """Rows with mean square one, and their scale."""
    if problem.center:
        x = x - np.mean(x, axis=-1, keepdims=True)
        x = x - np.mean(x, axis=-1, keepdims=True)  # the rest that rounding a large mean leaves
    scale = 1 / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + x.dtype.type(problem.eps))
    return x * scale, scale
