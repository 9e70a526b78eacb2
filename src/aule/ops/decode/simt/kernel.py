"""The decoding kernel on the simt engine: a few query rows of a key head attend to a sequence's keys.

The kernel is bound by memory. Its rows are the query heads of a key head for all query tokens, so that a key is read
once for all of them. A team of lanes holds a key, and each lane reads 16 bytes of it at a time. ``Q K^T`` is a partial
sum in each lane and an exchange in the team (`aule.tile.common.lane_team`); softmax is computed once for each score; in
``P V`` a lane sums its own columns over its team's keys. Teams, then subgroups, are combined at the end.

Keys of the next step are prefetched while this step is computed, values while scores are, and page numbers two steps
ahead, so that no load waits for anything but memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value, Var
from aule.ir.types import f32, i32
from aule.ops.combine.workgroup import WorkgroupPartials
from aule.ops.decode.config import DecodeConfig
from aule.ops.decode.result import Result
from aule.ops.decode.simt.loads import KeyLoads
from aule.ops.decode.variables import assign, values
from aule.ops.decode.work_range import QueryRow, WorkRange
from aule.target import Target
from aule.tile.common.lane_team import Team
from aule.tile.common.math import LOWEST, NEG_INF, fold
from aule.tile.common.matrix import QUAD

KERNEL_NAME = "decode_attention"

LAG = 16.0
"""Powers of two by which m may lag behind the largest score; sums are fp32."""


def build_decode(config: DecodeConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the kernel of a configuration."""
    shape = config.shape
    subgroup = shape.subgroup if shape.subgroup in target.subgroup_sizes else 0
    b = Builder(name, shape.threads, subgroup, shape.registers, arithmetic="quick")
    kernel = _Decode(b, config, target)
    with b.if_(kernel.work.find_length()):
        kernel.run()
    return b.finish()


@dataclass(frozen=True)
class _Step:
    """Values that a lane has loaded for a step of keys.

    Attributes
    ----------
    start : Value
        First key of the workgroup's step.
    k, v : list of Value
        Runs of K and V by key and piece.
    scales : list of (Value, Value)
        Scales of K and V for the keys of the scores that this lane owns; empty unless quantised.
    """

    start: Value
    k: list[Value]
    v: list[Value]
    scales: list[tuple[Value, Value]]


class _Decode:
    """The kernel while it is traced."""

    def __init__(self, b: Builder, config: DecodeConfig, target: Target) -> None:
        self.b, self.config, self.shape = b, config, config.shape
        shape = config.shape
        self.work = WorkRange(b, config)
        self.result = Result(self.work)
        self.scores = shape.rows * shape.keys
        self.team = Team(b, shape.lanes, shape.subgroup, shape.threads, self.scores, target.subgroup_barriers)
        self.loads = KeyLoads(self.work, config, self.team, target.f16)

    # -- the loop over keys --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trace the loop over the workgroup's keys."""
        b, config, work, loads = self.b, self.config, self.work, self.loads
        zero, q, rows = b.const(0.0, f32), self._queries(), self._rows()
        columns = self.shape.pieces(config.value_dim) * self.shape.run
        O = [[b.var(zero, "o") for _ in range(columns)] for _ in range(self.shape.rows)]
        k = loads.key_variables()
        pages, next_pages = loads.page_variables(), loads.page_variables()
        with b.if_(work.first < work.end):
            assign(pages, loads.pages(work.first))
            assign(k, loads.load("k", loads.keys(work.first), values(pages)))
            if pages:
                assign(next_pages, loads.pages(work.first + work.stride))

        with b.loop(work.first, work.end, work.stride, name="key") as start:
            keys, next_keys = loads.keys(start), loads.keys(start + work.stride)
            v = self._latent_values(values(k)) if config.latent else loads.load("v", keys, values(pages))
            scales = loads.scales(values(pages), self._own_keys(start)) if config.quantised else []
            step = _Step(start, values(k), v, scales)
            assign(k, loads.load("k", next_keys, values(next_pages)))
            if pages:
                assign(pages, values(next_pages))
                assign(next_pages, loads.pages(start + work.stride * 2))
            self._attend(q, step, rows, O)
        if config.next_launch_overlaps:
            b.launch_next()
        self._finish(rows, O)
        if config.last_workgroup_combines:
            self.result.combine_splits(self.team.thread)

    def _latent_values(self, k: list[Value]) -> list[Value]:
        """Runs of V that are the first runs of K: a lane has the same columns of both."""
        shape, config = self.shape, self.config
        pieces, wanted = shape.pieces(config.head_dim), shape.pieces(config.value_dim)
        return [k[i * pieces + piece] for i in range(shape.keys) for piece in range(wanted)]

    def _queries(self) -> list[list[Value]]:
        """This lane's columns of every query row, scaled."""
        b, config, shape, work = self.b, self.config, self.shape, self.work
        padded = shape.padded(config.head_dim)
        scale = work.p.number("scale", f32)
        found = []
        for r in range(shape.rows):
            start = work.row_start("q", work.q, *work.own_query(b.const(r, i32)))
            row: list[Value] = []
            for piece in range(shape.pieces(config.head_dim)):
                width = shape.run if not work.q.aligned else min(shape.run, QUAD)
                for i in range(0, shape.run, width):
                    run = work.q.load_quad(b, start, self.loads.column(piece) + i, padded, width)
                    row += [x * scale for x in b.unpack(b.cast(run, f32))]
            found.append(row)
        return found

    def _rows(self) -> list[QueryRow]:
        """The rows whose scores this lane owns."""
        first = self.team.owned(self.shape.rows)
        return [self.work.query_row(first + i) for i in range(max(self.shape.rows // self.shape.lanes, 1))]

    def _own_keys(self, start: Value) -> list[Value]:
        """Keys of the scores that this lane owns in a row."""
        shape = self.shape
        share = max(self.scores // shape.lanes, 1)
        first = self.team.owned(self.scores) & (shape.keys - 1) if share < shape.keys else self.b.const(0, i32)
        at = self.loads.first_key(start)
        return [at + (first + i) * shape.teams for i in range(min(share, shape.keys))]

    # -- a step --------------------------------------------------------------------------------------------------------

    def _attend(self, q: list[list[Value]], step: _Step, rows: list[QueryRow], O: list[list[Var]]) -> None:
        """Compute S = Q K^T, softmax of the scores that each lane owns, and O = O + P V."""
        b = self.b
        S = self._scores(q, step, rows)
        self._follow_maximum(rows, S, O)
        P = self.team.spread(self._weigh(rows, S, step.scales), self.scores)
        with b.if_(self.work.at_edge(self.loads.subgroup_start(step.start))):
            self._add_values(O, P, step.v, guarded=True)
        with b.else_():
            self._add_values(O, P, step.v, guarded=False)

    def _scores(self, q: list[list[Value]], step: _Step, rows: list[QueryRow]) -> list[list[Value]]:
        """The scores that this lane owns, by row, after all modifiers."""
        b, shape, scales = self.b, self.shape, step.scales
        numbers = list(self.loads.numbers_by_key(step.k, shape.pieces(self.config.head_dim)))
        partial = [_dot(b, row, key) for row in q for key in numbers]
        own_keys = self._own_keys(step.start)
        owned = self.team.reduce(partial)
        per_row = len(owned) // len(rows)
        scores: list[list[Value]] = []
        for i, row in enumerate(rows):
            mine = []
            for j, s in enumerate(owned[i * per_row : (i + 1) * per_row]):
                s = s * scales[j][0] if scales else s
                for modifier in row.modifiers:
                    s = modifier.apply(b, s, row.site(own_keys[j]))
                mine.append(s)
            scores.append(mine)
        return scores

    def _follow_maximum(self, rows: list[QueryRow], S: list[list[Value]], O: list[list[Var]]) -> None:
        """Let m follow the largest score if it lags too far behind."""
        b, shape = self.b, self.shape
        highest = [self._combine_lanes("max", fold(b, "max", list(mine))) for mine in S]
        lagging = [high > row.softmax.m.value + LAG for high, row in zip(highest, rows, strict=True)]
        with self.team.where_any(fold(b, "or", lagging)):
            alphas = [row.softmax.follow(high) for high, row in zip(highest, rows, strict=True)]
            _scale_rows(O, self.team.spread(alphas, shape.rows))

    def _combine_lanes(self, kind: str, value: Value) -> Value:
        """Combine a value over the lanes that own scores of a row; those that own the very same scores count once."""
        shape = self.shape
        return self.team.combine(kind, value, max(shape.lanes // self.scores, 1), max(shape.lanes // shape.rows, 1))

    def _weigh(self, rows: list[QueryRow], S: list[list[Value]], scales: list[tuple[Value, Value]]) -> list[Value]:
        """P of the scores that this lane owns, times the scales of V; -inf marks dropped keys."""
        b = self.b
        p: list[Value] = []
        for row, scores in zip(rows, S, strict=True):
            for j, (s, weight) in enumerate(zip(scores, row.softmax.weigh(scores), strict=True)):
                weight = weight * scales[j][1] if scales else weight
                # The values of dropped keys may be Inf or NaN, so a weight of 0 does not suffice.
                p.append(b.select(s < LOWEST, b.const(NEG_INF, f32), weight))
        return p

    def _add_values(self, O: list[list[Var]], P: list[Value], v: list[Value], guarded: bool) -> None:
        """Compute O = O + P V; if ``guarded``, without dropped keys."""
        b, shape = self.b, self.shape
        sums = [[x.value for x in row] for row in O]
        for i, numbers in enumerate(self.loads.numbers_by_key(v, shape.pieces(self.config.value_dim))):
            for r, row in enumerate(sums):
                weight = P[r * shape.keys + i]
                dropped = weight < LOWEST if guarded else None
                for c, x in enumerate(numbers):
                    new = b.fma(weight, x, row[c])
                    row[c] = new if dropped is None else b.select(dropped, row[c], new)
        for variables, row in zip(O, sums, strict=True):
            assign(variables, row)

    # -- results -------------------------------------------------------------------------------------------------------

    def _finish(self, rows: list[QueryRow], O: list[list[Var]]) -> None:
        """Combine the teams of a subgroup, then the subgroups, and store the rows."""
        b, shape, team = self.b, self.shape, self.team
        sums = [self._combine_lanes("add", row.softmax.l.value) for row in rows]
        maxima = [row.softmax.m.value for row in rows]
        if shape.subgroup > shape.lanes:
            b.comment("teams of a subgroup")
            highest = [team.combine("max", m, shape.lanes, shape.subgroup) for m in maxima]
            factors = [b.exp2(m - high) for m, high in zip(maxima, highest, strict=True)]
            sums = [
                team.combine("add", l * factor, shape.lanes, shape.subgroup)
                for l, factor in zip(sums, factors, strict=True)
            ]
            maxima = highest
            _scale_rows(O, team.spread(factors, shape.rows))
            for row in O:
                for x in row:
                    x.value = team.combine("add", x.value, shape.lanes, shape.subgroup)
        if shape.subgroups == 1:
            self._store(maxima, sums, O)
        else:
            self._combine_parts(maxima, sums, O)

    def _store(self, maxima: list[Value], sums: list[Value], O: list[list[Var]]) -> None:
        """Store the rows of a workgroup of one subgroup."""
        b, shape, team, result = self.b, self.shape, self.team, self.result
        pieces, padded = shape.pieces(self.config.value_dim), shape.padded(self.config.value_dim)
        m, l = team.spread(maxima, shape.rows), team.spread(sums, shape.rows)
        numbers = [b.const(r, i32) for r in range(shape.rows)]
        ends = [result.finish(*given) for given in zip(numbers, m, l, strict=True)]
        with b.if_(team.thread < shape.lanes):
            for r, variables, (factor, lse) in zip(numbers, O, ends, strict=True):
                with b.if_(self.work.row0 + r < self.work.rows):
                    for piece in range(pieces):
                        part = variables[piece * shape.run : (piece + 1) * shape.run]
                        result.store(r, self.loads.column(piece), [x.value * factor for x in part], padded)
                    result.store_lse(r, lse, b.eq(team.lane, 0))

    def _combine_parts(self, maxima: list[Value], sums: list[Value], O: list[list[Var]]) -> None:
        """Combine the results of subgroups, or of teams if there are no subgroups, in shared memory."""
        b, shape, team, loads = self.b, self.shape, self.team, self.loads
        pieces, padded = shape.pieces(self.config.value_dim), shape.padded(self.config.value_dim)
        part = loads.subgroup if shape.subgroup else loads.member
        partials = WorkgroupPartials(b, team.thread, shape.subgroups, shape.rows, padded, min(QUAD, shape.run))
        first = team.owned(shape.rows)
        # By now all teams of a subgroup hold its sums; without subgroups, each team holds its own.
        with b.if_(b.eq(loads.member, 0) if shape.subgroup else loads.member >= 0):
            # One of the lanes that own a row writes its m and l.
            sharing = max(shape.lanes // shape.rows, 1)
            with b.if_(b.eq(team.lane & (sharing - 1), 0)):
                for i, (m, l) in enumerate(zip(maxima, sums, strict=True)):
                    partials.store_state(part, first + i, m, l)
            for row, variables in enumerate(O):
                for piece in range(pieces):
                    columns = values(variables[piece * shape.run : (piece + 1) * shape.run])
                    partials.store_columns(part, row, loads.column(piece), columns)
        self.result.combine(partials)


def _dot(b: Builder, x: list[Value], y: list[Value]) -> Value:
    total = x[0] * y[0]
    for i in range(1, len(x)):
        total = b.fma(x[i], y[i], total)
    return total


def _scale_rows(O: list[list[Var]], factors: list[Value]) -> None:
    for row, factor in zip(O, factors, strict=True):
        for x in row:
            x.value = x.value * factor
