"""The decoding kernel for matrix units: up to 16 query rows of one key head against a sequence's keys.

Both products are made transposed, ``S^T = K Q^T`` and ``O^T = V^T P^T``, so that what comes from memory, K and V, is
always the left factor, whose elements lanes hold in a known way: they read them in runs of 16 bytes and multiply
(`aule.tile.direct`). Nothing of the cache passes through shared memory, and converting bytes is all the arithmetic
that there is for each element. Q is a right factor that stays in registers; P, 16 keys by 16 rows at a time, becomes
one by way of a few hundred bytes of shared memory. With at most eight rows the other half of every fragment is dead:
PTX's compiler leaves its products out.

As in `kernel.py`, each subgroup has its own keys; K of the next step, V of this one and page numbers of the one after
are under way at the same time. Of quantised caches the scales are those of the next step, too, and so is V where a
subgroup takes 32 keys at a time: a step has more to compute there, and meanwhile there would be less under way.

Bytes of quantised caches become fp16 whatever the type of Q. Rows of a bf16 Q are brought into the range of fp16 by
powers of two. A key's scale is multiplied into its scores and a value's into its weights, and the maximum that is
subtracted is that of both, so that the weights of fp16 neither overflow nor vanish.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import SCALARS, Scalar, Vector, f16, f32, i32, i64, u32
from aule.ops.attention import modifiers as mod
from aule.ops.attention.parameters import Parameters
from aule.ops.decode.await_parts import AwaitedParts, PostedParts
from aule.ops.decode.config import FragmentDecodeConfig
from aule.ops.decode.fetch import Fetch, assign, flat, values
from aule.ops.decode.join import Join
from aule.ops.decode.kernel import KERNEL_NAME
from aule.ops.decode.last import add_up
from aule.ops.decode.place import Place
from aule.ops.decode.result import Result
from aule.target import Target
from aule.tile.arrangement import SIZE
from aule.tile.direct import Direct
from aule.tile.fragment import Components
from aule.tile.fragment_shape import row_stride
from aule.tile.math import LOWEST, fold, overflowing
from aule.tile.matrix import QUAD
from aule.tile.quantised import I8_BITS, without_nan

LAG = 8.0
"""How far, in powers of two, the maximum that is subtracted may lag behind."""
ROOM = 6.0
"""How far above 1, in powers of two, the weights of fp16 begin: those far below the largest do not vanish so soon."""
_FAINT = -64
"""Exponent of the smallest scale of a value that the maximum takes into account: sums of weights stay finite."""


def build_decode_fragment(config: FragmentDecodeConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the kernel of a configuration for a target with matrix units."""
    shape = config.shape
    b = Builder(name, shape.threads, shape.lanes, shape.registers, config.cluster, arithmetic="quick")
    kernel = _Decode(b, config, target)
    kernel.begin()
    with b.if_(kernel.place.measure()):
        kernel.run()
    return b.finish()


@dataclass(frozen=True)
class _Row:
    """A query row of which this lane has scores: its place along a fragment's columns beside the lane's, what its
    scores are multiplied by and what else happens to them, and its maximum and sum so far."""

    column: int
    number: Value
    factor: Value
    modifiers: list[mod.Modifier]
    head: Value
    position: Value
    base: Var
    total: Var


Scores = list[list[list[Var]]]
"""By block, key and row, of those that a lane holds."""


class _Decode:
    """The passage of one workgroup over its keys."""

    def __init__(self, b: Builder, config: FragmentDecodeConfig, target: Target) -> None:
        self.b, self.config, self.shape = b, config, config.shape
        shape = config.shape
        self.index: Scalar = i64 if config.index64 else i32
        self.p = Parameters(b, config, self.index)
        self.place = Place(self.p, config, shape.rows, shape.stretch, shape.step)
        self.result = Result(self.place)
        self.engine = engine = Components(b, target, f16 if config.quantised else SCALARS[config.dtype])
        self.keys = Direct(engine, config.head_dim, config.cache, "columns")
        self.values = Direct(engine, config.value_dim, config.cache, "rows")
        if config.cache == "i8" and target.backend == "vulkan":
            # Drivers must not know it: of `and` and `xor` with two constants NVIDIA's makes two instructions, with one
            # constant and a register one.
            known = b.const(I8_BITS, u32)
            hidden = b.select(self.p.number("heads_kv") > 0, known, b.const(0, u32))
            self.keys.i8_bits = self.values.i8_bits = hidden
        self.room = ROOM if config.quantised else 0.0
        # Lanes that have scores of the same rows, of other keys, differ in these bits.
        self._down = [1 << i for i, weight in enumerate(engine.layout.lane_rows) if weight]
        self.weights = b.shared("weights", engine.elem, shape.step * row_stride(SIZE))
        self.fetch = Fetch(self.place, engine, self.keys, self.values, shape)

    # -- the passage -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Where it is known which keys come first, they do not wait for the sequence's length: others do no harm. Nor
        do queries and first values, if the plan says so."""
        b, fetch, config = self.b, self.fetch, self.config
        self._k = [b.var(b.splat(b.const(0, u32), self.keys.words), "k") for _ in range(fetch.key_runs)]
        self._ahead = config.quantised and self.shape.ahead
        runs = fetch.value_runs if self._ahead else 0
        self._v = [b.var(b.splat(b.const(0, u32), self.values.words), "v") for _ in range(runs)]
        self._here, self._scales = fetch.page_variables(), fetch.scale_variables()
        self._early = None
        if config.early:
            self.place.expect_rows()
            if config.direct:
                self._query_words = self._read_words()
            else:
                self._early = [self._read_query(row) for row in self._query_rows()]
        self._values_come = config.early and not config.left
        if config.brief:  # of which every part has keys, so that no condition is in the way
            start, end = self.place.begin, self.p.number("seq_kv")
            assign(self._here, fetch.pages(start, end))
            here = values(self._here)
            self._only = (
                fetch.load_keys(start, here, end), fetch.scales(start, here, end), fetch.load_values(start, here, end)
            )  # fmt: skip
        elif not config.left:
            self._load_first(self.place.begin, self.p.number("seq_kv"), self._values_come)

    def _load_first(self, start: Value, end: Value, with_values: bool) -> None:
        b, fetch = self.b, self.fetch
        with b.if_(start < end):
            assign(self._here, fetch.pages(start, end))
            here = values(self._here)
            assign(self._k, fetch.load_keys(start, here, end))
            if with_values:
                assign(self._scales, flat(fetch.scales(start, here, end)))
            if with_values and self._ahead:
                assign(self._v, fetch.load_values(start, here, end))

    def run(self) -> None:
        b, shape, place, fetch, config = self.b, self.shape, self.place, self.fetch, self.config
        k, v, here, ahead, scales = self._k, self._v, self._here, fetch.page_variables(), self._scales
        if config.brief:
            self._run_once()
            return
        if config.left:
            self._load_first(place.first, place.end, with_values=False)
        with b.if_(place.first < place.end):
            if not self._values_come:
                assign(scales, flat(fetch.scales(place.first, values(here))))
            assign(ahead, fetch.pages(place.first + place.stride))
        q, rows = self._queries()
        if self._ahead and not self._values_come:
            with b.if_(place.first < place.end):
                assign(v, fetch.load_values(place.first, values(here)))
        zero = b.fragment_fill(self.engine.accumulator, 0.0)
        O = [b.var(zero, "o") for _ in range(self.values.fragments)]

        with b.loop(place.first, place.end, place.stride, name="key") as start:
            later = start + place.stride
            found = values(v) if self._ahead else fetch.load_values(start, values(here))
            current_k, current_v = values(k), [b.var(run, "v") for run in found]
            current_scales = fetch.by_block(values(scales))
            # The condition also keeps the loads here: without it ptxas puts those of bytes behind the first product,
            # into the registers that this frees, and V is waited for.
            with b.if_(later < place.end):
                assign(k, fetch.load_keys(later, values(ahead)))
                assign(scales, flat(fetch.scales(later, values(ahead))))
                if self._ahead:
                    assign(v, fetch.load_values(later, values(ahead)))
                assign(here, values(ahead))
                assign(ahead, fetch.pages(later + place.stride))
            self._step(q, current_k, current_v, current_scales, rows, O, start)
        if config.followed:
            b.launch_next()
        self._finish(rows, O)
        if config.gather:
            add_up(self.result, shape.rows, self.engine.thread, shape.threads)

    def _run_once(self) -> None:
        """The same where a part has one step at most, which was loaded at the beginning."""
        b, place, (k, scales, v) = self.b, self.place, self._only
        q, rows = self._queries()
        zero = b.fragment_fill(self.engine.accumulator, 0.0)
        O = [b.var(zero, "o") for _ in range(self.values.fragments)]
        with b.if_(place.first < place.end):
            self._step(q, k, [b.var(run, "v") for run in v], scales, rows, O, place.first)
        self._finish(rows, O)

    def _queries(self) -> tuple[list[Value], list[_Row]]:
        """Q as right factors, along columns in the order in which lanes hold those of K; and this lane's rows."""
        b, engine, shape = self.b, self.engine, self.shape
        if self.config.direct:
            return self._direct_queries()
        stride = row_stride(self.keys.padded)
        memory = b.shared("queries", engine.elem, SIZE * stride)
        narrow = self.config.quantised and self.config.dtype == "bf16"
        held = self.config.held
        factors = b.shared("factors", f32, held) if narrow else None
        # The others are multiplied, too; while what was loaded is under way there is time for that.
        self._clear(memory, held * stride, (SIZE - held) * stride, engine.thread, shape.threads)
        if shape.rows < SIZE:
            self._clear(self.weights, 0, shape.step * row_stride(SIZE), engine.thread, shape.threads)
        for i, row in enumerate(self._query_rows()):
            with b.if_(row < held) if shape.subgroups > held else nullcontext():
                found = self._read_query(row) if self._early is None else self._early[i]
                self._leave_query(row, found, memory, stride, factors)
        b.barrier()
        depth = range(self.keys.fragments)
        start = b.const(0, i32)
        q = [engine.load_right(memory, start, stride, k * SIZE, 0, transposed=True) for k in depth]
        # Those that no lane has are left out.
        return q, [self._row(part, factors) for part in engine.part_cols if part < shape.rows]

    def _read_words(self) -> dict[int, list[Value]]:
        """Of the rows of Q of which this lane holds elements, by their place beside the lane's."""
        b, place, way = self.b, self.place, self.keys
        found = {}
        for part in self.engine.part_rows:
            if part < self.shape.rows:
                start = place.row_start("q", place.q, *place.existing(self.engine.lane_row + part))
                runs = [b.load(place.q.buffer, start + way.column(piece), way.run) for piece in range(way.pieces)]
                found[part] = way.row_words([b.bitcast(run, Vector(u32, way.words)) for run in runs])
        return found

    def _direct_queries(self) -> tuple[list[Value], list[_Row]]:
        """The same without shared memory: lanes read what they hold of right factors, as they do of K."""
        shape, way = self.shape, self.keys
        if shape.rows < SIZE:
            own = shape.stretch * row_stride(SIZE)
            self._clear(self.weights, self.engine.subgroup * own, own, self.engine.lane, shape.lanes)
        q = [way.right_factor(self._query_words, number) for number in range(way.fragments)]
        return q, [self._row(part, None) for part in self.engine.part_cols if part < shape.rows]

    def _clear(self, memory: Value, begin: Value | int, size: int, thread: Value, threads: int) -> None:
        """Zeros in shared memory, by some threads."""
        b, at_once = self.b, threads * QUAD
        nothing = b.splat(b.const(0, self.engine.elem), QUAD)
        for first in range(0, size, at_once):
            at = thread * QUAD + first
            with b.if_(at < size) if first + at_once > size else nullcontext():
                b.store(memory, at + begin, nothing)

    def _query_rows(self) -> list[Value]:
        """The rows of Q that this subgroup brings; the last one may be beyond those that there can be."""
        return [self.engine.subgroup + first for first in range(0, self.config.held, self.shape.subgroups)]

    def _query_columns(self) -> list[Value]:
        return [self.engine.lane + i for i in range(0, self.keys.padded, self.shape.lanes)]

    def _read_query(self, row: Value) -> list[Value]:
        """This lane's elements of a row of Q."""
        b, place, dim = self.b, self.place, self.keys.padded
        start = place.row_start("q", place.q, *place.existing(row))
        inside = [b.min(column, dim - 1) if dim % self.shape.lanes else column for column in self._query_columns()]
        return [place.q.load_quad(b, start, self.keys.source(column), dim, 1) for column in inside]

    def _leave_query(self, row: Value, found: list[Value], memory: Value, stride: int, factors: Value | None) -> None:
        """A row of Q into shared memory."""
        b, engine, dim, lanes = self.b, self.engine, self.keys.padded, self.shape.lanes
        if factors is not None:
            found, factor = self._narrowed([b.cast(x, f32) for x in found])
            with b.if_(b.eq(engine.lane, 0)):
                b.store(factors, row, factor)
        for i, (column, x) in enumerate(zip(self._query_columns(), found, strict=True)):
            if (i + 1) * lanes <= dim:
                b.store(memory, row * stride + column, x)
            else:
                with b.if_(column < dim):
                    b.store(memory, row * stride + column, x)

    def _row(self, part: int, factors: Value | None) -> _Row:
        b, place = self.b, self.place
        number = self.engine.lane_col + part
        scale = self.p.number("scale", f32)
        if self.keys.unit != 1.0:
            scale = scale * (1.0 / self.keys.unit)
        if factors is not None:
            scale = scale * b.load(factors, b.min(number, self.config.held - 1))
        token, head = place.existing(number)
        base, total = b.var(b.const(LOWEST, f32), "m"), b.var(b.const(0.0, f32), "l")
        return _Row(part, number, scale, place.modifiers(head), head, place.extent.shift + token, base, total)

    def _narrowed(self, found: list[Value]) -> tuple[list[Value], Value]:
        """A row of Q, of which this subgroup holds the elements, as fp16 below 2; and the power of two to be made up
        for. What is lost is less than 2^-24 of its largest element."""
        b = self.b
        largest = b.subgroup_reduce("max", fold(b, "max", [b.abs(x) for x in found]))
        exponent = b.min(b.max(b.bitcast(largest, u32) >> 23, 1), 253)
        down = b.bitcast((254 - exponent) << 23, f32)
        return [b.cast(x * down, f16) for x in found], b.bitcast(exponent << 23, f32)

    def _step(
        self, q: list[Value], k: list[Value], v: list[Var], scales: list[list[tuple[Value, Value]]], rows: list[_Row],
        O: list[Var], start: Value,
    ) -> None:  # fmt: skip
        """One step: S^T = K Q^T, softmax, O^T = O^T + V^T P^T."""
        b, shape, place = self.b, self.shape, self.place
        at = self.fetch.at(start)
        edge = (at < place.full_first) | (at + shape.stretch > place.full_end)
        S = self._scores(q, k, scales, rows)
        keys = self.fetch.down_keys(start)
        self._modify(S, rows, keys, everywhere=True)
        with b.if_(edge):
            self._modify(S, rows, keys, everywhere=False)
        self._follow_maximum(S, scales, rows, O)
        P = self._weigh(S, scales, rows)
        if self.config.quantised:
            if self.values.converts:  # which makes NaN of two bytes; others are all finite
                with b.if_(edge):
                    assign(v, [without_nan(b, run) for run in values(v)])
            self._add_values(O, P, values(v))
            return
        wild = b.var(b.const(0, i32), "wild")
        with b.if_(edge):
            found = self._clear_dropped(v, start)
            if self.config.left or self.config.right:  # of which some rows may drop what others keep
                wild.value = b.select(found, b.const(1, i32), b.const(0, i32))
        with b.if_(b.ne(wild.value, 0)):
            self._add_row_by_row(O, P, v, rows, start)
        with b.else_():
            self._add_values(O, P, values(v))

    def _scores(
        self, q: list[Value], k: list[Value], scales: list[list[tuple[Value, Value]]], rows: list[_Row]
    ) -> Scores:
        b, engine, way = self.b, self.engine, self.keys
        b.comment("S^T = K Q^T")
        held = len(engine.part_rows)
        S = []
        for i in range(self.shape.blocks):
            runs = [k[(i * held + a) * way.pieces : (i * held + a + 1) * way.pieces] for a in range(held)]
            words = [way.row_words(x) for x in runs]
            total = b.fragment_fill(engine.accumulator, 0.0)
            for number, factor in enumerate(q):
                total = b.fragment_mma(way.rows_factor(words, number), factor, total)
            block = []
            for a, part in enumerate(engine.part_rows):
                found = [b.fragment_get(total, engine.component(part, row.column)) for row in rows]
                if scales:
                    found = [x * scales[i][a][0] for x in found]
                block.append([b.var(x * row.factor, "s") for x, row in zip(found, rows, strict=True)])
            S.append(block)
        return S

    def _modify(self, S: Scores, rows: list[_Row], keys: list[list[Value]], everywhere: bool) -> None:
        """Apply the modifiers that every score needs, or those that only keys at an edge do."""
        for block, numbers in zip(S, keys, strict=True):
            for scores, key in zip(block, numbers, strict=True):
                for score, row in zip(scores, rows, strict=True):
                    site = mod.Site(self.place.batch, row.head, row.position, key, row.position)
                    for modifier in row.modifiers:
                        if modifier.everywhere == everywhere:
                            score.value = modifier.apply(self.b, score.value, site)

    def _follow_maximum(
        self, S: Scores, scales: list[list[tuple[Value, Value]]], rows: list[_Row], O: list[Var]
    ) -> None:
        """Where the largest weight of a row has grown by too much, the base follows it, and what was summed up
        shrinks."""
        b, engine = self.b, self.engine
        # Powers of two are near enough, and 0 and subnormals count as the smallest.
        sizes = [
            [b.cast(b.max(b.cast(b.bitcast(v, u32) >> 23, i32) - 127, _FAINT), f32) for _, v in block]
            for block in scales
        ]
        highest = []  # of this lane's keys alone until it matters
        for r in range(len(rows)):
            found = [
                scores[r].value + sizes[i][a] if sizes else scores[r].value
                for i, block in enumerate(S)
                for a, scores in enumerate(block)
            ]
            highest.append(fold(b, "max", found) - self.room)
        if self.config.brief:  # nothing was summed up yet
            for mask in self._down:
                highest = [b.max(x, b.shuffle_xor(x, mask)) for x in highest]
            for high, row in zip(highest, rows, strict=True):
                row.base.value = b.max(row.base.value, high)
            return
        grown = [high > row.base.value + LAG for high, row in zip(highest, rows, strict=True)]
        with b.if_(b.subgroup_any(fold(b, "or", grown))):
            for mask in self._down:
                highest = [b.max(x, b.shuffle_xor(x, mask)) for x in highest]
            factors = {}
            for high, row in zip(highest, rows, strict=True):
                new = b.max(row.base.value, high)
                factors[row.column] = b.exp2(row.base.value - new)
                row.base.value = new
                row.total.value = row.total.value * factors[row.column]
            for o in O:
                parts = [b.fragment_get(o.value, i) for i in range(len(engine.places))]
                scaled = [
                    x * factors[col] if col in factors else x for x, (_, col) in zip(parts, engine.places, strict=True)
                ]
                o.value = b.fragment_pack(engine.accumulator, scaled)

    def _weigh(self, S: Scores, scales: list[list[tuple[Value, Value]]], rows: list[_Row]) -> list[Value]:
        """P^T as right factors, one for each block; the sums of its rows go into their totals."""
        b, engine, blocks = self.b, self.engine, self.shape.blocks
        stride = row_stride(SIZE)
        own = engine.subgroup * (self.shape.stretch * stride)
        b.subgroup_barrier()  # what was there has been read
        sums: list[list[Value]] = [[] for _ in rows]
        for i, block in enumerate(S):
            for a, (part, scores) in enumerate(zip(engine.part_rows, block, strict=True)):
                at = own + (engine.lane_row + (i * SIZE + part)) * stride + engine.lane_col
                weights = []
                for s, row, found in zip(scores, rows, sums, strict=True):
                    weight = b.exp2(s.value - row.base.value)
                    found.append(weight)
                    if scales:  # what belongs to dropped keys may be NaN
                        weight = b.select(s.value < LOWEST, b.const(0.0, f32), weight * scales[i][a][1])
                    weights.append(weight)
                rounded = engine.rounded(weights, "weights")
                for r in range(0, len(rows), 2):  # `holds_pairs`
                    b.store(self.weights, at + rows[r].column, b.vector(rounded[r : r + 2]))
        for row, found in zip(rows, sums, strict=True):
            row.total.value = row.total.value + fold(b, "add", found)
        b.subgroup_barrier()
        return [engine.load_right(self.weights, own, stride, i * SIZE, 0) for i in range(blocks)]

    # -- the product with V ----------------------------------------------------------------------------------------

    def _pairs(self, v: list[Value]) -> list[list[list[Value]]]:
        """V of two keys each, by block."""
        held, pieces = len(self.engine.part_cols), self.values.pieces
        runs = [v[i * pieces : (i + 1) * pieces] for i in range(len(v) // pieces)]
        pairs = [self.values.pair_words(x, y) for x, y in zip(runs[::2], runs[1::2], strict=True)]
        return [pairs[i * held // 2 : (i + 1) * held // 2] for i in range(self.shape.blocks)]

    def _products(self, start: list[Value], P: list[Value], v: list[Value]) -> list[Value]:
        b = self.b
        sums = list(start)
        for factor, pairs in zip(P, self._pairs(v), strict=True):
            for u in range(len(sums)):
                sums[u] = b.fragment_mma(self.values.columns_factor(pairs, u), factor, sums[u])
        return sums

    def _add_values(self, O: list[Var], P: list[Value], v: list[Value]) -> None:
        self.b.comment("O^T = O^T + V^T P^T")
        assign(O, self._products(values(O), P, v))

    def _clear_dropped(self, v: list[Var], start: Value) -> Value:
        """Zeros in place of V of keys that no row keeps, which may be anything; returns whether the rest has Inf or
        NaN in some lane."""
        b, place, pieces = self.b, self.place, self.values.pieces
        keys = [key for block in self.fetch.across_keys(start) for key in block]
        nothing = b.splat(b.const(0, u32), self.values.words)
        found = []
        for i, run in enumerate(v):
            key = keys[i // pieces]
            run.value = b.select((key >= place.kept) & (key < place.end), run.value, nothing)
            found += [overflowing(b, word, self.engine.elem) for word in b.unpack(run.value)]
        return b.subgroup_any(b.ne(fold(b, "or", found), 0))

    def _add_row_by_row(self, O: list[Var], P: list[Value], v: list[Var], rows: list[_Row], start: Value) -> None:
        """The same where V has Inf or NaN that some rows keep and others do not: 0 times either is NaN, so each row has
        a product of its own, of the keys that it keeps. Slow."""
        b, engine, place, pieces = self.b, self.engine, self.place, self.values.pieces
        keys = [key for block in self.fetch.across_keys(start) for key in block]
        nothing = b.splat(b.const(0, u32), self.values.words)
        zero = b.fragment_fill(engine.accumulator, 0.0)
        with b.loop(0, self.shape.rows, name="row") as number:
            position = place.extent.shift + place.existing(number)[0]
            kept = []
            for i, run in enumerate(v):
                key = keys[i // pieces]
                keep = key < place.end
                keep = keep if place.right is None else keep & (key <= position + place.right)
                keep = keep if place.left is None else keep & (key >= position - place.left)
                kept.append(b.select(keep, run.value, nothing))
            for o, product in zip(O, self._products([zero] * len(O), P, kept), strict=True):
                parts = []
                for i, (_, col) in enumerate(engine.places):
                    mine = b.eq(engine.lane_col + col, number)
                    parts.append(
                        b.fragment_get(o.value, i) + b.select(mine, b.fragment_get(product, i), b.const(0.0, f32))
                    )
                o.value = b.fragment_pack(engine.accumulator, parts)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _finish(self, rows: list[_Row], O: list[Var]) -> None:
        b, engine, shape, way = self.b, self.engine, self.shape, self.values
        totals = [row.total.value for row in rows]
        for mask in self._down:
            totals = [x + b.shuffle_xor(x, mask) for x in totals]
        held, posted = self.config.held, None
        if self.config.trailed:
            posted = PostedParts(self.result, held * way.padded)
        elif self.config.awaits:
            posted = AwaitedParts(self.result, held * way.padded, engine.thread, shape.threads, shape.lanes)
        join = Join(self.result, shape.subgroups, held, way.padded, posted)
        unit = 1.0 / way.unit
        fragments = values(O)
        for row, total in zip(rows, totals, strict=True):
            sums = []
            for fragment in fragments:
                parts = [b.fragment_get(fragment, engine.component(part, row.column)) for part in engine.part_rows]
                sums += parts if unit == 1.0 else [x * unit for x in parts]
            with b.if_(row.number < held):  # a fragment has room for more
                with b.if_(b.eq(engine.lane_row, 0)):
                    join.leave(engine.subgroup, row.number, row.base.value, total)
                for piece in range(way.pieces):
                    part = sums[piece * way.run : (piece + 1) * way.run]
                    join.leave_sums(engine.subgroup, row.number, way.column(piece), part)
        join.finish(engine.thread, shape.threads, QUAD)
