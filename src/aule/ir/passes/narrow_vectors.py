"""Splits vectors wider than a language supports: eight fp16 are loaded as two aligned fours.

A ``permute`` becomes extracts and a make_vector: few languages have more, and GPU registers are scalars anyway. An
``atomic`` of several elements, which only PTX has, becomes several atomics.
"""

from __future__ import annotations

import math

from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.ops import OPS
from aule.ir.passes.rewrite import Lowered, Rewriter
from aule.ir.types import Ref, Scalar, Type, Vector, element, lanes_of, u32, vector_type

_LANEWISE = frozenset({"unary", "binary", "compare", "ternary", "cast"})


def narrow_vectors(kernel: KernelIR, max_lanes: int) -> KernelIR:
    """Split vectors of more than ``max_lanes``, and permutations and atomics into lanes."""
    return _NarrowVectors(kernel, max_lanes).run()


class _NarrowVectors(Rewriter):
    def __init__(self, kernel: KernelIR, max_lanes: int) -> None:
        super().__init__(kernel)
        self._max = max_lanes
        self.hooks = {opcode: self._lanewise for opcode, info in OPS.items() if info.category in _LANEWISE}
        self.hooks |= {
            "bitcast": self._bitcast, "make_vector": self._make_vector, "splat": self._splat, "extract": self._extract,
            "permute": self._permute, "load": self._load, "store": self._store, "var": self._var, "get": self._get,
            "set": self._set, "atomic": self._atomic,
        }  # fmt: skip

    def _pieces(self, type_: Type) -> int:
        return lanes_of(type_) // self._max if lanes_of(type_) > self._max else 1

    def _lanewise(self, op: Op) -> Lowered | None:
        pieces = max(self._pieces(a.type) for a in op.args)
        if pieces == 1:
            return self.clone(op)
        type_ = Vector(element(op.output.type), self._max)
        # A scalar operand (the condition of a select) is used for every piece.
        args = [self.parts(a) * (pieces if self._pieces(a.type) == 1 else 1) for a in op.args]
        return tuple(self.b.emit(op.opcode, tuple(a[i] for a in args), type_, **op.attrs) for i in range(pieces))

    def _bitcast(self, op: Op) -> Lowered | None:
        assert isinstance(op.output.type, Scalar | Vector)
        source, target = op.args[0], op.output.type
        pieces = max(self._pieces(source.type), self._pieces(target))
        if pieces == 1:
            return self.clone(op)
        lanes = [lane for part in self.parts(source) for lane in self.b.unpack(part)]
        if lanes_of(target) < pieces:
            # Few wide lanes from many small ones: go through words.
            lanes = self._cut(lanes, vector_type(u32, self._max * lanes[0].type.bits // 32), pieces)  # type: ignore[union-attr]
            pieces = lanes_of(target)
        elif len(lanes) < pieces:
            words = element(source.type).bits // 32
            lanes = self._cut(lanes, vector_type(u32, words), len(lanes))
        return self._grouped(self._cut(lanes, vector_type(element(target), lanes_of(target) // pieces), pieces))

    def _cut(self, lanes: list[Value], piece: Scalar | Vector, pieces: int) -> list[Value]:
        """Bitcast ``lanes`` in ``pieces`` groups to another type; returns the resulting lanes."""
        per = len(lanes) // pieces
        new = [self.b.bitcast(self.b.vector(lanes[i : i + per]), piece) for i in range(0, len(lanes), per)]
        return [lane for v in new for lane in self.b.unpack(v)]

    def _make_vector(self, op: Op) -> Lowered | None:
        return self._grouped([self.value(a) for a in op.args])

    def _grouped(self, lanes: list[Value]) -> Lowered:
        if len(lanes) <= self._max:
            return self.b.vector(lanes)
        return tuple(self.b.vector(lanes[i : i + self._max]) for i in range(0, len(lanes), self._max))

    def _splat(self, op: Op) -> Lowered | None:
        pieces = self._pieces(op.output.type)
        if pieces == 1:
            return self.clone(op)
        return (self.b.splat(self.value(op.args[0]), self._max),) * pieces

    def _extract(self, op: Op) -> Lowered | None:
        piece, lane = divmod(op.attrs["lane"], self._max)
        return self.b.extract(self.parts(op.args[0])[piece], lane)

    def _permute(self, op: Op) -> Lowered | None:
        places: list[tuple[Value, int]] = []
        for part in (part for a in op.args for part in self.parts(a)):
            places += [(part, lane) for lane in range(lanes_of(part.type))]
        # Extract each used lane once; the builder folds a vector whose lanes are all used in order.
        used = {i: self.b.extract(*places[i]) for i in sorted(set(op.attrs["lanes"]))}
        return self._grouped([used[i] for i in op.attrs["lanes"]])

    def _load(self, op: Op) -> Lowered | None:
        pieces = self._pieces(op.output.type)
        if pieces == 1:
            return self.clone(op)
        pointer, index = self.value(op.args[0]), self.value(op.args[1])
        align = math.gcd(op.attrs["align"], self._max)
        return tuple(self.b.load(pointer, index + i * self._max, self._max, align) for i in range(pieces))

    def _store(self, op: Op) -> None:
        parts = self.parts(op.args[2])
        if len(parts) == 1:
            self.clone(op)
            return
        pointer, index = self.value(op.args[0]), self.value(op.args[1])
        align = math.gcd(op.attrs["align"], self._max)
        for i, part in enumerate(parts):
            self.b.store(pointer, index + i * self._max, part, align)

    def _atomic(self, op: Op) -> Lowered | None:
        if lanes_of(op.args[2].type) == 1:
            return self.clone(op)
        pointer, index = self.value(op.args[0]), self.value(op.args[1])
        lanes = [lane for part in self.parts(op.args[2]) for lane in self.b.unpack(part)]
        return self._grouped([self.b.atomic(op.attrs["kind"], pointer, index + i, x) for i, x in enumerate(lanes)])

    def _var(self, op: Op) -> Lowered | None:
        assert isinstance(op.output.type, Ref)
        parts = self.parts(op.args[0])
        if len(parts) == 1:
            return self.clone(op)
        return tuple(self.b.var(part, op.output.hint).ref for part in parts)

    def _get(self, op: Op) -> Lowered | None:
        refs = self.parts(op.args[0])
        return self.b.get(refs[0]) if len(refs) == 1 else tuple(self.b.get(ref) for ref in refs)

    def _set(self, op: Op) -> None:
        for ref, part in zip(self.parts(op.args[0]), self.parts(op.args[1]), strict=True):
            self.b.set(ref, part)
