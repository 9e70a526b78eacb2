"""Attention with rotary position embeddings: three variants in one run, each checked against float64 before timing.

    python benchmarks/rope.py [--dtype bfloat16] [--csv FILE]

`fused` is ``aule.flash_attention(rope=(cos, sin))``; `before` rotates q and k by compiled PyTorch and then calls
``aule.flash_attention``; `torch` does the same with PyTorch's FLASH_ATTENTION (EFFICIENT_ATTENTION in fp32); `plain` is
aule's attention without any rotation, the bound. B·S = 16384, H·D = 2048, causal; milliseconds, and the memory that a
forward and backward pass adds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from forward import timed
from result_file import write_csv
from torch.nn.attention import SDPBackend, sdpa_kernel

import aule

WARM_SECONDS = 0.5
"""The card idles at low clocks."""


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """By halves, in fp32, rounded once."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def variants(cos: Any, sin: Any, peer: SDPBackend) -> dict[str, Callable[..., Any]]:
    rotate = torch.compile(rotated, dynamic=False)

    def by_torch(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(peer):
            return F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)

    return {
        "fused": lambda q, k, v: aule.flash_attention(q, k, v, causal=True, rope=(cos, sin)),
        "before": lambda q, k, v: aule.flash_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, causal=True),
        "torch": by_torch,
        "plain": lambda q, k, v: aule.flash_attention(q, k, v, causal=True),
    }


def error_of(call: Callable[..., Any], tensors: list[Any], dout: Any, expected: list[Any]) -> float:
    """Largest error of the last head's result and gradients, relative to the largest of each."""
    out = call(*tensors)
    found = [out, *torch.autograd.grad(out, tensors, dout)]
    pairs = zip(found, expected, strict=True)
    return max(float((f[-1:, -1:].double() - w).abs().max() / w.abs().max()) for f, w in pairs)


def added_memory(call: Callable[..., Any], tensors: list[Any], dout: Any) -> float:
    """MiB at most above what the inputs take, over a forward and a backward pass."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(call(*tensors), tensors, dout)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def warm(call: Callable[[], Any]) -> None:
    end = time.monotonic() + WARM_SECONDS
    while time.monotonic() < end:
        call()
        torch.cuda.synchronize()


def compare(dtype: torch.dtype, dim: int, seq: int, table: torch.dtype) -> dict[str, object]:
    batch, heads = 16384 // seq, 2048 // dim
    tensors = [torch.randn(batch, heads, seq, dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    dout = torch.randn(batch, heads, seq, dim, device="cuda", dtype=dtype)
    cos, sin = aule.precompute_rope_frequencies(seq, dim, device="cuda", dtype=table)
    last = [x.detach()[-1:, -1:].double().requires_grad_() for x in tensors]
    rotated_qk = [torch.cat([a * cos.double() - b * sin.double(), b * cos.double() + a * sin.double()], -1)
                  for a, b in (x.chunk(2, -1) for x in last[:2])]  # fmt: skip
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*rotated_qk, last[2], is_causal=True)
    expected = [out, *torch.autograd.grad(out, last, dout[-1:, -1:].double())]
    peer = SDPBackend.EFFICIENT_ATTENTION if dtype == torch.float32 else SDPBackend.FLASH_ATTENTION
    row: dict[str, object] = {"dtype": str(dtype).removeprefix("torch."), "head_dim": dim, "seq": seq}
    row["table"] = str(table).removeprefix("torch.")
    calls = variants(cos, sin, peer)
    errors = {name: error_of(call, tensors, dout, expected) for name, call in calls.items() if name != "plain"}
    allowed = 2e-5 if dtype == torch.float32 else 2 * errors["torch"]
    if not errors["fused"] <= allowed:
        raise SystemExit(f"{row}: error {errors['fused']:.1e} of {allowed:.1e} allowed")
    row |= {f"{name}_error": f"{error:.1e}" for name, error in errors.items()}
    for name, call in calls.items():
        out = call(*tensors)
        warm(lambda call=call: call(*tensors))  # type: ignore[misc]
        with torch.no_grad():
            row[f"{name}_forward_ms"] = round(timed(lambda call=call: call(*tensors)) * 1e3, 3)  # type: ignore[misc]
        gradients = timed(lambda out=out: torch.autograd.grad(out, tensors, dout, retain_graph=True))  # type: ignore[misc]
        row[f"{name}_backward_ms"] = round(gradients * 1e3, 3)
        del out
        row[f"{name}_mib"] = round(added_memory(call, tensors, dout))
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, aule {aule.__version__}")
    tables = (torch.float32,) if dtype == torch.float32 else (torch.float32, dtype)
    rows = [compare(dtype, dim, seq, table) for dim in (64, 128) for seq in (2048, 8192) for table in tables]
    if args.csv:
        write_csv(args.csv, rows, torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
