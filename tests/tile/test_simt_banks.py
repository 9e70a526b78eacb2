"""Threads of the simt engine write to shared memory without bank conflicts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from aule import tuning
from aule.ops.attention.plan.tiles import SIMT, simt_shape
from aule.tile.common.matrix import QUAD
from aule.tile.simt.bank_padding import BANKS
from aule.tile.simt.shape import LANES_PER_COLUMN, SimtShape

SHAPES = [simt_shape(record.use) for record in tuning.every(SIMT)]
WARP = 32


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_come_in_without_conflicts(shape: SimtShape) -> None:
    for rows in (shape.block_q, shape.block_kv):
        if rows % BANKS:
            continue
        padding, quads = shape.chunk_padding(rows), shape.chunk_k // QUAD
        for e in range(QUAD):
            places = [padding.at(lane % quads * QUAD) + e * padding.stride + lane // quads for lane in range(WARP)]
            assert len({place % BANKS for place in places}) == WARP


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.row_strip == QUAD and s.block_q % BANKS == 0], ids=str)
def test_weights_are_stored_without_conflicts(shape: SimtShape) -> None:
    """Vectors of four pass eight lanes at a time: 32 banks, each once."""
    width = min(shape.part_cols, shape.strip(shape.block_kv))
    for first in range(0, WARP, 8):
        banks = set()
        for lane in range(first, first + 8):
            pair, parity = divmod(lane, LANES_PER_COLUMN)
            ty, tx = pair // shape.threads_x * LANES_PER_COLUMN + parity, pair % shape.threads_x
            place = shape.p_padding.at(tx * width) + ty * QUAD
            banks |= {(place + e) % BANKS for e in range(QUAD)}
        assert len(banks) == BANKS


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_do_not_overlap(shape: SimtShape) -> None:
    for padding, length, count in (
        (shape.chunk_padding(shape.block_q), shape.block_q, shape.chunk_k),
        (shape.chunk_padding(shape.block_kv), shape.block_kv, shape.chunk_k),
        (shape.p_padding, shape.block_q, shape.part),
    ):
        starts = [padding.at(row) for row in range(count)]
        assert all(later - earlier >= length for earlier, later in pairwise(starts))
        assert padding.at(count) >= starts[-1] + length
        assert all(start % QUAD == 0 for start in starts)  # rows are read as vectors of four
