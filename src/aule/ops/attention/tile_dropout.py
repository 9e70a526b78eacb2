"""Which weights of a tile on matrix units dropout keeps.

One counter of `dropout.Dropout` serves eight neighbouring keys, an octet, but a lane of a fragment holds one or two of
these, and others hold the rest. So lanes that share octets draw one each, and exchange bits: each gets those of its own
keys. That is a transposition, and takes one shuffle for each bit of the lane's number that tells keys of an octet
apart. A word has the bits of four octets, which travel together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from aule.ir import Value
from aule.ir.types import u32
from aule.ops.attention.dropout import OCTET, Dropout
from aule.tile.arrangement import weigh_bits
from aule.tile.fragment import Fragments
from aule.tile.math import fold

Place = Callable[[int, int], tuple[Value, Value]]
"""Query and key of the element in a lane's r-th row and c-th column."""
_WORD = 4
"""Octets of which a word has the bits."""
_LOWER = {1: 0x55555555, 2: 0x33333333, 4: 0x0F0F0F0F}
"""Bits of the keys of octets whose number lacks a bit."""


class TileDropout:
    """Draws for tiles of an engine, of which keys lie along the columns or, in transposed tiles, the rows.

    Parameters
    ----------
    rows, cols : int
        That a lane holds.
    """

    def __init__(
        self, dropout: Dropout, engine: Fragments, rows: int, cols: int, keys: Literal["columns", "rows"] = "columns"
    ) -> None:
        self.b, self.dropout, self.lane = dropout.b, dropout, engine.lane
        self.rows, self.cols, self.by_columns = rows, cols, keys == "columns"
        down, right = [engine.below(r) for r in range(rows)], [engine.behind(c) for c in range(cols)]
        layout = engine.way.results
        weights, self.keys, self.others = (
            (layout.lane_cols, right, down) if self.by_columns else (layout.lane_rows, down, right)
        )
        self.lane_bits = [(i, weight) for i, weight in enumerate(weights) if 0 < weight < OCTET]
        """Bits of the lane that tell keys of an octet apart, and what they add to the key."""
        self.octets = sorted({key // OCTET for key in self.keys})
        # Lanes that share octets draw those of some neighbouring places, as many as there are lanes.
        shared = len(self.lane_bits)
        across = _steps(self.others, shared)
        along = _steps(self.octets, shared - len(across))
        self.size = 1 << len(across), 1 << len(along)
        places = [*((x, 0) for x in across), *((0, x) for x in along)]
        add = {i: at for (i, _), at in zip(self.lane_bits, places, strict=False)}  # a bit without one: drawn twice
        each = [add.get(i, (0, 0)) for i in range(len(weights))]
        self.own = [weigh_bits(self.b, self.lane, [at[axis] for at in each]) for axis in (0, 1)]
        """What is added to query and octet of the first of these for what the lane draws."""

    def draw(self, head: Value, place: Place) -> Draw:
        """Draw for a tile. All lanes of the subgroup take part."""
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
        """Bits of all of this lane's octets, at its own keys, for those of one octet at all its keys: what a bit of the
        lane adds to a key is, from there on, what the same bit of who has drawn adds to a place in a byte."""
        b = self.b
        for i, weight in self.lane_bits:
            upper = (b.cast(self.lane, u32) >> i) & 1
            stays = b.select(b.ne(upper, 0), b.const(_LOWER[weight] << weight, u32), b.const(_LOWER[weight], u32))
            theirs = b.shuffle_xor(word, 1 << i)
            moved = (theirs << (weight - upper * weight)) >> (upper * weight)
            word = (word & stays) | (moved & ~stays)
        return word

    def bit(self, r: int, c: int) -> tuple[int, int]:
        """The word that has an element's bit, and which it is there."""
        across, along = self.size
        other, key = (r, self.keys[c]) if self.by_columns else (c, self.keys[r])
        (group, i), (octet, j) = divmod(other, across), divmod(self.octets.index(key // OCTET), along)
        number, byte = divmod(group * (len(self.octets) // along) + octet, _WORD)
        drew = i + j * across
        return number, byte * OCTET + key % OCTET + sum(w for n, (_, w) in enumerate(self.lane_bits) if drew >> n & 1)


@dataclass(frozen=True)
class Draw:
    """What was drawn for a tile: bits of this lane's elements."""

    tile: TileDropout
    words: list[Value]

    def keeps(self, r: int, c: int) -> Value:
        """Whether the element in a lane's r-th row and c-th column is kept."""
        b = self.tile.b
        number, bit = self.tile.bit(r, c)
        return b.ne(self.words[number] & (1 << bit), 0)

    def kept(self) -> list[list[Value]]:
        """The same of all elements, by rows and columns."""
        return [[self.keeps(r, c) for c in range(self.tile.cols)] for r in range(self.tile.rows)]


def _steps(offsets: list[int], most: int) -> list[int]:
    """What each bit of a number below ``2 ** n`` adds to the first of so many offsets, for all groups of as many: for
    the largest n for which that is so, ``most`` at most."""
    for bits in range(most, 0, -1):
        size = 1 << bits
        weights = [offsets[1 << i] - offsets[0] for i in range(bits)] if len(offsets) % size == 0 else []
        inside = [sum(w for i, w in enumerate(weights) if n >> i & 1) for n in range(size)]
        if weights and [start + x for start in offsets[::size] for x in inside] == offsets:
            return weights
    return []
