"""Rotation on matrix units: of rows in shared memory, and of results in registers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from aule.ir import Value
from aule.ir.types import Vector, f32, i32, u32
from aule.tile.common.matrix import Matrix, divmod_const
from aule.tile.fragment.engine import Fragments, FragmentTile
from aule.tile.fragment.shape import RUN
from aule.tile.fragment.transfer import Transfer


def transfer_of(
    engine: Fragments, source: Matrix, rows: int, memory: Value, copies: bool = True, width: int = 0
) -> Transfer:
    """A transfer as `Fragments.transfer`, which also rotates the rows if the matrix says so."""
    if source.rotary is None:
        return engine.transfer(source, rows, memory, copies, width)
    return RotatedTransfer(engine, source, rows, memory, copies and engine.copies, width)


class RotatedTransfer(Transfer):
    """A transfer that rotates rows.

    A thread fetches both runs of a pair and rotates them in shared memory before others see them. So nothing waits in
    registers, and rows can be copied asynchronously.
    """

    def __init__(
        self, engine: Fragments, source: Matrix, rows: int, memory: Value, copies: bool, width: int = 0
    ) -> None:
        assert source.rotary is not None
        self.rotary = source.rotary
        paired = not self.rotary.interleaved
        # Runs of a row come in pairs; if their number is odd, the last is paired with padding.
        super().__init__(engine, source, rows, memory, copies and not (paired and source.cols % (2 * RUN)), width)
        b, threads = self.b, engine.shape.threads
        self.first = b.var(b.const(0, i32), "first_row")
        if paired:
            self.together = 2
            self.regular = False  # a thread's runs lie in two columns
            self.runs //= 2
            self.count = -(-self.runs // threads) * 2
            if not self.direct and len(self.registers) < self.count:
                self.registers.append(self._register())
            self.across = self.cols // (2 * RUN)
            self.pair_row, self.pair = divmod_const(b, engine.thread, self.across)

    def place(self, i: int | Value) -> tuple[Value, Value, Value]:
        """Row and column of this thread's ``i``-th run, and its number, or its pair's."""
        if self.together == 1 or not isinstance(i, int):
            return super().place(i)
        b, threads, half = self.b, self.engine.shape.threads, self.rotary.half
        number = self.engine.thread + i // 2 * threads
        if threads % self.across == 0:
            row, pair = self.pair_row + i // 2 * (threads // self.across), self.pair
        else:
            row, pair = divmod_const(b, number, self.across)
        col = pair * RUN + i % 2 * half
        if self.rotary.dim < self.cols:  # beyond the rotated columns, neighbours are paired
            beyond = pair * (2 * RUN) + i % 2 * RUN
            col = b.select(pair < half // RUN, col, beyond)
        return row, col, number

    def start(self, first: Value, target: Value, full: bool = False) -> None:
        self.first.value = first
        super().start(first, target, full)

    def finish(self, target: Value) -> None:
        super().finish(target)
        b, rotary, first = self.b, self.rotary, self.first.value

        def rotate(row: Value, col: Value) -> None:
            with b.if_(col < rotary.dim) if rotary.dim < self.cols else nullcontext():
                self._rotate(first + row, target + row * self.stride + col, col)

        for i in range(0, self.count, self.together):
            self._each(i, rotate)

    def _rotate(self, row: Value, at: Value, col: Value) -> None:
        """Rotate a run, or two that are partners, in shared memory from ``at`` on."""
        b, rotary = self.b, self.rotary
        cos, sin = (b.unpack(b.cast(x, f32)) for x in rotary.fetch_angles(b, rotary.angles(b, row), col, RUN))
        places = [at + i * rotary.half for i in range(self.together)]
        runs = [b.unpack(b.cast(b.load(self.memory, place, RUN), f32)) for place in places]
        if rotary.interleaved:
            pairs = [(runs[0][i], runs[0][i + 1]) for i in range(0, RUN, 2)]
        else:
            pairs = list(zip(*runs, strict=True))
        rotated = [rotary.rotate_pair(b, *pair, c, s) for pair, c, s in zip(pairs, cos, sin, strict=True)]
        if rotary.interleaved:
            results = [[x for pair in rotated for x in pair]]
        else:
            results = [[pair[i] for pair in rotated] for i in range(2)]
        for place, result in zip(places, results, strict=True):
            b.store(self.memory, place, self.engine.incoming(b.vector(result)))


def rotated_back(
    engine: Fragments,
    memory: Value,
    tile: FragmentTile,
    out: Matrix,
    place: tuple[Value, Value, Value],
    row_of: Callable[[int], Value],
    cols: int,
) -> list[list[Value]]:
    """This lane's elements of a result, by row and column, rotated back.

    ``place`` is the workgroup's first row of ``out``, the tile's first row among the workgroup's, and its first column;
    ``row_of`` gives the tile's row that is this lane's first, second and so on; ``cols`` are the columns of all tiles.
    Partners that another lane holds pass through shared memory, which nobody reads any more; an fp32 takes two elements
    of 16 bits.
    """
    b, rotary, run = engine.b, out.rotary, engine.run
    assert rotary is not None
    row0, own_row, own_col = place
    values = tile.values()
    rows = [own_row + row_of(r) for r in range(len(values))]
    columns = [own_col + tile.col(c) for c in range(len(values[0]))]
    exchange = not rotary.interleaved or run == 1
    if exchange:
        for row, line in zip(rows, values, strict=True):
            for col, x in zip(columns, line, strict=True):
                b.store(memory, (row * cols + col) * 2, b.bitcast(b.bitcast(x, u32), Vector(engine.elem, 2)))
        b.barrier()
    result = []
    for row, line in zip(rows, values, strict=True):
        angles = rotary.angles(b, row0 + row)
        rotated: list[Value] = []
        for c in range(0, len(line), run):
            partners = []
            for col in columns[c : c + run] if exchange else []:
                halves = b.load(memory, (row * cols + rotary.partner(b, col)) * 2, 2)
                partners.append(b.bitcast(b.bitcast(halves, u32), f32))
            found = rotary.fetch_angles(b, angles, columns[c], run)
            rotated += rotary.rotate(b, line[c : c + run], partners, found, columns[c], cols, back=True)
        result.append(rotated)
    return result


def exchange_bytes(rows: int, cols: int) -> int:
    """Bytes of shared memory that `rotated_back` needs for the rows of a workgroup."""
    return 4 * rows * cols
