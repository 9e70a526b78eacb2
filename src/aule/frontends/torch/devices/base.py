"""Route: how calls are computed on one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import torch
from torch import Tensor

from aule import settings
from aule.engine import observe
from aule.engine.memory import MemorySource
from aule.engine.run import BoundCall
from aule.engine.signatures import signatures
from aule.frontends.torch.calls import Call, Output, Ready, Results
from aule.frontends.torch.checks import checked_out
from aule.frontends.torch.views import ViewOf, aligned, device_layouts, view_on_device, written
from aule.runtime.base import Device

Saving = Literal["nothing", "results", "one result"]
"""What a row operation saves for its gradient: all outputs that make it faster, or one that replaces an operand."""


class Route(ABC):
    """Computes calls on tensors of one kind of device. `aule.frontends.torch.route` chooses among routes.

    The first call of a signature plans and builds; later ones need one look-up before the launches.
    """

    in_place = True
    """Whether kernels use the tensors' own memory."""
    packed_gradients = False
    """Whether gradients of packed batches are supported."""

    @abstractmethod
    def compute(self, call: Call) -> Results:
        """The results of a call, on the device of its tensors."""

    def saves(self, first: Tensor, backend: str | None) -> Saving:
        """Which outputs a row operation on ``first`` saves for its gradient alone."""
        return "nothing"


class Planned(Route):
    """A route whose kernels use the tensors' own memory."""

    host_memory = False
    """Whether tensors are in host memory, where their contents can be checked."""
    view: ViewOf = staticmethod(view_on_device)
    layouts: Callable[[Sequence[Tensor]], Hashable] = staticmethod(device_layouts)

    @abstractmethod
    def device(self, call: Call) -> Device:
        """The device that computes a call; looked up once per signature."""

    @abstractmethod
    def memory(self, call: Call, device: Device) -> MemorySource | None:
        """Where workspace and scratch come from; None for the device itself."""

    @abstractmethod
    def launch(self, launch: BoundCall, tensors: Sequence[Tensor]) -> None:
        """Start the launches of a call after PyTorch's work so far."""

    def remember(self, call: Call, ready: Ready, tensors: Sequence[Tensor]) -> None:
        """Let calls like this one be repeated by `repeated`, without this route."""

    def compute(self, call: Call) -> Results:
        return self.planned(call.placed(on_host=False), None)

    def planned(self, call: Call, device: Device | None) -> Results:
        """The results of a call, by kernels of ``device``; None for the one that `device` finds."""
        tensors = call.all_tensors()
        try:
            key = device, call.option_key, call.backend, tuple(call.tensors), self.layouts(tensors)
            ready: Ready | None = signatures.get(key)
        except (TypeError, RuntimeError):  # an option that is no key, or a tensor without strides
            call.bind(self.view)  # says what is wrong
            raise
        if ready is None:
            ready = self._prepared(call, device or self.device(call))
            signatures.put(key, ready, ready.device)
        if ready.overlap is not None and ready.overlap(tensors):
            elsewhere = call.with_tensors(call.tensors).placed(self.host_memory)
            return copied_back(call, self.planned(elsewhere, device))
        if ready.check is not None and (self.host_memory or settings.check_indices()):
            ready.check(tensors if self.host_memory else [x if x.is_floating_point() else x.cpu() for x in tensors])
        if call.repeat_key is not None and ready.launch is not None:
            self.remember(call, ready, tensors)
        return self._run(call, ready, tensors[0].device)

    def _run(self, call: Call, ready: Ready, home: torch.device) -> Results:
        given, made = call.destinations, []
        for name, dtype, shape, strides, fill, empty in ready.outputs:
            if name in given:
                x = written(given[name])
            else:
                x = torch.empty_strided(shape, strides, dtype=dtype, device=home)  # takes less time than torch.empty
                if fill is not None:
                    x.fill_(fill)
            if ready.launch is None:
                x.fill_(empty)
            made.append(x)
        if ready.launch is not None:
            self.launch(ready.launch, [*call.tensors.values(), *made])
            ready.launch.tally[observe.caller.get()] += 1
        return ready.results(made)

    def _prepared(self, call: Call, device: Device) -> Ready:
        bound = call.bind(self.view)
        starts = aligned(call.tensors | call.destinations)
        prepared = call.prepare(bound, device, self.memory(call, device), starts)
        made = (*bound.outputs, *call.further_outputs())
        outputs = {output.name: i for i, output in enumerate(made)}
        launch = None if prepared.empty else prepared.bind((*call.tensors, *outputs))
        places = None if tuple(outputs) == call.results else [outputs.get(name) for name in call.results]
        check = call.contents_check(bound.problem)
        overlap = call.overlap(self.host_memory)
        return Ready(launch, tuple(map(_laid_out, made)), places, device, check, overlap)


def _laid_out(output: Output) -> Output:
    return output._replace(strides=output.strides or torch.empty(output.shape, device="meta").stride())


def copied_back(call: Call, found: Results) -> Results:
    """Results that were computed elsewhere, copied into the caller's memory if the call gives some."""
    if not call.destinations:
        return found
    results = list(found)
    for i, (name, x) in enumerate(zip(call.results, found, strict=True)):
        if x is not None and name in call.destinations:
            results[i] = checked_out(call.destinations[name], tuple(x.shape), call.first, call.op).copy_(x)
    return tuple(results)
