"""Trials of row operations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aule.ops.attention.reference import largest_error, unit_in_last_place
from aule.ops.catalogue import CATALOGUE
from aule.ops.shared.elements import as_float
from aule.ops.shared.spec import Call, OpSpec
from aule.ops.softmax.dropout import seed_words
from aule.view import TensorView, contiguous_strides
from fuzzing.trial import Array, Buffer, Name, Step, Trial, Wanted, buffer, names

Case = dict[str, Any]


def floats(rng: np.random.Generator, shape: tuple[int, ...], kind: str, dtype: str) -> Array:
    """Random rows of a kind."""
    values = rng.standard_normal(shape)
    if kind == "large":
        values *= 30.0 if dtype == "f16" else 1000.0
    elif kind == "offset":
        values = np.round(values * 4) + 64.0
    elif kind == "tiny":
        values *= 1e-3 if dtype == "f16" else 1e-9
    elif kind == "constant":
        values[...] = 0.75
    elif kind == "zero":
        values[...] = 0.0
    elif kind == "nonfinite" and values.size:
        values.reshape(-1)[rng.integers(0, values.size, 2)] = rng.choice([np.nan, np.inf, -np.inf], 2)
    return values


def arrays_of(rng: np.random.Generator, case: Case) -> dict[str, Buffer]:
    """The operands of a call by name."""
    op, shape, dtype = case["op"], tuple(case["shape"]), case["dtype"]
    vector = "f32" if case["vector"] == "f32" and dtype != "f64" else dtype
    found: dict[str, Buffer] = {}
    for operand in CATALOGUE[op].operands:
        name = operand.name
        if name in case["without"] or name == "seed":
            continue
        if name in ("cos", "sin", "position_ids"):
            if name == "cos":
                found |= tables(rng, case)
        elif name == "mask":
            if case["mask"] is not None:
                found[name] = mask(rng, case)
        elif name == "target":
            target = rng.integers(0, shape[-1], shape[:-1])
            ignored = rng.random(shape[:-1]) < 0.2
            found[name] = buffer(np.where(ignored, case["options"]["ignore_index"], target), case["ids"])
        elif op == "layer_norm_linear" and name == "weight":
            values = rng.standard_normal((case["features"], shape[-1])) * shape[-1] ** -0.5
            found[name] = buffer(values, dtype, case["layout"] if case["layout"] in ("step", "gap") else "contiguous")
        elif name in ("weight", "bias", "weight_norm", "bias_norm"):
            count = case["features"] if op == "layer_norm_linear" and name == "bias" else shape[-1]
            found[name] = buffer(rng.standard_normal(count), vector, "step" if case["layout"] == "step" else "")
        else:
            found[name] = buffer(floats(rng, shape, case["values"], dtype), dtype, case["layout"])
    return found


def tables(rng: np.random.Generator, case: Case) -> dict[str, Buffer]:
    """Cosines, sines and position ids."""
    shape, pairs = tuple(case["shape"]), case["pairs"]
    if case["ids"] is not None:
        positions = 11
        ids = rng.integers(0, positions, (shape[0], shape[-2]) if len(shape) == 4 else shape[-2:-1])
        lead: tuple[int, ...] = (positions,)
    else:
        lead = (shape[0], shape[-2]) if case["tables"] == "batch" and len(shape) == 4 else shape[-2:-1]
    angles = rng.uniform(-3, 3, (*lead, pairs))
    if case["tables"] == "twice" and 4 * pairs > shape[-1]:
        repeated = np.repeat(angles, 2, -1) if case["options"]["interleaved"] else np.concatenate([angles, angles], -1)
        angles = repeated
    found = {"cos": buffer(np.cos(angles), "f32"), "sin": buffer(np.sin(angles), "f32")}
    return found if case["ids"] is None else found | {"position_ids": buffer(ids, case["ids"])}


def mask(rng: np.random.Generator, case: Case) -> Buffer:
    shape = tuple(case["shape"])
    full = shape if len(shape) < 3 else (1, *shape[1:])
    if case["mask"] == "bool":
        return buffer(rng.random(full) < 0.7, "bool")
    values = rng.standard_normal(full)
    values[rng.random(full) < 0.2] = -np.inf
    return buffer(values, "f32" if case["mask"] == "f32" else case["dtype"])


def rows(case: Case) -> Trial:
    """A row operation, and its gradients through torch."""
    rng = np.random.default_rng(case["seed"])
    spec = CATALOGUE[case["op"]]
    arrays = arrays_of(rng, case)
    given: Case = {**case["options"], "backend": case["backend"]}
    if case.get("inplace"):
        given["inplace"] = True
    if case["options"].get("dropout_p"):
        given["seed"] = case["seed"]
    args = tuple(Name(x.name) if x.name in arrays else None for x in spec.operands if x.name != "seed")
    if case["op"] in ("rope", "rms_norm_rope", "softmax_dropout"):  # these take the last ones by keyword
        given |= {x: Name(x) for x in ("position_ids", "mask") if x in arrays}
        args = args[:-1]
    results = ("loss",) if case["op"] == "cross_entropy" else spec.outputs
    trial = Trial(arrays, [Step(results, f"aule.{case['op']}", args, given)], dict, case["front"], case["backend"])
    trial.refused = case["dtype"] == "f64" and case["backend"] not in ("cpu", "numpy")
    if case.get("inplace"):
        trial.written = ("x",)
        if 0 in arrays["x"].strides and arrays["x"].flat.size < math.prod(case["shape"]):
            trial.refused = True  # elements share memory
    if case["grad"] and case["values"] != "nonfinite":
        trial.leaves = tuple(name for name in spec.gradients or {} if name in arrays)
        shapes = call_of(spec, case, arrays).outputs
        for name in results:
            trial.arrays[f"d_{name}"] = buffer(rng.standard_normal(shapes[name].shape), case["dtype"])
        grads = tuple(f"grad_{name}" for name in trial.leaves)
        douts = names(f"d_{name}" for name in results)
        trial.steps.append(Step(grads, "torch.autograd.grad", (names(results), names(trial.leaves), douts)))
    trial.wanted = lambda: expected(spec, case, trial)
    return trial


def call_of(spec: OpSpec, case: Case, arrays: dict[str, Buffer]) -> Call:
    """The call as the package checks it."""
    operands = {operand.name for operand in spec.operands}
    views = {name: one.view for name, one in arrays.items() if name in operands}
    if case["options"].get("dropout_p"):
        words = seed_words(case["seed"])
        views["seed"] = TensorView("u32", words.shape, contiguous_strides(words.shape), "host", words)
    options = {option.name: case["options"].get(option.name, option.default) for option in spec.options}
    return spec.call(views, options)


def expected(spec: OpSpec, case: Case, trial: Trial) -> dict[str, Wanted]:
    """Results and gradients in float64, with the bounds that the package's tests have."""
    call = call_of(spec, case, trial.arrays)
    dtype = case["dtype"]
    values = {name: as_float(view.storage, view.dtype) for name, view in call.views.items()}
    exact = dict(values)
    total: Array | None = None
    if "residual" in exact:  # the sum is stored, and normalised, rounded
        total = exact["x"].astype(np.float64) + exact.pop("residual")
        exact["x"] = as_float(buffer(total, dtype).view.storage, dtype)
    right = spec.reference(call, exact)
    if total is not None:
        right["h"] = total
    slack = rounding(case, exact)
    wanted, naive = {}, naive_linear(case, exact, right)
    for name in trial.steps[0].to:
        limit = max(bound(dtype, right[name], False, slack), naive.get(name, 0.0))
        if name == "y":
            limit += centring(case, exact)
        wanted[name] = Wanted(right[name], limit, dtype, loose=case["values"] == "nonfinite")
    if trial.leaves:
        wanted |= gradients(spec, case, trial, call, exact | right)
    return wanted


def bound(dtype: str, exact: Array, gradient: bool, slack: float = 0.0, at_least: float = 0.0) -> float:
    """The largest error, as `tests/fused_cases.py` has it."""
    finite = np.abs(exact[np.isfinite(exact)])
    largest = max(float(np.max(finite, initial=0.0)), at_least)
    relative = {"f64": 1e-12, "f32": 2e-5 if gradient else 1e-5}.get(dtype)
    step = unit_in_last_place(largest, dtype) if relative is None else relative * largest
    return step + slack * largest


def rounding(case: Case, arrays: dict[str, Array]) -> float:
    """What rounding large scores of a softmax, or a sum of rows, adds to a relative error."""
    if case["op"] != "softmax_dropout" or case["values"] not in ("large", "offset"):
        return 0.0
    largest = float(np.max(np.abs(arrays["x"].astype(np.float64)), initial=0.0)) * abs(case["options"]["scale"])
    return 2 * (2.0**-52 if case["dtype"] == "f64" else 2.0**-23) * largest


def centring(case: Case, arrays: dict[str, Array]) -> float:
    """What rounding the mean adds to a normalised row: all there is of one whose numbers are equal.

    Layer norms on CPUs subtract the mean of equal numbers exactly.
    """
    exact = case["backend"] in ("cpu", "numpy") and case["op"] != "layer_norm_linear"
    if exact or "layer_norm" not in case["op"]:
        return 0.0
    x = arrays["x"].astype(np.float64)
    with np.errstate(all="ignore"):
        scaled = np.abs(x).max(-1, initial=0.0) / np.sqrt(x.var(-1) + case["options"]["eps"])
    weight = np.abs(arrays.get("weight", np.ones(1)).astype(np.float64))
    if case["op"] == "layer_norm_linear":
        weight = weight.sum(-1) * np.max(np.abs(arrays.get("weight_norm", np.ones(1)).astype(np.float64)))
    step = 2.0**-52 if case["dtype"] == "f64" else 2.0**-23
    error = 2 * step * float(np.max(weight, initial=0.0)) * float(np.max(scaled[np.isfinite(scaled)], initial=0.0))
    return error + (unit_in_last_place(error, case["dtype"]) if case["dtype"] in ("f16", "bf16") else 0.0)


def naive_linear(case: Case, arrays: dict[str, Array], exact: dict[str, Array]) -> dict[str, float]:
    """Twice the errors of `layer_norm_linear` done in two steps, each rounded to the arrays' precision; and what
    rounding the terms of its sums costs, where these cancel."""
    if case["op"] != "layer_norm_linear":
        return {}

    def rounded(values: Array) -> Array:
        return as_float(buffer(values, case["dtype"]).view.storage, case["dtype"]).astype(np.float64)

    wide = {name: array.astype(np.float64) for name, array in arrays.items() if array.dtype.kind == "f"}
    x, weight = wide["x"], wide["weight"]
    eps = case["options"]["eps"]
    centred = x - x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt(np.mean(centred**2, -1, keepdims=True) + eps)
    normal = centred * scale
    middle = rounded(normal * wide.get("weight_norm", 1.0) + wide.get("bias_norm", 0.0))
    found = {"y": rounded(middle @ weight.T + wide.get("bias", 0.0))}
    terms = {"y": np.abs(middle) @ np.abs(weight.T) + np.abs(wide.get("bias", 0.0))}
    if "dy" in wide:
        dy = wide["dy"]
        rows, flat = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1]), middle.reshape(-1, x.shape[-1])
        outer = rounded(dy @ weight)
        inner = outer * wide.get("weight_norm", 1.0)
        across = inner - inner.mean(-1, keepdims=True) - normal * np.mean(inner * normal, -1, keepdims=True)
        axes = tuple(range(x.ndim - 1))
        found |= {
            "dx": rounded(across * scale), "dweight_norm": rounded(np.sum(outer * normal, axes)),
            "dbias_norm": rounded(np.sum(outer, axes)), "dweight": rounded(rows.T @ flat),
            "dbias": rounded(rows.sum(0)),
        }  # fmt: skip
        sizes = np.abs(dy) @ np.abs(weight)
        terms |= {
            "dx": sizes * scale, "dweight_norm": np.sum(sizes * np.abs(normal), axes),
            "dbias_norm": np.sum(sizes, axes), "dweight": np.abs(rows.T) @ np.abs(flat), "dbias": np.abs(rows).sum(0),
        }  # fmt: skip
    step = 2.0**-52 if case["dtype"] == "f64" else 2.0**-23
    return {
        name: 2 * largest_error(found[name], right) + 4 * step * float(np.max(terms[name], initial=0.0))
        for name, right in exact.items()
        if name in found
    }


def gradients(spec: OpSpec, case: Case, trial: Trial, call: Call, known: dict[str, Array]) -> dict[str, Wanted]:
    """Expected gradients of the leaves."""
    gradient = spec.gradient
    assert gradient is not None
    dtype = case["dtype"]
    given: dict[str, Any] = dict(known)
    if "h" in given:
        given["h"] = given["x"]  # rounded
    for name in trial.steps[0].to:
        given[f"d{name}"] = as_float(trial.arrays[f"d_{name}"].view.storage, dtype)
    operands = {operand.name: operand for operand in gradient.operands}
    arrays = {name: given[name] for name in operands if name in given and not operands[name].spares}
    views = {}
    for name, array in arrays.items():
        kind = {"f": "f64", "i": "i64", "b": "bool", "u": "u32"}[array.dtype.kind]
        wide = {"f64": np.float64, "i64": np.int64}.get(kind, array.dtype)
        arrays[name] = array = np.array(array, wide, order="C")
        views[name] = TensorView(kind, array.shape, contiguous_strides(array.shape), "host", array)
    options = {option.name: case["options"].get(option.name, option.default) for option in gradient.options}
    exact = gradient.reference(gradient.call(views, options), arrays)
    incoming = max(float(np.max(np.abs(given[f"d{name}"]), initial=0.0)) for name in trial.steps[0].to)
    wanted, naive = {}, naive_linear(case, arrays, exact)
    for leaf in trial.leaves:
        name = (spec.gradients or {})[leaf]
        found = exact[name]
        kind = trial.arrays[leaf].dtype
        limit = max(bound(kind, found, True, rounding(case, known), incoming), naive.get(name, 0.0))
        wanted[f"grad_{leaf}"] = Wanted(found.reshape(trial.arrays[leaf].shape), limit, kind)
    return wanted
