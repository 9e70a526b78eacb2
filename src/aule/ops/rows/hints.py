"""Tuned numbers for the layout of rows over a GPU's threads, and the facts about a kernel that select them."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ops.rows.classes import Use
from aule.tile.rows.shape import ColumnReads, PrefetchTo


@dataclass(frozen=True)
class RowTuning:
    """Numbers by which `choose_rows` lays rows out over a GPU's threads.

    Attributes
    ----------
    parts : int
        Preferred number of 16-byte parts of a row per thread.
    most : int
        Most columns of a row that a thread holds in registers.
    threads : int
        Fewest threads of a workgroup, if rows are short.
    columns : str
        When arrays with one number per column are loaded, as in `PassShape`.
    cluster : int
        Workgroups that share a row, if they can: more small ones fit a compute unit, and some load while others
        compute.
    registers : int
        Register limit per thread, as in `RowShape`.
    in_shared : bool
        Rows are copied to shared memory, as in `RowShape`, if possible.
    narrow : bool
        Registers hold elements in their own type, as in `PassShape`.
    reload : bool
        Passes after the first read rows again, as in `PassShape`.
    """

    parts: int = 4
    most: int = 64
    threads: int = 128
    columns: ColumnReads = "row_start"
    cluster: int = 1
    registers: int = 0
    in_shared: bool = False
    narrow: bool = False
    reload: bool = False


@dataclass(frozen=True)
class SumTuning(RowTuning):
    """Numbers for kernels that also hold sums of columns in registers.

    Attributes
    ----------
    batch : int
        Rows that a thread processes at once, if enough blocks remain.
    widest : int
        Most threads of a row, as long as they can hold it: fewer leave room for a second workgroup, and have more
        registers each, which sums of long rows need.
    resident : int
        Resident threads per compute unit; their workgroups loop over blocks of rows.
    prefetch : int
        Blocks of rows that are prefetched, if shared memory has room.
    prefetch_to : str
        Where they go, as in `RowShape`.
    sums_cluster : int
        2 if two workgroups combine their sums of columns, as in `RowShape`, if possible.
    cluster_exchange : int
        Values of a row that workgroups of a cluster exchange, as in `RowShape`.
    """

    parts: int = 2
    most: int = 32
    batch: int = 1
    widest: int = 256
    resident: int = 512
    prefetch: int = 1
    prefetch_to: PrefetchTo = "shared"
    sums_cluster: int = 1
    cluster_exchange: int = 0


@dataclass(frozen=True)
class Work:
    """What a kernel does to rows, as far as their layout depends on it.

    Attributes
    ----------
    sums : int
        Sums per column, over all rows.
    columns : bool
        Arrays with one number per column are read or written.
    copied : tuple of int
        Element sizes in bytes of the arrays of rows that are read, if they may be prefetched.
    written : int
        Arrays of rows that are written.
    centred : bool
        Rows are centred.
    exchanged : int
        Values reduced per row in one exchange; 0 if they need several.
    rotates : bool
        Pairs of columns are rotated; lengths are numbers of pairs.
    elements : bool
        Columns have nothing to do with each other.
    """

    sums: int = 0
    columns: bool = False
    copied: tuple[int, ...] = ()
    written: int = 1
    centred: bool = False
    exchanged: int = 0
    rotates: bool = False
    elements: bool = False

    @property
    def use(self) -> Use:
        """The classes of lengths that apply."""
        if self.rotates or self.elements:
            return "rotation" if self.rotates else "elements"
        return "sums" if self.sums else "rows"


NO_SUMS = Work()
