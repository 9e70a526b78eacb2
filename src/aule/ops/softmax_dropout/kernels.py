"""The kernels of softmax with masks and dropout, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from aule.ir import KernelIR, Value
from aule.ir.types import SCALARS, Vector, bf16, element, i16, i32, u16, u32, u64
from aule.ops.rows.kernel import RowConfig, RowKernel
from aule.ops.softmax.dropout import OCTET, VECTORS, Dropout
from aule.ops.softmax_dropout.problem import STATISTICS
from aule.target import Target
from aule.tile.common.math import NEG_INF
from aule.tile.rows.parts import Derived, Part, PerRow, Product, RowArray, Source, Term
from aule.tile.vector.engine import has_pairs

EarlyDraw = Literal["", "words", "masks"]


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(RowConfig):
    """Configuration of a softmax kernel.

    Attributes
    ----------
    mask : str or None
        The mask's dtype.
    dropout : bool
        Weights are dropped, and the others scaled; a seed says which, or a result.
    folded : bool
        The scale is applied in the exponent: it preserves the order of scores, and nothing is added to them.
    one_exchange : bool
        Subgroups that share a row take exponentials relative to the maximum of their own columns, and exchange once.
    early_draw : str
        Dropout is drawn while rows are being loaded, as random ``words`` or as ``masks`` of the result's bits. One
        instruction makes masks for two columns, if there is arithmetic of 16-bit pairs.
    fetches : bool
        Rows of later workgroups are fetched to the second-level cache.
    narrow : bool
        The maximum is taken of elements in their own type.
    small : bool
        The conversion of weights is told that they are small.
    """

    mask: str | None
    causal: bool
    dropout: bool
    folded: bool
    one_exchange: bool = False
    early_draw: EarlyDraw = ""
    fetches: bool = False
    narrow: bool = False
    small: bool = False


class _Kernel:
    """Scores, which of them count, and which weights are dropped."""

    def __init__(self, config: SoftmaxConfig, target: Target) -> None:
        self.config = config
        self.k = k = RowKernel(config, target)
        self.passes = k.passes
        self.passes.kernel_masks = config.causal  # no row's band reaches past its end
        self.fuses = target.exact_fma  # large scores would lose digits as products that are rounded by themselves
        self.x_array = k.array("x")
        self.mask_array = k.array("mask") if config.mask else None
        self.y_array = k.array("y") if config.has("y") and config.has("dy") else None
        self.seed = k.p.buffer("seed", u32) if config.dropout and self.y_array is None else None

    def load_rows(self) -> None:
        """Start to load the rows of this block, and define their scores."""
        k, b, passes = self.k, self.k.b, self.passes
        rows = k.rows
        self.x: Source | Derived = rows.source(self.x_array)
        passes.preload(self.x)
        if self.config.fetches:
            self._fetch_later_row()
        self.mask = self._preloaded(self.mask_array)
        self.y = self._preloaded(self.y_array)
        per_head = k.p.number("seq")
        if k.cpu or self.config.has("dy"):
            self.row = rows.per_row(lambda number: number % per_head)
            self.head = rows.per_row(lambda number: number // per_head)
        else:
            # The draw waits for it; gradients draw later, and are faster with a plain division.
            self.head = rows.per_row(lambda number: k.quotient(number, "seq"))
            self.row = self.head.map(lambda head, number: number - head * per_head, PerRow(rows.numbers))
        if self.seed is not None:
            self.dropout = Dropout(b, k.p.number("dropout_limit", u32), self.seed, k.p.number("seed_offset", k.p.index))
        self.scores = Derived(self._scores)
        self.drawn: Derived | None = None
        """Random words or masks that were drawn early, if any."""
        if self.config.early_draw:
            self._draw_early()

    def _preloaded(self, array: RowArray | None) -> Source | None:
        if array is None:
            return None
        source = self.k.rows.source(array)
        self.passes.preload(source)
        return source

    def _fetch_later_row(self) -> None:
        """Fetch this thread's share, less than a cache line, of the row ``later`` rows on: memory stays busy while this
        row is processed."""
        b, passes, rows = self.k.b, self.passes, self.k.rows
        number = rows.numbers[0] + self.k.p.number("later")
        with b.if_(number < rows.count):
            start = self.x_array.start(number)
            col = b.min(passes.lane * (passes.shape.width * passes.shape.parts), passes.length - passes.shape.width)
            b.prefetch(self.x_array.buffer, start + b.cast(col, element(start.type)))

    # -- exponentials --------------------------------------------------------------------------------------------------

    def exponentials(self, dp: Derived | None = None) -> tuple[Derived, list[PerRow], PerRow | None]:
        """Exponentials of a row; their sum and, with ``dp``, the sum of their products with it; and the factor of each
        subgroup, if exponentials are relative to its own maximum."""
        b, passes, rows = self.k.b, self.passes, self.k.rows

        def finite(m: Value) -> Value:
            """0 if no column counts."""
            return b.select(b.eq(m, NEG_INF), 0.0, m)

        def terms(p: Part) -> list[Term]:
            return [p[powers]] if dp is None else [p[powers], Product(p[powers], p[dp])]

        count = 1 if dp is None else 2
        if self.config.narrow:
            thread_max = passes.thread_max(self.x)
        else:
            thread_max = passes.partials("max", lambda p: [p[self.scores]], 1)[0]
        if not (self.config.one_exchange and rows.can_exchange_subgroups):
            self.largest = rows.reduce("max", [thread_max])[0].map(finite)
            powers = self.relative_to(self.largest, costly=True)
            return powers, rows.reduce("add", passes.partials("add", terms, count)), None
        own_max = rows.reduce_subgroup("max", thread_max)
        powers = self.relative_to(own_max.map(finite), costly=True)
        (their_max, *sums), combine = rows.exchange_subgroups(own_max, passes.partials("add", terms, count))
        largest = self.largest = combine("max", their_max)[0].map(finite)
        theirs, own = (x.map(self._rescale, largest) for x in (their_max, own_max))
        return powers, combine("add", *(s.map(lambda x, c: x * c, theirs) for s in sums)), own

    def relative_to(self, largest: PerRow, costly: bool) -> Derived:
        """Exponentials of scores relative to ``largest``."""
        b = self.k.b
        if not self.fuses:
            factor = self.k.number("factor")
            return Derived(lambda p: b.exp2((p[self.scores] - p[largest]) * factor), costly)
        factors = largest.map(self._factor)
        low = largest.map(lambda m, f: -(m * f), factors)
        return Derived(lambda p: b.exp2(b.fma(p[self.scores], p[factors], p[low])), costly)

    def _rescale(self, m: Value, largest: Value) -> Value:
        """The factor by which exponentials relative to ``m`` become relative to ``largest``."""
        b = self.k.b
        if not self.fuses:
            return b.exp2((m - largest) * self.k.number("factor"))
        one, other = self._factor(m), self._factor(largest)
        moved = b.exp2(m * one - largest * other)  # the products as they were rounded
        return b.select(b.eq(one, other), moved, 0.0)

    def _factor(self, m: Value) -> Value:
        """The factor of scores in the exponents of a row whose maximum is ``m``.

        Its product with the maximum is rounded, by the same amount in all of a row, which cancels in the division by
        the sum. For large scores (-1e30 in place of -inf) that amount would exceed the range of exponents: they take a
        power of two, which rounds nothing, or 1 if the product would overflow (finfo.min). Scores other than the
        maximum are then too far away to have weight.
        """
        b, number = self.k.b, self.k.number
        far = b.select(b.abs(m) < number("reach"), number("power"), 1.0)
        return b.select(b.abs(m) < number("near"), number("factor"), far)

    def _scores(self, p: Part) -> Value:
        """Scores, -inf for columns that do not count."""
        b, config = self.k.b, self.config
        x = p[self.x]
        if not config.folded:
            x = x * self.k.number("scale")
            if self.mask is not None and config.mask != "bool":
                x = x + p[self.mask]
        counts = self.counts(p)
        return x if counts is None else b.select(counts, x, b.const(NEG_INF, self.k.work))

    def counts(self, p: Part) -> Value | None:
        """Which columns count; None if all do."""
        b, config = self.k.b, self.config
        found: Value | None = None
        if self.mask is not None and config.mask == "bool":
            found = b.ne(p.raw(self.mask), 0)
        if config.causal:
            last = b.cast(p[self.row] + self.k.p.number("shift"), self.k.column)
            before = p.columns() <= last
            found = before if found is None else found & before
        return found

    # -- dropout -------------------------------------------------------------------------------------------------------

    def drop(self, p: Part, value: Value) -> Value:
        """The value, zero where its weight is dropped; `scaled` applies the scale."""
        keep = self.keep_mask(p)
        return value if keep is None else self.k.b.select(keep, value, 0.0)

    def keep_mask(self, p: Part) -> Value | None:
        """Which weights are not dropped; None if all are kept."""
        b = self.k.b
        if self.y is not None:
            y = p.raw(self.y)  # zero if dropped, or rounded to zero
            if isinstance(y.type, Vector) and y.type.elem.bits == 16:
                y = b.bitcast(y, Vector(u16, y.type.lanes))  # the bits suffice, and need no widening
            return b.ne(y, 0)
        if self.seed is None:
            return None
        if self.drawn is not None:
            return self.dropout.kept(b.unpack(p[self.drawn]))
        return _draw(self.dropout, p, p[self.head], p[self.row], self.passes.shape.width)

    def _draw_early(self) -> None:
        """Draw while rows are being loaded.

        Compilers would draw where the result is used: after the reductions, when no load is left to overlap with. So
        rows are made to depend on what was drawn, by a zero that no compiler knows. Gradients use it before reductions.
        """
        b, config, dropout, source = self.k.b, self.config, self.dropout, self.x
        elem, octet = SCALARS[config.dtype], Vector(u32, OCTET // 2)

        def draw(p: Part) -> Value:
            words = dropout.words(p[self.head], p[self.row], p.col >> 3)
            return dropout.masks(words) if config.early_draw == "masks" else b.vector(words)

        drawn = self.drawn = Derived(draw)
        for number in range(self.passes.shape.parts):
            for part in self.passes.register_parts(number):
                part[drawn]
        if config.has("dy"):
            return
        zero = b.cast(b.min(self.k.rows.count, 0), u32)

        def tied(p: Part) -> Value:
            return b.bitcast(b.bitcast(p.raw(source), octet) ^ (p[drawn] & zero), Vector(elem, OCTET))

        self.x = Derived(tied, narrow=True)

    def result(self, p: Part, value: Value) -> Value:
        """A weight as it is stored: zero if dropped."""
        b, masks = self.k.b, self.config.early_draw == "masks"
        value = value if masks else self.drop(p, value)
        value = b.small(value) if self.config.small else value
        return self.drop_bits(p, b.cast(value, SCALARS[self.config.dtype])) if masks else value

    def drop_bits(self, p: Part, value: Value) -> Value:
        """Elements in the rows' type, zero where their weights are dropped, by masks drawn early."""
        assert self.drawn is not None
        b, elem = self.k.b, SCALARS[self.config.dtype]
        return b.bitcast(b.bitcast(value, Vector(u32, OCTET // 2)) & p[self.drawn], Vector(elem, OCTET))

    def inverse(self, total: Value) -> Value:
        """One over a sum of exponentials; zero if that is zero. NaN stays."""
        b = self.k.b
        return b.select(b.eq(total, 0.0), 0.0, b.rcp(total))

    def scaled(self, inverse: Value) -> Value:
        """``inverse`` times the scale of weights that are not dropped."""
        return inverse * self.k.number("keep_scale") if self.config.dropout else inverse


def _draw(dropout: Dropout, p: Part, head: Value, row: Value, width: int) -> Value:
    """Whether each column of a part is kept."""
    if p.group is not None and p.group[0].count == VECTORS and width > 1:
        # A vector of counters serves four vectors of columns.
        group, number = p.group
        if "kept" not in group.cache:
            group.cache["kept"] = dropout.kept_vectors(head, row, group.col, width)
        kept: Value = group.cache["kept"][number]
        return kept
    if p.shift is not None:
        return _draw_shifted(dropout, p, p.shift, head, row, width)
    return _draw_columns(dropout, p.col, head, row, width)


def _draw_columns(dropout: Dropout, col: Value, head: Value, row: Value, width: int) -> Value:
    """Whether the columns from ``col`` on, a multiple of ``width``, are kept."""
    b = dropout.b
    if width < OCTET:
        return b.vector(dropout.strip_halves(head, row, col, width)) >= dropout.limit
    octet = col >> 3
    places = [octet + i if i else octet for i in range(width // OCTET)]
    return dropout.kept([word for place in places for word in dropout.words(head, row, place)])


def _draw_shifted(dropout: Dropout, p: Part, shift: Value, head: Value, row: Value, width: int) -> Value:
    """Whether the last columns of a row are kept, which begin ``shift`` columns before a multiple of ``width``."""
    b = dropout.b
    memory = b.private("kept", i32, 2 * width)
    full = p.col + b.cast(shift, element(p.col.type))
    for i in range(2):
        kept = _draw_columns(dropout, full - (width - i * width), head, row, width)
        flags = b.select(kept, b.splat(b.const(1, i32), width), b.splat(b.const(0, i32), width))
        b.store(memory, i * width, flags, align=1)
    return b.ne(b.load(memory, width - shift, width, align=1), 0)


def build_softmax(config: SoftmaxConfig, target: Target) -> KernelIR:
    """Trace the forward kernel."""
    kernel = _Kernel(config, target)
    k, passes, rows = kernel.k, kernel.passes, kernel.k.rows
    b, y_array = k.b, k.array("y", "write")
    weights_array = None
    if config.has("weights"):  # not read soon
        weights_array = replace(k.array("weights", "write"), stream=k.cpu)

    def body() -> None:
        kernel.load_rows()
        y = rows.source(y_array)
        powers, (total,), own = kernel.exponentials()
        inverse = total.map(kernel.inverse)
        if config.has("statistics"):
            for number, statistic in enumerate((kernel.largest, inverse)):
                rows.put(k.statistic(number, "write"), statistic)
        factor = inverse.map(kernel.scaled)
        if own is not None:
            factor = factor.map(lambda f, c: f * c, own)
        if weights_array is None:
            passes.each(lambda p: p.store(y, kernel.result(p, p[powers] * p[factor])))
            return
        all_weights = rows.source(weights_array)
        one = inverse if own is None else inverse.map(lambda i, c: i * c, own)
        elem = SCALARS[config.dtype]
        bits = {2: u16, 4: u32, 8: u64}[elem.bytes]

        def write(p: Part) -> None:
            """Drop on the bits of the stored type, which are the shortest vectors."""
            value, weight = (b.cast(p[powers] * p[by], elem) for by in (factor, one))
            keep = kernel.keep_mask(p)
            if keep is not None:
                lanes = passes.shape.width
                words, numbers = (Vector(x, lanes) if lanes > 1 else x for x in (bits, elem))
                value, weight = b.bitcast(value, words), b.bitcast(weight, words)
                value, weight = b.select(keep, value, 0), b.select(keep, weight, weight | 1 << (elem.bits - 1))
                value, weight = b.bitcast(value, numbers), b.bitcast(weight, numbers)
            p.store(y, value)
            p.store(all_weights, weight)

        passes.each(write)

    return k.trace(body)


def build_softmax_gradient(config: SoftmaxConfig, target: Target) -> KernelIR:
    """Trace the backward kernel, which recomputes weights: ``dx = P * (dP - sum(P * dP)) * scale``."""
    kernel = _Kernel(config, target)
    k, b, passes, rows = kernel.k, kernel.k.b, kernel.passes, kernel.k.rows
    dy_array, dx_array = k.array("dy"), k.array("dx", "write")
    scale = k.number("scale")
    masks = config.early_draw == "masks"

    def body() -> None:
        dy = rows.source(dy_array)
        passes.preload(dy)
        kernel.load_rows()
        dx = rows.source(dx_array)

        def gradient(p: Part) -> Value:
            """The gradient of a weight: zero if the column does not count, whatever ``dy`` is."""
            value = kernel.drop_bits(p, p.raw(dy)) if masks else kernel.drop(p, p[dy])
            counts = kernel.counts(p)
            return value if counts is None else b.select(counts, value, 0.0)

        dp = Derived(gradient, costly=kernel.seed is not None, narrow=masks)
        own: PerRow | None = None
        if config.has("statistics"):
            largest, inverse = (rows.get(k.statistic(number)) for number in range(STATISTICS))
            powers = kernel.relative_to(largest, costly=kernel.y is None)
            if kernel.y is not None:  # P * dP is y * dy
                y = kernel.y
                paired = has_pairs(target, SCALARS[config.dtype]) and not (config.causal or config.mask)
                along = passes.dot_of_pairs(y, dy) if paired else passes.sum(lambda p: Product(p[y], p[dp]))
                mean = along.map(lambda s, i: s * i * scale, inverse)
            else:
                # Multiplied by 1 / sum before the exchange: compilers would load that number after it.
                mine = passes.partials("add", lambda p: [Product(p[powers], p[dp])], 1)[0]
                along = rows.reduce("add", [mine.map(lambda s, i: s * i, inverse)])[0]
                mean = along.map(lambda s, i: s * kernel.scaled(i) * scale, inverse)
        else:
            powers, (total, along), own = kernel.exponentials(dp)
            inverse = total.map(kernel.inverse)
            # 1 / sum is in the factor, and once more in the mean of the weights' gradients.
            mean = along.map(
                lambda s, t, i: b.select(b.eq(t, 0.0), 0.0, s / t) * kernel.scaled(i) * scale, total, inverse
            )
        factor = inverse.map(lambda i: kernel.scaled(i) * scale)
        if own is not None:
            factor, mean = (x.map(lambda f, c: f * c, own) for x in (factor, mean))
        less = mean.map(lambda m: -m)
        passes.each(lambda p: p.store(dx, p[powers] * b.fma(p[dp], p[factor], p[less])))

    return k.trace(body)


def build_gradient_of_weights(config: SoftmaxConfig, target: Target) -> KernelIR:
    """Trace the backward kernel for saved weights, negative where they were dropped: for CPUs, and rows of bf16."""
    k = RowKernel(config, target)
    b, passes, rows = k.b, k.passes, k.rows
    weights_array, dy_array, dx_array = k.array("weights"), k.array("dy"), k.array("dx", "write")
    scale, keep_scale = k.number("scale"), k.number("keep_scale")

    def body() -> None:
        weights, dy, dx = (rows.source(array) for array in (weights_array, dy_array, dx_array))
        passes.preload(weights, dy)

        def bits(p: Part) -> Value:
            return b.bitcast(p.raw(weights), Vector(i16, passes.shape.width))

        # Zero where a weight is dropped or zero, whatever ``dy`` is.
        dp = Derived(lambda p: b.select(bits(p) > 0, p[dy], 0.0))
        # A column that does not count may have Inf or NaN in dy.
        paired = has_pairs(target, SCALARS[config.dtype]) and not (config.causal or config.mask)
        if paired:
            positive = Derived(lambda p: b.bitcast(b.max(bits(p), 0), Vector(bf16, passes.shape.width)), narrow=True)
            along = passes.dot_of_pairs(positive, dy)
        else:
            along = passes.sum(lambda p: Product(p[weights], p[dp]))
        less = along.map(lambda s: -s * keep_scale * scale)
        factor = keep_scale * scale
        passes.each(lambda p: p.store(dx, b.abs(p[weights]) * b.fma(p[dp], factor, p[less])))

    return k.trace(body)
