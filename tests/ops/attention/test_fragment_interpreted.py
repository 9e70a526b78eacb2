"""The kernels for matrix units on the interpreter with the sanitizer on, in its own layout of fragments, which is no
device's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grid
import ml_dtypes
import numpy as np
import pytest
import rope_cases
from test_backward_interpreted import run as backward
from test_forward_interpreted import run

from aule import tuning
from aule.ir import Builder
from aule.ir.interpret import interpret
from aule.ir.types import bf16, f32
from aule.ops.attention.plan import forward as plan
from aule.ops.attention.plan.tiles import fragment_shape
from aule.ops.attention.plan.tiles_backward import FRAGMENT
from aule.ops.attention.problem import UNBOUNDED
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import attention_problem
from aule.target import WARPGROUP_UNITS, FragmentLayout, Target
from aule.tile.fragment.engine import EXCESS, Components
from aule.tile.fragment.shape import FragmentShape

ROW_HALVES = FragmentLayout((0, 1, 2, 4, 8), (8, 0, 0, 0, 0), (0, 0, 0), (1, 2, 4))
"""Of the interpreter: lane L holds elements 8 L ... 8 L + 7, which is half of row L / 2."""

SHAPES = {
    "two-stages": FragmentShape(32, 32, 2, 2, True),
    "one-stage": FragmentShape(32, 32, 2, 1, True),
    "q-in-memory": FragmentShape(32, 16, 2, 2, False),
    "two-blocks-of-rows": FragmentShape(32, 32, 1, 1, False),
    "some-of-q-in-memory": FragmentShape(32, 16, 2, 1, False, register_columns=16),
    "scores-ahead": FragmentShape(32, 16, 2, 1, True, prefetch_scores=True),
    "shared-rows": FragmentShape(32, 16, 4, 1, True, columns=2, depth_parts=2),
    "warpgroups": FragmentShape(64, 16, 4, 2, False, warpgroups=True),
    "warpgroups-ahead": FragmentShape(64, 16, 4, 3, False, warpgroups=True),
}
CASES = [case for case in grid.forward_grid("small") if case.dtype in ("f16", "bf16")]


def target(arch: str = "sm_90") -> Target:
    return Target(
        "cuda", arch=arch, subgroup_size=32, subgroup_sizes=(32,), max_threads=1024, max_shared_bytes=1 << 20,
        int64=True, matrix_layout=ROW_HALVES, atomic_f32_add=True,
        matrix_units=(
            "m16n8k16:f16:f32", "m16n8k16:bf16:f32", "m16n8k8:tf32:f32", *(WARPGROUP_UNITS if arch == "sm_90" else ()),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_wide_values(arch: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values too wide for warpgroups: a launch for each part of their columns, the first of which has the lse. Other
    workgroups divide the columns among subgroups."""
    rng = np.random.default_rng(3)
    shapes = {"q": (1, 2, 70, 304), "k": (1, 1, 80, 304), "v": (1, 1, 80, 296)}
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, return_lse=True, **options)
    made: list[int] = []
    in_turn = plan._in_turn
    monkeypatch.setattr(plan, "_in_turn", lambda plans: made.append(len(plans)) or in_turn(plans))
    out, lse = run(problem, operands, None, target(arch))
    assert made == ([2] if arch == "sm_90" else [])
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_grid(case: grid.Case, shape: str) -> None:
    inputs = grid.make_inputs(case, seed=3)
    problem, operands = grid.case_problem(case, inputs)
    out, lse = run(problem, operands, SHAPES[shape], target())
    verdict = compare(problem, out, lse if case.return_lse else None, grid.expected(case, inputs))
    assert verdict, verdict.message


BANDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (60, 0)},
    "both-sides": {"window": (33, 20)},
}


@pytest.mark.parametrize("few", [0, 2048], ids=["two-loops", "one-loop"])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("length", [128, 200])
def test_many_tiles_over_warpgroups(
    length: int, stages: int, band: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough of them for stages to go round, with and without edges, over two warpgroups."""
    monkeypatch.setattr(plan, "_few_keys", lambda problem, _: few > 0 and problem.limits != (UNBOUNDED, UNBOUNDED))
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal((1, 2, length, 72)).astype(np.float16) for name in "qkv"}
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, **BANDS[band], return_lse=True)
    shape = FragmentShape(128, 16, 8, stages, False, warpgroups=True)
    out, lse = run(problem, operands, shape, target())
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message


@pytest.mark.parametrize("few", [0, 2048], ids=["two-loops", "one-loop"])
@pytest.mark.parametrize("band", ["causal", "window", "both-sides"])
def test_alibi_over_warpgroups(band: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances of one sign, which only differ by a number of the row from column to column, and of both."""
    monkeypatch.setattr(plan, "_few_keys", lambda problem, _: few > 0 and problem.limits != (UNBOUNDED, UNBOUNDED))
    rng = np.random.default_rng(2)
    arrays = {name: rng.standard_normal((1, 2, 150, 16)).astype(np.float16) for name in "qkv"}
    slopes = np.array([2.0, 0.01], np.float32)
    views = {name: grid.view_of(array) for name, array in (arrays | {"alibi_slopes": slopes}).items()}
    problem, operands = attention_problem(**views, **BANDS[band], return_lse=True)
    shape = FragmentShape(64, 32, 4, 3, False, warpgroups=True)
    out, lse = run(problem, operands, shape, target())
    verdict = compare(problem, out, lse, expect(problem, **arrays, alibi=slopes))
    assert verdict, verdict.message


WAYS = {
    "no asynchronous copies": (target("sm_75"), True),
    "rows that are not aligned": (target(), False),
    "as for Vulkan": (
        replace(target(""), backend="vulkan", matrix_units=("m16n16k16:f16:f32", "m16n16k16:bf16:f32")),
        True,
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_fetched_through_registers(case: grid.Case, way: str) -> None:
    inputs = grid.make_inputs(case, seed=3)
    problem, operands = grid.case_problem(case, inputs)
    device, aligned = WAYS[way]
    out, lse = run(problem, operands, SHAPES["two-stages"], device, aligned=aligned)
    verdict = compare(problem, out, lse if case.return_lse else None, grid.expected(case, inputs))
    assert verdict, verdict.message


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", SHAPES)
def test_dropped_infinities_do_not_leak(shape: str, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key 5 is dropped for all rows, key 20 for those before it; rows from 20 on get what it holds."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 40, 16)).astype(np.float16) for _ in range(3))
    mask = np.ones((40, 40), bool)
    mask[:, 5] = False
    k[:, :, 5], v[:, :, 5], v[:, :, 20, 3] = bad, bad, bad
    views = {name: grid.view_of(array) for name, array in {"q": q, "k": k, "v": v, "mask": mask}.items()}
    problem, operands = attention_problem(**views, causal=True, return_lse=True)
    out, lse = run(problem, operands, SHAPES[shape], target())
    _check_infinities(out, lse, bad)
    if shape.startswith("warpgroups"):  # the same by the causal band alone, with a loop of its own for edges
        monkeypatch.setattr(plan, "_few_keys", lambda *_: False)
        v[:, :, 5] = 1.0
        k[:, :, 5] = 1.0
        views = {name: grid.view_of(array) for name, array in {"q": q, "k": k, "v": v}.items()}
        problem, operands = attention_problem(**views, causal=True, return_lse=True)
        _check_infinities(*run(problem, operands, SHAPES[shape], target()), bad)


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape", ["two-stages", "scores-ahead", "warpgroups", "warpgroups-ahead"])
def test_nan_that_is_added_comes_out(shape: str, name: str) -> None:
    """In its row alone; not where causality drops the key. The interpreter's maximum ignores NaN as GPUs' do."""
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((1, 1, 40, 16)).astype(np.float16) for n in "qkv"}
    arrays[name] = rng.standard_normal((40, 40)).astype(np.float32 if name == "bias" else np.float16)
    arrays[name][7, 3] = arrays[name][20, 20] = arrays[name][5, 30] = np.nan
    views = {n: grid.view_of(array) for n, array in arrays.items()}
    problem, operands = attention_problem(**views, causal=True, return_lse=True)
    out, lse = run(problem, operands, SHAPES[shape], target())
    assert np.argwhere(np.isnan(lse[0, 0])).ravel().tolist() == [7, 20]
    assert np.isnan(out[0, 0, [7, 20]]).all() and np.isfinite(np.delete(out[0, 0], [7, 20], axis=0)).all()


def _check_infinities(out: np.ndarray, lse: np.ndarray, bad: float) -> None:
    assert np.isfinite(lse).all() and np.isfinite(out[:, :, :20]).all()
    assert np.isfinite(np.delete(out[:, :, 20:], 3, axis=3)).all()
    np.testing.assert_array_equal(out[0, 0, 20:, 3], np.full(20, bad, np.float16))


BACKWARD = {
    "two-stages": FragmentShape(32, 32, 2, 2, False),
    "one-stage": FragmentShape(32, 16, 2, 1, False),
    "two-blocks-of-rows": FragmentShape(32, 32, 1, 2, False),
    "one-in-registers": FragmentShape(32, 16, 2, 1, True),
    "fetched-late": FragmentShape(32, 16, 2, 1, True, late_fetch=True, start_at_delta=True),
}


SHARING = {
    "scores-by-columns": FragmentShape(32, 32, 4, 2, False, columns=2),
    "scores-by-rows": FragmentShape(
        64, 32, 4, 1, True, columns=2, register_columns=16, late_fetch=True, start_at_delta=True
    ),
}


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "sums"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHARING)
@pytest.mark.parametrize("dims", [(64, 32), (24, 128)], ids=str)
def test_gradients_of_subgroups_that_share_their_rows(
    dims: tuple[int, int], shape: str, causal: bool, deterministic: bool
) -> None:
    """Only dK and dV are made so; dQ has tiles of its own."""
    rng = np.random.default_rng(1)
    arrays = {
        "q": rng.standard_normal((1, 2, 39, dims[0])).astype(np.float16),
        "k": rng.standard_normal((1, 1, 50, dims[0])).astype(np.float16),
        "v": rng.standard_normal((1, 1, 50, dims[1])).astype(np.float16),
    }
    views = {name: grid.view_of(array) for name, array in arrays.items()}
    problem, operands = attention_problem(**views, causal=causal, deterministic=deterministic)
    shapes = (BACKWARD["two-stages"], SHARING[shape])
    found, dout = backward(problem, operands, arrays, shapes, True, target())
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "sums"])
@pytest.mark.parametrize("shape", BACKWARD)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: grid.Case, shape: str, deterministic: bool) -> None:
    inputs = grid.make_inputs(case, seed=3)
    problem, operands = grid.case_problem(case, inputs)
    problem = replace(problem, deterministic=deterministic)
    found, dout = backward(problem, operands, inputs, BACKWARD[shape], case.seq_q % 2 == 0, target())
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


WIDE = [
    fragment_shape(r.use) for r in tuning.family_records("nvidia-sm90", FRAGMENT) if "depth_parts" in r.use["shape"]
]
WIDE_CASES = [case for case in grid.forward_grid("wide") if case.dtype in ("f16", "bf16")][2:15:4]


@pytest.mark.parametrize("number", range(len(WIDE_CASES)), ids=lambda n: str(WIDE_CASES[n]))
def test_gradients_of_wide_heads(number: int) -> None:
    """Subgroups divide the depth of the scores: in two, or in eight, where they keep their columns in registers."""
    case = WIDE_CASES[number]
    inputs = grid.make_inputs(case, seed=3)
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
    for i, shape in enumerate((WIDE[0], WIDE[1 + number % 3])):
        problem, operands = grid.case_problem(case, inputs)
        problem = replace(problem, deterministic=(number + i) % 2 == 0)
        found, dout = backward(problem, operands, inputs, shape, number % 2 == 0, target())
        wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
        assert not wrong, (shape, wrong)


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "sums"])
@pytest.mark.parametrize("dims", [(136, 160), (192, 128), (256, 256)], ids=str)
def test_gradients_of_129_to_256_columns_where_memory_is_small(dims: tuple[int, int], deterministic: bool) -> None:
    """With the tiles of wide heads: eight subgroups, of which some have only padding at 136 columns."""
    rng = np.random.default_rng(6)
    shapes = {"q": (1, 4, 37, dims[0]), "k": (1, 2, 51, dims[0]), "v": (1, 2, 51, dims[1])}
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    views = {name: grid.view_of(x) for name, x in arrays.items()}
    options = {"causal": True, "window": (30, 0), "softcap": 20.0, "deterministic": deterministic}
    problem, operands = attention_problem(**views, **options)
    found, dout = backward(problem, operands, arrays, WIDE[-1], True, target())
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


@pytest.mark.parametrize("shape", WIDE[::2], ids=lambda s: f"{s.depth_parts}-parts")
def test_gradients_of_wide_heads_with_rope(shape: FragmentShape) -> None:
    case = rope_cases.Case("f16", (576, 512), 64, (19, 33))
    inputs = rope_cases.make_inputs(case)
    problem, operands = rope_cases.case_problem(case, inputs, deterministic=True)
    arrays = rope_cases.reference_arrays(inputs, operands)
    found, dout = backward(problem, operands, arrays, shape, False, target())
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "sums"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "shape", [*BACKWARD.values(), *SHARING.values(), *WIDE[:2]], ids=[*BACKWARD, *SHARING, "two-parts", "eight-parts"]
)
def test_what_a_dropped_key_holds_reaches_no_gradient(shape: FragmentShape, bad: float, deterministic: bool) -> None:
    """Key 21, in a tile of which other keys are kept. The last row keeps keys to its left alone, but rows past the end
    would keep key 21."""
    rng = np.random.default_rng(5)
    clean = {
        name: rng.standard_normal((1, heads, rows, dim)).astype(np.float16)
        for name, heads, rows, dim in (("q", 2, 20, 136), ("k", 1, 40, 136), ("v", 1, 40, 24))
    }
    queries = shape if shape.score_cut[0] == 1 else BACKWARD["two-stages"]
    masked = clean | {"mask": np.arange(40)[None] != 21}
    for arrays, options in ((masked, {}), (clean, {"causal": True, "causal_align": "top-left"})):
        given = {name: x.copy() for name, x in arrays.items()}
        given["k"][:, :, 21], given["v"][:, :, 21] = bad, bad
        views = {name: grid.view_of(x) for name, x in given.items()}
        problem, operands = attention_problem(**views, **options, deterministic=deterministic)
        found, dout = backward(problem, operands, arrays, (queries, shape), True, target())
        wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
        assert not wrong, wrong


def test_factors_rounded_by_integers() -> None:
    """Halves of bf16 where a device does not convert: to nearest but for ties, Inf and NaN as they are."""
    numbers = (np.random.default_rng(0).standard_normal(64) * 2.0 ** np.arange(-32, 32)).astype(np.float32)
    numbers[:5] = np.inf, -np.inf, np.nan, 0.0, -0.0
    numbers.view(np.uint32)[5] = 0x7FFFFFFF  # the NaN of NVIDIA's arithmetic
    b = Builder("halves", 32, 32)
    source, out = b.buffer("source", f32), b.buffer("out", f32, "write")
    engine = Components(b, replace(target(""), backend="vulkan"), bf16)
    at = b.thread_id() * 2
    for half in engine.rounded(b.unpack(b.load(source, at, 2)), "nearest"):
        b.store(out, at, b.cast(half, f32))
        at = at + 1
    found = np.zeros(64, np.float32)
    interpret(b.finish(), (1, 1, 1), [numbers, found])
    np.testing.assert_array_equal(found, np.asarray(numbers.astype(ml_dtypes.bfloat16), np.float32))


def test_enlarged_factors_are_cut_off() -> None:
    """What bf16 has stays what it is, Inf and NaN as well; others are off by a third more than when rounded, and on
    average by nothing."""
    rng = np.random.default_rng(0)
    exact = np.asarray(rng.standard_normal(1024).astype(ml_dtypes.bfloat16), np.float32)
    exact[:4] = np.inf, -np.inf, np.nan, 0.0
    exact.view(np.uint32)[4] = 0x7FFFFFFF  # the NaN of NVIDIA's arithmetic
    others = np.exp2(-8.0 * rng.random(1 << 16)).astype(np.float32)
    numbers = np.concatenate([exact, others])
    b = Builder("halves", 32, 32)
    source, out = b.buffer("source", f32), b.buffer("out", f32, "write")
    engine = Components(b, replace(target(""), backend="vulkan"), bf16)
    assert engine.excess == EXCESS and Components(b, target(), bf16).excess == 1.0
    at = (b.group_id() * 32 + b.thread_id()) * 2
    parts = [x * engine.excess for x in b.unpack(b.load(source, at, 2))]
    b.store(out, at, b.vector([b.cast(half, f32) for half in engine.rounded(parts, "enlarged")]))
    found = np.zeros_like(numbers)
    interpret(b.finish(), (numbers.size // 64, 1, 1), [numbers, found], sanitize=False)
    np.testing.assert_array_equal(found[:1024], exact)
    errors = found[1024:].astype(np.float64) / others - 1.0
    assert abs(errors.mean()) < 2e-5 and np.abs(errors).max() < 0.0051 and np.sqrt((errors**2).mean()) < 0.00177


def test_a_negative_scale() -> None:
    case = replace(CASES[0])
    inputs = grid.make_inputs(case, seed=3)
    views = {name: grid.view_of(inputs[name]) for name in "qkv"}
    problem, operands = attention_problem(**views, causal=False, scale=-0.3)
    out, _ = run(problem, operands, SHAPES["two-stages"], target())
    q, k, v = (np.asarray(inputs[name], np.float64) for name in "qkv")
    k, v = (np.repeat(x, problem.group, axis=1) for x in (k, v))
    s = -0.3 * q @ k.swapaxes(2, 3)
    p = np.exp(s - s.max(-1, keepdims=True))
    expected = p / p.sum(-1, keepdims=True) @ v
    assert np.abs(out.astype(np.float64) - expected).max() < 4e-3
