"""Runs operations of the catalogue on NumPy arrays by a device's plan, on that device or in the interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aule.engine.memory import STORED, work_dtype
from aule.engine.row_ops import on_host, result_views
from aule.frontends.numpy import view
from aule.ir.interpret import interpret
from aule.ir.verify import verify
from aule.ops.shared.elements import as_float
from aule.ops.shared.plan import Step
from aule.ops.shared.spec import Call, OpSpec
from aule.runtime.base import Device
from aule.target import FragmentLayout, Target

Arrays = Mapping[str, Any]


def bound(spec: OpSpec, arrays: Arrays, options: Mapping[str, Any]) -> Call:
    """A call on arrays by the names of operands; options that are not given have their defaults."""
    return spec.call(
        {name: view(array, name, spec.name) for name, array in arrays.items()},
        {option.name: options.get(option.name, option.default) for option in spec.options},
    )


def run(spec: OpSpec, arrays: Arrays, options: Mapping[str, Any], device: Device | None) -> dict[str, Any]:
    """Run a call on a device, or with NumPy if None; returns all outputs as floats."""
    call = bound(spec, arrays, options)
    return {name: as_float(x, call.outputs[name].dtype) for name, x in on_host(spec, call, device).items()}


def layouts_of(device: Target) -> dict[str, FragmentLayout]:
    """Layouts of a target's fragments, as the interpreter takes them."""
    results = device.matrix_layout
    left, right = device.matrix_factors or (results, device.matrix_right)
    return {
        use: layout for use, layout in zip(("accumulator", "a", "b"), (results, left, right), strict=True) if layout
    }


def interpreted(spec: OpSpec, arrays: Arrays, options: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Run a call by a target's launches on the interpreter, with the sanitizer on."""
    call = bound(spec, arrays, options)
    plan = spec.plan(call.problem, {**call.views, **result_views(call)}, target)
    results = {name: np.zeros(x.shape, STORED[x.dtype]) for name, x in call.outputs.items()}
    memory = {name: np.ascontiguousarray(x.storage) for name, x in call.views.items()} | results
    memory |= {name: np.zeros(count, work_dtype(call.problem.dtype)) for name, count in plan.workspace.items()}
    for step in plan.steps:
        kernel = step.build(step.config, target)
        arguments = [step.scalars.get(p.name, memory.get(step.memory_of(p.name))) for p in kernel.params]
        for i, p in enumerate(kernel.params):
            if step.memory_of(p.name) in plan.workspace:  # memory of whatever type a kernel says
                arguments[i] = arguments[i].view(STORED[p.dtype])
        size = target.subgroup_size or None
        interpret(kernel, step.grid, arguments, subgroup_size=size, layouts=layouts_of(target))
    return {name: as_float(x, call.outputs[name].dtype) for name, x in results.items()}


def reference(spec: OpSpec, arrays: Arrays, options: Mapping[str, Any]) -> dict[str, Any]:
    """Expected results in float64."""
    call = bound(spec, arrays, options)
    values = {name: as_float(x.storage, x.dtype) for name, x in call.views.items()}
    return spec.reference(call, values)


def error(found: Any, right: Any) -> float:
    """The largest difference over the largest expected number."""
    return float(np.max(np.abs(found - right)) / max(np.max(np.abs(right)), 1e-30))


def unwritten(words: int) -> np.ndarray:
    """A workspace before a launch: all words differ, so that a word that was never written is not right by chance."""
    return np.random.default_rng(words).integers(-(2**31), 2**31, words, dtype=np.int32)


def run_step(step: Step, memory: Arrays, device: Target) -> None:
    """Run one launch in the interpreter, on memory by name; workspaces have the kernel's element types."""
    kernel = step.build(step.config, device)
    verify(kernel)
    arguments = []
    for p in kernel.params:
        value = step.scalars[p.name] if p.kind == "scalar" else memory[step.memory_of(p.name)]
        if p.kind == "buffer" and value.dtype == np.int32 and p.dtype != "i32":
            value = value.view({"u32": np.uint32, "u8": np.uint8}.get(p.dtype) or STORED[p.dtype])
        arguments.append(value)
    lanes = device.subgroup_size or 32
    interpret(kernel, step.grid, arguments, subgroup_size=lanes, layouts=layouts_of(device))
