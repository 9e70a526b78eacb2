"""Memory of CUDA devices that kernels find zero and leave zero, for PyTorch.

Calls on one stream are in order, so one piece of memory serves them all: it is zeroed when it is made, and everybody
who had it has left zeros. Calls on two streams may run at the same time, so each stream has its own; a stream is known
by its handle, as it is to PyTorch's own allocator.

A capture into a CUDA graph has its own as well, for each of its streams. It is made during the capture, so it lies in
the graph's memory and its zeroing is a part of the graph. The graph can therefore run beside calls on the stream on
which it was captured, and beside other graphs; beside itself CUDA never runs one. To forget any of it is harmless at
any time: PyTorch gives memory that a stream has used to the same stream only, behind what used it.
"""

from __future__ import annotations

from typing import Any

import torch

_LEAST = 1024
_MAX_PIECES = 64

_pieces: dict[tuple[int, int, int], Any] = {}


def zeroed(device: Any, home: Any, stream: int, words: int) -> int:
    """Address of at least so many 32-bit words for a launch on a stream.

    Parameters
    ----------
    device : CudaDevice
    home : torch.device
        The same as PyTorch's; ``stream`` is its current stream.
    """
    # Nobody can capture on the legacy default stream.
    key = (home.index, stream, device.capture(stream) if stream else 0)
    piece = _pieces.get(key)
    if piece is None or piece.numel() < words:
        if len(_pieces) >= _MAX_PIECES:
            _pieces.clear()
        piece = _pieces[key] = torch.zeros(max(words, _LEAST), dtype=torch.int32, device=home)
    address: int = piece.data_ptr()
    return address
