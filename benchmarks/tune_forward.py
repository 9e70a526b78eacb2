"""Times alternative tiles of the forward kernel on one device, each result checked against PyTorch first.

    python benchmarks/tune_forward.py cuda 64 2048 full 64,64,16,8,16,16,1 64,64,16,8,16,16,0

A shape is block_q,block_kv,threads_x,threads_y,chunk_k,chunk_v,resident_q.
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
from aule.tile.simt import SimtShape
from aule.view import TensorView


def measure(device, shape: SimtShape, head_dim: int, seq: int, causal: bool, repeats: int = 10) -> str:
    batch, heads = max(16384 // seq, 1), max(2048 // head_dim, 1)
    dims = (batch, heads, seq, head_dim)
    problem = AttentionProblem(batch, heads, heads, seq, seq, head_dim, head_dim, "f32", head_dim**-0.5, causal=causal)
    rng = np.random.default_rng(0)
    host = {name: rng.standard_normal(dims, np.float32) for name in "qkv"}
    memory = {}
    for name, array in host.items():
        memory[name] = device.alloc(array.nbytes)
        device.upload(memory[name], array)
    memory["o"] = device.alloc(host["q"].nbytes)
    views = {n: TensorView("f32", dims, contiguous_strides(dims), "d", memory[n]) for n in "qkvo"}
    try:
        plan = plan_forward(problem, views, device.target, shape=shape)
        loaded = program(device, plan.config, lambda: build_forward(plan.config, device.target))
        values = {f"{n}_ptr": m for n, m in memory.items()} | plan.scalars
        args = [values[p.name] for p in loaded.artifact.params]
        device.launch(loaded, plan.grid, args)
        out = np.empty(dims, np.float32)
        device.download(memory["o"], out)
        q, k, v = (torch.from_numpy(host[n][-1:, -1:]).double() for n in "qkv")
        want = F.scaled_dot_product_attention(q, k, v, is_causal=causal).numpy()
        error = float(np.abs(out[-1:, -1:] - want).max() / np.abs(want).max())
        times = [device.time_launch(loaded, plan.grid, args) for _ in range(repeats)]
        median = statistics.median(times)
        stats = device.statistics(loaded) if hasattr(device, "statistics") else {}
        verdict = "" if error < 1e-5 else f" WRONG {error:.2e}"
        return f"{problem.flops / median / 1e12:6.1f} TFLOPS {1e3 * median:8.3f} ms err {error:.1e}{verdict} {stats}"
    except AuleError as error:
        return f"refused: {error}"
    finally:
        for allocation in memory.values():
            device.free(allocation)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("head_dim", type=int)
    parser.add_argument("seq", type=int)
    parser.add_argument("kind", choices=["full", "causal"])
    parser.add_argument("shapes", nargs="+")
    args = parser.parse_args()
    device = registry.find(args.device)
    for text in args.shapes:
        *numbers, resident = (int(x) for x in text.split(","))
        shape = SimtShape(*numbers, bool(resident))
        line = measure(device, shape, args.head_dim, args.seq, args.kind == "causal")
        print(f"{args.device} d{args.head_dim} S{args.seq} {args.kind} {text:28} {line}", flush=True)


if __name__ == "__main__":
    main()
