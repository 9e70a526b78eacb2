"""The NumPy implementation against the reference: the full grid, strides, properties, memory, and dropped values."""

from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from grid import NUMPY_DTYPES, Case, case_problem, expected, forward_grid, lay_out, make_inputs, view_of
from hypothesis import given, settings
from hypothesis import strategies as st

from aule.ops.attention import numpy_forward
from aule.ops.attention.numpy_forward import forward
from aule.ops.attention.reference import compare, expect
from aule.ops.attention.validate import attention_problem
from aule.ops.shared import elements

Array = np.ndarray[Any, Any]


def attend(inputs: Mapping[str, Array], **options: Any) -> tuple[Array, Array]:
    """Run the NumPy implementation; results start as garbage so that an unwritten element shows."""
    problem, operands = attention_problem(**{name: view_of(array) for name, array in inputs.items()}, **options)
    out = np.full(operands.out_shape, np.nan, dtype=inputs["q"].dtype)
    lse = np.full(operands.lse_shape, np.nan, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(problem, operands, out, lse)
    return out, lse


def check(inputs: Mapping[str, Array], **options: Any) -> None:
    problem, _ = attention_problem(**{name: view_of(array) for name, array in inputs.items()}, **options)
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
    verdict = compare(problem, *attend(inputs, **options), expect(problem, **arrays))
    assert verdict.ok, verdict.message


def normal(*shape: int, dtype: str = "f32", seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(NUMPY_DTYPES[dtype])


@pytest.mark.parametrize("case", forward_grid("full") + forward_grid("small"), ids=str)
def test_grid(case: Case) -> None:
    inputs = make_inputs(case)
    before = {name: array.copy() for name, array in inputs.items()}
    problem, _ = case_problem(case, inputs)
    out, lse = attend(inputs, **case.options)
    verdict = compare(problem, out, lse, expected(case, inputs))
    assert verdict.ok, verdict.message
    for name, array in inputs.items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("case", forward_grid("full")[::4], ids=str)
def test_many_tiles(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few elements: every edge between tiles is met, and heads are batched in odd numbers."""
    monkeypatch.setattr(numpy_forward, "_TILE_ROWS", 24)
    monkeypatch.setattr(numpy_forward, "_TILE_KEYS", 20)
    monkeypatch.setattr(numpy_forward, "_TILE_ELEMENTS", 1500)
    inputs = make_inputs(case, seed=1)
    problem, _ = case_problem(case, inputs)
    verdict = compare(problem, *attend(inputs, **case.options), expected(case, inputs))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("causal", [False, True])
def test_more_than_one_default_tile(dtype: str, causal: bool) -> None:
    q, k, v = (
        normal(1, 2, 600, 32, dtype=dtype),
        normal(1, 1, 1100, 32, dtype=dtype),
        normal(1, 1, 1100, 48, dtype=dtype),
    )
    check({"q": q, "k": k, "v": v}, causal=causal)
    check({"q": q, "k": k, "v": v}, causal=causal, window=300)


def test_f64_lse_may_be_stored_in_f64() -> None:
    q = normal(1, 2, 70, 16, dtype="f64")
    problem, operands = attention_problem(view_of(q), view_of(q), view_of(q), causal=True)
    out, lse = np.empty_like(q), np.empty(q.shape[:3])
    forward(problem, operands, out, lse)
    assert compare(problem, out, lse, expect(problem, q, q, q)).ok


@pytest.mark.parametrize("rank", [2, 3])
def test_fewer_axes(rank: int) -> None:
    lead = (3,) if rank == 3 else ()
    q, k, v = normal(*lead, 9, 8), normal(*lead, 12, 8), normal(*lead, 12, 5)
    out, lse = attend({"q": q, "k": k, "v": v}, causal=True)
    assert out.shape == (*lead, 9, 5)
    assert lse.shape == (*lead, 9)
    check({"q": q, "k": k, "v": v}, causal=True)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("strides", ["bshd", "gap", "step-2"])
def test_strided_output(dtype: str, strides: str) -> None:
    q = normal(2, 4, 20, 16, dtype=dtype)
    problem, operands = attention_problem(view_of(q), view_of(q), view_of(q))
    out = lay_out(np.zeros_like(q), strides)
    forward(problem, operands, out, None)
    np.testing.assert_array_equal(out, attend({"q": q, "k": q, "v": q})[0])


def test_unusual_input_strides() -> None:
    q, k, v = normal(2, 4, 30, 16), normal(2, 2, 40, 16), normal(2, 2, 40, 16)
    check({"q": q[:, ::-1, ::-1, ::-1], "k": k[..., ::-1, :], "v": v[..., ::2]})
    check({"q": q, "k": np.broadcast_to(k[:1, :1], k.shape), "v": np.broadcast_to(v[..., :1], v.shape)})
    mask = normal(30, 80)[:, ::2] > 0
    check({"q": q, "k": k, "v": v, "mask": mask})
    check({"q": q, "k": k, "v": v, "mask": np.broadcast_to(mask, (2, 4, 30, 40))})


def test_bf16_results_are_rounded_to_nearest_even() -> None:
    values = np.random.default_rng(3).integers(0, 1 << 32, 4096, dtype=np.uint32).view(np.float32)
    ties = (np.arange(-4, 5, dtype=np.float32) + np.float32(256.5)) * np.float32(2)
    for part in (values[~np.isnan(values)], ties):
        bits = elements.stored(part, "bf16")
        np.testing.assert_array_equal(bits, part.astype(NUMPY_DTYPES["bf16"]).view(np.uint16))
    assert np.isnan(elements.stored(values[np.isnan(values)], "bf16").view(NUMPY_DTYPES["bf16"])).all()


def test_same_bits_again() -> None:
    q = normal(2, 3, 100, 24)
    first, second = attend({"q": q, "k": q, "v": q}), attend({"q": q, "k": q, "v": q})
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (1, 2, 0, 8)])
def test_empty_results(shape: tuple[int, ...]) -> None:
    q, k = normal(*shape), normal(*shape[:2], 7, 8)
    out, lse = attend({"q": q, "k": k, "v": k})
    assert out.shape == shape and lse.shape == shape[:3]


@pytest.mark.parametrize("sinks", [False, True])
def test_no_keys_at_all(sinks: bool) -> None:
    inputs = {"q": normal(1, 2, 3, 8), "k": normal(1, 2, 0, 8), "v": normal(1, 2, 0, 4)}
    if sinks:
        inputs["sinks"] = np.array([0.5, -np.inf], np.float32)
    out, lse = attend(inputs, causal=True)
    assert (out == 0).all()
    assert (lse[0, 0] == (0.5 if sinks else -np.inf)).all()
    assert (lse[0, 1] == -np.inf).all()


@pytest.mark.parametrize("kind", ["bool", "additive", "causal", "window"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_fully_masked_rows_are_zero(kind: str, dtype: str) -> None:
    q, k = normal(2, 2, 40, 16, dtype=dtype), normal(2, 2, 30, 16, dtype=dtype)
    inputs, options = {"q": q, "k": k, "v": k}, {}
    dropped = np.zeros(40, np.bool_)
    if kind in ("bool", "additive"):
        dropped[[0, 7, 39]] = True
        keep = np.broadcast_to(~dropped[:, None], (40, 30))
        inputs["mask"] = keep if kind == "bool" else np.where(keep, 0, -np.inf).astype(np.float32)
    elif kind == "causal":
        options["causal"] = True
        dropped[:10] = True
    else:
        options |= {"window": (3, 3), "causal_align": "top-left"}
        dropped[33:] = True
    out, lse = attend(inputs, **options)
    assert (out[:, :, dropped] == 0).all()
    assert (lse[:, :, dropped] == -np.inf).all()
    assert np.isfinite(lse[:, :, ~dropped]).all()
    check(inputs, **options)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["bool", "additive", "bias", "causal", "window"])
def test_dropped_keys_and_values_do_not_leak(kind: str, poison: float, dtype: str) -> None:
    q, k, v = (normal(1, 2, 50, 16, dtype=dtype, seed=i) for i in range(3))
    inputs, options = {"q": q, "k": k, "v": v}, {}
    bad = slice(40, 50)
    rows = slice(0, 40)
    if kind == "causal":
        options["causal"] = True
    elif kind == "window":
        options["window"] = (0, 3)
        rows = slice(0, 37)
    else:
        keep = np.ones((50, 50), np.bool_)
        keep[rows, bad] = False
        inputs["mask" if kind != "bias" else "bias"] = (
            keep if kind == "bool" else np.where(keep, 0, -np.inf).astype(np.float32)
        )
    clean = attend(inputs, **options)
    inputs["k"], inputs["v"] = k.copy(), v.copy()
    inputs["k"][:, :, bad] = poison
    inputs["v"][:, :, bad] = poison
    out, lse = attend(inputs, **options)
    np.testing.assert_array_equal(out[:, :, rows], clean[0][:, :, rows])
    np.testing.assert_array_equal(lse[:, :, rows], clean[1][:, :, rows])
    # Kept, they must show: hiding a NaN is as wrong as spreading one.
    assert not np.isfinite(out[:, :, 49].astype(np.float32)).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_kept_values_that_are_not_finite_reach_only_their_rows(poison: float) -> None:
    q, k, v = (normal(2, 2, 30, 8, seed=i) for i in range(3))
    v[1, 0, 20, 3] = poison
    out, _ = attend({"q": q, "k": k, "v": v}, causal=True)
    hit = np.zeros(out.shape, np.bool_)
    hit[1, 0, 20:, 3] = True
    np.testing.assert_array_equal(~np.isfinite(out), hit)
    np.testing.assert_array_equal(out[hit], np.full(10, poison, np.float32))


def test_queries_that_are_not_finite_stay_in_their_rows() -> None:
    q, k, v = (normal(1, 2, 30, 8, seed=i) for i in range(3))
    clean, _ = attend({"q": q, "k": k, "v": v})
    q[0, 1, 4] = np.nan
    out, _ = attend({"q": q, "k": k, "v": v})
    assert np.isnan(out[0, 1, 4]).all()
    out[0, 1, 4] = clean[0, 1, 4]
    np.testing.assert_array_equal(out, clean)


def test_sinks_take_weight_without_value() -> None:
    q, k, v = (normal(1, 4, 25, 16, seed=i) for i in range(3))
    sinks = np.array([-np.inf, 0.0, 30.0, -30.0], np.float32)
    plain, plain_lse = attend({"q": q, "k": k, "v": v}, causal=True)
    out, lse = attend({"q": q, "k": k, "v": v, "sinks": sinks}, causal=True)
    np.testing.assert_array_equal(out[:, 0], plain[:, 0])
    weight = np.exp(plain_lse) / (np.exp(plain_lse) + np.exp(sinks)[None, :, None])
    np.testing.assert_allclose(out, plain * weight[..., None], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, np.logaddexp(plain_lse, sinks[None, :, None]), rtol=1e-5, atol=1e-6)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (normal(1, 1, 64, 64, seed=i) for i in range(3))
    check({"q": q * np.float32(100), "k": k, "v": v}, softcap=30.0)
    out, lse = attend({"q": q * np.float32(1e4), "k": k * np.float32(1e4), "v": v})
    assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 64}])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_memory_is_linear(dtype: str, options: dict[str, Any]) -> None:
    seq = 8192
    q = normal(1, 1, seq, 16, dtype=dtype)
    problem, operands = attention_problem(view_of(q), view_of(q), view_of(q), **options)
    out = np.empty_like(q)
    tracemalloc.start()
    try:
        forward(problem, operands, out, None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # N x N in fp32 would be 256 MiB.
    assert peak < 8 << 20


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Array], dict[str, Any]]:
    dtype = draw(st.sampled_from(["f32", "f16", "bf16", "f64"]))
    group, heads_kv, batch = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    seq_q, seq_kv = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    head_dim, value_dim = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    heads_q = group * heads_kv
    rng = np.random.default_rng(draw(st.integers(0, 1000)))

    def layout(*shape: int) -> Array:
        array = rng.standard_normal(shape).astype(NUMPY_DTYPES[dtype])
        array = lay_out(array, draw(st.sampled_from(["contiguous", "bshd", "gap", "step-2"])))
        return array[:, :, ::-1] if draw(st.booleans()) else array

    inputs = {
        "q": layout(batch, heads_q, seq_q, head_dim),
        "k": layout(batch, heads_kv, seq_kv, head_dim),
        "v": layout(batch, heads_kv, seq_kv, value_dim),
    }
    for name in draw(st.sets(st.sampled_from(["mask", "bias"]))):
        full = (batch, heads_q, seq_q, seq_kv)
        shape = [n if draw(st.booleans()) else 1 for n in full][draw(st.integers(0, 2)) :]
        values = rng.standard_normal(shape).astype(np.float32)
        values[rng.random(shape) < 0.2] = -np.inf
        inputs[name] = values > -0.5 if name == "mask" and draw(st.booleans()) else values
    if draw(st.booleans()):
        inputs["alibi_slopes"] = rng.random(heads_q).astype(np.float32)
    if draw(st.booleans()):
        inputs["sinks"] = rng.standard_normal(heads_q).astype(np.float32)
    side = st.none() | st.integers(0, 50)
    options = {
        "causal": draw(st.booleans()),
        "causal_align": draw(st.sampled_from(["bottom-right", "top-left"])),
        "window": draw(st.none() | st.integers(1, 50) | st.tuples(side, side)),
        "softcap": draw(st.sampled_from([None, 5.0])),
        "scale": draw(st.sampled_from([None, 0.0, -0.4, 0.8])),
    }
    return inputs, options


@given(call=calls())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_call(call: tuple[dict[str, Array], dict[str, Any]]) -> None:
    inputs, options = call
    check(inputs, **options)


@given(call=calls(), tile=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 200)))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_call_in_any_tiles(call: tuple[dict[str, Array], dict[str, Any]], tile: tuple[int, int, int]) -> None:
    inputs, options = call
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("_TILE_ROWS", "_TILE_KEYS", "_TILE_ELEMENTS"), tile, strict=True):
            patch.setattr(numpy_forward, name, value)
        check(inputs, **options)
