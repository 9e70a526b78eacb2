"""Measures the cycles of 16-byte reads from shared memory, by how many lanes read the same address.

python benchmarks/shared_reads.py
"""

from __future__ import annotations

from aule.backends import registry
from aule.ir import Builder
from aule.ir.types import f32
from aule.render import ptx

READS, ROUNDS = 16, 2000


def kernel(pattern: str):
    b = Builder("reads", 512)
    out = b.buffer("out", f32, "write")
    memory = b.shared("memory", f32, 8192)
    t = b.thread_id()
    with b.loop(0, 16) as i:
        b.store(memory, t + i * 512, b.cast(t, f32))
    b.barrier()
    lane = t & 31
    index = {
        "1 address": lane & 0,
        "2 addresses, by half": (lane >> 4) * 20,
        "4 addresses, by quarter": (lane >> 3) * 20,
        "8 addresses, in each quarter": (lane & 7) * 20,
        "8 addresses, 4 lanes each": (lane >> 2) * 20,
        "16 addresses": (lane & 15) * 20,
        "32 addresses": lane * 20,
    }[pattern]
    sums = [b.var(b.const(0.0, f32)) for _ in range(4)]
    with b.loop(0, ROUNDS) as r:
        start = index + (r & 1) * 4
        for k in range(READS):
            for s, x in zip(sums, b.unpack(b.load(memory, start + k * 4, 4)), strict=True):
                s.value = s.value + x
    b.store(out, b.group_id() * 512 + t, sums[0].value + sums[1].value + sums[2].value + sums[3].value)
    return b.finish()


device = registry.find("cuda")
groups = device.target.compute_units
out = device.alloc(groups * 512 * 4)
for pattern in ("1 address", "2 addresses, by half", "4 addresses, by quarter", "8 addresses, in each quarter",
                "8 addresses, 4 lanes each", "16 addresses", "32 addresses"):  # fmt: skip
    program = device.load(ptx.render(kernel(pattern), device.target))
    seconds = min(device.time_launch(program, (groups, 1, 1), [out]) for _ in range(5))
    cycles = seconds * 1.98e9 / (READS * ROUNDS * 16)
    print(f"{pattern:32} {cycles:5.2f} cycles per warp read (1.98 GHz assumed)", flush=True)
