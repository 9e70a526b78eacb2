"""Caches of keys and values in torch tensors: writes new rows and copies pages in place."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aule.engine.kvcache import APPEND, COPY, append_on_host, copy_on_host, no_memory, words, writer
from aule.errors import AuleError, BackendUnavailableError
from aule.frontends.torch import route
from aule.frontends.torch.calls import Bound, Call, Results
from aule.frontends.torch.checks import no_gradient, require_tensor
from aule.frontends.torch.devices.base import Route
from aule.frontends.torch.modes import refuse_transforms
from aule.frontends.torch.views import DTYPES, ViewOf, alignment, view_on_host
from aule.ops.kvcache.plan import plan_append, plan_copy
from aule.ops.kvcache.problem import AppendProblem, append_problem
from aule.ops.shared.plan import Plan
from aule.runtime.base import Device

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer types of each size, by which NumPy views the bits of any tensor."""


def accepts(array: object) -> bool:
    """Whether this front end serves an array."""
    return isinstance(array, Tensor)


def empty(shape: tuple[int, ...], dtype: str, device: str | torch.device) -> Tensor:
    """A tensor of zeros; ``dtype`` is f32, f16, bf16, i8 or e4m3."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # PyTorch has no such device
        raise BackendUnavailableError(
            str(device),
            f"[KVCache] expected a device that PyTorch has, got {device!r} ({error}); pass device='cpu', or None for "
            "NumPy arrays",
        ) from error
    try:
        made = torch.zeros(shape, dtype=DTYPES[dtype], device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU raises only this
        raise no_memory(math.prod(shape) * DTYPES[dtype].itemsize, str(device), error) from error
    _served("KVCache", made)
    return made


def new(tensor: Tensor) -> Tensor:
    """An uninitialised, contiguous tensor of the same shape and type."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def integers(array: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """Copy host integers to the device of the cache; the result must not be written to."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def write(op: str, arrays: Mapping[str, Tensor], *, interleaved: bool = False, backend: str | None = None) -> None:
    """Write new rows into caches, on the current stream. ``arrays`` as for `append_problem`."""
    for name, tensor in arrays.items():
        require_tensor(tensor, name, op, "k")
    refuse_transforms(op, arrays.values(), "call it outside of them")
    if torch.is_grad_enabled() and any(arrays[name].requires_grad for name in "kv" if name in arrays):
        raise no_gradient(None, "call it under torch.no_grad()", op)
    _served(op, arrays["k"]).compute(_Append(op, arrays, interleaved, backend))


def copy_pages(arrays: Mapping[str, Tensor], pairs: npt.NDArray[np.int32], *, backend: str | None = None) -> None:
    """Copy pages of tensors ``[layers, pages, ...]`` of the cache, on the current stream."""
    call = _Copy({name: tensor.flatten(2) for name, tensor in arrays.items()}, pairs, backend)
    _served("KVCache", call.first).compute(call)


def _served(op: str, tensor: Tensor) -> Route:
    """The route of a cache, which must be one that writes in place."""
    found = route.home(tensor)
    if not found.in_place:
        raise AuleError(
            "AULE_ERROR_UNSUPPORTED",
            f"[{op}] expected a cache on the CPU, a CUDA device or Apple's GPU, got one on {tensor.device}; keep it "
            "on the CPU",
        )
    return found


class _Write(Call):
    """A call without results, which writes to its operands.

    The caller's backend counts only for caches in host memory; others are written by their own device.
    """

    __slots__ = ("writer",)

    def __init__(
        self, op: str, tensors: Mapping[str, Tensor], option_key: tuple[Hashable, ...], backend: str | None
    ) -> None:
        self.op, self.tensors, self.option_key, self.writer = op, dict(tensors), option_key, backend
        self.destinations, self.results, self.repeat_key, self.backend = {}, (), None, None

    def host_device(self, foreign: bool) -> Device | None:
        return writer(self.writer)

    def has_signature(self) -> bool:
        return False

    def with_tensors(self, tensors: dict[str, Tensor]) -> Call:
        raise AssertionError("a cache is written where it lies")


def _alignments(bound: Bound) -> dict[str, int]:
    """Bytes that divide the address of each tensor."""
    return {name: view.alignment for name, view in bound.views.items()}


class _Append(_Write):
    __slots__ = ("interleaved",)
    counted_as = APPEND

    def __init__(self, op: str, arrays: Mapping[str, Tensor], interleaved: bool, backend: str | None) -> None:
        super().__init__(op, {"k": arrays["k"], **arrays}, ("append", interleaved), backend)
        self.interleaved = interleaved

    def bind(self, view: ViewOf) -> Bound:
        views = {name: view(tensor, name, self.op, "k") for name, tensor in self.tensors.items()}
        return Bound(append_problem(self.op, views, interleaved=self.interleaved), views, ())

    def plan(self, bound: Bound, device: Device, aligned: Mapping[str, bool]) -> Plan:
        assert isinstance(bound.problem, AppendProblem)
        return plan_append(bound.problem, bound.views, device.target, _alignments(bound))

    def through_host(self, device: Device | None) -> Results:
        bound = self.bind(view_on_host)
        assert isinstance(bound.problem, AppendProblem)
        append_on_host(bound.problem, bound.views, device)
        return ()


class _Copy(_Write):
    __slots__ = ("pairs",)

    def __init__(self, flat: Mapping[str, Tensor], pairs: npt.NDArray[np.int32], backend: str | None) -> None:
        super().__init__(COPY, flat, ("copy", len(pairs)), backend)
        self.pairs = pairs

    def placed(self, on_host: bool) -> Call:
        if not on_host:
            self.tensors["pairs"] = integers(self.pairs, self.first.device)
        return self

    def bind(self, view: ViewOf) -> Bound:
        flat = {name: tensor for name, tensor in self.tensors.items() if name != "pairs"}
        views = {name: replace(words(x), alignment=alignment(x.data_ptr())) for name, x in flat.items()}
        return Bound(len(self.pairs), views, ())

    def plan(self, bound: Bound, device: Device, aligned: Mapping[str, bool]) -> Plan:
        return plan_copy(len(self.pairs), bound.views, device.target, _alignments(bound))

    def through_host(self, device: Device | None) -> Results:
        bits = {name: tensor.view(_BITS[tensor.itemsize]).numpy() for name, tensor in self.tensors.items()}
        copy_on_host(self.pairs, bits, device)
        return ()
