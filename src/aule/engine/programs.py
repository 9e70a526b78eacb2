"""From a kernel's configuration to a program that a device can launch: build, verify, render, load; each once."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aule.backends import registry
from aule.engine import cache
from aule.ir import KernelIR
from aule.ir.verify import verify
from aule.ops.step import Step, StepPlan
from aule.runtime.base import Device, Launch, Program

log = logging.getLogger("aule")
_lock = threading.Lock()
_building: dict[tuple[int, Any], threading.Lock] = {}


def program(device: Device, config: Any, build: Callable[[], KernelIR]) -> Program:
    """The program of a configuration on a device; built once, also when several threads ask at the same time.

    Parameters
    ----------
    config : hashable
        With the device's Target, everything that decides what the kernel is.
    build : callable
        Traces the kernel.
    """
    # Programs hold their device: kept on it, the two go together, as they would not in a weak dictionary.
    known: dict[Any, Program] = vars(device).setdefault("_engine_programs", {})
    key = (config, device.target)
    if key in known:
        return known[key]
    with _lock:
        mine = _building.setdefault((id(device), key), threading.Lock())
    with mine:
        if key in known:
            return known[key]
        try:
            loaded = known[key] = device.load(_artifact(device, config, build))
        finally:
            with _lock:
                _building.pop((id(device), key), None)
    return loaded


@dataclass(frozen=True, eq=False)
class StepLaunches:
    """Several launches in order, ready to go: programs with their grids and scalars, and what they share."""

    steps: tuple[tuple[Step, Program], ...]
    workspace: Mapping[str, int]
    """fp32 elements of each further buffer, by name."""
    zeroed: Mapping[str, int] = field(default_factory=dict)
    """Words of each further buffer that is zero before the launches and behind them, by name."""


def load_steps(plan: StepPlan, device: Device) -> StepLaunches:
    """Build the kernels of a plan, or find them in memory."""
    steps = []
    for step in plan.steps:
        loaded = program(device, step.config, lambda step=step: step.build(step.config, device.target))  # type: ignore[misc]
        steps.append((step, loaded))
    return StepLaunches(tuple(steps), plan.workspace, plan.zeroed)


def launch_steps(ready: StepLaunches, device: Device, memory: Mapping[str, Any]) -> None:
    """Start launches on memory of the device, by buffer name; asynchronous."""
    groups: list[list[Launch]] = []
    for step, loaded in ready.steps:
        launch = launch_of(step, loaded, memory)
        if step.together:
            groups[-1].append(launch)
        else:
            groups.append([launch])
    for group in groups:
        if len(group) == 1:
            device.launch(*group[0])
        else:
            device.launch_together(group)


def launch_of(step: Step, loaded: Program, memory: Mapping[str, Any]) -> Launch:
    """A step as a device wants it, on memory by buffer name."""
    numbers, params = step.scalars, loaded.artifact.params
    arguments = [numbers[p.name] if p.name in numbers else memory[step.memory_of(p.name)] for p in params]
    return loaded, step.grid, arguments


def _artifact(device: Device, config: Any, build: Callable[[], KernelIR]) -> Any:
    entry = cache.key(config, device.target)
    artifact = cache.load(entry)
    if artifact is None:
        start = time.perf_counter()
        kernel = build()
        verify(kernel)
        artifact = registry.backend(device.target.backend).render(kernel, device.target)
        cache.save(entry, artifact)
        log.debug("built %s for %s in %.0f ms", kernel.name, device.target.name, 1e3 * (time.perf_counter() - start))
    return artifact


def _after_fork() -> None:
    # Other threads of the parent may have held these; nobody would ever release them here. Programs belong to the
    # parent's devices, which refuse to work here; the child finds its own.
    global _lock
    _lock = threading.Lock()
    _building.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
