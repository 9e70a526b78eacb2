"""The kernels of rotary position embedding, forward and backward, with and without RMSNorm before it.

A row is one head at one position. The rows that a thread processes at once are heads of one position, which share its
angles.
"""

from __future__ import annotations

from dataclasses import dataclass

from aule.ir import KernelIR, Value
from aule.ir.types import i32
from aule.ops.rows.kernel import RowConfig, RowKernel
from aule.target import Target
from aule.tile.rows.column_sums import ColumnSums
from aule.tile.rows.pairs import Pairs
from aule.tile.rows.parts import Columns, Part, PerRow, Source


@dataclass(frozen=True, kw_only=True)
class RopeConfig(RowConfig):
    """Configuration of a rotation's kernel; with ``inverse`` and ``norm``, of the gradient of norm and rotation.

    ``ids`` is the dtype of ``position_ids``, if that is an operand. With ``copies`` columns that are not rotated are
    written as well.
    """

    interleaved: bool
    ids: str | None
    inverse: bool
    norm: bool
    copies: bool


class _Kernel:
    """The angles of a position, and rotations by them."""

    def __init__(self, config: RopeConfig, target: Target) -> None:
        self.config = config
        self.k = RowKernel(config, target)
        self.pairs = self.k.passes
        self.rest = self.k.all_passes[1] if len(self.k.all_passes) > 1 else None
        self.tables = [self.k.array(name) for name in ("cos", "sin")]
        self.weight = self.k.columns("weight")

    def load_angles(self) -> None:
        """Start to load the angles of this thread's rows."""
        k, b, row = self.k, self.k.b, self.k.rows.numbers[0]
        if self.config.ids is None:
            starts = [table.start(row) for table in self.tables]
        else:
            wide = self.config.ids == "i64"  # low words are at even places
            at = k.p.strided("position_ids", *k.axes(row))
            words, last = k.p.buffer("position_ids", i32), k.p.number("positions") - 1
            number = b.load(words, at * 2 if wide else at)
            # Clamped: an invalid position must not leave the table.
            inside = b.max(b.min(number, last), 0)
            if wide:
                high = b.load(words, at * 2 + 1)
                inside = b.select(b.eq(high, 0) & (number >= 0), inside, b.select(high < 0, 0, last))
            starts = [
                k.p.strided(name) + b.cast(inside, k.p.index) * k.p.number(f"{name}_position_stride", k.p.index)
                for name in ("cos", "sin")
            ]
        self.cos, self.sin = (Columns(table, start) for table, start in zip(self.tables, starts, strict=True))
        self.pairs.preload(self.cos, self.sin)

    def rotated(self, p: Part, first: Value, second: Value) -> tuple[Value, Value]:
        """A pair rotated by the angles of its position, or back in the gradient."""
        cos, sin = p[self.cos], p[self.sin]
        if self.config.inverse:
            return first * cos + second * sin, second * cos - first * sin
        return first * cos - second * sin, second * cos + first * sin

    def behind_pairs(self, source: Source) -> Source:
        """The columns after the pairs."""
        rows = self.k.rows
        shift = self.pairs.length * 2
        return Source(source.array, tuple(rows.shifted(source.array, start, shift) for start in source.starts))

    def weights(self) -> tuple[Pairs | None, Columns | None]:
        """The norm's weights for the pairs, and for the columns after them."""
        if self.weight is None:
            return None, None
        rows, start = self.k.rows, self.weight.start
        shifted = rows.shifted(self.weight.array, start, self.pairs.length * 2)
        return Pairs(self.pairs, self.weight, self.config.interleaved), Columns(self.weight.array, shifted)


def build_rope(config: RopeConfig, target: Target) -> KernelIR:
    """Trace the kernel of a rotation, with or without a norm before it, or of a rotation's gradient."""
    kernel = _Kernel(config, target)
    k, pairs, rest = kernel.k, kernel.pairs, kernel.rest
    b, rows = k.b, k.rows
    x_array = k.array("dy" if config.inverse else "x")
    y_array = k.array("dx" if config.inverse else "y", "write")

    def body() -> None:
        x_source, y_source = rows.source(x_array), rows.source(y_array)
        x, y = (Pairs(pairs, source, config.interleaved) for source in (x_source, y_source))
        x.preload()
        x_rest, y_rest = kernel.behind_pairs(x_source), kernel.behind_pairs(y_source)
        if rest is not None:
            rest.preload(x_rest)
        kernel.load_angles()
        weights, weights_rest = kernel.weights()
        scale: PerRow | None = None
        if config.norm:
            squares = pairs.partials("add", lambda p: [p[x.first] * p[x.first] + p[x.second] * p[x.second]], 1)
            if rest is not None:
                more = rest.partials("add", lambda p: [p[x_rest] * p[x_rest]], 1)
                squares = [squares[0].map(lambda s, t: s + t, more[0])]
            inverse, eps = k.number("inverse_length"), k.number("eps")
            scale = rows.reduce("add", squares)[0].map(lambda s: b.unary("rsqrt", s * inverse + eps))

        def write(p: Part) -> None:
            first, second = p[x.first], p[x.second]
            if scale is not None:
                first, second = first * p[scale], second * p[scale]
            if weights is not None:
                first, second = first * p[weights.first], second * p[weights.second]
            y.store(p, *kernel.rotated(p, first, second))

        def pass_on(p: Part) -> None:
            value = p[x_rest] if scale is None else p[x_rest] * p[scale]
            p.store(y_rest, value if weights_rest is None else value * p[weights_rest])

        pairs.each(write)
        if rest is not None and config.copies:
            rest.each(pass_on)

    return k.trace(body)


def build_norm_rope_gradient(config: RopeConfig, target: Target) -> KernelIR:
    """Trace the gradient of a norm and a rotation: rotate back, then as `build_norm_gradient`."""
    kernel = _Kernel(config, target)
    k, pairs, rest = kernel.k, kernel.pairs, kernel.rest
    b, rows = k.b, k.rows
    dy_array, x_array = k.array("dy"), k.array("x")
    dx_array = k.array("dx", "write") if config.has("dx") else None
    half = pairs.length
    sums: list[ColumnSums] = []
    sums_rest: list[ColumnSums] = []
    if config.has("dweight"):  # first columns of pairs, second columns, and the rest; `build_column_sum` sorts them
        sums = [ColumnSums(pairs, k.partial(shift=shift)) for shift in (0, half)]
        sums_rest = [] if rest is None else [ColumnSums(rest, k.partial(shift=half * 2))]

    def body() -> None:
        dy_source, x_source = rows.source(dy_array), rows.source(x_array)
        dy, x = (Pairs(pairs, source, config.interleaved) for source in (dy_source, x_source))
        dy.preload()
        x.preload()
        dy_rest, x_rest = kernel.behind_pairs(dy_source), kernel.behind_pairs(x_source)
        if rest is not None:
            rest.preload(dy_rest, x_rest)
        kernel.load_angles()
        weights, weights_rest = kernel.weights()

        def inner(p: Part) -> tuple[Value, Value]:
            """The gradient of the normalised pair, without its weights."""
            first, second = kernel.rotated(p, p[dy.first], p[dy.second])
            return (first, second) if weights is None else (first * p[weights.first], second * p[weights.second])

        def inner_rest(p: Part) -> Value:
            return p[dy_rest] if weights_rest is None else p[dy_rest] * p[weights_rest]

        def products(p: Part) -> list[Value]:
            first, second = inner(p)
            a, c = p[x.first], p[x.second]
            return [a * a + c * c, first * a + second * c]

        found = pairs.partials("add", products, 2)
        if rest is not None:
            more = rest.partials("add", lambda p: [p[x_rest] * p[x_rest], inner_rest(p) * p[x_rest]], 2)
            found = [one.map(lambda s, t: s + t, other) for one, other in zip(found, more, strict=True)]
        squares, along = rows.reduce("add", found)
        inverse, eps = k.number("inverse_length"), k.number("eps")
        scale = squares.map(lambda s: b.unary("rsqrt", s * inverse + eps))
        along = along.map(lambda s, r: s * inverse * r * r, scale)
        if dx_array is not None:
            dx_source = rows.source(dx_array)
            dx, dx_rest = Pairs(pairs, dx_source, config.interleaved), kernel.behind_pairs(dx_source)

        def write(p: Part) -> list[Value]:
            a, c = p[x.first], p[x.second]
            if dx_array is not None:
                first, second = inner(p)
                dx.store(p, (first - a * p[along]) * p[scale], (second - c * p[along]) * p[scale])
            first, second = kernel.rotated(p, p[dy.first], p[dy.second])
            return [first * (a * p[scale]), second * (c * p[scale])] if sums else []

        def write_rest(p: Part) -> list[Value]:
            if dx_array is not None:
                p.store(dx_rest, (inner_rest(p) - p[x_rest] * p[along]) * p[scale])
            return [p[dy_rest] * (p[x_rest] * p[scale])] if sums_rest else []

        pairs.each(write, sums)
        if rest is not None:
            rest.each(write_rest, sums_rest)

    return k.trace(body, sums=(*sums, *sums_rest))
