"""Renderer for WGSL (WebGPU): 32-bit numbers and, with ``shader-f16``, fp16. All other types are legalised away.

Buffers are declared by how they are accessed: as arrays of vectors if every access allows it, of atomics if any access
is atomic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from aule.artifact import Artifact
from aule.errors import KernelError
from aule.ir.builder import Builder
from aule.ir.constants import wrap
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.passes import Legal, legalise
from aule.ir.types import (
    Pointer,
    Scalar,
    ValueType,
    Vector,
    bf16,
    bool_,
    element,
    f16,
    f32,
    i8,
    i16,
    lanes_of,
    u8,
    u16,
    u32,
    vector_type,
)
from aule.ir.verify import verify
from aule.render.clike import Expr, Printer, decimal, swizzle
from aule.target import Target

_SMALL = frozenset({i8, u8, i16, u16})
_ATOMICS = {
    "add": "atomicAdd", "min": "atomicMin", "max": "atomicMax", "and": "atomicAnd", "or": "atomicOr",
    "xor": "atomicXor", "exchange": "atomicExchange",
}  # fmt: skip
_INPUTS = {
    "thread_id": ("local_invocation_index", "u32"),
    "group_id": ("workgroup_id", "vec3<u32>"),
    "group_count": ("num_workgroups", "vec3<u32>"),
    "lane_id": ("subgroup_invocation_id", "u32"),
    "subgroup_size": ("subgroup_size", "u32"),
}


def render(kernel: KernelIR, target: Target) -> Artifact:
    """Print a kernel as WGSL for ``target``; a KernelError if WGSL lacks something it needs."""
    verify(kernel)
    legal = legalise(kernel, _legal(kernel, target))
    verify(legal)
    return _Wgsl(legal, target).artifact(kernel.params)


def _legal(kernel: KernelIR, target: Target) -> Legal:
    """Limits of WGSL on a device."""
    return Legal(
        soft=frozenset({bf16}) if target.f16 else frozenset({bf16, f16}),
        packed=_SMALL if target.storage16 else _SMALL | {f16},
        widened=_SMALL,
        int64=False,
        mulhi=False,
        max_lanes=4,
        half_to_float=_half_to_float,
        rounded=kernel.arithmetic == "exact" and target.vendor == "nvidia",
    )


def _half_to_float(b: Builder, bits: Value) -> Value:
    """fp16 bits in the low half of a word to f32.

    unpack2x16float is exact by the specification. There is no counterpart for f32 to fp16, because pack2x16float may
    round in any direction.
    """
    value = b.intrinsic("wgsl", "{0} = unpack2x16float({1}).x;", [bits], f32)
    assert value is not None
    return value


@dataclass(frozen=True)
class _Layout:
    """Declaration of an array: of atomics, or of vectors of ``width``."""

    elem: Scalar
    width: int = 1
    atomic: bool = False


class _Wgsl(Printer):
    language = "wgsl"
    type_names: ClassVar[dict[str, str]] = {"bool": "bool", "i32": "i32", "u32": "u32", "f32": "f32", "f16": "f16"}
    functions: ClassVar[dict[str, str]] = {
        "exp2": "exp2", "log2": "log2", "sqrt": "sqrt", "rsqrt": "inverseSqrt", "floor": "floor", "sin": "sin",
        "cos": "cos",
    }  # fmt: skip

    def __init__(self, kernel: KernelIR, target: Target) -> None:
        super().__init__(kernel, target)
        self._declarations: list[str] = []
        self._inputs: dict[str, str] = {}
        self._specials: dict[str, str] = {}
        self._layouts: dict[Value, _Layout] = {}

    # -- module ----------------------------------------------------------------------------------------------------

    def declare_parameters(self) -> None:
        scalars = []
        binding = 0
        for param in self.kernel.params:
            value = self.kernel.values[param.name]
            name = self.name(param.name)
            if isinstance(value.type, Pointer):
                self.let(value, name)
                layout = self._layout(value)
                access = "read" if param.access == "read" else "read_write"
                self._declarations.append(
                    f"@group(0) @binding({binding}) var<storage, {access}> {name}: array<{self._stored(layout)}>;"
                )
                binding += 1
            else:
                self.let(value, f"params.{name}")
                scalars.append(f"    {name}: {self.type_name(element(value.type))},")
        if scalars:
            self.helpers["Params"] = "\n".join(["struct Params {", *scalars, "}"])
            self._declarations.append(f"@group(0) @binding({binding}) var<uniform> params: Params;")

    def declare_shared(self, array: Value) -> None:
        assert isinstance(array.type, Pointer) and array.type.length is not None
        layout = self._layout(array)
        length = array.type.length // layout.width
        self._declarations.append(f"var<workgroup> {self.bare(array)}: array<{self._stored(layout)}, {length}>;")

    def module(self) -> str:
        inputs = [f"    @builtin({builtin}) {builtin}: {type_}," for builtin, type_ in self._inputs.items()]
        arguments = "\n".join(["(", *inputs, ")"]) if inputs else "()"
        enables = [f"enable {name};" for name, used in self._features() if used]
        lines = [f"// {self.kernel.name}, rendered by aule for {self.target.name}.", *enables, ""]
        lines += [f"{text}\n" for text in self.helpers.values()]
        lines += [*self._declarations, ""]
        lines += [f"@compute @workgroup_size({self.kernel.workgroup}, 1, 1)", f"fn {self.entry}{arguments} {{"]
        lines += [f"    let {name} = {text};" for name, text in self._specials.items()]
        lines += [f"    {line}" for line in self.arrays]
        return "\n".join([*lines, *self.lines, "}", ""])

    def extensions(self) -> Iterable[str]:
        return [{"f16": "shader-f16"}.get(name, name) for name, used in self._features() if used]

    def _features(self) -> list[tuple[str, bool]]:
        return [("f16", self.uses(f16)), ("subgroups", self.uses_subgroups)]

    # -- types and values ------------------------------------------------------------------------------------------

    def type_name(self, type_: ValueType) -> str:
        if isinstance(type_, Vector):
            return f"vec{type_.lanes}<{self.type_name(type_.elem)}>"
        return super().type_name(type_)

    def declare(self, type_: ValueType, name: str, init: str | None, mutable: bool = False) -> str:
        return f"{'var' if mutable else 'let'} {name}: {self.type_name(type_)}{'' if init is None else f' = {init}'};"

    def literal(self, value: float | int | bool, type_: Scalar) -> Expr:
        if type_ == bool_:
            return Expr("true" if value else "false")
        if type_.is_int:
            number = wrap(int(value), type_)
            if type_ == u32:
                return Expr(f"{number}u")
            return Expr("i32(-2147483648)") if number == -(1 << 31) else Expr(str(number), number >= 0)
        value = float(value)
        if math.isfinite(value):
            text = decimal(value, type_)
            if "inf" not in text:
                return Expr(text + ("h" if type_ == f16 else "f"), not text.startswith("-"))
        return self._special(value, type_)

    def _special(self, value: float, type_: Scalar) -> Expr:
        """An infinity or NaN, from bits in a variable: WGSL rejects them in constant expressions."""
        name, bits = ("not_a_number", 0x7FC00000)
        if not math.isnan(value):
            name, bits = ("infinity", 0x7F800000) if value > 0 else ("minus_infinity", 0xFF800000)
        self.helpers.setdefault(name, f"var<private> {name}_bits: u32 = {bits:#x}u;")
        self._specials[name] = f"bitcast<f32>({name}_bits)"
        return Expr(name if type_ == f32 else f"{type_}({name})")

    def select(self, condition: Value, yes: Value, no: Value) -> Expr:
        return Expr(f"select({self.bare(no)}, {self.bare(yes)}, {self.bare(condition)})")

    def infix(self, op: Op) -> Expr:
        left, right = op.args
        elem = element(left.type)
        if op.opcode == "rem" and elem.is_signed and self.kernel.arithmetic == "exact":
            # naga compiles % to an instruction that Vulkan leaves undefined for negative numbers.
            for value in op.args:
                self.named(value)
            x, y = self.operand(left), self.operand(right)
            return Expr(f"{x} - {x} / {y} * {y}", atom=False)
        if op.opcode in ("eq", "ne") and elem.is_float:
            if left is right:
                return self._is_number(left, op.opcode)
            if op.opcode == "ne":  # naga's != is false if an operand is NaN
                return Expr(f"!({self.operand(left)} == {self.operand(right)})", atom=False)
        return super().infix(op)

    def _is_number(self, value: Value, opcode: str) -> Expr:
        """NaN test by bits, for x == x and x != x: WGSL lets a compiler assume that there are no NaNs."""
        text = self.bare(value)
        if element(value.type) == f16:
            text = f"{self.type_name(vector_type(f32, lanes_of(value.type)))}({text})"
        words = self.type_name(vector_type(u32, lanes_of(value.type)))
        compared = "<=" if opcode == "eq" else ">"
        return Expr(f"(bitcast<{words}>({text}) & {words}(0x7fffffffu)) {compared} {words}(0x7f800000u)", atom=False)

    def shift_count(self, count: Value) -> str:
        if count.constant is not None:
            return f"{int(count.constant)}u"
        if element(count.type) == u32:
            return self.operand(count)
        return f"{self.type_name(vector_type(u32, lanes_of(count.type)))}({self.bare(count)})"

    def negative(self, type_: ValueType, text: str) -> Expr:
        return Expr(f"0u - {text}" if element(type_) == u32 else f"-{text}", atom=False)

    def bitcast(self, value: Value, type_: ValueType) -> Expr:
        if element(value.type) == f16:
            return self._words(value, type_)
        if element(type_) == f16:
            return self._halves(value, type_)
        return Expr(f"bitcast<{self.type_name(type_)}>({self.bare(value)})")

    def _words(self, value: Value, type_: ValueType) -> Expr:
        """fp16 pairs as words. naga lacks the bitcast; packing is exact for fp16 numbers."""
        name = self.named(value)
        words = [f"pack2x16float(vec2<f32>({name}.{pair}))" for pair in ("xy", "zw")[: lanes_of(type_)]]
        text = words[0] if len(words) == 1 else f"vec2<u32>({', '.join(words)})"
        return Expr(text if element(type_) == u32 else f"bitcast<{self.type_name(type_)}>({text})")

    def _halves(self, value: Value, type_: ValueType) -> Expr:
        """Words as fp16 pairs."""
        name = self.named(value)
        words = [f"{name}.x", f"{name}.y"] if isinstance(value.type, Vector) else [name]
        if element(value.type) != u32:
            words = [f"bitcast<u32>({word})" for word in words]
        pairs = [f"vec2<f16>(unpack2x16float({word}))" for word in words]
        return Expr(pairs[0]) if len(pairs) == 1 else self.make_vector(type_, pairs)

    def unroll(self, count: int) -> list[str]:
        return []

    # -- memory ----------------------------------------------------------------------------------------------------

    def _layout(self, pointer: Value) -> _Layout:
        """The declaration of an array that needs the fewest accesses."""
        if pointer in self._layouts:
            return self._layouts[pointer]
        assert isinstance(pointer.type, Pointer)
        elem, length = pointer.type.elem, pointer.type.length
        users = [op for op in self.users(pointer) if op.args[0] is pointer]
        if any(op.opcode == "atomic" for op in users):
            layout = _Layout(u32 if elem == f32 else elem, atomic=True)
        elif pointer.type.space == "private":
            layout = _Layout(elem)
        else:
            layout = _Layout(elem, max((w for w in (2, 4) if _fits(users, w, length)), default=1))
        self._layouts[pointer] = layout
        return layout

    def _stored(self, layout: _Layout) -> str:
        if layout.atomic:
            return f"atomic<{layout.elem}>"
        return self.type_name(layout.elem if layout.width == 1 else Vector(layout.elem, layout.width))

    def private(self, array: Value) -> str:
        assert isinstance(array.type, Pointer)
        return f"var {self.bare(array)}: array<{self.type_name(array.type.elem)}, {array.type.length}>;"

    def load(self, pointer: Value, index: Value, type_: ValueType, align: int) -> Expr:
        layout = self._layout(pointer)
        lanes = lanes_of(type_)
        vectors = layout.width > 1 and lanes % layout.width == 0 and align % layout.width == 0
        if lanes > (layout.width if vectors else 1):
            self.named(index)
        if vectors:
            parts = [self._vector(pointer, index, i) for i in range(0, lanes, layout.width)]
        else:
            parts = [self._element(pointer, index, i) for i in range(lanes)]
        return Expr(parts[0]) if len(parts) == 1 else self.make_vector(type_, parts)

    def _vector(self, pointer: Value, index: Value, add: int) -> str:
        width = self._layout(pointer).width
        if index.constant is not None:
            return f"{self.operand(pointer)}[{(int(index.constant) + add) // width}]"
        at = f"{self.operand(index)} >> {width.bit_length() - 1}u"
        return f"{self.operand(pointer)}[{f'({at}) + {add // width}' if add else at}]"

    def _element(self, pointer: Value, index: Value, add: int) -> str:
        """One element, for reading."""
        layout = self._layout(pointer)
        assert isinstance(pointer.type, Pointer)
        name = self.operand(pointer)
        if layout.atomic:
            text = f"atomicLoad(&{name}[{self.offset(index, add)}])"
            return text if layout.elem == pointer.type.elem else f"bitcast<f32>({text})"
        if layout.width == 1:
            return f"{name}[{self.offset(index, add)}]"
        if index.constant is not None:
            at = int(index.constant) + add
            return f"{name}[{at // layout.width}][{at % layout.width}]"
        at_text = f"({self.offset(index, add)})"
        return f"{name}[{at_text} >> {layout.width.bit_length() - 1}u][{at_text} & {layout.width - 1}]"

    def store(self, pointer: Value, index: Value, value: Value, align: int) -> list[str]:
        layout = self._layout(pointer)
        assert isinstance(pointer.type, Pointer)
        lanes = lanes_of(value.type)
        if lanes == layout.width and not layout.atomic:
            left = self._vector(pointer, index, 0) if lanes > 1 else self._element(pointer, index, 0)
            return [f"{left} = {self.bare(value)};"]
        if lanes > 1:
            self.named(value)
            self.named(index)
        if layout.width > 1:
            halves = [f"{self.bare(value)}.{'xyzw'[i : i + layout.width]}" for i in range(0, lanes, layout.width)]
            return [
                f"{self._vector(pointer, index, i * layout.width)} = {half};" for i, half in enumerate(halves)
            ]  # fmt: skip
        parts = (
            [self.bare(value)] if lanes == 1 else [f"{self.bare(value)}{swizzle(value.type, i)}" for i in range(lanes)]
        )
        if not layout.atomic:
            return [f"{self._element(pointer, index, i)} = {part};" for i, part in enumerate(parts)]
        if layout.elem != pointer.type.elem:
            parts = [f"bitcast<u32>({part})" for part in parts]
        name = self.operand(pointer)
        return [f"atomicStore(&{name}[{self.offset(index, i)}], {part});" for i, part in enumerate(parts)]

    def atomic(self, op: Op) -> Expr:
        pointer, index, value = op.args
        assert isinstance(pointer.type, Pointer)
        kind = op.attrs["kind"]
        place = f"&{self.operand(pointer)}[{self.named(index)}]"
        if pointer.type.elem != f32:
            return Expr(f"{_ATOMICS[kind]}({place}, {self.bare(value)})")
        if kind != "add":
            raise KernelError(f"{self.kernel.name}: expected atomic add of f32, got {kind} ({op.where})")
        # WGSL has no atomics on floats: compare and swap until no other thread has written in between.
        old, seen, term = self.name("old"), self.name("seen"), self.named(value)
        self.emit(
            f"var {old} = atomicLoad({place});",
            "loop {",
            f"    let {seen} = atomicCompareExchangeWeak({place}, {old}, bitcast<u32>(bitcast<f32>({old}) + {term}));",
            f"    if ({seen}.exchanged) {{ break; }}",
            f"    {old} = {seen}.old_value;",
            "}",
        )
        return Expr(f"bitcast<f32>({old})") if op.result in self._users else Expr("")

    # -- threads and subgroups -------------------------------------------------------------------------------------

    def barrier(self, global_memory: bool) -> list[str]:
        return (["storageBarrier();"] if global_memory else []) + ["workgroupBarrier();"]

    def subgroup_barrier(self) -> str:
        # WGSL has none. A workgroup barrier would be wrong if only one subgroup arrives, so the kernel is rejected.
        raise KernelError(f"{self.kernel.name}: WGSL has no subgroup barrier; use a barrier of the workgroup")

    def leaf(self, code: str, axis: int) -> Expr:
        if code == "subgroup_id":
            return Expr(f"i32({self._input('thread_id')} / {self._input('subgroup_size')})")
        name = self._input(code)
        return Expr(f"i32({name}.{'xyz'[axis]})" if code.startswith("group") else f"i32({name})")

    def _input(self, code: str) -> str:
        name, type_ = _INPUTS[code]
        self._inputs[name] = type_
        return name

    def subgroup(self, op: Op) -> Expr:
        value = self.bare(op.args[0])
        match op.opcode:
            case "shuffle":
                return Expr(f"subgroupShuffle({value}, u32({self.bare(op.args[1])}))")
            case "shuffle_xor":
                return Expr(f"subgroupShuffleXor({value}, {op.attrs['mask']}u)")
            case "subgroup_reduce":
                return Expr(f"subgroup{op.attrs['kind'].capitalize()}({value})")
            case _:
                return Expr(f"subgroup{op.opcode.removeprefix('subgroup_').capitalize()}({value})")


def _fits(users: Sequence[Op], width: int, length: int | None) -> bool:
    """True if an array can be declared with vectors of ``width``.

    Some access must be such a vector, and every store must consist of full vectors: reading a single element of a
    vector is safe, but writing one may also write its neighbours.
    """
    if length is not None and length % width:
        return False
    found = False
    for op in users:
        value = op.output if op.opcode == "load" else op.args[2]
        full = lanes_of(value.type) % width == 0 and op.attrs["align"] % width == 0
        if op.opcode == "store" and not full:
            return False
        found = found or full
    return found
