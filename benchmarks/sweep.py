"""Times random problems against every kernel of PyTorch that takes them, worst first; each result is checked.

    python benchmarks/sweep.py [--seed 1] [--count 200] [--csv FILE] [--peers flash,cudnn,efficient,fa3] [--workers 12]
        [--seconds 100]

Head dimensions 32 to 256 in steps of 8, 1 to 8192 rows and keys, grouped heads, both layouts, causal, boolean and
additive masks; forward and backward. Problems are the same for the same seed. A ratio is the time of the fastest peer
over aule's; the summary leaves out problems that no peer takes 15 us for, since those time the launch. So many workers
compile problems at the same time, ours and cuDNN's, which is most of the work; one at a time uses the device to check
and to time. ``AULE_CUDA_ARCH=80`` times what older GPUs run; compare that with ``--peers flash``. FlashAttention-3 is
timed where its package is found, on copies in its own layout.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from forward import timed
from result_file import written
from torch.nn.attention import SDPBackend, sdpa_kernel

import aule

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
LEAST_US = 15.0
MOST_SCORES, MOST_ELEMENTS = 2**32, 2**27
"""Scores of a problem, and elements of q or of k; more takes too long, or too much memory in the check."""


@dataclass(frozen=True)
class Problem:
    """A problem: ``mask`` is "none", "causal", or the kind and broadcast shape of a mask."""

    batch: int
    heads: int
    heads_kv: int
    rows: int
    keys: int
    dim: int
    layout: str
    mask: str


def problems(seed: int, count: int) -> Iterator[Problem]:
    """So many random problems."""
    rng = random.Random(seed)

    def length() -> int:
        return min(8192, int(2 ** rng.uniform(0, 13.2)))

    while count:
        rows = length()
        keys = rows if rng.random() < 0.6 else length()
        heads_kv = rng.choice([1, 2, 4, 8, 16])
        heads = heads_kv * rng.choice([1, 1, 1, 2, 4, 8])
        mask = rng.choice(["none", "none", "causal", "causal", "bool keys", "bool", "added", "added heads"])
        found = Problem(
            rng.choice([1, 2, 4, 8, 16, 64]), heads, heads_kv, rows, keys, rng.randrange(32, 257, 8),
            rng.choice(["bhsd", "bshd"]), mask,
        )  # fmt: skip
        scores = found.batch * heads * rows * keys
        if scores <= MOST_SCORES and found.batch * heads * max(rows, keys) * found.dim <= MOST_ELEMENTS:
            count -= 1
            yield found


def mask_of(problem: Problem) -> torch.Tensor | None:
    """The mask tensor; every row keeps some keys."""
    kind, _, shape = problem.mask.partition(" ")
    if kind not in ("bool", "added"):
        return None
    if shape == "keys":
        lengths = torch.randint(max(problem.keys // 4, 1), problem.keys + 1, (problem.batch, 1), device="cuda")
        return (torch.arange(problem.keys, device="cuda") < lengths)[:, None, None]
    heads = problem.heads if shape == "heads" else 1
    sizes = (1 if shape == "heads" else problem.batch, heads, problem.rows, problem.keys)
    if kind == "added":
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)
    kept = torch.rand(sizes, device="cuda") < 0.7
    kept[..., 0] = True
    return kept


def inputs_of(problem: Problem) -> list[torch.Tensor]:
    """q, k and v."""
    result = []
    for heads, rows in (
        (problem.heads, problem.rows),
        (problem.heads_kv, problem.keys),
        (problem.heads_kv, problem.keys),
    ):
        sizes = (problem.batch, heads, rows) if problem.layout == "bhsd" else (problem.batch, rows, heads)
        x = torch.randn(*sizes, problem.dim, device="cuda", dtype=torch.bfloat16)
        result.append((x if problem.layout == "bhsd" else x.transpose(1, 2)).requires_grad_())
    return result


class Case:
    """Tensors of a problem, and the calls to time."""

    def __init__(self, problem: Problem) -> None:
        torch.manual_seed(0)
        self.problem, self.inputs, self.mask = problem, inputs_of(problem), mask_of(problem)
        self.options: dict[str, Any] = {
            "attn_mask": self.mask, "is_causal": problem.mask == "causal",
            "enable_gqa": problem.heads != problem.heads_kv,
        }  # fmt: skip
        self.dout = torch.randn_like(self.inputs[0])
        self.tokens_first: list[torch.Tensor] = []

    def ours(self) -> torch.Tensor:
        return aule.scaled_dot_product_attention(*self.inputs, **self.options)

    def peer(self, name: str) -> torch.Tensor | None:
        """A peer's result; None if it does not take the problem."""
        if name == "fa3":
            return self._fa3()
        with sdpa_kernel(BACKENDS[name]):
            try:
                return F.scaled_dot_product_attention(*self.inputs, **self.options)
            except RuntimeError:
                return None

    def _fa3(self) -> torch.Tensor | None:
        try:
            from flash_attn_interface import flash_attn_func
        except ImportError:
            return None
        causal = self.problem.mask == "causal"
        if self.mask is not None or (causal and self.problem.rows != self.problem.keys):
            return None  # it aligns causal masks with the last key
        if not self.tokens_first:
            self.tokens_first = [x.detach().transpose(1, 2).contiguous() for x in self.inputs]
        out = flash_attn_func(*self.tokens_first, causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    def gradients(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, self.dout, retain_graph=True)

    def exact(self) -> list[torch.Tensor]:
        """Result and gradients of the last batch's last key head, in float64."""
        group = self.problem.heads // self.problem.heads_kv
        last = [x.detach()[-1:, -n:].double().requires_grad_() for x, n in zip(self.inputs, (group, 1, 1), strict=True)]
        mask = self.mask
        if mask is not None:
            mask = mask[-1:, -min(group, mask.shape[1]) :]
            mask = mask if mask.dtype == torch.bool else mask.double()
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(
                *last, attn_mask=mask, is_causal=self.options["is_causal"], enable_gqa=True
            )
        return [out.detach(), *torch.autograd.grad(out, last, self.dout[-1:, -group:].double())]

    def errors(self, out: torch.Tensor, found: tuple[torch.Tensor, ...]) -> tuple[float, float]:
        """Largest error of the result and of the gradients, relative to the largest element."""
        group, exact = self.problem.heads // self.problem.heads_kv, self.exact()
        parts = zip((out, *found), exact, (group, group, 1, 1), strict=True)
        each = [
            float((x.detach()[-1:, -n:].double() - y).abs().max() / y.abs().max().clamp(min=1e-2)) for x, y, n in parts
        ]
        return each[0], max(each[1:])


def measure(problem: Problem, peers: list[str], device: AbstractContextManager[object]) -> dict[str, object]:
    """Times of all, in us, forward and backward; checked and timed while this process has the device."""
    case = Case(problem)
    calls: dict[str, Callable[[], torch.Tensor | None]] = {"aule": case.ours}
    calls |= {name: partial(case.peer, name) for name in peers}
    outs = {name: out for name, call in calls.items() if (out := call()) is not None}
    backward = {name: partial(case.gradients, out) for name, out in outs.items() if _compiles(case, out)}
    torch.cuda.synchronize()
    row: dict[str, Any] = asdict(problem)
    with device:
        errors = case.errors(outs["aule"], case.gradients(outs["aule"]))
        row |= {"forward_error": f"{errors[0]:.1e}", "backward_error": f"{errors[1]:.1e}"}
        with torch.no_grad():
            row |= {f"forward_{name}_us": round(1e6 * timed(calls[name], 7), 1) for name in outs}
        row |= {f"backward_{name}_us": round(1e6 * timed(call, 7), 1) for name, call in backward.items()}
    for direction in ("forward", "backward"):
        best = min((row[key] for name in peers if (key := f"{direction}_{name}_us") in row), default=None)
        row[f"{direction}_peer_us"] = best
        row[f"{direction}_ratio"] = None if best is None else round(best / row[f"{direction}_aule_us"], 3)
    return row


def _compiles(case: Case, out: torch.Tensor) -> bool:
    """Whether a result has gradients; computes them once."""
    try:
        case.gradients(out)
    except RuntimeError:
        return False
    return True


_DEVICE: list[Any] = []
"""The lock of a worker; a pool's arguments cannot carry it."""


def begin(device: Any) -> None:
    """Start a worker."""
    warnings.simplefilter("ignore")  # PyTorch says which kernels do not take a problem
    _DEVICE.append(device)


def measure_one(given: tuple[Problem, list[str]]) -> dict[str, object]:
    """Measure in a worker."""
    row = measure(*given, _DEVICE[0])
    torch.cuda.empty_cache()
    return row


def summarise(rows: list[dict[str, Any]]) -> None:
    for direction in ("forward", "backward"):
        timed_rows = [r for r in rows if r[f"{direction}_ratio"] and r[f"{direction}_peer_us"] >= LEAST_US]
        if not timed_rows:
            continue
        ratios = sorted(r[f"{direction}_ratio"] for r in timed_rows)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        limit = 0.8 if direction == "forward" else 0.75
        print(f"{direction}: {len(ratios)} problems, geometric mean {mean:.3f}, worst {ratios[0]:.3f}, "
              f"below {limit}: {sum(r < limit for r in ratios)}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--csv")
    parser.add_argument("--peers", default="flash,cudnn,efficient,fa3")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    args = parser.parse_args()
    chosen = list(problems(args.seed, args.count))
    rows: list[dict[str, Any]] = []
    device, start = torch.cuda.get_device_name(), time.perf_counter()
    print(f"{device}, torch {torch.__version__}, aule {aule.__version__}, {args.count} problems of seed {args.seed}")
    processes = multiprocessing.get_context("spawn")
    with (
        written(args.csv, rows, device, seed=args.seed),
        processes.Pool(args.workers, begin, (processes.Lock(),)) as pool,
    ):
        for row in pool.imap(measure_one, [(problem, args.peers.split(",")) for problem in chosen]):
            rows.append(row)
            if time.perf_counter() - start > args.seconds:
                break
        rows.sort(key=lambda r: min(r["forward_ratio"] or 9.0, r["backward_ratio"] or 9.0))
    for row in rows[:30]:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    summarise(rows)
    wrong = [r for r in rows if float(r["forward_error"]) > 2e-2 or float(r["backward_error"]) > 4e-2]
    for row in wrong:
        print("wrong:", row)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
