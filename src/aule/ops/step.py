"""Step and StepPlan: the launches that compute an op, whatever the op is. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aule.errors import InvalidShapeError
from aule.ir import KernelIR
from aule.target import Target


@dataclass(frozen=True)
class Step:
    """One launch of several: its configuration and what traces it, its grid, and its scalars by name. Where a kernel's
    buffer has another name in this op, ``renamed`` has that by the kernel's. A step that goes ``together`` with the one
    before waits itself for what it needs of that, and the two are given to the device at once."""

    config: Any
    build: Callable[[Any, Target], KernelIR]
    grid: tuple[int, int, int]
    scalars: Mapping[str, int | float]
    renamed: Mapping[str, str] = field(default_factory=dict)
    together: bool = False

    def memory_of(self, parameter: str) -> str:
        """The name of the memory that a buffer parameter stands for."""
        name = parameter.removesuffix("_ptr")
        return self.renamed.get(name, name)


@dataclass(frozen=True)
class StepPlan:
    """Launches in order, and the elements of each workspace, by buffer name, that they share; of the type that is
    computed in. ``zeroed`` are further ones, of 32-bit words, that are zero before the launches and behind them."""

    steps: tuple[Step, ...]
    workspace: Mapping[str, int] = field(default_factory=dict)
    zeroed: Mapping[str, int] = field(default_factory=dict)


def grid_of(op: str, blocks: int, target: Target) -> tuple[int, int, int]:
    """A grid of at least so many workgroups, along x and then y: a driver may allow no more than 65535 along one."""
    if blocks == 0:
        return (0, 0, 0)
    x = min(blocks, target.max_grid[0])
    y = math.ceil(blocks / x)
    if y > target.max_grid[1]:
        raise InvalidShapeError(
            f"[{op}] expected at most {target.max_grid[0] * target.max_grid[1]} blocks of rows on "
            f"{target.name}, got {blocks}; split the batch"
        )
    return (x, y, 1)


def can_wait(target: Target) -> bool:
    """Whether workgroups may wait for each other: where those that have begun all go on, which no interface promises,
    it is known how many there is room for, and it was seen to be quicker than fences, or another launch."""
    return target.vulkan_on_nvidia and target.device_fence and target.compute_units > 0
