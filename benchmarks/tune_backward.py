"""Times alternative tiles of the backward kernels on one device, each result checked against PyTorch first.

    python benchmarks/tune_backward.py cuda f32 64:2048:full queries 64,64,16,8,16,16 64,64,16,8,16,16,168
    python benchmarks/tune_backward.py cuda f32 128:2048:full,128:8192:causal sums r:64,64,16,8,16,8 32,128,16,8,16,16
    python benchmarks/tune_backward.py cuda bf16 64:2048:full,64:8192:causal keys f:128,32,4,2 f:64,64,4,2

Cases are head_dim:seq:kind. A shape is block_q,block_kv,threads_x,threads_y,chunk_k,chunk_v[,registers], with r: before
it when the block's own rows stay in shared memory, or for matrix units f:rows,width,subgroups,stages[,registers[,
columns[,held]]], with fr: instead of f: when the second matrix that it owns stays in registers, or with w: for
warpgroups (``sums`` only). +ahead and +offset may follow, as in `FragmentShape`.
``queries`` times dQ, ``keys`` dK and dV, ``sums`` all three in one kernel that sums dQ by atomics; its five products
are counted, and the time is that of all its launches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from forward import timed
from torch.nn.attention import SDPBackend, sdpa_kernel
from tune_forward import warm_up

from aule.backends import registry
from aule.engine.attention import forward_on_host
from aule.engine.memory import device_scratch
from aule.engine.probe import find_layout
from aule.engine.programs import program
from aule.errors import AuleError
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.validate import Operands
from aule.runtime.base import Device
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape
from aule.view import TensorView, contiguous_strides

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def stored(tensor: torch.Tensor) -> Any:
    """A tensor as NumPy holds it."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class Case:
    """Inputs on the device and the right gradients of the last head, made once for all shapes."""

    def __init__(self, device: Device, dtype: str, dim: int, seq: int, causal: bool) -> None:
        batch, heads = max(16384 // seq, 1), max(2048 // dim, 1)
        self.device, self.dims, self.dtype = device, (batch, heads, seq, dim), dtype
        self.problem = AttentionProblem(
            batch, heads, heads, seq, seq, dim, dim, dtype, dim**-0.5, causal=causal, return_lse=True
        )
        torch.manual_seed(0)
        host = {name: torch.randn(self.dims).to(DTYPES[dtype]) for name in ("q", "k", "v", "do")}
        strides = contiguous_strides(self.dims)
        q, k, v = (TensorView(dtype, self.dims, strides, "host", stored(host[n])) for n in "qkv")
        out, lse = forward_on_host(self.problem, Operands(q, k, v), device)
        assert lse is not None
        arrays = {name: stored(tensor) for name, tensor in host.items()} | {"o": out, "lse": lse}
        self.memory = {name: device.alloc(array.nbytes) for name, array in arrays.items()}
        for name, array in arrays.items():
            device.upload(self.memory[name], array)
        for name in ("dq", "dk", "dv"):
            self.memory[name] = device.alloc(out.nbytes)
        self.memory["delta"] = device.alloc(lse.nbytes)
        names = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
        self.views = {n: TensorView(dtype, self.dims, strides, "d", self.memory[n]) for n in names}
        last = [host[n][-1:, -1:].double().requires_grad_() for n in "qkv"]
        want = F.scaled_dot_product_attention(*last, is_causal=causal)
        grads = torch.autograd.grad(want, last, host["do"][-1:, -1:].double())
        self.want = dict(zip(("dq", "dk", "dv"), grads, strict=True))

    def measure(self, of: str, shape: SimtShape | FragmentShape, repeats: int = 5) -> str:
        device = self.device
        problem = replace(self.problem, deterministic=of != "sums")
        spent, told, extra = [], {}, {}
        try:
            plan = plan_backward(problem, self.views, device.target, shapes=(shape, shape))
            extra = {name: device.alloc(4 * count) for name, count in plan.workspace.items() if name not in self.memory}
            shared = {name: device_scratch(device, words) for name, words in plan.scratch.items()}  # the device's own
            chosen = [step for step in plan.steps if of == "sums" or getattr(step.config, "of", of) == of]
            for step in chosen:
                loaded = program(device, step.config, lambda step=step: step.build(step.config, device.target))
                values = {f"{n}_ptr": m for n, m in (self.memory | extra | shared).items()} | dict(step.scalars)
                args = [values[p.name] for p in loaded.artifact.params]
                if getattr(step.config, "of", None):
                    told = device.statistics(loaded) if hasattr(device, "statistics") else {}
                warm_up(device, loaded, step.grid, args)
                times = [device.time_launch(loaded, step.grid, args) for _ in range(repeats)]
                spent.append(statistics.median(times))
            if of == "sums":  # the timing above has added up many times
                for step in chosen:
                    loaded = program(device, step.config, lambda step=step: step.build(step.config, device.target))
                    values = {f"{n}_ptr": m for n, m in (self.memory | extra | shared).items()} | dict(step.scalars)
                    device.launch(loaded, step.grid, [values[p.name] for p in loaded.artifact.params])
                device.synchronize()
        except AuleError as error:
            return f"refused: {error.message[:150]}"
        finally:
            for allocation in extra.values():
                device.free(allocation)
        worst = 0.0
        for name in {"queries": ("dq",), "keys": ("dk", "dv"), "sums": ("dq", "dk", "dv")}[of]:
            out = torch.empty(self.dims, dtype=DTYPES[self.dtype])
            device.download(self.memory[name], stored(out))
            want = self.want[name]
            worst = max(worst, float((out[-1:, -1:].double() - want).abs().max() / want.abs().max()))
        shown = ", ".join(f"{k} {v}" for k, v in told.items() if k in ("registers", "local_bytes", "Register Count"))
        products = {"queries": 3, "keys": 4, "sums": 5}[of]
        main = sum(spent) if of == "sums" else spent[-1]
        rate = self.problem.flops / 2 * products / main / 1e12
        verdict = "" if worst < {"f32": 2e-5, "f16": 2e-3, "bf16": 1.6e-2}[self.dtype] else " WRONG"
        each = ", ".join(f"{1e3 * x:.3f}" for x in spent)
        return f"{rate:6.1f} TFLOPS of its own products, {each} ms, error {worst:.1e}{verdict}; {shown}"

    def peer(self, backend: SDPBackend, repeats: int = 5) -> str:
        """PyTorch's backward pass on tensors of the same shape."""
        inputs = [torch.randn(self.dims, device="cuda").to(DTYPES[self.dtype]).requires_grad_() for _ in range(3)]
        dout = torch.randn(self.dims, device="cuda").to(DTYPES[self.dtype])
        try:
            with sdpa_kernel([backend]):
                out = F.scaled_dot_product_attention(*inputs, is_causal=self.problem.causal)

            def call() -> None:
                torch.autograd.grad(out, inputs, dout, retain_graph=True)

            begin = time.perf_counter()
            while time.perf_counter() - begin < 0.5:  # until the clocks are up
                call()
                torch.cuda.synchronize()
            seconds = timed(call, repeats)
        except RuntimeError as error:
            return f"refused: {str(error)[:150]}"
        return f"{self.problem.flops / 2 * 5 / seconds / 1e12:6.1f} TFLOPS, {1e3 * seconds:.3f} ms"

    def close(self) -> None:
        for allocation in self.memory.values():
            self.device.free(allocation)


def parsed(text: str) -> SimtShape | FragmentShape:
    kind, _, rest = text.rpartition(":")
    listed, *options = rest.split("+")
    numbers = [int(x) for x in listed.split(",")]
    if kind in ("f", "fr", "w"):
        further: dict[str, Any] = dict(zip(("registers", "columns", "register_columns"), numbers[4:], strict=False))
        further |= dict.fromkeys(options, True)
        return FragmentShape(*numbers[:4], kind == "fr", warpgroups=kind == "w", **further)
    return SimtShape(*numbers[:6], kind == "r", 0, *numbers[6:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("dtype", choices=DTYPES)
    parser.add_argument("cases")
    parser.add_argument("of", choices=["queries", "keys", "sums"])
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--peers", action="store_true", help="time PyTorch's FLASH_ATTENTION and CUDNN_ATTENTION first")
    args = parser.parse_args()
    device = registry.find(args.device)
    assert device is not None
    find_layout(device)
    for text in args.cases.split(","):
        dim, seq, kind = text.split(":")
        case = Case(device, args.dtype, int(dim), int(seq), kind == "causal")
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if args.peers else ():
            print(f"{args.device} {args.dtype} d{dim} S{seq} {kind} {backend.name:27} {case.peer(backend)}", flush=True)
        for shape in args.shapes:
            line = case.measure(args.of, parsed(shape))
            print(f"{args.device} {args.dtype} d{dim} S{seq} {kind} {args.of} {shape:22} {line}", flush=True)
        case.close()


if __name__ == "__main__":
    main()
