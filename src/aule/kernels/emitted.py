"""`EmittedKernel`, the base class of the library's kernels: renders a kernel in any language."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from aule.artifact import Artifact
from aule.backends import registry
from aule.codegen import generate, target_for
from aule.dtypes import KERNEL_NAMES, dtype_name, either
from aule.errors import InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ir import KernelIR
from aule.ops.attention.checks import MAX_HEAD_DIM
from aule.ops.shared.checks import checked_number
from aule.target import Target
from aule.view import TensorView, contiguous_strides

_DTYPES = ("float32", "float16", "bfloat16")


def contiguous(dtype: str, shape: tuple[int, ...]) -> TensorView:
    """A view of a contiguous array without memory."""
    return TensorView(dtype, shape, contiguous_strides(shape), "device", None)


class EmittedKernel(ABC):
    """A kernel that can be traced for a target and rendered in its language."""

    dtype: str

    def _check_sizes(self, **sizes: Any) -> None:
        """Refuse sizes that are not positive integers, and unsupported dtypes; name the dtype as kernels do."""
        kind = type(self).__name__
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < 1 << 63:
                raise InvalidShapeError(f"[{kind}] expected {name} >= 1, got {value!r}; pass a positive int of 64 bits")
        name = dtype_name(self.dtype) or ""
        if name not in _DTYPES:
            raise InvalidDtypeError(f"[{kind}] expected dtype {either(_DTYPES)}, got {self.dtype!r}; choose one")
        object.__setattr__(self, "dtype", KERNEL_NAMES[name])  # kernels are frozen dataclasses

    def _check_heads(self, head_dim: Any, num_heads: int, num_kv_heads: int) -> None:
        kind = type(self).__name__
        if not isinstance(head_dim, (int, np.integer)) or not 1 <= head_dim <= MAX_HEAD_DIM:
            raise InvalidShapeError(
                f"[{kind}] expected head_dim in 1..{MAX_HEAD_DIM}, got {head_dim!r}; split the head dimension over "
                "more heads"
            )
        if num_heads % num_kv_heads:
            raise InvalidShapeError(
                f"[{kind}] expected num_heads to be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}; "
                "repeat or drop heads of k and v"
            )

    def _checked_scale(self, scale: Any, head_dim: int) -> float:
        """Return the factor of the scores; ``1 / sqrt(head_dim)`` for None."""
        if scale is None:
            return 1.0 / math.sqrt(head_dim)
        kind = type(self).__name__
        value = checked_number(kind, "scale", scale)
        if not math.isfinite(value):
            raise InvalidArgumentError(
                f"[{kind}] expected a finite scale, got {value}; leave it out for 1/sqrt(head_dim)"
            )
        return value

    @abstractmethod
    def build(self, target: str | Target | None = None) -> KernelIR:
        """Trace the kernel for a device, a language, or the kernel's default target."""

    def artifact(self, language: str, target: Target | None = None, *, arch: str | None = None) -> Artifact:
        """Render the kernel, with its parameters, workgroup and shared memory.

        Parameters
        ----------
        language : {"ptx", "hip", "spirv", "opencl", "wgsl", "msl", "llvm"}
        target : Target, optional
            A particular device; default: what nearly every device with this language can do.
        arch : str, optional
            Instead of a target, an instruction set: as ``sm_90`` for PTX, as ``gfx942`` for HIP.

        Returns
        -------
        Artifact

        Raises
        ------
        InvalidArgumentError
            The target or ``arch`` is not one of the language, or both are given.
        BackendUnavailableError
            The language is unknown.
        """
        expected = registry.by_language(language)
        if target is not None and arch is not None:
            raise InvalidArgumentError("[emit] expected a target or an arch, got both; leave one out")
        resolved = target_for(language, arch) if target is None else target
        if resolved.backend != expected.name:
            raise InvalidArgumentError(
                f"[emit] expected a {expected.name} target for {language}, got one of {resolved.backend}; "
                "leave the target out, or take the language of its backend"
            )
        return generate(self.build(resolved), resolved)

    def emit(self, language: str, target: Target | None = None, *, arch: str | None = None) -> str | bytes:
        """Render the kernel's code.

        Parameters
        ----------
        language : {"ptx", "hip", "spirv", "opencl", "wgsl", "msl", "llvm"}
        target : Target, optional
            A particular device; default: what nearly every device with this language can do.
        arch : str, optional
            Instead of a target, an instruction set: as ``sm_90`` for PTX, as ``gfx942`` for HIP.

        Returns
        -------
        str or bytes
            Source text, or the binary for SPIR-V.

        Raises
        ------
        InvalidArgumentError
            The target or ``arch`` is not one of the language, or both are given.
        BackendUnavailableError
            The language is unknown.
        """
        artifact = self.artifact(language, target, arch=arch)
        return artifact.code if artifact.language == "spirv" else artifact.text

    def emit_ptx(self, target: Target | None = None) -> str:
        """Render PTX for NVIDIA's driver."""
        return self.artifact("ptx", target).text

    def emit_hip(self, target: Target | None = None) -> str:
        """Render HIP C++ for AMD GPUs."""
        return self.artifact("hip", target).text

    def emit_spirv(self, target: Target | None = None) -> bytes:
        """Render a SPIR-V module for Vulkan."""
        return self.artifact("spirv", target).code

    def emit_opencl(self, target: Target | None = None) -> str:
        """Render OpenCL C."""
        return self.artifact("opencl", target).text

    def emit_wgsl(self, target: Target | None = None) -> str:
        """Render WGSL for WebGPU."""
        return self.artifact("wgsl", target).text

    def emit_msl(self, target: Target | None = None) -> str:
        """Render the Metal Shading Language."""
        return self.artifact("msl", target).text

    def emit_llvm(self, target: Target | None = None) -> str:
        """Render LLVM IR for a CPU."""
        return self.artifact("llvm", target).text
