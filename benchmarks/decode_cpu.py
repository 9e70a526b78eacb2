"""Compares decoding on the CPU engine with PyTorch's attention over the same keys, in one run.

    python benchmarks/decode_cpu.py [--one-thread] [--csv FILE] [--only TEXT] [--rounds N]

Each case is one query token of each sequence over its cache. Ours is computed over a contiguous cache and over pages in
random order, in the cache's dtype, int8 and fp8; PyTorch's over the contiguous one, with ``enable_gqa`` and the better
number of threads. Every result is checked against float64 first. Rounds alternate between all of them, and ratios are
medians over rounds. With ``--one-thread`` all run on one thread and its CPU time is measured, the least of all rounds:
for machines with other load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from result_file import write_csv

import aule
from aule.backends import registry

HEADS, HEADS_KV, DIM, PAGE = 32, 8, 128, 16


@dataclass(frozen=True)
class Case:
    """Sequences of so many keys each, in a dtype and an order of axes."""

    batch: int
    keys: int
    dtype: torch.dtype
    layout: str

    def __str__(self) -> str:
        kind = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        return f"B{self.batch} {self.keys} keys {kind} {self.layout}"


CASES = [
    Case(batch, 4096, dtype, layout)
    for batch in (1, 8)
    for dtype in (torch.float32, torch.bfloat16)
    for layout in ("NHD", "HND")
]


class Problem:
    """A case's tensors, and the calls that are timed."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        self.case = case
        self.q = torch.randn(case.batch, HEADS, DIM, generator=generator).to(case.dtype)
        each = case.keys // PAGE
        self.tables = torch.randperm(case.batch * each, generator=generator).view(case.batch, each).int()
        self.lens = torch.full((case.batch,), case.keys, dtype=torch.int32)
        token = (PAGE, HEADS_KV) if case.layout == "NHD" else (HEADS_KV, PAGE)
        shape = (case.batch * each, *token, DIM)
        self.pools = [torch.randn(shape, generator=generator).to(case.dtype) for _ in range(2)]
        self.plain = [self._gathered(pool) for pool in self.pools]

    def _gathered(self, pool: torch.Tensor) -> torch.Tensor:
        """The cache of each sequence in one piece, its axes in the order of the pool's: [batch, heads, keys, dim]."""
        pages = pool[self.tables.long()]
        if self.case.layout == "NHD":
            return pages.reshape(self.case.batch, self.case.keys, HEADS_KV, DIM).transpose(1, 2)
        return pages.transpose(1, 2).reshape(self.case.batch, HEADS_KV, self.case.keys, DIM)

    def paged(self, *pools: torch.Tensor, **scales: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = aule.flash_attention_paged(
            self.q, *pools, self.tables, self.lens, layout=self.case.layout, backend="cpu", **scales
        )
        return result

    def quantised(self, dtype: torch.dtype, largest: float) -> Callable[[], torch.Tensor]:
        scales = [pool.float().abs().amax(-1) / largest for pool in self.pools]
        whole = [pool.float() / scale[..., None] for pool, scale in zip(self.pools, scales, strict=True)]
        stored = [(x.round() if dtype == torch.int8 else x).to(dtype) for x in whole]
        return lambda: self.paged(*stored, k_scale=scales[0], v_scale=scales[1])

    def calls(self) -> dict[str, Callable[[], torch.Tensor]]:
        def contiguous() -> torch.Tensor:
            result: torch.Tensor = aule.decode_attention(self.q, *self.plain, context_lens=self.lens, backend="cpu")
            return result

        def peer() -> torch.Tensor:
            return F.scaled_dot_product_attention(self.q[:, :, None], *self.plain, enable_gqa=True)[:, :, 0]

        return {
            "pytorch": peer,
            "contiguous": contiguous,
            "paged": lambda: self.paged(*self.pools),
            "int8": self.quantised(torch.int8, 127.0),
            "fp8": self.quantised(torch.float8_e4m3fn, 448.0),
        }

    def check(self, calls: dict[str, Callable[[], torch.Tensor]]) -> None:
        """Largest error relative to the largest value, of what is not quantised; that is as coarse as its numbers."""
        q, k, v = (x.double() for x in (self.q[:, :, None], *self.plain))
        want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0]
        limits = {"int8": 2e-2, "fp8": 8e-2}
        for name, call in calls.items():
            error = float((call().double() - want).abs().max() / want.abs().max())
            assert error <= limits.get(name, 1e-5 if self.case.dtype == torch.float32 else 1e-2), (name, error)


def seconds(call: Callable[[], Any], clock: Callable[[], float], at_least: float = 0.03) -> float:
    """Time of one call; a first one, which may find the threads of whoever ran before, is not counted."""
    call()
    count, start = 0, clock()
    while clock() - start < at_least:
        call()
        count += 1
    return (clock() - start) / count


def race(calls: dict[str, Callable[[], Any]], rounds: int, one_thread: bool) -> dict[str, list[float]]:
    """Times of each call, round by round; PyTorch's with its better number of threads."""
    threads = [1] if one_thread else range(1, (os.cpu_count() or 1) + 1)
    clock = time.thread_time if one_thread else time.perf_counter
    default = torch.get_num_threads()
    times: dict[str, list[float]] = {name: [] for name in calls if name != "pytorch"}
    peer: dict[int, list[float]] = {n: [] for n in threads}
    for _ in range(rounds):
        for n in threads:
            torch.set_num_threads(n)
            peer[n].append(seconds(calls["pytorch"], clock))
        torch.set_num_threads(default)
        for name in times:
            times[name].append(seconds(calls[name], clock))
    return times | {"pytorch": min(peer.values(), key=statistics.median)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one-thread", action="store_true")
    parser.add_argument("--csv")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.one_thread:
        os.environ["AULE_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    device = registry.find("cpu")
    assert device is not None
    print(f"{device.target.name}, torch {torch.__version__}, {HEADS}/{HEADS_KV} heads, d{DIM}, pages of {PAGE}")
    rows = []
    for case in CASES:
        if args.only not in str(case):
            continue
        problem = Problem(case)
        calls = problem.calls()
        problem.check(calls)
        times = race(calls, args.rounds, args.one_thread)
        middle = min if args.one_thread else statistics.median
        best: dict[str, float] = {name: middle(series) for name, series in times.items()}
        ratio = {
            name: best["pytorch"] / best[name] if args.one_thread
            else statistics.median(b / a for a, b in zip(series, times["pytorch"], strict=True))
            for name, series in times.items()
        }  # fmt: skip
        nbytes = 2 * problem.plain[0].numel() * problem.plain[0].element_size()
        row: dict[str, Any] = {"case": str(case)}
        for name, x in best.items():
            row |= {f"{name}_ms": round(1e3 * x, 3), f"{name}_ratio": round(ratio[name], 2)}
        row |= {
            "contiguous_gb_per_s": round(nbytes / best["contiguous"] / 1e9, 1),
            "paged_of_contiguous": round(best["paged"] / best["contiguous"], 3),
        }
        rows.append(row)
        print(
            f"{case!s:24} PyTorch {row['pytorch_ms']:8.2f} ms; "
            + ", ".join(f"{n} {row[f'{n}_ms']:.2f} ms ({row[f'{n}_ratio']:.2f}x)" for n in best if n != "pytorch")
            + f"; {row['contiguous_gb_per_s']} GB/s, pages take {row['paged_of_contiguous']:.2f} of contiguous",
            flush=True,
        )
    if args.csv:
        write_csv(args.csv, rows, device.target.name, one_thread=args.one_thread)
    return 0


if __name__ == "__main__":
    sys.exit(main())
