"""Compares aule.flex_attention on a GPU with PyTorch's FlexAttention, compiled: the same functions in one run.

    python benchmarks/flex.py [--csv FILE] [--cases causal,documents] [--dims 64,128] [--workers 8] [--masks]

bf16, batch 2, 16 heads, S 8192, forward and backward; every result is checked against float64 on the last head.
``--workers`` has so many processes compile PyTorch's kernels into its cache first. ``--masks`` times the block masks
alone, also at S 131072, and the first call of a new function with an empty cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from forward import timed
from result_file import written
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import aule

S, BATCH, HEADS, LONG = 8192, 2, 16, 131072


class Case(NamedTuple):
    """Functions, and the captured tensors that are learned."""

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    learned: tuple[torch.Tensor, ...] = ()


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def window(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i - j <= 1024)


def prefix(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) | (j < 1500)


def dilated(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & ((i - j) // 128 % 4 == 0)


def documents(length: int = S) -> Case:
    ends = torch.randperm(length - 1, generator=torch.Generator().manual_seed(1))[: length // 600].sort().values.cuda()
    number = torch.searchsorted(ends, torch.arange(length, device="cuda"), right=True)
    return Case(mask=lambda b, h, i, j: (number[i] == number[j]) & (i >= j))


def alibi() -> Case:
    slopes = torch.tensor([2.0 ** (-(i + 1) / 2) for i in range(HEADS)], device="cuda")
    return Case(lambda s, b, h, i, j: s - slopes[h] * (i - j), causal)


def softcap() -> Case:
    return Case(lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0), causal)


def relative(learned: bool) -> Case:
    table = torch.randn(HEADS, 2 * S, device="cuda", requires_grad=learned)
    return Case(lambda s, b, h, i, j: s + table[h, i - j + S], None, (table,) if learned else ())


CASES: dict[str, Callable[[], Case]] = {
    "causal": lambda: Case(mask=causal),
    "window of 1024": lambda: Case(mask=window),
    "documents": documents,
    "prefix LM": lambda: Case(mask=prefix),
    "dilated": lambda: Case(mask=dilated),
    "ALiBi, causal": alibi,
    "softcap, causal": softcap,
    "relative bias": lambda: relative(False),
    "relative bias, learned": lambda: relative(True),
}


class Calls:
    """Tensors of a case, and the calls of both."""

    def __init__(self, name: str, dim: int) -> None:
        torch.manual_seed(0)
        self.case = CASES[name]()
        make = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        self.inputs = tuple(torch.randn(BATCH, HEADS, S, dim, **make) for _ in range(3))
        self.dout = torch.randn(BATCH, HEADS, S, dim, device="cuda", dtype=torch.bfloat16)
        mask = self.case.mask
        self.masks = [
            None if mask is None else make(mask, None, None, S, S, device="cuda")
            for make in (aule.create_block_mask, create_block_mask)
        ]
        self.compiled = torch.compile(flex_attention, dynamic=False)

    def ours(self) -> Any:
        return aule.flex_attention(*self.inputs, score_mod=self.case.score, block_mask=self.masks[0])

    def peer(self) -> Any:
        return self.compiled(*self.inputs, score_mod=self.case.score, block_mask=self.masks[1])

    def gradients(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (*self.inputs, *self.case.learned), self.dout, retain_graph=True)

    def error(self, out: torch.Tensor) -> float:
        """Largest error of the last head, relative to its largest element."""
        i = torch.arange(S, device="cuda")
        with torch.no_grad():
            q, k, v = (x[-1, -1].double() for x in self.inputs)
            s = q @ k.T * q.shape[-1] ** -0.5
            if self.case.score is not None:
                s = self.case.score(s, BATCH - 1, HEADS - 1, i[:, None], i[None, :]).double()
            if self.case.mask is not None:
                s = s.masked_fill(~self.case.mask(BATCH - 1, HEADS - 1, i[:, None], i[None, :]), float("-inf"))
            want = F.softmax(s, -1) @ v
            return float((out[-1, -1].double() - want).abs().max() / want.abs().max())


def run(name: str, dim: int) -> dict[str, object]:
    """Times of both, in ms; of aule alone where PyTorch's compiler fails."""
    calls = Calls(name, dim)
    row: dict[str, object] = {"case": name, "head_dim": dim}
    found = []
    for who, call in (("aule", calls.ours), ("flex", calls.peer)):
        try:
            out = call()
            found.append([x.float() for x in calls.gradients(out)])
        except RuntimeError as error:
            row["flex_failed"] = str(error).splitlines()[0][:200]
            continue
        with torch.no_grad():
            row |= {f"{who}_error": f"{calls.error(out):.1e}", f"{who}_ms": ms(several(call))}
        row[f"{who}_backward_ms"] = ms(several(lambda out=out: calls.gradients(out)))
    if len(found) > 1:
        apart = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(*found, strict=True))
        row |= {"ratio": over(row, "flex_ms", "aule_ms"), "gradients_apart": f"{apart:.1e}"}
        row["backward_ratio"] = over(row, "flex_backward_ms", "aule_backward_ms")
    return row


def over(row: dict[str, Any], first: str, second: str) -> float:
    return round(row[first] / row[second], 3)


def several(call: Any) -> float:
    """Seconds of a call of four in a row, during which the host is ahead."""
    return timed(lambda: [call() for _ in range(4)], 7) / 4


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def compile_peer(case: tuple[str, int]) -> None:
    """Compile PyTorch's kernels of a case into its cache."""
    try:
        calls = Calls(*case)
        calls.gradients(calls.peer())
    except Exception as error:  # an exception of PyTorch's compiler cannot be sent to another process
        print(*case, f"not compiled: {error}"[:300], flush=True)


def masks() -> list[dict[str, object]]:
    """Times of block masks, by wall clock: both wait for the device."""
    rows = []
    made = torch.compile(create_block_mask)
    for name in ("causal", "window of 1024", "documents", "prefix LM", "dilated"):
        mask = CASES[name]().mask
        calls = {
            "aule": lambda mask=mask: aule.create_block_mask(mask, None, None, S, S, device="cuda"),
            "flex": lambda mask=mask: made(mask, None, None, S, S, device="cuda"),
        }
        row: dict[str, object] = {"case": f"block mask, {name}"}
        row |= {f"{who}_ms": ms(wall(call)) for who, call in calls.items()}
        rows.append(row | {"ratio": over(row, "flex_ms", "aule_ms")})
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base, mask = torch.cuda.memory_allocated(), documents(LONG).mask
    q, k, v = (torch.randn(1, 2, LONG, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    start = time.perf_counter()
    out = aule.flex_attention(q, k, v, block_mask=aule.create_block_mask(mask, None, None, LONG, LONG, device="cuda"))
    torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() - base
    assert bool(out.isfinite().all())
    rows.append({"case": f"documents, S {LONG}, first call", "aule_ms": ms(seconds), "peak_mib": peak >> 20})
    return rows


def wall(call: Callable[[], Any], repeats: int = 10) -> float:
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repeats // 2]


FIRST = """
import time, torch, aule
q = torch.randn(1, 4, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
aule.flash_attention(torch.randn(1, 1, 8, 8, device="cuda"), *(torch.randn(1, 1, 8, 8, device="cuda"),) * 2)
torch.cuda.synchronize()
start = time.perf_counter()
mask = aule.create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 300), None, None, 2048, 2048, device="cuda")
out = aule.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + 0.1 * (i - j), block_mask=mask)
torch.cuda.synchronize()
forward = time.perf_counter() - start
out.sum().backward()
torch.cuda.synchronize()
print(f"{forward:.2f} s, with backward {time.perf_counter() - start:.2f} s")
"""


def first_call() -> None:
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"AULE_CACHE_DIR": folder, "CUDA_CACHE_PATH": folder + "/nv"}
        done = subprocess.run([sys.executable, "-c", FIRST], env=env, capture_output=True, text=True, check=True)
        print("first call of new functions, empty cache:", done.stdout.strip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv")
    parser.add_argument("--cases", default="", help="the beginnings of their names")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--masks", action="store_true")
    args = parser.parse_args()
    device, rows = torch.cuda.get_device_name(), []
    chosen = [name for name in CASES if name.startswith(tuple(args.cases.split(",")))]
    cases = [(name, int(dim)) for dim in args.dims.split(",") for name in chosen]
    if args.workers:
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
            pool.map(compile_peer, cases, chunksize=1)
    print(f"{device}, torch {torch.__version__}, aule {aule.__version__}")
    with written(args.csv, rows, device):
        for case in cases:
            torch._dynamo.reset()  # every case is compiled anew
            rows.append(run(*case))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        if args.masks:
            rows += masks()
            print(*rows[-6:], sep="\n", flush=True)
            first_call()


if __name__ == "__main__":
    main()
