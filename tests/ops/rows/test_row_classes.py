"""Row operations have few kernels, whatever lengths rows have, and rows of all lengths of a class are right."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import fused_cases
import numpy as np
import pytest
from interpreted_rows import judged, run
from op_plans import interpreted
from repository import ROOT

from aule.codegen import TARGETS as GENERIC
from aule.engine.memory import host_view
from aule.engine.row_ops import result_views
from aule.ops.catalogue import CATALOGUE
from aule.ops.rows.classes import RowClass, row_class
from aule.ops.shared.spec import OpSpec
from aule.ops.softmax.dropout import kept, seed_words
from aule.target import Target
from aule.view import TensorView, contiguous_strides

MOST = 12
"""Kernels of an op, dtype and device."""
LONGEST = 1 << 16


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TARGETS: dict[str, Target] = tool("kernel_targets").TARGETS


def lengths(count: int, longest: int = LONGEST) -> list[int]:
    """Ends of classes and their neighbours, multiples of 256, and random lengths, half of them short."""
    rng = random.Random(count)
    ends = [1 << bit for bit in range(longest.bit_length())]
    found = {n for end in ends for n in (end - 8, end - 1, end, end + 1, end + 8, 3 * end)}
    found |= {256 * i for i in range(1, 64, 7)} | {1000, 5120, 50257, 50304}
    found = {n for n in found if 1 <= n <= longest}
    while len(found) < count:
        found.add(rng.choice((rng.randint(1, longest), int(longest ** rng.random()))))
    return sorted(found)


def view(dtype: str, *shape: int) -> TensorView:
    return TensorView(dtype, shape, contiguous_strides(shape), "device", None)


def operands(op: str, dtype: str, rows: int, length: int) -> dict[str, TensorView]:
    if "rope" in op:
        tables = {name: view("f32", rows, length // 2) for name in ("cos", "sin")}
        return {"x": view(dtype, 1, 8, rows, length), **tables} | (
            {"weight": view(dtype, length)} if "norm" in op else {}
        )
    if op == "cross_entropy":
        return {"logits": view(dtype, rows, length), "target": view("i64", rows)}
    if "glu" in op:
        return {"gate": view(dtype, rows, length), "up": view(dtype, rows, length)}
    if op == "softmax_dropout":
        return {"x": view(dtype, rows, length), "seed": view("u32", 2)}
    found = {"x": view(dtype, rows, length)} | ({"residual": view(dtype, rows, length)} if "residual" in op else {})
    vectors = ("weight",) if "rms" in op else ("weight", "bias")
    return found | {name: view(dtype, length) for name in vectors}


def planned(op: str, dtype: str, rows: int, length: int, target: Target) -> Iterator[tuple[str, Any]]:
    """The kernels of an op and of its gradient, with all that is saved for it."""
    spec, given = CATALOGUE[op], operands(op, dtype, rows, length)
    options = {option.name: option.default for option in spec.options}
    if op == "softmax_dropout":
        options["dropout_p"] = 0.1
    call = spec.call(given, options, spec.results)
    yield from steps(spec, call, target)
    assert spec.gradient is not None
    results = result_views(call)
    known = given | results | {f"d{name}": x for name, x in results.items()}
    wanted = {operand.name for operand in spec.gradient.operands}
    yield from steps(
        spec.gradient, spec.gradient.call({n: x for n, x in known.items() if n in wanted}, options), target
    )


def steps(spec: OpSpec, call: Any, target: Target) -> Iterator[tuple[str, Any]]:
    for step in spec.plan(call.problem, {**call.views, **result_views(call)}, target).steps:
        yield spec.name, step.config


def kernels(op: str, dtype: str, target: Target, count: int, rows: int) -> dict[str, set[Any]]:
    """The kernels of an op and its gradient for rows of many lengths; of rotations, heads of many dimensions."""
    found: dict[str, set[Any]] = {}
    used = [2 * n for n in lengths(count, 1024)] if "rope" in op else lengths(count)
    for length in used:
        for name, config in planned(op, dtype, rows, length, target):
            found.setdefault(name, set()).add(config)
    return found


ROW_OPS = [name for name in CATALOGUE if name != "layer_norm_linear"]
DEVICES = [
    "h200-cuda", "h200-vulkan", "sm80-cuda", "rdna3-vulkan", "dg2-opencl", "apple-metal", "lavapipe-vulkan",
    "pocl-opencl", "portable-webgpu", "cpu-avx512", "cpu-neon",
]  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_an_op_has_few_kernels(name: str) -> None:
    """At most a dozen for an op, a dtype and a device."""
    for number, op in enumerate(ROW_OPS):
        dtype = ("bf16", "f32")[(number + DEVICES.index(name)) % 2]
        for direction, configs in kernels(op, dtype, TARGETS[name], 120, 1000).items():
            assert len(configs) <= MOST, (direction, dtype)


@pytest.mark.parametrize(("op", "rows"), [("layer_norm", 1000), ("residual_rms_norm", 4096)])
def test_three_thousand_lengths(op: str, rows: int) -> None:
    for direction, configs in kernels(op, "bf16", TARGETS["h200-cuda"], 3000, rows).items():
        assert len(configs) <= MOST, direction


def test_which_parts_are_masked() -> None:
    """Those past the longest row of the class before; none if all rows of a class have the same length."""
    target = TARGETS["h200-cuda"]
    longer = row_class(target, "bf16", 5120, 8)
    assert longer == RowClass(8, 6144, 4096) and longer.ragged(3, 256) == 1
    assert row_class(target, "bf16", 6144, 8) == longer  # its length is not compiled in
    exact = row_class(target, "bf16", 2048, 8, "elements")
    assert exact.exact and exact.ragged(4, 128) == 0
    odd = row_class(target, "bf16", 5121, 1)
    assert (odd.width, odd.held) == (1, False)
    assert row_class(target, "bf16", 5122, 2) == odd


# -- right results -----------------------------------------------------------------------------------------------------

SUBGROUPS = replace(GENERIC["ptx"], compute_units=2)
AVX512 = Target("cpu", arch="x86_64", extensions=("avx2", "avx512f", "fma"), compute_units=2)


@pytest.mark.parametrize("target", [SUBGROUPS, AVX512], ids=["gpu", "cpu"])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "residual_layer_norm", "softmax_dropout", "swiglu"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_lengths_of_a_class(op: str, dtype: str, target: Target) -> None:
    """From a class's shortest row to its longest, with and without a part of a vector at the end."""
    for length in (1, 3, 15, 16, 17, 31, 40, 120, 1032, 1288):
        judged(fused_cases.Case(op, (3, length), dtype), target)


@pytest.mark.parametrize("offset", [0.0, 300.0])
@pytest.mark.parametrize("length", [136, 1032, 2560, 5000])
def test_moments_of_unequal_shares(length: int, offset: float) -> None:
    """Threads have different numbers of columns of a row, some none; a large mean or column costs no digits."""
    spec = CATALOGUE["layer_norm"]
    rng = np.random.default_rng(3)
    values = (offset + rng.standard_normal((3, length))).astype(np.float32)
    values[1, 0] = 1000.0
    options = {option.name: option.default for option in spec.options}
    call = spec.call({"x": host_view("f16", values.astype(np.float16))}, options, spec.outputs)
    fused_cases.judge(call, run(spec, call, SUBGROUPS), fused_cases.right(spec, call), gradient=False)


@pytest.mark.parametrize("length", [9, 21, 45, 67, 100])
@pytest.mark.parametrize("target", [AVX512, replace(AVX512, extensions=())], ids=["avx512", "baseline"])
def test_what_is_dropped_at_the_end_of_a_row(length: int, target: Target) -> None:
    """A vector that is moved back to the row's end drops the same weights as any other device."""
    spec = CATALOGUE["softmax_dropout"]
    x = np.zeros((2, 3, length), np.float32)
    arrays = {"x": x, "seed": seed_words(99)}
    found = interpreted(spec, arrays, {"dropout_p": 0.5}, target)["y"]
    heads = np.arange(2)
    np.testing.assert_array_equal(found != 0, kept(0.5, seed_words(99), heads, slice(0, 3), slice(0, length)))
