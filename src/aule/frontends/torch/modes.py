"""PyTorch's state around a call: autocast, transforms, modes and tensor subclasses."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from aule.engine import observe
from aule.errors import AuleError

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Bound to names of this module because every call uses them: an attribute look-up takes as long as the function.
read_by_dynamo = torch.compiler.is_dynamo_compiling  # only while Dynamo reads this code, not while a graph is traced
dispatch_modes = torch._C._len_torch_dispatch_stack
transform = torch._C._functorch.peek_interpreter_stack
forward_ad = torch.autograd.forward_ad
any_autocast = torch._C._is_any_autocast_enabled
cuda_autocast = torch.is_autocast_enabled  # cheaper than any_autocast
grad_enabled = torch.is_grad_enabled

profiler: Any = torch.autograd.profiler
"""Its ``_is_profiler_enabled`` says whether a profiler records, or PyTorch's NVTX ranges are on."""
if not hasattr(profiler, "_is_profiler_enabled"):  # a PyTorch that says so elsewhere, or not at all
    profiler = SimpleNamespace(_is_profiler_enabled=False)

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


# -- what users see of a call ------------------------------------------------------------------------------------------


def called_by(name: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Mark a function of an integration, so that `aule.dispatch_stats` counts the calls inside under its name.

    In code that Dynamo reads the function is unchanged: the calls are counted as ``compiled`` when they run.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if read_by_dynamo():
                return function(*args, **kwargs)
            with observe.called_by(name):
                return function(*args, **kwargs)

        return call

    return decorate


def as_operator(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark the function of an operator: its calls are counted as ``compiled``, unless an integration makes them."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        name = observe.caller.get()
        with observe.called_by("compiled" if name == "direct" else name):
            return function(*args, **kwargs)

    return call


def _nvtx() -> tuple[Callable[[str], Any], Callable[[], Any]] | None:
    """PyTorch's own functions of NVTX, or of ROCTX where it is built for ROCm; None without them."""
    return (torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop) if torch.version.cuda or torch.version.hip else None


observe.add_profiler(lambda: profiler._is_profiler_enabled, torch.autograd.profiler.record_function)
observe.other_markers.append(_nvtx)
