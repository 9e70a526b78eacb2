"""Rotation on one CPU core: rows are copied from where they lie to where they are wanted, rotated on the way."""

from __future__ import annotations

from aule.ir import Value
from aule.ir.types import i32, i64
from aule.tile.matrix import Matrix
from aule.tile.rotary import Rotary
from aule.tile.vector import Vectors


def rows_in(engine: Vectors, array: Value, rows: Value, cols: int, stride: int) -> Matrix:
    """Rows of ``stride`` elements in an array of the kernel as a matrix."""
    b = engine.b
    return Matrix(array, b.const(0, i64), rows, cols, b.const(stride, i64), None, False)


def rotated_rows(
    engine: Vectors,
    source: Matrix,
    first: Value,
    count: Value,
    target: Value,
    stride: int,
    scale: Value | None = None,
) -> Matrix:
    """Bring ``count`` rows from row ``first`` on into an array of rows of ``stride`` elements, rotated, scaled, and
    with zeros behind the last column. Rows past the source's end repeat its last."""
    b, rotary = engine.b, source.rotary
    assert rotary is not None
    result = rows_in(engine, target, b.coerce(count, i32), source.cols, stride)
    with b.loop(b.const(0, i32), count, name="row") as row:
        at = b.min(first + row, source.rows - 1)
        to = engine.index(row) * stride
        turn_row(engine, rotary, at, source, source.row_start(b, at), result, to, scale)
        for col, width in engine.columns(stride - source.cols):
            engine.write(result, to, source.cols + col, engine.const(0.0), width)
    return result


def turn_row(
    engine: Vectors,
    rotary: Rotary,
    row: Value,
    source: Matrix,
    start: Value,
    target: Matrix,
    to: Value,
    scale: Value | None = None,
    back: bool = False,
) -> None:
    """Copy a row of a matrix, rotated and scaled; ``back`` the other way round. It may be copied onto itself.

    Parameters
    ----------
    row : Value
        Its number, on which its angles depend.
    start, to : Value
        Where it begins in ``source`` and in ``target``.
    """
    b, half = engine.b, rotary.half
    angles = rotary.angles(b, row)

    def read(col: int, width: int) -> Value:
        x = engine.read(source, start, col, width)
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
            engine.write(target, to, col, b.fma(others, sin * signs, x * cos), width)
    else:
        for col, width in engine.columns(half):
            pair = rotary.turn_pair(b, read(col, width), read(half + col, width), *angle(col, width))
            for at, x in zip((col, half + col), pair, strict=True):
                engine.write(target, to, at, x, width)
    for col, width in engine.columns(source.cols - rotary.dim):
        engine.write(target, to, rotary.dim + col, read(rotary.dim + col, width), width)
