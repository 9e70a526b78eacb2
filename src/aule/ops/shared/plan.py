"""Step and Plan: the launches that compute an op. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aule.errors import InvalidShapeError
from aule.ir import KernelIR
from aule.target import Target

_ENGINES = ("warpgroup", "fragment", "vector", "simt")
"""Engines that multiply tiles; all other kernels move and reduce rows."""


@dataclass(frozen=True)
class Step:
    """One launch of a plan.

    Attributes
    ----------
    config : hashable
        With the target, everything that decides what the kernel is.
    build : callable
        ``build(config, target)`` traces the kernel.
    grid : tuple of int
        Workgroups along each axis.
    scalars : mapping
        Values by name; it may hold more than the kernel's parameters.
    renamed : mapping
        Name of the memory that stands for a buffer, by the buffer's name, where the two differ.
    """

    config: Any
    build: Callable[[Any, Target], KernelIR]
    grid: tuple[int, int, int]
    scalars: Mapping[str, int | float]
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def tiles(self) -> Any:
        """The kernel's tile sizes and schedule; None for a kernel without such."""
        return getattr(self.config, "shape", None) or getattr(self.config, "blocks", None)

    @property
    def engine(self) -> str:
        """The engine of the kernel."""
        return getattr(self.tiles, "engine", "rows")

    def memory_of(self, parameter: str) -> str:
        """Name of the memory that a buffer parameter stands for."""
        name = parameter.removesuffix("_ptr")
        return self.renamed.get(name, name)


@dataclass(frozen=True)
class Plan:
    """Launches in order: each sees what those before it wrote. Without steps there is nothing to compute.

    Attributes
    ----------
    workspace : mapping
        Memory for results between launches, by buffer name: how many elements of the type that is computed in. Its
        contents are undefined before.
    scratch : mapping
        Memory that is zero before the launches and again after them (tickets), by buffer name: how many 32-bit words.
    """

    steps: tuple[Step, ...]
    workspace: Mapping[str, int] = field(default_factory=dict)
    scratch: Mapping[str, int] = field(default_factory=dict)

    @property
    def engine(self) -> str:
        """The engine of the kernels that take the time: one that multiplies tiles, if there is one."""
        used = {step.engine for step in self.steps}
        return next((engine for engine in _ENGINES if engine in used), "rows")


def grid_of(op: str, blocks: int, target: Target) -> tuple[int, int, int]:
    """A grid of at least ``blocks`` workgroups, along x and then y: a driver may allow only 65535 along one axis."""
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
