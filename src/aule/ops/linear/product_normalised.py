"""A product of warpgroups whose left factor is normalised on its way.

One warpgroup more than the tile has rows for multiplies nothing. It brings in the left factor as it is, and a step
later, when its copies have come, normalises the very runs that it has copied where they lie. The others then find what
they expect of any factor: they bring in the right one, and multiply as those of the plain product do. All meet once a
step; while step n is multiplied, step n + 1 is normalised and step n + 2 is on its way.

A thread's runs lie one below the other. What belongs to its eight columns it fetches itself, and what belongs to its
warp's rows is spread over the lanes, which hand it to each other. The one are weight and bias and the other the
statistics, or the other way round, as the factor is stored; the one comes with each step, the other with each tile.

The roles are the two branches of one condition, within one loop. PTX has a loop for each (`render._ptx_warpgroup`), so
that neither role has to keep the other's registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import Vector, f32, u32
from aule.ops.linear.config import WARPGROUP_STAGES as STAGES
from aule.ops.linear.config import ProductConfig, WarpgroupBlocks
from aule.ops.linear.factors import Factor, RowAt
from aule.ops.linear.product_warpgroup import Cursor, WarpgroupProduct, Way
from aule.target import Target
from aule.tile.fragment_shape import RUN
from aule.tile.warpgroup import ROWS, SUBGROUPS

_LANES = 32
_THREADS = SUBGROUPS * _LANES
"""Of the warpgroup that normalises."""
_REGISTERS = 1 << 16
"""Of a multiprocessor."""


def build_product_normalised(config: ProductConfig, target: Target) -> KernelIR:
    """Trace the kernel."""
    blocks = config.blocks
    assert isinstance(blocks, WarpgroupBlocks) and config.whole and config.right.norm is None
    threads = blocks.threads + _THREADS
    registers = min(blocks.registers, _REGISTERS // threads // RUN * RUN)
    b = Builder(config.name, threads, subgroup_size=_LANES, max_registers=registers)
    NormalisedProduct(b, config, blocks, target).run()
    return b.finish()


class _Numbers:
    """What a thread that normalises needs beside its runs of a step."""

    def __init__(self, product: WarpgroupProduct) -> None:
        b, way, engine = product.b, product.left, product.engine
        self.b, self.way, self.factor = b, way, way.factor
        runs = way.shape.cols // RUN
        self.rows = _LANES // runs
        assert self.rows * way.count <= _LANES, "a lane has the numbers of one row at most"
        # Lanes have a warp's rows one after the other; its first are those of its first round.
        warp = engine.subgroup - product.blocks.threads // _LANES
        self.row = warp * self.rows + engine.lane % self.rows + engine.lane // self.rows % way.count * way.step
        self.own = engine.lane // runs
        self.statistics = [b.var(b.const(0.0, f32)) for _ in range(3)]
        # Word by word: from a loaded vector, which has its place among registers, ptxas would copy what a variable
        # holds, and wait for it.
        self.affine = [
            None if x is None else [b.var(b.const(0, u32)) for _ in range(RUN * x.elem.bits // 32)]
            for x in self.factor.vectors
        ]

    def fetch(self, first: Value, depth: Value) -> None:
        """Start to load those of a step of the tile that begins at row or column ``first``; what belongs to the tile
        comes with its first step."""
        row, col = (depth, first) if self.factor.across else (first, depth)
        with self.b.if_(self.b.eq(depth, 0)):
            self._fetch_affine(col) if self.factor.across else self._fetch_statistics(row)
        self._fetch_statistics(row) if self.factor.across else self._fetch_affine(col)

    def _fetch_statistics(self, row: Value) -> None:
        for variable, x in zip(self.statistics, self.factor.statistics(row + self.row), strict=True):
            variable.value = x

    def _fetch_affine(self, col: Value) -> None:
        b, factor = self.b, self.factor
        for vector, words in zip(factor.vectors, self.affine, strict=True):
            if vector is None or words is None:
                continue
            width = RUN // len(words)
            for i, word in enumerate(words):
                at = col + self.way.col + i * width
                word.value = b.bitcast(vector.load(vector.start(), at, width, factor.bound), u32)

    def values(self) -> tuple[list[RowAt], list[Value | None]]:
        """What normalises each of this thread's runs, and weight and bias of their columns."""
        b = self.b
        mean, scale, shift = (x.value for x in self.statistics)
        shift = b.fma(-mean, scale, shift)
        lanes = [self.own + i * self.rows for i in range(self.way.count)]
        affine: list[Value | None] = []
        for vector, words in zip(self.factor.vectors, self.affine, strict=True):
            if vector is None or words is None:
                affine.append(None)
            else:
                affine.append(b.bitcast(b.vector([x.value for x in words]), Vector(vector.elem, RUN)))
        return [RowAt(lane, b.shuffle(scale, lane), b.shuffle(shift, lane)) for lane in lanes], affine


class NormalisedProduct(WarpgroupProduct):
    """The product of a left factor that is normalised and a right one that is not."""

    def __init__(self, b: Builder, config: ProductConfig, blocks: WarpgroupBlocks, target: Target) -> None:
        super().__init__(b, config, blocks, target)
        self.multiplies = self.engine.group < blocks.rows // ROWS
        self.numbers = _Numbers(self)

    def ways(self, left: Factor, right: Factor) -> tuple[Way, Way]:
        blocks = self.blocks
        columns = Way(self, right, blocks.cols, 0, blocks.threads)
        start = STAGES * columns.shape.elements
        return Way(self, left, blocks.rows, start, _THREADS, leader=blocks.threads), columns

    def run(self) -> None:
        b, stage, tiles = self.b, self.stage, self.down * self.along
        cursor = Cursor(self, self.first)

        def bring(to: Value) -> None:
            """Start the copies of the cursor's step; of the left factor behind the last tile, too, for what is there is
            normalised."""
            with b.if_(self.multiplies), b.if_(cursor.number.value < tiles):
                self.right.copy(cursor.col.value, cursor.depth.value, to)
            with b.else_():
                self.left.copy(cursor.row.value, cursor.depth.value, to)
            b.async_commit()

        def fetch() -> None:
            """The numbers of that step: in the place of those before, and so behind their use."""
            with self.normalising(), b.if_(cursor.number.value < tiles):
                self.numbers.fetch(cursor.row.value, cursor.depth.value)
            cursor.advance()

        bring(stage.value)
        fetch()
        bring(stage.value + 1)
        b.async_wait(1)
        with self.normalising():
            self.normalise(stage.value)
        self.arrive()
        fetch()
        self.begin()
        with b.loop(self.first, tiles, self.workgroups, name="tile") as number:
            with b.loop(0, self.k, self.blocks.depth, name="depth"):
                now = stage.value
                following = (now + 1) & (STAGES - 1)
                self.meet(now)
                with b.if_(self.multiplies):
                    self.multiply(self._left_panels(now), now)
                bring((now + 2) & (STAGES - 1))
                b.async_wait(1)
                with b.if_(self.multiplies):
                    b.warpgroup_wait(1)
                with b.else_():
                    self.normalise(following)
                self.arrive()
                fetch()
                stage.value = following
            with b.if_(self.multiplies):
                self.finish(number)

    @contextmanager
    def normalising(self) -> Iterator[None]:
        """What only the warpgroup does that normalises."""
        with self.b.if_(self.multiplies):
            pass
        with self.b.else_():
            yield

    def normalise(self, stage: Value) -> None:
        """Normalise the runs that this thread has copied into a stage."""
        b, factor, places = self.b, self.left.factor, self.left.places(stage)
        raw = [b.load(self.memory, place, RUN) for place in places]
        rows, affine = self.numbers.values()
        for place, row, run in zip(places, rows, raw, strict=True):
            b.store(self.memory, place, b.cast(factor.value(run, row, affine), self.engine.elem))
