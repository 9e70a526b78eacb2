"""Rotation of results that lie in the registers of a workgroup."""

from __future__ import annotations

from aule.ir import Value
from aule.tile.common.matrix import Matrix
from aule.tile.simt.engine import Simt
from aule.tile.simt.register_tile import RegisterTile


def rotate_back(engine: Simt, tile: RegisterTile, out: Matrix, row0: Value, cols: int) -> None:
    """Rotate the rows of a result back before they are stored into ``out`` from ``row0`` on.

    ``cols`` are its columns with padding. Partners that another thread holds pass through the stage, a few rows at a
    time.
    """
    b, rotary, strip = engine.b, out.rotary, tile.strip
    assert rotary is not None and engine.shape.threads_y * cols <= 2 * engine.stage_size
    exchange = not rotary.interleaved or strip == 1
    own_row = engine.ty * cols
    for r, variables in enumerate(tile.vars):
        x, partners = [variable.value for variable in variables], []
        columns = [tile.col(c) for c in range(len(x))]
        if exchange:
            b.barrier()  # everyone has read what the stage held
            for col, value in zip(columns, x, strict=True):
                b.store(engine.stage, own_row + col, value)
            b.barrier()
            partners = [b.load(engine.stage, own_row + rotary.partner(b, col)) for col in columns]
        angles = rotary.angles(b, row0 + tile.row(r))
        for c in range(0, len(x), strip):
            own = slice(c, c + strip)
            found = rotary.fetch_angles(b, angles, columns[c], strip)
            rotated = rotary.rotate(b, x[own], partners[own], found, columns[c], cols, back=True)
            for variable, value in zip(variables[own], rotated, strict=True):
                variable.value = value
