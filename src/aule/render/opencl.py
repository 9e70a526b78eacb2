"""Renderer for OpenCL C 1.2 and later; extensions are optional.

Without ``cl_khr_fp16`` (PoCL, NVIDIA) fp16 is only a storage format: ``vload_half`` and ``vstore_half`` convert at the
access, and a register holds a ``float`` with a value that fp16 can represent. No legalisation pass is needed for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from aule.artifact import Artifact
from aule.errors import KernelError
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.passes import Legal, legalise
from aule.ir.types import Pointer, Scalar, ValueType, Vector, bf16, bool_, element, f16, f32, f64, i32, lanes_of
from aule.ir.verify import verify
from aule.render.clike import Expr
from aule.render.clike_c import CPrinter
from aule.target import Target

_SPACES = {"global": "__global", "shared": "__local", "private": "__private"}
_ATOMICS = {"exchange": "xchg"}
_PRAGMAS = frozenset({"cl_khr_fp16", "cl_khr_fp64", "cl_khr_subgroups"})
_SUBGROUPS = frozenset({"cl_khr_subgroups", "cl_khr_subgroup_shuffle", "cl_intel_subgroups"})
_MASKS = {8: "char", 16: "short", 32: "int", 64: "long"}


def render(kernel: KernelIR, target: Target) -> Artifact:
    """Print a kernel as OpenCL C for ``target``; a KernelError if the target lacks something it needs."""
    verify(kernel)
    legal = legalise(kernel, Legal(soft=frozenset({bf16}), max_lanes=16))
    verify(legal)
    return _OpenCL(legal, target).artifact(kernel.params)


class _OpenCL(CPrinter):
    language = "opencl"
    type_names: ClassVar[dict[str, str]] = CPrinter.type_names | {"f64": "double"}
    functions: ClassVar[dict[str, str]] = {
        "exp2": "exp2", "log2": "log2", "sqrt": "sqrt", "rsqrt": "rsqrt", "floor": "floor", "sin": "sin", "cos": "cos",
        "mulhi": "mul_hi",
    }  # fmt: skip

    def __init__(self, kernel: KernelIR, target: Target) -> None:
        super().__init__(kernel, target)
        self._soft_half = not target.f16
        self._parameters: list[str] = []
        if self.uses(f64) and not target.f64:
            raise KernelError(f"{kernel.name}: it uses f64, {target.name} has none")

    # -- module ----------------------------------------------------------------------------------------------------

    def declare_parameters(self) -> None:
        for param in self.kernel.params:
            value = self.kernel.values[param.name]
            name = self.name(param.name)
            self.let(value, name)
            if isinstance(value.type, Pointer):
                const = "const " if param.access == "read" else ""
                self._parameters.append(f"__global {const}{self._memory_type(value.type)}* restrict {name}")
            else:
                self._parameters.append(f"const {self.type_name(element(value.type))} {name}")

    def declare_shared(self, array: Value) -> None:
        assert isinstance(array.type, Pointer)
        # Without the extension, only pointers to ``half`` are allowed, so the array is one of ushort.
        soft = self._soft_half and array.type.elem == f16
        elem = "ushort" if soft else self.type_name(array.type.elem)
        align = max(16, self.widest(array))
        name = self.bare(array)
        self.arrays.append(f"__local {elem} {name}[{array.type.length}] __attribute__((aligned({align})));")
        if soft:
            self.let(array, f"(__local half*){name}", atom=False)

    def module(self) -> str:
        head = [f"// {self.kernel.name}, rendered by aule for {self.target.name}."]
        # Other extensions need no pragma, and some compilers warn about one.
        head += [f"#pragma OPENCL EXTENSION {e} : enable" for e in self.extensions() if e in _PRAGMAS]
        attributes = [f"__attribute__((reqd_work_group_size({self.kernel.workgroup}, 1, 1)))"]
        if self.kernel.subgroup_size and "cl_intel_required_subgroup_size" in self.target.extensions:
            attributes.append(f"__attribute__((intel_reqd_sub_group_size({self.kernel.subgroup_size})))")
        parameters = ",\n    ".join(self._parameters)
        head += ["", *(f"{text}\n" for text in self.helpers.values())]
        return "\n".join(
            [*head, *attributes, f"__kernel void {self.entry}(\n    {parameters})\n{{"]
            + [f"    {line}" for line in self.arrays]
            + [*self.lines, "}", ""]
        )

    def extensions(self) -> Iterable[str]:
        if self.uses(f16) and not self._soft_half:
            yield "cl_khr_fp16"
        if self.uses(f64):
            yield "cl_khr_fp64"
        if self.uses_subgroups:
            yield from (e for e in self.target.extensions if e in _SUBGROUPS)

    # -- types and values ------------------------------------------------------------------------------------------

    def type_name(self, type_: ValueType) -> str:
        elem = element(type_)
        if elem == f16 and self._soft_half and isinstance(type_, Scalar | Vector):
            type_ = f32 if isinstance(type_, Scalar) else Vector(f32, type_.lanes)
        if isinstance(type_, Vector) and type_.elem == bool_:
            # Comparing vectors gives integers with all bits set for true; they are held as int.
            type_ = Vector(i32, type_.lanes)
        return super().type_name(type_)

    def _memory_type(self, pointer: Pointer) -> str:
        return "half" if pointer.elem == f16 else self.type_name(pointer.elem)

    def literal(self, value: float | int | bool, type_: Scalar) -> Expr:
        if type_ == f16 and self._soft_half:  # a float with the value rounded to fp16
            with np.errstate(over="ignore"):
                return super().literal(float(np.float16(value)), f32)
        expr = super().literal(value, type_)
        return Expr(f"(half){expr.text}") if type_ == f16 else expr

    def narrowed(self, type_: ValueType, text: str, atom: bool = False) -> Expr:
        if element(type_) == f16 and self._soft_half:
            return self._round(type_, text)
        return super().narrowed(type_, text, atom)

    def absolute(self, type_: ValueType, text: str) -> Expr:
        if element(type_).is_float:
            return Expr(f"fabs({text})")
        # abs() of an int is unsigned in OpenCL.
        return self._convert(type_, f"abs({text})") if element(type_).is_signed else Expr(text, atom=False)

    def fused(self, type_: ValueType, a: str, b: str, c: str) -> Expr:
        if element(type_) == f64:
            return Expr(f"fma({a}, {b}, {c})")
        self.helpers["FMA"] = (
            "// Fused where the hardware fuses; a software fma() costs more than the rounding is worth.\n"
            "#ifdef FP_FAST_FMAF\n#define FMA fma\n#else\n#define FMA mad\n#endif"
        )
        return self.narrowed(type_, f"FMA({a}, {b}, {c})", atom=True)

    def expression(self, op: Op) -> Expr:
        if op.opcode == "exp2" and element(op.output.type) == f32 and not self.target.software:
            # The hardware instruction: within 2 ulp on NVIDIA (ex2.approx), AMD and Intel.
            return self.call("native_exp2", op.args)
        return super().expression(op)

    def infix(self, op: Op) -> Expr:
        if isinstance(op.output.type, Vector) and op.output.type.elem == bool_:
            return self._vector_logic(op)
        return super().infix(op)

    def _vector_logic(self, op: Op) -> Expr:
        left, right = op.args
        elem = element(left.type)
        if elem == bool_:
            symbol = {"and": "&", "or": "|", "xor": "^", "eq": "==", "ne": "!="}[op.opcode]
            return Expr(f"{self.operand(left)} {symbol} {self.operand(right)}", atom=False)
        expr = super().infix(op)
        bits = 32 if elem == f16 and self._soft_half else elem.bits
        assert isinstance(op.output.type, Vector)
        return expr if bits == 32 else Expr(f"convert_int{op.output.type.lanes}({expr.text})")

    def invert(self, type_: ValueType, text: str) -> Expr:
        return Expr(f"~{text}", False) if isinstance(type_, Vector) else super().invert(type_, text)

    def select(self, condition: Value, yes: Value, no: Value) -> Expr:
        if isinstance(condition.type, Scalar):
            return super().select(condition, yes, no)
        elem = element(yes.type)
        bits = 32 if elem == bool_ or (elem == f16 and self._soft_half) else elem.bits
        mask = self.bare(condition)
        if bits != 32:
            mask = f"convert_{_MASKS[bits]}{condition.type.lanes}({mask})"  # type: ignore[union-attr]
        return Expr(f"select({self.bare(no)}, {self.bare(yes)}, {mask})")

    def cast(self, value: Value, type_: ValueType, result: Value) -> Expr:
        source, target, text = element(value.type), element(type_), self.bare(value)
        if self._soft_half and target == f16:
            wide = text if source == f32 else self._convert(type_, text).text
            if source == f32 and self._only_stored(result):
                # The store rounds.
                return self._text[value]
            return self._round(type_, wide)
        if self._soft_half and source == f16 and target == f32:
            return self._text[value]
        if source == bool_ and isinstance(type_, Vector):
            return self._convert(type_, f"-{self.operand(value)}")
        return self._convert(type_, text, operand=self.operand(value))

    def _convert(self, type_: ValueType, text: str, operand: str | None = None) -> Expr:
        if isinstance(type_, Vector):
            return Expr(f"convert_{self.type_name(type_)}({text})")
        return Expr(f"({self.type_name(type_)}){operand or f'({text})'}")

    def bitcast(self, value: Value, type_: ValueType) -> Expr:
        text = self.typed(value)
        assert isinstance(value.type, Scalar | Vector) and isinstance(type_, Scalar | Vector)
        if self._soft_half and element(value.type) == f16:
            text = f"{self._half_helper('half_bits', value.type)}({text})"
        if self._soft_half and element(type_) == f16:
            suffix = str(type_.lanes) if isinstance(type_, Vector) else ""
            return Expr(f"{self._half_helper('bits_half', type_)}(as_ushort{suffix}({text}))")
        return Expr(f"as_{self.type_name(type_)}({text})")

    def make_vector(self, type_: ValueType, parts: Sequence[str]) -> Expr:
        if element(type_) == bool_:
            parts = [f"({part}) ? -1 : 0" for part in parts]
        return Expr(f"({self.type_name(type_)})({', '.join(parts)})")

    def extract(self, vector: Value, lane: int) -> Expr:
        expr = super().extract(vector, lane)
        return Expr(f"{expr.text} != 0", atom=False) if element(vector.type) == bool_ else expr

    # -- fp16 as storage -------------------------------------------------------------------------------------------

    def _round(self, type_: ValueType, text: str) -> Expr:
        return Expr(f"{self._half_helper('round_half', type_)}({text})")

    def _only_stored(self, value: Value) -> bool:
        return all(
            op.opcode == "store" and op.args[2] is value and op.args[0].type.space != "private"  # type: ignore[union-attr]
            for op in self.users(value)
        )

    def _half_helper(self, kind: str, type_: ValueType) -> str:
        """Add a conversion function between float and fp16, of the shape of ``type_``, to the source; its name."""
        n = str(type_.lanes) if isinstance(type_, Vector) else ""
        a = "a" if n else ""
        name = f"{kind}{n}"
        if kind == "round_half":
            bits, back = self._half_helper("half_bits", type_), self._half_helper("bits_half", type_)
            text = f"float{n} {name}(float{n} x) {{ return {back}({bits}(x)); }}"
        elif kind == "half_bits":
            text = (
                f"ushort{n} {name}(float{n} x)\n{{\n    ushort{n} bits;\n"
                f"    vstore{a}_half{n}_rte(x, 0, (__private half*)&bits);\n    return bits;\n}}"
            )
        else:
            text = f"float{n} {name}(ushort{n} bits) {{ return vload{a}_half{n}(0, (__private half*)&bits); }}"
        self.helpers[name] = text
        return name

    # -- memory ----------------------------------------------------------------------------------------------------

    def load(self, pointer: Value, index: Value, type_: ValueType, align: int) -> Expr:
        assert isinstance(pointer.type, Pointer)
        lanes = lanes_of(type_)
        aligned = align % lanes == 0
        if pointer.type.space == "private":
            if lanes == 1:
                return Expr(self.element_of(pointer, index))
            self.named(index)
            return self.make_vector(type_, [self.element_of(pointer, index, i) for i in range(lanes)])
        if pointer.type.elem == f16 and self._soft_half:
            if lanes == 1:
                return Expr(f"vload_half({self.bare(index)}, {self.bare(pointer)})")
            return Expr(f"vload{'a' if aligned else ''}_half{lanes}(0, {self.address(pointer, index)})")
        if lanes == 1:
            return Expr(self.element_of(pointer, index))
        if aligned:
            return Expr(
                f"*({self._space(pointer, True)} {self.type_name(type_)}*)({self.address(pointer, index)})", False
            )
        return Expr(f"vload{lanes}(0, {self.address(pointer, index)})")

    def store(self, pointer: Value, index: Value, value: Value, align: int) -> list[str]:
        assert isinstance(pointer.type, Pointer) and isinstance(value.type, Scalar | Vector)
        lanes = lanes_of(value.type)
        aligned = align % lanes == 0
        if pointer.type.space == "private":
            parts = [self.bare(value)]
            if lanes > 1:
                self.named(value)
                self.named(index)
                parts = [self.extract(value, i).text for i in range(lanes)]
            return [f"{self.element_of(pointer, index, i)} = {part};" for i, part in enumerate(parts)]
        if pointer.type.elem == f16 and self._soft_half:
            if lanes == 1:
                return [f"vstore_half_rte({self.bare(value)}, {self.bare(index)}, {self.bare(pointer)});"]
            name = f"vstore{'a' if aligned else ''}_half{lanes}_rte"
            return [f"{name}({self.bare(value)}, 0, {self.address(pointer, index)});"]
        if lanes == 1:
            return [f"{self.element_of(pointer, index)} = {self.bare(value)};"]
        if aligned:
            left = f"*({self._space(pointer)} {self.type_name(value.type)}*)({self.address(pointer, index)})"
            return [f"{left} = {self.bare(value)};"]
        return [f"vstore{lanes}({self.bare(value)}, 0, {self.address(pointer, index)});"]

    def atomic(self, op: Op) -> Expr:
        pointer, index, value = op.args
        assert isinstance(pointer.type, Pointer)
        kind = op.attrs["kind"]
        if pointer.type.elem == f32 and kind == "add":
            function = self._float_add(_SPACES[pointer.type.space])
            return Expr(f"{function}({self.address(pointer, index)}, {self.bare(value)})")
        return Expr(f"atomic_{_ATOMICS.get(kind, kind)}({self.address(pointer, index)}, {self.bare(value)})")

    def _float_add(self, space: str) -> str:
        name = f"atomic_add_float{space.replace('__', '_')}"
        self.helpers[name] = (
            f"float {name}(volatile {space} float* p, float x)\n{{\n"
            f"    uint seen = *(volatile {space} uint*)p, old;\n"
            f"    do {{\n        old = seen;\n"
            f"        seen = atomic_cmpxchg((volatile {space} uint*)p, old, as_uint(as_float(old) + x));\n"
            f"    }} while (seen != old);\n    return as_float(old);\n}}"
        )
        return name

    def _space(self, pointer: Value, reading: bool = False) -> str:
        assert isinstance(pointer.type, Pointer)
        return _SPACES[pointer.type.space] + (" const" if reading else "")

    # -- work-items and subgroups ----------------------------------------------------------------------------------

    def barrier(self, global_memory: bool) -> list[str]:
        return [f"barrier(CLK_LOCAL_MEM_FENCE{' | CLK_GLOBAL_MEM_FENCE' if global_memory else ''});"]

    def subgroup_barrier(self) -> str:
        return "sub_group_barrier(CLK_LOCAL_MEM_FENCE);"

    def leaf(self, code: str, axis: int) -> Expr:
        function = {
            "thread_id": "get_local_id(0)",
            "group_id": f"get_group_id({axis})",
            "group_count": f"get_num_groups({axis})",
            "lane_id": "get_sub_group_local_id()",
            "subgroup_id": "get_sub_group_id()",
        }[code]
        return Expr(f"(int){function}")

    def subgroup(self, op: Op) -> Expr:
        value = self.bare(op.args[0])
        match op.opcode:
            case "shuffle":
                return Expr(f"{self._shuffle('shuffle')}({value}, {self.bare(op.args[1])})")
            case "shuffle_xor":
                return Expr(f"{self._shuffle('shuffle_xor')}({value}, {op.attrs['mask']})")
            case "subgroup_reduce":
                return Expr(f"sub_group_reduce_{op.attrs['kind']}({value})")
            case _:
                return Expr(f"sub_group_{op.opcode.removeprefix('subgroup_')}({value}) != 0", atom=False)

    def _shuffle(self, name: str) -> str:
        if "cl_khr_subgroup_shuffle" in self.target.extensions:
            return f"sub_group_{name}"
        if "cl_intel_subgroups" in self.target.extensions:
            return f"intel_sub_group_{name}"
        raise KernelError(f"{self.kernel.name}: it shuffles, {self.target.name} has no extension for that")
