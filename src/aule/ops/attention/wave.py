"""Wave: what a device works on at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wave:
    """What a device works on at a time of a forward kernel without modifiers, and how the last, partial wave is best
    cut (`tail.py`).

    Attributes
    ----------
    resident : int
        Workgroups that a multiprocessor holds.
    pieces : int
        How many are made for each workgroup that the device works on at a time.
    cost : int
        Tiles of keys that could be worked on while pieces begin, end and are added up. None has fewer.
    leading : bool
        Pieces are begun before the whole blocks, and not behind them.
    """

    resident: int
    pieces: int
    cost: int
    leading: bool = False
