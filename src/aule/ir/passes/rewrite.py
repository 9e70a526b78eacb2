"""Base of all passes: clones a kernel operation by operation through a Builder.

A pass is a `Rewriter` with hooks for the operations it changes; all others are copied. Each old value maps to one new
value, or to several if a pass splits it (a 64-bit integer into two words, a wide vector into narrow ones). Every new
operation keeps the Python line of the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from aule.artifact import Param
from aule.errors import KernelError
from aule.ir.builder import Builder, Var
from aule.ir.constants import COMPARE, computed, wrap
from aule.ir.kernel import KernelIR, Location, Op, Value
from aule.ir.ops import OPS
from aule.ir.types import Fragment, Pointer, Ref, Scalar, Type, ValueType, bool_, element, lanes_of

Lowered: TypeAlias = Value | tuple[Value, ...]
"""The new value or values of an old one."""
Hook: TypeAlias = Callable[[Op], Lowered | None]
"""Rewrites one operation and returns its new result (None if it has no result)."""


class PassBuilder(Builder):
    """A Builder that folds more: the general code that a pass emits is often constant in a given kernel."""

    where: Location | None = None
    """Location for all new operations, instead of the caller's line."""

    def const(self, value: float | int | bool, type_: Scalar) -> Value:
        """Make a constant; integers wrap."""
        return super().const(wrap(int(value), type_) if type_.is_int else value, type_)

    def extract(self, vector: Value, lane: int) -> Value:
        """Extract a lane; folds ``make_vector`` and ``splat``."""
        if vector.op is not None and vector.op.opcode == "make_vector":
            return vector.op.args[lane]
        if vector.op is not None and vector.op.opcode == "splat":
            return vector.op.args[0]
        return super().extract(vector, lane)

    def vector(self, values: Sequence[Value]) -> Value:
        """Make a vector; all lanes of one vector, in order, fold to that vector."""
        lanes = [(v.op.args[0], v.op.attrs["lane"]) for v in values if v.op is not None and v.op.opcode == "extract"]
        if len(lanes) == len(values) > 1:
            source = lanes[0][0]
            if len(lanes) == lanes_of(source.type) and all(v is source and i == n for n, (v, i) in enumerate(lanes)):
                return source
        return super().vector(values)

    def cast(self, value: Value, elem: Scalar) -> Value:
        """Convert a value; folds integer constants."""
        number = value.constant
        if number is not None and isinstance(value.type, Scalar) and value.type.is_int and elem.is_int:
            return self.const(number, elem)
        return super().cast(value, elem)

    def select(self, condition: Value, yes: Any, no: Any) -> Value:
        """Select a value; folds constant conditions."""
        if condition.constant is not None and isinstance(yes, Value) and isinstance(no, Value):
            return yes if condition.constant else no
        return super().select(condition, yes, no)

    def _fold(self, opcode: str, left: Value, right: Value) -> Value | None:
        type_ = left.type
        if not (isinstance(type_, Scalar) and type_.is_int):
            return None
        x, y = left.constant, right.constant
        if x is not None and y is not None:
            x, y = wrap(x, type_), wrap(y, type_)
            if opcode in COMPARE:
                return self.const(COMPARE[opcode](x, y), bool_)
            result = None if opcode in ("div", "rem") else computed(opcode, x, y, type_)
            if result is not None:
                return self.const(result, type_)
        elif opcode == "and" and (x == 0 or y == 0):
            return self.const(0, type_)
        return super()._fold(opcode, left, right)

    def location(self) -> Location | None:
        return self.where


def joined(parts: Sequence[Value], bits: int) -> Value:
    """A word made of parts of ``bits`` bits each, the lowest first."""
    word = parts[0]
    for i, part in enumerate(parts[1:], 1):
        word = word | (part << (i * bits))
    return word


class Rewriter:
    """Clones a kernel. A pass overrides the mapping of types and adds ``hooks`` for the operations it changes.

    Attributes
    ----------
    b : PassBuilder
        Collects the new kernel.
    values : dict
        The new value or values of each old one.
    hooks : dict
        Functions by opcode; operations without one are copied by `clone`.
    """

    def __init__(self, kernel: KernelIR) -> None:
        self.kernel = kernel
        self.b = PassBuilder(kernel.name, kernel.workgroup, kernel.subgroup_size, arithmetic=kernel.arithmetic)
        self.values: dict[Value, Lowered] = {}
        self.hooks: dict[str, Hook] = {}

    # -- overridden by passes --------------------------------------------------------------------------------------

    def register(self, type_: ValueType) -> ValueType:
        """The new type of a register."""
        return type_

    def memory(self, pointer: Pointer) -> Pointer:
        """The new type of a buffer or array."""
        return pointer

    def parameter(self, param: Param) -> None:
        """Declare a parameter of the old kernel in the new one."""
        old = self.kernel.values[param.name]
        if isinstance(old.type, Pointer):
            elem = self.memory(old.type).elem
            self.values[old] = self.b.buffer(param.name, elem, param.access)
        else:
            self.values[old] = self.b.scalar(param.name, element(old.type))

    # -- cloning ---------------------------------------------------------------------------------------------------

    def run(self) -> KernelIR:
        for param in self.kernel.params:
            self.parameter(param)
        for old in self.kernel.shared:
            assert isinstance(old.type, Pointer)
            new = self.memory(old.type)
            assert new.length is not None
            self.values[old] = self.b.shared(old.hint, new.elem, new.length)
        self.block(self.kernel.body)
        return self.b.finish()

    def block(self, ops: list[Op]) -> None:
        """Rewrite operations into the current block."""
        for op in ops:
            self.b.where = op.where
            new = self.hooks.get(op.opcode, self.clone)(op)
            if op.result is None:
                continue
            assert new is not None
            self.values[op.result] = new
            if op.result.hint and isinstance(new, Value) and not new.hint:
                new.hint = op.result.hint

    def value(self, old: Value) -> Value:
        """The new value of an old one that was not split."""
        new = self.values[old]
        if isinstance(new, tuple):
            raise KernelError(f"{type(self).__name__}: {old.type} was split and is used where that cannot be")
        return new

    def parts(self, old: Value) -> tuple[Value, ...]:
        """The new values of an old one."""
        new = self.values[old]
        return new if isinstance(new, tuple) else (new,)

    def clone(self, op: Op) -> Lowered | None:
        """Copy an operation, with the new values of its operands."""
        if op.opcode == "loop":
            self.clone_loop(op)
            return None
        if op.opcode == "repeat":
            with self.b.repeat(Var(self.b, self.value(op.args[0]))):
                self.block(op.blocks[0])
            return None
        if op.opcode == "if":
            self.clone_if(op)
            return None
        if op.opcode == "roles":
            with self.b.roles(*op.attrs["roles"]) as places:
                for place, block in zip(places, op.blocks, strict=True):
                    with place:
                        self.block(block)
            return None
        args = tuple(self.value(a) for a in op.args)
        if OPS[op.opcode].category in ("binary", "compare"):
            return self.b.binary(op.opcode, *args)
        if op.opcode == "cast" and not isinstance(op.output.type, Fragment):
            return self.b.cast(args[0], element(op.output.type))
        type_ = None if op.result is None else self.retype(op.result.type)
        result = self.b.emit(op.opcode, args, type_, **op.attrs)
        return None if type_ is None else result

    def clone_loop(self, op: Op) -> None:
        start, stop, step = (self.value(a) for a in op.args)
        index: Value = op.attrs["index"]
        with self.b.loop(start, stop, step, unroll=op.attrs["unroll"], name=index.hint) as new:
            self.values[index] = new
            self.block(op.blocks[0])

    def clone_if(self, op: Op) -> None:
        with self.b.if_(self.value(op.args[0])):
            self.block(op.blocks[0])
        if op.blocks[1]:
            with self.b.else_():
                self.block(op.blocks[1])

    def retype(self, type_: Type) -> Type:
        """The new type of any value."""
        if isinstance(type_, Pointer):
            return self.memory(type_)
        if isinstance(type_, Ref):
            return Ref(self.register(type_.target))
        return self.register(type_)
