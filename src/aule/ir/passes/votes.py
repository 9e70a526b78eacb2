"""``workgroup_any`` through a word of shared memory, for languages without such an instruction."""

from __future__ import annotations

from collections.abc import Iterator

from aule.ir.kernel import KernelIR, Op
from aule.ir.passes.rewrite import Lowered, Rewriter
from aule.ir.types import i32


def votes(kernel: KernelIR) -> KernelIR:
    """Replace every ``workgroup_any`` by barriers and an atomic."""
    found = list(_votes(kernel.body))
    return _Votes(kernel, found == [True]).run() if found else kernel


def _votes(block: list[Op], in_loop: bool = False) -> Iterator[bool]:
    """For each vote of a block: True if it runs only once and follows a barrier of its block."""
    after_barrier = False
    for op in block:
        after_barrier |= op.opcode == "barrier"
        if op.opcode == "workgroup_any":
            yield after_barrier and not in_loop
        for inner in op.blocks:
            yield from _votes(inner, in_loop or op.opcode == "loop")


class _Votes(Rewriter):
    """Rewrites votes. ``once``: the only vote follows a barrier, so the word is cleared at the kernel's start."""

    def __init__(self, kernel: KernelIR, once: bool) -> None:
        super().__init__(kernel)
        self.hooks["workgroup_any"] = self._any
        self._once = once
        self._word = self.b.shared("vote", i32, 1)
        if once:
            self._clear()

    def _clear(self) -> None:
        with self.b.if_(self.b.eq(self.b.thread_id(), 0)):
            self.b.store(self._word, 0, self.b.const(0, i32))

    def _any(self, op: Op) -> Lowered:
        b = self.b
        if not self._once:
            b.barrier()  # wait until all threads have read the previous vote
            self._clear()
            b.barrier()
        with b.if_(self.value(op.args[0])):
            b.atomic("or", self._word, 0, b.const(1, i32))
        b.barrier(op.attrs["global_memory"])
        return b.ne(b.load(self._word, 0), 0)
