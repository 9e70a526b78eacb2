"""Which rows of a sequence each rank holds, and how many rows and keys of two ranks meet within a band.

Pure arithmetic: every rank computes the same answer for all ranks, so nothing about it needs to be exchanged.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from aule.errors import InvalidArgumentError, InvalidShapeError

Balance = Literal["zigzag", "contiguous", "striped"]
Numbers = npt.NDArray[np.int64]
BALANCES = ("zigzag", "contiguous", "striped")


class Chunk(NamedTuple):
    """Rows ``start, start + step, ...`` of the sequence, which a rank holds from its row ``at`` on."""

    start: int
    length: int
    step: int
    at: int

    @property
    def rows(self) -> range:
        """Their numbers in the sequence."""
        return range(self.start, self.start + self.length * self.step, self.step)

    @property
    def local(self) -> slice:
        """Where the rank holds them."""
        return slice(self.at, self.at + self.length)


class Band(NamedTuple):
    """Keys that query row ``i`` of a chunk keeps: ``i - left .. i + right``, both None if unbounded, else any sign."""

    left: int | None
    right: int | None

    def kept(self, rows: int, keys: int) -> int:
        """Number of pairs of rows and keys that are kept."""
        return _kept(self, rows, keys)

    def is_full(self, rows: int, keys: int) -> bool:
        """Whether every row keeps every key."""
        return (self.left is None or self.left >= rows - 1) and (self.right is None or self.right >= keys - 1)


@lru_cache(4096)
def _kept(band: Band, rows: int, keys: int) -> int:
    i = np.arange(rows)
    first = 0 if band.left is None else np.maximum(i - band.left, 0)
    end = keys if band.right is None else np.minimum(i + band.right + 1, keys)
    return int(np.broadcast_to(np.maximum(end - first, 0), i.shape).sum())


def check_balance(op: str, balance: object) -> None:
    """Refuse an unknown balance."""
    if balance not in BALANCES:
        raise InvalidArgumentError(
            f"[{op}] expected balance {', '.join(map(repr, BALANCES))}, got {balance!r}; choose one"
        )


def check_length(op: str, name: str, length: int, ranks: int, balance: str) -> None:
    """Refuse a local length that a balance cannot have."""
    if balance == "zigzag" and length % 2 and ranks > 1:
        raise InvalidShapeError(
            f"[{op}] expected shards of an even number of rows with balance 'zigzag', got {length} rows of {name}; pad "
            f"the sequence to a multiple of {2 * ranks}, or choose balance='contiguous'"
        )


def chunks(balance: str, rank: int, ranks: int, length: int) -> tuple[Chunk, ...]:
    """The chunks of a sequence of ``ranks * length`` rows that a rank holds, in the order in which it holds them."""
    if balance == "striped" and ranks > 1:
        return (Chunk(rank, length, ranks, 0),)
    if balance == "zigzag" and ranks > 1:
        half = length // 2
        return Chunk(rank * half, half, 1, 0), Chunk((2 * ranks - 1 - rank) * half, half, 1, half)
    return (Chunk(rank * length, length, 1, 0),)


def rows(balance: str, rank: int, ranks: int, length: int) -> Numbers:
    """Numbers of the rows that a rank holds, in order."""
    return np.concatenate([np.asarray(chunk.rows, np.int64) for chunk in chunks(balance, rank, ranks, length)])


def order(balance: str, ranks: int, length: int) -> Numbers:
    """Numbers of the rows of all ranks, concatenated."""
    return np.concatenate([rows(balance, rank, ranks, length) for rank in range(ranks)])


# -- calls -------------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """One ordinary call: consecutive query rows and keys of two ranks, and where they are in the sequence.

    Attributes
    ----------
    rows, keys : slice
        Of the rank that holds the queries, and of the one that holds the keys.
    q, k : range
        Their numbers in the sequence; empty if they have gaps, which only calls without positions have.
    band : Band
        Kept keys, in local numbers.
    shift : int
        Key that row 0 is aligned with; the band contains it.
    sign : int
        With ALiBi and strides, the sign of ``position - key``, which is the same in the whole block; else 0.
    sequence : int
        Number of the packed sequence, else 0.
    offsets : tuple of int or None
        Where packed sequences begin and the last one ends, if one call computes several of them.
    """

    rows: slice
    keys: slice
    q: range
    k: range
    band: Band
    shift: int
    sign: int = 0
    sequence: int = 0
    offsets: tuple[int, ...] | None = None

    @property
    def kept(self) -> int:
        """Pairs of rows and keys that are kept."""
        if self.offsets is not None:
            return sum(self.band.kept(n, n) for n in (y - x for x, y in pairwise(self.offsets)))
        return self.band.kept(_length(self.rows), _length(self.keys))

    @property
    def window(self) -> tuple[int | None, int | None]:
        """The band as a window around ``row + shift``."""
        left, right = self.band
        return None if left is None else left + self.shift, None if right is None else right - self.shift


def _length(part: slice) -> int:
    return int(part.stop - part.start)


class Positions(NamedTuple):
    """Everything about a call that decides which rows meet which keys.

    Attributes
    ----------
    balance : str
        How rows and keys are spread over ranks.
    ranks, rows, keys : int
        Ranks of the ring, query rows and keys of each.
    shift : int
        Key that row 0 of the sequence is aligned with.
    left, right : int or None
        Keys kept left and right of it; None if unbounded.
    exact : bool
        Calls must know positions: ALiBi, dropout, masks and biases.
    signed : bool
        Blocks with strides are divided where ``position - key`` changes its sign: ALiBi.
    sequences : tuple of int
        Where packed sequences begin and the last one ends; empty if there is only one.
    apart : bool
        Each packed sequence is a call of its own: dropout.
    """

    balance: str
    ranks: int
    rows: int
    keys: int
    shift: int
    left: int | None
    right: int | None
    exact: bool = False
    signed: bool = False
    sequences: tuple[int, ...] = ()
    apart: bool = False


def blocks(at: Positions, rank: int, owner: int) -> list[Block]:
    """The calls of a rank on the keys of another; none if it keeps none of them."""
    queries = chunks(at.balance, rank, at.ranks, at.rows)
    keys = chunks(at.balance, owner, at.ranks, at.keys)
    if at.sequences:
        return [block for q in queries for k in keys for block in _packed(at, q, k)]
    found = [block for q in queries for k in keys for block in _pairs(at, q, k)]
    return found if at.exact else _joined(at, found)


def _pairs(at: Positions, q: Chunk, k: Chunk) -> Iterator[Block]:
    """The calls on two chunks: one, or with ALiBi and strides one for each sign of ``position - key``."""
    distance, step = q.start + at.shift - k.start, q.step
    # Row i stands at key (i * step + distance) / step of the chunk, in general between two of them.
    left = None if at.left is None else (at.left - distance) // step
    right = None if at.right is None else (at.right + distance) // step
    band, below = Band(left, right), distance // step
    if step == 1:
        parts = [(band, distance, 0)]
    elif not at.signed:
        shift = max(0, -left) if left is not None else 0
        parts = [(band, min(shift, right) if right is not None else shift, 0)]
    else:
        lower = Band(left, below if right is None else min(right, below))
        upper = Band(-below - 1 if left is None else min(left, -below - 1), right)
        parts = [(lower, below, 1), (upper, below + 1, -1)]
    for part, shift, sign in parts:
        if part.kept(q.length, k.length):
            yield Block(q.local, k.local, q.rows, k.rows, part, shift, sign)


def _packed(at: Positions, q: Chunk, k: Chunk) -> Iterator[Block]:
    """The calls on two chunks of packed sequences: one for each that has rows in both, or one for all of them."""
    starts = at.sequences
    here = range(max(bisect_right(starts, q.start) - 1, 0), min(bisect_left(starts, q.rows.stop), len(starts) - 1))
    if q.start == k.start and not at.apart:
        inner = [min(max(x - q.start, 0), q.length) for x in starts[here.start : here.stop + 1]]
        if inner and inner[-1] > inner[0]:
            rows, keys = (slice(x.at + inner[0], x.at + inner[-1]) for x in (q, k))
            offsets = tuple(x - inner[0] for x in inner)
            yield Block(rows, keys, range(0), range(0), Band(at.left, at.right), 0, offsets=offsets)
        return
    for number in here:
        first, end = starts[number], starts[number + 1]
        (q0, q1), (k0, k1) = ((max(x.start, first), min(x.rows.stop, end)) for x in (q, k))
        if q0 < q1 and k0 < k1:
            distance = q0 - k0
            band = Band(*(None if x is None else x + y for x, y in ((at.left, -distance), (at.right, distance))))
            if band.kept(q1 - q0, k1 - k0):
                rows, keys = (slice(x.at + a - x.start, x.at + b - x.start) for x, a, b in ((q, q0, q1), (k, k0, k1)))
                q_rows, k_rows = range(q0 - first, q1 - first), range(k0 - first, k1 - first)
                yield Block(rows, keys, q_rows, k_rows, band, distance, sequence=number)


def _joined(at: Positions, blocks: list[Block]) -> list[Block]:
    """Join chunks for fewer calls, where rows need no positions: two chunks become one where all keys are kept."""
    if len(blocks) == 3 and at.rows == at.keys and at.shift == 0 and at.left is None and at.right == 0:
        # A rank's own zigzag chunks: their local order is that of the sequence, so one causal call does.
        return [Block(slice(0, at.rows), slice(0, at.keys), range(0), range(0), Band(None, 0), 0)]
    for one in ("keys", "rows"):
        blocks = _joined_along(blocks, one)
    return blocks


def _joined_along(blocks: list[Block], same: str) -> list[Block]:
    other = "rows" if same == "keys" else "keys"
    found: list[Block] = []
    for block in sorted(blocks, key=lambda x: (getattr(x, same).start, getattr(x, other).start)):
        last = found[-1] if found else None
        full = block.band.is_full(_length(block.rows), _length(block.keys))
        if (
            last is not None
            and full
            and last.band == Band(None, None)
            and getattr(last, same) == getattr(block, same)
            and getattr(last, other).stop == getattr(block, other).start
        ):
            both = slice(getattr(last, other).start, getattr(block, other).stop)
            joined = last._replace(q=range(0), k=range(0))
            found[-1] = joined._replace(rows=both) if other == "rows" else joined._replace(keys=both)
        else:
            found.append(block._replace(band=Band(None, None), shift=0) if full else block)
    return found
