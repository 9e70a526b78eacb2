"""How operands are laid out in memory, and what kernels may assume about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aule.tile.common.matrix import QUAD
from aule.view import TensorView

_BYTES = 16
"""Alignment of rows that tensor copies read."""
_MOST_STRIDE = 1 << 39
"""Elements of 16 bits by which neighbours of a tensor map must be nearer."""


@dataclass(frozen=True)
class Layout:
    """The operands of a problem.

    Attributes
    ----------
    views : mapping
        Views by buffer name.
    aligned_base : mapping
        Whether the memory of each starts at a multiple of 16 bytes; True if missing.
    """

    views: Mapping[str, TensorView]
    aligned_base: Mapping[str, bool]

    def starts_aligned(self, name: str) -> bool:
        """Whether an operand's memory starts at a multiple of 16 bytes."""
        return self.aligned_base.get(name, True)

    def aligned(self, names: Iterable[str], run: int) -> tuple[bool, ...]:
        """Whether rows of each operand can be read in aligned runs of ``run`` elements."""
        return tuple(aligned_rows(self.views[name], run) and self.starts_aligned(name) for name in names)

    def unit(self, names: Iterable[str]) -> tuple[bool, ...]:
        """Whether neighbouring columns of each operand are neighbours in memory."""
        return tuple(self.views[n].strides[3] == 1 or self.views[n].shape[3] == 1 for n in names)

    def tensors(self, names: Sequence[str]) -> bool:
        """Whether tensor maps can describe operands of 16 bits: strides and start are multiples of 16 bytes, and no
        axis is empty or repeats its elements."""
        views = [self.views[name] for name in names]
        steps = [s for view in views for n, s in zip(view.shape, view.strides, strict=True) if n > 1]
        fits = all(0 < s < _MOST_STRIDE for s in steps) and all(n for view in views for n in view.shape)
        return fits and all(self.aligned(names, _BYTES // 2))

    @property
    def index64(self) -> bool:
        """Whether kernels need indices of 64 bits."""
        return any(_extent(view) > 2**31 - 1 for view in self.views.values())

    def in_pairs(self, name: str) -> bool:
        """Whether two keys, the first of which has an even number, can be read together."""
        view = self.views[name]
        steps = [s for n, s in zip(view.shape[:3], view.strides[:3], strict=True) if n > 1]
        even = all(n % 2 == 0 for n in [*steps, view.offset, view.shape[3]])
        return self.starts_aligned(name) and view.strides[3] == 1 and even

    def rope_options(self, run: int) -> dict[str, Any]:
        """As `rope_options`."""
        return rope_options(self.views, run, self.aligned_base)

    def rotated(self, made: Mapping[str, TensorView]) -> Layout:
        """The layout after a prepass has rotated some operands into aligned memory; without rope's tables."""
        views = {name: made.get(name, view) for name, view in self.views.items() if name not in ("cos", "sin")}
        return Layout(views, {name: ok for name, ok in self.aligned_base.items() if name not in made})


def aligned_rows(view: TensorView, run: int = QUAD) -> bool:
    """Whether rows can be read in aligned runs of ``run`` elements."""
    steps = [s for n, s in zip(view.shape[:3], view.strides[:3], strict=True) if n > 1]
    return view.strides[3] == 1 and view.shape[3] % run == 0 and all(s % run == 0 for s in [*steps, view.offset])


def rope_options(
    views: Mapping[str, TensorView], run: int = QUAD, aligned_base: Mapping[str, bool] | None = None
) -> dict[str, Any]:
    """The fields of a `ScoreConfig` that the tables of cosines and sines decide; rows are read ``run`` at a time."""
    tables = {name: views[name] for name in ("cos", "sin") if name in views}
    base_ok = aligned_base or {}
    return {
        "rope_unit": all(view.strides[3] == 1 or view.shape[3] == 1 for view in tables.values()),
        "rope_aligned": bool(tables) and all(aligned_rows(v, run) and base_ok.get(n, True) for n, v in tables.items()),
    }


def view_scalars(views: Mapping[str, TensorView]) -> dict[str, int | float]:
    """Offsets and strides of the operands, by parameter name."""
    scalars: dict[str, int | float] = {}
    for name, view in views.items():
        scalars[f"{name}_offset"] = view.offset
        if name[-1].isdigit():  # captured by a user's function
            for axis, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
                scalars[f"{name}_size{axis}"], scalars[f"{name}_stride{axis}"] = size, stride
            continue
        if len(view.strides) == 4:
            scalars[f"{name}_row_stride"], scalars[f"{name}_col_stride"] = view.strides[2:]
            scalars[f"{name}_rows"] = view.shape[2]
        for axis, stride in enumerate(view.strides[:2]):
            scalars[f"{name}_stride{axis}"] = stride
    return scalars


def _extent(view: TensorView) -> int:
    """Largest element index that a kernel computes, which may lie a tile of rows and columns past the end."""
    rows = list(zip(view.shape, view.strides, strict=True))[-2:]
    return view.last_index + sum(256 * abs(stride) for n, stride in rows if n > 1)
