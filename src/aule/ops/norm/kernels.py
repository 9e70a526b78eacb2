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
from aule.tile.carried import Numbers
from aule.tile.column_sums import ColumnSums
from aule.tile.math import fold
from aule.tile.rows import Columns, PerRow, Source
from aule.tile.spans import Derived, Part, Product, Term
from aule.tile.stages import Stages


@dataclass(frozen=True, kw_only=True)
class NormConfig(RowConfig):
    """A kernel of normalisation; what else there is is said by its operands.

    Attributes
    ----------
    moments : bool
        Mean and squares of a row come from one exchange, where they can: its numbers have 16 bits, which are fewer
        digits than are lost when the mean is rounded.
    """

    name: str
    center: bool
    moments: bool = False


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
    k: RowKernel,
    x: Source | Derived,
    center: bool,
    also: Sequence[Callable[[Part, Value], Term]] = (),
    moments: bool = False,
) -> Normalised:
    """Statistics of rows; ``also`` are functions of a part and its columns, without the mean but for ``shift``, whose
    sums are wanted as well. For ``moments`` see `NormConfig`."""
    b, span = k.b, k.span
    inverse, eps = k.number("inverse_length"), k.number("eps")

    def square(x: Source | Derived) -> Callable[[Part], Term]:
        return lambda p: Product(p[x], p[x])

    def extra(x: Source | Derived) -> list[Callable[[Part], Term]]:
        return [lambda p, f=f: f(p, p[x]) for f in also]  # type: ignore[misc]

    if not center:
        squares, *sums = span.sums(square(x), *extra(x))
        return Normalised(x, None, squares.map(lambda s: b.unary("rsqrt", s * inverse + eps)), None, sums, x)
    even = span.shape.parts > 0 and not span.shape.ragged and k.rows.merges
    if moments and even and not also:
        mean, squares = _moments(k, x)
        scale = squares.map(lambda s: b.unary("rsqrt", s * inverse + eps))
        near = Derived(lambda p: p[x] - p[mean])
        return Normalised(near, mean, scale, None, [], near)
    mean = span.sum(lambda p: p[x]).map(lambda s: s * inverse)
    near = Derived(lambda p: p[x] - p[mean])
    left, squares, *sums = span.sums(lambda p: p[near], square(near), *extra(near))
    shift = left.map(lambda s: s * inverse)
    variance = squares.map(lambda s, m: b.max(s * inverse - m * m, 0.0), shift)
    scale = variance.map(lambda v: b.unary("rsqrt", v + eps))
    return Normalised(Derived(lambda p: p[near] - p[shift]), mean, scale, shift, sums, near)


def recall(
    k: RowKernel, x: Source | Derived, also: Sequence[Callable[[Part, Value], Term]], kept: Sequence[PerRow]
) -> Normalised:
    """`normalise` with statistics that the forward kernel has left."""
    mean, scale, *rest = kept
    shift = rest[0] if rest else None
    near = Derived(lambda p: p[x] - p[mean])
    sums = k.span.sums(*(lambda p, f=f: f(p, p[near]) for f in also))
    return Normalised(near if shift is None else Derived(lambda p: p[near] - p[shift]), mean, scale, shift, sums, near)


def kept_numbers(k: RowKernel) -> int:
    """How many of a row's numbers the gradient has: of 16-bit numbers on GPUs without the rest of the mean, which is
    less than their last place."""
    return 2 if k.narrow and not k.cpu else STATISTICS


def _moments(k: RowKernel, x: Source | Derived) -> tuple[PerRow, PerRow]:
    """Mean of rows, and the sum of squares about it, by one pass and one exchange: each part has those of its own, and
    two that meet have those of both."""
    b, span, width = k.b, k.span, k.span.shape.width
    found: dict[int, tuple[Value, Value]] = {}
    count = 0

    def add(parts: list[Part], _: int) -> None:
        nonlocal count
        for part in parts:
            values = b.unpack(part[x])
            mean = fold(b, "add", values) * (1.0 / width)
            squares = _squares(b, [value - mean for value in values])
            if count:
                before, sums = found[part.row]
                apart, share = mean - before, width / (count + width)
                mean, squares = b.fma(apart, share, before), b.fma(apart * (count * share), apart, sums + squares)
            found[part.row] = mean, squares
        count += width

    span.walk(add)
    means, sums = zip(*(found[row] for row in sorted(found)), strict=True)
    return k.rows.merged(PerRow(means), PerRow(sums), count)


def _squares(b: Builder, values: list[Value]) -> Value:
    """The sum of squares, by two chains, since an addition waits for the one before."""
    chains = [x * x for x in values[:2]]
    for i, x in enumerate(values[2:]):
        chains[i % 2] = b.fma(x, x, chains[i % 2])
    return fold(b, "add", chains)


def build_norm(config: NormConfig, target: Target) -> KernelIR:
    """Trace the forward kernel."""
    k = RowKernel(config.name, config, target)
    b, span, rows = k.b, k.span, k.rows
    arrays = {name: k.array(name) for name in ("x", "residual") if config.has(name)}
    weight, bias = k.columns("weight"), k.columns("bias")
    results = {name: k.array(name, "write") for name in ("y", "h") if config.has(name)}

    stages = None
    if config.shape.landed:
        stages = span.early = Stages(span, list(arrays.values()))

    def body() -> None:
        given = {name: rows.source(array) for name, array in arrays.items()}
        out = {name: rows.source(array) for name, array in results.items()}
        if stages is not None:
            stages.land()
        span.hold(*given.values())
        span.hold(*(columns for columns in (weight, bias) if columns is not None))
        x: Source | Derived = given["x"]
        if "residual" in given:
            # Rounded as it is stored: the gradient sees the same.
            elem = SCALARS[config.dtype]
            x = h = Derived(lambda p: b.cast(p[given["x"]] + p[given["residual"]], elem), narrow=True)
        early = span.shape.parts > 0 and not span.shape.packed
        if "h" in out and early:  # later it would take registers until then
            span.each(lambda p: p.store(out["h"], p.raw(h)))
        found = normalise(k, x, config.center, moments=config.moments)
        if config.has("statistics"):
            assert found.mean is not None
            numbers = (found.mean, found.scale, found.shift)
            for number, statistic in enumerate(numbers[: kept_numbers(k)]):
                assert statistic is not None
                rows.put(k.statistic(number, "write"), statistic)
        scaled = found.scaled(b)

        def write(p: Part) -> None:
            if "h" in out and not early:
                p.store(out["h"], p.raw(h))
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
    sums = {name: ColumnSums(span, k.partial(i), config.sums) for i, name in enumerate(wanted)}

    statistics = [k.statistic(number) for number in range(kept_numbers(k))] if config.has("statistics") else []
    numbers = Numbers(rows, statistics) if statistics and rows.shape.loops and not k.cpu else None

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
        if config.has("statistics"):
            kept = numbers.found if numbers is not None else [rows.get(array) for array in statistics]
            found = recall(k, x, also, kept)
        else:
            found = normalise(k, x, config.center, also)
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

    if weight is not None and span.shape.columns == "kept":
        span.hold(weight)
    often = arrays.get("h", arrays.get("x", arrays["dy"]))
    early = k.read_ahead(list(arrays.values()), often)
    ahead = [x for x in (numbers, early) if x is not None]
    rows.run(add_up if len(arrays) == 1 else body, *ahead)
    k.leave(sums.values())
    return k.finish()
