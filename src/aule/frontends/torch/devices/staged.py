"""Tensors on devices that aule does not drive in place (ROCm, XPU): through the host, and back.

The best device that aule has computes them: maybe the same GPU through Vulkan or OpenCL, else the CPU engine. Slow but
correct.
"""

from __future__ import annotations

from aule.frontends.torch.calls import Call, Results
from aule.frontends.torch.checks import require_same_device
from aule.frontends.torch.devices.base import Route, copied_back
from aule.frontends.torch.devices.host import Host


class Staged(Route):
    """Tensors that are copied to the host and back."""

    in_place = False

    def __init__(self) -> None:
        self._host = Host(foreign=True)

    def compute(self, call: Call) -> Results:
        require_same_device(call.op, {name: x for name, x in call.tensors.items() if name not in call.indices})
        home = call.first.device
        there = call.with_tensors({name: x.cpu() for name, x in call.tensors.items()})
        found = self._host.compute(there)
        return copied_back(call, tuple([None if x is None else x.to(home) for x in found]))
