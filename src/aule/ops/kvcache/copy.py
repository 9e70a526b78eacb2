"""The kernel that copies pages of all layers and arrays: copy-on-write of shared pages."""

from __future__ import annotations

from aule.ir import Builder, KernelIR
from aule.ir.types import Scalar, i32, i64, u8, u16, u32
from aule.ops.kvcache.config import CopyConfig
from aule.target import Target

KERNEL_NAME = "kv_copy_pages"
_ELEMENTS = {8: u8, 16: u16, 32: u32}


def build_copy(config: CopyConfig, target: Target) -> KernelIR:
    """Trace the kernel: one workgroup for each part of a page of a layer.

    No page is both copied from and copied to, so workgroups need no order.
    """
    b = Builder(KERNEL_NAME, config.threads)
    index: Scalar = i64 if config.index64 else i32
    pairs = b.buffer("pairs_ptr", i32)
    buffers = [
        b.buffer(f"{name}_ptr", _ELEMENTS[bits], "readwrite")
        for name, bits in zip(config.operands, config.bits, strict=True)
    ]
    tasks, parts, layers = b.scalar("tasks", i32), b.scalar("parts", i32), b.scalar("layers", i32)
    with b.loop(b.group_id(0), tasks, b.group_count(0), name="task") as task:
        number, part = task // parts, task % parts
        pair, layer = number // layers, number % layers
        source, target_page = b.load(pairs, pair * 2), b.load(pairs, pair * 2 + 1)
        for name, buffer, width in zip(config.operands, buffers, config.width, strict=True):
            size, all_pages = b.scalar(f"{name}_page", index), b.scalar(f"{name}_layer", index)
            base = b.cast(layer, index) * all_pages
            start, to = (base + b.cast(page, index) * size for page in (source, target_page))
            first = b.cast((part * config.threads + b.thread_id()) * width, index)
            with b.loop(first, size, b.cast(parts * (config.threads * width), index), name="at") as at:
                b.store(buffer, to + at, b.load(buffer, start + at, width))
    if config.threads > 1:
        b.barrier()  # see `append.py`
    return b.finish()
