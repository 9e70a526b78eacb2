"""The fields by which rows are laid out over a GPU's threads, and what they depend on."""

from __future__ import annotations

from dataclasses import dataclass

from aule.tile.rows.shape import ColumnReads, PrefetchTo


@dataclass(frozen=True)
class RowTuning:
    """Numbers by which `choose_rows` lays rows out over a GPU's threads.

    Attributes
    ----------
    parts : int
        Parts of 16 bytes that a thread preferably has of a row.
    most : int
        Columns of a row that a thread may hold in registers.
    threads : int
        Fewest threads of a workgroup, where rows are short.
    columns : str
        When arrays of columns are read, as in `PassShape`.
    cluster : int
        Workgroups that share a row, if they can: more small ones fit a compute unit, and some load while others
        compute.
    registers : int
        Most registers of a thread, where the language can say so; 0 leaves it to the compiler.
    in_shared : bool
        Rows are copied past the registers, as in `RowShape`, if they can be.
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
    """Numbers for kernels with sums of columns, which stay in registers, too.

    Attributes
    ----------
    batch : int
        Rows that a thread takes at once, where that leaves enough blocks.
    widest : int
        Most threads of a row, as long as they can hold it: fewer leave room for a second workgroup, and have more
        registers each, which sums of long rows need.
    resident : int
        Threads of each compute unit: workgroups take one block of rows after the other.
    prefetch : int
        Blocks of rows that are prefetched, as far as shared memory has the room.
    prefetch_to : str
        Where to, as in `RowShape`.
    sums_cluster : int
        2 if two workgroups combine their sums of columns, as in `RowShape`, where they can and all have rows.
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
        For each column, over all rows.
    columns : bool
        Arrays of one number for each column are read, or sums made.
    copied : tuple of int
        Bytes of an element of each array of rows that is read, if they may be prefetched.
    written : int
        Arrays of rows that are written.
    centred : bool
        Rows are centred.
    exchanged : int
        Values reduced per row in one exchange; 0 if they need several.
    """

    sums: int = 0
    columns: bool = False
    copied: tuple[int, ...] = ()
    written: int = 1
    centred: bool = False
    exchanged: int = 0


NO_SUMS = Work()
