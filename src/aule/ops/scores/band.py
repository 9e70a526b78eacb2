"""Which keys a row keeps, and how scores are modified between the first product and softmax."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from aule.ir import Builder, Value
from aule.ir.types import SCALARS, Vector, element, f32, i32, u8, u32
from aule.ops.scores import modifiers as mod
from aule.ops.scores.config import Columns, ScoreConfig
from aule.ops.scores.functions.differentiate import derivatives
from aule.ops.scores.functions.emit import MASK_FUNCTION, SCORE_FUNCTION, Emitter
from aule.ops.scores.parameters import Parameters
from aule.ops.softmax.dropout import Dropout
from aule.tile.common.math import NEG_INF

Slope = Callable[[Builder, Value, Value, mod.Site], Value]
"""As `Modifier.slope`."""
Place = Callable[[int, int], tuple[Value, Value]]
"""Gives query row and key of the element in a thread's r-th row and c-th column of a tile."""


def block_of(
    b: Builder, config: ScoreConfig, number: Value, blocks: Value, total: Value, together: Value | None
) -> tuple[Value, Value]:
    """The head of workgroup ``number`` of ``total``, and which of its ``blocks`` blocks of rows it has.

    With a causal mask the last blocks have the most work. Those of ``together`` heads come first, so that the launch
    ends with short work; then those of the next heads, so that K and V in use stay in the cache. Without a causal mask,
    or if ``together`` is None, heads follow each other.
    """
    if config.right and not config.left and together is not None:
        section = number // (together * blocks)
        first = section * together
        place, width = number - first * blocks, b.min(together, total // blocks - first)
        return first + place % width, blocks - 1 - place // width
    return number // blocks, blocks - 1 - number % blocks


class Tile(Protocol):
    """A tile of any engine: a thread's elements by row and column."""

    def values(self) -> list[list[Value]]: ...

    def map(self, f: Callable[[Value, int, int], Value]) -> None: ...


@dataclass(frozen=True)
class Reach:
    """Keys (i32) of some rows: ``first .. end - 1`` holds every kept key, and every row keeps all of
    ``full_first .. full_end - 1`` unless mask or bias drop some."""

    first: Value
    end: Value
    full_first: Value
    full_end: Value

    @staticmethod
    def of(
        b: Builder, seq_kv: Value, left: Value | None, right: Value | None, nearest: Value, furthest: Value
    ) -> Reach:
        """The reach of rows at positions ``nearest .. furthest`` of ``seq_kv`` keys, within a band."""
        zero = b.const(0, i32)
        first, full_first, end, full_end = zero, zero, seq_kv, seq_kv
        if right is not None:
            end = b.max(b.min(end, furthest + right + 1), zero)
            full_end = b.max(b.min(full_end, nearest + right + 1), zero)
        if left is not None:
            first = b.max(nearest - left, zero)
            full_first = b.max(furthest - left, zero)
        return Reach(first, end, full_first, full_end)


@dataclass(frozen=True)
class Extent:
    """Lengths of the sequences of one batch, the key position of query row 0, and the rows of Q and of K at which
    packed sequences begin."""

    seq_q: Value
    seq_kv: Value
    shift: Value
    first_q: Value | None
    first_kv: Value | None

    @staticmethod
    def of(p: Parameters, batch: Value) -> Extent:
        b, number, config = p.b, p.number, p.config
        if not config.packed and not config.lens:
            return Extent(number("seq_q"), number("seq_kv"), number("shift"), None, None)
        at = b.min(batch, number("batches") - 1)  # there may be more workgroups than work
        seq_q, first_q = number("seq_q"), None
        if config.packed:
            first_q, end_q = (b.load(p.buffer("cu_q", i32), p.strided("cu_q", at + i)) for i in (0, 1))
            seq_q = end_q - first_q
        if config.lens:
            length = b.load(p.buffer("lens", i32), p.strided("lens", at))
            # No key outside of the cache is read, whatever the buffer holds.
            seq_kv = b.min(b.max(length, 0), number("seq_kv"))
            return Extent(seq_q, seq_kv, seq_kv - seq_q, first_q, None)
        first_kv, end_kv = (b.load(p.buffer("cu_k", i32), p.strided("cu_k", at + i)) for i in (0, 1))
        seq_kv = end_kv - first_kv
        return Extent(seq_q, seq_kv, (seq_kv - seq_q) * number("bottom_right"), first_q, first_kv)

    def first(self, name: str) -> Value | None:
        """The first row of an operand, by its name."""
        return self.first_kv if name in ("k", "v", "dk", "dv") else self.first_q

    def row_base(self, p: Parameters, head_number: Value, head: Value) -> Value:
        """Index of query row 0 in arrays with one number for each row: ``[batch, heads, rows]``, or ``[heads, rows]``
        if sequences are packed. ``head_number`` is ``batch * heads + head``."""
        b, index = p.b, p.index
        if self.first_q is not None:
            total = p.number("total_q", index)
            return b.cast(head, index) * total + b.cast(self.first_q, index)
        return b.cast(head_number, index) * b.cast(self.seq_q, index)


def _dropping(keeps: Callable[[mod.Site], Value]) -> Callable[[Builder, Value, mod.Site], Value]:
    def apply(b: Builder, s: Value, site: mod.Site) -> Value:
        keep = keeps(site)
        if isinstance(s.type, Vector) and not isinstance(keep.type, Vector):
            keep = b.splat(keep, s.type.lanes)
        return b.select(keep, s, b.const(NEG_INF, element(s.type)))

    return apply


def _multiplied(a: list[list[Value]], b: list[list[Value]]) -> list[list[Value]]:
    return [[x * y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def score_function(p: Parameters) -> mod.Modifier:
    """The user's function of scores. One for all rows, which share what they have in common."""
    function, unit = p.config.score_function, p.config.score_unit
    assert function is not None
    emitter = Emitter(p, function, SCORE_FUNCTION, unit)
    derivative = derivatives(function)
    slopes = Emitter(p, derivative, SCORE_FUNCTION, unit)

    def slope(b: Builder, before: Value, after: Value, site: mod.Site) -> Value:
        return slopes.results(site, before)[0]

    return mod.Modifier(lambda b, s, site: emitter.score(site, s), True, None if derivative.is_one else slope)


def mask_function(p: Parameters) -> mod.Modifier:
    """The user's function that says which keys are kept."""
    return mod.Modifier(_dropping(keeps(p)), everywhere=p.config.calls_mask)


def keeps(p: Parameters) -> Callable[[mod.Site], Value]:
    """Tells whether the user's function keeps a key."""
    function = p.config.mask_function
    assert function is not None
    return Emitter(p, function, MASK_FUNCTION, p.config.score_unit).keeps


class Scores:
    """Band, modifiers and dropout of the scores of one batch."""

    def __init__(self, parameters: Parameters, batch: Value, extent: Extent | None = None) -> None:
        self.p, self.b, self.config, self.batch = parameters, parameters.b, parameters.config, batch
        number = parameters.number
        self.extent = extent or Extent.of(parameters, batch)
        self.seq_q, self.seq_kv, self.shift = self.extent.seq_q, self.extent.seq_kv, self.extent.shift
        self.left = number("left") if self.config.left else None
        self.right = number("right") if self.config.right else None
        self.keys_end = self.seq_kv
        """Keys from here on are dropped for all rows, rows past the end among them."""

    def drop_unreached(self) -> None:
        """Drop keys behind the reach of the last row for rows past the end, too. They keep those otherwise, and though
        they weigh nothing, NaN in such a key would reach its own gradients."""
        if self.right is not None:
            self.keys_end = self.b.min(self.seq_kv, self.seq_q + self.shift + self.right)

    def reach(self, nearest: Value, furthest: Value) -> Reach:
        """The reach of rows at positions ``nearest .. furthest``."""
        return Reach.of(self.b, self.seq_kv, self.left, self.right, nearest, furthest)

    def reach_of_rows(self, first: Value, count: int) -> Reach:
        """The reach of ``count`` query rows from ``first`` on, as far as they exist."""
        last = self.b.min(first + count, self.seq_q) - 1
        return self.reach(first + self.shift, last + self.shift)

    def rows_reaching(self, first: Value, end: Value) -> tuple[Value, Value]:
        """The query rows ``low .. high - 1`` that may keep a key of ``first .. end - 1``, as ``(low, high)``."""
        b = self.b
        low, high = b.const(0, i32), self.seq_q
        if self.right is not None:
            low = b.max(first - self.right - self.shift, 0)
        if self.left is not None:
            high = b.max(b.min(high, end + self.left - self.shift), 0)
        return low, high

    def modifiers(self, head: Value, columns: dict[str, Columns]) -> list[mod.Modifier]:
        """The modifiers of one query head's rows, in order. An additive mask or bias that is not in ``columns`` is left
        out."""
        b, config, number = self.b, self.config, self.p.number
        work = SCALARS["f64"] if config.dtype == "f64" else f32
        result: list[mod.Modifier] = []
        if config.softcap:
            result.append(mod.softcap(number("softcap", work)))
        if config.mask not in (None, "bool", "bits") and "mask" in columns:
            added = mod.additive(self._reader("mask", config.mask, head, columns["mask"]), config.add)
            result.append(replace(added, everywhere=not config.tiles_listed))
        if config.bias is not None and "bias" in columns:
            result.append(mod.additive(self._reader("bias", config.bias, head, columns["bias"]), config.add))
        if config.alibi:
            slope = b.load(self.p.buffer("alibi", f32), self.p.strided("alibi", self.batch, head))
            slope = b.cast(slope, work)
            result.append(mod.alibi(slope if config.score_unit == 1.0 else slope * config.score_unit))
        if config.score_function is not None:
            result.append(self._score_function)
        if config.mask == "bool":
            result.append(mod.boolean(self._reader("mask", "bool", head, columns["mask"])))
        if config.mask_function is not None:
            result.append(self._mask_function)
        result.append(mod.band(self.keys_end, self.left, self.right))
        return result

    def modify(self, tile: Tile, head: Value, place: Place, partial: Value) -> list[list[Value]] | None:
        """Apply the modifiers of one query head's rows to a tile of scores; those that only drop keys, only if it is
        ``partial``. Returns the derivatives of the scores by what they were before; None if all are 1."""
        b, slope = self.b, None
        for modifier in self.modifiers(head, {"mask": "any", "bias": "any"}):
            before = [] if modifier.slope is None else tile.values()
            with nullcontext() if modifier.everywhere else b.if_(partial):
                self.apply(modifier, tile, head, place)
            if modifier.slope is not None:
                found = self._slopes(modifier.slope, before, tile.values(), head, place)
                slope = found if slope is None else _multiplied(slope, found)
        return slope

    def _slopes(
        self, slope: Slope, before: list[list[Value]], after: list[list[Value]], head: Value, place: Place
    ) -> list[list[Value]]:
        """A modifier's derivative at every element of a tile."""
        return [
            [slope(self.b, x, y, self._site(head, place(r, c))) for c, (x, y) in enumerate(zip(*rows, strict=True))]
            for r, rows in enumerate(zip(before, after, strict=True))
        ]

    def _site(self, head: Value, at: tuple[Value, Value]) -> mod.Site:
        row, key = at
        return mod.Site(self.batch, head, row, key, row + self.shift)

    def apply(self, modifier: mod.Modifier, tile: Tile, head: Value, place: Place) -> None:
        """Apply a modifier to a tile of scores of one query head."""

        def each(s: Value, r: int, c: int) -> Value:
            return modifier.apply(self.b, s, self._site(head, place(r, c)))

        tile.map(each)

    def dropout(self) -> Dropout | None:
        """Draws the weights that are kept; None without dropout."""
        if not self.config.dropout:
            return None
        p, start = self.p, None
        if self.config.dropout_origin:
            start = tuple(p.number(f"dropout_{name}", u32) for name in ("octet", "row", "head"))
        return Dropout(self.b, p.number("dropout_limit", u32), p.buffer("seed", u32), p.strided("seed"), start)

    @cached_property
    def _score_function(self) -> mod.Modifier:
        return score_function(self.p)

    @cached_property
    def _mask_function(self) -> mod.Modifier:
        return mask_function(self.p)

    def _reader(self, name: str, dtype: str, head: Value, columns: Columns) -> Callable[[mod.Site], Value]:
        """A function that reads an element of a mask or bias, or a vector; rows and columns past the end read the
        last."""
        b, index = self.b, self.p.index
        elem = u8 if dtype == "bool" else SCALARS[dtype]
        buffer = self.p.buffer(name, elem)
        base = self.p.strided(name, self.batch, head)
        row_stride = self.p.number(f"{name}_row_stride", index)

        def read(site: mod.Site) -> Value:
            lanes = site.column.type.lanes if isinstance(site.column.type, Vector) else 1
            start = base + b.cast(b.min(site.row, self.seq_q - 1), index) * row_stride
            if columns == "same":
                return b.splat(b.load(buffer, start), lanes)
            step = b.const(1, index) if columns == "unit" else self.p.number(f"{name}_col_stride", index)
            first = b.extract(site.column, 0)

            def gathered() -> Value:
                inside = [b.cast(b.min(first + i, self.seq_kv - 1), index) for i in range(lanes)]
                return b.vector([b.load(buffer, start + i * step) for i in inside])

            if columns == "any" or lanes == 1:
                return gathered()
            found = b.var(b.splat(b.const(0, elem), lanes), name)
            with b.if_(first + lanes <= self.seq_kv):
                found.value = b.load(buffer, start + b.cast(first, index), lanes, align=1)
            with b.else_():
                found.value = gathered()
            result: Value = found.value
            return result

        return read
