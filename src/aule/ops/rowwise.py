"""What ops that work row by row share: rows of any strides, and the parameters of kernels over them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from aule.errors import DeviceMismatchError, InvalidDtypeError, InvalidShapeError
from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, Scalar, i32, i64, u32
from aule.ops.attention.validate import FLOAT_DTYPES
from aule.ops.column_trail import POSTED
from aule.ops.parameters import Access, Parameters
from aule.ops.spec import Result
from aule.target import Target
from aule.tile.carried import Carried
from aule.tile.column_sums import ColumnSums, Pieces, SumsLayout, gather, has_pieces, put_together
from aule.tile.early import Early
from aule.tile.matrix import divmod_const
from aule.tile.parked import Parked
from aule.tile.rows import Columns, RowArray, Rows, RowShape
from aule.tile.spans import Span, SpanShape
from aule.tile.stages import Stages
from aule.tile.vector import work_type
from aule.view import TensorView, broadcast, contiguous_strides

MAX_LENGTH = 1 << 30
"""Columns of a row, so that sums of two of them stay below 2**31."""


# -- checks ------------------------------------------------------------------------------------------------------------


def check_floats(op: str, main: str, views: Mapping[str, TensorView], alike: Iterable[str] = ()) -> None:
    """All floats and on one device; those of ``alike`` of the dtype of ``main``, others no wider than float32 unless
    it is float64."""
    first = views[main]
    for name, view in views.items():
        if view.dtype not in FLOAT_DTYPES:
            raise InvalidDtypeError(
                f"[{op}] expected {name} of dtype {', '.join(FLOAT_DTYPES)}, got {view.dtype}; convert it first"
            )
        if name in alike and view.dtype != first.dtype:
            raise InvalidDtypeError(
                f"[{op}] expected {name} of {main}'s dtype {first.dtype}, got {view.dtype}; convert one of them"
            )
        if view.dtype == "f64" and first.dtype != "f64":
            raise InvalidDtypeError(
                f"[{op}] expected {name} of at most 32 bits with {main} of dtype {first.dtype}, got f64; convert it"
            )
    check_devices(op, main, views)


def check_devices(op: str, main: str, views: Mapping[str, TensorView]) -> None:
    """All on one device."""
    home = views[main].device
    for name, view in views.items():
        if view.device != home:
            raise DeviceMismatchError(f"[{op}] expected {name} on {home} like {main}, got {view.device}; move it there")


def check_rows(op: str, name: str, view: TensorView) -> None:
    """An array of rows, with at least one column."""
    if not view.shape or not 1 <= view.shape[-1] <= MAX_LENGTH:
        raise InvalidShapeError(
            f"[{op}] expected {name} with a last axis of 1 to {MAX_LENGTH} columns, got shape {list(view.shape)}; "
            "reshape it"
        )
    if math.prod(view.shape[:-1]) >= 1 << 31:
        raise InvalidShapeError(f"[{op}] expected {name} of fewer than 2**31 rows, got {list(view.shape)}; split it")


def check_shape(op: str, name: str, view: TensorView, shape: tuple[int, ...], remedy: str) -> None:
    """An array of this shape."""
    if view.shape != shape:
        raise InvalidShapeError(f"[{op}] expected {name} of shape {list(shape)}, got {list(view.shape)}; {remedy}")


def spread(op: str, name: str, view: TensorView, shape: tuple[int, ...], remedy: str) -> TensorView:
    """A view of a larger shape, with stride 0 along axes that it has not or has once."""
    lead = len(shape) - len(view.shape)
    if lead < 0 or any(n not in (1, m) for n, m in zip(view.shape, shape[lead:], strict=True)):
        raise InvalidShapeError(
            f"[{op}] expected {name} that can be spread to {list(shape)}, got {list(view.shape)}; {remedy}"
        )
    return broadcast(view, shape, (*(None for _ in range(lead)), *range(len(view.shape))))


def statistics_of(dtype: str, shape: tuple[int, ...], count: int) -> Result:
    """What ``count`` numbers of each row are together: all first ones, then all second ones ..."""
    return Result(work_type(SCALARS[dtype]).name, (count, *shape[:-1]))


def check_statistics(op: str, main: str, views: Mapping[str, TensorView], count: int) -> dict[str, TensorView]:
    """Such statistics of the rows of ``main``, where there are some; the other views."""
    if "statistics" in views:
        want, found = statistics_of(views[main].dtype, views[main].shape, count), views["statistics"]
        if found.dtype != want.dtype:
            raise InvalidDtypeError(
                f"[{op}] expected statistics of dtype {want.dtype}, got {found.dtype}; leave them out"
            )
        check_shape(op, "statistics", found, want.shape, "leave them out")
    return {name: view for name, view in views.items() if name != "statistics"}


def has_statistics(views: Mapping[str, TensorView]) -> bool:
    """Whether a kernel can read statistics of rows, or writes them: where they lie in one piece."""
    view = views.get("statistics")
    if view is None or view.offset:
        return False
    return view.strides == contiguous_strides(view.shape)


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowOperand:
    """What a kernel is told of an operand of rows, or of columns."""

    dtype: str
    aligned: bool = False
    unit: bool = True


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """What every kernel over rows is made from.

    Attributes
    ----------
    axes : int
        Leading axes that cannot be taken as one, by whose strides a row is found.
    operands : tuple of (str, RowOperand)
        In the order of the kernel's buffers, by name.
    stream : bool
        Rows that are written go past the caches.
    lasting : bool
        Rows that are read are the last that the second-level cache gives up.
    fused_rounding : bool
        Results are rounded by a fused operation (`KernelIR.arithmetic`).
    fixed : tuple of (str, int or float)
        Numbers that all calls have, as in `Parameters`.
    sums : str
        How rows of partial sums of columns lie in memory.
    awaits : bool
        It begins while the launch before ends, waits for that itself, and lets the next launch do so.
    """

    dtype: str
    shape: RowShape
    spans: tuple[SpanShape, ...]
    axes: int
    index64: bool
    operands: tuple[tuple[str, RowOperand], ...]
    stream: bool = False
    awaits: bool = False
    lasting: bool = False
    fused_rounding: bool = False
    fixed: tuple[tuple[str, int | float], ...] = ()
    sums: SumsLayout = "whole"

    def has(self, name: str) -> bool:
        return any(name == known for known, _ in self.operands)


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Where the rows of some arrays of one shape are: lengths of the axes that are left, and each array's strides."""

    sizes: tuple[int, ...]
    strides: Mapping[str, tuple[int, ...]]

    def dense(self, length: int) -> bool:
        """Whether rows of so many columns follow each other without gaps, in all arrays."""
        return len(self.sizes) == 1 and all(strides == (length,) for strides in self.strides.values())

    @property
    def scalars(self) -> dict[str, int | float]:
        numbers: dict[str, int | float] = {"rows": math.prod(self.sizes)}
        numbers |= {f"axis{i}": n for i, n in enumerate(self.sizes) if i}
        for name, strides in self.strides.items():
            numbers |= {f"{name}_stride{i}": stride for i, stride in enumerate(strides)}
        return numbers


def lay_out(shape: tuple[int, ...], strides: Mapping[str, Sequence[int]]) -> RowLayout:
    """Take leading axes together where every array allows it."""
    sizes: list[int] = []
    kept: dict[str, list[int]] = {name: [] for name in strides}
    for axis, n in enumerate(shape):
        if n == 1:
            continue
        if sizes and all(kept[name][-1] == given[axis] * n for name, given in strides.items()):
            sizes[-1] *= n
            for name, given in strides.items():
                kept[name][-1] = given[axis]
        else:
            sizes.append(n)
            for name, given in strides.items():
                kept[name].append(given[axis])
    if not sizes:
        return RowLayout((1,), {name: (0,) for name in strides})
    return RowLayout(tuple(sizes), {name: tuple(found) for name, found in kept.items()})


def view_numbers(views: Mapping[str, TensorView]) -> dict[str, int | float]:
    """Offsets, and strides of columns."""
    numbers: dict[str, int | float] = {}
    for name, view in views.items():
        numbers[f"{name}_offset"] = view.offset
        numbers[f"{name}_col_stride"] = view.strides[-1]
    return numbers


def fixed_numbers(scalars: Mapping[str, int | float]) -> tuple[tuple[str, int | float], ...]:
    """For `RowConfig.fixed`: all but how many rows there are, which changes from call to call."""
    return tuple((name, number) for name, number in scalars.items() if name != "rows")


def extent(view: TensorView) -> int:
    """Largest element index, with room for indices that are computed but not used."""
    return view.last_index + 2 * sum(abs(s) for n, s in zip(view.shape, view.strides, strict=True) if n > 1)


def view_width(view: TensorView, columns: int | None = None) -> int:
    """Columns that can travel together: a power of two, with 16 bytes as the most. ``columns`` are those that count,
    if not all."""
    if view.strides[-1] != 1 and view.shape[-1] != 1:
        return 1
    width = min(16, view.alignment) // view.itemsize
    lengths = [view.shape[-1] if columns is None else columns, view.offset]
    lengths += [abs(s) for n, s in zip(view.shape[:-1], view.strides[:-1], strict=True) if n > 1]
    for n in lengths:
        if n:
            width = min(width, n & -n)
    return max(width, 1)


def common_width(views: Collection[TensorView]) -> int:
    """Columns of arrays of one shape that can travel together: 16 bytes at most of the narrowest elements, of which
    wider ones are several whole pieces."""
    narrowest = min(view.itemsize for view in views)
    widths = [(view_width(view), view.itemsize) for view in views]
    return min(width for width, size in widths if size == narrowest or width * size < 16)


def operand(view: TensorView, width: int, columns: int | None = None) -> RowOperand:
    """What a kernel whose parts have ``width`` columns is told of a view."""
    unit = view.strides[-1] == 1 or view.shape[-1] == 1
    # Wider elements travel in pieces of 16 bytes, whose starts are what counts.
    piece = min(width, 16 // view.itemsize)
    dtype = "u8" if view.dtype == "bool" else view.dtype
    return RowOperand(dtype, view_width(view, columns) >= piece and width % piece == 0, unit)


# -- kernels -----------------------------------------------------------------------------------------------------------


class RowKernel:
    """A kernel over rows while it is traced: its parameters, its rows and its columns."""

    def __init__(self, name: str, config: RowConfig, target: Target) -> None:
        self.config = config
        shape = config.shape
        cluster = max(shape.cluster, shape.gather)
        self.b = Builder(
            name,
            shape.workgroup,
            max_registers=shape.registers,
            cluster=cluster,
            arithmetic="fused" if config.fused_rounding else "quick",
        )
        self.cpu = target.backend == "cpu"
        if config.awaits:
            self.b.launch_await()
            self.b.launch_next()
        index: Scalar = i64 if self.cpu or config.index64 else i32
        self.column = i64 if self.cpu else i32
        self.p = Parameters(self.b, index, dict(config.fixed))
        self.work = work_type(SCALARS[config.dtype])
        self._operands = dict(config.operands)
        self._found: dict[int, tuple[Value, list[Value]]] = {}
        self.rows = Rows(self.b, target, config.shape, self.work, self.p.number("rows"))
        self.spans = [
            Span(self.rows, shape, self.p.number("length" if i == 0 else f"length{i}", self.column))
            for i, shape in enumerate(config.spans)
        ]

    @property
    def narrow(self) -> bool:
        """Rows are of 16-bit numbers."""
        return SCALARS[self.config.dtype].bytes == 2

    @property
    def span(self) -> Span:
        return self.spans[0]

    def number(self, name: str) -> Value:
        """A scalar of the type that is computed in."""
        return self.p.number(name, self.work)

    def array(self, name: str, access: Access = "read") -> RowArray:
        """An operand of rows."""
        told = self._operands[name]
        buffer = self.p.buffer(name, SCALARS[told.dtype], access, self.config.lasting and access == "read")
        stride = None if told.unit else self.p.number(f"{name}_col_stride", self.p.index)
        aligned, stream = told.aligned and not self.cpu, self.config.stream and access == "write"
        return RowArray(buffer, lambda row: self.p.strided(name, *self.axes(row)), stride, aligned, stream)

    def columns(self, name: str) -> Columns | None:
        """An operand with one number for each column; None where the kernel has none such."""
        if name not in self._operands:
            return None
        told = self._operands[name]
        buffer = self.p.buffer(name, SCALARS[told.dtype])
        stride = None if told.unit else self.p.number(f"{name}_col_stride", self.p.index)
        start = self.p.strided(name)
        return Columns(RowArray(buffer, lambda row: start, stride, told.aligned and not self.cpu), start)

    def read_ahead(self, arrays: Sequence[RowArray], often: RowArray) -> Early | None:
        """Let rows of arrays come ahead of their turn, for `Rows.run`, where the shape says so; most passes read those
        of ``often``."""
        shape = self.config.shape
        if shape.ahead:
            if shape.through == "shared":
                self.span.early = Stages(self.span, arrays)
            elif shape.through == "registers":
                self.span.early = Carried(self.span, arrays)
            else:
                self.span.early = Parked(self.span, arrays, often, alone=shape.through == "parked alone")
        return self.span.early

    def partial(self, number: int = 0, shift: Value | int = 0) -> RowArray:
        """Rows of partial sums of columns, from column ``shift`` on; ``number`` tells several such apart."""
        if self.config.sums == "posted":
            buffer = self.p.buffer(POSTED, i32, "readwrite")
        else:
            buffer = self.p.buffer("partial", u32 if self.config.sums == "short" else self.work, "readwrite")
        index = self.p.index
        step = self.p.number("sums", index)
        base = step * self.b.cast(self.p.number("partials"), index) * number
        base = base + self.b.cast(self.b.coerce(shift, i32), index)

        def start(row: Value) -> Value:
            return base + self.b.cast(row, index) * step

        return RowArray(buffer, start, None, not self.cpu)  # parts of more than one column divide a row

    def leave(self, sums: Collection[ColumnSums]) -> None:
        """Store sums of columns; the launch that adds them up may start."""
        if sums:
            self.b.launch_next()
        shape, early = self.config.shape, self.span.early
        if sums and isinstance(early, Stages) and (shape.gather > 1 or (shape.slots > 1 and has_pieces(self.span))):
            assert self.config.sums == "whole"
            pieces = Pieces(list(sums), early.memory)  # whose rows nobody needs any more
            gather(pieces) if shape.gather > 1 else put_together(pieces)
            return
        for total in sums:
            total.finish()

    def statistic(self, number: int, access: Access = "read") -> RowArray:
        """One of several numbers of each row in ``statistics``, which has all first ones, then all second ones ..."""
        buffer, index = self.p.buffer("statistics", self.work, access), self.p.index
        rows = self.b.cast(self.rows.count, index)
        return RowArray(buffer, lambda row: rows * number + self.b.cast(row, index))

    def axes(self, row: Value) -> list[Value]:
        """A row's number along each axis."""
        known = self._found.get(id(row))
        if known is None:
            rest, found = row, []
            for i in range(self.config.axes - 1, 0, -1):
                size = self.p.number(f"axis{i}")
                if size.constant is not None:
                    rest, number = divmod_const(self.b, rest, size.constant)
                else:
                    rest, number = rest // size, rest % size
                found.append(number)
            known = self._found[id(row)] = (row, [rest, *reversed(found)])
        return known[1]

    def finish(self) -> KernelIR:
        self.rows.finish()
        return self.b.finish()
