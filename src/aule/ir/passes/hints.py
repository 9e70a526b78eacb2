"""Removes hints that a language does not have."""

from __future__ import annotations

from dataclasses import replace

from aule.ir.kernel import KernelIR, Op
from aule.ir.passes.rewrite import Lowered, Rewriter

_DROPPED = ("prefetch", "launch_next", "launch_await")
_PLAIN = {"load_streaming": "load", "store_streaming": "store"}


def hints(kernel: KernelIR) -> KernelIR:
    """Drop ``prefetch``, ``launch_next`` and ``launch_await``; make streaming loads and stores plain ones."""
    found = any(op.opcode in _DROPPED or op.opcode in _PLAIN for op in kernel.walk())
    return _Hints(kernel).run() if found else kernel


class _Hints(Rewriter):
    def __init__(self, kernel: KernelIR) -> None:
        super().__init__(kernel)
        self.hooks |= dict.fromkeys(_DROPPED, lambda op: None) | dict.fromkeys(_PLAIN, self._plain)

    def _plain(self, op: Op) -> Lowered | None:
        return self.clone(replace(op, opcode=_PLAIN[op.opcode]))
