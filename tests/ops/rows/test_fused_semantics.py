"""Semantics of row operations: ONNX's definitions written out, refused arguments, and the catalogue."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import aule
from aule.ops.catalogue import CATALOGUE


def made(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.max(np.abs(want)))


# -- ONNX's definitions, operator by operator --------------------------------------------------------------------------


def test_rms_normalization() -> None:
    """RMSNormalization-23, axis=-1: X / Sqrt(ReduceMean(X*X) + epsilon) * scale."""
    x, scale = made(2, 3, 8), made(8)
    squares = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
    close(aule.rms_norm(x, scale, eps=0.5), x / np.sqrt(squares + 0.5) * scale)


def test_layer_normalization() -> None:
    """LayerNormalization-17, axis=-1: D = X - Mean; D / Sqrt(Mean(D*D) + epsilon) * Scale + B; the variance is that of
    the population."""
    x, scale, bias = made(2, 3, 7), made(7), made(7)[::-1].copy()
    d = x.astype(np.float64) - np.mean(x, axis=-1, keepdims=True, dtype=np.float64)
    close(
        aule.layer_norm(x, scale, bias, eps=0.25), d / np.sqrt(np.mean(d * d, -1, keepdims=True) + 0.25) * scale + bias
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 4])
def test_rotary_embedding(interleaved: bool, rotary: int) -> None:
    """RotaryEmbedding-23 on [batch, heads, seq, head]: caches of [positions, rotary / 2], taken at position_ids; the
    first ``rotary`` columns are rotated."""
    batch, heads, seq, dim = 2, 3, 4, 8
    x, angles = made(batch, heads, seq, dim), made(10, rotary // 2)
    ids = np.random.default_rng(0).integers(0, 10, (batch, seq))
    want = x.astype(np.float64)
    for b, h, s in np.ndindex(batch, heads, seq):
        for i in range(rotary // 2):
            real, imaginary = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary // 2)
            cos, sin = math.cos(angles[ids[b, s], i]), math.sin(angles[ids[b, s], i])
            want[b, h, s, real] = cos * x[b, h, s, real] - sin * x[b, h, s, imaginary]
            want[b, h, s, imaginary] = sin * x[b, h, s, real] + cos * x[b, h, s, imaginary]
    cos, sin = np.cos(angles), np.sin(angles)
    close(aule.rope(x, cos, sin, interleaved=interleaved, position_ids=ids), want)
    gathered = aule.rope(x, cos[ids], sin[ids], interleaved=interleaved)
    np.testing.assert_array_equal(gathered, aule.rope(x, cos, sin, interleaved=interleaved, position_ids=ids))


def test_softmax() -> None:
    """Softmax-13, axis=-1: Exp(input) / ReduceSum(Exp(input))."""
    x = made(3, 5, 6)
    e = np.exp(x.astype(np.float64))
    close(aule.softmax_dropout(x), e / e.sum(-1, keepdims=True))


def test_gelu() -> None:
    """Gelu-20: 0.5 * x * (1 + Erf(x / Sqrt(2))), or with approximate="tanh"
    0.5 * x * (1 + Tanh(Sqrt(2 / pi) * (x + 0.044715 * x**3)))."""
    x = 3 * made(4, 9)
    exact = [[0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in row] for row in x.astype(float)]
    close(aule.geglu(x, np.ones_like(x)), np.array(exact))
    inner = math.sqrt(2 / math.pi) * (x.astype(np.float64) + 0.044715 * x.astype(np.float64) ** 3)
    close(aule.geglu(x, np.ones_like(x), approximate="tanh"), 0.5 * x * (1 + np.tanh(inner)))


def test_swish() -> None:
    """Swish-24, alpha=1: x * Sigmoid(x)."""
    x = 3 * made(4, 9)
    close(aule.swiglu(x, np.ones_like(x)), x / (1 + np.exp(-x.astype(np.float64))))


# -- what else a call may say ------------------------------------------------------------------------------------------


def test_tables_with_each_number_twice_are_those_of_transformers() -> None:
    x, angles = made(1, 2, 3, 8), made(3, 4)
    for interleaved, double in ((False, np.concatenate([angles, angles], -1)), (True, np.repeat(angles, 2, -1))):
        short = aule.rope(x, np.cos(angles), np.sin(angles), interleaved=interleaved)
        np.testing.assert_array_equal(aule.rope(x, np.cos(double), np.sin(double), interleaved=interleaved), short)
    quarter = np.concatenate([angles[:, :1], angles[:, :1]], -1)  # two columns of eight: one pair
    want = aule.rope(x, np.cos(angles[:, :1]), np.sin(angles[:, :1]), rotary_dim=2)
    np.testing.assert_array_equal(aule.rope(x, np.cos(quarter), np.sin(quarter), rotary_dim=2), want)
    np.testing.assert_array_equal(want[..., 2:], x[..., 2:])


def test_in_place() -> None:
    angles = made(3, 2)
    for backend in ("numpy", None):
        x = made(1, 2, 3, 6)
        want = aule.rope(x, np.cos(angles), np.sin(angles), backend=backend)
        found = aule.rope(x, np.cos(angles), np.sin(angles), inplace=True, backend=backend)
        assert found is x
        np.testing.assert_array_equal(x, want)
        empty = np.empty((2, 0, 6), np.float32)
        assert aule.rope(empty, angles[:0], angles[:0], inplace=True, backend=backend) is empty
    x.flags.writeable = False
    with pytest.raises(aule.InvalidArgumentError, match="expected x to be writable"):
        aule.rope(x, np.cos(angles), np.sin(angles), inplace=True)
    with pytest.raises(aule.InvalidArgumentError, match="expected x with memory for every element"):
        aule.rope(np.broadcast_to(x, (5, 2, 3, 6)), np.cos(angles), np.sin(angles), inplace=True)


def test_dropout_is_attention_s() -> None:
    q, k, v = (made(2, 3, 9, 16) + i for i in range(3))
    want = aule.flash_attention(q, k, v, causal=True, dropout_p=0.4, seed=2**63 + 5)
    weights = aule.softmax_dropout(q @ k.swapaxes(-1, -2), scale=0.25, causal=True, dropout_p=0.4, seed=2**63 + 5)
    close(weights @ v, want)
    assert (aule.softmax_dropout(made(4, 64), dropout_p=1.0) == 0).all()
    first, second = (aule.softmax_dropout(made(4, 64), dropout_p=0.5) for _ in range(2))
    assert (first != second).any()


def test_rows_of_nothing_and_no_rows() -> None:
    x = made(3, 5)
    none = np.zeros((3, 5), bool)
    assert (aule.softmax_dropout(x, mask=none) == 0).all()
    for backend in ("numpy", None):
        assert aule.softmax_dropout(made(2, 0, 5), dropout_p=0.5, backend=backend).shape == (2, 0, 5)
    assert aule.rms_norm(made(0, 5)).shape == (0, 5)
    assert aule.layer_norm(np.zeros((2, 0, 4), np.float16)).shape == (2, 0, 4)


REFUSED = {
    "weight too long": (lambda: aule.rms_norm(made(2, 4), made(5)), aule.InvalidShapeError, "expected weight of shape"),
    "no axes": (lambda: aule.rms_norm(made()), aule.InvalidShapeError, "expected x with a last axis"),
    "integers": (
        lambda: aule.layer_norm(np.zeros((2, 4), np.int32)),
        aule.InvalidDtypeError,
        "expected x of float32, ",
    ),
    "wide weight": (
        lambda: aule.rms_norm(made(2, 4), np.ones(4)),
        aule.InvalidDtypeError,
        "expected weight of at most 32 bits",
    ),
    "two dtypes": (
        lambda: aule.swiglu(made(2, 4), made(2, 4).astype(np.float16)),
        aule.InvalidDtypeError,
        "expected up of gate's dtype",
    ),
    "odd halves": (lambda: aule.swiglu(made(2, 5)), aule.InvalidShapeError, "expected gate with an even last axis"),
    "eps": (
        lambda: aule.rms_norm(made(2, 4), eps=-1.0),
        aule.InvalidArgumentError,
        "expected eps from 0 to 1e+38, got -1.0",
    ),
    "eps as text": (lambda: aule.layer_norm(made(2, 4), eps="1"), aule.InvalidArgumentError, "expected eps"),
    "eps beyond float32": (
        lambda: aule.layer_norm_linear(made(2, 4), None, None, made(3, 4), eps=1e60),
        aule.InvalidArgumentError,
        "[layer_norm_linear] expected eps from 0 to 1e+38, got 1e+60",
    ),
    "scale beyond float32": (
        lambda: aule.softmax_dropout(made(2, 4), scale=-1e60),
        aule.InvalidArgumentError,
        "expected a finite scale of at most 1e+38, got -1e+60",
    ),
    "mask of integers": (
        lambda: aule.softmax_dropout(made(2, 3), mask=np.ones((2, 3), np.int32)),
        aule.InvalidDtypeError,
        "expected mask of bool or floats, got int32",
    ),
    "approximate": (
        lambda: aule.geglu(made(2, 4), approximate="erf"),
        aule.InvalidArgumentError,
        "expected approximate 'none' or 'tanh'",
    ),
    "wide tables": (lambda: aule.rope(made(2, 3, 4), made(3, 9), made(3, 9)), aule.InvalidShapeError, "expected cos"),
    "positions": (
        lambda: aule.rope(made(2, 3, 4), made(5, 2), made(5, 2), position_ids=made(3)),
        aule.InvalidDtypeError,
        "expected position_ids of int32",
    ),
    "mask": (
        lambda: aule.softmax_dropout(made(2, 3), mask=np.ones((2, 4), bool)),
        aule.InvalidShapeError,
        "expected mask broadcastable to",
    ),
    "dropout": (
        lambda: aule.softmax_dropout(made(2, 3), dropout_p=1.5),
        aule.InvalidArgumentError,
        "expected dropout_p in 0..1",
    ),
    "a list": (lambda: aule.rms_norm([1.0]), aule.InvalidDtypeError, "[rms_norm] expected NumPy arrays"),
    "another kind": (
        lambda: aule.rms_norm(made(2, 2), [1.0, 2.0]),
        aule.InvalidDtypeError,
        "expected weight to be a NumPy array like x",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, error, message = REFUSED[case]
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value) and ";" in str(caught.value)


def test_every_op_is_public() -> None:
    for name, spec in CATALOGUE.items():
        assert spec.name == name and name in aule.__all__ and callable(getattr(aule, name))
        assert spec.gradient is not None and set(spec.gradients or {}) <= {operand.name for operand in spec.operands}
