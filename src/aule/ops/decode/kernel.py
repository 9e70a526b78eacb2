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
from aule.ir.types import SCALARS, Scalar, f32, i32, i64, u32
from aule.ops.attention import modifiers as mod
from aule.ops.attention.parameters import Parameters
from aule.ops.attention.scores import Reach
from aule.ops.decode.config import DecodeConfig
from aule.target import Target
from aule.tile.math import LN2, LOG2E, LOWEST, NEG_INF, fold
from aule.tile.matrix import QUAD, Matrix
from aule.tile.team import Team

KERNEL_NAME = "decode_attention"

LAG = 16.0
"""How far, in powers of two, the maximum that is subtracted may lag behind the largest score: sums are fp32."""


def build_decode(config: DecodeConfig, target: Target, name: str = KERNEL_NAME) -> KernelIR:
    """Trace the kernel of a configuration."""
    shape = config.shape
    wanted = shape.subgroup if shape.subgroup in target.subgroup_sizes else 0
    b = Builder(name, shape.threads, wanted, shape.registers)
    kernel = _Decode(b, config)
    with b.if_(kernel.exists):
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
    """The parameters of the kernel, the place of this workgroup, and the passage over the keys."""

    def __init__(self, b: Builder, config: DecodeConfig) -> None:
        self.b, self.config, shape = b, config, config.shape
        self.shape = shape
        self.index: Scalar = i64 if config.index64 else i32
        p = self.p = Parameters(b, config, self.index)
        number = b.group_id(0) + b.group_id(1) * b.group_count(0)
        self.exists = number < p.number("blocks")
        # Blocks of rows that read the same keys come one after the other, then heads, whose keys may be neighbours.
        rest, row_block = self._split(number, "row_blocks")
        rest, self.kv_head = self._split(rest, "heads_kv")
        self.part = b.const(0, i32)
        if config.split:
            rest, self.part = self._split(rest, "splits")
        self.batch = b.min(rest, p.number("batches") - 1)  # there may be more workgroups than work
        self.group = p.number("group")

        for name, cols, column in (("q", config.head_dim, 0), ("k", config.head_dim, 1), ("v", config.value_dim, 2)):
            setattr(self, name, self._matrix(name, cols, column))
        self.q: Matrix
        self.k: Matrix
        self.v: Matrix
        self.length, self.seq_q, self.first_q = self._extent()
        self.row0 = row_block * shape.rows
        self.rows = self.seq_q * self.group
        self.exists = self.exists & (self.row0 < self.rows)
        self._reach()
        self.team = Team(b, shape.lanes, shape.subgroup, shape.threads, shape.rows * shape.keys)
        self.subgroup = self.team.thread // shape.subgroup if shape.subgroup else b.const(0, i32)
        in_group = (self.team.thread & (shape.subgroup - 1)) if shape.subgroup else self.team.thread
        self.member = in_group // shape.lanes
        """Number of this thread's team in its subgroup."""
        self.scores = shape.rows * shape.keys

    def _split(self, number: Value, name: str) -> tuple[Value, Value]:
        """Quotient and remainder by a parameter."""
        by = self.p.number(name)
        quotient = number // by
        return quotient, number - quotient * by

    def _matrix(self, name: str, cols: int, column: int) -> Matrix:
        """One operand, from the row of its first batch and this workgroup's head; of pages, from page 0."""
        b, p, config = self.b, self.p, self.config
        elem = SCALARS[config.dtype if name in "qo" else self._stored()]
        zero = b.const(0, i32)
        if name in ("q", "o"):
            base = p.strided(name, zero if config.packed else self.batch)
        else:
            base = p.strided(name, zero if config.paging != "none" else self.batch, self.kv_head)
        row_stride = p.number(f"{name}_row_stride", self.index)
        col_stride = None if config.unit[column] else p.number(f"{name}_col_stride", self.index)
        buffer = p.buffer(name, elem, "write" if name == "o" else "read")
        return Matrix(buffer, base, zero, cols, row_stride, col_stride, config.aligned[column])

    def _stored(self) -> str:
        """Element type of the cache's buffers."""
        if self.config.words:
            return "u32"
        return {"e4m3": "u8"}.get(self.config.cache, self.config.cache)

    def _extent(self) -> tuple[Value, Value, Value]:
        """Keys and query rows of the sequence, and the first of these rows in q."""
        b, p, config = self.b, self.p, self.config
        length = p.number("seq_kv")
        if config.lens:
            given = b.load(p.buffer("lens", i32), p.strided("lens", self.batch))
            length = b.min(b.max(given, 0), length)  # nothing outside of the cache is read, whatever they say
        if not config.packed:
            return length, p.number("seq_q"), b.const(0, i32)
        cu_q = p.buffer("cu_q", i32)
        first, end = (b.load(cu_q, p.strided("cu_q", self.batch + i)) for i in (0, 1))
        return length, end - first, first

    def _reach(self) -> None:
        """Keys of this workgroup: a part of those that any of its rows may keep."""
        b, p, config, shape = self.b, self.p, self.config, self.shape
        last_row = b.min(self.row0 + shape.rows, self.rows) - 1
        self.shift = self.length - self.seq_q
        self.left = p.number("left") if config.left else None
        self.right = p.number("right") if config.right else None
        nearest, furthest = self.shift + self.row0 // self.group, self.shift + last_row // self.group
        reach = Reach.of(b, self.length, self.left, self.right, nearest, furthest)
        # Steps begin at multiples of their length, so that they lie in one page where pages are multiples of it.
        self.first = reach.first - (reach.first & (shape.stretch - 1)) if config.left else reach.first
        self.end = b.max(reach.end, self.first)
        self.full_first, full_end = reach.full_first, reach.full_end
        if config.split:
            # Whole steps, as evenly as they go; a sequence that is short has fewer parts, and the others are empty.
            steps = (self.end - self.first + (shape.step - 1)) // shape.step
            parts = b.min(b.max(steps // p.number("least_steps"), 1), p.number("splits"))
            begin, finish = (b.min(self.part + i, parts) * steps // parts * shape.step for i in (0, 1))
            self.first, self.end = self.first + begin, b.min(self.first + finish, self.end)
        self.full_end = b.min(full_end, self.end)

    # -- loads -----------------------------------------------------------------------------------------------------

    def _keys(self, start: Value) -> list[Value]:
        """Keys of this thread's team in the step at ``start``; the last one instead of those past the end."""
        b, shape = self.b, self.shape
        first = start + self.subgroup * shape.stretch + self.member
        return [b.min(first + i * shape.teams, self.end - 1) for i in range(shape.keys)]

    def _pages(self, start: Value) -> list[Value]:
        """Numbers of the pages that hold a step's keys; one for all of them where they lie in one page."""
        b, p, config = self.b, self.p, self.config
        keys = self._keys(start)
        if config.whole:
            keys = [b.min(start + self.subgroup * self.shape.stretch, self.end - 1)]
        table = p.buffer("tables", i32)
        row = p.strided("tables", self.batch)
        found = []
        for key in keys:
            place = b.cast(self._in_page(key)[0], self.index) * p.number("tables_stride1", self.index)
            # Whatever the table says, nothing outside of the pool is read.
            found.append(b.min(b.max(b.load(table, row + place), 0), p.number("pages") - 1))
        return found

    def _in_page(self, key: Value) -> tuple[Value, Value]:
        """Which page of its sequence a key is in, and where there."""
        if self.config.paging == "shift":
            return key >> self.p.number("page_shift"), key & (self.p.number("page") - 1)
        return self._split(key, "page")

    def _places(self, name: str, keys: list[Value], pages: list[Value]) -> list[Value]:
        """Where rows of keys begin in an operand, from its base."""
        b, p, index = self.b, self.p, self.index
        row_stride = p.number(f"{name}_row_stride", index)
        if not pages:
            return [b.cast(key, index) * row_stride for key in keys]
        pages = pages * len(keys) if self.config.whole else pages
        stride = p.number(f"{name}_stride0", index)
        return [
            b.cast(page, index) * stride + b.cast(self._in_page(key)[1], index) * row_stride
            for key, page in zip(keys, pages, strict=True)
        ]

    def _fetch(self, matrix: Matrix, name: str, keys: list[Value], pages: list[Value]) -> list[Value]:
        """The runs that this lane holds of a step's keys or values, key by key."""
        b, shape = self.b, self.shape
        pieces = shape.pieces(matrix.cols)
        padded = pieces * shape.lanes * shape.run
        starts = [matrix.base + place for place in self._places(name, keys, pages)]
        if self.config.words:  # the same with everything divided by four
            matrix, padded = replace(matrix, cols=matrix.cols // 4), padded // 4
            starts = [start >> 2 for start in starts]
        width = shape.run // 4 if self.config.words else shape.run
        columns = [(self.team.lane + piece * shape.lanes) * width for piece in range(pieces)]
        return [matrix.load_quad(b, start, column, padded, width) for start in starts for column in columns]

    def _column(self, piece: int) -> Value:
        return (self.team.lane + piece * self.shape.lanes) * self.shape.run

    def _numbers(self, run: Value) -> list[Value]:
        """The elements of a run of the cache as fp32, without their scale."""
        b, cache = self.b, self.config.cache
        elements = b.unpack(run)
        if self.config.words and cache == "i8":
            signed = [b.bitcast(word, i32) for word in elements]
            return [b.cast((word << (24 - shift)) >> 24, f32) for word in signed for shift in (0, 8, 16, 24)]
        if cache != "e4m3":
            return [b.cast(x, f32) for x in elements] if cache == "i8" else b.unpack(b.cast(run, f32))
        if self.config.words:
            elements = [(word >> shift) & 0xFF for word in elements for shift in (0, 8, 16, 24)]
        found = []
        for bits in elements:
            word = b.cast(bits, u32)
            # The exponent's bias is 7, not 127. Without a leading one (exponent 0) it would be twice the distance to
            # 2^-7; no subnormal fp32 is made on the way, which devices may take for 0.
            size = b.bitcast(((word & 0x7F) << 20) + (120 << 23), f32)
            size = b.select((word & 0x78) < 0x08, b.fma(size, 2.0, -(2.0**-6)), size)
            found.append(b.bitcast(b.bitcast(size, u32) | ((word & 0x80) << 24), f32))
        return found

    # -- the passage -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        b, config, shape = self.b, self.config, self.shape
        zero = b.const(0.0, f32)
        q = self._queries()
        rows = self._rows()
        columns = shape.pieces(config.value_dim) * shape.run
        acc = [[b.var(zero, "o") for _ in range(columns)] for _ in range(shape.rows)]
        runs = shape.keys * shape.pieces(config.head_dim)
        empty = b.splat(b.const(0, self.k.elem), shape.run // 4 if config.words else shape.run)
        k = [b.var(empty, "k") for _ in range(runs)]
        lookups = 0 if config.paging == "none" else 1 if config.whole else shape.keys
        here, ahead = ([b.var(b.const(0, i32), "page") for _ in range(lookups)] for _ in range(2))
        with b.if_(self.first < self.end):
            _assign(here, self._pages(self.first) if lookups else [])
            _assign(k, self._fetch(self.k, "k", self._keys(self.first), _values(here)))
            _assign(ahead, self._pages(self.first + shape.step) if lookups else [])

        with b.loop(self.first, self.end, shape.step, name="key") as start:
            keys, later = self._keys(start), self._keys(start + shape.step)
            v = self._fetch(self.v, "v", keys, _values(here))
            scales = self._scales(start, _values(here)) if config.quantised else []
            current = _values(k)
            _assign(k, self._fetch(self.k, "k", later, _values(ahead)))
            if lookups:
                _assign(here, _values(ahead))
                _assign(ahead, self._pages(start + 2 * shape.step))
            self._step(q, current, v, scales, rows, acc, start)
        self._finish(rows, acc)

    def _queries(self) -> list[list[Value]]:
        """This lane's columns of every query row, scaled."""
        b, config, shape = self.b, self.config, self.shape
        padded = shape.pieces(config.head_dim) * shape.lanes * shape.run
        scale = self.p.number("scale", f32)
        found = []
        for r in range(shape.rows):
            token, head = self._token(b.min(self.row0 + r, self.rows - 1))
            start = self.q.base + b.cast(head, self.index) * self.p.number("q_stride1", self.index)
            start = start + b.cast(self.first_q + token, self.index) * self.q.row_stride
            row: list[Value] = []
            for piece in range(shape.pieces(config.head_dim)):
                width = shape.run if not self.q.aligned else min(shape.run, QUAD)
                for i in range(0, shape.run, width):
                    run = self.q.load_quad(b, start, self._column(piece) + i, padded, width)
                    row += [x * scale for x in b.unpack(b.cast(run, f32))]
            found.append(row)
        return found

    def _token(self, row: Value) -> tuple[Value, Value]:
        """The query token of a row, and its head."""
        token = row // self.group
        return token, self.kv_head * self.group + (row - token * self.group)

    def _rows(self) -> list[_Row]:
        """The rows whose scores this lane works on."""
        b, config, p = self.b, self.config, self.p
        rows = []
        first = self.team.owned(self.shape.rows)
        for i in range(max(self.shape.rows // self.shape.lanes, 1)):
            token, head = self._token(b.min(self.row0 + first + i, self.rows - 1))
            modifiers = []
            if config.softcap:
                modifiers.append(mod.softcap(p.number("softcap", f32)))
            if config.alibi:
                slope = b.load(p.buffer("alibi", f32), p.strided("alibi", self.batch, head))
                modifiers.append(mod.alibi(slope * LOG2E))
            modifiers.append(mod.band(self.end, self.left, self.right))
            base, total = b.var(b.const(LOWEST, f32), "m"), b.var(b.const(0.0, f32), "l")
            rows.append(_Row(modifiers, head, self.shift + token, base, total))
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
        b, p = self.b, self.p
        keys = [b.min(key, self.end - 1) for key in self._own_keys(start)]
        if pages and not self.config.whole:
            table = p.buffer("tables", i32)
            row = p.strided("tables", self.batch)
            step = p.number("tables_stride1", self.index)
            places = [row + b.cast(self._in_page(key)[0], self.index) * step for key in keys]
            pages = [b.min(b.max(b.load(table, place), 0), p.number("pages") - 1) for place in places]
        found = []
        for name in ("k_scale", "v_scale"):
            buffer = p.buffer(name, f32)
            base = p.strided(name, b.const(0, i32) if pages else self.batch, self.kv_head)
            found.append([b.load(buffer, base + place) for place in self._places(name, keys, pages)])
        return list(zip(*found, strict=True))

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
                site = mod.Site(self.batch, row.head, row.position, own_keys[j], row.position)
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
        edge = (at < self.full_first) | (at + shape.stretch > self.full_end)
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
        columns = shape.pieces(self.config.value_dim) * shape.run
        if shape.parts == 1:
            base_of, total_of = team.spread(bases, shape.rows), team.spread(totals, shape.rows)
            results = [self._normal(r, base_of[r], total_of[r]) for r in range(shape.rows)]
            with b.if_(self.team.thread < shape.lanes):
                for r, variables in enumerate(acc):
                    factor, lse = results[r]
                    with b.if_(self.row0 + r < self.rows):
                        for piece in range(columns // shape.run):
                            part = variables[piece * shape.run : (piece + 1) * shape.run]
                            self._store(self.row0 + r, self._column(piece), [x.value * factor for x in part])
                        self._store_lse(self.row0 + r, lse, b.eq(self.team.lane, 0))
            return
        self._join(bases, totals, acc)

    def _join(self, bases: list[Value], totals: list[Value], acc: list[list[Var]]) -> None:
        """Put the parts of subgroups (or of teams, where there are no subgroups) together in shared memory."""
        b, shape, team = self.b, self.shape, self.team
        pieces = shape.pieces(self.config.value_dim)
        columns = pieces * shape.lanes * shape.run
        part = self.subgroup if shape.subgroup else self.member
        memory = b.shared("parts", f32, shape.parts * shape.rows * columns)
        maxima, sums = (b.shared(name, f32, shape.parts * shape.rows) for name in ("maxima", "sums"))
        first = team.owned(shape.rows)
        with b.if_(b.eq(self.member, 0) if shape.subgroup else b.const(1, i32) > 0):
            # One of the lanes that own a row writes its maximum and sum.
            sharing = max(shape.lanes // shape.rows, 1)
            with b.if_(b.eq(team.lane & (sharing - 1), 0)):
                for i, (base, total) in enumerate(zip(bases, totals, strict=True)):
                    b.store(maxima, part * shape.rows + first + i, base)
                    b.store(sums, part * shape.rows + first + i, total)
            for row, variables in enumerate(acc):
                for piece in range(pieces):
                    at = (part * shape.rows + row) * columns + self._column(piece)
                    for i in range(0, shape.run, QUAD):
                        values = [x.value for x in variables[piece * shape.run + i :][: min(QUAD, shape.run)]]
                        b.store(memory, at + i, b.vector(values))
        b.barrier()

        width = min(QUAD, shape.run)
        with b.loop(team.thread, shape.rows * columns // width, shape.threads, name="place") as place:
            r, column = place * width // columns, place * width % columns
            highest = fold(b, "max", [b.load(maxima, i * shape.rows + r) for i in range(shape.parts)])
            factors = [b.exp2(b.load(maxima, i * shape.rows + r) - highest) for i in range(shape.parts)]
            total, values = b.const(0.0, f32), [b.const(0.0, f32)] * width
            for i, factor in enumerate(factors):
                total = b.fma(factor, b.load(sums, i * shape.rows + r), total)
                at = (r + i * shape.rows) * columns + column
                found = b.unpack(b.load(memory, at, width))
                values = [b.fma(factor, x, y) for x, y in zip(found, values, strict=True)]
            factor, lse = self._normal(r, highest, total)
            with b.if_(self.row0 + r < self.rows):
                self._store(self.row0 + r, column, [x * factor for x in values])
                self._store_lse(self.row0 + r, lse, b.eq(column, 0))
        # See `aule.ops.attention.forward`: PoCL 3.1 needs a barrier behind the last condition.
        b.barrier()

    def _normal(self, r: Value | int, base: Value, total: Value) -> tuple[Value, Value]:
        """What a row's sums are multiplied by, and the logarithm (base 2) of the softmax's denominator."""
        b, config = self.b, self.config
        rescale = b.const(1.0, f32)
        if config.sinks and not config.split:
            _, head = self._token(b.min(self.row0 + r, self.rows - 1))
            sink = b.load(self.p.buffer("sinks", f32), self.p.strided("sinks", head)) * LOG2E
            new = b.max(base, sink)
            rescale = b.exp2(base - new)
            total = b.fma(total, rescale, b.exp2(sink - new))
            base = new
        nothing = b.eq(total, 0.0)  # such a row gives zeros; one with a NaN score has a NaN sum and stays NaN
        factor = b.select(nothing, b.const(0.0, f32), b.rcp(total)) * rescale
        return factor, b.select(nothing, b.const(NEG_INF, f32), base + b.log2(total))

    def _place(self, row: Value) -> Value:
        """The place of a row in what has one number for each: ``[batch, heads, rows]``, or packed ``[heads, rows]``."""
        b, p, index = self.b, self.p, self.index
        token, head = self._token(row)
        if self.config.packed:
            return b.cast(head, index) * p.number("total_q", index) + b.cast(self.first_q + token, index)
        heads = b.cast(self.batch * p.number("heads_q") + head, index)
        return heads * b.cast(self.seq_q, index) + b.cast(token, index)

    def _store(self, row: Value, column: Value, values: list[Value]) -> None:
        """Store columns of a result: of the whole one, or of one part of the keys."""
        b, p, config, shape = self.b, self.p, self.config, self.shape
        padded = shape.pieces(config.value_dim) * shape.lanes * shape.run
        if config.split:
            at = self._place(row) * b.cast(p.number("splits"), self.index) + b.cast(self.part, self.index)
            base = at * config.value_dim
            whole = Matrix(
                p.buffer("part", f32, "write"), base, b.const(0, i32), config.value_dim, b.const(0, self.index), None,
                config.value_dim % QUAD == 0 and len(values) % QUAD == 0,
            )  # fmt: skip
            row = b.const(0, i32)
        else:
            token, head = self._token(row)
            whole = self._matrix("o", config.value_dim, 3)
            base = whole.base + b.cast(head, self.index) * p.number("o_stride1", self.index)
            whole = Matrix(
                whole.buffer, base, whole.rows, whole.cols, whole.row_stride, whole.col_stride, whole.aligned
            )
            row = self.first_q + token
        for i in range(0, len(values), QUAD):
            whole.store(b, row, column + i, values[i : i + QUAD], padded)

    def _store_lse(self, row: Value, lse: Value, chosen: Value) -> None:
        b, p, config = self.b, self.p, self.config
        if config.split:
            at = self._place(row) * b.cast(p.number("splits"), self.index) + b.cast(self.part, self.index)
            with b.if_(chosen):
                b.store(p.buffer("part_lse", f32, "write"), at, lse)
        elif config.lse:
            with b.if_(chosen):
                b.store(p.buffer("lse", f32, "write"), self._place(row), lse * LN2)


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
