"""Floats of 24 bits in memory: eight neighbours as their upper halves, and the bytes that follow those.

What is cut off is less than 2^-15 of a number, which 16-bit results do not show. A NaN of arithmetic stays one: its
upper bits are set.
"""

from __future__ import annotations

from collections.abc import Sequence

from aule.ir import Builder, Value
from aule.ir.types import f32, u32

RUN = 8
"""Numbers that are cut together."""
_UPPER = 0xFFFF0000
_NEXT = 0xFF00


def short_words(count: int) -> int:
    """32-bit words of so many numbers, a multiple of 16: so both kinds of pieces can travel at once."""
    assert count % (2 * RUN) == 0, count
    return count // 4 * 3


def shortened(b: Builder, values: Sequence[Value]) -> tuple[Value, Value]:
    """Of eight numbers four words of upper halves, and two of the bytes that follow."""
    bits = [b.bitcast(x, u32) for x in values]
    upper = [(x >> 16) | (y & _UPPER) for x, y in zip(bits[::2], bits[1::2], strict=True)]
    pairs = [((x >> 8) & 0xFF) | (y & _NEXT) for x, y in zip(bits[::2], bits[1::2], strict=True)]
    lower = [x | (y << 16) for x, y in zip(pairs[::2], pairs[1::2], strict=True)]
    return b.vector(upper), b.vector(lower)


def widened(b: Builder, upper: Value, lower: Value) -> list[Value]:
    """The eight numbers again."""
    halves, rest = b.unpack(upper), b.unpack(lower)
    found = []
    for i in range(RUN):
        half, word, byte = halves[i // 2], rest[i // 4], i % 4
        moved = word << 8 if byte == 0 else word if byte == 1 else word >> (8 * (byte - 1))
        found.append(b.bitcast((half & _UPPER if i % 2 else half << 16) | (moved & _NEXT), f32))
    return found
