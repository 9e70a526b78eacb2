"""Numbers out of the bytes of a quantised cache, four to a word, in few operations.

int8 becomes the mantissa of a float whose exponent makes its last bit a one; what is too much is subtracted. fp8 (e4m3)
has the exponent of fp16 but for one bit, so that its bits in the right place are the number times `E4M3_HALF`,
subnormals included.
"""

from __future__ import annotations

from aule.ir import Builder, Value
from aule.ir.types import Vector, f16, f32, u32

E4M3_HALF = 2.0**-8
"""What fp16 numbers are multiplied by that `half_pairs` makes of e4m3."""


I8_BITS = 0x64806480
"""What makes fp16 numbers of two bytes: 1024 and a byte, whose sign is flipped, from 0 to 255, so 128 too much."""


def half_pairs(b: Builder, word: Value, cache: str, i8_bits: Value | int = I8_BITS) -> tuple[Value, Value]:
    """Pairs of fp16, as words: of bytes 0 and 2, and of bytes 1 and 3. ``i8_bits`` are `I8_BITS`, if need be in a
    register."""
    if cache == "i8":
        bits = [(x & 0x00FF00FF) ^ i8_bits for x in (word, word >> 8)]
        excess = b.splat(b.const(1024.0 + 128.0, f16), 2)
        pairs = [b.bitcast(b.bitcast(x, Vector(f16, 2)) - excess, u32) for x in bits]
    else:
        # Shifted before they are masked: a shift to the left is a multiplication, for which other units of NVIDIA's
        # have room, and a mask and an `or` are one instruction.
        pairs = [(x & 0x3F803F80) | (signs & 0x80008000) for x, signs in ((word << 7, word << 8), (word >> 1, word))]
    return pairs[0], pairs[1]


def without_nan(b: Builder, words: Value) -> Value:
    """Bytes of e4m3 with 448 in place of NaN: a dropped key's weight of 0 makes 0 of that."""
    # Adding one carries into the sign of those that are all ones.
    return words ^ (((words & 0x7F7F7F7F) + 0x01010101 & 0x80808080) >> 7)


def floats(b: Builder, word: Value, cache: str, halves: bool = False) -> list[Value]:
    """The four numbers as fp32; with ``halves``, for devices with fp16, those of e4m3 times `E4M3_HALF`."""
    if cache == "i8":
        # The last bit of a mantissa is 1 from 2^23 on, and the ninth from 2^15 on.
        ways = ((0x000000FF, 0x4B000080, 2.0**23 + 128), (0x0000FF00, 0x47008000, 2.0**15 + 128))
        return [b.bitcast((x & mask) ^ bits, f32) - excess for x in (word, word >> 16) for mask, bits, excess in ways]
    if halves:
        even, odd = (b.unpack(b.cast(b.bitcast(x, Vector(f16, 2)), f32)) for x in half_pairs(b, word, cache))
        return [even[0], odd[0], even[1], odd[1]]
    return [_e4m3(b, (word >> shift) & 0xFF) for shift in (0, 8, 16, 24)]


def _e4m3(b: Builder, word: Value) -> Value:
    # The exponent's bias is 7, not 127. Without a leading one (exponent 0) it would be twice the distance to 2^-7; no
    # subnormal fp32 is made on the way, which devices may take for 0.
    size = b.bitcast(((word & 0x7F) << 20) + (120 << 23), f32)
    size = b.select((word & 0x78) < 0x08, b.fma(size, 2.0, -(2.0**-6)), size)
    return b.bitcast(b.bitcast(size, u32) | ((word & 0x80) << 24), f32)
