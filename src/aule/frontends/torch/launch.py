"""Launches of a user's own kernels on torch tensors: CUDA and ROCm tensors in place, CPU tensors as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aule.backends import registry
from aule.engine.launch import Buffer, check_arguments, loaded, seen
from aule.errors import DeviceMismatchError, InvalidArgumentError
from aule.frontends import numpy as numpy_front_end
from aule.frontends.torch import route
from aule.frontends.torch.checks import no_gradient
from aule.frontends.torch.devices import streams
from aule.frontends.torch.views import written
from aule.ir import KernelIR
from aule.runtime._stream_device import StreamDevice
from aule.runtime.base import Grid


def launch(kernel: KernelIR, grid: Grid, args: Sequence[Any], backend: str | None) -> None:
    """Launch a kernel on torch tensors and numbers. Gradients are not recorded."""
    tensors = [x for x in args if isinstance(x, Tensor) and x.dim()]
    homes = {x.device for x in tensors}
    if len(homes) > 1:
        raise DeviceMismatchError(
            f"[launch] {kernel.name} expected tensors on one device, got {', '.join(map(str, homes))}; move them"
        )
    given = []
    for param, x in zip(kernel.params, args, strict=True):
        if not isinstance(x, Tensor):
            given.append(x)
        elif not x.dim():
            given.append(x.item())
        elif x.is_neg() or x.is_conj() or x.layout is not torch.strided:
            raise InvalidArgumentError(
                f"[launch] {kernel.name} expected {param.name} to be a plain tensor, got a negated, conjugated or "
                "sparse one; use .clone() or .to_dense()"
            )
        elif param.access != "read" and x.requires_grad and x.is_leaf and torch.is_grad_enabled():
            raise no_gradient(None, f"launch it under torch.no_grad() to write to {param.name}", "launch")
        else:
            given.append((written(x) if param.access != "read" else x).detach())
    home = homes.pop()
    if home.type == "cpu":
        numpy_front_end.launch(kernel, grid, [_array(x) for x in given], backend)
    elif (gpu := route.gpu_of(tensors[0])) is not None and gpu.kind == "cuda":
        _on_stream(kernel, grid, given, backend or f"{gpu.backend}:{home.index}", home)
    else:
        raise DeviceMismatchError(
            f"[launch] {kernel.name} expected tensors on the CPU or a GPU of CUDA or ROCm, got {home}; use .cpu(), and "
            "backend= for the device that computes"
        )


def _array(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def _on_stream(kernel: KernelIR, grid: Grid, args: list[Any], backend: str, home: torch.device) -> None:
    device = registry.find(backend)
    if not isinstance(device, StreamDevice) or device.index != home.index:
        raise DeviceMismatchError(
            f"[launch] {kernel.name} expected tensors on {backend}, got {home}; move them or drop backend="
        )
    check_arguments(kernel, [_described(x) if isinstance(x, Tensor) else x for x in args])
    if all(grid):
        memory = [device.wrap(x.data_ptr(), x.nbytes, x) if isinstance(x, Tensor) else x for x in args]
        ready = loaded(kernel, device)
        with seen(kernel, device):
            device.launch(ready, grid, memory, streams.raw_stream(device.index))


def _described(x: Tensor) -> Buffer:
    return Buffer(str(x.dtype).removeprefix("torch."), x.is_contiguous(), True, x.data_ptr(), x.nbytes)
