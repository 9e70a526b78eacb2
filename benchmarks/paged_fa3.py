"""Compares attention over vLLM's paged cache with FlashAttention-3, as vLLM calls it, in one run on a GPU.

    python benchmarks/paged_fa3.py [--csv FILE] [--cases decode-32x4k,...] [--peers .gpu/peers] [--seconds 28]

bf16, d128, causal. One layer's cache has the shape of vLLM's, ``[blocks, heads_kv, block, 2 * head_dim]`` with each key
followed by its value, and lies in memory by block, token, head ("NHD", vLLM's default) or by block, head, token
("HND"). aule is called as `aule.integrations.vllm` calls it. FlashAttention-3 (`peers.py` in the folder ``--peers``
loads vLLM's build) reads the same memory, and beside it pools of its own for keys and for values, contiguous NHD; its
schedule is computed once outside of the timed calls, as vLLM does for a step's layers. The ratio is the faster of the
two over aule. "mixed" has sequences of many new tokens and of one in a batch.

The results of each are checked against float64 before and after it is timed. Times are those of a CUDA graph of several
calls. A case that fails is reported and fails the run at its end. After ``--seconds`` no further case begins; those
left out are named.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from decode import graph_seconds, warm_up
from result_file import written

import aule
from aule.errors import AuleError
from aule.integrations import _vllm_pages as pages

DIM, DEVICE, DTYPE = 128, "cuda", torch.bfloat16
CALLS = 10
"""Of one graph."""
ALLOWED = 0.02
"""Of the largest output: several times bf16's rounding of a result, far below the error of a wrong key."""


@dataclass(frozen=True)
class Case:
    """A step: for each sequence its new tokens and its keys, those of the new tokens included."""

    sequences: tuple[tuple[int, int], ...]
    order: str = "NHD"
    block: int = 16
    heads_q: int = 32
    heads_kv: int = 8

    @property
    def flops(self) -> int:
        """Of both products, those of masked scores left out."""
        scores = sum(new * keys - new * (new - 1) // 2 for new, keys in self.sequences)
        return 4 * self.heads_q * DIM * scores

    @property
    def bytes(self) -> int:
        """Of keys and values, each read once."""
        return 2 * 2 * DIM * self.heads_kv * sum(keys for _, keys in self.sequences)


CASES = {
    "decode-32x4k": Case(32 * ((1, 4096),)),
    "decode-32x4k-hnd": Case(32 * ((1, 4096),), "HND"),
    "prefill-4x2k": Case(4 * ((2048, 2048),)),
    "prefill-4x2k-hnd": Case(4 * ((2048, 2048),), "HND"),
    "chunk-4x512-of-8k": Case(4 * ((512, 8192),)),
    "mixed": Case((*(31 * ((1, 2048),)), (2048, 2048))),
    "decode-128x1k": Case(128 * ((1, 1024),)),
    "decode-4x32k": Case(4 * ((1, 32768),)),
    "decode-1x64k": Case(((1, 65536),)),
    "decode-1x1k": Case(((1, 1024),)),
    "decode-uneven": Case(tuple((1, 256 + 509 * i) for i in range(32))),
    "four-drafts-32x4k": Case(32 * ((4, 4096),)),
    "decode-32x4k-8-to-1": Case(32 * ((1, 4096),), heads_q=8, heads_kv=1),
    "decode-32x4k-block64": Case(32 * ((1, 4096),), block=64),
    "prefill-1x8k": Case(((8192, 8192),)),
    "prefill-1x8k-block64": Case(((8192, 8192),), block=64),
    "chunk-1x2k-of-32k": Case(((2048, 32768),)),
    "prefill-uneven": Case(tuple((137 + 256 * i,) * 2 for i in range(8))),
}


class Step:
    """Tensors of a case, and each attention on them."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        new, keys = (torch.tensor(x, dtype=torch.int32) for x in zip(*case.sequences, strict=True))
        starts = F.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
        counts = -(-keys // case.block)
        self.most_new, self.most_keys, total = int(new.max()), int(keys.max()), int(counts.sum())
        order = 1 + torch.randperm(total, dtype=torch.int32)  # vLLM gives block 0 to no sequence
        tables = torch.zeros(len(keys), int(counts.max()), dtype=torch.int32)
        for row, taken, count in zip(tables, counts.cumsum(0).tolist(), counts.tolist(), strict=True):
            row[:count] = order[taken - count : taken]
        self.starts, self.lens, self.tables = (x.to(DEVICE) for x in (starts, keys, tables))
        shape = [1 + total, case.heads_kv, case.block, 2 * DIM]
        if case.order == "NHD":
            self.cache = _random(1 + total, case.block, case.heads_kv, 2 * DIM).transpose(1, 2)
        else:
            self.cache = _random(*shape)
        assert list(self.cache.shape) == shape
        self.q = _random(int(starts[-1]), case.heads_q, DIM)
        self.out = torch.zeros_like(self.q)
        self.batch = pages.make_batch(self.starts, starts, self.lens, self.tables, causal=True)
        self.in_place = tuple(x.transpose(1, 2) for x in pages.layer_cache(self.cache, DIM))
        self.own_pools = tuple(x.contiguous() for x in self.in_place)

    def aule(self) -> Any:
        """aule's attention, as its backend for vLLM calls it."""
        pages.attend(self.q, pages.layer_cache(self.cache, DIM), self.batch, pages.Scoring(DIM**-0.5), self.out)
        return self.out

    def schedule(self) -> Any:
        """Compute FlashAttention-3's plan of a step, which all layers share."""
        case = self.case
        return torch.ops._vllm_fa3_C.get_scheduler_metadata(
            len(case.sequences), self.most_new, self.most_keys, case.heads_q, case.heads_kv, DIM, DIM, DTYPE,
            self.lens, self.starts, None, None, None, None, case.block, 0, True, -1, -1, False, 0, None, 0,
        )  # fmt: skip

    def fa3(self, pools: tuple[Any, ...], schedule: Any) -> Any:
        """FlashAttention-3 on pools ``[blocks, block, heads_kv, head_dim]``."""
        return torch.ops._vllm_fa3_C.fwd(
            self.q, *pools, None, None, None, self.out, self.starts, None, None, None, self.lens, self.most_new,
            self.most_keys, self.tables, None, None, None, None, None, None, None, None, DIM**-0.5, True, -1, -1, 0.0,
            True, schedule, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip

    def error(self, out: Any) -> float:
        """Largest error against float64 relative to the largest output: of the last key head's queries, in the first
        and the last sequence and the longest."""
        case, worst = self.case, 0.0
        group, lengths = case.heads_q // case.heads_kv, [keys for _, keys in case.sequences]
        starts = self.starts.tolist()
        for n in {0, len(lengths) - 1, lengths.index(max(lengths))}:
            new, keys = case.sequences[n]
            mine = self.tables[n, : -(-keys // case.block)].long()
            both = self.cache[mine, -1].reshape(-1, 2 * DIM)[:keys].double()
            rows = slice(starts[n], starts[n + 1])
            for head in range(case.heads_q - group, case.heads_q):
                s = self.q[rows, head].double() @ both[:, :DIM].T * DIM**-0.5
                mask = torch.ones(new, keys, device=DEVICE, dtype=torch.bool).tril(keys - new)
                want = s.masked_fill_(~mask, float("-inf")).softmax(-1) @ both[:, DIM:]
                difference = (out[rows, head].double() - want).abs().max()
                worst = max(worst, float(difference / want.abs().max()))
        return worst


def _random(*shape: int) -> Any:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def _checked(name: str, label: str, step: Step, out: Any) -> float:
    error = step.error(out)
    if not error <= ALLOWED:
        raise RuntimeError(f"{name}: expected an error of {label} up to {ALLOWED}, got {error}")
    return error


def compare(name: str, case: Case) -> dict[str, object]:
    """Check and time a case."""
    step = Step(case)
    schedule = step.schedule()
    calls: dict[str, Callable[[], Any]] = {
        "aule": step.aule,
        "fa3": lambda: step.fa3(step.in_place, schedule),
        "fa3_own": lambda: step.fa3(step.own_pools, schedule),
    }
    row: dict[str, object] = {
        "case": name, "order": case.order, "block": case.block, "heads_q": case.heads_q, "heads_kv": case.heads_kv,
        "sequences": len(case.sequences), "new": step.most_new, "keys": step.most_keys,
    }  # fmt: skip
    errors, seconds = {}, {}
    for label, call in calls.items():
        step.out.fill_(float("nan"))  # a result that is not written must not pass
        errors[label] = _checked(name, label, step, call())
        seconds[label] = graph_seconds(call, CALLS, 0.03)
        _checked(name, label, step, step.out)  # nor one that only the first of many calls gets right
    row |= {f"{label}_us": round(1e6 * x, 1) for label, x in seconds.items()}
    best = min(seconds["fa3"], seconds["fa3_own"])
    row |= {
        "ratio": round(best / seconds["aule"], 3),
        "aule_tflops": round(case.flops / seconds["aule"] / 1e12, 1),
        "aule_gb_s": round(case.bytes / seconds["aule"] / 1e9),
    }
    return row | {f"{label}_error": f"{x:.1e}" for label, x in errors.items()}


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--peers", default=".gpu/peers", help="folder of peers.py, which loads FlashAttention-3")
    parser.add_argument("--seconds", type=float, default=28.0)
    options = parser.parse_args()
    sys.path.insert(0, options.peers)
    import peers

    device = torch.cuda.get_device_name()
    rows: list[dict[str, object]] = []
    failed: list[str] = []
    left_out: list[str] = []
    print(f"{device}, torch {torch.__version__}, aule {aule.__version__}", flush=True)
    with torch.no_grad(), written(options.csv, rows, device):
        tiny = _random(1, 16, 1, DIM)
        peers.fa3(tiny, tiny, tiny, True)  # loads the library
        warm_up(0.3)
        for name in options.cases.split(","):
            if time.perf_counter() - start > options.seconds:
                left_out.append(name)
                continue
            try:
                rows.append(compare(name, CASES[name]))
            except (AuleError, RuntimeError) as problem:
                failed.append(name)
                print(f"{name} failed: {problem}", flush=True)
                continue
            print(*(f"{key} {value}" for key, value in rows[-1].items()), sep="  ", flush=True)
    print(f"{time.perf_counter() - start:.1f} s" + (f"; no time for {', '.join(left_out)}" if left_out else ""))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
