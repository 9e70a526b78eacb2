"""Attention on NumPy alone, for machines without any device.

Blocked online softmax: scores exist one tile at a time, sized so that a tile stays in a core's L2 cache while BLAS and
NumPy's vector loops pass over it. Extra memory is linear in the sequence length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands
from aule.ops.rope.tables import rotate
from aule.ops.scores.functions.emit import MASK_FUNCTION, SCORE_FUNCTION
from aule.ops.scores.functions.evaluate import Evaluator
from aule.ops.scores.functions.program import BoundFunction
from aule.ops.shared.elements import as_float, stored
from aule.ops.softmax.dropout import keep_scale, kept
from aule.view import TensorView

Array = npt.NDArray[Any]

_TILE_ROWS = 256
_TILE_KEYS = 512
_TILE_ELEMENTS = _TILE_ROWS * _TILE_KEYS
_BANDS = 8
"""Bands remembered: more than the tiles along a diagonal have."""


def forward(problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None, first_batch: int = 0) -> None:
    """Compute attention into given arrays.

    Parameters
    ----------
    problem : AttentionProblem
    operands : Operands
        Host views, from `attention_problem`.
    out : ndarray
        ``[batch, heads_q, seq_q, value_dim]`` of the problem's dtype (bf16 as uint16 bits or ml_dtypes), any strides;
        leading axes of length 1 may be missing.
    lse : ndarray or None
        ``[batch, heads_q, seq_q]`` for the log-sum-exp, float32 or float64, likewise.
    first_batch : int
        The number that dropout and functions give to the first batch.
    """
    out = _lift(out.view(np.uint16) if problem.dtype == "bf16" else out, 4)
    lse = None if lse is None else _lift(lse, 3)
    if out.size == 0:
        return
    # Nonfinite inputs and fully masked rows take part in the arithmetic on purpose.
    with np.errstate(all="ignore"):
        _Forward(problem, operands, out, lse, first_batch).run()


class _Forward:
    """One call: its arrays with the heads split into ``[heads_kv, group]``, and its tile sizes."""

    def __init__(
        self, problem: AttentionProblem, operands: Operands, out: Array, lse: Array | None, first_batch: int
    ) -> None:
        self.problem = problem
        self.left, self.right = problem.band
        self.first_batch = first_batch
        self.work: type[np.floating[Any]] = np.float64 if problem.dtype == "f64" else np.float32
        self.q = _split_heads(operands.q.storage, problem)
        self.k: Array = operands.k.storage
        self.v: Array = operands.v.storage
        self.out = _split_heads(out, problem)
        self.lse = None if lse is None else _split_heads(lse, problem)
        self.mask, self.bias = (_score_reader(view, problem) for view in (operands.mask, operands.bias))
        self.slopes = None if operands.alibi is None else _split_heads(operands.alibi.storage, problem)
        self.score_mod = _evaluator(problem.score_mod, SCORE_FUNCTION, operands)
        self.mask_mod = _evaluator(problem.mask_mod, MASK_FUNCTION, operands)
        self.sinks = None if operands.sinks is None else operands.sinks.storage.reshape(-1, problem.group)

        self.seed = None if operands.seed is None else operands.seed.storage.view(np.uint32)
        self.tables = [as_float(x.storage, x.dtype) for x in (operands.cos, operands.sin) if x is not None]

        # Query heads that share K and V are rows of one product. Small heads are batched until a tile is full.
        self.rows = max(1, min(problem.seq_q, _TILE_ROWS // problem.group))
        self.keys = min(max(problem.seq_kv, 1), _TILE_KEYS)
        heads = max(1, _TILE_ELEMENTS // (self.rows * problem.group * self.keys))
        self.heads = min(heads, problem.heads_kv)
        self.batches = max(1, min(heads // problem.heads_kv, problem.batch))
        held = self.heads * self.batches * self.rows * problem.group
        if self.keys < problem.seq_kv:
            # Few rows (decoding): longer blocks, since each block costs a fixed number of NumPy calls.
            self.keys = max(self.keys, min(problem.seq_kv, _TILE_ELEMENTS // held))
        self.bands: dict[tuple[int, int, int], Array] = {}
        self.scores = np.empty(held * self.keys, dtype=self.work)
        self.partial = np.empty(held * problem.value_dim, dtype=self.work)

    def run(self) -> None:
        p = self.problem
        for b in _slices(0, p.batch, self.batches):
            for h in _slices(0, p.heads_kv, self.heads):
                self._heads(b, h)

    def _heads(self, b: slice, h: slice) -> None:
        p = self.problem
        # Conversion to fp32, and a copy where BLAS could not read the strides, once per head.
        first, last = self._reach(slice(0, p.seq_q))
        k = self._rotated(_readable(self.k[b, h, first:last], p.dtype), b, first + p.rope_starts[1])
        v = _readable(self.v[b, h, first:last], p.dtype)
        for rows in _slices(0, p.seq_q, self.rows):
            acc, m, total = self._rows(b, h, rows, k, v, first)
            shape = (*acc.shape[:2], p.group, rows.stop - rows.start)
            acc /= np.where(total == 0, 1, total)
            self.out[b, h, :, rows] = stored(acc.reshape(*shape, p.value_dim), p.dtype)
            if self.lse is not None:
                self.lse[b, h, :, rows] = (m + np.log(total)).reshape(shape)

    def _rotated(self, x: Array, b: slice, first: int) -> Array:
        """Rows ``[batch, ..., rows, head_dim]`` from position ``first`` on, rotated where the problem says so."""
        if self.problem.rope is None:
            return x
        cos, sin = (t[b, 0, first : first + x.shape[-2]] for t in self.tables)
        between = (slice(None), *(None,) * (x.ndim - 3))
        return rotate(self.problem.rope, x, cos[between], sin[between])

    def _rows(self, b: slice, h: slice, rows: slice, k: Array, v: Array, offset: int) -> tuple[Array, Array, Array]:
        """Unnormalised output, running maximum and running sum of one block of query rows."""
        p = self.problem
        count = rows.stop - rows.start
        q = self._rotated(as_float(self.q[b, h, :, rows], p.dtype), b, rows.start + p.rope_starts[0])
        q = q * self.work(p.scale / p.softcap if p.softcap else p.scale)
        q = q.reshape(*q.shape[:2], p.group * count, p.head_dim)
        head = (*q.shape[:2], p.group * count)
        acc = np.zeros((*head, p.value_dim), dtype=self.work)
        m = np.full((*head, 1), -np.inf, dtype=self.work)
        total = np.zeros((*head, 1), dtype=self.work)
        if self.sinks is not None:
            # The sink is a key without a value that comes first; one of -inf has no weight beside other keys.
            m.reshape(*q.shape[:2], p.group, count)[:] = self.sinks[h, :, None]
            total[:] = 1

        first, last = self._reach(rows)
        for keys in _slices(first, last, self.keys):
            keep, terms = self._modifiers(b, h, rows, keys)
            if keep is not None and not keep.any():
                continue
            near = slice(keys.start - offset, keys.stop - offset)
            s = self._scores(head, count, q, k[:, :, near], terms)
            by_head = s.reshape(*head[:2], p.group, count, -1)
            if self.score_mod is not None:
                by_head[:] = self.score_mod(score=by_head, **self._places(b, h, rows, keys))
            if keep is not None:
                # Overwritten, not added to: a dropped key may hold NaN.
                np.copyto(by_head, -np.inf, where=~keep)
            highest = np.maximum(m, s.max(axis=-1, keepdims=True))
            # A row that has kept nothing so far: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
            level = np.where(highest == -np.inf, 0, highest)
            s -= level
            np.exp(s, out=s)
            decay = np.exp(m - level)
            total *= decay
            total += s.sum(axis=-1, keepdims=True)
            acc *= decay
            if self.seed is not None:
                self._drop(s.reshape(*s.shape[:2], p.group, count, -1), b, h, rows, keys)
            acc += self._product(s, v[:, :, near], keep, count)
            m = highest
        return acc, m, total

    def _scores(self, head: tuple[int, ...], count: int, q: Array, k: Array, terms: list[Array]) -> Array:
        p = self.problem
        keys = k.shape[2]
        s = self.scores[: head[0] * head[1] * head[2] * keys].reshape(*head, keys)
        np.matmul(q, k.swapaxes(-1, -2), out=s)
        if p.softcap:
            np.tanh(s, out=s)
            s *= self.work(p.softcap)
        by_head = s.reshape(*head[:2], p.group, count, keys)
        for term in terms:
            by_head += term
        return s

    def _places(self, b: slice, h: slice, rows: slice, keys: slice) -> dict[str, Array]:
        """Batch, head, query and key of a tile's scores, for the user's functions."""
        batches, heads, members, queries, columns = np.ogrid[b, h, : self.problem.group, rows, keys]
        return {
            "batch": batches + self.first_batch,
            "head": heads * self.problem.group + members,
            "query": queries,
            "position": queries + self.problem.shift,
            "key": columns,
        }

    def _product(self, s: Array, v: Array, keep: Array | None, count: int) -> Array:
        part = self.partial[: s.size // s.shape[-1] * v.shape[-1]].reshape(*s.shape[:-1], v.shape[-1])
        finite = None if keep is None else np.isfinite(v)
        if keep is None or finite is None or finite.all():
            return np.matmul(s, v, out=part)
        # 0 * NaN is NaN. Nonfinite values go through a second product, with 1 for kept keys as weights, so that a row
        # receives Inf or NaN only from keys that it keeps.
        p = self.problem
        np.matmul(s, np.where(finite, v, 0), out=part)
        kept = np.broadcast_to(keep, (*s.shape[:2], p.group, count, s.shape[-1])).reshape(s.shape).astype(self.work)
        for special in (np.inf, -np.inf, np.nan):
            found = np.isnan(v) if np.isnan(special) else v == special
            if found.any():
                part[np.matmul(kept, found.astype(self.work)) > 0] += special
        return part

    def _drop(self, weights: Array, b: slice, h: slice, rows: slice, keys: slice) -> None:
        """Apply dropout to weights ``[batch, heads_kv, group, rows, keys]`` in place."""
        p = self.problem
        assert self.seed is not None
        batches, heads, members = np.ogrid[b, h, : p.group]
        numbers = (batches + self.first_batch) * p.heads_q + heads * p.group + members
        weights *= kept(p.dropout_p, self.seed, *p.dropout_places(numbers, rows, keys))
        weights *= self.work(keep_scale(p.dropout_p))

    def _modifiers(self, b: slice, h: slice, rows: slice, keys: slice) -> tuple[Array | None, list[Array]]:
        """What is kept (None: everything) and what is added to the scores of a tile; both broadcast over it."""
        p = self.problem
        keep: Array | None = None
        terms: list[Array] = []
        count, length = rows.stop - rows.start, keys.stop - keys.start
        ahead = keys.start - rows.start - p.shift
        if not self._inside(rows, keys):
            keep = self._band(ahead, count, length)
        if self.slopes is not None:
            far = np.abs(_distance(ahead, count, length)).astype(self.work)
            terms.append(self.slopes[b, h, :, None, None] * -far)
        for read in (self.mask, self.bias):
            if read is None:
                continue
            values = read(b, h, rows, keys)
            if values.dtype != np.bool_:
                terms.append(values)
                values = values != -np.inf
            if not values.all():
                keep = values if keep is None else keep & values
        if self.mask_mod is not None:
            kept_keys = self.mask_mod(**self._places(b, h, rows, keys))
            keep = kept_keys if keep is None else keep & kept_keys
        return keep, terms

    def _band(self, ahead: int, count: int, length: int) -> Array:
        """Keys that causality and window keep, in a tile whose first key is ``ahead`` of its first row's."""
        # Tiles along the diagonal look alike, in every head.
        place = (ahead, count, length)
        keep = self.bands.get(place)
        if keep is None:
            distance = _distance(*place)
            keep = (distance <= self.right) & (distance >= -self.left)
            if len(self.bands) == _BANDS:
                self.bands.clear()
            self.bands[place] = keep
        return keep

    def _reach(self, rows: slice) -> tuple[int, int]:
        """Keys that any of the rows may keep, as far as causality and window say."""
        shift = self.problem.shift
        first = max(0, rows.start + shift - self.left)
        return first, max(first, min(self.problem.seq_kv, rows.stop + shift + self.right))

    def _inside(self, rows: slice, keys: slice) -> bool:
        """Whether every row keeps every one of the keys, as far as causality and window say."""
        first, last = rows.start + self.problem.shift, rows.stop - 1 + self.problem.shift
        return bool(keys.start >= last - self.left and keys.stop <= first + self.right + 1)


def _evaluator(function: BoundFunction | None, name: str, operands: Operands) -> Evaluator | None:
    """A user's function with the arrays it captured."""
    if function is None:
        return None
    views = [operands.captured[f"{name}{i}"] for i in range(len(function.program.arrays))]
    return Evaluator(function, [as_float(x.storage, x.dtype) if x.dtype == "bf16" else x.storage for x in views])


def _score_reader(view: TensorView | None, problem: AttentionProblem) -> Callable[..., Array] | None:
    """A function that reads a tile ``(b, h, rows, keys)`` of a mask or bias; it broadcasts over the tile's scores."""
    if view is None:
        return None
    array, dtype = _split_heads(view.storage, problem), view.dtype
    # Axes of length 1, which NumPy broadcasts where needed, are converted once.
    array = array[tuple(slice(0, 1) if step == 0 else slice(None) for step in array.strides)]

    def read(b: slice, h: slice, rows: slice, keys: slice) -> Array:
        wanted = (b, h, slice(None), rows, keys)
        part = array[tuple(slice(None) if n == 1 else w for n, w in zip(array.shape, wanted, strict=True))]
        return part if dtype == "bool" else as_float(part, dtype)

    return read


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def _distance(ahead: int, count: int, length: int) -> npt.NDArray[np.int32]:
    """How far each key of a tile is ahead of the key that its row stands at."""
    columns = np.arange(ahead, ahead + length, dtype=np.int32)
    return columns - np.arange(count, dtype=np.int32)[:, None]


def _lift(array: Array, rank: int) -> Array:
    return array[(np.newaxis,) * (rank - array.ndim)]


def _split_heads(array: Array, problem: AttentionProblem) -> Array:
    """``[batch, heads_q, ...]`` as ``[batch, heads_kv, group, ...]``, never copied."""
    shape = (array.shape[0], problem.heads_kv, problem.group, *array.shape[2:])
    strides = (array.strides[0], array.strides[1] * problem.group, *array.strides[1:])
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def _readable(array: Array, dtype: str) -> Array:
    """`as_float` with rows that BLAS can read in place."""
    array = as_float(array, dtype)
    row, element = array.strides[-2:]
    width = array.shape[-1] * array.itemsize
    return array if element == array.itemsize and row >= width else np.ascontiguousarray(array)
