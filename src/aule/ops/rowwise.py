"""What ops that work row by row share: rows of any strides, and how they lie over a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from aule.errors import DeviceMismatchError, InvalidDtypeError, InvalidShapeError
from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, Scalar, f32, i32, i64
from aule.ops.attention.validate import FLOAT_DTYPES
from aule.ops.parameters import Access, Parameters
from aule.ops.spec import Result
from aule.ops.step import grid_of
from aule.target import Target
from aule.tile.rows import Columns, RowArray, Rows, RowShape
from aule.tile.spans import Span, SpanShape
from aule.tile.stages import COPIED_BYTES, copies_past_registers
from aule.tile.vector import vector_unit, work_type
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


def has_statistics(views: Mapping[str, TensorView], target: Target) -> bool:
    """Whether a kernel can read statistics of rows, or writes them: on CPUs, where they lie in one piece."""
    view = views.get("statistics")
    if view is None or target.backend != "cpu" or view.offset:
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
    """

    dtype: str
    shape: RowShape
    spans: tuple[SpanShape, ...]
    axes: int
    index64: bool
    operands: tuple[tuple[str, RowOperand], ...]
    stream: bool = False

    def has(self, name: str) -> bool:
        return any(name == known for known, _ in self.operands)


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Where the rows of some arrays of one shape are: lengths of the axes that are left, and each array's strides."""

    sizes: tuple[int, ...]
    strides: Mapping[str, tuple[int, ...]]

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


def operand(view: TensorView, width: int, columns: int | None = None) -> RowOperand:
    """What a kernel whose parts have ``width`` columns is told of a view."""
    unit = view.strides[-1] == 1 or view.shape[-1] == 1
    # Wider elements travel in pieces of 16 bytes, whose starts are what counts.
    piece = min(width, 16 // view.itemsize)
    dtype = "u8" if view.dtype == "bool" else view.dtype
    return RowOperand(dtype, view_width(view, columns) >= piece and width % piece == 0, unit)


# -- shapes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowTuning:
    """Numbers by which `choose_rows` lays rows over a GPU.

    Attributes
    ----------
    parts, sum_parts : int
        Parts of 16 bytes that a thread has of a row at best, in kernels without and with sums of columns, which stay
        in registers, too.
    sum_batch : int
        Rows that a thread takes at once in kernels with sums of columns, where that leaves enough blocks.
    most, sum_most : int
        Columns of a row that a thread may keep, without and with sums of columns.
    threads : int
        Of a workgroup at least, where rows are short.
    resident : int
        Threads for each of the device's units, in kernels whose workgroups take one block of rows after the other.
    ahead : int
        Blocks of rows that are copied ahead in kernels with sums of columns, where a device can and has the memory.
        0 until it has been measured that this is faster (docs/performance.md).
    ahead_parts, ahead_batch, ahead_most, ahead_resident : int
        ``sum_parts``, ``sum_batch``, ``sum_most`` and ``resident`` of such kernels.
    ahead_threads : int
        Of a row at most in such kernels, as long as they can keep it: fewer leave room for a second workgroup, and have
        more registers each, which sums of long rows need.
    """

    parts: int = 4
    sum_parts: int = 1
    sum_batch: int = 1
    most: int = 64
    sum_most: int = 16
    threads: int = 128
    resident: int = 1024
    ahead: int = 0
    ahead_parts: int = 2
    ahead_batch: int = 1
    ahead_most: int = 32
    ahead_resident: int = 512
    ahead_threads: int = 256


TUNING = RowTuning()
_SCRATCH = (1024, 4096, 16384)
"""Columns for which a CPU's thread may have memory of its own, which is to stay in its caches."""
_ROW_BYTES = (6 << 10, 5 << 10)
"""Bytes of a row up to which a CPU's thread takes one at a time, in kernels without and with sums of columns."""
_CACHE_BYTES = 32 << 20
"""Of a CPU's last cache, where the system does not say."""
_FRESH_BYTES = 32 << 20
"""An array of so much is fresh memory each time (glibc), which the system has cleared and so brought to the caches:
past them a result of 40 MiB took 5 to 10% longer."""
_UNITS = 16
"""Assumed where a device does not say how many units it has."""
_ROW_SUMS, _COLUMN_SUMS = 5, 2
"""Numbers for each row and each column that kernels with sums of columns exchange, at most."""
_RESERVED = 1024
"""Bytes of shared memory that CUDA takes of each workgroup's."""


def choose_rows(
    target: Target,
    dtype: str,
    length: int,
    width: int,
    rows: int,
    sums: bool = False,
    columns: bool = False,
    copied: int = 0,
) -> tuple[RowShape, SpanShape]:
    """How rows of ``length`` columns, of which ``width`` can travel together, lie over a device's threads; ``sums`` of
    columns are made, or arrays of one number for each of the ``columns`` are read. ``copied`` says how many arrays of
    rows are read, where they may be copied ahead."""
    if target.backend == "cpu":
        return _choose_cpu_rows(target, dtype, length, rows, sums, columns)
    tuning = TUNING
    if not sums:
        return _over_threads(target, length, width, rows, _Share(tuning.parts, tuning.most))
    if copied and copies_past_registers(target) and width * SCALARS[dtype].bytes == COPIED_BYTES:
        share = _Share(tuning.ahead_parts, tuning.ahead_most, tuning.ahead_batch, tuning.ahead_threads)
        shape, span = _over_threads(target, length, width, rows, share)
        memory = target.max_shared_bytes // max(tuning.ahead_resident // shape.workgroup, 1)
        ahead = min(tuning.ahead, _blocks_in(memory, target, dtype, shape, span, copied) - 1)
        if ahead > 0:
            return replace(shape, ahead=ahead), span
    share = _Share(tuning.sum_parts, tuning.sum_most, tuning.sum_batch)
    return _over_threads(target, length, width, rows, share)


@dataclass(frozen=True)
class _Share:
    """What a thread of a GPU is to have of rows: parts of 16 bytes at best, columns at most if it is to keep them, rows
    at once where there are sums of columns; and how many threads share a row at most, while they can keep it."""

    parts: int
    most: int
    batch: int = 0
    threads: int = 1024


def _over_threads(target: Target, length: int, width: int, rows: int, share: _Share) -> tuple[RowShape, SpanShape]:
    """Rows over the threads of a GPU."""
    pieces, tuning, sums = -(-length // width), TUNING, share.batch > 0
    best = max(8 // width, 1) * share.parts
    smallest = max(min(target.subgroup_sizes, default=target.subgroup_size), 1)
    limit = 1 << (min(target.max_threads, 1024).bit_length() - 1)
    most = min(share.threads, limit)
    while most < limit and pieces * width > most * share.most:
        most *= 2
    threads = 1
    while threads < most and pieces > threads * best:
        threads *= 2
    if smallest < threads <= 2 * smallest and pieces * width <= tuning.most * smallest and not sums:
        threads = smallest  # no barriers
    elif max(smallest, tuning.threads // 2) < threads <= smallest * smallest:
        # Whole subgroups are enough, as long as one can read what all of them leave (`Rows`).
        each = max(best, -(-pieces // most))
        threads = -(-pieces // each // smallest) * smallest
    slots = max(min(tuning.threads, most) // threads, 1)
    parts = -(-pieces // threads)
    if parts * width > share.most:
        slots = 1 if sums else slots  # sums that are not in registers are a workgroup's own
        return RowShape(threads, slots, 1, sums, rows % slots == 0), SpanShape(width)
    batch = share.batch if sums and rows >= share.batch * slots * _units(target) else 1
    exact = rows % (slots * batch) == 0
    return RowShape(threads, slots, batch, sums, exact), SpanShape(width, parts, pieces % threads != 0)


def _blocks_in(memory: int, target: Target, dtype: str, shape: RowShape, span: SpanShape, copied: int) -> int:
    """Blocks of rows of some arrays that fit a workgroup's shared memory, beside what their sums take."""
    size = work_type(SCALARS[dtype]).bytes
    stage = copied * span.parts * shape.batch * shape.workgroup * COPIED_BYTES
    stage += size * _ROW_SUMS * shape.batch * shape.workgroup // max(target.subgroup_size, 1)
    slots = size * _COLUMN_SUMS * shape.workgroup * span.width if shape.slots > 1 else 0
    return max(memory - slots - _RESERVED, 0) // stage if span.parts else 0


def _choose_cpu_rows(
    target: Target, dtype: str, length: int, rows: int, sums: bool, columns: bool
) -> tuple[RowShape, SpanShape]:
    """One row at a time, which stays in the first-level cache with all that it meets; or four, where that would not and
    what belongs to columns is brought for all of them at once.

    Zen 4, one thread, 2**22 elements, LayerNorm forward and backward in ms. fp32, one row and four: 1024 columns 0.97,
    2.65 and 1.86, 2.96; 1536 columns 1.30, 3.47 and 1.70, 3.10; 4096 columns 1.98, 4.07 and 1.41, 2.70. bf16, whose
    sums are twice as wide as its rows: 1024 columns 1.16, 2.30 and 1.03, 1.81.
    """
    elem = SCALARS[dtype]
    lanes = vector_unit(target, work_type(elem)).lanes
    most = 0 if sums and elem.bytes < f32.bytes else _ROW_BYTES[sums]
    batch = 4 if (sums or columns) and length * elem.bytes > most else 1
    scratch = next((n for n in _SCRATCH if length <= n), 0)
    span = SpanShape(lanes, tail=length % lanes, unroll=4 if batch == 1 else 2, scratch=scratch)
    return RowShape(batch=batch, loops=True, exact=rows % batch == 0), span


def row_grid(op: str, shape: RowShape, rows: int, target: Target) -> tuple[int, int, int]:
    """The workgroups of a kernel."""
    blocks = -(-rows // shape.block)
    if not shape.loops or blocks == 0:
        return grid_of(op, blocks, target)
    if target.backend == "cpu":
        return (min(blocks, 8 * max(target.compute_units, 1)), 1, 1)
    threads = TUNING.ahead_resident if shape.ahead else TUNING.resident
    return (min(blocks, _units(target) * max(threads // shape.workgroup, 1)), 1, 1)


def streams(views: Mapping[str, TensorView], target: Target) -> bool:
    """Whether what a kernel writes is to go past the caches: on CPUs, where all that it reads and writes fills them, so
    that whoever comes next would not find it there anyway.

    Zen 4, one thread, fp32, LayerNorm: 1.29 -> 1.13 ms forward and 3.5 -> 2.5 backward with arrays of 16 MiB, and with
    a sum over the result after that 1.58 -> 1.57 and 4.0 -> 3.4. Kernels of 16-bit numbers take as long as it takes to
    convert those: 3% less (SwiGLU) to 7% more (softmax, backward).
    """
    sizes = [math.prod(view.shape) * view.itemsize for view in views.values()]
    fills = sum(sizes) >= (target.cache_bytes or _CACHE_BYTES) and max(sizes) < _FRESH_BYTES
    return target.backend == "cpu" and fills and all(view.itemsize >= f32.bytes for view in views.values())


def _units(target: Target) -> int:
    return target.compute_units or _UNITS


# -- kernels -----------------------------------------------------------------------------------------------------------


class RowKernel:
    """A kernel over rows while it is traced: its parameters, its rows and its columns."""

    def __init__(self, name: str, config: RowConfig, target: Target) -> None:
        self.config = config
        self.b = Builder(name, config.shape.workgroup)
        self.cpu = target.backend == "cpu"
        index: Scalar = i64 if self.cpu or config.index64 else i32
        self.column = i64 if self.cpu else i32
        self.p = Parameters(self.b, index)
        self.work = work_type(SCALARS[config.dtype])
        self._operands = dict(config.operands)
        self._found: dict[int, tuple[Value, list[Value]]] = {}
        self.rows = Rows(self.b, target, config.shape, self.work, self.p.number("rows"))
        self.spans = [
            Span(self.rows, shape, self.p.number("length" if i == 0 else f"length{i}", self.column))
            for i, shape in enumerate(config.spans)
        ]

    @property
    def span(self) -> Span:
        return self.spans[0]

    def number(self, name: str) -> Value:
        """A scalar of the type that is computed in."""
        return self.p.number(name, self.work)

    def array(self, name: str, access: Access = "read") -> RowArray:
        """An operand of rows."""
        told = self._operands[name]
        buffer = self.p.buffer(name, SCALARS[told.dtype], access)
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

    def partial(self, number: int = 0, shift: Value | int = 0) -> RowArray:
        """Rows of partial sums of columns, from column ``shift`` on; ``number`` tells several such apart."""
        buffer = self.p.buffer("partial", self.work, "readwrite")
        index = self.p.index
        step = self.p.number("sums", index)
        base = step * self.b.cast(self.p.number("partials"), index) * number
        base = base + self.b.cast(self.b.coerce(shift, i32), index)

        def start(row: Value) -> Value:
            return base + self.b.cast(row, index) * step

        return RowArray(buffer, start, None, not self.cpu)  # parts of more than one column divide a row

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
                found.append(rest % size)
                rest = rest // size
            known = self._found[id(row)] = (row, [rest, *reversed(found)])
        return known[1]

    def finish(self) -> KernelIR:
        self.rows.finish()
        return self.b.finish()
