"""PyTorch's state around a call: autocast, transforms, modes and tensor subclasses."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from aule.errors import AuleError

# Bound to names of this module because every call uses them: an attribute look-up takes as long as the function.
read_by_dynamo = torch.compiler.is_dynamo_compiling  # only while Dynamo reads this code, not while a graph is traced
dispatch_modes = torch._C._len_torch_dispatch_stack
transform = torch._C._functorch.peek_interpreter_stack
forward_ad = torch.autograd.forward_ad
any_autocast = torch._C._is_any_autocast_enabled
cuda_autocast = torch.is_autocast_enabled  # cheaper than any_autocast
grad_enabled = torch.is_grad_enabled

_functorch = torch._C._functorch
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


def dispatches(x: object) -> bool:
    """Whether x is a tensor subclass that handles operators itself."""
    return isinstance(x, Tensor) and type(x).__torch_dispatch__ is not _PLAIN_DISPATCH


def wrapped(x: Tensor) -> bool:
    """Whether a tensor is a wrapper of functorch or vmap around the tensors in memory.

    Such tensors exist inside functorch transforms, and outlive them when the function of ``torch.func.vjp`` is called,
    or under autograd's ``is_grads_batched``.
    """
    return bool(_functorch.is_functorch_wrapped_tensor(x) or _functorch.is_legacy_batchedtensor(x))


def transformed() -> bool:
    """Whether a functorch transform or forward-mode differentiation is under way."""
    return transform() is not None or forward_ad._current_level >= 0


def needs_operator(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the call must be an operator: a mode or transform is active, or a tensor is wrapped or has no memory."""
    return bool(
        dispatch_modes()
        or transform() is not None
        or forward_ad._current_level >= 0
        or any(x is not None and (wrapped(x) or (type(x) is not Tensor and dispatches(x))) for x in tensors)
        or (tensors[0] is not None and tensors[0].is_meta)
    )


def refuse_transforms(op: str, tensors: Iterable[object], remedy: str) -> None:
    """Refuse transforms, modes and tensors that only an operator could handle, for functions that have none."""
    given = [x for x in tensors if isinstance(x, Tensor)]
    got = next((type(x).__name__ for x in given if dispatches(x)), None) or _intercepting()
    if got is None and any(map(wrapped, given)):
        got = "a mapped one"
    if got is not None:
        raise AuleError(
            "AULE_ERROR_UNSUPPORTED", f"[{op}] expected plain tensors outside of transforms, got {got}; {remedy}"
        )


def in_onnx_export() -> bool:
    """Whether ``torch.onnx.export`` traces this call, which translates PyTorch's own operators only."""
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and bool(onnx.is_in_onnx_export())


def _intercepting() -> str | None:
    """The transform or mode under which a call without an operator would be missed, or get results without memory."""
    if transform() is not None:
        return "a functorch transform"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if not dispatch_modes():
        return None
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return "a graph that is traced"
    made = torch.empty(0, device="cpu")
    return f"a mode that makes a {type(made).__name__} of every tensor" if dispatches(made) else None


def refuse_tracing(op: str = "flash_attention") -> None:
    """Refuse TorchScript's tracing. Checked for new signatures only: while tracing, every signature is new."""
    if torch._C._get_tracing_state() is not None:
        raise AuleError(
            "AULE_ERROR_UNSUPPORTED",
            f"[{op}] expected no torch.jit.trace, which makes tensors of lengths, got one; use torch.export",
        )


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Apply autocast for the device of the first tensor: floats other than float64 take its dtype."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )
