"""Compares the backward pass on a GPU with PyTorch's, in one run; results are checked against float64 before timing.

    python benchmarks/backward.py [--csv FILE] [--dtype float32]

PyTorch's EFFICIENT_ATTENTION (fp32, TF32 off) or FLASH_ATTENTION (half), aule through CUDA on the same tensors, and
aule through Vulkan where it is found (device timestamps of its three kernels). B·S = 16384, H·D = 2048; five products
are counted, 2.5 times the forward's.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from forward import timed
from result_file import written
from torch.nn.attention import SDPBackend, sdpa_kernel

import aule
from aule.backends import registry
from aule.engine.attention import prepare_backward
from aule.engine.memory import device_scratch
from aule.errors import AuleError
from aule.ops.attention.problem import AttentionProblem
from aule.view import TensorView, contiguous_strides


def error_of(found: Any, wanted: Any) -> float:
    """Largest error of the last head's gradients, relative to the largest of each."""
    pairs = zip(found, wanted, strict=True)
    return max(float((f[-1:, -1:].double() - w).abs().max() / w.abs().max()) for f, w in pairs)


def vulkan_run(tensors: dict[str, torch.Tensor], causal: bool, repeats: int, wanted: Any) -> tuple[float, float]:
    """The same problem through Vulkan: seconds and error."""
    device = registry.find("vulkan")
    assert device is not None
    q = tensors["q"]
    batch, heads, seq, dim = q.shape
    name = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[q.dtype]
    problem = AttentionProblem(batch, heads, heads, seq, seq, dim, dim, name, dim**-0.5, causal=causal, return_lse=True)
    shape = tuple(q.shape)
    views, memory = {}, {}
    for key in ("q", "k", "v", "o", "do", "dq", "dk", "dv"):
        memory[key] = device.alloc(q.numel() * q.element_size())
        views[key] = TensorView(name, shape, contiguous_strides(shape), "vulkan", memory[key])
    memory["lse"] = device.alloc(tensors["lse"].numel() * 4)
    try:
        for key in ("q", "k", "v", "o", "do", "lse"):
            host = tensors[key].detach().cpu().contiguous()
            device.upload(memory[key], (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy())
        ready = prepare_backward(problem, views, device)
        ready.run(memory)
        memory |= {key: device.alloc(4 * count) for key, count in ready.plan.workspace.items()}
        shared = {key: device_scratch(device, words) for key, words in ready.plan.scratch.items()}  # the device's own
        found = []
        for key in ("dq", "dk", "dv"):
            host = torch.empty(shape, dtype=q.dtype)
            device.download(memory[key], (host.view(torch.uint16) if name == "bf16" else host).numpy())
            found.append(host.to(q.device))
        total = 0.0
        for launch in ready.launches(memory | shared):  # each several times: sums are too large from here on
            total += statistics.median([device.time_launch(*launch) for _ in range(repeats + 2)][2:])
        return total, error_of(found, wanted)
    finally:
        for allocation in memory.values():
            device.free(allocation)


def compare(dtype: torch.dtype, dim: int, seq: int, causal: bool, repeats: int) -> dict[str, object]:
    batch, heads = 16384 // seq, 2048 // dim
    q, k, v = (torch.randn(batch, heads, seq, dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    dout = torch.randn(batch, heads, seq, dim, device="cuda", dtype=dtype)
    flops = 2.5 * 4 * batch * heads * seq * seq * dim / (2 if causal else 1)
    last = [x.detach()[-1:, -1:].double().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = torch.autograd.grad(
            F.scaled_dot_product_attention(*last, is_causal=causal), last, dout[-1:, -1:].double()
        )
    peer = SDPBackend.EFFICIENT_ATTENTION if dtype == torch.float32 else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(peer):
        peer_out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    peer_seconds = timed(lambda: torch.autograd.grad(peer_out, (q, k, v), dout, retain_graph=True), repeats)
    peer_error = error_of(torch.autograd.grad(peer_out, (q, k, v), dout, retain_graph=True), wanted)
    out, lse = aule.flash_attention(q, k, v, causal=causal, return_lse=True)
    results = {
        "cuda": (
            timed(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), repeats),
            error_of(torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), wanted),
        )
    }
    try:
        tensors = {"q": q, "k": k, "v": v, "o": out, "do": dout, "lse": lse}
        results["vulkan"] = vulkan_run(tensors, causal, repeats, wanted)
    except AuleError as error:
        print(f"vulkan: {error}")
    row: dict[str, object] = {
        "dtype": str(dtype).removeprefix("torch."), "head_dim": dim, "seq": seq, "causal": causal, "peer": peer.name,
        "peer_tflops": round(flops / peer_seconds / 1e12, 1), "peer_error": f"{peer_error:.1e}",
    }  # fmt: skip
    for name, (seconds, error) in results.items():
        row[f"{name}_tflops"] = round(flops / seconds / 1e12, 1)
        row[f"{name}_ratio"] = round(peer_seconds / seconds, 3)
        row[f"{name}_error"] = f"{error:.1e}"
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, aule {aule.__version__}")
    dtype = getattr(torch, args.dtype)
    shapes = [(dim, seq, causal) for dim in (64, 128) for seq in (2048, 8192) for causal in (False, True)]
    rows: list[dict[str, object]] = []
    with written(args.csv, rows, device):
        for dim, seq, causal in shapes:
            rows.append(compare(dtype, dim, seq, causal, 5))


if __name__ == "__main__":
    main()
