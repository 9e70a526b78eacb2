"""Renderer for Metal Shading Language. fp16 is native; bf16 is held as bits, because ``bfloat`` needs Metal 3.1.

Buffers are ``[[buffer(0)]]`` and up; all scalars are one ``constant`` struct after them. `_msl_fragment` prints matrix
fragments.
"""

from __future__ import annotations

from typing import ClassVar

from aule.artifact import Artifact
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.passes import Legal, legalise
from aule.ir.types import Pointer, Scalar, ValueType, Vector, bf16, bool_, element, f16, f32
from aule.ir.verify import verify, verify_structure
from aule.render._msl_fragment import FragmentPrinter
from aule.render.clike import Expr, swizzle
from aule.target import Target

_LEAVES = {
    "thread_id": ("uint", "thread_index_in_threadgroup"),
    "group_id": ("uint3", "threadgroup_position_in_grid"),
    "group_count": ("uint3", "threadgroups_per_grid"),
    "lane_id": ("uint", "thread_index_in_simdgroup"),
    "subgroup_id": ("uint", "simdgroup_index_in_threadgroup"),
}


def render(kernel: KernelIR, target: Target) -> Artifact:
    """Print a kernel as Metal Shading Language for ``target``; a KernelError if it needs what Metal lacks (f64)."""
    verify(kernel)
    soft = frozenset({bf16})
    legal = legalise(kernel, Legal(soft=soft, max_lanes=4))
    # Barriers are not checked again: a vote through shared memory is uniform, but the analysis cannot prove it.
    verify_structure(legal, soft)
    return _Msl(legal, target).artifact(kernel.params)


class _Msl(FragmentPrinter):
    language = "msl"
    # Fast functions may assume finite numbers, but exp2(-inf) must be 0.
    functions: ClassVar[dict[str, str]] = {
        "exp2": "precise::exp2", "log2": "precise::log2", "sqrt": "precise::sqrt", "rsqrt": "precise::rsqrt",
        "floor": "floor", "sin": "precise::sin", "cos": "precise::cos", "mulhi": "mulhi",
    }  # fmt: skip

    def __init__(self, kernel: KernelIR, target: Target) -> None:
        super().__init__(kernel, target)
        self._parameters: list[str] = []
        self._inputs: dict[str, str] = {}

    # -- module ----------------------------------------------------------------------------------------------------

    def declare_parameters(self) -> None:
        scalars = []
        for param in self.kernel.params:
            value = self.kernel.values[param.name]
            name = self.name(param.name)
            if isinstance(value.type, Pointer):
                self.let(value, name)
                const = "const " if param.access == "read" else ""
                slot = len(self._parameters)
                self._parameters.append(
                    f"device {const}{self.type_name(value.type.elem)}* {name} [[buffer({slot})]]"
                )  # fmt: skip
            else:
                self.let(value, f"params.{name}")
                scalars.append(f"    {self.type_name(element(value.type))} {name};")
        if scalars:
            self.helpers["Params"] = "\n".join(["struct Params {", *scalars, "};"])
            self._parameters.append(f"constant Params& params [[buffer({len(self._parameters)})]]")

    def declare_shared(self, array: Value) -> None:
        assert isinstance(array.type, Pointer) and array.type.length is not None
        name, elem = self.bare(array), self.type_name(array.type.elem)
        lanes = self.widest(array) // array.type.elem.bytes
        if lanes <= 1:
            self.arrays.append(f"threadgroup {elem} {name}[{array.type.length}];")
            return
        # Declared as an array of vectors for its alignment.
        storage = self.name(f"{name}_storage")
        self.arrays.append(f"threadgroup {elem}{lanes} {storage}[{-(-array.type.length // lanes)}];")
        self.arrays.append(f"threadgroup {elem}* const {name} = (threadgroup {elem}*){storage};")

    def module(self) -> str:
        inputs = [f"{type_} {name} [[{name}]]" for name, type_ in self._inputs.items()]
        arguments = ",\n    ".join([*self._parameters, *inputs])
        lines = [f"// {self.kernel.name}, rendered by aule for {self.target.name}."]
        lines += ["#include <metal_stdlib>", "using namespace metal;", ""]
        lines += [f"{text}\n" for text in self.helpers.values()]
        lines += [f"kernel void {self.entry}(\n    {arguments})\n{{", *(f"    {line}" for line in self.arrays)]
        return "\n".join([*lines, *self.lines, "}", ""])

    # -- values ----------------------------------------------------------------------------------------------------

    def literal(self, value: float | int | bool, type_: Scalar) -> Expr:
        expr = super().literal(value, type_)
        return Expr(f"half({expr.text})") if type_ == f16 else expr

    def absolute(self, type_: ValueType, text: str) -> Expr:
        if element(type_).is_float:
            return Expr(f"fabs({text})")
        return self.narrowed(type_, f"abs({text})", atom=True) if element(type_).is_signed else Expr(text, atom=False)

    def expression(self, op: Op) -> Expr:
        if op.opcode in self.functions and element(op.output.type) == f16:
            # Functions of half have no precise form.
            return self.call(self.functions[op.opcode].removeprefix("precise::"), op.args)
        return super().expression(op)

    def select(self, condition: Value, yes: Value, no: Value) -> Expr:
        if isinstance(condition.type, Vector) and element(yes.type) == bool_:
            # Metal's select() takes only numbers.
            mask = self.operand(condition)
            return Expr(f"({mask} & {self.operand(yes)}) | (!{mask} & {self.operand(no)})", atom=False)
        return super().select(condition, yes, no)

    def bitcast(self, value: Value, type_: ValueType) -> Expr:
        return Expr(f"as_type<{self.type_name(type_)}>({self.typed(value)})")

    # -- memory ----------------------------------------------------------------------------------------------------

    def load(self, pointer: Value, index: Value, type_: ValueType, align: int) -> Expr:
        if not isinstance(type_, Vector):
            return Expr(self.element_of(pointer, index))
        if self._as_vector(pointer, type_, align):
            return Expr(
                f"*({self.space(pointer)} const {self.type_name(type_)}*)({self.address(pointer, index)})", False
            )
        self.named(index)
        return self.make_vector(type_, [self.element_of(pointer, index, i) for i in range(type_.lanes)])

    def store(self, pointer: Value, index: Value, value: Value, align: int) -> list[str]:
        if not isinstance(value.type, Vector):
            return [f"{self.element_of(pointer, index)} = {self.bare(value)};"]
        if self._as_vector(pointer, value.type, align):
            left = f"*({self.space(pointer)} {self.type_name(value.type)}*)({self.address(pointer, index)})"
            return [f"{left} = {self.bare(value)};"]
        self.named(index)
        name = self.named(value)
        lanes = range(value.type.lanes)
        return [f"{self.element_of(pointer, index, i)} = {name}{swizzle(value.type, i)};" for i in lanes]

    def _as_vector(self, pointer: Value, type_: Vector, align: int) -> bool:
        """True if an access can be one vector access; such pointer casts would keep private arrays out of registers."""
        assert isinstance(pointer.type, Pointer)
        return pointer.type.space != "private" and align % type_.lanes == 0

    def atomic(self, op: Op) -> Expr:
        pointer, index, value = op.args
        assert isinstance(pointer.type, Pointer)
        elem, kind, space = pointer.type.elem, op.attrs["kind"], self.space(pointer)
        if elem == f32:
            return Expr(f"{self._float_add(space)}({self.address(pointer, index)}, {self.bare(value)})")
        place = f"({space} atomic_{self.type_name(elem)}*)({self.address(pointer, index)})"
        function = "atomic_exchange_explicit" if kind == "exchange" else f"atomic_fetch_{kind}_explicit"
        return Expr(f"{function}({place}, {self.bare(value)}, memory_order_relaxed)")

    def _float_add(self, space: str) -> str:
        # atomic_float needs Metal 3 and device memory; compare-and-swap of words works everywhere.
        name = f"atomic_add_float_{space}"
        self.helpers[name] = (
            f"float {name}({space} float* p, float x)\n{{\n"
            f"    {space} atomic_uint* word = ({space} atomic_uint*)p;\n"
            "    uint old = atomic_load_explicit(word, memory_order_relaxed);\n"
            "    while (!atomic_compare_exchange_weak_explicit(\n"
            "        word, &old, as_type<uint>(as_type<float>(old) + x),\n"
            "        memory_order_relaxed, memory_order_relaxed)) {\n"
            "    }\n    return as_type<float>(old);\n}"
        )
        return name

    # -- threads and simdgroups ------------------------------------------------------------------------------------

    def barrier(self, global_memory: bool) -> list[str]:
        flags = "mem_flags::mem_threadgroup" + (" | mem_flags::mem_device" if global_memory else "")
        return [f"threadgroup_barrier({flags});"]

    def subgroup_barrier(self) -> str:
        return "simdgroup_barrier(mem_flags::mem_threadgroup);"

    def leaf(self, code: str, axis: int) -> Expr:
        type_, name = _LEAVES[code]
        self._inputs[name] = type_
        return Expr(f"int({name}.{'xyz'[axis]})" if type_ == "uint3" else f"int({name})")

    def subgroup(self, op: Op) -> Expr:
        value = self.bare(op.args[0])
        match op.opcode:
            case "shuffle":
                return Expr(f"simd_shuffle({value}, ushort({self.bare(op.args[1])}))")
            case "shuffle_xor":
                return Expr(f"simd_shuffle_xor({value}, ushort({op.attrs['mask']}))")
            case "subgroup_reduce":
                return Expr(f"simd_{ {'add': 'sum'}.get(op.attrs['kind'], op.attrs['kind']) }({value})")
            case _:
                return Expr(f"simd_{op.opcode.removeprefix('subgroup_')}({value})")
