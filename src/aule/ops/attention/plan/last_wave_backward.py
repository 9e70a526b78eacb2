"""The last, partial wave of the kernel of dK and dV where all blocks of keys take as long: cut along the query rows.

Blocks that are left over when every slot of the device has had as many would leave most of it idle. Each of them is
shared by a few workgroups, which come after the uncut ones in the same launch. Their sums of dK and dV go to memory as
lanes hold them, and the last workgroup to finish combines them in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aule.ir import Value
from aule.ir.types import i32
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.plan.last_wave import Leavings, Piece
from aule.ops.attention.plan.wave import Wave
from aule.ops.shared.tickets import when_last
from aule.tile.common.matrix import padded
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import FragmentTile
from aule.tile.fragment.shape import FragmentShape


@dataclass(frozen=True)
class Cut:
    """``blocks`` blocks after ``first`` uncut ones, each in ``pieces`` pieces."""

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
        """Words of memory for the sums of pieces, by buffer name: dK and dV of a block, padded to fragments."""
        return {"part": self.blocks * self.pieces * shape.block_q * sum(padded(dim, SIZE) for dim in dims)}


def cut_blocks(blocks: int, tiles: int, units: int, wave: Wave) -> Cut | None:
    """Cut the blocks that are left over when every workgroup that runs at a time has had as many uncut ones; None where
    it is not worth it.

    Parameters
    ----------
    blocks : int
        Blocks of the launch, all of the same number of ``tiles``.
    units : int
        Compute units; 0 when unknown.
    """
    slots = wave.resident * units
    rest = blocks % slots if slots else 0
    if not rest:
        return None

    def time(pieces: int) -> float:
        alone = 2 * rest * pieces <= slots
        work = -(-rest * pieces // slots) * (-(-tiles // pieces) + wave.cost) * (wave.alone if alone else 1.0)
        # Without uncut blocks beside them, pieces all begin, and are combined, at once.
        return work if pieces == 1 or blocks > slots else work + 2 * wave.cost

    pieces = min(range(1, min(wave.pieces, tiles) + 1), key=time)
    return Cut(blocks - rest, rest, pieces) if pieces > 1 else None


def piece_of(p: Parameters, task: Value) -> Piece:
    """The block of a workgroup, and which of its pieces; an uncut block is its only piece."""
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
    """Combine the pieces of a block and ``store`` the results: at once if there is one piece, otherwise by the last
    workgroup to finish; uniform."""
    b = p.b
    variables = [variable for tile in tiles for row in tile.vars for variable in row]
    kind, parts = tiles[0].engine.accumulator, tiles[0].engine.arrangement.results.parts
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
