"""Which query rows a task has."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Value
from aule.ir.types import i32
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.scores import Extent


@dataclass(frozen=True)
class Rows:
    """A block of the query rows that share a key head of a sequence, or all rows of several key heads, head by head.

    They are counted token by token, and the query heads of one token follow each other: so rows that share keys stand
    at neighbouring positions, and a block of them reaches about the same keys.

    Attributes
    ----------
    seq_q : Value
        Tokens of the sequence.
    first_q : Value or None
        Where they begin among those of all sequences, when these are packed.
    row0, count : Value
        The first row, and how many there are; none, at most, where the launch is not for this sequence.
    kv_head : Value
        The first key head.
    each : int or None
        Rows of a key head where there are several.
    """

    batch: Value
    kv_head: Value
    group: int
    seq_q: Value
    first_q: Value | None
    row0: Value
    count: Value
    each: int | None

    @staticmethod
    def of(p: Parameters, number: Value, group: int, block_q: int, heads: int, ragged: bool) -> Rows:
        """The rows of block ``number`` of a launch, of so many key heads.

        Of packed sequences a launch serves those that have ``least .. most`` tokens.
        """
        b = p.b
        heads_kv, blocks = p.number("heads_kv"), p.number("blocks_q")
        # The last rows come first: with a causal mask they have the most work.
        kv_number, row0 = number // blocks, (blocks - 1 - number % blocks) * block_q
        each = None
        if heads > 1:
            heads_kv, each = heads_kv // heads, block_q // heads
        batch, kv_head = kv_number // heads_kv, kv_number % heads_kv * heads
        if not ragged:
            seq_q = p.number("seq_q")
            return Rows(batch, kv_head, group, seq_q, None, row0, b.min(seq_q * (group * heads) - row0, block_q), each)
        first, end = (b.load(p.buffer("cu_q", i32), p.strided("cu_q", batch + i)) for i in (0, 1))
        seq_q = end - first
        served = (seq_q >= p.number("least")) & (seq_q <= p.number("most"))
        count = b.select(served, b.min(seq_q * (group * heads) - row0, block_q), b.const(0, i32))
        return Rows(batch, kv_head, group, seq_q, first, row0, count, each)

    def extent(self, seq_kv: Value) -> Extent:
        """The lengths of the sequence, which has so many keys. Its last token is the last key."""
        return Extent(self.seq_q, seq_kv, seq_kv - self.seq_q, self.first_q, None)

    def place(self, row: Value) -> tuple[Value, Value]:
        """Query head and token of a row of this block."""
        if self.each is not None:
            number = row // self.each
            token = (row - number * self.each) // self.group
            return (self.kv_head + number) * self.group + (row - number * self.each - token * self.group), token
        token = (self.row0 + row) // self.group
        return self.kv_head * self.group + (self.row0 + row - token * self.group), token
