"""A product of warpgroups (NVIDIA's sm_90).

Each warpgroup has 64 rows of a workgroup's tile and all of its columns; both factors lie in panels in a ring of stages,
and a step's products run on while the next steps are brought in. A workgroup makes one tile after the other, and goes
on bringing in steps, then of its next tile, while it stores a result.

What happens around step n, behind the barrier that shows it to everybody: its products are queued behind those of step
n - 1, copies of step n + 2 start, what is normalised of step n + 1 goes from registers to its stage, and that of step
n + 2 is fetched. Then the products of step n - 1 are waited for. So at the next barrier no warpgroup has more than one
step in flight, and the stages of all others, two before it and two behind, may be written.
"""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import PANEL, Vector, element, f32, i32, i64, u32
from aule.ops.linear.config import WARPGROUP_STAGES as STAGES
from aule.ops.linear.config import ProductConfig, WarpgroupBlocks
from aule.ops.linear.factors import Factor, RowAt, Stored
from aule.ops.linear.product_fragment import column_bias, tile_at
from aule.ops.parameters import Parameters
from aule.target import Target
from aule.tile.arrangement import SIZE
from aule.tile.fragment import RUN, FragmentShape, FragmentTile
from aule.tile.matrix import divmod_const
from aule.tile.warpgroup import ROWS, SUBGROUPS, PanelFactor, Warpgroups

PUBLISH_COPIES = True
_QUAD = 4
"""Lanes that have a row of a result."""


def build_product_warpgroup(config: ProductConfig, target: Target) -> KernelIR:
    """Trace the kernel."""
    blocks = config.blocks
    assert isinstance(blocks, WarpgroupBlocks) and config.whole
    b = Builder(config.name, blocks.threads, subgroup_size=32, max_registers=blocks.registers)
    _Product(b, config, blocks, target).run()
    return b.finish()


class _Cursor:
    """The tile and the step of it that is brought in next."""

    def __init__(self, product: _Product, number: Value) -> None:
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


class _Way:
    """A factor's way into the stages: by asynchronous copies, or through registers, where it is normalised."""

    def __init__(self, product: _Product, factor: Factor, outer: int, start: int) -> None:
        b = self.b = product.b
        self.product, self.factor, self.start = product, factor, start
        blocks = product.blocks
        self.shape = blocks.panel(factor.across, outer)
        self.step = blocks.threads * RUN // self.shape.cols
        self.count = self.shape.rows // self.step
        assert self.step % RUN == 0, "the order of runs is the same in all of a thread's rows"
        self.row, run = divmod_const(b, product.engine.thread, self.shape.cols // RUN)
        self.col = run * RUN
        self.own = self.shape.offset(self.row, self.col)
        self.carried = factor.norm is not None
        # What was fetched is held as words, and statistics as they were stored: whatever was computed of them, if only
        # to take halves apart, would wait for them at once.
        nothing = b.const(0.0, factor.work)
        self.raw = [self._held(factor.stored) for _ in range(self.count)] if self.carried else []
        self.rows = [[b.var(nothing) for _ in range(3 if factor.across else 2)] for _ in self.raw]
        self.affine = [None if x is None else self._held(x) for x in factor.vectors]

    def _held(self, stored: Stored) -> Var:
        return self.b.var(self.b.splat(self.b.const(0, u32), RUN * stored.elem.bits // 32), "fetched")

    def _keep(self, held: Var, value: Value) -> None:
        held.value = self.b.bitcast(value, Vector(u32, RUN * element(value.type).bits // 32))

    def _kept(self, held: Var, stored: Stored) -> Value:
        return self.b.bitcast(held.value, Vector(stored.elem, RUN))

    def memory_of(self, stage: Value) -> Value:
        return stage * self.shape.elements + self.start

    def _at(self, i: int, first: Value, depth: Value) -> tuple[Value, Value]:
        """The stored row of a thread's ``i``-th run of a step, and its column."""
        b, factor, row = self.b, self.factor, self.row + i * self.step
        if factor.across:
            return depth + row, b.min(first + self.col, factor.cols - RUN)
        return first + row, depth + self.col

    def copy(self, first: Value, depth: Value, stage: Value) -> None:
        """Start the copies of a step of the tile that begins at row or column ``first``."""
        to, stored = self.memory_of(stage) + self.own, self.factor.stored
        for i in range(self.count):
            row, col = self._at(i, first, depth)
            index = stored.index(self.factor.place(row), col)
            self.b.async_copy(self.product.memory, to + i * self.step * PANEL, stored.buffer, index, RUN)

    def fetch(self, first: Value, depth: Value) -> None:
        """Load a step into registers, with what normalises it."""
        b, factor = self.b, self.factor
        places = [self._at(i, first, depth) for i in range(self.count)]

        def rows() -> None:
            for variables, (row, _) in zip(self.rows, places, strict=True):
                numbers = factor.statistics(row)
                if not factor.across:
                    at = factor.normalised(row, numbers)
                    numbers = [x for x in (at.scale, at.shift) if x is not None]
                for variable, x in zip(variables, numbers, strict=True):
                    variable.value = x

        def columns() -> None:
            for held, x in zip(self.affine, factor.affine(places[0][1], RUN), strict=True):
                if held is not None and x is not None:
                    self._keep(held, x)

        coming, lasting = (rows, columns) if factor.across else (columns, rows)
        with b.if_(b.eq(depth, 0)):
            lasting()
        coming()
        for held, (row, col) in zip(self.raw, places, strict=True):
            self._keep(held, factor.load(RowAt(factor.place(row)), col, RUN))

    def put(self, stage: Value) -> None:
        """Store the step that was fetched, normalised."""
        b, factor, to = self.b, self.factor, self.memory_of(stage) + self.own
        nowhere = b.const(0, i32)
        affine = [
            None if held is None or stored is None else self._kept(held, stored)
            for held, stored in zip(self.affine, factor.vectors, strict=True)
        ]
        for i, (held, numbers) in enumerate(zip(self.raw, self.rows, strict=True)):
            known = [x.value for x in numbers]
            row = factor.normalised(nowhere, known) if factor.across else RowAt(nowhere, *known)
            value = b.cast(factor.value(self._kept(held, factor.stored), row, affine), self.product.engine.elem)
            b.store(self.product.memory, to + i * self.step * PANEL, value)


class _Product:
    def __init__(self, b: Builder, config: ProductConfig, blocks: WarpgroupBlocks, target: Target) -> None:
        self.b, self.config, self.blocks = b, config, blocks
        p = self.p = Parameters(b, i64 if config.index64 else i32)
        self.m, self.n, self.k = (p.number(name) for name in "mnk")
        subgroups = blocks.rows // ROWS * SUBGROUPS
        shape = FragmentShape(blocks.rows, blocks.cols, subgroups, STAGES, False, blocks.registers)
        self.engine = Warpgroups(b, target, shape, config.left.stored.dtype)
        left = Factor(p, config.left, self.m, self.k, f32, config.whole)
        right = Factor(p, config.right, self.n, self.k, f32, config.whole)
        sizes = blocks.shared_elements(config.left.across, config.right.across)
        self.memory = b.shared("stages", self.engine.elem, sum(sizes))
        self.left = _Way(self, left, blocks.rows, 0)
        self.right = _Way(self, right, blocks.cols, sizes[0])
        self.out = Stored(p, config.out, "write")
        self.down = (self.m + (blocks.rows - 1)) // blocks.rows
        self.along = (self.n + (blocks.cols - 1)) // blocks.cols
        self.first = b.group_id(0) + b.group_id(1) * b.group_count(0)
        self.workgroups = b.group_count(0) * b.group_count(1)

    def place(self, number: Value) -> tuple[Value, Value]:
        """The first row and column of a tile."""
        row, col = tile_at(self.b, number, self.down, self.along, self.blocks.group)
        return row * self.blocks.rows, col * self.blocks.cols

    def run(self) -> None:
        b, blocks = self.b, self.blocks
        ways = [(self.left, True), (self.right, False)]
        tiles = self.down * self.along
        cursor = _Cursor(self, self.first)
        stage = b.var(b.const(0, i32), "stage")
        tile = self.engine.tile(SIZE, blocks.cols)

        def bring(to: Value) -> None:
            """Start the copies of the cursor's step."""
            with b.if_(cursor.number.value < tiles):
                for way, is_left in ways:
                    if not way.carried:
                        way.copy(cursor.row.value if is_left else cursor.col.value, cursor.depth.value, to)
            b.async_commit()

        def fetch() -> None:
            """The same with what passes through registers. Behind the last tile something is fetched, too: under a
            condition loads would not go to where they are held, and moves wait for them."""
            for way, is_left in ways:
                if way.carried:
                    way.fetch(cursor.row.value if is_left else cursor.col.value, cursor.depth.value)

        def put(to: Value) -> None:
            for way, _ in ways:
                if way.carried:
                    way.put(to)
                    b.warpgroup_publish()

        bring(stage.value)
        fetch()
        put(stage.value)
        cursor.advance()
        bring(stage.value + 1)
        fetch()
        with b.loop(self.first, tiles, self.workgroups, name="tile") as number:
            with b.loop(0, self.k, blocks.depth, name="depth"):
                now = stage.value
                b.async_wait(1)
                if PUBLISH_COPIES:
                    b.warpgroup_publish()
                b.barrier()
                self._multiply(tile, now)
                put((now + 1) & (STAGES - 1))
                cursor.advance()
                bring((now + 2) & (STAGES - 1))
                fetch()
                b.warpgroup_wait(1)
                stage.value = (now + 1) & (STAGES - 1)
            b.warpgroup_wait(0)
            self._finish(tile, *self.place(number))
            for variable in tile.vars[0]:
                variable.value = b.fragment_fill(self.engine.accumulator, 0.0)

    def _multiply(self, tile: FragmentTile, stage: Value) -> None:
        """Start a step's products."""
        b, engine, config = self.b, self.engine, self.config
        # A warpgroup's rows are 64 rows of the left factor's panel, or one of its panels of 64 columns.
        left_at = self.left.memory_of(stage) + engine.group * (ROWS * PANEL)
        right_at = self.right.memory_of(stage)
        left = PanelFactor(self.memory, left_at, self.left.shape, transposed=config.left.across)
        right = PanelFactor(self.memory, right_at, self.right.shape, transposed=not config.right.across)
        b.warpgroup_fence()
        engine.start_product(tile.vars[0], left, right, self.blocks.depth // SIZE)
        b.warpgroup_commit()

    def _finish(self, tile: FragmentTile, row0: Value, col0: Value) -> None:
        """Store a tile, and add the bias on the way."""
        b, engine, config, out = self.b, self.engine, self.config, self.out
        values = tile.values()
        rows = [row0 + engine.subgroup * SIZE + tile.row(r) for r in range(len(values))]
        starts = [out.start(row) for row in rows]
        for c in range(0, len(values[0]), RUN):
            cols = [col0 + tile.col(c + i) for i in range(RUN)]
            parts = [row[c : c + RUN] for row in values]
            if config.bias is not None:
                added = column_bias(self.p, config.bias, cols, self.n, f32)
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
        pairs = [b.cast(b.vector(part[i : i + 2]), elem) for i in range(0, RUN, 2)]
        if elem.bits != 16:
            return list(zip(cols[::2], pairs, strict=True))
        words = [b.bitcast(pair, u32) for pair in pairs]
        for mask in (2, 1):  # the words of four lanes as a matrix of 4 x 4, which is transposed
            upper = b.ne(self.engine.lane & mask, 0)
            for low in (i for i in range(_QUAD) if not i & mask):
                high = low | mask
                other = b.shuffle_xor(b.select(upper, words[low], words[high]), mask)
                words[low], words[high] = b.select(upper, other, words[low]), b.select(upper, words[high], other)
        # This lane's first column is that of its own pair in the first eight; its run is the one of its number.
        quad = self.engine.lane & (_QUAD - 1)
        return [(cols[0] - quad * 2 + quad * RUN, b.bitcast(b.vector(words), Vector(elem, RUN)))]
