"""The Target of a WebGPU adapter."""

from __future__ import annotations

import re
from typing import Any

from aule.target import Target

FEATURES = ("shader-f16", "subgroup", "timestamp-query")
"""Features to enable if the adapter has them."""
_VENDORS = {0x10DE: "nvidia", 0x1002: "amd", 0x8086: "intel", 0x106B: "apple"}


def read_target(wgpu: Any, adapter: Any) -> Target:
    """Read an adapter's properties into a Target."""
    info, limits, features = adapter.info, adapter.limits, adapter.features
    name = info["device"] or info["description"]
    software = info["adapter_type"] == "CPU"
    vendor = "apple" if name.startswith("Apple") else _VENDORS.get(info["vendor_id"], "unknown")
    if software:
        vendor = "software"
    f16 = "shader-f16" in features
    grid = int(limits["max-compute-workgroups-per-dimension"])
    return Target(
        backend="webgpu",
        name=name,
        vendor=vendor,
        # naga is part of the compiler, so wgpu's version belongs to the driver's.
        driver=f"{info['backend_type']} {info['description']}, wgpu {wgpu.__version__}",
        software=software,
        subgroup_size=_subgroup_size(vendor, name) if "subgroup" in features else 0,
        max_threads=min(
            int(limits["max-compute-invocations-per-workgroup"]), int(limits["max-compute-workgroup-size-x"])
        ),
        max_shared_bytes=int(limits["max-compute-workgroup-storage-size"]),
        max_grid=(grid, grid, grid),
        max_buffers=min(
            int(limits["max-storage-buffers-per-shader-stage"]), int(limits["max-bindings-per-bind-group"]) - 1
        ),
        max_buffer_bytes=min(int(limits["max-buffer-size"]), int(limits["max-storage-buffer-binding-size"])) & ~15,
        offset_alignment=int(limits["min-storage-buffer-offset-alignment"]),
        unified_memory=software or info["adapter_type"] == "IntegratedGPU",
        f16=f16,
        storage16=f16,
        extensions=tuple(f for f in FEATURES if f in features),
    )


def _subgroup_size(vendor: str, name: str) -> int:
    """Return the subgroup size if it is the same for every kernel, else 0.

    wgpu-native 29 reports no sizes (its fields are 0), and a kernel cannot require one. NVIDIA and Apple always have
    32 lanes, llvmpipe fills its vector registers; AMD's and Intel's compilers choose per kernel.
    """
    if vendor in ("nvidia", "apple"):
        return 32
    bits = re.search(r"llvmpipe.*?(\d+) bits", name)
    return int(bits[1]) // 32 if bits else 0
