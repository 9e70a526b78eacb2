"""Compares masked, windowed and grouped attention on a GPU with PyTorch's FlexAttention, compiled, on the same mask.

    python benchmarks/flex.py [--csv FILE] [--backward] [--cases causal,documents] [--dims 64,128]

bf16, batch 4, 16 query heads, S 4096, d128 and d64; every result checked against float64 on the last head. The last
cases give the mask as a tensor: aule reads ``mask`` in every call; FlexAttention gets a block mask made from it before
timing.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from forward import timed
from result_file import written
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import aule

S, BATCH, HEADS = 4096, 4, 16


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def window(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i - j <= 511)


def documents() -> torch.Tensor:
    """[S, S]: documents of random lengths, causal within each."""
    ends = torch.randperm(S - 1, generator=torch.Generator().manual_seed(1))[:7].sort().values.cuda()
    i = torch.arange(S, device="cuda")
    number = torch.searchsorted(ends, i, right=True)
    return (number[:, None] == number[None, :]) & (i[:, None] >= i[None, :])


def padding() -> torch.Tensor:
    """[B, 1, 1, S]: sequences of different lengths."""
    lengths = torch.tensor([S, 3 * S // 4, S // 2 + 77, S // 3], device="cuda")
    return (torch.arange(S, device="cuda") < lengths[:, None])[:, None, None]


def looked_up(mask: torch.Tensor) -> Any:
    """A mask tensor as FlexAttention wants it."""
    if mask.dim() == 2:
        return lambda b, h, i, j: mask[i, j]
    rows = mask[:, 0, 0].contiguous()
    return lambda b, h, i, j: rows[b, j]


def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 30.0 * torch.tanh(score / 30.0)


SLOPES = [2.0 ** (-(i + 1) / 2) for i in range(HEADS)]

CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": causal, "kv": HEADS, "options": {"causal": True}},
    "causal, 4 key heads": {"mask": causal, "kv": 4, "options": {"causal": True}},
    "window of 512": {"mask": window, "kv": HEADS, "options": {"causal": True, "window": (511, 0)}},
    "causal, softcap": {"mask": causal, "score": capped, "kv": HEADS, "options": {"causal": True, "softcap": 30.0}},
    "causal, ALiBi": {"mask": causal, "score": "alibi", "kv": HEADS, "options": {"causal": True, "alibi": True}},
    "documents": {"tensor": documents, "kv": HEADS, "options": {"causal": False}},
    "documents, 4 key heads": {"tensor": documents, "kv": 4, "options": {"causal": False}},
    "padding": {"tensor": padding, "kv": HEADS, "options": {"causal": False}},
}


def run(name: str, case: dict[str, Any], dim: int, compiled: Any, backward: bool) -> dict[str, object]:
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, S, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(BATCH, case["kv"], S, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    slopes = torch.tensor(SLOPES, device="cuda")
    score, options = case.get("score"), dict(case["options"])
    rule, batches = case.get("mask"), None
    if rule is None:
        options["mask"] = mask = case["tensor"]()
        rule, batches = looked_up(mask), BATCH if mask.dim() == 4 else None
    block_mask = create_block_mask(rule, batches, None, S, S, device="cuda")
    if score == "alibi":
        score = lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()  # noqa: E731
        options["alibi_slopes"] = slopes
        options.pop("alibi")

    def peer() -> Any:
        return compiled(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=case["kv"] != HEADS)

    def ours() -> Any:
        return aule.flash_attention(q, k, v, **options)

    i = torch.arange(S, device="cuda")
    last = [x[-1:, -1:].double() for x in (q, k, v)]
    s = last[0] @ last[1].transpose(-1, -2) * dim**-0.5
    if score is not None:
        s = score(s, 0, HEADS - 1, i[:, None], i[None, :]).double()
    s = s.masked_fill(~rule(BATCH - 1, 0, i[:, None], i[None, :]), float("-inf"))
    want = F.softmax(s, -1) @ last[2]

    def error(out: Any) -> float:
        return float((out[-1:, -1:].double() - want).abs().max() / want.abs().max())

    errors = error(ours()), error(peer())
    seconds = several(ours), several(peer)
    row: dict[str, object] = {
        "case": name, "head_dim": dim, "aule_ms": round(1e3 * seconds[0], 3), "flex_ms": round(1e3 * seconds[1], 3),
        "ratio": round(seconds[1] / seconds[0], 3), "aule_error": f"{errors[0]:.1e}", "flex_error": f"{errors[1]:.1e}",
    }  # fmt: skip
    if backward:
        row |= gradients((q, k, v), ours, peer)
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def several(call: Any) -> float:
    """Seconds of a call of four in a row, during which the host is ahead."""
    return timed(lambda: [call() for _ in range(4)]) / 4


def gradients(inputs: tuple[torch.Tensor, ...], ours: Any, peer: Any) -> dict[str, object]:
    """The backward passes, whose results are to be the same but for rounding."""
    for x in inputs:
        x.requires_grad_()
    outs = ours(), peer()
    dout = torch.randn_like(outs[0])
    calls = [lambda out=out: torch.autograd.grad(out, inputs, dout, retain_graph=True) for out in outs]
    found = [[x.float() for x in call()] for call in calls]
    apart = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(*found, strict=True))
    seconds = [several(call) for call in calls]
    return {
        "aule_backward_ms": round(1e3 * seconds[0], 3), "flex_backward_ms": round(1e3 * seconds[1], 3),
        "backward_ratio": round(seconds[1] / seconds[0], 3), "apart": f"{apart:.1e}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv")
    parser.add_argument("--backward", action="store_true", help="gradients, too")
    parser.add_argument("--cases", default="", help="the beginnings of their names")
    parser.add_argument("--dims", default="64,128")
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # every case is compiled anew
    compiled = torch.compile(flex_attention, dynamic=False)
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, aule {aule.__version__}")
    wanted = {name: case for name, case in CASES.items() if name.startswith(tuple(args.cases.split(",")))}
    dims = [int(dim) for dim in args.dims.split(",")]
    rows: list[dict[str, object]] = []
    with written(args.csv, rows, device):
        for dim in dims:
            for name, case in wanted.items():
                rows.append(run(name, case, dim, compiled, args.backward))


if __name__ == "__main__":
    main()
