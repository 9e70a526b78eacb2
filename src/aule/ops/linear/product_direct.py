"""A product on matrix units whose left factor goes straight into registers, for devices without asynchronous copies.

The left factor is in the order of fragments (`aule.ops.linear.pack_fragments`): a lane loads the 16 bytes that are its
part of one, and subgroups that share rows find them in the first-level cache. So only the right factor takes time on
the path through shared memory. A fragment's registers are loaded again once it has been multiplied, two steps of 16 of
the depth before they are used.

The right factor is loaded in lines (`product_lines`): one step along the summed dimension is in shared memory, and the
next waits in registers until all have read this one.
"""

from __future__ import annotations

from aule.ir import Value, Var
from aule.ir.types import i32
from aule.ops.linear.config import DirectBlocks, ProductConfig
from aule.ops.linear.pack_fragments import BLOCKS, LANES, PANEL, RUNS, left_fragment
from aule.ops.linear.product_fragment import FragmentProduct
from aule.ops.linear.product_lines import LineFactor
from aule.target import Target
from aule.tile.common.variables import assign_vars, read_vars
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.shape import RUN

_SLOTS = 2
"""Steps of 16 of the depth whose part of the left factor is in registers, or being loaded."""


class DirectProduct(FragmentProduct):
    """A product whose left factor is loaded straight into registers."""

    def __init__(self, config: ProductConfig, blocks: DirectBlocks, target: Target) -> None:
        assert blocks.stages == 1 and config.full_steps
        super().__init__(config, blocks, target)
        b = self.b
        assert blocks.rows == blocks.down * PANEL and blocks.cols == blocks.along * PANEL
        self.first_col = self.col0
        # The workspace has rows past the end; columns are moved back to where they exist.
        self.col0 = b.min(self.col0, self.n - blocks.cols)
        own = self.row0 + self.sub_row
        self.right = LineFactor(self, False, blocks.cols, self.col0, self.sub_col)
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
        tile = self.tile()
        last, last_step = self.k - depth, self.steps - 1
        slots: list[list[Var]] = [[b.var(x) for x in self.load(b.const(i, i32))] for i in range(_SLOTS)]
        right.put(right.fetch(b.const(0, i32)))
        with b.loop(0, self.k, depth, name="depth") as at:
            sums = read_vars(tile.vars)
            runs = read_vars(slots)
            b.barrier()
            fetched = right.fetch(b.min(at + depth, last))
            for k in range(depth // SIZE):
                following = b.min((at // SIZE) + (k + _SLOTS), last_step)
                left = [left_fragment(b, engine.left, run) for run in runs[k % _SLOTS]]
                self.multiply(sums, left, right.factors(k, BLOCKS))
                runs[k % _SLOTS] = self.load(following)
            b.barrier()
            right.put(fetched)
            assign_vars(slots, runs)
            assign_vars(tile.vars, sums)
        self.store(tile, lambda row: row < self.m, lambda col: col >= self.first_col)
