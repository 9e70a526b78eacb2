"""Whether this machine can have a GPU at all, without a question to any driver."""

from __future__ import annotations

import glob
import sys
from functools import cache

_LINUX = (
    "/dev/dri/renderD*",  # Mesa, AMD, Intel, and NVIDIA beside its own
    "/dev/nvidia[0-9]*",
    "/dev/nvhost*",  # NVIDIA's Tegra
    "/dev/nvgpu*",
    "/dev/kfd",  # ROCm
    "/dev/dxg",  # Windows' GPUs under WSL
    "/dev/mali*",
    "/dev/kgsl*",  # Qualcomm's Adreno
    "/dev/pvr*",
    "/dev/accel/*",
)
"""Device files of GPUs and accelerators. A container sees only those that it was given."""


@cache
def may_have_gpu() -> bool:
    """Whether a driver could list a hardware device: False only on Linux without the device file of any GPU."""
    return sys.platform != "linux" or any(glob.glob(pattern) for pattern in _LINUX)
