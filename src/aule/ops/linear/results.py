"""The result of a product while it is traced: which tile a workgroup computes, and how it is stored."""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, Scalar, Vector, f32, u32
from aule.ops.linear.config import ProductConfig
from aule.ops.linear.factors import Stored
from aule.ops.shared.parameters import Parameters
from aule.tile.fragment.engine import Fragments, FragmentTile
from aule.tile.fragment.shape import RUN
from aule.tile.simt.register_tile import RegisterTile

QUAD_LANES = 4
"""Lanes that hold a row of an accumulator, if `holds_quads`."""


def tile_of(b: Builder, m: Value, n: Value, rows: int, cols: int, group: int) -> tuple[Value, Value]:
    """The first row and column of a workgroup's tile."""
    number = b.group_id(0) + b.group_id(1) * b.group_count(0)
    row, col = tile_at(b, number, (m + (rows - 1)) // rows, (n + (cols - 1)) // cols, group)
    return row * rows, col * cols


def tile_at(b: Builder, number: Value, down: Value, along: Value, group: int) -> tuple[Value, Value]:
    """Row and column of a tile among ``down`` by ``along``: ``group`` tiles down, then the next ones along."""
    band = number // (along * group)
    inside = number - band * (along * group)
    height = b.min(down - band * group, group)
    # A split grid has numbers past the last tile; those have no height, and no row that exists.
    column = inside // b.max(height, 1)
    return band * group + (inside - column * b.max(height, 1)), column


def column_bias(p: Parameters, dtype: str, cols: list[Value], n: Value, run: int = 1) -> list[Value]:
    """The bias of some columns, clamped to existing ones; each ``run`` of them are neighbours that exist together."""
    b, buffer = p.b, p.buffer("bias", SCALARS[dtype])
    start, step = p.strided("bias"), p.number("bias_col_stride", p.index)
    places = [start + b.cast(b.min(col, n - run), p.index) * step for col in cols[::run]]
    return [b.cast(b.load(buffer, place + step * i), f32) for place in places for i in range(run)]


def store_tile(
    p: Parameters,
    config: ProductConfig,
    tile: FragmentTile,
    first: tuple[Value, Value],
    stores_row: Callable[[Value], Value],
    stores_col: Callable[[Value], Value],
) -> None:
    """Add the bias and store a subgroup's tile, whose first row and column are ``first``, where ``stores_row`` and
    ``stores_col`` are true."""
    b, engine, out = p.b, tile.engine, Stored(p, config.out, "write")
    values, cols = with_bias(p, config, tile, first)
    run = engine.run if config.out.aligned else 1
    quads = config.runs and holds_quads(engine)
    for r, row in enumerate(values):
        at = first[0] + tile.row(r)
        if quads:
            _store_quads(out, engine, row, at, first[1], stores_row, stores_col)
            continue
        with b.if_(stores_row(at)):
            start = out.start(at)
            for c in range(0, len(row), run):
                with b.if_(stores_col(cols[c])):
                    parts = b.vector(row[c : c + run])
                    b.store(out.buffer, out.index(start, cols[c]), b.cast(parts, out.elem))


def _store_quads(
    out: Stored,
    engine: Fragments,
    row: list[Value],
    at: Value,
    first_col: Value,
    stores_row: Callable[[Value], Value],
    stores_col: Callable[[Value], Value],
) -> None:
    """Store a row of a tile in runs of eight columns, which four lanes exchange."""
    b = engine.b
    found = [quad_run(engine, row[c : c + RUN], out.elem) for c in range(0, len(row), RUN)]
    with b.if_(stores_row(at)):
        start = out.start(at)
        for i, value in enumerate(found):
            col = first_col + i * QUAD_LANES * RUN + (engine.lane & (QUAD_LANES - 1)) * RUN
            with b.if_(stores_col(col)):
                b.store(out.buffer, out.index(start, col), value)


def with_bias(
    p: Parameters, config: ProductConfig, tile: FragmentTile | RegisterTile, first: tuple[Value, Value]
) -> tuple[list[list[Value]], list[Value]]:
    """A tile's values with the bias added, and their columns."""
    values = tile.values()
    cols = [first[1] + tile.col(c) for c in range(len(values[0]))]
    if config.bias is not None:
        added = column_bias(p, config.bias, cols, p.number("n"))
        values = [[x + y for x, y in zip(row, added, strict=True)] for row in values]
    return values, cols


def holds_quads(engine: Fragments) -> bool:
    """Whether four lanes hold a row of an accumulator in neighbouring pairs."""
    return engine.layout.lane_cols[:2] == (2, 4) and engine.part_cols == [0, 1, 8, 9]


def quad_run(engine: Fragments, row: list[Value], elem: Scalar) -> Value:
    """Eight neighbours of a row, from the pairs that four lanes hold of four times eight: the first lane gets the first
    eight, and so on."""
    b = engine.b
    words = [b.bitcast(b.cast(b.vector(row[i : i + 2]), elem), u32) for i in range(0, RUN, 2)]
    for step in (2, 1):
        upper = b.ne(engine.lane & step, 0)
        for low in (i for i in range(QUAD_LANES) if not i & step):
            high = low | step
            other = b.shuffle_xor(b.select(upper, words[low], words[high]), step)
            words[low], words[high] = b.select(upper, other, words[low]), b.select(upper, words[high], other)
    return b.bitcast(b.vector(words), Vector(elem, RUN))
