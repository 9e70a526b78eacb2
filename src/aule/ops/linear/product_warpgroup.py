"""A product of warpgroups (NVIDIA's sm_90).

Each warpgroup has 64 rows of a workgroup's tile and all of its columns; both factors lie in panels in a ring of stages,
and a step's products run on while the next steps are brought in. A workgroup makes one tile after the other, and goes
on bringing in steps, then of its next tile, while it stores a result.

Warpgroups meet once a step. When they meet for step n, what all of them brought of it is there and nobody reads step
n - 2 any more: its products are queued behind those of step n - 1, copies of step n + 2 start, which take the place of
step n - 2, and the products of step n - 1 are waited for. Then a thread arrives for the next meeting; between that and
the meeting itself it stores a result, if there is one.
"""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import PANEL, f32, i32, i64, u64
from aule.ops.linear.config import WARPGROUP_STAGES as STAGES
from aule.ops.linear.config import ProductConfig, WarpgroupBlocks
from aule.ops.linear.factors import Factor, Stored
from aule.ops.linear.results import QUAD_LANES, column_bias, quad_run, tile_at
from aule.ops.parameters import Parameters
from aule.target import Target
from aule.tile.arrangement import SIZE
from aule.tile.fragment_shape import RUN, FragmentShape
from aule.tile.matrix import divmod_const
from aule.tile.warpgroup import ROWS, SUBGROUPS, PanelFactor, Warpgroups


def build_product_warpgroup(config: ProductConfig, target: Target) -> KernelIR:
    """Trace the kernel."""
    blocks = config.blocks
    assert isinstance(blocks, WarpgroupBlocks) and config.whole
    b = Builder(config.name, blocks.threads, subgroup_size=32, max_registers=blocks.registers)
    WarpgroupProduct(b, config, blocks, target).run()
    return b.finish()


class Cursor:
    """The tile and the step of it that is brought in next."""

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


class Way:
    """A factor's way into the stages."""

    def __init__(self, product: WarpgroupProduct, factor: Factor, outer: int, start: int) -> None:
        self.b, self.product, self.factor, self.start = product.b, product, factor, start
        blocks = product.blocks
        self.shape = blocks.panel(factor.across, outer)
        self.step = blocks.threads * RUN // self.shape.cols
        self.count = self.shape.rows // self.step
        assert self.step % RUN == 0, "the order of runs is the same in all of a thread's rows"
        self.row, run = divmod_const(self.b, product.engine.thread, self.shape.cols // RUN)
        self.col = run * RUN
        self.own = self.shape.offset(self.row, self.col)

    def memory_of(self, stage: Value) -> Value:
        return stage * self.shape.elements + self.start

    def copy(self, first: Value, depth: Value, stage: Value) -> None:
        """Start the copies of a step of the tile that begins at row or column ``first``."""
        b, factor, to = self.b, self.factor, self.memory_of(stage) + self.own
        for i in range(self.count):
            row, col = self.row + i * self.step, self.col
            if factor.across:
                row, col = depth + row, b.min(first + col, factor.cols - RUN)
            else:
                row, col = first + row, depth + col
            index = factor.stored.index(factor.place(row), col)
            b.async_copy(self.product.memory, to + i * self.step * PANEL, factor.stored.buffer, index, RUN)


class WarpgroupProduct:
    """The product of two factors that are multiplied as they are."""

    def __init__(self, b: Builder, config: ProductConfig, blocks: WarpgroupBlocks, target: Target) -> None:
        self.b, self.config, self.blocks = b, config, blocks
        p = self.p = Parameters(b, i64 if config.index64 else i32)
        self.m, self.n, self.k = (p.number(name) for name in "mnk")
        subgroups = blocks.rows // ROWS * SUBGROUPS
        shape = FragmentShape(blocks.rows, blocks.cols, subgroups, STAGES, False, blocks.registers)
        self.engine = Warpgroups(b, target, shape, config.left.stored.dtype)
        left = Factor(p, config.left, self.m, self.k, f32, config.whole)
        right = Factor(p, config.right, self.n, self.k, f32, config.whole)
        # The right one's stages are in front.
        self.right = Way(self, right, blocks.cols, 0)
        self.left = Way(self, left, blocks.rows, STAGES * self.right.shape.elements)
        elements = self.left.shape.elements + self.right.shape.elements
        self.memory = b.shared("stages", self.engine.elem, STAGES * elements)
        self.meeting = b.shared("meeting", u64, 1)
        b.warpgroup_meeting(self.meeting)
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

    def run(self) -> None:
        """Trace all of it."""
        b, stage, tiles = self.b, self.stage, self.down * self.along
        cursor = Cursor(self, self.first)

        def bring(to: Value) -> None:
            """Start the copies of the cursor's step."""
            with b.if_(cursor.number.value < tiles):
                self.left.copy(cursor.row.value, cursor.depth.value, to)
                self.right.copy(cursor.col.value, cursor.depth.value, to)
            b.async_commit()
            cursor.advance()

        bring(stage.value)
        bring(stage.value + 1)
        self.arrive()
        with b.loop(self.first, tiles, self.workgroups, name="tile") as number:
            with b.loop(0, self.k, self.blocks.depth, name="depth"):
                now = stage.value
                self.meet(now)
                self.multiply(now)
                bring((now + 2) & (STAGES - 1))
                b.warpgroup_wait(1)
                self.arrive()
                stage.value = (now + 1) & (STAGES - 1)
            self.finish(number)

    def arrive(self) -> None:
        """This thread has finished the products before the latest, and brought in what came before the latest
        copies."""
        self.b.async_wait(1)
        self.b.warpgroup_publish()
        self.b.warpgroup_arrive(self.meeting)

    def meet(self, times: Value) -> None:
        """All have come that far, ``times`` before."""
        self.b.warpgroup_await(self.meeting, 0, times & 1)

    def multiply(self, stage: Value) -> None:
        """Start a step's products."""
        b, config = self.b, self.config
        # A warpgroup's rows are 64 rows of the left factor's panel, or one of its panels of 64 columns.
        at = self.left.memory_of(stage) + self.engine.group * (ROWS * PANEL)
        left = PanelFactor(self.memory, at, self.left.shape, transposed=config.left.across)
        at = self.right.memory_of(stage)
        right = PanelFactor(self.memory, at, self.right.shape, transposed=not config.right.across)
        b.warpgroup_fence()
        self.engine.start_product(self.tile.vars[0], left, right, self.blocks.depth // SIZE)
        b.warpgroup_commit()

    def finish(self, number: Value) -> None:
        """Store a tile, by its number, and begin anew."""
        self.b.warpgroup_wait(0)
        self._store(*self.place(number))
        for variable in self.tile.vars[0]:
            variable.value = self.b.fragment_fill(self.engine.accumulator, 0.0)

    def _store(self, row0: Value, col0: Value) -> None:
        """Store a tile, and add the bias on the way."""
        b, engine, config, out, tile = self.b, self.engine, self.config, self.out, self.tile
        values = tile.values()
        rows = [row0 + engine.subgroup * SIZE + tile.row(r) for r in range(len(values))]
        starts = [out.start(row) for row in rows]
        for c in range(0, len(values[0]), RUN):
            cols = [col0 + tile.col(c + i) for i in range(RUN)]
            parts = [row[c : c + RUN] for row in values]
            if config.bias is not None:
                added = column_bias(self.p, config.bias, cols, self.n, f32, 2 if config.out.aligned else 1)
                parts = [[x + y for x, y in zip(part, added, strict=True)] for part in parts]
            for row, start, part in zip(rows, starts, parts, strict=True):
                stored = self._runs(part, cols)
                with b.if_(row < self.m):
                    for col, run in stored:
                        with b.if_(col < self.n):
                            b.store(out.buffer, out.index(start, col), run)

    def _runs(self, part: list[Value], cols: list[Value]) -> list[tuple[Value, Value]]:
        """A lane's elements of 32 columns as runs that can be stored, with the column of each: pairs, or 16 bytes where
        the lanes of a row have exchanged theirs."""
        b, elem = self.b, self.out.elem
        if not self.config.out.aligned:
            return [(col, b.cast(x, elem)) for col, x in zip(cols, part, strict=True)]
        if elem.bits != 16:
            return [(cols[i], b.cast(b.vector(part[i : i + 2]), elem)) for i in range(0, RUN, 2)]
        run = quad_run(self.engine, part, elem)
        # This lane's first column is that of its own pair in the first eight; its run is the one of its number.
        quad = self.engine.lane & (QUAD_LANES - 1)
        return [(cols[0] - quad * 2 + quad * RUN, run)]
