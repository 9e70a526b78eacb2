"""The decoding kernel: a few query rows of one key head against a sequence's keys, at the speed of its memory.

The rows of a workgroup are the query heads of one key head and, where a sequence has several query tokens, those too:
every key is read once for all of them. A key is held by a team of lanes, each of which reads 16 bytes of it at a time;
the first product is a partial sum in each lane and an exchange in the team (`aule.tile.team`), softmax is done on each
score once, and in the second product a lane sums up its own columns over its team's keys. Teams, then subgroups, are
put together at the end. Without further subgroups that needs no shared memory at all.

Keys of the next step are on their way while this step's are worked on, and so are values while scores are made, and
page numbers two steps ahead: nothing in the chain of loads waits for anything but memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import Scalar, f32, i32, i64
from aule.ops.attention import modifiers as mod
from aule.ops.attention.parameters import Parameters
from aule.ops.decode.config import DecodeConfig
from aule.ops.decode.join import Join
from aule.ops.decode.last import add_up
from aule.ops.decode.place import Place
from aule.ops.decode.result import Result
from aule.target import Target
from aule.tile.math import LOWEST, NEG_INF, fold, from_e4m3
from aule.tile.matrix import QUAD, Matrix, divmod_const
from aule.tile.quantised import E4M3_HALF, floats
from aule.tile.team import Team

KERNEL_NAME = "decode_attention"

LAG = 16.0
"""How far, in powers of two, the maximum that is subtracted may lag behind the largest score: sums are fp32."""


def build_decode(config: DecodeConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the kernel of a configuration."""
    shape = config.shape
    wanted = shape.subgroup if shape.subgroup in target.subgroup_sizes else 0
    b = Builder(name, shape.threads, wanted, shape.registers, arithmetic="quick")
    kernel = _Decode(b, config, target)
    with b.if_(kernel.place.measure()):
        kernel.run()
    return b.finish()


@dataclass(frozen=True)
class _Row:
    """A query row whose scores a lane works on: what happens to them, and its maximum and sum so far."""

    modifiers: list[mod.Modifier]
    head: Value
    position: Value
    base: Var
    total: Var


class _Decode:
    """The passage of one workgroup over its keys."""

    def __init__(self, b: Builder, config: DecodeConfig, target: Target) -> None:
        self.b, self.config, self.shape = b, config, config.shape
        self.halves = config.cache == "e4m3" and config.words and target.f16
        shape = config.shape
        self.index: Scalar = i64 if config.index64 else i32
        self.p = Parameters(b, config, self.index)
        # Steps begin at multiples of their stretch, so that they lie in one page where pages are multiples of it.
        self.place = Place(self.p, config, shape.rows, shape.stretch, shape.step)
        self.result = Result(self.place)
        branches = target.backend != "webgpu"
        self.team = Team(b, shape.lanes, shape.subgroup, shape.threads, shape.rows * shape.keys, branches)
        self.subgroup, in_group = b.const(0, i32), self.team.thread
        if shape.subgroup:
            self.subgroup, in_group = divmod_const(b, self.team.thread, shape.subgroup)
        self.member, _ = divmod_const(b, in_group, shape.lanes)
        """Number of this thread's team in its subgroup."""
        self.scores = shape.rows * shape.keys

    # -- loads -----------------------------------------------------------------------------------------------------

    def _keys(self, start: Value) -> list[Value]:
        """Keys of this thread's team in the step at ``start``; the last one instead of those past the end."""
        b, shape = self.b, self.shape
        first = start + self.subgroup * shape.stretch + self.member
        return [b.min(first + i * shape.teams, self.place.end - 1) for i in range(shape.keys)]

    def _pages(self, start: Value) -> list[Value]:
        """Numbers of the pages that hold a step's keys; one for all of them where they lie in one page."""
        b = self.b
        keys = self._keys(start)
        if self.config.whole:
            keys = [b.min(start + self.subgroup * self.shape.stretch, self.place.end - 1)]
        return self.place.page_numbers(keys)

    def _fetch(self, matrix: Matrix, name: str, keys: list[Value], pages: list[Value]) -> list[Value]:
        """The runs that this lane holds of a step's keys or values, key by key."""
        b, shape = self.b, self.shape
        pieces = shape.pieces(matrix.cols)
        padded = pieces * shape.lanes * shape.run
        starts = [matrix.base + place for place in self.place.key_starts(name, keys, pages)]
        if self.config.words:  # the same with everything divided by four
            matrix, padded = replace(matrix, cols=matrix.cols // 4), padded // 4
            starts = [start >> 2 for start in starts]
        width = shape.run // 4 if self.config.words else shape.run
        columns = [(self.team.lane + piece * shape.lanes) * width for piece in range(pieces)]
        return [matrix.load_quad(b, start, column, padded, width) for start in starts for column in columns]

    def _column(self, piece: int) -> Value:
        return (self.team.lane + piece * self.shape.lanes) * self.shape.run

    def _numbers(self, run: Value) -> list[Value]:
        """The elements of a run of the cache as fp32, without their scale; of e4m3 by way of fp16 times `E4M3_HALF`."""
        b, cache = self.b, self.config.cache
        if self.config.words:
            return [x for word in b.unpack(run) for x in floats(b, word, cache, self.halves)]
        return b.unpack(from_e4m3(b, run) if cache == "e4m3" else b.cast(run, f32))

    # -- the passage -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        b, config, shape = self.b, self.config, self.shape
        zero = b.const(0.0, f32)
        q = self._queries()
        rows = self._rows()
        columns = shape.pieces(config.value_dim) * shape.run
        acc = [[b.var(zero, "o") for _ in range(columns)] for _ in range(shape.rows)]
        runs = shape.keys * shape.pieces(config.head_dim)
        empty = b.splat(b.const(0, self.place.k.elem), shape.run // 4 if config.words else shape.run)
        k = [b.var(empty, "k") for _ in range(runs)]
        lookups = 0 if config.paging == "none" else 1 if config.whole else shape.keys
        here, ahead = ([b.var(b.const(0, i32), "page") for _ in range(lookups)] for _ in range(2))
        with b.if_(self.place.first < self.place.end):
            _assign(here, self._pages(self.place.first) if lookups else [])
            _assign(k, self._fetch(self.place.k, "k", self._keys(self.place.first), _values(here)))
            _assign(ahead, self._pages(self.place.first + self.place.stride) if lookups else [])

        with b.loop(self.place.first, self.place.end, self.place.stride, name="key") as start:
            keys, later = self._keys(start), self._keys(start + self.place.stride)
            v = self._fetch(self.place.v, "v", keys, _values(here))
            scales = self._scales(start, _values(here)) if config.quantised else []
            current = _values(k)
            _assign(k, self._fetch(self.place.k, "k", later, _values(ahead)))
            if lookups:
                _assign(here, _values(ahead))
                _assign(ahead, self._pages(start + self.place.stride * 2))
            self._step(q, current, v, scales, rows, acc, start)
        if config.followed:
            b.launch_next()
        self._finish(rows, acc)
        if config.gather:
            add_up(self.result, shape.rows, self.team.thread, shape.threads)

    def _queries(self) -> list[list[Value]]:
        """This lane's columns of every query row, scaled."""
        b, config, shape, place = self.b, self.config, self.shape, self.place
        padded = shape.pieces(config.head_dim) * shape.lanes * shape.run
        scale = self.p.number("scale", f32)
        found = []
        for r in range(shape.rows):
            start = place.row_start("q", place.q, *place.existing(b.const(r, i32)))
            row: list[Value] = []
            for piece in range(shape.pieces(config.head_dim)):
                width = shape.run if not place.q.aligned else min(shape.run, QUAD)
                for i in range(0, shape.run, width):
                    run = place.q.load_quad(b, start, self._column(piece) + i, padded, width)
                    row += [x * scale for x in b.unpack(b.cast(run, f32))]
            found.append(row)
        return found

    def _rows(self) -> list[_Row]:
        """The rows whose scores this lane works on."""
        b = self.b
        rows = []
        first = self.team.owned(self.shape.rows)
        for i in range(max(self.shape.rows // self.shape.lanes, 1)):
            token, head = self.place.existing(first + i)
            base, total = b.var(b.const(LOWEST, f32), "m"), b.var(b.const(0.0, f32), "l")
            rows.append(_Row(self.place.modifiers(head), head, self.place.extent.shift + token, base, total))
        return rows

    def _own_keys(self, start: Value) -> list[Value]:
        """Keys of the scores that this lane owns in a row."""
        shape = self.shape
        share = max(self.scores // shape.lanes, 1)
        first = self.team.owned(self.scores) & (shape.keys - 1) if share < shape.keys else self.b.const(0, i32)
        at = start + self.subgroup * shape.stretch + self.member
        return [at + (first + i) * shape.teams for i in range(min(share, shape.keys))]

    def _scales(self, start: Value, pages: list[Value]) -> list[tuple[Value, Value]]:
        """Scales of keys and values, for the scores that this lane owns."""
        keys = [self.b.min(key, self.place.end - 1) for key in self._own_keys(start)]
        found = self.place.scales(keys, pages if self.config.whole else self.place.page_numbers(keys))
        return [(k * (1.0 / E4M3_HALF), v * (1.0 / E4M3_HALF)) for k, v in found] if self.halves else found

    def _step(
        self, q: list[list[Value]], k: list[Value], v: list[Value], scales: list[tuple[Value, Value]], rows: list[_Row],
        acc: list[list[Var]], start: Value,
    ) -> None:  # fmt: skip
        """One step: S = Q K^T, softmax on the scores that each lane owns, O = O + P V."""
        b, config, shape = self.b, self.config, self.shape
        pieces = shape.pieces(config.head_dim)
        numbers = [
            [x for run in k[i * pieces : (i + 1) * pieces] for x in self._numbers(run)] for i in range(shape.keys)
        ]
        partial = [_dot(b, row, key) for row in q for key in numbers]
        own_keys = self._own_keys(start)
        owned = self.team.reduce(partial)
        per_row = len(owned) // len(rows)
        scores: list[list[Value]] = []
        for i, row in enumerate(rows):
            mine = []
            for j, s in enumerate(owned[i * per_row : (i + 1) * per_row]):
                site = mod.Site(self.place.batch, row.head, row.position, own_keys[j], row.position)
                s = s * scales[j][0] if scales else s
                for modifier in row.modifiers:
                    s = modifier.apply(b, s, site)
                mine.append(s)
            scores.append(mine)
        self._follow_maximum(rows, scores, acc)

        p: list[Value] = []
        for row, mine in zip(rows, scores, strict=True):
            weights = [b.exp2(s - row.base.value) for s in mine]
            row.total.value = row.total.value + fold(b, "add", weights)
            for j, (s, weight) in enumerate(zip(mine, weights, strict=True)):
                weight = weight * scales[j][1] if scales else weight
                # What dropped keys hold, Inf and NaN included, must not count: they are marked.
                p.append(b.select(s < LOWEST, b.const(NEG_INF, f32), weight))
        p = self.team.spread(p, self.scores)
        at = start + self.subgroup * shape.stretch
        edge = (at < self.place.full_first) | (at + shape.stretch > self.place.full_end)
        with b.if_(edge):
            self._add_values(acc, p, v, guarded=True)
        with b.else_():
            self._add_values(acc, p, v, guarded=False)

    def _follow_maximum(self, rows: list[_Row], scores: list[list[Value]], acc: list[list[Var]]) -> None:
        """Let the maximum that is subtracted follow the largest score where that has grown much."""
        b, shape = self.b, self.shape
        # Lanes that own scores of the same row agree on its maximum; those that own the very same ones do already.
        lanes_of_row = max(shape.lanes // shape.rows, 1)
        same = max(shape.lanes // self.scores, 1)
        highest = [self.team.combine("max", fold(b, "max", list(mine)), same, lanes_of_row) for mine in scores]
        grown = [high > row.base.value + LAG for high, row in zip(highest, rows, strict=True)]
        with self.team.where_any(fold(b, "or", grown)):
            factors = []
            for high, row in zip(highest, rows, strict=True):
                new = b.max(row.base.value, high)
                factors.append(b.exp2(row.base.value - new))
                row.base.value = new
                row.total.value = row.total.value * factors[-1]
            _scale_rows(acc, self.team.spread(factors, shape.rows))

    def _add_values(self, acc: list[list[Var]], p: list[Value], v: list[Value], guarded: bool) -> None:
        b, shape = self.b, self.shape
        pieces = shape.pieces(self.config.value_dim)
        sums = [[x.value for x in row] for row in acc]
        for i in range(shape.keys):
            numbers = [x for run in v[i * pieces : (i + 1) * pieces] for x in self._numbers(run)]
            for r, row in enumerate(sums):
                weight = p[r * shape.keys + i]
                dropped = weight < LOWEST if guarded else None
                for c, x in enumerate(numbers):
                    new = b.fma(weight, x, row[c])
                    row[c] = new if dropped is None else b.select(dropped, row[c], new)
        for variables, row in zip(acc, sums, strict=True):
            _assign(variables, row)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _finish(self, rows: list[_Row], acc: list[list[Var]]) -> None:
        b, shape, team = self.b, self.shape, self.team
        lanes_of_row = max(shape.lanes // shape.rows, 1)
        same = max(shape.lanes // self.scores, 1)
        totals = [team.combine("add", row.total.value, same, lanes_of_row) for row in rows]
        bases = [row.base.value for row in rows]
        if shape.subgroup > shape.lanes:
            b.comment("teams of a subgroup")
            highest = [team.combine("max", base, shape.lanes, shape.subgroup) for base in bases]
            factors = [b.exp2(base - high) for base, high in zip(bases, highest, strict=True)]
            totals = [
                team.combine("add", total * factor, shape.lanes, shape.subgroup)
                for total, factor in zip(totals, factors, strict=True)
            ]
            bases = highest
            _scale_rows(acc, team.spread(factors, shape.rows))
            for row in acc:
                for x in row:
                    x.value = team.combine("add", x.value, shape.lanes, shape.subgroup)
        pieces = shape.pieces(self.config.value_dim)
        padded = pieces * shape.lanes * shape.run
        if shape.parts == 1:
            base_of, total_of = team.spread(bases, shape.rows), team.spread(totals, shape.rows)
            numbers = [b.const(r, i32) for r in range(shape.rows)]
            results = [self.result.normal(*given) for given in zip(numbers, base_of, total_of, strict=True)]
            with b.if_(team.thread < shape.lanes):
                for r, variables, (factor, lse) in zip(numbers, acc, results, strict=True):
                    with b.if_(self.place.row0 + r < self.place.rows):
                        for piece in range(pieces):
                            part = variables[piece * shape.run : (piece + 1) * shape.run]
                            self.result.store(r, self._column(piece), [x.value * factor for x in part], padded)
                        self.result.store_lse(r, lse, b.eq(team.lane, 0))
            return
        self._join(bases, totals, acc)

    def _join(self, bases: list[Value], totals: list[Value], acc: list[list[Var]]) -> None:
        """Put the parts of subgroups (or of teams, where there are no subgroups) together in shared memory."""
        b, shape, team = self.b, self.shape, self.team
        pieces = shape.pieces(self.config.value_dim)
        columns = pieces * shape.lanes * shape.run
        part = self.subgroup if shape.subgroup else self.member
        join = Join(self.result, shape.parts, shape.rows, columns)
        first = team.owned(shape.rows)
        # Teams of a subgroup all have its sums by now; teams that are no subgroup's, their own.
        with b.if_(b.eq(self.member, 0) if shape.subgroup else self.member >= 0):
            # One of the lanes that own a row writes its maximum and sum.
            sharing = max(shape.lanes // shape.rows, 1)
            with b.if_(b.eq(team.lane & (sharing - 1), 0)):
                for i, (base, total) in enumerate(zip(bases, totals, strict=True)):
                    join.leave(part, first + i, base, total)
            for row, variables in enumerate(acc):
                for piece in range(pieces):
                    values = _values(variables[piece * shape.run : (piece + 1) * shape.run])
                    join.leave_sums(part, row, self._column(piece), values)
        join.finish(team.thread, shape.threads, min(QUAD, shape.run))


def _dot(b: Builder, x: list[Value], y: list[Value]) -> Value:
    total = x[0] * y[0]
    for i in range(1, len(x)):
        total = b.fma(x[i], y[i], total)
    return total


def _values(variables: list[Var]) -> list[Value]:
    return [x.value for x in variables]


def _assign(variables: list[Var], values: list[Value]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.value = value


def _scale_rows(acc: list[list[Var]], factors: list[Value]) -> None:
    for row, factor in zip(acc, factors, strict=True):
        for x in row:
            x.value = x.value * factor
