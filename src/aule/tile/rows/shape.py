"""How rows and their columns are laid out over the threads of a workgroup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

PrefetchTo = Literal["shared", "registers", "staged", "staged_alone"]
ColumnReads = Literal["resident", "row_start", "first_part", "first_use", "every_pass"]


@dataclass(frozen=True)
class RowShape:
    """How rows are laid out over the threads of a workgroup.

    Attributes
    ----------
    threads : int
        Threads that share a row, a power of two; 1 on a CPU.
    slots : int
        Rows side by side in a workgroup.
    batch : int
        Rows that a thread processes at once: their loads overlap, and their reductions share barriers.
    loops : bool
        A workgroup processes several blocks of rows instead of one.
    exact : bool
        All blocks are full: ``slots * batch`` divides the number of rows.
    resident : int
        Workgroups per compute unit, in kernels that loop.
    prefetch : int
        Blocks that are prefetched while one is processed (`aule.tile.rows.prefetch`), in kernels that loop.
    prefetch_to : str
        Where they go: ``shared`` memory (`prefetch_shared`), or, for one block, ``registers`` (`prefetch_registers`),
        from where one array is ``staged`` in shared memory; ``staged_alone`` prefetches only that array.
    cluster : int
        Workgroups, a power of two, that share a row, each with ``threads`` of it: a power of two as well, with at most
        as many subgroups in all as a subgroup has lanes (`Target.max_cluster`).
    cluster_exchange : int
        In kernels that loop, with one row at a time: how many values of a row the cluster reduces, all at once and
        without barriers (`aule.tile.rows.cluster_exchange`); 0 if it uses barriers.
    registers : int
        Register limit per thread, if the compiler takes one; 0 leaves the choice to it.
    in_shared : bool
        In kernels that do not loop: rows are copied asynchronously to shared memory, and each pass reads them there.
        That frees registers, so more workgroups are resident.
    group_is_block : bool
        In kernels that do not loop: the grid has one axis and one workgroup per block, so the kernel needs no bounds.
    sums_cluster : int
        In kernels that loop, with rows prefetched to shared memory: 2 if the two workgroups of a cluster combine their
        column sums before they store them.
    """

    engine: ClassVar = "rows"

    threads: int = 1
    slots: int = 1
    batch: int = 1
    loops: bool = False
    exact: bool = False
    resident: int = 1
    prefetch: int = 0
    prefetch_to: PrefetchTo = "shared"
    cluster: int = 1
    cluster_exchange: int = 0
    registers: int = 0
    in_shared: bool = False
    group_is_block: bool = False
    sums_cluster: int = 1

    @property
    def workgroup(self) -> int:
        return self.threads * self.slots

    @property
    def block(self) -> int:
        """Rows that a workgroup processes at a time."""
        return self.slots * self.batch


@dataclass(frozen=True)
class PassShape:
    """How the columns of a row, or a range of them, are divided into parts.

    Attributes
    ----------
    width : int
        Neighbouring columns of a part, loaded together.
    parts : int
        Parts that a thread keeps in registers; 0 if each pass reads memory again.
    ragged : int
        With rows in registers: so many of a thread's last parts may be past the row's end.
    tail : bool
        Without: columns may follow the last full part. They are visited as the last ``width`` columns of the row, so a
        row has at least that many.
    unroll : int
        Parts that a pass takes together: without rows in registers, their loads overlap.
    scratch : int
        Without: columns of a row for which a thread has scratch memory; 0 if that would be too much.
    columns : str
        With rows in registers: when arrays with one number per column are loaded. ``resident``: once, before the first
        row; ``row_start``: with each row; ``first_part``: the first part with each row, others on first use;
        ``first_use``: when a pass first needs them; ``every_pass``: again in each pass. Each needs fewer registers
        than the one before.
    narrow : bool
        With rows in registers, in a type narrower than the one computed in: they stay narrow, and each pass widens
        them again. Compilers would keep the wide values instead.
    reload : bool
        With rows in registers: passes after the first reload them, from the cache, except what is staged in shared
        memory (`StagedPrefetch`).
    """

    width: int
    parts: int = 0
    ragged: int = 0
    tail: bool = False
    unroll: int = 4
    scratch: int = 0
    columns: ColumnReads = "row_start"
    narrow: bool = False
    reload: bool = False
