"""A product on matrix units whose left factor comes straight into registers: where copies are not asynchronous.

It lies in the order of fragments (`aule.ops.linear.pack_fragments`), so that a lane loads 16 bytes that are its part of
one; subgroups that share rows find them in the first-level cache. It passes neither through registers on the way to
shared memory nor through that, which leaves the time that would take to the right factor. Registers are loaded anew
when they have been multiplied, two steps of 16 of the depth before they are wanted again.

The right factor comes in lines (`product_lines`): one step along the summed dimension is in shared memory, and the next
waits in registers until all have read this one.
"""

from __future__ import annotations

from aule.ir import KernelIR, Value, Var
from aule.ir.types import i32
from aule.ops.linear.config import DirectBlocks, ProductConfig
from aule.ops.linear.pack_fragments import BLOCKS, LANES, PANEL, RUNS, left_fragment
from aule.ops.linear.product_fragment import FragmentProduct
from aule.ops.linear.product_lines import Lines
from aule.ops.linear.results import store_tile
from aule.target import Target
from aule.tile.arrangement import SIZE
from aule.tile.fragment_shape import RUN

_SLOTS = 2
"""Steps of 16 of the depth whose part of the left factor is in registers, or on its way there."""


def build_product_direct(config: ProductConfig, target: Target) -> KernelIR:
    """Trace the kernel."""
    blocks = config.blocks
    assert isinstance(blocks, DirectBlocks) and blocks.stages == 1 and config.whole
    product = _Product(config, blocks, target)
    product.run()
    return product.b.finish()


class _Product(FragmentProduct):
    def __init__(self, config: ProductConfig, blocks: DirectBlocks, target: Target) -> None:
        super().__init__(config, blocks, target)
        b = self.b
        assert blocks.rows == blocks.down * PANEL and blocks.cols == blocks.along * PANEL
        self.first_col = self.col0
        # Rows behind the end are in the workspace; columns are moved back to where they exist.
        self.col0 = b.min(self.col0, self.n - blocks.cols)
        own = self.row0 + self.sub_row
        self.right = Lines(self, False, blocks.cols, self.col0, self.sub_col)
        index = self.p.index
        self.buffer = self.p.buffer("fragments", self.engine.elem)
        self.steps = self.k // SIZE
        panel = b.cast(own // PANEL, index) * b.cast(self.steps, index)
        self.begin = panel * RUNS + b.cast(self.engine.lane, index)

    def load(self, step: Value) -> list[Value]:
        """Start to load this lane's runs of a step of 16 of the depth."""
        b = self.b
        at = self.begin + b.cast(step, self.p.index) * RUNS
        return [b.load(self.buffer, (at + i * LANES) * RUN, RUN) for i in range(BLOCKS)]

    def run(self) -> None:
        b, engine, depth, right = self.b, self.engine, self.blocks.depth, self.right
        tile = engine.tile(PANEL, PANEL)
        last, last_step = self.k - depth, self.steps - 1
        slots: list[list[Var]] = [[b.var(x) for x in self.load(b.const(i, i32))] for i in range(_SLOTS)]
        right.put(right.fetch(b.const(0, i32)))
        with b.loop(0, self.k, depth, name="depth") as at:
            sums = [[variable.value for variable in row] for row in tile.vars]
            held = [[variable.value for variable in slot] for slot in slots]
            b.barrier()
            coming = right.fetch(b.min(at + depth, last))
            for k in range(depth // SIZE):
                following = b.min((at // SIZE) + (k + _SLOTS), last_step)
                left = [left_fragment(b, engine.left, run) for run in held[k % _SLOTS]]
                for j, factor in enumerate(right.factors(k, BLOCKS)):
                    for x, row in zip(left, sums, strict=True):
                        row[j] = engine.multiply_add(x, factor, row[j])
                held[k % _SLOTS] = self.load(following)
            b.barrier()
            right.put(coming)
            for variables, values in zip((*slots, *tile.vars), (*held, *sums), strict=True):
                for variable, value in zip(variables, values, strict=True):
                    variable.value = value
        first = self.row0 + self.sub_row, self.col0 + self.sub_col
        store_tile(self.p, self.config, tile, first, lambda row: row < self.m, lambda col: col >= self.first_col)
