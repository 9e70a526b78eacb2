"""Dot products of a few rows with rows of a matrix in place, without packing it.

The partial sums of ``lanes`` dot products are vectors; they are reduced together, giving one vector of results.
"""

from __future__ import annotations

from aule.ir import Value
from aule.ir.types import element, i32, i64, u32
from aule.tile.common.matrix import Matrix
from aule.tile.vector.engine import CACHE_LINE, Operand, Vectors


def dot_products(
    engine: Vectors, left: Operand, rows: int, source: Matrix, first: Value, ahead: int = 0, row_by_row: int = 0
) -> list[Value]:
    """Multiply ``rows`` rows of A with ``lanes`` rows of a matrix, giving one vector per row of A.

    Parameters
    ----------
    left : Operand
        Rows of A, zero-padded to full vectors. If A holds pairs, the matrix is bf16 and is read as pairs.
    rows : int
        Rows of A, a power of two.
    source : Matrix
        The matrix, with stride 1 along its rows.
    first : Value
        First row of the matrix.
    ahead : int
        Rows ahead of use at which the matrix is prefetched into the cache.
    row_by_row : int
        Unroll factor for reading the matrix row by row, with A in registers; 0 reads a few lines of several rows at a
        time.
    """
    if row_by_row:
        return _dot_products_row_by_row(engine, left, rows, source, first, ahead, row_by_row)
    span = engine.lanes // rows
    groups = [dot_product_group(engine, left, rows, source, first + i * span, ahead) for i in range(rows)]
    return dot_products_from_groups(engine, groups)


def dot_product_group(engine: Vectors, left: Operand, rows: int, source: Matrix, first: Value, ahead: int = 0) -> Value:
    """Multiply ``rows`` rows of A with ``lanes // rows`` rows of a matrix, giving one vector, rows of A outermost."""
    b, lanes = engine.b, engine.lanes
    span = lanes // rows
    pairs = element(left.pointer.type) == u32
    step_cols = 2 * lanes if pairs else lanes
    line_steps = max(CACHE_LINE // source.elem.bytes // step_cols, 1) if ahead else 1
    starts = [source.row_start(b, first + i) for i in range(span)]
    later = [source.row_start(b, first + (i + ahead)) for i in range(span if ahead else 0)]
    c = engine.accumulators(rows, span)

    def step(col: Value, count: int) -> None:
        read = engine.read_pairs if pairs else engine.read
        theirs = [read(source, start, col, count) for start in starts]
        for i, row in enumerate(c):
            mine = engine.load_factor(left.pointer, left.base + left.row * i + (col >> 1 if pairs else col), lanes)
            for variable, x in zip(row, theirs, strict=True):
                variable.value = engine.accumulate(mine, x, variable.value)

    width = line_steps * step_cols
    end = source.cols // width * width
    if end:
        with b.loop(b.const(0, i64), end, width, unroll=max(2 // line_steps, 1), name="col") as col:
            for start in later:
                b.prefetch(source.buffer, start + col)
            for i in range(line_steps):
                step(col + i * step_cols, step_cols)
    for start in later if source.cols > end else ():
        b.prefetch(source.buffer, start + end)
    for at in range(end, source.cols, step_cols):
        step(b.const(at, i64), min(step_cols, source.cols - at))
    return _lane_sums(engine, [variable.value for row in c for variable in row])


def dot_products_from_groups(engine: Vectors, groups: list[Value]) -> list[Value]:
    """Rearrange the results of `dot_product_group` into one vector per row of A."""
    span = engine.lanes // len(groups)
    return [_concatenated(engine, [(group, r * span) for group in groups], span) for r in range(len(groups))]


def _dot_products_row_by_row(
    engine: Vectors, left: Operand, rows: int, source: Matrix, first: Value, ahead: int, unroll: int
) -> list[Value]:
    """Compute `dot_products` one row of the matrix at a time.

    Partial sums go through memory: in registers they would displace A, and compilers would hoist the loads of many rows
    above their products.
    """
    b, lanes = engine.b, engine.lanes
    pairs = element(left.pointer.type) == u32
    step_cols, read = (2 * lanes, engine.read_pairs) if pairs else (lanes, engine.read)
    steps = range(0, source.cols, step_cols)
    mine = [
        [engine.load_factor(left.pointer, left.base + left.row * r + i * lanes, lanes) for i in range(len(steps))]
        for r in range(rows)
    ]
    partial = b.private("dots", engine.work, lanes * rows * lanes)
    with b.loop(b.const(0, i32), lanes, unroll=unroll, name="row") as row:
        start = source.row_start(b, first + row)
        if ahead:
            later = source.row_start(b, first + row + ahead)
            for col in range(0, source.cols, CACHE_LINE // source.elem.bytes):
                b.prefetch(source.buffer, later + col)
        totals = [engine.const(0.0)] * rows
        for i, col in enumerate(steps):
            x = read(source, start, b.const(col, i64), min(step_cols, source.cols - col))
            totals = [engine.accumulate(mine[r][i], x, totals[r]) for r in range(rows)]
        for r, total in enumerate(totals):
            b.store(partial, (engine.index(row) * rows + r) * lanes, total)
    span = lanes // rows

    def sums(group: int) -> Value:
        order = [(row, r) for r in range(rows) for row in range(group * span, (group + 1) * span)]
        return _lane_sums(engine, [b.load(partial, (row * rows + r) * lanes, lanes) for row, r in order])

    return dot_products_from_groups(engine, [sums(group) for group in range(rows)])


def _lane_sums(engine: Vectors, vectors: list[Value]) -> Value:
    """Sum each of ``lanes`` vectors over its lanes; the sums form one vector."""
    b, lanes = engine.b, engine.lanes
    size = lanes // 2
    while len(vectors) > 1:
        # Each run of 2 * size lanes belongs to one sum; its halves are added. Runs of the two vectors alternate.
        runs = range(0, lanes, 2 * size)
        low = tuple(of + at + i for at in runs for of in (0, lanes) for i in range(size))
        high = tuple(i + size for i in low)
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [b.permute(x, y, low) + b.permute(x, y, high) for x, y in pairs]
        size //= 2
    return vectors[0]


def _concatenated(engine: Vectors, pieces: list[tuple[Value, int]], width: int) -> Value:
    """Concatenate ``width`` lanes of each vector, from the given lane on."""
    b = engine.b
    if len(pieces) == 1:
        return pieces[0][0]
    parts = [b.permute(x, None, tuple(range(at, at + width))) for x, at in pieces]
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        both = tuple(range(2 * width))
        parts = [b.vector([x, y]) if width == 1 else b.permute(x, y, both) for x, y in pairs]
        width *= 2
    return parts[0]
