"""Limits of errors of attention, and expected gradients that the package's oracle lacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import (
    Expected,
    Inputs,
    head_rows,
    largest_error,
    lse_tolerance,
    softmax,
    to_f64,
    tolerance,
)
from aule.ops.attention.reference_backward import NAMES, ExpectedGradients, gradient_tolerance
from aule.ops.softmax.dropout import keep_scale
from fuzzing.trial import Array, Trial, Wanted, buffer

Case = dict[str, Any]
EPS = {"f64": 2.0**-52}
"""Of sums; 2**-23 for all other types."""
HALF_EPS = {"f16": 2.0**-10, "bf16": 2.0**-7}
LEAST = {"f16": 2.0**-25}
"""What rounding an output costs at least, however small it is: half of the smallest subnormal number."""
FAINT = {"f16": 4 * 2.0**-25, "f64": 1e-300}
"""Weights that may be zero, of a few keys together (`docs/numerics.md`, nan-in-v); 1e-36 for all other types."""


class Bounds:
    """Limits of errors: those of the package's oracle, and for large scores what rounding them in fp32 adds."""

    def __init__(self, case: Case, problem: AttentionProblem, arrays: dict[str, Array]) -> None:
        self.problem, self.case = problem, case
        self.slack = 0.0
        if case["values"] in ("huge", "offset"):
            sizes = [float(np.max(np.abs(to_f64(arrays[x], problem.dtype)), initial=0.0)) for x in "qk"]
            scores = sizes[0] * sizes[1] * problem.head_dim**0.5 * abs(problem.scale)
            self.slack = 4 * EPS.get(problem.dtype, 2.0**-23) * scores
            if problem.rope is not None:  # q and k are rounded again when they are rotated
                self.slack = max(self.slack, HALF_EPS.get(problem.dtype, 0.0) * scores)
        finite = {name: np.abs(to_f64(arrays[name], problem.dtype)) for name in "qkv"}
        self.sizes = {name: float(np.max(x[np.isfinite(x)], initial=0.0)) for name, x in finite.items()}
        self.largest = self.sizes["v"]

    def results(self, found: Expected) -> dict[str, Wanted]:
        """``out`` and ``lse`` in the oracle's shape."""
        problem, loose = self.problem, self.case["values"] == "nonfinite"
        # Where a row's only keys have the lowest scores that a mask can give, these have lost their digits.
        lost = np.isfinite(found.lse) & (found.lse < -1e3)
        limit = tolerance(problem, found.out, found.twin) + self.slack * self.largest
        size = np.maximum(1.0, np.where(np.isfinite(found.lse), np.abs(found.lse), 1.0))
        relative = lse_tolerance(problem)
        if found.lse_twin is not None:
            relative = max(relative, 2.0 * largest_error(found.lse_twin / size, found.lse / size))
        return {
            "out": Wanted(found.out, limit, problem.dtype, lost[..., None] & np.ones(found.out.shape, bool), loose),
            "lse": Wanted(found.lse, relative * size + self.slack, "f32", lost, loose),
        }

    def gradients(self, found: ExpectedGradients, dout: Array) -> dict[str, Wanted]:
        """``dq``, ``dk`` and ``dv`` in the oracle's shape.

        dS is the difference of two dot products, which may be equal. What rounding their terms costs is a limit too:
        of fp32 the terms themselves, of half precision the output, from which delta is computed.
        """
        result, problem = {}, self.problem
        rows = row_sums(dout, problem.dtype)
        terms = 2 * EPS.get(problem.dtype, 2.0**-23) * rows * self.largest + LEAST.get(problem.dtype, 0.0) * rows
        terms *= abs(problem.scale) * keep_scale(problem.dropout_p)
        for name in NAMES:
            limit = gradient_tolerance(problem, name, found)
            rounding = HALF_EPS.get(problem.dtype, 0.0) / 2 * found.magnitude[name]
            if name != "dv":
                rounding = max(rounding, terms * self.sizes["k" if name == "dq" else "q"])
            limit = max(limit, rounding) + 2 * self.slack * found.magnitude[name]
            result[name] = Wanted(found.reference[name], limit, self.problem.dtype)
        return result


def marks(v: Array, dtype: str) -> Array | None:
    """Ones where v is not finite, else zeros, as v is stored; None if all of it is finite."""
    bad = ~np.isfinite(to_f64(v, dtype))
    return buffer(bad, dtype).view.storage if bad.any() else None


def without_faint(wanted: dict[str, Wanted], weights: Array) -> dict[str, Wanted]:
    """Promise nothing about outputs in which what is not finite has a weight that may be zero."""
    out = wanted["out"]
    faint = (weights > 0) & (weights < FAINT.get(out.dtype, 1e-36))
    return {**wanted, "out": replace(out, skip=out.skip | faint)}


def row_sums(dout: Array, dtype: str) -> float:
    """The largest sum of a row's absolute values."""
    return float(np.max(np.abs(to_f64(dout, dtype)).sum(-1), initial=0.0))


def score_gradients(problem: AttentionProblem, inputs: Inputs, dout: Array) -> tuple[dict[str, Array], float]:
    """Gradients of the scores' additive terms and of sinks in float64, and the size of what they are sums of."""
    scores = np.zeros((problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv))
    sinks, size = np.zeros(problem.heads_q), 0.0
    with np.errstate(all="ignore"):
        for part in head_rows(problem, inputs):
            b, h, rows = part.where
            do = to_f64(dout[b, h, rows], problem.dtype)
            s = (part.q @ part.k.T) * problem.scale
            if problem.softcap > 0:
                s = problem.softcap * np.tanh(s / problem.softcap)
            for term in part.terms:
                s = s + term
            weights, lse = softmax(s, part.keep, part.sink)
            dp = (do @ part.v.T) * part.factor
            delta = np.sum(weights * dp, axis=1, keepdims=True)
            scores[b, h, rows] = weights * (dp - delta)
            weight = np.where(np.isfinite(lse), np.exp(part.sink - lse), 0.0)
            sinks[h] -= float(np.sum(weight * delta[:, 0]))
            size = max(size, float(np.max(np.abs(dp), initial=0.0)))
    return {"scores": scores, "sinks": sinks}, size


def summed(values: Array, shape: tuple[int, ...]) -> Array:
    """Values summed over the axes that a shape broadcasts."""
    full = (1,) * (values.ndim - len(shape)) + shape
    axes = tuple(i for i, n in enumerate(full) if n == 1 and values.shape[i] != 1)
    return values.sum(axis=axes, keepdims=True).reshape(shape)


def extra_gradients(trial: Trial, problem: AttentionProblem, inputs: Inputs, dout: Array) -> dict[str, Wanted]:
    """Expected gradients of mask, bias and sinks, of those that are leaves."""
    wanted = {}
    found, size = score_gradients(problem, inputs, dout)
    for name in ("mask", "bias", "sinks"):
        if name in trial.leaves:
            one = trial.arrays[name]
            exact = found["sinks"] if name == "sinks" else summed(found["scores"], one.shape)
            terms = max(problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv // max(exact.size, 1), 1)
            eps = max(HALF_EPS.get(problem.dtype, 0.0), HALF_EPS.get(one.dtype, 0.0), 1e-5)
            if problem.dtype == "f64":
                eps = 1e-5 if one.dtype == "f32" else 1e-12
            limit = 2 * eps * (size * terms**0.5 + float(np.max(np.abs(exact), initial=0.0)))
            limit += 2 * LEAST.get(problem.dtype, 0.0) * row_sums(dout, problem.dtype) * terms**0.5
            wanted[f"d{name}"] = Wanted(exact, limit, one.dtype)
    return wanted


def reshaped(one: Wanted, shape: tuple[int, ...]) -> Wanted:
    """An expectation with other axes."""
    skip = one.skip if isinstance(one.skip, bool) else one.skip.reshape(shape)
    limit = one.limit if np.ndim(one.limit) == 0 else np.reshape(one.limit, shape)
    return replace(one, values=one.values.reshape(shape), skip=skip, limit=limit)


def packed(one: Wanted) -> Wanted:
    """``[1, heads, rows, dim]`` as ``[rows, heads, dim]``."""
    skip = one.skip if isinstance(one.skip, bool) else one.skip[0].swapaxes(0, 1)
    return replace(one, values=one.values[0].swapaxes(0, 1), skip=skip)
