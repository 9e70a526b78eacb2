"""CPU tensors: in place by the CPU engine, or through views by NumPy or another device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aule.engine.memory import reports_shortage
from aule.engine.row_ops import host_device
from aule.engine.run import BoundCall
from aule.frontends.torch import repeated
from aule.frontends.torch.calls import Call, Ready, Results
from aule.frontends.torch.devices.base import Planned, Saving
from aule.frontends.torch.views import host_layouts, view_on_host
from aule.runtime.base import Device

_SAVE_FROM = 1 << 14
"""Fewest elements for which a row operation saves outputs for its gradient; PyTorch takes time for each output."""


class Host(Planned):
    """CPU tensors.

    Parameters
    ----------
    foreign : bool
        Tensors are copies of another device's.
    """

    packed_gradients = True
    host_memory = True
    view = staticmethod(view_on_host)
    layouts = staticmethod(host_layouts)

    def __init__(self, foreign: bool = False) -> None:
        self._foreign = foreign

    @reports_shortage
    def compute(self, call: Call) -> Results:
        call = call.placed(on_host=True)
        device = call.host_device(self._foreign)
        if device is None or device.target.backend != "cpu" or not call.has_signature():
            return call.through_host(device)
        return self.planned(call, device)

    def device(self, call: Call) -> Device:
        raise AssertionError("compute has chosen the device")

    def memory(self, call: Call, device: Device) -> None:
        return None

    def launch(self, launch: BoundCall, tensors: Sequence[Tensor]) -> None:
        launch([x.data_ptr() for x in tensors])

    def remember(self, call: Call, ready: Ready, tensors: Sequence[Tensor]) -> None:
        repeated.remember(repeated.OnHost, call, ready, tensors)

    def saves(self, first: Tensor, backend: str | None) -> Saving:
        device = host_device(backend) if first.numel() >= _SAVE_FROM else None
        if device is not None and device.target.backend == "cpu":
            return "one result" if first.dtype == torch.bfloat16 else "results"
        return "results" if device is not None and device.target.vulkan_on_nvidia else "nothing"
