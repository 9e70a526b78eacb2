"""The kernel that writes new tokens into a cache: rotates, quantises and stores them into their slots."""

from __future__ import annotations

from aule.ir import Builder, KernelIR, Value
from aule.ir.types import SCALARS, Scalar, f32, i8, i32, i64, u8, u32, with_element
from aule.ops.kvcache.config import AppendConfig
from aule.ops.kvcache.problem import QUANTISED, TINY
from aule.ops.scores.config import ScoreConfig
from aule.ops.scores.parameters import Parameters
from aule.target import Target
from aule.tile.common.math import fold
from aule.tile.common.matrix import divmod_const

KERNEL_NAME = "kv_append"


def build_append(config: AppendConfig, target: Target) -> KernelIR:
    """Trace the kernel: ``config.lanes`` threads for each head of each token, and equal turns for all threads."""
    b = Builder(KERNEL_NAME, config.threads, arithmetic="quick")
    index: Scalar = i64 if config.index64 else i32
    p = Parameters(b, ScoreConfig(dtype=config.dtype, head_dim=config.dims[0], value_dim=config.dims[-1]), index)
    places = p.buffer("places", i32)
    rows, heads, each = p.number("rows"), p.number("heads"), p.number("each")
    page, slots = p.number("page"), p.number("slots")
    turns, workers = p.number("turns"), p.number("workers")
    number, lane = divmod_const(b, b.group_id(0) * config.threads + b.thread_id(), config.lanes)
    with b.loop(b.const(0, i32), turns, name="turn") as turn:
        row = turn * workers + number
        inside = b.min(row, rows - 1)  # every lane takes part in the shuffles
        token, head = inside // heads, inside % heads
        slot = b.load(places, token)
        # Slots may come from an unchecked table on the device: never write outside of the cache.
        exists = (row < rows) & (slot >= 0) & (slot < slots)
        place = b.max(b.min(slot, slots - 1), 0)
        for i, name in enumerate(config.operands):
            position = b.load(places, rows // heads + token) if name == "k" and config.rope else None
            source = p.strided(name, token // each, token % each, head)
            to = p.strided(f"{name}_cache", place // page, place % page, head)
            vector = _Row(b, p, config, i, source, position)
            if config.quantize is None:
                vector.store(lane, to, exists)
            else:
                at = p.strided(f"{name}_scale", place // page, place % page, head)
                vector.store_quantised(lane, to, at, exists)
    if config.threads > 1:
        # A driver takes the last condition of a kernel for uniform unless a barrier follows.
        b.barrier()
    return b.finish()


class _Row:
    """A row of k or v; every thread has some of its columns."""

    def __init__(
        self, b: Builder, p: Parameters, config: AppendConfig, i: int, source: Value, position: Value | None
    ) -> None:
        self.b, self.p, self.config, self.source = b, p, config, source
        self.name, self.dim = config.operands[i], config.dims[i]
        self.unit, self.align = config.unit[i], config.align[i]
        self.buffer = p.buffer(self.name, SCALARS[config.dtype])
        self.step = config.lanes * config.width
        self.angles: tuple[Value, Value] | None = None
        if position is not None:
            at = b.max(b.min(position, p.number("positions") - 1), 0)
            self.angles = p.strided("cos", at), p.strided("sin", at)

    def store(self, lane: Value, to: Value, exists: Value) -> None:
        """Store the row, rotated if the configuration says so."""
        b, elem = self.b, SCALARS[self.config.dtype]
        out = self.p.buffer(f"{self.name}_cache", elem, "write")
        with b.loop(lane * self.config.width, self.dim, self.step, name="col") as col:
            values = self._load(col) if self.angles is None else b.cast(self._rotated(col), elem)
            self._store(out, to, col, values, exists)

    def store_quantised(self, lane: Value, to: Value, at: Value, exists: Value) -> None:
        """Store the row as bytes, and its scale. The row is read twice: first for its largest element."""
        b, config = self.b, self.config
        assert config.quantize is not None
        elem, limit = QUANTISED[config.quantize]
        # The maximum of the bits, which order like the magnitudes: a maximum of floats may ignore NaN.
        most = b.var(b.const(0, i32), "most")
        with b.loop(lane * config.width, self.dim, self.step, name="col") as col:
            values = self._values(col)
            bits = b.bitcast(values, with_element(values.type, i32)) & 0x7FFFFFFF  # type: ignore[arg-type]
            most.value = b.max(most.value, fold(b, "max", b.unpack(bits)))
        top, step = most.value, 1
        while step < config.lanes:
            top = b.max(top, b.shuffle_xor(top, step))
            step *= 2
        largest = b.bitcast(top, f32)
        nonfinite, tiny = top >= 0x7F800000, largest < TINY
        inverse = limit / largest
        scale = b.select(tiny, b.const(0.0, f32), largest * (1.0 / limit))
        out = self.p.buffer(f"{self.name}_cache", i8 if elem == "i8" else u8, "write")
        # The scale is stored by its bits: NaN as a float may be folded away.
        scales = self.p.buffer(f"{self.name}_scale", u32, "write")
        encode = _int8 if elem == "i8" else _e4m3
        with b.loop(lane * config.width, self.dim, self.step, name="col") as col:
            coded = encode(b, b.select(nonfinite | tiny, 0.0, self._values(col) * inverse))
            self._store(out, to, col, coded, exists)
        with b.if_(exists & b.eq(lane, 0)):
            b.store(scales, at, b.select(nonfinite, b.const(0x7FC00000, u32), b.bitcast(scale, u32)))

    def _values(self, col: Value) -> Value:
        return self.b.cast(self._load(col), f32) if self.angles is None else self._rotated(col)

    def _rotated(self, col: Value) -> Value:
        """Columns in fp32; those below ``rotary_dim`` are rotated."""
        b, config = self.b, self.config
        rotary, width = config.rotary_dim, config.width
        half = rotary // 2
        x = b.cast(self._load(col), f32)
        rotates = col < rotary
        inside = col if rotary == self.dim else b.select(rotates, col, b.const(0, i32))
        if config.interleaved and width > 1:
            cos, sin = (b.unpack(self._angle(i, inside >> 1, width // 2)) for i in (0, 1))
            pairs = [(b.extract(x, 2 * i), b.extract(x, 2 * i + 1)) for i in range(width // 2)]
            rotated = b.vector(
                [
                    part
                    for (a, c), cosine, sine in zip(pairs, cos, sin, strict=True)
                    for part in (b.fma(a, cosine, -(c * sine)), b.fma(c, cosine, a * sine))
                ]
            )
        else:
            if config.interleaved:
                first, other, angle = b.eq(inside & 1, 0), inside ^ 1, inside >> 1
            else:
                first = inside < half
                other = b.select(first, inside + half, inside - half)
                angle = b.select(first, inside, inside - half)
            partner = b.cast(self._load(other), f32)
            cosine, sine = self._angle(0, angle, width), self._angle(1, angle, width)
            rotated = b.fma(x, cosine, b.select(first, -partner, partner) * sine)
        return rotated if rotary == self.dim else b.select(rotates, rotated, x)

    def _angle(self, which: int, at: Value, count: int) -> Value:
        """``count`` cosines (0) or sines (1) of the row's position."""
        assert self.angles is not None and self.config.rope is not None
        b, name = self.b, ("cos", "sin")[which]
        buffer = self.p.buffer(name, SCALARS[self.config.rope])
        start = self.angles[which] + b.cast(at, self.p.index)
        return b.cast(b.load(buffer, start, count, min(count, self.config.rope_align)), f32)

    def _load(self, col: Value) -> Value:
        return self.b.load(self.buffer, self.source + self._offset(self.name, col), self.config.width, self.align[0])

    def _store(self, out: Value, to: Value, col: Value, values: Value, exists: Value) -> None:
        with self.b.if_(exists):
            self.b.store(out, to + self._offset(f"{self.name}_cache", col), values, self.align[1])

    def _offset(self, name: str, col: Value) -> Value:
        index = self.b.cast(col, self.p.index)
        return index if self.unit else index * self.p.number(f"{name}_stride3", self.p.index)


def _int8(b: Builder, values: Value) -> Value:
    """Round numbers within ±127 to int8."""
    nearest = b.unary("floor", values + 0.5)
    return b.cast(b.cast(b.max(b.min(nearest, 127.0), -127.0), i32), i8)


def _e4m3(b: Builder, values: Value) -> Value:
    """Round numbers within ±448 to fp8 e4m3 bits, to nearest with ties to even."""
    bits = b.bitcast(values, with_element(values.type, u32))  # type: ignore[arg-type]
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # From 2**-6 on, the upper three fraction bits remain, rounded, and the exponent changes its bias. Below that,
    # adding 2**14 gives a float whose last bit is worth 2**-9, the step of subnormals.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    magnitude = b.bitcast(size, values.type)  # type: ignore[arg-type]
    small = b.bitcast(magnitude + 16384.0, with_element(values.type, u32)) - 0x46800000  # type: ignore[arg-type]
    code = b.select(magnitude < 2.0**-6, small, b.min(normal, 0x7E))
    return b.cast(code | sign, u8)
