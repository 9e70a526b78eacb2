"""Transfers of matrices from global into shared memory, for kernels on matrix units."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

from aule.ir import Builder, Value, Var
from aule.ir.types import Scalar, Vector, f32, i32, u32
from aule.tile.common.matrix import Matrix, divmod_const, padded
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.shape import RUN, FragmentShape, row_stride


class Mover(Protocol):
    """Threads that move rows, ``thread`` of ``shape.threads``, and what becomes of runs on their way."""

    b: Builder
    elem: Scalar
    shape: FragmentShape
    thread: Value

    def incoming(self, run: Value) -> Value: ...


class Transfer:
    """Moves one matrix into shared memory, some rows at a time.

    ``start`` begins to fetch, ``finish`` makes the rows visible to the thread itself, and a barrier after that to all.
    Asynchronous copies go to ``target`` directly. Otherwise the rows wait in registers until ``finish`` stores them,
    rounded to the engine's type.
    """

    together = 1
    """Runs of a thread that share a number."""

    def __init__(self, engine: Mover, source: Matrix, rows: int, memory: Value, copies: bool, width: int = 0) -> None:
        # Columns in shared memory: the matrix's, and padding.
        self.width = width or padded(source.cols, SIZE)
        self.engine, self.b, self.source, self.rows, self.memory = engine, engine.b, source, rows, memory
        # Rows that are rounded pass through registers.
        copied = copies and source.elem == engine.elem != f32
        self.direct = copied and source.aligned and source.col_stride is None
        self.cols = source.cols if self.direct else padded(source.cols, SIZE)
        self.runs = rows * self.cols // RUN
        b, threads = self.b, engine.shape.threads
        self.count = -(-self.runs // threads)
        # If one run of each thread fills entire rows, all runs of a thread lie in one column.
        self.step, rest = divmod(threads * RUN, self.cols)
        self.regular = rest == 0 and self.runs % threads == 0
        self.row, run = divmod_const(b, engine.thread, self.cols // RUN)
        self.col = run * RUN
        self.own = self.address(self.row, self.col)
        self.offset = source.index(b, self.row) * source.row_stride + source.index(b, self.col)
        # Small elements wait as words: some compilers carry bf16 through a loop half by half.
        bits = source.elem.bits
        self.waiting = Vector(u32, RUN * bits // 32) if bits < 32 else Vector(source.elem, RUN)
        self._zero = b.splat(b.const(0, self.waiting.elem), self.waiting.lanes)
        self.registers: list[Var] = [] if self.direct else [self._register() for _ in range(self.count)]

    @property
    def stride(self) -> int:
        """Elements from one row to the next in shared memory."""
        return row_stride(self.width)

    def address(self, row: Value, col: Value) -> Value:
        """Offset of a run of elements from the start of the rows."""
        return row * self.stride + col

    def place(self, i: int | Value) -> tuple[Value, Value, Value]:
        """Row and column of this thread's ``i``-th run, and its number."""
        number = self.engine.thread + i * self.engine.shape.threads
        if self.regular:
            return self.row + i * self.step, self.col, number
        row, run = divmod_const(self.b, number, self.cols // RUN)
        return row, run * RUN, number

    def clear_padding(self, target: Value, times: int) -> None:
        """Store zeros after the columns of ``times`` stages, which asynchronous copies do not write."""
        b, engine = self.b, self.engine
        if self.width == self.cols:
            return
        zero = b.splat(b.const(0, engine.elem), RUN)  # columns come in full runs
        with b.loop(0, -(-self.rows * times // engine.shape.threads), name="row") as i:
            row = engine.thread + i * engine.shape.threads
            with b.if_(row < self.rows * times):
                for col in range(self.cols, self.width, RUN):
                    b.store(self.memory, target + self.address(row, b.const(col, i32)), zero)

    def start(self, first: Value, target: Value, full: bool = False) -> None:
        """Fetch the rows from ``first`` on into memory from ``target`` on. With ``full`` all of them exist; otherwise
        rows past the end are replaced by zeros, or by the last one if they wait in registers."""
        b, source = self.b, self.source
        # Rows have one stride and a thread's runs lie in one column: addresses are a start and constant steps.
        even = full and self.regular and source.even and source.aligned and source.col_stride is None
        even = even and self.cols == source.cols
        base = source.base + source.index(b, first) * source.row_stride + self.offset if even else None
        own = target + self.own
        for i in range(self.count):

            def fetch(row: Value, col: Value, i: int = i) -> None:
                if base is not None:
                    index = base + source.row_stride * (i * self.step)
                else:
                    index = source.row_start(b, first + row)
                    if not self.direct:
                        self._keep(i, source.load_quad(b, index, col, self.cols, RUN))
                        return
                    index = index + source.index(b, col)
                if not self.direct:
                    self._keep(i, b.load(source.buffer, index, RUN))
                    return
                to = own + i * self.step * self.stride if self.regular else target + self.address(row, col)
                exists = None if full or source.in_bounds else first + row < source.rows
                b.async_copy(self.memory, to, source.buffer, index, RUN, exists)

            self._each(i, fetch)
        if self.direct:
            b.async_commit()

    def _register(self) -> Var:
        return self.b.var(self._zero, "fetched")

    def _keep(self, i: int, run: Value) -> None:
        self.registers[i].value = self.b.bitcast(run, self.waiting)

    def finish(self, target: Value) -> None:
        """Wait for the fetched rows, and store those that are in registers."""
        b = self.b
        if self.direct:
            b.async_wait(0)
            return
        for i, register in enumerate(self.registers):
            value = self.engine.incoming(b.bitcast(register.value, Vector(self.source.elem, RUN)))
            self._each(i, lambda row, col: b.store(self.memory, target + self.address(row, col), value))  # noqa: B023

    def own_runs(self, target: Value, f: Callable[[Value], None]) -> None:
        """Call ``f`` with each run in shared memory that this thread fetched."""
        for i in range(self.count):
            self._each(i, lambda row, col: f(self.b.load(self.memory, target + self.address(row, col), RUN)))

    def rewrite_own(self, target: Value, f: Callable[[Value], Value]) -> None:
        """Replace each run in shared memory that this thread fetched by ``f`` of it."""
        b = self.b

        def each(row: Value, col: Value) -> None:
            at = target + self.address(row, col)
            b.store(self.memory, at, f(b.load(self.memory, at, RUN)))

        for i in range(self.count):
            self._each(i, each)

    def runs_of(self, first: Value) -> list[Value]:
        """This thread's runs of the rows from ``first`` on, fetched into registers and rounded."""
        b, source, runs = self.b, self.source, []
        for i in range(self.count):
            row, col, _ = self.place(i)  # a run too many belongs to a row past the end
            runs.append(source.load_quad(b, source.row_start(b, first + row), col, self.cols, RUN))
        return [self.engine.incoming(run) for run in runs]

    def rewrite(self, first: Value, target: Value, f: Callable[[Value], Value]) -> None:
        """Fetch the rows from ``first`` on again and store ``f`` of each run. Slow."""
        b = self.b
        with b.loop(0, self.count, name="run") as i:
            row, col, number = self.place(i)
            with b.if_(number < self.runs):
                start = self.source.row_start(b, first + row)
                run = self.source.load_quad(b, start, col, self.cols, RUN)
                b.store(self.memory, target + self.address(row, col), f(self.engine.incoming(run)))

    def _each(self, i: int, f: Callable[[Value, Value], None]) -> None:
        """Call ``f`` with row and column of this thread's ``i``-th run, if it has one."""
        row, col, number = self.place(i)
        may_lack = self.runs % self.engine.shape.threads and i >= self.count - self.together
        with self.b.if_(number < self.runs) if may_lack else nullcontext():
            f(row, col)


_USUAL_ACROSS = 8
"""Threads along a row that read 128 bytes together."""


class RowTransfer(Transfer):
    """A transfer whose threads have a few rows each, and of these every ``across``-th run: a thread looks up few rows,
    and its addresses have constant steps."""

    def __init__(
        self, engine: Mover, source: Matrix, rows: int, memory: Value, copies: bool, width: int, across: int
    ) -> None:
        super().__init__(engine, source, rows, memory, copies, width)
        self._rows_at_once, self._along = engine.shape.threads // across, across * RUN
        self._each_row = self.cols // self._along
        self.row, run = divmod_const(self.b, engine.thread, across)
        self.col = run * RUN
        self.own = self.address(self.row, self.col)

    @staticmethod
    def across(cols: int, rows: int, threads: int) -> int:
        """Threads along a row: a power of two, or 0 if threads and runs cannot be dealt out evenly."""
        runs = padded(cols, SIZE) // RUN
        fitting = [n for n in (32, 16, 8, 4) if runs % n == 0 and threads % n == 0 and rows % (threads // n) == 0]
        return min(fitting, default=0, key=lambda n: abs(n - _USUAL_ACROSS))

    def place(self, i: int | Value) -> tuple[Value, Value, Value]:
        row, run = divmod_const(self.b, i, self._each_row) if isinstance(i, Value) else divmod(i, self._each_row)
        return self.row + row * self._rows_at_once, self.col + run * self._along, self.engine.thread

    def start(self, first: Value, target: Value, full: bool = False) -> None:
        b, source = self.b, self.source
        own = target + self.own
        for i in range(self.count):
            row, run = divmod(i, self._each_row)
            if run == 0:
                number = first + self.row + row * self._rows_at_once
                start, exists = source.row_start(b, number), None
                if not (full or source.in_bounds):
                    exists = number < source.rows
            col = self.col + run * self._along
            if not self.direct:
                self._keep(i, source.load_quad(b, start, col, self.cols, RUN))
                continue
            to = own + (row * self._rows_at_once * self.stride + run * self._along)
            b.async_copy(self.memory, to, source.buffer, start + source.index(b, col), RUN, exists)
        if self.direct:
            b.async_commit()


def transfer_by_rows(engine: Mover, source: Matrix, rows: int, memory: Value, copies: bool, width: int) -> Transfer:
    """A `RowTransfer` if threads and runs can be dealt out evenly, otherwise a `Transfer`."""
    across = RowTransfer.across(source.cols, rows, engine.shape.threads)
    if not across:
        return Transfer(engine, source, rows, memory, copies, width)
    return RowTransfer(engine, source, rows, memory, copies, width, across)
