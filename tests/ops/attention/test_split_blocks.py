"""Blocks split along the keys: their pieces, and equal results."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace
from typing import Any

import grid
import numpy as np
import pytest
from test_forward_interpreted import SMALL_SHAPES, STEADY, run, target
from test_fragment_interpreted import SHAPES, WAYS
from test_fragment_interpreted import target as sm90
from test_fragment_vulkan import TARGET

from aule.ops.attention.plan import forward as plan
from aule.ops.attention.plan.split import SplitBlocks, SplitLastWave, Wave, split_blocks
from aule.ops.attention.plan.tiles import choose_fragments, choose_shape, choose_wave
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import attention_problem
from aule.target import Target
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape

ENGINES: dict[str, tuple[SimtShape | FragmentShape, Target, type]] = {
    "simt": (SMALL_SHAPES["parts"], target(8), np.float32),
    "simt, whole tiles": (STEADY, target(8), np.float32),
    "simt without subgroups": (SMALL_SHAPES["pieces"], target(0), np.float32),
    "fragments": (SHAPES["two-stages"], WAYS["as for Vulkan"][0], np.float16),
    "fragments, scores ahead": (SHAPES["scores-ahead"], WAYS["as for Vulkan"][0], np.float16),
    "fragments, full tiles": (SHAPES["scores-ahead"], WAYS["as for Vulkan"][0], np.float16),
}
FULL = {"simt, whole tiles": 48, "fragments, full tiles": 64}
"""Rows that are whole blocks."""


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("length", [320, 333])
@pytest.mark.parametrize("engine", ENGINES)
def test_pieces(engine: str, length: int, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks of each of five heads on more workgroups than that."""
    shape, device, dtype = ENGINES[engine]
    queries = FULL.get(engine, 40)
    device = replace(device, compute_units=40, device_fence=True)
    monkeypatch.setattr(plan, "choose_wave", lambda target, shape: Wave(2, 1, 1))
    splits_made: list[SplitBlocks | None] = []
    monkeypatch.setattr(plan, "split_blocks", lambda *args: splits_made.append(split_blocks(*args)) or splits_made[-1])
    rng = np.random.default_rng(2)
    value_dim = 16 if sinks or engine in FULL else 24  # whole fragments, or not
    arrays: dict[str, Any] = {
        name: rng.standard_normal((1, heads, rows, dim)).astype(dtype)
        for name, heads, rows, dim in (("q", 5, queries, 16), ("k", 1, length, 16), ("v", 1, length, value_dim))
    }
    if sinks:
        arrays["sinks"] = rng.standard_normal(5).astype(np.float32)
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, return_lse=True)
    out, lse = run(problem, operands, shape, device, tuned=True)
    assert splits_made[0] is not None and splits_made[0].splits > 1
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message


@pytest.mark.parametrize(
    ("band", "units", "sinks"),
    [
        ("full", 40, False), ("full", 7, True), ("causal", 40, True), ("both-sides", 40, False), ("alibi", 40, False),
        ("bool", 40, True), ("added", 40, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stages", [2, 3])
def test_pieces_over_warpgroups(
    band: str, units: int, sinks: bool, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five heads of two blocks: on 40 units all are split, on 7 only those of the last wave."""
    device = replace(sm90(), compute_units=units, device_fence=True)
    monkeypatch.setattr(plan, "choose_wave", lambda target, shape: Wave(1, 5, 1))
    made: list[SplitLastWave | None] = []
    split = plan.split_last_wave
    monkeypatch.setattr(plan, "split_last_wave", lambda *args: made.append(split(*args)) or made[-1])
    shape = FragmentShape(64, 16, 4, stages, False, warpgroups=True)
    rng = np.random.default_rng(4)
    arrays: dict[str, Any] = {
        name: rng.standard_normal((1, heads, rows, 72)).astype(np.float16)
        for name, heads, rows in (("q", 5, 100), ("k", 1, 203), ("v", 1, 203))
    }
    options: dict[str, Any] = {"causal": {"causal": True}, "both-sides": {"window": (90, 30)}}.get(band, {})
    kept = rng.random((1, 1, 100, 203)) < 0.8
    kept[..., 16:48] = True
    kept[..., 64:, 96:160] = False
    if band == "bool":
        arrays["mask"] = kept
    if band == "added":
        arrays["mask"] = np.where(kept, rng.standard_normal(kept.shape), -np.inf).astype(np.float16)
    if sinks:
        arrays["sinks"] = rng.standard_normal(5).astype(np.float32)
    if band == "alibi":
        arrays["alibi_slopes"] = np.array([0.5, 0.25, 0.1, 0.05, 0.0], np.float32)
    problem, operands = attention_problem(
        **{name: grid.view_of(array) for name, array in arrays.items()}, **options, return_lse=True
    )
    out, lse = run(problem, operands, shape, device, tuned=True)
    (found,) = made
    assert found is not None and found.pieces > 1 and (found.first > 0) == (units < 10)
    if "alibi_slopes" in arrays:
        arrays["alibi"] = arrays.pop("alibi_slopes")
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message


def shares(split: SplitBlocks) -> list[list[tuple[int, int, int]]]:
    """What each workgroup has: blocks, and the tiles of each from the first up to the last."""
    total = split.blocks * split.tiles
    found = []
    for start in range(0, total, split.each):
        end = min(start + split.each, total)
        blocks = range(start // split.tiles, -(-end // split.tiles))
        found.append([(i, max(start - i * split.tiles, 0), min(end - i * split.tiles, split.tiles)) for i in blocks])
    return found


def makespan(work: list[float], slots: int) -> float:
    """When the last of some workgroups is done, each of which begins as soon as one of as many slots is free."""
    free = [0.0] * min(slots, len(work))
    for length in work:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


@pytest.mark.parametrize("wave", [Wave(1, 1, 8), Wave(2, 1, 14), Wave(2, 4, 2), Wave(3, 1, 2)], ids=str)
@pytest.mark.parametrize("tiles", [16, 64, 256])
@pytest.mark.parametrize("blocks", [1, 60, 100, 200, 263, 395])
def test_split_is_even(blocks: int, tiles: int, wave: Wave) -> None:
    """Pieces are all keys of all blocks, once; and all is over earlier than with whole blocks."""
    units = 132
    slots = units * wave.resident
    split = split_blocks(blocks, tiles, units, wave)
    ideal = blocks * tiles / slots
    worst = max(ideal + wave.pieces, wave.cost) + wave.cost
    if split is None:
        assert blocks >= slots or worst + wave.cost >= tiles * 3 // 4
        return
    assert split.blocks == blocks < slots
    work = shares(split)
    assert len(work) == split.workgroups <= wave.pieces * slots
    done = [(i, tile) for share in work for i, first, last in share for tile in range(first, last)]
    assert done == [(i, tile) for i in range(split.blocks) for tile in range(tiles)]
    parts = Counter(i for share in work for i, _, _ in share)
    assert max(parts.values()) == split.splits
    beginning = wave.cost / (2 * wave.pieces)
    lengths = [sum(last - first + beginning for _, first, last in share) for share in work]
    took = makespan(lengths, slots)
    assert took <= worst
    assert took < makespan([tiles + beginning] * blocks, slots)


def test_what_is_not_split() -> None:
    wave = Wave(2, 1, 14)
    assert split_blocks(100, 128, 132, wave) is not None
    assert split_blocks(0, 128, 132, wave) is None
    assert split_blocks(264, 128, 132, wave) is None  # the device is full
    assert split_blocks(264 * 8 + 100, 128, 132, wave) is None  # more than one wave
    assert split_blocks(260, 128, 132, wave) is None  # nearly full
    assert split_blocks(200, 16, 132, wave) is None  # there is nothing to split
    assert split_blocks(128, 64, 132, wave) is None  # each has a multiprocessor to itself
    assert split_blocks(100, 128, 0, wave) is None  # nobody knows how many run at a time


def test_waves_of_the_table() -> None:
    """They are found by the shapes that are chosen, and only where they were measured."""
    for dim in (64, 128, 256):
        shape = choose_fragments(TARGET, "bf16", dim, dim, False, False)
        assert shape is not None and choose_wave(TARGET, shape) is not None
        assert choose_wave(replace(TARGET, vendor="amd"), shape) is None
    for dim in (64, 128):
        assert choose_wave(TARGET, choose_shape(TARGET, dim, dim)) is not None
