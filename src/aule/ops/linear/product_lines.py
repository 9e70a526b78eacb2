"""A product on matrix units of factors as they are, through registers: for devices without asynchronous copies.

One step along the summed dimension is in shared memory, as long as a line of a cache, so that rows come in whole lines.
While it is multiplied, the next one is fetched; it waits in registers until all have read this one, and is then stored
in its place. A second workgroup on the same unit multiplies in the meantime. What was fetched is not carried around the
loop, and no later load is under way when it is waited for: either can make a thread wait for loads that have just
begun.

Tiles at the end of the result are moved back to where all of their rows and columns exist, so that nothing is bounded
but what is stored.
"""

from __future__ import annotations

from aule.ir import KernelIR, Value
from aule.ir.types import i32
from aule.ops.linear.config import FactorConfig, FragmentBlocks, ProductConfig
from aule.ops.linear.factors import Stored
from aule.ops.linear.product_fragment import FragmentProduct
from aule.ops.linear.results import store_tile
from aule.target import Target
from aule.tile.arrangement import SIZE
from aule.tile.fragment_shape import RUN
from aule.tile.matrix import divmod_const


def build_product_lines(config: ProductConfig, target: Target) -> KernelIR:
    """Trace the kernel."""
    blocks = config.blocks
    assert isinstance(blocks, FragmentBlocks) and blocks.stages == 1 and config.whole
    product = _Product(config, blocks, target)
    product.run()
    return product.b.finish()


class Lines:
    """A factor's way from memory to fragments, through registers and shared memory.

    Parameters
    ----------
    left : bool
        It is the left factor.
    outer : int
        Rows or columns of the result's tile.
    first, own : Value
        The first of them, and the first of those of the tile that are this subgroup's.
    start : int
        Of the factor in shared memory.
    """

    def __init__(
        self, product: FragmentProduct, left: bool, outer: int, first: Value, own: Value, start: int = 0
    ) -> None:
        config: FactorConfig = product.config.left if left else product.config.right
        b, p, blocks = product.b, product.p, product.blocks
        assert config.norm is None and config.stored.axes == 1 and config.stored.aligned
        self.b, self.product, self.left, self.across, self.start = b, product, left, config.across, start
        rows, cols, self.stride = blocks.panel(config.across, outer)
        self.size = rows * self.stride
        self.step, rest = divmod(blocks.threads * RUN, cols)
        self.count, over = divmod(rows, self.step)
        assert rest == 0 and over == 0, "a round of the workgroup is some whole rows"
        self.stored = Stored(p, config.stored)
        row, run = divmod_const(b, product.engine.thread, cols // RUN)
        self.own = row * self.stride + run * RUN
        # Runs are counted, not elements: that the latter are a multiple of the former is known only here.
        self.row_runs = p.number(f"{config.stored.name}_stride0", p.index) >> 3
        begin = p.strided(config.stored.name) >> 3
        at = b.cast(first, p.index)
        begin = begin + ((at >> 3) if config.across else at * self.row_runs)
        self.begin = begin + b.cast(row, p.index) * self.row_runs + b.cast(run, p.index)
        self.fragments = start + (own if config.across else own * self.stride)

    def fetch(self, depth: Value) -> list[Value]:
        """Start to load this thread's runs of the step that begins at ``depth``."""
        b, p = self.b, self.product.p
        at = b.cast(depth, p.index)
        places = self.begin + (at * self.row_runs if self.across else at >> 3)
        runs = [places + self.row_runs * (i * self.step) for i in range(self.count)]
        return [b.load(self.stored.buffer, run * RUN, RUN) for run in runs]

    def put(self, values: list[Value]) -> None:
        """Store them in shared memory."""
        for i, value in enumerate(values):
            self.b.store(self.product.memory, self.own + (self.start + i * self.step * self.stride), value)

    def factors(self, k: int, count: int) -> list[Value]:
        """The subgroup's fragments of 16 of the depth, the ``k``-th ones."""
        engine, memory, stride = self.product.engine, self.product.memory, self.stride
        if self.left:
            return [
                engine.load_left(memory, self.fragments, stride, i * SIZE, k * SIZE, self.across) for i in range(count)
            ]
        return [
            engine.load_right(memory, self.fragments, stride, k * SIZE, j * SIZE, not self.across) for j in range(count)
        ]


class _Product(FragmentProduct):
    def __init__(self, config: ProductConfig, blocks: FragmentBlocks, target: Target) -> None:
        super().__init__(config, blocks, target)
        b = self.b
        self.tile = self.row0, self.col0
        self.row0, self.col0 = b.min(self.row0, self.m - blocks.rows), b.min(self.col0, self.n - blocks.cols)
        self.left = Lines(self, True, blocks.rows, self.row0, self.sub_row)
        self.right = Lines(self, False, blocks.cols, self.col0, self.sub_col, self.left.size)

    def run(self) -> None:
        b, blocks, depth = self.b, self.blocks, self.blocks.depth
        tile = self.engine.tile(blocks.rows // blocks.down, blocks.cols // blocks.along)
        last = self.k - depth
        for way in (self.left, self.right):
            way.put(way.fetch(b.const(0, i32)))
        with b.loop(0, self.k, depth, name="depth") as at:
            sums = [[variable.value for variable in row] for row in tile.vars]
            b.barrier()
            following = b.min(at + depth, last)
            fetched = [(way, way.fetch(following)) for way in (self.left, self.right)]
            for k in range(depth // SIZE):
                left = self.left.factors(k, len(sums))
                for j, factor in enumerate(self.right.factors(k, len(sums[0]))):
                    for x, row in zip(left, sums, strict=True):
                        row[j] = self.engine.multiply_add(x, factor, row[j])
            b.barrier()
            for way, values in fetched:
                way.put(values)
            for variables, row in zip(tile.vars, sums, strict=True):
                for variable, value in zip(variables, row, strict=True):
                    variable.value = value
        first = self.row0 + self.sub_row, self.col0 + self.sub_col
        store_tile(self.p, self.config, tile, first, lambda row: row >= self.tile[0], lambda col: col >= self.tile[1])
