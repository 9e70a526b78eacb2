"""Loads, stores and atomics in PTX, and the addresses they need.

An address is a register plus an immediate offset. The register depends only on the register part of the index, so it is
computed once per block and shared by all accesses whose indices differ by a constant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aule.artifact import Param
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.types import Pointer, Scalar, element, lanes_of
from aule.render._ptx_convert import join, split
from aule.render._ptx_emitter import Emitter, refuse, register_class

STATIC_SHARED_BYTES = 48 * 1024
"""More shared memory than this must be requested at launch."""
_MAX_VECTOR_BYTES = 16
_HINT = ".L2::cache_hint"


@dataclass(frozen=True)
class Memory:
    """The memory of a pointer: ``base`` is a register (global) or a symbol (shared, local), ``offset`` is in bytes."""

    space: str
    base: str
    elem: Scalar
    offset: int = 0
    load: str = "ld"
    """The load instruction without its type."""
    evict_last: bool = False
    """As in `Param`."""


class Addresses:
    """The memory of each pointer of a kernel."""

    def __init__(self, e: Emitter, kernel: KernelIR) -> None:
        self._e = e
        self._memory: dict[Value, Memory] = {}
        self.symbol = f"{kernel.name}_shared"
        self.local: list[str] = []
        self._locals: dict[Op, Memory] = {}
        for array, offset in kernel.shared_offsets.items():
            self._memory[array] = Memory("shared", self.symbol, element(array.type), offset, "ld.shared")

    def bind_global(self, value: Value, register: str, param: Param) -> None:
        load = "ld.global.nc" if param.access == "read" else "ld.global"
        if param.access != "read" and self._e.arch.number < 70:
            load = "ld.global.cg"  # their first-level caches may hold what another workgroup has written since
        evict_last = param.evict_last and self._e.arch.number >= 80
        if evict_last:
            load += _HINT
        self._memory[value] = Memory("global", register, element(value.type), 0, load, evict_last)

    def private(self, op: Op) -> None:
        """Declare a private array, in local memory."""
        assert isinstance(op.output.type, Pointer) and op.output.type.length is not None
        memory = self._locals.get(op)
        if memory is None:
            elem = op.output.type.elem
            name = f"local_{len(self.local)}_{re.sub(r'[^a-zA-Z0-9_]', '_', op.attrs['name'])}"
            self.local.append(f"\t.local .align 16 .b8 {name}[{elem.bytes * op.output.type.length}];")
            memory = self._locals[op] = Memory("local", name, elem, 0, "ld.local")
        self._memory[op.output] = memory

    def memory(self, pointer: Value) -> Memory:
        return self._memory[pointer]

    def pointer(self, pointer: Value) -> str:
        """A register with the address, for intrinsics: 32 bits for shared memory, else 64."""
        memory = self._memory[pointer]
        if memory.space == "global":
            return memory.base
        if memory.space == "local":
            return self.symbol_of(memory)
        base = self.symbol_of(memory)
        key = ("pointer", memory.offset)
        return base if memory.offset == 0 else self._e.once(key, "add.s32", "r", base, str(memory.offset))

    def locate(self, memory: Memory, index: Value) -> tuple[str, int]:
        """Base register (or symbol) and immediate offset of an element."""
        e, size = self._e, memory.elem.bytes
        register, constant = e.sum(index)
        offset = memory.offset + constant * size
        if register is None:
            base = memory.base
        elif memory.space == "shared":
            if register.startswith("%rd"):
                register = e.once(("low", register), "cvt.u32.u64", "r", register)
            base = self._scaled("mad.lo.s32", "r", register, size, self.symbol_of(memory))
        else:
            multiply = "mad.lo.s64" if register.startswith("%rd") else "mad.wide.s32"
            base = self._scaled(multiply, "rd", register, size, self.symbol_of(memory))
        if memory.space == "global" and not -(2**31) <= offset < 2**31 - 256:
            return e.once(("far", base, offset), "add.s64", "rd", base, str(offset)), 0
        return base, offset

    def locate_register(self, memory: Memory, index: Value) -> tuple[str, int]:
        """As `locate`, with the base always in a register."""
        base, offset = self.locate(memory, index)
        return (base if base.startswith("%") else self.symbol_of(memory)), offset

    def _scaled(self, instruction: str, cls: str, register: str, size: int, base: str) -> str:
        return self._e.once((instruction, register, size, base), instruction, cls, register, str(size), base)

    def symbol_of(self, memory: Memory) -> str:
        """A register with the start address of ``base``."""
        if memory.space == "global":
            return memory.base
        kind, cls = ("mov.u32", "r") if memory.space == "shared" else ("mov.u64", "rd")
        return self._e.once(("symbol", memory.base), kind, cls, memory.base)


def alignment(align: int, elem: Scalar) -> int:
    """Guaranteed alignment of an access in bytes, at most 16, if ``align`` divides its index."""
    return min((align & -align) * elem.bytes, _MAX_VECTOR_BYTES)


def load(e: Emitter, addresses: Addresses, op: Op) -> None:
    """Emit a scalar or vector load, in as few instructions as the alignment allows."""
    memory = addresses.memory(op.args[0])
    base, offset = addresses.locate(memory, op.args[1])
    if op.opcode == "load_streaming":  # .cs: evict first
        memory = replace(memory, load=memory.load.replace("ld.global", "ld.global.cs"))
    lanes, elem = lanes_of(op.output.type), memory.elem
    step = min(lanes, max(alignment(op.attrs["align"], elem) // elem.bytes, 1))
    out: list[str] = []
    for i in range(0, lanes, step):
        out += _load(e, memory, at(base, offset + i * elem.bytes) + hint(e, memory), step)
    e.bind(op.output, tuple(out))


def _load(e: Emitter, memory: Memory, address: str, n: int) -> Sequence[str]:
    elem = memory.elem
    if elem.bits == 8:
        return _load_bytes(e, memory.load, "s8" if elem.is_signed else "u8", address, n)
    if elem.bits == 16 and n == 8:
        return [half for x in _vector(e, f"{memory.load}.v4.b32", "r", address, 4) for half in split(e, x, 32, 16)]
    return _vector(e, f"{memory.load}{_count(n)}.{_memory_type(elem)}", register_class(elem), address, n)


def _load_bytes(e: Emitter, instruction: str, kind: str, address: str, n: int) -> Sequence[str]:
    if n <= 4:
        return _vector(e, f"{instruction}{_count(n)}.{kind}", "h", address, n)
    words = _vector(e, f"{instruction}{_count(n // 4)}.b32", "r", address, n // 4)
    extract = f"bfe.{kind[0]}32"
    return [e.emit("cvt.u16.u32", "h", e.emit(extract, "r", word, str(8 * i), "8")) for word in words for i in range(4)]


def _vector(e: Emitter, instruction: str, cls: str, address: str, n: int) -> list[str]:
    registers = [e.new(cls) for _ in range(n)]
    target = registers[0] if n == 1 else f"{{{', '.join(registers)}}}"
    e.line(f"{instruction} {target}, {address};")
    return registers


def store(e: Emitter, addresses: Addresses, op: Op) -> None:
    """Emit a scalar or vector store, in as few instructions as the alignment allows."""
    memory = addresses.memory(op.args[0])
    base, offset = addresses.locate(memory, op.args[1])
    elem, lanes = memory.elem, e.registers(op.args[2])
    step = min(len(lanes), max(alignment(op.attrs["align"], elem) // elem.bytes, 1))
    for i in range(0, len(lanes), step):
        _store(e, memory, at(base, offset + i * elem.bytes), lanes[i : i + step])


def _store(e: Emitter, memory: Memory, address: str, lanes: Sequence[str], qualifier: str = "") -> None:
    bits, kind = memory.elem.bits, _memory_type(memory.elem)
    if len(lanes) > 4:  # a vector has at most four lanes: store more 8- or 16-bit numbers as words
        n = 32 // bits
        lanes = [join(e, lanes[i : i + n], bits, 32, "r") for i in range(0, len(lanes), n)]
        kind = "b32"
    source = lanes[0] if len(lanes) == 1 else f"{{{', '.join(lanes)}}}"
    e.line(f"st{qualifier}.{memory.space}{_count(len(lanes))}.{kind} {address}, {source};")


def atomic(e: Emitter, addresses: Addresses, op: Op) -> None:
    """Emit ``atom`` of device scope, relaxed unless ordered; a vector in one instruction from sm_90 on."""
    memory = addresses.memory(op.args[0])
    if memory.space == "local":
        raise refuse(op, "a global or shared pointer", "a private one", "use load and store")
    suffix = _atomic_suffix(op, memory.elem)
    base, offset = addresses.locate(memory, op.args[1])
    cls = register_class(memory.elem)
    if lanes_of(op.output.type) == 1:
        value = e.operands(op.args[2])[0]
        ordered = op.attrs["ordered"]
        fenced = ordered and e.arch.number < 70  # no ordered atomics yet
        if fenced:
            e.device_fence()
        order = ".acq_rel.gpu" if ordered and not fenced else ""
        e.bind(op.output, (e.emit(f"atom{order}.{memory.space}.{suffix}", cls, at(base, offset), value),))
        if fenced:
            e.device_fence()
        return
    values = e.registers(op.args[2])
    if e.arch.number < 90:
        places = [at(base, offset + i * memory.elem.bytes) for i in range(len(values))]
        singly = [e.emit(f"atom.global.{suffix}", cls, *pair) for pair in zip(places, values, strict=True)]
        e.bind(op.output, tuple(singly))
        return
    old = [e.new(cls) for _ in values]
    e.line(f"atom.global.add.v{len(values)}.f32 {{{', '.join(old)}}}, {at(base, offset)}, {{{', '.join(values)}}};")
    e.bind(op.output, tuple(old))


def _atomic_suffix(op: Op, elem: Scalar) -> str:
    """Operation and type of an ``atom`` instruction."""
    kind, name = op.attrs["kind"], elem.name
    if kind in ("add", "min", "max") and name in ("i32", "u32"):
        return f"{kind}.{'s' if name == 'i32' else 'u'}32"
    if kind in ("and", "or", "xor") and name in ("i32", "u32"):
        return f"{kind}.b32"
    if kind == "exchange" and elem.bits == 32:
        return "exch.b32"
    if kind == "add" and name == "f32":
        return "add.f32"
    raise refuse(op, "an atomic of ir.ops on i32, u32 or f32", f"{kind} on {name}", "use another type")


def cluster_load(e: Emitter, addresses: Addresses, op: Op) -> None:
    """Emit a load from another workgroup's shared memory."""
    memory = replace(addresses.memory(op.args[0]), load="ld.shared::cluster")
    e.bind(op.output, tuple(_load(e, memory, _cluster_address(e, addresses, op, op.args[2]), lanes_of(op.output.type))))


def cluster_post(e: Emitter, addresses: Addresses, op: Op) -> None:
    """Emit a store to another workgroup's shared memory that may race with its atomics."""
    memory = replace(addresses.memory(op.args[0]), space="shared::cluster")
    _store(e, memory, _cluster_address(e, addresses, op, op.args[3]), e.registers(op.args[2]), ".relaxed.cluster")


def _cluster_address(e: Emitter, addresses: Addresses, op: Op, number: Value) -> str:
    """An address in shared memory of another workgroup of the cluster, by `mapa`."""
    if e.arch.number < 90:
        raise refuse(op, "sm_90 or newer", e.arch.name, "leave clusters out")
    memory = addresses.memory(op.args[0])
    base, offset = addresses.locate_register(memory, op.args[1])
    who = e.registers(number)[0]
    return at(e.once(("mapa", base, who), "mapa.shared::cluster.u32", "r", base, who), offset)


def prefetch(e: Emitter, addresses: Addresses, op: Op) -> None:
    """Emit ``prefetch`` of a cache line into L2."""
    base, offset = addresses.locate(addresses.memory(op.args[0]), op.args[1])
    e.line(f"prefetch.global.L2 {at(base, offset)};")


def async_copy(e: Emitter, addresses: Addresses, op: Op) -> None:
    """Emit ``cp.async`` of 16 bytes, which bypasses L1; of none of them, where they do not exist."""
    if e.arch.number < 80:
        raise refuse(op, "sm_80 or newer", e.arch.name, "load and store")
    to, to_offset = addresses.locate(addresses.memory(op.args[0]), op.args[1])
    base, offset = addresses.locate(addresses.memory(op.args[2]), op.args[3])
    source = addresses.memory(op.args[2])
    kind = f"cp.async.cg.shared.global{_HINT if source.evict_last else ''}"
    size = "16"
    if len(op.args) > 4:
        size += ", " + e.emit("selp.b32", "r", "16", "0", *e.registers(op.args[4]))
    e.line(f"{kind} {at(to, to_offset)}, {at(base, offset)}, {size}{hint(e, source)};")


def hint(e: Emitter, memory: Memory) -> str:
    """The last operand of an access with an L2 cache policy; empty without one."""
    if not memory.evict_last:
        return ""
    return ", " + e.once("evict_last", "createpolicy.fractional.L2::evict_last.b64", "rd", "1.0")


def at(base: str, offset: int) -> str:
    """The text of an address."""
    return f"[{base}+{offset}]" if offset else f"[{base}]"


def _count(n: int) -> str:
    return f".v{n}" if n > 1 else ""


def _memory_type(elem: Scalar) -> str:
    return elem.name if elem.name in ("f32", "f64") else f"b{elem.bits}"
