"""Results of every operation, compared with NumPy or with Python's own numbers."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aule.errors import KernelError
from aule.ir import Builder, Value
from aule.ir.interpret import SanitizerError, interpret
from aule.ir.ops import OPS
from aule.ir.passes import narrow_vectors
from aule.ir.types import (
    SCALARS,
    Fragment,
    Scalar,
    Vector,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
)
from aule.ir.verify import verify
from aule.target import FragmentLayout

MEMORY = {
    "bf16": np.uint16, "f16": np.float16, "f32": np.float32, "f64": np.float64, "i8": np.int8, "i16": np.int16,
    "i32": np.int32, "i64": np.int64, "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip
INTEGERS = (i8, i16, i32, i64, u8, u16, u32, u64)
FLOATS = (f16, f32, f64)
EXERCISED: set[str] = set()


def launch(b: Builder, args: Sequence[Any], grid: tuple[int, int, int] = (1, 1, 1), **options: Any) -> None:
    """Verify and interpret; no kernel may cause a warning."""
    kernel = b.finish()
    verify(kernel)
    EXERCISED.update(op.opcode for op in kernel.walk())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        interpret(kernel, grid, args, **options)


def compute(
    function: Callable[..., Value], elems: Sequence[Scalar], result: Scalar, *columns: Any, lanes: int = 1
) -> np.ndarray:
    """``function(b, x, y, ...)`` for every row of the columns, one thread each."""
    arrays = [np.ascontiguousarray(c, MEMORY[e.name]) for c, e in zip(columns, elems, strict=True)]
    count = len(arrays[0]) // lanes
    b = Builder("compute", workgroup=count)
    buffers = [b.buffer(f"in{n}", e) for n, e in enumerate(elems)]
    out = b.buffer("out", result, "write")
    at = b.thread_id() * lanes
    b.store(out, at, function(b, *[b.load(p, at, lanes) for p in buffers]))
    target = np.zeros(count * lanes, MEMORY[result.name])
    launch(b, [*arrays, target])
    return target


def flag(b: Builder, x: Value) -> Value:
    """A bool as something that memory can hold."""
    return b.select(x, b.const(1, u8), b.const(0, u8))


def wrap(value: int, t: Scalar) -> int:
    value &= (1 << t.bits) - 1
    return value - (1 << t.bits) if t.kind == "int" and value >> (t.bits - 1) else value


def truncating_div(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def nearest_bf16(x: float) -> float:
    """Correct rounding by exact arithmetic: all scalings by powers of two are exact in Python's floats."""
    if x == 0 or not math.isfinite(x):
        return x
    quantum = 2.0 ** max(math.frexp(x)[1] - 8, -133)
    rounded = round(x / quantum) * quantum
    return math.copysign(math.inf, x) if abs(rounded) >= 2.0**128 else math.copysign(rounded, x)


def bits_bf16(values: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        exact = np.array([nearest_bf16(float(v)) for v in values], np.float32)
    return (exact.view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


# -- integers ------------------------------------------------------------------------------------------------------

INTEGER_OPS: dict[str, Callable[[int, int, Scalar], int]] = {
    "add": lambda x, y, t: x + y,
    "sub": lambda x, y, t: x - y,
    "mul": lambda x, y, t: x * y,
    "div": lambda x, y, t: truncating_div(x, y),
    "rem": lambda x, y, t: x - truncating_div(x, y) * y,
    "min": lambda x, y, t: min(x, y),
    "max": lambda x, y, t: max(x, y),
    "and": lambda x, y, t: x & y,
    "or": lambda x, y, t: x | y,
    "xor": lambda x, y, t: x ^ y,
}


def numbers(t: Scalar) -> st.SearchStrategy[int]:
    low = -(1 << (t.bits - 1)) if t.kind == "int" else 0
    high = low + (1 << t.bits) - 1
    return st.one_of(st.integers(low, high), st.sampled_from([low, high, 0, 1, max(low, -1)]))


@pytest.mark.parametrize("t", INTEGERS, ids=str)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_integer_arithmetic_wraps_as_python_says(t: Scalar, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(numbers(t), numbers(t)), min_size=1, max_size=8))
    x, y = (list(column) for column in zip(*pairs, strict=True))
    for opcode, reference in INTEGER_OPS.items():
        right = [v or 1 for v in y] if opcode in ("div", "rem") else y
        got = compute(lambda b, p, q, opcode=opcode: b.binary(opcode, p, q), (t, t), t, x, right)
        assert got.tolist() == [wrap(reference(p, q, t), t) for p, q in zip(x, right, strict=True)], opcode


@given(pairs=st.lists(st.tuples(numbers(u32), numbers(u32)), min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
def test_mulhi_is_the_high_word_of_the_product(pairs: list[tuple[int, int]]) -> None:
    x, y = (list(column) for column in zip(*pairs, strict=True))
    got = compute(lambda b, p, q: b.mulhi(p, q), (u32, u32), u32, x, y)
    assert got.tolist() == [(p * q) >> 32 for p, q in pairs]


@pytest.mark.parametrize("t", INTEGERS, ids=str)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_shifts_and_unary_integers(t: Scalar, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(numbers(t), st.integers(0, t.bits - 1)), min_size=1, max_size=8))
    x, n = (list(column) for column in zip(*pairs, strict=True))
    shl = compute(lambda b, p, q: p << q, (t, t), t, x, n)
    shr = compute(lambda b, p, q: p >> q, (t, t), t, x, n)
    assert shl.tolist() == [wrap(p << q, t) for p, q in pairs]
    assert shr.tolist() == [p >> q for p, q in pairs]
    assert compute(lambda b, p: -p, (t,), t, x).tolist() == [wrap(-p, t) for p in x]
    assert compute(lambda b, p: ~p, (t,), t, x).tolist() == [wrap(~p, t) for p in x]
    assert compute(lambda b, p: b.abs(p), (t,), t, x).tolist() == [wrap(abs(p), t) for p in x]


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


@pytest.mark.parametrize("opcode", COMPARISONS)
def test_comparisons_and_unordered_operands(opcode: str) -> None:
    x = np.array([0, 1, -1, np.nan, 1, np.inf, -0.0, np.nan], np.float32)
    y = np.array([0, 2, -2, 1, np.nan, np.inf, 0.0, np.nan], np.float32)
    for t in (f16, f32, f64):
        got = compute(lambda b, p, q: flag(b, b.binary(opcode, p, q)), (t, t), u8, x, y)
        np.testing.assert_array_equal(got.astype(bool), COMPARISONS[opcode](x, y))
    i, j = [3, -3, 7], [3, 3, -7]
    got = compute(lambda b, p, q: flag(b, b.binary(opcode, p, q)), (i32, i32), u8, i, j)
    np.testing.assert_array_equal(got.astype(bool), COMPARISONS[opcode](np.array(i), np.array(j)))


def test_bool_logic() -> None:
    x, y = [0, 0, 1, 1], [0, 1, 0, 1]

    def boolean(opcode: str) -> list[int]:
        return compute(lambda b, p, q: flag(b, b.binary(opcode, b.ne(p, 0), b.ne(q, 0))), (u8, u8), u8, x, y).tolist()

    assert boolean("and") == [0, 0, 0, 1]
    assert boolean("or") == [0, 1, 1, 1]
    assert boolean("xor") == boolean("ne") == [0, 1, 1, 0]
    assert boolean("eq") == [1, 0, 0, 1]
    assert compute(lambda b, p: flag(b, ~b.ne(p, 0)), (u8,), u8, x).tolist() == [1, 1, 0, 0]


# -- floating point ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", FLOATS, ids=str)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_float_arithmetic_rounds_to_its_own_type(t: Scalar, data: st.DataObject) -> None:
    bits = st.lists(st.integers(0, (1 << t.bits) - 1), min_size=4, max_size=4)
    p, q = (np.array(data.draw(bits), f"u{t.bytes}").view(MEMORY[t.name]) for _ in range(2))
    with np.errstate(all="ignore"):
        expected = {"add": p + q, "sub": p - q, "mul": p * q, "div": p / q, "min": np.fmin(p, q), "max": np.fmax(p, q)}
    for opcode, reference in expected.items():
        got = compute(lambda b, v, w, opcode=opcode: b.binary(opcode, v, w), (t, t), t, p, q)
        np.testing.assert_array_equal(got, reference, err_msg=opcode)


@pytest.mark.parametrize("t", FLOATS, ids=str)
@pytest.mark.parametrize("opcode", "neg abs exp2 log2 sqrt rsqrt rcp floor small sin cos".split())
def test_unary_floats(t: Scalar, opcode: str) -> None:
    references: dict[str, Callable[[Any], Any]] = {
        "neg": lambda x: -x, "small": lambda x: x, "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": lambda x: 1 / x,
    }  # fmt: skip
    reference = references.get(opcode) or getattr(np, opcode)
    x = np.array([0.25, 0.5, 1.0, 1.7, 2.0, 3.3, 9.0], MEMORY[t.name])
    got = compute(lambda b, v: b.unary(opcode, v), (t,), t, x)
    tolerance = {"f16": 2e-3, "f32": 3e-7, "f64": 1e-15}[t.name]
    np.testing.assert_allclose(got, reference(x.astype(np.float64)), rtol=tolerance)


def test_special_values() -> None:
    inf = math.inf
    assert compute(lambda b, v: b.exp2(v), (f32,), f32, [-inf, 0.0, inf]).tolist() == [0.0, 1.0, inf]
    assert compute(lambda b, v: b.rcp(v), (f32,), f32, [0.0, -0.0]).tolist() == [inf, -inf]
    assert compute(lambda b, v: b.log2(v), (f32,), f32, [0.0, 8.0]).tolist() == [-inf, 3.0]
    got = compute(lambda b, v, w: b.max(v, w), (f32, f32), f32, [math.nan, 1.0], [2.0, math.nan])
    assert got.tolist() == [2.0, 1.0]


def test_fma_rounds_once() -> None:
    # 1 + 2**-12 squared is 1 + 2**-11 + 2**-24: float32 drops the last term, so only one rounding finds the difference.
    x = 1 + 2.0**-12
    got = compute(lambda b, v, w: b.fma(v, v, w), (f32, f32), f32, [x], [-(1 + 2.0**-11)])
    assert got.tolist() == [2.0**-24]
    half = np.array([1.5, 3.0], np.float16)
    np.testing.assert_array_equal(compute(lambda b, v: b.fma(v, v, v), (f16,), f16, half), half * half + half)
    assert compute(lambda b, v: b.fma(v, v, 1.0), (f64,), f64, [3.0]).tolist() == [10.0]


def test_dot_pairs_takes_the_first_of_a_pair_from_the_low_half() -> None:
    def pair(first: float, second: float) -> int:
        low, high = np.array([first, second], ml_dtypes.bfloat16).view(np.uint16)
        return int(low) | int(high) << 16

    a, b = [pair(2.0, 3.0), pair(1.5, math.inf)], [pair(5.0, 0.25), pair(-4.0, 1.0)]
    c = np.array([0.5, 1.0], np.float32)
    for lanes in (1, 2):
        got = compute(lambda k, x, y, z: k.dot_pairs(x, y, z), (u32, u32, f32), f32, a, b, c, lanes=lanes)
        assert got.tolist() == [2.0 * 5.0 + 3.0 * 0.25 + 0.5, math.inf]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_bf16_conversion_rounds_to_nearest_even(values: list[float]) -> None:
    x = np.array(values, np.float32)
    got = compute(lambda b, v: b.cast(v, bf16), (f32,), bf16, x)
    np.testing.assert_array_equal(got, bits_bf16(x))
    back = compute(lambda b, v: b.cast(v, f32), (bf16,), f32, got)
    np.testing.assert_array_equal(back, from_bf16(got))


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_f64_to_bf16_rounds_once(values: list[float]) -> None:
    # Just above a tie between two bf16 numbers, but on the tie once rounded to float32.
    values = [*values, 1 + 2.0**-8 + 2.0**-40, -1 - 2.0**-8 - 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40]
    got = compute(lambda b, v: b.cast(v, bf16), (f64,), bf16, values)
    np.testing.assert_array_equal(got, bits_bf16(values))


@given(st.lists(st.tuples(*[st.floats(-(2.0**60), 2.0**60, width=32)] * 3), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_bf16_arithmetic_rounds_after_each_operation(rows: list[tuple[float, float, float]]) -> None:
    x, y, z = (bits_bf16(column) for column in zip(*rows, strict=True))
    p, q = from_bf16(x).astype(np.float64), from_bf16(y).astype(np.float64)
    with np.errstate(all="ignore"):
        expected = {"add": p + q, "sub": p - q, "mul": p * q}
    for opcode, exact in expected.items():
        got = compute(lambda b, v, w, opcode=opcode: b.binary(opcode, v, w), (bf16, bf16), bf16, x, y)
        np.testing.assert_array_equal(got, bits_bf16(exact), err_msg=opcode)
    got = compute(lambda b, u, v, w: b.fma(u, v, w), (bf16, bf16, bf16), bf16, x, y, z)
    np.testing.assert_array_equal(got, bits_bf16(p * q + from_bf16(z)))
    got = compute(lambda b, v: -b.abs(v), (bf16,), bf16, x)
    np.testing.assert_array_equal(got, x | 0x8000)


def test_bf16_nan_and_overflow() -> None:
    got = from_bf16(compute(lambda b, v: b.cast(v, bf16), (f32,), bf16, [math.nan, 3.4e38, -math.inf]))
    assert np.isnan(got[0]) and got[1] == math.inf and got[2] == -math.inf
    payload = np.array([0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(from_bf16(compute(lambda b, v: b.cast(v, bf16), (f32,), bf16, payload))).all()


# -- conversion ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [*INTEGERS, *FLOATS, bf16], ids=str)
@pytest.mark.parametrize("source", [*INTEGERS, *FLOATS], ids=str)
def test_cast(source: Scalar, target: Scalar) -> None:
    values = np.array([0, 1, 2, 5, 100] + ([-1, -3, -100] if source.is_signed else []), np.float64)
    if source.is_float:
        values = values + np.where(values < 0, -0.625, 0.625)
        if target.kind == "uint":
            values = values[values >= 0]
    x = values.astype(MEMORY[source.name])
    got = compute(lambda b, v: b.cast(v, target), (source,), target, x)
    if target == bf16:
        np.testing.assert_array_equal(got, bits_bf16(x))
    elif target.is_float:
        np.testing.assert_array_equal(got, x.astype(MEMORY[target.name]))
    else:
        assert got.tolist() == [wrap(int(v), target) for v in x]


def test_cast_of_bool() -> None:
    for t in (i32, u8, f16, bf16):
        got = compute(lambda b, v, t=t: b.cast(v > 0, t), (i32,), t, [1, -1])
        assert (from_bf16(got) if t == bf16 else got).tolist() == [1, 0]


def test_bitcast() -> None:
    x = np.array([1.0, -2.5, np.inf], np.float32)
    np.testing.assert_array_equal(compute(lambda b, v: b.bitcast(v, u32), (f32,), u32, x), x.view(np.uint32))
    pairs = np.arange(8, dtype=np.float16)
    b = Builder("pairs", 4)
    source, out = b.buffer("source", f16), b.buffer("out", u32, "write")
    b.store(out, b.thread_id(), b.bitcast(b.load(source, b.thread_id() * 2, 2), u32))
    words = np.zeros(4, np.uint32)
    launch(b, [pairs, words])
    np.testing.assert_array_equal(words, pairs.view(np.uint32))
    b = Builder("unpack", 4)
    source, out = b.buffer("source", u32), b.buffer("out", bf16, "write")
    b.store(out, b.thread_id() * 2, b.bitcast(b.load(source, b.thread_id()), Vector(bf16, 2)))
    halves = np.zeros(8, np.uint16)
    launch(b, [words, halves])
    np.testing.assert_array_equal(halves, words.view(np.uint16))


def test_constants_are_rounded_to_their_type() -> None:
    for t in FLOATS:
        got = compute(lambda b, v, t=t: b.const(0.1, t), (t,), t, [0.0])
        assert got[0] == MEMORY[t.name](0.1)
    assert compute(lambda b, v: b.const(0.1, bf16), (bf16,), bf16, [0]).tolist() == bits_bf16([0.1]).tolist()
    assert compute(lambda b, v: b.const(2**64 - 1, u64), (u64,), u64, [0]).tolist() == [2**64 - 1]
    assert compute(lambda b, v: b.const(-(2**63), i64), (i64,), i64, [0]).tolist() == [-(2**63)]


# -- vectors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
@pytest.mark.parametrize("t", [f16, f32, i32, bf16], ids=str)
def test_vectors_are_computed_lane_by_lane(lanes: int, t: Scalar) -> None:
    x = np.arange(3 * lanes) + 1
    x = bits_bf16(x) if t == bf16 else x.astype(MEMORY[t.name])

    def body(b: Builder, v: Value) -> Value:
        parts = b.unpack(v)
        shifted = b.vector(parts[1:] + parts[:1])
        return b.select(v > shifted, v * 2, b.splat(parts[0], lanes))

    def plain(values: np.ndarray) -> np.ndarray:
        rows = values.reshape(-1, lanes)
        return np.where(rows > np.roll(rows, -1, axis=1), rows * 2, rows[:, :1]).ravel()

    got = compute(body, (t,), t, x, lanes=lanes)
    if t == bf16:
        np.testing.assert_array_equal(got, bits_bf16(plain(from_bf16(x))))
    else:
        np.testing.assert_array_equal(got, plain(x))


def test_permute_takes_lanes_of_one_vector_or_of_two() -> None:
    x, y = np.arange(8, dtype=np.float32), np.arange(8, dtype=np.float32) + 10
    got = compute(lambda b, v, w: b.permute(v, w, (0, 4, 7, 2)), (f32, f32), f32, x, y, lanes=4)
    np.testing.assert_array_equal(got, [0, 10, 13, 2, 4, 14, 17, 6])
    got = compute(lambda b, v: b.splat(b.permute(v, None, (3,)), 4), (f32,), f32, x, lanes=4)
    np.testing.assert_array_equal(got, [3, 3, 3, 3, 7, 7, 7, 7])


def test_select_by_one_bool_takes_whole_vectors() -> None:
    x = np.arange(8, dtype=np.float32)
    got = compute(lambda b, v: b.select(b.extract(v, 0) > 3.0, v, -v), (f32,), f32, x, lanes=4)
    np.testing.assert_array_equal(got, [0, -1, -2, -3, 4, 5, 6, 7])


# -- threads, control and variables --------------------------------------------------------------------------------


def test_identities() -> None:
    b = Builder("who", workgroup=48)
    out = b.buffer("out", i32, "write")
    number = (b.group_id(2) * b.group_count(1) + b.group_id(1)) * b.group_count(0) + b.group_id(0)
    at = (number * 48 + b.thread_id()) * 8
    parts = [b.thread_id(), b.lane_id(), b.subgroup_id(), b.group_id(0), b.group_id(1), b.group_id(2),
             b.group_count(0), b.group_count(2)]  # fmt: skip
    b.store(out, at, b.vector(parts))
    got = np.zeros((4, 3, 2, 48, 8), np.int32)
    launch(b, [got], (2, 3, 4), subgroup_size=16)
    z, y, x, t = np.indices((4, 3, 2, 48))
    expected = np.stack([t, t % 16, t // 16, x, y, z, np.full_like(t, 2), np.full_like(t, 4)], -1)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("workgroup", [1, 7, 64, 1500])
def test_grids_of_any_size(workgroup: int) -> None:
    b = Builder("count", workgroup)
    out, n = b.buffer("out", i32, "write"), b.scalar("n", i32)
    i = b.group_id() * workgroup + b.thread_id()
    with b.if_(i < n):
        b.store(out, i, i)
    got = np.full(5000, -1, np.int32)
    launch(b, [got, 5000], (-(-5000 // workgroup), 1, 1))
    np.testing.assert_array_equal(got, np.arange(5000))


def test_an_empty_grid_runs_nothing() -> None:
    b = Builder("nothing", 32)
    b.store(b.buffer("out", i32, "write"), 99, 1)
    launch(b, [np.zeros(1, np.int32)], (4, 0, 1))


def test_divergent_branches_and_nested_loops() -> None:
    b = Builder("collatz", workgroup=64)
    out = b.buffer("out", i32, "write")
    t = b.thread_id()
    total, skipped = b.var(b.const(0, i32), "total"), b.var(b.const(0, i32), "skipped")
    with b.loop(t % 5, t, 2) as i, b.loop(0, i) as j:
        with b.if_((i + j) % 3 < 1):
            total.value = total.value + i * j
            with b.if_(j > 4):
                total.value = total.value + 1
        with b.else_():
            skipped.value = skipped.value + 1
    b.store(out, t * 2, b.vector([total.value, skipped.value]))
    got = np.zeros((64, 2), np.int32)
    launch(b, [got])
    for t_, row in enumerate(got):
        total_ = skipped_ = 0
        for i_ in range(t_ % 5, t_, 2):
            for j_ in range(i_):
                if (i_ + j_) % 3 < 1:
                    total_ += i_ * j_ + (j_ > 4)
                else:
                    skipped_ += 1
        assert row.tolist() == [total_, skipped_]


@pytest.mark.parametrize("t", [i32, i64, u32, u64], ids=str)
def test_loops_count_in_their_own_type(t: Scalar) -> None:
    b = Builder("count", 1)
    out, n = b.buffer("out", t, "write"), b.scalar("n", t)
    total = b.var(b.const(0, t))
    with b.loop(3, n, 4, unroll=2) as i:
        total.value = total.value + i
    b.store(out, 0, total.value)
    got = np.zeros(1, MEMORY[t.name])
    launch(b, [got, 50])
    assert got[0] == sum(range(3, 50, 4))


def test_inactive_lanes_neither_write_nor_fail() -> None:
    b = Builder("guard", workgroup=64)
    source, out, n = b.buffer("source", f32), b.buffer("out", f32, "write"), b.scalar("n", i32)
    i = b.thread_id()
    with b.if_(i < n):
        b.store(out, i, b.load(source, 10 // (n - i)))  # out of bounds, and a division by zero, in inactive lanes
    got = np.zeros(5, np.float32)
    launch(b, [np.arange(11, dtype=np.float32), got, 5])
    np.testing.assert_array_equal(got, [2, 2, 3, 5, 10])


def test_variables_of_vectors_and_bools() -> None:
    b = Builder("variables", workgroup=8)
    out = b.buffer("out", f32, "write")
    t = b.thread_id()
    v = b.var(b.splat(b.const(1.0, f32), 2), "v")
    even = b.var(b.eq(t % 2, 0), "even")
    with b.if_(even.value):
        v.value = v.value * 3.0
        even.value = b.const(False, bool_)
    with b.if_(t > 5):
        v.value = 0.5
    with b.if_(even.value):
        v.value = v.value - v.value
    b.store(out, t * 2, v.value)
    got = np.zeros((8, 2), np.float32)
    launch(b, [got])
    np.testing.assert_array_equal(got[:, 0], [3, 1, 3, 1, 3, 1, 0.5, 0.5])
    np.testing.assert_array_equal(got[:, 1], got[:, 0])


# -- memory --------------------------------------------------------------------------------------------------------


def test_private_arrays_belong_to_a_thread() -> None:
    b = Builder("private", workgroup=16)
    out = b.buffer("out", i32, "write")
    t = b.thread_id()
    mine = b.private("mine", i32, 8)
    with b.loop(0, 8) as i:
        b.store(mine, i, t * 10 + i)
    b.store(out, t, b.load(mine, t % 8))
    got = np.zeros(16, np.int32)
    launch(b, [got])
    np.testing.assert_array_equal(got, [i * 10 + i % 8 for i in range(16)])


@pytest.mark.parametrize("sanitize", [True, False])
def test_tree_reduction_in_shared_memory(sanitize: bool) -> None:
    b = Builder("reduce", workgroup=128)
    source, out = b.buffer("source", f32), b.buffer("out", f32, "write")
    tile = b.shared("tile", f32, 128)
    t, g = b.thread_id(), b.group_id()
    b.store(tile, t, b.load(source, g * 128 + t))
    b.barrier()
    width = 64
    while width:
        with b.if_(t < width):
            b.store(tile, t, b.load(tile, t) + b.load(tile, t + width))
        b.barrier()
        width //= 2
    with b.if_(b.eq(t, 0)):
        b.store(out, g, b.load(tile, 0))
    x = np.random.default_rng(0).integers(-8, 8, (11, 128)).astype(np.float32)
    got = np.zeros(11, np.float32)
    launch(b, [x, got], (11, 1, 1), sanitize=sanitize)
    np.testing.assert_array_equal(got, x.sum(axis=1))


@pytest.mark.parametrize("kind", ["add", "min", "max", "and", "or", "xor"])
@pytest.mark.parametrize("t", [i32, u32], ids=str)
def test_atomics_lose_nothing(kind: str, t: Scalar) -> None:
    b = Builder("atomics", workgroup=64)
    source, out = b.buffer("source", t), b.buffer("out", t, "readwrite")
    i = b.group_id() * 64 + b.thread_id()
    b.atomic(kind, out, i % 3, b.load(source, i))
    x = np.random.default_rng(1).integers(0, 1 << 30, 640).astype(MEMORY[t.name])
    got = np.array([7, 1 << 20, 12345], MEMORY[t.name])
    expected = got.copy()
    merge = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
             "xor": np.bitwise_xor}[kind]  # fmt: skip
    with np.errstate(all="ignore"):
        merge.at(expected, np.arange(640) % 3, x)
    launch(b, [x, got], (10, 1, 1))
    np.testing.assert_array_equal(got, expected)


def test_atomics_return_what_was_there() -> None:
    b = Builder("tickets", workgroup=64)
    counter, out, last = (b.buffer(n, i32, "readwrite") for n in ("counter", "out", "last"))
    ticket = b.atomic("add", counter, 0, 1)
    b.store(out, ticket, ticket)
    with b.if_(ticket < 10):
        b.atomic("exchange", last, 0, ticket)
    count, got, final = np.zeros(1, np.int32), np.full(192, -1, np.int32), np.full(1, -1, np.int32)
    launch(b, [count, got, final], (3, 1, 1))
    assert count[0] == 192 and 0 <= final[0] < 10
    np.testing.assert_array_equal(got, np.arange(192))


def test_atomic_add_of_floats_in_shared_memory() -> None:
    b = Builder("sum", workgroup=64)
    out, total = b.buffer("out", f32, "write"), b.shared("total", f32, 1)
    with b.if_(b.eq(b.thread_id(), 0)):
        b.store(total, 0, 0.0)
    b.barrier()
    b.atomic("add", total, 0, b.cast(b.thread_id(), f32))
    b.barrier()
    with b.if_(b.eq(b.thread_id(), 0)):
        b.store(out, b.group_id(), b.load(total, 0))
    got = np.zeros(3, np.float32)
    launch(b, [got], (3, 1, 1))
    assert got.tolist() == [2016.0] * 3


@pytest.mark.parametrize("count", [48, 64])
def test_atomic_add_of_vectors(count: int) -> None:
    """Each element for itself, in one piece or as the passes take it apart; eight places for all lanes."""
    b = Builder("vectors", workgroup=64)
    out, before = b.buffer("out", f32, "readwrite"), b.buffer("before", f32, "write")
    t = b.thread_id()
    with b.if_(t < count):
        x = b.cast(t, f32)
        b.store(before, t * 4, b.atomic("add", out, (t & 7) * 4, b.vector([x, x + 1.0, x + 2.0, x + 3.0])))
    kernel = b.finish()
    terms = (np.arange(count)[:, None] + np.arange(4.0)).reshape(-1, 8, 4).astype(np.float32)
    singly = narrow_vectors(kernel, 4)
    assert not any(isinstance(op.args[2].type, Vector) for op in singly.walk() if op.opcode == "atomic")
    for each in (kernel, singly):
        verify(each)
        got, old = np.zeros(32, np.float32), np.zeros(256, np.float32)
        interpret(each, (1, 1, 1), [got, old])
        np.testing.assert_array_equal(got.reshape(8, 4), terms.sum(axis=0))
        np.testing.assert_array_equal(old[: 4 * count].reshape(-1, 8, 4), terms.cumsum(axis=0) - terms)


def test_bf16_buffers_as_bits_or_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    b = Builder("double", workgroup=8)
    source, out = b.buffer("source", bf16), b.buffer("out", bf16, "write")
    b.store(out, b.thread_id(), b.load(source, b.thread_id()) * 2.0)
    x = np.arange(8).astype(ml_dtypes.bfloat16)
    named, bits = np.zeros(8, ml_dtypes.bfloat16), np.zeros(8, np.uint16)
    launch(b, [x, named])
    launch(b, [x.view(np.uint16), bits])
    np.testing.assert_array_equal(named.astype(np.float32), 2 * np.arange(8))
    np.testing.assert_array_equal(bits, named.view(np.uint16))


# -- subgroups -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 32])
def test_shuffles_and_reductions(size: int) -> None:
    b = Builder("shuffle", workgroup=64)
    source, out = b.buffer("source", i32), b.buffer("out", i32, "write")
    t = b.thread_id()
    x = b.load(source, t)
    lane = b.lane_id()
    parts = [b.shuffle(x, (lane + 1) % size), b.shuffle_xor(x, 4), b.subgroup_reduce("add", x),
             b.subgroup_reduce("min", x), b.subgroup_reduce("max", x), b.cast(b.subgroup_any(x > 90), i32),
             b.cast(b.subgroup_all(x > 10), i32), b.shuffle(x, 0)]  # fmt: skip
    b.store(out, t * 8, b.vector(parts))
    values = np.random.default_rng(2).integers(0, 100, 64).astype(np.int32)
    got = np.zeros((64, 8), np.int32)
    launch(b, [values, got], subgroup_size=size)
    rows = values.reshape(-1, size)
    lanes = np.arange(size)
    whole = [rows.sum(1), rows.min(1), rows.max(1), (rows > 90).any(1), (rows > 10).all(1), rows[:, 0]]
    expected = [np.roll(rows, -1, axis=1), rows[:, lanes ^ 4], *[np.repeat(w, size).reshape(-1, size) for w in whole]]
    np.testing.assert_array_equal(got, np.stack(expected, -1).reshape(64, 8))


def test_float_reductions_and_partial_subgroups() -> None:
    b = Builder("partial", workgroup=40)
    out = b.buffer("out", f32, "write")
    x = b.cast(b.thread_id(), f32)
    b.store(out, b.thread_id(), b.subgroup_reduce("add", x))
    got = np.zeros(40, np.float32)
    launch(b, [got])
    np.testing.assert_array_equal(got, [sum(range(32))] * 32 + [sum(range(32, 40))] * 8)


def test_a_whole_subgroup_may_branch_on_its_own() -> None:
    b = Builder("specialised", workgroup=64)
    out = b.buffer("out", i32, "write")
    with b.if_(b.eq(b.subgroup_id(), 1)):
        b.store(out, b.lane_id(), b.subgroup_reduce("max", b.thread_id()))
    got = np.zeros(32, np.int32)
    launch(b, [got])
    np.testing.assert_array_equal(got, 63)


# -- fragments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("t", [f16, bf16], ids=str)
def test_fragments(layout: str, t: Scalar) -> None:
    a_type, b_type, c_type = Fragment(t, 16, 8, "a"), Fragment(t, 8, 16, "b"), Fragment(f32, 16, 16, "accumulator")
    b = Builder("mma", workgroup=64, subgroup_size=32)
    a, bb, out = b.buffer("a", t), b.buffer("b", t), b.buffer("out", f32, "write")
    part = b.subgroup_id()
    stride = 8 if layout == "row" else 16
    x = b.fragment_load(a_type, a, part * 128, stride, layout)
    y = b.fragment_load(b_type, bb, part * 128, 16)
    acc = b.var(b.fragment_fill(c_type, 1.0))
    with b.loop(0, 2):
        acc.value = b.fragment_mma(x, y, acc.value)
    result = acc.value
    for component in range(8):
        result = b.fragment_set(result, component, b.fragment_get(result, component) * 0.5)
    b.fragment_store(out, part * 256, 16, result)
    rng = np.random.default_rng(3)
    p, q = rng.integers(-4, 4, (2, 16, 8)), rng.integers(-4, 4, (2, 8, 16))
    stored = p if layout == "row" else p.transpose(0, 2, 1)
    args = [bits_bf16(m.ravel()) if t == bf16 else np.ascontiguousarray(m, np.float16) for m in (stored, q)]
    got = np.zeros((2, 16, 16), np.float32)
    launch(b, [*args, got])
    np.testing.assert_array_equal(got, (1 + 2 * (p @ q)) / 2)


def test_fragment_components_lie_in_row_major_order() -> None:
    b = Builder("layout", workgroup=32, subgroup_size=32)
    a, out = b.buffer("a", i32), b.buffer("out", i32, "write")
    x = b.fragment_load(Fragment(i32, 8, 16, "accumulator"), a, 0, 16)
    b.store(out, b.thread_id() * 4, b.vector([b.fragment_get(x, c) for c in range(4)]))
    got = np.zeros(128, np.int32)
    launch(b, [np.arange(128, dtype=np.int32), got])
    np.testing.assert_array_equal(got, np.arange(128))


def test_fragments_lie_as_they_are_told() -> None:
    """Two copies of a factor, a row of four in lanes L and L + 4."""
    b = Builder("told", workgroup=8, subgroup_size=8)
    a, out = b.buffer("a", f16), b.buffer("out", f32, "write")
    type_, t = Fragment(f16, 4, 4, "a"), b.thread_id()
    x = b.fragment_load(type_, a, 0, 4)
    parts = [b.fragment_get(x, i) for i in range(4)]
    b.store(out, t * 4, b.vector([b.cast(part, f32) for part in parts]))
    same = b.fragment_pack(type_, [part + part for part in parts])
    b.store(out, t + 32, b.cast(b.fragment_get(same, 1), f32) + b.cast(b.fragment_length(same), f32))
    numbers, got = np.arange(16, dtype=np.float16), np.zeros(40, np.float32)
    layouts = {"a": FragmentLayout((1, 2, 0), (0, 0, 0), (0, 0), (1, 2))}
    launch(b, [numbers, got], layouts=layouts)
    np.testing.assert_array_equal(got[:32], np.tile(np.arange(16), 2))
    np.testing.assert_array_equal(got[32:], np.tile([2 * (4 * row + 1) + 4 for row in range(4)], 2))
    with pytest.raises(KernelError, match="has 2 components in each lane"):
        launch(b, [numbers, got])


def test_copies_of_an_element_must_agree() -> None:
    b = Builder("copies", workgroup=8, subgroup_size=8)
    out = b.buffer("out", f32, "write")
    x = b.fragment_pack(Fragment(f32, 4, 4, "a"), [b.cast(b.thread_id(), f32)] * 4)
    b.store(out, b.thread_id(), b.fragment_get(x, 0))
    layouts = {"a": FragmentLayout((1, 2, 0), (0, 0, 0), (0, 0), (1, 2))}
    with pytest.raises(SanitizerError, match="copies of an element of a fragment that differ"):
        launch(b, [np.zeros(8, np.float32)], layouts=layouts)


def test_fragment_cast_and_integers() -> None:
    a_type, b_type = Fragment(i8, 8, 8, "a"), Fragment(i8, 8, 8, "b")
    b = Builder("int", workgroup=32, subgroup_size=32)
    a, out = b.buffer("a", i8), b.buffer("out", f32, "write")
    x, y = b.fragment_load(a_type, a, 0, 8), b.fragment_load(b_type, a, 0, 8)
    s = b.fragment_mma(x, y, b.fragment_fill(Fragment(i32, 8, 8, "accumulator"), 0))
    b.fragment_store(out, 0, 8, b.cast(s, f32))
    m = np.random.default_rng(4).integers(-100, 100, (8, 8)).astype(np.int8)
    got = np.zeros((8, 8), np.float32)
    launch(b, [m, got])
    np.testing.assert_array_equal(got, m.astype(np.int64) @ m.astype(np.int64))


# -- arguments -----------------------------------------------------------------------------------------------------


def _double() -> Builder:
    b = Builder("double", workgroup=4)
    source, out, n = b.buffer("source", f32), b.buffer("out", f32, "write"), b.scalar("n", i32)
    with b.if_(b.thread_id() < n):
        b.store(out, b.thread_id(), b.load(source, b.thread_id()) * 2.0)
    b.comment("done")
    return b


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: np.zeros(4)}, "buffer source: expected an array of float32, got float64"),
        ({0: [0.0]}, "buffer source: expected an array of float32, got list"),
        ({0: np.zeros(8, np.float32)[::2]}, "expected a contiguous array"),
        ({2: 2.5}, "scalar n: expected a number for i32, got 2.5"),
        ({2: 1 << 31}, "scalar n: 2147483648 does not fit into i32"),
        ({2: 1 << 70}, "got 1180591620717411303424"),
        ({2: "4"}, "scalar n: expected a number"),
    ],
)
def test_arguments_are_checked(change: dict[int, Any], message: str) -> None:
    args = [np.zeros(4, np.float32), np.zeros(4, np.float32), 4]
    for position, value in change.items():
        args[position] = value
    with pytest.raises(KernelError, match=message):
        launch(_double(), args)


def test_scalars_may_be_numpy_numbers_and_outputs_must_be_writable() -> None:
    x, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    launch(_double(), [x, y, np.int64(3)])
    launch(_double(), [x, y, np.array(4)])
    np.testing.assert_array_equal(y, 2)
    y.flags.writeable = False
    with pytest.raises(KernelError, match="read-only"):
        launch(_double(), [x, y, 4])
    with pytest.raises(KernelError, match=r"expected 3 arguments \(source, out, n\), got 1"):
        launch(_double(), [x])
    with pytest.raises(KernelError, match="grid of three numbers"):
        launch(_double(), [x, x, 4], (1, 1))  # type: ignore[arg-type]


def test_the_subgroup_size_of_the_kernel_counts() -> None:
    b = Builder("sized", workgroup=32, subgroup_size=16)
    out = b.buffer("out", i32, "write")
    b.store(out, b.thread_id(), b.subgroup_reduce("max", b.lane_id()))
    got = np.zeros(32, np.int32)
    launch(b, [got])
    np.testing.assert_array_equal(got, 15)
    with pytest.raises(KernelError, match="written for subgroups of 16, got 32"):
        launch(b, [got], subgroup_size=32)


def test_intrinsics_are_refused() -> None:
    b = Builder("special", workgroup=32)
    out = b.buffer("out", f32, "write")
    x = b.intrinsic("ptx", "tanh.approx.f32 {0}, {1};", [b.const(1.0, f32)], f32)
    b.store(out, 0, x)
    with pytest.raises(KernelError, match=r"cannot run an intrinsic of ptx .*test_ir_interpret\.py"):
        launch(b, [np.zeros(1, np.float32)])


def test_sanitizer_errors_are_kernel_errors() -> None:
    assert issubclass(SanitizerError, KernelError)


def test_every_operation_is_exercised(request: pytest.FixtureRequest) -> None:
    """Runs last: the kernels above contain every operation of the language, but those that the sanitizer's tests and
    kernels use."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # which runs some of them: all are run again by one that has none beside it
        alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__]
        done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return
    collected = {getattr(item, "originalname", "") for item in request.session.items}
    mine = {name for name in globals() if name.startswith("test_")}
    if not mine <= collected:
        pytest.skip("only part of this file was asked for")
    hoppers = {name for name, info in OPS.items() if info.category == "warpgroup"}
    assert set(OPS) - EXERCISED - hoppers == {
        "subgroup_barrier", "workgroup_any", "device_fence", "e4m3_halves", "prefetch", "store_streaming",
        "load_streaming", "async_copy", "async_copy_or_zero", "async_commit", "async_wait", "cluster_load",
        "cluster_post", "cluster_barrier", "launch_next", "launch_await", "repeat", "roles",
    }  # fmt: skip
    assert set(SCALARS) == {"bool", *MEMORY}
