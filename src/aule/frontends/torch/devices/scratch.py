"""Workspace and scratch of devices with streams out of PyTorch's memory.

Launches find scratch zero and leave it zero. Calls on one stream run in order, so they share one allocation. Calls on
two streams may run at the same time, so each stream has its own; streams are identified by their handles, as in
PyTorch's allocator.

A capture into a graph also has its own for each stream. It is allocated during the capture, so it lies in the
graph's memory and the graph zeroes it. The graph can therefore run at the same time as calls on the captured stream and
as other graphs; a graph never runs concurrently with itself. An allocation may be dropped at any time: PyTorch
gives memory that a stream has used to the same stream only, after the work that used it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aule.engine.signatures import Signatures
from aule.runtime._stream_device import StreamDevice

_LEAST = 1024

_pieces = Signatures(64)
"""Scratch by device, stream and capture."""


class StreamMemory:
    """Memory for launches on PyTorch's current stream of a device.

    Parameters
    ----------
    device : StreamDevice
    home : torch.device
        PyTorch's name of the same device.
    """

    raw = True
    has_scratch = True

    def __init__(self, device: StreamDevice, home: torch.device) -> None:
        self._device, self._home = device, home

    def acquire(
        self, workspace: Sequence[int], scratch: Sequence[int], stream: int | None
    ) -> tuple[list[int], Tensor | None]:
        """Addresses of memory for one call; see `aule.engine.memory.MemorySource`."""
        memory, block = [], None
        if workspace:
            block = torch.empty(sum(workspace), dtype=torch.uint8, device=self._home)
            at = block.data_ptr()
            for nbytes in workspace:
                memory.append(at)
                at += nbytes
        if scratch:
            at = self._scratch(sum(scratch), stream or 0).data_ptr()
            for words in scratch:
                memory.append(at)
                at += 4 * words
        return memory, block

    def release(self, block: Tensor | None) -> None:
        """Nothing to do: PyTorch's allocator gives the memory to later work of this stream only."""

    def _scratch(self, words: int, stream: int) -> Tensor:
        # Nobody can capture on the legacy default stream.
        key = (self._home.index, stream, self._device.capture(stream) if stream else 0)
        piece: Tensor | None = _pieces.get(key)
        if piece is None or piece.numel() < words:
            made = torch.zeros(max(words, _LEAST), dtype=torch.int32, device=self._home)
            piece = _pieces.put(key, made, self._device)
        return piece
