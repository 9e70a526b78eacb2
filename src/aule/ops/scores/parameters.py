"""Parameters of attention kernels: one head of an operand as a matrix."""

from __future__ import annotations

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, Scalar, i32, i64
from aule.ops.scores.config import ScoreConfig
from aule.ops.shared import parameters
from aule.tile.common.matrix import Matrix


class Parameters(parameters.Parameters):
    """The parameters of one attention kernel."""

    def __init__(self, b: Builder, config: ScoreConfig, index: Scalar = i64) -> None:
        super().__init__(b, index)
        self.config = config

    def matrix(
        self,
        name: str,
        batch: Value,
        head: Value,
        rows: Value,
        cols: int,
        unit: bool,
        aligned: bool = False,
        first: Value | None = None,
    ) -> Matrix:
        """One head of an operand.

        Parameters
        ----------
        unit : bool
            Columns have stride 1.
        aligned : bool
            As in `Matrix`.
        first : Value, optional
            Row at which the batch begins, where sequences are packed.
        """
        buffer = self.buffer(name, SCALARS[self.config.dtype])
        base = self.strided(name, batch if first is None else self.b.const(0, i32), head)
        if first is not None:
            base = base + self.b.cast(first, self.index) * self.number(f"{name}_row_stride", self.index)
        col_stride = None if unit else self.number(f"{name}_col_stride", self.index)
        return Matrix(buffer, base, rows, cols, self.number(f"{name}_row_stride", self.index), col_stride, aligned)

    def result(
        self,
        name: str,
        batch: Value,
        head: Value,
        rows: Value,
        cols: int,
        unit: bool,
        aligned: bool = False,
        first: Value | None = None,
    ) -> Matrix:
        """One head of a result; parameters as for `matrix`."""
        self.buffer(name, SCALARS[self.config.dtype], "write")
        return self.matrix(name, batch, head, rows, cols, unit, aligned, first)
