"""The kernels of normalisation, forward and backward, over `aule.tile.rows`.

Statistics are made in two passes over registers: the mean first, then the squares of what is left, with what the
rounding of the mean has left behind taken off as well. So a large common offset costs no digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS
from aule.ops.norm.problem import STATISTICS
from aule.ops.rowwise import RowConfig, RowKernel
from aule.target import Target
from aule.tile.column_sums import ColumnSums
from aule.tile.rows import Columns, PerRow, Source
from aule.tile.spans import Derived, Part, Product, Term


@dataclass(frozen=True, kw_only=True)
class NormConfig(RowConfig):
    """A kernel of normalisation; what else there is is said by its operands."""

    name: str
    center: bool


@dataclass(frozen=True, eq=False)
class Normalised:
    """Rows on their way to mean square one.

    Attributes
    ----------
    centred : Source or Derived
        Without their mean, where that goes.
    mean : PerRow or None
        But for ``shift``.
    scale : PerRow
        What makes their mean square one.
    shift : PerRow or None
        What ``also`` was not told: the rest of the mean.
    sums : list of PerRow
        Of what was asked for along the way.
    near : Source or Derived
        Without ``mean``, but not without ``shift``.
    """

    centred: Source | Derived
    mean: PerRow | None
    scale: PerRow
    shift: PerRow | None
    sums: list[PerRow]
    near: Source | Derived

    def scaled(self, b: Builder) -> Callable[[Part], Value]:
        """What they are in the end: by one operation each."""
        if self.shift is None:
            return lambda p: p[self.near] * p[self.scale]
        offset = self.shift.map(lambda m, r: m * -r, self.scale)
        return lambda p: b.fma(p[self.near], p[self.scale], p[offset])


def normalise(
    k: RowKernel, x: Source | Derived, center: bool, also: Sequence[Callable[[Part, Value], Term]] = ()
) -> Normalised:
    """Statistics of rows; ``also`` are functions of a part and its columns, without the mean but for ``shift``, whose
    sums are wanted as well."""
    b, span = k.b, k.span
    inverse, eps = k.number("inverse_length"), k.number("eps")

    def square(x: Source | Derived) -> Callable[[Part], Term]:
        return lambda p: Product(p[x], p[x])

    def extra(x: Source | Derived) -> list[Callable[[Part], Term]]:
        return [lambda p, f=f: f(p, p[x]) for f in also]  # type: ignore[misc]

    if not center:
        squares, *sums = span.sums(square(x), *extra(x))
        return Normalised(x, None, squares.map(lambda s: b.unary("rsqrt", s * inverse + eps)), None, sums, x)
    mean = span.sum(lambda p: p[x]).map(lambda s: s * inverse)
    near = Derived(lambda p: p[x] - p[mean])
    left, squares, *sums = span.sums(lambda p: p[near], square(near), *extra(near))
    shift = left.map(lambda s: s * inverse)
    variance = squares.map(lambda s, m: b.max(s * inverse - m * m, 0.0), shift)
    scale = variance.map(lambda v: b.unary("rsqrt", v + eps))
    return Normalised(Derived(lambda p: p[near] - p[shift]), mean, scale, shift, sums, near)


def recall(k: RowKernel, x: Source | Derived, also: Sequence[Callable[[Part, Value], Term]]) -> Normalised:
    """`normalise` with statistics that the forward kernel has left."""
    mean, scale, shift = (k.rows.get(k.statistic(number)) for number in range(STATISTICS))
    near = Derived(lambda p: p[x] - p[mean])
    sums = k.span.sums(*(lambda p, f=f: f(p, p[near]) for f in also))
    return Normalised(Derived(lambda p: p[near] - p[shift]), mean, scale, shift, sums, near)


def build_norm(config: NormConfig, target: Target) -> KernelIR:
    """Trace the forward kernel."""
    k = RowKernel(config.name, config, target)
    b, span, rows = k.b, k.span, k.rows
    arrays = {name: k.array(name) for name in ("x", "residual") if config.has(name)}
    weight, bias = k.columns("weight"), k.columns("bias")
    results = {name: k.array(name, "write") for name in ("y", "h") if config.has(name)}

    def body() -> None:
        given = {name: rows.source(array) for name, array in arrays.items()}
        out = {name: rows.source(array) for name, array in results.items()}
        span.hold(*given.values())
        span.hold(*(columns for columns in (weight, bias) if columns is not None))
        x: Source | Derived = given["x"]
        if "residual" in given:
            # Rounded as it is stored: the gradient sees the same.
            elem = SCALARS[config.dtype]
            x = Derived(lambda p: b.cast(b.cast(p[given["x"]] + p[given["residual"]], elem), k.work))
        early = span.shape.parts > 0
        if "h" in out and early:  # later it would take registers until then
            span.each(lambda p: p.store(out["h"], p[x]))
        found = normalise(k, x, config.center)
        if config.has("statistics"):
            assert found.mean is not None and found.shift is not None
            for number, statistic in enumerate((found.mean, found.scale, found.shift)):
                rows.put(k.statistic(number, "write"), statistic)
        scaled = found.scaled(b)

        def write(p: Part) -> None:
            if "h" in out and not early:
                p.store(out["h"], p[x])
            p.store(out["y"], affine(p, scaled(p), weight, bias))

        span.each(write)

    rows.run(body)
    return k.finish()


def affine(p: Part, value: Value, weight: Columns | None, bias: Columns | None) -> Value:
    """A normalised part with weight and bias."""
    if weight is None:
        return value if bias is None else value + p[bias]
    return value * p[weight] if bias is None else p.span.rows.b.fma(value, p[weight], p[bias])


def rows_read(operands: Iterable[str]) -> list[str]:
    """Which operands of a gradient are rows that it reads: of ``dbias`` alone, no more than ``dy``."""
    given = set(operands)
    if given.isdisjoint(("dx", "dweight")):
        return ["dy"]
    return [name for name in ("dy", "x", "h", "dh") if name in given]


def build_norm_gradient(config: NormConfig, target: Target) -> KernelIR:
    """Trace the backward kernel: statistics are made again, which costs no memory, unless they were kept, and with them
    ``dx``; the sums over rows of which the gradients of weight and bias are made stay where they are until the
    workgroup's last row."""
    k = RowKernel(config.name, config, target)
    b, span, rows = k.b, k.span, k.rows
    inverse = k.number("inverse_length")
    arrays = {name: k.array(name) for name in rows_read(name for name, _ in config.operands)}
    weight = k.columns("weight")
    result = k.array("dx", "write") if config.has("dx") else None
    wanted = [name for name in ("dweight", "dbias") if config.has(name)]
    sums = {name: ColumnSums(span, k.partial(i)) for i, name in enumerate(wanted)}

    def add_up() -> None:
        dy = rows.source(arrays["dy"])
        span.hold(dy)
        span.each(lambda p: [p[dy]], list(sums.values()))

    def body() -> None:
        given = {name: rows.source(array) for name, array in arrays.items()}
        span.hold(*given.values(), *([] if weight is None else [weight]))
        dy, x = given["dy"], given["h" if "h" in given else "x"]

        def inner(p: Part) -> Value:
            return p[dy] if weight is None else p[dy] * p[weight]

        also: list[Callable[[Part, Value], Term]] = [lambda p, x: Product(inner(p), x)]
        if config.center:
            also.append(lambda p, x: inner(p))
        found = recall(k, x, also) if config.has("statistics") else normalise(k, x, config.center, also)
        along, total = found.sums[0], found.sums[-1]
        if found.shift is not None:
            along = along.map(lambda s, t, m: s - t * m, total, found.shift)
        # dx = scale * (inner - mean of inner - centred * along); its last two terms are `level` and `slope`
        slope = along.map(lambda s, r: s * inverse * r * r * -r, found.scale)
        level = total.map(lambda s, r: s * inverse * -r, found.scale)

        def write(p: Part) -> list[Term]:
            centred, scaled = p[found.centred], p[dy] * p[found.scale]
            if result is not None:
                dx = b.fma(centred, p[slope], p[level]) if config.center else centred * p[slope]
                dx = scaled + dx if weight is None else b.fma(scaled, p[weight], dx)
                p.store(to, dx + p[given["dh"]] if "dh" in given else dx)
            return [Product(scaled, centred) if name == "dweight" else p[dy] for name in sums]

        if result is not None:
            to = rows.source(result)
        span.each(write, list(sums.values()))

    often = arrays.get("h", arrays.get("x", arrays["dy"]))
    rows.run(add_up if len(arrays) == 1 else body, k.read_ahead(list(arrays.values()), often))
    k.leave(sums.values())
    return k.finish()
