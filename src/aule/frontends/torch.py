"""PyTorch tensors. Imported only when torch is loaded already.

Calls come in here, and leave by the route that their tensors take (`torch_routes`): CUDA tensors are used in place on
the current stream (`torch_cuda`), CPU tensors where they lie (`torch_host`), MPS tensors too (`torch_mps`), and tensors
elsewhere (ROCm, XPU) are staged through the host (`torch_stage`). Those that need gradients go through autograd first
(`torch_gradients`).

All that holds for calls which compute at once. Where PyTorch traces, transforms or intercepts operators, the call
becomes the operator of `torch_ops`, which comes to the same routes when it runs.
"""

from __future__ import annotations

from typing import Any

import torch

from aule.errors import BackendUnavailableError, InvalidDtypeError
from aule.frontends import torch_decode, torch_fused, torch_routes
from aule.frontends.torch_cuda import on_cuda, repeated
from aule.frontends.torch_gradients import needs_gradient, with_gradient
from aule.frontends.torch_host import on_host
from aule.frontends.torch_routes import autocast, dispatches
from aule.frontends.torch_seeds import seed_on
from aule.frontends.torch_stage import staged
from aule.frontends.torch_views import NAMES
from aule.ops.attention.precision import checked_precision
from aule.ops.attention.validate import FLOAT_DTYPES, checked_deterministic, checked_dropout, checked_seed
from aule.options import AttentionOptions, DecodeOptions

_Tensor = torch.Tensor
# By names of this module: what is asked on every call, each a few dozen nanoseconds, would take as long to be found.
_read_by_dynamo = torch.compiler.is_dynamo_compiling  # only while it reads this code, not while a graph is traced
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_forward_ad = torch.autograd.forward_ad
_any_autocast = torch._C._is_any_autocast_enabled
_cuda_autocast = torch.is_autocast_enabled  # half the price of the one above
_grad_enabled = torch.is_grad_enabled
_CUDA_BUILD = torch_routes.CUDA_BUILD


def accepts(array: object) -> bool:
    """Whether this front end serves an array."""
    return isinstance(array, torch.Tensor)


def flash_attention(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Attention on torch tensors.

    PyTorch must see an operator where the elements are not simply in memory, or others watch the call: inside of
    dispatch modes (fake tensors, with which graphs are traced, among them), functorch transforms and forward-mode
    differentiation, and for subclasses with ``__torch_dispatch__``. An operator costs tens of microseconds, so it is
    asked for on every call, in line, at a third of one.
    """
    if _read_by_dynamo():
        from aule.frontends import torch_traced  # which imports the compiler

        return torch_traced.flash_attention(q, k, v, *options)
    try:
        again = repeated.get(options)
    except TypeError:  # a window given as a list, or an array of NumPy
        again = None
    if again is not None:
        out = again(q, k, v)
        if out is not None:
            return out
    if (
        type(options.dropout_p) is not float
        or options.dropout_p != 0.0
        or options.seed is not None
        or options.deterministic is not False
        or options.precision is not None
    ):
        options = _completed("flash_attention", q, options)
    if (
        _dispatch_modes()
        or _transform() is not None
        or _forward_ad._current_level >= 0
        or (type(q) is not _Tensor and dispatches(q))
        or (type(k) is not _Tensor and dispatches(k))
        or (type(v) is not _Tensor and dispatches(v))
    ):
        return _operator(q, k, v, options)
    cuda = q.is_cuda
    if _cuda_autocast() if cuda else _any_autocast():
        q, k, v = autocast(q, k, v)
    if _grad_enabled() and needs_gradient(q, k, v, options):
        return with_gradient(q, k, v, options)
    if cuda and _CUDA_BUILD and options.backend is None:  # the way that counts, without a further question
        return on_cuda(q, k, v, options)
    where = torch_routes.route(q, options.backend)
    if where == "cuda":
        return on_cuda(q, k, v, options)
    if where == "host":
        return on_host(q, k, v, options)
    if where == "mps":
        return torch_routes.mps().on_mps(q, k, v, options)
    if q.is_meta and getattr(k, "is_meta", False) and getattr(v, "is_meta", False):
        return _operator(q, k, v, options)
    return staged(q, k, v, options)


def _operator(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    from aule.frontends import torch_ops  # here and below: of use to few programs

    return torch_ops.flash_attention(q, k, v, options)


def flash_attention_varlen(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int | None, max_k: int | None, options: AttentionOptions
) -> Any:
    """Attention on packed batches of torch tensors."""
    if _read_by_dynamo():
        from aule.frontends import torch_traced  # which imports the compiler

        return torch_traced.flash_attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, options)
    from aule.frontends import torch_varlen

    seeded = type(options.dropout_p) is not float or options.dropout_p != 0.0 or options.seed is not None
    if seeded or options.deterministic is not False:
        options = _completed("flash_attention_varlen", q, options)
    return torch_varlen.flash_attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, options)


def fused(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...], backend: str | None) -> Any:
    """An op of the catalogue on torch tensors."""
    if _read_by_dynamo():
        from aule.frontends import torch_traced  # which imports the compiler

        return torch_traced.fused(name, tensors, options, backend)
    return torch_fused.fused(name, tensors, options, backend)


def decode(q: Any, k: Any, v: Any, options: DecodeOptions) -> Any:
    """Attention over a cache of keys and values, of torch tensors."""
    if _read_by_dynamo():
        from aule.frontends import torch_traced  # which imports the compiler

        return torch_traced.decode(q, k, v, options)
    return torch_decode.decode(q, k, v, options)


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Results over disjoint keys put together, of torch tensors."""
    return torch_decode.merge_states(o_a, lse_a, o_b, lse_b)


def _completed(op: str, q: Any, options: AttentionOptions) -> AttentionOptions:
    """The options with a seed on the device of ``q`` where weights are dropped: the given one, or one drawn there from
    PyTorch's generator, which `torch.manual_seed` sets. Nothing waits for the device, and a CUDA graph can hold it; a
    compiled one draws anew each time, since this is traced."""
    exactly = checked_deterministic(op, options.deterministic)
    checked_precision(op, options.precision)
    p = checked_dropout(op, options.dropout_p)
    number = checked_seed(op, options.seed)
    if p == 0.0:
        return options._replace(dropout_p=p, seed=None, deterministic=exactly)
    return options._replace(dropout_p=p, seed=seed_on(number, q.device), deterministic=exactly)


_PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def to_precision(tensor: Any, precision: str) -> Any:
    """Convert floats to ``"fp16"``, ``"bf16"`` or ``"fp32"``; without a copy when they are that already."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InvalidDtypeError(
            f"[attention] expected torch tensors of floats to convert to {precision}, got {got}; convert with .to"
        )
    return tensor.to(_PRECISIONS[precision])


def make(array: Any, device: Any, dtype: Any, op: str) -> Any:
    """A NumPy array of float64 as a tensor on a device, by default the CPU, in a dtype, by default float32."""
    kind = torch.float32 if dtype is None else dtype
    if not isinstance(kind, torch.dtype) or NAMES.get(kind) not in FLOAT_DTYPES:
        raise InvalidDtypeError(f"[{op}] expected dtype as a float type of torch, got {dtype!r}; such as torch.float32")
    made = torch.from_numpy(array).to(kind)
    try:
        return made if device is None else made.to(device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise BackendUnavailableError(
            "torch", f"[{op}] expected a device that PyTorch has, got {device!r} ({error}); pass device='cpu'"
        ) from error
