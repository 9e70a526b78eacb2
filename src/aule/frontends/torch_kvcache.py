"""Caches of keys and values in torch tensors: written by CUDA and MPS devices; on the CPU by its engine or NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aule.backends import registry
from aule.engine.kvcache import Launches, append_on_host, copy_on_host, no_memory, prepare, words, writer
from aule.errors import AuleError, BackendUnavailableError
from aule.frontends.torch_cuda import device_view, raw_stream, signature
from aule.frontends.torch_host import host_view_of
from aule.frontends.torch_routes import mps, route
from aule.frontends.torch_views import require_tensor
from aule.ops.kvcache.plan import plan_append, plan_copy
from aule.ops.kvcache.problem import append_problem

_DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i8": torch.int8, "e4m3": torch.float8_e4m3fn,
}  # fmt: skip
_MAX_LAUNCHES = 4096
_launches: dict[Any, Launches] = {}


def accepts(array: object) -> bool:
    """Whether this front end serves an array."""
    return isinstance(array, torch.Tensor)


def empty(shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    """A tensor of zeros; ``dtype`` is f32, f16, bf16, i8 or e4m3."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # PyTorch has none such
        raise BackendUnavailableError(
            str(device),
            f"[KVCache] expected a device that PyTorch has, got {device!r} ({error}); pass device='cpu', or None for "
            "NumPy arrays",
        ) from error
    try:
        made = torch.zeros(shape, dtype=_DTYPES[dtype], device=device)
    except RuntimeError as error:  # as torch.OutOfMemoryError is; on the CPU it is no more than that
        raise no_memory(math.prod(shape) * _DTYPES[dtype].itemsize, str(device), error) from error
    _served("KVCache", made)
    return made


def new(tensor: Any) -> Any:
    """A tensor of the same shape and type, contiguous, with anything in it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def integers(array: npt.NDArray[np.int32], device: Any) -> Any:
    """Integers made on the host, where the cache is; not to be written to."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def write(op: str, arrays: Mapping[str, Any], *, interleaved: bool = False, backend: str | None = None) -> None:
    """Write new rows into caches, on the current stream. ``arrays`` as for `append_problem`."""
    for name, tensor in arrays.items():
        require_tensor(tensor, name, op, "k")
    if torch.is_grad_enabled() and any(arrays[name].requires_grad for name in "kv" if name in arrays):
        raise AuleError(
            "AULE_ERROR_NO_GRADIENT",
            f"[{op}] expected tensors that need no gradient, got requires_grad=True; call it under torch.no_grad()",
        )
    k = arrays["k"]
    if _served(op, k) == "host":
        views = {name: host_view_of(tensor, name, op) for name, tensor in arrays.items()}
        append_on_host(append_problem(op, views, interleaved=interleaved), views, writer(backend))
        return

    def plan() -> Launches:
        views = {name: device_view(tensor, name, op) for name, tensor in arrays.items()}
        problem = append_problem(op, views, interleaved=interleaved)
        device = _device(k)
        return prepare(plan_append(problem, views, device.target, _alignment(arrays)), device)

    key = ("append", *arrays, *(signature(tensor) for tensor in arrays.values()), interleaved)
    _start(_remembered(key, plan), arrays, k)


def copy_pages(arrays: Mapping[str, Any], pairs: npt.NDArray[np.int32], *, backend: str | None = None) -> None:
    """Copy pages of tensors ``[layers, pages, ...]`` of the cache, on the current stream."""
    flat = {name: tensor.flatten(2) for name, tensor in arrays.items()}
    first = next(iter(flat.values()))
    if _served("KVCache", first) == "host":
        bits = {name: tensor.view(_BITS[tensor.itemsize]).numpy() for name, tensor in flat.items()}
        copy_on_host(pairs, bits, writer(backend))
        return

    def plan() -> Launches:
        device = _device(first)
        views = {name: words(tensor) for name, tensor in flat.items()}
        return prepare(plan_copy(len(pairs), views, device.target, _alignment(flat)), device)

    key = ("copy", len(pairs), *flat, *(signature(tensor) for tensor in flat.values()))
    _start(_remembered(key, plan), {"pairs": integers(pairs, first.device), **flat}, first)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Types by whose bits NumPy can view any tensor."""


def _served(op: str, tensor: Any) -> str:
    """Where a cache is written to: ``"cuda"``, ``"host"`` or ``"mps"``."""
    where = route(tensor, None)
    if where == "staged":
        raise AuleError(
            "AULE_ERROR_UNSUPPORTED",
            f"[{op}] expected a cache on the CPU, a CUDA device or Apple's GPU, got one on {tensor.device}; keep it "
            "on the CPU",
        )
    return where


def _device(tensor: Any) -> Any:
    if tensor.is_cuda:
        return registry.find(f"cuda:{tensor.device.index}")
    return mps().device_of(tensor)


def _alignment(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that divide each address; 16 is as many as matter."""
    return {name: (tensor.data_ptr() | 16) & -(tensor.data_ptr() | 16) for name, tensor in arrays.items()}


def _remembered(key: Any, plan: Callable[[], Launches]) -> Launches:
    found = _launches.get(key)
    if found is None:
        if len(_launches) >= _MAX_LAUNCHES:
            _launches.clear()
        found = _launches[key] = plan()
    return found


def _start(ready: Launches, memory: Mapping[str, Any], first: Any) -> None:
    for launch, buffers in ready:
        if first.is_cuda:
            launch([memory[name].data_ptr() for name in buffers], raw_stream(first.get_device()))
        else:
            launch([memory[name] for name in buffers])
