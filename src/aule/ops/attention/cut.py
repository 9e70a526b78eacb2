"""The last, partial wave of the kernel of dK and dV where all blocks of keys take as long: cut along the query rows.

As in `tail.py`, blocks that are more than a multiple of what the device works on at a time would leave most of it idle.
Each of them is shared by a few workgroups, which come behind the whole ones in the same launch. What they have of dK
and dV goes to memory as lanes hold it, and who comes last adds it up, in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aule.ir import Value
from aule.ir.types import i32
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.tail import Leavings, Piece
from aule.ops.tickets import when_last
from aule.tile.arrangement import SIZE
from aule.tile.fragment import FragmentTile
from aule.tile.fragment_shape import FragmentShape
from aule.tile.matrix import padded

_MOST_PIECES = 8
"""Of a block; what they bring is in docs/performance.md, step 34 of "Matrix units"."""
_COST = 6
"""Tiles that could be worked on while a workgroup begins and ends, and its piece is added up."""
_ALONE = 0.8
"""What part of its time a workgroup takes that has a multiprocessor to itself (`tail.py`)."""


@dataclass(frozen=True)
class Cut:
    """``blocks`` blocks behind ``first`` whole ones, each in so many ``pieces``."""

    first: int
    blocks: int
    pieces: int

    @property
    def workgroups(self) -> int:
        return self.first + self.blocks * self.pieces

    @property
    def scalars(self) -> dict[str, int]:
        """Parameters of the kernel, by name."""
        return {"blocks": self.workgroups, "tail_first": self.first, "splits": self.pieces}

    def workspace(self, shape: FragmentShape, dims: tuple[int, int]) -> dict[str, int]:
        """Words of memory for what pieces have, by buffer name: dK and dV of a block in whole fragments."""
        return {"part": self.blocks * self.pieces * shape.block_q * sum(padded(dim, SIZE) for dim in dims)}


def cut_blocks(blocks: int, tiles: int, slots: int) -> Cut | None:
    """Cut the blocks that are left over when each of the device's ``slots`` has had as many whole ones; None where it
    is not worth it.

    Parameters
    ----------
    blocks : int
        Of the launch, all of the same number of ``tiles``.
    slots : int
        Workgroups that the device works on at a time, two on a multiprocessor; 0 when unknown.
    """
    rest = blocks % slots if slots else 0
    if not rest:
        return None

    def time(pieces: int) -> float:
        alone = 2 * rest * pieces <= slots
        work = -(-rest * pieces // slots) * (-(-tiles // pieces) + _COST) * (_ALONE if alone else 1.0)
        # Where nothing whole goes beside them, pieces all begin, and are added up, at once.
        return work if pieces == 1 or blocks > slots else work + 2 * _COST

    pieces = min(range(1, min(_MOST_PIECES, tiles) + 1), key=time)
    return Cut(blocks - rest, rest, pieces) if pieces > 1 else None


def piece_of(p: Parameters, task: Value) -> Piece:
    """The block of a workgroup, and which of its pieces; a whole one is the only piece."""
    b, first, splits = p.b, p.number("tail_first"), p.number("splits")
    behind = b.max(task - first, 0)
    place = behind // splits
    cut, zero = task >= first, b.const(0, i32)
    part, parts = b.select(cut, behind - place * splits, zero), b.select(cut, splits, b.const(1, i32))
    return Piece(b.select(cut, first + place, task), place, zero, zero, part, parts)


def share(piece: Piece, first: Value, last: Value) -> tuple[Value, Value]:
    """A piece's share of the tiles of a block."""
    tiles = last - first
    return first + tiles * piece.part // piece.parts, first + tiles * (piece.part + 1) // piece.parts


def add_up(p: Parameters, piece: Piece, threads: int, tiles: list[FragmentTile], store: Callable[[], None]) -> None:
    """``store`` results that all pieces of a block have added to: at once where there is one, and otherwise by the
    workgroup that is the last to come; uniform."""
    b = p.b
    variables = [variable for tile in tiles for row in tile.vars for variable in row]
    kind, parts = tiles[0].engine.accumulator, tiles[0].engine.way.results.parts
    leavings = Leavings(p, piece, threads, len(variables) * parts)
    missing = b.var(piece.parts - 1, "missing")

    def gather() -> None:
        missing.value = b.const(0, i32)
        for variable in variables:
            variable.value = b.fragment_fill(kind, 0.0)
        with b.loop(b.const(0, i32), piece.parts, name="part") as part:
            for i, variable in enumerate(variables):
                numbers = leavings.load(part, i * parts, parts)
                sums = [b.fragment_get(variable.value, c) + x for c, x in enumerate(numbers)]
                variable.value = b.fragment_pack(kind, sums)

    with b.if_(piece.parts > 1):
        leavings.store([b.fragment_get(v.value, c) for v in variables for c in range(parts)])
        when_last(p, piece.place, piece.parts, b.thread_id(), gather)
    with b.if_(b.eq(missing.value, 0)):
        store()
