"""EmittedKernel: what every kernel of the library has, its code in any language."""

from __future__ import annotations

from abc import ABC, abstractmethod

from aule.artifact import Artifact
from aule.backends import registry
from aule.codegen import generate, target_for
from aule.errors import InvalidArgumentError
from aule.ir import KernelIR
from aule.target import Target


class EmittedKernel(ABC):
    """A kernel that can be traced for a target and written down in its language."""

    @abstractmethod
    def build(self, target: str | Target | None = None) -> KernelIR:
        """Trace the kernel for a device, a language, or whatever it takes by default."""

    def artifact(self, language: str, target: Target | None = None) -> Artifact:
        """The kernel in a language, with its parameters, workgroup and shared memory."""
        expected = registry.by_language(language)
        resolved = target_for(language) if target is None else target
        if resolved.backend != expected.name:
            raise InvalidArgumentError(
                f"[emit] expected a {expected.name} target for {language}, got one of {resolved.backend}; "
                "leave the target out, or take the language of its backend"
            )
        return generate(self.build(resolved), resolved)

    def emit(self, language: str, target: Target | None = None) -> str | bytes:
        """Source text, or the binary of SPIR-V.

        Parameters
        ----------
        language : {"ptx", "spirv", "opencl", "wgsl", "msl", "llvm"}
        target : Target, optional
            A particular device; default: what nearly every device of the kind can do.
        """
        artifact = self.artifact(language, target)
        return artifact.code if artifact.language == "spirv" else artifact.text

    def emit_ptx(self, target: Target | None = None) -> str:
        """PTX for NVIDIA's driver."""
        return self.artifact("ptx", target).text

    def emit_spirv(self, target: Target | None = None) -> bytes:
        """A SPIR-V module for Vulkan."""
        return self.artifact("spirv", target).code

    def emit_opencl(self, target: Target | None = None) -> str:
        """OpenCL C."""
        return self.artifact("opencl", target).text

    def emit_wgsl(self, target: Target | None = None) -> str:
        """WGSL for WebGPU."""
        return self.artifact("wgsl", target).text

    def emit_msl(self, target: Target | None = None) -> str:
        """The Metal Shading Language."""
        return self.artifact("msl", target).text

    def emit_llvm(self, target: Target | None = None) -> str:
        """LLVM IR for a CPU."""
        return self.artifact("llvm", target).text
