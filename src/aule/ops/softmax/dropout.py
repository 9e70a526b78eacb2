"""Dropout of attention weights: which weights are kept, the same on every backend for the same seed.

Weight (row, column) of a head is kept when its 16 random bits, as a number, are at least ``2**16 * rounded_chance(p)``.
They are number ``column & 7`` of the eight halves of Philox4x32-10 (`aule.tile.common.random`), the lower half of each
word first, at counter ``(column >> 3, row, batch * heads_q + head, 0)`` with the two words of the seed, low word first,
as key. Row and column count from the start of the problem, so tiles and schedules do not matter. Kept weights are
multiplied by ``1 / (1 - rounded_chance(p))``; dropout changes neither the softmax's denominator nor the log-sum-exp.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from aule.ir import Builder, Value
from aule.ir.types import Scalar, Vector, u16, u32, u64
from aule.tile.common.random import MULTIPLIERS, ROUNDS, WEYL, philox
from aule.tile.vector.engine import Vectors

Words = npt.NDArray[np.uint32]
OCTET = 8
"""Neighbouring columns that one counter serves."""
VECTORS = 4
"""Vectors of columns that CPUs draw for at a time."""


def rounded_chance(p: float) -> float:
    """``p`` rounded to a multiple of 2^-16, the chances that 16 bits can have; 0 and 1 only if ``p`` is."""
    return p if p in (0.0, 1.0) else min(max(round(p * 65536), 1), 65535) / 65536


def threshold(p: float) -> int:
    """A weight is dropped if the word with its bits in the upper half is below this."""
    return min(int(rounded_chance(p) * 65536), 65535) << 16


def keep_scale(p: float) -> float:
    """The factor of kept weights, which preserves their mean. With p = 1 it is 0, since `threshold` keeps the largest
    bits."""
    return 0.0 if p == 1.0 else 1.0 / (1.0 - rounded_chance(p))


# -- NumPy -------------------------------------------------------------------------------------------------------------


def philox_words(counter: tuple[npt.ArrayLike, ...], key: tuple[int, int]) -> list[Words]:
    """Four random words for each element of the broadcast counter, as `aule.tile.common.random.philox`."""
    x = [np.asarray(word, np.uint64) for word in counter]
    for number in range(ROUNDS):
        k0, k1 = (np.uint64((word + step * number) & 0xFFFFFFFF) for word, step in zip(key, WEYL, strict=True))
        product0, product1 = x[0] * np.uint64(MULTIPLIERS[0]), x[2] * np.uint64(MULTIPLIERS[1])
        high0, high1 = product0 >> np.uint64(32), product1 >> np.uint64(32)
        low0, low1 = product0 & np.uint64(0xFFFFFFFF), product1 & np.uint64(0xFFFFFFFF)
        x = [high1 ^ x[1] ^ k0, low1, high0 ^ x[3] ^ k1, low0]
    return [word.astype(np.uint32) for word in x]


def fresh_seed() -> int:
    """A random seed. Not from `secrets`, whose import takes longer than all of this file's."""
    return int.from_bytes(os.urandom(8), "little")


def seed_words(seed: int) -> Words:
    """A seed as kernels read it: low word, high word."""
    return np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)


def kept(p: float, seed: Words, heads: npt.ArrayLike, rows: slice, columns: slice) -> npt.NDArray[np.bool_]:
    """Which weights are kept: bools ``[*heads.shape, rows, columns]``.

    ``seed`` is two words (`seed_words`), ``heads`` holds ``batch * heads_q + head`` of each head, and the slices have
    start and stop.
    """
    first = columns.start // OCTET
    octets = np.arange(first, -(-columns.stop // OCTET))
    places = np.arange(rows.start, rows.stop)[:, None]
    words = philox_words((octets, places, np.asarray(heads)[..., None, None], 0), (int(seed[0]), int(seed[1])))
    halves = [word << shift for word in words for shift in (np.uint32(16), np.uint32(0))]
    flat = np.stack(halves, axis=-1).reshape(*words[0].shape[:-1], OCTET * len(octets))  # not -1: there may be no rows
    start = columns.start - OCTET * first
    return flat[..., start : start + columns.stop - columns.start] >= np.uint32(threshold(p))


# -- kernels -----------------------------------------------------------------------------------------------------------


class Dropout:
    """Which weights a kernel keeps.

    Parameters
    ----------
    seed, offset : Value
        The buffer of the seed's two words, and where it begins.
    start : tuple, optional
        Octet, row and head at which the kernel's problem begins, if it is a part of a larger one.
    """

    def __init__(
        self, b: Builder, limit: Value, seed: Value, offset: Value, start: tuple[Value, ...] | None = None
    ) -> None:
        self.b, self.limit, self.start = b, limit, start
        self.key = (b.load(seed, offset), b.load(seed, offset + 1))

    def words(self, head: Value, row: Value, octet: Value) -> list[Value]:
        """The four words of the eight columns from ``8 * octet`` on, or of as many octets as a vector has lanes.
        ``head`` is ``batch * heads_q + head``."""
        octet, row, head = (self.b.cast(x, u32) for x in (octet, row, head))
        return self._draw(octet, row, head, u32)

    def _draw(self, octet: Value, row: Value, head: Value, kind: Scalar) -> list[Value]:
        """The words of counters that count from the start of the problem, in words of 32 or 64 bits."""
        b = self.b
        if self.start is not None:
            octet, row, head = (x + b.cast(y, kind) for x, y in zip((octet, row, head), self.start, strict=True))
        return philox(b, (octet, row, head, b.const(0, kind)), self.key)

    def kept(self, words: list[Value]) -> Value:
        """Whether the columns of `words` are kept, as a vector."""
        return self.b.vector(_upper(words)) >= self.limit

    def masks(self, words: list[Value]) -> Value:
        """A vector of words with ones in the halves that are kept, by arithmetic of all halves at once."""
        b = self.b
        most = (self.limit >> 16) - 1  # the largest that is dropped; larger ones become 1, then all ones
        halves = b.max(b.bitcast(b.vector(words), Vector(u16, 2 * len(words))), b.cast(most, u16))
        ones = b.min(halves + b.cast(b.const(0, u32) - most, u16), 1)
        return b.bitcast(ones, Vector(u32, len(words))) * 0xFFFF

    def octet(self, head: Value, row: Value, octet: Value) -> list[Value]:
        """Whether each of the eight columns from ``8 * octet`` on is kept."""
        return [half >= self.limit for half in _upper(self.words(head, row, octet))]

    def strip(self, head: Value, row: Value, column: Value, width: int) -> list[Value]:
        """Whether ``width`` (1, 2, 4 or 8) columns from ``column``, a multiple of it, are kept."""
        return [half >= self.limit for half in self.strip_halves(head, row, column, width)]

    def strip_halves(self, head: Value, row: Value, column: Value, width: int) -> list[Value]:
        """A word for each column of `strip`, with its random bits in the upper half."""
        b = self.b
        words = self.words(head, row, column >> 3)
        while len(words) > max(width // 2, 1):
            half = len(words) // 2
            second = b.ne(column & 2 * half, 0)
            words = [b.select(second, y, x) for x, y in zip(words[:half], words[half:], strict=True)]
        halves = _upper(words)
        return halves if width > 1 else [b.select(b.ne(column & 1, 0), halves[1], halves[0])]

    def vectors(self, engine: Vectors, head: Value, row: Value, column: Value, scale: Value) -> list[Value]:
        """The factors of weights in four vectors of columns from ``column`` on, a multiple of eight."""
        b, lanes = self.b, engine.lanes
        zero, factor = engine.const(0.0), b.splat(scale, lanes)
        return [b.select(keep, factor, zero) for keep in self.kept_vectors(head, row, column, lanes)]

    def kept_vectors(self, head: Value, row: Value, column: Value, lanes: int) -> list[Value]:
        """Whether the columns of `vectors` are kept, as four vectors."""
        b, octets = self.b, lanes * VECTORS // OCTET
        if octets == 1:
            parts = self.words(head, row, column >> 3)
        else:
            places = b.vector([b.const(i, u64) for i in range(octets)]) + b.cast(column >> 3, u64)
            words = self._draw(places, b.cast(row, u64), b.cast(head, u64), u64)
            # Interleave the low halves of two words, then pairs of them.
            low = [b.bitcast(word, Vector(u32, 2 * octets)) for word in words]
            alternating = tuple(i // 2 * 2 + 2 * octets * (i % 2) for i in range(2 * octets))
            pairs = [b.bitcast(b.permute(x, y, alternating), Vector(u64, octets)) for x, y in (low[:2], low[2:])]
            order = [i // 2 + octets * (i % 2) for i in range(2 * octets)]
            step = len(order) // VECTORS
            parts = [b.permute(pairs[0], pairs[1], tuple(order[i : i + step])) for i in range(0, len(order), step)]
        limit = b.splat(b.cast(self.limit >> 16, u16), lanes)
        return [b.bitcast(part, Vector(u16, lanes)) >= limit for part in parts]


def _upper(words: list[Value]) -> list[Value]:
    """A word for each half of some words, the lower one first, with that half in its upper bits."""
    return [half for word in words for half in (word << 16, word)]
