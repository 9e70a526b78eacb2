"""A product of warpgroups whose left factor is normalised on its way.

The left factor comes into shared memory as it is, row by row, and each warp takes its fragments of a step from there:
it normalises them while the products of the step before run, and multiplies with them out of its registers. So numbers
that are normalised are nowhere but in registers, and each is normalised once for a tile.

Two numbers belong to each row of the left factor as it is multiplied, and stay in registers; two or three to each of
the summed dimension, and come with each step. Which are the statistics and which weight and bias depends on how the
factor is stored. It is brought in three steps ahead, the right factor two. Fragments of two steps are held at a time,
in variables of their own, so the summed dimension has an even number of steps.
"""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import f32
from aule.ops.linear.config import WARPGROUP_STAGES as STAGES
from aule.ops.linear.config import ProductConfig, WarpgroupBlocks
from aule.ops.linear.factors import Factor
from aule.ops.linear.product_warpgroup import Cursor, WarpgroupProduct, Way
from aule.target import Target
from aule.tile.arrangement import SIZE
from aule.tile.fragment_shape import row_stride


def build_product_normalised(config: ProductConfig, target: Target) -> KernelIR:
    """Trace the kernel."""
    blocks = config.blocks
    assert isinstance(blocks, WarpgroupBlocks) and config.whole and config.right.norm is None
    b = Builder(config.name, blocks.threads, subgroup_size=32, max_registers=blocks.registers)
    NormalisedProduct(b, config, blocks, target).run()
    return b.finish()


_Line = list[Value | None]
"""A factor and a summand."""


class _Rows(Way):
    """The way of a factor that is normalised: rows one after the other, so that fragments can be loaded."""

    @property
    def stride(self) -> int:
        return row_stride(self.shape.cols)

    @property
    def elements(self) -> int:
        return self.shape.rows * self.stride

    def offset(self, row: Value, col: Value) -> Value:
        return row * self.stride + col


class _Inner:
    """Numbers of the summed dimension, of all stages: an array in memory, some of which come with a step."""

    def __init__(self, product: WarpgroupProduct, source: Value, start: Value, name: str) -> None:
        self.b, self.thread, self.source, self.start = product.b, product.engine.thread, source, start
        self.elem = source.type.elem  # type: ignore[union-attr]
        self.depth = product.blocks.depth
        self.memory = self.b.shared(name, self.elem, STAGES * self.depth)

    def copy(self, depth: Value, stage: Value, first: int) -> int:
        """Start the copies of a step, by the threads from ``first`` on; behind those are others."""
        b, run = self.b, 16 // self.elem.bytes
        count, mine = self.depth // run, self.thread - first
        with b.if_((mine >= 0) & (mine < count)):
            index = self.start + b.cast(depth + mine * run, self.start.type)  # type: ignore[arg-type]
            b.async_copy(self.memory, stage * self.depth + mine * run, self.source, index, run)
        return first + count

    def pair(self, stage: Value, col: Value) -> list[Value]:
        """Two neighbouring numbers of a step."""
        return self.b.unpack(self.b.cast(self.b.load(self.memory, stage * self.depth + col, 2), f32))


class NormalisedProduct(WarpgroupProduct):
    """The product of a left factor that is normalised and a right one that is not."""

    def __init__(self, b: Builder, config: ProductConfig, blocks: WarpgroupBlocks, target: Target) -> None:
        super().__init__(b, config, blocks, target)
        factor, p = self.left.factor, self.p
        statistics = p.buffer("statistics", f32)
        self.inner: list[_Inner | None]
        if factor.across:
            count = b.cast(factor.rows, p.index)
            self.inner = [
                _Inner(self, statistics, count * i, name) for i, name in enumerate(("mean", "scale", "shift"))
            ]
        else:
            self.inner = [
                None if x is None else _Inner(self, x.buffer, x.start(), f"{x.config.name}s") for x in factor.vectors
            ]
        zero, there = b.const(0.0, f32), [x is not None for x in factor.vectors] if factor.across else [True, True]
        self.outer = [[b.var(zero) if x else None for x in there] for _ in self.engine.part_rows]

    def ways(self, left: Factor, right: Factor) -> tuple[Way, Way]:
        columns = Way(self, right, self.blocks.cols, 0)
        return _Rows(self, left, self.blocks.rows, STAGES * columns.elements), columns

    def run(self) -> None:
        b, stage, tiles, depth = self.b, self.stage, self.down * self.along, self.blocks.depth
        rows, cols = Cursor(self, self.first), Cursor(self, self.first)

        def bring_left(to: Value) -> None:
            """Start copies of the left factor; behind the last tile of something else, for it is read there, too."""
            self.left.copy(rows.row.value, rows.depth.value, to)
            first = 0
            for inner in self.inner:
                if inner is not None:
                    first = inner.copy(rows.depth.value, to, first)
            rows.advance()

        def bring_right(to: Value) -> None:
            with b.if_(cols.number.value < tiles):
                self.right.copy(cols.col.value, cols.depth.value, to)
            b.async_commit()
            cols.advance()

        def ahead(steps: int) -> Value:
            return (stage.value + steps) & (STAGES - 1)

        bring_left(stage.value)
        bring_left(ahead(1))
        bring_right(stage.value)
        bring_left(ahead(2))
        bring_right(ahead(1))
        self._know_rows(self.first)
        self.arrive()
        self.meet(stage.value)
        held = [b.var(x, "normalised") for x in self._normalised(stage.value)]
        b.warpgroup_arrive(self.meeting)
        with b.loop(self.first, tiles, self.workgroups, name="tile") as number:
            with b.loop(0, self.k, 2 * depth, name="depth") as at:
                factor = [x.value for x in held]
                for half in range(2):
                    self.meet(stage.value + 1)
                    self.multiply(factor, stage.value)
                    bring_left(ahead(3))
                    bring_right(ahead(2))
                    b.warpgroup_wait(1)
                    self.arrive()
                    if half:
                        with b.if_(at + 2 * depth >= self.k):
                            self._know_rows(number + self.workgroups)
                    factor = self._normalised(ahead(1))
                    stage.value = ahead(1)
                for variable, x in zip(held, factor, strict=True):
                    variable.value = x
            self.finish(number)

    def _know_rows(self, number: Value) -> None:
        """What belongs to the rows of the result in a tile."""
        b, engine, factor = self.b, self.engine, self.left.factor
        first = self.place(number)[0] + engine.subgroup * SIZE + engine.lane_row
        for variables, further in zip(self.outer, engine.part_rows, strict=True):
            if factor.across:
                found = factor.affine(first + further, 1)
            else:
                row = factor.row(first + further)
                found = [row.scale, row.shift]
            for variable, x in zip(variables, found, strict=True):
                if variable is not None and x is not None:
                    variable.value = b.cast(x, f32)

    def _normalised(self, stage: Value) -> list[Value]:
        """This warp's rows of a step as fragments."""
        b, engine, left = self.b, self.engine, self.left
        across = left.factor.across
        at = left.memory_of(stage) + engine.subgroup * (SIZE if across else SIZE * left.stride)
        outer: list[_Line] = [[None if x is None else x.value for x in variables] for variables in self.outer]
        fragments = []
        for k in range(0, self.blocks.depth, SIZE):
            raw = engine.load_left(self.memory, at, left.stride, 0, k, across)
            columns = list(zip(engine.part_cols, self._of_step(stage, k), strict=True))
            values: list[list[Value]] = []
            for row, line in zip(engine.part_rows, outer, strict=True):
                values.append([])
                for col, other in columns:
                    x = b.cast(b.fragment_get(raw, engine.component(row, col)), f32)
                    # The statistics first, whichever of the two they are.
                    values[-1].append(self._apply(self._apply(x, other if across else line), line if across else other))
            fragments.append(engine.pack(values, engine.left)[0][0])
        return fragments

    def _of_step(self, stage: Value, k: int) -> list[_Line]:
        """What belongs to this lane's columns of a fragment: factor and summand of each."""
        b, engine = self.b, self.engine
        result: list[_Line] = []
        for first in engine.part_cols[::2]:
            col = engine.lane_col + (k + first)
            pairs = [[None, None] if x is None else x.pair(stage, col) for x in self.inner]
            for numbers in zip(*pairs, strict=True):
                if self.left.factor.across:
                    mean, scale, shift = numbers
                    assert mean is not None and shift is not None
                    result.append([scale, b.fma(-mean, scale, shift)])
                else:
                    result.append(list(numbers))
        return result

    def _apply(self, x: Value, line: _Line) -> Value:
        factor, summand = line
        if factor is None:
            return x if summand is None else x + summand
        return x * factor if summand is None else self.b.fma(x, factor, summand)
