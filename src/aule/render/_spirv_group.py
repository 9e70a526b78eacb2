"""Operations of more than one thread in SPIR-V: atomics, barriers, subgroup operations and cooperative matrices."""

from __future__ import annotations

from collections.abc import Callable

from aule.errors import KernelError
from aule.ir.kernel import Op, Value
from aule.ir.types import Fragment, Pointer, Scalar, bf16, bool_, element, f32, i32, u32
from aule.render._spirv_memory import Memory
from aule.render._spirv_module import Module
from aule.render._spirv_ops import (
    Capability,
    CooperativeMatrixOperands,
    GroupOperation,
    LoopControl,
    MemorySemantics,
    Scope,
    StorageClass,
)
from aule.render._spirv_ops import Op as Spv
from aule.render._spirv_values import Parts, conversion, register
from aule.target import Target

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


class Group:
    """Emits the operations of more than one thread.

    Parameters
    ----------
    value : callable
        The id of an IR value that has one part.
    vulkan_model : bool
        The module uses the Vulkan memory model.
    """

    def __init__(
        self, module: Module, memory: Memory, target: Target, *, value: Callable[[Value], int], vulkan_model: bool
    ) -> None:
        self._m = module
        self._memory = memory
        self._target = target
        self._value = value
        self._vulkan_model = vulkan_model
        # In the Vulkan memory model, device scope is an optional feature; a kernel runs in one queue family anyway.
        self._device = Scope.QueueFamily if vulkan_model else Scope.Device
        self.emitters: dict[str, Callable[[Op], Parts | None]] = {
            "atomic": self._atomic,
            "barrier": self._workgroup_barrier,
            "device_fence": self._device_fence,
            "subgroup_barrier": self._subgroup_barrier,
            "shuffle": self._shuffle,
            "shuffle_xor": self._shuffle_xor,
            "subgroup_reduce": self._subgroup_reduce,
            "subgroup_any": self._subgroup_any,
            "subgroup_all": self._subgroup_all,
            "fragment_fill": self._fragment_fill,
            "fragment_load": memory.fragment_load,
            "fragment_store": self._fragment_store,
            "fragment_mma": self._fragment_mma,
            "fragment_length": self._fragment_length,
            "fragment_get": self._fragment_get,
            "fragment_set": self._fragment_set,
            "fragment_pack": self._fragment_pack,
        }

    def _atomic(self, op: Op) -> Parts:
        pointer, _, value = op.args
        assert isinstance(pointer.type, Pointer)
        elem, kind, shared = pointer.type.elem, op.attrs["kind"], pointer.type.space == "shared"
        instruction = _ATOMICS.get(kind, {}).get(elem.kind)
        needed = "shaderSharedFloat32AtomicAdd" if shared else "VK_EXT_shader_atomic_float"
        if elem == f32 and kind == "add" and needed in self._target.extensions:
            self._m.capability(Capability.AtomicFloat32AddEXT)
            self._m.extension("SPV_EXT_shader_atomic_float_add")
            instruction = Spv.AtomicFAddEXT
        if instruction is None:
            raise KernelError(
                f"[spirv] atomic {kind} on {pointer.type} is not possible on {self._target.name}; "
                "use i32 or u32, or another way to add up"
            )
        scope = self._m.constant(u32, Scope.Workgroup if shared else self._device)
        address, _ = self._memory.element_address(op)
        # Memory semantics on the atomic are cheaper than barriers before and after it.
        order = self._semantics(MemorySemantics.UniformMemory) if op.attrs["ordered"] else self._m.constant(u32, 0)
        return (self._m.result(instruction, self._m.type(elem), address, scope, order, self._value(value)),)

    # -- synchronisation and subgroups -----------------------------------------------------------------------------

    def _workgroup_barrier(self, op: Op) -> None:
        self._barrier(Scope.Workgroup, MemorySemantics.UniformMemory if op.attrs["global_memory"] else 0)

    def _subgroup_barrier(self, op: Op) -> None:
        self._m.capability(Capability.GroupNonUniform)
        self._barrier(Scope.Subgroup, 0)

    def _barrier(self, scope: int, more: int) -> None:
        within = self._m.constant(u32, scope)
        self._m.emit(Spv.ControlBarrier, within, within, self._semantics(MemorySemantics.WorkgroupMemory | more))

    def _device_fence(self, op: Op) -> None:
        scope = self._m.constant(u32, self._device)
        self._m.emit(Spv.MemoryBarrier, scope, self._semantics(MemorySemantics.UniformMemory))

    def _semantics(self, memory: int) -> int:
        """Acquire and release semantics of a barrier or fence for some kinds of memory."""
        semantics = MemorySemantics.AcquireRelease | memory
        if self._vulkan_model:
            semantics |= MemorySemantics.MakeAvailable | MemorySemantics.MakeVisible
        return self._m.constant(u32, semantics)

    def _subgroup(self, capability: int, instruction: int, op: Op, *operands: int) -> Parts:
        self._m.capability(Capability.GroupNonUniform, capability)
        scope = self._m.constant(u32, Scope.Subgroup)
        return (self._m.result(instruction, self._m.type(register(op.output)), scope, *operands),)

    def _shuffle(self, op: Op) -> Parts:
        value, lane = (self._value(v) for v in op.args)
        lane = self._m.result(Spv.Bitcast, self._m.type(u32), lane)
        return self._subgroup(Capability.GroupNonUniformShuffle, Spv.GroupNonUniformShuffle, op, value, lane)

    def _shuffle_xor(self, op: Op) -> Parts:
        value, mask = self._value(op.args[0]), self._m.constant(u32, op.attrs["mask"])
        return self._subgroup(Capability.GroupNonUniformShuffle, Spv.GroupNonUniformShuffleXor, op, value, mask)

    def _subgroup_reduce(self, op: Op) -> Parts:
        instruction = _REDUCTIONS[op.attrs["kind"]][element(op.args[0].type).kind]
        value = self._value(op.args[0])
        return self._subgroup(Capability.GroupNonUniformArithmetic, instruction, op, GroupOperation.Reduce, value)

    def _subgroup_any(self, op: Op) -> Parts:
        return self._subgroup(Capability.GroupNonUniformVote, Spv.GroupNonUniformAny, op, self._value(op.args[0]))

    def _subgroup_all(self, op: Op) -> Parts:
        return self._subgroup(Capability.GroupNonUniformVote, Spv.GroupNonUniformAll, op, self._value(op.args[0]))

    # -- fragments -------------------------------------------------------------------------------------------------

    def _fragment_fill(self, op: Op) -> Parts:
        type_id, elem = self._m.type(register(op.output)), element(op.output.type)
        return (self._m.result(Spv.CompositeConstruct, type_id, self._component(op.args[0], elem)),)

    def _fragment_store(self, op: Op) -> None:
        self._memory.fragment_store(op, (self._value(op.args[3]),))

    def _fragment_mma(self, op: Op) -> Parts:
        signed = (
            CooperativeMatrixOperands.MatrixASignedComponentsKHR,
            CooperativeMatrixOperands.MatrixBSignedComponentsKHR,
            CooperativeMatrixOperands.MatrixCSignedComponentsKHR
            | CooperativeMatrixOperands.MatrixResultSignedComponentsKHR,
        )
        flags = sum(bits for value, bits in zip(op.args, signed, strict=True) if element(value.type).kind == "int")
        operands = [self._value(v) for v in op.args] + ([flags] if flags else [])
        return (self._m.result(Spv.CooperativeMatrixMulAddKHR, self._m.type(register(op.output)), *operands),)

    def _fragment_length(self, op: Op) -> Parts:
        m = self._m
        length = m.result(Spv.CooperativeMatrixLengthKHR, m.type(u32), m.type(register(op.args[0])))
        return (m.result(Spv.Bitcast, m.type(i32), length),)

    def _fragment_get(self, op: Op) -> Parts:
        elem = element(op.args[0].type)
        got = self._m.result(Spv.CompositeExtract, self._m.type(elem), self._value(op.args[0]), op.attrs["component"])
        if op.output.type == elem:
            return (got,)
        return (self._m.result(Spv.Bitcast, self._m.type(register(op.output)), got),)

    def _fragment_set(self, op: Op) -> Parts:
        fragment, new = op.args
        part = self._component(new, element(fragment.type))
        type_id = self._m.type(register(fragment))
        return (self._m.result(Spv.CompositeInsert, type_id, part, self._value(fragment), op.attrs["component"]),)

    def _fragment_pack(self, op: Op) -> Parts:
        type_id, elem = self._m.type(register(op.output)), element(op.output.type)
        parts = [self._component(value, elem) for value in op.args]
        fragment = self._m.result(Spv.CompositeConstruct, type_id, parts[0])
        for i, part in enumerate(parts[1:], 1):
            fragment = self._m.result(Spv.CompositeInsert, type_id, part, fragment, i)
        return (fragment,)

    def fragment_cast(self, source: Fragment, result: Fragment, fragment: int) -> int:
        """Convert a fragment. f32 is rounded before it becomes bf16, because NVIDIA's OpFConvert of matrices truncates.

        Its conversion of matrices to f16 rounds to nearest.
        """
        if result.elem == bf16 and source.elem == f32:
            fragment = self._round_components(source, fragment)
        return self._m.result(conversion(source.elem, result.elem), self._m.type(result), fragment)

    def _round_components(self, type_: Fragment, fragment: int) -> int:
        """Round each f32 component to nearest even with 8 bits, so that truncation to bf16 is exact."""
        m, word, flag = self._m, self._m.type(u32), self._m.type(bool_)
        type_id, single = m.type(type_), m.type(f32)
        variable = m.local_variable(StorageClass.Function, type_id)
        counter = m.local_variable(StorageClass.Function, word)
        m.emit(Spv.Store, variable, fragment)
        m.emit(Spv.Store, counter, m.constant(u32, 0))
        # The driver chooses the number of components per lane, and knows it when it compiles: it can unroll.
        length = m.result(Spv.CooperativeMatrixLengthKHR, word, type_id)
        header, check, body, onward, merge = (m.id() for _ in range(5))
        m.emit(Spv.Branch, header)
        m.label(header)
        m.emit(Spv.LoopMerge, merge, onward, LoopControl.Unroll)
        m.emit(Spv.Branch, check)
        m.label(check)
        index = m.result(Spv.Load, word, counter)
        m.emit(Spv.BranchConditional, m.result(Spv.ULessThan, flag, index, length), body, merge)
        m.label(body)
        address = m.result(Spv.AccessChain, m.pointer(StorageClass.Function, single), variable, index)
        bits = m.result(Spv.Bitcast, word, m.result(Spv.Load, single, address))
        odd = m.result(Spv.ShiftRightLogical, word, bits, m.constant(u32, 16))
        odd = m.result(Spv.BitwiseAnd, word, odd, m.constant(u32, 1))
        rounded = m.result(Spv.IAdd, word, m.result(Spv.IAdd, word, bits, odd), m.constant(u32, 0x7FFF))
        # Rounding could turn a NaN into infinity or zero by a carry; setting the top mantissa bit cannot.
        magnitude = m.result(Spv.BitwiseAnd, word, bits, m.constant(u32, 0x7FFFFFFF))
        is_nan = m.result(Spv.UGreaterThan, flag, magnitude, m.constant(u32, 0x7F800000))
        quiet = m.result(Spv.BitwiseOr, word, bits, m.constant(u32, 0x400000))
        rounded = m.result(Spv.Select, word, is_nan, quiet, rounded)
        rounded = m.result(Spv.BitwiseAnd, word, rounded, m.constant(u32, 0xFFFF0000))
        m.emit(Spv.Store, address, m.result(Spv.Bitcast, single, rounded))
        m.emit(Spv.Branch, onward)
        m.label(onward)
        m.emit(Spv.Store, counter, m.result(Spv.IAdd, word, index, m.constant(u32, 1)))
        m.emit(Spv.Branch, header)
        m.label(merge)
        return m.result(Spv.Load, type_id, variable)

    def _component(self, value: Value, elem: Scalar) -> int:
        """A scalar as an element of a fragment. bf16 exists only in fragments; registers hold u16."""
        number = self._value(value)
        return number if value.type == elem else self._m.result(Spv.Bitcast, self._m.type(elem), number)
