"""The CPU kernels on the interpreter with the sanitizer on, for vectors of several widths."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import grid
import numpy as np
import pytest

from aule.engine.attention import attention_views
from aule.engine.memory import STORED
from aule.ir.interpret import interpret
from aule.ir.verify import verify
from aule.ops.attention.cpu.plan import plan_backward, plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare
from aule.ops.attention.reference_backward import compare_gradients, expect_gradients
from aule.ops.attention.validate import Operands, attention_problem
from aule.ops.shared.plan import Plan
from aule.target import Target
from aule.view import TensorView, contiguous_strides

TARGETS = {
    "avx512": Target("cpu", arch="x86_64", extensions=("avx2", "avx512f", "fma"), compute_units=2),
    "pairs": Target(
        "cpu",
        arch="x86_64",
        extensions=("avx2", "avx512bf16", "avx512dq", "avx512f", "avx512vl", "fma"),
        compute_units=2,
    ),
    "baseline": Target("cpu", arch="x86_64", compute_units=2),
}


def brought(problem: AttentionProblem, operands: Operands) -> tuple[dict[str, TensorView], dict[str, Any]]:
    """Views and memory of a problem's operands and result, packed as the engine packs them for devices."""
    out_shape = problem.out_shape
    result = TensorView(problem.dtype, out_shape, contiguous_strides(out_shape), "host", None)
    views: dict[str, TensorView] = {"o": result}
    memory: dict[str, Any] = {
        "o": np.zeros(out_shape, STORED[problem.dtype]).reshape(-1),
        "lse": np.zeros(out_shape[:3], work(problem)).reshape(-1),
    }
    for name, view in attention_views(operands, result).items():
        if name != "o":
            used = tuple(slice(None) if stride else slice(0, 1) for stride in view.strides)
            packed = np.ascontiguousarray(view.storage[used])
            steps = zip(contiguous_strides(packed.shape), view.strides, strict=True)
            views[name] = TensorView(view.dtype, view.shape, tuple(p if s else 0 for p, s in steps), "host", None)
            memory[name] = (packed.view(np.uint8) if packed.dtype == np.bool_ else packed).reshape(-1)
    return views, memory


def skip_repeated(case: grid.Case, target: Target) -> None:
    """Without bf16, the target with pairs gives the same kernels as the one without."""
    if target is TARGETS["pairs"] and case.dtype != "bf16":
        pytest.skip("the same kernels as avx512")


def work(problem: AttentionProblem) -> Any:
    return np.float64 if problem.dtype == "f64" else np.float32


def run_plan(plan: Plan, problem: AttentionProblem, memory: dict[str, Any], target: Target) -> None:
    memory |= {name: np.full(size, np.nan, work(problem)) for name, size in plan.workspace.items()}
    for step in plan.steps:
        kernel = step.build(step.config, target)
        verify(kernel)
        values = {f"{name}_ptr": array for name, array in memory.items()} | dict(step.scalars)
        for param in kernel.params:
            if param.dtype == "u32" and param.kind == "buffer":  # a workspace may hold pairs of bf16 as well
                values[param.name] = values[param.name].view(np.uint32)
        interpret(kernel, step.grid, [values[p.name] for p in kernel.params])


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("case", grid.forward_grid("small"), ids=str)
def test_small_grid(case: grid.Case, target: Target) -> None:
    skip_repeated(case, target)
    inputs = grid.make_inputs(case, seed=3)
    problem, operands = grid.case_problem(case, inputs)
    views, memory = brought(problem, operands)
    run_plan(plan_forward(problem, views, target), problem, memory, target)
    expected = grid.expected(case, inputs)
    lse = memory["lse"].astype(np.float32) if case.return_lse else None
    verdict = compare(problem, memory["o"], lse, expected)
    assert verdict, verdict.message


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("case", grid.forward_grid("small"), ids=str)
def test_small_grid_of_gradients(case: grid.Case, target: Target) -> None:
    skip_repeated(case, target)
    inputs = grid.make_inputs(case, seed=3)
    problem, operands = grid.case_problem(case, inputs)
    problem = replace(problem, return_lse=True)
    views, memory = brought(problem, operands)
    run_plan(plan_forward(problem, views, target), problem, memory, target)
    rng = np.random.default_rng(1)
    dout = rng.standard_normal(views["o"].shape).astype(grid.NUMPY_DTYPES[case.dtype])
    memory["do"] = (dout.view(np.uint16) if case.dtype == "bf16" else dout).reshape(-1)
    views["do"] = views["o"]
    for name in "qkv":
        shape = views[name].shape
        views["d" + name] = TensorView(problem.dtype, shape, contiguous_strides(shape), "host", None)
        memory["d" + name] = np.zeros(shape, STORED[problem.dtype]).reshape(-1)
    run_plan(plan_backward(problem, views, target), problem, memory, target)
    arrays = {"alibi" if name == "alibi_slopes" else name: array for name, array in inputs.items()}
    wrong = compare_gradients(problem, memory, expect_gradients(problem, dout, **arrays))
    assert not wrong, wrong


def laid_out(*shape: int) -> TensorView:
    return TensorView("f32", shape, contiguous_strides(shape), "host", None)


@pytest.mark.parametrize("name", ["avx512", "baseline"])
def test_lengths_share_kernels(name: str) -> None:
    """A process that sees every length holds a bounded number of kernels for each set of options."""
    kernels = set()
    for heads, rows, keys in product((1, 8), [*range(1, 140), 4000, 20_000], (1, 100, 50_000)):
        q, k = laid_out(1, heads, rows, 32), laid_out(1, heads, keys, 32)
        problem, _ = attention_problem(q, k, k)
        plan = plan_forward(problem, {"q": q, "k": k, "v": k, "o": q}, TARGETS[name])
        kernels |= {step.config for step in plan.steps}
    assert 20 < len(kernels) <= 48, len(kernels)
