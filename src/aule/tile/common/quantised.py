"""Conversion of the bytes of a quantised cache, four to a word, in few operations.

int8 becomes the mantissa of a float whose exponent gives the last bit the value one; the excess is subtracted. fp8
(e4m3) has one exponent bit less than fp16, so its bits, shifted into place, are the number times `E4M3_HALF`,
subnormals included.
"""

from __future__ import annotations

from aule.ir import Builder, Value
from aule.ir.types import Vector, f16, f32, u32

E4M3_HALF = 2.0**-8
"""Factor by which the fp16 numbers of `half_pairs` differ from e4m3."""


I8_BITS = 0x64806480
"""Bits that turn two bytes into fp16 numbers: 1024 plus a byte with its sign flipped, so 1024 + 128 too much."""


def half_pairs(b: Builder, word: Value, cache: str, i8_bits: Value | int = I8_BITS) -> tuple[Value, Value]:
    """Pairs of fp16, as words: of bytes 0 and 2, and of bytes 1 and 3. ``i8_bits`` is `I8_BITS`, or a register that
    holds it."""
    if cache == "i8":
        bits = [(x & 0x00FF00FF) ^ i8_bits for x in (word, word >> 8)]
        excess = b.splat(b.const(1024.0 + 128.0, f16), 2)
        pairs = [b.bitcast(b.bitcast(x, Vector(f16, 2)) - excess, u32) for x in bits]
    else:
        # Shifted before they are masked: some devices shift left by a multiplication on another unit, and a mask and
        # an `or` are one instruction.
        pairs = [(x & 0x3F803F80) | (signs & 0x80008000) for x, signs in ((word << 7, word << 8), (word >> 1, word))]
    return pairs[0], pairs[1]


def without_nan(b: Builder, words: Value) -> Value:
    """Bytes of e4m3 with 448 in place of NaN, which a dropped key's weight of zero makes zero."""
    # Adding one carries into the sign of those that are all ones.
    return words ^ (((words & 0x7F7F7F7F) + 0x01010101 & 0x80808080) >> 7)


def floats(b: Builder, word: Value, cache: str, halves: bool = False) -> list[Value]:
    """The four numbers of a word as fp32; with ``halves``, for devices with fp16, e4m3 times `E4M3_HALF`."""
    if cache == "i8":
        # The last bit of a mantissa is 1 from 2^23 on, and the ninth from 2^15 on.
        bytes_ = ((0x000000FF, 0x4B000080, 2.0**23 + 128), (0x0000FF00, 0x47008000, 2.0**15 + 128))
        return [b.bitcast((x & mask) ^ bits, f32) - excess for x in (word, word >> 16) for mask, bits, excess in bytes_]
    if halves:
        even, odd = (b.unpack(b.cast(b.bitcast(x, Vector(f16, 2)), f32)) for x in half_pairs(b, word, cache))
        return [even[0], odd[0], even[1], odd[1]]
    return [_e4m3(b, (word >> shift) & 0xFF) for shift in (0, 8, 16, 24)]


def _e4m3(b: Builder, word: Value) -> Value:
    # The exponent's bias is 7, not 127. For exponent 0 the number is twice its distance to 2^-7. No subnormal fp32
    # occurs, which devices may flush to 0.
    size = b.bitcast(((word & 0x7F) << 20) + (120 << 23), f32)
    size = b.select((word & 0x78) < 0x08, b.fma(size, 2.0, -(2.0**-6)), size)
    return b.bitcast(b.bitcast(size, u32) | ((word & 0x80) << 24), f32)
