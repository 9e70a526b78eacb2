"""What kernels over rows are told about how rows are to lie over a GPU, and what that is chosen by."""

from __future__ import annotations

from dataclasses import dataclass

from aule.tile.rows import Through
from aule.tile.spans import ColumnReads

LONG = 8192
"""Columns of a row that is not yet a long one."""
LANDS = 4096
"""Columns of a row that loses its mean and need not land in shared memory. 16384 columns, 64 MiB and 1 GiB: 3.53 and
4.14, in registers 3.32 and 4.05; 8192 columns, 64 MiB, 3.65 and 3.60; 4096 columns 3.73, 4.09 and 3.68, 4.13. Through
Vulkan such rows are packed, 16384 columns, 64 and 512 MiB: 2.95 and 3.85, before 2.75 and 3.68."""
LARGE_ROWS = 1 << 14
"""Rows with a residual from which on a thread has one part. 4096 columns, 1 GiB, `lasts`, with one, two and four parts:
residual_rms_norm 4.29, 4.26, 4.25, residual_layer_norm 4.29, 4.26, 4.25; 16384 columns the same with all."""
UNITS = 16
"""Assumed where a device does not say how many units it has."""


@dataclass(frozen=True)
class RowTuning:
    """Numbers by which `choose_rows` lays rows over a GPU.

    Attributes
    ----------
    parts : int
        Parts of 16 bytes that a thread has of a row at best.
    most : int
        Columns of a row that a thread may keep.
    threads : int
        Of a workgroup at least, where rows are short.
    columns : str
        When arrays of columns are read, as in `SpanShape`.
    cluster : int
        Workgroups that share a row, where they can: of smaller ones more fit a unit, and some load while others
        compute.
    registers : int
        Of a thread at most, where a compiler can be told; 0 leaves it to that.
    landed : bool
        Rows are copied past the registers, as in `RowShape`, where they can be.
    packed : bool
        What registers hold stays as narrow as it is, as in `SpanShape`.
    again : bool
        Passes behind the first read rows again, as in `SpanShape`.
    """

    parts: int = 4
    most: int = 64
    threads: int = 128
    columns: ColumnReads = "held"
    cluster: int = 1
    registers: int = 0
    landed: bool = False
    packed: bool = False
    again: bool = False


TUNING = RowTuning()


@dataclass(frozen=True)
class SumTuning(RowTuning):
    """The same for kernels with sums of columns, which stay in registers, too.

    Attributes
    ----------
    batch : int
        Rows that a thread takes at once, where that leaves enough blocks.
    widest : int
        Threads of a row at most, as long as they can keep it: fewer leave room for a second workgroup, and have more
        registers each, which sums of long rows need.
    resident : int
        Threads for each of the device's units: workgroups take one block of rows after the other.
    ahead : int
        Blocks of rows that are on their way while one is worked on, as far as shared memory has the room.
    through : str
        Where to, as in `RowShape`.
    gather : int
        2 where workgroups add up their sums of columns by two, as in `RowShape`, if they can and all have rows.
    mail : int
        Numbers of a row that workgroups of a cluster exchange by mail, as in `RowShape`.
    """

    parts: int = 2
    most: int = 32
    batch: int = 1
    widest: int = 256
    resident: int = 512
    ahead: int = 1
    through: Through = "shared"
    gather: int = 1
    mail: int = 0


SUMS = SumTuning(parts=1, most=16, widest=1024, resident=1024, ahead=0)
"""Where rows are loaded when their turn comes."""


@dataclass(frozen=True)
class Work:
    """What a kernel does to rows that matters for how they lie.

    Attributes
    ----------
    sums : int
        For each column, over all rows.
    columns : bool
        Arrays of one number for each column are read, or sums made.
    copied : tuple of int
        Bytes of an element of each array of rows that is read, where those may come ahead of their turn.
    written : int
        Arrays of rows that are written.
    centred : bool
        Rows lose their mean.
    exchanged : int
        Numbers of a row that its threads add up, where all are at once; else 0.
    """

    sums: int = 0
    columns: bool = False
    copied: tuple[int, ...] = ()
    written: int = 1
    centred: bool = False
    exchanged: int = 0


NO_SUMS = Work()


def is_middle(length: int) -> bool:
    """Rows of about 4096 columns."""
    return LANDS // 2 < length <= LANDS
