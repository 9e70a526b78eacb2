"""RowConfig and RowKernel: the base classes of kernels over rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, Scalar, i32, i64, u32
from aule.ops.rows.views import RowOperand
from aule.ops.shared.parameters import Access, Parameters
from aule.target import Target
from aule.tile.rows.column_sums import (
    ColumnSums,
    SumPieces,
    SumsLayout,
    has_pieces,
    store_cluster_sums,
    store_slot_sums,
)
from aule.tile.rows.engine import Rows
from aule.tile.rows.parts import Columns, RowArray
from aule.tile.rows.passes import Passes
from aule.tile.rows.prefetch import BlockPrefetch, RowPrefetch
from aule.tile.rows.prefetch_registers import RegisterPrefetch, StagedPrefetch
from aule.tile.rows.prefetch_shared import SharedPrefetch
from aule.tile.rows.shape import PassShape, RowShape
from aule.tile.vector.engine import work_type


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """Configuration of a kernel over rows.

    Attributes
    ----------
    passes : tuple of PassShape
        One for each range of columns.
    axes : int
        Leading axes that could not be merged, by whose strides a row is found.
    operands : tuple of (str, RowOperand)
        In the order of the kernel's buffers, by name.
    stream : bool
        Stores of rows bypass the caches.
    evict_last : bool
        Rows that are read are the last that the second-level cache evicts.
    fused_rounding : bool
        Results are rounded by a fused operation (`KernelIR.arithmetic`).
    sums : str
        Layout of partial sums of columns in memory.
    awaits : bool
        The kernel starts while the launch before it ends, waits for it, and lets the next launch do so.
    """

    name: str
    dtype: str
    shape: RowShape
    passes: tuple[PassShape, ...]
    axes: int
    index64: bool
    operands: tuple[tuple[str, RowOperand], ...]
    stream: bool = False
    awaits: bool = False
    evict_last: bool = False
    fused_rounding: bool = False
    sums: SumsLayout = "in_order"

    def has(self, name: str) -> bool:
        return any(name == known for known, _ in self.operands)


class RowKernel:
    """A kernel over rows while it is traced: its parameters, rows and passes.

    ``all_passes`` are the passes over each range of columns; ``passes`` is the first.
    """

    def __init__(self, config: RowConfig, target: Target) -> None:
        self.config = config
        shape = config.shape
        self.b = Builder(
            config.name,
            shape.workgroup,
            max_registers=shape.registers,
            cluster=max(shape.cluster, shape.sums_cluster),
            arithmetic="fused" if config.fused_rounding else "quick",
        )
        self.cpu = target.host
        if config.awaits:
            self.b.launch_await()
            self.b.launch_next()
        index: Scalar = i64 if self.cpu or config.index64 else i32
        self.column = i64 if self.cpu else i32
        self.p = Parameters(self.b, index)
        self.work = work_type(SCALARS[config.dtype])
        self._operands = dict(config.operands)
        self._axes: dict[int, tuple[Value, list[Value]]] = {}
        self.rows = Rows(self.b, target, config.shape, self.work, self.p.number("rows"))
        self.all_passes = [
            Passes(self.rows, shape, self.p.number("length" if i == 0 else f"length{i}", self.column))
            for i, shape in enumerate(config.passes)
        ]
        self.passes = self.all_passes[0]

    @property
    def narrow(self) -> bool:
        """Whether rows have 16-bit elements."""
        return SCALARS[self.config.dtype].bytes == 2

    def number(self, name: str) -> Value:
        """A scalar of the type computed in."""
        return self.p.number(name, self.work)

    def array(self, name: str, access: Access = "read") -> RowArray:
        """An operand that is an array of rows."""
        operand = self._operands[name]
        buffer = self.p.buffer(name, SCALARS[operand.dtype], access, self.config.evict_last and access == "read")
        stride = None if operand.unit else self.p.number(f"{name}_col_stride", self.p.index)
        stream = self.config.stream and access == "write"
        return RowArray(buffer, lambda row: self.p.strided(name, *self.axes(row)), stride, operand.aligned, stream)

    def columns(self, name: str) -> Columns | None:
        """An operand with one number per column; None if the kernel has none of this name."""
        if name not in self._operands:
            return None
        operand = self._operands[name]
        buffer = self.p.buffer(name, SCALARS[operand.dtype])
        stride = None if operand.unit else self.p.number(f"{name}_col_stride", self.p.index)
        start = self.p.strided(name)
        return Columns(RowArray(buffer, lambda row: start, stride, operand.aligned), start)

    def prefetch(self, arrays: Sequence[RowArray], most_read: RowArray) -> RowPrefetch | None:
        """Prefetch rows of some arrays, for `Rows.run`, if the shape says so; ``most_read`` is read by most passes."""
        shape, passes = self.config.shape, self.passes
        if shape.prefetch:
            if shape.prefetch_to == "shared":
                passes.prefetch = SharedPrefetch(passes, arrays)
            elif shape.prefetch_to == "registers":
                passes.prefetch = RegisterPrefetch(passes, arrays)
            else:
                alone = shape.prefetch_to == "staged_alone"
                passes.prefetch = StagedPrefetch(passes, arrays, most_read, alone)
        return passes.prefetch

    def partial(self, number: int = 0, shift: Value | int = 0) -> RowArray:
        """Rows of partial sums of columns, from column ``shift`` on, of the output with this number."""
        buffer, index = self.p.buffer("partial", self.work, "readwrite"), self.p.index
        step = self.p.number("sums", index)
        base = step * self.b.cast(self.p.number("partials"), index) * number
        base = base + self.b.cast(self.b.coerce(shift, i32), index)

        def start(row: Value) -> Value:
            return base + self.b.cast(row, index) * step

        return RowArray(buffer, start, None, not self.cpu)  # the width of a part divides a row

    def _store_sums(self, sums: Collection[ColumnSums]) -> None:
        """Store sums of columns; the launch that adds them up may begin."""
        if sums:
            self.b.launch_next()
        shape, prefetch = self.config.shape, self.passes.prefetch
        combines = shape.sums_cluster > 1 or (shape.slots > 1 and has_pieces(self.passes))
        if sums and isinstance(prefetch, SharedPrefetch) and combines:
            assert self.config.sums == "in_order"
            pieces = SumPieces(list(sums), prefetch.memory)  # its rows are no longer needed
            store_cluster_sums(pieces) if shape.sums_cluster > 1 else store_slot_sums(pieces)
            return
        for total in sums:
            total.finish()

    def statistic(self, number: int, access: Access = "read") -> RowArray:
        """One of the statistics of each row: the first of every row, then the second of every row ..."""
        buffer, index = self.p.buffer("statistics", self.work, access), self.p.index
        rows = self.b.cast(self.rows.count, index)
        return RowArray(buffer, lambda row: rows * number + self.b.cast(row, index))

    def axes(self, row: Value) -> list[Value]:
        """A row's number along each axis."""
        known = self._axes.get(id(row))
        if known is None:
            rest, found = row, []
            for i in range(self.config.axes - 1, 0, -1):
                outer = self.quotient(rest, f"axis{i}")
                found.append(rest - outer * self.p.number(f"axis{i}"))
                rest = outer
            known = self._axes[id(row)] = (row, [rest, *reversed(found)])
        return known[1]

    def quotient(self, number: Value, name: str) -> Value:
        """A non-negative i32 divided by a scalar: by one multiplication, since GPUs have no division."""
        b = self.b
        if self.cpu:
            return number // self.p.number(name)
        word = b.cast(number, u32)
        high = b.mulhi(word, self.p.number(f"{name}_factor", u32))
        return b.cast((high + word) >> self.p.number(f"{name}_bits", u32), i32)

    def trace(
        self, body: Callable[[], None], *prefetches: BlockPrefetch, sums: Collection[ColumnSums] = ()
    ) -> KernelIR:
        """Trace ``body`` for the rows of a workgroup, then store ``sums`` of columns."""
        self.rows.run(body, *prefetches)
        self._store_sums(sums)
        self.rows.finish()
        return self.b.finish()
