"""A product on matrix units that loads full cache lines through registers, for devices without asynchronous copies.

One step along the summed dimension is in shared memory, as long as a cache line, so that rows are loaded in full lines.
While it is multiplied, the next one is loaded; it waits in registers until all have read this one, and is then stored
in its place. A second workgroup on the same unit multiplies in the meantime. Loaded values are not carried around the
loop, and no later load is in flight when they are waited for: either can make a thread wait for loads that have only
just begun.

Tiles at the result's end are moved back to where all their rows and columns exist, so only stores are bounded.
"""

from __future__ import annotations

from aule.ir import Value
from aule.ir.types import i32
from aule.ops.linear.config import FactorConfig, FragmentBlocks, ProductConfig
from aule.ops.linear.factors import Stored
from aule.ops.linear.product_fragment import FragmentProduct
from aule.target import Target
from aule.tile.common.matrix import divmod_const
from aule.tile.common.variables import assign_vars, read_vars
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.shape import RUN


class LineFactor:
    """The left or right factor on its path from memory through registers and shared memory to fragments.

    The result's tile has ``outer`` rows or columns, from ``first`` on, and this subgroup those from ``own`` on. In
    shared memory the factor begins at ``start``.
    """

    def __init__(
        self, product: FragmentProduct, left: bool, outer: int, first: Value, own: Value, start: int = 0
    ) -> None:
        config: FactorConfig = product.config.left if left else product.config.right
        b, p, blocks = product.b, product.p, product.blocks
        assert config.norm is None and config.stored.axes == 1 and config.stored.aligned
        self.b, self.product, self.left, self.depth_major, self.start = b, product, left, config.depth_major, start
        rows, cols, self.stride = blocks.panel(config.depth_major, outer)
        self.size = rows * self.stride
        self.step, rest = divmod(blocks.threads * RUN, cols)
        self.count, over = divmod(rows, self.step)
        assert rest == 0 and over == 0, "a round of the workgroup is some whole rows"
        self.stored = Stored(p, config.stored)
        row, run = divmod_const(b, product.engine.thread, cols // RUN)
        self.own = row * self.stride + run * RUN
        # Indices count runs, not elements: only here is it known that elements are multiples of a run.
        self.row_runs = p.number(f"{config.stored.name}_stride0", p.index) >> 3
        begin = p.strided(config.stored.name) >> 3
        at = b.cast(first, p.index)
        begin = begin + ((at >> 3) if config.depth_major else at * self.row_runs)
        self.begin = begin + b.cast(row, p.index) * self.row_runs + b.cast(run, p.index)
        self.fragments = start + (own if config.depth_major else own * self.stride)

    def fetch(self, depth: Value) -> list[Value]:
        """Start to load this thread's runs of the step that begins at ``depth``."""
        b, p = self.b, self.product.p
        at = b.cast(depth, p.index)
        places = self.begin + (at * self.row_runs if self.depth_major else at >> 3)
        runs = [places + self.row_runs * (i * self.step) for i in range(self.count)]
        return [b.load(self.stored.buffer, run * RUN, RUN) for run in runs]

    def put(self, values: list[Value]) -> None:
        """Store loaded runs in shared memory."""
        for i, value in enumerate(values):
            self.b.store(self.product.memory, self.own + (self.start + i * self.step * self.stride), value)

    def factors(self, k: int, count: int) -> list[Value]:
        """The subgroup's fragments of the ``k``-th 16 of the depth."""
        engine, memory, at, stride = self.product.engine, self.product.memory, self.fragments, self.stride
        if self.left:
            return [engine.load_left(memory, at, stride, i * SIZE, k * SIZE, self.depth_major) for i in range(count)]
        return [engine.load_right(memory, at, stride, k * SIZE, j * SIZE, not self.depth_major) for j in range(count)]


class LineProduct(FragmentProduct):
    """A product whose factors are loaded in full cache lines."""

    def __init__(self, config: ProductConfig, blocks: FragmentBlocks, target: Target) -> None:
        assert blocks.stages == 1 and config.full_steps
        super().__init__(config, blocks, target)
        b = self.b
        self.first = self.row0, self.col0
        self.row0, self.col0 = b.min(self.row0, self.m - blocks.rows), b.min(self.col0, self.n - blocks.cols)
        self.left = LineFactor(self, True, blocks.rows, self.row0, self.sub_row)
        self.right = LineFactor(self, False, blocks.cols, self.col0, self.sub_col, self.left.size)

    def run(self) -> None:
        b, depth, both = self.b, self.blocks.depth, (self.left, self.right)
        tile = self.tile()
        last = self.k - depth
        for factor in both:
            factor.put(factor.fetch(b.const(0, i32)))
        with b.loop(0, self.k, depth, name="depth") as at:
            sums = read_vars(tile.vars)
            b.barrier()
            following = b.min(at + depth, last)
            fetched = [(factor, factor.fetch(following)) for factor in both]
            for k in range(depth // SIZE):
                self.multiply(sums, self.left.factors(k, len(sums)), self.right.factors(k, len(sums[0])))
            b.barrier()
            for factor, values in fetched:
                factor.put(values)
            assign_vars(tile.vars, sums)
        self.store(tile, lambda row: row >= self.first[0], lambda col: col >= self.first[1])
