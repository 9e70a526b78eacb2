"""The warpgroup engine: products that four subgroups start together and that run on their own (NVIDIA's sm_90).

Accumulators lie as those of `fragment` do, 16 rows to a subgroup, so everything between two products is that engine's.
What differs is where factors come from: the right one, and where it suits the left one, is read by the product itself
from shared memory, in which it lies in panels (`aule.ir.types.Panels`); and that a product goes on while the subgroup
does something else, until somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aule.ir import Builder, Value, Var
from aule.ir.types import PANEL, Panels, i32
from aule.target import WARPGROUP_UNITS, Target
from aule.tile.arrangement import SIZE
from aule.tile.fragment import Fragments
from aule.tile.fragment_shape import FragmentShape
from aule.tile.matrix import Matrix
from aule.tile.transfer import Transfer

SUBGROUPS = 4
"""Of a warpgroup."""
ROWS = SUBGROUPS * SIZE
"""Of a product."""


def has_warpgroups(target: Target, dtype: str) -> bool:
    """Whether a device has such products of a type."""
    return any(f":{dtype}:" in unit for unit in WARPGROUP_UNITS if unit in target.matrix_units)


@dataclass(frozen=True)
class PanelShape:
    """A matrix of so many rows and columns in panels; the columns of the last one are filled up."""

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
        """Where a run of eight elements lies behind the start; ``col`` is a multiple of eight."""
        return (col >> 6) * self.stride + row * PANEL + self.run(row, col) * 8

    @staticmethod
    def run(row: Value, col: Value) -> Value:
        """Which run of its row of a panel an element is in."""
        return ((col >> 3) ^ row) & 7


@dataclass(frozen=True)
class PanelFactor:
    """A factor of a product, in shared memory from ``start`` on, a multiple of 512.

    ``transposed``: what lies there is its transpose. ``row`` and ``col`` say where in the matrix it begins.
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
        # The same for all lanes, but only a lane's word tells ptxas so.
        self.group = b.shuffle(self.subgroup >> 2, b.const(0, i32))

    def panels(self, source: Matrix, rows: int, memory: Value) -> PanelTransfer:
        """Brings ``rows`` rows of a matrix at a time into panels; as `transfer`."""
        return PanelTransfer(self, source, rows, memory, self.copies)

    def start_product(
        self,
        tile: Sequence[Var],
        left: PanelFactor | Sequence[Value],
        right: PanelFactor,
        depth: int,
        fresh: bool = False,
    ) -> None:
        """Start ``tile += left @ right``, or ``=`` where ``fresh``.

        Parameters
        ----------
        tile : sequence of Var
            Accumulators of 16 columns each, of which the subgroup has its 16 rows of 64.
        left : PanelFactor or sequence of Value
            In shared memory, or fragments of this subgroup's rows, 16 columns each.
        depth : int
            Sixteens of the dimension that is summed over.
        """
        for k in range(depth):
            factor = left.left(k) if isinstance(left, PanelFactor) else left[k]
            self.b.warpgroup_mma(tile, factor, right.right(k), fresh and k == 0)

    def put_factors(
        self, memory: Value, start: Value, shape: PanelShape, row: Value, col: Value, factors: Sequence[Value]
    ) -> None:
        """Store left factors side by side in panels from ``start`` on; ``row`` and ``col`` are where the first of this
        subgroup begins, the column a multiple of all their columns and in the first panel."""
        b = self.b
        # Bits of a lane's row and column, of a component's and of the subgroup's are different ones, so that the order
        # of runs within a row, which is their exclusive or, can be put together from them.
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
    """The way of a matrix into panels; a wait for what it brings is followed by ``warpgroup_publish`` and a barrier."""

    def __init__(self, engine: Fragments, source: Matrix, rows: int, memory: Value, copies: bool) -> None:
        self.shape = PanelShape(rows, source.cols)
        super().__init__(engine, source, rows, memory, copies)
        # From one of a thread's runs to the next the order within rows must be the same.
        self.regular = self.regular and self.step % 8 == 0

    def clear_padding(self, target: Value, times: int) -> None:
        for stage in range(times):
            super().clear_padding(target + stage * self.shape.elements, 1)

    def address(self, row: Value, col: Value) -> Value:
        return self.shape.offset(row, col)

    @property
    def stride(self) -> int:
        return PANEL
