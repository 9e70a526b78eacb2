"""Renderer for SPIR-V 1.5, for Vulkan 1.2 and later.

Buffers are bound at set 0, bindings 0, 1, ... in their order, and the scalars as one uniform block at the binding after
them (the *block* convention of `aule.artifact`).

The code uses only features that the target lists. Three decisions:

* Kernels rely on infinities (masked scores are ``-inf``). ``SignedZeroInfNanPreserve`` is declared if the target lists
  ``VK_KHR_shader_float_controls``; else declaring it would be invalid, and no known driver assumes finite numbers by
  default.
* f32 to f16 must round to nearest even, which Vulkan leaves to the driver. If the target lists
  ``shaderRoundingModeRTEFloat16``, the mode is declared for the kernel; else conversions that are stored directly to a
  buffer are decorated with the rounding mode, and all others are done in integers. On NVIDIA the latter are always done
  in integers, because its compiler drops a conversion and its inverse, unless the kernel allows that
  (``KernelIR.arithmetic``). Conversions of fragments are left to the driver, except that those to bf16 are rounded
  before. In kernels that are not exact, numbers are also converted by ``VK_KHR_shader_bfloat16``, whose conversion may
  truncate, after rounding.
* The memory model is GLSL450, or the Vulkan memory model for kernels with fragments: cooperative matrices require it.

If the target lists ``VK_KHR_workgroup_memory_explicit_layout`` (and ``workgroupMemoryExplicitLayout8BitAccess`` or
``...16BitAccess`` for elements of 8 and 16 bits), shared memory is accessed both as scalars and as vectors: see
`_spirv_memory`.

Arithmetic on 16- and 8-bit integers is used if the target lists ``shaderInt16`` (or has cooperative matrices) and
``VK_KHR_shader_float16_int8``; else such integers are held in 32 bits.
"""

from __future__ import annotations

from aule.artifact import Artifact
from aule.ir.builder import Builder
from aule.ir.kernel import KernelIR, Op, Value
from aule.ir.passes import Legal, legalise
from aule.ir.passes.round_half import casts_used_in_registers
from aule.ir.passes.soft_half import float_to_bfloat
from aule.ir.types import (
    Fragment,
    Pointer,
    Scalar,
    bf16,
    element,
    f16,
    f32,
    i8,
    i16,
    lanes_of,
    u8,
    u16,
    vector_type,
)
from aule.render._spirv_kernel import RTE_HALF, KernelRenderer
from aule.render._spirv_memory import access_unit
from aule.render._spirv_ops import Capability
from aule.render._spirv_values import Rounding
from aule.target import Target

FEATURES = {
    Capability.Float16: "shaderFloat16",
    Capability.Float64: "shaderFloat64",
    Capability.Int64: "shaderInt64",
    Capability.Int16: "shaderInt16",
    Capability.Int8: "shaderInt8",
    Capability.StorageBuffer16BitAccess: "storageBuffer16BitAccess",
    Capability.StorageBuffer8BitAccess: "storageBuffer8BitAccess",
    Capability.WorkgroupMemoryExplicitLayoutKHR: "workgroupMemoryExplicitLayout",
    Capability.WorkgroupMemoryExplicitLayout8BitAccessKHR: "workgroupMemoryExplicitLayout8BitAccess",
    Capability.WorkgroupMemoryExplicitLayout16BitAccessKHR: "workgroupMemoryExplicitLayout16BitAccess",
    Capability.VulkanMemoryModel: "vulkanMemoryModel",
    Capability.AtomicFloat32AddEXT: "shaderBufferFloat32AtomicAdd",
    Capability.CooperativeMatrixKHR: "cooperativeMatrix",
    Capability.BFloat16TypeKHR: "shaderBFloat16Type",
    Capability.BFloat16CooperativeMatrixKHR: "shaderBFloat16CooperativeMatrix",
}
"""The Vulkan device feature that each capability needs; an artifact lists them as its ``extensions``."""


def render(kernel: KernelIR, target: Target) -> Artifact:
    """Write a verified kernel as a SPIR-V module; a KernelError if it needs what SPIR-V or the target lacks."""
    computable = _computable(target)
    legal = legalise(kernel, _legal(kernel, target, computable))
    rendered = KernelRenderer(legal, target, computable, _roundings(legal, target, computable))
    code = rendered.code()
    return Artifact(
        language="spirv",
        code=code,
        entry=kernel.name,
        # Legalisation does not change the bytes of buffers and of the parameter block, so callers use the old params.
        params=kernel.params,
        workgroup=kernel.workgroup,
        shared_bytes=legal.shared_bytes,
        subgroup_size=kernel.subgroup_size,
        uses_subgroups=rendered.subgroups,
        extensions=tuple(sorted(FEATURES[c] for c in rendered.m.capabilities if c in FEATURES)),
    )


def _computable(target: Target) -> frozenset[Scalar]:
    """8- and 16-bit types that support arithmetic, not only loads, stores and conversions."""
    types: list[Scalar] = [f16] if target.f16 else []
    # A bf16 matrix is loaded from an array of 16-bit integers, which must not be widened. All known devices with
    # cooperative matrices support 16-bit integer arithmetic.
    types += [i16, u16] if "shaderInt16" in target.extensions or target.matrix_units else []
    types += [i8, u8] if "VK_KHR_shader_float16_int8" in target.extensions else []
    return frozenset(types)


def _legal(kernel: KernelIR, target: Target, computable: frozenset[Scalar]) -> Legal:
    """Limits of the target, for the types that the kernel uses only, to skip passes."""
    present = kernel.elements()
    soft = {bf16} & present
    if f16 in present and not target.f16 and not (target.storage16 and _half_stays_in_memory(kernel)):
        soft.add(f16)
    if soft:
        present |= {u16}
    packed = set() if target.storage16 else {i16, u16, f16} & present
    packed |= set() if target.storage8 else {i8, u8} & present
    if packed:
        present |= {u16, u8}
    converts = u16 in computable and target.storage16
    narrow = _exact_bfloat if kernel.arithmetic == "exact" else _quick_bfloat
    return Legal(
        soft=frozenset(soft),
        packed=frozenset(packed),
        widened=frozenset({i8, u8, i16, u16} & present - computable),
        int64=target.int64 or not any(t.bits == 64 and t.is_int for t in present),
        float_to_bfloat=narrow if converts and "VK_KHR_shader_bfloat16" in target.extensions else None,
        pairs=converts,
    )


def _quick_bfloat(b: Builder, value: Value) -> Value:
    """f32 to bf16 bits by the conversion of SPV_KHR_bfloat16 after rounding; inexact for huge numbers (`KernelIR`)."""
    return b.bitcast(b.cast(value, bf16), vector_type(u16, lanes_of(value.type)))


def _exact_bfloat(b: Builder, value: Value) -> Value:
    """f32 to bf16 bits, by integer arithmetic unless the number is known to be small."""
    if value.op is not None and value.op.opcode == "small":
        return _quick_bfloat(b, value)
    return b.cast(float_to_bfloat(b, value), u16)


def _half_stays_in_memory(kernel: KernelIR) -> bool:
    """True if f16 is only loaded and converted to f32, or converted from f32 and stored: no arithmetic is needed."""
    if any(element(array.type) == f16 for array in kernel.shared):
        return False
    for op in kernel.walk():
        result = None if op.result is None else op.result.type
        in_registers = op.opcode not in ("load", "cast") or isinstance(result, Fragment)
        if result is not None and element(result) == f16 and in_registers:
            return False
        for value in op.args:
            if element(value.type) != f16 or isinstance(value.type, Pointer):
                continue
            source = value.op.opcode if value.op is not None else ""
            widens = source == "load" and op.opcode == "cast" and result is not None and element(result) == f32
            stored = source == "cast" and op.opcode == "store"
            if not (widens or stored):
                return False
    return True


def _roundings(kernel: KernelIR, target: Target, computable: frozenset[Scalar]) -> dict[Op, Rounding]:
    """Choose how each conversion to f16 rounds to nearest even; see the module docstring."""
    # Group.fragment_cast handles fragments.
    casts = {
        op: op.output
        for op in kernel.walk()
        if op.opcode == "cast" and element(op.output.type) == f16 and not isinstance(op.output.type, Fragment)
    }
    if not casts or f16 not in computable:
        return {}
    if RTE_HALF in target.extensions:
        # NVIDIA's compiler drops a conversion and its inverse.
        hidden = casts_used_in_registers(kernel) if target.vendor == "nvidia" and kernel.arithmetic == "exact" else {}
        return dict.fromkeys(hidden, "software")
    direct: dict[Value, bool] = {}
    for op in kernel.walk():
        for position, value in enumerate(op.args):
            direct[value] = position == 2 and _stores_parts(op) and direct.get(value, True)
    return {op: "decorate" if direct.get(result) else "software" for op, result in casts.items()}


def _stores_parts(op: Op) -> bool:
    """True if a store writes the parts of its value to a buffer unchanged, as the decoration requires."""
    if op.opcode != "store":
        return False
    pointer, value = op.args[0].type, op.args[2].type
    assert isinstance(pointer, Pointer)
    lanes = lanes_of(value)
    return pointer.space == "global" and access_unit(pointer.elem, lanes, op.attrs["align"]) == min(lanes, 4)
