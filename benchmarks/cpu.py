"""Compares the CPU engine with PyTorch's attention, in one run; results are checked against float64 before timing.

    python benchmarks/cpu.py [--csv FILE] [--plot FILE] [--only TEXT] [--rounds N]

PyTorch is timed with its default number of threads and with every number up to that of the cores; ratios are those of
its best time to ours. Rounds alternate between the two, and a ratio is the median over rounds: the machine may be
noisy, but both see the same noise. The processor's own peak, independent fused multiply-adds on all threads, is
measured in the same rounds; shares of it are those of the best rounds of either.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from result_file import write_csv

import aule
from aule.backends import registry
from aule.engine.programs import program
from aule.ir import Builder
from aule.ir.types import Vector, bf16, f32, i64, u32
from aule.tile.vector.engine import has_pairs, vector_unit


@dataclass(frozen=True)
class Case:
    """A row of the table: what is computed, and what is asked of it."""

    name: str
    heads: int
    seq_q: int
    seq_kv: int
    dim: int
    batch: int = 1
    heads_kv: int | None = None
    causal: bool = False
    mask: bool = False
    dtype: torch.dtype = torch.float32
    forward: float = 0.0
    """The least ratio to PyTorch, as the project asks for it."""
    backward: float = 0.0

    @property
    def flops(self) -> float:
        full = 4.0 * self.batch * self.heads * self.seq_q * self.seq_kv * self.dim
        return full / 2 if self.causal else full

    @property
    def bytes(self) -> float:
        """Of K and V."""
        kv = self.heads_kv or self.heads
        return 2.0 * self.batch * kv * self.seq_kv * self.dim * torch.empty(0, dtype=self.dtype).element_size()


def cases() -> list[Case]:
    rows = []
    for seq, batch, full, causal in ((512, 2, 1.2, 2.0), (2048, 1, 1.25, 1.6), (8192, 1, 1.25, 1.3)):
        heads = 8 if seq < 8192 else 4
        rows.append(Case(f"d64 S{seq} full", heads, seq, seq, 64, batch, forward=full, backward=1.4))
        rows.append(Case(f"d64 S{seq} causal", heads, seq, seq, 64, batch, causal=True, forward=causal, backward=1.6))
    rows.append(Case("d128 S2048 full", 8, 2048, 2048, 128, forward=1.35, backward=1.3))
    rows.append(Case("d128 S2048 causal", 8, 2048, 2048, 128, causal=True, forward=1.8, backward=1.6))
    for dim in (40, 80, 96, 256):
        rows.append(Case(f"d{dim} S1024 full", 8, 1024, 1024, dim, forward=1.4, backward=1.4))
    rows.append(Case("one head d64 S4096", 1, 4096, 4096, 64, forward=1.5, backward=1.8))
    for batch in (1, 8):
        for keys in (4096, 32768):
            rows.append(Case(f"decode GQA 32/8 d128 B{batch} {keys} keys", 32, 1, keys, 128, batch, 8, forward=2.5))
    rows.append(Case("GQA 32/8 d64 S1024 boolean mask", 32, 1024, 1024, 64, 1, 8, mask=True, forward=1.5))
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        for dim in (64, 128):
            rows.append(Case(f"{name} d{dim} S2048 full", 8, 2048, 2048, dim, dtype=dtype, forward=1.2, backward=3.0))
    return rows


class Problem:
    """A case's tensors, and the calls that are timed."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(0)
        kv = case.heads_kv or case.heads

        def made(heads: int, seq: int) -> torch.Tensor:
            return torch.randn(case.batch, heads, seq, case.dim, generator=generator).to(case.dtype)

        self.q, self.k, self.v = made(case.heads, case.seq_q), made(kv, case.seq_kv), made(kv, case.seq_kv)
        self.dout = made(case.heads, case.seq_q)
        self.mask = None
        if case.mask:
            self.mask = torch.rand(case.batch, 1, case.seq_q, case.seq_kv, generator=generator) < 0.7

    def ours(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = aule.flash_attention(q, k, v, causal=self.case.causal, mask=self.mask, backend="cpu")
        return result

    def peer(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.case.causal, enable_gqa=gqa)

    def check(self) -> tuple[float, float]:
        """Largest error of the output and of the gradients, relative to the largest value, by the last head."""
        group = self.q.shape[1] // self.k.shape[1]
        last = [x[-1:, -n:].double().requires_grad_() for x, n in ((self.q, group), (self.k, 1), (self.v, 1))]
        mask = None if self.mask is None else self.mask[-1:]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            want = F.scaled_dot_product_attention(
                *last, attn_mask=mask, is_causal=self.case.causal, enable_gqa=group > 1
            )
        got = self.ours(self.q, self.k, self.v)[-1:, -group:].double()
        error = float((got - want.detach()).abs().max() / want.detach().abs().max())
        if not self.case.backward:
            return error, 0.0
        wanted = torch.autograd.grad(want, last, self.dout[-1:, -group:].double())
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        found = torch.autograd.grad(self.ours(*leaves), leaves, self.dout)
        worst = 0.0
        for w, f, n in zip(wanted, found, (group, 1, 1), strict=True):
            worst = max(worst, float((f[-1:, -n:].double() - w).abs().max() / w.abs().max()))
        return error, worst

    def backward(self, attention: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        out = attention(*leaves)
        return lambda: torch.autograd.grad(out, leaves, self.dout, retain_graph=True)


def peak(pairs: bool = False) -> Callable[[], float]:
    """A function that measures the rate of independent fused multiply-adds on all threads, in GFLOP/s; or of products
    of pairs of bf16."""
    device: Any = registry.find("cpu")
    lanes, chains, steps, tasks = vector_unit(device.target, f32).lanes, 12, 600000, 8
    b = Builder("pair_peak" if pairs else "fma_peak", workgroup=1)
    out, x = b.buffer("out_ptr", f32, "write"), b.splat(b.scalar("x", f32), lanes)
    sums = [b.var(b.splat(b.const(float(i), f32), lanes)) for i in range(chains)]
    bits = b.bitcast(x, Vector(u32, lanes))
    with b.loop(b.const(0, i64), steps, unroll=4):
        for s in sums:
            s.value = b.dot_pairs(bits, bits, s.value) if pairs else b.fma(s.value, x, x)
    total = sums[0].value
    for s in sums[1:]:
        total = total + s.value
    b.store(out, b.cast(b.group_id(0), i64) * lanes, total, align=1)
    launch = device.prepare(program(device, ("peak", pairs, lanes, steps), b.finish), (tasks, 1, 1), [0.5])
    memory = np.zeros(tasks * lanes, np.float32)

    def measure() -> float:
        start = time.perf_counter()
        launch.launch([memory.ctypes.data])
        flops = (4.0 if pairs else 2.0) * tasks * steps * chains * lanes
        return flops / (time.perf_counter() - start) / 1e9

    measure()
    return measure


def seconds(call: Callable[[], Any], at_least: float = 0.02) -> float:
    """Time of one call; short ones are repeated. A first call is not counted: the threads of whoever ran before may
    still be spinning for more work."""
    start = time.perf_counter()
    call()
    count = int(at_least / max(time.perf_counter() - start, 1e-6)) + 1
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def race(ours: Callable[[], Any], peer: Callable[[], Any], peak_of: Callable[[], float], rounds: int) -> dict[str, Any]:
    """Our time, PyTorch's by number of threads, and the ratio, over alternating rounds."""
    default = torch.get_num_threads()
    settings = sorted({default, *range(1, (os.cpu_count() or 1) + 1)})
    mine: list[float] = []
    theirs: dict[int, list[float]] = {n: [] for n in settings}
    peaks = []
    ours()
    for _ in range(rounds):
        peaks.append(peak_of())
        mine.append(seconds(ours))
        for n in settings:
            torch.set_num_threads(n)
            if not theirs[n]:
                peer()
            theirs[n].append(seconds(peer))
        torch.set_num_threads(default)
    best = min(settings, key=lambda n: statistics.median(theirs[n]))
    ratios = [b / a for a, b in zip(mine, theirs[best], strict=True)]
    at_default = [b / a for a, b in zip(mine, theirs[default], strict=True)]
    return {
        "ours_ms": 1e3 * statistics.median(mine),
        "peer_ms": 1e3 * statistics.median(theirs[best]),
        "peer_threads": best,
        "ratio": statistics.median(ratios),
        "ratio_default": statistics.median(at_default),
        "peak": statistics.median(peaks),
        "best_ms": 1e3 * min(mine),
        "best_peak": max(peaks),
    }


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Ratios as bars, in SVG written by hand: no further package."""
    bars = [(f"{r['case']} {r['pass']}", float(r["ratio"]), float(r["wanted"])) for r in rows]
    height, left, scale = 18 * len(bars) + 30, 330, 120
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + scale * 6}" height="{height}" '
             'font-family="sans-serif" font-size="12">']  # fmt: skip
    for i, (name, ratio, wanted) in enumerate(bars):
        y = 18 * i + 6
        colour = "#4a7" if ratio >= wanted else "#c64"
        parts.append(f'<text x="{left - 6}" y="{y + 11}" text-anchor="end">{name}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{scale * min(ratio, 5.5):.1f}" height="13" fill="{colour}"/>')
        at = left + scale * min(wanted, 5.5)
        parts.append(f'<path d="M{at:.1f} {y - 1}v15" stroke="#000"/>')
        parts.append(f'<text x="{left + scale * min(ratio, 5.5) + 4:.1f}" y="{y + 11}">{ratio:.2f}x</text>')
    parts.append(
        f'<text x="{left}" y="{height - 8}">speed against PyTorch; the stroke is what is asked for</text></svg>'
    )
    with open(path, "w") as file:
        file.write("\n".join(parts))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv")
    parser.add_argument("--plot")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    device = registry.find("cpu")
    assert device is not None
    fp32_peak = peak()
    # What is converted to fp32 is measured against fp32; pairs of bf16, where they are multiplied, by themselves.
    bf16_peak = peak(pairs=True) if has_pairs(device.target, bf16) else fp32_peak
    print(
        f"{device.target.name}, {torch.get_num_threads()} threads, torch {torch.__version__}, aule {aule.__version__}"
    )
    rows: list[dict[str, Any]] = []
    for case in cases():
        if args.only not in case.name:
            continue
        problem = Problem(case)
        peak_of = bf16_peak if case.dtype == torch.bfloat16 else fp32_peak
        errors = problem.check()
        limit = 1e-5 if case.dtype == torch.float32 else 2e-2
        passes = [("forward", case.forward, errors[0], 1.0)]
        if case.backward:
            passes.append(("backward", case.backward, errors[1], 2.5))
        for name, wanted, error, work in passes:
            assert error <= 2 * limit, (case.name, name, error)
            if name == "forward":
                with torch.no_grad():
                    figures = race(
                        lambda p=problem: p.ours(p.q, p.k, p.v),
                        lambda p=problem: p.peer(p.q, p.k, p.v),
                        peak_of,
                        args.rounds,
                    )
            else:
                figures = race(problem.backward(problem.ours), problem.backward(problem.peer), peak_of, args.rounds)
            rate = work * case.flops / figures["ours_ms"] / 1e6
            best_rate = work * case.flops / figures["best_ms"] / 1e6
            row = {
                "case": case.name, "pass": name, "ratio": round(figures["ratio"], 3), "wanted": wanted,
                "ratio_default_threads": round(figures["ratio_default"], 3), "peer_threads": figures["peer_threads"],
                "ours_ms": round(figures["ours_ms"], 3), "peer_ms": round(figures["peer_ms"], 3),
                "gflops": round(rate, 1), "peak_gflops": round(figures["peak"], 1),
                "of_peak": round(best_rate / figures["best_peak"], 3),
                "gb_per_s": round(case.bytes / figures["ours_ms"] / 1e6, 1), "error": f"{error:.1e}",
            }  # fmt: skip
            rows.append(row)
            mark = "ok " if row["ratio"] >= wanted else "LOW"
            print(
                f"{mark} {case.name:38} {name:8} {row['ratio']:6.2f}x (asked {wanted:.2f}x)  "
                f"{row['gflops']:7.1f} GFLOP/s, {100 * row['of_peak']:5.1f}% of peak {row['peak_gflops']:.0f}  "
                f"{row['gb_per_s']:6.1f} GB/s  error {row['error']}",
                flush=True,
            )
    if args.csv:
        write_csv(args.csv, rows, device.target.name, python=platform.python_version(), driver=device.target.driver)
    if args.plot:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
