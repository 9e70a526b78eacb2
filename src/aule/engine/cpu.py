"""Runs plans on the processor, on arrays where they lie: made once per signature, and workspaces are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from aule.engine.programs import program
from aule.ops.attention.problem import AttentionProblem
from aule.ops.decode.problem import DecodeProblem
from aule.ops.step import Step, StepPlan
from aule.runtime.base import Allocation, Device
from aule.view import TensorView

Array = npt.NDArray[Any]
_Problem = TypeVar("_Problem", AttentionProblem, DecodeProblem)
_MAX_SIGNATURES = 1024
_KEPT_BYTES = 256 << 20
"""The largest workspace that is kept for the next call: fresh memory costs a page fault for every 4 KiB."""

_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class Ready:
    """A plan whose kernels are loaded: its launches, and the names of each one's buffers."""

    sequence: Any
    buffers: tuple[tuple[str, ...], ...]
    workspace: dict[str, int]
    """Bytes of each workspace."""
    zeroed: dict[str, int]
    """32-bit words of each of those that launches find zero."""
    orders: dict[tuple[str, ...], Ordered] = field(default_factory=dict)
    """For addresses in orders that were asked for."""


Memory = Array | Allocation
"""Where a view's elements are: an array in host memory, or memory of the device, which is the same."""


def forward(problem: AttentionProblem, views: dict[str, TensorView], device: Device, lse: Memory | None) -> None:
    """Compute attention. ``views`` are those of ``q``, ``k``, ``v``, ``o`` and what else there is; ``lse`` is
    C-contiguous, float64 for an fp64 problem and else float32."""
    _compute(prepare_forward(problem, views, device), views, device, {} if lse is None else {"lse": lse})


def backward(problem: AttentionProblem, views: dict[str, TensorView], device: Device, lse: Memory) -> None:
    """Compute the gradients. ``views`` as for the forward pass, and ``do``, ``dq``, ``dk``, ``dv``; ``lse`` from it."""
    _compute(prepare_backward(problem, views, device), views, device, {"lse": lse})


def decode(problem: DecodeProblem, views: dict[str, TensorView], device: Device, lse: Memory | None) -> None:
    """Compute decoding. ``views`` as for `plan_decode`, ``lse`` as for `forward`."""
    _compute(prepare_decode(problem, views, device), views, device, {} if lse is None else {"lse": lse})


def prepare_forward(problem: AttentionProblem, views: dict[str, TensorView], device: Device) -> Ready:
    """The forward pass of a signature, planned and loaded once, for `run`. ``views`` as for `forward`."""
    from aule.ops.attention.cpu.plan import plan_forward  # not before: `import aule` is to be quick

    return _ready(problem, views, device, plan_forward)


def prepare_backward(problem: AttentionProblem, views: dict[str, TensorView], device: Device) -> Ready:
    """The gradients of a signature, planned and loaded once, for `run`. ``views`` as for `backward`."""
    from aule.ops.attention.cpu.plan import plan_backward

    return _ready(problem, views, device, plan_backward)


def prepare_decode(problem: DecodeProblem, views: dict[str, TensorView], device: Device) -> Ready:
    """Decoding of a signature, planned and loaded once, for `run`. ``views`` as for `decode`."""
    from aule.ops.decode.cpu.plan import plan_decode

    return _ready(problem, views, device, plan_decode)


def work_dtype(problem: AttentionProblem | DecodeProblem) -> Any:
    """NumPy's type for what is computed in, and for the log-sum-exp."""
    return np.float64 if problem.dtype == "f64" else np.float32


def _ready(
    problem: _Problem,
    views: dict[str, TensorView],
    device: Device,
    planner: Callable[[_Problem, dict[str, TensorView], Any], StepPlan],
) -> Ready:
    known: dict[Any, Ready] = vars(device).setdefault("_ready_attention", {})
    key = (planner, problem, tuple((name, view.strides, view.offset) for name, view in views.items()))
    ready = known.get(key)
    if ready is None:
        if len(known) >= _MAX_SIGNATURES:
            known.clear()
        ready = known[key] = prepare(planner(problem, views, device.target), work_dtype(problem), device)
    return ready


def _compute(ready: Ready, views: dict[str, TensorView], device: Device, extra: dict[str, Memory]) -> None:
    addresses = {name: address(view.storage) for name, view in views.items()}
    addresses |= {name: address(array) for name, array in extra.items()}
    run(ready, device, addresses)


def run(ready: Ready, device: Device, addresses: dict[str, int]) -> None:
    """Compute, with the address of each buffer by name; whoever calls keeps the memory alive."""
    names = tuple(addresses)
    ordered = ready.orders.get(names)
    if ordered is None:
        ordered = ready.orders[names] = Ordered(ready, device, names)
    ordered.run(list(addresses.values()))


class Ordered:
    """A plan that is ready, for addresses in a fixed order.

    Parameters
    ----------
    names : sequence of str
        Of the buffers, workspaces aside, in the order in which `run` takes their addresses.
    """

    __slots__ = ("_device", "_launches", "_sequence", "_total", "_workspace", "_zeroed")

    def __init__(self, ready: Ready, device: Device, names: Sequence[str]) -> None:
        places = {name: i for i, name in enumerate((*names, *ready.workspace, *ready.zeroed))}
        self._device, self._sequence = device, ready.sequence
        self._workspace, self._zeroed = tuple(ready.workspace.values()), tuple(ready.zeroed.values())
        self._total = sum(self._workspace)
        self._launches = [[places[name] for name in names] for names in ready.buffers]

    def run(self, addresses: list[int]) -> None:
        """Compute; addresses of workspaces are appended. Whoever calls keeps the memory alive."""
        if not self._total and not self._zeroed:
            self._launch(addresses)
            return
        # Not kept from call to call: two threads may compute the same at the same time.
        zeros = [np.zeros(words, np.int32) for words in self._zeroed]
        block = _take(self._device, self._total) if self._total else None
        try:
            if block is not None:
                at = block.address
                for size in self._workspace:
                    addresses.append(at)
                    at += size
            addresses += map(address, zeros)
            self._launch(addresses)
        finally:
            if block is not None:
                _give(self._device, block)

    def _launch(self, addresses: list[int]) -> None:
        self._sequence.launch([[addresses[i] for i in places] for places in self._launches])


def prepare(plan: StepPlan, work: Any, device: Any) -> Ready:
    """Load the kernels of a plan; workspaces are of type ``work``."""
    size = np.dtype(work).itemsize
    # Never empty, so that every buffer has an address: without keys there is nothing to pack.
    workspace = {name: -(-max(count, 1) * size // 64) * 64 for name, count in plan.workspace.items()}
    launches = [_launch(step, device) for step in plan.steps]
    sequence = device.prepare_sequence([launch for launch, _ in launches])
    return Ready(sequence, tuple(x for _, x in launches), workspace, dict(plan.zeroed))


def _launch(step: Step, device: Any) -> tuple[Any, tuple[str, ...]]:
    loaded = program(device, step.config, lambda: step.build(step.config, device.target))
    scalars = [step.scalars[p.name] for p in loaded.artifact.scalars]
    prepared = device.prepare(loaded, step.grid, scalars)
    return prepared, tuple(step.memory_of(p.name) for p in loaded.artifact.buffers)


def address(memory: Memory) -> int:
    """Where memory begins."""
    return memory.address if isinstance(memory, Allocation) else int(memory.__array_interface__["data"][0])


def _take(device: Device, nbytes: int) -> Allocation:
    """A workspace: the one kept from the last call when nobody has it and it is large enough."""
    with _lock:
        kept: Allocation | None = vars(device).pop("_workspace", None)
    if kept is not None and kept.nbytes >= nbytes and not kept.freed:
        return kept
    return device.alloc(nbytes)


def _give(device: Device, block: Allocation) -> None:
    if block.nbytes <= _KEPT_BYTES:
        with _lock:
            vars(device).setdefault("_workspace", block)
