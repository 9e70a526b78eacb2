"""Base printer of the C-like languages: statements, expressions, names and inlining.

`opencl`, `msl`, `wgsl` and `hip` subclass it. Each value becomes a line ``const T v = ...;``, or is written inline if
it is used once, in the same block, and can be moved freely.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from aule.artifact import Artifact, Param
from aule.errors import KernelError
from aule.ir.kernel import KernelIR, Op, Value, walk
from aule.ir.ops import OPS, SUBGROUP_OPS
from aule.ir.types import Fragment, Pointer, Ref, Scalar, Type, ValueType, Vector, bool_, element, f16
from aule.render._clike_names import Names
from aule.target import Target

_INLINE_CHARS = 48
"""Longer expressions get a line and a name, to keep lines readable."""
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "and": "&", "or": "|", "xor": "^", "shl": "<<",
    "shr": ">>", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
_SHIFTS = ("shl", "shr")
_LOGICAL = {"and": "&&", "or": "||", "xor": "!="}
_WIDENING = frozenset({"add", "sub", "mul", "div", "shl"})
"""Operations that C computes in a wider type if the operands are narrow."""
_MOVABLE = frozenset({"leaf", "unary", "binary", "compare", "ternary", "cast", "vector", "variable"})
"""Categories of operations that may be evaluated later."""


class Expr(NamedTuple):
    """The text of an expression; ``atom`` if it needs no parentheses as an operand."""

    text: str
    atom: bool = True


class Printer(ABC):
    """Prints one legalised kernel.

    Parameters
    ----------
    kernel : KernelIR
        Verified, and legalised for the language.
    target : Target
        The device it is for.
    """

    language: ClassVar[str]
    type_names: ClassVar[dict[str, str]]
    functions: ClassVar[dict[str, str]]
    """Functions of the language by opcode (``exp2``, ``sqrt`` ...)."""
    reserved: ClassVar[frozenset[str]] = frozenset()
    """Further names that the printer uses."""

    def __init__(self, kernel: KernelIR, target: Target) -> None:
        self.kernel = kernel
        self.target = target
        self.helpers: dict[str, str] = {}
        """Functions and declarations printed before the kernel, by name."""
        self.arrays: list[str] = []
        """Declarations of arrays at the top of the kernel."""
        self.lines: list[str] = []
        self._depth = 1
        self._names = Names(self.reserved)
        self._text: dict[Value, Expr] = {}
        self._pending: dict[Value, frozenset[Value]] = {}
        self._users: dict[Value, list[Op]] = {}
        self._home: dict[int, int] = {}
        self._survey(kernel.body)
        self.entry = self.name(kernel.name)
        self.uses_subgroups = any(op.opcode in SUBGROUP_OPS for op in kernel.walk())
        self._check_subgroups()

    # -- module ----------------------------------------------------------------------------------------------------

    def artifact(self, params: tuple[Param, ...]) -> Artifact:
        """Print the kernel. ``params`` are those of the kernel before legalisation."""
        self.declare_parameters()
        for array in self.kernel.shared:
            self._text[array] = Expr(self.name(array.hint or "shared"))
            self.declare_shared(array)
        self.block(self.kernel.body)
        return Artifact(
            self.language, self.module().encode(), self.entry, params, self.kernel.workgroup, self.kernel.shared_bytes,
            subgroup_size=self.kernel.subgroup_size, uses_subgroups=self.uses_subgroups,
            extensions=tuple(self.extensions()),
        )  # fmt: skip

    @abstractmethod
    def module(self) -> str:
        """The complete source, with ``self.lines`` as the kernel's body."""

    @abstractmethod
    def declare_parameters(self) -> None:
        """Declare the parameters and set the text of their values."""

    @abstractmethod
    def declare_shared(self, array: Value) -> None:
        """Declare one shared array."""

    def extensions(self) -> Iterable[str]:
        """Device features that the code needs."""
        return ()

    def uses(self, elem: Scalar) -> bool:
        """True if any register, buffer or array has this element type."""
        return elem in self.kernel.elements()

    # -- names and operands ----------------------------------------------------------------------------------------

    def name(self, hint: str = "") -> str:
        return self._names.new(hint)

    def let(self, value: Value, text: str, atom: bool = True) -> None:
        """Set the text of a value."""
        self._text[value] = Expr(text, atom)

    def bare(self, value: Value) -> str:
        """A value in a place that needs no parentheses: an argument, an index, the right side of an assignment."""
        self._pending.pop(value, None)
        return self._text[value].text

    def operand(self, value: Value) -> str:
        """A value as an operand of an operator."""
        expr = self._text[value]
        self._pending.pop(value, None)
        return expr.text if expr.atom else f"({expr.text})"

    def named(self, value: Value) -> str:
        """A value as a name, for text that repeats it."""
        expr = self._text[value]
        if not (is_name(expr) or value.constant is not None):
            self._pending.pop(value, None)
            self._define(value, expr)
        return self.bare(value)

    def emit(self, *lines: str) -> None:
        """Append lines at the current indentation."""
        self.lines += ["    " * self._depth + line if line else "" for line in lines]

    # -- statements ------------------------------------------------------------------------------------------------

    def block(self, ops: list[Op]) -> None:
        for op in ops:
            self.statement(op)

    def statement(self, op: Op) -> None:
        match op.opcode:
            case "comment":
                for line in str(op.attrs["text"]).splitlines():
                    self.emit(f"// {line}")
            case "loop":
                self._loop(op)
            case "if":
                self._if(op)
            case "set":
                name, value = self.operand(op.args[0]), self.bare(op.args[1])
                self._flush_pending({op.args[0]})
                self.emit(f"{name} = {value};")
            case "var":
                self._var(op)
            case "private":
                assert isinstance(op.output.type, Pointer)
                self.let(op.output, self.name(op.attrs["name"] or "scratch"))
                self.arrays.append(self.private(op.output))
            case "store":
                self.emit(*self.store(op.args[0], op.args[1], op.args[2], op.attrs["align"]))
            case "barrier":
                self.emit(*self.barrier(op.attrs["global_memory"]))
            case "subgroup_barrier":
                self.emit(self.subgroup_barrier())
            case _ if op.opcode == "device_fence" or op.attrs.get("ordered"):
                raise KernelError(f"{self.kernel.name}: {self.language} has no fence of the device ({op.where})")
            case "intrinsic":
                self._intrinsic(op)
            case "fragment_store":
                self.emit(*self.fragment_store(op))
            case _:
                self._value(op)

    def _value(self, op: Op) -> None:
        value = op.result
        assert value is not None
        depends: frozenset[Value] = frozenset(op.args[:1]) if op.opcode == "get" else frozenset()
        for arg in op.args:
            depends |= self._pending.get(arg, frozenset())
        if OPS[op.opcode].category == "fragment":
            # Fragment operations are printed in place, never inlined.
            depends = frozenset()
        expr = self.atomic(op) if op.opcode == "atomic" else self.expression(op)
        users = self._users.get(value, [])
        repeatable = is_name(expr) or (op.opcode == "extract" and is_name(self._text[op.args[0]]))
        if op.opcode == "const" or (repeatable and not depends):
            self._text[value] = expr
        elif not users:
            # After dead-code elimination, only operations with side effects have no user.
            if expr.text:
                self.emit(f"{expr.text};")
        elif (
            len(users) == 1
            and self._home[id(users[0])] == self._home[id(op)]
            and users[0].opcode != "intrinsic"
            and OPS[op.opcode].category in _MOVABLE
            and len(expr.text) <= _INLINE_CHARS
        ):
            self._text[value] = expr
            self._pending[value] = depends
        else:
            self._define(value, expr)

    def _define(self, value: Value, expr: Expr) -> None:
        assert isinstance(value.type, Scalar | Vector | Fragment)
        name = self.name(value.hint)
        self.emit(self.declare(value.type, name, expr.text))
        self._text[value] = Expr(name)

    def _flush_pending(self, refs: set[Value]) -> None:
        """Print pending inline values that read variables which are about to change."""
        for value, depends in list(self._pending.items()):
            if depends & refs:
                expr = self._text[value]
                del self._pending[value]
                self._define(value, expr)

    def _var(self, op: Op) -> None:
        assert isinstance(op.output.type, Ref)
        init = self.bare(op.args[0])
        name = self.name(op.output.hint or "cell")
        self.let(op.output, name)
        self.emit(self.declare(op.output.type.target, name, init, mutable=True))

    def _loop(self, op: Op) -> None:
        for bound in op.args[1:]:
            # The condition is evaluated in every iteration, so its bounds must not read variables.
            if self._pending.get(bound):
                self._flush_pending(set(self._pending[bound]))
        changed = {inner.args[0] for inner in walk(op.blocks[0]) if inner.opcode == "set"}
        start, stop, step = self.bare(op.args[0]), self.operand(op.args[1]), self.bare(op.args[2])
        self._flush_pending(changed)
        index: Value = op.attrs["index"]
        assert isinstance(index.type, Scalar)
        name = self.name(index.hint or "i")
        self.let(index, name)
        first = self.declare(index.type, name, start, mutable=True)
        self.emit(*self.unroll(op.attrs["unroll"]), f"for ({first} {name} < {stop}; {name} += {step}) {{")
        self._nested(op.blocks[0])
        self.emit("}")

    def _if(self, op: Op) -> None:
        condition = self.bare(op.args[0])
        self._flush_pending({inner.args[0] for block in op.blocks for inner in walk(block) if inner.opcode == "set"})
        self.emit(f"if ({condition}) {{")
        self._nested(op.blocks[0])
        if op.blocks[1]:
            self.emit("} else {")
            self._nested(op.blocks[1])
        self.emit("}")

    def _nested(self, ops: list[Op]) -> None:
        self._depth += 1
        self.block(ops)
        self._depth -= 1

    def _intrinsic(self, op: Op) -> None:
        if op.attrs["language"] != self.language:
            raise KernelError(
                f"{self.kernel.name}: an intrinsic of {op.attrs['language']} in {self.language} ({op.where})"
            )
        code, args = str(op.attrs["code"]), [_Named(self, self.operand(a), a.type) for a in op.args]
        if op.result is None:
            self.emit(code.format(None, *args))
            return
        assert isinstance(op.result.type, Scalar | Vector | Fragment)
        if code.startswith("{0} = ") and code.count("{0") == 1:
            # A plain assignment becomes the declaration of the value.
            self._define(op.result, Expr(code.removeprefix("{0} = ").removesuffix(";").format(None, *args)))
            return
        result = _Named(self, self.name(op.result.hint), op.result.type)
        self.emit(self.declare(op.result.type, result.text, None, mutable=True))
        self.let(op.result, result.text)
        self.emit(code.format(result, *args))

    # -- expressions -----------------------------------------------------------------------------------------------

    def expression(self, op: Op) -> Expr:
        """The right-hand side of an operation that has a result."""
        code, args, result = op.opcode, op.args, op.result
        assert result is not None and isinstance(result.type, Scalar | Vector | Fragment)
        match code:
            case "const":
                assert isinstance(result.type, Scalar)
                return self.literal(op.attrs["value"], result.type)
            case "get":
                return self._text[args[0]]
            case "load":
                return self.load(args[0], args[1], result.type, op.attrs["align"])
            case "thread_id" | "group_id" | "group_count" | "lane_id" | "subgroup_id":
                return self.leaf(code, op.attrs.get("axis", 0))
            case "cast":
                return self.cast(args[0], result.type, result)
            case "bitcast":
                return self.bitcast(args[0], result.type)
            case "make_vector" | "splat":
                return self.make_vector(result.type, [self.bare(a) for a in args])
            case "extract":
                return self.extract(args[0], op.attrs["lane"])
        if OPS[code].category == "subgroup":
            return self.subgroup(op)
        if OPS[code].category == "fragment":
            return self.fragment(op)
        return self.arithmetic(op, result.type)

    def arithmetic(self, op: Op, type_: ValueType) -> Expr:
        """A unary, binary, compare or ternary operation."""
        code, args = op.opcode, op.args
        match code:
            case "small":
                return Expr(self.operand(args[0]))
            case "neg":
                return self.negative(type_, self.operand(args[0]))
            case "not":
                return self.invert(type_, self.operand(args[0]))
            case "abs":
                return self.absolute(type_, self.bare(args[0]))
            case "rcp":
                one = self.literal(1.0, element(type_)).text
                return self.narrowed(type_, f"{one} / {self.operand(args[0])}")
            case "min" | "max":
                return self.call(self.extreme(code, element(type_)), args)
            case "fma":
                return self.fused(type_, *(self.bare(a) for a in args))
            case "select":
                return self.select(args[0], args[1], args[2])
        if code in self.functions:
            return self.narrowed(type_, self.call(self.functions[code], args).text, atom=True)
        if code in _INFIX:
            return self.infix(op)
        raise KernelError(f"{self.kernel.name}: {self.language} has no {code} ({op.where})")

    def infix(self, op: Op) -> Expr:
        """A binary operator, including comparisons."""
        left, right = op.args
        symbol = _INFIX[op.opcode]
        if left.type == bool_:
            symbol = _LOGICAL.get(op.opcode, symbol)
        elif element(left.type).kind == "bool" and op.opcode == "xor":
            symbol = "!="
        first = self.operand(left)
        text = f"{first} {symbol} {self.shift_count(right) if op.opcode in _SHIFTS else self.operand(right)}"
        if op.opcode not in _WIDENING:
            return Expr(text, atom=False)
        assert isinstance(op.output.type, Scalar | Vector)
        return self.narrowed(op.output.type, text)

    def call(self, function: str, args: Sequence[Value]) -> Expr:
        return Expr(f"{function}({', '.join(self.bare(a) for a in args)})")

    def narrowed(self, type_: ValueType, text: str, atom: bool = False) -> Expr:
        """The result of arithmetic, converted back to ``type_`` if the language computes in a wider type."""
        return Expr(text, atom)

    def shift_count(self, count: Value) -> str:
        """The right operand of a shift."""
        return self.operand(count)

    def negative(self, type_: ValueType, text: str) -> Expr:
        """``neg`` of an operand."""
        return self.narrowed(type_, f"-{text}")

    def invert(self, type_: ValueType, text: str) -> Expr:
        """``not`` of an operand."""
        return Expr(f"!{text}", False) if element(type_).kind == "bool" else self.narrowed(type_, f"~{text}")

    def absolute(self, type_: ValueType, text: str) -> Expr:
        """``abs`` of an operand."""
        return Expr(f"abs({text})")

    def extreme(self, code: str, elem: Scalar) -> str:
        """The function for ``min`` or ``max`` of an element type."""
        return code

    def fused(self, type_: ValueType, a: str, b: str, c: str) -> Expr:
        """``a * b + c``."""
        return Expr(f"fma({a}, {b}, {c})")

    def select(self, condition: Value, yes: Value, no: Value) -> Expr:
        """``yes`` where the condition holds, else ``no``."""
        if isinstance(condition.type, Scalar):
            return Expr(f"{self.operand(condition)} ? {self.operand(yes)} : {self.operand(no)}", atom=False)
        return Expr(f"select({self.bare(no)}, {self.bare(yes)}, {self.bare(condition)})")

    def cast(self, value: Value, type_: ValueType, result: Value) -> Expr:
        """``value`` converted to ``type_``; ``result`` is the value of the cast."""
        return Expr(f"{self.type_name(type_)}({self.bare(value)})")

    def make_vector(self, type_: ValueType, parts: Sequence[str]) -> Expr:
        """A vector of parts, or of one part in every lane."""
        return Expr(f"{self.type_name(type_)}({', '.join(parts)})")

    def extract(self, vector: Value, lane: int) -> Expr:
        """One lane of a vector."""
        return Expr(f"{self.operand(vector)}{self.lane(vector.type, lane)}")

    def lane(self, type_: Any, lane: int) -> str:
        """The suffix that selects a lane of a vector."""
        return swizzle(type_, lane)

    # -- language-specific -----------------------------------------------------------------------------------------

    def type_name(self, type_: ValueType) -> str:
        """The name of a register's type."""
        elem = element(type_)
        if elem.name not in self.type_names or isinstance(type_, Fragment):
            raise KernelError(f"{self.kernel.name}: {self.language} has no type {type_}")
        return self.type_names[elem.name] + (str(type_.lanes) if isinstance(type_, Vector) else "")

    @abstractmethod
    def declare(self, type_: ValueType, name: str, init: str | None, mutable: bool = False) -> str:
        """A declaration, with its semicolon."""

    @abstractmethod
    def literal(self, value: float | int | bool, type_: Scalar) -> Expr:
        """A literal."""

    @abstractmethod
    def bitcast(self, value: Value, type_: ValueType) -> Expr:
        """The bits of ``value`` as ``type_``."""

    @abstractmethod
    def private(self, array: Value) -> str:
        """The declaration of a private array."""

    @abstractmethod
    def load(self, pointer: Value, index: Value, type_: ValueType, align: int) -> Expr:
        """A load."""

    @abstractmethod
    def store(self, pointer: Value, index: Value, value: Value, align: int) -> list[str]:
        """The statements of a store."""

    @abstractmethod
    def atomic(self, op: Op) -> Expr:
        """An atomic."""

    @abstractmethod
    def barrier(self, global_memory: bool) -> list[str]:
        """The statements of a barrier of the workgroup."""

    @abstractmethod
    def subgroup_barrier(self) -> str:
        """The statement of a barrier of the subgroup."""

    @abstractmethod
    def leaf(self, code: str, axis: int) -> Expr:
        """A thread, lane, subgroup or workgroup index, or a workgroup count."""

    @abstractmethod
    def subgroup(self, op: Op) -> Expr:
        """A subgroup operation."""

    def fragment(self, op: Op) -> Expr:
        """A fragment operation with a result."""
        raise KernelError(f"{self.kernel.name}: {self.language} has no matrix fragments ({op.where})")

    def fragment_store(self, op: Op) -> list[str]:
        """The statements of a ``fragment_store``."""
        raise KernelError(f"{self.kernel.name}: {self.language} has no matrix fragments ({op.where})")

    def unroll(self, count: int) -> list[str]:
        """The unroll hint before a loop."""
        if count == 0:
            return []
        return ["#pragma unroll" if count < 0 else f"#pragma unroll {count}"]

    # -- helpers ---------------------------------------------------------------------------------------------------

    def offset(self, index: Value, add: int) -> str:
        """The text of ``index + add``."""
        if index.constant is not None:
            return str(int(index.constant) + add)
        return f"{self.operand(index)} + {add}" if add else self.bare(index)

    def users(self, value: Value) -> list[Op]:
        return self._users.get(value, [])

    def _survey(self, block: list[Op]) -> None:
        for op in block:
            self._home[id(op)] = id(block)
            for arg in op.args:
                self._users.setdefault(arg, []).append(op)
            for inner in op.blocks:
                self._survey(inner)

    def _check_subgroups(self) -> None:
        wanted, target = self.kernel.subgroup_size, self.target
        if not self.uses_subgroups:
            return
        if not target.subgroup_size:
            raise KernelError(
                f"{self.kernel.name}: it uses subgroups, {target.name} offers none through {target.backend}"
            )
        if wanted and wanted != target.subgroup_size and wanted not in target.subgroup_sizes:
            raise KernelError(
                f"{self.kernel.name}: expected subgroups of {wanted} lanes, {target.name} has {target.subgroup_size}"
            )


def is_name(expr: Expr) -> bool:
    """True if the text is an identifier, which can be repeated at no cost."""
    return expr.text.isidentifier()


def swizzle(type_: Any, lane: int) -> str:
    """The suffix that selects a lane of a vector."""
    return f".{'xyzw'[lane]}" if type_.lanes <= 4 else f".s{lane:x}"


def decimal(number: float, type_: Scalar) -> str:
    """The shortest decimal that round-trips to the same number of the type."""
    text = str(np.float16(number) if type_ == f16 else np.float32(number))
    return text if "." in text or "e" in text else text + ".0"


class _Named:
    """An operand in the text of an intrinsic: ``{1}`` is the operand, ``{1[2]}`` its lane 2."""

    def __init__(self, printer: Printer, text: str, type_: Type) -> None:
        self.text, self._type, self._printer = text, type_, printer

    def __str__(self) -> str:
        return self.text

    def __format__(self, spec: str) -> str:
        return self.text

    def __getitem__(self, lane: int) -> str:
        return self.text + self._printer.lane(self._type, lane)
