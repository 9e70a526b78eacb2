"""What a workgroup of decoding leaves: rows of the result, or of a part of it for `last.py` or `reduce.py`."""

from __future__ import annotations

from dataclasses import replace

from aule.ir import Builder, Value
from aule.ir.types import f32, i32
from aule.ops.decode.place import Place
from aule.ops.parameters import Access
from aule.tile.math import LN2, LOG2E, NEG_INF
from aule.tile.matrix import QUAD, Matrix


def normal(b: Builder, base: Value, total: Value, sink: Value | None = None) -> tuple[Value, Value]:
    """What a row's sums are multiplied by, and the logarithm (base 2) of the softmax's denominator. ``base`` and
    ``total`` are the row's maximum and its sum of weights, in powers of two."""
    rescale = b.const(1.0, f32)
    if sink is not None:
        new = b.max(base, sink * LOG2E)
        rescale = b.exp2(base - new)
        total = b.fma(total, rescale, b.exp2(sink * LOG2E - new))
        base = new
    nothing = b.eq(total, 0.0)  # such a row gives zeros; one with a NaN score has a NaN sum and stays NaN
    factor = b.select(nothing, b.const(0.0, f32), b.rcp(total)) * rescale
    return factor, b.select(nothing, b.const(NEG_INF, f32), base + b.log2(total))


class Result:
    """The results of one workgroup's rows, which are counted from its first."""

    def __init__(self, place: Place) -> None:
        self.place, self.b, self.p, self.config = place, place.b, place.p, place.config
        self._access: Access = "readwrite" if place.config.gather else "write"

    def normal(self, row: Value, base: Value, total: Value) -> tuple[Value, Value]:
        """The same of a row of the workgroup; sinks count where parts are added up."""
        sink = None
        if self.config.sinks and not self.config.leaves_parts:
            _, head = self.place.existing(row)
            sink = self.b.load(self.p.buffer("sinks", f32), self.p.strided("sinks", head))
        return normal(self.b, base, total, sink)

    def finish(self, row: Value, column: Value, highest: Value, total: Value, values: list[Value], padded: int) -> None:
        """Store columns of a row that exists, of which these are the sums, its maximum and its sum of weights."""
        factor, lse = self.normal(row, highest, total)
        self.store(row, column, [x * factor for x in values], padded)
        self.store_lse(row, lse, self.b.eq(column, 0))

    def store(self, row: Value, column: Value, values: list[Value], padded: int) -> None:
        """Store columns of a row that exists, leaving out those past the last."""
        b, p, dim, index = self.b, self.p, self.config.value_dim, self.place.index
        zero = b.const(0, i32)
        if self.config.leaves_parts:
            wide = dim % QUAD == 0 and len(values) % QUAD == 0
            start, parts = self._part(row) * dim, p.buffer("part", f32, self._access)
            whole = Matrix(parts, start, zero, dim, b.const(0, index), None, wide)
        else:
            whole = self.place.matrix("o")
            token, head = self.place.token(self.place.row0 + row)
            whole = replace(whole, base=self.place.row_start("o", whole, token, head))
        for i in range(0, len(values), QUAD):
            whole.store(b, zero, column + i, values[i : i + QUAD], padded)

    def store_lse(self, row: Value, lse: Value, chosen: Value) -> None:
        """Store the logarithm of a row that exists, by the threads that are chosen for it."""
        b, p, place = self.b, self.p, self.place
        if self.config.leaves_parts:
            with b.if_(chosen):
                b.store(p.buffer("part_lse", f32, self._access), self._part(row), lse)
        elif self.config.lse:
            token, head = place.token(place.row0 + row)
            first = place.extent.row_base(p, place.batch * p.number("heads_q") + head, head)
            with b.if_(chosen):
                b.store(p.buffer("lse", f32, "write"), first + b.cast(token, place.index), lse * LN2)

    def row_number(self, row: Value) -> Value:
        """The number of a row among all that have parts: ``[batch, heads, tokens]``."""
        p, place, index = self.p, self.place, self.place.index
        token, head = place.token(place.row0 + row)
        heads = self.b.cast(place.batch * p.number("heads_q") + head, index)
        return heads * self.b.cast(p.number("tokens"), index) + self.b.cast(token, index)

    def _part(self, row: Value) -> Value:
        """The place of a row's part: ``[batch, heads, tokens, splits]``."""
        b, index = self.b, self.place.index
        return self.row_number(row) * b.cast(self.p.number("splits"), index) + b.cast(self.place.part, index)
