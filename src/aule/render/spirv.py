"""Kernels as SPIR-V 1.5 for Vulkan 1.2 and later.

Buffers are bound at set 0, bindings 0, 1, ... in their order, and the scalars as one uniform block at the binding after
them (the *block* convention of `aule.artifact`).

Drivers are not asked for more than they said they can do, with three decisions worth knowing:

* Infinities are relied upon (masked scores are ``-inf``). ``SignedZeroInfNanPreserve`` is declared where the target
  lists ``VK_KHR_shader_float_controls``; elsewhere declaring it would be invalid, and no driver known to us assumes
  finite numbers by default.
* f32 to f16 must round to nearest even, which Vulkan leaves to the driver. Where the target lists
  ``shaderRoundingModeRTEFloat16`` the mode is declared for the whole kernel; else conversions that go straight to a
  buffer are decorated with the rounding mode, and all others are done in integers.
* The memory model is GLSL450. Cooperative matrices require the Vulkan memory model, so kernels with fragments use that.
"""

from __future__ import annotations

from collections.abc import Callable

from aule.artifact import Artifact, scalar_offsets
from aule.errors import KernelError
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.types import Fragment, Pointer, Ref, Scalar, ValueType, Vector, bool_, element, f16, f32, i32, u32
from aule.render._spirv_indices import Indices
from aule.render._spirv_memory import Memory, access_unit
from aule.render._spirv_module import Module
from aule.render._spirv_ops import (
    BuiltIn,
    Capability,
    CooperativeMatrixOperands,
    Decoration,
    ExecutionMode,
    GroupOperation,
    LoopControl,
    MemoryModel,
    MemorySemantics,
    Scope,
    SelectionControl,
    StorageClass,
)
from aule.render._spirv_ops import Op as Spv
from aule.render._spirv_values import ARITHMETIC, Parts, Registers, Rounding, lanes_of, part_types
from aule.target import Target

FEATURES = {
    Capability.Float16: "shaderFloat16",
    Capability.Float64: "shaderFloat64",
    Capability.Int64: "shaderInt64",
    Capability.Int16: "shaderInt16",
    Capability.Int8: "shaderInt8",
    Capability.StorageBuffer16BitAccess: "storageBuffer16BitAccess",
    Capability.StorageBuffer8BitAccess: "storageBuffer8BitAccess",
    Capability.VulkanMemoryModel: "vulkanMemoryModel",
    Capability.AtomicFloat32AddEXT: "shaderBufferFloat32AtomicAdd",
    Capability.CooperativeMatrixKHR: "cooperativeMatrix",
    Capability.BFloat16TypeKHR: "shaderBFloat16Type",
    Capability.BFloat16CooperativeMatrixKHR: "shaderBFloat16CooperativeMatrix",
}
"""The feature of a Vulkan device that a capability of the code needs; an artifact lists them as its ``extensions``."""

_BUILTINS = {
    "thread_id": BuiltIn.LocalInvocationIndex,
    "lane_id": BuiltIn.SubgroupLocalInvocationId,
    "subgroup_id": BuiltIn.SubgroupId,
    "group_id": BuiltIn.WorkgroupId,
    "group_count": BuiltIn.NumWorkgroups,
}
_REDUCTIONS = {
    "add": {"float": Spv.GroupNonUniformFAdd, "int": Spv.GroupNonUniformIAdd, "uint": Spv.GroupNonUniformIAdd},
    "min": {"float": Spv.GroupNonUniformFMin, "int": Spv.GroupNonUniformSMin, "uint": Spv.GroupNonUniformUMin},
    "max": {"float": Spv.GroupNonUniformFMax, "int": Spv.GroupNonUniformSMax, "uint": Spv.GroupNonUniformUMax},
}
_ATOMICS = {
    "add": {"int": Spv.AtomicIAdd, "uint": Spv.AtomicIAdd},
    "min": {"int": Spv.AtomicSMin, "uint": Spv.AtomicUMin},
    "max": {"int": Spv.AtomicSMax, "uint": Spv.AtomicUMax},
    "and": {"int": Spv.AtomicAnd, "uint": Spv.AtomicAnd},
    "or": {"int": Spv.AtomicOr, "uint": Spv.AtomicOr},
    "xor": {"int": Spv.AtomicXor, "uint": Spv.AtomicXor},
    "exchange": {"int": Spv.AtomicExchange, "uint": Spv.AtomicExchange},
}
_SUBGROUP_OPS = {
    "lane_id", "subgroup_id", "subgroup_barrier", "shuffle", "shuffle_xor", "subgroup_reduce", "subgroup_any",
    "subgroup_all", "fragment_fill", "fragment_load", "fragment_store", "fragment_mma", "fragment_get", "fragment_set",
}  # fmt: skip


def render(kernel: KernelIR, target: Target) -> Artifact:
    """The kernel as a SPIR-V module.

    Parameters
    ----------
    kernel : KernelIR
        Any kernel that keeps the IR's rules.
    target : Target
        The Vulkan device to render for.

    Returns
    -------
    Artifact
        Its ``extensions`` are the names of the Vulkan features that the code needs.

    Raises
    ------
    KernelError
        The kernel asks for something that SPIR-V or the target cannot do.
    """
    return _Renderer(kernel, target).artifact()


class _Renderer:
    """Renders one kernel."""

    def __init__(self, kernel: KernelIR, target: Target) -> None:
        self.kernel = kernel
        self.target = target
        self.m = Module()
        self.r = Registers(self.m)
        self.ids: dict[Value, Parts] = {}
        self.indices = Indices(kernel)
        self._quotients: dict[tuple[Value, int], int] = {}
        self._inputs: dict[tuple[str, int], int] = {}
        opcodes = {op.opcode for op in kernel.walk()}
        self.fragments = any(name.startswith("fragment") for name in opcodes)
        self.subgroups = bool(opcodes & _SUBGROUP_OPS)
        self._check(opcodes)
        coherent = any(op.opcode == "barrier" and op.attrs["global_memory"] for op in kernel.walk())
        self.memory = Memory(
            self.m, self.r, kernel, self.indices, value=self._scalar, quotient=self._quotient,
            coherent=coherent, vulkan_model=self.fragments,
        )  # fmt: skip
        self.indices.spread()
        self.rounding = _roundings(kernel, target)
        self._emitters: dict[str, Callable[[Op], Parts | None]] = {
            name.removeprefix("_op_"): getattr(self, name) for name in dir(self) if name.startswith("_op_")
        }

    def artifact(self) -> Artifact:
        """Render, and describe what was rendered."""
        self._declare_scalars()
        self._declare_inputs()
        self._declare_capabilities()
        self.m.mode(ExecutionMode.LocalSize, self.kernel.workgroup, 1, 1)
        self._block(self.kernel.body)
        code = self.m.assemble(self.kernel.name, MemoryModel.Vulkan if self.fragments else MemoryModel.GLSL450)
        return Artifact(
            language="spirv",
            code=code,
            entry=self.kernel.name,
            params=self.kernel.params,
            workgroup=self.kernel.workgroup,
            shared_bytes=self.kernel.shared_bytes,
            subgroup_size=self.kernel.subgroup_size,
            uses_subgroups=self.subgroups,
            extensions=tuple(sorted(FEATURES[c] for c in self.m.capabilities if c in FEATURES)),
        )

    # -- what the kernel needs -------------------------------------------------------------------------------------

    def _check(self, opcodes: set[str]) -> None:
        if self.subgroups and not self.target.subgroup_size:
            used = ", ".join(sorted(opcodes & _SUBGROUP_OPS))
            raise KernelError(
                f"[spirv] expected a target with subgroup operations for {used}, got {self.target.name} without; "
                "plan the kernel through shared memory"
            )
        if self.fragments and not self.target.matrix_units:
            raise KernelError(
                f"[spirv] expected a target with cooperative matrices, got {self.target.name} without; "
                "plan the kernel without fragments"
            )

    def _declare_capabilities(self) -> None:
        """Capabilities of the types in use. Narrow integers that are only loaded, stored and converted need none."""
        m = self.m
        computed: set[Scalar] = {element(a.type) for a in self.kernel.shared}
        seen: set[Scalar] = {element(v.type) for v in self.kernel.values.values()} | computed
        for op in self.kernel.walk():
            if op.result is None:
                continue
            elem = element(op.result.type)
            seen.add(elem)
            wide = isinstance(op.result.type, Vector) and op.result.type.lanes > 4
            if op.opcode not in ("load", "cast") or wide:
                computed.add(elem)
        for elem in sorted(seen, key=lambda t: t.name):
            if elem.bits == 64:
                m.capability(Capability.Float64 if elem.is_float else Capability.Int64)
            elif elem == f16:
                m.capability(Capability.Float16)
            elif elem in computed and elem.bits in (8, 16) and elem.is_int:
                m.capability(Capability.Int8 if elem.bits == 8 else Capability.Int16)
        if self.fragments:
            m.capability(Capability.CooperativeMatrixKHR, Capability.VulkanMemoryModel)
            m.extension("SPV_KHR_cooperative_matrix")
        if "VK_KHR_shader_float_controls" in self.target.extensions:
            m.capability(Capability.SignedZeroInfNanPreserve)
            m.mode(ExecutionMode.SignedZeroInfNanPreserve, 32)
        if f16 in seen and "shaderRoundingModeRTEFloat16" in self.target.extensions:
            m.capability(Capability.RoundingModeRTE)
            m.mode(ExecutionMode.RoundingModeRTE, 16)

    def _declare_scalars(self) -> None:
        """The uniform block, and a load of each scalar at the head of the kernel."""
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
        """Built-in variables, each loaded once at the head of the kernel."""
        m = self.m
        for op in self.kernel.walk():
            if op.opcode not in _BUILTINS:
                continue
            axis = op.attrs.get("axis", 0)
            if (op.opcode, axis) in self._inputs:
                continue
            three = "axis" in op.attrs
            type_id = m.type(Vector(u32, 3) if three else u32)
            variable = self._inputs.get((op.opcode, -1)) or m.global_variable(StorageClass.Input, type_id)
            if (op.opcode, -1) not in self._inputs:
                self._inputs[op.opcode, -1] = variable
                m.decorate(variable, Decoration.BuiltIn, _BUILTINS[op.opcode])
                m.name(variable, op.opcode)
                if op.opcode in ("lane_id", "subgroup_id"):
                    m.capability(Capability.GroupNonUniform)
            loaded = m.result(Spv.Load, type_id, variable)
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
            return self.r.cast(_register(op.args[0]), elem, (quotients[0],))[0]
        carry = self.indices.carry(op, divisor)
        for left, right in ((0, 1), (1, 0)) if op.opcode == "add" else ((0, 1),):
            # A constant takes the carry with it, and disappears when it is zero.
            constant = parts[right].constant
            if constant is not None:
                rest = constant // divisor + (carry if op.opcode == "add" else -carry)
                if rest == 0:
                    return quotients[left]
                quotients[right], carry = m.constant(elem, rest), 0
                break
        total = m.result(Spv.IAdd if op.opcode == "add" else Spv.ISub, type_id, *quotients)
        return m.result(Spv.IAdd, type_id, total, m.constant(elem, carry)) if carry else total

    # -- operations ------------------------------------------------------------------------------------------------

    def _block(self, block: list[Op]) -> None:
        for op in block:
            try:
                parts = self._emit(op)
            except KernelError as error:
                raise _located(error, op) from None
            if op.result is not None and parts is not None:
                self._define(op.result, parts)

    def _emit(self, op: Op) -> Parts | None:
        if op.opcode in ARITHMETIC:
            assert op.result is not None
            operands = [self.ids[v] for v in op.args]
            return self.r.arithmetic(op.opcode, _register(op.args[0]), _register(op.result), operands)
        if op.opcode in _BUILTINS:
            return (self._inputs[op.opcode, op.attrs.get("axis", 0)],)
        emitter = self._emitters.get(op.opcode)
        if emitter is None:
            raise KernelError(f"[spirv] unknown operation {op.opcode}")
        return emitter(op)

    def _op_const(self, op: Op) -> Parts:
        assert op.result is not None
        return (self.m.constant(element(op.result.type), op.attrs["value"]),)

    def _op_select(self, op: Op) -> Parts:
        assert op.result is not None
        return self.r.select(_register(op.result), _register(op.args[0]), [self._parts(v) for v in op.args])

    def _op_cast(self, op: Op) -> Parts:
        assert op.result is not None
        source, rounding = self._parts(op.args[0]), self.rounding.get(op, "default")
        return self.r.cast(_register(op.args[0]), _register(op.result), source, rounding)

    def _op_bitcast(self, op: Op) -> Parts:
        assert op.result is not None
        return self.r.bitcast(_register(op.args[0]), _register(op.result), self._parts(op.args[0]))

    def _op_make_vector(self, op: Op) -> Parts:
        return self.r.join(element(op.args[0].type), [(self._scalar(v), 1) for v in op.args])

    def _op_splat(self, op: Op) -> Parts:
        assert op.result is not None and isinstance(op.result.type, Vector)
        return self.r.splat(op.result.type, self._scalar(op.args[0]))

    def _op_extract(self, op: Op) -> Parts:
        return (self.r.cut(_register(op.args[0]), self._parts(op.args[0]), op.attrs["lane"], 1),)

    # -- memory and variables --------------------------------------------------------------------------------------

    def _op_private(self, op: Op) -> None:
        assert op.result is not None
        self.memory.declare_array(op.result, op.attrs["name"])

    def _op_load(self, op: Op) -> Parts:
        return self.memory.load(op)

    def _op_store(self, op: Op) -> None:
        self.memory.store(op, self._parts(op.args[2]))

    def _op_atomic(self, op: Op) -> Parts:
        pointer, _, value = op.args
        assert isinstance(pointer.type, Pointer)
        elem, kind, shared = pointer.type.elem, op.attrs["kind"], pointer.type.space == "shared"
        instruction = _ATOMICS.get(kind, {}).get(elem.kind)
        if elem == f32 and kind == "add" and not shared and "VK_EXT_shader_atomic_float" in self.target.extensions:
            self.m.capability(Capability.AtomicFloat32AddEXT)
            self.m.extension("SPV_EXT_shader_atomic_float_add")
            instruction = Spv.AtomicFAddEXT
        if instruction is None:
            raise KernelError(
                f"[spirv] atomic {kind} on {pointer.type} is not possible on {self.target.name}; "
                "use i32 or u32, or another way to add up"
            )
        # The Vulkan model's device scope is a feature of its own; one queue family is all that a kernel runs on.
        device = Scope.QueueFamily if self.fragments else Scope.Device
        scope = self.m.constant(u32, Scope.Workgroup if shared else device)
        address, _ = self.memory.element_address(op)
        relaxed = self.m.constant(u32, 0)
        return (self.m.result(instruction, self.m.type(elem), address, scope, relaxed, self._scalar(value)),)

    def _op_var(self, op: Op) -> None:
        assert op.result is not None and isinstance(op.result.type, Ref)
        types = part_types(op.result.type.target)
        variables = tuple(self.m.local_variable(StorageClass.Function, self.m.type(t)) for t in types)
        self._define(op.result, variables)
        for variable, part in zip(variables, self._parts(op.args[0]), strict=True):
            self.m.emit(Spv.Store, variable, part)

    def _op_get(self, op: Op) -> Parts:
        assert op.result is not None
        types = part_types(_register(op.result))
        variables = self._parts(op.args[0])
        return tuple(self.m.result(Spv.Load, self.m.type(t), v) for t, v in zip(types, variables, strict=True))

    def _op_set(self, op: Op) -> None:
        for variable, part in zip(self._parts(op.args[0]), self._parts(op.args[1]), strict=True):
            self.m.emit(Spv.Store, variable, part)

    # -- control ---------------------------------------------------------------------------------------------------

    def _op_if(self, op: Op) -> None:
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

    def _op_loop(self, op: Op) -> None:
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

    # -- synchronisation and subgroups -----------------------------------------------------------------------------

    def _op_barrier(self, op: Op) -> None:
        self._barrier(Scope.Workgroup, MemorySemantics.UniformMemory if op.attrs["global_memory"] else 0)

    def _op_subgroup_barrier(self, op: Op) -> None:
        self.m.capability(Capability.GroupNonUniform)
        self._barrier(Scope.Subgroup, 0)

    def _barrier(self, scope: int, more: int) -> None:
        semantics = MemorySemantics.AcquireRelease | MemorySemantics.WorkgroupMemory | more
        if self.fragments:
            semantics |= MemorySemantics.MakeAvailable | MemorySemantics.MakeVisible
        within = self.m.constant(u32, scope)
        self.m.emit(Spv.ControlBarrier, within, within, self.m.constant(u32, semantics))

    def _subgroup(self, capability: int, instruction: int, op: Op, *operands: int) -> Parts:
        assert op.result is not None
        self.m.capability(Capability.GroupNonUniform, capability)
        scope = self.m.constant(u32, Scope.Subgroup)
        return (self.m.result(instruction, self.m.type(_register(op.result)), scope, *operands),)

    def _op_shuffle(self, op: Op) -> Parts:
        value, lane = (self._scalar(v) for v in op.args)
        lane = self.m.result(Spv.Bitcast, self.m.type(u32), lane)
        return self._subgroup(Capability.GroupNonUniformShuffle, Spv.GroupNonUniformShuffle, op, value, lane)

    def _op_shuffle_xor(self, op: Op) -> Parts:
        value, mask = self._scalar(op.args[0]), self.m.constant(u32, op.attrs["mask"])
        return self._subgroup(Capability.GroupNonUniformShuffle, Spv.GroupNonUniformShuffleXor, op, value, mask)

    def _op_subgroup_reduce(self, op: Op) -> Parts:
        instruction = _REDUCTIONS[op.attrs["kind"]][element(op.args[0].type).kind]
        value = self._scalar(op.args[0])
        return self._subgroup(Capability.GroupNonUniformArithmetic, instruction, op, GroupOperation.Reduce, value)

    def _op_subgroup_any(self, op: Op) -> Parts:
        return self._subgroup(Capability.GroupNonUniformVote, Spv.GroupNonUniformAny, op, self._scalar(op.args[0]))

    def _op_subgroup_all(self, op: Op) -> Parts:
        return self._subgroup(Capability.GroupNonUniformVote, Spv.GroupNonUniformAll, op, self._scalar(op.args[0]))

    # -- fragments -------------------------------------------------------------------------------------------------

    def _op_fragment_fill(self, op: Op) -> Parts:
        assert op.result is not None
        type_id = self.m.type(_register(op.result))
        return (self.m.result(Spv.CompositeConstruct, type_id, self._scalar(op.args[0])),)

    def _op_fragment_load(self, op: Op) -> Parts:
        return self.memory.fragment_load(op)

    def _op_fragment_store(self, op: Op) -> None:
        self.memory.fragment_store(op, self._parts(op.args[3]))

    def _op_fragment_mma(self, op: Op) -> Parts:
        assert op.result is not None
        signed = (
            CooperativeMatrixOperands.MatrixASignedComponentsKHR,
            CooperativeMatrixOperands.MatrixBSignedComponentsKHR,
            CooperativeMatrixOperands.MatrixCSignedComponentsKHR
            | CooperativeMatrixOperands.MatrixResultSignedComponentsKHR,
        )
        flags = sum(bits for value, bits in zip(op.args, signed, strict=True) if element(value.type).kind == "int")
        operands = [self._scalar(v) for v in op.args] + ([flags] if flags else [])
        return (self.m.result(Spv.CooperativeMatrixMulAddKHR, self.m.type(_register(op.result)), *operands),)

    def _op_fragment_get(self, op: Op) -> Parts:
        type_id = self.m.type(element(op.args[0].type))
        return (self.m.result(Spv.CompositeExtract, type_id, self._scalar(op.args[0]), op.attrs["component"]),)

    def _op_fragment_set(self, op: Op) -> Parts:
        type_id = self.m.type(_register(op.args[0]))
        fragment, new = (self._scalar(v) for v in op.args)
        return (self.m.result(Spv.CompositeInsert, type_id, new, fragment, op.attrs["component"]),)

    # -- what only one language has --------------------------------------------------------------------------------

    def _op_intrinsic(self, op: Op) -> Parts:
        raise KernelError(
            f"[spirv] expected portable operations, got an intrinsic of {op.attrs['language']}; "
            "plan another kernel for Vulkan"
        )

    def _op_comment(self, op: Op) -> None:
        """SPIR-V is binary: nobody would read it."""


def _register(value: Value) -> ValueType:
    assert isinstance(value.type, Scalar | Vector | Fragment)
    return value.type


def _located(error: KernelError, op: Op) -> KernelError:
    """The error with the line of Python that emitted the operation; once, at the innermost operation."""
    if op.where is None or "\n  at " in error.message:
        return error
    return KernelError(f"{error.message}\n  at {op.where}")


def _loop_control(unroll: int) -> tuple[int, ...]:
    if unroll == -1:
        return (LoopControl.Unroll,)
    if unroll == 1:
        return (LoopControl.DontUnroll,)
    return (LoopControl.PartialCount, unroll) if unroll else (LoopControl.None_,)


def _roundings(kernel: KernelIR, target: Target) -> dict[Op, Rounding]:
    """How each conversion to f16 is made to round to nearest even; see the module's head."""
    casts = [op for op in kernel.walk() if op.opcode == "cast" and op.result is not None]
    casts = [op for op in casts if isinstance(op.result, Value) and op.result.type in _halves(op.result)]
    if not casts or "shaderRoundingModeRTEFloat16" in target.extensions:
        return {}
    direct: dict[Value, bool] = {}
    for op in kernel.walk():
        for position, value in enumerate(op.args):
            direct[value] = direct.get(value, True) and position == 2 and _stores_whole(op)
    return {op: "decorate" if op.result is not None and direct.get(op.result) else "software" for op in casts}


def _halves(value: Value) -> tuple[ValueType, ...]:
    """Types that need care when converted to: f16 and vectors of it, but not fragments, which drivers convert."""
    return (f16, Vector(f16, lanes_of(value.type)))


def _stores_whole(op: Op) -> bool:
    """Whether a store writes the parts of its value to a buffer just as they are, as the decoration demands."""
    if op.opcode != "store":
        return False
    pointer, value = op.args[0].type, op.args[2].type
    assert isinstance(pointer, Pointer)
    lanes = lanes_of(value)
    return pointer.space == "global" and access_unit(pointer.elem, lanes, op.attrs["align"]) == min(lanes, 4)
