"""A product on matrix units, through stages in shared memory.

Steps along the summed dimension are in a ring of stages in shared memory. A factor that needs no change is copied there
asynchronously, some steps ahead. One that is normalised or unaligned goes through registers: between the products of a
step, each of a thread's runs for the next step is stored and that for the one after is loaded. So loads have the time
of an entire step, and arithmetic overlaps with the matrix units.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import f32, i32, i64
from aule.ops.linear.config import FragmentBlocks, ProductConfig
from aule.ops.linear.factors import Factor, RegisterPanel
from aule.ops.linear.results import store_tile, tile_of
from aule.ops.shared.parameters import Parameters
from aule.target import Target
from aule.tile.common.variables import assign_vars, read_vars
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Fragments, FragmentTile
from aule.tile.fragment.shape import RUN, FragmentShape


class FragmentProduct:
    """Common parts of products on matrix units: the kernel, lengths, the engine, the workgroup's tile of the result,
    and the subgroup's place in it."""

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
        elements = blocks.shared_elements(config.left.depth_major, config.right.depth_major)
        self.memory = b.shared("stages", self.engine.elem, elements)

    def build(self) -> KernelIR:
        self.run()
        return self.b.finish()

    @abstractmethod
    def run(self) -> None: ...

    def tile(self) -> FragmentTile:
        return self.engine.tile(self.blocks.rows // self.blocks.down, self.blocks.cols // self.blocks.along)

    def multiply(self, sums: list[list[Value]], left: Sequence[Value], right: Iterable[Value]) -> None:
        """Add the products of a column of fragments and a row of them to ``sums``."""
        for j, factor in enumerate(right):
            for x, row in zip(left, sums, strict=True):
                row[j] = self.engine.multiply_add(x, factor, row[j])

    def store(
        self, tile: FragmentTile, stores_row: Callable[[Value], Value], stores_col: Callable[[Value], Value]
    ) -> None:
        first = self.row0 + self.sub_row, self.col0 + self.sub_col
        store_tile(self.p, self.config, tile, first, stores_row, stores_col)


class StagedFactor:
    """A factor in the stages: copied there asynchronously, or stored through registers."""

    def __init__(self, product: StagedProduct, factor: Factor, outer: int, first: Value, start: int) -> None:
        self.b, self.memory, self.start = product.b, product.memory, start
        engine, threads = product.engine, product.blocks.threads
        rows, cols, self.stride = product.blocks.panel(factor.depth_major, outer)
        self.size = rows * self.stride
        self.panel = RegisterPanel(factor, engine.thread, threads, rows, cols, RUN, first)
        self.copied = engine.copies and factor.stored.config.aligned and factor.plain

    def at(self, stage: Value) -> Value:
        return stage * self.size + self.start

    def copy(self, step: Value, stage: Value) -> None:
        """Start the asynchronous copies of a step."""
        b, panel, to = self.b, self.panel, self.at(stage)
        for i in range(panel.count):
            row, col = panel.place(i)
            source = panel.factor.stored.buffer
            b.async_copy(self.memory, to + row * self.stride + col, source, panel.index(i, step), RUN)

    def put(self, i: int, step: Value, stage: Value) -> None:
        """Store the ``i``-th run that was loaded for a step."""
        row, col = self.panel.place(i)
        value = self.panel.factor_value(i, step)
        self.b.store(self.memory, self.at(stage) + row * self.stride + col, value)


class StagedProduct(FragmentProduct):
    """A product whose factors pass through stages in shared memory."""

    def __init__(self, config: ProductConfig, blocks: FragmentBlocks, target: Target) -> None:
        super().__init__(config, blocks, target)
        left = Factor(self.p, config.left, self.m, self.k, f32, config.full_steps)
        right = Factor(self.p, config.right, self.n, self.k, f32, config.full_steps)
        self.left = StagedFactor(self, left, blocks.rows, self.row0, 0)
        self.right = StagedFactor(self, right, blocks.cols, self.col0, self.left.size * blocks.stages)

    def run(self) -> None:
        b, blocks = self.b, self.blocks
        steps = (self.k + (blocks.depth - 1)) // blocks.depth
        copied = [factor for factor in (self.left, self.right) if factor.copied]
        through_registers = [factor for factor in (self.left, self.right) if not factor.copied]
        tile = self.tile()
        zero, ahead = b.const(0, i32), blocks.stages - 1
        for factor in through_registers:
            factor.panel.fetch_all(zero)
        for number in range(ahead if copied else 0):
            with b.if_(number < steps):
                for factor in copied:
                    factor.copy(b.const(number * blocks.depth, i32), b.const(number, i32))
            b.async_commit()
        for factor in through_registers:
            for i in range(factor.panel.count):
                factor.put(i, zero, zero)
                factor.panel.fetch(i, b.min(steps - 1, 1) * blocks.depth)
        current = b.var(zero, "stage")
        with b.loop(0, steps, name="step") as step:
            stage = current.value
            following = self._wrapped(stage + 1)
            if copied:
                b.async_wait(ahead - 1)
            b.barrier()
            if copied:
                with b.if_(step + ahead < steps):
                    for factor in copied:
                        factor.copy((step + ahead) * blocks.depth, self._wrapped(stage + ahead))
                b.async_commit()
            near, far = b.min(step + 1, steps - 1) * blocks.depth, b.min(step + 2, steps - 1) * blocks.depth
            jobs = [(factor, i) for factor in through_registers for i in range(factor.panel.count)]

            def carry(part: int, parts: int) -> None:
                for factor, i in jobs[len(jobs) * part // parts : len(jobs) * (part + 1) // parts]:
                    factor.put(i, near, following)
                    factor.panel.fetch(i, far)

            self._multiply_step(tile, stage, carry)
            current.value = following
        self.store(tile, lambda row: row < self.m, lambda col: col < self.n)

    def _wrapped(self, stage: Value) -> Value:
        """A stage number that may be past the ring's end, wrapped around."""
        b, stages = self.b, self.blocks.stages
        return b.select(stage < stages, stage, stage - stages)

    def _multiply_step(self, tile: FragmentTile, stage: Value, carry: Callable[[int, int], None]) -> None:
        """Add a step's product; after each 16 of the depth, ``carry`` stores and loads a share of the runs."""
        engine, left, right = self.engine, self.left, self.right
        left_major, right_major = self.config.left.depth_major, self.config.right.depth_major
        left_at, right_at = left.at(stage), right.at(stage)
        left_at = left_at + (self.sub_row if left_major else self.sub_row * left.stride)
        right_at = right_at + (self.sub_col if right_major else self.sub_col * right.stride)
        depth = self.blocks.depth // SIZE
        sums = read_vars(tile.vars)
        for k in range(depth):
            a = [
                engine.load_left(self.memory, left_at, left.stride, i * SIZE, k * SIZE, left_major)
                for i in range(len(sums))
            ]
            factors = (
                engine.load_right(self.memory, right_at, right.stride, k * SIZE, j * SIZE, not right_major)
                for j in range(len(sums[0]))
            )
            self.multiply(sums, a, factors)
            carry(k, depth)
        assign_vars(tile.vars, sums)
