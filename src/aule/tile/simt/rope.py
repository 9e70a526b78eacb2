"""Rotation of results that lie in the registers of a workgroup."""

from __future__ import annotations

from aule.ir import Value
from aule.tile.common.matrix import Matrix
from aule.tile.common.rotary import Rotary
from aule.tile.simt.engine import Simt
from aule.tile.simt.register_tile import RegisterTile


def rotate_back(engine: Simt, tile: RegisterTile, out: Matrix, row0: Value, cols: int) -> None:
    """Rotate the rows of a result back before they are stored into ``out`` from ``row0`` on.

    ``cols`` are its columns with padding. Partners that another thread holds pass through the stage, a few rows at a
    time.
    """
    b, rotary, strip = engine.b, out.rotary, tile.strip
    assert rotary is not None
    exchange = not rotary.interleaved or strip == 1
    at_once = 2 * engine.stage_size // cols
    own_row = engine.ty * cols
    for r, variables in enumerate(tile.vars):
        x, partners = [variable.value for variable in variables], []
        columns = [tile.col(c) for c in range(len(x))]
        if exchange and at_once < engine.shape.threads_y:
            partners = _exchange_in_turn(engine, rotary, x, columns, cols, at_once)
        elif exchange:
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


def _exchange_in_turn(
    engine: Simt, rotary: Rotary, x: list[Value], columns: list[Value], cols: int, at_once: int
) -> list[Value]:
    """Partners of the elements of one row of each thread, ``at_once`` rows at a time: wide rows do not all fit into the
    stage."""
    b = engine.b
    partners = [b.var(value) for value in x]
    for first in range(0, engine.shape.threads_y, at_once):
        own_row = (engine.ty - first) * cols
        mine = (engine.ty >= first) & (engine.ty < first + at_once)
        b.barrier()  # everyone has read what the stage held
        with b.if_(mine):
            for col, value in zip(columns, x, strict=True):
                b.store(engine.stage, own_row + col, value)
        b.barrier()
        with b.if_(mine):
            for partner, col in zip(partners, columns, strict=True):
                partner.value = b.load(engine.stage, own_row + rotary.partner(b, col))
    return [partner.value for partner in partners]
