"""Compares the forward pass with PyTorch's, in one run; results are checked against float64 before timing.

    python benchmarks/forward.py [--csv FILE] [--dtype float32] [--quick]

On a CUDA machine: PyTorch's EFFICIENT_ATTENTION (fp32, TF32 off) or FLASH_ATTENTION (half), aule through CUDA on the
same tensors, and aule through Vulkan where it is found; in half precision cuDNN, too. B·S = 16384, H·D = 2048 (d256 in
half precision only). Also measured: host time of a repeated call, time of the first call with a cold and a warm disk
cache, and extra device memory at S = 16384.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F
from result_file import written
from torch.nn.attention import SDPBackend, sdpa_kernel

import aule
from aule.backends import registry
from aule.engine.attention import prepare_forward
from aule.engine.memory import device_scratch
from aule.errors import AuleError
from aule.ops.attention.problem import AttentionProblem
from aule.view import TensorView, contiguous_strides

ROWS: list[dict[str, object]] = []
PAUSE = 2_000_000
"""Cycles, a millisecond, in which the host gets a call ready: a device's clock, which times the others, leaves out
the host's time, too."""


def timed(call, repeats: int = 15) -> float:
    """Median seconds of a call on the current CUDA stream, the host's share left out: it is queued behind a pause."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(PAUSE)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def error_of(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> float:
    """Largest error of the last head against float64, relative to the largest output."""
    last = [x[-1:, -1:].double() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(*last, is_causal=causal)
    return float((out[-1:, -1:].double() - want).abs().max() / want.abs().max())


def vulkan_run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, repeats: int) -> tuple[float, float]:
    """The same problem through Vulkan: seconds and error."""
    device = registry.find("vulkan")
    assert device is not None
    batch, heads, seq, dim = q.shape
    name = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[q.dtype]
    problem = AttentionProblem(batch, heads, heads, seq, seq, dim, dim, name, dim**-0.5, causal=causal)
    shape = tuple(q.shape)
    memory = {n: device.alloc(q.numel() * q.element_size()) for n in "qkvo"}
    try:
        for n, x in zip("qkv", (q, k, v), strict=True):
            host = x.cpu()
            device.upload(memory[n], (host.view(torch.uint16) if name == "bf16" else host).numpy())
        views = {n: TensorView(name, shape, contiguous_strides(shape), "vulkan", m) for n, m in memory.items()}
        call = prepare_forward(problem, views, device)
        memory |= {name: device.alloc(4 * count) for name, count in call.plan.workspace.items()}
        shared = {name: device_scratch(device, words) for name, words in call.plan.scratch.items()}  # the device's own
        launches = call.launches(memory | shared)
        times = [device.time_launches(launches, 1) for _ in range(repeats + 3)][3:]
        host = torch.empty(shape, dtype=q.dtype)
        device.download(memory["o"], (host.view(torch.uint16) if name == "bf16" else host).numpy())
    finally:
        for allocation in memory.values():
            device.free(allocation)
    return statistics.median(times), error_of(host.to(q.device), q, k, v, causal)


def compare(dtype: torch.dtype, dim: int, seq: int, causal: bool, repeats: int) -> None:
    batch, heads = 16384 // seq, 2048 // dim
    q, k, v = (torch.randn(batch, heads, seq, dim, device="cuda", dtype=dtype) for _ in range(3))
    flops = 4 * batch * heads * seq * seq * dim / (2 if causal else 1)
    peer = SDPBackend.EFFICIENT_ATTENTION if dtype == torch.float32 else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(peer):
        peer_out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        peer_seconds = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), repeats)
    peer_error = error_of(peer_out, q, k, v, causal)
    row: dict[str, object] = {
        "dtype": str(dtype).removeprefix("torch."), "head_dim": dim, "seq": seq, "causal": causal,
        "peer": peer.name, "peer_tflops": round(flops / peer_seconds / 1e12, 1), "peer_error": f"{peer_error:.1e}",
    }  # fmt: skip
    if dtype != torch.float32:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            seconds = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), repeats)
        row["cudnn_tflops"] = round(flops / seconds / 1e12, 1)
    results = {"cuda": (timed(lambda: aule.flash_attention(q, k, v, causal=causal), repeats),
                        error_of(aule.flash_attention(q, k, v, causal=causal), q, k, v, causal))}  # fmt: skip
    try:
        results["vulkan"] = vulkan_run(q, k, v, causal, repeats)
    except AuleError as error:
        print(f"vulkan: {error}")
    for name, (seconds, error) in results.items():
        row[f"{name}_tflops"] = round(flops / seconds / 1e12, 1)
        row[f"{name}_ratio"] = round(peer_seconds / seconds, 3)
        row[f"{name}_error"] = f"{error:.1e}"
    ROWS.append(row)
    print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)


def host_cost() -> None:
    """Microseconds of host time per call when the device is kept busy elsewhere: calls are only enqueued."""
    q, k, v = (torch.randn(1, 4, 64, 64, device="cuda") for _ in range(3))
    calls = {
        "aule.flash_attention": lambda: aule.flash_attention(q, k, v, causal=True),
        "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    with torch.no_grad():
        for name, call in calls.items():
            for _ in range(50):
                call()
            rounds = []
            for _ in range(20):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(100):
                    call()
                rounds.append((time.perf_counter() - start) / 100)
            print(f"host time per call, {name}: {1e6 * statistics.median(rounds):.1f} us", flush=True)


FIRST = """
import time, torch
q = torch.randn(1, 4, 512, 64, device="cuda"); torch.cuda.synchronize()
start = time.perf_counter()
import aule
imported = time.perf_counter()
aule.flash_attention(q, q, q); torch.cuda.synchronize()
print(f"import {imported - start:.3f} s, first call {time.perf_counter() - imported:.3f} s")
"""


def first_calls() -> None:
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"AULE_CACHE_DIR": folder, "AULE_DISK_CACHE": "1", "CUDA_CACHE_PATH": folder + "/nv"}
        for kind in ("cold", "warm"):
            done = subprocess.run([sys.executable, "-c", FIRST], env=env, capture_output=True, text=True, check=True)
            print(f"first call, {kind} cache: {done.stdout.strip()}", flush=True)


def memory_growth() -> None:
    """Extra device memory of a call, beyond inputs and output."""
    for seq in (4096, 8192, 16384):
        q = torch.randn(1, 8, seq, 64, device="cuda")
        aule.flash_attention(q, q, q)
        torch.cuda.synchronize()
        free_before = torch.cuda.mem_get_info()[0]
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        out, lse = aule.flash_attention(q, q, q, return_lse=True)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - base
        outside = free_before - torch.cuda.mem_get_info()[0]
        expected = out.numel() * 4 + lse.numel() * 4
        print(f"memory at S {seq}: torch peak {peak} bytes (output and lse are {expected}), outside torch {outside}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quick", action="store_true", help="only the shapes of the speed floor, fewer repeats")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, aule {aule.__version__}, Python {platform.python_version()}")
    with written(args.csv, ROWS, device, numpy=np.__version__):
        for dim in (64, 128) if args.dtype == "float32" else (64, 128, 256):
            for seq in (2048, 8192) if args.quick else (512, 2048, 8192):
                for causal in (False, True):
                    compare(getattr(torch, args.dtype), dim, seq, causal, 7 if args.quick else 15)
    host_cost()
    first_calls()
    memory_growth()


if __name__ == "__main__":
    main()
