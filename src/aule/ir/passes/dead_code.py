"""Dead-code elimination: passes split values into halves that are often unused (the high word of an index)."""

from __future__ import annotations

from dataclasses import replace

from aule.ir.kernel import KernelIR, Op, Value, walk
from aule.ir.ops import OPS

_PURE = frozenset({"leaf", "unary", "binary", "compare", "ternary", "cast", "vector"})
_READS = frozenset({"load", "private", "var", "get", "fragment_length", "fragment_get"})
_EXCHANGES = frozenset({"shuffle", "shuffle_xor", "subgroup_reduce", "subgroup_any", "subgroup_all"})
"""Safe to remove, since they are unused in all lanes alike; WGSL rejects calls of them with an unused result."""


def dead_code(kernel: KernelIR) -> KernelIR:
    """Remove operations whose results are unused, and variables that are only written."""
    body = kernel.body
    while True:
        read: set[Value] = set()
        for op in walk(body):
            # Writing to a variable does not make it live; only reading does.
            read.update(op.args[1:] if op.opcode == "set" else op.args)
        new = _without_dead(body, read)
        if new is None:
            return replace(kernel, body=body)
        body = new


def _without_dead(block: list[Op], read: set[Value]) -> list[Op] | None:
    """Copy a block without its dead operations; None if it has none."""
    live: list[Op] = []
    changed = False
    for op in block:
        if _is_dead(op, read):
            changed = True
            continue
        inner = [_without_dead(b, read) for b in op.blocks]
        if any(b is not None for b in inner):
            blocks = tuple(old if b is None else b for old, b in zip(op.blocks, inner, strict=True))
            op = Op(op.opcode, op.args, op.attrs, op.result, blocks, op.where)
            changed = True
        live.append(op)
    return live if changed else None


def _is_dead(op: Op, read: set[Value]) -> bool:
    if op.opcode == "set":
        return op.args[0] not in read
    if op.result is None or op.result in read:
        return False
    return OPS[op.opcode].category in _PURE or op.opcode in _READS | _EXCHANGES
