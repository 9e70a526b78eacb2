"""The kernels of a cache on the interpreter with the sanitizer on, and through every compiler found."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import kvcache_cases as cases
import ml_dtypes
import numpy as np
import pytest
import test_fragment_compiles as compiles

from aule.engine.kvcache import words
from aule.ir.interpret import interpret
from aule.ir.verify import verify
from aule.ops.kvcache import numpy_append
from aule.ops.kvcache.plan import plan_append, plan_copy
from aule.ops.shared.plan import Plan, Step
from aule.target import Target

TARGETS = {
    "subgroups": Target("vulkan", subgroup_size=8, subgroup_sizes=(8,), max_threads=64, int64=True, max_buffers=32),
    "no-subgroups": Target("webgpu", max_threads=64, max_buffers=8),
    "cpu": Target("cpu", compute_units=2, max_buffers=32),
}


def run(plan: Plan, target: Target, memory: dict[str, Any]) -> None:
    for step in plan.steps:
        kernel = step.build(step.config, target)
        verify(kernel)
        values = {f"{name}_ptr": array for name, array in memory.items()} | dict(step.scalars)
        size = target.subgroup_size or 32
        interpret(kernel, step.grid, [values[p.name] for p in kernel.params], subgroup_size=size)


def flat(view: cases.TensorView) -> np.ndarray:
    """The memory that a view lies in, in its own order; scales by their bits, as the kernel has them."""
    array = view.storage
    base = array.base if array.base is not None and not array.flags.c_contiguous else array
    assert base.flags.c_contiguous and base.size == array.size
    return base.reshape(-1)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_append(case: cases.Case, target: str) -> None:
    problem, views = cases.make(case)
    wanted = cases.expected(problem, views)
    plan = plan_append(problem, views, TARGETS[target])
    buffers = 5 + (2 if case.quantize else 0) + (2 if case.rotary_dim else 0)
    assert len(plan.steps) == (1 if buffers <= TARGETS[target].max_buffers else 2)
    memory = {n: flat(v).view(np.uint32) if n.endswith("_scale") else flat(v) for n, v in views.items()}
    run(plan, TARGETS[target], memory)
    cases.compare(case, {name: v.storage for name, v in views.items() if cases.written(name)}, wanted)


def test_quantised_rows_are_as_near_as_they_can_be() -> None:
    rows = np.random.default_rng(1).standard_normal((500, 64)).astype(np.float32) * np.float32(7)
    rows[0] = np.linspace(-1e-3, 448, 64)
    for kind, step in (("int8", 0.5 / 127), ("fp8", 2.0**-4)):
        coded, scales = numpy_append.quantised(rows, kind)
        values = coded.view(ml_dtypes.float8_e4m3fn).astype(np.float32) if kind == "fp8" else coded.astype(np.float32)
        largest = np.abs(rows).max(-1, keepdims=True)
        error = np.abs(values * scales[:, None] - rows)
        # int8 has steps of one size; those of fp8 grow with the number, and are 2**-9 of the scale at the least.
        bound = step * largest if kind == "int8" else np.maximum(step * np.abs(rows), 2.0**-10 / 448 * largest)
        assert (error <= bound * 1.001).all()
    exact = (rows / np.abs(rows).max(-1, keepdims=True) * np.float32(448)).astype(np.float32)
    np.testing.assert_array_equal(numpy_append._e4m3(exact), exact.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_every_fp8_number_and_every_tie() -> None:
    numbers = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    between = (numbers[:-1] + numbers[1:]) / np.float32(2)
    values = np.concatenate([numbers, -numbers, between, -between])
    np.testing.assert_array_equal(numpy_append._e4m3(values), values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("target", TARGETS)
def test_copy(target: str) -> None:
    rng = np.random.default_rng(2)
    shapes = {"k_cache": (np.uint8, 2 * 3 * 5), "v_cache": (np.uint8, 4096 * 3), "k_scale": (np.uint32, 6)}
    arrays = {name: rng.integers(0, 255, (3, 5, n)).astype(kind) for name, (kind, n) in shapes.items()}
    pairs = np.array([[0, 3], [0, 4], [2, 1]], np.int32)
    wanted = {name: array.copy() for name, array in arrays.items()}
    numpy_append.copy_pages(pairs, wanted)
    plan = plan_copy(len(pairs), {name: words(array) for name, array in arrays.items()}, TARGETS[target])
    run(plan, TARGETS[target], {"pairs": pairs.reshape(-1), **{n: a.reshape(-1) for n, a in arrays.items()}})
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, wanted[name])
        assert (array[:, 3] == array[:, 0]).all() and (array[:, 1] == array[:, 2]).all()


def test_large_pools_have_64_bit_indices() -> None:
    problem, views = cases.make(cases.CASES[0])
    cache = views["k_cache"]
    far = cases.TensorView(cache.dtype, (1 << 26, *cache.shape[1:]), cache.strides, "host", None)
    (step,) = plan_append(problem, views | {"k_cache": far, "v_cache": far}, TARGETS["subgroups"]).steps
    assert step.config.index64 and step.scalars["slots"] == 1 << 28
    (small,) = plan_append(problem, views, TARGETS["subgroups"]).steps
    assert not small.config.index64
    memory = {name: flat(view) for name, view in views.items()}
    wanted = cases.expected(problem, views)
    wide = Step(step.config, step.build, small.grid, small.scalars)
    run(Plan((wide,)), TARGETS["subgroups"], memory)
    np.testing.assert_array_equal(views["k_cache"].storage, wanted["k_cache"])


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_ptx_moves_whole_vectors_and_spills_nothing(arch: str, tmp_path: Path) -> None:
    target = compiles.target(arch)
    for case in (cases.CASES[1], cases.CASES[4], cases.CASES[6]):
        problem, views = cases.make(case)
        for step in plan_append(problem, views, target).steps:
            text, spilled = compiles.assemble(step.build(step.config, target), target, tmp_path)
            assert spilled == 0
            assert "ld.global.nc.v4.b32" in text  # eight halves at once
            assert ("st.global.v2.b32" if case.quantize else "st.global.v4.b32") in text
    (copy,) = plan_copy(1, {"k_cache": words(np.zeros((1, 2, 64), np.uint16))}, target).steps
    text, spilled = compiles.assemble(copy.build(copy.config, target), target, tmp_path)
    assert spilled == 0 and "ld.global.v4.b32" in text and "st.global.v4.b32" in text
