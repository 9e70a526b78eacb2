"""Rotated matrices of a kernel: Q and K when they are read, dQ and dK when they are stored."""

from __future__ import annotations

from dataclasses import replace

from aule.ir import Value
from aule.ir.types import SCALARS, Scalar
from aule.ops.scores.config import ScoreConfig
from aule.ops.scores.parameters import Parameters
from aule.tile.common.matrix import QUAD, Matrix
from aule.tile.common.rotary import Rotary


def declare_tables(p: Parameters) -> None:
    """Declare the buffers of cosines and sines, for kernels whose callers rely on the order of buffers."""
    rope = p.config.rope
    assert rope is not None
    for name in ("cos", "sin"):
        p.buffer(name, SCALARS[rope.dtype])


def quad_angles(config: ScoreConfig) -> tuple[Scalar, int] | None:
    """Type of the tables, and the number of angles of a quad of columns; None without rotation."""
    rope = config.rope
    return None if rope is None else (SCALARS[rope.dtype], QUAD // 2 if rope.interleaved else QUAD)


def rotating(p: Parameters, name: str, matrix: Matrix, batch: Value, shift: Value) -> Matrix:
    """A matrix with its rotation, if the configuration rotates the matrix of that name."""
    if p.config.rope is None or name not in (("dq", "dk") if p.config.rope_prepass else ("q", "k", "dq", "dk")):
        return matrix
    return replace(matrix, rotary=rotary_of(p, name, batch, shift))


def rotary_of(p: Parameters, name: str, batch: Value, shift: Value) -> Rotary:
    """The rotation of the matrix of a name. ``shift`` is the key position of query row 0; whichever of queries and keys
    begins further to the left begins at position 0."""
    b, rope = p.b, p.config.rope
    assert rope is not None
    first = b.max(shift if name in ("q", "dq") else -shift, 0)
    cos, sin = (_table(p, table, batch) for table in ("cos", "sin"))
    return Rotary(cos, sin, first, rope.dim, rope.interleaved)


def _table(p: Parameters, name: str, batch: Value) -> Matrix:
    config = p.config
    assert config.rope is not None
    base = p.strided(name, batch)
    row_stride = p.number(f"{name}_row_stride", p.index)
    col_stride = None if config.rope_unit else p.number(f"{name}_col_stride", p.index)
    buffer = p.buffer(name, SCALARS[config.rope.dtype])
    rows = p.number("cos_rows")  # both tables have equally many
    return Matrix(buffer, base, rows, config.rope.half, row_stride, col_stride, config.rope_aligned)
