"""Memory of a SPIR-V kernel: variables for buffers, shared and private arrays, and accesses to them.

A buffer may be bound to several variables (*views*), one for each width of its accesses: an aligned load of four
elements reads from an array of vectors of four. Eight 16-bit elements are loaded as four words, the widest load.

Shared memory has views too if the target lists VK_KHR_workgroup_memory_explicit_layout: for each width there is a block
with the arrays that are accessed in it, at the offsets of `KernelIR.shared_offsets`, and all blocks alias each other.
It is all or nothing. If a view needs 8- or 16-bit elements that the target does not allow in such blocks, or the target
lacks the extension, then an array that is accessed in vectors is declared as an array of the widest of them, and a
single element is accessed through an access chain into a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from aule.artifact import Param
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.types import (
    Fragment,
    Pointer,
    Scalar,
    ValueType,
    Vector,
    element,
    i32,
    lanes_of,
    u32,
    vector_type,
    with_element,
)
from aule.render._spirv_indices import Indices
from aule.render._spirv_module import Module
from aule.render._spirv_ops import (
    Capability,
    CooperativeMatrixLayout,
    Decoration,
    MemoryAccess,
    StorageClass,
)
from aule.render._spirv_ops import Op as Spv
from aule.render._spirv_values import Parts, Registers, Rounding, register_element
from aule.target import Target

_BUFFER_ACCESS = {8: Capability.StorageBuffer8BitAccess, 16: Capability.StorageBuffer16BitAccess}
_BLOCK_ACCESS = {
    8: Capability.WorkgroupMemoryExplicitLayout8BitAccessKHR,
    16: Capability.WorkgroupMemoryExplicitLayout16BitAccessKHR,
}
_LAYOUTS = {"row": CooperativeMatrixLayout.RowMajorKHR, "column": CooperativeMatrixLayout.ColumnMajorKHR}


@dataclass
class _Access:
    """A variable to index, and the type of its elements."""

    variable: int
    storage: int
    unit: Scalar | Vector
    """Type of the variable's elements."""
    width: int
    """Elements of the IR's pointer per element of the variable."""
    flags: tuple[int, ...]
    """Memory operands of loads and stores."""
    member: int | None = None
    """Index of the member, if the variable is a block."""


@dataclass(frozen=True)
class MemoryRules:
    """Rules of a target and kernel for declaring and accessing memory."""

    coherent: bool
    """Writes to buffers must be visible to other threads of the kernel."""
    vulkan_model: bool
    """The module uses the Vulkan memory model."""
    computable: frozenset[Scalar]
    """Narrow types that registers can hold; others are loaded at most four at a time and held in 32 bits."""
    half_rounding: Rounding
    """Rounding of f16 in stores if registers cannot hold it."""
    blocks: frozenset[int]
    """Element sizes in bits that blocks of shared memory may have (`block_widths`)."""


def access_unit(elem: Scalar, lanes: int, align: int) -> int:
    """Elements per access: as many as the alignment allows, up to 16 bytes."""
    return min(gcd(lanes, align), max(128 // elem.bits, 1))


def block_widths(target: Target) -> frozenset[int]:
    """Element sizes in bits that blocks of shared memory may have; empty if the target has no explicit layout."""
    if "VK_KHR_workgroup_memory_explicit_layout" not in target.extensions:
        return frozenset()
    narrow = {bits for bits in _BLOCK_ACCESS if f"workgroupMemoryExplicitLayout{bits}BitAccess" in target.extensions}
    return frozenset({32, 64} | narrow)


class Memory:
    """Declares a kernel's memory in a module and emits accesses.

    Parameters
    ----------
    value : callable
        The id of a scalar IR value.
    quotient : callable
        The id of an index divided by a power of two that was requested in ``indices``.
    """

    def __init__(
        self, module: Module, registers: Registers, kernel: KernelIR, indices: Indices, rules: MemoryRules, *,
        value: Callable[[Value], int], quotient: Callable[[Value, int], int],
    ) -> None:  # fmt: skip
        self._m = module
        self._r = registers
        self._indices = indices
        self._rules = rules
        self._value = value
        self._quotient = quotient
        self._blocks = False
        """Shared memory has views, in blocks of an explicit layout."""
        self._views: dict[tuple[Value, int], _Access] = {}
        self._arrays: dict[Value, _Access] = {}
        self._widths: dict[Value, int] = {}
        buffers = [p for p in kernel.params if p.kind == "buffer"]
        views: dict[Value, dict[int, None]] = {kernel.values[p.name]: {} for p in buffers}
        ops = [op for op in kernel.walk() if op.args and isinstance(op.args[0].type, Pointer)]
        self._blocks = bool(rules.blocks) and all(
            element(self._view(element(op.args[0].type), self._unit(op))).bits in rules.blocks
            for op in ops
            if self._is_shared(op.args[0])
        )
        if self._blocks:
            views.update({array: {} for array in kernel.shared})
        self._plan(ops, views)
        for binding, param in enumerate(buffers):
            buffer = kernel.values[param.name]
            self._declare_buffer(param, buffer, binding, sorted(views[buffer]))
        if self._blocks:
            self._declare_blocks({array: views[array] for array in kernel.shared}, kernel.shared_offsets)
        else:
            for array in kernel.shared:
                self.declare_array(array, array.hint)

    # -- planning --------------------------------------------------------------------------------------------------

    def _plan(self, ops: list[Op], views: dict[Value, dict[int, None]]) -> None:
        """Choose the views of memory that has views and the widths of other arrays; request the quotients they need."""
        for op in ops:
            pointer = op.args[0]
            if pointer not in views:
                self._widths[pointer] = max(self._widths.get(pointer, 1), min(self._unit(op), 4))
        for op in ops:
            pointer = op.args[0]
            if pointer not in views and not self._divisible(op, self._widths[pointer]):
                self._widths[pointer] = 1
        for op in ops:
            pointer, index = op.args[0], op.args[1]
            width = self._widths.get(pointer, 1)
            if pointer in views:
                width = self._unit(op)
                views[pointer][width] = None
            if width > 1:
                self._indices.want(index, width)

    def _divisible(self, op: Op, width: int) -> bool:
        """True if an operation can work on an array of vectors of a width."""
        if op.opcode == "atomic":
            return width == 1
        if op.opcode.startswith("fragment"):
            aligned = self._indices.remainder(op.args[1], width) == 0
            return width == 1 or (aligned and op.args[2].constant is not None and op.args[2].constant % width == 0)
        return True

    def _unit(self, op: Op) -> int:
        """Width of the view that an operation uses."""
        if op.opcode.startswith("fragment") and self._blocks and self._is_shared(op.args[0]):
            # A view of vectors tells the driver the alignment of the matrix.
            widest = access_unit(element(op.args[0].type), 8, 8)
            return next(width for width in (8, 4, 2, 1) if width <= widest and self._divisible(op, width))
        if op.opcode not in ("load", "store"):
            return 1
        type_ = op.args[2].type if op.opcode == "store" else op.result.type if op.result is not None else None
        assert isinstance(type_, Scalar | Vector)
        unit = access_unit(element(type_), lanes_of(type_), op.attrs["align"])
        return unit if element(type_) in self._rules.computable else min(unit, 4)

    @staticmethod
    def _is_shared(pointer: Value) -> bool:
        return isinstance(pointer.type, Pointer) and pointer.type.space == "shared"

    @staticmethod
    def _view(elem: Scalar, unit: int) -> Scalar | Vector:
        """The type for accesses of ``unit`` elements; vectors have at most four lanes."""
        return vector_type(elem, unit) if unit <= 4 else vector_type(u32, unit * elem.bits // 32)

    # -- declarations ----------------------------------------------------------------------------------------------

    def _declare_buffer(self, param: Param, value: Value, binding: int, units: list[int]) -> None:
        elem = element(value.type)
        written = param.access != "read"
        coherent = self._rules.coherent and written
        flags = self._nonprivate if coherent else ()
        for unit in units:
            view = self._view(elem, unit)
            if element(view).bits in _BUFFER_ACCESS:
                self._m.capability(_BUFFER_ACCESS[element(view).bits])
            array = self._m.runtime_array(self._m.type(view), elem.bytes * unit)
            block = self._m.block([array], [0])
            variable = self._m.global_variable(StorageClass.StorageBuffer, block)
            self._m.name(variable, param.name if unit == 1 else f"{param.name}_x{unit}")
            self._m.decorate(variable, Decoration.DescriptorSet, 0)
            self._m.decorate(variable, Decoration.Binding, binding)
            if not written:
                self._m.decorate_member(block, 0, Decoration.NonWritable)
            elif coherent and not self._rules.vulkan_model:
                self._m.decorate(variable, Decoration.Coherent)
            # Views of one buffer alias each other, which matters only if the kernel writes to it.
            aliased = written and len(units) > 1
            self._m.decorate(variable, Decoration.Aliased if aliased else Decoration.Restrict)
            self._views[value, unit] = _Access(variable, StorageClass.StorageBuffer, view, unit, flags, 0)

    def _declare_blocks(self, views: dict[Value, dict[int, None]], offsets: dict[Value, int]) -> None:
        """Declare all shared arrays, in one block per width of accesses."""
        for unit in sorted({unit for units in views.values() for unit in units}):
            self._m.capability(Capability.WorkgroupMemoryExplicitLayoutKHR)
            self._m.extension("SPV_KHR_workgroup_memory_explicit_layout")
            arrays = [array for array in views if unit in views[array]]
            members = [self._block_member(array, unit) for array in arrays]
            block = self._m.block(members, [offsets[array] for array in arrays])
            variable = self._m.global_variable(StorageClass.Workgroup, block)
            self._m.name(variable, "shared" if unit == 1 else f"shared_x{unit}")
            self._m.decorate(variable, Decoration.Aliased)
            for i, array in enumerate(arrays):
                self._m.member_name(block, i, array.hint)
                view = self._view(element(array.type), unit)
                self._views[array, unit] = _Access(variable, StorageClass.Workgroup, view, unit, self._nonprivate, i)

    @property
    def _nonprivate(self) -> tuple[int, ...]:
        """Memory operands of accesses to memory that other threads use."""
        return (MemoryAccess.NonPrivatePointer,) if self._rules.vulkan_model else ()

    def _block_member(self, array: Value, unit: int) -> int:
        """The type of a shared array in the block for a width."""
        pointer = array.type
        assert isinstance(pointer, Pointer) and pointer.length is not None
        view = self._view(pointer.elem, unit)
        if element(view).bits in _BLOCK_ACCESS:
            self._m.capability(_BLOCK_ACCESS[element(view).bits])
        # A partial last vector does not overlap the next array: arrays are aligned to 16 bytes.
        return self._m.strided_array(self._m.type(view), -(-pointer.length // unit), pointer.elem.bytes * unit)

    def declare_array(self, array: Value, name: str) -> None:
        """Declare a shared or private array without views."""
        pointer = array.type
        assert isinstance(pointer, Pointer) and pointer.length is not None
        width = self._widths.get(array, 1)
        unit = vector_type(pointer.elem, width)
        type_ = self._m.array(self._m.type(unit), -(-pointer.length // width))
        if pointer.space == "shared":
            variable = self._m.global_variable(StorageClass.Workgroup, type_)
            self._arrays[array] = _Access(variable, StorageClass.Workgroup, unit, width, self._nonprivate)
        else:
            variable = self._m.local_variable(StorageClass.Function, type_)
            self._arrays[array] = _Access(variable, StorageClass.Function, unit, width, ())
        self._m.name(variable, name)

    # -- access ----------------------------------------------------------------------------------------------------

    def load(self, op: Op) -> Parts:
        assert isinstance(op.output.type, Scalar | Vector)
        access, elem = self._access(op), element(op.output.type)
        wide = register_element(elem, self._rules.computable)
        pieces: list[tuple[int, int]] = []
        for address, type_, lanes in self._addresses(op, access, lanes_of(op.output.type)):
            loaded = self._m.result(Spv.Load, self._m.type(type_), address, *access.flags)
            if access.width > 4:
                parts = self._r.bitcast(access.unit, Vector(elem, access.width), (loaded,))
                pieces += [(part, 4) for part in parts]
            else:
                (piece,) = self._r.cast(type_, with_element(type_, wide), (loaded,)) if wide != elem else (loaded,)
                pieces.append((piece, lanes))
        return self._r.join(wide, pieces)

    def store(self, op: Op, parts: Parts) -> None:
        type_ = op.args[2].type
        assert isinstance(type_, Scalar | Vector)
        access, start = self._access(op), 0
        wide = with_element(type_, register_element(element(type_), self._rules.computable))
        for address, unit, lanes in self._addresses(op, access, lanes_of(type_)):
            if access.width > 4:
                group = parts[start // 4 : (start + lanes) // 4]
                (stored,) = self._r.bitcast(Vector(element(type_), lanes), access.unit, group)
            else:
                stored = self._r.cut(wide, parts, start, lanes)
                if wide != type_:
                    (stored,) = self._r.cast(
                        vector_type(element(wide), lanes), unit, (stored,), self._rules.half_rounding
                    )
            self._m.emit(Spv.Store, address, stored, *access.flags)
            start += lanes

    def element_address(self, op: Op) -> tuple[int, int]:
        """Address of the element at ``op.args[1]``, for atomics and fragments, and the width of its view."""
        access = self._access(op)
        index = self._value(op.args[1]) if access.width == 1 else self._quotient(op.args[1], access.width)
        return self._chain(access, access.unit, index), access.width

    def fragment_load(self, op: Op) -> Parts:
        assert isinstance(op.output.type, Fragment)
        address, layout, stride, flags = self._matrix(op)
        type_id = self._m.type(op.output.type)
        return (self._m.result(Spv.CooperativeMatrixLoadKHR, type_id, address, layout, stride, *flags),)

    def fragment_store(self, op: Op, parts: Parts) -> None:
        address, layout, stride, flags = self._matrix(op)
        self._m.emit(Spv.CooperativeMatrixStoreKHR, address, parts[0], layout, stride, *flags)

    def _matrix(self, op: Op) -> tuple[int, int, int, tuple[int, ...]]:
        address, width = self.element_address(op)
        stride = self._value(op.args[2]) if width == 1 else self._m.constant(i32, op.args[2].constant // width)
        return address, self._m.constant(u32, _LAYOUTS[op.attrs["layout"]]), stride, self._access(op).flags

    def _access(self, op: Op) -> _Access:
        pointer = op.args[0]
        return self._arrays.get(pointer) or self._views[pointer, self._unit(op)]

    def _addresses(self, op: Op, access: _Access, lanes: int) -> list[tuple[int, ValueType, int]]:
        """Addresses of consecutive accesses, each with its type and number of elements."""
        index, width = op.args[1], access.width
        if width == 1:
            first, count = self._value(index), 1
        elif self._unit(op) >= width:
            first, count = self._quotient(index, width), width
        else:
            return self._components(op, access, lanes)
        return [
            (self._chain(access, access.unit, self._plus(index, first, i)), access.unit, count)
            for i in range(lanes // count)
        ]

    def _components(self, op: Op, access: _Access, lanes: int) -> list[tuple[int, ValueType, int]]:
        """Addresses of single elements in an array of vectors."""
        index, width, elem = op.args[1], access.width, element(access.unit)
        known = 0 if op.attrs["align"] % width == 0 else self._indices.remainder(index, width)
        quotient = self._quotient(index, width)
        result: list[tuple[int, ValueType, int]] = []
        for lane in range(lanes):
            if known is not None:
                row = self._plus(index, quotient, (known + lane) // width)
                column = self._m.constant(i32, (known + lane) % width)
            elif self._unit(op) == lanes:
                # The lanes of an aligned vector are in one element of the array.
                row, source = quotient, self._indices.remainder_source(index, width)
                column = self._plus(index, self._binary(Spv.BitwiseAnd, index, self._value(source), width - 1), lane)
            else:
                at = self._plus(index, self._value(index), lane)
                row = self._binary(Spv.ShiftRightArithmetic, index, at, width.bit_length() - 1)
                column = self._binary(Spv.BitwiseAnd, index, at, width - 1)
            result.append((self._chain(access, elem, row, column), elem, 1))
        return result

    def _chain(self, access: _Access, unit: Scalar | Vector, *indices: int) -> int:
        if access.member is not None:
            indices = (self._m.constant(i32, access.member), *indices)
        pointer = self._m.pointer(access.storage, self._m.type(unit))
        return self._m.result(Spv.AccessChain, pointer, access.variable, *indices)

    def _plus(self, index: Value, number: int, offset: int) -> int:
        return self._binary(Spv.IAdd, index, number, offset) if offset else number

    def _binary(self, opcode: int, index: Value, number: int, operand: int) -> int:
        type_ = element(index.type)
        return self._m.result(opcode, self._m.type(type_), number, self._m.constant(type_, operand))
