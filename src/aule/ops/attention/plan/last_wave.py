"""Blocks of rows cut along the keys, where there are fewer than the device runs at a time.

The tiles of keys of all blocks, one block after the other, are dealt out evenly: each workgroup takes a range of them,
which may be the end of one block and the beginning of the next. The sums of its *piece* of a block go to memory with
their log-sum-exp, and the last workgroup to finish a piece of a block combines them in the order of the keys
(`ops/shared/tickets.py`), so that results are reproducible.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aule.ir import Builder, Value
from aule.ir.types import f32, i32
from aule.ops.attention.config import ForwardConfig
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.plan.wave import Wave
from aule.ops.attention.scores.band import Extent
from aule.ops.combine.partials import Row, RowCombiner
from aule.ops.shared.tickets import when_last
from aule.target import Target
from aule.tile.common.matrix import QUAD, Matrix, padded
from aule.tile.fragment.arrangement import SIZE, arrange
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape

_PARTS_AT_ONCE, _ROWS_AT_ONCE = 1, 16
"""Parts and rows that a thread loads before it uses any, when pieces are combined."""


@dataclass(frozen=True)
class Tail:
    """How blocks are cut.

    Attributes
    ----------
    blocks : int
        Blocks of rows.
    tiles : int
        Tiles of keys of a block.
    each : int
        Tiles of a workgroup.
    """

    blocks: int
    tiles: int
    each: int

    @property
    def workgroups(self) -> int:
        return -(-self.blocks * self.tiles // self.each)

    @property
    def splits(self) -> int:
        """The most pieces of a block."""
        ends = ((i * self.tiles, (i + 1) * self.tiles - 1) for i in range(self.blocks))
        return max(last // self.each - first // self.each + 1 for first, last in ends)

    def workspace(self, shape: SimtShape | FragmentShape, value_dim: int, target: Target) -> dict[str, int]:
        """Words of memory for the results of pieces, by buffer name."""
        if isinstance(shape, FragmentShape):
            each = padded(lane_numbers(shape, value_dim, target), QUAD) * shape.threads
            return {"part": self.blocks * self.splits * each}
        rows = self.blocks * shape.block_q * self.splits
        return {"part": rows * value_dim, "part_lse": rows}

    @property
    def scalars(self) -> dict[str, int]:
        """Parameters of the kernel, by name."""
        return {
            "tail_tiles": self.blocks * self.tiles,
            "block_tiles": self.tiles,
            "piece_tiles": self.each,
            "splits": self.splits,
        }


def cut_tail(blocks: int, tiles: int, units: int, wave: Wave) -> Tail | None:
    """Cut the blocks of a launch if they are fewer than the device runs at a time; None where it is not worth it.

    Parameters
    ----------
    blocks : int
        Blocks of the launch, all of the same ``tiles`` of keys.
    units : int
        Compute units; 0 when unknown.
    """
    slots = wave.resident * units
    if not 0 < blocks < slots:
        return None
    tail = Tail(blocks, tiles, max(-(-blocks * tiles // (slots * wave.pieces)), wave.cost))
    alone = wave.resident > 1 and 2 * blocks <= slots
    turns = -(-tail.workgroups // slots)
    # Pieces all begin, and are combined, at once, which costs twice.
    return tail if turns * tail.each + 2 * wave.cost < (int(wave.alone * tiles) if alone else tiles) else None


@dataclass(frozen=True)
class Piece:
    """A workgroup's share of a block: the block's number in the launch and among those that are cut, the tiles from
    ``first`` up to ``last``, and which of how many pieces that is."""

    number: Value
    place: Value
    first: Value
    last: Value
    part: Value
    parts: Value


@contextmanager
def pieces(b: Builder) -> Iterator[Piece]:
    """Go over the pieces of this workgroup; uniform."""
    each, tiles, total = (b.scalar(name, i32) for name in ("piece_tiles", "block_tiles", "tail_tiles"))
    workgroup = b.group_id(0) + b.group_id(1) * b.group_count(0)
    start = workgroup * each
    end = b.min(start + each, total)
    with b.loop(start // tiles, (end + (tiles - 1)) // tiles, name="block") as block:
        zero = block * tiles
        owner = zero // each
        yield Piece(
            block,
            block,
            b.max(start - zero, 0),
            b.min(end - zero, tiles),
            workgroup - owner,
            (zero + (tiles - 1)) // each - owner + 1,
        )


def lane_numbers(shape: FragmentShape, value_dim: int, target: Target) -> int:
    """Numbers that a lane on matrix units holds of a block: elements of O, and a base and a sum for each row."""
    results, height = arrange(target).results, arrange(target).height
    rows = len({results.place(0, part)[0] for part in range(results.parts)}) * shape.rows // height
    return results.parts * shape.rows * padded(value_dim, SIZE) // (height * arrange(target).width) + 2 * rows


class Leavings:
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


class Parts:
    """Partial rows of a piece, counted from the block's first, and their combination over all pieces of the block."""

    def __init__(self, p: Parameters, config: ForwardConfig, piece: Piece) -> None:
        self.p, self.b, self.config, self.piece = p, p.b, config, piece

    def _number(self, row: Value) -> Value:
        """The row's number among all that have parts."""
        return self.b.cast(self.piece.place * self.config.shape.block_q + row, self.p.index)

    def matrix(self, rows: Value) -> Matrix:
        """The piece's part of ``rows`` rows of O."""
        b, dim, index = self.b, self.config.value_dim, self.p.index
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
        b, config = self.b, self.config

        def add_up() -> None:
            combiner = RowCombiner(
                self.p, config, config.aligned[3], config.shape.threads, _PARTS_AT_ONCE, "readwrite"
            )  # fmt: skip
            combiner.combine_rows_per_team(
                rows,
                self.piece.parts,
                lambda row: Row(self._number(row), batch, head, row0 + row, extent),
                _ROWS_AT_ONCE,
            )

        when_last(self.p, self.piece.place, self.piece.parts, b.thread_id(), add_up)
