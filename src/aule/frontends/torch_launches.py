"""Launches on PyTorch's memory and streams with everything else fixed, several of them as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aule.engine.programs import StepLaunches
from aule.options import AttentionOptions


def prepared_steps(ready: StepLaunches, device: Any) -> list[tuple[Any, tuple[str, ...]]]:
    """Launches with everything fixed but memory and stream, each with the names of its buffers."""
    launches = []
    for step, loaded in ready.steps:
        scalars = [step.scalars.get(p.name) for p in loaded.artifact.params]  # None in the place of a buffer
        buffers = tuple(step.memory_of(p.name) for p in loaded.artifact.buffers)
        launches.append((device.prepare(loaded, step.grid, scalars).launch, buffers))
    return launches


def in_steps(
    names: Sequence[str], launches: Sequence[tuple[Any, tuple[str, ...]]], workspace: Mapping[str, int], device: Any
) -> Callable[[list[int], int], None]:
    """Several launches as one, with memory of their own."""
    places, total = {}, 0
    for name, count in workspace.items():
        places[name] = 4 * total
        total += -(-count // 64) * 64

    def start(pointers: list[int], stream: int) -> None:
        memory = dict(zip(names, pointers, strict=True))
        # Given back at the end, of which PyTorch's allocator makes use on this stream alone.
        space = torch.empty(total, dtype=torch.int32, device=device)
        first = space.data_ptr()
        memory |= {name: first + offset for name, offset in places.items()}
        for launch, buffers in launches:
            launch([memory[name] for name in buffers], stream)

    return start


def extras_aligned(options: AttentionOptions) -> dict[str, bool]:
    """Whether mask, bias and the tables of rope start at multiples of 16 bytes, by the names of their buffers."""
    extras = {"mask": options.mask, "bias": options.bias, "cos": options.rope_cos, "sin": options.rope_sin}
    return {name: x.data_ptr() % 16 == 0 for name, x in extras.items() if x is not None}
