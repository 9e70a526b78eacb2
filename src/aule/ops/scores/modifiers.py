"""Score modifiers: functions that are traced into the kernel between the first product and softmax.

Scores are in the base-2 log domain (``log2(e)`` times the score), because softmax is computed with ``exp2``. A score is
one number, or a vector along the keys of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aule.ir import Builder, Value
from aule.ir.types import element
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
    """

    apply: Callable[[Builder, Value, Site], Value]
    everywhere: bool


def softcap(cap_log2: Value) -> Modifier:
    """``cap * tanh(s / cap)``. The scores come divided by the cap; ``cap_log2`` is the cap times log2(e)."""
    return Modifier(lambda b, s, site: tanh(b, s) * cap_log2, everywhere=True)


def alibi(slope_log2: Value) -> Modifier:
    """``s - slope * |position - column|``."""

    def apply(b: Builder, s: Value, site: Site) -> Value:
        return s - slope_log2 * b.cast(b.abs(site.position - site.column), element(s.type))

    return Modifier(apply, everywhere=True)


def additive(read: Callable[[Site], Value]) -> Modifier:
    """Add what ``read`` finds at a site.

    Exactly -inf drops the key. The lowest finite number, with which some frameworks mask, stays finite in the log2
    domain, so that a row of nothing else is averaged as in those frameworks.
    """
    return Modifier(lambda b, s, site: added(b, s, read(site)), everywhere=True)


def added(b: Builder, s: Value, x: Value) -> Value:
    """A score plus an element of a mask or bias."""
    elem = element(s.type)
    value = b.cast(x, elem)
    finite = b.max(value * LOG2E, lowest(elem))
    return b.select(value < lowest(elem), b.const(NEG_INF, elem), s + finite)


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
