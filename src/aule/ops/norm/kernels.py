"""The kernels of normalisation, forward and backward, over `aule.tile.rows`.

Statistics take two passes over registers: the mean first, then the deviations from it and their squares. The mean of
the deviations, left over when the first was rounded, is subtracted as well, so a large common offset costs no digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS
from aule.ops.norm.problem import STATISTICS
from aule.ops.rows.kernel import RowConfig, RowKernel
from aule.target import Target
from aule.tile.common.math import fold
from aule.tile.rows.column_sums import ColumnSums
from aule.tile.rows.parts import Columns, Derived, Part, PerRow, Product, Source, Term
from aule.tile.rows.prefetch_registers import StatisticsPrefetch
from aule.tile.rows.prefetch_shared import SharedPrefetch

ExtraTerm = Callable[[Part, Value], Term]
"""A function of a part and its deviations from the rounded mean (`Normalised.rough`)."""


@dataclass(frozen=True, kw_only=True)
class NormConfig(RowConfig):
    """Configuration of a normalisation kernel; operands say what else it does.

    With ``moments`` one exchange gives mean and variance of a row, if possible: for 16-bit elements, whose own rounding
    exceeds the digits lost when the mean is rounded.
    """

    center: bool
    moments: bool = False


@dataclass(frozen=True, eq=False)
class Normalised:
    """Statistics of rows, and rows that are centred but not scaled.

    Attributes
    ----------
    centred : Source or Derived
        Rows without their mean, if that is subtracted.
    rough : Source or Derived
        Rows without ``mean``, but with ``mean_rest``.
    mean : PerRow or None
        The rounded mean.
    mean_rest : PerRow or None
        The mean of ``rough``.
    scale : PerRow
        The factor that makes the mean square of rows one.
    sums : list of PerRow
        Sums of the extra terms.
    """

    centred: Source | Derived
    rough: Source | Derived
    mean: PerRow | None
    mean_rest: PerRow | None
    scale: PerRow
    sums: list[PerRow]

    def scaled(self, b: Builder) -> Callable[[Part], Value]:
        """The normalised rows, by one operation per element."""
        if self.mean_rest is None:
            return lambda p: p[self.rough] * p[self.scale]
        offset = self.mean_rest.map(lambda m, r: m * -r, self.scale)
        return lambda p: b.fma(p[self.rough], p[self.scale], p[offset])


def normalise(
    k: RowKernel, x: Source | Derived, center: bool, extra: Sequence[ExtraTerm] = (), moments: bool = False
) -> Normalised:
    """Compute the statistics of rows, and sums of ``extra`` terms; for ``moments`` see `NormConfig`."""
    b, passes = k.b, k.passes
    inverse, eps = k.number("inverse_length"), k.number("eps")

    def square(x: Source | Derived) -> Callable[[Part], Term]:
        return lambda p: Product(p[x], p[x])

    def terms(x: Source | Derived) -> list[Callable[[Part], Term]]:
        return [lambda p, f=f: f(p, p[x]) for f in extra]  # type: ignore[misc]

    if not center:
        squares, *sums = passes.sums(square(x), *terms(x))
        scale = squares.map(lambda s: b.unary("rsqrt", s * inverse + eps))
        return Normalised(x, x, None, None, scale, sums)
    if moments and passes.shape.parts and k.rows.can_merge_moments and not extra:
        mean, squares = _moments(k, x)
        scale = squares.map(lambda s: b.unary("rsqrt", s * inverse + eps))
        rough = Derived(lambda p: p[x] - p[mean])
        return Normalised(rough, rough, mean, None, scale, [])
    mean = passes.sum(lambda p: p[x]).map(lambda s: s * inverse)
    rough = Derived(lambda p: p[x] - p[mean])
    rest, squares, *sums = passes.sums(lambda p: p[rough], square(rough), *terms(rough))
    mean_rest = rest.map(lambda s: s * inverse)
    variance = squares.map(lambda s, m: b.max(s * inverse - m * m, 0.0), mean_rest)
    scale = variance.map(lambda v: b.unary("rsqrt", v + eps))
    return Normalised(Derived(lambda p: p[rough] - p[mean_rest]), rough, mean, mean_rest, scale, sums)


def restore(k: RowKernel, x: Source | Derived, extra: Sequence[ExtraTerm], statistics: Sequence[PerRow]) -> Normalised:
    """`normalise` with the statistics that the forward kernel saved."""
    mean, scale, *rest = statistics
    mean_rest = rest[0] if rest else None
    rough = Derived(lambda p: p[x] - p[mean])
    sums = k.passes.sums(*(lambda p, f=f: f(p, p[rough]) for f in extra))
    centred = rough if mean_rest is None else Derived(lambda p: p[rough] - p[mean_rest])
    return Normalised(centred, rough, mean, mean_rest, scale, sums)


def saved_statistics(k: RowKernel) -> int:
    """How many statistics per row the gradient uses: for 16-bit rows on GPUs not the rest of the mean, which is below
    their last place."""
    return 2 if k.narrow and not k.cpu else STATISTICS


def _moments(k: RowKernel, x: Source | Derived) -> tuple[PerRow, PerRow]:
    """Mean and squared deviations of rows by one pass and one exchange: those of parts are merged."""
    b, passes, width = k.b, k.passes, k.passes.shape.width
    found: dict[int, tuple[Value, Value]] = {}
    count, exist = 0, b.const(0.0, k.work)

    def add(parts: list[Part], _: int) -> None:
        nonlocal count, exist
        for part in parts:
            values = b.unpack(part[x])
            mean = fold(b, "add", values) * (1.0 / width)
            squares = _squares(b, [value - mean for value in values])
            before, sums = found.get(part.row, (mean, b.const(0.0, k.work)))
            if count:
                difference, share = mean - before, width / (count + width)
                mean = b.fma(difference, share, before)
                squares = b.fma(difference * (count * share), difference, sums + squares)
            if part.inside is not None:
                mean, squares = b.select(part.inside, mean, before), b.select(part.inside, squares, sums)
            found[part.row] = mean, squares
        inside, columns = parts[0].inside, b.const(float(width), k.work)
        exist = exist + (columns if inside is None else b.select(inside, columns, 0.0))
        count += width

    passes.walk(add)
    means, sums = zip(*(found[row] for row in sorted(found)), strict=True)
    return k.rows.merge_moments(PerRow(means), PerRow(sums), exist if passes.shape.ragged else count)


def _squares(b: Builder, values: list[Value]) -> Value:
    """The sum of squares, in two chains, since an addition waits for the one before."""
    chains = [x * x for x in values[:2]]
    for i, x in enumerate(values[2:]):
        chains[i % 2] = b.fma(x, x, chains[i % 2])
    return fold(b, "add", chains)


def build_norm(config: NormConfig, target: Target) -> KernelIR:
    """Trace the forward kernel."""
    k = RowKernel(config, target)
    b, passes, rows = k.b, k.passes, k.rows
    arrays = {name: k.array(name) for name in ("x", "residual") if config.has(name)}
    weight, bias = k.columns("weight"), k.columns("bias")
    results = {name: k.array(name, "write") for name in ("y", "h") if config.has(name)}
    shared = None
    if config.shape.in_shared:
        shared = passes.prefetch = SharedPrefetch(passes, list(arrays.values()))

    def body() -> None:
        given = {name: rows.source(array) for name, array in arrays.items()}
        out = {name: rows.source(array) for name, array in results.items()}
        if shared is not None:
            shared.copy_block()
        passes.preload(*given.values())
        passes.preload(*(columns for columns in (weight, bias) if columns is not None))
        x: Source | Derived = given["x"]
        if "residual" in given:
            # Rounded as it is stored: the gradient sees the same values.
            elem = SCALARS[config.dtype]
            x = h = Derived(lambda p: b.cast(p[given["x"]] + p[given["residual"]], elem), narrow=True)
        store_first = passes.shape.parts > 0 and not passes.shape.narrow
        if "h" in out and store_first:  # stored later, it would occupy registers until then
            passes.each(lambda p: p.store(out["h"], p.raw(h)))
        found = normalise(k, x, config.center, moments=config.moments)
        if config.has("statistics"):
            assert found.mean is not None
            statistics = (found.mean, found.scale, found.mean_rest)
            for number, statistic in enumerate(statistics[: saved_statistics(k)]):
                assert statistic is not None
                rows.put(k.statistic(number, "write"), statistic)
        scaled = found.scaled(b)

        def write(p: Part) -> None:
            if "h" in out and not store_first:
                p.store(out["h"], p.raw(h))
            p.store(out["y"], affine(p, scaled(p), weight, bias))

        passes.each(write)

    return k.trace(body)


def affine(p: Part, value: Value, weight: Columns | None, bias: Columns | None) -> Value:
    """Apply weight and bias to a normalised part."""
    if weight is None:
        return value if bias is None else value + p[bias]
    return value * p[weight] if bias is None else p.passes.rows.b.fma(value, p[weight], p[bias])


def rows_read(operands: Iterable[str]) -> list[str]:
    """The operands of a gradient that are rows it reads: ``dbias`` alone needs only ``dy``."""
    given = set(operands)
    if given.isdisjoint(("dx", "dweight")):
        return ["dy"]
    return [name for name in ("dy", "x", "h", "dh") if name in given]


def build_norm_gradient(config: NormConfig, target: Target) -> KernelIR:
    """Trace the backward kernel.

    It recomputes the statistics, which needs no memory, unless the forward kernel saved them. The sums over rows for
    the gradients of weight and bias accumulate until the workgroup's last row.
    """
    k = RowKernel(config, target)
    b, passes, rows = k.b, k.passes, k.rows
    inverse = k.number("inverse_length")
    arrays = {name: k.array(name) for name in rows_read(name for name, _ in config.operands)}
    weight = k.columns("weight")
    result = k.array("dx", "write") if config.has("dx") else None
    wanted = [name for name in ("dweight", "dbias") if config.has(name)]
    sums = {name: ColumnSums(passes, k.partial(i), config.sums) for i, name in enumerate(wanted)}
    statistics = [k.statistic(number) for number in range(saved_statistics(k))] if config.has("statistics") else []
    saved = StatisticsPrefetch(rows, statistics) if statistics and rows.shape.loops and not k.cpu else None

    def add_up() -> None:
        dy = rows.source(arrays["dy"])
        passes.preload(dy)
        passes.each(lambda p: [p[dy]], list(sums.values()))

    def body() -> None:
        given = {name: rows.source(array) for name, array in arrays.items()}
        passes.preload(*given.values(), *([] if weight is None else [weight]))
        dy, x = given["dy"], given["h" if "h" in given else "x"]

        def inner(p: Part) -> Value:
            return p[dy] if weight is None else p[dy] * p[weight]

        extra: list[ExtraTerm] = [lambda p, x: Product(inner(p), x)]
        if config.center:
            extra.append(lambda p, x: inner(p))
        if statistics:
            found = restore(k, x, extra, saved.found if saved is not None else [rows.get(x) for x in statistics])
        else:
            found = normalise(k, x, config.center, extra)
        along, total = found.sums[0], found.sums[-1]
        if found.mean_rest is not None:
            along = along.map(lambda s, t, m: s - t * m, total, found.mean_rest)
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
        passes.each(write, list(sums.values()))

    if weight is not None and passes.shape.columns == "resident":
        passes.preload(weight)
    prefetch = k.prefetch(list(arrays.values()), arrays.get("h", arrays.get("x", arrays["dy"])))
    prefetches = [x for x in (saved, prefetch) if x is not None]
    return k.trace(add_up if len(arrays) == 1 else body, *prefetches, sums=sums.values())
