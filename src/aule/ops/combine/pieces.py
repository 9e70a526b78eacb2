"""Pieces: blocks whose work several workgroups share, combined by the last workgroup to finish.

Each workgroup leaves the sums of its piece in memory and draws a ticket (`ops/shared/tickets.py`). The one with the
block's last ticket combines all pieces in order, so that results are reproducible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aule.ir import Builder, Value
from aule.ir.types import f32, i32
from aule.ops.combine.partials import Row, RowCombiner
from aule.ops.scores.band import Extent
from aule.ops.scores.parameters import Parameters
from aule.ops.shared.tickets import when_last
from aule.target import Target
from aule.tile.common.matrix import QUAD, Matrix, padded
from aule.tile.fragment.arrangement import arrange
from aule.tile.fragment.engine import FragmentTile
from aule.tile.fragment.shape import FragmentShape

_PARTS_AT_ONCE, _ROWS_AT_ONCE = 1, 16
"""Parts and rows that a thread loads before it uses any, when pieces are combined."""


@dataclass(frozen=True)
class Piece:
    """A workgroup's share of a block.

    Attributes
    ----------
    number, place : Value
        Number of the block in the launch, and among the blocks that are split.
    part, parts : Value
        Number of the piece, and pieces of the block.
    share : tuple of Value, optional
        The piece has tiles ``share[0] .. share[1] - 1`` of the block. None: pieces are as long as each other.
    """

    number: Value
    place: Value
    part: Value
    parts: Value
    share: tuple[Value, Value] | None = None

    def tiles(self, first: Value, last: Value) -> tuple[Value, Value]:
        """The piece's tiles of a block that has ``first .. last - 1``."""
        if self.share is not None:
            return self.share
        tiles = last - first
        return first + tiles * self.part // self.parts, first + tiles * (self.part + 1) // self.parts


@contextmanager
def pieces(b: Builder) -> Iterator[Piece]:
    """Loop over the pieces of this workgroup; uniform."""
    each, tiles, total = (b.scalar(name, i32) for name in ("piece_tiles", "block_tiles", "split_tiles"))
    workgroup = b.group_id(0) + b.group_id(1) * b.group_count(0)
    start = workgroup * each
    end = b.min(start + each, total)
    with b.loop(start // tiles, (end + (tiles - 1)) // tiles, name="block") as block:
        zero = block * tiles
        owner = zero // each
        share = b.max(start - zero, 0), b.min(end - zero, tiles)
        yield Piece(block, block, workgroup - owner, (zero + (tiles - 1)) // each - owner + 1, share)


def lane_numbers(shape: FragmentShape, value_dim: int, target: Target) -> int:
    """Values of a block that a lane on matrix units holds: elements of O, and m and l of each row."""
    results, height = arrange(target).results, arrange(target).height
    rows = len({results.place(0, part)[0] for part in range(results.parts)}) * shape.rows // height
    columns = shape.result_columns(value_dim) // shape.columns
    return results.parts * shape.rows * columns // (height * arrange(target).width) + 2 * rows


class LanePartials:
    """Partial results of a piece in memory, in the order in which lanes on matrix units hold them: four numbers of a
    lane beside its neighbour's, so that few instructions store and load them."""

    def __init__(self, p: Parameters, piece: Piece, threads: int, count: int) -> None:
        self.p, self.b, self.piece, self.threads, self.count = p, p.b, piece, threads, count
        self.buffer = p.buffer("part", f32, "readwrite")

    def _start(self, part: Value) -> Value:
        """Index of this lane's first number of a part of the block."""
        b, index = self.b, self.p.index
        number = b.cast(self.piece.place, index) * b.cast(self.p.number("splits"), index) + b.cast(part, index)
        return number * (padded(self.count, QUAD) * self.threads) + b.cast(b.thread_id() * QUAD, index)

    def store(self, numbers: list[Value]) -> None:
        b, start = self.b, self._start(self.piece.part)
        numbers = numbers + [b.const(0.0, f32)] * (-len(numbers) % QUAD)
        for i in range(0, len(numbers), QUAD):
            b.store(self.buffer, start + i * self.threads, b.vector(numbers[i : i + QUAD]))

    def load(self, part: Value, first: int = 0, count: int | None = None) -> list[Value]:
        """All numbers of a part, or ``count`` of them from ``first`` on, a multiple of four."""
        b, start, count = self.b, self._start(part), self.count if count is None else count
        quads = [b.load(self.buffer, start + i * self.threads, QUAD) for i in range(first, first + count, QUAD)]
        return [x for quad in quads for x in b.unpack(quad)][:count]


class RowPartials:
    """Partial rows of a piece in memory, counted from the block's first, and their combination over all pieces.

    Parameters
    ----------
    rows : int
        Rows of a block.
    aligned : bool
        As for `RowCombiner`.
    """

    def __init__(self, p: Parameters, piece: Piece, rows: int, aligned: bool) -> None:
        self.p, self.b, self.piece, self.rows, self.aligned = p, p.b, piece, rows, aligned

    def _number(self, row: Value) -> Value:
        """Number of a row among all rows of split blocks."""
        return self.b.cast(self.piece.place * self.rows + row, self.p.index)

    def matrix(self, rows: Value) -> Matrix:
        """The piece's part of ``rows`` rows of O."""
        b, dim, index = self.b, self.p.config.value_dim, self.p.index
        splits, zero = b.cast(self.p.number("splits"), index), b.const(0, i32)
        base = (self._number(zero) * splits + b.cast(self.piece.part, index)) * dim
        parts = self.p.buffer("part", f32, "readwrite")
        return Matrix(parts, base, rows, dim, splits * dim, None, dim % QUAD == 0)

    def store_lse(self, row: Value, lse: Value) -> None:
        """Store the logarithm, base 2, of a row's sum of weights."""
        b, p = self.b, self.p
        at = self._number(row) * b.cast(p.number("splits"), p.index) + b.cast(self.piece.part, p.index)
        b.store(p.buffer("part_lse", f32, "readwrite"), at, lse)

    def finish(self, row0: Value, rows: Value, batch: Value, head: Value, extent: Extent) -> None:
        """Combine ``rows`` rows of the block, from ``row0`` on, if all its pieces are written; uniform."""
        p = self.p

        def combine() -> None:
            combiner = RowCombiner(p, self.aligned, _PARTS_AT_ONCE, "readwrite")
            combiner.combine_rows_per_team(
                rows,
                self.piece.parts,
                lambda row: Row(self._number(row), batch, head, row0 + row, extent),
                _ROWS_AT_ONCE,
            )

        when_last(p, self.piece.place, self.piece.parts, self.b.thread_id(), combine)


def piece_of(p: Parameters, task: Value) -> Piece:
    """The block of a workgroup, and which of its pieces; a block that is not split has one piece."""
    b, first, splits = p.b, p.number("first_split"), p.number("splits")
    behind = b.max(task - first, 0)
    place = behind // splits
    split, zero = task >= first, b.const(0, i32)
    part, parts = b.select(split, behind - place * splits, zero), b.select(split, splits, b.const(1, i32))
    return Piece(b.select(split, first + place, task), place, part, parts)


class Passes:
    """A piece's share of a block's passes over some members: all passes are as long as ``each``, one after the other,
    and divided evenly."""

    def __init__(self, b: Builder, piece: Piece, members: Value, each: Value) -> None:
        self.b, self.each, total = b, each, members * each
        self.start, self.end = (total * (piece.part + i) // piece.parts for i in range(2))

    def members(self) -> tuple[Value, Value]:
        """The first member, and the one after the last."""
        return self.start // self.each, (self.end + (self.each - 1)) // self.each

    def tiles(self, member: Value, first: Value, last: Value) -> tuple[Value, Value]:
        """The share of a member's tiles, which may be fewer than ``each``."""
        begin, tiles = member * self.each, last - first
        low, high = self.b.max(self.start - begin, 0), self.b.min(self.end - begin, self.each)
        return first + tiles * low // self.each, first + tiles * high // self.each


def combine_tiles(
    p: Parameters, piece: Piece, threads: int, tiles: list[FragmentTile], store: Callable[[], None]
) -> None:
    """Combine the pieces of a block and ``store`` the results: at once if there is one piece, otherwise by the last
    workgroup to finish; uniform."""
    b = p.b
    variables = [variable for tile in tiles for row in tile.vars for variable in row]
    kind, parts = tiles[0].engine.accumulator, tiles[0].engine.arrangement.results.parts
    partials = LanePartials(p, piece, threads, len(variables) * parts)
    missing = b.var(piece.parts - 1, "missing")

    def gather() -> None:
        missing.value = b.const(0, i32)
        for variable in variables:
            variable.value = b.fragment_fill(kind, 0.0)
        with b.loop(b.const(0, i32), piece.parts, name="part") as part:
            for i, variable in enumerate(variables):
                numbers = partials.load(part, i * parts, parts)
                sums = [b.fragment_get(variable.value, c) + x for c, x in enumerate(numbers)]
                variable.value = b.fragment_pack(kind, sums)

    with b.if_(piece.parts > 1):
        partials.store([b.fragment_get(v.value, c) for v in variables for c in range(parts)])
        when_last(p, piece.place, piece.parts, b.thread_id(), gather)
    with b.if_(b.eq(missing.value, 0)):
        store()
