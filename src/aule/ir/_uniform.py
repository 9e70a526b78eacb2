"""Uniformity analysis: which values are equal in all threads of a workgroup. Used by `verify` for barriers.

Conservative, like WGSL's rules: a value that is not known to be uniform counts as divergent.
"""

from __future__ import annotations

from collections.abc import Iterator

from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.ops import OPS

_UNIFORM = ("const", "group_id", "group_count", "workgroup_any")
_BARRIERS = ("barrier", "workgroup_any", "cluster_barrier")
_ELEMENTWISE = ("unary", "binary", "compare", "ternary", "cast", "vector")


def divergent_barriers(kernel: KernelIR) -> Iterator[tuple[Op, Op]]:
    """Every barrier in divergent control flow, with the ``if`` or ``loop`` that makes it so."""
    analysis = _Analysis(kernel)
    analysis.run()
    yield from analysis.barriers


def uniform_values(kernel: KernelIR) -> set[Value]:
    """All values that are known to be uniform."""
    analysis = _Analysis(kernel)
    analysis.run()
    return analysis.uniform


class _Analysis:
    """Visits values in program order, repeatedly until no more variables turn out to be divergent."""

    def __init__(self, kernel: KernelIR) -> None:
        self.kernel = kernel
        read_only = {p.name for p in kernel.params if p.kind == "buffer" and p.access == "read"}
        self.read_only = {value for name, value in kernel.values.items() if name in read_only}
        self.divergent_variables: set[Value] = set()
        self.uniform: set[Value] = set()
        self.barriers: list[tuple[Op, Op]] = []

    def run(self) -> None:
        known = -1
        while known != len(self.divergent_variables):
            known = len(self.divergent_variables)
            self.uniform = set(self.kernel.values.values())
            self.barriers = []
            self._block(self.kernel.body, None)

    def _block(self, block: list[Op], divergence: Op | None) -> None:
        for op in block:
            inputs_uniform = all(arg in self.uniform for arg in op.args)
            if op.result is not None and self._is_uniform(op, inputs_uniform):
                self.uniform.add(op.result)
            if op.opcode == "var" and not inputs_uniform:
                self.divergent_variables.add(op.output)
            elif op.opcode == "set" and (divergence is not None or op.args[1] not in self.uniform):
                self.divergent_variables.add(op.args[0])
            elif op.opcode in _BARRIERS and divergence is not None:
                self.barriers.append((op, divergence))
            elif op.opcode == "loop" and inputs_uniform:
                self.uniform.add(op.attrs["index"])
            inner = divergence if inputs_uniform or divergence is not None else op
            for nested in op.blocks:
                self._block(nested, inner)

    def _is_uniform(self, op: Op, inputs_uniform: bool) -> bool:
        if op.opcode in _UNIFORM:
            return True
        if op.opcode == "get":
            return op.args[0] not in self.divergent_variables
        if op.opcode == "load":
            return op.args[0] in self.read_only and op.args[1] in self.uniform
        return OPS[op.opcode].category in _ELEMENTWISE and inputs_uniform
