"""Times alternative tiles of the forward kernel on one device, each result checked against PyTorch first.

    python benchmarks/tune_forward.py cuda 64 2048 full 64,64,16,8,16,16,1 64,64,16,8,16,16,0

A shape is block_q,block_kv,threads_x,threads_y,chunk_k,chunk_v,resident_q[,block_p[,registers]].
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import torch
import torch.nn.functional as F

from aule.backends import registry
from aule.engine.attention import contiguous_strides
from aule.engine.programs import program
from aule.errors import AuleError
from aule.ops.attention.forward import build_forward
from aule.ops.attention.plan import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.runtime.base import Device
from aule.tile.simt import SimtShape
from aule.view import TensorView


class Case:
    """Inputs on the device and the right answer for the last head, made once for all shapes."""

    def __init__(self, device: Device, head_dim: int, seq: int, causal: bool) -> None:
        batch, heads = max(16384 // seq, 1), max(2048 // head_dim, 1)
        self.device, self.causal = device, causal
        self.dims = (batch, heads, seq, head_dim)
        self.problem = AttentionProblem(
            batch, heads, heads, seq, seq, head_dim, head_dim, "f32", head_dim**-0.5, causal=causal
        )
        rng = np.random.default_rng(0)
        host = {name: rng.standard_normal(self.dims, np.float32) for name in "qkv"}
        self.memory = {name: device.alloc(host["q"].nbytes) for name in "qkvo"}
        for name, array in host.items():
            device.upload(self.memory[name], array)
        q, k, v = (torch.from_numpy(host[n][-1:, -1:]).double() for n in "qkv")
        self.want = F.scaled_dot_product_attention(q, k, v, is_causal=causal).numpy()

    def measure(self, shape: SimtShape, repeats: int = 7) -> str:
        device, dims = self.device, self.dims
        views = {n: TensorView("f32", dims, contiguous_strides(dims), "d", self.memory[n]) for n in "qkvo"}
        try:
            plan = plan_forward(self.problem, views, device.target, shape=shape)
            loaded = program(device, plan.config, lambda: build_forward(plan.config, device.target))
            values = {f"{n}_ptr": m for n, m in self.memory.items()} | plan.scalars
            args = [values[p.name] for p in loaded.artifact.params]
            times = [device.time_launch(loaded, plan.grid, args) for _ in range(repeats)]
            out = np.empty(dims, np.float32)
            device.download(self.memory["o"], out)
        except AuleError as error:
            return f"refused: {error.message[:150]}"
        error = float(np.abs(out[-1:, -1:] - self.want).max() / np.abs(self.want).max())
        median = statistics.median(times)
        stats = device.statistics(loaded) if hasattr(device, "statistics") else {}
        wanted = ("registers", "local_bytes", "Register Count", "Binary Size")
        shown = ", ".join(f"{k} {v}" for k, v in stats.items() if k in wanted)
        verdict = "" if error < 1e-5 else " WRONG"
        rate = self.problem.flops / median / 1e12
        return f"{rate:6.1f} TFLOPS {1e3 * median:8.3f} ms error {error:.1e}{verdict}; {shown}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("head_dim", type=int)
    parser.add_argument("seq", type=int)
    parser.add_argument("kind", choices=["full", "causal"])
    parser.add_argument("shapes", nargs="+")
    args = parser.parse_args()
    device = registry.find(args.device)
    case = Case(device, args.head_dim, args.seq, args.kind == "causal")
    for text in args.shapes:
        numbers = [int(x) for x in text.split(",")]
        shape = SimtShape(*numbers[:6], bool(numbers[6]), *numbers[7:])
        line = case.measure(shape)
        print(f"{args.device} d{args.head_dim} S{args.seq} {args.kind} {text:28} {line}", flush=True)


if __name__ == "__main__":
    main()
