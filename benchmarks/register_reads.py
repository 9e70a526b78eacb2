"""Estimates the cycles of the forward kernel's FFMAs from their register reads; needs ptxas and nvdisasm, no GPU.

    python benchmarks/register_reads.py 128 64,64,16,8,16,16,1,0,168,1 64,128,16,8,16,16,0,64

The model: an FFMA takes as many cycles as it reads registers from one of the two banks (even and odd numbers), at least
one; an operand that the previous instruction left in the operand cache (``.reuse`` in the same place) is not read.
With all other instructions at one cycle this bounds the rate of the simt kernel; docs/lab/README.md compares it with
measurements. Shapes as in tune_forward.py. nvdisasm comes with CUDA or with PyPI's nvidia-cuda-nvdisasm; NVDISASM names
another.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from aule.ops.attention.build import build_forward
from aule.ops.attention.config import ForwardConfig
from aule.render import ptx
from aule.target import Target
from aule.tile.simt.shape import SimtShape

TARGET = Target(
    "cuda", vendor="nvidia", arch="sm_90", subgroup_size=32, subgroup_sizes=(32,), max_threads=1024,
    max_shared_bytes=232448, f16=True, bf16=True, int64=True, storage16=True, storage8=True,
)  # fmt: skip


def disassemble(source: bytes) -> tuple[str, str]:
    """What ptxas says of a kernel, and its machine code as text."""
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_bytes(source)
        command = ["ptxas", "-v", f"-arch={TARGET.arch}", str(text), "-o", str(binary)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        tool = os.environ.get("NVDISASM", "nvdisasm")
        return said, subprocess.run([tool, "-c", str(binary)], check=True, capture_output=True, text=True).stdout


def blocks(code: str) -> list[list[str]]:
    """Instructions between labels."""
    result: list[list[str]] = [[]]
    for line in code.splitlines():
        if re.match(r"\s*\.L_x_\d+:", line):
            result.append([])
        elif match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            result[-1].append(match.group(1))
    return result


def cycles(block: list[str]) -> int:
    """Cycles of a block's FFMAs by the model."""
    kept: list[str | None] = [None] * 3
    total = 0
    for instruction in block:
        if not instruction.startswith("FFMA"):
            continue
        operands = re.findall(r"R(\d+|Z)(\.reuse)?", instruction)[1:4]
        reads = [int(r) for place, (r, _) in enumerate(operands) if r != "Z" and kept[place] != r]
        kept = [r if reuse else None for r, reuse in operands] + [None] * (3 - len(operands))
        banks = Counter(r % 2 for r in reads)
        total += max(1, *banks.values()) if banks else 1
    return total


def main(head_dim: int, shapes: list[str]) -> None:
    for shape in shapes:
        numbers = [int(x) for x in shape.split(",")]
        tiles = SimtShape(*numbers[:6], bool(numbers[6]), *numbers[7:])
        config = ForwardConfig(dtype="f32", head_dim=head_dim, value_dim=head_dim, shape=tiles)
        said, code = disassemble(ptx.render(build_forward(config, TARGET), TARGET).code)
        registers = re.search(r"Used (\d+) registers", said)
        spills = re.search(r"(\d+) bytes spill stores", said)
        print(f"d{head_dim} {shape}: {registers and registers[1]} registers, {spills and spills[1]} bytes spilled")
        for block in blocks(code):
            fused = sum(i.startswith("FFMA") for i in block)
            if fused >= 128:
                print(f"  {fused} FFMAs of {len(block)} instructions: {cycles(block) / fused:.3f} cycles each")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
