"""Seeds of dropout on the devices of PyTorch's tensors.

A seed that is not given is drawn on the device from PyTorch's generator, which `torch.manual_seed` sets. Nothing waits
for the device, and a captured CUDA graph draws a new seed in each replay. Drawing is a launch of its own, so the first
call of a capture also draws the seeds of later calls on its stream. Outside of a capture each call draws its own:
checkpointing sets the generator back and must get the same seed, which PyTorch refuses in a capture.
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
"""Unused seeds by device, stream and capture, in the graph's memory. Dropping them is harmless: each seed keeps that
memory alive."""


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
    """The next seed of the capture on the device's current stream; None outside of one."""
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
        # Two numbers per seed, of which one is used: all seeds are then 16-byte aligned and share a prepared launch.
        both = torch.randint(2**63 - 1, (_AT_ONCE, 2), dtype=torch.int64, device=device)
        found = next(_drawn.put(key, iter(both.view(torch.int32)[:, :2].unbind()), ours))
    return found
