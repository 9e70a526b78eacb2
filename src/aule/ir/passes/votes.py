"""``workgroup_any`` where a language has no such instruction: through one word of shared memory."""

from __future__ import annotations

from aule.ir.kernel import KernelIR, Op
from aule.ir.passes.rewrite import Lowered, Rewriter
from aule.ir.types import i32


def votes(kernel: KernelIR) -> KernelIR:
    """Replace every ``workgroup_any`` by barriers and an atomic."""
    return _Votes(kernel).run() if any(op.opcode == "workgroup_any" for op in kernel.walk()) else kernel


class _Votes(Rewriter):
    def __init__(self, kernel: KernelIR) -> None:
        super().__init__(kernel)
        self.hooks["workgroup_any"] = self._any
        self._word = self.b.shared("vote", i32, 1)

    def _any(self, op: Op) -> Lowered:
        b = self.b
        b.barrier()  # the vote before this one has been read
        with b.if_(b.eq(b.thread_id(), 0)):
            b.store(self._word, 0, b.const(0, i32))
        b.barrier()
        with b.if_(self.value(op.args[0])):
            b.atomic("or", self._word, 0, b.const(1, i32))
        b.barrier()
        return b.ne(b.load(self._word, 0), 0)
