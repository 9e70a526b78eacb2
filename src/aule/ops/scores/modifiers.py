"""Score modifiers: functions that are traced into the kernel between the first product and softmax.

Scores come in a unit: on GPUs log2(e) times the score, because softmax is computed with ``exp2``; on CPUs the score
itself (`ScoreConfig.score_unit`). A score is one number, or a vector along the keys of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aule.ir import Builder, Value
from aule.ir.types import Scalar, element, f16
from aule.tile.common.math import LOG2E, NEG_INF, lowest, tanh


@dataclass(frozen=True)
class Site:
    """Where a score stands: batch, query head, query row, key column, and the row's position among the keys."""

    batch: Value
    head: Value
    row: Value
    column: Value
    position: Value


@dataclass(frozen=True)
class Modifier:
    """One step between scores and softmax.

    Attributes
    ----------
    apply : callable
        ``f(b, score, site) -> score``; a score of -inf drops the key.
    everywhere : bool
        Every tile needs it; otherwise only edge tiles do.
    slope : callable, optional
        ``f(b, before, after, site) -> derivative`` of the score after this step by the score before it; None if that
        is 1.
    """

    apply: Callable[[Builder, Value, Site], Value]
    everywhere: bool
    slope: Callable[[Builder, Value, Value, Site], Value] | None = None


def softcap(cap: Value) -> Modifier:
    """``cap * tanh(s / cap)``. The scores come divided by the cap; ``cap`` is the cap in the unit of scores."""

    def slope(b: Builder, before: Value, after: Value, site: Site) -> Value:
        bent = after * b.rcp(cap)
        return 1.0 - bent * bent

    return Modifier(lambda b, s, site: tanh(b, s) * cap, everywhere=True, slope=slope)


def alibi(slope: Value) -> Modifier:
    """``s - slope * |position - column|``; ``slope`` is in the unit of scores."""

    def apply(b: Builder, s: Value, site: Site) -> Value:
        return s - slope * b.cast(b.abs(site.position - site.column), element(s.type))

    return Modifier(apply, everywhere=True)


def additive(read: Callable[[Site], Value], add: Add) -> Modifier:
    """Add what ``read`` finds at a site."""
    return Modifier(lambda b, s, site: add(b, s, read(site)), everywhere=True)


@dataclass(frozen=True)
class Add:
    """Adds elements of a mask or bias to scores.

    Exactly -inf drops the key. The lowest finite number, with which some frameworks mask, stays finite in the unit of
    scores, so that a row of nothing else is averaged as in those frameworks. NaN makes the score NaN.

    Attributes
    ----------
    unit : float
        The unit of scores.
    twice : bool
        A mask and a bias are both added: a key that one of them has dropped stays dropped, whatever the other holds.
    """

    unit: float = LOG2E
    twice: bool = False

    def __call__(self, b: Builder, s: Value, x: Value) -> Value:
        elem = element(s.type)
        value = b.cast(x, elem)
        dropped = value < lowest(elem)
        if self.twice:
            dropped = dropped | (s < lowest(elem))
        return b.select(dropped, b.const(NEG_INF, elem), self._sum(b, s, value, element(x.type)))

    def _sum(self, b: Builder, s: Value, value: Value, elem: Scalar) -> Value:
        if self.unit == 1.0:
            return s + value
        if elem != f16:  # times the unit it might be infinite
            least = lowest(element(s.type)) / self.unit * (1 - 2**-20)
            # Not a maximum: that may give the number beside NaN.
            value = b.select(value < least, b.const(least, element(s.type)), value)
        return b.fma(value, self.unit, s)


def boolean(read: Callable[[Site], Value]) -> Modifier:
    """Keep a key if ``read`` finds a nonzero element."""

    def apply(b: Builder, s: Value, site: Site) -> Value:
        return b.select(b.ne(read(site), 0), s, b.const(NEG_INF, element(s.type)))

    return Modifier(apply, everywhere=True)


def band(seq_kv: Value, left: Value | None, right: Value | None) -> Modifier:
    """Keep keys that exist and lie within ``position - left .. position + right``."""

    def apply(b: Builder, s: Value, site: Site) -> Value:
        keep = site.column < seq_kv
        if right is not None:
            keep = keep & (site.column <= site.position + right)
        if left is not None:
            keep = keep & (site.column >= site.position - left)
        return b.select(keep, s, b.const(NEG_INF, element(s.type)))

    return Modifier(apply, everywhere=False)
