"""A linear layer after a normalisation on every device, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import BACKENDS, need, spare
from op_plans import error, reference, run

from aule.frontends.numpy import bfloat16
from aule.ops.catalogue import CATALOGUE

pytestmark = pytest.mark.device

SPEC = CATALOGUE["layer_norm_linear"]
CASES = [
    ("float32", (2, 35, 50), 29),
    ("bfloat16", (33, 131), 72),
    ("float16", (33, 36), 130),
    ("float32", (50,), 29),
]


def given(dtype: str, shape: tuple[int, ...], features: int) -> dict[str, Any]:
    rng = np.random.default_rng(features)
    kind = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    if kind is None:
        pytest.skip("no ml_dtypes")
    length = shape[-1]
    arrays = {
        "x": rng.normal(3, 1, (*shape[:-1], length + 8))[..., :-8],
        "weight_norm": rng.normal(1, 0.2, length),
        "bias_norm": rng.normal(0, 0.2, length),
        "weight": rng.normal(0, length**-0.5, (features, length)),
        "bias": rng.normal(0, 1, features),
        "dy": rng.normal(0, 1, (*shape[:-1], features)),
    }
    return {name: array.astype(kind) for name, array in arrays.items()}


def naive(arrays: dict[str, Any]) -> dict[str, Any]:
    """Both steps one after the other, each result rounded to the arrays' precision, as PyTorch has it."""
    kind = arrays["x"].dtype

    def rounded(x: Any) -> Any:
        return x.astype(kind).astype(np.float64)

    x, weight_norm, bias_norm, weight, bias, dy = (
        arrays[name].astype(np.float64) for name in ("x", "weight_norm", "bias_norm", "weight", "bias", "dy")
    )
    normal = CATALOGUE["layer_norm"]
    inner = {"x": x.astype(kind), "weight": weight_norm.astype(kind), "bias": bias_norm.astype(kind)}
    middle = rounded(reference(normal, inner, {})["y"])
    assert normal.gradient is not None
    outer = {"dy": (dy @ weight).astype(kind), **inner}
    found = {
        f"d{n}": rounded(g)
        for n, g in zip(("x", "weight_norm", "bias_norm"), reference(normal.gradient, outer, {}).values(), strict=True)
    }
    flat = dy.reshape(-1, dy.shape[-1])
    found |= {"y": rounded(middle @ weight.T + bias), "dbias": rounded(flat.sum(0))}
    return found | {"dweight": rounded(flat.T @ middle.reshape(-1, x.shape[-1]))}


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("backend", ["numpy", *BACKENDS])
def test_result_and_gradients(backend: str, number: int) -> None:
    device = None if backend == "numpy" else need(backend)
    if device is not None:
        spare(device, number)
    judge(device, *CASES[number])


@pytest.mark.parametrize(
    ("dtype", "shape", "features"),
    [
        ("bfloat16", (800, 70), 600),
        ("bfloat16", (110, 301), 530),
        ("float32", (97, 300), 70),
        ("float16", (100, 140), 40),
    ],
)
def test_products_of_many_rows_on_a_cpu(dtype: str, shape: tuple[int, ...], features: int) -> None:
    """The weight is packed for all tasks: whole tiles and parts of the summed dimension, and others."""
    judge(need("cpu"), dtype, shape, features)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_left_factors_in_the_order_of_fragments(dtype: str) -> None:
    """All three products through Vulkan on NVIDIA, with tiles that end behind the last row and column."""
    device = need("vulkan")
    if not (device.target.vulkan_on_nvidia and device.target.matrix_units and device.target.compute_units <= 150):
        pytest.skip("only NVIDIA's driver, on units of which these products fill all, takes factors so")
    judge(device, dtype, (2176, 1152), 2112)


def judge(device: Any, dtype: str, shape: tuple[int, ...], features: int) -> None:
    arrays = given(dtype, shape, features)
    other = naive(arrays)
    dy = arrays.pop("dy")
    assert SPEC.gradient is not None
    found, right = run(SPEC, arrays, {}, device), reference(SPEC, arrays, {})
    arrays["dy"] = dy
    found |= run(SPEC.gradient, arrays, {}, device)
    right |= reference(SPEC.gradient, arrays, {})
    for name, exact in right.items():
        single = 1e-5 if name == "y" else 2e-5
        allowed = single if dtype == "float32" else 2 * error(other[name], exact)
        assert error(found[name], exact) <= allowed, name
