"""Decoding with NumPy and its reference: sequence by sequence, gathered from their pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.ops.attention import numpy_forward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import Expected, attention_reference, attention_twin, to_f64
from aule.ops.attention.validate import Operands
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.validate import DecodeOperands
from aule.ops.shared.elements import as_float, stored
from aule.view import TensorView

Array = npt.NDArray[Any]


def _e4m3() -> npt.NDArray[np.float32]:
    bits = np.arange(256)
    exponent, fraction = (bits >> 3) & 15, bits & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    size[(bits & 0x7F) == 0x7F] = np.nan
    return np.where(bits & 0x80, -size, size).astype(np.float32)


E4M3 = _e4m3()
"""Value of each byte as fp8 e4m3."""


def dequantised(array: Array, scale: Array, dtype: str, work: type[np.floating[Any]]) -> Array:
    """Dequantise an array (`QUANTISED`, e4m3 as uint8 bits) to a wider type.

    Parameters
    ----------
    scale : ndarray
        One for each row: the array's shape without its last axis.
    """
    numbers = E4M3[array] if dtype == "e4m3" else array
    result: Array = numbers.astype(work) * scale[..., None].astype(work)
    return result


@dataclass(frozen=True, eq=False)
class Sequence:
    """One sequence: its number, its slice of the result, and its queries, keys and values ``[1, heads, rows, dim]``.

    Keys and values of a quantised cache are still quantised; ``scales`` holds their scales.
    """

    number: int
    where: tuple[slice, slice, slice]
    q: Array
    k: Array
    v: Array
    scales: tuple[Array, Array] | None


def sequences(problem: DecodeProblem, operands: DecodeOperands) -> Iterator[Sequence]:
    """Yield the sequences of a call whose arrays are in host memory."""
    lens = None if operands.lens is None else np.clip(operands.lens.storage, 0, problem.seq_kv)
    starts = None if operands.cu_q is None else operands.cu_q.storage.tolist()
    every = slice(None)
    for n in range(problem.batch):
        length = problem.seq_kv if lens is None else int(lens[n])
        where = (slice(n, n + 1), every, every) if starts is None else (every, every, slice(starts[n], starts[n + 1]))
        pages = None
        if operands.tables is not None:
            pages = np.clip(operands.tables.storage[n, : -(-length // problem.page)], 0, problem.pages - 1)
        k, v = (_gather(view, n, pages, length) for view in (operands.k, operands.v))
        scales = None
        if operands.k_scale is not None and operands.v_scale is not None:
            scales = _gather(operands.k_scale, n, pages, length), _gather(operands.v_scale, n, pages, length)
        yield Sequence(n, where, operands.q.storage[where], k, v, scales)


def _gather(view: TensorView, n: int, pages: Array | None, length: int) -> Array:
    """Keys, values or scales of sequence ``n``, ``[1, heads, length, ...]``, from its pages if it has any."""
    if pages is None:
        return np.asarray(view.storage[n : n + 1, :, :length])
    found = view.storage[pages].swapaxes(0, 1)  # [heads, pages, page, ...]
    return np.asarray(found.reshape(1, found.shape[0], -1, *found.shape[3:])[:, :, :length])


# -- NumPy -------------------------------------------------------------------------------------------------------------


def decode(problem: DecodeProblem, operands: DecodeOperands, out: Array, lse: Array | None) -> None:
    """Compute with NumPy into given arrays.

    Parameters
    ----------
    out : ndarray
        ``problem.out_shape``, any strides; bf16 as uint16 bits.
    lse : ndarray, optional
        Shape of ``out`` without the last axis.
    """
    work, name = (np.float64, "f64") if problem.dtype == "f64" else (np.float32, "f32")
    out[...] = 0  # some rows may belong to no sequence
    if lse is not None:
        lse[...] = -np.inf
    for one in sequences(problem, operands):
        q, k, v = one.q, one.k, one.v
        dtype = problem.dtype
        if one.scales is not None:
            q, dtype = as_float(q, dtype), name
            k, v = (dequantised(x, s, problem.cache, work) for x, s in zip((k, v), one.scales, strict=True))
        alone = problem.alone(q.shape[2], k.shape[2], dtype)
        given = Operands(
            q=_view(dtype, q),
            k=_view(dtype, k),
            v=_view(dtype, v),
            alibi=_slopes(operands, one),
            sinks=operands.sinks,
            captured=operands.captured,
        )
        found = out[one.where] if one.scales is None else np.zeros(alone.out_shape, work)
        numpy_forward.forward(alone, given, found, None if lse is None else lse[one.where], one.number)
        if one.scales is not None:
            out[one.where] = stored(found, problem.dtype)


def _view(dtype: str, array: Array) -> TensorView:
    return TensorView(dtype, array.shape, tuple(step // array.itemsize for step in array.strides), "host", array)


def _slopes(operands: DecodeOperands, one: Sequence) -> TensorView | None:
    return None if operands.alibi is None else _view("f32", operands.alibi.storage[one.number : one.number + 1])


# -- reference ---------------------------------------------------------------------------------------------------------


def expect_decode(problem: DecodeProblem, operands: DecodeOperands) -> tuple[AttentionProblem, Expected]:
    """Compute the expected result in fp64, like `aule.ops.attention.reference.expect`.

    Keys and values of a quantised cache are dequantised; the low-precision twin rounds them to q's type.

    Returns
    -------
    judged : AttentionProblem
        The problem to pass to `aule.ops.attention.reference.compare`.
    expected : Expected
    """
    out, lse = np.zeros(problem.out_shape), np.full(problem.out_shape[:3], -np.inf)
    half = problem.dtype in ("f16", "bf16")
    twin = np.zeros(problem.out_shape) if half else None
    for one in sequences(problem, operands):
        q = to_f64(one.q, problem.dtype)
        if one.scales is None:
            k, v = to_f64(one.k, problem.cache), to_f64(one.v, problem.cache)
        else:
            k, v = (
                dequantised(x, s, problem.cache, np.float64) for x, s in zip((one.k, one.v), one.scales, strict=True)
            )
        slopes = _slopes(operands, one)
        extra: dict[str, Any] = {
            "alibi": None if slopes is None else slopes.storage,
            "sinks": None if operands.sinks is None else operands.sinks.storage,
            "captured": {name: view.storage for name, view in operands.captured.items()},
            "first_batch": one.number,
        }
        alone = problem.alone(q.shape[2], k.shape[2])
        out[one.where], lse[one.where] = attention_reference(alone, q, k, v, **extra)
        if twin is not None:
            twin[one.where], _ = attention_twin(alone, q, k, v, **extra)
    return problem.alone(problem.seq_q, problem.seq_kv), Expected(out, lse, twin)
