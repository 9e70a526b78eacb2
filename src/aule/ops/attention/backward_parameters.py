"""Parameters of the GPU backward kernels, and the matrices that they read and write."""

from __future__ import annotations

from typing import ClassVar

from aule.ir import Builder, Value
from aule.ir.types import Scalar, f32, i32, i64
from aule.ops.attention.config import BackwardConfig, FragmentBackwardConfig
from aule.ops.scores.band import Scores, block_of
from aule.ops.scores.parameters import Parameters
from aule.ops.scores.rotated_operands import rotating
from aule.tile.common.matrix import Matrix


class BackwardBlock:
    """The parameters of a backward kernel, and the number of the workgroup."""

    vector_width: ClassVar[int]
    """Elements of a row that are moved together."""
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

    def rows_of(self, task: Value) -> tuple[Value, Value]:
        """The head of a workgroup, and the number of its block of query rows."""
        p, config = self.p, self.p.config
        together = p.number("heads_together") if config.right and not config.left else None
        return block_of(self.b, config, task, p.number("blocks_each"), p.number("blocks"), together)

    def keys_of(self, task: Value) -> tuple[Value, Value]:
        """The head of a workgroup, and the number of its block of keys. With a causal mask the first keys have the most
        work, as the last rows do."""
        p, config, blocks = self.p, self.p.config, self.p.number("blocks_each")
        if not config.right or config.left:
            return task // blocks, task % blocks
        together = p.number("key_heads_together")
        head_number, block = block_of(self.b, config, task, blocks, p.number("blocks"), together)
        return head_number, blocks - 1 - block

    def matrix(self, name: str, head: Value, rows: Value, cols: int, number: int) -> Matrix:
        """An operand of the forward pass, or the gradient of its result."""
        scores = self.scores
        first, unit, aligned = scores.extent.first(name), self.unit[number], self.aligned[number]
        found = self.p.matrix(name, scores.batch, head, rows, cols, unit, aligned=aligned, first=first)
        return rotating(self.p, name, found, scores.batch, scores.shift)

    def gradient(self, name: str, head: Value, rows: Value, cols: int) -> Matrix:
        """A gradient that the kernel stores."""
        scores = self.scores
        first, aligned = scores.extent.first(name), cols % self.vector_width == 0
        found = self.p.result(name, scores.batch, head, rows, cols, True, aligned=aligned, first=first)
        return rotating(self.p, name, found, scores.batch, scores.shift)
