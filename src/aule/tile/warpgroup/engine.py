"""The warpgroup engine: asynchronous products that four subgroups start together.

Accumulators have the layout of the fragment engine, 16 rows per subgroup, whose code handles everything between two
products. Two things differ. The product itself reads its right factor, and optionally its left one, from shared memory,
where they are stored in panels (`aule.ir.types.Panels`). And a product runs on while the subgroup does something else,
until it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aule.ir import Builder, Value, Var
from aule.ir.types import PANEL, Panels, i32
from aule.target import WARPGROUP_UNITS, Target
from aule.tile.common.matrix import Matrix
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Fragments
from aule.tile.fragment.shape import FragmentShape
from aule.tile.fragment.transfer import Mover, Transfer

SUBGROUPS = 4
"""Subgroups of a warpgroup."""
ROWS = SUBGROUPS * SIZE
"""Rows of a product."""
MOST_COLUMNS = 256
"""Columns of a product at most."""


def has_warpgroups(target: Target, dtype: str) -> bool:
    """Whether a device has warpgroup products of an element type."""
    return any(f":{dtype}:" in unit for unit in WARPGROUP_UNITS if unit in target.matrix_units)


@dataclass(frozen=True)
class PanelShape:
    """A matrix in panels; the last one is padded."""

    rows: int
    cols: int

    @property
    def stride(self) -> int:
        """Elements from one panel to the next."""
        return self.rows * PANEL

    @property
    def elements(self) -> int:
        return -(-self.cols // PANEL) * self.stride

    def offset(self, row: Value, col: Value) -> Value:
        """Offset of a run of eight elements; ``col`` is a multiple of eight."""
        return (col >> 6) * self.stride + row * PANEL + self.run(row, col) * 8

    @staticmethod
    def run(row: Value, col: Value) -> Value:
        """The run of its row of a panel that holds an element."""
        return ((col >> 3) ^ row) & 7


@dataclass(frozen=True)
class PanelFactor:
    """A factor of a product, in shared memory from ``start`` on, a multiple of 512.

    ``transposed``: memory holds its transpose. It begins at ``row`` and ``col`` of the matrix.
    """

    memory: Value
    start: Value
    shape: PanelShape
    transposed: bool = False
    row: int = 0
    col: int = 0

    def left(self, k: int) -> tuple[Value, Value, Panels]:
        """16 columns of a left factor, from ``16 k`` on."""
        return self._part(k, along_rows=self.transposed)

    def right(self, k: int) -> tuple[Value, Value, Panels]:
        """16 rows of a right factor, from ``16 k`` on."""
        return self._part(k, along_rows=not self.transposed)

    def _part(self, k: int, along_rows: bool) -> tuple[Value, Value, Panels]:
        row, col = (self.row + SIZE * k, self.col) if along_rows else (self.row, self.col + SIZE * k)
        return self.memory, self.start, Panels("column" if self.transposed else "row", self.shape.stride, row, col)


class Warpgroups(Fragments):
    """The fragment engine with products of warpgroups."""

    def __init__(self, b: Builder, target: Target, shape: FragmentShape, dtype: str) -> None:
        super().__init__(b, target, shape, dtype)
        assert shape.subgroups % SUBGROUPS == 0 and shape.rows == SIZE
        # The shuffle tells the compiler that all lanes have the same value.
        self.group = b.shuffle(self.subgroup >> 2, b.const(0, i32))

    def panels(self, source: Matrix, rows: int, memory: Value, width: int = 0) -> PanelTransfer:
        """A transfer of ``rows`` rows of a matrix at a time into panels, with padding up to ``width`` columns."""
        return PanelTransfer(self, source, rows, memory, self.copies, width)

    def start_product(
        self,
        tile: Sequence[Var],
        left: PanelFactor | Sequence[Value],
        right: PanelFactor,
        depth: int,
        fresh: bool = False,
    ) -> None:
        """Start ``tile += left @ right``, or ``=`` with ``fresh``; the summed dimension has ``16 * depth`` elements.

        Of the product's 64 rows the subgroup has 16, in accumulators of 16 columns each. The left factor is in shared
        memory, or fragments of this subgroup's rows, 16 columns each.
        """
        for k in range(depth):
            factor = left.left(k) if isinstance(left, PanelFactor) else left[k]
            self.b.warpgroup_mma(tile, factor, right.right(k), fresh and k == 0)

    def put_factors(
        self, memory: Value, start: Value, shape: PanelShape, row: Value, col: Value, factors: Sequence[Value]
    ) -> None:
        """Store left factors side by side in panels from ``start`` on. This subgroup's first begins at ``row`` and
        ``col``, which is a multiple of all their columns and in the first panel."""
        b = self.b
        # Rows and columns of a lane, a component and the subgroup occupy different bits, so that the order of runs
        # within a row, an exclusive or, can be composed of them.
        own = (
            start
            + (row + self.lane_row) * PANEL
            + shape.run(self.lane_row, self.lane_col + col) * 8
            + (self.lane_col & 7)
        )
        for k, factor in enumerate(factors):
            for part in range(0, len(self.places), 2):
                y, x = self.places[part]
                (panel, x), order = divmod(x + k * SIZE, PANEL), (x + k * SIZE) // 8 ^ y
                at = (own ^ (order % 8 * 8)) + (panel * shape.stride + y * PANEL + x % 8)
                b.store(memory, at, b.vector([b.fragment_get(factor, part + i) for i in range(2)]))


class PanelTransfer(Transfer):
    """A transfer into panels, of ``panel_rows`` rows if those are more. After ``finish``, ``warpgroup_publish`` and a
    barrier show the rows to products."""

    def __init__(
        self, engine: Mover, source: Matrix, rows: int, memory: Value, copies: bool, width: int = 0,
        panel_rows: int = 0,
    ) -> None:  # fmt: skip
        self.shape = PanelShape(panel_rows or rows, max(source.cols, width))
        super().__init__(engine, source, rows, memory, copies, width)
        # The order of runs within rows must be the same for all runs of a thread.
        self.regular = self.regular and self.step % 8 == 0

    def clear_padding(self, target: Value, times: int) -> None:
        for stage in range(times):
            super().clear_padding(target + stage * self.shape.elements, 1)

    def address(self, row: Value, col: Value) -> Value:
        return self.shape.offset(row, col)

    @property
    def stride(self) -> int:
        return PANEL
