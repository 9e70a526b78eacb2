"""Renders any kernel, including a user's own, without a device.

>>> from aule import codegen
>>> from aule.ir import Builder
>>> from aule.ir.types import f32, i32
>>> b = Builder("double", workgroup=64)
>>> source, out, n = b.buffer("source", f32), b.buffer("out", f32, "write"), b.scalar("n", i32)
>>> i = b.group_id() * 64 + b.thread_id()
>>> with b.if_(i < n):
...     b.store(out, i, b.load(source, i) * 2.0)
>>> source = codegen.generate(b.finish(), "wgsl").text
"""

from __future__ import annotations

import re
from dataclasses import replace

from aule.artifact import Artifact
from aule.backends import registry
from aule.errors import InvalidArgumentError
from aule.ir import KernelIR
from aule.runtime import _hip_chips
from aule.target import APPLE_LAYOUT, NVIDIA_LAYOUT, Target

__all__ = ["TARGETS", "generate", "target_for", "with_arch"]

TARGETS: dict[str, Target] = {
    "ptx": Target(
        "cuda", "generic NVIDIA", "nvidia", arch="sm_80", subgroup_size=32, subgroup_sizes=(32,), max_threads=1024,
        max_shared_bytes=99 * 1024, max_grid=(2**31 - 1, 65535, 65535), max_buffers=256, max_buffer_bytes=1 << 40,
        offset_alignment=1, f16=True, bf16=True, f64=True, int64=True, storage16=True, storage8=True,
        device_fence=True, atomic_f32_add=True, matrix_units=("m16n8k16:f16:f32", "m16n8k16:bf16:f32"),
        matrix_layout=NVIDIA_LAYOUT,
    ),
    "hip": _hip_chips.chip(_hip_chips.DEFAULT),
    "spirv": Target(
        "vulkan", "generic Vulkan 1.2", subgroup_size=32, max_threads=256, max_shared_bytes=32768, f16=True,
        int64=True, storage16=True, storage8=True, device_fence=True, language_version=12,
    ),
    "opencl": Target(
        "opencl", "generic OpenCL 1.2", max_threads=256, max_shared_bytes=32768, int64=True, storage16=True,
        storage8=True, language_version=120, max_buffers=64,
    ),
    "wgsl": Target("webgpu", "generic WebGPU", max_threads=256, max_shared_bytes=16384),
    "msl": Target(
        "metal", "generic Apple", "apple", subgroup_size=32, max_threads=1024, max_shared_bytes=32768, max_buffers=30,
        unified_memory=True, f16=True, bf16=True, int64=True, storage16=True, storage8=True,
        matrix_units=("m8n8k8:f16:f32", "m8n8k8:bf16:f32", "m8n8k8:f32:f32"), matrix_layout=APPLE_LAYOUT,
    ),
    "llvm": Target(
        "cpu", "generic x86-64-v3", arch="x86_64", max_threads=1, max_shared_bytes=1 << 20,
        max_grid=(2**31 - 1, 2**31 - 1, 2**31 - 1), max_buffers=256, max_buffer_bytes=1 << 40, offset_alignment=1,
        unified_memory=True, f64=True, int64=True, storage16=True, storage8=True, device_fence=True,
        extensions=("avx", "avx2", "f16c", "fma", "sse4.1"),
    ),
}  # fmt: skip
"""Default target of each language: what nearly every device of the kind can do."""


def target_for(language: str, arch: str | None = None) -> Target:
    """Return the default target of a kernel language.

    Parameters
    ----------
    language : {"ptx", "hip", "spirv", "opencl", "wgsl", "msl", "llvm"}
        Or the name of a backend.
    arch : str, optional
        An instruction set: as ``sm_90`` for PTX, as ``gfx942`` for HIP.

    Returns
    -------
    Target
        What nearly every device of the kind can do.

    Raises
    ------
    InvalidArgumentError
        The language has no such instruction set.
    """
    target = TARGETS[registry.by_language(language).language]
    return target if arch is None else with_arch(target, arch)


def with_arch(target: Target, arch: str) -> Target:
    """Return a target for another instruction set of its kind; raises `InvalidArgumentError` if there is none."""
    if target.backend == "cuda" and re.fullmatch(r"sm_\d{2,3}[af]?", str(arch)):
        return replace(target, arch=arch)
    if target.backend == "hip" and _hip_chips.known(str(arch)):
        return _hip_chips.chip(arch)
    raise InvalidArgumentError(
        f"[codegen] expected an arch as sm_90 for ptx or gfx942 for hip, got {arch!r} for "
        f"{registry.backend(target.backend).language}; change or leave it out"
    )


def generate(kernel: KernelIR, target: str | Target) -> Artifact:
    """Render a kernel.

    Parameters
    ----------
    kernel : KernelIR
        From ``Builder.finish()`` or ``AttentionKernel(...).build()``.
    target : str or Target
        A language for its usual devices, or a Target for a particular one.

    Returns
    -------
    Artifact
        ``.code`` (bytes), ``.text`` (source; not for SPIR-V), ``.entry``, ``.params``, ``.shared_bytes``.

    Raises
    ------
    KernelError
        The kernel breaks a rule of the language, or needs something that the target lacks.
    """
    resolved = target if isinstance(target, Target) else target_for(target)
    if not isinstance(kernel, KernelIR):
        raise InvalidArgumentError(
            f"[codegen] expected a KernelIR, got {type(kernel).__name__}; pass what Builder.finish() or a kernel's "
            "build() returns"
        )
    return registry.backend(resolved.backend).render(kernel, resolved)
