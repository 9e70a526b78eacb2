"""The decoding kernel on matrix units: up to 16 query rows of a key head attend to a sequence's keys.

Both products are transposed, ``S^T = K Q^T`` and ``O^T = V^T P^T``, so that K and V are always left factors, whose
layout over lanes is known: lanes load them in runs of 16 bytes and multiply (`aule.tile.fragment.direct`). Nothing of
the cache goes through shared memory, and converting bytes is the only arithmetic per element. Q is a right factor that
stays in registers; P becomes one through a few hundred bytes of shared memory, 16 keys by 16 rows at a time. With at
most eight rows half of every fragment is unused, and the compiler removes its products.

Each subgroup has its own keys, as in the simt kernel. K of the next step, V of this one and page numbers of the one
after are in flight at the same time; for quantised caches the next step's scales, and its V if the shape says so, since
a step then has more to compute and less in flight.

Bytes of quantised caches become fp16 whatever the type of Q. Rows of a bf16 Q are scaled into the range of fp16 by
powers of two. A key's scale multiplies its scores and a value's its weights. m is the maximum of both, so that fp16
weights neither overflow nor vanish.
"""

from __future__ import annotations

from dataclasses import dataclass

from aule import tuning
from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import SCALARS, f16, f32, i32, u32
from aule.ops.combine.workgroup import WorkgroupPartials
from aule.ops.decode.config import FragmentDecodeConfig
from aule.ops.decode.fragment.loads import KeyLoads, Prefetch, Scales, Step
from aule.ops.decode.fragment.queries import Queries
from aule.ops.decode.result import Result
from aule.ops.decode.simt.kernel import KERNEL_NAME
from aule.ops.decode.variables import assign, values
from aule.ops.decode.work_range import QueryRow, WorkRange
from aule.ops.scores.band import keeps
from aule.ops.scores.modifiers import Site
from aule.target import Target
from aule.tile.common.math import LOWEST, fold, overflowing
from aule.tile.common.matrix import QUAD
from aule.tile.common.quantised import I8_BITS, without_nan
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.direct import Direct
from aule.tile.fragment.engine import Components
from aule.tile.fragment.shape import row_stride

LAG = 8.0
"""Powers of two by which m may lag behind the largest weight."""
ROOM = 6.0
"""Powers of two above 1 at which fp16 weights begin, so that those far below the largest do not vanish so soon."""
_SMALLEST_EXPONENT = -64
"""Exponent of the smallest scale of a value that m takes into account, so that sums of weights stay finite."""


def scale_exponent(b: Builder, scale: Value) -> Value:
    """The exponent of a scale, which is near enough for m; 0 and subnormals count as the smallest."""
    return b.cast(b.max(b.cast(b.bitcast(scale, u32) >> 23, i32) - 127, _SMALLEST_EXPONENT), f32)


def build_decode_fragment(config: FragmentDecodeConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the kernel of a configuration for a target with matrix units."""
    shape = config.shape
    b = Builder(name, shape.threads, shape.lanes, shape.registers, config.cluster, arithmetic="quick")
    kernel = _Decode(b, config, target)
    kernel.load_early()
    with b.if_(kernel.work.find_length()):
        kernel.run()
    return b.finish()


@dataclass(frozen=True)
class _Row:
    """A query row of which this lane has scores.

    Attributes
    ----------
    column : int
        The row's column in a fragment, relative to the lane's.
    number : Value
        Number of the row in the workgroup.
    factor : Value
        Factor of the row's scores.
    """

    column: int
    number: Value
    factor: Value
    query: QueryRow


Scores = list[list[list[Var]]]
"""Scores of a lane by block, key and row."""


class _Decode:
    """The kernel while it is traced."""

    def __init__(self, b: Builder, config: FragmentDecodeConfig, target: Target) -> None:
        self.b, self.config, self.shape = b, config, config.shape
        shape = config.shape
        self.work = WorkRange(b, config)
        self.result = Result(self.work)
        self.engine = engine = Components(b, target, f16 if config.quantised else SCALARS[config.dtype])
        self.keys = Direct(engine, config.head_dim, config.cache, "columns")
        self.values = Direct(engine, config.value_dim, config.cache, "rows")
        if config.cache == "i8" and tuning.number(target, "decode.fragment.hides_constant"):
            # Hide the constant from the driver's compiler: it makes two instructions of `and` and `xor` with two
            # constants, but one with a constant and a register.
            known = b.const(I8_BITS, u32)
            hidden = b.select(self.work.p.number("heads_kv") > 0, known, b.const(0, u32))
            self.keys.i8_bits = self.values.i8_bits = hidden
        self.room = ROOM if config.quantised else 0.0
        # Lanes with scores of the same rows, but of other keys, differ in these bits.
        self._key_masks = [1 << i for i, weight in enumerate(engine.layout.lane_rows) if weight]
        self.weights = b.shared("weights", engine.elem, shape.step * row_stride(SIZE))
        self.loads = KeyLoads(self.work, engine, self.keys, self.values, shape)
        self.queries = Queries(self.work, config, engine, self.keys)
        self.prefetch = Prefetch(self.loads, early_values=config.early_queries and not config.left)

    # -- the loop over keys --------------------------------------------------------------------------------------------

    def load_early(self) -> None:
        """Begin the loads that need not wait for the sequence's length."""
        self.queries.load_early()
        self.prefetch.load_early()

    def run(self) -> None:
        """Trace the loop over the workgroup's keys."""
        b, work, prefetch, config = self.b, self.work, self.prefetch, self.config
        prefetch.load_first()
        q = self.queries.factors(self.weights)
        rows = [self._row(part) for part in self.engine.part_cols if part < self.shape.rows]
        prefetch.load_first_values()
        zero = b.fragment_fill(self.engine.accumulator, 0.0)
        O = [b.var(zero, "o") for _ in range(self.values.fragments)]
        with b.loop(work.first, work.end, work.stride, name="key") as start:
            self._attend(q, prefetch.next_step(start), rows, O)
        if config.next_launch_overlaps:
            b.launch_next()
        self._finish(rows, O)
        if config.last_workgroup_combines:
            self.result.combine_splits(self.engine.thread)

    def _row(self, part: int) -> _Row:
        b, work, row_scales = self.b, self.work, self.queries.scales
        number = self.engine.lane_col + part
        scale = work.p.number("scale", f32)
        if self.keys.unit != 1.0:
            scale = scale * (1.0 / self.keys.unit)
        if row_scales is not None:
            scale = scale * b.load(row_scales, b.min(number, self.config.most_rows - 1))
        return _Row(part, number, scale, work.query_row(number))

    def _attend(self, q: list[Value], step: Step, rows: list[_Row], O: list[Var]) -> None:
        """Compute S^T = K Q^T, softmax, and O^T = O^T + V^T P^T of a step."""
        b = self.b
        edge = self.work.at_edge(self.loads.subgroup_start(step.start))
        S = self._scores(q, step, rows)
        keys = self.loads.score_keys(step.start)
        self._modify(S, rows, keys, everywhere=True)
        with b.if_(edge):
            self._modify(S, rows, keys, everywhere=False)
        self._follow_maximum(S, step.scales, rows, O)
        P = self._weigh(S, step.scales, rows)
        if self.config.quantised:
            if self.values.converts:  # the conversion makes NaN of two bytes; all others are finite
                with b.if_(edge):
                    assign(step.v, [without_nan(b, run) for run in values(step.v)])
            self._add_values(O, P, values(step.v))
            return
        nonfinite = b.var(b.const(0, i32), "wild")
        with b.if_(edge):
            found = self._clear_dropped(step)
            # Some rows may drop keys that others keep.
            if self.config.left or self.config.right or self.config.mask_function is not None:
                nonfinite.value = b.select(found, b.const(1, i32), b.const(0, i32))
        with b.if_(b.ne(nonfinite.value, 0)):
            self._add_row_by_row(O, P, step)
        with b.else_():
            self._add_values(O, P, values(step.v))

    # -- scores and weights --------------------------------------------------------------------------------------------

    def _scores(self, q: list[Value], step: Step, rows: list[_Row]) -> Scores:
        b, engine, layout, k, scales = self.b, self.engine, self.keys, step.k, step.scales
        b.comment("S^T = K Q^T")
        keys = len(engine.part_rows)
        S = []
        for i in range(self.shape.blocks):
            runs = [k[(i * keys + a) * layout.pieces : (i * keys + a + 1) * layout.pieces] for a in range(keys)]
            words = [layout.row_words(x) for x in runs]
            total = b.fragment_fill(engine.accumulator, 0.0)
            for number, factor in enumerate(q):
                total = b.fragment_mma(layout.rows_factor(words, number), factor, total)
            block = []
            for a, part in enumerate(engine.part_rows):
                found = [b.fragment_get(total, engine.component(part, row.column)) for row in rows]
                if scales:
                    found = [x * scales[i][a][0] for x in found]
                block.append([b.var(x * row.factor, "s") for x, row in zip(found, rows, strict=True)])
            S.append(block)
        return S

    def _modify(self, S: Scores, rows: list[_Row], keys: list[list[Value]], everywhere: bool) -> None:
        """Apply the modifiers that every score needs, or those that only keys at an edge need."""
        for block, numbers in zip(S, keys, strict=True):
            for scores, key in zip(block, numbers, strict=True):
                for score, row in zip(scores, rows, strict=True):
                    for modifier in row.query.modifiers:
                        if modifier.everywhere == everywhere:
                            score.value = modifier.apply(self.b, score.value, row.query.site(key))

    def _follow_maximum(self, S: Scores, scales: Scales, rows: list[_Row], O: list[Var]) -> None:
        """Let m follow the largest weight of a row, times its value's scale, if it lags too far behind."""
        b = self.b
        exponents = [[scale_exponent(b, v) for _, v in block] for block in scales]
        highest = []  # of this lane's keys alone, until m has to follow
        for r in range(len(rows)):
            found = [
                scores[r].value + exponents[i][a] if exponents else scores[r].value
                for i, block in enumerate(S)
                for a, scores in enumerate(block)
            ]
            highest.append(fold(b, "max", found) - self.room)
        lagging = [high > row.query.softmax.m.value + LAG for high, row in zip(highest, rows, strict=True)]
        with b.if_(b.subgroup_any(fold(b, "or", lagging))):
            for mask in self._key_masks:
                highest = [b.max(x, b.shuffle_xor(x, mask)) for x in highest]
            alphas = {row.column: row.query.softmax.follow(high) for high, row in zip(highest, rows, strict=True)}
            self._rescale(O, alphas)

    def _rescale(self, O: list[Var], alphas: dict[int, Value]) -> None:
        """Multiply the columns of O^T by their rows' alphas."""
        b, engine = self.b, self.engine
        for o in O:
            parts = [b.fragment_get(o.value, i) for i in range(len(engine.places))]
            scaled = [x * alphas[col] if col in alphas else x for x, (_, col) in zip(parts, engine.places, strict=True)]
            o.value = b.fragment_pack(engine.accumulator, scaled)

    def _weigh(self, S: Scores, scales: Scales, rows: list[_Row]) -> list[Value]:
        """P^T as right factors, one for each block; adds the weights to l."""
        b, engine, blocks = self.b, self.engine, self.shape.blocks
        stride = row_stride(SIZE)
        own = engine.subgroup * (self.shape.subgroup_step * stride)
        b.subgroup_barrier()  # the previous step's P has been read
        sums: list[list[Value]] = [[] for _ in rows]
        for i, block in enumerate(S):
            for a, (part, scores) in enumerate(zip(engine.part_rows, block, strict=True)):
                at = own + (engine.lane_row + (i * SIZE + part)) * stride + engine.lane_col
                weights = []
                for s, row, found in zip(scores, rows, sums, strict=True):
                    weight = row.query.softmax.form.weight(s.value, row.query.softmax.m.value)
                    found.append(weight)
                    if scales:  # a dropped key's scale may be NaN
                        weight = b.select(s.value < LOWEST, b.const(0.0, f32), weight * scales[i][a][1])
                    weights.append(weight)
                rounded = engine.rounded(weights, "weights")
                for r in range(0, len(rows), 2):  # `holds_pairs`
                    b.store(self.weights, at + rows[r].column, b.vector(rounded[r : r + 2]))
        for row, found in zip(rows, sums, strict=True):
            row.query.softmax.add(found)
        b.subgroup_barrier()
        return [engine.load_right(self.weights, own, stride, i * SIZE, 0) for i in range(blocks)]

    # -- O^T = O^T + V^T P^T -------------------------------------------------------------------------------------------

    def _add_values(self, O: list[Var], P: list[Value], v: list[Value]) -> None:
        self.b.comment("O^T = O^T + V^T P^T")
        assign(O, self._products(values(O), P, v))

    def _products(self, start: list[Value], P: list[Value], v: list[Value]) -> list[Value]:
        b = self.b
        sums = list(start)
        for factor, pairs in zip(P, self._key_pairs(v), strict=True):
            for u in range(len(sums)):
                sums[u] = b.fragment_mma(self.values.columns_factor(pairs, u), factor, sums[u])
        return sums

    def _key_pairs(self, v: list[Value]) -> list[list[list[Value]]]:
        """V of pairs of keys, by block."""
        keys, pieces = len(self.engine.part_cols), self.values.pieces
        runs = [v[i * pieces : (i + 1) * pieces] for i in range(len(v) // pieces)]
        pairs = [self.values.pair_words(x, y) for x, y in zip(runs[::2], runs[1::2], strict=True)]
        return [pairs[i * keys // 2 : (i + 1) * keys // 2] for i in range(self.shape.blocks)]

    def _clear_dropped(self, step: Step) -> Value:
        """Replace V of keys that no row keeps by zeros; returns whether the rest holds Inf or NaN in any lane."""
        b, work, pieces = self.b, self.work, self.values.pieces
        keys = [key for block in self.loads.value_keys(step.start) for key in block]
        zeros = b.splat(b.const(0, u32), self.values.words)
        found = []
        for i, run in enumerate(step.v):
            key = keys[i // pieces]
            run.value = b.select((key >= work.first_kept) & (key < work.end), run.value, zeros)
            found += [overflowing(b, word, self.engine.elem) for word in b.unpack(run.value)]
        return b.subgroup_any(b.ne(fold(b, "or", found), 0))

    def _add_row_by_row(self, O: list[Var], P: list[Value], step: Step) -> None:
        """Add V if it holds Inf or NaN that some rows keep and others drop; slow.

        Zero times either is NaN, so each row has a product of its own with V of the keys that it keeps.
        """
        b, engine, work, pieces = self.b, self.engine, self.work, self.values.pieces
        keys = [key for block in self.loads.value_keys(step.start) for key in block]
        zeros = b.splat(b.const(0, u32), self.values.words)
        zero = b.fragment_fill(engine.accumulator, 0.0)
        with b.loop(0, self.shape.rows, name="row") as number:
            token, head = work.own_query(number)
            position = work.extent.shift + token
            kept = []
            for i, run in enumerate(step.v):
                key = keys[i // pieces]
                keep = key < work.end
                keep = keep if work.right is None else keep & (key <= position + work.right)
                keep = keep if work.left is None else keep & (key >= position - work.left)
                if self.config.mask_function is not None:
                    keep = keep & keeps(work.p)(Site(work.batch, head, token, key, position))
                kept.append(b.select(keep, run.value, zeros))
            for o, product in zip(O, self._products([zero] * len(O), P, kept), strict=True):
                parts = []
                for i, (_, col) in enumerate(engine.places):
                    mine = b.eq(engine.lane_col + col, number)
                    parts.append(
                        b.fragment_get(o.value, i) + b.select(mine, b.fragment_get(product, i), b.const(0.0, f32))
                    )
                o.value = b.fragment_pack(engine.accumulator, parts)

    # -- results -------------------------------------------------------------------------------------------------------

    def _finish(self, rows: list[_Row], O: list[Var]) -> None:
        """Combine the subgroups' results and store the rows."""
        b, engine, shape, layout = self.b, self.engine, self.shape, self.values
        totals = [row.query.softmax.l.value for row in rows]
        for mask in self._key_masks:
            totals = [x + b.shuffle_xor(x, mask) for x in totals]
        most_rows = self.config.most_rows
        partials = WorkgroupPartials(b, engine.thread, shape.subgroups, most_rows, layout.padded, QUAD)
        unit = 1.0 / layout.unit
        fragments = values(O)
        for row, total in zip(rows, totals, strict=True):
            sums = []
            for fragment in fragments:
                parts = [b.fragment_get(fragment, engine.component(part, row.column)) for part in engine.part_rows]
                sums += parts if unit == 1.0 else [x * unit for x in parts]
            with b.if_(row.number < most_rows):  # a fragment has room for more
                with b.if_(b.eq(engine.lane_row, 0)):
                    partials.store_state(engine.subgroup, row.number, row.query.softmax.m.value, total)
                for piece in range(layout.pieces):
                    part = sums[piece * layout.run : (piece + 1) * layout.run]
                    partials.store_columns(engine.subgroup, row.number, layout.column(piece), part)
        self.result.combine(partials)
