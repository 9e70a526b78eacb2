"""Appends that every device is tested on: rows, caches and places, and NumPy's results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from aule.ops.kvcache import numpy_append
from aule.ops.kvcache.problem import AppendProblem, append_problem
from aule.view import TensorView

STORED: dict[str, Any] = {
    "f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i8": np.int8, "e4m3": np.uint8, "i32": np.int32,
}  # fmt: skip
VALUES = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}
QUANTISED = {None: None, "int8": "i8", "fp8": "e4m3"}


@dataclass(frozen=True)
class Case:
    """Ten tokens of three heads into pages of four."""

    dtype: str
    head_dim: int
    value_dim: int
    quantize: str | None = None
    rotary_dim: int = 0
    interleaved: bool = False
    rope: str = "f32"
    heads_first: bool = False
    """The new rows are a transposed view, and so are the caches (layout "HND")."""
    nonfinite: bool = False
    """Some rows hold Inf, NaN, nothing but zeros, or numbers too small for a scale."""

    def __str__(self) -> str:
        rope = f"-rope{self.rotary_dim}{'i' if self.interleaved else ''}" if self.rotary_dim else ""
        flags = f"{'-hnd' if self.heads_first else ''}{'-nonfinite' if self.nonfinite else ''}"
        return f"{self.dtype}-d{self.head_dim}-{self.value_dim}-{self.quantize}{rope}{flags}"


CASES = [
    Case("f32", 64, 64),
    Case("bf16", 64, 32, rotary_dim=64, heads_first=True),
    Case("f16", 64, 64, rotary_dim=32, interleaved=True, rope="f16"),
    Case("f32", 7, 5, "int8", rotary_dim=6, interleaved=True),
    Case("bf16", 64, 64, "int8", rotary_dim=64, nonfinite=True),
    Case("f32", 48, 16, "fp8", rotary_dim=48, heads_first=True),
    Case("f16", 64, 64, "fp8", nonfinite=True),
]


def view(dtype: str, array: np.ndarray) -> TensorView:
    return TensorView(dtype, array.shape, tuple(step // array.itemsize for step in array.strides), "host", array)


def make(case: Case) -> tuple[AppendProblem, dict[str, TensorView]]:
    """The problem, and views of host arrays."""
    rng = np.random.default_rng(5)
    batch, each, heads, pages, page = 2, 5, 3, 6, 4

    def rows(dim: int) -> TensorView:
        shape = (batch, heads, each, dim) if case.heads_first else (batch, each, heads, dim)
        values = rng.standard_normal(shape).astype(np.float32)
        if case.nonfinite:
            flat = values.reshape(-1, dim)
            flat[0, 1], flat[1, 0], flat[2], flat[3] = np.inf, np.nan, 0.0, 1e-38
            flat[4, 0] = 3e4
        stored = values.astype(VALUES.get(case.dtype, STORED[case.dtype])).view(STORED[case.dtype])
        return view(case.dtype, stored.swapaxes(1, 2) if case.heads_first else stored)

    def cache(*last: int, dtype: str) -> TensorView:
        shape = (pages, heads, page, *last) if case.heads_first else (pages, page, heads, *last)
        made = np.zeros(shape, STORED[dtype])
        return view(dtype, made.swapaxes(1, 2) if case.heads_first else made)

    stored = QUANTISED[case.quantize] or case.dtype
    slots = rng.permutation(pages * page)[: batch * each].astype(np.int32)
    slots[[3, 7]] = -1, pages * page  # neither is written
    views = {
        "k": rows(case.head_dim),
        "v": rows(case.value_dim),
        "k_cache": cache(case.head_dim, dtype=stored),
        "v_cache": cache(case.value_dim, dtype=stored),
        "places": view("i32", np.stack([slots, rng.integers(0, 9, batch * each).astype(np.int32)])),
    }
    if case.quantize is not None:
        views |= {f"{x}_scale": cache(dtype="f32") for x in "kv"}
    if case.rotary_dim:
        angles = rng.standard_normal((9, case.rotary_dim // 2))
        views |= {
            name: view(case.rope, f(angles).astype(STORED[case.rope])) for name, f in (("cos", np.cos), ("sin", np.sin))
        }
    return append_problem("append", views, interleaved=case.interleaved), views


def expected(problem: AppendProblem, views: dict[str, TensorView]) -> dict[str, np.ndarray]:
    """The caches after the append, by NumPy."""
    fresh = {name: v if not written(name) else view(v.dtype, v.storage.copy(order="K")) for name, v in views.items()}
    numpy_append.append(problem, fresh)
    return {name: v.storage for name, v in fresh.items() if written(name)}


def written(name: str) -> bool:
    return name.endswith(("_cache", "_scale"))


def compare(case: Case, found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Assert that caches hold the same numbers.

    Rows that are neither rotated nor quantised are the same bits. Rotated ones may differ by a rounding, and where that
    falls on a tie a quantised number by one step of its type.
    """
    for name, array in found.items():
        dtype = QUANTISED[case.quantize] or case.dtype
        x, y = array, wanted[name]
        if name.endswith("_scale"):
            np.testing.assert_allclose(x, y, rtol=1e-6)
        elif case.quantize == "int8":
            assert np.abs(x.astype(int) - y.astype(int)).max() <= 1
            assert (x != y).mean() < 0.01
        elif case.quantize == "fp8":
            assert np.abs(_ordered(x) - _ordered(y)).max() <= 1
            assert (x != y).mean() < 0.01
        elif name == "k_cache" and case.rotary_dim:
            kind = VALUES.get(dtype, STORED[dtype])
            x, y = (a.copy().view(kind).astype(np.float64) for a in (x, y))
            bits = {"f32": 23, "f16": 10, "bf16": 7}[dtype]
            np.testing.assert_allclose(
                x, y, rtol=2.0 ** (1 - bits), atol=4 * 2.0**-bits * (2.0**-16 if dtype == "f32" else 1)
            )
        else:
            np.testing.assert_array_equal(x, y)


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Bits of fp8 as integers in the order of the numbers."""
    size = (bits & 0x7F).astype(int)
    return np.where(bits & 0x80, -size, size)
