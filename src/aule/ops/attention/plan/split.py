"""Splits blocks into pieces where a launch would leave much of the device idle. Pure.

Forward, a launch of fewer blocks of rows than the device runs at a time is split along the keys (`split_blocks`). Over
warpgroups, and backward, the blocks of the last, partial wave, which may be the only one, are split instead
(`split_last_wave`): along the keys, or backward along their passes over query heads and rows. The last workgroup to
finish a piece of a block combines them (`aule.ops.combine.pieces`).
"""

from __future__ import annotations

from dataclasses import dataclass

from aule.ops.combine.pieces import lane_numbers
from aule.target import Target
from aule.tile.common.matrix import QUAD, padded
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape


@dataclass(frozen=True)
class Wave:
    """How many workgroups of a kernel without modifiers a device runs at a time, and how to split blocks.

    Attributes
    ----------
    resident : int
        Workgroups that a compute unit runs at a time.
    pieces : int
        `split_blocks`: pieces made for each workgroup that runs at a time. `split_last_wave`: most pieces of a block.
    cost : int
        Tiles that could be computed while a piece begins, ends and is combined. `split_blocks`: fewest tiles of a
        piece.
    alone : float
        Part of its time that a workgroup takes if it has a compute unit to itself.
    merge : float
        `split_last_wave`: tiles that could be computed while one of several pieces is merged into the result.
    """

    resident: int
    pieces: int
    cost: int
    alone: float = 0.75
    merge: float = 0.0


@dataclass(frozen=True)
class SplitBlocks:
    """All blocks of rows of a launch, split along the keys.

    The tiles of all blocks, one block after the other, are divided evenly: a workgroup may have the end of one block
    and the beginning of the next.

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
            return {"part": self.blocks * self.splits * lane_words(shape, value_dim, target)}
        rows = self.blocks * shape.block_q * self.splits
        return {"part": rows * value_dim, "part_lse": rows}

    @property
    def scalars(self) -> dict[str, int]:
        """Parameters of the kernel, by name."""
        return {
            "split_tiles": self.blocks * self.tiles,
            "block_tiles": self.tiles,
            "piece_tiles": self.each,
            "splits": self.splits,
        }


def split_blocks(blocks: int, tiles: int, units: int, wave: Wave) -> SplitBlocks | None:
    """Split the blocks of a launch, all of ``tiles`` tiles of keys, if they are fewer than the device runs at a time on
    its compute ``units`` (0 if unknown); None if it does not pay."""
    slots = wave.resident * units
    if not 0 < blocks < slots:
        return None
    split = SplitBlocks(blocks, tiles, max(-(-blocks * tiles // (slots * wave.pieces)), wave.cost))
    alone = wave.resident > 1 and 2 * blocks <= slots
    turns = -(-split.workgroups // slots)
    # Pieces all begin, and are combined, at once, which costs twice.
    return split if turns * split.each + 2 * wave.cost < (int(wave.alone * tiles) if alone else tiles) else None


def lane_words(shape: FragmentShape, value_dim: int, target: Target) -> int:
    """Words of memory for O, m and l of a piece, as the lanes on matrix units hold them."""
    return padded(lane_numbers(shape, value_dim, target), QUAD) * shape.threads


@dataclass(frozen=True)
class SplitLastWave:
    """``blocks`` blocks of ``pieces`` pieces each, after ``first`` blocks that are not split."""

    first: int
    blocks: int
    pieces: int

    @property
    def workgroups(self) -> int:
        return self.first + self.blocks * self.pieces

    @property
    def scalars(self) -> dict[str, int]:
        """Parameters of the kernel, by name."""
        return {"workgroups": self.workgroups, "first_split": self.first, "splits": self.pieces}

    def workspace(self, words: int) -> dict[str, int]:
        """Words of memory for the results of pieces, ``words`` each, by buffer name."""
        return {"part": self.blocks * self.pieces * words}


def split_last_wave(blocks: int, tiles: int, units: int, wave: Wave) -> SplitLastWave | None:
    """Split the blocks of the last wave, if that wave is partial; None if it does not pay. Parameters as for
    `split_blocks`."""
    slots = wave.resident * units
    rest = blocks % slots if slots else 0
    if not rest:
        return None

    def time(pieces: int) -> float:
        alone = 2 * rest * pieces <= slots
        work = -(-rest * pieces // slots) * (-(-tiles // pieces) + wave.cost) * (wave.alone if alone else 1.0)
        # Without other blocks beside them, all pieces begin and are combined at the same time.
        return work if pieces == 1 else work + pieces * wave.merge + (2 * wave.cost if blocks <= slots else 0)

    pieces = min(range(1, min(wave.pieces, tiles) + 1), key=time)
    return SplitLastWave(blocks - rest, rest, pieces) if pieces > 1 else None
