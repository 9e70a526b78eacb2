"""A product on matrix units.

Steps along the summed dimension lie in a ring of stages in shared memory. What can go there as it is goes by
asynchronous copies, some steps ahead; what is normalised, or lies awkwardly, goes through registers: while a step is
multiplied, each of a thread's runs for the next one is stored and that for the one after is fetched, in between the
products, so that loads have a whole step's time and arithmetic runs beside the matrix units.
"""

from __future__ import annotations

from collections.abc import Callable

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import f32, i32, i64
from aule.ops.linear.config import FragmentBlocks, ProductConfig
from aule.ops.linear.factors import Factor, Panel
from aule.ops.linear.results import store_tile, tile_of
from aule.ops.parameters import Parameters
from aule.target import Target
from aule.tile.arrangement import SIZE
from aule.tile.fragment import Fragments, FragmentTile
from aule.tile.fragment_shape import RUN, FragmentShape


def build_product_fragment(config: ProductConfig, target: Target) -> KernelIR:
    """Trace the kernel."""
    blocks = config.blocks
    assert isinstance(blocks, FragmentBlocks)
    product = _Product(config, blocks, target)
    product.run()
    return product.b.finish()


class _Way:
    """A factor's way into the stages: by itself, or through registers."""

    def __init__(self, product: _Product, factor: Factor, outer: int, first: Value, start: int) -> None:
        self.b, self.product, self.start = product.b, product, start
        engine, threads = product.engine, product.blocks.threads
        rows, cols, self.stride = product.blocks.panel(factor.across, outer)
        self.size = rows * self.stride
        self.panel = Panel(factor, engine.thread, threads, rows, cols, RUN, first)
        self.direct = engine.copies and factor.stored.config.aligned and not factor.changes
        self.plain = not factor.changes

    def memory_of(self, stage: Value) -> Value:
        return stage * self.size + self.start

    def copy(self, step: Value, stage: Value) -> None:
        """Start the asynchronous copies of a step."""
        b, panel, to = self.b, self.panel, self.memory_of(stage)
        for i in range(panel.count):
            row, col = panel.place(i)
            source = panel.factor.stored.buffer
            b.async_copy(self.product.memory, to + row * self.stride + col, source, panel.index(i, step), RUN)

    def put(self, i: int, step: Value, stage: Value) -> None:
        """Store the ``i``-th run that was fetched for a step."""
        panel = self.panel
        row, col = panel.place(i)
        value = panel.raw[i].value if self.plain else self.b.cast(panel.value(i, step), self.product.engine.elem)
        self.b.store(self.product.memory, self.memory_of(stage) + row * self.stride + col, value)


class FragmentProduct:
    """What products on matrix units begin with, whichever way their factors come: the kernel, lengths, the engine, the
    workgroup's tile of the result, and where the subgroup's lies in it."""

    def __init__(self, config: ProductConfig, blocks: FragmentBlocks, target: Target) -> None:
        self.config, self.blocks = config, blocks
        b = self.b = Builder(
            config.name, blocks.threads, subgroup_size=blocks.lanes, max_registers=blocks.registers, arithmetic="quick"
        )
        p = self.p = Parameters(b, i64 if config.index64 else i32)
        self.m, self.n, self.k = (p.number(name) for name in "mnk")
        shape = FragmentShape(
            blocks.rows, blocks.cols, blocks.down * blocks.along, blocks.stages, False, blocks.registers, blocks.lanes
        )
        self.engine = Fragments(b, target, shape, config.left.stored.dtype)
        self.row0, self.col0 = tile_of(b, self.m, self.n, blocks.rows, blocks.cols, blocks.group)
        self.sub_row = (self.engine.subgroup // blocks.along) * (blocks.rows // blocks.down)
        self.sub_col = (self.engine.subgroup % blocks.along) * (blocks.cols // blocks.along)
        self.memory = b.shared(
            "stages", self.engine.elem, blocks.shared_elements(config.left.across, config.right.across)
        )


class _Product(FragmentProduct):
    def __init__(self, config: ProductConfig, blocks: FragmentBlocks, target: Target) -> None:
        super().__init__(config, blocks, target)
        left = Factor(self.p, config.left, self.m, self.k, f32, config.whole)
        right = Factor(self.p, config.right, self.n, self.k, f32, config.whole)
        self.left = _Way(self, left, blocks.rows, self.row0, 0)
        self.right = _Way(self, right, blocks.cols, self.col0, self.left.size * blocks.stages)
        self.ways = (self.left, self.right)

    def run(self) -> None:
        b, blocks = self.b, self.blocks
        steps = (self.k + (blocks.depth - 1)) // blocks.depth
        copied = [way for way in self.ways if way.direct]
        carried = [way for way in self.ways if not way.direct]
        tile = self.engine.tile(blocks.rows // blocks.down, blocks.cols // blocks.along)
        zero, ahead = b.const(0, i32), blocks.stages - 1
        for way in carried:
            for i in range(way.panel.count):
                way.panel.fetch(i, zero)
        for early in range(ahead if copied else 0):
            with b.if_(early < steps):
                for way in copied:
                    way.copy(b.const(early * blocks.depth, i32), b.const(early, i32))
            b.async_commit()
        for way in carried:
            for i in range(way.panel.count):
                way.put(i, zero, zero)
                way.panel.fetch(i, b.min(steps - 1, 1) * blocks.depth)
        current = b.var(zero, "stage")
        with b.loop(0, steps, name="step") as step:
            stage = current.value
            following = self._turned(stage + 1)
            if copied:
                b.async_wait(ahead - 1)
            b.barrier()
            if copied:
                with b.if_(step + ahead < steps):
                    for way in copied:
                        way.copy((step + ahead) * blocks.depth, self._turned(stage + ahead))
                b.async_commit()
            near, far = b.min(step + 1, steps - 1) * blocks.depth, b.min(step + 2, steps - 1) * blocks.depth
            jobs = [(way, i) for way in carried for i in range(way.panel.count)]

            def carry(part: int, parts: int) -> None:
                for way, i in jobs[len(jobs) * part // parts : len(jobs) * (part + 1) // parts]:
                    way.put(i, near, following)
                    way.panel.fetch(i, far)

            self._multiply(tile, stage, carry)
            current.value = following
        first = self.row0 + self.sub_row, self.col0 + self.sub_col
        store_tile(self.p, self.config, tile, first, lambda row: row < self.m, lambda col: col < self.n)

    def _turned(self, stage: Value) -> Value:
        """A number of a stage that may have gone once around the ring."""
        b, stages = self.b, self.blocks.stages
        return b.select(stage < stages, stage, stage - stages)

    def _multiply(self, tile: FragmentTile, stage: Value, carry: Callable[[int, int], None]) -> None:
        """Add a step's product; ``carry`` does a part of what else there is to do after each 16 of the depth."""
        b, engine, config = self.b, self.engine, self.config
        left_at, right_at = self.left.memory_of(stage), self.right.memory_of(stage)
        left_at = left_at + (self.sub_row if config.left.across else self.sub_row * self.left.stride)
        right_at = right_at + (self.sub_col if config.right.across else self.sub_col * self.right.stride)
        depth = self.blocks.depth // SIZE
        sums = [[variable.value for variable in row] for row in tile.vars]
        for k in range(depth):
            a = [
                engine.load_left(self.memory, left_at, self.left.stride, i * SIZE, k * SIZE, config.left.across)
                for i in range(len(sums))
            ]
            for j in range(len(sums[0])):
                factor = engine.load_right(
                    self.memory, right_at, self.right.stride, k * SIZE, j * SIZE, not config.right.across
                )
                for x, row in zip(a, sums, strict=True):
                    row[j] = b.fragment_mma(x, factor, row[j])
            carry(k, depth)
        for variables, row in zip(tile.vars, sums, strict=True):
            for variable, value in zip(variables, row, strict=True):
                variable.value = value
