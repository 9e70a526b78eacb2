"""Dropout of tiles on matrix units: lanes that share draws keep the right weights in every layout of fragments."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from test_fragment_layouts import LAYOUTS

from aule.ir.builder import Builder
from aule.ir.interpret import interpret
from aule.ir.types import i32, u32
from aule.ops.scores.tile_dropout import TileDropout
from aule.ops.softmax.dropout import Dropout, kept, seed_words, threshold
from aule.tile.fragment.engine import Fragments, fitted
from aule.tile.fragment.shape import FragmentShape

SEED, P, HEAD = 0x0123456789ABCDEF, 0.4, 5


def drawn(way: str, rows: int, cols: int, keys: Literal["columns", "rows"]) -> tuple[Any, TileDropout, Any]:
    """A kernel in which one subgroup stores what it keeps of a tile, and what that is to be."""
    target = LAYOUTS[way].target
    shape = fitted(FragmentShape(rows, cols, 1, 1, False), target)
    b = Builder("tile_dropout", workgroup=shape.threads, subgroup_size=shape.lanes)
    seed, limit, out = b.buffer("seed", u32), b.scalar("limit", u32), b.buffer("out", i32, "write")
    engine = Fragments(b, target, shape, "f16")
    S = engine.tile(rows, cols)
    values = S.values()
    tile = TileDropout(Dropout(b, limit, seed, b.const(0, i32)), engine, len(values), len(values[0]), keys)
    first = b.const(48, i32)  # a later tile of both axes

    def place(r: int, c: int) -> tuple[Any, Any]:
        row, col = first + S.row(r), first + S.col(c)
        return (row, col) if keys == "columns" else (col, row)

    for r, line in enumerate(tile.draw(b.const(HEAD, i32), place).kept()):
        for c, keep in enumerate(line):
            b.store(out, S.row(r) * cols + S.col(c), b.cast(keep, i32))
    span = slice(48, 48 + rows), slice(48, 48 + cols)
    queries, columns = span if keys == "columns" else span[::-1]
    wanted = kept(P, seed_words(SEED), np.array(HEAD), queries, columns)
    return b.finish(), tile, wanted if keys == "columns" else wanted.T


@pytest.mark.parametrize("keys", ["columns", "rows"])
@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (16, 48), (32, 32), (48, 16)])
@pytest.mark.parametrize("way", LAYOUTS)
def test_lanes_keep_what_is_defined(way: str, rows: int, cols: int, keys: Literal["columns", "rows"]) -> None:
    kernel, _, wanted = drawn(way, rows, cols, keys)
    found = np.full((rows, cols), -1, np.int32)
    interpret(kernel, (1, 1, 1), [seed_words(SEED), threshold(P), found.reshape(-1)])
    assert (found == wanted).all()


@pytest.mark.parametrize("keys", ["columns", "rows"])
def test_nothing_is_drawn_twice(keys: Literal["columns", "rows"]) -> None:
    """On NVIDIA's units eight elements of a lane take one draw, which are twenty products of two words."""
    kernel, tile, _ = drawn("nvidia", 16, 64, keys)
    assert tile.rows * tile.cols == 32
    assert sum(op.opcode == "mulhi" for op in kernel.walk()) == 32 // 8 * 20
