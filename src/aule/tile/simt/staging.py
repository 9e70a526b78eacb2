"""Staging of the simt engine: chunks of matrices from global memory through registers into shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aule.ir import Value, Var
from aule.ir.types import Scalar, i32
from aule.tile.common.matrix import QUAD
from aule.tile.common.rotary import Angles
from aule.tile.simt.bank_padding import BankPadding

if TYPE_CHECKING:
    from aule.tile.simt.engine import Simt


class Stager:
    """Registers and stages through which quads pass from global into shared memory.

    `Simt.fetch` starts the loads of the next step, `Simt.commit` stores them to the current stage, and the caller puts
    a barrier after it. Two stages suffice with one barrier a step: a stage is written again only after the barrier that
    follows its last readers.
    """

    def __init__(
        self,
        engine: Simt,
        elem: Scalar,
        quads: int,
        stage: Value,
        stage_size: int,
        angles: tuple[Scalar, int] | None = None,
    ) -> None:
        """``angles``, if quads are rotated: the type of the tables, and how many angles a quad has."""
        b = engine.b
        zero = b.splat(b.const(0, elem), QUAD)
        self.registers: list[Var] = [b.var(zero, "fetched") for _ in range(quads)]
        # Cosines, sines and, unless they are in the quad itself, the partners of its elements.
        self.rotations: list[list[Var]] = [[] for _ in range(quads)]
        if angles is not None:
            angle = b.splat(b.const(0, angles[0]), angles[1])
            kinds = [angle, angle, zero] if angles[1] == QUAD else [angle, angle]
            self.rotations = [[b.var(kind, "turn") for kind in kinds] for _ in range(quads)]
        self.stage = stage
        self.stage_size = stage_size
        self.step = b.var(b.const(0, i32), "step")
        self.offset = b.var(b.const(0, i32), "stage_offset")

    def advance(self) -> None:
        step = self.step.value + 1
        self.step.value = step
        self.offset.value = (step & 1) * self.stage_size


@dataclass(frozen=True)
class Row:
    """The start of a row in memory, and its angles if it is rotated."""

    start: Value
    angles: Angles | None = None


@dataclass(frozen=True)
class Chunk:
    """``rows`` × ``cols`` elements of a matrix that one step brings into shared memory."""

    rows: int
    cols: int
    start: int
    """Where the chunk begins in its stage, in elements."""
    padding: BankPadding
    """Padding of its rows in shared memory, or of its columns when transposed."""
    transposed: bool = False
    by_row: bool = False
    """All quads of a thread lie in one row, so that they need one address; only if that divides evenly and lanes still
    read entire cache lines."""

    @property
    def quads(self) -> int:
        return self.rows * self.cols // QUAD

    def per_thread(self, threads: int) -> int:
        return -(-self.quads // threads)


@dataclass(frozen=True)
class Operand:
    """A factor of a product in shared memory: its start, and the padding of its rows."""

    memory: Value
    start: Value
    padding: BankPadding
