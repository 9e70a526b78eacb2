"""Philox4x32-10: random numbers that depend only on where they are used.

A counter-based generator (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) is a
function of a counter and a key without state, so any thread can compute the number of any place, and forward and
backward agree.
"""

from __future__ import annotations

from aule.ir import Builder, Value
from aule.ir.types import element, u64

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""Increments of the two words of the key from round to round."""
ROUNDS = 10


def philox(b: Builder, counter: tuple[Value, Value, Value, Value], key: tuple[Value, Value]) -> list[Value]:
    """Four random words for a counter of four words and a key of two, all u32.

    Words of the counter may be vectors of one length; scalars beside them count in every lane. They may also be the low
    halves of u64, as results then are: a vector unit that multiplies such halves has either word of a product where it
    is needed. The high halves of results are undefined.
    """
    x = list(counter)
    wide = element(x[0].type) == u64
    for number in range(ROUNDS):
        k0, k1 = (word + (step * number & 0xFFFFFFFF) for word, step in zip(key, WEYL, strict=True))
        if wide:
            k0, k1 = b.cast(k0, u64), b.cast(k1, u64)
            low0, low1 = ((word & 0xFFFFFFFF) * factor for word, factor in zip(x[::2], MULTIPLIERS, strict=True))
            high0, high1 = low0 >> 32, low1 >> 32
        else:
            high0, low0 = b.mulhi(x[0], MULTIPLIERS[0]), x[0] * MULTIPLIERS[0]
            high1, low1 = b.mulhi(x[2], MULTIPLIERS[1]), x[2] * MULTIPLIERS[1]
        x = [high1 ^ x[1] ^ k0, low1, high0 ^ x[3] ^ k1, low0]
    return x
