"""Packed batches on the interpreter with the sanitizer on: the kernels of GPUs, of matrix units and of CPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_fragment_interpreted as fragments
import varlen_cases
from test_backward_interpreted import SHAPES, TARGET
from test_cpu_interpreted import TARGETS, brought, run_plan
from test_forward_interpreted import SMALL_SHAPES

from aule.engine.memory import STORED
from aule.ops.attention.cpu import plan as cpu_plan
from aule.ops.attention.plan.backward import plan_backward
from aule.ops.attention.plan.forward import plan_forward
from aule.ops.attention.problem import AttentionProblem
from aule.ops.attention.reference import compare
from aule.ops.attention.reference_backward import compare_gradients
from aule.ops.attention.varlen import expect_varlen, expect_varlen_gradients
from aule.tile.fragment.shape import FragmentShape
from aule.view import TensorView, contiguous_strides

CASES = list(varlen_cases.cases(varlen_cases.SMALL))


def with_gradients(problem: AttentionProblem, views: dict[str, TensorView], memory: dict[str, Any]) -> Any:
    """Memory for the gradients; returns the gradient of the result as values."""
    dout = np.random.default_rng(1).standard_normal(problem.out_shape).astype(np.float32)
    if problem.dtype == "bf16":
        stored = (dout.view(np.uint32) >> 16).astype(np.uint16)
        dout = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        stored = dout.astype(STORED[problem.dtype])
    memory["do"], views["do"] = stored.reshape(-1), views["o"]
    for name in "qkv":
        shape = views[name].shape
        views["d" + name] = TensorView(problem.dtype, shape, contiguous_strides(shape), "host", None)
        memory["d" + name] = np.zeros(shape, STORED[problem.dtype]).reshape(-1)
    return stored


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_cpus(case: varlen_cases.Case, target: Any) -> None:
    problem, operands = varlen_cases.problem_of(varlen_cases.make(case))
    views, memory = brought(problem, operands)
    run_plan(cpu_plan.plan_forward(problem, views, target), problem, memory, target)
    verdict = compare(problem, memory["o"], memory["lse"].astype(np.float32), expect_varlen(problem, operands))
    assert verdict, verdict.message
    dout = with_gradients(problem, views, memory)
    run_plan(cpu_plan.plan_backward(problem, views, target), problem, memory, target)
    wrong = compare_gradients(problem, memory, expect_varlen_gradients(problem, operands, dout))
    assert not wrong, wrong


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_gpus(case: varlen_cases.Case) -> None:
    for name in ("streamed", "resident"):
        check(case, TARGET, SMALL_SHAPES[name], (SHAPES["tall"], SHAPES["wide"]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_matrix_units(case: varlen_cases.Case) -> None:
    case = replace(case, dtype="f16") if case.dtype == "f32" else case
    backward = fragments.BACKWARD["two-stages"], fragments.BACKWARD["one-stage"]
    check(case, fragments.target(), fragments.SHAPES["two-stages"], backward)


def test_wide_heads_on_matrix_units() -> None:
    """Subgroups divide the depth of the scores, in the kernel of dQ, too."""
    case = varlen_cases.Case("wide", (5, 0, 37), (7, 3, 50), (2, 1), (320, 288), options={"causal": True}, dtype="bf16")
    target = fragments.target()
    check(case, target, fragments.SHAPES["two-stages"], (fragments.WIDE[0], fragments.WIDE[0]))


@pytest.mark.parametrize("case", CASES[1:8:2], ids=str)
def test_over_warpgroups(case: varlen_cases.Case) -> None:
    """Rows are copied as they are, and dQ has a kernel of its own."""
    case = replace(case, dtype="f16") if case.dtype == "f32" else case
    keys = FragmentShape(64, 64, 4, 4, False, warpgroups=True)
    check(case, fragments.target(), fragments.SHAPES["warpgroups"], (fragments.BACKWARD["two-stages"], keys))


def check(case: varlen_cases.Case, target: Any, shape: Any, backward: Any) -> None:
    """Forward and backward with given tiles."""
    problem, operands = varlen_cases.problem_of(varlen_cases.make(case))
    views, memory = brought(problem, operands)
    plan = plan_forward(problem, views, target, shape=shape)
    run_plan(plan, problem, memory, target)
    verdict = compare(problem, memory["o"], memory["lse"], expect_varlen(problem, operands))
    assert verdict, verdict.message
    dout = with_gradients(problem, views, memory)
    run_plan(plan_backward(problem, views, target, shapes=backward), problem, memory, target)
    wrong = compare_gradients(problem, memory, expect_varlen_gradients(problem, operands, dout))
    assert not wrong, wrong
