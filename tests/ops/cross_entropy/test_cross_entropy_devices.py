"""Cross entropy on every device, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from devices import BACKENDS, need, spare
from op_plans import error, reference, run

from aule.frontends.numpy import bfloat16
from aule.ops.catalogue import CATALOGUE

pytestmark = pytest.mark.device

SPEC = CATALOGUE["cross_entropy"]
CASES = [
    ("float32", (2, 3, 259), "int32", {"reduction": "none", "label_smoothing": 0.1}),
    ("bfloat16", (5, 4608), "int64", {"ignore_index": 7}),
    ("float16", (9, 64), "int64", {"reduction": "sum"}),
]


def given(dtype: str, shape: tuple[int, ...], index: str, options: dict[str, Any]) -> dict[str, Any]:
    """Logits with gaps between their rows, targets of which some are ignored."""
    rng = np.random.default_rng(sum(shape))
    kind = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    if kind is None:
        pytest.skip("no ml_dtypes")
    wide = rng.normal(0, 4, (*shape[:-1], shape[-1] + 8)).astype(kind)
    target = rng.integers(0, shape[-1], shape[:-1]).astype(index)
    target.reshape(-1)[1::3] = options.get("ignore_index", -100)
    loss_shape = shape[:-1] if options.get("reduction") == "none" else ()
    return {"logits": wide[..., :-8], "target": target, "dloss": np.asarray(rng.normal(0, 1, loss_shape), kind)}


def allowed(right: Any, kind: Any, single: float) -> float:
    """The error that may be: of halves twice that of rounding alone, which is less than a naive computation's."""
    return single if kind == np.float32 else 2 * error(right.astype(kind).astype(np.float64), right)


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("backend", ["numpy", *BACKENDS])
def test_loss_and_gradient(backend: str, number: int) -> None:
    device = None if backend == "numpy" else need(backend)
    if device is not None:
        spare(device, number)
    dtype, shape, index, options = CASES[number]
    arrays = given(dtype, shape, index, options)
    kind, dloss = arrays["logits"].dtype, arrays.pop("dloss")
    found, right = run(SPEC, arrays, options, device), reference(SPEC, arrays, options)
    assert error(found["loss"], right["loss"]) <= allowed(right["loss"], kind, 1e-5)

    assert SPEC.gradient is not None
    got = run(
        SPEC.gradient, {**arrays, "dloss": dloss, "most": found["most"], "above": found["above"]}, options, device
    )["dlogits"]
    exact = {
        "logits": arrays["logits"].astype(np.float64),
        "dloss": dloss.astype(np.float64),
        "most": right["most"],
        "above": right["above"],
    }
    gradient = reference(SPEC.gradient, {**exact, "target": arrays["target"]}, options)["dlogits"]
    assert error(got, gradient) <= allowed(gradient, kind, 2e-5)
    ignored = arrays["target"] == options.get("ignore_index", -100)
    assert ignored.any()
    assert not got[ignored].any()
    if options.get("reduction") == "none":
        assert not found["loss"][ignored].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_keep_their_trouble_to_themselves(backend: str) -> None:
    """Targets that are no columns, which only devices ever see, NaN and infinities; logits with a common offset."""
    device = need(backend)
    unchecked = replace(SPEC, check=None)
    options = {"reduction": "none"}
    logits = np.random.default_rng(3).normal(0, 1, (9, 64)).astype(np.float32)
    target = np.arange(9, dtype=np.int64)
    plain = run(unchecked, {"logits": logits, "target": target}, options, device)["loss"]
    logits[0] += 4096
    logits[1, 5], logits[2, 5], logits[3, 5], logits[4] = np.nan, np.inf, -np.inf, -np.inf
    target[5:8] = 64, -1, 2**40
    loss = run(unchecked, {"logits": logits, "target": target}, options, device)["loss"]
    assert np.isnan(loss[[1, 2, 4, 5, 6, 7]]).all()
    assert loss[8] == plain[8]
    assert np.isfinite(loss[3]) and loss[3] < plain[3]
    moved = logits[0].astype(np.float64)
    assert abs(loss[0] - (np.log(np.sum(np.exp(moved - 4096))) + 4096 - moved[0])) < 1e-5 * loss[0]


@pytest.mark.parametrize("backend", ["numpy", *BACKENDS])
def test_a_common_offset_costs_no_digits(backend: str) -> None:
    """Neither of the loss nor of the gradient, nor do rows of large numbers that are all alike."""
    device = None if backend == "numpy" else need(backend)
    rng = np.random.default_rng(7)
    logits = (np.round(16 * rng.normal(0, 3, (4, 300))) / 16).astype(np.float32)
    logits[1:] += np.float32(1e6)
    logits[3] = 3e38
    arrays = {"logits": logits, "target": np.array([0, 299, 5, 7])}
    options = {"reduction": "none", "label_smoothing": 0.125}
    found, right = run(SPEC, arrays, options, device), reference(SPEC, arrays, options)
    assert error(found["loss"], right["loss"]) <= 1e-5
    assert SPEC.gradient is not None
    dloss, names = np.ones(4, np.float32), ("most", "above")
    got = run(SPEC.gradient, arrays | {"dloss": dloss} | {n: found[n] for n in names}, options, device)["dlogits"]
    exact = arrays | {"logits": logits.astype(np.float64), "dloss": dloss.astype(np.float64)}
    gradient = reference(SPEC.gradient, exact | {n: right[n] for n in names}, options)["dlogits"]
    for row in range(4):
        assert error(got[row], gradient[row]) <= 2e-5
