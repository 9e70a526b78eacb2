"""The last, partial wave of a launch: how it is cut, and that its pieces come to the same."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace
from typing import Any

import grid
import numpy as np
import pytest
from test_forward_interpreted import SMALL_SHAPES, run, target
from test_fragment_interpreted import SHAPES, WAYS

from aule.ops.attention.reference import compare, expect
from aule.ops.attention.tail import LEAST_TILES, Tail, cut_tail
from aule.ops.attention.validate import attention_problem
from aule.target import Target
from aule.tile.fragment_shape import FragmentShape
from aule.tile.simt_shape import SimtShape

ENGINES: dict[str, tuple[SimtShape | FragmentShape, Target, type]] = {
    "simt": (SMALL_SHAPES["parts"], target(8), np.float32),
    "simt without subgroups": (SMALL_SHAPES["pieces"], target(0), np.float32),
    "fragments": (SHAPES["two-stages"], WAYS["as for Vulkan"][0], np.float16),
    "fragments, scores ahead": (SHAPES["scores-ahead"], WAYS["as for Vulkan"][0], np.float16),
}


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("length", [320, 333])
@pytest.mark.parametrize("engine", ENGINES)
def test_pieces(engine: str, length: int, sinks: bool) -> None:
    """Blocks of 40 rows for three heads on four workgroups at a time."""
    shape, device, dtype = ENGINES[engine]
    device = replace(device, compute_units=2, device_fence=True)
    rng = np.random.default_rng(2)
    arrays: dict[str, Any] = {
        name: rng.standard_normal((1, heads, rows, 16)).astype(dtype)
        for name, heads, rows in (("q", 3, 40), ("k", 1, length), ("v", 1, length))
    }
    if sinks:
        arrays["sinks"] = rng.standard_normal(3).astype(np.float32)
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, return_lse=True)
    out, lse = run(problem, operands, replace(shape, resident=2), device, preferred=True)
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message


def shares(tail: Tail) -> list[list[tuple[int, int, int]]]:
    """What each workgroup has: blocks, and the tiles of each from the first up to the last."""
    total = tail.blocks * tail.tiles
    found = []
    for start in range(0, total, tail.each):
        end = min(start + tail.each, total)
        blocks = range(start // tail.tiles, -(-end // tail.tiles))
        found.append([(i, max(start - i * tail.tiles, 0), min(end - i * tail.tiles, tail.tiles)) for i in blocks])
    return found


def makespan(work: list[float], slots: int) -> float:
    """When the last of some workgroups is done, each of which begins as soon as one of as many slots is free."""
    free = [0.0] * min(slots, len(work))
    for length in work:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


@pytest.mark.parametrize("slots", [132, 264, 396])
@pytest.mark.parametrize("tiles", [16, 64, 256])
@pytest.mark.parametrize("blocks", [400, 1024, 2048, 4096])
def test_tail_is_even(blocks: int, tiles: int, slots: int) -> None:
    """Pieces are all keys of all blocks, once; and all slots are done when the longest of them is."""
    tail = cut_tail(blocks, tiles, slots)
    if tail is None:
        assert blocks % slots == 0 or blocks % slots > 0.8 * slots or blocks < slots
        return
    assert tail.first + tail.blocks == blocks and tail.first % slots == 0
    work = shares(tail)
    assert len(work) == tail.workgroups <= slots
    done = [(i, tile) for share in work for i, first, last in share for tile in range(first, last)]
    assert done == [(i, tile) for i in range(tail.blocks) for tile in range(tiles)]
    parts = Counter(i for share in work for i, _, _ in share)
    assert max(parts.values()) == tail.splits
    assert tail.each <= max(tail.blocks * tiles / slots + 1, LEAST_TILES)
    beginning = 0.5
    lengths = [sum(last - first + beginning for _, first, last in share) for share in work]
    took = makespan([*lengths, *[tiles + beginning] * tail.first], slots)
    assert took <= tail.first // slots * (tiles + beginning) + tail.each + 2 * beginning
    assert took < makespan([tiles + beginning] * blocks, slots)


def test_what_is_not_cut() -> None:
    assert cut_tail(264 * 8, 64, 264) is None  # nothing is left over
    assert cut_tail(200, 64, 264) is None  # all run at the same time
    assert cut_tail(264 * 8 - 8, 64, 264) is None  # the last wave is nearly full
    assert cut_tail(264 * 100 + 100, 64, 264) is None  # the others are too many
    assert cut_tail(264 * 8 + 100, 4, 264) is None  # there is nothing to cut
    assert cut_tail(2048, 64, 0) is None  # nobody knows how many run at a time
