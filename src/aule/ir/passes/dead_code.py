"""Drop what nothing reads: passes split values whose halves are often not needed (the high word of an index)."""

from __future__ import annotations

from aule.ir.kernel import KernelIR, Op, Value, walk
from aule.ir.ops import OPS

_PURE = frozenset({"leaf", "unary", "binary", "compare", "ternary", "cast", "vector"})
_READS = frozenset({"load", "private", "var", "get", "fragment_length", "fragment_get"})
_EXCHANGES = frozenset({"shuffle", "shuffle_xor", "subgroup_reduce", "subgroup_any", "subgroup_all"})
"""Dead for all lanes at once, and WGSL refuses calls of them whose result is not used."""


def dead_code(kernel: KernelIR) -> KernelIR:
    """The kernel without operations whose results are unused, and without variables that are only written."""
    body = kernel.body
    while True:
        read: set[Value] = set()
        for op in walk(body):
            # A variable lives by being read; writing to it keeps nothing alive but its place.
            read.update(op.args[1:] if op.opcode == "set" else op.args)
        new = _kept(body, read)
        if new is None:
            return KernelIR(
                kernel.name, kernel.params, kernel.values, kernel.shared, kernel.workgroup, body, kernel.subgroup_size,
                arithmetic=kernel.arithmetic,
            )  # fmt: skip
        body = new


def _kept(block: list[Op], read: set[Value]) -> list[Op] | None:
    """The block without dead operations; None when there are none."""
    kept: list[Op] = []
    changed = False
    for op in block:
        if _is_dead(op, read):
            changed = True
            continue
        inner = [_kept(b, read) for b in op.blocks]
        if any(b is not None for b in inner):
            blocks = tuple(old if b is None else b for old, b in zip(op.blocks, inner, strict=True))
            op = Op(op.opcode, op.args, op.attrs, op.result, blocks, op.where)
            changed = True
        kept.append(op)
    return kept if changed else None


def _is_dead(op: Op, read: set[Value]) -> bool:
    if op.opcode == "set":
        return op.args[0] not in read
    if op.result is None or op.result in read:
        return False
    return OPS[op.opcode].category in _PURE or op.opcode in _READS | _EXCHANGES
