"""Memory of a SPIR-V kernel: which variables stand for buffers, shared and private arrays, and how they are accessed.

A buffer may be bound to several variables, one for each width it is accessed in: an aligned load of four elements
reads from an array of vectors of four. Eight 16-bit elements come as four words, the widest load there is.

Shared memory is viewed in the same way where the target lists VK_KHR_workgroup_memory_explicit_layout: each width is a
block with the arrays that are accessed so, at the offsets that `KernelIR.shared_bytes` counts, and all blocks lie on
top of one another. It is all or nothing: where one view needs elements of 8 or 16 bits that the target does not take
in such blocks, and on targets without the extension, an array that is accessed in vectors is declared as an array of
the widest of them, and a single element of it is reached through an access chain into a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from aule.artifact import Param
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.types import Fragment, Pointer, Scalar, ValueType, Vector, element, i32, u32, with_element
from aule.render._spirv_indices import Indices
from aule.render._spirv_module import Module
from aule.render._spirv_ops import (
    Capability,
    CooperativeMatrixLayout,
    Decoration,
    MemoryAccess,
    Scope,
    StorageClass,
)
from aule.render._spirv_ops import Op as Spv
from aule.render._spirv_values import Parts, Registers, Rounding, held, lanes_of, shape
from aule.target import Target

_BUFFER_ACCESS = {8: Capability.StorageBuffer8BitAccess, 16: Capability.StorageBuffer16BitAccess}
_BLOCK_ACCESS = {
    8: Capability.WorkgroupMemoryExplicitLayout8BitAccessKHR,
    16: Capability.WorkgroupMemoryExplicitLayout16BitAccessKHR,
}
_LAYOUTS = {"row": CooperativeMatrixLayout.RowMajorKHR, "column": CooperativeMatrixLayout.ColumnMajorKHR}


@dataclass
class _Access:
    """A variable to index, and what one of its elements is."""

    variable: int
    storage: int
    unit: Scalar | Vector
    """Type of the variable's elements."""
    width: int
    """How many elements of the IR's pointer one of them holds."""
    flags: tuple[int, ...]
    """Memory operands of loads and stores."""
    member: int | None = None
    """Which member of the variable is indexed, when it is a block."""


def access_unit(elem: Scalar, lanes: int, align: int) -> int:
    """Elements that one access can take: as many as the alignment allows, up to 16 bytes."""
    return min(gcd(lanes, align), max(128 // elem.bits, 1))


def block_widths(target: Target) -> frozenset[int]:
    """Bits that elements of shared memory may have in blocks of an explicit layout; none where there are no such."""
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
        The id of an index divided by a power of two that was asked for in ``indices``.
    coherent : bool
        Writes to buffers must be seen by other threads of the kernel.
    vulkan_model : bool
        The module uses the Vulkan memory model.
    computable : frozenset of Scalar
        Narrow types that registers can hold; others are loaded four at a time at most, and held in 32 bits.
    half_rounding : Rounding
        How f16 that registers cannot hold is rounded when it is stored.
    blocks : frozenset of int
        Bits that elements of shared memory may have in blocks of an explicit layout (`block_widths`).
    """

    def __init__(
        self, module: Module, registers: Registers, kernel: KernelIR, indices: Indices, *,
        value: Callable[[Value], int], quotient: Callable[[Value, int], int], coherent: bool, vulkan_model: bool,
        computable: frozenset[Scalar], half_rounding: Rounding, blocks: frozenset[int],
    ) -> None:  # fmt: skip
        self._m = module
        self._r = registers
        self._indices = indices
        self._value = value
        self._quotient = quotient
        self._coherent = coherent
        self._vulkan_model = vulkan_model
        self._computable = computable
        self._half_rounding = half_rounding
        self._blocks = False
        """Shared memory is viewed in blocks of an explicit layout."""
        self._views: dict[tuple[Value, int], _Access] = {}
        self._arrays: dict[Value, _Access] = {}
        self._widths: dict[Value, int] = {}
        buffers = [p for p in kernel.params if p.kind == "buffer"]
        views: dict[Value, dict[int, None]] = {kernel.values[p.name]: {} for p in buffers}
        ops = [op for op in kernel.walk() if op.args and isinstance(op.args[0].type, Pointer)]
        self._blocks = bool(blocks) and all(
            element(self._view(element(op.args[0].type), self._unit(op))).bits in blocks
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
            self._declare_blocks({array: views[array] for array in kernel.shared})
        else:
            for array in kernel.shared:
                self.declare_array(array, array.hint)

    # -- planning --------------------------------------------------------------------------------------------------

    def _plan(self, ops: list[Op], views: dict[Value, dict[int, None]]) -> None:
        """Find the views of memory that has any and the widths of other arrays, and ask for the quotients that accesses
        will need."""
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
        """Whether an operation that needs whole elements can work on an array of vectors."""
        if op.opcode == "atomic":
            return width == 1
        if op.opcode.startswith("fragment"):
            whole = self._indices.remainder(op.args[1], width) == 0
            return width == 1 or (whole and op.args[2].constant is not None and op.args[2].constant % width == 0)
        return True

    def _unit(self, op: Op) -> int:
        """Elements of the view through which an operation on viewed memory goes."""
        if op.opcode.startswith("fragment") and self._blocks and self._is_shared(op.args[0]):
            # Matrices of vectors tell the driver how they are aligned.
            widest = access_unit(element(op.args[0].type), 8, 8)
            return next(width for width in (8, 4, 2, 1) if width <= widest and self._divisible(op, width))
        if op.opcode not in ("load", "peek", "store", "post"):
            return 1
        type_ = op.args[2].type if op.opcode in ("store", "post") else op.result.type if op.result is not None else None
        assert isinstance(type_, Scalar | Vector)
        unit = access_unit(element(type_), lanes_of(type_), op.attrs["align"])
        return unit if element(type_) in self._computable else min(unit, 4)

    @staticmethod
    def _is_shared(pointer: Value) -> bool:
        return isinstance(pointer.type, Pointer) and pointer.type.space == "shared"

    @staticmethod
    def _view(elem: Scalar, unit: int) -> Scalar | Vector:
        """The type through which ``unit`` elements are accessed; vectors end at four lanes."""
        return shape(elem, unit) if unit <= 4 else shape(u32, unit * elem.bits // 32)

    # -- declarations ----------------------------------------------------------------------------------------------

    def _declare_buffer(self, param: Param, value: Value, binding: int, units: list[int]) -> None:
        elem = element(value.type)
        written = param.access != "read"
        flags = (MemoryAccess.NonPrivatePointer,) if self._vulkan_model and self._coherent and written else ()
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
            elif self._coherent and not self._vulkan_model:
                self._m.decorate(variable, Decoration.Coherent)
            # Views of one buffer alias each other, which only matters where one of them is written through.
            aliased = written and len(units) > 1
            self._m.decorate(variable, Decoration.Aliased if aliased else Decoration.Restrict)
            self._views[value, unit] = _Access(variable, StorageClass.StorageBuffer, view, unit, flags, 0)

    def _declare_blocks(self, views: dict[Value, dict[int, None]]) -> None:
        """All shared arrays, in one block for each width in which any of them is accessed."""
        offset, offsets = 0, {}
        for array in views:
            pointer = array.type
            assert isinstance(pointer, Pointer) and pointer.length is not None
            offsets[array] = offset
            offset += -(-pointer.elem.bytes * pointer.length // 16) * 16
        flags = (MemoryAccess.NonPrivatePointer,) if self._vulkan_model else ()
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
                self._views[array, unit] = _Access(variable, StorageClass.Workgroup, view, unit, flags, i)

    def _block_member(self, array: Value, unit: int) -> int:
        """The type of a shared array in the block of a width."""
        pointer = array.type
        assert isinstance(pointer, Pointer) and pointer.length is not None
        view = self._view(pointer.elem, unit)
        if element(view).bits in _BLOCK_ACCESS:
            self._m.capability(_BLOCK_ACCESS[element(view).bits])
        # A last vector that is not filled does not reach into the next array: both are aligned to 16 bytes.
        return self._m.strided_array(self._m.type(view), -(-pointer.length // unit), pointer.elem.bytes * unit)

    def declare_array(self, array: Value, name: str) -> None:
        """A shared or private array."""
        pointer = array.type
        assert isinstance(pointer, Pointer) and pointer.length is not None
        width = self._widths.get(array, 1)
        unit = shape(pointer.elem, width)
        type_ = self._m.array(self._m.type(unit), -(-pointer.length // width))
        if pointer.space == "shared":
            variable = self._m.global_variable(StorageClass.Workgroup, type_)
            flags = (MemoryAccess.NonPrivatePointer,) if self._vulkan_model else ()
            self._arrays[array] = _Access(variable, StorageClass.Workgroup, unit, width, flags)
        else:
            variable = self._m.local_variable(StorageClass.Function, type_)
            self._arrays[array] = _Access(variable, StorageClass.Function, unit, width, ())
        self._m.name(variable, name)

    # -- access ----------------------------------------------------------------------------------------------------

    def load(self, op: Op) -> Parts:
        """The value of a ``load``."""
        assert op.result is not None and isinstance(op.result.type, Scalar | Vector)
        access, elem = self._access(op), element(op.result.type)
        wide = held(elem, self._computable)
        pieces: list[tuple[int, int]] = []
        for address, type_, lanes in self._addresses(op, access, lanes_of(op.result.type)):
            loaded = self._m.result(Spv.Load, self._m.type(type_), address, *self._flags(op, access))
            if access.width > 4:
                parts = self._r.bitcast(access.unit, Vector(elem, access.width), (loaded,))
                pieces += [(part, 4) for part in parts]
            else:
                (piece,) = self._r.cast(type_, with_element(type_, wide), (loaded,)) if wide != elem else (loaded,)
                pieces.append((piece, lanes))
        return self._r.join(wide, pieces)

    def store(self, op: Op, parts: Parts) -> None:
        """Carry out a ``store``."""
        type_ = op.args[2].type
        assert isinstance(type_, Scalar | Vector)
        access, start = self._access(op), 0
        wide = with_element(type_, held(element(type_), self._computable))
        for address, unit, lanes in self._addresses(op, access, lanes_of(type_)):
            if access.width > 4:
                group = parts[start // 4 : (start + lanes) // 4]
                (stored,) = self._r.bitcast(Vector(element(type_), lanes), access.unit, group)
            else:
                stored = self._r.cut(wide, parts, start, lanes)
                if wide != type_:
                    (stored,) = self._r.cast(shape(element(wide), lanes), unit, (stored,), self._half_rounding)
            self._m.emit(Spv.Store, address, stored, *self._flags(op, access))
            start += lanes

    def _flags(self, op: Op, access: _Access) -> tuple[int, ...]:
        """How a load or store accesses memory. What other workgroups are waiting for, or change, is volatile: it must
        neither be found in a cache nor be moved out of a loop."""
        if op.opcode not in ("peek", "post"):
            return access.flags
        if not self._vulkan_model:
            return (MemoryAccess.Volatile,)
        made = MemoryAccess.MakePointerVisible if op.opcode == "peek" else MemoryAccess.MakePointerAvailable
        scope = self._m.constant(u32, Scope.QueueFamily)
        return (MemoryAccess.Volatile | MemoryAccess.NonPrivatePointer | made, scope)

    def element_address(self, op: Op) -> tuple[int, int]:
        """Where the one element at ``op.args[1]`` is, for atomics and fragments; and the elements of its unit."""
        access = self._access(op)
        index = self._value(op.args[1]) if access.width == 1 else self._quotient(op.args[1], access.width)
        return self._chain(access, access.unit, index), access.width

    def fragment_load(self, op: Op) -> Parts:
        """The value of a ``fragment_load``."""
        assert op.result is not None and isinstance(op.result.type, Fragment)
        address, layout, stride, flags = self._matrix(op)
        type_id = self._m.type(op.result.type)
        return (self._m.result(Spv.CooperativeMatrixLoadKHR, type_id, address, layout, stride, *flags),)

    def fragment_store(self, op: Op, parts: Parts) -> None:
        """Carry out a ``fragment_store``."""
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
        """Pointers to follow one another: address, type behind it, elements behind it."""
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
        """Elements inside an array of vectors, one by one."""
        index, width, elem = op.args[1], access.width, element(access.unit)
        known = 0 if op.attrs["align"] % width == 0 else self._indices.remainder(index, width)
        quotient = self._quotient(index, width)
        result: list[tuple[int, ValueType, int]] = []
        for lane in range(lanes):
            if known is not None:
                row = self._plus(index, quotient, (known + lane) // width)
                column = self._m.constant(i32, (known + lane) % width)
            elif self._unit(op) == lanes:
                # The lanes of an aligned vector lie in one unit.
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
