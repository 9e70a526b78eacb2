"""Ring, Ulysses and both on gloo processes: results and gradients of one process, and the same bits every time.

``AULE_FULL_GRID=1`` adds worlds of 3 and 8 ranks, and all pairs of options.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from cases import HEADS, Case, compare, difference, inputs
from world import World

import aule
import aule.distributed as distributed
from aule.distributed import positions

FULL = os.environ.get("AULE_FULL_GRID") == "1"
RANKS = (2, 3, 4, 8) if FULL else (2, 4)
TOLERANCE = 1e-5
WAYS = (("ring", "zigzag"), ("ring", "contiguous"), ("ring", "striped"), ("ulysses", "contiguous"),
        ("ulysses", "zigzag"), ("mesh", "zigzag"), ("mesh", "striped"))  # fmt: skip


def case(way: str, balance: str, *arrays: str, **fields: Any) -> Case:
    """A case; names that are no fields are options."""
    known = {name: fields.pop(name) for name in tuple(fields) if name in Case.__dataclass_fields__}
    return Case(way, balance, arrays=arrays, options=tuple(fields.items()), **known)


PACKED = (0, 8, 8, 56, 80, 96)
# Few sets of options, since each compiles its own kernels, but each with several ways and balances.
PLAIN: dict[str, Any] = {"heads_kv": 2, "softcap": 3.0}
ADDED: dict[str, Any] = {"causal": False, "window": (40, 8)}
DROPPED: dict[str, Any] = {"lengths": (384, 384), "dropout_p": 0.3, "seed": 5, "deterministic": True}
COMBINED = [
    case("ring", "zigzag", "sinks", **PLAIN),
    case("ring", "striped", "sinks", lengths=(96, 192), **PLAIN),
    case("mesh", "zigzag", "sinks", "rope", **PLAIN),
    case("ring", "zigzag", "alibi", "bias", lengths=(96, 192), **ADDED),
    case("ring", "striped", "alibi", "bias", **ADDED),
    case("ulysses", "contiguous", "alibi", "row bias", heads_kv=1, **ADDED),
    case("ring", "contiguous", "rope", "mask", lengths=(192, 96), causal_align="top-left"),
    case("ulysses", "zigzag", "mask", "sinks"),
    case("ring", "zigzag", **DROPPED),
    case("mesh", "zigzag", **DROPPED),
    case("ring", "zigzag", "rope", cu_seqlens=PACKED, batch=1),
    case("mesh", "contiguous", "sinks", cu_seqlens=PACKED, batch=1),
]


def check(world: World, cases: list[Case]) -> None:
    failed = []
    for one in cases:
        found = world.run(compare, one)
        if any(own["bits"] for own in found) or max(found[0].values()) > TOLERANCE:
            failed.append((one, found[0]))
    assert not failed


@pytest.mark.parametrize("ranks", RANKS)
def test_equal_to_one_process(worlds: Callable[[int], World], ranks: int) -> None:
    ours = COMBINED
    if not FULL:  # the worlds share the cases
        ours = COMBINED[::4] if ranks == 2 else COMBINED[1::2]
    heads = {3: 6, 8: 8}.get(ranks, HEADS)  # a multiple of the ranks
    check(worlds(ranks), [replace(one, heads=heads, heads_kv=one.heads_kv * heads // HEADS) for one in ours])


FEATURES: dict[str, dict[str, Any]] = {
    "grouped heads": {"heads_kv": 2},
    "one key head": {"heads_kv": 1},
    "window": {"window": 21},
    "not causal": {"causal": False},
    "two-sided window": {"causal": False, "window": (13, 5)},
    "more keys": {"lengths": (96, 192)},
    "more rows": {"lengths": (192, 96)},
    "top-left": {"lengths": (96, 192), "causal_align": "top-left"},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.3},
    "deterministic": {"deterministic": True},
    "dropout": {"lengths": (384, 384), "dropout_p": 0.3, "seed": 5},
    "packed": {"cu_seqlens": PACKED, "batch": 1},
    **{name: {"arrays": (name,)} for name in ("alibi", "bias", "row bias", "mask", "sinks", "rope")},
}


def pairs(way: str, balance: str, heads: int) -> list[Case]:
    """All pairs of features that a call may have."""
    made = []
    for names in itertools.combinations_with_replacement(FEATURES, 2):
        fields: dict[str, Any] = {}
        arrays: tuple[str, ...] = ()
        for name in dict.fromkeys(names):
            arrays += FEATURES[name].get("arrays", ())
            new = {key: x for key, x in FEATURES[name].items() if key != "arrays"}
            if any(key in fields and fields[key] != x for key, x in new.items()):
                break
            fields |= new
        else:
            packed = "packed" in names and (balance == "striped" or fields.keys() & {"lengths"} or {*arrays} & _SCORES)
            stripes = balance == "striped" and "dropout" in names
            if not packed and not stripes and not {"bias", "row bias"} <= {*arrays}:
                made.append(case(way, balance, *arrays, heads=heads, **{"heads_kv": heads, **fields}))
    return made


_SCORES = {"bias", "row bias", "mask"}


@pytest.mark.skipif(not FULL, reason="takes minutes; AULE_FULL_GRID=1 runs it")
@pytest.mark.parametrize(("way", "balance"), WAYS)
@pytest.mark.parametrize("ranks", (2, 3, 4, 8))
def test_pairs_of_options(worlds: Callable[[int], World], way: str, balance: str, ranks: int) -> None:
    check(worlds(ranks), pairs(way, balance, 6 if ranks == 3 else 8))


def test_half_precision_is_as_exact_as_in_one_process(worlds: Callable[[int], World]) -> None:
    for dtype, limit in ((torch.bfloat16, 2e-2), (torch.float64, 1e-12)) if FULL else ((torch.bfloat16, 2e-2),):
        found = worlds(2).run(compare, Case(dtype=dtype))[0]
        assert max(x for name, x in found.items() if name != "lse") < limit, found


def one_row_each() -> list[float]:
    """Masks of one row on each rank, and of one row for all."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    q, k, v = (torch.randn(1, 2 * ranks, ranks, 16) for _ in range(3))
    shards = [distributed.shard(x, balance="contiguous") for x in (q, k, v)]
    found = []
    for mask in (torch.ones(ranks, ranks).tril().bool(), torch.arange(ranks)[None] > 0):
        own = distributed.shard(mask, balance="contiguous") if len(mask) > 1 else mask
        out = distributed.ulysses_attention(*shards, mask=own, causal=False)
        wanted = aule.flash_attention(q, k, v, mask=mask, causal=False)
        found.append(difference(distributed.unshard(out, balance="contiguous"), wanted))
    return found


def test_masks_of_one_row(worlds: Callable[[int], World]) -> None:
    for found in worlds(2).run(one_row_each):
        assert max(found) < TOLERANCE


def packed_by_numpy() -> float:
    """Packed sequences without the CPU engine."""
    given = inputs(Case(lengths=(64, 64), cu_seqlens=(0, 10, 64)))
    q, k, v = (x.detach() for x in (given.q, given.k, given.v))
    offsets = torch.tensor([0, 10, 64], dtype=torch.int32)
    wanted = aule.flash_attention_varlen(q, k, v, offsets, offsets)
    shards = [distributed.shard(x, dim=0) for x in (q, k, v)]
    out = distributed.ring_attention(*shards, cu_seqlens=offsets, backend="numpy")
    return difference(distributed.unshard(out, dim=0), wanted)


def test_packed_sequences_without_the_cpu_engine(worlds: Callable[[int], World]) -> None:
    assert max(worlds(2).run(packed_by_numpy)) < TOLERANCE


def test_every_balance_is_covered() -> None:
    assert {balance for _, balance in WAYS} == {*positions.BALANCES}
