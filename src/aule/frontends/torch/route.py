"""Chooses the route of a call: in place on a GPU or the host, or copies through the host.

To add a device, write a `Route` in ``devices/`` and give `ROUTES` a line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from aule import settings
from aule.backends import registry
from aule.errors import AuleError
from aule.frontends.torch.devices import cuda, hip, mps
from aule.frontends.torch.devices.base import Route
from aule.frontends.torch.devices.host import Host
from aule.frontends.torch.devices.staged import Staged

HOST = Host()
STAGED = Staged()
CUDA = cuda.Cuda()
HIP = hip.Hip()
MPS = mps.Mps(STAGED)


class _Gpu(NamedTuple):
    """The route of tensors of one device type, the backend that computes them, and whether it is available."""

    kind: str
    backend: str
    route: Route
    available: Callable[[], bool]


ROUTES = (
    _Gpu("cuda", "cuda", CUDA, lambda: cuda.BUILD),
    _Gpu("cuda", "hip", HIP, hip.available),
    _Gpu("mps", "metal", MPS, mps.available),
)
"""ADD A DEVICE HERE. CPU tensors take `HOST`; all others go through the host."""


def gpu_of(tensor: Tensor) -> _Gpu | None:
    """The route of a tensor's device if it is used in place and not the host."""
    kind = "cuda" if tensor.is_cuda else tensor.device.type  # device.type is slow
    for gpu in ROUTES:
        if gpu.kind == kind and gpu.available():
            return gpu
    return None


def home(tensor: Tensor) -> Route:
    """The route of a tensor when no backend is chosen."""
    if tensor.is_cpu:
        return HOST
    gpu = gpu_of(tensor)
    return STAGED if gpu is None else gpu.route


def route(tensor: Tensor, backend: str | None) -> Route:
    """The route of a call on a tensor. ``backend=`` or ``AULE_BACKEND`` may take a GPU's tensor through the host."""
    if tensor.is_cpu:
        return HOST
    gpu = gpu_of(tensor)
    if gpu is None:
        return STAGED
    wanted = registry.requested_backend(backend) or gpu.backend
    return gpu.route if wanted.startswith(gpu.backend) else STAGED


def host_backend(tensor: Tensor) -> str | None:
    """The backend for a tensor when none is named: the CPU engine for CPU tensors, if it is available.

    None in compiled code, where the operator takes the CPU engine by itself.
    """
    if torch.compiler.is_compiling() or tensor.device.type != "cpu" or settings.backend():
        return None
    return "cpu" if _cpu_engine() else None


def has_fast_engine(tensor: Tensor) -> bool:
    """Whether tensors of this device are computed fast; NumPy and copies to other devices are not, unless chosen."""
    return tensor.device.type != "cpu" or settings.backend() is not None or _cpu_engine()


def _cpu_engine() -> bool:
    try:
        registry.devices("cpu")
    except AuleError:
        return False
    return True
