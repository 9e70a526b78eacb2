"""Device families: which data files apply to a device, and in which order.

This is the only place that maps a Target to a family.
"""

from __future__ import annotations

from aule.target import Target

GENERIC = "generic"
"""The last family of every device."""

_MEASURED_ARCH = "sm90"
"""The measured architecture, whose numbers serve architectures without their own."""


def families(target: Target) -> tuple[str, ...]:
    """Return the families of a device, the closest first, `GENERIC` last. A family may lack a data file."""
    return (*_own(target), GENERIC)


def _own(target: Target) -> tuple[str, ...]:
    if target.backend == "cpu":
        return ("cpu",)
    # On software devices compiling takes longer than computing. Software Vulkan uses the tiles of real devices, so that
    # tests without a GPU cover those.
    if target.software and target.backend in ("opencl", "webgpu"):
        return ("software",)
    if target.vendor == "nvidia" or target.backend == "cuda":
        return (*_nvidia(target), "nvidia")
    if target.backend == "metal":
        return ("apple",)
    if target.backend == "hip":
        return ("hip-cdna" if target.arch.startswith("gfx9") else "hip-rdna",)
    if target.vendor in ("amd", "intel"):
        return (target.vendor,)
    return ("vulkan",) if target.backend == "vulkan" else ()


def _nvidia(target: Target) -> tuple[str, ...]:
    if target.backend == "vulkan":
        return ("nvidia-vulkan",)
    if target.backend != "cuda":
        return ()
    arch = target.arch.replace("_", "").rstrip("af")
    return tuple(f"nvidia-{name}" for name in dict.fromkeys((arch, _MEASURED_ARCH)) if name)
