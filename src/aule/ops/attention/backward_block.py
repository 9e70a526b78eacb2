"""What every backward kernel for GPUs has, whichever engine it is on: its parameters, and the matrices it reads and
writes."""

from __future__ import annotations

from typing import ClassVar

from aule.ir import Builder, Value
from aule.ir.types import Scalar, f32, i32, i64
from aule.ops.attention.config import BackwardConfig, FragmentBackwardConfig
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.rotating import rotating
from aule.ops.attention.scores import Scores
from aule.tile.matrix import Matrix


class BackwardBlock:
    """The parameters of a kernel, and which workgroup this is."""

    travels: ClassVar[int]
    """Elements of a row that travel together."""
    scores: Scores

    def __init__(self, b: Builder, config: BackwardConfig | FragmentBackwardConfig) -> None:
        self.b, self.unit, self.aligned = b, config.unit, config.aligned
        self.index: Scalar = i64 if config.index64 else i32
        self.p = Parameters(b, config, self.index)
        number = self.p.number
        self.heads, self.heads_kv, self.group = number("heads_q"), number("heads_kv"), number("group")
        self.scale = number("scale", f32)
        # Workgroups are counted along x and then y: a driver may allow no more than 65535 along one axis.
        self.task = b.group_id(0) + b.group_id(1) * b.group_count(0)
        self.exists = self.task < number("blocks")

    def matrix(self, name: str, head: Value, rows: Value, cols: int, number: int) -> Matrix:
        """An operand of the forward pass, or the gradient of its result."""
        scores = self.scores
        first, unit, aligned = scores.extent.first(name), self.unit[number], self.aligned[number]
        found = self.p.matrix(name, scores.batch, head, rows, cols, unit, aligned=aligned, first=first)
        return rotating(self.p, name, found, scores.batch, scores.shift)

    def gradient(self, name: str, head: Value, rows: Value, cols: int) -> Matrix:
        """A gradient that is made."""
        scores = self.scores
        first, aligned = scores.extent.first(name), cols % self.travels == 0
        found = self.p.matrix(name, scores.batch, head, rows, cols, True, "write", aligned=aligned, first=first)
        return rotating(self.p, name, found, scores.batch, scores.shift)
