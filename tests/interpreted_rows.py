"""Runs row operations by a target's plan on the interpreter, and judges them against float64."""

from __future__ import annotations

from dataclasses import replace

import fused_cases
import numpy as np

from aule.engine.memory import STORED, host_view
from aule.ir.interpret import interpret
from aule.ir.verify import verify
from aule.ops.catalogue import CATALOGUE
from aule.ops.shared.spec import Call, OpSpec
from aule.target import Target


def run(spec: OpSpec, call: Call, target: Target) -> dict[str, np.ndarray]:
    """The outputs of a call, whose arrays are brought to contiguous memory as devices get them."""
    results = {name: np.zeros(out.shape, STORED[out.dtype]) for name, out in call.outputs.items()}
    views = {}
    for name, view in call.views.items():
        used = tuple(slice(None) if stride else slice(0, 1) for stride in view.strides)
        packed = np.ascontiguousarray(view.storage[used])
        steps = zip(host_view("f32", packed).strides, view.strides, strict=True)
        views[name] = replace(view, storage=packed, strides=tuple(p if s else 0 for p, s in steps))
    views |= {name: host_view(call.outputs[name].dtype, array) for name, array in results.items()}
    plan = spec.plan(call.problem, views, target)
    work = np.float64 if call.problem.dtype == "f64" else np.float32
    memory = {name: view.storage.reshape(-1) for name, view in views.items()}
    memory |= {name: np.full(count, np.nan, work) for name, count in plan.workspace.items()}
    scratch = {name: np.zeros(words, np.int32) for name, words in plan.scratch.items()}
    memory |= scratch
    for step in plan.steps:
        kernel = step.build(step.config, target)
        verify(kernel)
        values = dict(step.scalars)
        for name, array in memory.items():
            kinds = {np.dtype(bool): np.uint8, np.dtype(np.int64): np.int32}
            values[f"{name}_ptr"] = array.view(kinds.get(array.dtype, array.dtype))
        for p in kernel.params:
            if p.name.removesuffix("_ptr") in plan.workspace and p.dtype == "u32":  # floats of other sizes
                values[p.name] = values[p.name].view(np.uint32)
        interpret(kernel, step.grid, [values[p.name] for p in kernel.params])
    assert not any(words.any() for words in scratch.values())
    return results


def judged(case: fused_cases.Case, target: Target) -> list[tuple[OpSpec, Call]]:
    """An op and its gradient with their calls, after both have been found right."""
    spec = CATALOGUE[case.op]
    arrays = fused_cases.operands(case)
    call = fused_cases.bound(spec, arrays, fused_cases.options(spec, case))
    found = run(spec, call, target)
    fused_cases.judge(call, found, fused_cases.right(spec, call), gradient=False)
    assert spec.gradient is not None
    backward = fused_cases.gradient_call(spec, arrays, call, found, case)
    expected = fused_cases.right(spec.gradient, backward)
    fused_cases.judge(backward, run(spec.gradient, backward, target), expected, gradient=True)
    return [(spec, call), (spec.gradient, backward)]
