"""Targets written by hand, for which `kernel_hashes.py` renders kernels; none of the devices has to be present."""

from __future__ import annotations

from dataclasses import replace

from aule.runtime._hip_chips import chip
from aule.target import APPLE_LAYOUT, NVIDIA_LAYOUT, RDNA3_LAYOUTS, WARPGROUP_UNITS, FragmentLayout, Target

_WIDE_GRID = (2**31 - 1, 65535, 65535)
_UNIT = "m16n16k16:{}:f32"
_HALVES = ("f16", "bf16")

# -- NVIDIA ------------------------------------------------------------------------------------------------------------

_MMA = ("m16n8k16:f16:f32", "m16n8k16:bf16:f32", "m16n8k8:tf32:f32")


def _cuda(arch: str, shared: int, units: int, *matrix_units: str) -> Target:
    capability = int(arch.removeprefix("sm_"))
    return Target(
        "cuda", arch, "nvidia", driver="CUDA", arch=arch, subgroup_size=32, subgroup_sizes=(32,), max_threads=1024,
        max_shared_bytes=shared, max_grid=_WIDE_GRID, max_buffers=512, max_buffer_bytes=1 << 36, offset_alignment=1,
        memory_bytes=1 << 36, compute_units=units, f16=True, f64=True, int64=True, storage16=True, storage8=True,
        bf16=capability >= 80, e4m3=capability >= 90, device_fence=True, atomic_f32_add=True,
        overlap=capability >= 90,
        max_cluster=8 if capability >= 90 else 1, matrix_units=matrix_units, matrix_layout=NVIDIA_LAYOUT,
    )  # fmt: skip


CUDA = {
    "sm_75": _cuda("sm_75", 64 << 10, 40, "m16n8k8:f16:f32"),
    "sm_80": _cuda("sm_80", 163 << 10, 108, *_MMA),
    "sm_86": _cuda("sm_86", 99 << 10, 84, *_MMA),
    "sm_89": _cuda("sm_89", 99 << 10, 128, *_MMA),
    "sm_90": _cuda("sm_90", 227 << 10, 132, *_MMA, *WARPGROUP_UNITS),
    "sm_100": _cuda("sm_100", 227 << 10, 148, *_MMA),
    "sm_120": _cuda("sm_120", 99 << 10, 170, *_MMA),
}
"""NVIDIA's generations, as the CUDA runtime describes a GPU of each."""

_VULKAN_BASICS = (
    "VK_EXT_scalar_block_layout",
    "VK_EXT_subgroup_size_control",
    "VK_KHR_maintenance4",
    "VK_KHR_shader_float16_int8",
    "VK_KHR_shader_float_controls",
    "VK_KHR_shader_subgroup_extended_types",
    "VK_KHR_vulkan_memory_model",
    "shaderInt16",
)
_BLOCKS = (
    "VK_KHR_workgroup_memory_explicit_layout",
    "workgroupMemoryExplicitLayout16BitAccess",
    "workgroupMemoryExplicitLayout8BitAccess",
)


def _vulkan(name: str, vendor: str, lanes: int, sizes: tuple[int, ...], shared: int, units: int) -> Target:
    return Target(
        "vulkan", name, vendor, driver="Vulkan", subgroup_size=lanes, subgroup_sizes=sizes, max_threads=1024,
        max_shared_bytes=shared, max_grid=_WIDE_GRID, max_buffers=1024, max_buffer_bytes=(1 << 32) - 1,
        offset_alignment=16, memory_bytes=1 << 36, compute_units=units, f16=True, f64=True, int64=True, storage16=True,
        storage8=True, device_fence=True, language_version=13, extensions=_VULKAN_BASICS,
    )  # fmt: skip


_H200_VULKAN = replace(
    _vulkan("H200", "nvidia", 32, (32,), 48 << 10, 132),
    atomic_f32_add=True,
    bf16=True,
    matrix_units=tuple(map(_UNIT.format, _HALVES)),
    matrix_layout=NVIDIA_LAYOUT,
    matrix_right=FragmentLayout((2, 4, 0, 0, 0), (0, 0, 1, 2, 4), (1, 8, 0), (0, 0, 8)),
    extensions=tuple(
        sorted(
            (
                *_VULKAN_BASICS,
                *_BLOCKS,
                "VK_EXT_shader_atomic_float",
                "VK_KHR_shader_bfloat16",
                "shaderRoundingModeRTEFloat16",
                "shaderSharedFloat32AtomicAdd",
            )
        )
    ),
)
_H200_OPENCL = Target(
    "opencl", "H200", "nvidia", driver="OpenCL", max_threads=1024, max_shared_bytes=48 << 10, max_grid=_WIDE_GRID,
    max_buffers=272, max_buffer_bytes=1 << 35, memory_bytes=1 << 36, compute_units=132, f64=True, int64=True,
    storage16=True, storage8=True, language_version=300,
)  # fmt: skip
_H200_WEBGPU = Target(
    "webgpu", "H200", "nvidia", driver="WebGPU", subgroup_size=32, max_threads=1024, max_shared_bytes=48 << 10,
    max_buffers=16, max_buffer_bytes=(1 << 31) - 16, f16=True, storage16=True, extensions=("shader-f16", "subgroup"),
)  # fmt: skip

# -- AMD ---------------------------------------------------------------------------------------------------------------


def _rdna3(lanes: int, staged: bool = False) -> Target:
    results, left, right = RDNA3_LAYOUTS[lanes]
    return replace(
        _vulkan("RDNA 3", "amd", 64, (32, 64), 64 << 10, 96),
        atomic_f32_add=True,
        matrix_units=tuple(map(_UNIT.format, _HALVES)),
        matrix_layout=results,
        matrix_factors=(None, None) if staged else (left, right),
        matrix_right=None if staged else right,
        extensions=tuple(sorted((*_VULKAN_BASICS, *_BLOCKS, "VK_EXT_shader_atomic_float", "VK_KHR_shader_bfloat16"))),
    )


_RDNA3_OPENCL = Target(
    "opencl", "gfx1100", "amd", driver="OpenCL", subgroup_size=32, max_threads=256, max_shared_bytes=64 << 10,
    max_grid=_WIDE_GRID, max_buffers=64, max_buffer_bytes=1 << 33, compute_units=48, f16=True, f64=True, int64=True,
    storage16=True, storage8=True, language_version=200,
    extensions=("cl_khr_fp16", "cl_khr_fp64", "cl_khr_subgroup_shuffle", "cl_khr_subgroups"),
)  # fmt: skip

# -- Intel -------------------------------------------------------------------------------------------------------------

_DPAS = (
    FragmentLayout((0, 0, 0), (1, 2, 4), (1, 2, 4), (0, 0, 0)),
    FragmentLayout((0, 0, 0), (2, 4, 8), (0, 1, 2, 4), (1, 0, 0, 0)),
    FragmentLayout((0, 0, 0), (1, 2, 4), (1, 2, 4, 8), (0, 0, 0, 0)),
)
"""8 x 8 x 16 over 8 lanes: accumulators, left and right factors."""
_DG2_VULKAN = replace(
    _vulkan("dg2", "intel", 32, (8, 16, 32), 64 << 10, 0),
    atomic_f32_add=True,
    f64=False,
    matrix_units=tuple(f"m8n8k16:{dtype}:f32" for dtype in _HALVES),
    matrix_shape=(8, 8, 16),
    matrix_layout=_DPAS[0],
    matrix_factors=_DPAS[1:],
    matrix_right=_DPAS[2],
    extensions=tuple(sorted((*_VULKAN_BASICS, "VK_EXT_shader_atomic_float", "VK_KHR_shader_bfloat16"))),
)
_DG2_OPENCL = Target(
    "opencl", "dg2", "intel", driver="OpenCL", subgroup_size=16, subgroup_sizes=(8, 16, 32), max_threads=256,
    max_shared_bytes=64 << 10, max_grid=_WIDE_GRID, max_buffers=128, max_buffer_bytes=1 << 32, compute_units=512,
    f16=True, int64=True, storage16=True, storage8=True, language_version=300,
    extensions=("cl_intel_required_subgroup_size", "cl_intel_subgroups", "cl_intel_subgroups_short", "cl_khr_fp16",
                "cl_khr_subgroup_shuffle", "cl_khr_subgroups"),
)  # fmt: skip

# -- Apple, software, processors ---------------------------------------------------------------------------------------

_APPLE = Target(
    "metal", "Apple", "apple", driver="macOS", subgroup_size=32, max_threads=1024, max_shared_bytes=32 << 10,
    max_grid=_WIDE_GRID, max_buffers=30, max_buffer_bytes=1 << 34, offset_alignment=16, unified_memory=True, f16=True,
    int64=True, storage16=True, storage8=True, bf16=True,
    matrix_units=("m8n8k8:f16:f32", "m8n8k8:f32:f32", "m8n8k8:bf16:f32"), matrix_layout=APPLE_LAYOUT,
)  # fmt: skip
_LAVAPIPE = replace(
    _vulkan("llvmpipe", "software", 8, (8,), 32 << 10, 4),
    software=True,
    unified_memory=True,
    max_buffers=16,
    max_grid=(65535, 65535, 65535),
    max_buffer_bytes=1 << 27,
)
_LAVAPIPE_WEBGPU = Target(
    "webgpu", "llvmpipe (LLVM, 256 bits)", "software", driver="WebGPU", software=True, subgroup_size=8,
    max_threads=1024, max_shared_bytes=32 << 10, max_buffers=16, max_buffer_bytes=1 << 27, unified_memory=True,
    f16=True, storage16=True, extensions=("shader-f16", "subgroup"),
)  # fmt: skip
_PORTABLE_WEBGPU = Target("webgpu", "portable", max_threads=256, max_shared_bytes=16 << 10, max_buffers=8)
_POCL = Target(
    "opencl", "pocl", "software", driver="OpenCL", software=True, max_threads=4096, max_shared_bytes=512 << 10,
    max_grid=_WIDE_GRID, max_buffers=64, max_buffer_bytes=1 << 32, compute_units=4, unified_memory=True, f64=True,
    int64=True, storage16=True, storage8=True, language_version=300,
)  # fmt: skip


def _cpu(name: str, arch: str, *extensions: str) -> Target:
    return Target(
        "cpu", name, driver="LLVM", arch=arch, max_threads=1024, max_shared_bytes=256 << 10,
        max_grid=(2**31 - 1, 2**31 - 1, 2**31 - 1), max_buffers=64, max_buffer_bytes=1 << 62, offset_alignment=1,
        memory_bytes=1 << 34, cache_bytes=32 << 20, compute_units=8, unified_memory=True, f16=True, f64=True,
        int64=True, storage16=True, storage8=True, device_fence=True, extensions=tuple(sorted(extensions)),
    )  # fmt: skip


_V3 = ("sse4.1", "sse4.2", "avx", "avx2", "fma", "f16c")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

TARGETS: dict[str, Target] = {
    "h200-cuda": CUDA["sm_90"],
    "h200-vulkan": _H200_VULKAN,
    "h200-opencl": _H200_OPENCL,
    "h200-webgpu": _H200_WEBGPU,
    "sm75-cuda": CUDA["sm_75"],
    "sm80-cuda": CUDA["sm_80"],
    "sm120-cuda": CUDA["sm_120"],
    "rdna3-vulkan": _rdna3(32),
    "rdna3-vulkan64": _rdna3(64),
    "rdna3-staged": _rdna3(64, staged=True),
    "rdna3-opencl": _RDNA3_OPENCL,
    "rdna3-hip": replace(chip("gfx1100"), driver="HIP", memory_bytes=1 << 34, compute_units=48),
    "mi300-hip": replace(chip("gfx942"), driver="HIP", memory_bytes=1 << 37, compute_units=304),
    "dg2-opencl": _DG2_OPENCL,
    "dg2-vulkan": _DG2_VULKAN,
    "apple-metal": _APPLE,
    "lavapipe-vulkan": _LAVAPIPE,
    "lavapipe-webgpu": _LAVAPIPE_WEBGPU,
    "portable-webgpu": _PORTABLE_WEBGPU,
    "pocl-opencl": _POCL,
    "cpu-baseline": _cpu("baseline", "x86_64"),
    "cpu-avx2": _cpu("avx2", "x86_64", *_V3),
    "cpu-avx512": _cpu("avx512", "x86_64", *_V4),
    "cpu-bf16": _cpu("avx512 with pairs of bf16", "x86_64", *_V4, "avx512bf16"),
    "cpu-neon": _cpu("neon", "aarch64", "neon"),
}
"""By name. Capabilities are those of the devices; sizes of memory are round numbers."""
