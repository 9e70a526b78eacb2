"""Factors of f32 in PTX: the generated code, run lane by lane in Python, multiplies the matrices it was given.

The layout of the operands of ``mma.m16n8k8`` over lanes is written here as in the PTX manual.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from aule.ir import Builder, KernelIR
from aule.ir.types import Fragment, f32, i32
from aule.render import ptx
from aule.target import NVIDIA_LAYOUT, Target

STRIDE = 24
TARGET = Target("cuda", arch="sm_90", subgroup_size=32, subgroup_sizes=(32,), max_shared_bytes=49152, int64=True)
Lane = dict[str, Any]


def product(layouts: tuple[str, str]) -> KernelIR:
    b = Builder("product", 32, 32)
    out = b.buffer("out", f32, "write")
    memory = b.shared("memory", f32, 2 * 16 * STRIDE)
    a, c = (
        b.fragment_load(Fragment(f32, 16, 16, use), memory, b.const(i * 16 * STRIDE, i32), STRIDE, layout)
        for i, (use, layout) in enumerate(zip(("a", "b"), layouts, strict=True))
    )
    result = b.fragment_mma(a, c, b.fragment_fill(Fragment(f32, 16, 16, "accumulator"), 0.0))
    for part in range(8):
        b.store(out, b.thread_id() * 8 + part, b.fragment_get(result, part))
    return b.finish()


class Warp:
    """Just enough of a processor: registers of 32 lanes, shared memory, and a buffer at address 0."""

    def __init__(self, shared: np.ndarray) -> None:
        self.shared, self.out = shared, np.zeros(256, np.float32)
        self.lanes: list[Lane] = [{"%laneid": lane, "%tid.x": lane} for lane in range(32)]

    def run(self, text: str) -> None:
        body = text[text.index("{") + 1 : text.rindex("}")]
        for line in body.split("\n"):
            opcode, _, operands = line.split("//")[0].strip().rstrip(";").partition(" ")
            if not opcode or opcode.startswith((".", "ret")) or opcode.endswith(":"):
                continue
            if opcode.startswith("mma"):
                assert opcode.endswith("m16n8k8.row.col.f32.tf32.tf32.f32")
                self.multiply(*(re.split(r",\s*", group) for group in re.findall(r"\{([^}]*)\}", operands)))
            else:
                for lane in self.lanes:
                    self.step(lane, opcode, operands)

    def value(self, lane: Lane, name: str) -> Any:
        if name.startswith("0f"):
            return np.frombuffer(bytes.fromhex(name[2:]), ">f4")[0]
        return lane[name] if name.startswith("%") else int(name) if name.lstrip("-").isdigit() else 0  # a symbol

    def step(self, lane: Lane, opcode: str, operands: str) -> None:
        address = re.search(r"\[([^\]+]+)(?:\+(\d+))?\]", operands)
        if address is not None and ".param" not in opcode:
            at = self.value(lane, address[1]) + int(address[2] or 0)
            names = re.findall(r"%\w+", operands.replace(address[0], ""))
            assert at % (4 * len(names)) == 0
            for i, name in enumerate(names):
                if opcode.startswith("ld.shared"):
                    lane[name] = self.shared[at // 4 + i]
                else:
                    self.out[at // 4 + i] = lane[name]
            return
        to, *given = re.split(r",\s*", operands)
        x = [0] if ".param" in opcode else [self.value(lane, name) for name in given]
        compute = {
            "ld": lambda: 0, "cvta": lambda: x[0], "mov": lambda: x[0], "cvt": lambda: x[0], "and": lambda: x[0] & x[1],
            "shl": lambda: x[0] << x[1], "shr": lambda: x[0] >> x[1], "add": lambda: x[0] + x[1],
            "mul": lambda: x[0] * x[1], "mad": lambda: x[0] * x[1] + x[2],
        }  # fmt: skip
        lane[to] = compute[opcode.split(".")[0]]()

    def multiply(self, d: list[str], a: list[str], b: list[str], c: list[str]) -> None:
        left, right, total = np.zeros((16, 8)), np.zeros((8, 8)), np.zeros((16, 8))
        for number, lane in enumerate(self.lanes):
            group, third = number >> 2, number & 3
            for i in range(4):
                left[group + 8 * (i % 2), third + 4 * (i // 2)] = self.value(lane, a[i])
                total[group + 8 * (i // 2), 2 * third + i % 2] = self.value(lane, c[i])
            for i in range(2):
                right[third + 4 * i, group] = self.value(lane, b[i])
        total += left @ right
        for number, lane in enumerate(self.lanes):
            for i in range(4):
                lane[d[i]] = total[(number >> 2) + 8 * (i // 2), 2 * (number & 3) + i % 2]


def bits(number: int, weights: tuple[int, ...]) -> int:
    return sum(weight for i, weight in enumerate(weights) if number >> i & 1)


@pytest.mark.parametrize("layouts", [("row", "row"), ("row", "column"), ("column", "row"), ("column", "column")])
def test_it_multiplies(layouts: tuple[str, str]) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, (16, 16)).astype(np.float32) for _ in range(2))
    memory = np.full((2, 16, STRIDE), np.nan, np.float32)
    for place, matrix, layout in zip(memory, (a, b), layouts, strict=True):
        place[:, :16] = matrix if layout == "row" else matrix.T
    warp = Warp(memory.reshape(-1))
    warp.run(ptx.render(product(layouts), TARGET).text)
    got, at = np.zeros((16, 16)), NVIDIA_LAYOUT
    for lane in range(32):
        for part in range(8):
            row, col = (
                bits(lane, at.lane_rows) + bits(part, at.part_rows),
                bits(lane, at.lane_cols) + bits(part, at.part_cols),
            )
            got[row, col] = warp.out[lane * 8 + part]
    np.testing.assert_array_equal(got, a @ b)
