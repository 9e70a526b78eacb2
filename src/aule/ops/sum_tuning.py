"""How rows lie in kernels with sums of columns: gradients of norms."""

from __future__ import annotations

from dataclasses import replace

from aule.ops.row_tuning import LARGE_ROWS, LONG, SUMS, UNITS, SumTuning, Work
from aule.target import Target
from aule.tile.stages import copies_past_registers


def choose_sums(target: Target, length: int, work: Work, rows: int = 0) -> SumTuning:
    """What was fastest on the H200 for kernels with sums of columns; on devices that nobody has measured, `SUMS`."""
    if copies_past_registers(target):
        measured = _COPIED
    elif target.vulkan_on_nvidia:
        measured = _CARRIED
    else:
        return SUMS
    if len(set(work.copied)) > 1:
        return _MIXED if measured is _COPIED and length <= _MIXED_LONGEST else SUMS
    mailed = _by_mail(target, length, work, rows) if measured is _COPIED else None
    if mailed is not None:
        return mailed
    choices = measured[min(work.sums, 2), max(len(work.copied), 2)]
    tuning = next((tuning for longest, tuning in choices if length <= longest), SUMS)
    if tuning.again and work.sums > 1 and rows >= _STEADY * (target.compute_units or UNITS):
        return replace(tuning, ahead=0)
    return tuning


def _by_mail(target: Target, length: int, work: Work, rows: int) -> SumTuning | None:
    """What is chosen where rows are to lie over clusters; None where they are not."""
    kind = min(work.sums, 2), len(work.copied)
    if target.max_cluster < _MAILED.cluster or work.exchanged != _MAILED.mail or length > 2 * LONG:
        return None
    choices = (_BY_MAIL if max(work.copied) == 2 else _WIDE_BY_MAIL).get(kind, ())
    few = kind != (1, 2) or length > LONG or rows < LARGE_ROWS
    return next((tuning for shortest, tuning in choices if few and length >= shortest), None)


_Choices = dict[tuple[int, int], tuple[tuple[int, SumTuning], ...]]
_FOUR = SumTuning(parts=4, gather=2)
_ONE_PART = SumTuning(parts=1, widest=1024, resident=1024, through="registers")
_AGAIN = SumTuning(parts=4, widest=512, ahead=0, columns="again")
_PASSED = replace(_AGAIN, ahead=1, through="parked", again=True)
_STEADY = 16
"""Rows for each unit from which on nothing is to come ahead, where there are two sums and rows are read again; see the
last lines of `_CARRIED`."""
_MAILED = SumTuning(parts=4, widest=512, columns="kept", cluster=8, mail=2)
_COPIED: _Choices = {
    (1, 2): (
        (768, SumTuning(resident=640, through="registers")),
        (1024, SumTuning(resident=768, through="registers")),
        (2048, SumTuning(threads=256, batch=2, columns="kept")),
        (4096, SumTuning(batch=2)),
        (16384, replace(_FOUR, ahead=2)),
    ),
    (1, 3): (
        (1024, SumTuning(through="registers")),
        (2048, SumTuning(through="registers", columns="kept")),
        (4096, SumTuning(batch=2, resident=768, columns="kept")),
        (8192, replace(_FOUR, ahead=2, columns="kept")),
        (16384, replace(_FOUR, ahead=2)),
    ),
    (2, 2): (
        (512, SumTuning(batch=2, ahead=2, resident=384)),
        (1024, SumTuning(parts=4, threads=256, resident=256, ahead=3, columns="kept")),
        (4096, SumTuning(threads=256, batch=2, gather=2, columns="kept")),
        (8192, replace(_FOUR, ahead=2, registers=128)),
        (16384, replace(_FOUR, ahead=2)),
    ),
    (2, 3): (
        (2048, SumTuning(through="registers")),
        (4096, SumTuning(batch=2, ahead=2, gather=2, columns="kept")),
        (8192, SumTuning(widest=512, batch=2, gather=2, columns="kept")),
        (16384, _FOUR),
    ),
}
"""By sums for each column and arrays that are read (norms without and with a residual): rows of up to so many columns.

H200, bf16, 512 MiB, TB/s of what must be read and written; in parentheses `SUMS`:

=======  ===================  ===================  ===================  ===================  ==================
columns  1024                 2048                 4096                 8192                 16384
=======  ===================  ===================  ===================  ===================  ==================
(1, 2)   4.10 (3.79)          3.93 (3.58)          3.96 (3.40)          3.98 (2.98)          3.85 (2.33)
(1, 3)   4.02 (3.77)          4.01 (3.72)          3.92 (3.67)          3.92 (3.37)          3.85 (1.97)
(2, 2)   3.84 (3.46)          3.83 (2.89)          3.83 (2.66)          3.74 (2.17)          3.59 (1.32)
(2, 3)   3.86 (3.47)          3.82 (3.22)          3.83 (3.14)          3.80 (2.79)          3.63 (0.56)
=======  ===================  ===================  ===================  ===================  ==================

Others: (1, 2) of 1024 columns through shared memory 3.87, through registers with 512 threads 3.62; (1, 3) with 768, of
which some wait, 3.29. Of 4096 columns through registers 3.41 and, with two sums, 3.15.

Since then two workgroups gather, and LayerNorm has statistics of rows. 64 MiB, in parentheses before: (2, 2) 1024
columns, with 128 threads in place of 256, 3.11 (2.95), 4096 2.94 (2.72), 8192 2.51 (2.35), 16384 2.58 (2.23); (2, 3)
4096 2.66 (2.44), 8192 2.50 (2.23), 16384 2.19 (1.77). 1 GiB: (2, 2) 1024 columns 4.16, with 256 threads 4.09, 16384
3.83, with one block ahead 3.67 (3.65); (2, 3) 16384 4.08 (4.03). Four that gather have 1.56 where two have 2.00.

512 columns, of which threads need more registers than 1024 do, 64 MiB and 1 GiB: (1, 2) with 640 threads 3.64 and 4.24,
768, of which some wait, 3.12 and 3.40, with at most 80 registers 3.61 and 4.05; (2, 2) with 384 threads 3.49 and 4.11,
512, of which some wait, 3.04 and 3.64, with at most 128 registers, which spill, 3.19 and 3.94.

Then weights that are kept, where they gain; us, 64 MiB and 1 GiB, in parentheses held: (1, 2) 2048 columns 29.5 and 399
(31.8 and 395), 4096 29.7 and 398 (31.3 and 388), 1024 34.9 and 490 (28.6 and 377); (1, 3) 1024 columns 20.2 and 254
(20.3 and 254), 2048 20.6 and 251 (21.6 and 255), 4096 21.1 and 255 (23.2 and 256), 8192 22.7 and 257 (24.4 and 255);
(2, 2) 1024 columns, a row to a subgroup, 31.1 and 382 (32.4 and 382), with 384 threads 31.5 and 383, with 512, which
spill, 91; 2048 31.3 and 387 (33.0 and 389), 4096 32.5 and 388 (34.5 and 392), 8192 35.4 and 404 (37.2 and 398); (2, 3)
1024 and 2048 columns nothing, 4096 24.3 and 251 (25.1 and 259), 8192 24.3 and 257 (26.6 and 265).
"""
_CARRIED: _Choices = {
    (1, 2): ((4096, _ONE_PART), (8192, _AGAIN), (16384, _PASSED)),
    (1, 3): ((8192, _ONE_PART), (16384, replace(_PASSED, columns="kept"))),
    (2, 2): ((8192, SumTuning(widest=512, through="registers")), (16384, _PASSED)),
    (2, 3): (
        (1024, replace(_ONE_PART, threads=384, resident=768)),
        (2048, SumTuning(resident=768, through="registers")),
        (8192, SumTuning(widest=512, through="registers")),
        (16384, replace(_PASSED, through="parked alone")),
    ),
}
"""The same through Vulkan, 512 MiB; in parentheses what was chosen before, with bf16 rounded as it is now:

=======  ===================  ===================  ===================  ===================
columns  1024                 4096                 8192                 16384
=======  ===================  ===================  ===================  ===================
(1, 2)   3.97                 3.63                 3.82 (3.50)          3.57 (2.29)
(1, 3)   3.91                 3.90                 3.82                 3.47 (2.79)
(2, 2)   3.38                 3.30                 3.15                 2.61 (1.61)
(2, 3)   3.31                 3.31 (2.75)          3.37                 2.29 (0.33)
=======  ===================  ===================  ===================  ===================

What was chosen before spills at 16384 columns. Others there: (1, 2) with x parked alone 3.40, (1, 3) 3.52; (2, 2) and
(2, 3) with nothing ahead 1.98 and 2.09.

(2, 3) has changed since then. 64 MiB and 1 GiB, in parentheses what the table is of: 1024 columns 2.54 and 3.82 (2.32
and 3.58), with 1024 threads, of which some wait, 2.18 and 3.26; 16384 columns, with 255 registers for each of 256
threads, 1.59 and 2.95 (1.49 and 2.44). The same for (2, 2): 1.75 and 2.72 (1.86 and 2.95).

Then three rows side by side for (2, 3) of 1024 columns, whose workgroups leave a third of the sums: 64 MiB 2.69 (2.50).
Four side by side 2.20, in half as many workgroups 2.57; rows of 32 or 64 threads 1.95 to 2.70.

With statistics of rows, 512 MiB, in parentheses without: (2, 2) 1024 columns 3.83 (3.40), 4096 3.76 (3.33); (2, 3) 4096
3.84 (3.41). 16384 columns: (2, 2) all rows ahead, x parked, by 256 threads 3.11, x alone ahead by 512 3.06 (2.89),
nothing ahead 2.67; (2, 3) nothing ahead, packed, 3.28, x alone ahead by 256 threads 2.72 (2.72).

16384 columns, what is not parked read again in the last pass rather than kept, strides known, 64 MiB and 1 GiB, in
parentheses before: (1, 2) x parked 2.71 and 3.92 (2.55 and 3.84), not parked 2.50 and 3.59, nothing ahead 2.00 and
2.60; (1, 3) x parked 2.43 and 4.03 (2.31 and 3.89), alone ahead 2.38 and 3.98, not read again but packed, nothing
ahead, 2.46 and 3.97; (2, 2) x parked 2.15 and 3.12 (2.01 and 3.22), alone ahead 1.98, not parked 2.05 and 3.23, by 256
threads 2.09 and 3.31, nothing ahead 2.00 and 3.47, which is quicker from 2000 rows on by these; (2, 3) x alone ahead
1.92 and 3.74 (1.89 and 3.66), all ahead 1.73 and 3.06, nothing ahead 1.90 and 3.74, as before with strides known 1.86
and 3.75.

With sums in halves and 24 bits (`sums_layout`), us, 64 MiB and 1 GiB, in parentheses before: (2, 3) 4096 columns
through registers 25.7 and 268 (27.0 and 287), with weights kept 25.7 and 274, x parked alone 29.5 and 330; (1, 3) 16384
columns with weights kept 26.0 and 261 (26.2 and 264). Others at 16384 columns gain nothing: (2, 3) 29.4 and 286,
nothing ahead 30.1 and 285, not read again but packed 30.0 and 284, by 256 threads 33.6 and 340; (2, 2) 40.8 and 485,
nothing ahead 43.3 and 482, x alone 43.6 and 491, by 256 threads 47.8 and 573; (1, 2) 35.0 and 411, through registers
with weights kept 35.4 and 403.
"""
_BY_MAIL: _Choices = {
    (1, 2): (
        (8192, replace(_MAILED, threads=512, resident=512)),
        (4096, replace(_MAILED, threads=512, resident=512, cluster=4)),
    ),
    (1, 3): (
        (12288, replace(_MAILED, threads=256, resident=256, ahead=3)),
        (8192, replace(_MAILED, threads=512, resident=512)),
    ),
    (2, 2): (
        (8192, replace(_MAILED, threads=512, resident=512)),
        (4096, replace(_MAILED, parts=2, threads=512, resident=512, ahead=2, cluster=2)),
    ),
    (2, 3): (
        (12288, replace(_MAILED, threads=256, resident=256, ahead=3)),
        (8192, replace(_MAILED, threads=384, resident=384, ahead=2)),
        (4096, replace(_MAILED, threads=384, resident=384, cluster=2)),
    ),
}
"""By sums for each column and arrays that are read: rows of at least so many columns that lie over clusters, which
leave a half to an eighth of the partial sums, and exchange by mail.

H200, bf16, us, 64 MiB and 1 GiB, in parentheses what is chosen without clusters, but with weights held as before:

=======  ==========================  ==========================  ===========================
columns  4096                        8192                        16384
=======  ==========================  ==========================  ===========================
(1, 2)   29.9, 393 (31.3, 388)       29.5, 390 (33.2, 385)       29.5, 392 (35.4, 402)
(1, 3)   22.4, 255 (23.2, 256)       22.5, 253 (24.4, 255)       22.5, 255 (27.0, 258)
(2, 2)   30.5, 380 (34.5, 392)       31.1, 391 (37.2, 398)       31.1, 390 (40.0, 417)
(2, 3)   22.4, 256 (25.1, 259)       23.6, 255 (26.6, 265)       24.2, 257 (30.4, 262)
=======  ==========================  ==========================  ===========================

Of many rows (1, 2) has 385 to 388 us without, so it is; (1, 3) of 4096 columns has 21.1 and 255 with weights that are
kept and 768 threads. Others at 16384 columns: with weights held (2, 3) has 27.5 and 297, since each row waits for them
again, and with 512 threads 25.9 and 263; clusters of four 25.2 and 265, with 512 threads 26.2 and 264; 384 threads 24.2
and 258, 128 threads 36.7 and 484. (2, 2) with 256 threads and three blocks ahead 32.4 and 386, with 384 and two 31.8
and 386. (1, 2) with 256 threads 29.8 and 397. Weights that are kept gain less without clusters: 8192 columns 31.2 and
403, 22.7 and 257, 35.4 and 404, 24.3 and 257.
"""
_WIDE = replace(_MAILED, threads=256, resident=256, ahead=3)
_WIDE_BY_MAIL: _Choices = {
    (1, 2): ((8192, _WIDE),),
    (1, 3): ((8192, _WIDE),),
    (2, 2): ((8192, _WIDE),),
    (2, 3): ((12288, _WIDE),),
}
"""The same of float32, where 16384 columns do not fit without clusters: 28.9, 382 (38.2, 455); 21.6, 253 (31.2, 339);
29.9, 384 (57.2, 663); 22.2, 254 (42.7, 448). 8192 columns: 28.6, 434 (33.5, 435); 21.3, 253 (24.2, 280); 30.2, 400
(35.5, 429); (2, 3) 23.4, 264 (22.9, 251)."""
_MIXED, _MIXED_LONGEST = SumTuning(widest=512, through="registers"), 8192
"""Rows of float32 beside 16-bit ones (layer_norm_linear, 4096 x 4096): 45.0 us; `SUMS` 48.0, by copies 54 to 56."""
