"""Seeds of dropout on the devices of PyTorch's tensors.

A seed that is not given is drawn where it is used, from PyTorch's generator of the device, which `torch.manual_seed`
sets: nothing waits for the device, and a CUDA graph that has captured the drawing draws anew in each replay. Drawing is
a launch of its own, so in a capture the first call draws seeds for later calls on the same stream as well. Outside of a
capture it must not: setting the generator back, as checkpointing does, must give the same seed again. In a capture
PyTorch refuses that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from aule.backends import registry
from aule.engine.signatures import Signatures

_AT_ONCE = 64
"""Seeds that one launch draws."""

_drawn = Signatures(16)
"""Seeds that are left, by device, stream and capture. They lie in memory of the graph, which draws them anew in each
replay. Forgetting them is harmless: whoever has one of them holds their memory."""


def seed_on(number: int | None, device: torch.device) -> Tensor:
    """The two words of a seed on a device: of the given number, or drawn there."""
    if number is not None:
        signed = number - 2**64 if number >= 2**63 else number
        return torch.full((1,), signed, dtype=torch.int64, device=device).view(torch.int32)
    if not torch.compiler.is_compiling() and device.type == "cuda":
        drawn = _captured(device)
        if drawn is not None:
            return drawn
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device).view(torch.int32)


def _captured(device: torch.device) -> Tensor | None:
    """The next seed of the capture that the device's current stream takes part in; None outside of one."""
    watched = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    if watched or not torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream(device).cuda_stream
    ours: Any = registry.find(f"cuda:{device.index}")
    # The current stream of another device than the capturing one may be its default stream, which cannot capture.
    capture = ours.capture(stream) if stream and ours is not None else 0
    if not capture:
        return None
    key = (device.index, stream, capture)
    left: Iterator[Tensor] = _drawn.get(key) or iter(())
    found = next(left, None)
    if found is None:
        # Two numbers for each, of which one counts: 16 bytes apart they are all aligned alike, so that one prepared
        # launch serves for all.
        both = torch.randint(2**63 - 1, (_AT_ONCE, 2), dtype=torch.int64, device=device)
        found = next(_drawn.put(key, iter(both.view(torch.int32)[:, :2].unbind()), ours))
    return found
