"""RoPE inside attention: the reference, every engine on the interpreter with the sanitizer on, and errors."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rope_cases
from rope_cases import CASES, Case
from test_backward_interpreted import SHAPES as SIMT
from test_backward_interpreted import run as backward
from test_cpu_interpreted import TARGETS as CPUS
from test_cpu_interpreted import brought, run_plan
from test_forward_interpreted import SMALL_SHAPES, run
from test_forward_interpreted import target as simt_target
from test_fragment_compiles import SPILLED, assemble
from test_fragment_compiles import target as ptx_target
from test_fragment_compiles import views as ptx_views
from test_fragment_interpreted import BACKWARD, WAYS
from test_fragment_interpreted import SHAPES as FRAGMENTS
from test_fragment_interpreted import target as fragment_target

import aule
from aule.engine.memory import STORED
from aule.errors import AuleError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ops.attention import numpy_forward
from aule.ops.attention.build import build_forward
from aule.ops.attention.config import FragmentBackwardConfig
from aule.ops.attention.cpu import plan as cpu_plan
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.reference import attention_reference, compare, expect
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.tile.fragment.shape import FragmentShape
from aule.tile.simt.shape import SimtShape
from aule.view import TensorView, contiguous_strides

HALF = {name: case for name, case in CASES.items() if case.dtype != "f32"}


# -- what is right -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_the_reference_is_attention_on_rotated_rows(case: Case) -> None:
    inputs = rope_cases.make_inputs(case)
    problem, operands = rope_cases.case_problem(case, inputs)
    arrays = rope_cases.reference_arrays(inputs, operands)
    plain, rotated = rope_cases.unrotated(case, problem, inputs)
    for got, right in zip(attention_reference(problem, **arrays), attention_reference(plain, **rotated), strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-12)
    dout = np.random.default_rng(1).standard_normal(problem.out_shape).astype(inputs["q"].dtype)
    found = expect_gradients(problem, dout, **arrays).reference
    right = expect_gradients(plain, dout.astype(np.float64), **rotated).reference
    for name in ("dq", "dk"):
        back = rope_cases.rotated(case, inputs, name, right[name], back=True)
        np.testing.assert_allclose(found[name], back, rtol=0, atol=1e-11)
    np.testing.assert_allclose(found["dv"], right["dv"], rtol=0, atol=1e-11)


def test_positions_are_relative() -> None:
    """With tables of one frequency each, scores depend on the distance alone: shifting all rows changes nothing."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 30, 32), np.float32) for _ in range(3))
    cos, sin = aule.precompute_rope_frequencies(100, 32)
    first = aule.flash_attention(q, k, v, rope=(cos, sin), backend="numpy")
    later = aule.flash_attention(q, k, v, rope=(cos[60:], sin[60:]), backend="numpy")
    np.testing.assert_allclose(first, later, atol=1e-5)
    assert np.abs(first - aule.flash_attention(q, k, v, backend="numpy")).max() > 0.1


def test_frequencies() -> None:
    cos, sin = aule.precompute_rope_frequencies(50, 8, base=100.0)
    angles = np.arange(50)[:, None] / 100.0 ** (np.arange(4) / 4)
    assert cos.dtype == np.float32 and sin.shape == (50, 4)
    np.testing.assert_allclose(cos + 1j * sin, np.exp(1j * angles), atol=1e-6)
    with pytest.raises(InvalidArgumentError, match=r"even head_dim"):
        aule.precompute_rope_frequencies(50, 7)


# -- engines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_numpy(case: Case) -> None:
    inputs = rope_cases.make_inputs(case)
    problem, operands = rope_cases.case_problem(case, inputs)
    out = np.empty(problem.out_shape, STORED[problem.dtype])
    lse = np.empty(problem.out_shape[:3], np.float32)
    numpy_forward.forward(problem, operands, out, lse)
    verdict = compare(problem, out, lse, expect(problem, **rope_cases.reference_arrays(inputs, operands)))
    assert verdict, verdict.message


SIMT_WAYS = (("resident", "tall", False), ("two-rows", "wide", True))
SIMT_RUNS = [(case, *SIMT_WAYS[i % 2]) for i, case in enumerate(CASES.values())]
"""Each case with tiles of its forward and of its backward pass, and whether dQ has a kernel of its own; in turns."""


@pytest.mark.parametrize(("case", "shape", "backward_shape", "deterministic"), SIMT_RUNS, ids=str)
def test_simt(case: Case, shape: str, backward_shape: str, deterministic: bool) -> None:
    inputs = rope_cases.make_inputs(case)
    problem, operands = rope_cases.case_problem(case, inputs, deterministic=deterministic)
    arrays = rope_cases.reference_arrays(inputs, operands)
    out, lse = run(problem, operands, SMALL_SHAPES[shape], simt_target(8))
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message
    found, dout = backward(problem, operands, arrays, SIMT[backward_shape])
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


SHARED = (BACKWARD["two-stages"], FragmentShape(32, 32, 4, 2, False, columns=2))
MATRIX_UNITS: dict[str, tuple[Any, FragmentShape, Any, bool]] = {
    "asynchronous copies": (fragment_target(), FRAGMENTS["two-stages"], SHARED, False),
    "registers": (WAYS["as for Vulkan"][0], FRAGMENTS["one-stage"], BACKWARD["one-stage"], True),
    "warpgroups": (
        fragment_target(), FRAGMENTS["warpgroups"], FragmentShape(64, 64, 4, 4, False, warpgroups=True), False
    ),
}  # fmt: skip
"""Target, forward shape, backward shapes, and whether gradients are deterministic."""


@pytest.mark.parametrize("way", MATRIX_UNITS)
@pytest.mark.parametrize("case", HALF.values(), ids=str)
def test_matrix_units(case: Case, way: str) -> None:
    target, shape, shapes, deterministic = MATRIX_UNITS[way]
    if way != "warpgroups" and (case.dims[0] % 32 or case.dims[1] % 32):
        shapes = BACKWARD["two-blocks-of-rows"]  # columns do not come in pairs
    inputs = rope_cases.make_inputs(case)
    problem, operands = rope_cases.case_problem(case, inputs, deterministic=deterministic)
    arrays = rope_cases.reference_arrays(inputs, operands)
    out, lse = run(problem, operands, shape, target)
    verdict = compare(problem, out, lse, expect(problem, **arrays))
    assert verdict, verdict.message
    found, dout = backward(problem, operands, arrays, shapes, False, target)
    wrong = compare_gradients(problem, found, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


def test_columns_that_are_no_whole_runs_have_no_matrix_units() -> None:
    """Runs of eight columns are rotated at a time there."""
    for rotary, kind in ((64, FragmentShape), (40, SimtShape)):
        case = Case("f16", (64, 64), rotary, (20, 20))
        problem, operands = rope_cases.case_problem(case, rope_cases.make_inputs(case))
        out = TensorView("f16", problem.out_shape, contiguous_strides(problem.out_shape), "host", None)
        views = {"q": operands.q, "k": operands.k, "v": operands.v, "o": out, "cos": operands.cos, "sin": operands.sin}
        plan = plan_forward(problem, views, replace(fragment_target("sm_80"), max_shared_bytes=100_000))  # type: ignore[arg-type]
        assert isinstance(plan.steps[-1].config.shape, kind)


CPU_RUNS = [(case, ("avx512", "baseline")[i % 2]) for i, case in enumerate(CASES.values())]
CPU_RUNS += [(case, "pairs") for case in CASES.values() if case.dtype == "bf16"]


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_ptx(arch: str, tmp_path: Path) -> None:
    """On matrix units rows still come by asynchronous copies, and nothing is spilt that was not before."""
    case, device = Case("bf16", (128, 128), 128, (2048, 2048)), ptx_target(arch)
    problem, operands = rope_cases.case_problem(case, rope_cases.make_inputs(case))
    tables = {"cos": operands.cos, "sin": operands.sin}
    views: dict[str, Any] = ptx_views(replace(problem, heads_kv=problem.heads_q)) | tables
    kernels = [build_forward(plan_forward(problem, views, device).steps[-1].config, device)]
    steps = plan_backward(problem, views, device).steps
    kernels += [step.build(step.config, device) for step in steps if isinstance(step.config, FragmentBackwardConfig)]
    for kernel in kernels:
        text, spilled = assemble(kernel, device, tmp_path)
        products = text.count("wgmma.mma_async") > 20 if arch == "sm_90" else text.count("mma.sync") > 100
        assert products and "cp.async" in text and spilled <= SPILLED


@pytest.mark.parametrize(("case", "target"), CPU_RUNS, ids=str)
def test_cpu(case: Case, target: str) -> None:
    inputs = rope_cases.make_inputs(case)
    problem, operands = rope_cases.case_problem(case, inputs)
    arrays, device = rope_cases.reference_arrays(inputs, operands), CPUS[target]
    views, memory = brought(problem, operands)
    run_plan(cpu_plan.plan_forward(problem, views, device), problem, memory, device)
    verdict = compare(problem, memory["o"], memory["lse"], expect(problem, **arrays))
    assert verdict, verdict.message
    dout = np.random.default_rng(1).standard_normal(problem.out_shape).astype(inputs["q"].dtype)
    views["do"], memory["do"] = views["o"], dout.view(STORED[problem.dtype]).reshape(-1)
    for name in "qkv":
        shape = views[name].shape
        views[f"d{name}"] = TensorView(problem.dtype, shape, contiguous_strides(shape), "host", None)
        memory[f"d{name}"] = np.zeros(shape, STORED[problem.dtype]).reshape(-1)
    run_plan(cpu_plan.plan_backward(problem, views, device), problem, memory, device)
    wrong = compare_gradients(problem, memory, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 1, n, 16), np.float32) for n in (5, 9, 9))
    cos, sin = aule.precompute_rope_frequencies(9, 16)

    def refused(kind: type[AuleError], match: str, rope: Any, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            aule.flash_attention(q, k, v, rope=rope, backend="numpy", **options)

    refused(InvalidArgumentError, r"rope as \(cos, sin\), got 3 values", (cos, sin, sin))
    refused(InvalidArgumentError, r"rope as \(cos, sin\), got ndarray", cos)
    refused(InvalidArgumentError, "rope_interleaved to be True or False", (cos, sin), rope_interleaved="yes")
    refused(InvalidShapeError, "at least 9 positions", (cos[:8], sin[:8]))
    refused(InvalidShapeError, "both alike", (cos, sin[:, :4]))
    refused(InvalidShapeError, "batch 2 or 1", (np.stack([cos] * 3), np.stack([sin] * 3)))
    refused(InvalidShapeError, r"at most head_dim // 2 = 8", (np.ones((9, 17), np.float32),) * 2)
    refused(InvalidShapeError, r"cos\[\.\.\., ::2\]", (np.ones((9, 16), np.float32),) * 2, rope_interleaved=True)
    refused(InvalidDtypeError, "both of float32", (cos.astype(np.float16), sin.astype(np.float16)))
