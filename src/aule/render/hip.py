"""Renderer for HIP C++, for AMD GPUs. fp16 is native; bf16 is held as bits.

The source includes no header and calls AMD's builtins only in the functions of `_hip_prelude`. Every parameter is one
kernel argument. Names of types are those of the IR; vectors are the compiler's own, so that a lane is ``v[0]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any, ClassVar

from aule.artifact import Artifact
from aule.errors import KernelError
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.passes import Legal, legalise
from aule.ir.types import Fragment, Pointer, Scalar, ValueType, Vector, bf16, bool_, element, f16, f64, i32
from aule.ir.verify import verify, verify_structure
from aule.render import _hip_prelude as prelude
from aule.render._hip_fragment import FragmentPrinter
from aule.render.clike import Expr
from aule.target import Target

WAVE64 = "wavefrontsize64"
"""In ``Artifact.extensions`` of a kernel that must be compiled with ``-mwavefrontsize64``: 64 lanes are not usual."""
_LEAVES = {"thread_id": "thread_id()", "lane_id": "lane_id()", "subgroup_id": "subgroup_id()"}
_SHARED_ALIGNMENT = 16


def render(kernel: KernelIR, target: Target) -> Artifact:
    """Print a kernel as HIP for ``target``, whose ``arch`` it needs; a KernelError if the target lacks something."""
    if not target.arch.startswith("gfx"):
        raise KernelError(
            f"{kernel.name}: expected a target with an architecture as gfx942, got {target.arch!r}; set Target.arch"
        )
    verify(kernel)
    soft = frozenset({bf16})
    legal = legalise(kernel, Legal(soft=soft, max_lanes=16))
    # Barriers are not checked again: a vote through shared memory is uniform, but the analysis cannot prove it.
    verify_structure(legal, soft)
    return _Hip(legal, target).artifact(kernel.params)


class _Hip(FragmentPrinter):
    language = "hip"
    type_names: ClassVar[dict[str, str]] = {"bool": "bool"} | {name: name for name in prelude.SCALARS}
    functions: ClassVar[dict[str, str]] = {
        name: name for name in ("exp2", "log2", "sqrt", "rsqrt", "floor", "sin", "cos", "mulhi", "rcp")
    }
    reserved = frozenset({"aule", *prelude.SCALARS})

    def __init__(self, kernel: KernelIR, target: Target) -> None:
        super().__init__(kernel, target)
        self.arch = target.arch.partition(":")[0]  # without features, as in gfx90a:sramecc+
        self.wave = kernel.subgroup_size or target.subgroup_size or 64
        self._parameters: list[str] = []
        self._vectors: set[Vector] = set()
        self._functions: set[str] = set()

    # -- module ----------------------------------------------------------------------------------------------------

    def declare_parameters(self) -> None:
        for param in self.kernel.params:
            value = self.kernel.values[param.name]
            name = self.name(param.name)
            self.let(value, name)
            if isinstance(value.type, Pointer):
                const = "const " if param.access == "read" else ""
                self._parameters.append(f"{const}{self.type_name(value.type.elem)}* __restrict__ {name}")
            else:
                self._parameters.append(f"const {self.type_name(element(value.type))} {name}")

    def declare_shared(self, array: Value) -> None:
        assert isinstance(array.type, Pointer)
        elem = self.type_name(array.type.elem)
        self.arrays.append(f"AULE_SHARED({_SHARED_ALIGNMENT}) {elem} {self.bare(array)}[{array.type.length}];")

    def module(self) -> str:
        head = [f"// {self.kernel.name}, rendered by aule for {self.target.name}.", f"#define AULE_WAVE {self.wave}"]
        head += [f"#ifndef {prelude.STAND_IN}", prelude.ATTRIBUTES, *prelude.type_definitions(self._vectors)]
        functions = prelude.functions(self._functions, self.wave, self.arch)
        if functions:
            head += ["", "namespace aule {", *functions, "}"]
        head += ["#endif", "", *(f"{text}\n" for text in self.helpers.values())]
        parameters = ",\n    ".join(self._parameters)
        return "\n".join(
            [*head, f"AULE_KERNEL({self.kernel.workgroup}) void {self.entry}(\n    {parameters})\n{{"]
            + [f"    {line}" for line in self.arrays]
            + [*self.lines, "}", ""]
        )

    def extensions(self) -> Iterable[str]:
        if self.wave == 64 and prelude.generation(self.arch) > 9:
            yield WAVE64

    def function(self, name: str, *args: str, template: str = "") -> Expr:
        """A call of a function of the prelude."""
        self._functions.add(name)
        return Expr(f"aule::{name}{template}({', '.join(args)})")

    # -- types and values ------------------------------------------------------------------------------------------

    def type_name(self, type_: ValueType) -> str:
        if not isinstance(type_, Vector):
            return super().type_name(type_)
        held = Vector(i32, type_.lanes) if type_.elem == bool_ else type_  # comparing vectors gives integers
        self._vectors.add(held)
        return prelude.type_name(held)

    def literal(self, value: float | int | bool, type_: Scalar) -> Expr:
        text = super().literal(value, type_).text
        names = {"INFINITY": "__builtin_inff()", "-INFINITY": "-__builtin_inff()", "NAN": '__builtin_nanf("")'}
        text = names.get(text, text)
        if type_ in (f16, f64):
            return Expr(f"({type_}){text}")
        return Expr(text, not text.startswith("-"))

    def _integer(self, value: int, type_: Scalar) -> Expr:
        expr = super()._integer(value, type_)
        # long has 32 bits on Windows.
        return expr._replace(text=expr.text.replace("L", "LL")) if type_.bits == 64 else expr

    def call(self, function: str, args: Sequence[Value]) -> Expr:
        return self.function(function, *map(self.typed, args))

    def extreme(self, code: str, elem: Scalar) -> str:
        return code

    def absolute(self, type_: ValueType, text: str) -> Expr:
        if not element(type_).is_signed:
            return Expr(text, atom=False)
        if isinstance(type_, Scalar) and type_.is_int and type_.bits < 32:
            text = f"({type_})({text})"
        return self.function("abs", text)

    def fused(self, type_: ValueType, a: str, b: str, c: str) -> Expr:
        return self.function("fma", a, b, c)

    def arithmetic(self, op: Op, type_: ValueType) -> Expr:
        if op.opcode == "rcp" and element(type_) != f64:
            return self.call("rcp", op.args)
        return super().arithmetic(op, type_)

    def expression(self, op: Op) -> Expr:
        if op.opcode == "splat":
            assert isinstance(op.output.type, Vector)
            return self.make_vector(op.output.type, [self.named(op.args[0])] * op.output.type.lanes)
        if op.opcode in ("dot_pairs", "e4m3_halves"):
            return self._special(op)
        if op.opcode == "make_vector":
            assert isinstance(op.output.type, Vector)
            return self.make_vector(op.output.type, [self.typed(a) for a in op.args])
        return super().expression(op)

    def _special(self, op: Op) -> Expr:
        """An operation that only some chips have."""
        has = prelude.multiplies_pairs if op.opcode == "dot_pairs" else prelude.converts_e4m3
        if not has(self.arch) or (op.opcode == "dot_pairs" and isinstance(op.output.type, Vector)):
            raise KernelError(f"{self.kernel.name}: {self.language} has no {op.opcode} for {self.arch} ({op.where})")
        self.type_name(Vector(f16, 4))
        return self.function(op.opcode, *map(self.bare, op.args))

    def infix(self, op: Op) -> Expr:
        type_ = op.output.type
        if not (isinstance(type_, Vector) and type_.elem == bool_):
            return super().infix(op)
        left, right = op.args
        if element(left.type) == bool_:
            symbol = {"and": "&", "or": "|", "xor": "^", "eq": "==", "ne": "!="}[op.opcode]
            return Expr(f"{self.operand(left)} {symbol} {self.operand(right)}", atom=False)
        expr = super().infix(op)
        return expr if element(left.type).bits == 32 else self._convert(type_, expr.text)

    def invert(self, type_: ValueType, text: str) -> Expr:
        return Expr(f"~{text}", False) if isinstance(type_, Vector) else super().invert(type_, text)

    def select(self, condition: Value, yes: Value, no: Value) -> Expr:
        if isinstance(condition.type, Scalar):
            return super().select(condition, yes, no)
        return self.function("select", self.bare(condition), self.bare(yes), self.bare(no))

    def cast(self, value: Value, type_: ValueType, result: Value) -> Expr:
        if isinstance(type_, Fragment):
            return super().cast(value, type_, result)
        if not isinstance(type_, Vector):
            return Expr(f"({self.type_name(type_)}){self.operand(value)}")
        minus = "-" if element(value.type) == bool_ else ""  # true has all bits set
        return self._convert(type_, f"{minus}{self.operand(value)}")

    def _convert(self, type_: ValueType, text: str) -> Expr:
        return self.function("convert", text, template=f"<{self.type_name(type_)}>")

    def bitcast(self, value: Value, type_: ValueType) -> Expr:
        return self.function("bits", self.typed(value), template=f"<{self.type_name(type_)}>")

    def make_vector(self, type_: ValueType, parts: Sequence[str]) -> Expr:
        if element(type_) == bool_:
            parts = [f"-(i32)({part})" for part in parts]
        return Expr(f"{self.type_name(type_)}{{{', '.join(parts)}}}")

    def extract(self, vector: Value, lane: int) -> Expr:
        expr = super().extract(vector, lane)
        return Expr(f"{expr.text} != 0", atom=False) if element(vector.type) == bool_ else expr

    def lane(self, type_: Any, lane: int) -> str:
        return f"[{lane}]"

    # -- memory ----------------------------------------------------------------------------------------------------

    def load(self, pointer: Value, index: Value, type_: ValueType, align: int) -> Expr:
        assert isinstance(pointer.type, Pointer)
        if not isinstance(type_, Vector):
            return Expr(self.element_of(pointer, index))
        if pointer.type.space == "private":  # an address would keep the array out of registers
            self.named(index)
            return self.make_vector(type_, [self.element_of(pointer, index, i) for i in range(type_.lanes)])
        return Expr(f"*(const {self._in_memory(type_, align)}*)({self.address(pointer, index)})", atom=False)

    def store(self, pointer: Value, index: Value, value: Value, align: int) -> list[str]:
        assert isinstance(pointer.type, Pointer)
        if not isinstance(value.type, Vector):
            return [f"{self.element_of(pointer, index)} = {self.bare(value)};"]
        if pointer.type.space == "private":
            self.named(index)
            self.named(value)
            lanes = range(value.type.lanes)
            return [f"{self.element_of(pointer, index, i)} = {self.extract(value, i).text};" for i in lanes]
        return [f"*({self._in_memory(value.type, align)}*)({self.address(pointer, index)}) = {self.bare(value)};"]

    def _in_memory(self, type_: Vector, align: int) -> str:
        """A vector type with the alignment that an access has."""
        name, known = self.type_name(type_), gcd(align, type_.lanes)
        if known == type_.lanes:
            return name
        loose = f"{name}_by{known}"
        self.helpers[loose] = f"typedef {name} {loose} __attribute__((aligned({known * type_.elem.bytes})));"
        return loose

    def atomic(self, op: Op) -> Expr:
        pointer, index, value = op.args
        assert isinstance(pointer.type, Pointer)
        name = f"atomic_{op.attrs['kind']}_{pointer.type.space}"
        return self.function(name, self.address(pointer, index), self.typed(value))

    # -- threads and subgroups -------------------------------------------------------------------------------------

    def statement(self, op: Op) -> None:
        if op.opcode == "device_fence":
            self.emit(f"{self.function('device_fence').text};")
        elif op.attrs.get("ordered"):
            self.emit(f"{self.function('device_fence').text};")
            self._value(op)
            self.emit(f"{self.function('device_fence').text};")
        else:
            super().statement(op)

    def unroll(self, count: int) -> list[str]:
        # By itself the compiler would unroll short loops, and keep what all of their iterations load in registers.
        return super().unroll(count) or ["#pragma nounroll"]

    def barrier(self, global_memory: bool) -> list[str]:
        return [f"{self.function('barrier_global' if global_memory else 'barrier').text};"]

    def subgroup_barrier(self) -> str:
        return f"{self.function('subgroup_barrier').text};"

    def leaf(self, code: str, axis: int) -> Expr:
        self._functions.add(code)
        if code in _LEAVES:
            return Expr(f"aule::{_LEAVES[code]}")
        threads = str(self.kernel.workgroup) if code == "group_count" else ""
        return Expr(f"aule::{code}_{'xyz'[axis]}({threads})")

    def subgroup(self, op: Op) -> Expr:
        value = self.bare(op.args[0])
        match op.opcode:
            case "shuffle":
                return self.function("shuffle", value, self.bare(op.args[1]))
            case "shuffle_xor":
                return self.function(f"shuffle_xor<{op.attrs['mask']}>", value)
            case "subgroup_reduce":
                return self.function(f"subgroup_reduce_{op.attrs['kind']}", value)
            case _:
                return self.function(op.opcode, value)
