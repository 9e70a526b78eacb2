"""The decoding kernels on the interpreter with the sanitizer on: with and without subgroups and splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import decode_cases
import numpy as np
import pytest
import test_fragment_interpreted as fragments
from op_plans import layouts_of

from aule.codegen import TARGETS
from aule.engine.memory import STORED
from aule.ir.interpret import interpret
from aule.ir.verify import verify
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.reference import compare
from aule.ops.decode.config import AnyShape
from aule.ops.decode.plan.decode import Combine, decode_views, plan_decode
from aule.ops.decode.problem import DecodeProblem
from aule.ops.decode.sequences import expect_decode
from aule.ops.decode.validate import DecodeOperands
from aule.target import Target
from aule.view import TensorView, contiguous_strides

CASES = list(decode_cases.cases())
PTX, WGSL = replace(TARGETS["ptx"], matrix_units=()), TARGETS["wgsl"]
NARROW = replace(PTX, subgroup_size=8, subgroup_sizes=(8,))
"""As lavapipe has it: lanes hold several runs of a key."""


def run(
    problem: DecodeProblem,
    operands: DecodeOperands,
    target: Target,
    splits: int | None = None,
    combine: Combine | None = None,
    chosen: AnyShape | None = None,
    **shape: int,
) -> tuple[Any, Any]:
    """Plan and interpret; returns the result and the log-sum-exp. Without ``combine`` the plan decides who combines
    splits: the last workgroup where the target has fences, else a second launch. ``chosen`` is the shape, or ``shape``
    what is different from the planner's."""
    out = TensorView(problem.dtype, problem.out_shape, contiguous_strides(problem.out_shape), "device", None)
    views = decode_views(operands, out)
    for name, view in views.items():
        if name != "o":
            packed = np.ascontiguousarray(view.storage)
            views[name] = replace(view, storage=packed, strides=contiguous_strides(packed.shape))
    memory = {name: view.storage for name, view in views.items()}
    memory["o"] = np.zeros(problem.out_shape, STORED[problem.dtype])
    memory["lse"] = np.full(problem.out_shape[:3], -np.inf, np.float32)
    plan = plan_decode(problem, views, target, splits=splits, shape=chosen, combine=combine)
    if shape:
        own = replace(plan.steps[0].config.shape, **shape)
        plan = plan_decode(problem, views, target, splits=splits, shape=own, combine=combine)
    memory |= {name: np.full(count, np.nan, np.float32) for name, count in plan.workspace.items()}
    scratch = {name: np.zeros(count, np.int32) for name, count in plan.scratch.items()}
    memory |= scratch
    values = {f"{name}_ptr": array for name, array in memory.items()}
    for step in plan.steps:
        kernel = step.build(step.config, target)
        verify(kernel)
        arguments = values | dict(step.scalars)
        given = [arguments[p.name] for p in kernel.params]
        for i, p in enumerate(kernel.params):
            if p.kind == "buffer" and p.dtype == "u32":  # bytes that are read as words
                given[i] = given[i].reshape(-1).view(np.uint32)
        layouts = layouts_of(target)
        lanes = kernel.subgroup_size or target.subgroup_size or 32
        interpret(kernel, step.grid, given, subgroup_size=lanes, layouts=layouts)
    assert not any(words.any() for words in scratch.values())
    return memory["o"], memory["lse"]


def check(case: decode_cases.Case, target: Target, splits: int | None = None, **shape: int) -> None:
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    out, lse = run(problem, operands, target, splits, **shape)
    judged, expected = expect_decode(problem, operands)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


@pytest.mark.parametrize("case", CASES, ids=str)
def test_subgroups(case: decode_cases.Case) -> None:
    check(case, PTX, subgroups=2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts(case: decode_cases.Case) -> None:
    check(case, NARROW, 3, subgroups=1)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_parts_in_two_launches(case: decode_cases.Case) -> None:
    check(case, replace(NARROW, device_fence=False), 3, subgroups=1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_subgroups(case: decode_cases.Case) -> None:
    check(case, WGSL)


@pytest.mark.parametrize("target", [PTX, NARROW, WGSL], ids=["subgroups", "narrow", "none"])
def test_latent_keys_are_read_once(target: Target) -> None:
    """The values are the first columns of the keys: the kernel never loads them."""
    case = decode_cases.Case("latent", (20, 33, 0), 2, (4, 1), (576, 512), "f16", page=16)
    given = decode_cases.make(case)
    given["v"] = given["k"][..., :512]
    problem, operands = decode_cases.problem_of(case, given | {"latent": True})
    assert operands.v.storage.base is not None
    judged, expected = expect_decode(problem, operands)
    hidden = replace(operands, v=replace(operands.v, storage=np.full_like(operands.v.storage, np.nan)))
    out, lse = run(problem, hidden, target, subgroups=1)
    verdict = compare(judged, out, lse, expected)
    assert verdict, verdict.message


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_long_indices(case: decode_cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aule.view.TensorView.last_index", property(lambda view: 1 << 32))
    check(case, PTX, 2, subgroups=1)


def test_prefill_on_matrix_units() -> None:
    """Sequences of many rows go to attention's own kernel, which reads the pages; the others do not."""
    case = next(case for case in CASES if case.id == "prefill")
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    plan = plan_decode(problem, decode_views(operands, operands.q), fragments.target())
    assert [type(step.config).__name__ for step in plan.steps] == ["FragmentDecodeConfig", "FragmentConfig"]
    check(case, fragments.target())
    check(replace(case, rows=70, page=3, options={"sinks": True}), fragments.target())
    check(replace(case, rows=70, page=0, dims=(40, 24), options={"causal": False}), fragments.target())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_prefill_of_wide_heads(arch: str) -> None:
    """Values wider than a product of warpgroups: subgroups that share rows divide the columns."""
    case = decode_cases.Case("prefill", (90, 70), (80, 2), (2, 1), (320, 288), "f16", page=16, options={"window": 50})
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    *_, step = plan_decode(problem, decode_views(operands, operands.q), fragments.target(arch)).steps
    assert isinstance(step.config, FragmentConfig) and step.config.shape.columns == 2
    check(case, fragments.target(arch))


def test_entries_outside_of_the_pool_read_inside_of_it() -> None:
    """On a device nobody has looked at the table: the sanitizer sees that nothing else is read."""
    case = CASES[1]
    problem, operands = decode_cases.problem_of(case, decode_cases.make(case))
    assert operands.tables is not None and operands.lens is not None
    tables = np.where(operands.tables.storage < 3, 10**9, -(10**9)).astype(np.int32)
    lens = np.array([10**9, -5, 0, 1, 130, 32], np.int32)
    operands = replace(
        operands, tables=replace(operands.tables, storage=tables), lens=replace(operands.lens, storage=lens)
    )
    run(problem, operands, PTX, subgroups=1)


def test_the_maximum_may_grow_far() -> None:
    """Scores that rise by hundreds along the keys: sums are rescaled on the way."""
    case = decode_cases.Case("rising", (90, 40), heads=(2, 1))
    given = decode_cases.make(case)
    given["k"] = np.abs(given["k"]) * np.linspace(0, 60, given["k"].shape[2])[:, None].astype(np.float32)
    given["q"] = np.abs(given["q"])
    problem, operands = decode_cases.problem_of(case, given)
    for target in (PTX, WGSL):
        out, lse = run(problem, operands, target, subgroups=1)
        judged, expected = expect_decode(problem, operands)
        verdict = compare(judged, out, lse, expected)
        assert verdict, verdict.message
