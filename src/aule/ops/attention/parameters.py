"""Parameters of attention's kernels: what every kernel has, and heads as matrices."""

from __future__ import annotations

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, Scalar, i32, i64
from aule.ops import parameters
from aule.ops.attention.config import ScoreConfig
from aule.ops.parameters import Access
from aule.tile.matrix import Matrix


class Parameters(parameters.Parameters):
    """The parameters of one kernel of attention."""

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
        access: Access = "read",
        aligned: bool = False,
        first: Value | None = None,
    ) -> Matrix:
        """One head of an operand of four axes; of a packed one, all batches in one, ``first`` is the batch's first
        row."""
        buffer = self.buffer(name, SCALARS[self.config.dtype], access)
        base = self.strided(name, batch if first is None else self.b.const(0, i32), head)
        if first is not None:
            base = base + self.b.cast(first, self.index) * self.number(f"{name}_row_stride", self.index)
        col_stride = None if unit else self.number(f"{name}_col_stride", self.index)
        return Matrix(buffer, base, rows, cols, self.number(f"{name}_row_stride", self.index), col_stride, aligned)
