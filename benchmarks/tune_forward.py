"""Times alternative tiles of the forward kernel on one device, each result checked against PyTorch first.

    python benchmarks/tune_forward.py cuda f32 64:2048:full 64,64,16,8,16,16,1 64,64,16,8,16,16,0
    python benchmarks/tune_forward.py cuda bf16 128:2048:full,128:8192:causal f:128,64,4,2,0 f:128,64,8,2,1
    python benchmarks/tune_forward.py cuda bf16 --tensors

Cases are head_dim:seq:kind, B·S = 16384, H·D = 2048. A shape is block_q,block_kv,threads_x,threads_y,chunk_k,chunk_v,
resident_q[,block_p[,registers[,late_values[,edge_loop[,sums_in_shared[,by_columns[,prefetch_k[,prefetch_v[,full_tiles
]]]]]]]]], or for matrix units f:block_q,block_kv,subgroups,stages,resident_q[,register_columns], for warpgroups
w:block_q,block_kv,subgroups[,registers[,stages[,q_stages]]], the last of which adds copiers, or t: and the same numbers
for tensor copies (TMA). ``table`` is the warpgroup record that a call would take. ``--peers`` times PyTorch's
FLASH_ATTENTION and CUDNN_ATTENTION first, or EFFICIENT_ATTENTION for f32. ``--precision`` rounds f32 inputs to that
type for matrix units. ``--tensors`` compares all tiles with tensor copies with the table and the peers, at 512 to 8192
rows, in some five minutes; then cases and shapes are left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from aule.backends import registry
from aule.engine.probe import find_layout
from aule.engine.run import prepare
from aule.errors import AuleError
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.plan.tiles import choose_warpgroups
from aule.ops.attention.problem import AttentionProblem
from aule.runtime.base import Device
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape
from aule.view import TensorView, contiguous_strides

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

TENSORS = {
    64: ("t:192,128,12,255,2,2", "t:192,128,12,255,4,2", "t:128,128,8,255,4,2"),
    96: ("t:128,128,8,255,2,2",),
    128: ("w:128,128,8,255,2,2", "t:128,128,8,255,2,2", "t:128,176,8,255,2,1"),
    192: ("t:128,112,8,255,2,1", "t:128,80,8,255,2,2"),
    256: ("t:128,80,8,255,2,1", "t:128,64,8,255,2,1"),
}
"""Tiles with tensor copies by head dimension, and what they are to replace at 128."""


def warm_up(device: Device, loaded: Any, grid: Any, args: list[Any], seconds: float = 0.5) -> None:
    """Launch until the clocks are up: a card that has idled starts at a sixth of them."""
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        device.time_launch(loaded, grid, args)


class Case:
    """Inputs on the device and the right answer for the last head, made once for all shapes."""

    def __init__(
        self, device: Device, dtype: str, head_dim: int, seq: int, causal: bool, precision: str | None = None
    ) -> None:
        batch, heads = max(16384 // seq, 1), max(2048 // head_dim, 1)
        self.device, self.causal, self.dtype = device, causal, dtype
        self.dims = (batch, heads, seq, head_dim)
        self.problem = AttentionProblem(
            batch, heads, heads, seq, seq, head_dim, head_dim, dtype, head_dim**-0.5, causal=causal, precision=precision
        )
        torch.manual_seed(0)
        self.host = {name: torch.randn(self.dims).to(DTYPES[dtype]) for name in "qkv"}
        self.memory = {name: device.alloc(self.host["q"].nbytes) for name in "qkvo"}
        for name, tensor in self.host.items():
            device.upload(self.memory[name], (tensor.view(torch.uint16) if dtype == "bf16" else tensor).numpy())
        q, k, v = (self.host[n][-1:, -1:].double() for n in "qkv")
        self.want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def measure(self, shape: SimtShape | FragmentShape, repeats: int = 9) -> str:
        device, dims = self.device, self.dims
        views = {n: TensorView(self.dtype, dims, contiguous_strides(dims), "d", self.memory[n]) for n in "qkvo"}
        try:
            plan = plan_forward(self.problem, views, device.target, shape=shape)
            (launch,) = prepare(plan, device).launches(self.memory)
            out = torch.full(dims, float("nan")).to(DTYPES[self.dtype])
            plain = (out.view(torch.uint16) if self.dtype == "bf16" else out).numpy()
            device.upload(self.memory["o"], plain)
            warm_up(device, *launch)
            times = [device.time_launch(*launch) for _ in range(repeats)]
            device.download(self.memory["o"], plain)
        except AuleError as error:
            return f"refused: {error.message[:150]}"
        error = float((out[-1:, -1:].double() - self.want).abs().max() / self.want.abs().max())
        written = bool(torch.isfinite(out).all())
        median = statistics.median(times)
        stats = device.statistics(launch[0]) if hasattr(device, "statistics") else {}
        wanted = ("registers", "local_bytes", "Register Count", "Binary Size")
        shown = ", ".join(f"{k} {v}" for k, v in stats.items() if k in wanted)
        bound = {"f32": 1e-5, "f16": 1e-3, "tf32": 1e-3, "bf16": 8e-3}[self.problem.precision or self.dtype]
        verdict = "" if error < bound and written else " WRONG"
        rate = self.problem.flops / median / 1e12
        return f"{rate:6.1f} TFLOPS {1e3 * median:8.3f} ms error {error:.1e}{verdict}; {shown}"

    def peer(self, backend: SDPBackend, repeats: int = 9) -> str:
        q, k, v = (x.cuda() for x in self.host.values())
        times = []
        with sdpa_kernel(backend):
            for _ in range(repeats + 3):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e-3)
        return f"{self.problem.flops / statistics.median(times[3:]) / 1e12:6.1f} TFLOPS"

    def close(self) -> None:
        for allocation in self.memory.values():
            self.device.free(allocation)


def parsed(text: str) -> SimtShape | FragmentShape:
    kind, _, rest = text.rpartition(":")
    numbers = [int(x) for x in rest.split(",")]
    if kind in ("w", "t"):
        registers, stages = (*numbers[3:], 255, 2)[0], (*numbers[4:], 2)[0]
        shape = FragmentShape(*numbers[:3], stages, False, registers, warpgroups=True)
        if len(numbers) < 6:
            return shape
        return replace(shape, copiers=4, q_stages=numbers[5], copies="tma" if kind == "t" else "async")
    if kind == "f":
        return FragmentShape(*numbers[:4], bool(numbers[4]), register_columns=sum(numbers[5:]))
    return SimtShape(*numbers[:6], bool(numbers[6]), *numbers[7:])


def of_table(device: Device, case: Case) -> FragmentShape | None:
    """The shape of the record that a call would take."""
    batch, heads, seq, dim = case.dims
    length = 0 if case.causal else seq
    return choose_warpgroups(device.target, case.dtype, dim, dim, length=length, keys=seq, rows=batch * heads * seq)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("dtype", choices=DTYPES)
    parser.add_argument("cases", nargs="?")
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--tensors", action="store_true")
    parser.add_argument("--precision", choices=["f16", "bf16", "tf32"], help="of f32 inputs, on matrix units")
    args = parser.parse_args()
    if args.tensors == bool(args.shapes):
        parser.error("expected cases and shapes, or --tensors")
    kinds = [(seq, kind) for seq in (512, 2048, 8192) for kind in ("full", "causal")]
    cases = [f"{d}:{seq}:{kind}" for d in TENSORS for seq, kind in kinds] if args.tensors else args.cases.split(",")
    device = registry.find(args.device)
    assert device is not None
    find_layout(device)
    for text in cases:
        head_dim, seq, kind = text.split(":")
        case = Case(device, args.dtype, int(head_dim), int(seq), kind == "causal", args.precision)
        label = f"{args.device} {args.dtype} d{head_dim} S{seq} {kind}"
        if args.peers or args.tensors:
            half = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
            for backend in (SDPBackend.EFFICIENT_ATTENTION,) if args.dtype == "f32" else half:
                print(f"{label} {backend.name:28} {case.peer(backend)}", flush=True)
        for name in ("table", *TENSORS[int(head_dim)]) if args.tensors else args.shapes:
            shape = of_table(device, case) if name == "table" else parsed(name)
            print(f"{label} {name:28} {'no record' if shape is None else case.measure(shape)}", flush=True)
        case.close()


if __name__ == "__main__":
    main()
