"""Shared by the GPU backward kernels: parameters, the workgroup's block of rows or keys, and its matrices."""

from __future__ import annotations

from typing import ClassVar

from aule.ir import Builder, Value
from aule.ir.types import Scalar, f32, i32, i64
from aule.ops.attention.config import BackwardConfig, FragmentBackwardConfig
from aule.ops.attention.prepass.tile_list import TileList
from aule.ops.scores.band import Scores, block_of
from aule.ops.scores.parameters import Parameters
from aule.ops.scores.rotated_operands import rotating
from aule.ops.shared.parameters import workgroup_number
from aule.tile.common.math import NEG_INF
from aule.tile.common.matrix import Matrix
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape


class BackwardBlock:
    """A workgroup of a backward kernel: its block of query rows, or of keys, and what it reads and writes."""

    vector_width: ClassVar[int]
    """Elements of a row that are moved together."""
    scores: Scores
    block: Value
    row0: Value
    """The block's number in its head, and its first query row or key."""
    head: Value
    kv_head: Value
    """The query head of query rows, and the key head of either."""

    def __init__(self, b: Builder, config: BackwardConfig | FragmentBackwardConfig) -> None:
        self.b, self.unit, self.aligned = b, config.unit, config.aligned
        self.block_q, self.block_kv = config.shape.block_q, config.shape.block_kv
        self.tile_shape: SimtShape | FragmentShape = config.shape
        self.index: Scalar = i64 if config.index64 else i32
        self.p = Parameters(b, config, self.index)
        number = self.p.number
        self.heads, self.heads_kv, self.group = number("heads_q"), number("heads_kv"), number("group")
        self.scale = number("scale", f32)
        self.task = workgroup_number(b)
        self.exists = self.task < number("blocks")

    def own_rows(self) -> None:
        """Find the workgroup's block of query rows."""
        p, config = self.p, self.p.config
        together = p.number("heads_together") if config.right and not config.left else None
        blocks = p.number("blocks_each")
        head_number, self.block = block_of(self.b, config, self.task, blocks, p.number("blocks"), together)
        self.row0 = self.block * self.block_q
        batch, self.head = head_number // self.heads, head_number % self.heads
        self.scores = Scores(p, batch)
        if config.packed:
            self.exists = self.exists & (self.row0 < self.scores.seq_q)
        self.kv_head = self.head // self.group

    def own_keys(self, number: Value | None = None) -> None:
        """Find the workgroup's block of keys, by its number if that is not the workgroup's. With a causal mask the
        first keys have the most work, as the last rows do."""
        p, config, blocks = self.p, self.p.config, self.p.number("blocks_each")
        number = self.task if number is None else number
        if not config.right or config.left:
            head_number, self.block = number // blocks, number % blocks
        else:
            together = p.number("key_heads_together")
            head_number, block = block_of(self.b, config, number, blocks, p.number("blocks"), together)
            self.block = blocks - 1 - block
        self.row0 = self.block * self.block_q
        batch, self.kv_head = head_number // self.heads_kv, head_number % self.heads_kv
        self.scores = Scores(p, batch)
        self.scores.drop_unreached()
        if config.packed:
            self.exists = self.exists & (self.row0 < self.scores.seq_kv)

    def row_tiles(self) -> tuple[Value, Value, Value]:
        """The first tile of query rows that may keep a key of the block, the one after the last, and the end of the
        block's keys."""
        end = self.b.min(self.row0 + self.block_q, self.scores.seq_kv)
        low, high = self.scores.rows_reaching(self.row0, end)
        return low // self.block_kv, (high + (self.block_kv - 1)) // self.block_kv, end

    def listed(self, head: Value) -> TileList | None:
        """The tiles that a mask leaves to the block in its pass over one query head; None if they are not listed."""
        if not self.p.config.tiles_listed:
            return None
        return TileList(self.p, self.scores.batch, head, self.block, self.tile_shape)

    def lse_and_delta(self, head: Value, row: Value) -> tuple[Value, Value, Value]:
        """Log-sum-exp and delta of a query row, and whether it is past the end or keeps no key."""
        b, scores = self.b, self.scores
        base = scores.extent.row_base(self.p, scores.batch * self.heads + head, head)
        at = base + b.cast(b.min(row, scores.seq_q - 1), self.index)
        lse, delta = b.load(self.p.buffer("lse", f32), at), b.load(self.p.buffer("delta", f32), at)
        return lse, delta, (row >= scores.seq_q) | b.eq(lse, NEG_INF)

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
