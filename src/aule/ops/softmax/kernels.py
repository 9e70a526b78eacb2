"""The kernels of softmax with masks and dropout, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from aule.ir import KernelIR, Value
from aule.ir.types import SCALARS, Vector, bf16, element, i16, i32, u16, u32, u64
from aule.ops.attention.dropout import OCTET, VECTORS, Dropout
from aule.ops.rowwise import RowConfig, RowKernel
from aule.ops.softmax.problem import STATISTICS
from aule.target import Target
from aule.tile.math import NEG_INF
from aule.tile.rows import PerRow, Source
from aule.tile.spans import Derived, Part, Product, Term
from aule.tile.vector import has_pairs

Early = Literal["", "words", "masks"]


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(RowConfig):
    """A kernel of softmax.

    Attributes
    ----------
    mask : str or None
        The mask's dtype.
    dropout : bool
        What is kept is multiplied by a scale; a seed says what that is, or a result.
    folded : bool
        The scale can wait until the exponent: it keeps the order of scores, and nothing is added to them.
    meets : bool
        Subgroups that share a row take weights about the largest score of their own columns, and meet once.
    early : str
        What is kept is drawn while rows are on their way, and waits as it is (``words``) or as masks of the result's
        bits (``masks``), which one instruction makes for two columns where there is arithmetic of 16-bit pairs.
    fetches : bool
        Rows of the workgroups that come next are fetched to the second-level cache.
    narrow : bool
        The largest score is looked for among elements as they are in memory.
    small : bool
        Whoever rounds weights is told that they are small.
    """

    name: str
    mask: str | None
    causal: bool
    dropout: bool
    folded: bool
    meets: bool = False
    early: Early = ""
    fetches: bool = False
    narrow: bool = False
    small: bool = False


def _fuses(target: Target) -> bool:
    """Whether a product and a sum are rounded once, for sure: scores may be large, and lose digits as products."""
    if target.backend == "cpu":
        return "fma" in target.extensions or target.arch == "aarch64"
    return target.backend == "cuda" or target.vulkan_on_nvidia


class _Kernel:
    """What both kernels have: scores, which of them count, and which weights are kept."""

    def __init__(self, config: SoftmaxConfig, target: Target) -> None:
        self.config = config
        self.k = k = RowKernel(config.name, config, target)
        self.span = k.span
        self.fuses = _fuses(target)
        self.x_array = k.array("x")
        self.mask_array = k.array("mask") if config.mask else None
        self.y_array = k.array("y") if config.has("y") and config.has("dy") else None
        self.seed = k.p.buffer("seed", u32) if config.dropout and self.y_array is None else None

    def take(self) -> None:
        """The rows at hand, and their scores."""
        k, b, span = self.k, self.k.b, self.span
        rows = k.rows
        self.x: Source | Derived = rows.source(self.x_array)
        span.hold(self.x)
        if self.config.fetches:
            self.fetch_later()
        self.mask: Source | None = None
        if self.mask_array is not None:
            self.mask = rows.source(self.mask_array)
            span.hold(self.mask)
        self.y: Source | None = None
        if self.y_array is not None:
            self.y = rows.source(self.y_array)
            span.hold(self.y)
        per_head = k.p.number("seq")
        if k.cpu or self.config.has("dy"):
            self.row = rows.per_row(lambda number: number % per_head)
            self.head = rows.per_row(lambda number: number // per_head)
        else:
            self.head = rows.per_row(self._head)
            self.row = self.head.map(lambda head, number: number - head * per_head, PerRow(rows.numbers))
        if self.seed is not None:
            self.dropout = Dropout(b, k.p.number("dropout_limit", u32), self.seed, k.p.number("seed_offset", k.p.index))
        self.scores = Derived(self._scores)
        self.drawn: Derived | None = None
        """What was drawn for a part, as it waits."""
        if self.config.early:
            self.draw()

    def _head(self, row: Value) -> Value:
        """The head of a row: a division by one product, since GPUs have no instruction for it, and what is drawn waits
        for this. (Gradients, which draw later, lose by it: 3.47 -> 3.35 TB/s for 16384 columns on the H200, through
        Vulkan 3.83 -> 3.48 at 1 GiB.)"""
        k, b = self.k, self.k.b
        number = b.cast(row, u32)
        high = b.mulhi(number, k.p.number("seq_factor", u32))
        return b.cast((high + number) >> k.p.number("seq_bits", u32), i32)

    def fetch_later(self) -> None:
        """Fetch as much of the row that is ``later`` by so many as this thread has of its own, which is less than a
        line: memory goes on while this one is worked on."""
        b, span, rows = self.k.b, self.span, self.k.rows
        number = rows.numbers[0] + self.k.p.number("later")
        with b.if_(number < rows.count):
            start = self.x_array.start(number)
            col = b.min(span.lane * (span.shape.width * span.shape.parts), span.length - span.shape.width)
            b.prefetch(self.x_array.buffer, start + b.cast(col, element(start.type)))

    def weigh(self, dp: Derived | None = None) -> tuple[Derived, list[PerRow], PerRow | None]:
        """Weights but for one over their sum; that sum and, with ``dp``, the sum of their products; and what weights
        are to be multiplied by, where it is not the same for all of a row."""
        b, span, rows = self.k.b, self.span, self.k.rows

        def finite(m: Value) -> Value:
            """0 where no column counts."""
            return b.select(b.eq(m, NEG_INF), 0.0, m)

        def terms(p: Part) -> list[Term]:
            return [p[weights]] if dp is None else [p[weights], Product(p[weights], p[dp])]

        count = 1 if dp is None else 2
        if self.config.narrow:
            most = span.largest_held(self.x)
        else:
            most = span.partials("max", lambda p: [p[self.scores]], 1)[0]
        if not (self.config.meets and rows.meets):
            self.largest = rows.reduce("max", [most])[0].map(finite)
            weights = self.exponentials(self.largest, costly=True)
            return weights, rows.reduce("add", span.partials("add", terms, count)), None
        mine = rows.within("max", most)
        weights = self.exponentials(mine.map(finite), costly=True)
        (theirs, *sums), combine = rows.meet(mine, span.partials("add", terms, count))
        largest = self.largest = combine("max", theirs)[0].map(finite)
        share, own = (x.map(self.share, largest) for x in (theirs, mine))
        return weights, combine("add", *(s.map(lambda x, c: x * c, share) for s in sums)), own

    def exponentials(self, largest: PerRow, costly: bool) -> Derived:
        """Weights but for one over their sum."""
        b = self.k.b
        if not self.fuses:
            factor = self.k.number("factor")
            return Derived(lambda p: b.exp2((p[self.scores] - p[largest]) * factor), costly)
        factors = largest.map(self._factor)
        low = largest.map(lambda m, f: -(m * f), factors)
        return Derived(lambda p: b.exp2(b.fma(p[self.scores], p[factors], p[low])), costly)

    def share(self, m: Value, most: Value) -> Value:
        """What weights about one largest score are to be multiplied by to be about another."""
        b = self.k.b
        if not self.fuses:
            return b.exp2((m - most) * self.k.number("factor"))
        one, other = self._factor(m), self._factor(most)
        moved = b.exp2(m * one - most * other)  # what was subtracted, with its rounding
        return b.select(b.eq(one, other), moved, 0.0)

    def _factor(self, m: Value) -> Value:
        """What scores are multiplied by in exponents, where a row's largest is this one.

        The product with the largest is rounded, by so much for all of a row, which its sum makes good. Of large scores
        (-1e30 in the place of -inf) it would be more than exponents have room for: they take a power of two, which
        rounds nothing, and where the product would overflow (finfo.min) 1. Other scores than the largest are too far
        away there to have weights.
        """
        b, number = self.k.b, self.k.number
        far = b.select(b.abs(m) < number("reach"), number("power"), 1.0)
        return b.select(b.abs(m) < number("near"), number("factor"), far)

    def _scores(self, p: Part) -> Value:
        """What the exponential is taken of; -inf where a column does not count."""
        b, config = self.k.b, self.config
        x = p[self.x]
        if not config.folded:
            x = x * self.k.number("scale")
            if self.mask is not None and config.mask != "bool":
                x = x + p[self.mask]
        counts = self.counts(p)
        return x if counts is None else b.select(counts, x, b.const(NEG_INF, self.k.work))

    def counts(self, p: Part) -> Value | None:
        """Which columns count; None when all do."""
        b, config = self.k.b, self.config
        found: Value | None = None
        if self.mask is not None and config.mask == "bool":
            found = b.ne(p.raw(self.mask), 0)
        if config.causal:
            last = b.cast(p[self.row] + self.k.p.number("shift"), self.k.column)
            before = p.columns() <= last
            found = before if found is None else found & before
        return found

    def kept(self, p: Part, value: Value) -> Value:
        """A value where its weight is kept, else zero; the scale is in `inverse`."""
        keep = self.keeps(p)
        return value if keep is None else self.k.b.select(keep, value, 0.0)

    def keeps(self, p: Part) -> Value | None:
        """Which weights are kept; None when all are."""
        b = self.k.b
        if self.y is not None:
            y = p.raw(self.y)  # zero: dropped, or rounded to nothing
            if isinstance(y.type, Vector) and y.type.elem.bits == 16:
                y = b.bitcast(y, Vector(u16, y.type.lanes))  # whose bits tell, and need not be made wider
            return b.ne(y, 0)
        if self.seed is None:
            return None
        if self.drawn is not None:
            return self.dropout.kept(b.unpack(p[self.drawn]))
        return _kept(self.dropout, p, p[self.head], p[self.row], self.span.shape.width)

    def draw(self) -> None:
        """Draw while rows are on their way.

        Rows then depend on what was drawn, by a zero that no compiler knows. All of them would draw when it is wanted
        else: behind the sums, where nobody waits for memory any more. Gradients want it before those.
        """
        b, config, dropout, source = self.k.b, self.config, self.dropout, self.x
        elem, octet = SCALARS[config.dtype], Vector(u32, OCTET // 2)

        def draw(p: Part) -> Value:
            words = dropout.words(p[self.head], p[self.row], p.col >> 3)
            return dropout.masks(words) if config.early == "masks" else b.vector(words)

        drawn = self.drawn = Derived(draw)
        for number in range(self.span.shape.parts):
            for part in self.span.held_parts(number):
                part[drawn]
        if config.has("dy"):
            return
        zero = b.cast(b.min(self.k.rows.count, 0), u32)

        def tied(p: Part) -> Value:
            return b.bitcast(b.bitcast(p.raw(source), octet) ^ (p[drawn] & zero), Vector(elem, OCTET))

        self.x = Derived(tied, narrow=True)

    def result(self, p: Part, value: Value) -> Value:
        """A weight as it is stored: zero where it is dropped."""
        b = self.k.b
        if self.drawn is None or self.config.early == "words":
            return self.small(self.kept(p, value))
        return self.masked(p, b.cast(self.small(value), SCALARS[self.config.dtype]))

    def masked(self, p: Part, value: Value) -> Value:
        """Elements of rows where their weights are kept, else zero, by masks that wait."""
        assert self.drawn is not None
        b, elem = self.k.b, SCALARS[self.config.dtype]
        return b.bitcast(b.bitcast(value, Vector(u32, OCTET // 2)) & p[self.drawn], Vector(elem, OCTET))

    def small(self, value: Value) -> Value:
        """A weight, for whoever rounds it."""
        return self.k.b.small(value) if self.config.small else value

    def inverse(self, total: Value) -> Value:
        """One over a sum of weights; zero where there are none. NaN stays."""
        b = self.k.b
        return b.select(b.eq(total, 0.0), 0.0, b.rcp(total))

    def scaled(self, inverse: Value) -> Value:
        """The same times what is kept is multiplied by."""
        return inverse * self.k.number("keep_scale") if self.config.dropout else inverse


def _kept(dropout: Dropout, p: Part, head: Value, row: Value, width: int) -> Value:
    """Which columns of a part are kept: bools."""
    b = dropout.b
    if p.group is not None and p.group[0].count == VECTORS and width > 1:
        # A vector of counters serves four vectors of columns.
        group, number = p.group
        if "kept" not in group.made:
            group.made["kept"] = dropout.kept_vectors(head, row, group.col, width)
        kept: Value = group.made["kept"][number]
        return kept
    if width < OCTET:
        return b.vector(dropout.strip_halves(head, row, p.col, width)) >= dropout.limit
    octet = p.col >> 3
    places = [octet + i if i else octet for i in range(width // OCTET)]
    return dropout.kept([word for place in places for word in dropout.words(head, row, place)])


def build_softmax(config: SoftmaxConfig, target: Target) -> KernelIR:
    """Trace the forward kernel."""
    kernel = _Kernel(config, target)
    k, span, rows = kernel.k, kernel.span, kernel.k.rows
    b, y_array = k.b, k.array("y", "write")
    weights_array = None
    if config.has("weights"):  # of which nobody reads anything soon
        weights_array = replace(k.array("weights", "write"), stream=k.cpu)

    def body() -> None:
        kernel.take()
        y = rows.source(y_array)
        weights, (total,), own = kernel.weigh()
        inverse = total.map(kernel.inverse)
        if config.has("statistics"):
            for number, statistic in enumerate((kernel.largest, inverse)):
                rows.put(k.statistic(number, "write"), statistic)
        factor = inverse.map(kernel.scaled)
        if own is not None:
            factor = factor.map(lambda f, c: f * c, own)
        if weights_array is None:
            span.each(lambda p: p.store(y, kernel.result(p, p[weights] * p[factor])))
            return
        all_weights = rows.source(weights_array)
        one = inverse if own is None else inverse.map(lambda i, c: i * c, own)
        elem = SCALARS[config.dtype]
        bits = {2: u16, 4: u32, 8: u64}[elem.bytes]

        def write(p: Part) -> None:
            """By bits of what is stored, of which a vector has least."""
            value, weight = (b.cast(p[weights] * p[by], elem) for by in (factor, one))
            keep = kernel.keeps(p)
            if keep is not None:
                lanes = span.shape.width
                words, numbers = (Vector(x, lanes) if lanes > 1 else x for x in (bits, elem))
                value, weight = b.bitcast(value, words), b.bitcast(weight, words)
                value, weight = b.select(keep, value, 0), b.select(keep, weight, weight | 1 << (elem.bits - 1))
                value, weight = b.bitcast(value, numbers), b.bitcast(weight, numbers)
            p.store(y, value)
            p.store(all_weights, weight)

        span.each(write)

    rows.run(body)
    return k.finish()


def build_softmax_gradient(config: SoftmaxConfig, target: Target) -> KernelIR:
    """Trace the backward kernel: weights are made again, ``dx = P * (dP - sum(P * dP)) * scale``."""
    kernel = _Kernel(config, target)
    k, b, span, rows = kernel.k, kernel.k.b, kernel.span, kernel.k.rows
    dy_array, dx_array = k.array("dy"), k.array("dx", "write")
    scale = k.number("scale")
    masks = config.early == "masks"

    def body() -> None:
        dy = rows.source(dy_array)
        span.hold(dy)
        kernel.take()
        dx = rows.source(dx_array)

        def gradient(p: Part) -> Value:
            """Of a weight; whatever comes for one that does not count is nothing."""
            value = kernel.masked(p, p.raw(dy)) if masks else kernel.kept(p, p[dy])
            counts = kernel.counts(p)
            return value if counts is None else b.select(counts, value, 0.0)

        dp = Derived(gradient, costly=kernel.seed is not None, narrow=masks)
        if kernel.y is not None and config.has("statistics"):
            # P * dP is y * dy, and weights are made once.
            y = kernel.y
            largest, inverse = (rows.get(k.statistic(number)) for number in range(STATISTICS))
            weights = kernel.exponentials(largest, costly=False)
            masked = config.causal or config.mask is not None
            paired = has_pairs(target, SCALARS[config.dtype]) and not masked
            own: PerRow | None = None
            along = span.dot_of_pairs(y, dy) if paired else span.sum(lambda p: Product(p[y], p[dp]))
            mean = along.map(lambda s, i: s * i * scale, inverse)
        elif config.has("statistics"):
            largest, inverse = (rows.get(k.statistic(number)) for number in range(STATISTICS))
            weights, own = kernel.exponentials(largest, costly=True), None
            # Times one over the sum before they meet: compilers would send for that number behind the exchange.
            mine = span.partials("add", lambda p: [Product(p[weights], p[dp])], 1)[0].map(lambda s, i: s * i, inverse)
            along = rows.reduce("add", [mine])[0]
            mean = along.map(lambda s, i: s * kernel.scaled(i) * scale, inverse)
        else:
            weights, (total, along), own = kernel.weigh(dp)
            inverse = total.map(kernel.inverse)
            # One over the sum is in the factor, and a second time in the mean of what comes for the weights.
            mean = along.map(
                lambda s, t, i: b.select(b.eq(t, 0.0), 0.0, s / t) * kernel.scaled(i) * scale, total, inverse
            )
        factor = inverse.map(lambda i: kernel.scaled(i) * scale)
        if own is not None:
            factor, mean = (x.map(lambda f, c: f * c, own) for x in (factor, mean))
        less = mean.map(lambda m: -m)
        span.each(lambda p: p.store(dx, p[weights] * b.fma(p[dp], p[factor], p[less])))

    rows.run(body)
    return k.finish()


def build_gradient_of_weights(config: SoftmaxConfig, target: Target) -> KernelIR:
    """The same from weights that were kept, negative where they were dropped: for CPUs, and rows of bf16."""
    k = RowKernel(config.name, config, target)
    b, span, rows = k.b, k.span, k.rows
    weights_array, dy_array, dx_array = k.array("weights"), k.array("dy"), k.array("dx", "write")
    scale, keep_scale = k.number("scale"), k.number("keep_scale")

    def body() -> None:
        weights, dy, dx = (rows.source(array) for array in (weights_array, dy_array, dx_array))
        span.hold(weights, dy)

        def bits(p: Part) -> Value:
            return b.bitcast(p.raw(weights), Vector(i16, span.shape.width))

        def gradient(p: Part) -> Value:
            """Of a weight; whatever comes for one that is nothing is nothing."""
            return b.select(bits(p) > 0, p[dy], 0.0)

        dp = Derived(gradient)
        # A column that does not count may have Inf or NaN in dy.
        paired = has_pairs(target, SCALARS[config.dtype]) and not (config.causal or config.mask)
        if paired:
            positive = Derived(lambda p: b.bitcast(b.max(bits(p), 0), Vector(bf16, span.shape.width)), narrow=True)
            along = span.dot_of_pairs(positive, dy)
        else:
            along = span.sum(lambda p: Product(p[weights], p[dp]))
        less = along.map(lambda s: -s * keep_scale * scale)
        factor = keep_scale * scale

        def write(p: Part) -> None:
            p.store(dx, b.abs(p[weights]) * b.fma(p[dp], factor, p[less]))

        span.each(write)

    rows.run(body)
    return k.finish()
