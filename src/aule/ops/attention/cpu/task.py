"""Which query rows and keys a task of the CPU's forward kernel has."""

from __future__ import annotations

from typing import Protocol

from aule.ir import Value
from aule.ir.types import i32
from aule.ops.attention.cpu.config import CpuConfig
from aule.ops.scores.band import Reach, Scores
from aule.ops.scores.parameters import Parameters


class Task(Protocol):
    """The query rows and the keys of one task."""

    number: Value
    """The task's number in the launch."""
    batch: Value
    scores: Scores
    """Modifiers of the scores, and the lengths of the task's sequence."""
    kv_head: Value
    """Key head; the first, if a task has several."""
    split: Value
    """The task's number among those that share the keys of its rows."""
    first_key: Value
    end_key: Value
    count: Value
    """Number of query rows."""
    partial_rows: Value
    """Rows for which a task leaves partial results if keys are split."""

    def query(self, row: Value) -> tuple[Value, Value]:
        """Query head of a row of this task, and its query row in the sequence."""

    def reach(self, row: Value, rows: int) -> Reach:
        """Keys that some consecutive rows of this task may keep."""


class AttentionTask(Task):
    """A task of the forward pass.

    If ``config.grouped``, it has the rows of all query heads that share a key head; otherwise a block of rows of one
    query head.
    """

    def __init__(self, p: Parameters, config: CpuConfig) -> None:
        self.p, self.config = p, config
        heads, heads_kv, group = p.number("heads_q"), p.number("heads_kv"), p.number("group")
        self.number, self.split = p.b.group_id(0), p.b.const(0, i32)
        if not config.packed:
            self._lengths()  # kernels have these parameters first
        if config.grouped:
            self._locate_group(heads_kv, group)
        else:
            self._locate_block(heads, heads_kv, group)
        self.partial_rows = self.count
        if not config.packed:
            self.scores = Scores(p, self.batch)

    def _locate_group(self, heads_kv: Value, group: Value) -> None:
        b, splits = self.p.b, self.p.number("splits")
        self.kv_number, self.split = self.number // splits, self.number % splits
        self.batch, self.kv_head = self.kv_number // heads_kv, self.kv_number % heads_kv
        seq_q, seq_kv = self._lengths()
        self.first_head, self.row0, self.count = self.kv_head * group, b.const(0, i32), group * seq_q
        self.first_key, self.end_key = b.const(0, i32), seq_kv
        if self.config.split:
            self.first_key = self.split * self.p.number("split_keys")
            self.end_key = b.min(seq_kv, self.first_key + self.p.number("split_keys"))

    def _locate_block(self, heads: Value, heads_kv: Value, group: Value) -> None:
        # The last rows come first: with a causal mask they have the most work.
        b, block_q, blocks = self.p.b, self.config.shape.block_q, self.p.number("blocks_q")
        head_number = self.number // blocks
        self.row0 = (blocks - 1 - self.number % blocks) * block_q
        if self.config.packed:  # lengths depend on it
            self.batch = head_number // heads
        seq_q, seq_kv = self._lengths()
        self.first_key, self.end_key = b.const(0, i32), seq_kv
        self.count = b.min(seq_q - self.row0, block_q)
        self.batch, self.first_head = head_number // heads, head_number % heads
        self.kv_head = self.first_head // group
        self.kv_number = self.batch * heads_kv + self.kv_head

    def _lengths(self) -> tuple[Value, Value]:
        """Number of query rows and of keys of the task's sequence."""
        if self.config.packed:
            self.scores = Scores(self.p, self.batch)
            return self.scores.seq_q, self.scores.seq_kv
        return self.p.number("seq_q"), self.p.number("seq_kv")

    def query(self, row: Value) -> tuple[Value, Value]:
        if not self.config.grouped:
            return self.first_head, self.row0 + row
        seq_q = self.scores.seq_q
        return self.first_head + row // seq_q, row % seq_q

    def reach(self, row: Value, rows: int) -> Reach:
        b, scores = self.p.b, self.scores
        if self.config.grouped:
            return scores.reach(scores.shift, scores.seq_q - 1 + scores.shift)
        last = b.min(self.row0 + row + rows, scores.seq_q) - 1
        return scores.reach(self.row0 + row + scores.shift, last + scores.shift)
