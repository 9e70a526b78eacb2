"""Views of row operations' arrays as kernels take them: leading axes merged, strides, alignment."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from aule.target import Target
from aule.view import TensorView


@dataclass(frozen=True)
class RowOperand:
    """An operand of a row kernel: an array of rows, or one with a number per column."""

    dtype: str
    aligned: bool = False
    unit: bool = True


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Lengths of the leading axes that remain after merging, and each array's strides along them."""

    sizes: tuple[int, ...]
    strides: Mapping[str, tuple[int, ...]]

    @property
    def scalars(self) -> dict[str, int | float]:
        numbers: dict[str, int | float] = {"rows": math.prod(self.sizes)}
        for i, n in enumerate(self.sizes[1:], 1):
            numbers[f"axis{i}"] = n
            numbers[f"axis{i}_factor"], numbers[f"axis{i}_bits"] = divisor(n)
        for name, strides in self.strides.items():
            numbers |= {f"{name}_stride{i}": stride for i, stride in enumerate(strides)}
        return numbers


def lay_out(shape: tuple[int, ...], strides: Mapping[str, Sequence[int]]) -> RowLayout:
    """Merge leading axes where the strides of every array allow it."""
    sizes: list[int] = []
    merged: dict[str, list[int]] = {name: [] for name in strides}
    for axis, n in enumerate(shape):
        if n == 1:
            continue
        if sizes and all(merged[name][-1] == given[axis] * n for name, given in strides.items()):
            sizes[-1] *= n
            for name, given in strides.items():
                merged[name][-1] = given[axis]
        else:
            sizes.append(n)
            for name, given in strides.items():
                merged[name].append(given[axis])
    if not sizes:
        return RowLayout((1,), {name: (0,) for name in strides})
    return RowLayout(tuple(sizes), {name: tuple(found) for name, found in merged.items()})


def row_layout(shape: tuple[int, ...], views: Mapping[str, TensorView]) -> RowLayout:
    """The layout of the rows of arrays of one shape."""
    return lay_out(shape[:-1], {name: view.strides[:-1] for name, view in views.items()})


def divisor(n: int) -> tuple[int, int]:
    """Factor and bits by which non-negative 32-bit numbers are divided by ``n`` (`RowKernel.quotient`)."""
    bits = (n - 1).bit_length()
    return ((1 << 32) * ((1 << bits) - n)) // n + 1, bits


def view_scalars(views: Mapping[str, TensorView]) -> dict[str, int | float]:
    """Offsets of arrays, and their strides along columns."""
    numbers: dict[str, int | float] = {}
    for name, view in views.items():
        numbers[f"{name}_offset"] = view.offset
        numbers[f"{name}_col_stride"] = view.strides[-1]
    return numbers


def extent(view: TensorView) -> int:
    """Largest element index, with room for indices that are computed but not used."""
    return view.last_index + 2 * sum(abs(s) for n, s in zip(view.shape, view.strides, strict=True) if n > 1)


def needs_index64(views: Iterable[TensorView], more: int = 0) -> bool:
    """Whether indices into these arrays, or ``more`` beyond, exceed 32 bits."""
    return max(extent(view) for view in views) + more > 2**31 - 1


def view_width(view: TensorView, columns: int | None = None) -> int:
    """Columns that can be loaded together: a power of two, at most 16 bytes. ``columns`` is the number of columns used,
    if not all are."""
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
    """Columns of arrays of one shape that can be loaded together: at most 16 bytes of the narrowest elements; wider
    ones take several loads of 16 bytes."""
    narrowest = min(view.itemsize for view in views)
    widths = [(view_width(view), view.itemsize) for view in views]
    return min(width for width, size in widths if size == narrowest or width * size < 16)


def row_operands(
    views: Mapping[str, TensorView], width: int, target: Target, columns: int | None = None
) -> tuple[tuple[str, RowOperand], ...]:
    """Views as operands of a kernel with parts of ``width`` columns, by name: for `RowConfig.operands`. On CPUs vectors
    need no alignment."""
    operands = []
    for name, view in views.items():
        # Wider elements are loaded in pieces of 16 bytes; only the start of each matters.
        piece = min(width, 16 // view.itemsize)
        aligned = not target.host and view_width(view, columns) >= piece and width % piece == 0
        unit = view.strides[-1] == 1 or view.shape[-1] == 1
        operands.append((name, RowOperand("u8" if view.dtype == "bool" else view.dtype, aligned, unit)))
    return tuple(operands)
