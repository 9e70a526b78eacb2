"""Removes hints that a language does not have."""

from __future__ import annotations

from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.passes.rewrite import Rewriter

_HINTS = ("prefetch", "launch_next", "launch_await")


def hints(kernel: KernelIR) -> KernelIR:
    """Drop ``prefetch``, ``launch_next`` and ``launch_await``; make ``stream`` a store and ``load_once`` a load."""
    known = (*_HINTS, "stream", "load_once")
    return _Hints(kernel).run() if any(op.opcode in known for op in kernel.walk()) else kernel


class _Hints(Rewriter):
    def __init__(self, kernel: KernelIR) -> None:
        super().__init__(kernel)
        self.hooks |= dict.fromkeys(_HINTS, self._nothing) | {"stream": self._store, "load_once": self._load}

    def _nothing(self, op: Op) -> None:
        """Drop the operation."""

    def _load(self, op: Op) -> Value:
        assert op.result is not None
        pointer, index = (self.value(x) for x in op.args)
        return self.b.emit("load", (pointer, index), op.result.type, **op.attrs)

    def _store(self, op: Op) -> None:
        pointer, index, value = (self.value(x) for x in op.args)
        self.b.store(pointer, index, value, op.attrs["align"])
