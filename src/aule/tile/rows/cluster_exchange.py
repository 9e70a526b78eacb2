"""Exchange of values between the subgroups of a row that is spread over the workgroups of a cluster, without barriers.

Each subgroup has a receive buffer in shared memory, into which every subgroup of its row, itself included, stores one
word per value. So a row waits for its own subgroups only. A nonzero word means the value has arrived: zero is sent as
negative zero, and the receiver resets a word to zero.

There are at least two buffers, used for successive blocks of rows. A subgroup sends to a buffer again once it has
received all values of the previous block, which their senders sent after they had emptied that buffer.

Devices without clusters would have to exchange through global memory, which takes too long.
"""

from __future__ import annotations

from aule.ir import Builder, Value
from aule.ir.types import f32, i32
from aule.tile.common.matrix import divmod_const
from aule.tile.rows.shape import RowShape


class ClusterExchange:
    """The receive buffers of a workgroup, one per subgroup and stage.

    A row's ``senders`` are its subgroups; each sends ``values`` values, a power of two. A subgroup has a lane for each
    word that it receives.
    """

    def __init__(self, b: Builder, shape: RowShape, lanes: int, stages: int) -> None:
        subgroups = shape.threads // lanes
        self.b, self.senders, self.values = b, shape.cluster * subgroups, shape.cluster_exchange
        self._lanes, self._row_subgroups, self._words = lanes, subgroups, self.senders * self.values
        """Words of a buffer."""
        assert self._words <= lanes, (self._words, lanes)
        self._subgroups, self._stages = shape.slots * subgroups, stages
        self._subgroup, self._lane = divmod_const(b, b.thread_id(), lanes)
        self._slot, number = divmod_const(b, self._subgroup, subgroups)
        self._sender = (b.group_id(0) & (shape.cluster - 1)) * subgroups + number
        self._memory = b.shared("mail", i32, stages * self._subgroups * self._words)

    def clear(self) -> None:
        """Set all buffers to zero, and wait until all workgroups of the cluster have."""
        b, words = self.b, self._stages * self._subgroups * self._words
        for first in range(0, words, self._subgroups * self._lanes):
            with b.if_(b.thread_id() < words - first):
                b.store(self._memory, b.thread_id() + first, 0)
        b.cluster_barrier()

    def send(self, value: Value, stage: Value) -> None:
        """Send values to all subgroups of the row: a lane's is the one numbered by the lane's low bits."""
        b = self.b
        bits = b.bitcast(value, i32)
        word = b.select(b.eq(bits, 0), b.const(-(2**31), i32), bits)
        to, number = divmod_const(b, self._lane, self.values)
        group, subgroup = divmod_const(b, to, self._row_subgroups)
        buffer = self._buffer(stage, self._slot * self._row_subgroups + subgroup)
        at = buffer + self._sender * self.values + number
        with b.if_(to < self.senders):
            b.cluster_post(self._memory, at, group, word)

    def receive(self, stage: Value) -> Value:
        """Wait for everyone's values: a lane gets one, all of the first sender's, then the second's and so on,
        repeated over the lanes."""
        b = self.b
        place = self._lane & (self._words - 1)
        at = self._buffer(stage, self._subgroup) + place
        full = self._words == self._lanes
        word = b.var(b.const(0, i32) if full else b.select(self._lane < self._words, b.const(0, i32), 1), "word")
        done = b.var(b.const(0, i32), "done")
        with b.repeat(done):
            with b.if_(b.eq(word.value, 0)):
                word.value = b.atomic("exchange", self._memory, at, 0)
            done.value = b.select(b.subgroup_all(b.ne(word.value, 0)), b.const(1, i32), 0)
        found = b.bitcast(word.value, f32)
        return found if full else b.shuffle(found, place)

    def _buffer(self, stage: Value, subgroup: Value) -> Value:
        """Where a subgroup's receive buffer begins."""
        return (stage * self._subgroups + subgroup) * self._words
