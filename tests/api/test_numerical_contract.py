"""The numerical contract, docs/numerics.md: one case for each of its lines, on every backend that is here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import devices
import grid
import numpy as np
import pytest
from repository import ROOT

import aule
from aule.engine.attention import backward_on_host, forward_on_host
from aule.engine.memory import host_view
from aule.engine.row_ops import on_host
from aule.errors import AuleError
from aule.ops.attention.reference import attention_reference, compare, expect
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import attention_problem
from aule.ops.catalogue import CATALOGUE
from aule.ops.softmax.dropout import keep_scale, kept, seed_words
from aule.runtime.base import Device

pytestmark = pytest.mark.device

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
PAGE = ROOT / "docs" / "numerics.md"
NAN, INF = np.float32("nan"), np.float32("inf")


@dataclass(frozen=True)
class Backend:
    """What a case computes with; ``device`` is None for NumPy, which has no gradients of attention."""

    name: str
    device: Device | None

    @property
    def natural(self) -> bool:
        """Scores are not multiplied by log2(e)."""
        return self.device is None or self.device.target.backend == "cpu"

    def attend(self, arrays: Arrays, **options: Any) -> tuple[Array, Array]:
        """Output and log-sum-exp."""
        problem, operands = attention_problem(**views(arrays), return_lse=True, **options)
        out, lse = forward_on_host(problem, operands, self.device, exact_lse=True)
        assert lse is not None
        return out, lse

    def gradients(self, arrays: Arrays, dout: Array, **options: Any) -> Arrays | None:
        """dq, dk and dv; None from NumPy."""
        if self.device is None:
            return None
        problem, operands = attention_problem(**views(arrays), return_lse=True, **options)
        out, lse = forward_on_host(problem, operands, self.device, exact_lse=True)
        assert lse is not None
        stored = dout.view(np.uint16) if problem.dtype == "bf16" else dout
        found = backward_on_host(problem, operands, self.device, out, lse, host_view(problem.dtype, stored))
        return dict(zip(("dq", "dk", "dv"), found, strict=True))

    def row_op(self, name: str, arrays: Arrays, checked: bool = True, **options: Any) -> Array:
        """The first output of a row operation."""
        spec = CATALOGUE[name] if checked else replace(CATALOGUE[name], check=None)
        given = {option.name: option.default for option in spec.options} | options
        call = spec.call({n: host_view(STORED_AS[x.dtype.name], x) for n, x in arrays.items()}, given)
        return on_host(spec, call, self.device)[spec.outputs[0]]


STORED_AS = {"float32": "f32", "float16": "f16", "bool": "bool", "int32": "i32", "int64": "i64"}


def views(arrays: Arrays) -> dict[str, Any]:
    return {name: grid.view_of(array) for name, array in arrays.items()}


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(seq: int = 8, dim: int = 16, heads: int = 2, dtype: Any = np.float32, size: float = 1.0) -> Arrays:
    return {name: normal(1, heads, seq, dim, seed=i, dtype=dtype) * dtype(size) for i, name in enumerate("qkv")}


Case = Callable[[Backend], None]
CASES: dict[str, Case] = {}
"""By the names of the page's lines."""


def line(case: Case) -> Case:
    CASES[case.__name__.replace("_", "-")] = case
    return case


@pytest.fixture(params=(*(name for name in devices.BACKENDS if name not in devices.CPUS[1:]), "numpy"), scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param, None if request.param == "numpy" else devices.need(request.param))


# -- errors ------------------------------------------------------------------------------------------------------------


def judged(backend: Backend, arrays: Arrays, differentiated: bool = True, **options: Any) -> None:
    """Output, log-sum-exp and gradients are within the tolerances of the reference."""
    problem, _ = attention_problem(**views(arrays), **options)
    verdict = compare(problem, *backend.attend(arrays, **options), expect(problem, **arrays))
    assert verdict, verdict.message
    dout = normal(*problem.out_shape, seed=9, dtype=arrays["q"].dtype)
    found = backend.gradients(arrays, dout, **options) if differentiated else None
    if found is not None:
        wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
        assert not wrong, wrong


@line
def error_float32(backend: Backend) -> None:
    judged(backend, qkv(70), causal=True)


@line
def error_half(backend: Backend) -> None:
    judged(backend, qkv(70, dtype=np.float16))
    judged(backend, qkv(70, dtype=grid.NUMPY_DTYPES["bf16"]), differentiated=False)  # the grid's are, and compile long


@line
def error_float64(backend: Backend) -> None:
    arrays = qkv(20, 16, dtype=np.float64)
    if backend.natural:
        judged(backend, arrays)
    else:
        with pytest.raises(AuleError, match=r"float64|f64"):
            backend.attend(arrays)


@line
def error_large_scores(backend: Backend) -> None:
    arrays, dout = qkv(64, size=11.0), normal(1, 2, 64, 16, seed=9)
    problem, _ = attention_problem(**views(arrays))
    want, want_lse = attention_reference(problem, **arrays)
    out, lse = backend.attend(arrays)
    assert np.abs(want_lse).max() > 200
    more = np.abs(want_lse).max() * 2.0**-22
    assert np.abs(out - want).max() <= (1e-5 + more) * np.abs(want).max()
    assert np.abs(lse - want_lse).max() <= 1e-5 * np.abs(want_lse).max()
    found = backend.gradients(arrays, dout)
    reference = expect_gradients(problem, dout, **arrays).reference
    for name, x in (found or {}).items():
        assert np.abs(x - reference[name]).max() <= (2e-5 + more) * np.abs(reference[name]).max(), name


# -- magnitudes --------------------------------------------------------------------------------------------------------


def towering(size: float) -> Arrays:
    """Row 0 has scores of up to ``size``, with scale 1; key 2 is its largest."""
    arrays = qkv()
    arrays["q"][0, 0, 0], arrays["k"][0, 0] = 0, 0
    arrays["q"][0, 0, 0, 0], arrays["k"][0, 0, :, 0] = size**0.5, -(size**0.5)
    arrays["k"][0, 0, 1, 0], arrays["k"][0, 0, 2, 0] = 0.6 * size**0.5, size**0.5
    return arrays


@line
def scores_below_2_3e38(backend: Backend) -> None:
    arrays = towering(2e38)
    out, lse = backend.attend(arrays, scale=1.0)
    np.testing.assert_allclose(out[0, 0, 0], arrays["v"][0, 0, 2], rtol=1e-6)
    assert np.isfinite(lse).all() and np.isfinite(out).all()


@line
def scores_above_2_3e38(backend: Backend) -> None:
    arrays, dout = towering(3e38), normal(1, 2, 8, 16, seed=9)
    biased = qkv() | {"bias": np.zeros((8, 8), np.float32)}
    biased["bias"][0, 2] = 3e38
    for given, options in ((arrays, {"scale": 1.0}), (biased, {})):
        out, lse = backend.attend(given, **options)
        if backend.natural:
            np.testing.assert_allclose(out[0, 0, 0], given["v"][0, 0, 2], rtol=1e-6)
            np.testing.assert_allclose(lse[0, 0, 0], 3e38, rtol=1e-5)
        else:
            assert np.isnan(out[0, 0, 0]).all() and np.isnan(lse[0, 0, 0])
        assert np.isfinite(out[0, 0, 1:]).all()
        found = backend.gradients(given, dout, **options)
        if backend.natural and found is not None:
            assert all(np.isfinite(x).all() for x in found.values())


@line
def half_scores(backend: Backend) -> None:
    arrays = qkv(dtype=np.float16, size=200.0)
    out, lse = backend.attend(arrays, scale=1.0)
    assert np.abs(lse).max() > 65504 and np.isfinite(lse).all() and np.isfinite(out.astype(np.float32)).all()


@line
def subnormal_numbers(backend: Backend) -> None:
    tiny = np.float32(1e-40)
    out, _ = backend.attend({"q": normal(1, 1, 1, 16), "k": normal(1, 1, 1, 16), "v": np.full((1, 1, 1, 16), tiny)})
    assert ((out == 0) | (np.abs(out - tiny) <= 1e-44)).all()
    halves = {name: normal(1, 1, 1, 16, dtype=np.float16) for name in "qk"}
    halves["v"] = np.full((1, 1, 1, 16), 2.0**-24, np.float16)
    out, _ = backend.attend(halves)
    assert (out == 2.0**-24).all()


@line
def overflow_rounds_to_infinity(backend: Backend) -> None:
    x = np.full((2, 64), 60000.0, np.float16)
    out = backend.row_op("rms_norm", {"x": np.ones_like(x), "weight": np.full(64, 7e4, np.float32)})
    assert np.isposinf(out).all()
    assert (backend.row_op("rms_norm", {"x": x}) == 1).all()  # squares are summed in float32


# -- infinities and NaN ------------------------------------------------------------------------------------------------


def only_nan(found: Array, rows: Any) -> None:
    """These rows of the first head are NaN, and nothing else is."""
    nan = np.isnan(found.astype(np.float32))
    want = np.zeros(found.shape[:3], bool)
    want[0, 0, rows] = True
    np.testing.assert_array_equal(nan, np.broadcast_to(want.reshape(*want.shape, *(1,) * (nan.ndim - 3)), nan.shape))


@line
def nan_in_q_or_k(backend: Backend) -> None:
    for name, rows in (("q", [3]), ("k", range(3, 8))):
        arrays = qkv()
        arrays[name][0, 0, 3, 2] = NAN
        for x in backend.attend(arrays, causal=True):
            only_nan(x, rows)


@line
def nan_in_v(backend: Backend) -> None:
    arrays = qkv()
    arrays["v"][0, 0, 3, 2], arrays["v"][0, 0, 3, 5], arrays["v"][0, 0, 4, 5] = NAN, INF, -INF
    out, lse = backend.attend(arrays, causal=True)
    assert np.isnan(out[0, 0, 3:, 2]).all() and np.isposinf(out[0, 0, 3, 5]) and np.isnan(out[0, 0, 4:, 5]).all()
    assert np.isfinite(np.delete(out[0, 0], (2, 5), axis=1)).all()
    assert np.isfinite(lse).all() and np.isfinite(out[0, 1]).all() and np.isfinite(out[0, 0, :3]).all()


@line
def nan_in_bias_or_mask(backend: Backend) -> None:
    if backend.name == "webgpu" and backend.device is not None and not backend.device.target.software:
        pytest.skip("WGSL lets a driver assume that there is no NaN: the page says so")
    dout = normal(1, 2, 8, 16, seed=9)
    for name, dtype in (("bias", np.float32), ("mask", np.float16)):
        arrays = qkv(dtype=dtype) | {name: np.zeros((1, 2, 8, 8), dtype)}
        arrays[name][0, 0, 3, 2] = NAN
        for x in backend.attend(arrays):
            only_nan(x, [3])
        found = backend.gradients(arrays, dout.astype(dtype))
        if found is not None:
            only_nan(found["dq"], [3])
            only_nan(found["dk"], range(8))
            only_nan(found["dv"], range(8))


@line
def nan_in_sinks_or_slopes(backend: Backend) -> None:
    for name in ("sinks", "alibi_slopes"):
        for x in backend.attend(qkv() | {name: np.array([NAN, 0.5], np.float32)}):
            only_nan(x, range(8))


@line
def infinite_scores(backend: Backend) -> None:
    arrays = qkv() | {"bias": np.zeros((1, 2, 8, 8), np.float32)}
    arrays["bias"][0, 0, 3, 2] = INF
    for x in backend.attend(arrays):
        only_nan(x, [3])
    arrays = towering(1e39)
    for x in backend.attend(arrays, scale=1.0):
        only_nan(x, [0])


@line
def dropped_keys(backend: Backend) -> None:
    """By a boolean mask, by -inf in an additive mask or a bias, beside NaN in the other, by band and window."""
    clean, dout = qkv(), normal(1, 2, 8, 16, seed=9)
    keep = np.ones((8, 8), bool)
    keep[:, 5] = False
    away = np.where(keep, np.float32(0.5), -INF)
    spoilt = np.where(keep, np.float32(0.0), NAN)
    cases: list[tuple[Arrays, dict[str, Any]]] = [
        ({"mask": keep, "bias": spoilt}, {}),
        ({"mask": away, "bias": spoilt}, {}),
        ({"mask": spoilt, "bias": away}, {}),
        ({"bias": np.where(np.tri(8, dtype=bool) & ~np.tri(8, k=-3, dtype=bool), np.float32(0), NAN)},
         {"causal": True, "window": 3}),
    ]  # fmt: skip
    for extra, options in cases:
        finite = {name: np.nan_to_num(x, nan=0.0) if x.dtype != bool else x for name, x in extra.items()}
        same = [backend.attend(clean | given, **options) for given in (finite, extra)]
        arrays = {name: x.copy() for name, x in clean.items()} | extra
        if not options:
            arrays["k"][:, :, 5], arrays["v"][:, :, 5] = NAN, INF
        same.append(backend.attend(arrays, **options))
        for out, lse in same[1:]:
            np.testing.assert_array_equal(out, same[0][0])
            np.testing.assert_array_equal(lse, same[0][1])
        found = [backend.gradients(given, dout, **options) for given in (clean | finite, arrays)]
        for name in found[0] or {}:
            np.testing.assert_array_equal(found[1][name], found[0][name])  # type: ignore[index]


@line
def nan_in_row_operations(backend: Backend) -> None:
    x = normal(4, 40)
    x[1, 3] = NAN
    mask = np.zeros((4, 40), np.float32)
    mask[2, 7] = NAN
    for op, arrays, rows in (
        ("rms_norm", {"x": x}, [1]), ("layer_norm", {"x": x}, [1]),
        ("softmax_dropout", {"x": x}, [1]), ("softmax_dropout", {"x": normal(4, 40), "mask": mask}, [2]),
    ):  # fmt: skip
        out = backend.row_op(op, arrays)
        assert np.isnan(out[rows]).all() and np.isfinite(np.delete(out, rows, axis=0)).all(), op


# -- empty rows --------------------------------------------------------------------------------------------------------


@line
def rows_without_keys(backend: Backend) -> None:
    arrays, dout = qkv() | {"mask": np.ones((8, 8), bool)}, normal(1, 2, 8, 16, seed=9)
    arrays["mask"][3] = False
    added = arrays | {"mask": np.where(arrays["mask"], np.float32(0), -INF)}
    for given in (arrays, added):
        out, lse = backend.attend(given)
        assert (out[:, :, 3] == 0).all() and np.isneginf(lse[:, :, 3]).all()
        assert np.isfinite(np.delete(lse, 3, axis=2)).all()
        found = backend.gradients(given, dout)
        if found is not None:
            assert (found["dq"][:, :, 3] == 0).all() and all(np.isfinite(x).all() for x in found.values())


@line
def rows_of_lowest_numbers(backend: Backend) -> None:
    for dtype in (np.float32, np.float16):
        arrays = qkv(dtype=dtype) | {"mask": np.full((8, 8), np.finfo(dtype).min, dtype)}
        arrays["q"] = np.zeros_like(arrays["q"])
        out, _ = backend.attend(arrays)
        want = arrays["v"].astype(np.float32).mean(2, keepdims=True)
        np.testing.assert_allclose(out.astype(np.float32), np.broadcast_to(want, out.shape), atol=2e-3)


@line
def sinks_alone(backend: Backend) -> None:
    arrays = qkv() | {"mask": np.zeros((8, 8), bool), "sinks": np.array([0.5, -INF], np.float32)}
    out, lse = backend.attend(arrays)
    assert (out == 0).all()
    np.testing.assert_allclose(lse[0, 0], 0.5, rtol=1e-6)
    assert np.isneginf(lse[0, 1]).all()


@line
def empty_arrays(backend: Backend) -> None:
    for seq_q, seq_kv in ((0, 5), (5, 0)):
        arrays = {"q": normal(1, 2, seq_q, 16), "k": normal(1, 2, seq_kv, 16), "v": normal(1, 2, seq_kv, 16)}
        out, lse = backend.attend(arrays)
        assert out.shape == (1, 2, seq_q, 16) and (out == 0).all() and np.isneginf(lse).all()
        found = backend.gradients(arrays, np.ones_like(out))
        assert all((x == 0).all() for x in (found or {}).values())
    for op in ("softmax_dropout", "rms_norm", "layer_norm"):
        assert backend.row_op(op, {"x": normal(3, 0)}).shape == (3, 0)
        assert backend.row_op(op, {"x": normal(0, 3)}).shape == (0, 3)


@line
def masked_softmax_rows(backend: Backend) -> None:
    mask = np.ones((4, 40), bool)
    mask[2] = False
    assert (backend.row_op("softmax_dropout", {"x": normal(4, 40), "mask": mask})[2] == 0).all()


# -- indices -----------------------------------------------------------------------------------------------------------


@line
def positions_outside_of_tables(backend: Backend) -> None:
    angles = normal(6, 4)
    for kind in (np.int32, np.int64):
        far = 2**31 - 1 if kind is np.int32 else 2**40
        arrays = {"x": normal(1, 2, 4, 8), "cos": np.cos(angles), "sin": np.sin(angles)}
        outside = arrays | {"position_ids": np.array([[0, far, -far, 6]], kind)}
        with pytest.raises(aule.InvalidArgumentError, match="expected position_ids of 0 to 5"):
            backend.row_op("rope", outside)
        inside = backend.row_op("rope", arrays | {"position_ids": np.array([[0, 5, 0, 5]], kind)})
        np.testing.assert_array_equal(backend.row_op("rope", outside, checked=False), inside)


@line
def targets_outside_of_rows(backend: Backend) -> None:
    arrays = {"logits": normal(3, 10), "target": np.array([1, 10, -1])}
    with pytest.raises(aule.InvalidArgumentError, match="expected targets of 0 to 9"):
        backend.row_op("cross_entropy", arrays)
    loss = backend.row_op("cross_entropy", arrays, checked=False, reduction="none")
    np.testing.assert_array_equal(np.isnan(loss), [False, True, True])


@line
def lengths_below_2_30(backend: Backend) -> None:
    far = np.broadcast_to(np.zeros((1, 1, 1, 8), np.float32), (1, 1, 2**31, 8))
    near = np.zeros((1, 1, 1, 8), np.float32)
    for q, k in ((near, far), (far, near)):
        with pytest.raises(aule.InvalidShapeError, match=r"at most 2\*\*30 = 1073741824 rows, got 2147483648"):
            backend.attend({"q": q, "k": k, "v": k})


# -- determinism and dropout -------------------------------------------------------------------------------------------


@line
def same_bits_again(backend: Backend) -> None:
    arrays, dout = qkv(100), normal(1, 2, 100, 16, seed=9)
    first, again = (backend.attend(arrays, causal=True) for _ in range(2))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))
    found = [backend.gradients(arrays, dout, causal=True, deterministic=True) or {} for _ in range(2)]
    assert all(found[0][name].tobytes() == found[1][name].tobytes() for name in found[0])


@line
def batches_do_not_touch(backend: Backend) -> None:
    arrays = {name: normal(2, 2, 8, 16, seed=i) for i, name in enumerate("qkv")}
    before, _ = backend.attend(arrays)
    for x in arrays.values():
        x[0] = NAN
    after, _ = backend.attend(arrays)
    assert np.isnan(after[0]).all() and after[1].tobytes() == before[1].tobytes()


@line
def dropout_by_seed_and_place(backend: Backend) -> None:
    eye = {"q": np.zeros((1, 2, 8, 16), np.float32), "k": np.zeros((1, 2, 8, 16), np.float32)}
    eye["v"] = np.broadcast_to(np.eye(8, 16, dtype=np.float32), (1, 2, 8, 16)).copy()
    words = np.array(seed_words(2**63 + 5), np.uint32)
    out, _ = backend.attend(eye | {"seed": words}, dropout_p=0.3)  # the weights themselves: 1/8 each
    for head in range(2):
        mask = kept(0.3, words, head, slice(0, 8), slice(0, 8))
        np.testing.assert_allclose(out[0, head, :, :8], np.where(mask, keep_scale(0.3) / 8, 0), rtol=1e-6)
    assert (backend.attend(eye | {"seed": words}, dropout_p=1.0)[0] == 0).all()


# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_contract(backend: Backend, name: str) -> None:
    CASES[name](backend)


def test_every_line_of_the_page_has_its_case() -> None:
    assert re.findall(r"(?m)^- \*\*([\w-]+)\*\*:", PAGE.read_text("utf-8")) == list(CASES)
