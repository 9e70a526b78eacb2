"""Dropout of the weights of a tile on matrix units.

One counter of `dropout.Dropout` serves eight neighbouring keys, an octet, but a lane of a fragment holds only one or
two of them. So lanes that share octets draw one each and exchange bits, so that each gets those of its own keys. That
is a transposition, and takes one shuffle for each bit of the lane number that distinguishes keys of an octet. A word
holds the bits of four octets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aule.ir import Value
from aule.ir.types import u32
from aule.ops.scores.band import Place
from aule.ops.softmax.dropout import OCTET, Dropout
from aule.tile.common.math import fold
from aule.tile.fragment.arrangement import weigh_bits
from aule.tile.fragment.engine import Fragments

_WORD = 4
"""Octets whose bits fill a word."""
_LOWER = {1: 0x55555555, 2: 0x33333333, 4: 0x0F0F0F0F}
"""Bits of the keys whose number in the octet lacks a bit."""


class TileDropout:
    """Draws for tiles of an engine, whose keys lie along the columns or, in transposed tiles, the rows.

    Parameters
    ----------
    rows, cols : int
        Rows and columns that a lane holds.
    """

    def __init__(
        self, dropout: Dropout, engine: Fragments, rows: int, cols: int, keys: Literal["columns", "rows"] = "columns"
    ) -> None:
        self.b, self.dropout, self.lane = dropout.b, dropout, engine.lane
        self.rows, self.cols, self.by_columns = rows, cols, keys == "columns"
        down, right = [engine.below(r) for r in range(rows)], [engine.behind(c) for c in range(cols)]
        layout = engine.arrangement.results
        weights, self.keys, self.others = (
            (layout.lane_cols, right, down) if self.by_columns else (layout.lane_rows, down, right)
        )
        self.lane_bits = [(i, weight) for i, weight in enumerate(weights) if 0 < weight < OCTET]
        """Bits of the lane number that distinguish keys of an octet, and what each adds to the key."""
        self.octets = sorted({key // OCTET for key in self.keys})
        # Lanes that share octets draw for neighbouring places, one for each lane.
        shared = len(self.lane_bits)
        across = _steps(self.others, shared)
        along = _steps(self.octets, shared - len(across))
        self.size = 1 << len(across), 1 << len(along)
        places = [*((x, 0) for x in across), *((0, x) for x in along)]
        add = {i: at for (i, _), at in zip(self.lane_bits, places, strict=False)}  # a bit without a place draws twice
        each = [add.get(i, (0, 0)) for i in range(len(weights))]
        self.own = [weigh_bits(self.b, self.lane, [at[axis] for at in each]) for axis in (0, 1)]
        """What the lane adds to query and octet of the first place for its own draw."""

    def draw(self, head: Value, place: Place) -> Draw:
        """Draw for a tile. All lanes of the subgroup must take part."""
        b, words = self.b, []
        starts = [(x, y) for x in self.others[:: self.size[0]] for y in self.octets[:: self.size[1]]]
        for first in range(0, len(starts), _WORD):
            bits: list[Value] = []
            for byte, (other, octet) in enumerate(starts[first : first + _WORD]):
                at = self.others.index(other), [key // OCTET for key in self.keys].index(octet)
                query, key = place(*at) if self.by_columns else place(*reversed(at))
                keep = self.dropout.octet(head, query + self.own[0], (key >> 3) + self.own[1])
                ones = [b.const(1 << (byte * OCTET + i), u32) for i in range(OCTET)]
                bits += [b.select(x, one, b.const(0, u32)) for x, one in zip(keep, ones, strict=True)]
            words.append(self._exchanged(fold(b, "or", bits)))
        return Draw(self, words)

    def _exchanged(self, word: Value) -> Value:
        """Trade bits of one octet at all keys for bits of all this lane's octets at its own keys. Afterwards the weight
        that a bit of the lane has in a key is the weight of the drawing lane's bit in a byte."""
        b = self.b
        for i, weight in self.lane_bits:
            upper = (b.cast(self.lane, u32) >> i) & 1
            stays = b.select(b.ne(upper, 0), b.const(_LOWER[weight] << weight, u32), b.const(_LOWER[weight], u32))
            theirs = b.shuffle_xor(word, 1 << i)
            moved = (theirs << (weight - upper * weight)) >> (upper * weight)
            word = (word & stays) | (moved & ~stays)
        return word

    def bit(self, r: int, c: int) -> tuple[int, int]:
        """The word that holds an element's bit, and the bit's number."""
        across, along = self.size
        other, key = (r, self.keys[c]) if self.by_columns else (c, self.keys[r])
        (group, i), (octet, j) = divmod(other, across), divmod(self.octets.index(key // OCTET), along)
        number, byte = divmod(group * (len(self.octets) // along) + octet, _WORD)
        drew = i + j * across
        return number, byte * OCTET + key % OCTET + sum(w for n, (_, w) in enumerate(self.lane_bits) if drew >> n & 1)


@dataclass(frozen=True)
class Draw:
    """The draw for a tile: bits of this lane's elements."""

    tile: TileDropout
    words: list[Value]

    def keeps(self, r: int, c: int) -> Value:
        """Whether the element in this lane's r-th row and c-th column is kept."""
        b = self.tile.b
        number, bit = self.tile.bit(r, c)
        return b.ne(self.words[number] & (1 << bit), 0)

    def kept(self) -> list[list[Value]]:
        """Whether each element is kept, by row and column."""
        return [[self.keeps(r, c) for c in range(self.tile.cols)] for r in range(self.tile.rows)]


def _steps(offsets: list[int], most: int) -> list[int]:
    """What each bit of a number below ``2 ** n`` adds to the first offset of every group of ``2 ** n``, for the largest
    n up to ``most`` for which offsets are such sums."""
    for bits in range(most, 0, -1):
        size = 1 << bits
        weights = [offsets[1 << i] - offsets[0] for i in range(bits)] if len(offsets) % size == 0 else []
        inside = [sum(w for i, w in enumerate(weights) if n >> i & 1) for n in range(size)]
        if weights and [start + x for start in offsets[::size] for x in inside] == offsets:
            return weights
    return []
