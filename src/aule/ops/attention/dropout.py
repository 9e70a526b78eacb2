"""Dropout of attention weights: which weights are kept, the same on every backend for the same seed.

Weight (row, column) of a head is kept when a random word is at least ``threshold(p)``. The word is component
``column & 3`` of Philox4x32-10 (`aule.tile.random`) at counter ``(column >> 2, row, batch * heads_q + head, 0)`` with
the two words of the seed, low word first, as key. Row and column count from the start of the problem, so tiles and
schedules do not matter. Kept weights are multiplied by ``1 / (1 - p)``; the softmax's denominator and the log-sum-exp
know nothing of dropout.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from aule.ir import Builder, Value
from aule.ir.types import Vector, u32, u64
from aule.tile.random import MULTIPLIERS, ROUNDS, WEYL, philox
from aule.tile.vector import Vectors

Words = npt.NDArray[np.uint32]
WORDS = 4
"""Neighbouring columns that one counter serves."""


def threshold(p: float) -> int:
    """Words below this are dropped."""
    return min(round(p * 2**32), 2**32 - 1)


def keep_scale(p: float) -> float:
    """What kept weights are multiplied by. With p = 1 nothing is kept, also where a word is the largest there is."""
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


# -- NumPy -------------------------------------------------------------------------------------------------------------


def philox_words(counter: tuple[npt.ArrayLike, ...], key: tuple[int, int]) -> list[Words]:
    """Four words for each element that the four words of the counter broadcast to; as `aule.tile.random.philox`."""
    x = [np.asarray(word, np.uint64) for word in counter]
    for number in range(ROUNDS):
        k0, k1 = (np.uint64((word + step * number) & 0xFFFFFFFF) for word, step in zip(key, WEYL, strict=True))
        product0, product1 = x[0] * np.uint64(MULTIPLIERS[0]), x[2] * np.uint64(MULTIPLIERS[1])
        high0, high1 = product0 >> np.uint64(32), product1 >> np.uint64(32)
        low0, low1 = product0 & np.uint64(0xFFFFFFFF), product1 & np.uint64(0xFFFFFFFF)
        x = [high1 ^ x[1] ^ k0, low1, high0 ^ x[3] ^ k1, low0]
    return [word.astype(np.uint32) for word in x]


def fresh_seed() -> int:
    """A seed that nobody can guess. Not by `secrets`, whose import takes longer than all of this file's."""
    return int.from_bytes(os.urandom(8), "little")


def seed_words(seed: int) -> Words:
    """A seed as kernels read it: low word, high word."""
    return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)


def kept(p: float, seed: Words, heads: npt.ArrayLike, rows: slice, columns: slice) -> npt.NDArray[np.bool_]:
    """Which weights are kept.

    Parameters
    ----------
    seed : ndarray
        Two words, as `seed_words` gives them.
    heads : array_like of int
        ``batch * heads_q + head`` of each head, of any shape.
    rows, columns : slice
        With start and stop.

    Returns
    -------
    ndarray of bool
        ``[*heads.shape, rows, columns]``.
    """
    first = columns.start // WORDS
    quads = np.arange(first, -(-columns.stop // WORDS))
    places = np.arange(rows.start, rows.stop)[:, None]
    words = philox_words((quads, places, np.asarray(heads)[..., None, None], 0), (int(seed[0]), int(seed[1])))
    flat = np.stack(words, axis=-1).reshape(*words[0].shape[:-1], -1)
    start = columns.start - WORDS * first
    return flat[..., start : start + columns.stop - columns.start] >= np.uint32(threshold(p))


# -- kernels -----------------------------------------------------------------------------------------------------------


class Dropout:
    """Which weights a kernel keeps; ``seed`` is the buffer of the seed's two words, ``offset`` where it begins."""

    def __init__(self, b: Builder, limit: Value, seed: Value, offset: Value) -> None:
        self.b = b
        self.limit = limit
        self.key = (b.load(seed, offset), b.load(seed, offset + 1))

    def words(self, head: Value, row: Value, quad: Value) -> list[Value]:
        """The words of the four columns from ``4 * quad`` on, or of as many quads as a vector has lanes.

        ``head`` is ``batch * heads_q + head``.
        """
        b = self.b
        return philox(b, (b.cast(quad, u32), b.cast(row, u32), b.cast(head, u32), b.const(0, u32)), self.key)

    def strip(self, head: Value, row: Value, column: Value, width: int) -> list[Value]:
        """Whether ``width`` (1, 2 or 4) columns from ``column``, a multiple of it, are kept."""
        return [word >= self.limit for word in self.strip_words(head, row, column, width)]

    def strip_words(self, head: Value, row: Value, column: Value, width: int) -> list[Value]:
        """The words of those columns."""
        b = self.b
        words = self.words(head, row, column >> 2)
        while len(words) > width:
            half = len(words) // 2
            second = b.ne(column & half, 0)
            words = [b.select(second, y, x) for x, y in zip(words[:half], words[half:], strict=True)]
        return words

    def vectors(self, engine: Vectors, head: Value, row: Value, column: Value, scale: Value) -> list[Value]:
        """What the weights of four vectors of columns from ``column``, a multiple of four, are multiplied by."""
        b, lanes = self.b, engine.lanes
        zero, factor = engine.const(0.0), b.splat(scale, lanes)
        return [b.select(word >= self.limit, factor, zero) for word in self.vector_words(head, row, column, lanes)]

    def vector_words(self, head: Value, row: Value, column: Value, lanes: int) -> list[Value]:
        """The words of those columns, as four vectors."""
        b = self.b
        if lanes < WORDS:
            places = b.vector([b.const(i, u32) for i in range(lanes)]) + b.cast(column >> 2, u32)
            return _interleaved(b, self.words(head, row, places), lanes)
        quads, result = lanes // 2, []
        for first in (0, quads):
            places = b.vector([b.const(first + i, u64) for i in range(quads)]) + b.cast(column >> 2, u64)
            words = philox(b, (places, b.cast(row, u64), b.cast(head, u64), b.const(0, u64)), self.key)
            # Low halves of two words in turns; then twos of them.
            low = [b.bitcast(word, Vector(u32, lanes)) for word in words]
            turns = tuple(i // 2 * 2 + lanes * (i % 2) for i in range(lanes))
            twos = [b.bitcast(b.permute(x, y, turns), Vector(u64, quads)) for x, y in (low[:2], low[2:])]
            for at in (0, quads // 2):
                order = tuple(at + i // 2 + quads * (i % 2) for i in range(quads))
                result.append(b.bitcast(b.permute(twos[0], twos[1], order), Vector(u32, lanes)))
        return result


def _interleaved(b: Builder, x: list[Value], lanes: int) -> list[Value]:
    """Component 0 of lane 0, component 1 of lane 0 ... component 3 of the last lane, as four vectors of two."""
    result = []
    for first in range(0, WORDS * lanes, lanes):
        (lane, one), (other, two) = [divmod(first + i, WORDS) for i in range(lanes)]  # lane and component
        result.append(b.permute(x[one], x[two], (lane, lanes + other)))
    return result
