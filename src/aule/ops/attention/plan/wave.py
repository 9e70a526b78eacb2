"""Wave: the workgroups that a device runs at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wave:
    """How many workgroups of a kernel without modifiers a device runs at a time, and how blocks are best cut where
    there are fewer (`last_wave.py`, `last_wave_backward.py`).

    Attributes
    ----------
    resident : int
        Workgroups that a compute unit runs at a time.
    pieces : int
        Forward: pieces made for each workgroup that runs at a time. Backward: most pieces of a block.
    cost : int
        Tiles that could be computed while a piece begins, ends and is combined. Forward, no piece has fewer.
    alone : float
        Part of its time that a workgroup takes if it has a compute unit to itself.
    """

    resident: int
    pieces: int
    cost: int
    alone: float = 0.75
