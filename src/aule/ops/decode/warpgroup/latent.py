"""The decoding kernel of latent attention over warpgroups: 64 query rows attend to a sequence's keys.

The values are the first columns of the keys, so one tile of keys in shared memory serves both products: its rows are
multiplied with Q, and the columns of its first panels with P. O of 64 rows and 512 columns takes all registers of two
warpgroups, each of which holds half of the columns. So only one of them computes scores and weights. It keeps P in
registers for its own half and passes it through shared memory to the other warpgroup, which adds its half while the
scores of the next step are computed. Two smaller crews copy: each half of a stage of keys is filled again as soon as
it has been added to O.

All rows of a workgroup keep the same keys: it has query heads of one token, or there is no causal mask. Keys past the
last are zeros in shared memory, so that Inf and NaN behind a sequence's end add nothing.
"""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import Role, f32, i32
from aule.ops.decode.config import LatentWarpgroupConfig
from aule.ops.decode.result import Result
from aule.ops.decode.simt.kernel import KERNEL_NAME
from aule.ops.decode.variables import values
from aule.ops.decode.warpgroup.copies import Copies
from aule.ops.decode.warpgroup.memory import Memory
from aule.ops.decode.work_range import WorkRange
from aule.ops.softmax.online_softmax import LAG, Maximum, SoftmaxState
from aule.target import Target
from aule.tile.common.math import LOWEST, NEG_INF, fold
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.shape import FragmentShape
from aule.tile.warpgroup.engine import SUBGROUPS, PanelFactor, Warpgroups


def build_latent_warpgroup(config: LatentWarpgroupConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the kernel of a configuration for a target with warpgroup products."""
    shape = config.shape
    assert not config.last_workgroup_combines and config.cluster == 1
    b = Builder(name, shape.threads, shape.lanes, shape.registers, arithmetic="quick")
    work = WorkRange(b, config)
    memory = Memory(b, config)
    exists = work.find_length()
    b.barrier()  # the mbarriers are initialised
    left_role, right_role = (Role(SUBGROUPS, count) for count in (shape.score_registers, shape.value_registers))
    copiers = Role(SUBGROUPS // 2, shape.copy_registers, crews=2)
    with b.if_(exists), b.roles(left_role, right_role, copiers) as (left, right, copier):
        with left:
            _Left(b, work, memory, target).run()
        with right:
            _Right(b, work, memory, target).run()
        with copier:
            Copies(b, work, memory).run()
    return b.finish()


class _Half:
    """A crew that adds half of the values' columns to O."""

    half: int
    """0 for the left one."""

    def __init__(self, b: Builder, work: WorkRange, memory: Memory, target: Target) -> None:
        config, shape = memory.config, memory.shape
        self.b, self.work, self.memory, self.config, self.shape = b, work, memory, config, shape
        self.result = Result(work)
        tiles = FragmentShape(shape.rows, shape.keys, SUBGROUPS, shape.stages, False, warpgroups=True)
        self.engine = Warpgroups(b, target, tiles, config.dtype)
        self.subgroup_row = (self.engine.subgroup & (SUBGROUPS - 1)) * SIZE
        self.columns = config.value_dim // 2
        self.depth = shape.keys // SIZE
        self.O = self.engine.tile(SIZE, self.columns)
        self.number = b.var(b.const(0, i32), "number")
        """Number of the step."""

    @property
    def row_numbers(self) -> list[Value]:
        """Numbers of this lane's rows in the workgroup."""
        return [self.subgroup_row + self.O.row(r) for r in range(self.engine.rows_held)]

    def start_values(self, P: PanelFactor | list[Value]) -> None:
        """Start to add this crew's columns of P V."""
        b, memory = self.b, self.memory
        col = self.half * self.columns
        factor = PanelFactor(memory.tiles, memory.keys_at(self.number.value), memory.k_panels, col=col)
        b.warpgroup_fence()
        self.engine.start_product(self.O.vars[0], P, factor, self.depth)
        b.warpgroup_commit()

    def rescale(self, factors: list[Value]) -> None:
        """Multiply the rows of O."""
        self.O.map(lambda x, r, c: x * factors[r])

    def store(self, factors: list[Value]) -> None:
        """Store this crew's columns of O, multiplied by a factor for each row."""
        b, work, run = self.b, self.work, self.engine.run
        for row, sums, factor in zip(self.row_numbers, self.O.values(), factors, strict=True):
            with b.if_(work.row0 + row < work.rows):
                to = self.result.target(row, wide=run > 1)
                for c in range(0, len(sums), run):
                    parts = [x * factor for x in sums[c : c + run]]
                    to.store(b, b.const(0, i32), self.O.col(c) + self.half * self.columns, parts, self.config.value_dim)


class _Left(_Half):
    """The crew that computes scores and weights."""

    half = 0

    def run(self) -> None:
        """Pass over the keys and store the left half of the rows, and their log-sum-exps."""
        b, work, engine = self.b, self.work, self.engine
        self.S = engine.tile(SIZE, self.shape.keys)
        empty = b.fragment_fill(engine.left, 0.0)
        self.P = [b.var(empty, "p") for _ in range(self.depth)]
        m, l = engine.row_vars(b.const(LOWEST, f32)), engine.row_vars(b.const(0.0, f32))
        self.rows = [SoftmaxState(Maximum(b), *row) for row in zip(m, l, strict=True)]
        with b.if_(work.first < work.end):
            self._start_scores()
            b.warpgroup_wait()
            with b.loop(work.first, work.end - work.stride, work.stride, name="key"):
                self._weigh()
                b.comment("O = O + P V, left half; S = Q K^T of the next step")
                self.start_values(values(self.P))
                self.number.value = self.number.value + 1
                self._start_scores(running=True)
                b.warpgroup_wait()
            self._drop_missing()
            self._weigh()
            self.start_values(values(self.P))
            b.warpgroup_wait()
            self.number.value = self.number.value + 1
        if self.config.next_launch_overlaps:
            b.launch_next()
        self._finish()

    def _start_scores(self, running: bool = False) -> None:
        """Start to compute ``S = Q K^T``, each half of K as soon as it is there. If O's product of the step before is
        ``running``, its half of K is left to the copiers as soon as it ends."""
        b, memory, half, n = self.b, self.memory, self.columns, self.number.value
        # A zero that the compiler cannot know to be the same in all steps: it would keep the addresses of all parts of
        # Q in registers, which are not enough.
        q_at = n & b.min(self.work.p.number("seq_kv"), 0)
        memory.filled[0].wait(n)
        b.warpgroup_fence()
        self._start_part(q_at, 0, half, fresh=True)
        self._start_part(q_at, 2 * half, self.config.head_dim)
        b.warpgroup_commit()
        if running:
            b.warpgroup_wait(1)
            memory.emptied[0].arrive(n - 1)
        memory.filled[1].wait(n)
        b.warpgroup_fence()
        self._start_part(q_at, half, 2 * half)
        b.warpgroup_commit()

    def _start_part(self, q_at: Value, first: int, end: int, fresh: bool = False) -> None:
        """Start the product of some columns of Q and K."""
        memory, k_at = self.memory, self.memory.keys_at(self.number.value)
        queries = PanelFactor(memory.tiles, q_at, memory.q_panels, col=first)
        keys = PanelFactor(memory.tiles, k_at, memory.k_panels, transposed=True, col=first)
        self.engine.start_product(self.S.vars[0], queries, keys, (end - first) // SIZE, fresh)

    def _drop_missing(self) -> None:
        """Replace the last step's scores of keys past the last by -inf."""
        b, work, keys = self.b, self.work, self.shape.keys
        left = work.end - work.first - self.number.value * work.stride
        with b.if_(left < keys):
            last, dropped = left - self.engine.lane_col, b.const(NEG_INF, f32)
            self.S.map(lambda s, r, c: b.select(last > self.engine.behind(c), s, dropped))

    def _weigh(self) -> None:
        """Compute P, and pass it to the other crew with the factors by which O is rescaled."""
        b, engine, memory, rows, n = self.b, self.engine, self.memory, self.rows, self.number.value
        b.comment("online softmax: P = exp2(S - m), l = l + sum P")
        scale, s = self.work.p.number("scale", f32), self.S.values()
        highest = [fold(b, "max", list(row)) * scale for row in s]
        follows = engine.any_of_rows(fold(b, "or", [x.lags(high, LAG) for x, high in zip(rows, highest, strict=True)]))
        alphas = [b.var(b.const(1.0, f32), "alpha") for _ in rows]
        with b.if_(follows):
            for row, high, alpha in zip(rows, engine.reduce_rows("max", highest), alphas, strict=True):
                row.follow(high, alpha)
        p = [row.weigh(scores, scale=scale) for row, scores in zip(rows, s, strict=True)]
        for variable, fragment in zip(self.P, engine.pack(p, engine.left, "weights")[0], strict=True):
            variable.value = fragment
        memory.added.wait_before(n)
        zero, start = b.const(0, i32), b.const(memory.p_start, i32)
        engine.put_factors(memory.tiles, start, memory.p_panels, self.subgroup_row, zero, values(self.P))
        self._pass_factors(values(alphas))
        with b.if_(follows):
            self.rescale(values(alphas))

    def _pass_factors(self, factors: list[Value]) -> None:
        """Pass a factor for each row, and what else is in shared memory, to the other crew."""
        b, memory = self.b, self.memory
        with b.if_(b.eq(self.engine.lane_col, 0)):
            for row, factor in zip(self.row_numbers, factors, strict=True):
                b.store(memory.factors, row, factor)
        b.warpgroup_publish()
        memory.weighed.arrive(self.number.value)

    def _finish(self) -> None:
        b, memory, engine, result = self.b, self.memory, self.engine, self.result
        b.comment("O / l, and the log-sum-exp")
        totals = engine.reduce_rows("add", [row.l.value for row in self.rows])
        ends = [
            result.finish(number, row.m.value, total)
            for number, row, total in zip(self.row_numbers, self.rows, totals, strict=True)
        ]
        memory.added.wait_before(self.number.value)
        self._pass_factors([factor for factor, _ in ends])
        for number, (_, lse) in zip(self.row_numbers, ends, strict=True):
            with b.if_(self.work.row0 + number < self.work.rows):
                result.store_lse(number, lse, b.eq(engine.lane_col, 0))
        self.store([factor for factor, _ in ends])


class _Right(_Half):
    """The crew that adds the right half of the values' columns."""

    half = 1

    def run(self) -> None:
        """Add P V of all steps and store the right half of the rows."""
        b, work, memory = self.b, self.work, self.memory
        weights = PanelFactor(memory.tiles, b.const(memory.p_start, i32), memory.p_panels)
        with b.loop(work.first, work.end, work.stride, name="key"):
            n = self.number.value
            memory.weighed.wait(n)
            b.comment("O = O + P V, right half")
            alphas = self._factors()
            with b.if_(self.engine.any_of_rows(fold(b, "or", [b.ne(x, 1.0) for x in alphas]))):
                self.rescale(alphas)
            self.start_values(weights)
            b.warpgroup_wait()
            memory.added.arrive(n)
            memory.emptied[1].arrive(n)
            self.number.value = n + 1
        memory.weighed.wait(self.number.value)
        self.store(self._factors())

    def _factors(self) -> list[Value]:
        """The factors of this lane's rows."""
        return [self.b.load(self.memory.factors, row) for row in self.row_numbers]
