"""The reference: by hand, against PyTorch in fp64, and its judgement of wrong results."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from grid import case_problem, expected, forward_grid, make_inputs, pairwise, view_of

from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import (
    Expected,
    attention_reference,
    attention_twin,
    compare,
    expect,
    lse_tolerance,
    to_f64,
    tolerance,
)
from aule.ops.attention.validate import attention_problem

RNG = np.random.default_rng(7)


def tiny(scores: list[list[float]], values: list[float], **options: Any) -> tuple[AttentionProblem, dict[str, Any]]:
    """A problem of head_dim = seq_kv whose scores are exactly the given ones: k is the identity and the scale 1."""
    q = np.array(scores, dtype=np.float64)[None, None]
    k = np.eye(q.shape[-1])[None, None]
    v = np.array(values, dtype=np.float64)[None, None, :, None]
    arrays = {name: options.pop(name) for name in ("mask", "bias", "alibi_slopes", "sinks") if name in options}
    views = {name: view_of(array) for name, array in arrays.items()}
    problem, _ = attention_problem(view_of(q), view_of(k), view_of(v), scale=1.0, **views, **options)
    if "alibi_slopes" in arrays:
        arrays["alibi"] = arrays.pop("alibi_slopes")
    return problem, {"q": q, "k": k, "v": v, **arrays}


def solve(scores: list[list[float]], values: list[float], **options: Any) -> tuple[list[float], list[float]]:
    problem, arrays = tiny(scores, values, **options)
    out, lse = attention_reference(problem, **arrays)
    return out[0, 0, :, 0].tolist(), lse[0, 0].tolist()


LOG = [math.log(1), math.log(2), math.log(5)]


def test_softmax_by_hand() -> None:
    out, lse = solve([LOG], [8.0, 16.0, 24.0])
    assert out == pytest.approx([(8 + 2 * 16 + 5 * 24) / 8])
    assert lse == pytest.approx([math.log(8)])


def test_causal_alignment_by_hand() -> None:
    out, _ = solve([LOG, LOG], [8.0, 16.0, 24.0], causal=True)
    assert out == pytest.approx([(8 + 32) / 3, (8 + 32 + 120) / 8])
    out, _ = solve([LOG, LOG], [8.0, 16.0, 24.0], causal=True, causal_align="top-left")
    assert out == pytest.approx([8, (8 + 32) / 3])


def test_rows_before_the_first_key_are_zero() -> None:
    out, lse = solve([[0.0, 0.0]] * 3, [1.0, 3.0], causal=True)
    assert out == pytest.approx([0, 1, 2])
    assert lse == pytest.approx([-math.inf, 0, math.log(2)])


def test_window_by_hand() -> None:
    scores = [[0.0] * 4] * 4
    assert solve(scores, [1.0, 2.0, 4.0, 8.0], window=(1, 0))[0] == pytest.approx([1, 1.5, 3, 6])
    assert solve(scores, [1.0, 2.0, 4.0, 8.0], window=(0, None))[0] == pytest.approx([15 / 4, 14 / 3, 6, 8])
    assert solve(scores, [1.0, 2.0, 4.0, 8.0], window=2, causal=True)[0] == pytest.approx([1, 1.5, 3, 6])
    assert solve(scores, [1.0, 2.0, 4.0, 8.0], window=2)[0] == pytest.approx([1.5, 7 / 3, 14 / 3, 6])


def test_softcap_by_hand() -> None:
    out, _ = solve([[3.0, -1.0]], [1.0, 0.0], softcap=2.0)
    a, b = 2 * math.tanh(1.5), 2 * math.tanh(-0.5)
    assert out == pytest.approx([1 / (1 + math.exp(b - a))])


def test_masks_and_bias_by_hand() -> None:
    keep = np.array([[True, False, True]])
    assert solve([LOG], [8.0, 16.0, 24.0], mask=keep)[0] == pytest.approx([(8 + 120) / 6])
    added = np.array([[0.0, math.log(3), -math.inf]])
    assert solve([LOG], [8.0, 16.0, 24.0], mask=added)[0] == pytest.approx([(8 + 6 * 16) / 7])
    assert solve([LOG], [8.0, 16.0, 24.0], bias=added, mask=keep)[0] == pytest.approx([8])


def test_alibi_by_hand() -> None:
    slope = np.array([math.log(2)], np.float32)
    out, _ = solve([[0.0] * 3] * 2, [4.0, 8.0, 16.0], alibi_slopes=slope)
    assert out == pytest.approx([(2 + 8 + 8) / 2, (1 + 4 + 16) / 1.75], rel=1e-6)


def test_sinks_by_hand() -> None:
    sink = np.array([math.log(2)], np.float32)
    out, lse = solve([[0.0, 0.0]] * 3, [4.0, 8.0], causal=True, sinks=sink)
    assert out == pytest.approx([0, 4 / 3, 3])
    assert lse == pytest.approx([math.log(2), math.log(3), math.log(4)])
    out, lse = solve([[0.0, 0.0]] * 3, [4.0, 8.0], causal=True, sinks=np.array([-math.inf], np.float32))
    assert out == pytest.approx([0, 4, 6])
    assert lse == pytest.approx([-math.inf, 0, math.log(2)])


def test_dropped_keys_do_not_leak() -> None:
    problem, arrays = tiny([[0.0] * 3] * 3, [1.0, 2.0, 3.0], causal=True)
    arrays["k"][0, 0, 2] = np.nan
    arrays["v"][0, 0, 1] = np.inf
    arrays["v"][0, 0, 2] = np.nan
    out, lse = attention_reference(problem, **arrays)
    assert out[0, 0, 0, 0] == 1
    assert out[0, 0, 1, 0] == np.inf
    assert np.isnan(out[0, 0, 2, 0])
    assert np.isfinite(lse[0, 0, :2]).all()
    twin, _ = attention_twin(problem, **arrays)
    assert twin[0, 0, 0, 0] == 1


@pytest.mark.parametrize("option", ["plain", "causal", "bool", "additive", "gqa", "scale"])
def test_against_torch_math_in_fp64(option: str) -> None:
    torch = pytest.importorskip("torch")
    heads_kv = 2 if option == "gqa" else 4
    q = RNG.standard_normal((2, 4, 9, 16))
    k, v = RNG.standard_normal((2, heads_kv, 13, 16)), RNG.standard_normal((2, heads_kv, 13, 5))
    mask = None
    if option == "bool":
        mask = RNG.random((2, 1, 9, 13)) < 0.6
        mask[..., 0] = True
    elif option == "additive":
        mask = RNG.standard_normal((9, 13))
    scale = 0.7 if option == "scale" else None
    problem, _ = attention_problem(
        view_of(q),
        view_of(k),
        view_of(v),
        causal=option == "causal",
        causal_align="top-left",
        scale=scale,
        mask=None if mask is None else view_of(mask),
    )
    out, _ = attention_reference(problem, q, k, v, mask=mask)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *map(torch.from_numpy, (q, k, v)),
            attn_mask=None if mask is None else torch.from_numpy(mask),
            is_causal=option == "causal",
            scale=scale,
            enable_gqa=option == "gqa",
        )
    np.testing.assert_allclose(out, theirs.numpy(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_twin_errs_like_torch_in_low_precision(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = {"f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    q, k, v = (torch.randn(2, 3, 40, 64, generator=torch.Generator().manual_seed(i)).to(kind) for i in range(3))
    arrays = [x.view(torch.uint16).numpy() if dtype == "bf16" else x.numpy() for x in (q, k, v)]
    problem = AttentionProblem(2, 3, 3, 40, 40, 64, 64, dtype, 0.125)
    wanted = expect(problem, *arrays)
    assert wanted.twin is not None
    root = 0.125**0.5
    theirs = torch.softmax((q * root) @ (k * root).transpose(-1, -2), dim=-1) @ v
    error = np.abs(theirs.double().numpy() - wanted.out).max()
    twin_error = np.abs(wanted.twin - wanted.out).max()
    assert 0.5 < twin_error / error < 2
    assert compare(problem, theirs.float().numpy(), None, wanted)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_twin_is_rounded_to_the_dtype(dtype: str) -> None:
    case = next(c for c in forward_grid() if c.dtype == dtype and c.seq_q * c.seq_kv > 1000)
    twin = expected(case, make_inputs(case)).twin
    assert twin is not None
    kind = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[dtype]
    np.testing.assert_array_equal(twin.astype(kind).astype(np.float64), twin)


def test_negative_and_zero_scale_in_the_twin() -> None:
    q, k, v = (RNG.standard_normal((1, 1, 6, 8)).astype(np.float16) for _ in range(3))
    for scale in (-0.3, 0.0):
        problem = AttentionProblem(1, 1, 1, 6, 6, 8, 8, "f16", scale)
        wanted = expect(problem, q, k, v)
        assert wanted.twin is not None
        assert np.abs(wanted.twin - wanted.out).max() < 4e-3


def test_to_f64() -> None:
    values = np.array([1.5, -2.0, np.inf, 3e-39, 0.0], dtype=ml_dtypes.bfloat16)
    np.testing.assert_array_equal(to_f64(values.view(np.uint16), "bf16"), values.astype(np.float64))
    np.testing.assert_array_equal(to_f64(values, "bf16"), values.astype(np.float64))
    np.testing.assert_array_equal(to_f64(np.array([0.1], np.float16), "f16"), [float(np.float16(0.1))])


def test_tolerance() -> None:
    def problem(dtype: str) -> AttentionProblem:
        return AttentionProblem(1, 1, 1, 1, 2, 1, 1, dtype, 1.0)

    reference = np.array([-3.0, 0.5])
    assert tolerance(problem("f32"), reference) == pytest.approx(3e-5)
    assert tolerance(problem("f64"), reference) == pytest.approx(3e-12)
    assert tolerance(problem("f16"), reference, reference + 0.25) == pytest.approx(0.5)
    assert tolerance(problem("f16"), reference, reference) == 2 * 2.0**-10
    assert tolerance(problem("bf16"), reference, reference) == 2 * 2.0**-7
    assert tolerance(problem("f16"), np.array([1e-7]), np.array([1e-7])) == 2.0**-24
    assert tolerance(problem("f32"), np.zeros(0)) == 0
    assert tolerance(problem("bf16"), np.zeros(3), np.zeros(3)) == 0
    overflowed = np.array([np.nan, 0.5])
    assert tolerance(problem("f16"), reference, overflowed) == 2 * 2.0**-10
    with pytest.raises(ValueError, match="expected a twin"):
        tolerance(problem("f16"), reference)


def test_lse_tolerance() -> None:
    limits = [lse_tolerance(AttentionProblem(1, 1, 1, 1, 1, 1, 1, d, 1.0)) for d in ("f32", "f16", "bf16", "f64")]
    assert limits == [1e-5, 2e-5, 2e-5, np.finfo(np.float32).eps]
    assert lse_tolerance(AttentionProblem(1, 1, 1, 1, 1, 1, 1, "f64", 1.0), np.float64) == 1e-12


@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0])
def test_compare_refuses(bad: float) -> None:
    problem = AttentionProblem(1, 1, 1, 2, 2, 1, 1, "f32", 1.0)
    right = Expected(np.ones((1, 1, 2, 1)), np.array([[[0.0, -np.inf]]]), None)
    out, lse = np.ones((2, 1), np.float32), np.array([0.0, -np.inf], np.float32)
    verdict = compare(problem, out, lse, right)
    assert verdict and verdict.error == 0 and verdict.lse_error == 0
    assert compare(problem, out + np.float32(9e-6), None, right)
    assert not compare(problem, out + np.float32(2e-5), None, right)
    wrong = out.copy()
    wrong[1] = bad
    verdict = compare(problem, wrong, lse, right)
    assert not verdict.ok
    assert "worst at [0, 0, 1, 0]" in verdict.message
    for row in (0, 1):
        wrong_lse = lse.copy()
        wrong_lse[row] = bad
        assert not compare(problem, out, wrong_lse, right)


def test_nan_does_not_pass_against_nan() -> None:
    problem = AttentionProblem(1, 1, 1, 1, 1, 1, 1, "f32", 1.0)
    nan = np.full((1, 1, 1, 1), np.nan)
    assert not compare(problem, nan, None, Expected(nan, np.zeros((1, 1, 1)), None))


def test_long_sequences_are_cut_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in forward_grid() if c.seq_q > 60 and c.alibi and c.mask == "full")
    inputs = make_inputs(case)
    whole = expected(case, inputs)
    monkeypatch.setattr("aule.ops.attention.reference._ROWS", 7)
    parts = expected(case, inputs)
    np.testing.assert_allclose(parts.out, whole.out, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(parts.lse, whole.lse, rtol=1e-12)


def test_pairwise_covers_every_pair() -> None:
    axes = {"a": (1, 2, 3), "b": "xy", "c": (True, False), "d": range(5)}
    rows = pairwise(axes)
    for one, other in [("a", "b"), ("a", "d"), ("b", "c"), ("c", "d")]:
        assert {(r[one], r[other]) for r in rows} == {(x, y) for x in axes[one] for y in axes[other]}
    assert len(rows) < 25
    assert rows == pairwise(axes)


def test_grid_is_stable_and_sized() -> None:
    full, small = forward_grid("full"), forward_grid("small")
    assert full == forward_grid("full")
    assert 60 <= len(full) <= 150
    assert 12 <= len([case for case in small if not case.dropout_p]) <= 24
    assert 4 <= len([case for case in small if case.dropout_p]) <= 12
    assert len({c.id for c in full}) == len(full)
    for case in small:
        problem, operands = case_problem(case, make_inputs(case))
        assert problem.seq_q <= 33 and operands.rank == 4
