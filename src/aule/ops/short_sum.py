"""The kernel of `aule.ops.column_sum` for partial sums of 24 bits (`aule.tile.short_floats`), on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, f32, i32, i64, u32
from aule.ops.parameters import Parameters
from aule.ops.step import Step
from aule.target import Target
from aule.tile.column_sums import fold_threads, store_numbered
from aule.tile.math import fold
from aule.tile.matrix import QUAD, divmod_const
from aule.tile.short_floats import RUN, short_words, widened
from aule.view import TensorView

_COLUMNS = (64, 32, 16)
"""Neighbouring columns of a workgroup, as many as leave every unit one; upper halves of 32 bytes at least, which memory
brings at once."""
_RESIDENT = 1024
"""Threads for each unit at most, as long as a thread has few rows. H200, 32768 columns of 128 rows, with the gradient
that left them: 29.4 us; with 512 29.6, with 2048 29.7."""
_FEWEST_LANES = 16


@dataclass(frozen=True)
class ShortSumConfig:
    """``outputs`` have names and dtypes. A workgroup has so many ``columns``, eight to a thread, and ``lanes`` threads
    for each eight, of which each loads ``rows`` of partial sums before it adds any; in an ``exact`` one all have as
    many."""

    outputs: tuple[tuple[str, str], ...]
    columns: int
    lanes: int
    rows: int
    exact: bool
    index64: bool

    @property
    def threads(self) -> int:
        return self.columns // RUN * self.lanes


def short_sum_step(outputs: Sequence[tuple[str, TensorView]], partials: int, length: int, target: Target) -> Step:
    """Add up ``partials`` rows of ``length`` sums for each output."""
    columns = _COLUMNS[0]
    for columns in _COLUMNS:
        if -(-length // columns) * len(outputs) >= target.compute_units:
            break
    groups = -(-length // columns)
    lanes = min(1024, 1 << (target.max_threads.bit_length() - 1)) * RUN // columns
    most = target.compute_units * _RESIDENT
    while lanes > _FEWEST_LANES and groups * len(outputs) * columns // RUN * lanes > most:
        lanes //= 2
    named = tuple((name, view.dtype) for name, view in outputs)
    index64 = partials * len(outputs) * length > 2**31 - 1 - (1 << 20)
    config = ShortSumConfig(named, columns, lanes, -(-partials // lanes), partials % lanes == 0, index64)
    numbers: dict[str, int | float] = {"length": length, "partials": partials, "sums": short_words(length)}
    return Step(config, build_short_sum, (groups, len(outputs), 1), numbers)


def build_short_sum(config: ShortSumConfig, target: Target) -> KernelIR:
    """Trace the kernel: threads side by side have neighbouring columns, those of a column every n-th row; at the end a
    thread has one column."""
    b = Builder("short_sum", config.threads, arithmetic="quick")
    p = Parameters(b, i64 if config.index64 else i32)
    length, partials = p.number("length"), p.number("partials")
    source = p.buffer("partial", u32)
    lane, run = divmod_const(b, b.thread_id(), config.columns // RUN)
    first, number = b.group_id(0) * config.columns, b.group_id(1)
    step = b.cast(p.number("sums"), p.index)
    inside = b.min(first + run * RUN, length - RUN)
    start = step * b.cast(partials, p.index) * b.cast(number, p.index)
    upper_at = start + b.cast(inside >> 1, p.index)
    lower_at = start + b.cast((length >> 1) + (inside >> 2), p.index)
    rows = [lane + i * config.lanes for i in range(config.rows)]
    found = []
    for row in rows:
        at = b.cast(row if config.exact else b.min(row, partials - 1), p.index) * step
        found.append((b.load(source, upper_at + at, 4), b.load(source, lower_at + at, 2)))
    sums: list[list[Value]] = [[] for _ in range(RUN)]
    for row, (upper, lower) in zip(rows, found, strict=True):
        for terms, value in zip(sums, widened(b, upper, lower), strict=True):
            terms.append(value if config.exact else b.select(row < partials, value, 0.0))
    totals = [fold(b, "add", terms) for terms in sums]
    memory = b.shared("found", f32, config.threads * RUN)
    for i in range(0, RUN, QUAD):
        b.store(memory, b.thread_id() * RUN + i, b.vector(totals[i : i + QUAD]))
    value = fold_threads(b, memory, config.columns, config.lanes)
    chosen, column = divmod_const(b, b.thread_id(), config.columns)
    to = first + column
    outs = [p.buffer(name, SCALARS[dtype], "write") for name, dtype in config.outputs]
    with b.if_(b.eq(chosen, 0) & (to < length)):
        store_numbered(b, outs, number, b.cast(to, p.index), [value])
    return b.finish()
