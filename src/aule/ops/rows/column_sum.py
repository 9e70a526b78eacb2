"""The kernel that adds up workgroups' partial sums of columns (`aule.tile.rows.column_sums`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aule import tuning
from aule.errors import InvalidShapeError
from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import SCALARS, i32, i64
from aule.ops.shared.parameters import Parameters
from aule.ops.shared.plan import Step
from aule.target import Target
from aule.tile.common.math import fold
from aule.tile.common.matrix import divmod_const
from aule.tile.rows.column_sums import SumsLayout, deinterleaved_column, fold_threads, store_numbered
from aule.tile.vector.engine import vector_unit, work_type
from aule.view import TensorView


@dataclass(frozen=True)
class ColumnSumConfig:
    """Configuration of the kernel that adds up partial sums of columns.

    Attributes
    ----------
    outputs : tuple of (str, str)
        Names and dtypes.
    columns, lanes : int
        Columns of a workgroup, and threads that share a column.
    width, vectors : int
        Columns of a thread; on a CPU ``vectors`` times as many.
    together : int
        Vectors of columns that a CPU task adds up at a time.
    at_once : int
        Rows that a thread loads before it adds any.
    pairs : bool
        Partial sums hold the first columns of all pairs, then the second ones, then the rest; results hold columns in
        order, with pairs side by side.
    deinterleaved : bool
        Partial sums may be deinterleaved (`aule.tile.rows.column_sums.SumsLayout`): a parameter says so.
    awaits : bool
        The kernel starts while the launch before it ends, and waits for it. That launch is an ordinary one on the same
        stream, so when it has ended, so has everything before it.
    """

    dtype: str
    outputs: tuple[tuple[str, str], ...]
    columns: int
    lanes: int
    width: int
    vectors: int
    together: int
    at_once: int
    index64: bool
    pairs: bool = False
    deinterleaved: bool = False
    awaits: bool = False


def column_sum_step(
    dtype: str,
    outputs: Sequence[tuple[str, TensorView]],
    partials: int,
    length: int,
    target: Target,
    pairs: int = 0,
    layout: SumsLayout = "in_order",
) -> Step:
    """Add up ``partials`` rows of ``length`` sums for each output.

    Partial sums have this ``layout``; ``pairs`` pairs of columns are stored as in `ColumnSumConfig.pairs`.
    """
    shape = _host_shape(dtype, target, pairs > 0) if target.host else _shape(length, len(outputs), target)
    numbers: dict[str, int | float] = {"length": length, "partials": partials, "pairs": pairs}
    numbers["deinterleaved"] = int(layout == "deinterleaved")
    config = ColumnSumConfig(
        dtype,
        tuple((name, view.dtype) for name, view in outputs),
        **shape,
        index64=partials * len(outputs) * length > 2**31 - 1 - (1 << 20),
        pairs=pairs > 0,
        deinterleaved=tuning.number(target, "rows.sums.layout") == "deinterleaved",
        awaits=target.overlap,
    )
    each = config.columns * config.width * config.vectors
    groups = -(-length // each)
    if groups > target.max_grid[0]:
        raise InvalidShapeError(
            f"[{outputs[0][0]}] expected at most {target.max_grid[0] * each} columns on {target.name}, got "
            f"{length}; use backend='cpu'"
        )
    return Step(config, build_column_sum, (groups, len(outputs), 1), numbers)


def _host_shape(dtype: str, target: Target, pairs: bool) -> dict[str, int]:
    """Fields of `ColumnSumConfig` on a CPU."""
    lanes = vector_unit(target, work_type(SCALARS[dtype])).lanes
    task = {"vectors": 1, "together": 1} if pairs else tuning.use(target, "column_sum.cpu")
    return {"columns": 1, "lanes": 1, "width": 1 if pairs else lanes, "at_once": 1, **task}


def _shape(length: int, outputs: int, target: Target) -> dict[str, int]:
    """Fields of `ColumnSumConfig` on a GPU: for long rows; or for short ones, with fewer columns a workgroup, so that
    every unit has some."""
    choices = tuning.use(target, "column_sum")
    long: Mapping[str, int] = choices["long"]
    choice = long if -(-length // long["columns"]) * outputs >= target.compute_units else choices["short"]
    lanes = min(choice["lanes"], (1 << (target.max_threads.bit_length() - 1)) // choice["columns"])
    return {"width": 1, "vectors": 1, "together": 1, **choice, "lanes": lanes}


def build_column_sum(config: ColumnSumConfig, target: Target) -> KernelIR:
    """Trace the kernel: neighbouring threads have neighbouring columns; the threads of a column share its rows."""
    b = Builder("column_sum", config.columns * config.lanes, arithmetic="quick")
    if config.awaits:
        b.launch_await()
        b.launch_next()
    cpu = target.host
    p = Parameters(b, i64 if cpu or config.index64 else i32)
    work = work_type(SCALARS[config.dtype])
    length, partials = p.number("length"), p.number("partials")
    source = p.buffer("partial", work)
    lane, column = divmod_const(b, b.thread_id(), config.columns)
    number = b.group_id(1)
    col = (b.group_id(0) * config.columns + column) * (config.width * config.vectors)
    step = b.cast(length, p.index)

    def add_vectors(start: Value, width: int, count: int) -> list[Var]:
        """Add up this task's rows of ``count`` neighbouring vectors."""
        totals = [b.var(b.splat(b.const(0.0, work), width)) for _ in range(count)]
        with b.loop(lane, partials, config.lanes, unroll=4, name="row") as row:
            at = start + b.cast(row, p.index) * step
            for i, total in enumerate(totals):
                total.value = total.value + b.load(source, at + i * width, width, align=1)
        return totals

    def add_rows(start: Value) -> Var:
        """Add up this thread's rows of a column."""
        total = b.var(b.splat(b.const(0.0, work), 1))
        together = config.lanes * config.at_once
        with b.loop(lane, partials, together, name="row") as first:
            rows = [first + i * config.lanes for i in range(config.at_once)]
            places = [b.min(row, partials - 1) for row in rows]
            found = [b.load(source, start + b.cast(place, p.index) * step) for place in places]
            values = [b.select(row < partials, x, 0.0) for row, x in zip(rows, found, strict=True)]
            total.value = total.value + fold(b, "add", values)
        return total

    def fold_column(value: Value) -> Value:
        """Add up over the threads of a column; the first of them gets the sum."""
        if config.lanes == 1:
            return value
        memory = b.shared("sums", work, config.columns * config.lanes)
        b.store(memory, lane * config.columns + column, value)
        return fold_threads(b, memory, config.columns, config.lanes)

    def add(col: Value, width: int, count: int = 1) -> None:
        inside = b.min(col, length - width * count)
        start = step * b.cast(partials, p.index) * b.cast(number, p.index) + b.cast(inside, p.index)
        totals = add_vectors(start, width, count) if cpu else [add_rows(start)]
        values = [fold_column(total.value) for total in totals]
        to = inside
        if config.pairs:
            half = p.number("pairs")
            neighbours = b.select(inside < half, inside * 2, (inside - half) * 2 + 1)
            to = b.select(inside < half * 2, neighbours, inside)
        if config.deinterleaved:
            to = b.select(b.ne(p.number("deinterleaved"), 0), deinterleaved_column(b, inside, length), to)
        outs = [p.buffer(name, SCALARS[dtype], "write") for name, dtype in config.outputs]
        with b.if_(b.eq(lane, 0) & (col < length)):
            store_numbered(b, outs, number, b.cast(to, p.index), values)

    if config.width == 1:
        add(col, 1)
    else:
        end = b.min(col + config.width * config.vectors, length)
        together = config.width * config.together
        full = col + (end - col) // together * together
        with b.loop(col, full, together, name="col") as some:
            add(some, config.width, config.together)
        with b.loop(full, end, name="rest") as rest:
            add(rest, 1)
    b.barrier()  # see `Rows.finish`
    return b.finish()
