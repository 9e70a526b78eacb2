"""Hints, where a language cannot give them."""

from __future__ import annotations

from aule.ir.kernel import KernelIR, Op
from aule.ir.passes.rewrite import Rewriter


def hints(kernel: KernelIR) -> KernelIR:
    """Leave out every ``prefetch``, and store what is to be streamed."""
    given = any(op.opcode in ("prefetch", "stream") for op in kernel.walk())
    return _Hints(kernel).run() if given else kernel


class _Hints(Rewriter):
    def __init__(self, kernel: KernelIR) -> None:
        super().__init__(kernel)
        self.hooks |= {"prefetch": self._nothing, "stream": self._store}

    def _nothing(self, op: Op) -> None:
        """Whoever reads the memory waits for it."""

    def _store(self, op: Op) -> None:
        pointer, index, value = (self.value(x) for x in op.args)
        self.b.store(pointer, index, value, op.attrs["align"])
