"""Entry point of calls on torch tensors. Imported only if torch is already loaded.

Calls like an earlier one are launched at once (`repeated`). Other calls become a `Call`, which the route of the first
tensor computes (`route`); if a gradient is needed, `autograd` comes first. Where PyTorch traces, transforms or
intercepts operators, the call becomes an operator of `compile`, which takes the same routes when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from aule.dtypes import KERNEL_NAMES, dtype_name, shown
from aule.errors import BackendUnavailableError, InvalidDtypeError
from aule.frontends.numpy import VarlenFunctions
from aule.frontends.torch import decode as decoding
from aule.frontends.torch import passes, row_ops
from aule.frontends.torch import route as routes
from aule.frontends.torch.attention import Forward, repeat_key
from aule.frontends.torch.autograd import attention, varlen
from aule.frontends.torch.autograd import row_ops as row_gradients
from aule.frontends.torch.checks import no_gradient, require_dense, require_tensor
from aule.frontends.torch.flex import decode as flex_decode
from aule.frontends.torch.flex.trace import traced_pair
from aule.frontends.torch.launch import launch as launch
from aule.frontends.torch.modes import (
    any_autocast,
    autocast,
    cuda_autocast,
    dispatch_modes,
    dispatches,
    forward_ad,
    grad_enabled,
    needs_operator,
    read_by_dynamo,
    refuse_tracing,
    refuse_transforms,
    transform,
    transformed,
)
from aule.frontends.torch.repeated import repeat
from aule.frontends.torch.seeds import seed_on
from aule.frontends.torch.varlen import packed_call
from aule.ops.attention.precision import checked_precision
from aule.ops.attention.varlen import OP as VARLEN
from aule.ops.catalogue import CATALOGUE
from aule.ops.shared.checks import FLOAT_DTYPES, FLOATS, checked_deterministic, checked_dropout, checked_seed
from aule.ops.shared.spec import OpSpec
from aule.options import AttentionOptions, DecodeOptions

WithLse: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
"""A result, with its log-sum-exp where ``return_lse`` is set."""


def accepts(array: object) -> bool:
    """Whether this front end serves an array."""
    return isinstance(array, Tensor)


# -- attention ---------------------------------------------------------------------------------------------------------


def flash_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> WithLse:
    """Attention on torch tensors.

    The call must be an operator inside dispatch modes (which include the fake tensors of graph tracing), functorch
    transforms and forward-mode differentiation, and for subclasses with ``__torch_dispatch__``. An operator takes far
    longer than these checks, which are made in line because every call pays for them.
    """
    if read_by_dynamo():
        from aule.frontends.torch.compile import dynamo  # imports the compiler

        return dynamo.flash_attention(q, k, v, *options)
    if options.deterministic is False or options.deterministic is True:  # 1 is refused, and would be found as True
        found = repeat(options, (q, k, v)) if options.mask is None and options.out is None else None
        if found is None:
            key, tensors = repeat_key(q, k, v, options)
            found = None if key is options else repeat(key, tensors)  # the options themselves were tried already
        if found is not None:
            return _with_lse(found, True) if options.return_lse else found[0]
    if (
        type(options.dropout_p) is not float
        or options.dropout_p != 0.0
        or options.seed is not None
        or options.deterministic is not False
        or options.precision is not None
    ):
        options = completed("flash_attention", q, options)
    if (
        dispatch_modes()
        or transform() is not None
        or forward_ad._current_level >= 0
        or (type(q) is not Tensor and dispatches(q))
        or (type(k) is not Tensor and dispatches(k))
        or (type(v) is not Tensor and dispatches(v))
    ):
        return _attention_operator(q, k, v, options)
    if cuda_autocast() if q.is_cuda else any_autocast():
        q, k, v = autocast(q, k, v)
    if grad_enabled() and attention.needs_gradient(q, k, v, options):
        return attention.with_gradient(q, k, v, options)
    where = routes.route(q, options.backend)
    if not where.in_place and q.is_meta and getattr(k, "is_meta", False) and getattr(v, "is_meta", False):
        return _attention_operator(q, k, v, options)
    call = Forward(q, k, v, options)
    return _with_lse(where.compute(call), call.options.return_lse)


def _with_lse(found: tuple[Tensor | None, ...], return_lse: bool) -> WithLse:
    out = found[0]
    if not return_lse:
        return out
    lse = found[1]
    assert lse is not None
    return out, lse if lse.dtype is torch.float32 else lse.float()


def _attention_operator(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> WithLse:
    from aule.frontends.torch.compile import operators  # here and below: few programs use it

    return operators.flash_attention(q, k, v, options)


def completed(op: str, q: Tensor, options: AttentionOptions) -> AttentionOptions:
    """The options, checked, with a seed on the device of ``q`` if weights are dropped.

    A seed that is not given is drawn there from PyTorch's generator (see `seeds`). A compiled graph draws a new one
    each time, since this function is traced.
    """
    exactly = checked_deterministic(op, options.deterministic)
    options = options._replace(precision=checked_precision(op, options.precision))
    p = checked_dropout(op, options.dropout_p)
    number = checked_seed(op, options.seed)
    if p == 0.0:
        return options._replace(dropout_p=p, seed=None, deterministic=exactly)
    return options._replace(dropout_p=p, seed=seed_on(number, q.device), deterministic=exactly)


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: tuple[object, object],
    longest: tuple[int | None, int | None],
    options: AttentionOptions,
    functions: VarlenFunctions = (None, None),
) -> WithLse:
    """Attention on packed batches of torch tensors."""
    if read_by_dynamo():
        from aule.frontends.torch.compile import dynamo

        return dynamo.flash_attention_varlen(q, k, v, offsets, longest, options, functions)
    seeded = type(options.dropout_p) is not float or options.dropout_p != 0.0 or options.seed is not None
    if seeded or options.deterministic is not False:
        options = completed(VARLEN, q, options)
    refuse_tracing(VARLEN)
    refuse_transforms(VARLEN, (q, k, v, *offsets, *options.arrays().values()), varlen.REMEDY)
    q, k, v = autocast(q, k, v)
    packed = packed_call((q, k, v), offsets, longest, options, traced_pair(q, VARLEN, functions))
    return varlen.flash_attention_varlen(q, k, v, packed)


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Attention with functions of the user, and its log-sum-exp."""
    if read_by_dynamo():
        from aule.frontends.torch.compile import flex

        return flex.flex_attention(q, k, v, score_mod, block_mask, scale, backend)
    from aule.frontends.torch.flex import entry  # few programs use it

    return entry.flex_attention(q, k, v, score_mod, block_mask, scale, backend)


def max_scores(
    q: Tensor, k: Tensor, score_mod: Callable[..., Any] | None, block_mask: Any, scale: float | None
) -> Tensor:
    """The largest score of each row, after the functions of the user."""
    if read_by_dynamo():
        from aule.frontends.torch.compile import flex

        return flex.max_scores(q, k, score_mod, block_mask, scale)
    from aule.frontends.torch.flex import max_scores as largest

    return largest.max_scores(q, k, score_mod, block_mask, scale)


# -- decoding ----------------------------------------------------------------------------------------------------------


def decode(q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions) -> WithLse:
    """Attention over a cache of keys and values, of torch tensors."""
    if read_by_dynamo():
        from aule.frontends.torch.compile import dynamo

        return dynamo.decode(q, k, v, options)
    known = decoding.repeat_key(q, k, v, options)
    if known is not None:
        found = repeat(*known)
        if found is not None:
            return _with_lse(found, options.return_lse)
    if grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v)):
        remedy = "call it under torch.no_grad(), or use aule.flash_attention, which has gradients"
        raise no_gradient(None, remedy, options.op)
    given = (q, k, v, *options.arrays().values(), *options.indices().values())
    refuse_transforms(options.op, given, "call it outside of them, on all that is mapped at once")
    call = decoding.decode_call(q, k, v, options, None if known is None else known[0])
    if options.has_functions:
        call = flex_decode.with_functions(call)
    return _with_lse(routes.route(q, options.backend).compute(call), call.options.return_lse)


merge_states = decoding.merge_states


# -- row operations ----------------------------------------------------------------------------------------------------


def row_op(
    name: str, tensors: tuple[Tensor | None, ...], options: tuple[object, ...], backend: str | None
) -> Tensor | tuple[Tensor | None, ...]:
    """A row operation on torch tensors; ``tensors`` and ``options`` in the order of its spec."""
    if read_by_dynamo():
        from aule.frontends.torch.compile import dynamo

        return dynamo.row_op(name, tensors, options, backend)
    spec = CATALOGUE[name]
    options = row_ops.by_value(spec, options)
    found = repeat(*row_ops.repeat_key(spec, tensors, options, backend, spec.outputs))
    if found is not None:
        return row_gradients.seen(spec, found)
    if spec.seed is not None:
        p, number = checked_dropout(name, spec.option("dropout_p", options)), checked_seed(name, tensors[spec.seed])
        words = None if p == 0.0 else seed_on(number, tensors[0].device)  # type: ignore[union-attr]
        tensors = (*tensors[: spec.seed], words, *tensors[spec.seed + 1 :])
    for operand, x in zip(spec.operands, tensors, strict=True):
        if x is not None or not operand.optional:
            require_tensor(x, operand.name, name, spec.operands[0].name)
            if x.is_nested:  # type: ignore[union-attr]
                require_dense(x, operand.name, name)
    if any_autocast():
        tensors, options = _under_autocast(spec, tensors, options)
    if needs_operator(tensors):
        return _row_operator(spec, tensors, options, backend)
    if grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return row_gradients.with_gradient(spec, tensors, options, backend)
    return row_gradients.seen(spec, passes.compute(spec, tensors, options, backend, spec.outputs))


def _row_operator(
    spec: OpSpec, tensors: tuple[Tensor | None, ...], options: tuple[object, ...], backend: str | None
) -> Tensor | tuple[Tensor | None, ...]:
    """The op as an operator. Operators change nothing in place: the result is copied to where it is wanted."""
    where = row_ops.place(spec, options)
    if where is not None:
        fresh = _row_operator(spec, tensors, row_ops.not_in_place(spec, options), backend)
        return tensors[where].copy_(fresh)  # type: ignore[union-attr]
    refuse_tracing(spec.name)
    if transformed():
        return row_gradients.with_gradient(spec, tensors, options, backend)
    from aule.frontends.torch.compile import row_operators

    return row_operators.traced(spec, tensors, options, backend)


def _under_autocast(
    spec: OpSpec, tensors: tuple[Tensor | None, ...], options: tuple[object, ...]
) -> tuple[tuple[Tensor | None, ...], tuple[object, ...]]:
    """Apply autocast to a call, if it is on for the tensors' device.

    If rows have autocast's dtype, float32 weights are converted to it. float32 rows stay as they are: with a large
    mean, rounding before normalisation would lose their digits. Losses are float32, like PyTorch's own, because
    gradients are scaled by them.
    """
    x = tensors[0]
    assert x is not None
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):
        return tensors, options
    if spec.products and x.dtype == torch.get_autocast_dtype(kind):
        tensors = tuple(
            y.to(x.dtype) if y is not None and operand.name == "weight" and y.dtype == torch.float32 else y
            for operand, y in zip(spec.operands, tensors, strict=True)
        )
    return tensors, tuple(True if option.name == "wide" else y for option, y in zip(spec.options, options, strict=True))


# -- tensors -----------------------------------------------------------------------------------------------------------


def to_precision(tensor: Tensor, precision: str) -> Tensor:
    """Convert floats to a dtype (``"float16"`` ...); without a copy when they are that already."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = shown(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InvalidDtypeError(
            f"[attention] expected torch tensors of floats to convert to {precision}, got {got}; convert with .to"
        )
    return tensor.to(getattr(torch, precision))


def make(array: object, device: object, dtype: object, op: str) -> Tensor:
    """A NumPy array of float64 as a tensor on a device, by default the CPU, in a dtype, by default float32."""
    kind = "float32" if dtype is None else dtype_name(dtype)
    if KERNEL_NAMES.get(str(kind)) not in FLOAT_DTYPES:
        raise InvalidDtypeError(f"[{op}] expected dtype {FLOATS}, got {dtype!r}; choose one")
    made = torch.from_numpy(array).to(getattr(torch, str(kind)))
    try:
        return made if device is None else made.to(device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise BackendUnavailableError(
            "torch", f"[{op}] expected a device that PyTorch has, got {device!r} ({error}); pass device='cpu'"
        ) from error
