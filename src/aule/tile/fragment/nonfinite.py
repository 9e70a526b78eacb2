"""Products with factors that hold Inf or NaN, in which a weight of zero adds nothing although 0 times either is NaN.

Such a product is computed three times, by ``kind``: of the finite numbers (0), and of ones that stand for +inf (1) or
-inf (2). NaN counts as both, and Inf - Inf is NaN.
"""

from __future__ import annotations

from aule.ir import Builder, Value, Var
from aule.ir.types import Scalar, Vector, element, f32, u16, u32
from aule.tile.common.math import EXPONENTS, NEG_INF, overflowing
from aule.tile.fragment.engine import Components
from aule.tile.fragment.shape import RUN


def sorted_out(b: Builder, elem: Scalar, run: Value, kind: Value) -> Value:
    """A run of a factor's elements as they are multiplied in a kind of product."""
    word = u16 if elem.bits == 16 else u32
    return b.vector([b.bitcast(_sorted(b, elem, b.bitcast(x, word), kind), elem) for x in b.unpack(run)])


def _sorted(b: Builder, elem: Scalar, bits: Value, kind: Value) -> Value:
    """An element's bits: itself if finite (kind 0), or 1 where it is +inf (kind 1), -inf (kind 2) or NaN."""
    exponent, sign = EXPONENTS[elem], elem.bits - 1
    one = (exponent >> 1) & exponent  # 1.0: all bits of the exponent but its highest
    word = b.cast(bits, u32)
    size = word & ((1 << sign) - 1)
    finite, nan = size < exponent, size > exponent
    wanted = nan | b.eq(word >> sign, b.cast(kind - 1, u32))
    bad = b.select(~finite & wanted, b.const(one, u32), b.const(0, u32))
    return b.cast(b.select(b.eq(kind, 0), b.select(finite, word, b.const(0, u32)), bad), element(bits.type))


def added(engine: Components, total: Value, part: Value, kind: Value) -> Value:
    """An accumulator plus a product of a kind; kinds 1 and 2 add an infinity where the product is positive."""
    b = engine.b
    infinite = b.select(b.eq(kind, 1), b.const(float("inf"), f32), b.const(NEG_INF, f32))
    parts = []
    for c in range(len(engine.part_rows) * len(engine.part_cols)):
        x = b.fragment_get(part, c)
        more = b.select(b.eq(kind, 0), x, b.select(x > 0.0, infinite, b.const(0.0, f32)))
        parts.append(b.fragment_get(total, c) + more)
    return b.fragment_pack(engine.accumulator, parts)


def check_finite(b: Builder, elem: Scalar, run: Value, found: Var) -> None:
    """Set bits of ``found`` if a run of elements holds Inf or NaN."""
    for word in b.unpack(b.bitcast(run, Vector(u32, RUN * elem.bits // 32))):
        found.value = found.value | overflowing(b, word, elem)
