"""Which rows ranks hold, which keys they need, and what they send: compared with the mask of the whole sequence."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from aule.distributed import positions
from aule.distributed.positions import Positions
from aule.distributed.schedule import NOTHING, schedule

RANKS = (1, 2, 3, 4, 8)
BANDS = ((None, 0), (None, None), (5, 0), (20, 3), (0, 0), (None, 2), (7, None))


def kept(at: Positions) -> np.ndarray:
    """The mask of the whole sequence."""
    rows, keys = at.ranks * at.rows, at.ranks * at.keys
    distance = np.arange(rows)[:, None] + at.shift - np.arange(keys)
    keep = np.ones((rows, keys), bool)
    if at.left is not None:
        keep &= distance <= at.left
    if at.right is not None:
        keep &= -distance <= at.right
    if at.sequences:
        number = np.searchsorted(at.sequences, np.arange(rows), side="right")
        keep &= number[:, None] == number
    return keep


def block_mask(block: positions.Block, rows: int, keys: int) -> np.ndarray:
    """What a call keeps, as its kernel decides it."""
    left, right = block.window
    distance = np.arange(rows)[:, None] + block.shift - np.arange(keys)
    keep = np.ones((rows, keys), bool)
    assert left is None or left >= 0, block
    assert right is None or right >= 0, block
    if left is not None:
        keep &= distance <= left
    if right is not None:
        keep &= -distance <= right
    if block.offsets is not None:
        number = np.searchsorted(block.offsets, np.arange(rows), side="right")
        keep &= number[:, None] == number
    return keep


def check(at: Positions) -> None:
    """All calls of all ranks together keep what the mask keeps, once, and have the keys they need."""
    whole, length = kept(at), at.ranks * at.keys
    found = np.zeros_like(whole, dtype=int)
    for rank in range(at.ranks):
        plan = schedule(at, rank)
        held = positions.rows(at.balance, rank, at.ranks, at.rows)
        for number, hop in enumerate(plan.hops):
            theirs = positions.rows(at.balance, (rank - number) % at.ranks, at.ranks, at.keys)
            for block in hop.blocks:
                assert hop.here[0] <= block.keys.start < block.keys.stop <= hop.here[1]
                q, k = held[block.rows], theirs[block.keys]
                mask = block_mask(block, len(q), len(k))
                assert block.kept == mask.sum()
                found[np.ix_(q, k)] += mask
                if at.exact and not at.sequences:
                    assert list(block.q) == q.tolist() and list(block.k) == k.tolist()
                if block.sign:
                    distance = q[:, None] + at.shift - k
                    assert (np.sign(distance[mask]) * block.sign >= 0).all()
            if number + 1 < len(plan.hops):  # what one rank sends is what the next expects
                after = schedule(at, (rank + 1) % at.ranks).hops[number + 1]
                assert hop.on == after.here
    assert np.array_equal(found, whole.astype(int)), (at, length)


@pytest.mark.parametrize("balance", positions.BALANCES)
@pytest.mark.parametrize("ranks", RANKS)
def test_calls_of_all_ranks_keep_what_the_mask_keeps(balance: str, ranks: int) -> None:
    lengths = ((6, 6, 0), (6, 10, 4 * ranks), (10, 6, -4 * ranks), (6, 10, 0), (8, 8, 0))
    for (rows, keys, shift), band, exact in itertools.product(lengths, BANDS, (False, True)):
        check(Positions(balance, ranks, rows, keys, shift, *band, exact))
        if exact:
            check(Positions(balance, ranks, rows, keys, shift, *band, exact, signed=True))


@pytest.mark.parametrize("balance", ("zigzag", "contiguous"))
@pytest.mark.parametrize("ranks", RANKS)
def test_packed_sequences_meet_only_themselves(balance: str, ranks: int) -> None:
    total = 8 * ranks
    for inner in ((), (1,), (3, 3, total - 2), tuple(range(5, total, 5))):
        for band, apart in itertools.product(BANDS, (False, True)):
            sequences = (0, *inner, total)
            check(Positions(balance, ranks, 8, 8, 0, *band, True, sequences=sequences, apart=apart))


def work(balance: str, ranks: int, length: int, **band: int | None) -> list[int]:
    at = Positions(balance, ranks, length, length, 0, band.get("left"), 0)
    return [sum(block.kept for hop in schedule(at, rank).hops for block in hop.blocks) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", RANKS)
def test_zigzag_and_stripes_divide_the_work_of_causal_masks_evenly(ranks: int) -> None:
    for balance in ("zigzag", "striped"):
        done = work(balance, ranks, 512)
        assert max(done) <= 1.05 * sum(done) / ranks, (balance, done)
    assert ranks == 1 or max(work("contiguous", ranks, 512)) > 1.3 * sum(work("contiguous", ranks, 512)) / ranks


def test_plain_causal_hops_are_one_call_each() -> None:
    for balance, ranks in itertools.product(positions.BALANCES, (2, 4)):
        at = Positions(balance, ranks, 64, 64, 0, None, 0)
        for rank in range(ranks):
            assert all(len(hop.blocks) <= 1 for hop in schedule(at, rank).hops)


def test_keys_that_a_window_drops_are_not_sent() -> None:
    sent = {}
    for left in (None, 16, 40):
        at = Positions("contiguous", 8, 32, 32, 0, left, 0)
        plans = [schedule(at, rank) for rank in range(8)]
        sent[left] = sum(hop.on[1] - hop.on[0] for plan in plans for hop in plan.hops)
        assert {len(plan.hops) for plan in plans} == {{None: 8, 16: 2, 40: 3}[left]}
    # Rank r needs the keys of all before it, of the one before it, and of the two before it.
    assert sent == {None: 32 * 28, 16: 32 * 7, 40: 32 * 13}


def test_gradients_go_home_once() -> None:
    at = Positions("zigzag", 4, 16, 16, 0, 9, 0)
    for rank in range(4):
        own = [span for spans in schedule(at, rank).own for span in spans]
        assert sum(end - first for first, end in own) == 16
        assert NOTHING not in own
        for number, spans in enumerate(schedule(at, rank).own):
            if number and spans:
                assert schedule(at, (rank + number) % 4).hops[number].going_home == spans
