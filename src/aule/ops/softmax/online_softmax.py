"""Online softmax: the running maximum m and sum l of FlashAttention, for every kernel that passes over keys.

Everything is in the base-2 log domain: scores come multiplied by log2(e), except with `NaturalMaximum`. For each tile
of scores S of a row,

    m' = max(m, max S)    alpha = exp2(m - m')    l = l alpha    O = O alpha      (follow)
    P = exp2(S - m)       l = l + sum P                                           (weigh)
    O = O + P V

and after the last tile ``O / l`` and the log-sum-exp ``m + log2 l`` (finish). `merge` combines
results for different keys of a row. A sink is a key without a value.

m may lag behind the largest score by some powers of two, so that O is rarely rescaled. Where threads share a row, all
of them hold its m, and each holds the l of its own columns until the end.

The functions here emit arithmetic on values and do not depend on how a tile is spread over threads: an engine passes
the elements of its rows, and a `RowEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from aule.ir import Builder, Value, Var
from aule.ir.types import element, f32
from aule.tile.common.math import LN2, LOG2E, LOWEST, NEG_INF, fold

LAG = 8.0
"""How far, in powers of two, m may lag behind the largest score. P stays below 2^LAG, far from the limits of fp16."""


class RowEngine(Protocol):
    """What an engine provides whose threads share rows."""

    b: Builder

    def any_of_rows(self, condition: Value) -> Value:
        """Whether a condition holds in any of the threads that reduce their rows together."""

    def reduce_rows(self, kind: str, partial: list[Value]) -> list[Value]:
        """Combine a value for each row over the threads of that row; each of them gets the result."""


@dataclass(frozen=True)
class Maximum:
    """Arithmetic with a running maximum that is stored as it is."""

    b: Builder
    kind: ClassVar[str] = "max"
    """The operation that gives the larger of two stored maxima."""

    def stored(self, score: Value) -> Value:
        """What is stored for a score that is the maximum."""
        return score

    def larger(self, m: Value, other: Value) -> Value:
        """The larger of two stored maxima."""
        return self.b.binary(self.kind, m, other)

    def factor(self, old: Value, new: Value) -> Value:
        """The factor of sums when the stored maximum changes."""
        return self.b.exp2(old - new)

    def lead(self, score: Value, m: Value) -> Value:
        """How far a score is above the maximum."""
        return score - m

    def weight(self, score: Value, m: Value, scale: Value | None = None) -> Value:
        """The element of P for a score, or for ``scale`` times the score."""
        b = self.b
        return b.exp2(score - m if scale is None else b.fma(score, scale, -m))

    def log2_sum(self, m: Value, log2_l: Value) -> Value:
        """The logarithm, base 2, of a row's sum of exponentials."""
        return m + log2_l

    def log_sum_exp(self, m: Value, log2_l: Value) -> Value:
        """The natural logarithm of a row's sum of exponentials."""
        return self.log2_sum(m, log2_l) * LN2


@dataclass(frozen=True)
class NaturalMaximum(Maximum):
    """Arithmetic with scores as they are, not in the log2 domain.

    It takes one more multiplication for each weight. But every finite score has a weight, while log2(e) times the
    score may overflow, and differences of large scores are rounded less.
    """

    def factor(self, old: Value, new: Value) -> Value:
        return self.b.exp2((old - new) * LOG2E)

    def weight(self, score: Value, m: Value, scale: Value | None = None) -> Value:
        assert scale is None
        return self.b.exp2((score - m) * LOG2E)

    def log2_sum(self, m: Value, log2_l: Value) -> Value:
        return m * LOG2E + log2_l

    def log_sum_exp(self, m: Value, log2_l: Value) -> Value:
        return m + log2_l * LN2


@dataclass(frozen=True)
class NegatedMaximum(Maximum):
    """Arithmetic with a running maximum that is stored negated, as the addend of a multiply-add. Weights are ``lift``
    powers of two larger than ``exp2(S - m)``."""

    kind: ClassVar[str] = "min"
    lift: float = 0.0

    def stored(self, score: Value) -> Value:
        return -score + self.lift if self.lift else -score

    def factor(self, old: Value, new: Value) -> Value:
        return self.b.exp2(new - old)

    def lead(self, score: Value, m: Value) -> Value:
        return score + m

    def weight(self, score: Value, m: Value, scale: Value | None = None) -> Value:
        b = self.b
        return b.exp2(score + m if scale is None else b.fma(score, scale, m))

    def log2_sum(self, m: Value, log2_l: Value) -> Value:
        return log2_l - m


@dataclass(frozen=True)
class SoftmaxState:
    """Running maximum m and sum l of one query row; ``form`` says how m is stored."""

    form: Maximum
    m: Var
    l: Var

    def lags(self, score: Value, lag: float) -> Value:
        """Whether a score is more than ``lag`` powers of two above m."""
        return self.form.lead(score, self.m.value) > lag

    def follow(self, highest: Value, alpha: Var | None = None) -> Value:
        """Raise m to the largest score of a tile and rescale l.

        Returns alpha, by which O is to be multiplied. It also goes to the variable ``alpha`` for an O that cannot be
        rescaled yet.
        """
        factor = raise_maximum(self.form, self.m, highest, alpha)
        self.l.value = self.l.value * (factor if alpha is None else alpha.value)
        return factor

    def weigh(self, scores: Sequence[Value], m: Value | None = None, scale: Value | None = None) -> list[Value]:
        """P of some scores, times ``scale`` if given; its sum is added to l. ``m`` replaces the state's m."""
        p = [self.form.weight(s, self.m.value if m is None else m, scale) for s in scores]
        self.add(p)
        return p

    def add(self, p: Sequence[Value]) -> None:
        """Add weights to l."""
        self.l.value = self.l.value + fold(self.form.b, "add", list(p))

    def merge(self, m: Value, l: Value) -> tuple[Value, Value]:
        """Add m and l of other keys. Returns the factors of this O and of theirs."""
        form = self.form
        new = form.larger(self.m.value, m)
        own, other = form.factor(self.m.value, new), form.factor(m, new)
        self.m.value, self.l.value = new, form.b.fma(self.l.value, own, l * other)
        return own, other


def raise_maximum(form: Maximum, m: Var, highest: Value, alpha: Var | None = None) -> Value:
    """Raise m to a score, if that is larger. Returns alpha, by which l and O are to be multiplied."""
    new = form.larger(m.value, form.stored(highest))
    factor = form.factor(m.value, new)
    if alpha is not None:
        alpha.value = factor
    m.value = new
    return factor


def follow(
    engine: RowEngine,
    rows: Sequence[SoftmaxState],
    highest: list[Value],
    lag: float,
    rescale: Callable[[list[Value]], None],
) -> None:
    """Let m of all rows follow their scores once m of some row lags too far (`SoftmaxState.lags`).

    ``highest`` are the largest of this thread's scores of each row; ``rescale`` multiplies the rows of O by their
    alphas.
    """
    b = engine.b
    lagging = [row.lags(high, lag) for row, high in zip(rows, highest, strict=True)]
    with b.if_(engine.any_of_rows(fold(b, "or", lagging))):
        reduced = engine.reduce_rows("max", highest)
        rescale([row.follow(high) for row, high in zip(rows, reduced, strict=True)])


def merge_maxima(form: Maximum, maxima: Sequence[Value]) -> tuple[Value, list[Value]]:
    """The maximum of several states of a row, and the factors of their l and O."""
    new = fold(form.b, form.kind, list(maxima))
    return new, [form.factor(m, new) for m in maxima]


def from_sink(form: Maximum, sink: Value, column: Value) -> tuple[Value, Value]:
    """Row state (m, l) after the sink; l counts it only in the thread with column 0 of the row."""
    b = form.b
    sink = sink * LOG2E
    m = form.stored(b.max(sink, LOWEST))
    return m, b.select(b.eq(column, 0), form.weight(sink, m), b.const(0.0, f32))


@dataclass(frozen=True)
class Denominator:
    """l of a row that has seen all its keys.

    Where ``empty``, no key was kept: O is zero and the log-sum-exp -inf. A row with a NaN score has a NaN sum, is not
    empty, and stays NaN.
    """

    form: Maximum
    l: Value
    empty: Value

    @property
    def inverse(self) -> Value:
        """The factor of O."""
        b = self.form.b
        return b.select(self.empty, b.const(0.0, element(self.l.type)), b.rcp(self.l))

    def log2_sum(self, m: Value | Var) -> Value:
        """The logarithm, base 2, of the row's sum of exponentials."""
        return self._unless_empty(self.form.log2_sum, m)

    def log_sum_exp(self, m: Value | Var) -> Value:
        """The natural logarithm of the row's sum of exponentials."""
        return self._unless_empty(self.form.log_sum_exp, m)

    def _unless_empty(self, logarithm: Callable[[Value, Value], Value], m: Value | Var) -> Value:
        b = self.form.b
        found = logarithm(m.value if isinstance(m, Var) else m, b.log2(self.l))
        return b.select(self.empty, b.const(NEG_INF, element(self.l.type)), found)


def finish(form: Maximum, l: Value) -> Denominator:
    """The end of a row, given its sum over all threads and keys."""
    return Denominator(form, l, form.b.eq(l, 0.0))
