"""Replaces buffers of 8- and 16-bit elements by buffers of u32 words, for devices that can only address words.

The bytes of a buffer are the same; only the declaration changes. A load fetches the word and shifts. An aligned vector
store writes full words.

A store of part of a word clears the element's bits by an atomic ``and`` and sets them by an atomic ``or``. Together
they are not atomic, but correct: every element has one writer at a time, neither operation touches the bits of a
neighbour, and no thread may read an element before a barrier after its store. Two threads that store the same value to
the same element still leave that value, which an exclusive-or of the difference would not.
"""

from __future__ import annotations

from collections.abc import Iterable

from aule.artifact import Param
from aule.errors import KernelError
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.passes.rewrite import Lowered, Rewriter, joined
from aule.ir.types import Pointer, Scalar, element, i32, lanes_of, u8, u16, u32


def pack_memory(kernel: KernelIR, packed: Iterable[Scalar]) -> KernelIR:
    """Replace buffers whose elements are in ``packed`` by buffers of words."""
    return _PackMemory(kernel, frozenset(packed)).run()


class _PackMemory(Rewriter):
    def __init__(self, kernel: KernelIR, packed: frozenset[Scalar]) -> None:
        super().__init__(kernel)
        self._packed = packed
        self.hooks = {"load": self._load, "store": self._store, "atomic": self._atomic}

    def memory(self, pointer: Pointer) -> Pointer:
        return Pointer(u32, "global") if self._is_packed(pointer) else pointer

    def parameter(self, param: Param) -> None:
        old = self.kernel.values[param.name]
        if isinstance(old.type, Pointer) and self._is_packed(old.type):
            # Atomics read what they change.
            access = param.access if param.access == "read" else "readwrite"
            self.values[old] = self.b.buffer(param.name, u32, access)
        else:
            super().parameter(param)

    def _is_packed(self, pointer: object) -> bool:
        return isinstance(pointer, Pointer) and pointer.space == "global" and pointer.elem in self._packed

    def _load(self, op: Op) -> Lowered | None:
        if not self._is_packed(op.args[0].type):
            return self.clone(op)
        pointer, index = self.value(op.args[0]), self.value(op.args[1])
        elem, lanes, align = element(op.output.type), lanes_of(op.output.type), int(op.attrs["align"])
        per = 32 // elem.bits
        if lanes % per == 0 and align % per == 0:
            words = self.b.unpack(self.b.load(pointer, self._word(index, per), lanes // per, align // per))
            parts = [w >> (i * elem.bits) for w in words for i in range(per)]
        elif lanes < per and align % lanes == 0:
            word = self.b.load(pointer, self._word(index, per)) >> self._shift(index, elem)
            parts = [word >> (i * elem.bits) for i in range(lanes)]
        else:
            at = [index + i for i in range(lanes)]
            parts = [self.b.load(pointer, self._word(i, per)) >> self._shift(i, elem) for i in at]
        return self.b.vector([self._from_bits(p, elem) for p in parts])

    def _store(self, op: Op) -> None:
        if not self._is_packed(op.args[0].type):
            self.clone(op)
            return
        pointer, index, value = (self.value(a) for a in op.args)
        elem, align = element(op.args[2].type), int(op.attrs["align"])
        parts = [self._to_bits(v, elem) for v in self.b.unpack(value)]
        per, lanes = 32 // elem.bits, len(parts)
        if lanes % per == 0 and align % per == 0:
            words = [joined(parts[i : i + per], elem.bits) for i in range(0, lanes, per)]
            self.b.store(pointer, self._word(index, per), self.b.vector(words), align // per)
        elif lanes < per and align % lanes == 0:
            self._replace(pointer, index, joined(parts, elem.bits), elem, lanes)
        else:
            for i, part in enumerate(parts):
                self._replace(pointer, index + i, part, elem, 1)

    def _atomic(self, op: Op) -> Lowered | None:
        if self._is_packed(op.args[0].type):
            raise KernelError(f"pack_memory: expected atomics on 32-bit elements, got {op.args[0].type} ({op.where})")
        return self.clone(op)

    def _replace(self, pointer: Value, index: Value, bits: Value, elem: Scalar, lanes: int) -> None:
        """Replace elements in a word that other threads may write at the same time."""
        word, shift = self._word(index, 32 // elem.bits), self._shift(index, elem)
        mask = self.b.const((1 << (elem.bits * lanes)) - 1, u32) << shift
        self.b.atomic("and", pointer, word, ~mask)
        self.b.atomic("or", pointer, word, bits << shift)

    def _word(self, index: Value, per: int) -> Value:
        return index >> (per.bit_length() - 1)

    def _shift(self, index: Value, elem: Scalar) -> Value:
        return self.b.cast(self.b.cast(index, i32) & (32 // elem.bits - 1), u32) * elem.bits

    def _from_bits(self, word: Value, elem: Scalar) -> Value:
        """The element in the low bits of a word."""
        if elem.is_float:
            return self.b.bitcast(self.b.cast(word, u16), elem)
        return self.b.cast(word, elem)

    def _to_bits(self, value: Value, elem: Scalar) -> Value:
        """A word with the element in its low bits and zeros above."""
        unsigned = u8 if elem.bits == 8 else u16
        return self.b.cast(self.b.bitcast(value, unsigned), u32)
