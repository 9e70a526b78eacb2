"""Emits the body of a kernel in SPIR-V: values, variables and structured control flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aule.artifact import scalar_offsets
from aule.errors import KernelError
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.ops import MATRIX_OPS, SUBGROUP_OPS
from aule.ir.types import Fragment, Ref, Scalar, Vector, bf16, bool_, element, f16, f64, i32, u32, with_element
from aule.render._spirv_group import Group
from aule.render._spirv_indices import Indices
from aule.render._spirv_memory import Memory, MemoryRules, block_widths
from aule.render._spirv_module import Module
from aule.render._spirv_ops import (
    BuiltIn,
    Capability,
    Decoration,
    ExecutionMode,
    LoopControl,
    MemoryModel,
    SelectionControl,
    StorageClass,
)
from aule.render._spirv_ops import Op as Spv
from aule.render._spirv_values import ARITHMETIC, Parts, Registers, Rounding, part_types, register, register_element
from aule.target import Target

RTE_HALF = "shaderRoundingModeRTEFloat16"
"""Entry of ``Target.extensions``: a kernel can declare that conversions to f16 round to nearest even."""

_NARROW = {
    ("float", 16): Capability.Float16,
    ("int", 16): Capability.Int16,
    ("uint", 16): Capability.Int16,
    ("int", 8): Capability.Int8,
    ("uint", 8): Capability.Int8,
}
_BUILTINS = {
    "thread_id": BuiltIn.LocalInvocationIndex,
    "lane_id": BuiltIn.SubgroupLocalInvocationId,
    "subgroup_id": BuiltIn.SubgroupId,
    "group_id": BuiltIn.WorkgroupId,
    "group_count": BuiltIn.NumWorkgroups,
}


class KernelRenderer:
    """Renders one kernel that `spirv.render` has legalised.

    Parameters
    ----------
    computable : frozenset of Scalar
        8- and 16-bit types that support arithmetic, not only loads, stores and conversions.
    roundings : mapping
        How conversions to f16 are rounded; those not in it use a plain ``OpFConvert``.
    """

    def __init__(
        self, kernel: KernelIR, target: Target, computable: frozenset[Scalar], roundings: Mapping[Op, Rounding]
    ) -> None:
        self.kernel = kernel
        self.target = target
        self.m = Module()
        self.r = Registers(self.m, kernel.arithmetic)
        self.ids: dict[Value, Parts] = {}
        self.indices = Indices(kernel)
        self._quotients: dict[tuple[Value, int], int] = {}
        self._inputs: dict[tuple[str, int], int] = {}
        opcodes = {op.opcode for op in kernel.walk()}
        self.fragments = bool(opcodes & MATRIX_OPS)
        self.subgroups = self.fragments or bool(opcodes & SUBGROUP_OPS)
        self._check(opcodes)
        coherent = "device_fence" in opcodes or any(
            op.attrs.get(x) for op in kernel.walk() for x in ("global_memory", "ordered")
        )
        rules = MemoryRules(
            coherent=coherent, vulkan_model=self.fragments, computable=computable,
            half_rounding="default" if RTE_HALF in target.extensions else "decorate", blocks=block_widths(target),
        )  # fmt: skip
        self.memory = Memory(
            self.m, self.r, kernel, self.indices, rules, value=self._scalar, quotient=self._quotient
        )  # fmt: skip
        self.indices.spread()
        self._computable = computable
        self._roundings = roundings
        self.group = Group(self.m, self.memory, target, value=self._scalar, vulkan_model=self.fragments)
        self._low_words: dict[tuple[Value, object], Parts] = {}
        """Low words of products whose high words were computed in the current block."""
        self._emitters: dict[str, Callable[[Op], Parts | None]] = {
            **self.group.emitters,
            "const": self._const,
            "select": self._select,
            "cast": self._cast,
            "bitcast": self._bitcast,
            "make_vector": self._make_vector,
            "splat": self._splat,
            "extract": self._extract,
            "private": self._private,
            "load": self.memory.load,
            "store": self._store,
            "var": self._var,
            "get": self._get,
            "set": self._set,
            "if": self._if,
            "loop": self._loop,
            "dot_pairs": self._dot_pairs,
            "e4m3_halves": self._e4m3_halves,
            "intrinsic": self._intrinsic,
            "comment": lambda op: None,
        }

    def code(self) -> bytes:
        """The words of the module."""
        self._declare_scalars()
        self._declare_inputs()
        self._declare_capabilities()
        self.m.mode(ExecutionMode.LocalSize, self.kernel.workgroup, 1, 1)
        self._block(self.kernel.body)
        return self.m.assemble(self.kernel.name, MemoryModel.Vulkan if self.fragments else MemoryModel.GLSL450)

    # -- declarations ----------------------------------------------------------------------------------------------

    def _check(self, opcodes: set[str]) -> None:
        if self.subgroups and not self.target.subgroup_size:
            used = ", ".join(sorted(opcodes & (SUBGROUP_OPS | MATRIX_OPS)))
            raise KernelError(
                f"[spirv] expected a target with subgroup operations for {used}, got {self.target.name} without; "
                "plan the kernel through shared memory"
            )
        if self.fragments and not self.target.matrix_units:
            raise KernelError(
                f"[spirv] expected a target with cooperative matrices, got {self.target.name} without; "
                "plan the kernel without fragments"
            )
        halves = any(op.result is not None and element(op.result.type) == bf16 for op in self.kernel.walk())
        if halves and "VK_KHR_shader_bfloat16" not in self.target.extensions:
            raise KernelError(
                f"[spirv] expected a target with bf16 matrices (VK_KHR_shader_bfloat16), got {self.target.name} "
                "without; plan the kernel for f16 fragments"
            )

    def _declare_capabilities(self) -> None:
        """Declare the capabilities of the types in use. Narrow types without arithmetic need none here."""
        m = self.m
        seen = self.kernel.elements()
        for elem in sorted(seen, key=lambda t: t.name):
            if elem == f64 and not self.target.f64:
                raise KernelError(f"[spirv] expected a target with f64, got {self.target.name} without; compute in f32")
            if elem.bits == 64:
                m.capability(Capability.Float64 if elem.is_float else Capability.Int64)
            elif elem == bf16:
                m.capability(Capability.BFloat16TypeKHR)
                if self.fragments:
                    m.capability(Capability.BFloat16CooperativeMatrixKHR)
                m.extension("SPV_KHR_bfloat16")
            elif elem in self._computable:
                m.capability(_NARROW[elem.kind, elem.bits])
        if self.fragments:
            m.capability(Capability.CooperativeMatrixKHR, Capability.VulkanMemoryModel)
            m.extension("SPV_KHR_cooperative_matrix")
        if "VK_KHR_shader_float_controls" in self.target.extensions:
            m.capability(Capability.SignedZeroInfNanPreserve)
            m.mode(ExecutionMode.SignedZeroInfNanPreserve, 32)
        if f16 in seen and RTE_HALF in self.target.extensions:
            m.capability(Capability.RoundingModeRTE)
            m.mode(ExecutionMode.RoundingModeRTE, 16)

    def _declare_scalars(self) -> None:
        """Declare the uniform block, and load each scalar at the start of the kernel."""
        scalars = [p for p in self.kernel.params if p.kind == "scalar"]
        if not scalars:
            return
        m, values = self.m, [self.kernel.values[p.name] for p in scalars]
        block = m.block([m.type(element(v.type)) for v in values], scalar_offsets(scalars)[0])
        variable = m.global_variable(StorageClass.Uniform, block)
        m.name(variable, "scalars")
        m.decorate(variable, Decoration.DescriptorSet, 0)
        m.decorate(variable, Decoration.Binding, len(self.kernel.params) - len(scalars))
        for i, (param, value) in enumerate(zip(scalars, values, strict=True)):
            type_id = m.type(element(value.type))
            m.member_name(block, i, param.name)
            pointer = m.pointer(StorageClass.Uniform, type_id)
            address = m.result(Spv.AccessChain, pointer, variable, m.constant(i32, i))
            self._define(value, (m.result(Spv.Load, type_id, address),))

    def _declare_inputs(self) -> None:
        """Declare the built-in variables, and load each once at the start of the kernel."""
        m, variables = self.m, dict[str, int]()
        for op in self.kernel.walk():
            axis = op.attrs.get("axis", 0)
            if op.opcode not in _BUILTINS or (op.opcode, axis) in self._inputs:
                continue
            three = "axis" in op.attrs
            type_id = m.type(Vector(u32, 3) if three else u32)
            if op.opcode not in variables:
                variable = variables[op.opcode] = m.global_variable(StorageClass.Input, type_id)
                m.decorate(variable, Decoration.BuiltIn, _BUILTINS[op.opcode])
                m.name(variable, op.opcode)
                if op.opcode in ("lane_id", "subgroup_id"):
                    m.capability(Capability.GroupNonUniform)
            loaded = m.result(Spv.Load, type_id, variables[op.opcode])
            if three:
                loaded = m.result(Spv.CompositeExtract, m.type(u32), loaded, axis)
            self._inputs[op.opcode, axis] = m.result(Spv.Bitcast, m.type(i32), loaded)

    # -- values ----------------------------------------------------------------------------------------------------

    def _scalar(self, value: Value) -> int:
        return self._parts(value)[0]

    def _parts(self, value: Value) -> Parts:
        found = self.ids.get(value)
        if found is None:
            raise KernelError(f"[spirv] {value!r} is used before it is computed")
        return found

    def _define(self, value: Value, parts: Parts) -> None:
        self.ids[value] = parts
        if value.hint:
            for part in parts:
                self.m.name(part, value.hint)
        for divisor in self.indices.wanted.get(value, ()):
            if value.constant is None:
                self._quotients[value, divisor] = self._divide(value, divisor)

    def _quotient(self, value: Value, divisor: int) -> int:
        """``value / divisor``, rounded down."""
        if value.constant is not None:
            return self.m.constant(element(value.type), value.constant // divisor)
        return self._quotients[value, divisor]

    def _divide(self, value: Value, divisor: int) -> int:
        m, elem = self.m, element(value.type)
        type_id, shift = m.type(elem), divisor.bit_length() - 1
        op = value.op
        parts = self.indices.parts(op, divisor) if op is not None else None
        if op is None or parts is None:
            return m.result(Spv.ShiftRightArithmetic, type_id, self._scalar(value), m.constant(elem, shift))
        if op.opcode == "shl":
            count = op.args[1].constant - shift
            return m.result(Spv.ShiftLeftLogical, type_id, self._scalar(op.args[0]), m.constant(elem, count))
        if op.opcode == "mul":
            other = self._scalar(op.args[1] if parts[0] is op.args[0] else op.args[0])
            if parts[0].constant == divisor:
                return other
            return m.result(Spv.IMul, type_id, self._quotient(parts[0], divisor), other)
        quotients = [self._quotient(part, divisor) for part in parts]
        if op.opcode == "cast":
            return self.r.cast(register(op.args[0]), elem, (quotients[0],))[0]
        carry = self.indices.carry(op, divisor)
        for left, right in ((0, 1), (1, 0)) if op.opcode == "add" else ((0, 1),):
            # The carry is added to a constant, which is dropped if it becomes zero.
            constant = parts[right].constant
            if constant is not None:
                adjusted = constant // divisor + (carry if op.opcode == "add" else -carry)
                if adjusted == 0:
                    return quotients[left]
                quotients[right], carry = m.constant(elem, adjusted), 0
                break
        total = m.result(Spv.IAdd if op.opcode == "add" else Spv.ISub, type_id, *quotients)
        return m.result(Spv.IAdd, type_id, total, m.constant(elem, carry)) if carry else total

    # -- operations ------------------------------------------------------------------------------------------------

    def _block(self, block: list[Op]) -> None:
        self._low_words.clear()  # results of other blocks may not dominate this one
        for op in block:
            try:
                parts = self._emit(op)
            except KernelError as error:
                raise _located(error, op) from None
            if op.result is not None and parts is not None:
                self._define(op.result, parts)
        self._low_words.clear()

    def _emit(self, op: Op) -> Parts | None:
        if op.opcode in ARITHMETIC:
            operands = [self._parts(v) for v in op.args]
            if op.opcode in ("mul", "mulhi") and element(op.output.type) == u32 and self.target.int64:
                found = self._product(op, operands)
                if found is not None:
                    return found
            return self.r.arithmetic(op.opcode, register(op.args[0]), register(op.output), operands)
        if op.opcode in _BUILTINS:
            return (self._inputs[op.opcode, op.attrs.get("axis", 0)],)
        emitter = self._emitters.get(op.opcode)
        if emitter is None:
            raise KernelError(f"[spirv] unknown operation {op.opcode}")
        return emitter(op)

    def _product(self, op: Op, operands: list[Parts]) -> Parts | None:
        """Low or high word of a u32 product if both are needed, the high one first; None if the low one is not ready.

        NVIDIA's compiler emits one multiplication for a 64-bit product, but two for OpUMulExtended and OpIMul.
        """
        left, right = op.args
        same = right.op.args[0] if right.op is not None and right.op.opcode == "splat" else right
        key = (left, same if same.constant is None else same.constant)
        if op.opcode == "mul":
            return self._low_words.get(key)
        self.m.capability(Capability.Int64)
        self._low_words[key], high = self.r.products(register(op.output), operands)
        return high

    def _const(self, op: Op) -> Parts:
        return (self.m.constant(element(op.output.type), op.attrs["value"]),)

    def _select(self, op: Op) -> Parts:
        return self.r.select(register(op.output), register(op.args[0]), [self._parts(v) for v in op.args])

    def _cast(self, op: Op) -> Parts:
        source, rounding = self._parts(op.args[0]), self._roundings.get(op, "default")
        if isinstance(op.output.type, Fragment):
            fragment = op.args[0].type
            assert isinstance(fragment, Fragment)
            return (self.group.fragment_cast(fragment, op.output.type, source[0]),)
        before, after = register(op.args[0]), register(op.output)
        before = with_element(before, register_element(element(before), self._computable))
        after = with_element(after, register_element(element(after), self._computable))
        producer = op.args[0].op
        return self.r.cast(before, after, source, rounding, producer is not None and producer.opcode == "small")

    def _bitcast(self, op: Op) -> Parts:
        return self.r.bitcast(register(op.args[0]), register(op.output), self._parts(op.args[0]))

    def _make_vector(self, op: Op) -> Parts:
        return self.r.join(element(op.args[0].type), [(self._scalar(v), 1) for v in op.args])

    def _splat(self, op: Op) -> Parts:
        assert isinstance(op.output.type, Vector)
        return self.r.splat(op.output.type, self._scalar(op.args[0]))

    def _extract(self, op: Op) -> Parts:
        return (self.r.cut(register(op.args[0]), self._parts(op.args[0]), op.attrs["lane"], 1),)

    # -- memory and variables --------------------------------------------------------------------------------------

    def _private(self, op: Op) -> None:
        self.memory.declare_array(op.output, op.attrs["name"])

    def _store(self, op: Op) -> None:
        self.memory.store(op, self._parts(op.args[2]))

    def _var(self, op: Op) -> None:
        assert isinstance(op.output.type, Ref)
        types = part_types(op.output.type.target)
        variables = tuple(self.m.local_variable(StorageClass.Function, self.m.type(t)) for t in types)
        self._define(op.output, variables)
        for variable, part in zip(variables, self._parts(op.args[0]), strict=True):
            self.m.emit(Spv.Store, variable, part)

    def _get(self, op: Op) -> Parts:
        types = part_types(register(op.output))
        variables = self._parts(op.args[0])
        return tuple(self.m.result(Spv.Load, self.m.type(t), v) for t, v in zip(types, variables, strict=True))

    def _set(self, op: Op) -> None:
        for variable, part in zip(self._parts(op.args[0]), self._parts(op.args[1]), strict=True):
            self.m.emit(Spv.Store, variable, part)

    # -- control ---------------------------------------------------------------------------------------------------

    def _if(self, op: Op) -> None:
        m = self.m
        then, merge = m.id(), m.id()
        otherwise = m.id() if op.blocks[1] else merge
        m.emit(Spv.SelectionMerge, merge, SelectionControl.None_)
        m.emit(Spv.BranchConditional, self._scalar(op.args[0]), then, otherwise)
        m.label(then)
        self._block(op.blocks[0])
        m.emit(Spv.Branch, merge)
        if op.blocks[1]:
            m.label(otherwise)
            self._block(op.blocks[1])
            m.emit(Spv.Branch, merge)
        m.label(merge)

    def _loop(self, op: Op) -> None:
        m = self.m
        index: Value = op.attrs["index"]
        elem = element(index.type)
        type_id, flag = m.type(elem), m.type(bool_)
        start, stop, step = (self._scalar(v) for v in op.args)
        header, check, body, onward, merge = (m.id() for _ in range(5))
        counter = m.local_variable(StorageClass.Function, type_id)
        m.emit(Spv.Store, counter, start)
        m.emit(Spv.Branch, header)
        m.label(header)
        m.emit(Spv.LoopMerge, merge, onward, *_loop_control(op.attrs["unroll"]))
        m.emit(Spv.Branch, check)
        m.label(check)
        current = m.result(Spv.Load, type_id, counter)
        goes_on = m.result(Spv.SLessThan if elem.is_signed else Spv.ULessThan, flag, current, stop)
        m.emit(Spv.BranchConditional, goes_on, body, merge)
        m.label(body)
        self._define(index, (current,))
        self._block(op.blocks[0])
        m.emit(Spv.Branch, onward)
        m.label(onward)
        m.emit(Spv.Store, counter, m.result(Spv.IAdd, type_id, current, step))
        m.emit(Spv.Branch, header)
        m.label(merge)

    # -- unsupported operations ------------------------------------------------------------------------------------

    def _dot_pairs(self, op: Op) -> Parts:
        raise KernelError("[spirv] expected no products of packed pairs, got dot_pairs; multiply in f32")

    def _e4m3_halves(self, op: Op) -> Parts:
        raise KernelError("[spirv] expected no conversion of e4m3, got e4m3_halves; shift the bits into place")

    def _intrinsic(self, op: Op) -> Parts:
        raise KernelError(
            f"[spirv] expected portable operations, got an intrinsic of {op.attrs['language']}; "
            "plan another kernel for Vulkan"
        )


def _located(error: KernelError, op: Op) -> KernelError:
    """Add the line of Python that emitted an operation to its error, unless an inner operation has."""
    if op.where is None or "\n  at " in error.message:
        return error
    return KernelError(f"{error.message}\n  at {op.where}")


def _loop_control(unroll: int) -> tuple[int, ...]:
    if unroll == -1:
        return (LoopControl.Unroll,)
    # A loop without a hint must not be unrolled: kernels give a hint where it helps, and NVIDIA's compiler would
    # unroll the loop over the keys until it spills.
    return (LoopControl.PartialCount, unroll) if unroll > 1 else (LoopControl.DontUnroll,)
