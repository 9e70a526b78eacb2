"""The result of a product while it is traced: which tile of it a workgroup makes, and how that is stored, with the bias
of its columns."""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, Scalar, Vector, f32, u32
from aule.ops.linear.config import ProductConfig
from aule.ops.linear.factors import Stored
from aule.ops.parameters import Parameters
from aule.tile.fragment import Fragments, FragmentTile
from aule.tile.fragment_shape import RUN

QUAD_LANES = 4
"""That hold a row of an accumulator, where those are NVIDIA's."""


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
    # Numbers behind the last tile, where the grid had to be cut, have no height and no row that exists.
    column = inside // b.max(height, 1)
    return band * group + (inside - column * b.max(height, 1)), column


def column_bias(p: Parameters, dtype: str, cols: list[Value], n: Value, work: Scalar, run: int = 1) -> list[Value]:
    """The bias of some columns, as numbers of a type; of columns that do not exist that of the last. ``run`` of them
    are neighbours, and all there or not."""
    b, buffer = p.b, p.buffer("bias", SCALARS[dtype])
    start, step = p.strided("bias"), p.number("bias_col_stride", p.index)
    places = [start + b.cast(b.min(col, n - run), p.index) * step for col in cols[::run]]
    return [b.cast(b.load(buffer, place + step * i), work) for place in places for i in range(run)]


def store_tile(
    p: Parameters,
    config: ProductConfig,
    tile: FragmentTile,
    first: tuple[Value, Value],
    keeps_row: Callable[[Value], Value],
    keeps_col: Callable[[Value], Value],
) -> None:
    """Store a subgroup's tile, whose first row and column are ``first``, and add the bias on the way; of rows and
    columns that are to be kept."""
    b, engine, out = p.b, tile.engine, Stored(p, config.out, "write")
    values = tile.values()
    cols = [first[1] + tile.col(c) for c in range(len(values[0]))]
    if config.bias is not None:
        added = column_bias(p, config.bias, cols, p.number("n"), f32)
        values = [[x + y for x, y in zip(row, added, strict=True)] for row in values]
    run = engine.run if config.out.aligned else 1
    if config.runs and holds_quads(engine):
        for r, row in enumerate(values):
            at = first[0] + tile.row(r)
            found = [quad_run(engine, row[c : c + RUN], out.elem) for c in range(0, len(row), RUN)]
            with b.if_(keeps_row(at)):
                start = out.start(at)
                for i, value in enumerate(found):
                    col = first[1] + i * QUAD_LANES * RUN + (engine.lane & (QUAD_LANES - 1)) * RUN
                    with b.if_(keeps_col(col)):
                        b.store(out.buffer, out.index(start, col), value)
        return
    for r, row in enumerate(values):
        at = first[0] + tile.row(r)
        with b.if_(keeps_row(at)):
            start = out.start(at)
            for c in range(0, len(row), run):
                with b.if_(keeps_col(cols[c])):
                    parts = b.vector(row[c : c + run])
                    b.store(out.buffer, out.index(start, cols[c]), b.cast(parts, out.elem))


def holds_quads(engine: Fragments) -> bool:
    """Whether four lanes hold a row of an accumulator in neighbouring pairs, as NVIDIA's do."""
    return engine.layout.lane_cols[:2] == (2, 4) and engine.part_cols == [0, 1, 8, 9]


def quad_run(engine: Fragments, row: list[Value], elem: Scalar) -> Value:
    """Eight neighbours of a row out of the pairs that four lanes hold of four times eight: the first lane gets the
    first eight, and so on."""
    b = engine.b
    words = [b.bitcast(b.cast(b.vector(row[i : i + 2]), elem), u32) for i in range(0, RUN, 2)]
    for step in (2, 1):
        upper = b.ne(engine.lane & step, 0)
        for low in (i for i in range(QUAD_LANES) if not i & step):
            high = low | step
            other = b.shuffle_xor(b.select(upper, words[low], words[high]), step)
            words[low], words[high] = b.select(upper, other, words[low]), b.select(upper, words[high], other)
    return b.bitcast(b.vector(words), Vector(elem, RUN))
