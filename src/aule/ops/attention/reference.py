"""The oracle: attention in fp64, its low-precision twin, and the tolerance that follows from the two.

`attention_reference` computes the right result, `attention_twin` the same maths written naively in the problem's own
precision. A backend may err twice as much as the twin (fp16, bf16) or by 1e-5 of the largest output (fp32): see
`tolerance`. Tests, ``aule check`` and the benchmarks all judge through `compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.ops.attention.problem import AttentionProblem
from aule.ops.rope.tables import exactly, rotate
from aule.ops.scores.functions.differentiate import derivatives
from aule.ops.scores.functions.emit import MASK_FUNCTION, SCORE_FUNCTION
from aule.ops.scores.functions.evaluate import Evaluator
from aule.ops.scores.functions.program import BoundFunction
from aule.ops.softmax.dropout import keep_scale, kept

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]

_ROWS = 1024
"""Query rows handled at once: the reference stays linear in seq_q, so that long sequences can be checked too."""

_MANTISSA_BITS = {"f16": 10, "bf16": 7}
_SMALLEST_EXPONENT = {"f16": -14, "bf16": -126}


def to_f64(array: Array, dtype: str) -> F64:
    """The values of an array as float64.

    Parameters
    ----------
    array : ndarray
        Of any float dtype, ml_dtypes' bfloat16 included, or bool; bf16 also as uint16 bits.
    dtype : str
        IR name of the element type; needed to tell uint16-coded bf16 from integers.
    """
    array = np.asarray(array)
    if dtype == "bf16" and array.dtype == np.uint16:
        array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float64)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arrays of a problem.

    Attributes
    ----------
    q, k, v : ndarray
        ``[batch, heads, seq, dim]``; leading axes of length 1 may be missing.
    mask, bias : ndarray, optional
        Broadcastable to ``[batch, heads_q, seq_q, seq_kv]``.
    alibi : ndarray, optional
        ``[heads_q]`` or ``[batch, heads_q]``.
    sinks : ndarray, optional
        ``[heads_q]``.
    seed : ndarray, optional
        The words of the seed (`aule.ops.softmax.dropout.seed_words`), if the problem drops weights.
    cos, sin : ndarray, optional
        ``[positions, rope.half]``, with leading axes that broadcast to ``[batch, 1]``.
    captured : mapping
        Arrays that the user's functions capture, by buffer name.
    """

    q: Array
    k: Array
    v: Array
    mask: Array | None = None
    bias: Array | None = None
    alibi: Array | None = None
    sinks: Array | None = None
    seed: Array | None = None
    cos: Array | None = None
    sin: Array | None = None
    captured: Mapping[str, Array] = field(default_factory=dict)


def attention_reference(
    problem: AttentionProblem, q: Array, k: Array, v: Array, *, first_batch: int = 0, **extra: Any
) -> tuple[F64, F64]:
    """Attention as `AttentionProblem` defines it, in fp64.

    Parameters
    ----------
    problem : AttentionProblem
    q, k, v, **extra
        The arrays of `Inputs`.
    first_batch : int
        The number that dropout gives to the first batch.

    Returns
    -------
    out : ndarray
        float64 ``[batch, heads_q, seq_q, value_dim]``; zeros in a row that keeps no key.
    lse : ndarray
        float64 ``[batch, heads_q, seq_q]``, the logarithm of the softmax's denominator, a sink included; -inf in a row
        that keeps no key and has no sink.
    """
    out, lse = _empty_results(problem)
    with np.errstate(all="ignore"):
        for rows in head_rows(problem, Inputs(q, k, v, **extra), first_batch):
            s = (rows.q @ rows.k.T) * problem.scale
            if problem.softcap > 0:
                s = problem.softcap * np.tanh(s / problem.softcap)
            for term in rows.terms:
                s = s + term
            s = rows.functions.modified(s)
            p, lse[rows.where] = softmax(s, rows.keep, rows.sink)
            out[rows.where] = _product(p * rows.factor, rows.v, rows.keep)
    return out, lse


def attention_twin(
    problem: AttentionProblem, q: Array, k: Array, v: Array, *, first_batch: int = 0, **extra: Any
) -> tuple[F64, F64]:
    """Naive attention in the problem's own precision, whose error is the measure of `tolerance`.

    It follows PyTorch's math path where that may reduce in half precision: q and k each take the square root of the
    scale, every step (scores, each score modifier, softmax, product) is rounded to the problem's dtype, and products
    accumulate in fp32. Parameters and results as for `attention_reference`.
    """
    work = np.float64 if problem.dtype == "f64" else np.float32
    root = np.sqrt(abs(problem.scale))
    out, lse = _empty_results(problem)

    def rounded(values: Array) -> Array:
        return rounded_to(values.astype(work), problem.dtype)

    with np.errstate(all="ignore"):
        for rows in head_rows(problem, Inputs(q, k, v, **extra), first_batch, rounded):
            s = rounded(rounded(rows.q * np.copysign(root, problem.scale)) @ rounded(rows.k * root).T)
            if problem.softcap > 0:
                s = rounded(rounded(np.tanh(rounded(s / work(problem.softcap)))) * work(problem.softcap))
            for term in rows.terms:
                s = rounded(s + rounded(term))
            s = rounded(rows.functions.modified(s).astype(work))
            p, lse[rows.where] = softmax(s, rows.keep, float(rounded(np.asarray(rows.sink))))
            p = rounded(rounded(p) * rows.factor)
            out[rows.where] = rounded(_product(p, rows.v.astype(work), rows.keep))
    return out, lse


def _empty_results(problem: AttentionProblem) -> tuple[F64, F64]:
    """Output and log-sum-exp of rows that keep no key."""
    shape = (problem.batch, problem.heads_q, problem.seq_q)
    return np.zeros((*shape, problem.value_dim)), np.full(shape, -np.inf)


def softmax(s: Array, keep: npt.NDArray[np.bool_], sink: float) -> tuple[Array, Array]:
    """Weights of kept keys beside a sink, in the precision of the scores, and the log-sum-exp of each row."""
    # Selected, not multiplied: whatever a dropped key holds, NaN included, is gone from here on.
    s = np.where(keep, s, s.dtype.type(-np.inf))
    m = np.max(s, axis=1, initial=sink, keepdims=True)
    m = np.where(m == -np.inf, s.dtype.type(0), m)
    p = np.exp(s - m)
    total = p.sum(axis=1, keepdims=True) + np.exp(sink - m)
    return np.divide(p, total, out=np.zeros_like(p), where=total != 0), (m + np.log(total))[:, 0]


def tolerance(problem: AttentionProblem, reference: Array, twin: Array | None = None) -> float:
    """Largest error that is still right.

    fp32: 1e-5 of the largest reference value; fp64: 1e-12 of it. fp16 and bf16: twice the largest error of the twin,
    but no less than one unit in the last place of the dtype at the largest reference value, since the twin may be exact
    by luck (a row that keeps one key copies its value) while any result is rounded to the dtype once.

    Parameters
    ----------
    problem : AttentionProblem
    reference : ndarray
        From `attention_reference`.
    twin : ndarray, optional
        From `attention_twin`; needed for fp16 and bf16.
    """
    finite = np.abs(reference[np.isfinite(reference)])
    largest = float(np.max(finite, initial=0.0))
    if problem.dtype == "f32":
        return 1e-5 * largest
    if problem.dtype == "f64":
        return 1e-12 * largest
    if twin is None:
        raise ValueError(f"[tolerance] expected a twin for dtype {problem.dtype}, got None; call attention_twin")
    return max(2.0 * largest_error(twin, reference), unit_in_last_place(largest, problem.dtype))


def unit_in_last_place(value: float, dtype: str) -> float:
    """The step from a positive number to the next in fp16 or bf16; 0 for 0."""
    exponent = max(int(np.frexp(value)[1]) - 1, _SMALLEST_EXPONENT[dtype])
    return float(2.0 ** (exponent - _MANTISSA_BITS[dtype])) if value else 0.0


def lse_tolerance(problem: AttentionProblem, lse_dtype: npt.DTypeLike = np.float32) -> float:
    """Largest error of the log-sum-exp, relative to ``max(1, |lse|)``.

    An error in lse is an error in the scores, which every backend accumulates in fp32: 1e-5. fp16 and bf16 inputs are
    exact in fp32, but matrix units may truncate where an FMA rounds: twice that. fp64 problems are as good as the dtype
    the lse is stored in: 1e-12, or one fp32 epsilon.
    """
    if problem.dtype == "f64":
        return 1e-12 if np.dtype(lse_dtype) == np.float64 else float(np.finfo(np.float32).eps)
    return 1e-5 if problem.dtype == "f32" else 2e-5


@dataclass(frozen=True, eq=False)
class Expected:
    """What a backend must come close to; computed once and used for every backend."""

    out: F64
    lse: F64
    twin: F64 | None
    """None for fp32 and fp64, whose tolerance does not need it."""
    lse_twin: F64 | None = None
    """Only if q and k are rotated in half precision, whose products may take them rounded."""


def expect(problem: AttentionProblem, q: Array, k: Array, v: Array, *, first_batch: int = 0, **extra: Any) -> Expected:
    """Reference, and twin where the tolerance needs one; arguments as in `attention_reference`."""
    out, lse = attention_reference(problem, q, k, v, first_batch=first_batch, **extra)
    if problem.dtype not in _MANTISSA_BITS:
        return Expected(out, lse, None)
    twin, lse_twin = attention_twin(problem, q, k, v, first_batch=first_batch, **extra)
    return Expected(out, lse, twin, None if problem.rope is None else lse_twin)


@dataclass(frozen=True)
class Comparison:
    """The verdict of `compare`; true if the result is right."""

    error: float
    """Largest absolute error of the output."""
    tolerance: float
    lse_error: float
    """Largest error of the log-sum-exp, relative to ``max(1, |lse|)``; 0 when there was none to compare."""
    lse_tolerance: float
    ok: bool
    message: str
    """One line, with the place of the largest error if it is not ok."""

    def __bool__(self) -> bool:
        return self.ok


def compare(problem: AttentionProblem, got: Array, got_lse: Array | None, expected: Expected) -> Comparison:
    """Judge a result against the reference. NaN never passes; infinities must match exactly.

    Parameters
    ----------
    problem : AttentionProblem
    got : ndarray
        The output, bf16 as ml_dtypes or uint16 bits; leading axes of length 1 may be missing.
    got_lse : ndarray or None
        The log-sum-exp, or None when it was not asked for.
    expected : Expected
        From `expect`.
    """
    values = to_f64(got, problem.dtype).reshape(expected.out.shape)
    limit = tolerance(problem, expected.out, expected.twin)
    error, ok, message = judge(errors_of(values, expected.out), limit, values, expected.out)
    lse_error, lse_limit = 0.0, lse_tolerance(problem)
    if got_lse is not None:
        lse_limit = lse_tolerance(problem, got_lse.dtype)
        lse_values = got_lse.astype(np.float64).reshape(expected.lse.shape)
        size = np.maximum(1.0, np.where(np.isfinite(expected.lse), np.abs(expected.lse), 1.0))
        if expected.lse_twin is not None:
            lse_limit = max(lse_limit, 2.0 * largest_error(expected.lse_twin / size, expected.lse / size))
        lse_errors = errors_of(lse_values, expected.lse) / size
        lse_error, lse_ok, lse_message = judge(lse_errors, lse_limit, lse_values, expected.lse)
        ok, message = ok and lse_ok, f"{message}; lse {lse_message}"
    return Comparison(error, limit, lse_error, lse_limit, ok, message)


def judge(errors: F64, limit: float, got: F64, reference: F64) -> tuple[float, bool, str]:
    """The largest error, whether it is within a limit, and a message with its place if it is not."""
    error = float(np.max(errors, initial=0.0))
    message = f"error {error:.3g} of {limit:.3g} allowed"
    if error <= limit:
        return error, True, message
    index = np.unravel_index(int(np.argmax(errors)), errors.shape)
    place = f"{[int(i) for i in index]}: got {got[index]:.9g}, reference {reference[index]:.9g}"
    return error, False, f"{message}, worst at {place}"


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Some query rows of one head, in fp64."""

    where: tuple[int, int, slice]
    q: F64
    k: F64
    v: F64
    keep: npt.NDArray[np.bool_]
    terms: tuple[F64, ...]
    """What is added to the scores."""
    sink: float
    factor: F64 | float
    """What dropout multiplies the weights by."""
    functions: Functions
    """The user's functions at these rows."""


@dataclass(frozen=True, eq=False)
class Functions:
    """The user's functions at some rows of one head and all keys."""

    problem: AttentionProblem
    captured: Mapping[str, Array]
    where: tuple[int, int, slice]
    first_batch: int = 0

    def _at(self, function: BoundFunction, name: str, **inputs: Any) -> Array:
        kinds = enumerate(function.program.arrays)
        given = [(self.captured[f"{name}{i}"], kind.dtype) for i, kind in kinds]
        arrays = [to_f64(x, dtype) if dtype == "bf16" else x for x, dtype in given]
        b, h, rows = self.where
        query, key = np.arange(rows.start, rows.stop)[:, None], np.arange(self.problem.seq_kv)[None]
        places = {"batch": b + self.first_batch, "head": h, "query": query, "position": query + self.problem.shift}
        found = Evaluator(function, arrays, exact=True)(**places, key=key, **inputs)
        return np.broadcast_to(found, (rows.stop - rows.start, self.problem.seq_kv))

    def modified(self, s: Array) -> Array:
        """Scores after the user's function of scores."""
        mod = self.problem.score_mod
        return s if mod is None else self._at(mod, SCORE_FUNCTION, score=s)

    def slope(self, s: Array) -> Array | float:
        """The derivative of `modified`."""
        mod = self.problem.score_mod
        if mod is None:
            return 1.0
        return self._at(replace(mod, program=derivatives(mod.program)), SCORE_FUNCTION, score=s)

    def keep(self) -> Array | bool:
        """Which keys the user's mask function keeps."""
        mod = self.problem.mask_mod
        return True if mod is None else self._at(mod, MASK_FUNCTION)


def head_rows(
    problem: AttentionProblem,
    inputs: Inputs,
    first_batch: int = 0,
    rounded: Callable[[Array], Array] = exactly,
) -> Iterator[HeadRows]:
    """The rows of a problem, head by head; q and k are rotated if the problem says so, with ``rounded`` steps."""
    p = problem
    scores = (p.batch, p.heads_q, p.seq_q, p.seq_kv)
    q = np.reshape(inputs.q, (p.batch, p.heads_q, p.seq_q, p.head_dim))
    k = np.reshape(inputs.k, (p.batch, p.heads_kv, p.seq_kv, p.head_dim))
    v = np.reshape(inputs.v, (p.batch, p.heads_kv, p.seq_kv, p.value_dim))
    mask = None if inputs.mask is None else np.broadcast_to(inputs.mask, scores)
    bias = None if inputs.bias is None else np.broadcast_to(inputs.bias, scores)
    slopes = None if inputs.alibi is None else np.broadcast_to(inputs.alibi, (p.batch, p.heads_q))
    angles = Angles(p, inputs.cos, inputs.sin)

    for b, h in np.ndindex(p.batch, p.heads_q):
        h_kv = h // p.group
        k64, v64 = to_f64(k[b, h_kv], p.dtype), to_f64(v[b, h_kv], p.dtype)
        k64 = angles.rotate(k64, b, p.rope_starts[1], rounded)
        for start in range(0, p.seq_q, _ROWS):
            rows = slice(start, min(start + _ROWS, p.seq_q))
            where = (b, h, rows)
            # Distance of key j from t, the key that row i stands at.
            distance = np.arange(p.seq_kv) - (np.arange(rows.start, rows.stop)[:, None] + p.shift)
            left, right = p.band
            keep = (distance <= right) & (distance >= -left)
            terms: list[F64] = []
            if mask is not None and p.mask == "bool":
                keep = keep & mask[where]
            elif mask is not None:
                terms.append(to_f64(mask[where], p.mask or ""))
            if bias is not None:
                terms.append(to_f64(bias[where], p.bias or ""))
            for term in terms:
                keep = keep & (term != -np.inf)
            if slopes is not None:
                terms.append(-float(slopes[b, h]) * np.abs(distance))
            sink = -np.inf if inputs.sinks is None else float(inputs.sinks[h])
            factor: F64 | float = 1.0
            if p.dropout_p > 0:
                if inputs.seed is None:
                    raise ValueError("[attention_reference] expected the words of a seed with dropout_p > 0, got None")
                number = (first_batch + b) * p.heads_q + h
                kept_weights = kept(p.dropout_p, inputs.seed, *p.dropout_places(number, rows, slice(0, p.seq_kv)))
                factor = np.where(kept_weights, keep_scale(p.dropout_p), 0.0)
            q64 = angles.rotate(to_f64(q[where], p.dtype), b, p.rope_starts[0] + start, rounded)
            functions = Functions(p, inputs.captured, where, first_batch)
            yield HeadRows(where, q64, k64, v64, keep & functions.keep(), tuple(terms), sink, factor, functions)


class Angles:
    """The tables of a problem that rotates q and k, in fp64; otherwise rows stay as they are."""

    def __init__(self, problem: AttentionProblem, cos: Array | None, sin: Array | None) -> None:
        self.rope = problem.rope
        self.tables: list[F64] = []
        if self.rope is None:
            return
        if cos is None or sin is None:
            raise ValueError("[attention_reference] expected cos and sin with rope, got None")
        for table in (cos, sin):
            values = to_f64(table, self.rope.dtype)[..., : self.rope.half]
            values = values.reshape(-1, *values.shape[-2:])
            self.tables.append(np.broadcast_to(values, (problem.batch, *values.shape[1:])))

    def rotate(
        self, x: Array, batch: int, first: int, rounded: Callable[[Array], Array] = exactly, back: bool = False
    ) -> Array:
        """Rows of a batch, of which the first stands at position ``first``."""
        if self.rope is None:
            return x
        cos, sin = (table[batch, first : first + len(x)] for table in self.tables)
        return rotate(self.rope, x, cos, sin, rounded, back)


def _product(p: Array, v: Array, keep: npt.NDArray[np.bool_]) -> Array:
    """``p @ v`` over kept keys only: 0 * NaN is NaN, so a value that is not finite reaches only rows that keep it."""
    finite = np.isfinite(v)
    if finite.all():
        return np.asarray(p @ v)
    out = p @ np.where(finite, v, 0)
    for j in np.flatnonzero(~finite.all(axis=1)):
        out[keep[:, j]] += np.where(finite[j], 0, v[j])
    return np.asarray(out)


def rounded_to(values: Array, dtype: str) -> Array:
    """Round float32 values to fp16 or bf16 and back; for other dtypes they stay as they are."""
    if dtype == "f16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        # To nearest, ties to even. NaN would overflow into the sign.
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(values), values, nearest.view(np.float32)).reshape(values.shape)
    return values


def errors_of(got: F64, reference: F64) -> F64:
    """Absolute errors; 0 where infinities agree, infinite where either is NaN or only one is infinite."""
    with np.errstate(invalid="ignore"):
        errors = np.where(got == reference, 0.0, np.abs(got - reference))
    return np.where(np.isnan(errors), np.inf, errors)


def largest_error(got: F64, reference: F64) -> float:
    """Largest error where both are finite, since a twin may overflow."""
    both = np.isfinite(got) & np.isfinite(reference)
    return float(np.max(np.abs(got[both] - reference[both]), initial=0.0))
