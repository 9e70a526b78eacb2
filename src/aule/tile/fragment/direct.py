"""Left factors straight from global memory: every lane reads its elements of a fragment in runs of 16 bytes.

The order of elements along a product's inner dimension does not matter, nor which row of a result is which column of a
matrix, as long as both factors agree. So a lane takes neighbouring columns instead of those that the fragment's layout
gives it, and nothing passes through shared memory. `Direct.source` gives the column of a matrix at each place, for the
other factor.

Rows are `u32` words in memory: two elements of 16 bits or four of 8, which become fp16 here, by a device instruction or
by moving their bits (`aule.tile.common.quantised`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from aule.ir import Builder, Value
from aule.ir.types import Fragment, Vector, element, u16, u32
from aule.target import FragmentLayout, Target
from aule.tile.common.matrix import Matrix, padded
from aule.tile.common.quantised import E4M3_HALF, I8_BITS, half_pairs
from aule.tile.fragment.arrangement import SIZE, uniform, weigh_bits
from aule.tile.fragment.engine import Components
from aule.view import ITEMSIZE

Along = Literal["columns", "rows"]


def holds_pairs(layout: FragmentLayout) -> bool:
    """Whether a lane's components come in pairs of neighbouring columns, which form words."""
    return (layout.part_rows[0], layout.part_cols[0]) == (0, 1)


def mirrors(target: Target) -> bool:
    """Whether right factors have the layout of left ones with rows and columns exchanged."""
    left, right = target.matrix_layout, target.matrix_right
    if left is None or right is None or not uniform(target) or not holds_pairs(left):
        return False
    transposed = left.transposed
    same = (right.lane_rows, right.lane_cols) == (transposed.lane_rows, transposed.lane_cols)
    return same and right.part_bits[0] == (1, 0) and sorted(right.part_bits) == sorted(transposed.part_bits)


class Direct:
    """A matrix that is read row by row, as factors of 16 of its rows or of their transpose.

    Parameters
    ----------
    engine : Components
        Engine for the elements that are multiplied: fp16 for a ``cache`` of 8 bits.
    dim : int
        Columns of the matrix.
    cache : str
        Element type in memory.
    along : {"columns", "rows"}
        Where the matrix's columns lie in a factor: along its columns, when the matrix's rows are the factor's; along
        its rows, when they are its columns.
    """

    def __init__(self, engine: Components, dim: int, cache: str, along: Along) -> None:
        self.engine, self.b, self.dim, self.cache = engine, engine.b, dim, cache
        weights, parts = _weights(engine.layout, along)
        self._lane_weights, self._part_weights = [x for x in weights if x], sorted(x for x in parts if x)
        self._held = 1 << len(self._part_weights)
        self.lanes = 1 << len(self._lane_weights)
        """Lanes that share a row."""
        self.size = ITEMSIZE[cache]
        self.converts = cache == "e4m3" and engine.e4m3
        """A device instruction converts bytes to fp16, instead of moving their bits."""
        self.unit = E4M3_HALF if cache == "e4m3" and not self.converts else 1.0
        """The factor by which elements are too large or small after conversion."""
        self.i8_bits: Value | int = I8_BITS
        """The bits with which `half_pairs` converts int8. In a register, two operations with constants become one."""
        self.run = choose_run(engine.layout, dim, cache, along)
        self.padded = padded(dim, self.lanes * self.run)
        self.pieces = self.padded // (self.lanes * self.run)
        self.fragments = self.padded // SIZE
        """Fragments that the columns fill."""
        ranks, rank = [], 1
        for weight in weights:
            ranks.append(rank if weight else 0)
            rank *= 2 if weight else 1
        self._rank = weigh_bits(self.b, engine.lane, ranks)

    @property
    def words(self) -> int:
        return self.run * self.size // 4

    def column(self, piece: int) -> Value:
        """The first column of a lane's run."""
        return (self._rank + piece * self.lanes) * self.run

    def load(self, matrix: Matrix, start: Value) -> list[Value]:
        """This lane's runs of the row that begins at element ``start``."""
        b, shift = self.b, 1 if self.size == 2 else 2
        words = replace(matrix, cols=self.dim >> shift)
        first = self._rank * self.words  # further runs lie at constant offsets from it
        columns = [first + piece * self.lanes * self.words for piece in range(self.pieces)]
        return [words.load_quad(b, start >> shift, column, self.padded >> shift, self.words) for column in columns]

    def source(self, place: Value) -> Value:
        """The matrix's column at a place along the fragments, counted over all of them."""
        held = self._held.bit_length() - 1
        run, lanes = self.run.bit_length() - 1, self.lanes.bit_length() - 1

        def weight_of(bit: int) -> int:
            """What a bit of an element's number in its lane adds to the column."""
            if self.size == 1 and bit < 2 and not self.converts:  # bytes 0 and 2 are a pair
                return 2 >> bit
            return 1 << (bit if bit < run else bit + lanes)

        weights = []
        for bit in range((self.padded - 1).bit_length()):
            if bit >= SIZE.bit_length() - 1:
                weights.append(weight_of(bit - (SIZE.bit_length() - 1) + held))
            elif 1 << bit in self._part_weights:
                weights.append(weight_of(self._part_weights.index(1 << bit)))
            else:
                weights.append(1 << (run + self._lane_weights.index(1 << bit)))
        return weigh_bits(self.b, place, weights)

    def row_words(self, runs: Sequence[Value]) -> list[Value]:
        """A row's elements in pairs."""
        words = _unpack(self.b, runs)
        if self.size == 2:
            return words
        if self.converts:
            return [pair for word in words for pair in self._halves(word)]
        return [pair for word in words for pair in half_pairs(self.b, word, self.cache, self.i8_bits)]

    def _halves(self, word: Value) -> list[Value]:
        """Four bytes as fp16, in pairs."""
        return self.b.unpack(self.b.bitcast(self.b.e4m3_halves(word), Vector(u32, 2)))

    def pair_words(self, runs: Sequence[Value], others: Sequence[Value]) -> list[Value]:
        """The elements of two rows, paired by column."""
        b = self.b
        words = []
        for x, y in zip(_unpack(b, runs), _unpack(b, others), strict=True):
            if self.converts:
                for pairs in zip(self._halves(x), self._halves(y), strict=True):
                    words += interleaved(b, *pairs)
                continue
            both = interleaved(b, x, y)
            if self.size == 2:
                words += both
            else:
                words += [pair for word in both for pair in half_pairs(b, word, self.cache, self.i8_bits)]
        return words

    def rows_factor(self, rows: Sequence[Sequence[Value]], number: int) -> Value:
        """The ``number``-th fragment of 16 rows, from `row_words` of this lane's rows."""
        rows_held, cols = self.engine.part_rows, self.engine.part_cols
        places = [(rows_held.index(row), number * self._held + cols.index(col)) for row, col in self.engine.places[::2]]
        return _packed(self.engine, [rows[row][col // 2] for row, col in places])

    def right_factor(self, rows: Mapping[int, Sequence[Value]], number: int) -> Value:
        """The ``number``-th fragment of the rows' transpose as a right factor, from `row_words` of this lane's rows by
        their offset from its first; missing rows are zero. Only if the target `mirrors`."""
        engine, right, zero = self.engine, self.engine.right_layout, self.b.const(0, u32)
        assert right is not None
        words = []
        for part in range(0, right.parts, 2):
            col, row = right.place(0, part)
            words.append(rows[row][(number * self._held + engine.part_cols.index(col)) // 2] if row in rows else zero)
        return _packed(engine, words, engine.right)

    def columns_factor(self, pairs: Sequence[Sequence[Value]], number: int) -> Value:
        """The ``number``-th fragment of the transpose of 16 rows, from `pair_words` of this lane's rows."""
        rows, cols = self.engine.part_rows, self.engine.part_cols
        places = [(number * self._held + rows.index(row), cols.index(col)) for row, col in self.engine.places[::2]]
        return _packed(self.engine, [pairs[col // 2][row] for row, col in places])


def choose_run(layout: FragmentLayout, dim: int, cache: str, along: Along) -> int:
    """Elements that a lane reads at once: 16 bytes, or 8 where 16 would pad columns; at least as many as it holds of a
    fragment's row or column."""
    weights, parts = _weights(layout, along)
    lanes, held = (1 << sum(x > 0 for x in table) for table in (weights, parts))
    wide, narrow = 16 // ITEMSIZE[cache], 8 // ITEMSIZE[cache]
    return wide if dim % (lanes * wide) == 0 or narrow < held else narrow


def _weights(layout: FragmentLayout, along: Along) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What each bit of the lane and of the component number adds to a column or row."""
    return (layout.lane_cols, layout.part_cols) if along == "columns" else (layout.lane_rows, layout.part_rows)


def interleaved(b: Builder, x: Value, y: Value) -> list[Value]:
    """A word of the lower halves of two words, and one of the upper halves."""
    halves = zip(*(b.unpack(b.bitcast(word, Vector(u16, 2))) for word in (x, y)), strict=True)
    return [b.bitcast(b.vector(both), u32) for both in halves]


def _unpack(b: Builder, runs: Sequence[Value]) -> list[Value]:
    assert all(element(run.type) == u32 for run in runs)
    return [word for run in runs for word in b.unpack(run)]


def _packed(engine: Components, words: list[Value], type_: Fragment | None = None) -> Value:
    b = engine.b
    halves = [half for word in words for half in b.unpack(b.bitcast(word, Vector(engine.elem, 2)))]
    return b.fragment_pack(type_ or engine.left, halves)
