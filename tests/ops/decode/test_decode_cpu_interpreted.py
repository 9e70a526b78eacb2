"""The decoding kernels for CPUs on the interpreter with the sanitizer on, for vectors of several widths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import decode_cases
import numpy as np
import pytest
from decode_cases import Case
from test_cpu_interpreted import TARGETS

from aule.engine.memory import STORED
from aule.ir.interpret import interpret
from aule.ir.text import text
from aule.ir.verify import verify
from aule.ops.attention.reference import compare
from aule.ops.decode.cpu.plan import plan_decode
from aule.ops.decode.plan.decode import decode_views
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.sequences import expect_decode
from aule.ops.decode.validate import DecodeOperands
from aule.ops.shared.plan import Plan
from aule.target import Target
from aule.view import TensorView, contiguous_strides

CASES = [
    Case("contiguous", (70, 1, 0), options={"sinks": True}),
    Case("pages", (17, 0, 33), heads=(4, 1), dims=(32, 16), dtype="f16", page=16, shared=1),
    Case("tokens", (37, 4), 5, (4, 1), (16, 16), page=3, options={"window": 20, "softcap": 2.0}),
    Case("fp8", (20, 9), 1, (2, 2), (16, 16), "bf16", "e4m3", page=8, layout="HND"),
    Case("ragged-int8", (30, 5, 12), (9, 1, 0), (2, 1), (16, 16), "bf16", "i8", page=256),
    Case("in-turns", (150, 64, 3), heads=(4, 1), dims=(16, 16), page=16, layout="HND"),
    Case("parts", (2100, 3), heads=(2, 1), dims=(8, 8), page=16, options={"window": 1500}),
    Case("whole-rows", (70, 33), heads=(4, 1), dims=(64, 16)),
    Case("whole-rows-in-turns", (81, 3), heads=(4, 1), dims=(128, 32), dtype="bf16", page=16, layout="HND"),
    Case("heads-beside-each-other", (300, 20, 1), heads=(16, 8), dims=(16, 16), page=16, options={"sinks": True}),
    Case("heads-of-ragged-tokens", (40, 20, 33), (1, 0, 1), heads=(8, 8), dims=(64, 16), page=16),
    Case("heads-and-tokens", (33, 70, 7, 40), 2, (8, 4), (16, 16), page=32, options={"causal": False}),
    Case("heads-of-a-contiguous-cache", (300, 20, 1, 40), heads=(8, 4), dims=(16, 16)),
    Case("heads-in-parts", (2100, 700), heads=(8, 4), dims=(16, 16), page=16),
    Case("heads-of-piled-pages", (300, 20, 1, 64), heads=(8, 4), dims=(16, 16), page=16, layout="HND"),
    Case("heads-of-piled-whole-rows", (150, 33), heads=(32, 8), dims=(128, 32), dtype="bf16", page=8, layout="HND"),
    Case("heads-of-whole-rows", (70, 300), heads=(16, 8), dims=(128, 16), dtype="bf16", page=16),
    Case("whole-rows-that-end-early", (40, 7), heads=(2, 1), dims=(70, 16), page=4),
]


def planned(problem: DecodeProblem, operands: DecodeOperands, target: Target) -> tuple[Plan, dict[str, Any]]:
    """The plan for packed operands, and their memory."""
    result = TensorView(problem.dtype, problem.out_shape, contiguous_strides(problem.out_shape), "host", None)
    views, memory = decode_views(operands, result), {}
    for name, view in views.items():
        if name != "o":
            # Packed in the order of its axes in memory: whether heads of a key are neighbours depends on it.
            order = sorted(range(view.storage.ndim), key=lambda axis: -view.storage.strides[axis])
            packed = np.ascontiguousarray(view.storage.transpose(order))
            strides = dict(zip(order, contiguous_strides(packed.shape), strict=True))
            views[name] = replace(view, strides=tuple(strides[axis] for axis in range(packed.ndim)), storage=packed)
            memory[name] = packed.reshape(-1)
    return plan_decode(problem, views, target), memory


def run(problem: DecodeProblem, operands: DecodeOperands, target: Target) -> tuple[Any, Any]:
    """Plan and interpret; result and log-sum-exp."""
    plan, memory = planned(problem, operands, target)
    memory["o"] = np.zeros(problem.out_shape, STORED[problem.dtype]).reshape(-1)
    memory["lse"] = np.zeros(problem.out_shape[:3], np.float32).reshape(-1)
    memory |= {name: np.full(count, np.nan, np.float32) for name, count in plan.workspace.items()}
    memory |= {name: np.zeros(words, np.int32) for name, words in plan.scratch.items()}
    for step in plan.steps:
        kernel = step.build(step.config, target)
        verify(kernel)
        values = {f"{name}_ptr": array for name, array in memory.items()} | dict(step.scalars)
        interpret(kernel, step.grid, [values[p.name] for p in kernel.params])
    return memory["o"].reshape(problem.out_shape), memory["lse"].reshape(problem.out_shape[:3])


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: Case, target: Target) -> None:
    if target is TARGETS["pairs"] and case.dtype != "bf16":
        pytest.skip("the same kernels as avx512")
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    out, lse = run(problem, operands, target)
    judged, expected = expect_decode(problem, operands)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_have_several_heads_to_a_task_where_they_say_so(case: Case) -> None:
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    plan, _ = planned(problem, operands, TARGETS["avx512"])
    assert (plan.steps[0].config.heads > 1) == case.id.startswith("heads")
    assert plan.steps[0].config.split == ("parts" in case.id)


@pytest.mark.parametrize(
    ("dtype", "dims", "in_place"),
    [("f32", 64, True), ("bf16", 128, True), ("bf16", 64, False), ("f32", 128, False)],  # short, too many vectors
)
def test_long_rows_of_k_are_read_in_place(dtype: str, dims: int, in_place: bool) -> None:
    """Where the rows of Q stay in registers."""
    case = Case("rows", (20,), heads=(4, 1), dims=(dims, 16), dtype=dtype, page=16)
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    result = TensorView(problem.dtype, problem.out_shape, contiguous_strides(problem.out_shape), "host", None)
    step = plan_decode(problem, decode_views(operands, result), TARGETS["pairs"]).steps[0]
    assert ("dots" in text(step.build(step.config, TARGETS["pairs"]))) == in_place


def test_tasks_take_several_heads_where_those_are_neighbours() -> None:
    """As long as there are enough tasks left, and nothing goes by the number of a key."""

    def heads(case: Case, threads: int) -> int:
        problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
        result = TensorView(problem.dtype, problem.out_shape, contiguous_strides(problem.out_shape), "host", None)
        target = replace(TARGETS["avx512"], compute_units=threads)
        found: int = plan_decode(problem, decode_views(operands, result), target).steps[0].config.heads
        return found

    case = Case("heads", (20,) * 8, heads=(24, 12), dims=(64, 16), page=16)
    assert [heads(case, threads) for threads in (1, 6, 12, 100)] == [4, 4, 2, 1]
    assert heads(replace(case, lens=(2100,) * 8), 12) == 4  # whose tasks have parts of the keys
    assert heads(replace(case, page=0), 1) == heads(replace(case, layout="HND"), 1) == 4
    # Heads of a page that are in one piece each are not worth it.
    assert [heads(replace(case, lens=(2100,) * 8, layout="HND"), threads) for threads in (6, 12, 25)] == [4, 2, 1]
    others = (
        {"options": {"window": 7}},
        {"cache": "i8"},
        *({"layout": "HND", "page": page} for page in (4, 12, 256)),
    )
    for other in others:
        assert heads(replace(case, **other), 1) == 1, other


def test_entries_outside_of_the_pool_read_inside_of_it() -> None:
    """Whoever checks them, the kernel reads nothing else: the sanitizer would see it."""
    case = CASES[1]
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    assert operands.tables is not None and operands.lens is not None
    tables = np.where(operands.tables.storage < 1, 10**9, -(10**9)).astype(np.int32)
    lens = np.array([10**9, -5, 33], np.int32)
    operands = replace(
        operands, tables=replace(operands.tables, storage=tables), lens=replace(operands.lens, storage=lens)
    )
    run(problem, operands, TARGETS["baseline"])
