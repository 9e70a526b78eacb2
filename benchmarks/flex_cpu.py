"""Compares aule.flex_attention on the CPU with PyTorch's FlexAttention, compiled (it needs g++): forward, in one run.

    python benchmarks/flex_cpu.py [--one-thread] [--length N] [--rounds N] [--cases causal,documents] [--csv FILE]

fp32, batch 1, 8 heads, d64. Every result is checked against float64 on the last head. Rounds alternate between the two,
and ratios are medians over rounds. With ``--one-thread`` both run on one thread and its CPU time is measured, the least
of all rounds: for machines with other load. The gradients of aule are timed alone: PyTorch has none on CPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from result_file import write_csv
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import aule
from aule.backends import registry

HEADS, DIM = 8, 64
Functions = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def cases(length: int) -> dict[str, Functions]:
    """Score function and mask function of each case."""
    generator = torch.Generator().manual_seed(1)
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(HEADS)])
    table = torch.randn(HEADS, 2 * length, generator=generator)
    number = torch.arange(length) // (length // 8)
    return {
        "no function": (None, None),
        "causal": (None, causal),
        "window of 256": (None, lambda b, h, i, j: (i >= j) & (i - j <= 256)),
        "documents": (None, lambda b, h, i, j: (number[i] == number[j]) & (i >= j)),
        "prefix LM": (None, lambda b, h, i, j: (i >= j) | (j < length // 5)),
        "dilated": (None, lambda b, h, i, j: (i >= j) & ((i - j) // 128 % 4 == 0)),
        "ALiBi, causal": (lambda s, b, h, i, j: s - slopes[h] * (i - j), causal),
        "softcap, causal": (lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0), causal),
        "relative bias": (lambda s, b, h, i, j: s + table[h, i - j + length], None),
    }


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, functions: Functions) -> torch.Tensor:
    """The last head in float64."""
    score_mod, mask_mod = functions
    i = torch.arange(q.shape[2])
    s = q[-1, -1].double() @ k[-1, -1].double().T * DIM**-0.5
    if score_mod is not None:
        s = score_mod(s, 0, HEADS - 1, i[:, None], i)
    if mask_mod is not None:
        s = s.masked_fill(~mask_mod(0, HEADS - 1, i[:, None], i), -torch.inf)
    return F.softmax(s, -1) @ v[-1, -1].double()


def run(name: str, length: int, rounds: int, clock: Callable[[], float], best: bool) -> dict[str, object]:
    """Times of both in ms, and PyTorch's over ours."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, DIM) for _ in range(3))
    score_mod, mask_mod = functions = cases(length)[name]
    masks = [
        None if mask_mod is None else make(mask_mod, None, None, length, length, device="cpu")
        for make in (aule.create_block_mask, create_block_mask)
    ]
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    calls: dict[str, Callable[[], Any]] = {
        "aule": lambda: aule.flex_attention(q, k, v, score_mod, masks[0]),
        "flex": lambda: compiled(q, k, v, score_mod, masks[1]),
    }
    right = expected(q, k, v, functions)
    for who, call in calls.items():
        error = float((call()[-1, -1].double() - right).abs().max() / right.abs().max())
        if error > 1e-5:
            raise SystemExit(f"{name}: expected {who} within 1e-5 of float64, got {error:.1e}")
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out = aule.flex_attention(*given, score_mod, masks[0])
    calls["backward"] = lambda: torch.autograd.grad(out, given, v, retain_graph=True)
    times: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(rounds + 1):
        for who, call in calls.items():
            start = clock()
            call()
            times[who].append(clock() - start)
    typical = {who: (min if best else statistics.median)(found[1:]) for who, found in times.items()}
    ratios = [theirs / ours for ours, theirs in zip(times["aule"][1:], times["flex"][1:], strict=True)]
    ratio = typical["flex"] / typical["aule"] if best else statistics.median(ratios)
    return {"case": name} | {f"{who}_ms": round(1e3 * x, 2) for who, x in typical.items()} | {"ratio": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-thread", action="store_true")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", default="", help="the beginnings of their names")
    parser.add_argument("--csv")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    clock = time.thread_time if options.one_thread else time.perf_counter
    if options.one_thread:
        os.environ["AULE_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    rows = []
    for name in cases(options.length):
        if name.startswith(tuple(options.cases.split(","))):
            rows.append(run(name, options.length, options.rounds, clock, options.one_thread))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.csv:
        write_csv(options.csv, rows, registry.find("cpu").target.name, one_thread=options.one_thread)


if __name__ == "__main__":
    main()
