"""Widens 8- and 16-bit integers in registers, shared and private arrays to 32 bits with the same value.

A result that can leave the narrow range is wrapped at once: by a mask, or a pair of shifts for a signed type. Buffers
keep their elements (`pack_memory` runs first if they cannot be addressed): a load widens, a store narrows.
"""

from __future__ import annotations

from collections.abc import Iterable

from aule.ir.constants import wrap
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.passes.rewrite import Lowered, Rewriter, joined
from aule.ir.types import (
    Pointer,
    Scalar,
    Type,
    ValueType,
    Vector,
    element,
    i32,
    lanes_of,
    u32,
    vector_type,
    with_element,
)

_OVERFLOWING = frozenset({"neg", "abs", "not", "add", "sub", "mul", "div", "shl"})
"""Operations whose result can leave the range of their operands."""


def widen_int(kernel: KernelIR, small: Iterable[Scalar]) -> KernelIR:
    """Replace registers and local arrays of the integer types in ``small`` by 32-bit ones."""
    return _WidenInt(kernel, frozenset(small)).run()


class _WidenInt(Rewriter):
    def __init__(self, kernel: KernelIR, small: frozenset[Scalar]) -> None:
        super().__init__(kernel)
        self._small = small
        self.hooks |= dict.fromkeys(_OVERFLOWING, self._wrapped)
        self.hooks |= {
            "const": self._const, "cast": self._cast, "bitcast": self._bitcast, "load": self._load,
            "store": self._store,
        }  # fmt: skip

    def register(self, type_: ValueType) -> ValueType:
        return with_element(type_, self._wide(element(type_))) if self._is_small(type_) else type_

    def memory(self, pointer: Pointer) -> Pointer:
        if pointer.space == "global":
            return pointer
        return Pointer(self._wide(pointer.elem), pointer.space, pointer.length)

    def _is_small(self, type_: Type) -> bool:
        return isinstance(type_, Scalar | Vector) and element(type_) in self._small

    def _wide(self, elem: Scalar) -> Scalar:
        return elem if elem not in self._small else i32 if elem.is_signed else u32

    def _const(self, op: Op) -> Lowered | None:
        elem = element(op.output.type)
        if elem not in self._small:
            return self.clone(op)
        return self.b.const(wrap(int(op.attrs["value"]), elem), self._wide(elem))

    def _wrapped(self, op: Op) -> Lowered | None:
        new = self.clone(op)
        assert isinstance(new, Value)
        return self._wrap(new, element(op.output.type))

    def _wrap(self, value: Value, elem: Scalar) -> Value:
        """Wrap a 32-bit value to the range of ``elem``."""
        if elem not in self._small or _fits(value, elem):
            return value
        if elem.is_signed:
            return (value << (32 - elem.bits)) >> (32 - elem.bits)
        return value & ((1 << elem.bits) - 1)

    def _cast(self, op: Op) -> Lowered | None:
        value, elem = self.value(op.args[0]), element(op.output.type)
        if elem not in self._small:
            return self.b.cast(value, elem)
        if element(value.type).is_float:
            # Through i32, which can hold every number of the small type.
            value = self.b.cast(value, i32)
        return self._wrap(self.b.cast(value, self._wide(elem)), elem)

    def _load(self, op: Op) -> Lowered | None:
        pointer = self.value(op.args[0])
        type_ = with_element(op.output.type, element(pointer.type))  # type: ignore[arg-type]
        loaded = self.b.emit("load", (pointer, self.value(op.args[1])), type_, **op.attrs)
        return self.b.cast(loaded, self._wide(element(op.output.type)))

    def _store(self, op: Op) -> None:
        pointer, index, value = (self.value(a) for a in op.args)
        self.b.store(pointer, index, self.b.cast(value, element(pointer.type)), op.attrs["align"])

    def _bitcast(self, op: Op) -> Lowered | None:
        source, target = op.args[0].type, op.output.type
        assert isinstance(source, Scalar | Vector) and isinstance(target, Scalar | Vector)
        if not (self._is_small(source) or self._is_small(target)):
            return self.clone(op)
        if self._is_small(source) and self._is_small(target) and lanes_of(source) == lanes_of(target):
            return self._wrap(self.b.cast(self.value(op.args[0]), self._wide(element(target))), element(target))
        return self._from_words(self._to_words(self.value(op.args[0]), element(source)), target)

    def _to_words(self, value: Value, elem: Scalar) -> list[Value]:
        """The bits of a value as 32-bit words; an odd last half word goes to the low half of a word."""
        b = self.b
        if elem in self._small:
            lanes = [b.cast(v, u32) & ((1 << elem.bits) - 1) for v in b.unpack(value)]
            per = 32 // elem.bits
            return [joined(lanes[i : i + per], elem.bits) for i in range(0, len(lanes), per)]
        if elem.bits == 16:
            lanes = b.unpack(value)
            lanes += [b.const(0, elem)] * (len(lanes) % 2)
            value = b.vector(lanes)
        count = lanes_of(value.type) * elem.bits // 32
        return b.unpack(b.bitcast(value, vector_type(u32, count)))

    def _from_words(self, words: list[Value], target: Scalar | Vector) -> Value:
        b, elem, lanes = self.b, element(target), lanes_of(target)
        if elem in self._small:
            per = 32 // elem.bits
            bits = [words[i // per] >> (i % per * elem.bits) for i in range(lanes)]
            return b.vector([self._wrap(b.cast(v, self._wide(elem)), elem) for v in bits])
        available = max(lanes, 32 // elem.bits)
        value = b.bitcast(b.vector(words), vector_type(elem, available))
        return value if available == lanes else b.extract(value, 0)


def _fits(value: Value, elem: Scalar) -> bool:
    """True if a shift or mask already limits a 32-bit value to the range of an unsigned ``elem``."""
    if elem.is_signed or value.op is None or value.op.opcode not in ("shr", "and"):
        return False
    amount = value.op.args[1]
    if amount.op is not None and amount.op.opcode == "splat":
        amount = amount.op.args[0]
    if amount.constant is None or element(value.type) != u32:
        return False
    return bool(amount.constant >= 32 - elem.bits if value.op.opcode == "shr" else amount.constant < 1 << elem.bits)
