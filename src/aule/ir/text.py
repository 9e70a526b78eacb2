"""Prints a kernel as stable, readable text.

Equal text means an equal kernel: the engine's cache hashes it, and golden tests compare it. Results are numbered in
program order; parameters, shared arrays, variables and loop indices keep their names. Constants are printed where they
are used. ``4`` is an i32, ``4.0`` an f32 and ``true`` a bool; a constant of any other type has a suffix (``4:i64``,
``0.5:f16``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.ops import OPS
from aule.ir.types import Scalar

_PLAIN = ("bool", "i32", "f32")
"""Types of constants that need no suffix."""
_INDENT = "  "
_AT_INDEX = frozenset(
    {"load", "load_streaming", "store", "atomic", "fragment_load", "fragment_store"} | {"cluster_load", "cluster_post"}
)
"""Operations whose first two operands are a pointer and an index."""


def text(kernel: KernelIR) -> str:
    """Print a kernel, even one that `verify` would reject."""
    names = _names(kernel)
    lines = [f"kernel {kernel.name}("]
    for param in kernel.params:
        access = f" {param.access}{' evict_last' * param.evict_last}" if param.kind == "buffer" else ""
        lines.append(f"{_INDENT}%{param.name}: {param.kind} {param.dtype}{access}")
    subgroup = f" subgroup {kernel.subgroup_size}" if kernel.subgroup_size else ""
    registers = f" registers {kernel.max_registers}" if kernel.max_registers else ""
    cluster = f" cluster {kernel.cluster}" if kernel.cluster > 1 else ""
    arithmetic = f" {kernel.arithmetic} arithmetic" if kernel.arithmetic != "exact" else ""
    for tensor in kernel.maps:
        lines.append(f"{_INDENT}%{tensor.name}: {tensor}")
    lines.append(f") workgroup {kernel.workgroup}{subgroup}{registers}{cluster}{arithmetic} {{")
    lines += [f"{_INDENT}{names[array]} = {array.type}" for array in kernel.shared]
    lines += _block(kernel.body, names, _INDENT)
    lines.append("}")
    return "\n".join(lines) + "\n"


def line(kernel: KernelIR, op: Op) -> str:
    """Print one operation as `text` does, without its blocks."""
    return _line(op, _names(kernel)).rstrip("{ ")


def _names(kernel: KernelIR) -> dict[Value, str]:
    """A unique name for every value; duplicates get a numeric suffix."""
    names: dict[Value, str] = {}
    used: dict[str, int] = {}
    numbered = 0

    def give(value: Value, wanted: str) -> None:
        count = used.get(wanted, 0)
        used[wanted] = count + 1
        names[value] = f"%{wanted}.{count}" if count else f"%{wanted}"

    for name, value in kernel.values.items():
        give(value, name)
    for array in kernel.shared:
        give(array, array.hint)
    for op in kernel.walk():
        index = op.attrs.get("index") if op.opcode == "loop" else None
        if isinstance(index, Value):
            give(index, index.hint or "i")
        if op.result is None or op.opcode == "const":
            continue
        hint = op.result.hint or (str(op.attrs.get("name", "")) if op.opcode == "private" else "")
        if hint:
            give(op.result, hint)
        else:
            names[op.result] = f"%{numbered}"
            numbered += 1
    return names


def _block(block: list[Op], names: dict[Value, str], indent: str) -> Iterator[str]:
    for op in block:
        if op.opcode == "const":
            continue
        yield indent + _line(op, names).replace("\n", "\n" + indent)
        for position, inner in enumerate(op.blocks):
            if position:
                if not inner and op.opcode == "if":
                    continue
                yield indent + ("} else {" if op.opcode == "if" else "} and {")
            yield from _block(inner, names, indent + _INDENT)
        if op.blocks:
            yield indent + "}"


def _line(op: Op, names: dict[Value, str]) -> str:
    args = [_operand(arg, names) for arg in op.args]
    head = f"{names.get(op.result, '%?')} = " if op.result is not None and op.opcode != "const" else ""
    if op.opcode == "comment":
        return f"# {op.attrs.get('text', '')!s}".replace("\n", "\n# ")
    if op.opcode == "if":
        return f"if {', '.join(args)} {{"
    if op.opcode == "loop" and len(args) == 3:
        index = op.attrs.get("index")
        name = names.get(index, "%?") if isinstance(index, Value) else "%?"
        type_ = f"{index.type} " if isinstance(index, Value) else ""
        return f"loop {type_}{name} = {args[0]} to {args[1]} step {args[2]}{_attrs(op, ('index',))} {{"
    if op.opcode == "roles":
        return f"roles {_literal(op.attrs.get('roles'))} {{"
    if op.opcode == "repeat":
        return f"repeat until {', '.join(args)} {{"
    if op.opcode in _AT_INDEX and len(args) >= 2:
        args[:2] = [f"{args[0]}[{args[1]}]"]
    if op.opcode.startswith("async_copy") and len(args) >= 4:
        args[:4] = [f"{args[0]}[{args[1]}]", f"{args[2]}[{args[3]}]"]
    type_ = f" {op.result.type}" if op.result is not None else ""
    operands = f" {', '.join(args)}" if args else ""
    if op.opcode in ("var", "private") and op.result is not None:
        return f"{head}{op.result.type}{operands}{_attrs(op, ('name',))}"
    return f"{head}{op.opcode}{type_}{operands}{_attrs(op, ())}"


def _attrs(op: Op, hidden: tuple[str, ...]) -> str:
    known = OPS[op.opcode].attrs if op.opcode in OPS else ()
    keys = [key for key in known if key in op.attrs] + sorted(key for key in op.attrs if key not in known)
    return "".join(f" {key}={_literal(op.attrs[key])}" for key in keys if key not in hidden)


def _literal(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _operand(value: Value, names: dict[Value, str]) -> str:
    if value.op is None or value.op.opcode != "const":
        return names.get(value, "%?")
    plain = isinstance(value.type, Scalar) and value.type.name in _PLAIN
    return _literal(value.constant) + ("" if plain else f":{value.type}")
