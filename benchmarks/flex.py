"""Masked, windowed and grouped attention on a GPU: aule beside PyTorch's FlexAttention, compiled, on the same mask.

    python benchmarks/flex.py [--csv FILE]

bf16, batch 4, 16 query heads, S 4096, d128 and d64, forward; every result checked against float64 on the last head.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from forward import timed
from result_file import write_csv
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import aule

S, BATCH, HEADS = 4096, 4, 16


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def window(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i - j <= 511)


def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 30.0 * torch.tanh(score / 30.0)


SLOPES = [2.0 ** (-(i + 1) / 2) for i in range(HEADS)]

CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": causal, "kv": HEADS, "options": {"causal": True}},
    "causal, 4 key heads": {"mask": causal, "kv": 4, "options": {"causal": True}},
    "window of 512": {"mask": window, "kv": HEADS, "options": {"causal": True, "window": (511, 0)}},
    "causal, softcap": {"mask": causal, "score": capped, "kv": HEADS, "options": {"causal": True, "softcap": 30.0}},
    "causal, ALiBi": {"mask": causal, "score": "alibi", "kv": HEADS, "options": {"causal": True, "alibi": True}},
}


def run(name: str, case: dict[str, Any], dim: int, compiled: Any) -> dict[str, object]:
    torch.manual_seed(0)
    q = torch.randn(BATCH, HEADS, S, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(BATCH, case["kv"], S, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    block_mask = create_block_mask(case["mask"], None, None, S, S, device="cuda")
    slopes = torch.tensor(SLOPES, device="cuda")
    score, options = case.get("score"), dict(case["options"])
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
    s = s.masked_fill(~case["mask"](0, 0, i[:, None], i[None, :]), float("-inf"))
    want = F.softmax(s, -1) @ last[2]

    def error(out: Any) -> float:
        return float((out[-1:, -1:].double() - want).abs().max() / want.abs().max())

    errors = error(ours()), error(peer())
    seconds = timed(ours), timed(peer)
    row: dict[str, object] = {
        "case": name, "head_dim": dim, "aule_ms": round(1e3 * seconds[0], 3), "flex_ms": round(1e3 * seconds[1], 3),
        "ratio": round(seconds[1] / seconds[0], 3), "aule_error": f"{errors[0]:.1e}", "flex_error": f"{errors[1]:.1e}",
    }  # fmt: skip
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv")
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # every case is compiled anew
    compiled = torch.compile(flex_attention, dynamic=False)
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, aule {aule.__version__}")
    rows = [run(name, case, dim, compiled) for dim in (64, 128) for name, case in CASES.items()]
    if args.csv:
        write_csv(args.csv, rows, device)


if __name__ == "__main__":
    main()
