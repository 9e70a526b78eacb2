"""Numbers that the subgroups of a row exchange by mail, where the row lies over the workgroups of a cluster.

Each subgroup has boxes, into which all that it shares a row with, itself too, put a word for each number. So a row
waits for its own subgroups alone, and nobody at a barrier. A word that is not zero is there: a number that is zero is
sent as the negative zero. Whoever takes a word leaves zero.

A box is for one block of rows, and a subgroup has two or more. It sends to a box again when it has everyone's mail of
the block before, which everyone has sent after taking what was in that box.

Boxes are in shared memory. In global memory, which devices without clusters would need, an exchange takes too long
(docs/performance.md).
"""

from __future__ import annotations

from aule.ir import Builder, Value
from aule.ir.types import f32, i32
from aule.tile.math import posted_words
from aule.tile.matrix import divmod_const


class Mail:
    """The boxes of a workgroup.

    Parameters
    ----------
    lanes : int
        Of a subgroup.
    cluster : int
        Workgroups that share rows: a power of two.
    parts : int
        Subgroups of a row in each of them: a power of two.
    slots : int
        Rows side by side in them.
    boxes : int
        Of each subgroup.
    numbers : int
        That a subgroup sends: a power of two. It has a lane for each of those that it gets.
    """

    def __init__(
        self, b: Builder, lanes: int, *, cluster: int, parts: int, slots: int, boxes: int, numbers: int
    ) -> None:
        self.b, self.senders, self.numbers = b, cluster * parts, numbers
        self._lanes, self._parts, self._words = lanes, parts, cluster * parts * numbers
        """Words of a box."""
        assert self._words <= lanes, (self._words, lanes)
        self._subgroups, self._boxes = slots * parts, boxes
        self._subgroup, self._lane = divmod_const(b, b.thread_id(), lanes)
        self._slot, part = divmod_const(b, self._subgroup, parts)
        self._sender = (b.group_id(0) & (cluster - 1)) * parts + part
        self._memory = b.shared("mail", i32, boxes * self._subgroups * self._words)

    def open(self) -> None:
        """Empty the boxes, and wait until everyone has."""
        b, words = self.b, self._boxes * self._subgroups * self._words
        for first in range(0, words, self._subgroups * self._lanes):
            with b.if_(b.thread_id() < words - first):
                b.store(self._memory, b.thread_id() + first, 0)
        b.cluster_barrier()

    def send(self, value: Value, box: Value) -> None:
        """Send numbers to all subgroups of the row: each lane has the one whose number is the lane's last digits."""
        b = self.b
        [word] = posted_words(b, [value])
        to, number = divmod_const(b, self._lane, self.numbers)
        group, part = divmod_const(b, to, self._parts)
        at = self._place(box, self._slot * self._parts + part) + self._sender * self.numbers + number
        with b.if_(to < self.senders):
            b.cluster_post(self._memory, at, group, word)

    def take(self, box: Value) -> Value:
        """What everyone has sent, as soon as it is there: lanes have all numbers of the first sender, those of the
        second ..., and so on from the beginning."""
        b = self.b
        place = self._lane & (self._words - 1)
        at = self._place(box, self._subgroup) + place
        mine = b.const(0, i32) if self._words == self._lanes else b.select(self._lane < self._words, b.const(0, i32), 1)
        word, done = b.var(mine, "word"), b.var(b.const(0, i32), "done")
        with b.repeat(done):
            with b.if_(b.eq(word.value, 0)):
                word.value = b.atomic("exchange", self._memory, at, 0)
            done.value = b.select(b.subgroup_all(b.ne(word.value, 0)), b.const(1, i32), 0)
        found = b.bitcast(word.value, f32)
        return found if self._words == self._lanes else b.shuffle(found, place)

    def _place(self, box: Value, subgroup: Value) -> Value:
        return (box * self._subgroups + subgroup) * self._words
