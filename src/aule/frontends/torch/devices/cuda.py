"""NVIDIA's GPUs: tensors used in place on the current stream."""

from __future__ import annotations

import torch

from aule.frontends.torch.devices.streams import OnStream

BUILD = torch.version.cuda is not None
"""Whether tensors that PyTorch calls cuda are NVIDIA's; ROCm calls its own so, too."""


class Cuda(OnStream):
    """CUDA tensors."""

    backend = "cuda"
