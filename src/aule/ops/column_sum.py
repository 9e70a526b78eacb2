"""The kernel that adds up what workgroups have left of sums of columns (`aule.tile.column_sums`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from aule.errors import InvalidShapeError
from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, i32, i64
from aule.ops.column_trail import column_trail_step
from aule.ops.parameters import Parameters
from aule.ops.short_sum import short_sum_step
from aule.ops.step import Step
from aule.target import Target
from aule.tile.column_sums import SumsLayout, column_in_halves, fold_threads, store_numbered
from aule.tile.math import fold
from aule.tile.matrix import divmod_const
from aule.tile.vector import vector_unit, work_type
from aule.view import TensorView


@dataclass(frozen=True)
class ColumnSumConfig:
    """The kernel that adds up partial sums of columns; ``outputs`` have names and dtypes. A thread has ``width``
    columns, and on a CPU ``vectors`` times as many. It loads ``at_once`` rows before it adds any. With ``pairs``
    columns of pairs come first ones, second ones and the rest, and are to be neighbours; with ``halves`` they come as
    `aule.tile.column_sums.SumsLayout` has it. With ``awaits`` it is started while the launch before ends, which is an
    ordinary one on the same stream: when that is over, so is all that came before. ``fixed`` are numbers that all calls
    have, as in `Parameters`."""

    dtype: str
    outputs: tuple[tuple[str, str], ...]
    columns: int
    lanes: int
    width: int
    at_once: int
    index64: bool
    pairs: bool = False
    awaits: bool = False
    vectors: int = 1
    fixed: tuple[tuple[str, int | float], ...] = ()
    halves: bool = False


_COLUMNS = (32, 16, 8)
"""Neighbouring columns of a workgroup of a GPU, as many as leave every unit one; of 32 bytes at least, which memory
brings at once."""
_RESIDENT = 2048
"""Threads for which each unit of NVIDIA's GPUs has room: workgroups are as large as lets all of them run at once.
H200, 32768 columns of 66 rows, with the gradient that left them: 30.8 us with 256 threads each, 33.5 with 1024, by four
rounds."""
_FEWEST_LANES = 8
_AT_ONCE = (10, 17)
"""Rows that a thread of a GPU loads before it adds any, at most; and through Vulkan on NVIDIA's GPUs. There, on an
H200, 32768 columns of 132 rows with the gradient that left them: 36.1 us with 17, 36.7 with 10."""
_CPU_VECTORS, _CPU_TOGETHER = 16, 4
"""Vectors of columns of a task on a CPU, and how many of them it adds up at a time: neighbouring lines of a row. 16
rows of 16384 columns for two outputs took 0.18 ms on two cores with one line to a task, and so 0.10 (Zen 4)."""


def column_sum_step(
    dtype: str,
    outputs: Sequence[tuple[str, TensorView]],
    partials: int,
    length: int,
    target: Target,
    pairs: int = 0,
    usual: bool = False,
    layout: SumsLayout = "whole",
) -> Step:
    """Add up ``partials`` rows of ``length`` sums for each output; ``pairs`` of columns are to be neighbours. With
    ``usual`` there are as many rows in most calls, and a kernel for this number pays. ``layout`` is how they lie, which
    may want another kernel."""
    if layout == "posted":
        return column_trail_step(outputs, partials, length, target)
    if layout == "short":
        return short_sum_step(outputs, partials, length, target)
    vectors = 1
    if target.backend == "cpu" and pairs:
        columns = lanes = width = 1
    elif target.backend == "cpu":
        columns, lanes, width = 1, 1, vector_unit(target, work_type(SCALARS[dtype])).lanes
        vectors = _CPU_VECTORS
    else:
        columns, width = _COLUMNS[0], 1
        for columns in _COLUMNS:
            if -(-length // columns) * len(outputs) >= target.compute_units:
                break
        groups = -(-length // columns) * len(outputs)
        lanes = min(1024, 1 << (target.max_threads.bit_length() - 1)) // columns
        if target.backend == "cuda" or target.vulkan_on_nvidia:
            while lanes > _FEWEST_LANES and groups * columns * lanes > target.compute_units * _RESIDENT:
                lanes //= 2
    numbers: dict[str, int | float] = {"length": length, "partials": partials, "pairs": pairs}
    config = ColumnSumConfig(
        dtype,
        tuple((name, view.dtype) for name, view in outputs),
        columns,
        lanes,
        width,
        min(-(-partials // lanes), _AT_ONCE[target.vulkan_on_nvidia]),
        partials * len(outputs) * length > 2**31 - 1 - (1 << 20),
        pairs > 0,
        target.overlap,
        vectors,
        tuple(numbers.items()) if usual else (),
        layout == "halves",
    )
    groups = -(-length // (columns * width * vectors))
    if groups > target.max_grid[0]:
        raise InvalidShapeError(
            f"[{outputs[0][0]}] expected at most {target.max_grid[0] * columns * width} columns on {target.name}, got "
            f"{length}; use backend='cpu'"
        )
    grid = (groups, len(outputs), 1)
    return Step(config, build_column_sum, grid, numbers)


def build_column_sum(config: ColumnSumConfig, target: Target) -> KernelIR:
    """Trace the kernel: threads side by side have neighbouring columns, those of a column every n-th row."""
    b = Builder("column_sum", config.columns * config.lanes, arithmetic="quick")
    if config.awaits:
        b.launch_await()
        b.launch_next()
    cpu = target.backend == "cpu"
    p = Parameters(b, i64 if cpu or config.index64 else i32, dict(config.fixed))
    work = work_type(SCALARS[config.dtype])
    length, partials = p.number("length"), p.number("partials")
    source = p.buffer("partial", work)
    lane, column = divmod_const(b, b.thread_id(), config.columns)
    number = b.group_id(1)
    col = (b.group_id(0) * config.columns + column) * (config.width * config.vectors)
    step = b.cast(length, p.index)
    known = dict(config.fixed).get("partials", 0)
    alone = 0 < known <= config.lanes * config.at_once  # one round, and rows of which it is known that they are there

    def summed(start: Value, width: int, count: int) -> list[Value]:
        """What this thread's rows have at some places side by side."""
        totals = [b.var(b.splat(b.const(0.0, work), width)) for _ in range(count)]
        if cpu:
            with b.loop(lane, partials, config.lanes, unroll=4, name="row") as row:
                at = start + b.cast(row, p.index) * step
                for i, total in enumerate(totals):
                    total.value = total.value + b.load(source, at + i * width, width, align=1)
        else:
            together = config.lanes * config.at_once
            with nullcontext(lane) if alone else b.loop(lane, partials, together, name="row") as first:
                rows = [first + i * config.lanes for i in range(config.at_once)]
                sure = [alone and (i + 1) * config.lanes <= known for i in range(config.at_once)]
                places = [row if there else b.min(row, partials - 1) for row, there in zip(rows, sure, strict=True)]
                found = [b.load(source, start + b.cast(place, p.index) * step) for place in places]
                parts = zip(rows, found, sure, strict=True)
                there = [x if there else b.select(row < partials, x, 0.0) for row, x, there in parts]
                totals[0].value = totals[0].value + fold(b, "add", there)
        return [total.value for total in totals]

    def gathered(value: Value) -> Value:
        """The sum over the threads of a column, for the first of them."""
        if config.lanes == 1:
            return value
        memory = b.shared("sums", work, config.columns * config.lanes)
        b.store(memory, lane * config.columns + column, value)
        return fold_threads(b, memory, config.columns, config.lanes)

    def add(col: Value, width: int, count: int = 1) -> None:
        inside = b.min(col, length - width * count)
        start = step * b.cast(partials, p.index) * b.cast(number, p.index) + b.cast(inside, p.index)
        values = [gathered(value) for value in summed(start, width, count)]
        to = inside
        if config.pairs:
            half = p.number("pairs")
            neighbours = b.select(inside < half, inside * 2, (inside - half) * 2 + 1)
            to = b.select(inside < half * 2, neighbours, inside)
        if config.halves:
            to = column_in_halves(b, inside, length)
        outs = [p.buffer(name, SCALARS[dtype], "write") for name, dtype in config.outputs]
        with b.if_(b.eq(lane, 0) & (col < length)):
            store_numbered(b, outs, number, b.cast(to, p.index), values)

    if config.width == 1:
        add(col, 1)
    else:
        end = b.min(col + config.width * config.vectors, length)
        together = config.width * _CPU_TOGETHER
        whole = col + (end - col) // together * together
        with b.loop(col, whole, together, name="col") as some:
            add(some, config.width, _CPU_TOGETHER)
        with b.loop(whole, end, name="rest") as rest:
            add(rest, 1)
    b.barrier()  # see `Rows.finish`
    return b.finish()
