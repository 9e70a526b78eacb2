"""Softmax with dropout and its gradient in NumPy, in the arrays' precision: the reference for float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from aule.ops.shared.elements import Array
from aule.ops.softmax.dropout import keep_scale, kept
from aule.ops.softmax_dropout.problem import SoftmaxProblem


def softmax(problem: SoftmaxProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]) -> dict[str, Array]:
    """``y``."""
    weights, _ = _weights(problem, arrays)
    return {"y": _dropped(problem, arrays, weights)}


def softmax_gradient(problem: SoftmaxProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]) -> dict[str, Array]:
    """``dx``."""
    weights, counts = _weights(problem, arrays)
    dp = np.where(counts, _dropped(problem, arrays, arrays["dy"]), 0)
    mean = np.sum(weights * dp, axis=-1, keepdims=True)
    return {"dx": weights * (dp - mean) * weights.dtype.type(problem.scale)}


def _weights(problem: SoftmaxProblem, arrays: Mapping[str, Array]) -> tuple[Array, Array]:
    """Weights before dropout, and which columns count."""
    x = arrays["x"]
    scores = x * x.dtype.type(problem.scale)
    counts: Array = np.ones((1,) * (x.ndim - 1) + (problem.length,), bool)
    if problem.mask == "bool":
        counts = counts & arrays["mask"]
    elif problem.mask is not None:
        scores = scores + arrays["mask"]
    if problem.causal:
        last = np.arange(problem.head_rows)[:, None] + (problem.length - problem.head_rows)
        band = np.arange(problem.length) <= last
        counts = counts & (band if x.ndim > 1 else band[0])
    scores = np.where(counts, scores, -np.inf)
    largest = np.max(scores, axis=-1, keepdims=True)
    exponentials = np.exp(scores - np.where(largest == -np.inf, 0, largest))
    total = np.sum(exponentials, axis=-1, keepdims=True)
    return np.divide(exponentials, total, out=np.zeros_like(exponentials), where=total != 0), counts


def _dropped(problem: SoftmaxProblem, arrays: Mapping[str, Array], values: Array) -> Array:
    if problem.dropout_p == 0.0:
        return values
    heads = np.arange(math.prod(problem.shape[:-2]))
    places = slice(0, problem.head_rows), slice(0, problem.length)
    keep = kept(problem.dropout_p, arrays["seed"].view(np.uint32), heads, *places).reshape(problem.shape)
    return np.where(keep, values * values.dtype.type(keep_scale(problem.dropout_p)), 0).astype(values.dtype)
