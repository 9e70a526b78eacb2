"""Small kernels that together use every operation, for tests of passes and renderers: results are compared with the
interpreter's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aule.ir.builder import Builder
from aule.ir.kernel import Arithmetic, KernelIR, Value
from aule.ir.types import (
    SCALARS,
    Fragment,
    Scalar,
    Vector,
    bf16,
    f16,
    f32,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
)

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "f16": np.float16, "bf16": np.uint16, "f32": np.float32, "i8": np.int8, "u8": np.uint8, "i16": np.int16,
    "u16": np.uint16, "i32": np.int32, "u32": np.uint32, "i64": np.int64, "u64": np.uint64,
}  # fmt: skip
"""NumPy's type of each buffer element; bf16 is its bits."""

INTEGERS = (i8, u8, i16, u16, i32, u32, i64, u64)
POSITIVE = ("sqrt", "rsqrt", "log2")
"""Operations that are not defined below zero."""
N = 128
"""Elements that most cases work on: two workgroups of 64."""


@dataclass
class Case:
    """A kernel with its arguments. ``tolerance`` is relative, for floats; 0 asks for the same bits (any NaN is one)."""

    name: str
    kernel: KernelIR
    args: list[Any]
    grid: tuple[int, int, int] = (2, 1, 1)
    tolerance: float = 0.0
    needs: frozenset[str] = frozenset()
    """``subgroups``, ``fragments`` and the unit that multiplies them, ``float_atomics``, ``subgroup_barrier``: what a
    device may lack."""
    elems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.elems = [p.dtype for p in self.kernel.params]

    def copies(self) -> list[Any]:
        return [a.copy() if isinstance(a, np.ndarray) else a for a in self.args]


def numbers(elem: Scalar, count: int = N, seed: int = 0, low: float = -8, high: float = 8) -> Array:
    """Random contents of a buffer, with edge values first for integers."""
    rng = np.random.default_rng([seed, len(elem.name), elem.bits, count])
    dtype = DTYPES[elem.name]
    if elem.is_float:
        values = rng.uniform(low, high, count).astype(np.float32)
        return to_bf16(values) if elem == bf16 else values.astype(dtype)
    info = np.iinfo(dtype)
    edges = [info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 3, info.max // 3, info.max >> 1]
    if elem.is_signed:
        edges += [-1, -2, -3]
    if elem.bits == 64:
        edges += [1 << 32, (1 << 32) - 1, (1 << 33) + 5, 1 << 31]
    values = rng.integers(info.min, info.max, count, dtype, endpoint=True)
    small = rng.integers(0, 100, count).astype(dtype)
    values = np.where(np.arange(count) % 3 == 0, small, values)
    values[: len(edges)] = np.array(edges, dtype)
    return rng.permutation(values) if seed else values


def to_bf16(values: Array) -> Array:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def zeros(elem: Scalar, count: int) -> Array:
    return np.zeros(count, DTYPES[elem.name])


def trace(
    name: str, workgroup: int = 64, subgroup_size: int = 0, arithmetic: Arithmetic = "exact"
) -> Callable[[Callable[[Builder], None]], KernelIR]:
    """Build a kernel from the function it decorates."""

    def make(body: Callable[[Builder], None]) -> KernelIR:
        b = Builder(name, workgroup, subgroup_size, arithmetic=arithmetic)
        body(b)
        return b.finish()

    return make


def thread(b: Builder) -> Value:
    return b.group_id() * 64 + b.thread_id()


def elementwise(
    name: str, inputs: list[Scalar], out: Scalar, ops: list[Callable[..., Value]], lanes: int = 1
) -> tuple[KernelIR, int]:
    """A kernel that writes each of ``ops`` of its inputs, one after the other, to ``out``."""

    @trace(name)
    def kernel(b: Builder) -> None:
        buffers = [b.buffer(f"in{i}", elem) for i, elem in enumerate(inputs)]
        result = b.buffer("result", out, "write")
        i = thread(b)
        with b.if_(i < N // lanes):
            values = [b.load(x, i * lanes, lanes) for x in buffers]
            for k, op in enumerate(ops):
                b.store(result, i * lanes + k * N, op(b, *values))

    return kernel, len(ops) * N


def cases() -> Iterator[Case]:
    """All of them."""
    yield from floats()
    yield from integers()
    yield from halves()
    yield from casts()
    yield from bitcasts()
    yield from vectors()
    yield from permutations()
    yield from memory()
    yield from control()
    yield from workgroups()
    yield from subgroups()
    yield from votes()
    yield from fragments()


def floats() -> Iterator[Case]:
    unary = ["neg", "abs", "exp2", "sqrt", "rsqrt", "rcp", "floor", "small", "log2", "sin", "cos"]
    for lanes in (1, 4):
        ops = [lambda b, x, y, z, op=op: b.unary(op, b.abs(x) + 0.125 if op in POSITIVE else x) for op in unary]
        ops += [lambda b, x, y, z, op=op: b.binary(op, x, y) for op in ("add", "sub", "mul", "div", "min", "max")]
        ops += [lambda b, x, y, z: b.fma(x, y, z), lambda b, x, y, z: b.select(x < y, z, y)]
        ops += [lambda b, x, y, z: b.fma(x, 2.0, -1.5), lambda b, x, y, z: 1.0 - x * 0.1]
        kernel, size = elementwise(f"float_ops_{lanes}", [f32, f32, f32], f32, ops, lanes)
        x = numbers(f32)
        x[0] = -np.inf
        args = [x, numbers(f32, seed=1) + np.float32(20), numbers(f32, seed=2), zeros(f32, size)]
        args[0][0] = 0.5
        yield Case(kernel.name, kernel, args, tolerance=4e-6)

    @trace("compare_floats")
    def compare(b: Builder) -> None:
        x, y, out = b.buffer("x", f32), b.buffer("y", f32), b.buffer("result", u32, "write")
        i = thread(b)
        a, c = b.load(x, i), b.load(y, i)
        bits = b.const(0, u32)
        for k, op in enumerate(("lt", "le", "gt", "ge", "eq", "ne")):
            bits = bits | b.select(b.binary(op, a, c), b.const(1 << k, u32), b.const(0, u32))
        # Masks of attention: infinities through max, subtraction and exp2.
        worst = b.max(a, float("-inf"))
        bits = bits | b.select(b.exp2(worst + float("-inf")) <= 0.0, b.const(64, u32), b.const(0, u32))
        b.store(out, i, bits)

    x, y = numbers(f32, low=-2, high=2).round(), numbers(f32, seed=3, low=-2, high=2).round()
    x[:4], y[:4] = [np.inf, -np.inf, 1, -np.inf], [np.inf, np.inf, -np.inf, -np.inf]
    yield Case("compare_floats", compare, [x, y, zeros(u32, N)])

    for elem in (f32, f16):

        @trace(f"not_numbers_{elem}")
        def not_numbers(b: Builder, elem: Scalar = elem) -> None:
            x, y, out = b.buffer("x", elem), b.buffer("y", elem), b.buffer("result", u32, "write")
            i = thread(b)
            a, c = b.load(x, i), b.load(y, i)
            pair = b.vector([a, c])
            kinds = ("lt", "le", "gt", "ge", "eq", "ne")
            found = [b.binary(op, a, c) for op in kinds] + [~b.binary(op, a, c) for op in kinds]
            found += [b.ne(a, a), b.eq(c, c), b.ne(c, 0.0), ~b.eq(a, a)]
            bits = b.const(0, u32)
            for k, condition in enumerate(found):
                bits = bits | b.select(condition, b.const(1 << k, u32), b.const(0, u32))
            lanes = b.select(b.ne(pair, pair), b.splat(b.const(1 << 20, u32), 2), b.splat(b.const(0, u32), 2))
            b.store(out, i, bits | b.extract(lanes, 0) | (b.extract(lanes, 1) << 1))

        special = np.array([np.nan, 1, np.inf, -np.inf, 0], DTYPES[elem.name])
        yield Case(
            f"not_numbers_{elem}", not_numbers,
            [np.resize(special.repeat(5), N), np.resize(special, N), zeros(u32, N)],
        )  # fmt: skip

    @trace("special_constants")
    def special(b: Builder) -> None:
        out, bits = b.buffer("result", f32, "write"), b.buffer("bits", u32, "write")
        i = thread(b)
        values = [float("inf"), float("-inf"), 1e-30, -0.5, 3.4028234663852886e38, 0.1, 16777216.0, -1e10]
        picked = b.const(float("nan"), f32)
        for k, v in enumerate(values):
            picked = b.select(b.eq(i, k), b.const(v, f32), picked)
        b.store(out, i, picked)
        ints = [-(2**31), 2**31 - 1, -1, 7]
        chosen = b.const(0, i32)
        for k, n in enumerate(ints):
            chosen = b.select(b.eq(i, k), b.const(n, i32), chosen)
        b.store(bits, i, b.bitcast(chosen, u32) ^ b.const(0xFFFFFFFF, u32))

    yield Case("special_constants", special, [zeros(f32, N), zeros(u32, N)])

    @trace("exp2_log2_edges")
    def edges(b: Builder) -> None:
        x, out = b.buffer("x", f32), b.buffer("result", f32, "write")
        i = thread(b)
        b.store(out, i, b.exp2(b.load(x, i)))
        b.store(out, i + N, b.log2(b.exp2(b.load(x, i) * 0.5)))

    x = np.linspace(-60, 60, N, dtype=np.float32)
    x[:3] = [0, 1, -1]
    yield Case("exp2_log2_edges", edges, [x, zeros(f32, 2 * N)], tolerance=1e-5)


def integers() -> Iterator[Case]:
    for elem in INTEGERS:
        ops: list[Callable[..., Value]] = [
            lambda b, x, y, d, s, op=op: b.binary(op, x, y)
            for op in ("add", "sub", "mul", "min", "max", "and", "or", "xor")
        ]
        ops += [lambda b, x, y, d, s, op=op: b.binary(op, x, d) for op in ("div", "rem")]
        ops += [lambda b, x, y, d, s, op=op: b.binary(op, x, s) for op in ("shl", "shr")]
        ops += [lambda b, x, y, d, s, op=op: b.unary(op, x) for op in ("neg", "abs", "not")]
        ops += [
            lambda b, x, y, d, s, op=op, elem=elem: b.cast(b.binary(op, x, y), elem)
            for op in ("lt", "le", "gt", "ge", "eq", "ne")
        ]
        ops += [lambda b, x, y, d, s, n=n: x << n for n in (1, elem.bits // 2, elem.bits - 1)]
        ops += [lambda b, x, y, d, s, n=n: x >> n for n in (1, elem.bits // 2, elem.bits - 1)]
        ops += [lambda b, x, y, d, s: x * 3 + 5, lambda b, x, y, d, s: (x / 7) + (y % 7)]
        if elem == u32:
            ops += [lambda b, x, y, d, s: b.mulhi(x, y), lambda b, x, y, d, s: b.mulhi(x, 0xD2511F53)]
        divisors = numbers(elem, seed=5)
        # No zero, and no -1, by which the smallest number cannot be divided.
        divisors[(divisors == 0) | (divisors == DTYPES[elem.name](-1 if elem.is_signed else 0))] = 3
        counts = np.random.default_rng(1).integers(0, elem.bits, N).astype(DTYPES[elem.name])
        counts[:2] = 0, elem.bits - 1
        for lanes in (1, 4):
            kernel, size = elementwise(f"{elem}_ops_{lanes}", [elem] * 4, elem, ops, lanes)
            args = [numbers(elem), numbers(elem, seed=4), divisors, counts, zeros(elem, size)]
            args[1][::5] = args[0][::5]
            yield Case(kernel.name, kernel, args)


def halves() -> Iterator[Case]:
    for elem in (f16, bf16):
        exact: list[Callable[..., Value]] = [
            lambda b, x, y, op=op: b.binary(op, x, y) for op in ("add", "sub", "mul", "min", "max")
        ]
        exact += [lambda b, x, y: -x, lambda b, x, y: b.abs(x), lambda b, x, y: b.select(x < y, x, y)]
        exact += [
            lambda b, x, y: x * 0.5 + 3.0,
            lambda b, x, y: x * 0.3,
            lambda b, x, y: x + 0.7,
            lambda b, x, y, elem=elem: b.cast(b.cast(x, f32) * b.cast(y, f32), elem),
        ]
        near: list[Callable[..., Value]] = [
            lambda b, x, y, op=op: b.unary(op, b.abs(x) + 0.5)
            for op in ("exp2", "log2", "sqrt", "rsqrt", "rcp", "floor")
        ]
        near += [lambda b, x, y: x / (b.abs(y) + 1.0), lambda b, x, y: b.fma(x, y, x)]
        for lanes, (kind, ops, tolerance) in itertools.product(
            (1, 4, 8), (("exact", exact, 0.0), ("near", near, 2e-3 if elem == f16 else 1.6e-2))
        ):
            kernel, size = elementwise(f"{elem}_{kind}_{lanes}", [elem, elem], elem, ops, lanes)
            args = [numbers(elem), numbers(elem, seed=1), zeros(elem, size)]
            # 1-ulp neighbours are not rounding errors of ours: the devices' exp2 and division differ.
            yield Case(kernel.name, kernel, args, tolerance=tolerance)

        @trace(f"{elem}_variables")
        def variables(b: Builder, elem: Scalar = elem) -> None:
            x, out = b.buffer("x", elem), b.buffer("result", elem, "write")
            i = thread(b)
            total = b.var(b.const(0.0, elem), "total")
            wide = b.var(b.load(x, (i & 15) * 8, 8), "wide")
            scratch = b.private("scratch", elem, 4)
            with b.loop(0, 4, name="k") as k:
                b.store(scratch, k, b.load(x, (i + k) & (N - 1)))
            with b.loop(0, 4, name="k") as k:
                total.value = b.max(total.value, b.load(scratch, k))
            wide.value = wide.value + 1.0
            for lane in b.unpack(wide.value):
                total.value = b.max(total.value, lane)
            b.store(out, i, total.value)

        yield Case(f"{elem}_variables", variables, [numbers(elem), zeros(elem, N)])


ROUNDING = np.concatenate(
    [
        np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, 65504.0, 65519.9, 65520.0, -65520.0, 65536.0, 1e6, -1e30, 0.1,
                  2.0**-14, 2.0**-15, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, -(2.0**-25), 3 * 2.0**-25, 5 * 2.0**-26,
                  1023.5 * 2.0**-24, 2.0**-14 - 2.0**-26, 2049.0, 2051.0, 2050.0, 1.0009765625, 1.00048828125,
                  1.00146484375, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 3.3895e38, 257.0, 259.0],
                 np.float32),
        np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FBFFFFF], np.uint32).view(np.float32),
    ]
)  # fmt: skip
"""f32 numbers whose rounding to fp16 or bf16 is easy to get wrong: ties, subnormals, overflow, NaN."""


def casts() -> Iterator[Case]:
    for source in (*INTEGERS, f32):
        for target in (*INTEGERS, f32):
            if source == target:
                continue
            kernel, size = elementwise(
                f"{source}_to_{target}", [source], target, [lambda b, x, t=target: b.cast(x, t)], 1
            )  # fmt: skip
            data = numbers(source)
            if source == f32:
                top = min(2.0 ** (target.bits - 1) - 1, 2.0**62)
                data = numbers(f32, low=-min(top, 1e9) if target.is_signed else 0, high=min(top, 1e9))
                if target.bits == 64:
                    data[1::2] *= 4000000000
                data[0] = 0
            yield Case(kernel.name, kernel, [data, zeros(target, size)])

    rng = np.random.default_rng(7)
    wide = (rng.integers(0, 2**32, 1024 - len(ROUNDING), np.uint32)).view(np.float32)
    wide[::2] = rng.uniform(-70000, 70000, len(wide[::2]))
    wide[1::4] = rng.uniform(-1e-4, 1e-4, len(wide[1::4]))
    everything = np.concatenate([ROUNDING, wide])
    # Numbers below f32's own subnormals are flushed by many devices; they round to zero in fp16 only.
    tiny = np.abs(everything) < 1.2e-38
    everything[tiny] = 0
    kinds: list[tuple[Scalar, Arithmetic]] = [(f16, "exact"), (bf16, "exact"), (bf16, "quick"), (bf16, "fused")]
    for (target, kind), lanes in itertools.product(kinds, (1, 4)):
        name = f"round_to_{target}_{lanes}" if kind == "exact" else f"round_to_{target}_{kind}_{lanes}"

        @trace(name, arithmetic=kind)
        def rounding(b: Builder, target: Scalar = target, lanes: int = lanes) -> None:
            x, out = b.buffer("x", f32), b.buffer("result", target, "write")
            back = b.buffer("back", f32, "write")
            i = thread(b) * lanes
            with b.if_(i < 1024):
                small = b.cast(b.load(x, i, lanes), target)
                b.store(out, i, small)
                b.store(back, i, b.cast(small, f32))

        given = everything.copy()
        if kind != "exact":  # what else it rounds is not said
            other = ~(np.abs(given) < 2.0**110)
            given[other] = np.resize(np.float32([np.inf, -np.inf, np.nan, 2.0**109]), other.sum())
        yield Case(name, rounding, [given, zeros(target, 1024), zeros(f32, 1024)], (1024 // 64 // lanes, 1, 1))

    yield from returns(everything)

    for elem in (f16, bf16):

        @trace(f"read_every_{elem}")
        def read(b: Builder, elem: Scalar = elem) -> None:
            x, out = b.buffer("x", elem), b.buffer("result", f32, "write")
            i = thread(b)
            b.store(out, i * 4, b.cast(b.load(x, i * 4, 4), f32))

        data = np.arange(65536, dtype=np.uint16)
        if elem == bf16:
            # bf16 subnormals are f32 subnormals, which devices may flush.
            data[(data & 0x7F80) == 0] = 0
        yield Case(f"read_every_{elem}", read, [data.view(DTYPES[elem.name]), zeros(f32, 65536)], (256, 1, 1))

    for source, target in (
        (i32, f16),
        (f16, i32),
        (u8, f16),
        (f16, bf16),
        (bf16, f16),
        (i64, bf16),
        (bf16, i8),
        (u16, bf16),
    ):
        kernel, size = elementwise(f"{source}_to_{target}", [source], target, [lambda b, x, t=target: b.cast(x, t)], 2)
        data = numbers(source, low=-100, high=100)
        if source in (i32, i64, u16):
            data = (data % 2000).astype(DTYPES[source.name])
        yield Case(kernel.name, kernel, [data, zeros(target, size)])


def returns(data: Array) -> Iterator[Case]:
    """Numbers that are rounded and widened again without a store: a compiler must not remove the rounding."""
    data = np.where(np.abs(data) < 1e-33, np.float32(0), data)  # no subnormal f32 on the way, which devices may flush
    for target in (f16, bf16):

        @trace(f"through_{target}")
        def through(b: Builder, target: Scalar = target) -> None:
            source, result = b.buffer("x", f32), b.buffer("result", f32, "write")
            i = thread(b)
            x = b.load(source, i)
            narrow = b.cast(x, target)
            held = b.var(narrow, "held")
            with b.if_(i > 5):
                held.value = b.cast(x * 0.75, target)
            again = b.var(narrow, "again")
            with b.loop(0, 3):
                again.value = b.cast(b.cast(again.value, f32) * 0.75, target)
            wide = b.cast(b.vector([narrow, b.cast(x * 1.25, target), -narrow, narrow]), f32)
            ways = [
                b.cast(narrow, f32), b.cast(held.value, f32), b.cast(again.value, f32), *b.unpack(wide),
                b.cast(b.select(i > 7, narrow, b.const(1.5, target)), f32),
                b.cast(b.cast(b.cast(narrow, f32) * 1.0009765625, target), f32),
                b.select(b.abs(x) < 60000.0, x - b.cast(narrow, f32), b.const(0.0, f32)),
            ]  # fmt: skip
            for k, way in enumerate(ways):
                b.store(result, i + k * 1024, way)

        yield Case(f"through_{target}", through, [data.copy(), zeros(f32, 10 * 1024)], (16, 1, 1))


def bitcasts() -> Iterator[Case]:
    pairs: list[tuple[Any, Any]] = [
        (f32, u32), (i32, f32), (u32, Vector(f16, 2)), (Vector(f16, 2), u32), (u16, f16), (f16, u16), (bf16, u16),
        (u16, bf16), (Vector(u8, 4), u32), (u32, Vector(i8, 4)), (i16, u16), (i8, u8), (u64, Vector(u32, 2)),
        (Vector(u32, 2), i64), (Vector(u16, 4), Vector(u32, 2)), (Vector(u32, 4), Vector(f16, 8)), (i64, u64),
        (Vector(f16, 8), Vector(u32, 4)), (Vector(bf16, 4), u64), (u32, Vector(bf16, 2)), (Vector(u8, 2), i16),
        (Vector(u8, 16), Vector(u32, 4)),
    ]  # fmt: skip
    for source, target in pairs:
        lanes_in = source.lanes if isinstance(source, Vector) else 1
        lanes_out = target.lanes if isinstance(target, Vector) else 1
        elem_in = source.elem if isinstance(source, Vector) else source
        elem_out = target.elem if isinstance(target, Vector) else target

        @trace(f"bits_{elem_in}x{lanes_in}_{elem_out}x{lanes_out}")
        def bits(
            b: Builder, elem_in: Scalar = elem_in, elem_out: Scalar = elem_out, n: int = lanes_in, m: int = lanes_out,
            target: Any = target,
        ) -> None:  # fmt: skip
            x, out = b.buffer("x", elem_in), b.buffer("result", elem_out, "write")
            i = thread(b)
            b.store(out, i * m, b.bitcast(b.load(x, i * n, n), target))

        data = numbers(elem_in, N * lanes_in)
        if not elem_in.is_float:
            # No bits that are NaN or subnormal in the target: devices may change those.
            rng = np.random.default_rng(3)
            if elem_out.is_float:
                floats_ = rng.uniform(1, 8, N * lanes_out).astype(np.float32)
                like = to_bf16(floats_) if elem_out == bf16 else floats_.astype(DTYPES[elem_out.name])
                data = like.view(DTYPES[elem_in.name])
        yield Case(bits.name, bits, [data, zeros(elem_out, N * lanes_out)])

    # What an operator leaves of a small integer is an int to C, unless it is told.
    for source, target, ones in ((u16, f16, 0x3C00), (u8, i8, 0x40), (i16, u16, 0x3C00)):
        kernel, size = elementwise(
            f"bits_of_operators_{source}_{target}", [source], target,
            [
                lambda b, x, t=target, ones=ones: b.bitcast(x | ones, t),
                lambda b, x, t=target, ones=ones: b.bitcast((x | ones) & (ones | 0x3C), t),
            ],
        )  # fmt: skip
        yield Case(kernel.name, kernel, [numbers(source, low=0, high=100), zeros(target, size)])


def vectors() -> Iterator[Case]:
    for elem, lanes in itertools.product((f32, f16, bf16, u8, i16, u32, i64), (2, 4, 8, 16)):

        @trace(f"copy_{elem}x{lanes}")
        def copy(b: Builder, elem: Scalar = elem, n: int = lanes) -> None:
            x, out = b.buffer("x", elem), b.buffer("result", elem, "write")
            i = thread(b) * n
            value = b.load(x, i, n)
            parts = b.unpack(value)
            b.store(out, i, b.vector(parts[::-1]))
            b.store(out, i + N * n, b.load(x, i, n) + b.splat(parts[0], n))

        data = numbers(elem, N * lanes)
        yield Case(copy.name, copy, [data, zeros(elem, 2 * N * lanes)])

    for elem, lanes in itertools.product((f32, f16, bf16, u8, i64), (2, 4)):

        @trace(f"unaligned_{elem}x{lanes}")
        def unaligned(b: Builder, elem: Scalar = elem, n: int = lanes) -> None:
            x, out = b.buffer("x", elem), b.buffer("result", elem, "write")
            i = thread(b) * n
            b.store(out, i + 3, b.load(x, i + 1, n, align=1), align=1)

        yield Case(unaligned.name, unaligned, [numbers(elem, N * lanes + 1), zeros(elem, N * lanes + 3)])

    @trace("mixed_widths")
    def mixed(b: Builder) -> None:
        # One buffer read by fours and by ones, one written by fours and twos, one by pairs only.
        x, out, pairs = b.buffer("x", f32), b.buffer("result", f32, "write"), b.buffer("pairs", f32, "readwrite")
        i = thread(b)
        four = b.load(x, i * 4, 4)
        one = b.load(x, 4 * N - 1 - i)
        two = b.load(x, i * 2, 2)
        b.store(out, i * 8, four * one)
        b.store(out, i * 8 + 4, two)
        b.store(out, i * 8 + 6, b.vector([one, b.extract(four, 2)]))
        old = b.load(pairs, i * 2, 2)
        b.store(pairs, i * 2, old + two)

    args = [numbers(f32, 4 * N), zeros(f32, 8 * N), numbers(f32, 2 * N)]
    yield Case("mixed_widths", mixed, args, tolerance=1e-6)

    for elem, lanes in ((f32, 4), (i32, 4), (f16, 4), (u8, 4), (i64, 2), (f32, 8), (bf16, 2)):

        @trace(f"masks_{elem}x{lanes}")
        def masks(b: Builder, elem: Scalar = elem, n: int = lanes) -> None:
            x, y, out = b.buffer("x", elem), b.buffer("y", elem), b.buffer("result", elem, "write")
            i = thread(b) * n
            a, c = b.load(x, i, n), b.load(y, i, n)
            less, same = a < c, b.eq(a, c)
            b.store(out, i, b.select(less | same, a, c))
            b.store(out, i + N * n, b.select(~less & ~same, a, c))
            b.store(out, i + 2 * N * n, b.select(less ^ (a > c), a, c))
            b.store(out, i + 3 * N * n, b.select(b.extract(less, 1), a, c))
            made = b.vector([b.extract(same, k) for k in range(n)][::-1])
            kept = b.var(made, "kept")
            kept.value = b.select(b.extract(less, 0), kept.value, less)
            b.store(out, i + 4 * N * n, b.cast(b.cast(kept.value, i32), elem))

        args = [numbers(elem, N * lanes), numbers(elem, N * lanes, seed=2), zeros(elem, 5 * N * lanes)]
        args[1][::3] = args[0][::3]
        yield Case(masks.name, masks, args)


def permutations() -> Iterator[Case]:
    for elem, lanes in itertools.product((f32, f16, bf16, u8, i32, i64), (2, 4, 8, 16)):

        @trace(f"permute_{elem}x{lanes}")
        def permute(b: Builder, elem: Scalar = elem, n: int = lanes) -> None:
            x, y, out = b.buffer("x", elem), b.buffer("y", elem), b.buffer("result", elem, "write")
            t = thread(b)
            a, c = b.load(x, t * n, n), b.load(y, t * n, n)
            kept = b.var(a, "kept")
            kept.value = b.permute(a, None, range(n)[::-1])
            taken = [
                kept.value,
                b.permute(a, c, [i // 2 + i % 2 * n for i in range(n)]),  # interleaved: what unpacks do
                b.permute(a, c, [(i + n // 2) % (2 * n) for i in range(n)]),
                b.permute(a, c, [0] * (n // 2) + [2 * n - 1] * (n // 2)),
                b.splat(b.permute(c, None, [n - 1]), n),
                # A comparison is permuted as what it compares.
                b.select(b.permute(a < c, None, range(n)[::-1]), a, c),
            ]
            for k, value in enumerate(taken):
                b.store(out, t * n + k * N * n, value)
            at = len(taken) * N * n
            b.store(out, at + t * 2, b.permute(a, c, [n, 0]))
            if n < 16:
                b.store(out, at + 2 * N + t * 2 * n, b.permute(a, c, range(2 * n)[::-1]))

        args = [numbers(elem, N * lanes), numbers(elem, N * lanes, seed=2), zeros(elem, (8 * lanes + 2) * N)]
        yield Case(permute.name, permute, args)


def memory() -> Iterator[Case]:
    for elem in (u8, i8, u16, i16, f16, bf16):

        @trace(f"neighbours_{elem}")
        def neighbours(b: Builder, elem: Scalar = elem) -> None:
            # Neighbouring elements of a word are written by different threads, some of them not at all.
            x, out = b.buffer("x", elem), b.buffer("result", elem, "readwrite")
            i = thread(b)
            b.prefetch(x, i * 2)  # not all of it is there
            with b.if_(b.ne(i % 3, 0)):
                b.store(out, N - 1 - i, b.load(x, i))
            b.store(out, N + (i ^ 1) * 2, b.load(x, (i & 63) * 2, 2))

        args = [numbers(elem), numbers(elem, 3 * N, seed=9)]
        yield Case(neighbours.name, neighbours, args)

    @trace("streamed")
    def streamed(b: Builder) -> None:
        # Some vectors begin where memory past the caches may be written, others do not.
        x, out = b.buffer("x", f32), b.buffer("result", f32, "readwrite")
        i = thread(b)
        b.store_streaming(out, i, b.load(x, i))
        b.store_streaming(out, N + i * 5 + 1, b.load_streaming(x, (i & 31) * 4, 4), align=1)

    yield Case("streamed", streamed, [numbers(f32), numbers(f32, 7 * N, seed=9)])

    for elem in (f32, f16, bf16, u8, i16, u32, i64):

        @trace(f"arrays_{elem}")
        def arrays(b: Builder, elem: Scalar = elem) -> None:
            x, out = b.buffer("x", elem), b.buffer("result", elem, "write")
            tile, rows = b.shared("tile", elem, 64), b.shared("rows", elem, 256)
            t, i = b.thread_id(), thread(b)
            b.store(tile, t, b.load(x, i))
            b.store(rows, t * 4, b.load(x, (i & 31) * 4, 4))
            own = b.private("own", elem, 8)
            b.barrier()
            with b.loop(0, 4, name="k") as k:
                b.store(own, k * 2, b.load(tile, (t + k * 7) & 63))
                b.store(own, k * 2 + 1, b.load(rows, (t * 4 + k) ^ 5))
            b.store(out, i * 8, b.load(own, 0, 4))
            b.store(own, 0, b.load(rows, (63 - t) * 4, 4))
            b.store(out, i * 8 + 4, b.vector([b.load(own, t & 3), *(b.load(own, k) for k in (2, 5, 7))]))

        yield Case(arrays.name, arrays, [numbers(elem), zeros(elem, 8 * N)])

    @trace("scalars")
    def scalars(b: Builder) -> None:
        n, big, scale, mask = b.scalar("n", i32), b.scalar("big", i64), b.scalar("scale", f32), b.scalar("mask", u32)
        huge, last = b.scalar("huge", u64), b.scalar("last", i32)
        out, wide = b.buffer("result", f32, "write"), b.buffer("wide", i64, "write")
        i = thread(b)
        with b.if_(i < n):
            b.store(out, i, b.cast(i + last, f32) * scale + b.cast(mask & 255, f32))
            b.store(wide, i, big * b.cast(i, i64) + b.cast(huge >> 3, i64))

    args = [100, -(2**40) - 3, 0.25, 0xFFFFFF07, 2**63 + 24, -5, zeros(f32, N), zeros(i64, N)]
    yield Case("scalars", scalars, args)

    @trace("long_index")
    def long_index(b: Builder) -> None:
        x, out, offset = b.buffer("x", f16), b.buffer("result", f32, "write"), b.scalar("offset", i64)
        i = b.cast(thread(b), i64)
        b.store(out, i * 2 - offset * 2, b.cast(b.load(x, i * 2, 2), f32) + b.cast(offset, f32))

    yield Case("long_index", long_index, [numbers(f16, 2 * N), zeros(f32, 2 * N), 0])

    for elem in (i32, u32):

        @trace(f"atomics_{elem}")
        def atomics(b: Builder, elem: Scalar = elem) -> None:
            x, out, first = (
                b.buffer("x", elem),
                b.buffer("result", elem, "readwrite"),
                b.buffer("first", elem, "readwrite"),
            )
            local = b.shared("local", elem, 4)
            t, i = b.thread_id(), thread(b)
            value = b.load(x, i)
            with b.if_(t < 4):
                b.store(local, t, 0)
            b.barrier()
            for k, kind in enumerate(("add", "min", "max", "and", "or", "xor")):
                b.atomic(kind, out, k * 2 + (i & 1), value)
            b.atomic("exchange", out, 12 + i, value)
            b.atomic("add", local, t & 3, value)
            # What an atomic returns: every ticket is drawn once.
            ticket = b.atomic("add", first, 0, 1)
            b.atomic("add", first, 1 + b.cast(ticket, i32), 1)
            b.barrier()
            with b.if_(t < 4):
                b.atomic("add", out, 12 + N + t, b.load(local, t))

        args = [numbers(elem), numbers(elem, 16 + N, seed=3), zeros(elem, N + 1)]
        yield Case(atomics.name, atomics, args)

    # Whole numbers, so that the sums are exact in any order; what was there before is at most what is there after. Two
    # cases, because a device may have such atomics of buffers alone.
    @trace("atomic_floats")
    def atomic_floats(b: Builder) -> None:
        x, out = b.buffer("x", f32), b.buffer("result", f32, "readwrite")
        i = thread(b)
        before = b.atomic("add", out, i & 3, b.load(x, i))
        b.store(out, 4 + i, b.select(before <= N * 9.0, b.const(1.0, f32), b.const(0.0, f32)))

    @trace("shared_atomic_floats")
    def shared_atomic_floats(b: Builder) -> None:
        x, out, local = b.buffer("x", f32), b.buffer("result", f32, "write"), b.shared("local", f32, 2)
        t, i = b.thread_id(), thread(b)
        with b.if_(t < 2):
            b.store(local, t, 0.0)
        b.barrier()
        before = b.atomic("add", local, t & 1, b.load(x, i))
        b.barrier()
        b.store(out, i, b.load(local, t & 1) + b.select(before <= 64 * 9.0, b.const(0.5, f32), b.const(0.0, f32)))

    x, needs = np.random.default_rng(0).integers(0, 9, N).astype(np.float32), frozenset({"float_atomics"})
    yield Case("atomic_floats", atomic_floats, [x, zeros(f32, 4 + N)], needs=needs)
    yield Case("shared_atomic_floats", shared_atomic_floats, [x, zeros(f32, N)], needs=needs)

    @trace("reserved_names")
    def reserved(b: Builder) -> None:
        kernel, half, vec4 = b.buffer("kernel", f32), b.scalar("half", f32), b.buffer("vec4", f32, "write")
        shared = b.shared("threadgroup", f32, 64)
        value = b.var(b.load(kernel, thread(b)), "float")
        b.store(shared, b.thread_id(), value.value)
        b.barrier()
        with b.loop(0, 2, name="while") as k:
            value.value = value.value * half + b.load(shared, (b.thread_id() + k) & 63)
        b.store(vec4, thread(b), value.value)

    yield Case("reserved_names", reserved, [numbers(f32), 0.5, zeros(f32, N)], tolerance=1e-5)


def control() -> Iterator[Case]:
    @trace("loops")
    def loops(b: Builder) -> None:
        x, out, n = b.buffer("x", i32), b.buffer("result", i32, "write"), b.scalar("n", i32)
        i = thread(b)
        total, bound = b.var(b.const(0, i32), "total"), b.var(i & 7, "bound")
        b.comment("The bound changes inside, which must not change how often the loop turns.")
        with b.loop(0, bound.value, name="i") as k:
            bound.value = bound.value + 1
            total.value = total.value + k * 3
        with b.loop(i & 3, n, 3, unroll=4, name="i") as k, b.loop(k, k + 2, unroll=-1, name="j") as j:
            total.value = total.value ^ (j * b.load(x, (k + j) & (N - 1)))
        with b.loop(5, 5) as k:
            total.value = k
        with b.loop(b.const(0, u32), b.cast(i & 3, u32), name="u") as u:
            total.value = total.value + b.cast(u, i32)
        b.store(out, i, total.value + bound.value)

    yield Case("loops", loops, [numbers(i32), zeros(i32, N), 40])

    @trace("long_loops")
    def long_loops(b: Builder) -> None:
        out, start = b.buffer("result", i64, "write"), b.scalar("start", i64)
        i = thread(b)
        total = b.var(b.const(0, i64), "total")
        with b.loop(start, start + b.cast(i & 7, i64), name="k") as k:
            total.value = total.value + k
        with b.loop(start - 10, start + 10, 7, name="k") as k:
            total.value = total.value * 3 + k
        with b.loop(start, start - 1, name="k") as k:
            total.value = total.value - k
        b.store(out, i, total.value)

    yield Case("long_loops", long_loops, [zeros(i64, N), (1 << 32) - 3])

    @trace("branches")
    def branches(b: Builder) -> None:
        x, out = b.buffer("x", f32), b.buffer("result", f32, "write")
        i = thread(b)
        value = b.var(b.load(x, i), "value")
        with b.if_(i % 2 < 1):
            value.value = value.value * 2.0
            with b.if_(value.value > 4.0):
                value.value = value.value - 100.0
            with b.else_(), b.loop(0, i & 3):
                value.value = value.value + 0.5
        with b.else_():
            value.value = -value.value
        with b.if_((i > 5) & (i < 100) | ~(i < 120)):
            b.store(out, i, value.value)

    yield Case("branches", branches, [numbers(f32), zeros(f32, N)])

    @trace("order_of_variables")
    def order(b: Builder) -> None:
        # Values read before a variable changes keep what was there.
        x, out = b.buffer("x", i32), b.buffer("result", i32, "write")
        i = thread(b)
        a, c = b.var(b.load(x, i), "a"), b.var(i, "c")
        old = a.value
        doubled = a.value * 2
        a.value = c.value + 1
        c.value = old
        late = doubled + a.value
        with b.loop(0, 3):
            before = a.value
            a.value = a.value + c.value
            c.value = before
        pair = b.var(b.vector([a.value, c.value]), "pair")
        first = b.extract(pair.value, 0)
        pair.value = pair.value + 7
        held = c.value - 1
        with b.if_(i > 3):
            c.value = held * 2
        b.store(out, i * 4, b.vector([late, first, b.extract(pair.value, 1), held + c.value]))

    yield Case("order_of_variables", order, [numbers(i32), zeros(i32, 4 * N)])


def workgroups() -> Iterator[Case]:
    @trace("reduce", 128)
    def reduce(b: Builder) -> None:
        x, out = b.buffer("x", f32), b.buffer("result", f32, "write")
        tile = b.shared("tile", f32, 128)
        t = b.thread_id()
        b.store(tile, t, b.load(x, b.group_id() * 128 + t))
        b.barrier()
        width = 64
        while width:
            with b.if_(t < width):
                b.store(tile, t, b.load(tile, t) + b.load(tile, t + width))
            b.barrier()
            width //= 2
        with b.if_(b.eq(t, 0)):
            b.store(out, b.group_id(), b.load(tile, 0))

    yield Case("reduce", reduce, [numbers(f32, 512), zeros(f32, 4)], (4, 1, 1), tolerance=1e-5)

    @trace("grid", 32)
    def grid(b: Builder) -> None:
        out = b.buffer("result", i32, "write")
        at = (b.group_id(2) * b.group_count(1) + b.group_id(1)) * b.group_count(0) + b.group_id(0)
        b.store(out, at * 32 + b.thread_id(), at * 1000 + b.thread_id() + b.group_count(2))

    yield Case("grid", grid, [zeros(i32, 32 * 24)], (2, 3, 4))

    @trace("through_global_memory")
    def through(b: Builder) -> None:
        x, out, swap = b.buffer("x", f32), b.buffer("result", f32, "write"), b.buffer("swap", f32, "readwrite")
        i = thread(b)
        with b.loop(0, 3, name="k") as k:
            b.store(swap, i, b.load(x, i) * b.cast(k + 1, f32))
            b.barrier(global_memory=True)
            b.store(out, i + k * N, b.load(swap, i ^ 63))
            b.barrier(global_memory=True)

    yield Case("through_global_memory", through, [numbers(f32), zeros(f32, 3 * N), zeros(f32, N)], tolerance=1e-6)

    @trace("transpose", 64)
    def transpose(b: Builder) -> None:
        # Vectors into shared memory, scalars out of it, in halves.
        x, out = b.buffer("x", f16), b.buffer("result", f32, "write")
        tile = b.shared("tile", f16, 32 * 32)
        t = b.thread_id()
        with b.loop(0, 2, name="k") as k:
            b.store(tile, t * 8 + k * 512, b.load(x, t * 8 + k * 512, 8))
        b.barrier()
        with b.loop(0, 16, name="k") as k:
            at = k * 64 + t
            b.store(out, at, b.cast(b.load(tile, (at & 31) * 32 + (at >> 5)), f32))

    yield Case("transpose", transpose, [numbers(f16, 1024), zeros(f32, 1024)], (1, 1, 1))


def subgroups() -> Iterator[Case]:
    for elem in (f32, i32, u32):

        @trace(f"subgroup_{elem}", 64)
        def lanes(b: Builder, elem: Scalar = elem) -> None:
            x, out = b.buffer("x", elem), b.buffer("result", elem, "write")
            i = thread(b)
            value = b.load(x, i)
            lane = b.lane_id()
            results = [b.shuffle_xor(value, 1), b.shuffle_xor(value, 2), b.shuffle(value, (lane * 3 + 1) & 3)]
            results += [b.subgroup_reduce(kind, value) for kind in ("add", "min", "max")]
            positive = value > 3
            votes = b.select(b.subgroup_any(positive), b.const(1, elem), b.const(0, elem))
            votes = votes + b.select(b.subgroup_all(positive), b.const(2, elem), b.const(0, elem))
            place = b.cast(b.subgroup_id() * 100 + lane, elem)
            for k, result in enumerate([*results, votes, place]):
                b.store(out, i + k * N, result)

        data = numbers(elem)
        data[8:40] = 5
        args = [data, zeros(elem, 8 * N)]
        yield Case(lanes.name, lanes, args, tolerance=1e-5, needs=frozenset({"subgroups"}))

    @trace("subgroup_barrier", 64)
    def handover(b: Builder) -> None:
        x, out, tile = b.buffer("x", f32), b.buffer("result", f32, "write"), b.shared("tile", f32, 64)
        t, i = b.thread_id(), thread(b)
        b.store(tile, t, b.load(x, i))
        b.subgroup_barrier()
        b.store(out, i, b.load(tile, t ^ 1))

    needs = frozenset({"subgroups", "subgroup_barrier"})
    yield Case("subgroup_barrier", handover, [numbers(f32), zeros(f32, N)], needs=needs)


def votes() -> Iterator[Case]:
    @trace("workgroup_any", 64)
    def vote(b: Builder) -> None:
        x, out = b.buffer("x", f32), b.buffer("result", f32, "write")
        at = b.group_id() * 64 + b.thread_id()
        value = b.load(x, at)
        for limit in (0.9, 0.99, 2.0):
            found = b.workgroup_any(value > limit)
            value = b.select(found, value + 1.0, value)
        b.store(out, at, value)

    yield Case("workgroup_any", vote, [numbers(f32, low=0, high=1), zeros(f32, N)])


def fragments() -> Iterator[Case]:
    for elem, side in ((f32, 8), (f16, 8), (f16, 16), (bf16, 16)):
        area, held = side * side, side * side // 32

        @trace(f"fragments_{elem}_{side}", 64, 32)
        def product(b: Builder, elem: Scalar = elem, side: int = side, area: int = area, held: int = held) -> None:
            x, y, out = b.buffer("x", elem), b.buffer("y", elem), b.buffer("result", f32, "write")
            low, tile = b.buffer("low", elem, "write"), b.shared("tile", f32, 2 * area)
            copy = b.shared("copy", elem, 2 * area)
            s = b.subgroup_id()
            a_type, b_type = Fragment(elem, side, side, "a"), Fragment(elem, side, side, "b")
            sums = Fragment(f32, side, side, "accumulator")
            total = b.var(b.fragment_fill(sums, 1.0), "total")
            with b.loop(0, 4, name="k") as k:
                a = b.fragment_load(a_type, x, s * (4 * area) + k * side, 4 * side)
                c = b.fragment_load(b_type, y, k * side, 4 * side, "column")
                total.value = b.fragment_mma(a, c, total.value)
            scaled = total.value
            for component in range(held):
                scaled = b.fragment_set(scaled, component, b.fragment_get(scaled, component) * 0.5)
            scaled = b.fragment_pack(sums, [b.fragment_get(scaled, i) + 1.0 for i in range(held)])
            # The first of the left factors, taken apart and put together again, through shared memory and back.
            a = b.fragment_load(a_type, x, s * (4 * area), 4 * side)
            parts = [b.fragment_get(a, i) for i in range(held)]
            b.fragment_store(copy, s * area, side, b.fragment_pack(a_type, parts), "column")
            b.barrier()
            turned = b.fragment_load(b_type, copy, s * area, side)
            scaled = b.fragment_mma(b.fragment_fill(a_type, 1.0), turned, scaled)
            b.fragment_store(tile, s * area, side, scaled)
            b.barrier()
            b.store(out, b.thread_id() * held, b.load(tile, b.thread_id() * held, held))
            b.fragment_store(low, s * area, side, b.cast(total.value, elem), "column")

        args = [
            numbers(elem, 8 * area, low=-1, high=1),
            numbers(elem, 4 * area, seed=1, low=-1, high=1),
            zeros(f32, 2 * area),
            zeros(elem, 2 * area),
        ]
        tolerance = {f32: 1e-4, f16: 1e-2, bf16: 2e-2}[elem]
        needs = frozenset({"fragments", "subgroups", f"m{side}n{side}k{side}:{elem}:f32"})
        yield Case(product.name, product, args, (1, 1, 1), tolerance, needs)


def differences(case: Case, expected: list[Any], got: list[Any], tolerance: float | None = None) -> str:
    """Differences between the buffers of a run and the expected ones; empty if there are none."""
    limit = case.tolerance if tolerance is None else tolerance
    for name, elem, want, have in zip((p.name for p in case.kernel.params), case.elems, expected, got, strict=True):
        if not isinstance(want, np.ndarray):
            continue
        a, b = numeric(want, elem), numeric(have, elem)
        if SCALARS[elem].is_float:
            with np.errstate(all="ignore"):
                wrong = ~((a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= limit * (1 + np.abs(a))))
        else:
            wrong = a != b
        if wrong.any():
            at = np.flatnonzero(wrong)[:6]
            shown = ", ".join(f"[{i}] expected {a[i]!r}, got {b[i]!r}" for i in at)
            return f"{case.name}: {name} differs in {wrong.sum()} of {wrong.size}: {shown}"
    return ""


def numeric(data: Array, elem: str) -> Array:
    """A buffer as numbers that can be compared."""
    if elem == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32) if elem == "f16" else data
