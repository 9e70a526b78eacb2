"""Decoding on matrix units, on the interpreter with the sanitizer on, in its own layout of fragments and NVIDIA's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import decode_cases
import ml_dtypes
import numpy as np
import pytest
import test_decode_compiles as compiles
import test_decode_interpreted as plain
import test_fragment_interpreted as fragments

from aule import codegen
from aule.ir import Builder
from aule.ir.interpret import interpret
from aule.ir.types import Vector, f16, f32, u32
from aule.ir.verify import verify
from aule.ops.attention.reference import compare
from aule.ops.decode.config import FragmentDecodeConfig
from aule.ops.decode.plan.decode import Combine, decode_views, plan_decode
from aule.ops.decode.sequences import E4M3, expect_decode
from aule.ops.shared.plan import Step
from aule.target import NVIDIA_LAYOUT, FragmentLayout, Target
from aule.tile.common.quantised import E4M3_HALF, floats, half_pairs

ROW_HALVES = replace(fragments.target(), f16=True)
NVIDIA = replace(ROW_HALVES, matrix_layout=NVIDIA_LAYOUT)
HOPPER = replace(NVIDIA, overlap=True, max_cluster=4, compute_units=132)
VULKAN = replace(
    NVIDIA, backend="vulkan", arch="", matrix_units=("m16n16k16:f16:f32", "m16n16k16:bf16:f32"), bf16=False,
    device_fence=True, max_buffers=16,
)  # fmt: skip
RIGHT = FragmentLayout((2, 4, 0, 0, 0), (0, 0, 1, 2, 4), (1, 8, 0), (0, 0, 8))
"""Of right factors, as NVIDIA's Vulkan driver has them."""
H200 = replace(VULKAN, vendor="nvidia", compute_units=132, matrix_right=RIGHT)


def narrow(case: decode_cases.Case) -> decode_cases.Case:
    """The same in a type that matrix units multiply."""
    return replace(case, dtype="bf16") if case.dtype == "f32" else case


CASES = [narrow(case) for case in decode_cases.cases() if case.id not in ("odd", "fp8-odd", "prefill")]


def check(
    case: decode_cases.Case, target: Target, splits: int | None = None, combine: Combine | None = None, **given: Any
) -> None:
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case) | given)
    config = plan_decode(problem, decode_views(operands, operands.q), target).steps[0].config
    assert isinstance(config, FragmentDecodeConfig)
    out, lse = plain.run(problem, operands, target, splits, combine, subgroups=2)
    judged, expected = expect_decode(problem, operands)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: decode_cases.Case) -> None:
    check(case, ROW_HALVES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_in_nvidias_layout(case: decode_cases.Case) -> None:
    check(case, NVIDIA, 3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_clusters_and_launches_that_overlap(case: decode_cases.Case) -> None:
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    steps = plan_decode(problem, decode_views(operands, operands.q), HOPPER).steps
    assert isinstance(steps[0].config, FragmentDecodeConfig)
    if problem.seq_kv <= 1024:
        assert steps[0].config.cluster == min(4, -(-problem.seq_kv // steps[0].config.shape.step)) and len(steps) == 1
    else:
        assert steps[0].config.next_launch_overlaps and steps[1].config.overlaps_previous
    check(case, HOPPER)


@pytest.mark.parametrize("cache", ["i8", "e4m3"])
def test_as_for_vulkan(cache: str) -> None:
    case = decode_cases.Case(cache, (40, 17), 2, (4, 1), (64, 64), "bf16", cache, 16)
    check(case, VULKAN)
    check(replace(case, rows=1, lens=(140, 0, 70)), VULKAN, 3)


def step_of(case: decode_cases.Case, target: Target, splits: int | None = None) -> Step:
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    return plan_decode(problem, decode_views(operands, operands.q), target, splits=splits).steps[0]


def config_of(case: decode_cases.Case, target: Target, splits: int | None = None) -> FragmentDecodeConfig:
    found = step_of(case, target, splits).config
    assert isinstance(found, FragmentDecodeConfig)
    return found


@pytest.mark.parametrize("combine", ["last_workgroup", "second_launch"])
@pytest.mark.parametrize("splits", [2, 3, 20])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_through_vulkan(case: decode_cases.Case, splits: int, combine: Combine) -> None:
    """Both ways to combine the parts of a sequence, where right factors are read from memory directly."""
    check(case, H200, splits, combine)


@pytest.mark.parametrize("heads", [(4, 4), (3, 1)])
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (80, 80), (128, 96)])
def test_rows_of_any_width_are_combined(dims: tuple[int, int], heads: tuple[int, int]) -> None:
    target = replace(H200, max_shared_bytes=49152, max_threads=1024)
    for keys in (512, 4096):
        step = step_of(decode_cases.Case("x", (keys,), 1, heads, dims, "bf16"), target)
        verify(step.build(step.config, target))
    case = decode_cases.Case("x", (90, 3), 1, heads, dims, "bf16")
    check(case, target, 4)
    check(case, target, 4, "second_launch")


def test_where_the_last_workgroup_combines() -> None:
    case = decode_cases.Case("x", (512,), 1, (32, 8), (128, 128), "bf16")
    assert config_of(case, H200, 8).direct_queries and not config_of(case, VULKAN, 8).direct_queries
    assert all(config_of(case, target, 8).last_workgroup_combines for target in (H200, VULKAN))
    for other in (replace(H200, device_fence=False), HOPPER):
        assert not config_of(case, other, 8).last_workgroup_combines


@pytest.mark.parametrize(
    ("batch", "keys", "parts", "launches"),
    [(1, 512, 8, 1), (1, 1024, 16, 1), (1, 2048, 16, 1), (1, 4096, 16, 1), (1, 8192, 32, 2), (1, 16384, 32, 2),
     (2, 4096, 16, 1), (3, 4096, 11, 1), (4, 1024, 4, 1), (4, 32768, 8, 1), (32, 4096, 1, 1)],
)  # fmt: skip
def test_plans_of_whole_sequences(batch: int, keys: int, parts: int, launches: int) -> None:
    """The last workgroup combines few parts, a second launch many."""
    given = compiles.problem(batch, keys, 0, "bf16")
    plan = plan_decode(given, compiles.views_of(given), replace(H200, max_shared_bytes=49152, max_threads=1024))
    config = plan.steps[0].config
    assert isinstance(config, FragmentDecodeConfig)
    assert (config.shape.blocks, config.shape.subgroups) == (1, 4)
    assert (plan.steps[0].scalars["splits"], len(plan.steps)) == (parts, launches)
    assert config.last_workgroup_combines == (parts > 1 and launches == 1)


@pytest.mark.parametrize(("number", "held"), [("pages", 4), ("pages-of-256", 1), ("tokens", 16), ("ragged", 16)])
def test_queries_before_the_length(number: str, held: int) -> None:
    """Through Vulkan, unless the length says which rows they are; and only rows that can be there are added up."""
    case = next(case for case in CASES if case.id == number)
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    config = plan_decode(problem, decode_views(operands, operands.q), VULKAN).steps[0].config
    assert isinstance(config, FragmentDecodeConfig)
    assert (config.early_queries, config.most_rows) == (not config.packed, held)
    check(case, VULKAN, 2)


def test_what_is_known_of_a_single_token() -> None:
    """Which head a row is, how many rows there are to add up, and how many parts of each."""

    def config(case: decode_cases.Case, splits: int | None = None) -> FragmentDecodeConfig:
        return config_of(case, VULKAN, splits)

    case = decode_cases.Case("single", (40, 17), 1, (8, 2), (64, 64), "bf16")
    for splits, at_once in ((3, 4), (8, 8), (20, 16)):
        one = config(case, splits)
        assert one.last_workgroup_combines and (one.one_token, one.fixed_rows, one.partials_at_once) == (
            True,
            4,
            at_once,
        )
    alone = config(case, 1)
    assert not alone.last_workgroup_combines and alone.partials_at_once == 1
    tokens = config(replace(case, rows=2))
    assert (tokens.one_token, tokens.fixed_rows) == (False, 8)
    ragged = config(next(case for case in CASES if case.id == "ragged"))
    assert (ragged.one_token, ragged.fixed_rows) == (False, 0)


@pytest.mark.parametrize(
    ("batch", "keys", "cache", "parts", "lone"),
    [(1, 32768, "i8", 49, True), (1, 32768, "e4m3", 49, True), (1, 8192, "i8", 32, False), (4, 32768, "i8", 8, False),
     (1, 32768, "f16", 32, False)],
)  # fmt: skip
def test_a_long_quantised_sequence_by_itself(batch: int, keys: int, cache: str, parts: int, lone: bool) -> None:
    """Through Vulkan three workgroups share a multiprocessor, and values are not loaded ahead."""
    given = compiles.problem(batch, keys, 16, cache)
    step = plan_decode(given, compiles.views_of(given), replace(VULKAN, compute_units=132)).steps[0]
    assert isinstance(step.config, FragmentDecodeConfig)
    assert step.config.shape.ahead != lone and step.scalars["splits"] == parts
    assert step.config.shape.blocks == (1 if lone or cache == "f16" else 2)


@pytest.mark.parametrize("cache", ["i8", "e4m3"])
def test_values_that_are_not_loaded_ahead(cache: str) -> None:
    case = decode_cases.Case(cache, (150, 0, 70), 1, (4, 1), (64, 64), "bf16", cache, 16)
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    out, lse = plain.run(problem, operands, VULKAN, 3, subgroups=2, blocks=1, ahead=False)
    judged, expected = expect_decode(problem, operands)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


@pytest.mark.parametrize(
    ("keys", "cache", "rows", "once"),
    [(8192, "f16", 1, False), (16384, "f16", 1, True), (16384, "i8", 1, False), (32768, "e4m3", 1, True),
     (65536, "f16", 4, True), (65536, "f16", 8, False)],
)  # fmt: skip
def test_what_a_cache_cannot_hold_leaves_it_first(keys: int, cache: str, rows: int, once: bool) -> None:
    """Unless another block of rows reads it again."""
    given = compiles.problem(1, keys, 16, cache, rows)
    views = compiles.views_of(given)
    config = plan_decode(given, views, replace(HOPPER, max_cluster=8)).steps[0].config
    assert isinstance(config, FragmentDecodeConfig) and config.evict_first == once


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_scales_of_any_size(dtype: str) -> None:
    """Weights are fp16: those of values with tiny scales do not vanish, nor do those of large ones overflow."""
    case = decode_cases.Case("scales", (70, 33), 1, (4, 1), (64, 64), dtype, "i8", 16)
    rng = np.random.default_rng(5)
    for low, high in ((-30, -10), (-16, 8), (0, 0)):
        given = decode_cases.make(case)
        factor = np.exp2(rng.uniform(low, high, given["v_scale"].shape)).astype(np.float32)
        check(case, ROW_HALVES, v_scale=given["v_scale"] * factor)
    zeros = decode_cases.make(case)["v_scale"] * 0
    check(case, ROW_HALVES, v_scale=zeros)


def test_queries_of_any_size() -> None:
    """Rows of bf16 are brought into the range of fp16, each by its own power of two."""
    case = decode_cases.Case("queries", (40, 12), 2, (4, 1), (64, 64), "bf16", "i8", 16)
    given = decode_cases.make(case)
    size = np.exp2(np.linspace(-100, 3, 16)).reshape(2, 4, 2, 1)
    check(case, ROW_HALVES, q=(given["q"].astype(np.float64) * size).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_some_rows_drop_does_not_leak(bad: float) -> None:
    """Key 20 is seen by the last two of four tokens, whose results it makes infinite or NaN in one column."""
    case = decode_cases.Case("nonfinite", (22,), 4, (2, 1), (32, 32), "f16")
    given = decode_cases.make(case)
    given["v"][0, 0, 20, 3] = bad
    problem, operands = decode_cases.problem_of(case, given)
    out, lse = plain.run(problem, operands, NVIDIA, subgroups=1)
    assert np.isfinite(lse).all() and np.isfinite(out[:, :, :2]).all()
    assert np.isfinite(np.delete(out, 3, axis=3)).all()
    np.testing.assert_array_equal(out[0, :, 2:, 3], np.full((2, 2), bad, np.float16))


def test_the_maximum_may_grow_far() -> None:
    """Scores that rise by hundreds along the keys: sums are rescaled on the way."""
    case = decode_cases.Case("rising", (90, 40), heads=(2, 1), dtype="f16")
    given = decode_cases.make(case)
    rise = np.linspace(0, 60, given["k"].shape[2])[:, None]
    check(case, ROW_HALVES, k=(np.abs(given["k"]) * rise).astype(np.float16), q=np.abs(given["q"]))


CONVERTS = replace(NVIDIA, e4m3=True)


@pytest.mark.parametrize("case", [case for case in CASES if case.cache == "e4m3"], ids=str)
def test_devices_that_convert_e4m3(case: decode_cases.Case) -> None:
    check(case, CONVERTS, 2)


def test_nan_of_dropped_bytes_does_not_count() -> None:
    case = decode_cases.Case("nan", (50, 40), 3, (2, 1), (64, 64), "f16", "e4m3", 16, options={"window": (6, 0)})
    given = decode_cases.make(case)
    codes, tables = given["v"].view(np.uint8), given["block_tables"]
    codes[tables[0, 2], :9] = 0x7F  # keys 32 to 40: the window begins behind them
    codes[tables[1, 1], :15] = 0xFF  # keys 16 to 30
    check(case, CONVERTS, v=given["v"])


@pytest.mark.parametrize("cache", ["i8", "e4m3"])
def test_bytes_become_their_numbers(cache: str) -> None:
    """All 256 of them, as fp16 and as fp32, and by a device's own conversion."""
    b = Builder("bytes", 64)
    words, out = b.buffer("words", u32), b.buffer("out", f32, "write")
    t = b.thread_id()
    word = b.load(words, t)
    even, odd = (b.unpack(b.cast(b.bitcast(x, Vector(f16, 2)), f32)) for x in half_pairs(b, word, cache))
    found = [even[0], odd[0], even[1], odd[1], *floats(b, word, cache), *floats(b, word, cache, halves=True)]
    native = b.unpack(b.cast(b.e4m3_halves(word), f32)) if cache == "e4m3" else floats(b, word, cache)
    for i, x in enumerate([*found, *native]):
        b.store(out, t * 16 + i, x)
    got = np.zeros((64, 4, 4), np.float32)
    interpret(b.finish(), (1, 1, 1), [np.arange(256, dtype=np.uint8).view(np.uint32), got])
    codes = np.arange(256, dtype=np.uint8)
    wanted = codes.view(np.int8).astype(np.float32) if cache == "i8" else E4M3[codes].astype(np.float32)
    unit = np.array([1, 1, 1, 1] if cache == "i8" else [E4M3_HALF, 1, E4M3_HALF, 1], np.float32)
    numbers = np.isfinite(wanted)  # codes 127 and 255 of e4m3 are none
    found = got.transpose(1, 0, 2).reshape(4, 256)
    np.testing.assert_array_equal(np.isnan(found[3]), ~numbers)
    np.testing.assert_array_equal(found[:, numbers], (unit[:, None] * wanted)[:, numbers])


def test_ptx_takes_bytes_two_at_a_time() -> None:
    """A mask and a sign in one instruction, and fp16 in pairs."""
    b = Builder("bytes", 32)
    words, out = b.buffer("words", u32), b.buffer("out", u32, "write")
    for i, pair in enumerate(half_pairs(b, b.load(words, b.thread_id()), "i8")):
        b.store(out, b.thread_id() * 2 + i, pair)
    text = codegen.generate(b.finish(), "ptx").text
    assert text.count("lop3.b32") == 2 and text.count("sub.rn.f16x2") == 2
