"""One printer for the C-like languages: statements, expressions, names and inlining.

`opencl`, `msl` and `wgsl` subclass it with what their language says differently. Each value becomes a line
``const T v = ...;``, or is written where it is used when it is used once, in the same block, and costs nothing to move.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from aule.artifact import Artifact, Param
from aule.errors import KernelError
from aule.ir.kernel import KernelIR, Op, Value, walk
from aule.ir.ops import OPS
from aule.ir.types import Fragment, Pointer, Ref, Scalar, ValueType, Vector, element, f16, f64
from aule.target import Target

_INLINE_CHARS = 48
"""Longer expressions get a line and a name, so that no line grows beyond reading."""
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "and": "&", "or": "|", "xor": "^", "shl": "<<",
    "shr": ">>", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
_LOGICAL = {"and": "&&", "or": "||", "xor": "!="}
_WIDENING = frozenset({"add", "sub", "mul", "div", "shl"})
"""Operations that C computes in a wider type for narrow operands."""
SUBGROUP_OPS = frozenset(
    {"lane_id", "subgroup_id", "shuffle", "shuffle_xor", "subgroup_reduce", "subgroup_any", "subgroup_all",
     "subgroup_barrier"}
)  # fmt: skip
_RESERVED = frozenset(
    """
    abs active alignas alignof all and any array as asm atomic attribute auto await barrier become bfloat bitcast bool
    break case cast catch ceil char clamp class column common compile complex concept const const_assert constant
    constexpr continue continuing convert cos crate debugger decltype default delete demote device diagnostic discard
    do dot double else enable enum event exp exp2 explicit export extends extern external false fallthrough fast filter
    final finally float floor fma fn for fragment friend from function get global goto half handle i32 if image2d_t impl
    implements import inline int interface kernel layout let local log log2 long loop mad macro main match max meta
    metal min mod module move mut mutable namespace new nil not null nullptr of operator or override package params
    partial pass pipe pixel pow precise private protected ptr ptrdiff_t pub public queue read read_only read_write
    readonly ref register require requires resource restrict return round rsqrt sampler select self set shared short
    signed sin size_t sizeof smooth splat sqrt static std step storage struct super switch target template texture this
    thread threadgroup throw trait true try type typedef typename typeof u32 uchar uint uint2 uint3 uint4 ulong uniform
    union unsigned use ushort using var vec vec2 vec3 vec4 vector vertex virtual void volatile where while with
    workgroup write write_only writeonly xor yield f16 f32 i64 u64 f64 float2 float4 half2 half4 int2 int4
    FMA INFINITY NAN Params infinity local_invocation_index minus_infinity not_a_number num_workgroups
    simdgroup_index_in_threadgroup subgroup_invocation_id subgroup_size thread_index_in_simdgroup
    thread_index_in_threadgroup threadgroup_position_in_grid threadgroups_per_grid workgroup_id
    """.split()
)


class Expr(NamedTuple):
    """The text of an expression; ``atom`` when it can be an operand without parentheses."""

    text: str
    atom: bool = True


class Printer(ABC):
    """Prints one legalised kernel.

    Parameters
    ----------
    kernel : KernelIR
        Verified, with only what the language can say.
    target : Target
        The device it is for.
    """

    language: ClassVar[Literal["opencl", "wgsl", "msl"]]
    type_names: ClassVar[dict[str, str]]
    functions: ClassVar[dict[str, str]]
    """Names of ``exp2``, ``sqrt`` and their like."""

    def __init__(self, kernel: KernelIR, target: Target) -> None:
        self.kernel = kernel
        self.target = target
        self.helpers: dict[str, str] = {}
        """Functions and declarations before the kernel, by name."""
        self.arrays: list[str] = []
        """Declarations at the top of the kernel."""
        self.lines: list[str] = []
        self._depth = 1
        self._taken: set[str] = set()
        self._count = 0
        self._text: dict[Value, Expr] = {}
        self._pending: dict[Value, frozenset[Value]] = {}
        self._users: dict[Value, list[Op]] = {}
        self._home: dict[int, int] = {}
        self._survey(kernel.body)
        self.entry = self.name(kernel.name)
        self.uses_subgroups = any(op.opcode in SUBGROUP_OPS for op in kernel.walk())
        self._check_subgroups()

    # -- the whole -------------------------------------------------------------------------------------------------

    def artifact(self, params: tuple[Param, ...]) -> Artifact:
        """Print, and describe what was printed. ``params`` are those of the kernel before it was legalised."""
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
        """The source around ``self.lines``."""

    @abstractmethod
    def declare_parameters(self) -> None:
        """Give every parameter its text."""

    @abstractmethod
    def declare_shared(self, array: Value) -> None:
        """Declare one shared array."""

    def extensions(self) -> Iterable[str]:
        """Device features the code needs."""
        return ()

    def uses(self, elem: Scalar) -> bool:
        """True when any register or array has this element."""
        types = [v.type for v in (*self.kernel.values.values(), *self.kernel.shared)]
        types += [op.result.type for op in self.kernel.walk() if op.result is not None]
        return any(element(t) == elem for t in types)

    # -- names and operands ----------------------------------------------------------------------------------------

    def name(self, hint: str = "") -> str:
        """A new identifier."""
        if not hint:
            self._count += 1
            hint = f"v{self._count - 1}"
        base = re.sub(r"\W", "_", hint, flags=re.ASCII)
        if base in _RESERVED or not base[0].isalpha() or "__" in base:
            base = f"{base.strip('_').replace('__', '_')}_" if base[0].isalpha() else f"v{base.strip('_')}"
        unique, count = base, 1
        while unique in self._taken:
            count += 1
            unique = f"{base}{count}" if base.endswith("_") else f"{base}_{count}"
        self._taken.add(unique)
        return unique

    def let(self, value: Value, text: str, atom: bool = True) -> None:
        """Fix what is written for a value."""
        self._text[value] = Expr(text, atom)

    def bare(self, value: Value) -> str:
        """A value where it needs no parentheses: an argument, an index, the right side of an assignment."""
        self._pending.pop(value, None)
        return self._text[value].text

    def operand(self, value: Value) -> str:
        """A value as an operand of an operator."""
        expr = self._text[value]
        self._pending.pop(value, None)
        return expr.text if expr.atom else f"({expr.text})"

    def named(self, value: Value) -> str:
        """A value by name, for text that repeats it."""
        expr = self._text[value]
        if not (is_name(expr) or value.constant is not None):
            self._pending.pop(value, None)
            self._define(value, expr)
        return self.bare(value)

    def emit(self, *lines: str) -> None:
        """Lines at the present depth."""
        self.lines += ["    " * self._depth + line if line else "" for line in lines]

    # -- statements ------------------------------------------------------------------------------------------------

    def block(self, ops: list[Op]) -> None:
        """The statements of a block."""
        for op in ops:
            self.statement(op)

    def statement(self, op: Op) -> None:
        """One operation."""
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
                self._settle({op.args[0]})
                self.emit(f"{name} = {value};")
            case "var":
                self._var(op)
            case "private":
                assert op.result is not None and isinstance(op.result.type, Pointer)
                self.let(op.result, self.name(op.attrs["name"] or "scratch"))
                self.arrays.append(self.private(op.result))
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
            # Printed where it stands.
            depends = frozenset()
        expr = self.atomic(op) if op.opcode == "atomic" else self.expression(op)
        users = self._users.get(value, [])
        repeatable = is_name(expr) or (op.opcode == "extract" and is_name(self._text[op.args[0]]))
        if op.opcode == "const" or (repeatable and not depends):
            self._text[value] = expr
        elif not users:
            # Only operations with effects are left without a user by the dead-code pass.
            if expr.text:
                self.emit(f"{expr.text};")
        elif (
            len(users) == 1
            and self._home[id(users[0])] == self._home[id(op)]
            and users[0].opcode != "intrinsic"
            and self.movable(op)
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

    def _settle(self, refs: set[Value]) -> None:
        """Values that were to be written later but read variables about to change get their line now."""
        for value, depends in list(self._pending.items()):
            if depends & refs:
                expr = self._text[value]
                del self._pending[value]
                self._define(value, expr)

    def _var(self, op: Op) -> None:
        assert op.result is not None and isinstance(op.result.type, Ref)
        init = self.bare(op.args[0])
        name = self.name(op.result.hint or "cell")
        self.let(op.result, name)
        self.emit(self.declare(op.result.type.target, name, init, mutable=True))

    def _loop(self, op: Op) -> None:
        for bound in op.args[1:]:
            # The condition is written once and evaluated on every turn.
            if self._pending.get(bound):
                self._settle(set(self._pending[bound]))
        changed = {inner.args[0] for inner in walk(op.blocks[0]) if inner.opcode == "set"}
        start, stop, step = self.bare(op.args[0]), self.operand(op.args[1]), self.bare(op.args[2])
        self._settle(changed)
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
        self._settle({inner.args[0] for block in op.blocks for inner in walk(block) if inner.opcode == "set"})
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
        code, args = str(op.attrs["code"]), [_Named(self.operand(a)) for a in op.args]
        if op.result is None:
            self.emit(code.format(None, *args))
            return
        assert isinstance(op.result.type, Scalar | Vector | Fragment)
        if code.startswith("{0} = ") and code.count("{0") == 1:
            # A plain assignment is the value's own line.
            self._define(op.result, Expr(code.removeprefix("{0} = ").removesuffix(";").format(None, *args)))
            return
        result = _Named(self.name(op.result.hint))
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
            case "small":
                return Expr(self.operand(args[0]))
            case "neg":
                return self.negative(result.type, self.operand(args[0]))
            case "not":
                return self.invert(result.type, self.operand(args[0]))
            case "abs":
                return self.absolute(result.type, self.bare(args[0]))
            case "rcp":
                one = self.literal(1.0, element(result.type)).text
                return self.narrowed(result.type, f"{one} / {self.operand(args[0])}")
            case "min" | "max":
                return self.call(self.extreme(code, element(result.type)), args)
            case "fma":
                return self.fused(result.type, *(self.bare(a) for a in args))
            case "select":
                return self.select(args[0], args[1], args[2])
            case "cast":
                return self.cast(args[0], result.type, result)
            case "bitcast":
                return self.bitcast(args[0], result.type)
            case "make_vector":
                return self.make_vector(result.type, [self.bare(a) for a in args])
            case "splat":
                return self.make_vector(result.type, [self.bare(args[0])])
            case "extract":
                return self.extract(args[0], op.attrs["lane"])
            case "load":
                return self.load(args[0], args[1], result.type, op.attrs["align"])
            case "thread_id" | "group_id" | "group_count" | "lane_id" | "subgroup_id":
                return self.leaf(code, op.attrs.get("axis", 0))
            case "shuffle" | "shuffle_xor" | "subgroup_reduce" | "subgroup_any" | "subgroup_all":
                return self.subgroup(op)
        if code in self.functions:
            return self.narrowed(result.type, self.call(self.functions[code], args).text, atom=True)
        if code in _INFIX:
            return self.infix(op)
        if OPS[code].category == "fragment":
            return self.fragment(op)
        raise KernelError(f"{self.kernel.name}: {self.language} has no {code} ({op.where})")

    def infix(self, op: Op) -> Expr:
        """Operators between two operands, comparisons included."""
        left, right = op.args
        assert op.result is not None
        symbol = _INFIX[op.opcode]
        if left.type == Scalar("bool", "bool", 1):
            symbol = _LOGICAL.get(op.opcode, symbol)
        elif element(left.type).kind == "bool" and op.opcode == "xor":
            symbol = "!="
        text = f"{self.operand(left)} {symbol} {self.shift_count(right) if 'sh' in op.opcode else self.operand(right)}"
        if op.opcode not in _WIDENING:
            return Expr(text, atom=False)
        assert isinstance(op.result.type, Scalar | Vector)
        return self.narrowed(op.result.type, text)

    def call(self, function: str, args: Sequence[Value]) -> Expr:
        """A function of values."""
        return Expr(f"{function}({', '.join(self.bare(a) for a in args)})")

    def narrowed(self, type_: ValueType, text: str, atom: bool = False) -> Expr:
        """The result of arithmetic, brought back to ``type_`` where the language computes in a wider one."""
        return Expr(text, atom)

    def shift_count(self, count: Value) -> str:
        return self.operand(count)

    def negative(self, type_: ValueType, text: str) -> Expr:
        return self.narrowed(type_, f"-{text}")

    def invert(self, type_: ValueType, text: str) -> Expr:
        return Expr(f"!{text}", False) if element(type_).kind == "bool" else self.narrowed(type_, f"~{text}")

    def absolute(self, type_: ValueType, text: str) -> Expr:
        return Expr(f"abs({text})")

    def extreme(self, code: str, elem: Scalar) -> str:
        """The function for ``min`` or ``max`` of this element."""
        return code

    def fused(self, type_: ValueType, a: str, b: str, c: str) -> Expr:
        return Expr(f"fma({a}, {b}, {c})")

    def select(self, condition: Value, yes: Value, no: Value) -> Expr:
        if isinstance(condition.type, Scalar):
            return Expr(f"{self.operand(condition)} ? {self.operand(yes)} : {self.operand(no)}", atom=False)
        return Expr(f"select({self.bare(no)}, {self.bare(yes)}, {self.bare(condition)})")

    def cast(self, value: Value, type_: ValueType, result: Value) -> Expr:
        return Expr(f"{self.type_name(type_)}({self.bare(value)})")

    def make_vector(self, type_: ValueType, parts: Sequence[str]) -> Expr:
        return Expr(f"{self.type_name(type_)}({', '.join(parts)})")

    def extract(self, vector: Value, lane: int) -> Expr:
        return Expr(f"{self.operand(vector)}{swizzle(vector.type, lane)}")

    def movable(self, op: Op) -> bool:
        """True when an operation may be evaluated later than where it stands."""
        if op.opcode in SUBGROUP_OPS:
            return op.opcode in ("lane_id", "subgroup_id")
        return OPS[op.opcode].category in (
            "leaf",
            "unary",
            "binary",
            "compare",
            "ternary",
            "cast",
            "vector",
            "variable",
        )

    # -- what each language says in its own way ----------------------------------------------------------------------

    def type_name(self, type_: ValueType) -> str:
        """A register's type."""
        elem = element(type_)
        if elem.name not in self.type_names or isinstance(type_, Fragment):
            raise KernelError(f"{self.kernel.name}: {self.language} has no type {type_}")
        return self.type_names[elem.name] + (str(type_.lanes) if isinstance(type_, Vector) else "")

    @abstractmethod
    def declare(self, type_: ValueType, name: str, init: str | None, mutable: bool = False) -> str:
        """A declaration, with its semicolon."""

    @abstractmethod
    def literal(self, value: float | int | bool, type_: Scalar) -> Expr:
        """A constant."""

    @abstractmethod
    def bitcast(self, value: Value, type_: ValueType) -> Expr: ...

    @abstractmethod
    def private(self, array: Value) -> str:
        """The declaration of a thread's own array."""

    @abstractmethod
    def load(self, pointer: Value, index: Value, type_: ValueType, align: int) -> Expr: ...

    @abstractmethod
    def store(self, pointer: Value, index: Value, value: Value, align: int) -> list[str]: ...

    @abstractmethod
    def atomic(self, op: Op) -> Expr: ...

    @abstractmethod
    def barrier(self, global_memory: bool) -> list[str]: ...

    @abstractmethod
    def subgroup_barrier(self) -> str: ...

    @abstractmethod
    def leaf(self, code: str, axis: int) -> Expr: ...

    @abstractmethod
    def subgroup(self, op: Op) -> Expr: ...

    def fragment(self, op: Op) -> Expr:
        raise KernelError(f"{self.kernel.name}: {self.language} has no matrix fragments ({op.where})")

    def fragment_store(self, op: Op) -> list[str]:
        raise KernelError(f"{self.kernel.name}: {self.language} has no matrix fragments ({op.where})")

    def unroll(self, count: int) -> list[str]:
        """The hint before a loop."""
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


class CPrinter(Printer):
    """What OpenCL C and MSL share: C's types, pointers and casts."""

    type_names: ClassVar[dict[str, str]] = {
        "bool": "bool", "i8": "char", "i16": "short", "i32": "int", "i64": "long", "u8": "uchar", "u16": "ushort",
        "u32": "uint", "u64": "ulong", "f16": "half", "f32": "float",
    }  # fmt: skip

    def declare(self, type_: ValueType, name: str, init: str | None, mutable: bool = False) -> str:
        const = "" if mutable else "const "
        return f"{const}{self.type_name(type_)} {name}{'' if init is None else f' = {init}'};"

    def narrowed(self, type_: ValueType, text: str, atom: bool = False) -> Expr:
        # C promotes small integers to int; the IR's arithmetic wraps in its own width.
        if isinstance(type_, Scalar) and type_.is_int and type_.bits < 32:
            return Expr(f"({self.type_name(type_)})({text})")
        return Expr(text, atom)

    def typed(self, value: Value) -> str:
        """A value where its size counts: C has made an int of what `&` and others left of small integers."""
        assert isinstance(value.type, Scalar | Vector)
        atom = self._text[value].atom
        return self.bare(value) if atom else self.narrowed(value.type, self.bare(value)).text

    def extreme(self, code: str, elem: Scalar) -> str:
        # min and max of the language promise nothing for infinities; fmin and fmax do.
        return f"f{code}" if elem.is_float else code

    def literal(self, value: float | int | bool, type_: Scalar) -> Expr:
        if type_.kind == "bool":
            return Expr("true" if value else "false")
        if type_.is_int:
            return self._integer(int(value), type_)
        number = float(value)
        if math.isnan(number):
            text = "NAN"
        elif math.isinf(number):
            text = "INFINITY" if number > 0 else "-INFINITY"
        elif type_ == f64:
            return Expr(repr(number), number >= 0)
        else:
            text = decimal(number, type_) + "f"
        return Expr(text, not text.startswith("-"))

    def _integer(self, value: int, type_: Scalar) -> Expr:
        value &= (1 << type_.bits) - 1
        if type_.is_signed and value >> (type_.bits - 1):
            value -= 1 << type_.bits
        if type_.bits < 32:
            return Expr(f"({self.type_name(type_)}){value}" if value >= 0 else f"({self.type_name(type_)})({value})")
        suffix = ("" if type_.is_signed else "u") + ("L" if type_.bits == 64 else "")
        if value == -(1 << (type_.bits - 1)):
            # The literal without its minus sign does not fit.
            return Expr(f"(-{-value - 1}{suffix} - 1)")
        return Expr(f"{value}{suffix}", value >= 0)

    def private(self, array: Value) -> str:
        assert isinstance(array.type, Pointer)
        return f"{self.type_name(array.type.elem)} {self.bare(array)}[{array.type.length}];"

    def address(self, pointer: Value, index: Value) -> str:
        """The pointer to an element."""
        if index.constant == 0:
            return self.operand(pointer)
        return f"{self.operand(pointer)} + {self.operand(index)}"

    def element_of(self, pointer: Value, index: Value, add: int = 0) -> str:
        """An element as something that can be read and written."""
        return f"{self.operand(pointer)}[{self.offset(index, add)}]"

    def widest(self, pointer: Value) -> int:
        """Bytes of the widest aligned vector that passes through an array; 0 when all are scalars."""
        sizes = [0]
        for op in self.users(pointer):
            value = op.result if op.opcode == "load" else op.args[2] if op.opcode == "store" else None
            if value is not None and isinstance(value.type, Vector) and op.attrs["align"] % value.type.lanes == 0:
                sizes.append(value.type.bytes)
        return max(sizes)


def is_name(expr: Expr) -> bool:
    """True when the text is an identifier, which can be repeated for nothing."""
    return expr.text.isidentifier()


def swizzle(type_: Any, lane: int) -> str:
    """The suffix that takes a lane of a vector."""
    return f".{'xyzw'[lane]}" if type_.lanes <= 4 else f".s{lane:x}"


def decimal(number: float, type_: Scalar) -> str:
    """The shortest decimal that reads back as the same number of the type."""
    text = str(np.float16(number) if type_ == f16 else np.float32(number))
    return text if "." in text or "e" in text else text + ".0"


class _Named:
    """An operand in an intrinsic's text: ``{1}`` is itself, ``{1[2]}`` its lane 2."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __format__(self, spec: str) -> str:
        return self.text

    def __getitem__(self, lane: int) -> str:
        return f"{self.text}.{'xyzw'[lane]}" if lane < 4 else f"{self.text}.s{lane:x}"
