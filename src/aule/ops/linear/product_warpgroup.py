"""A product on matrix units by warpgroups, for factors that are multiplied as stored.

Each warpgroup has 64 rows of a workgroup's tile and all its columns; both factors are in panels in a ring of stages,
and a step's products run while the next steps are copied. A workgroup computes one tile after the other, and copies
steps of the next tile while it stores a result.

Warpgroups synchronise once a step, by a barrier at which threads arrive early. When all have arrived for step n, all
copies of it are complete and nobody reads step n - 2 any more. Then the products of step n are queued behind those of
step n - 1, copies of step n + 2 start in the place of step n - 2, and the products of step n - 1 are waited for. A
thread then arrives for the next step; before it waits there, it stores a finished result.
"""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import PANEL, f32, i32, i64, u64
from aule.ops.linear.config import WARPGROUP_STAGES as STAGES
from aule.ops.linear.config import ProductConfig, WarpgroupBlocks
from aule.ops.linear.factors import Factor, Stored
from aule.ops.linear.results import QUAD_LANES, column_bias, quad_run, tile_at
from aule.ops.shared.parameters import Parameters
from aule.target import Target
from aule.tile.common.matrix import divmod_const
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.shape import RUN, FragmentShape
from aule.tile.warpgroup.engine import ROWS, SUBGROUPS, PanelFactor, Warpgroups


class Cursor:
    """The tile and step that are copied next."""

    def __init__(self, product: WarpgroupProduct, number: Value) -> None:
        self.b, self.product = product.b, product
        row, col = product.place(number)
        self.number = self.b.var(number, "coming")
        self.row, self.col = self.b.var(row, "coming_row"), self.b.var(col, "coming_col")
        self.depth = self.b.var(self.b.const(0, i32), "coming_depth")

    def advance(self) -> None:
        b, product = self.b, self.product
        self.depth.value = self.depth.value + product.blocks.depth
        with b.if_(self.depth.value >= product.k):
            self.depth.value = b.const(0, i32)
            self.number.value = self.number.value + product.workgroups
            self.row.value, self.col.value = product.place(self.number.value)


class CopiedFactor:
    """A factor that is copied into the stages."""

    def __init__(self, product: WarpgroupProduct, factor: Factor, outer: int, start: int) -> None:
        self.b, self.product, self.factor, self.start = product.b, product, factor, start
        blocks = product.blocks
        self.shape = blocks.panel(factor.depth_major, outer)
        self.step = blocks.threads * RUN // self.shape.cols
        self.count = self.shape.rows // self.step
        assert self.step % RUN == 0, "the order of runs is the same in all of a thread's rows"
        self.row, run = divmod_const(self.b, product.engine.thread, self.shape.cols // RUN)
        self.col = run * RUN
        self.own = self.shape.offset(self.row, self.col)

    def at_stage(self, stage: Value) -> Value:
        return stage * self.shape.elements + self.start

    def copy(self, first: Value, depth: Value, stage: Value) -> None:
        """Start the copies of a step of the tile that begins at row or column ``first``."""
        b, factor, to = self.b, self.factor, self.at_stage(stage) + self.own
        for i in range(self.count):
            row, col = self.row + i * self.step, self.col
            if factor.depth_major:
                row, col = depth + row, b.min(first + col, factor.cols - RUN)
            else:
                row, col = first + row, depth + col
            index = factor.stored.index(factor.row_start(row), col)
            b.async_copy(self.product.memory, to + i * self.step * PANEL, factor.stored.buffer, index, RUN)


class WarpgroupProduct:
    """A product of two plain factors."""

    def __init__(self, config: ProductConfig, blocks: WarpgroupBlocks, target: Target) -> None:
        assert config.full_steps
        b = self.b = Builder(config.name, blocks.threads, subgroup_size=32, max_registers=blocks.registers)
        self.config, self.blocks = config, blocks
        p = self.p = Parameters(b, i64 if config.index64 else i32)
        self.m, self.n, self.k = (p.number(name) for name in "mnk")
        subgroups = blocks.rows // ROWS * SUBGROUPS
        shape = FragmentShape(blocks.rows, blocks.cols, subgroups, STAGES, False, blocks.registers)
        self.engine = Warpgroups(b, target, shape, config.left.stored.dtype)
        left = Factor(p, config.left, self.m, self.k, f32, config.full_steps)
        right = Factor(p, config.right, self.n, self.k, f32, config.full_steps)
        # The right factor's stages come first.
        self.right = CopiedFactor(self, right, blocks.cols, 0)
        self.left = CopiedFactor(self, left, blocks.rows, STAGES * self.right.shape.elements)
        elements = self.left.shape.elements + self.right.shape.elements
        self.memory = b.shared("stages", self.engine.elem, STAGES * elements)
        self.barrier = b.shared("mbarrier", u64, 1)
        b.mbarrier_init(self.barrier)
        b.barrier()
        self.out = Stored(p, config.out, "write")
        self.down = (self.m + (blocks.rows - 1)) // blocks.rows
        self.along = (self.n + (blocks.cols - 1)) // blocks.cols
        self.first = b.group_id(0) + b.group_id(1) * b.group_count(0)
        self.workgroups = b.group_count(0) * b.group_count(1)
        self.tile = self.engine.tile(SIZE, blocks.cols)
        self.stage = b.var(b.const(0, i32), "stage")

    def place(self, number: Value) -> tuple[Value, Value]:
        """The first row and column of a tile."""
        row, col = tile_at(self.b, number, self.down, self.along, self.blocks.group)
        return row * self.blocks.rows, col * self.blocks.cols

    def build(self) -> KernelIR:
        b, stage, tiles = self.b, self.stage, self.down * self.along
        cursor = Cursor(self, self.first)

        def copy_next(to: Value) -> None:
            with b.if_(cursor.number.value < tiles):
                self.left.copy(cursor.row.value, cursor.depth.value, to)
                self.right.copy(cursor.col.value, cursor.depth.value, to)
            b.async_commit()
            cursor.advance()

        copy_next(stage.value)
        copy_next(stage.value + 1)
        self.arrive()
        with b.loop(self.first, tiles, self.workgroups, name="tile") as number:
            with b.loop(0, self.k, self.blocks.depth, name="depth"):
                now = stage.value
                b.mbarrier_wait(self.barrier, 0, now & 1)  # all threads have arrived for this step
                self.multiply(now)
                copy_next((now + 2) & (STAGES - 1))
                b.warpgroup_wait(1)
                self.arrive()
                stage.value = (now + 1) & (STAGES - 1)
            self.finish(number)
        return b.finish()

    def arrive(self) -> None:
        """Arrive at the barrier: this thread's products but the latest, and its copies but the latest, are complete."""
        self.b.async_wait(1)
        self.b.warpgroup_publish()
        self.b.mbarrier_arrive(self.barrier)

    def multiply(self, stage: Value) -> None:
        b, config = self.b, self.config
        # A warpgroup's rows are 64 rows of the left factor's panel, or one panel of 64 columns.
        at = self.left.at_stage(stage) + self.engine.group * (ROWS * PANEL)
        left = PanelFactor(self.memory, at, self.left.shape, transposed=config.left.depth_major)
        at = self.right.at_stage(stage)
        right = PanelFactor(self.memory, at, self.right.shape, transposed=not config.right.depth_major)
        b.warpgroup_fence()
        self.engine.start_product(self.tile.vars[0], left, right, self.blocks.depth // SIZE)
        b.warpgroup_commit()

    def finish(self, number: Value) -> None:
        """Store the tile with this number, and clear the accumulators."""
        self.b.warpgroup_wait(0)
        self._store(*self.place(number))
        for variable in self.tile.vars[0]:
            variable.value = self.b.fragment_fill(self.engine.accumulator, 0.0)

    def _store(self, row0: Value, col0: Value) -> None:
        b, engine, config, out, tile = self.b, self.engine, self.config, self.out, self.tile
        values = tile.values()
        rows = [row0 + engine.subgroup * SIZE + tile.row(r) for r in range(len(values))]
        starts = [out.start(row) for row in rows]
        for c in range(0, len(values[0]), RUN):
            cols = [col0 + tile.col(c + i) for i in range(RUN)]
            parts = [row[c : c + RUN] for row in values]
            if config.bias is not None:
                added = column_bias(self.p, config.bias, cols, self.n, 2 if config.out.aligned else 1)
                parts = [[x + y for x, y in zip(part, added, strict=True)] for part in parts]
            for row, start, part in zip(rows, starts, parts, strict=True):
                stored = self._runs(part, cols)
                with b.if_(row < self.m):
                    for col, run in stored:
                        with b.if_(col < self.n):
                            b.store(out.buffer, out.index(start, col), run)

    def _runs(self, part: list[Value], cols: list[Value]) -> list[tuple[Value, Value]]:
        """A lane's elements of 32 columns as runs to store, with the column of each: pairs, or 16 bytes that the lanes
        of a row have exchanged."""
        b, elem = self.b, self.out.elem
        if not self.config.out.aligned:
            return [(col, b.cast(x, elem)) for col, x in zip(cols, part, strict=True)]
        if elem.bits != 16:
            return [(cols[i], b.cast(b.vector(part[i : i + 2]), elem)) for i in range(0, RUN, 2)]
        run = quad_run(self.engine, part, elem)
        # cols[0] is that of this lane's pair in the first eight columns; its run is numbered by the lane.
        quad = self.engine.lane & (QUAD_LANES - 1)
        return [(cols[0] - quad * 2 + quad * RUN, run)]
