"""Gated units and their gradients in NumPy, in the arrays' precision: the reference for float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from aule.ops.glu.kernels import TANH_CUBE, TANH_FACTOR, TANH_SATURATED
from aule.ops.glu.problem import Activation, GluProblem
from aule.ops.shared.elements import Array

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def glu(problem: GluProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]) -> dict[str, Array]:
    """``y``."""
    gate, up = _gate_and_up(problem, arrays)
    return {"y": _activated(problem.activation, gate)[0] * up}


def glu_gradient(problem: GluProblem, arrays: Mapping[str, Array], wanted: tuple[str, ...]) -> dict[str, Array]:
    """``dgate`` and ``dup``; packed, ``dgate`` holds both."""
    gate, up = _gate_and_up(problem, arrays)
    dy = arrays["dy"]
    value, slope = _activated(problem.activation, gate)
    results = {"dgate": dy * up * slope, "dup": dy * value}
    if problem.packed:
        results["dgate"] = np.concatenate([results["dgate"], results["dup"]], axis=-1)
    return {name: results[name] for name in wanted}


def _gate_and_up(problem: GluProblem, arrays: Mapping[str, Array]) -> tuple[Array, Array]:
    gate = arrays["gate"]
    return (gate[..., : problem.length], gate[..., problem.length :]) if problem.packed else (gate, arrays["up"])


def _activated(activation: Activation, x: Array) -> tuple[Array, Array]:
    """The activation and its derivative."""
    if activation == "silu":
        s = 1 / (1 + np.exp(-x))
        return x * s, s * (1 + x * (1 - s))
    if activation == "gelu":
        below = (0.5 * _erfc(x.astype(np.float64) * -math.sqrt(0.5))).astype(x.dtype)
        return x * below, below + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    square = np.minimum(x * x, x.dtype.type(TANH_SATURATED))
    t = np.tanh(TANH_FACTOR * (x + TANH_CUBE * x * square))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * TANH_FACTOR * (1 + 3 * TANH_CUBE * square)
