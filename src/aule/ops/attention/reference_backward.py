"""The oracle for gradients: in fp64, a naive twin in the problem's precision, and the verdict from the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import (
    F64,
    Angles,
    Array,
    Inputs,
    errors_of,
    head_rows,
    judge,
    largest_error,
    rounded_to,
    softmax,
    to_f64,
    unit_in_last_place,
)

NAMES = ("dq", "dk", "dv")


@dataclass(frozen=True, eq=False)
class ExpectedGradients:
    """What a backend must come close to, by name (`NAMES`)."""

    reference: dict[str, F64]
    twin: dict[str, F64] | None
    """None for fp32 and fp64, whose tolerance does not need it."""
    magnitude: dict[str, float]
    """The largest sum of absolute terms of an element; where they cancel, rounding exceeds the gradient."""


def expect_gradients(
    problem: AttentionProblem, dout: Array, q: Array, k: Array, v: Array, first_batch: int = 0, **extra: Any
) -> ExpectedGradients:
    """Gradients of ``sum(dout * attention(q, k, v))``.

    Parameters
    ----------
    dout : ndarray
        ``[batch, heads_q, seq_q, value_dim]``, of the problem's dtype.
    q, k, v, first_batch, **extra
        As in `aule.ops.attention.reference.attention_reference`.
    """
    inputs, magnitude = Inputs(q, k, v, **extra), dict.fromkeys(NAMES, 0.0)
    reference = _gradients(problem, dout, inputs, first_batch, True, magnitude)
    half = problem.dtype in ("f16", "bf16")
    twin = _gradients(problem, dout, inputs, first_batch, False, {}) if half else None
    return ExpectedGradients(reference, twin, magnitude)


def _gradients(
    problem: AttentionProblem,
    dout: Array,
    inputs: Inputs,
    first_batch: int,
    exact: bool,
    magnitude: dict[str, float],
) -> dict[str, F64]:
    p = problem
    work: Any = np.float64 if exact or p.dtype == "f64" else np.float32
    shapes = {
        "dq": (p.batch, p.heads_q, p.seq_q, p.head_dim),
        "dk": (p.batch, p.heads_kv, p.seq_kv, p.head_dim),
        "dv": (p.batch, p.heads_kv, p.seq_kv, p.value_dim),
    }
    result: dict[str, F64] = {name: np.zeros(shape) for name, shape in shapes.items()}
    dout = np.reshape(dout, (p.batch, p.heads_q, p.seq_q, p.value_dim))

    def rounded(values: Array) -> Array:
        return np.asarray(values) if exact else rounded_to(values.astype(work), p.dtype)

    with np.errstate(all="ignore"):
        angles = Angles(p, inputs.cos, inputs.sin)
        for part in head_rows(p, inputs, first_batch, rounded):
            b, h, rows = part.where
            do = to_f64(dout[b, h, rows], p.dtype).astype(work)
            raw = rounded(rounded((part.q @ part.k.T).astype(work)) * work(p.scale))
            bend = rounded(np.tanh(raw / work(p.softcap))) if p.softcap > 0 else np.zeros_like(raw)
            s = rounded(bend * work(p.softcap)) if p.softcap > 0 else raw
            bend = np.where(part.keep, bend, work(0))  # a dropped key's may be NaN, and its weight is 0
            for term in part.terms:
                s = rounded(s + rounded(term))
            slope = np.where(part.keep, part.functions.slope(s), 0.0).astype(work)
            s = rounded(part.functions.modified(s).astype(work))
            weights = rounded(softmax(s, part.keep, part.sink)[0])
            v_kept = np.where(np.isfinite(part.v), part.v, 0).astype(work)
            dropped = rounded(weights * part.factor)
            dp = rounded(rounded(do @ v_kept.T) * part.factor)
            # As in every flash attention, delta comes from the output, rounded to the problem's precision. In fp64 it
            # equals the sum of weights * dp.
            delta = (do * rounded(dropped @ v_kept)).sum(axis=1, keepdims=True)
            ds = rounded(np.where(weights == 0, 0, weights * (dp - delta) * (1 - bend * bend) * slope))
            k_kept = np.where(np.isfinite(part.k), part.k, 0).astype(work)
            dq = rounded(rounded(ds @ k_kept) * work(p.scale))
            dk = rounded(rounded(ds.T @ part.q.astype(work)) * work(p.scale))
            result["dq"][b, h, rows] = angles.rotate(dq, b, p.rope_starts[0] + rows.start, rounded, back=True)
            result["dk"][b, h // p.group] += angles.rotate(dk, b, p.rope_starts[1], rounded, back=True)
            result["dv"][b, h // p.group] += rounded(dropped.T @ do)
            if magnitude:
                terms = weights * (np.abs(dp) + np.abs(delta)) * abs(p.scale)
                sums = {"dq": terms @ np.abs(k_kept), "dk": terms.T @ np.abs(part.q), "dv": dropped.T @ np.abs(do)}
                for name, array in sums.items():
                    magnitude[name] = max(magnitude[name], p.group * float(np.max(array, initial=0.0)))
    return {name: rounded(array).astype(np.float64) for name, array in result.items()}


def gradient_tolerance(problem: AttentionProblem, name: str, expected: ExpectedGradients) -> float:
    """Largest error that is still right: as for the output, but 2e-5 of the largest gradient in fp32.

    Never below four units in the last place of the terms that were summed: a row of one key has a dS of zero in theory,
    the difference of two rounded numbers in practice.
    """
    reference = expected.reference[name]
    largest = float(np.max(np.abs(reference), initial=0.0))
    floor = 4 * expected.magnitude[name] * float(np.finfo(np.float64 if problem.dtype == "f64" else np.float32).eps)
    if expected.twin is None:
        return max((1e-12 if problem.dtype == "f64" else 2e-5) * largest, floor)
    twice = 2.0 * largest_error(expected.twin[name], reference)
    return max(twice, unit_in_last_place(largest, problem.dtype), floor)


def compare_gradients(problem: AttentionProblem, got: dict[str, Array], expected: ExpectedGradients) -> str:
    """Judge gradients; empty if all are right, else the name, error and place of each wrong one."""
    wrong = []
    for name in NAMES:
        reference = expected.reference[name]
        values = to_f64(got[name], problem.dtype).reshape(reference.shape)
        limit = gradient_tolerance(problem, name, expected)
        _, ok, message = judge(errors_of(values, reference), limit, values, reference)
        if not ok:
            wrong.append(f"{name}: {message}")
    return "; ".join(wrong)
