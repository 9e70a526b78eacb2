"""Times alternative tiles of the backward kernels on one device, each result checked against PyTorch first.

    python benchmarks/tune_backward.py cuda 64 2048 full queries 64,64,16,8,16,16 64,64,16,8,16,16,168

A shape is block_q,block_kv,threads_x,threads_y,chunk_k,chunk_v[,registers]; ``queries`` times dQ, ``keys`` dK and dV.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import torch
import torch.nn.functional as F

from aule.backends import registry
from aule.engine.attention import contiguous_strides, forward_on_host
from aule.engine.programs import program
from aule.errors import AuleError
from aule.ops.attention.plan import plan_backward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands
from aule.runtime.base import Device
from aule.tile.simt import SimtShape
from aule.view import TensorView


class Case:
    """Inputs on the device and the right gradients of the last head, made once for all shapes."""

    def __init__(self, device: Device, dim: int, seq: int, causal: bool) -> None:
        batch, heads = max(16384 // seq, 1), max(2048 // dim, 1)
        self.device, self.dims = device, (batch, heads, seq, dim)
        self.problem = AttentionProblem(
            batch, heads, heads, seq, seq, dim, dim, "f32", dim**-0.5, causal=causal, return_lse=True
        )
        rng = np.random.default_rng(0)
        host = {name: rng.standard_normal(self.dims, np.float32) for name in ("q", "k", "v", "do")}
        strides = contiguous_strides(self.dims)
        q, k, v = (TensorView("f32", self.dims, strides, "host", host[n]) for n in "qkv")
        out, lse = forward_on_host(self.problem, Operands(q, k, v), device)
        assert lse is not None
        host |= {"o": out, "lse": lse}
        self.memory = {name: device.alloc(array.nbytes) for name, array in host.items()}
        for name, array in host.items():
            device.upload(self.memory[name], array)
        for name in ("dq", "dk", "dv"):
            self.memory[name] = device.alloc(out.nbytes)
        self.memory["delta"] = device.alloc(lse.nbytes)
        names = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
        self.views = {n: TensorView("f32", self.dims, strides, "d", self.memory[n]) for n in names}
        last = [torch.from_numpy(host[n][-1:, -1:]).double().requires_grad_() for n in "qkv"]
        want = F.scaled_dot_product_attention(*last, is_causal=causal)
        grads = torch.autograd.grad(want, last, torch.from_numpy(host["do"][-1:, -1:]).double())
        self.want = dict(zip(("dq", "dk", "dv"), (g.numpy() for g in grads), strict=True))

    def measure(self, of: str, shape: SimtShape, repeats: int = 5) -> str:
        device = self.device
        try:
            plan = plan_backward(self.problem, self.views, device.target, shapes=(shape, shape))
            chosen = [step for step in plan.steps if getattr(step.config, "of", "delta") in (of, "delta")]
            for step in chosen:
                loaded = program(device, step.config, lambda step=step: step.build(step.config, device.target))
                values = {f"{n}_ptr": m for n, m in self.memory.items()} | dict(step.scalars)
                args = [values[p.name] for p in loaded.artifact.params]
                times = [device.time_launch(loaded, step.grid, args) for _ in range(repeats)]
        except AuleError as error:
            return f"refused: {error.message[:150]}"
        worst = 0.0
        for name in ("dq",) if of == "queries" else ("dk", "dv"):
            out = np.empty(self.dims, np.float32)
            device.download(self.memory[name], out)
            worst = max(worst, float(np.abs(out[-1:, -1:] - self.want[name]).max() / np.abs(self.want[name]).max()))
        stats = device.statistics(loaded) if hasattr(device, "statistics") else {}
        shown = ", ".join(f"{k} {v}" for k, v in stats.items() if k in ("registers", "local_bytes", "Register Count"))
        products = 3 if of == "queries" else 4
        rate = self.problem.flops / 2 * products / statistics.median(times) / 1e12
        verdict = "" if worst < 2e-5 else " WRONG"
        return f"{rate:6.1f} TFLOPS of its own products, {1e3 * statistics.median(times):8.3f} ms{verdict}; {shown}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("head_dim", type=int)
    parser.add_argument("seq", type=int)
    parser.add_argument("kind", choices=["full", "causal"])
    parser.add_argument("of", choices=["queries", "keys"])
    parser.add_argument("shapes", nargs="+")
    args = parser.parse_args()
    device = registry.find(args.device)
    assert device is not None
    case = Case(device, args.head_dim, args.seq, args.kind == "causal")
    for text in args.shapes:
        numbers = [int(x) for x in text.split(",")]
        registers = numbers[6] if len(numbers) > 6 else 255
        shape = SimtShape(*numbers[:6], False, registers=registers)
        print(f"{args.device} d{args.head_dim} {args.of} {text:26} {case.measure(args.of, shape)}", flush=True)


if __name__ == "__main__":
    main()
