"""Compares writes into a paged cache with PyTorch: new tokens rotated, quantised and scattered into their pages.

    python benchmarks/kvcache.py [--csv FILE]

8 key heads of d128 in bf16, pages of 16. Peers in the same run: the same by PyTorch's operators, eager and compiled.
Device times are those of a CUDA graph of many calls; "host" is the time of one `KVCache.append`, with its bookkeeping
and the copy of the slots to the device, when many are queued. GB/s counts the bytes read and written. The last rows
compare a copy of pages with PyTorch's copy of the same bytes. Every result is checked first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
from decode import graph_seconds
from result_file import write_csv

import aule
from aule.frontends.torch import kvcache as torch_kvcache
from aule.frontends.torch import route
from aule.frontends.torch.views import view_on_device

HEADS, DIM, PAGE = 8, 128, 16
CALLS = 20
"""Of one graph."""
LIMITS = {"int8": 127.0, "fp8": 448.0}
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Inputs:
    """Rows of new tokens, empty pools, and three ways to write the one into the other."""

    def __init__(self, tokens: int, quantize: str | None, rope: bool) -> None:
        torch.manual_seed(0)
        pages = 2 * -(-tokens // PAGE) + 8
        self.quantize, self.tokens = quantize, tokens
        self.k, self.v = (torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        shape = (pages, PAGE, HEADS, DIM)
        stored = torch.bfloat16 if quantize is None else TYPES[quantize]
        self.pools = [torch.zeros(shape, device="cuda", dtype=stored) for _ in range(2)]
        self.scales = [torch.zeros(shape[:3], device="cuda") for _ in range(2)] if quantize else []
        self.slots = torch.randperm(pages * PAGE, device="cuda")[:tokens]
        self.positions = torch.arange(tokens, device="cuda") % 4096
        angles = torch.randn(4096, DIM // 2, device="cuda")
        self.rope = (angles.cos(), angles.sin()) if rope else None
        arrays = {"k": self.k[None], "v": self.v[None], "k_cache": self.pools[0], "v_cache": self.pools[1]}
        if quantize:
            arrays |= {"k_scale": self.scales[0], "v_scale": self.scales[1]}
        if self.rope is not None:
            arrays |= {"cos": self.rope[0], "sin": self.rope[1]}
        self.arrays = arrays | {"places": torch.stack([self.slots, self.positions]).to(torch.int32)}

    @property
    def bytes(self) -> int:
        stored = 2 if self.quantize is None else 1
        return 2 * self.tokens * HEADS * (DIM * (2 + stored) + (4 if self.quantize else 0))

    def ours(self) -> None:
        torch_kvcache.write("benchmark", self.arrays)

    def rows(self, i: int) -> torch.Tensor:
        x = (self.k, self.v)[i]
        if i == 0 and self.rope is not None:
            cos, sin = (angle[self.positions][:, None] for angle in self.rope)
            a, b = x.float().chunk(2, -1)
            x = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return x

    def theirs(self) -> None:
        for i in range(2):
            x = self.rows(i)
            if self.quantize is not None:
                wide = x.float()
                scale = wide.abs().amax(-1) / LIMITS[self.quantize]
                self.scales[i].view(-1, HEADS)[self.slots] = scale
                wide = wide / scale[..., None]
                coded = wide.round() if self.quantize == "int8" else wide
                bits = coded.to(TYPES[self.quantize]).view(torch.int8)
                self.pools[i].view(torch.int8).view(-1, HEADS, DIM)[self.slots] = bits
            else:
                self.pools[i].view(-1, HEADS, DIM)[self.slots] = x.to(torch.bfloat16)

    def error(self) -> float:
        """Of what was written, relative to the largest number of its row."""
        worst = 0.0
        for i in range(2):
            found = self.pools[i].view(-1, HEADS, DIM)[self.slots].float()
            if self.quantize:
                found = found * self.scales[i].view(-1, HEADS)[self.slots][..., None]
            wanted = self.rows(i).double()
            worst = max(worst, float(((found - wanted).abs().amax(-1) / wanted.abs().amax(-1)).max()))
        return worst


def append_seconds(tokens: int, quantize: str | None, rope: Any) -> float:
    """Median time of one append of a token to each of ``tokens`` sequences, when many are queued."""
    steps, rounds = 64, 5
    cache = aule.KVCache(
        tokens * (steps * rounds // PAGE + 2), HEADS, DIM, dtype="bfloat16", quantize=quantize, device="cuda"
    )
    seqs = [cache.allocate() for _ in range(tokens)]
    k, v = (torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            cache.append(seqs, k, v, rope=rope)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / steps)
    return statistics.median(times)


def copied_pages(pages: int, layers: int) -> tuple[float, float]:
    """Times of copying pages of all layers, ours and PyTorch's."""
    pools = {
        f"{name}_cache": torch.randn(layers, 2 * pages, PAGE, HEADS, DIM, device="cuda").to(torch.bfloat16)
        for name in "kv"
    }
    pairs = np.stack([np.arange(pages), np.random.default_rng(0).permutation(pages) + pages], 1).astype(np.int32)
    there = torch.from_numpy(pairs).long().cuda()
    torch_kvcache.copy_pages(pools, pairs)
    for pool in pools.values():
        assert torch.equal(pool[:, there[:, 1]], pool[:, there[:, 0]])

    def theirs() -> None:
        for pool in pools.values():
            pool[:, there[:, 1]] = pool[:, there[:, 0]]

    # A graph cannot hold the copy of the pairs to the device: the launch alone.
    flat = {name: pool.flatten(2) for name, pool in pools.items()}
    call = torch_kvcache._Copy(flat, pairs, None).placed(on_host=False)
    device = route.CUDA.device(call)
    prepared = call.prepare(call.bind(view_on_device), device, route.CUDA.memory(call, device), {})
    launch, tensors = prepared.bind(tuple(call.tensors)), list(call.tensors.values())
    ours = graph_seconds(lambda: route.CUDA.launch(launch, tensors), CALLS)
    return ours, graph_seconds(theirs, CALLS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Appending to a paged cache beside PyTorch.")
    parser.add_argument("--csv")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    lines: list[dict[str, Any]] = []
    print(" tokens stored  rope  ours us   GB/s   eager  compiled  host us")
    for tokens in (32, 256, 16384):
        for quantize in (None, "int8", "fp8"):
            for rope in (False, True):
                inputs = Inputs(tokens, quantize, rope)
                inputs.ours()
                allowed = {None: 2.0**-8, "int8": 0.51 / 127, "fp8": 2.0**-4}[quantize]
                error = inputs.error()
                assert error <= allowed, f"{tokens} {quantize} {rope}: {error}"
                ours = graph_seconds(inputs.ours, CALLS)
                eager = graph_seconds(inputs.theirs, CALLS)
                compiled = float("nan")
                if tokens > 32:  # it takes its time
                    compiled = graph_seconds(torch.compile(inputs.theirs, dynamic=False), CALLS)
                host = append_seconds(tokens, quantize, inputs.rope) if tokens <= 256 else float("nan")
                rate = inputs.bytes / ours / 1e9
                lines.append({
                    "tokens": tokens, "stored": quantize or "bf16", "rope": rope, "ours_us": ours * 1e6, "gbs": rate,
                    "eager_us": eager * 1e6, "compiled_us": compiled * 1e6, "host_us": host * 1e6,
                })  # fmt: skip
                times = f"{eager * 1e6:7.1f} {compiled * 1e6:9.2f} {host * 1e6:8.1f}"
                print(
                    f"{tokens:7} {quantize or 'bf16':>6} {rope!s:>5} {ours * 1e6:8.2f} {rate:6.0f} {times}", flush=True
                )
    for pages, layers in ((4, 32), (64, 32)):
        ours, theirs = copied_pages(pages, layers)
        moved = 2 * 2 * pages * layers * PAGE * HEADS * DIM * 2
        print(f"copy of {pages} pages of {layers} layers: {ours * 1e6:.1f} us ({moved / ours / 1e9:.0f} GB/s), "
              f"PyTorch {theirs * 1e6:.1f} us")  # fmt: skip
    if options.csv:
        write_csv(options.csv, lines, torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
