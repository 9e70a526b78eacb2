"""Seeds of dropout on the devices of PyTorch's tensors.

A seed that nobody gives is drawn where it is used, from PyTorch's generator of the device, which `torch.manual_seed`
sets: nothing waits for the device, and a CUDA graph that has captured it draws anew in each replay. That is a launch of
its own, 2 us, for one number. In a capture the first call draws for those that come after it on the same stream as
well. Outside of one it must not: who sets the generator back, as checkpointing does, is to get the same seed again,
and PyTorch refuses that in a capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from aule.backends import registry

_TOGETHER = 64
"""Seeds that one launch draws."""
_MAX_STREAMS = 16

_drawn: dict[tuple[int, int, int], Iterator[Any]] = {}
"""Seeds that are left, by device, stream and capture. They lie in memory of the graph, which draws them anew in each
replay. To forget them is harmless: who has one of them has their memory."""


def seed_on(number: int | None, device: Any) -> Any:
    """The two words of a seed on a device, or of one that is drawn there."""
    if number is not None:
        signed = number - 2**64 if number >= 2**63 else number
        return torch.full((1,), signed, dtype=torch.int64, device=device).view(torch.int32)
    if not torch.compiler.is_compiling() and device.type == "cuda":
        drawn = _captured(device)
        if drawn is not None:
            return drawn
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device).view(torch.int32)


def _captured(device: Any) -> Any:
    """The next seed of the capture that the device's current stream takes part in; None outside of one."""
    watched = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    if watched or not torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream(device).cuda_stream
    ours: Any = registry.find(f"cuda:{device.index}")
    # Another device than the one that captures may have its default stream, on which nobody can.
    capture = ours.capture(stream) if stream and ours is not None else 0
    if not capture:
        return None
    key = (device.index, stream, capture)
    found = next(_drawn.get(key, iter(())), None)
    if found is None:
        if len(_drawn) >= _MAX_STREAMS:
            _drawn.clear()
        # Two numbers for each, of which one counts: 16 bytes apart they are all aligned alike, and one launch that
        # was prepared serves for all.
        both = torch.randint(2**63 - 1, (_TOGETHER, 2), dtype=torch.int64, device=device)
        _drawn[key] = iter(both.view(torch.int32)[:, :2].unbind())
        found = next(_drawn[key])
    return found
