"""Which query rows and keys a task of decoding on the CPU has."""

from __future__ import annotations

from aule.ir import Value
from aule.ir.types import i32
from aule.ops.decode.cpu.config import CpuDecodeConfig
from aule.ops.scores.band import Extent, Reach, Scores
from aule.ops.scores.parameters import Parameters


class DecodeTask:
    """A block of the query rows that share a key head of a sequence, or all rows of several key heads, and a split of
    their keys.

    Rows are counted token by token, and the query heads of a token follow each other. So neighbouring rows stand at
    neighbouring positions, and a block of them reaches about the same keys.

    If sequences are packed, a launch serves those with ``least .. most`` tokens; other tasks have no rows. `Task` in
    `ops/attention/cpu/task.py` describes the attributes; these are new:

    Attributes
    ----------
    block : Value
        Number of the block of rows, which all its splits share.
    seq_q : Value
        Tokens of the sequence.
    row0 : Value
        First row of the block among those of its key head.
    head_rows : int or None
        Rows of each key head, if the task has several heads.
    """

    def __init__(self, p: Parameters, config: CpuDecodeConfig) -> None:
        self.b, self.config = p.b, config
        b, shape = p.b, config.shape
        p.number("heads_q")  # kernels have this parameter first
        self.number = b.group_id(0)
        self.splits = p.number("splits")
        self.split, self.block = self.number % self.splits, self.number // self.splits
        self._find_rows(p)
        seq_kv = p.number("seq_kv")
        if config.lens:
            length = b.load(p.buffer("lens", i32), p.strided("lens", self.batch))
            seq_kv = b.max(b.min(length, seq_kv), 0)
        # The last token stands at the last key.
        self.scores = Scores(p, self.batch, Extent(self.seq_q, seq_kv, seq_kv - self.seq_q, self.first_q, None))
        self.partial_rows = b.const(shape.block_q, i32)
        self.first_key, self.end_key = b.const(0, i32), seq_kv
        if config.split:
            # Splits share the keys that any of the rows may keep, not all of the sequence's.
            reach = self.reach(b.const(0, i32), shape.block_q)
            first = reach.first // shape.block_kv
            blocks = b.max((reach.end + (shape.block_kv - 1)) // shape.block_kv - first, 0)
            split_blocks = (blocks + self.splits - 1) // self.splits
            self.first_key = (first + self.split * split_blocks) * shape.block_kv
            self.end_key = b.min(seq_kv, self.first_key + split_blocks * shape.block_kv)

    def _find_rows(self, p: Parameters) -> None:
        b, config, heads = self.b, self.config, self.config.heads
        block_q, group = config.shape.block_q, config.group
        heads_kv, blocks = p.number("heads_kv"), p.number("blocks_q")
        # The last rows come first: with a causal mask they have the most work.
        kv_number, self.row0 = self.block // blocks, (blocks - 1 - self.block % blocks) * block_q
        self.head_rows = None
        if heads > 1:
            heads_kv, self.head_rows = heads_kv // heads, block_q // heads
        self.batch, self.kv_head = kv_number // heads_kv, kv_number % heads_kv * heads
        self.first_q = None
        if not config.ragged:
            self.seq_q = p.number("seq_q")
            self.count = b.min(self.seq_q * (group * heads) - self.row0, block_q)
            return
        self.first_q, end = (b.load(p.buffer("cu_q", i32), p.strided("cu_q", self.batch + i)) for i in (0, 1))
        self.seq_q = end - self.first_q
        served = (self.seq_q >= p.number("least")) & (self.seq_q <= p.number("most"))
        self.count = b.select(served, b.min(self.seq_q * (group * heads) - self.row0, block_q), b.const(0, i32))

    def query(self, row: Value) -> tuple[Value, Value]:
        """Query head of a row of this task, and its token."""
        group = self.config.group
        if self.head_rows is not None:
            head = row // self.head_rows
            token = (row - head * self.head_rows) // group
            return (self.kv_head + head) * group + (row - head * self.head_rows - token * group), token
        token = (self.row0 + row) // group
        return self.kv_head * group + (self.row0 + row - token * group), token

    def reach(self, row: Value, rows: int) -> Reach:
        """Keys that some consecutive rows of this task may keep; of several heads, rows of the first."""
        b, shift, group = self.b, self.scores.shift, self.config.group
        first = self.row0 + row if self.config.heads == 1 else b.const(0, i32)
        last = b.min(first + rows, self.seq_q * group) - 1
        return self.scores.reach(first // group + shift, last // group + shift)
