"""Decoding of latents on matrix units: the values are the first columns of the keys.

A tile of keys lies in shared memory and is the right factor of both products, so that it is read once. The rows of a
workgroup are query heads and tokens of one sequence (`WorkRange`). For each tile

1. subgroups compute the scores. They divide the depth of the product, whose columns of Q stay in their registers, then
   the rows, then the keys, and store their sums in shared memory;
2. a few neighbouring lanes share each row. They add up its scores, apply modifiers and softmax, and leave P in shared
   memory, with the factor by which the row of O is to be rescaled;
3. subgroups divide the columns of O, of which each has all rows in registers, and add ``P V``.

Shared memory thus holds everything that subgroups exchange, in plain rows, and nothing depends on how the lanes of a
device hold a matrix. The next tile is copied meanwhile. A page number, which the copy of a key waits for, is looked up
two tiles ahead.

Bytes of a quantised cache become numbers of Q's type, exactly, on their way to shared memory. A key's scale multiplies
its scores and a value's its weights; m is the maximum of both, as in `fragment.kernel`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import Vector, f32, i32, u32
from aule.ops.decode.config import LatentConfig, LatentShape
from aule.ops.decode.fragment.kernel import ROOM, scale_exponent
from aule.ops.decode.result import Result
from aule.ops.decode.simt.kernel import KERNEL_NAME
from aule.ops.decode.work_range import QueryRow, WorkRange
from aule.ops.softmax.online_softmax import LAG, follow
from aule.target import Target
from aule.tile.common.math import LOWEST, fold, is_finite
from aule.tile.common.matrix import QUAD, Matrix, divmod_const, padded
from aule.tile.common.quantised import E4M3_HALF, floats
from aule.tile.fragment.arrangement import SIZE
from aule.tile.fragment.engine import Fragments, FragmentTile, fitted
from aule.tile.fragment.nonfinite import check_finite, sorted_out
from aule.tile.fragment.shape import RUN, FragmentShape, row_stride
from aule.tile.fragment.transfer import Mover, Transfer, transfer_by_rows

_SCORES_AT_ONCE = 512
"""Scores of a subgroup that are computed together: enough products that do not wait for each other."""


def build_latent(config: LatentConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the kernel of a configuration for a target with matrix units."""
    shape = config.shape
    b = Builder(name, shape.threads, shape.lanes, shape.registers, arithmetic="quick")
    kernel = _Latent(b, config, target)
    with b.if_(kernel.work.find_length()):
        kernel.run()
    return b.finish()


@dataclass(frozen=True)
class _QueryRows(Matrix):
    """The workgroup's rows of Q."""

    work: WorkRange

    def row_start(self, b: Builder, row: Value) -> Value:
        return self.work.row_start("q", self, *self.work.own_query(row))


class _Bytes:
    """Threads that move the bytes of a quantised cache and convert them, e4m3 to the numbers times ``unit``."""

    def __init__(self, engine: Fragments, cache: str, f16: bool) -> None:
        self.b, self.elem, self.shape, self.thread = engine.b, engine.elem, engine.shape, engine.thread
        self._cache, self._halves = cache, cache == "e4m3" and f16
        self.unit = E4M3_HALF if self._halves else 1.0

    def incoming(self, run: Value) -> Value:
        b = self.b
        words = b.unpack(b.bitcast(run, Vector(u32, RUN // 4)))
        return b.cast(b.vector([x for word in words for x in floats(b, word, self._cache, self._halves)]), self.elem)


class _Places:
    """Where the keys of two tiles begin in the pool, in shared memory. One thread looks up each key."""

    def __init__(self, work: WorkRange, shape: LatentShape, thread: Value) -> None:
        self.work, self.b, self.keys, self.thread = work, work.b, shape.keys, thread
        self._memory = self.b.shared("places", work.index, 2 * shape.keys)
        self._found = self.b.var(self.b.const(0, work.index), "place")
        self.turn = self.b.var(self.b.const(0, i32), "turn")
        """Which of the two tiles is read."""

    def look_up(self, start: Value) -> None:
        """Look up the keys of a tile; those past the end are replaced by the last."""
        key = [self.b.min(start + self.thread, self.work.end - 1)]
        with self._if_own():
            self._found.value = self.work.key_starts("k", key, self.work.page_numbers(key))[0]

    def put(self, turn: Value) -> None:
        """Store what was looked up; a barrier makes it visible."""
        with self._if_own():
            self.b.store(self._memory, turn * self.keys + self.thread, self._found.value)

    def of(self, key: Value) -> Value:
        """Where a key of the tile in ``turn`` begins. Tiles begin at multiples of their size."""
        return self.b.load(self._memory, self.turn.value * self.keys + (key & (self.keys - 1)))

    def _if_own(self) -> AbstractContextManager[None]:
        return self.b.if_(self.thread < self.keys)


@dataclass(frozen=True)
class _PlacedKeys(Matrix):
    """Keys whose places were looked up."""

    places: _Places

    @property
    def even(self) -> bool:
        return False

    def row_start(self, b: Builder, row: Value) -> Value:
        return self.base + self.places.of(row)


class _Latent:
    """The kernel while it is traced."""

    def __init__(self, b: Builder, config: LatentConfig, target: Target) -> None:
        self.b, self.config, self.shape = b, config, config.shape
        shape, dims = config.shape, (config.head_dim, config.value_dim)
        self.work = WorkRange(b, config)
        self.result = Result(self.work)
        tiles = FragmentShape(
            shape.rows, shape.keys, shape.subgroups, shape.stages, True, shape.registers, columns=shape.subgroups
        )
        engine = self.engine = Fragments(b, target, fitted(tiles, target), config.dtype)
        self.bytes = _Bytes(engine, config.cache, target.f16) if config.quantised else None
        self.width = shape.width(*dims)
        self.stride, self.weight_stride = row_stride(self.width), row_stride(shape.keys)
        self.memory = b.shared("tiles", engine.elem, shape.tile_elements(*dims))
        self.scores = b.shared("scores", f32, shape.depth_parts * shape.rows * shape.score_stride)
        self.weights = b.shared("weights", engine.elem, shape.rows * self.weight_stride)
        self.factors = b.shared("factors", f32, 2 * shape.rows)
        """Factors by which the rows of O are multiplied before a tile, and at the end."""
        # What this subgroup computes of the scores, and of O.
        rest, depth = divmod_const(b, engine.subgroup, shape.depth_parts)
        key_part, row_part = divmod_const(b, rest, shape.row_parts)
        self.depth = padded(config.head_dim, SIZE * shape.depth_parts) // shape.depth_parts
        self.columns = padded(config.value_dim, SIZE * shape.subgroups) // shape.subgroups
        self.score_rows, self.score_keys = shape.rows // shape.row_parts, shape.keys // shape.key_parts
        self.first_depth, self.first_column = depth * self.depth, engine.subgroup * self.columns
        self.first_row, self.first_key = row_part * self.score_rows, key_part * self.score_keys
        self.own_scores = (depth * shape.rows + self.first_row) * shape.score_stride + self.first_key
        # The row whose softmax this lane shares with its neighbours.
        assert shape.possible, shape
        self.row, self.lane = divmod_const(b, engine.subgroup * shape.lanes + engine.lane, shape.row_lanes)

    # -- the loop over keys --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Pass over the workgroup's keys and store its rows."""
        b, work = self.b, self.work
        self.places = None if work.pages is None else _Places(work, self.shape, self.engine.thread)
        mover = self.engine if self.bytes is None else self.bytes
        self.keys = self._transfer(mover, self._key_matrix(), self.shape.keys)
        row = work.query_row(self.row)
        O = self.engine.tile(self.shape.rows, self.columns)
        with b.if_(work.first < work.end):
            self._find_first()
        q = self._load_q()
        self.keys.clear_padding(b.const(0, i32), self.shape.stages)
        with b.if_(work.first < work.end):
            self.keys.start(work.first, b.const(0, i32))
            self._find_next(work.first - work.stride, b.const(1, i32))
        turn = b.var(b.const(0, i32), "turn")
        with b.loop(work.first, work.end, work.stride, name="key") as start:
            self._attend(start, turn.value, q, row, O)
            turn.value = turn.value ^ 1
        if self.config.next_launch_overlaps:
            b.launch_next()
        self._finish(row, O)

    def _transfer(self, mover: Mover, source: Matrix, rows: int) -> Transfer:
        return transfer_by_rows(mover, source, rows, self.memory, self.engine.copies, self.width)

    def _key_matrix(self) -> Matrix:
        keys = replace(self.work.k, rows=self.work.end)
        return keys if self.places is None else _PlacedKeys(**vars(keys), places=self.places)

    def _find_first(self) -> None:
        """Find the places of the first tile's keys; a barrier follows. Looks up those of the second."""
        if self.places is not None:
            self.places.look_up(self.work.first)
            self.places.put(self.b.const(0, i32))
            self.places.look_up(self.work.first + self.work.stride)

    def _find_next(self, start: Value, turn: Value) -> None:
        """Store the places of the tile after the next of that at ``start``, and look up those of the one after it."""
        if self.places is not None:
            self.places.put(turn)
            self.places.look_up(start + self.work.stride * 3)

    def _load_q(self) -> list[list[Value]]:
        """This subgroup's columns of its rows of Q as left factors; they pass through the memory of tiles."""
        b, work, engine = self.b, self.work, self.engine
        source = _QueryRows(**vars(replace(work.q, rows=work.rows - work.row0)), work=work)
        transfer = self._transfer(engine, source, self.shape.rows)
        zero = b.const(0, i32)
        transfer.clear_padding(zero, 1)
        transfer.start(zero, zero)
        transfer.finish(zero)
        b.barrier()
        own = self.first_row * self.stride + self.first_depth
        rows = range(0, self.score_rows, engine.arrangement.height)
        q = [
            [engine.load_left(self.memory, own, self.stride, row, col) for row in rows]
            for col in range(0, self.depth, SIZE)
        ]
        b.barrier()  # everyone has read it: the memory is free again
        return q

    def _attend(self, start: Value, turn: Value, q: list[list[Value]], row: QueryRow, O: FragmentTile) -> None:
        """Attend to the tile of keys at ``start``."""
        b, work, shape, keys = self.b, self.work, self.shape, self.keys
        edge = work.at_edge(start)
        at = turn * (shape.keys * self.stride) if shape.stages > 1 else b.const(0, i32)
        following = b.const(0, i32) if shape.stages == 1 else (turn ^ 1) * (shape.keys * self.stride)
        keys.finish(at)
        nonfinite = self._await_keys(at, edge)
        waits = shape.stages == 1 and keys.direct  # no memory to copy to meanwhile
        if not waits:
            self._start_next(start, turn, following)
        scales = self._scales(start)
        self._compute_scores(q, at)
        b.barrier()
        rescaled = self._weigh(start, row, edge, scales)
        with b.if_(b.workgroup_any(rescaled)):
            alphas = self._row_factors(0)
            O.map(lambda x, r, c: x * alphas[r])
        self._add_values(O, at, nonfinite)
        self._find_next(start, turn)
        if shape.stages == 1:
            b.barrier()
        if waits:
            self._start_next(start, turn, following)

    def _await_keys(self, at: Value, edge: Value) -> Value:
        """Wait for all threads' share of a tile. Returns whether an edge tile holds Inf or NaN, which a weight of zero
        would not hide."""
        b, found = self.b, self.b.var(self.b.const(0, u32), "found")
        with b.if_(edge):
            self.keys.own_runs(at, lambda run: check_finite(b, self.engine.elem, run, found))
        return b.workgroup_any(b.ne(found.value, 0))

    def _start_next(self, start: Value, turn: Value, to: Value) -> None:
        """Begin to copy the tile after the one at ``start``."""
        later = start + self.work.stride
        with self.b.if_(later < self.work.end):
            if self.places is not None:
                self.places.turn.value = turn ^ 1
            self.keys.start(later, to)

    # -- scores --------------------------------------------------------------------------------------------------------

    def _compute_scores(self, q: list[list[Value]], at: Value) -> None:
        """Compute this subgroup's part of S = Q K^T and store it."""
        b, engine, width = self.b, self.engine, self.engine.arrangement.width
        b.comment("S = Q K^T")
        together = max(SIZE, min(self.score_keys, _SCORES_AT_ONCE // self.score_rows))
        at = at + self.first_key * self.stride + self.first_depth
        for first in range(0, self.score_keys, together):
            S = engine.tile(self.score_rows, together)

            def keys(k: int, j: int, first: int = first) -> Value:
                return engine.load_right(self.memory, at, self.stride, k * SIZE, first + j * width, transposed=True)

            engine.multiply(S, lambda k: q[k], keys, len(q))
            for r, values in enumerate(S.values()):
                line = self.own_scores + S.row(r) * self.shape.score_stride
                for c in range(0, len(values), engine.run):
                    b.store(self.scores, line + (S.col(c) + first), b.vector(values[c : c + engine.run]))

    def _own_columns(self) -> tuple[list[Value], int]:
        """Columns of a tile whose scores this lane has, by the first of each run, and the length of the runs."""
        shape = self.shape
        width = min(QUAD, shape.keys // shape.row_lanes)
        return [self.lane * width + i for i in range(0, shape.keys, shape.row_lanes * width)], width

    def _scales(self, start: Value) -> list[tuple[Value, Value]]:
        """Scales of K and V of the keys whose scores this lane has; none unless quantised."""
        if self.bytes is None:
            return []
        b, work, (columns, width), unit = self.b, self.work, self._own_columns(), 1.0 / self.bytes.unit
        keys = [b.min(start + column + i, work.end - 1) for column in columns for i in range(width)]
        return [(k * unit, v * unit) for k, v in work.scales(keys, work.page_numbers(keys))]

    def _weigh(self, start: Value, row: QueryRow, edge: Value, scales: list[tuple[Value, Value]]) -> Value:
        """Make P of this lane's share of its row; returns whether the row of O is to be rescaled."""
        b, engine, shape, (columns, width) = self.b, self.engine, self.shape, self._own_columns()
        b.comment("online softmax: P = exp2(S - m), l = l + sum P")
        scale = self.work.p.number("scale", f32)
        S: list[Var] = []
        for column in columns:
            own = self.row * shape.score_stride + column
            parts = [
                b.unpack(b.load(self.scores, own + i * shape.rows * shape.score_stride, width))
                for i in range(shape.depth_parts)
            ]
            for x in zip(*parts, strict=True):
                factor = scale * scales[len(S)][0] if scales else scale
                S.append(b.var(fold(b, "add", list(x)) * factor, "s"))
        numbers = [start + column + i for column in columns for i in range(width)]
        self._modify(S, numbers, row, everywhere=True)
        with b.if_(edge):
            self._modify(S, numbers, row, everywhere=False)
        scores = [s.value for s in S]
        alpha = b.var(b.const(1.0, f32), "alpha")
        rescaled = b.var(b.const(0, i32), "rescaled")

        def rescale(alphas: list[Value]) -> None:
            alpha.value, rescaled.value = alphas[0], b.const(1, i32)

        sizes = [s + scale_exponent(b, v) for s, (_, v) in zip(scores, scales, strict=True)] if scales else scores
        highest = fold(b, "max", list(sizes))
        follow(self, [row.softmax], [highest - ROOM if scales else highest], LAG, rescale)
        weights = row.softmax.weigh(scores)
        if scales:  # a dropped key's scale may be NaN
            weights = [
                b.select(s < LOWEST, b.const(0.0, f32), weight * v)
                for weight, s, (_, v) in zip(weights, scores, scales, strict=True)
            ]
        weights = engine.rounded(weights, "weights")
        for i, column in enumerate(columns):
            at = self.row * self.weight_stride + column
            b.store(self.weights, at, b.vector(weights[i * width : (i + 1) * width]))
        with b.if_(b.eq(self.lane, 0)):
            b.store(self.factors, self.row, alpha.value)
        return b.ne(rescaled.value, 0)

    def _modify(self, S: list[Var], keys: list[Value], row: QueryRow, everywhere: bool) -> None:
        """Apply the modifiers that every score needs, or those that only keys at an edge need."""
        for score, key in zip(S, keys, strict=True):
            for modifier in row.modifiers:
                if modifier.everywhere == everywhere:
                    score.value = modifier.apply(self.b, score.value, row.site(key))

    def any_of_rows(self, condition: Value) -> Value:
        """As `RowEngine` has it."""
        return self.b.subgroup_any(condition)

    def reduce_rows(self, kind: str, partial: list[Value]) -> list[Value]:
        """As `RowEngine` has it: over the lanes that share a row."""
        mask = 1
        while mask < self.shape.row_lanes:
            partial = [self.b.binary(kind, x, self.b.shuffle_xor(x, mask)) for x in partial]
            mask *= 2
        return partial

    # -- values --------------------------------------------------------------------------------------------------------

    def _add_values(self, O: FragmentTile, at: Value, nonfinite: Value) -> None:
        b, engine, shape = self.b, self.engine, self.shape
        own, rows = at + self.first_column, range(0, shape.rows, engine.arrangement.height)
        with b.if_(nonfinite):
            self._add_nonfinite(O, own)
            b.barrier()
            self.keys.rewrite_own(at, lambda run: sorted_out(b, engine.elem, run, b.const(0, i32)))
            b.barrier()
        b.comment("O = O + P V")

        def weights(k: int) -> list[Value]:
            return [engine.load_left(self.weights, b.const(0, i32), self.weight_stride, row, k * SIZE) for row in rows]

        def values(k: int, j: int) -> Value:
            return engine.load_right(self.memory, own, self.stride, k * SIZE, j * engine.arrangement.width)

        engine.multiply(O, weights, values, shape.keys // SIZE)

    def _add_nonfinite(self, O: FragmentTile, at: Value) -> None:
        """Add Inf and NaN, one key after the other, to rows where their weights are not zero. The caller then replaces
        them by zeros, as zero times either would be NaN. Slow."""
        b = self.b
        with b.loop(0, self.shape.keys, name="key") as key:
            values, line = O.values(), at + key * self.stride
            weights = [
                b.cast(b.load(self.weights, O.row(r) * self.weight_stride + key), f32) for r in range(len(values))
            ]
            for c in range(len(values[0])):
                x = b.cast(b.load(self.memory, line + O.col(c)), f32)
                bad = ~is_finite(b, x)
                for row, weight in zip(values, weights, strict=True):
                    row[c] = b.select(bad & b.ne(weight, 0.0), row[c] + weight * x, row[c])
            O.assign(values)

    def _row_factors(self, first: int) -> list[Value]:
        """The numbers in ``factors``, from ``first`` on, of the rows of O that this lane holds elements of."""
        engine = self.engine
        count = self.shape.rows // engine.arrangement.height * len(engine.part_rows)
        return [self.b.load(self.factors, engine.row(r) + first) for r in range(count)]

    # -- results -------------------------------------------------------------------------------------------------------

    def _finish(self, row: QueryRow, O: FragmentTile) -> None:
        """Store the rows, or the partial results of the split."""
        b, engine, shape, result, work = self.b, self.engine, self.shape, self.result, self.work
        total = self.reduce_rows("add", [row.softmax.l.value])[0]
        factor, lse = result.finish(self.row, row.softmax.m.value, total)
        first = b.eq(self.lane, 0)
        with b.if_(first):
            b.store(self.factors, self.row + shape.rows, factor)
        with b.if_(work.row0 + self.row < work.rows):
            result.store_lse(self.row, lse, first)
        b.barrier()
        factors = self._row_factors(shape.rows)
        run, width = engine.run, self.columns * shape.subgroups
        for r, values in enumerate(O.values()):
            number = O.row(r)
            with b.if_(work.row0 + number < work.rows):
                out = result.target(number, self.config.value_dim % QUAD == 0)
                for c in range(0, len(values), run):
                    scaled = [x * factors[r] for x in values[c : c + run]]
                    out.store(b, b.const(0, i32), O.col(c) + self.first_column, scaled, width)
        if self.config.last_workgroup_combines:
            result.combine_splits(engine.thread)
        else:
            b.barrier()  # a driver takes the last condition of a kernel for uniform unless a barrier follows
