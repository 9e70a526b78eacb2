"""Measures how many workgroups are resident on a multiprocessor, by their shared memory.

    python benchmarks/resident_workgroups.py vulkan

Each workgroup runs a chain of dependent operations, so that up to four of 128 threads take no longer than one: the time
of many workgroups tells how many were resident at once.
"""

from __future__ import annotations

import statistics
import sys
import time

from aule.backends import registry
from aule.ir import Builder, KernelIR
from aule.ir.types import f32
from aule.ir.verify import verify

THREADS, EACH = 128, 12


def kernel(elements: int) -> KernelIR:
    b = Builder("resident", THREADS)
    out, memory = b.buffer("out", f32, "write"), b.shared("memory", f32, elements)
    t = b.thread_id()
    b.store(memory, t, b.cast(t, f32))
    b.store(memory, t + (elements - THREADS), b.cast(t, f32))
    b.barrier()
    x = b.load(memory, (t + 1) & (THREADS - 1))
    chain = b.var(x)
    with b.loop(0, 4096):
        value = chain.value
        for _ in range(8):
            value = b.fma(value, x, x)
        chain.value = value
    b.store(out, b.group_id() * THREADS + t, chain.value + b.load(memory, elements - 1 - t))
    return b.finish()


def main(name: str) -> None:
    device = registry.find(name)
    assert device is not None
    groups = EACH * max(device.target.compute_units, 1)
    out = device.alloc(groups * THREADS * 4)
    for kib in (4, 16, 24, 32, 40, 48):
        if kib * 1024 > device.target.max_shared_bytes:
            break
        made = kernel(kib * 256)
        verify(made)
        program = device.load(registry.backend(name).render(made, device.target))
        start = time.perf_counter()
        while time.perf_counter() - start < 0.5:  # until the clocks are up
            device.time_launch(program, (groups, 1, 1), [out])
        seconds = statistics.median(device.time_launch(program, (groups, 1, 1), [out]) for _ in range(9))
        print(f"{kib:2} KiB {1e6 * seconds:8.0f} us", flush=True)
    device.free(out)


if __name__ == "__main__":
    main(sys.argv[1])
