"""Rotary position embedding on one CPU core: copies of rows, rotated."""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Value
from aule.ir.types import i32, i64
from aule.tile.common.matrix import Matrix
from aule.tile.common.rotary import Rotary
from aule.tile.vector.engine import Vectors


@dataclass(frozen=True)
class MatrixRow:
    """A row of a matrix, and the index of its first element."""

    matrix: Matrix
    start: Value


def array_rows(engine: Vectors, array: Value, rows: Value, cols: int, stride: int) -> Matrix:
    """A matrix over an array of the kernel with rows of ``stride`` elements."""
    b = engine.b
    return Matrix(array, b.const(0, i64), rows, cols, b.const(stride, i64), None, False)


def rotate_rows(
    engine: Vectors,
    source: Matrix,
    first: Value,
    count: Value,
    target: Value,
    stride: int,
    scale: Value | None = None,
) -> Matrix:
    """Rotate ``count`` rows, from row ``first`` on, into an array with rows of ``stride`` elements, times ``scale``.

    Columns after the last are zero; rows past the source's end repeat its last row.
    """
    b, rotary = engine.b, source.rotary
    assert rotary is not None
    result = array_rows(engine, target, b.coerce(count, i32), source.cols, stride)
    with b.loop(b.const(0, i32), count, name="row") as row:
        at = b.min(first + row, source.rows - 1)
        to = engine.index(row) * stride
        rotate_row(engine, rotary, at, MatrixRow(source, source.row_start(b, at)), MatrixRow(result, to), scale)
        for col, width in engine.columns(stride - source.cols):
            engine.write(result, to, source.cols + col, engine.const(0.0), width)
    return result


def rotate_row(
    engine: Vectors,
    rotary: Rotary,
    row: Value,
    source: MatrixRow,
    target: MatrixRow,
    scale: Value | None = None,
    back: bool = False,
) -> None:
    """Copy a row of a matrix, rotated by the angles of number ``row`` and multiplied by ``scale``.

    Source and target may be the same row. ``back`` rotates by the negative angles.
    """
    b, half = engine.b, rotary.half
    angles = rotary.angles(b, row)

    def read(col: int, width: int) -> Value:
        x = engine.read(source.matrix, source.start, col, width)
        return x if scale is None else x * scale

    def angle(col: int, width: int) -> tuple[Value, Value]:
        cos, sin = engine.read(rotary.cos, angles.cos, col, width), engine.read(rotary.sin, angles.sin, col, width)
        return cos, -sin if back else sin

    if rotary.interleaved:
        lanes = range(engine.lanes)
        signs = b.vector([b.const(1.0 if i % 2 else -1.0, engine.work) for i in lanes])
        for col, width in engine.columns(rotary.dim):
            x = read(col, width)
            cos, sin = (b.permute(y, None, tuple(i // 2 for i in lanes)) for y in angle(col // 2, width // 2))
            others = b.permute(x, None, tuple(i ^ 1 for i in lanes))
            engine.write(target.matrix, target.start, col, b.fma(others, sin * signs, x * cos), width)
    else:
        for col, width in engine.columns(half):
            pair = rotary.rotate_pair(b, read(col, width), read(half + col, width), *angle(col, width))
            for at, x in zip((col, half + col), pair, strict=True):
                engine.write(target.matrix, target.start, at, x, width)
    for col, width in engine.columns(source.matrix.cols - rotary.dim):
        engine.write(target.matrix, target.start, rotary.dim + col, read(rotary.dim + col, width), width)
