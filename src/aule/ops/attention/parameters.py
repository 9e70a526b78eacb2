"""Parameters of a kernel, declared as they are asked for; plans fill them in by name."""

from __future__ import annotations

from typing import Literal

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, Scalar, i32, i64
from aule.ops.attention.config import ScoreConfig
from aule.tile.matrix import Matrix

Access = Literal["read", "write", "readwrite"]


class Parameters:
    """The parameters of one kernel. ``index`` is the type of indices into memory."""

    def __init__(self, b: Builder, config: ScoreConfig, index: Scalar = i64) -> None:
        self.b, self.config, self.index = b, config, index
        self._known: dict[str, Value] = {}

    def number(self, name: str, type_: Scalar = i32) -> Value:
        """A scalar parameter; the same one however often it is asked for."""
        if name not in self._known:
            self._known[name] = self.b.scalar(name, type_)
        return self._known[name]

    def buffer(self, name: str, elem: Scalar, access: Access = "read") -> Value:
        """A buffer parameter."""
        key = f"{name}_ptr"
        if key not in self._known:
            self._known[key] = self.b.buffer(key, elem, access)
        return self._known[key]

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

    def strided(self, name: str, *indices: Value) -> Value:
        """The offset of an operand, and indices times the strides of its leading axes."""
        total = self.number(f"{name}_offset", self.index)
        for axis, index in enumerate(indices):
            total = total + self.b.cast(index, self.index) * self.number(f"{name}_stride{axis}", self.index)
        return total
