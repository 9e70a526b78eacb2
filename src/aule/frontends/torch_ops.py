"""Attention as operators of PyTorch, ``torch.ops.aule.attention`` and ``attention_backward``, for all that traces.

A graph, an exported program or a transform holds these; when they run they are `with_lse` and `gradients` of
`aule.frontends.torch_gradients`, so a compiled call computes what an eager one does. Importing this module registers
them, which a process that loads an exported program must do first.

An operator has a fixed list of arguments. ``return_lse`` and ``out`` are dealt with around it, a window is always two
sides, and what has no gradient is an empty tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from aule.errors import AuleError
from aule.frontends.torch_gradients import CONSTANT, check_gradients, gradients, no_second_derivative, with_lse
from aule.frontends.torch_host import no_gradient
from aule.frontends.torch_routes import autocast
from aule.frontends.torch_views import checked_out, dtype_name, refuse_tracing, require_tensor
from aule.frontends.torch_vmap import Mapped, one_by_one
from aule.ops.attention.validate import Operands, attention_problem, window_sides
from aule.options import AttentionOptions
from aule.view import TensorView

_ARRAYS = ("mask", "bias", "alibi_slopes", "sinks", "rope_cos", "rope_sin", "seed")
"""Options that are tensors, in the order of the operators' arguments."""
_PLAIN = {
    "causal": "bool",
    "scale": "float?",
    "window": "int[]",
    "softcap": "float",
    "rope_interleaved": "bool",
    "dropout_p": "float",
    "causal_align": "str",
    "deterministic": "bool",
    "backend": "str?",
    "precision": "str?",
}
"""Options that are not, with their types; these follow."""
_ADDED = ("mask", "bias", "sinks")
"""Whose gradients are made only where they are wanted."""
SCHEMA = ", ".join(
    [*(f"Tensor {name}" for name in "qkv"), *(f"Tensor? {name}" for name in _ARRAYS)]
    + [f"{kind} {name}" for name, kind in _PLAIN.items()]
)
_TENSORS = 3 + len(_ARRAYS)


def flash_attention(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Attention as `aule.frontends.torch.flash_attention` gives it, by way of the operator."""
    refuse_tracing()
    for name, tensor in {"q": q, "k": k, "v": v, **options.arrays()}.items():
        require_tensor(tensor, name)
    if torch.is_grad_enabled() and any(x.requires_grad for x in _given(q, k, v, options)):
        check_gradients(q, k, v, options)
    q, k, v = autocast(q, k, v)
    try:
        arguments = _arguments(options)
    except (TypeError, ValueError):
        _checked(q, k, v, options)  # says it better
        raise
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or torch.autograd.forward_ad._current_level >= 0:
        out, lse = _Attention.apply(q, k, v, *arguments)
    else:
        out, lse = torch.ops.aule.attention(q, k, v, *arguments)
    if options.out is not None:
        out = checked_out(options.out, tuple(out.shape), q).copy_(out)
    return (out, lse.to(torch.float32)) if options.return_lse else out


def _given(q: Any, k: Any, v: Any, options: AttentionOptions) -> list[Any]:
    return [x for x in (q, k, v, options.out, *options.arrays().values()) if isinstance(x, torch.Tensor)]


def _arguments(options: AttentionOptions) -> list[Any]:
    """What the operators take after q, k and v."""
    window = window_sides("flash_attention", options.window, bool(options.causal))
    plain = options._replace(
        causal=bool(options.causal),
        scale=None if options.scale is None else float(options.scale),
        window=window,
        softcap=0.0 if options.softcap is None else float(options.softcap),
        dropout_p=float(options.dropout_p),
    )
    return [getattr(plain, name) for name in (*_ARRAYS, *_PLAIN)]


def _options(arguments: Sequence[Any]) -> AttentionOptions:
    """The same as options again."""
    options = AttentionOptions(**dict(zip((*_ARRAYS, *_PLAIN), arguments, strict=True)), return_lse=True)
    return options._replace(window=tuple(options.window))  # type: ignore[arg-type]


# -- forward -----------------------------------------------------------------------------------------------------------


def _attention(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    """Attention, and its log-sum-exp in the type that is computed in."""
    return with_lse(q, k, v, _options(rest), training=False)


attention = torch.library.custom_op(
    "aule::attention", _attention, mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)"
)


def _attention_fake(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    operands = _checked(q, k, v, _options(rest))
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(operands.out_shape), q.new_empty(operands.lse_shape, dtype=work)


def _checked(q: Any, k: Any, v: Any, options: AttentionOptions) -> Operands:
    """Refuse while tracing what would be refused when it runs."""
    tensors = {"q": q, "k": k, "v": v, **options.arrays()}
    views: dict[str, Any] = {
        name: TensorView(dtype_name(x, name), tuple(x.shape), x.stride(), str(x.device), None)
        for name, x in tensors.items()
    }
    return attention_problem(**views, **options.plain())[1]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    tensors, ctx.plain = inputs[:_TENSORS], inputs[_TENSORS:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(call: Any, ctx: Any, dout: Any) -> tuple[Any, ...]:
    needs = dict(zip(_ARRAYS, ctx.needs_input_grad[3:], strict=False))
    for name in CONSTANT:
        if needs[name]:
            raise no_gradient(name, f"detach {name}, which has no gradient here")
    *tensors, out, lse = ctx.saved_tensors
    wanted = [needs[name] for name in _ADDED]
    dq, dk, dv, *added = call(dout, out, lse, *tensors, *ctx.plain, wanted)
    found = {name: grad for name, grad, want in zip(_ADDED, added, wanted, strict=True) if want}
    return (dq, dk, dv, *(found.get(name) for name in _ARRAYS), *(None for _ in _PLAIN))


attention.register_fake(_attention_fake)
attention.register_autograd(
    lambda ctx, dout, _: _backward(torch.ops.aule.attention_backward, ctx, dout), setup_context=_keep
)


# -- backward ----------------------------------------------------------------------------------------------------------


def _attention_backward(dout: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
    """Gradients of q, k, v and, where ``wanted``, of mask, bias and sinks, else empty."""
    *arguments, wanted = rest
    found = gradients(q, k, v, out, lse, dout, _options(arguments), wanted)
    return tuple(q.new_empty(0) if x is None else x for x in found)


attention_backward = torch.library.custom_op(
    "aule::attention_backward",
    _attention_backward,
    mutates_args=(),
    schema=f"(Tensor dout, Tensor out, Tensor lse, {SCHEMA}, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def mapped_gradients(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, options: AttentionOptions, wanted: Sequence[bool]
) -> tuple[Any, ...]:
    """`gradients` by way of the operator, of a ``dout`` that autograd has mapped."""
    flags = [bool(want) for want in wanted]
    found = torch.ops.aule.attention_backward(dout, out, lse, q, k, v, *_arguments(options), flags)
    return (*found[:3], *(x if want else None for x, want in zip(found[3:], flags, strict=True)))


def _attention_backward_fake(dout: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
    *arguments, wanted = rest
    options = _options(arguments)
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    added = [getattr(options, name) for name in _ADDED]
    return (*grads, *(x.new_empty(x.shape) if want else q.new_empty(0) for x, want in zip(added, wanted, strict=True)))


def _no_more(ctx: Any, *grads: Any) -> Any:
    raise no_second_derivative()


attention_backward.register_fake(_attention_backward_fake)
attention_backward.register_autograd(_no_more)


# -- what FlopCounterMode asks -----------------------------------------------------------------------------------------


def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two per multiply-add of both products, whatever masks leave out, as PyTorch counts its own."""
    return int(2 * math.prod(q_shape[:-1]) * k_shape[-2] * (q_shape[-1] + v_shape[-1]))


def _backward_flops(dout: Any, out: Any, lse: Any, q_shape: Any, k_shape: Any, v_shape: Any, *_: Any, **__: Any) -> int:
    """Three products over the head dimension and two over the values', as PyTorch counts its own."""
    return int(2 * math.prod(q_shape[:-1]) * k_shape[-2] * (3 * q_shape[-1] + 2 * v_shape[-1]))


register_flop_formula(torch.ops.aule.attention)(_flops)
register_flop_formula(torch.ops.aule.attention_backward)(_backward_flops)


# -- functorch ---------------------------------------------------------------------------------------------------------


def _map_forward(call: Any, info: Any, dims: Any, *arguments: Any) -> Any:
    mapped = _mapped(info, dims, arguments)
    if mapped is None:
        return one_by_one(call, info.batch_size, dims, arguments)
    out, lse = call(*_folded(mapped, dims, arguments))
    return (mapped.unfold(out), mapped.unfold(lse)), (0, 0)


def _map_backward(call: Any, info: Any, dims: Any, *arguments: Any) -> Any:
    dout, out, lse, *rest = arguments
    *inner, wanted = rest
    mapped = None if any(wanted) else _mapped(info, dims[3:-1], inner)
    if mapped is None:
        return one_by_one(call, info.batch_size, dims, arguments)
    results = (mapped.fold(dout, dims[0]), mapped.fold(out, dims[1]), mapped.fold(lse, dims[2], 3))
    dq, dk, dv, *added = call(*results, *_folded(mapped, dims[3:-1], inner), wanted)
    return (*map(mapped.unfold, (dq, dk, dv)), *added), (0, 0, 0, *(None for _ in added))


def _mapped(info: Any, dims: Sequence[Any], arguments: Sequence[Any]) -> Mapped | None:
    """How the call is folded; None when it cannot be.

    That is where a tensor is mapped that has no axis of batches, and where weights are dropped: which ones depends on
    the number of a batch.
    """
    mapped = Mapped(info.batch_size, arguments[0], dims[0])
    tensors = dict(zip(("q", "k", "v", *_ARRAYS), zip(arguments, dims, strict=True), strict=False))
    single = {name: None if x is None else mapped.one(x, dim) for name, (x, dim) in tensors.items()}
    options = _options([*(single[name] for name in _ARRAYS), *arguments[_TENSORS:]])
    _checked(single["q"], single["k"], single["v"], options)
    if options.dropout_p > 0:
        return None
    folds = ("q", "k", "v", "mask", "bias", *CONSTANT)
    return mapped if all(name in folds or dim is None for name, (_, dim) in tensors.items()) else None


def _folded(mapped: Mapped, dims: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    result = [mapped.fold(x, dim) for x, dim in zip(arguments[:3], dims[:3], strict=True)]
    folds = {"mask": mapped.fold_scores, "bias": mapped.fold_scores, "alibi_slopes": mapped.fold_slopes}
    folds |= {"rope_cos": mapped.fold_table, "rope_sin": mapped.fold_table}
    for name, x, dim in zip(_ARRAYS, arguments[3:], dims[3:], strict=False):
        result.append(folds[name](x, dim) if x is not None and name in folds else x)
    return [*result, *arguments[_TENSORS:]]


attention.register_vmap(lambda info, dims, *arguments: _map_forward(torch.ops.aule.attention, info, dims, *arguments))
attention_backward.register_vmap(
    lambda info, dims, *arguments: _map_backward(torch.ops.aule.attention_backward, info, dims, *arguments)
)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The operator for functorch, whose transforms of derivatives pass over those that operators have."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.aule.attention(*arguments)

    setup_context = staticmethod(_keep)

    @staticmethod
    def backward(ctx: Any, dout: Any, _: Any) -> Any:
        return _backward(_AttentionBackward.apply, ctx, dout)

    @staticmethod
    def vmap(info: Any, dims: Any, *arguments: Any) -> Any:
        return _map_forward(_Attention.apply, info, dims, *arguments)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise AuleError(
            "AULE_ERROR_NO_GRADIENT",
            "[flash_attention] expected reverse-mode differentiation, got forward mode (jvp); use torch.func.vjp",
        )


class _AttentionBackward(torch.autograd.Function):  # type: ignore[misc]
    """Its gradient, likewise."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.aule.attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise no_second_derivative()

    @staticmethod
    def vmap(info: Any, dims: Any, *arguments: Any) -> Any:
        return _map_backward(_AttentionBackward.apply, info, dims, *arguments)
