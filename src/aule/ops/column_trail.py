"""`aule.ops.column_sum` where it need not come after the kernel that leaves the sums: it goes with it, and waits.

Both are given to the device at once (`Step.together`), with nothing between them, so that this one may begin while the
first ends, or before. Partial sums are left in words that are zero until then, and a word that is not zero is there: a
sum that is zero is left as the negative zero (`aule.tile.column_sums`). Each word speaks for itself, so nothing has to
be ordered, and whoever has read a word sets it back to zero, as it was found. No interface says which of the two
launches begins first, so there are fewer of these workgroups than multiprocessors: wherever all of them are and wait,
there is room for those that they wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import SCALARS, Vector, f32, i32, u32
from aule.ops.parameters import Parameters
from aule.ops.step import Step, can_wait
from aule.target import Target
from aule.tile.column_sums import MIN_LANES, column_in_halves, fold_threads, store_numbered
from aule.tile.math import fold
from aule.tile.matrix import QUAD, divmod_const
from aule.view import TensorView

POSTED = "posted"
"""The buffer of words."""
_FEWEST_COLUMNS = 8
"""Of a workgroup: 32 bytes, which memory brings at once."""
_THREADS, _ROWS = (512, 1024), 5
"""Of a workgroup, and rows that a thread waits for, which it has in registers: more only in the largest. H200 through
Vulkan, bf16, 64 MiB, us, gradients with a launch behind the first, and with one beside it by 512 threads with up to
five rows to each, by 1024, and by 256 and 128 with up to ten and 18. 1024 columns: rms_norm 31.4, 31.1, 31.9, 33.9,
34.6, residual_rms_norm 23.0, 22.5, 23.2, 25.2, 25.9, layer_norm 34.2, 34.3, 34.0, 34.9, 36.4, residual_layer_norm 25.3,
24.6, 25.3, 24.7, 25.6. 4096 columns: rms_norm 35.1, 34.0, 34.1, 35.2, 37.0, residual_rms_norm 23.7, 22.8, 23.0, 24.1,
25.4; at 1 GiB 0.3 to 1.3% less with it."""
_WORDS = 3 << 19
"""Of all partial sums at most, since each word is set back to zero. 64 MiB, without and with: 2.2 M words,
residual_layer_norm of 4096 columns 27.2 and 27.6, layer_norm 35.2 and 35.0; 2.1 M, 16384 columns, rms_norm 35.1 and
35.9, residual_rms_norm 26.2 and 26.9; 4.2 M, layer_norm 43.8 and 44.8."""


@dataclass(frozen=True)
class ColumnTrailConfig:
    """``outputs`` have names and dtypes. A workgroup has so many ``columns``, four to a thread, and ``lanes`` threads
    for each four, of which each waits for ``rows`` of partial sums."""

    outputs: tuple[tuple[str, str], ...]
    columns: int
    lanes: int
    rows: int

    @property
    def threads(self) -> int:
        return self.columns // QUAD * self.lanes


def trail_shape(outputs: int, partials: int, length: int, target: Target) -> tuple[int, int] | None:
    """Columns of a workgroup of a launch that waits for ``partials`` rows of ``length`` sums for each output, and its
    threads for each four of them; None where none is to wait."""
    # Whichever launch begins first, a multiprocessor is left to those that are waited for.
    room = target.compute_units - 1
    if not can_wait(target) or room < outputs or partials * outputs * length > _WORDS:
        return None
    columns = _FEWEST_COLUMNS
    while -(-length // columns) * outputs > room:
        columns *= 2
    for threads in _THREADS:
        lanes = threads // (columns // QUAD)
        if threads > target.max_threads or lanes < MIN_LANES:
            continue
        if threads == _THREADS[-1] or partials <= lanes * _ROWS:
            return columns, lanes
    return None


def column_trail_step(outputs: Sequence[tuple[str, TensorView]], partials: int, length: int, target: Target) -> Step:
    """Add up ``partials`` rows of ``length`` sums for each output, where `trail_shape` has a way."""
    shape = trail_shape(len(outputs), partials, length, target)
    assert shape is not None
    columns, lanes = shape
    named = tuple((name, view.dtype) for name, view in outputs)
    config = ColumnTrailConfig(named, columns, lanes, -(-partials // lanes))
    grid = (-(-length // columns), len(outputs), 1)
    return Step(config, build_column_trail, grid, {"length": length, "partials": partials}, together=True)


def build_column_trail(config: ColumnTrailConfig, target: Target) -> KernelIR:
    """Trace the kernel: threads side by side have neighbouring columns, those of a column every n-th row; at the end a
    thread has one column."""
    b = Builder("column_trail", config.threads, arithmetic="quick")
    p = Parameters(b, i32)
    length, partials = p.number("length"), p.number("partials")
    words = p.buffer(POSTED, i32, "readwrite")
    lane, quad = divmod_const(b, b.thread_id(), config.columns // QUAD)
    first, number = b.group_id(0) * config.columns, b.group_id(1)
    place = first + quad * QUAD
    start = partials * number * length + place
    items = []
    for i in range(config.rows):
        row = lane + i * config.lanes
        items.append(_Item(b, words, (row < partials) & (place < length), start + row * length))
    done = b.var(b.const(0, i32), "done")
    with b.repeat(done):
        with b.if_(items[0].missing):
            items[0].read()
        there_all = first_there = ~items[0].missing
        for item in items[1:]:
            # Who waits while others still read rows asks for no more than it must.
            with b.if_(item.missing & first_there):
                item.read()
            there_all = there_all & ~item.missing
        done.value = b.select(there_all, b.const(1, i32), b.const(0, i32))
    for item in items:
        item.clear()
    total = fold(b, "add", [b.splat(b.const(0.0, f32), QUAD), *(item.sums for item in items)])
    memory = b.shared("sums", f32, config.threads * QUAD)
    b.store(memory, b.thread_id() * QUAD, total)
    value = fold_threads(b, memory, config.columns, config.lanes)
    chosen, column = divmod_const(b, b.thread_id(), config.columns)
    column = first + column
    outs = [p.buffer(name, SCALARS[dtype], "write") for name, dtype in config.outputs]
    with b.if_(b.eq(chosen, 0) & (column < length)):
        store_numbered(b, outs, number, column_in_halves(b, column, length), [value])
    return b.finish()


class _Item:
    """Four sums of a row, on their way."""

    def __init__(self, b: Builder, words: Value, exists: Value, at: Value) -> None:
        self._b, self._words, self._exists, self._at = b, words, exists, at
        self._found: Var = b.var(b.splat(b.const(0, i32), QUAD), "found")

    @property
    def missing(self) -> Value:
        b = self._b
        least = fold(b, "min", [b.bitcast(x, u32) for x in b.unpack(self._found.value)])
        return self._exists & b.eq(least, 0)

    def read(self) -> None:
        self._found.value = self._b.peek(self._words, self._at, QUAD)

    def clear(self) -> None:
        with self._b.if_(self._exists):
            self._b.post(self._words, self._at, self._b.splat(self._b.const(0, i32), QUAD))

    @property
    def sums(self) -> Value:
        """Asked for when all of them are there; zeros where there are none."""
        return self._b.bitcast(self._found.value, Vector(f32, QUAD))
