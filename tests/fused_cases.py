"""Calls of row operations that every backend runs, with expected results and tolerances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aule.engine.memory import STORED, host_view
from aule.ops.attention.reference import unit_in_last_place
from aule.ops.catalogue import CATALOGUE
from aule.ops.shared.elements import as_float, stored
from aule.ops.shared.spec import Call, OpSpec
from aule.ops.softmax.dropout import seed_words

Arrays = dict[str, tuple[np.ndarray, str]]
"""Stored elements and dtype of each operand."""


@dataclass(frozen=True)
class Case:
    """A call of an op on rows of a shape, with its optional operands."""

    op: str
    shape: tuple[int, ...]
    dtype: str = "f32"
    options: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    layout: str = ""
    """``rows`` takes every other row, ``columns`` every other column, ``odd`` starts one column late, ``heads`` has the
    axis of heads behind that of positions."""
    pairs: int = 0
    """Columns of cos and sin."""
    ids: str = ""
    """dtype of position ids."""
    mask: str = ""
    """dtype of a mask."""

    def __str__(self) -> str:
        parts = [self.op, "x".join(map(str, self.shape)), self.dtype, self.layout, self.ids, self.mask]
        parts += [f"{k}={v}" for k, v in self.options.items()] + [f"no-{name}" for name in self.without]
        return "-".join(part for part in parts if part)


CASES = (
    Case("rms_norm", (5, 64), "bf16"),
    Case("rms_norm", (3, 2, 1000), "f16", layout="rows"),
    Case("rms_norm", (7, 1), "f32"),
    Case("rms_norm", (3, 20001), "f32", without=("weight",)),
    Case("layer_norm", (4, 1536), "bf16", layout="odd"),
    Case("layer_norm", (9, 37), "f32", layout="columns"),
    Case("layer_norm", (3, 4096), "f32", without=("bias",)),
    Case("residual_rms_norm", (5, 768), "bf16"),
    Case("residual_layer_norm", (6, 129), "f32"),
    Case("swiglu", (5, 320), "bf16"),
    Case("swiglu", (3, 66), "f32", without=("up",)),
    Case("swiglu", (16, 1536), "bf16"),
    Case("geglu", (4, 257), "f16", {"approximate": "none"}, layout="rows"),
    Case("geglu", (3, 1024), "f32", {"approximate": "tanh"}),
    Case("rope", (2, 4, 5, 64), "bf16", {"interleaved": False}, layout="heads", pairs=32),
    Case("rope", (2, 3, 5, 20), "f32", {"interleaved": True}, pairs=5, ids="i64"),
    Case("rms_norm_rope", (1, 6, 4, 96), "bf16", {"interleaved": True}, pairs=48),
    Case("rms_norm_rope", (2, 2, 3, 40), "f32", {"interleaved": False}, pairs=12, ids="i32"),
    Case("softmax_dropout", (2, 3, 5, 200), "f32", {"dropout_p": 0.3, "causal": True}),
    Case("softmax_dropout", (2, 2, 4, 61), "bf16", {"scale": 0.3}, mask="f32"),
    Case("softmax_dropout", (2, 2, 3, 62), "bf16", {"dropout_p": 0.2}),
    Case("softmax_dropout", (1, 2, 3, 1024), "f16", {"dropout_p": 0.5}, mask="bool"),
)


def values(shape: tuple[int, ...], dtype: str, seed: int, layout: str = "") -> np.ndarray:
    """Random elements of a dtype, as they are stored, in a layout."""
    rng = np.random.default_rng([seed, *shape])
    if layout == "heads":
        batch, heads, seq, dim = shape
        return values((batch, seq, heads, dim), dtype, seed).transpose(0, 2, 1, 3)
    if layout == "rows":
        return values((*shape[:-2], 2 * shape[-2], shape[-1]), dtype, seed)[..., ::2, :]
    if layout == "columns":
        return values((*shape[:-1], 2 * shape[-1]), dtype, seed)[..., ::2]
    if layout == "odd":
        return values((*shape[:-1], shape[-1] + 1), dtype, seed)[..., 1:]
    numbers = rng.standard_normal(shape).astype(np.float64 if dtype == "f64" else np.float32)
    return stored(numbers, dtype).astype(STORED[dtype], copy=False)


def operands(case: Case) -> Arrays:
    """The arrays of a call, optional ones included unless the case leaves them out."""
    found: Arrays = {}
    for i, operand in enumerate(CATALOGUE[case.op].operands):
        name = operand.name
        if name in case.without:
            continue
        if name in ("cos", "sin"):
            angles = np.random.default_rng(3).standard_normal((case.shape[-2], case.pairs)).astype(np.float32)
            found[name] = (np.cos(angles) if name == "cos" else np.sin(angles), "f32")
        elif name == "position_ids":
            if case.ids:
                kind = np.int64 if case.ids == "i64" else np.int32
                ids = np.random.default_rng(4).integers(0, case.shape[-2], (case.shape[0], case.shape[-2]))
                found[name] = (ids.astype(kind), case.ids)
        elif name == "mask":
            if case.mask == "bool":
                keep = np.random.default_rng(5).random((case.shape[-2], case.shape[-1])) < 0.7
                keep[-1] = False  # a row in which nothing counts
                found[name] = (keep, "bool")
            elif case.mask:
                found[name] = (values((case.shape[0], 1, 1, case.shape[-1]), case.mask, 6), case.mask)
        elif name == "seed":
            if case.options.get("dropout_p"):
                found[name] = (seed_words(0x1234_5678_9ABC_DEF0), "u32")
        elif name in ("weight", "bias"):
            found[name] = (values(case.shape[-1:], case.dtype, i), case.dtype)
        else:
            found[name] = (values(case.shape, case.dtype, i, case.layout), case.dtype)
    return found


def options(spec: OpSpec, case: Case) -> dict[str, Any]:
    return {option.name: case.options.get(option.name, option.default) for option in spec.options}


def bound(spec: OpSpec, arrays: Arrays, given: Mapping[str, Any]) -> Call:
    return spec.call({name: host_view(dtype, array) for name, (array, dtype) in arrays.items()}, given)


def right(spec: OpSpec, call: Call) -> dict[str, np.ndarray]:
    """Expected results in float64. A residual's sum is rounded before it is normalised, since it is stored rounded."""
    arrays = {name: as_float(view.storage, view.dtype) for name, view in call.views.items()}
    if "residual" in arrays and spec.name in CATALOGUE:
        total = arrays["x"].astype(np.float64) + arrays.pop("residual")
        dtype = call.problem.dtype
        arrays["x"] = as_float(stored(total.astype(np.float32), dtype).astype(STORED[dtype]), dtype)
        return {**spec.reference(call, arrays), "h": total}
    return spec.reference(call, arrays)


def gradient_call(spec: OpSpec, arrays: Arrays, call: Call, outs: Mapping[str, np.ndarray], case: Case) -> Call:
    """The call of an op's gradient, on the op's own results."""
    gradient = spec.gradient
    assert gradient is not None
    known = dict(arrays) | {name: (outs[name], result.dtype) for name, result in call.outputs.items()}
    for i, (name, result) in enumerate(call.outputs.items()):
        known[f"d{name}"] = (values(result.shape, result.dtype, 20 + i), result.dtype)
    given = {operand.name: known[operand.name] for operand in gradient.operands if operand.name in known}
    return bound(gradient, given, options(gradient, case))


def kept_gradient(case: Case, run: Callable[[OpSpec, Call], Mapping[str, np.ndarray]]) -> tuple[OpSpec, Call]:
    """An op's gradient with all results saved for it, and its call; some rows are zero."""
    spec, arrays = CATALOGUE[case.op], operands(case)
    assert spec.gradient is not None
    for array, _ in arrays.values():
        if array.ndim > 1:
            array[3:5] = 0
    given = options(spec, case)
    call = spec.call(bound(spec, arrays, given).views, given, (*spec.outputs, *spec.saved_outputs))
    return spec.gradient, gradient_call(spec, arrays, call, run(spec, call), case)


def judge(call: Call, found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], gradient: bool) -> None:
    """Assert that every output is within tolerance of the reference, with NaN and infinities in the same places.

    Errors of gradients are relative to the incoming gradients if those are larger: with one column, or one that
    counts, a gradient is the difference of two of them.
    """
    for name, want in expected.items():
        dtype = call.outputs[name].dtype
        got = as_float(np.ascontiguousarray(found[name]), dtype).astype(np.float64)
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(got), finite, err_msg=name)
        largest = float(np.max(np.abs(want[finite]), initial=0.0))
        if gradient:
            incoming = as_float(call.views["dy"].storage, call.views["dy"].dtype)
            largest = max(largest, float(np.max(np.abs(incoming), initial=0.0)))
        limit = {"f64": 1e-12, "f32": 2e-5 if gradient else 1e-5}.get(dtype)
        tolerance = unit_in_last_place(largest, dtype) if limit is None else limit * largest
        error = float(np.max(np.abs(got[finite] - want[finite]), initial=0.0))
        assert error <= tolerance, f"{name}: error {error:.3g} above {tolerance:.3g}"
