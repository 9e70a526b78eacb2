"""Tensors on GPUs that PyTorch calls cuda, used in place on the current stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from aule.backends import registry
from aule.engine.memory import MemorySource
from aule.engine.run import BoundCall
from aule.errors import DeviceMismatchError
from aule.frontends.torch import repeated
from aule.frontends.torch.calls import Call, Ready
from aule.frontends.torch.devices.base import Planned, Saving
from aule.frontends.torch.devices.scratch import StreamMemory
from aule.runtime._stream_device import StreamDevice
from aule.runtime.base import Device

_SAVE_FROM = 1 << 22
"""Fewest elements for which a row operation saves outputs for its gradient; PyTorch takes time for each output."""


def raw_stream(index: int) -> int:
    """Native handle of the current stream; replaced by PyTorch's own quick look-up where there is one."""
    return int(torch.cuda.current_stream(index).cuda_stream)


raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", raw_stream)


class OnStream(Planned):
    """Tensors of GPUs with streams.

    Attributes
    ----------
    backend : str
        Whose devices have PyTorch's numbers.
    """

    backend: str
    packed_gradients = True

    def device(self, call: Call) -> Device:
        q = call.first
        device = registry.find(call.backend or f"{self.backend}:{q.device.index}")
        if device is None or device.index != q.device.index:
            raise DeviceMismatchError(
                f"[{call.op}] expected tensors on {call.backend}, got {q.device}; move them or drop backend="
            )
        return device

    def memory(self, call: Call, device: Device) -> MemorySource:
        return StreamMemory(cast(StreamDevice, device), call.first.device)

    def launch(self, launch: BoundCall, tensors: Sequence[Tensor]) -> None:
        launch([x.data_ptr() for x in tensors], raw_stream(tensors[0].get_device()))

    def remember(self, call: Call, ready: Ready, tensors: Sequence[Tensor]) -> None:
        repeated.remember(repeated.OnCuda, call, ready, tensors)

    def saves(self, first: Tensor, backend: str | None) -> Saving:
        return "results" if first.numel() >= _SAVE_FROM else "nothing"
