"""Attention as operators of PyTorch, ``torch.ops.aule.attention`` and ``attention_backward``, for tracing.

A graph, an exported program or a transform holds these; when they run they call `aule.frontends.torch.passes`, so a
compiled call computes the same as an eager one. Importing this module registers them; `aule.api.exported` does so
before an exported program is loaded.

An operator has a fixed list of arguments. ``return_lse`` and ``out`` are handled around it, a window is always two
sides, and a missing gradient is an empty tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from aule.frontends.torch.attention import ARRAYS, Saved
from aule.frontends.torch.autograd.attention import CONSTANT, check_gradients
from aule.frontends.torch.calls import Results
from aule.frontends.torch.checks import (
    checked_out,
    dtype_name,
    no_forward_mode,
    no_gradient,
    no_second_derivative,
    require_dense,
    require_tensor,
)
from aule.frontends.torch.compile import formulas
from aule.frontends.torch.compile.vmap import Dim, Info, Mapped, one_by_one
from aule.frontends.torch.modes import as_operator, autocast, in_onnx_export, refuse_tracing, transformed
from aule.frontends.torch.passes import forward_with_lse, gradients
from aule.frontends.torch.views import work_dtype
from aule.ops.attention.validate import Operands, attention_problem, window_sides
from aule.options import AttentionOptions
from aule.view import TensorView

_ARRAYS = tuple(ARRAYS)
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
"""Options that are no tensors, with their types; these follow."""
_ADDED = ("mask", "bias", "sinks")
"""Options whose gradients are computed only if they are wanted."""
SCHEMA = ", ".join(
    [*(f"Tensor {name}" for name in "qkv"), *(f"Tensor? {name}" for name in _ARRAYS)]
    + [f"{kind} {name}" for name, kind in _PLAIN.items()]
)
_TENSORS = 3 + len(_ARRAYS)
Operator = Callable[..., tuple[Tensor, ...]]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor | tuple[Tensor, Tensor]:
    """`aule.frontends.torch.entry.flash_attention` by the operator."""
    refuse_tracing()
    tensors = {"q": q, "k": k, "v": v, **options.arrays()}
    for name, tensor in tensors.items():
        require_tensor(tensor, name)
        if tensor.is_nested:
            require_dense(tensor, name, "flash_attention")
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (*tensors.values(), options.out)):
        check_gradients(q, k, v, options)
    q, k, v = autocast(q, k, v)
    try:
        arguments = _arguments(options)
    except (TypeError, ValueError):
        _checked(q, k, v, options)  # raises a better message
        raise
    if in_onnx_export():
        plain = _options(arguments)._replace(return_lse=options.return_lse)
        _checked(q, k, v, plain)
        out, lse = formulas.attention(q, k, v, plain)
    elif transformed():
        out, lse = _Attention.apply(q, k, v, *arguments)
    else:
        out, lse = torch.ops.aule.attention(q, k, v, *arguments)
    if options.out is not None:
        out = checked_out(options.out, tuple(out.shape), q).copy_(out)
    return (out, lse.to(torch.float32)) if options.return_lse else out


def _arguments(options: AttentionOptions) -> list[Any]:
    """Arguments of the operators after q, k and v."""
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
    """Options from arguments of the operators."""
    options = AttentionOptions(**dict(zip((*_ARRAYS, *_PLAIN), arguments, strict=True)), return_lse=True)
    return options._replace(window=tuple(options.window))  # type: ignore[arg-type]


# -- forward -----------------------------------------------------------------------------------------------------------


@as_operator
def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Attention, and its log-sum-exp in the type computed in."""
    return forward_with_lse(q, k, v, _options(rest), training=False)


attention = torch.library.custom_op(
    "aule::attention", _attention, mutates_args=(), schema=f"({SCHEMA}) -> (Tensor, Tensor)"
)


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    operands = _checked(q, k, v, _options(rest))
    return q.new_empty(operands.out_shape), q.new_empty(operands.lse_shape, dtype=work_dtype(q))


def _checked(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Operands:
    """Check a call while it is traced."""
    views: dict[str, Any] = {
        name: TensorView(dtype_name(x, name), tuple(x.shape), x.stride(), str(x.device), None)
        for name, x in {"q": q, "k": k, "v": v, **options.arrays()}.items()
    }
    return attention_problem(**views, **options.plain())[1]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.plain = inputs[:_TENSORS], inputs[_TENSORS:]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(call: Operator, ctx: Any, dout: Tensor) -> Results:
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


@as_operator
def _attention_backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and, where ``wanted``, of mask, bias and sinks, else empty."""
    *arguments, wanted = rest
    found = gradients(Saved(q, k, v, out, lse, dout), _options(arguments), wanted)
    return tuple(q.new_empty(0) if x is None else x for x in found)


attention_backward = torch.library.custom_op(
    "aule::attention_backward",
    _attention_backward,
    mutates_args=(),
    schema=f"(Tensor dout, Tensor out, Tensor lse, {SCHEMA}, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def mapped_gradients(saved: Saved, options: AttentionOptions, wanted: Sequence[bool]) -> Results:
    """`gradients` by the operator, for a ``dout`` that autograd has mapped."""
    flags = [bool(want) for want in wanted]
    q, k, v, out, lse, dout = saved
    found = torch.ops.aule.attention_backward(dout, out, lse, q, k, v, *_arguments(options), flags)
    return (*found[:3], *(x if want else None for x, want in zip(found[3:], flags, strict=True)))


def _attention_backward_fake(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *arguments, wanted = rest
    options = _options(arguments)
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    added = [getattr(options, name) for name in _ADDED]
    return (*grads, *(x.new_empty(x.shape) if want else q.new_empty(0) for x, want in zip(added, wanted, strict=True)))


def _no_more(ctx: Any, *grads: Tensor) -> NoReturn:
    raise no_second_derivative()


attention_backward.register_fake(_attention_backward_fake)
attention_backward.register_autograd(_no_more)


# -- FlopCounterMode ---------------------------------------------------------------------------------------------------

Shape = Sequence[int]


def flops(q_shape: Shape, k_shape: Shape, v_shape: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two per multiply-add of both products, whatever masks leave out, as PyTorch counts its own."""
    return int(2 * math.prod(q_shape[:-1]) * k_shape[-2] * (q_shape[-1] + v_shape[-1]))


def backward_flops(
    dout: Shape, out: Shape, lse: Shape, q_shape: Shape, k_shape: Shape, v_shape: Shape, *_: Any, **__: Any
) -> int:
    """Three products over the head dimension and two over the values', as PyTorch counts its own."""
    return int(2 * math.prod(q_shape[:-1]) * k_shape[-2] * (3 * q_shape[-1] + 2 * v_shape[-1]))


register_flop_formula(torch.ops.aule.attention)(flops)
register_flop_formula(torch.ops.aule.attention_backward)(backward_flops)


# -- functorch ---------------------------------------------------------------------------------------------------------

Mapping = tuple[tuple[Tensor, ...], tuple["int | None", ...]]
"""Results of a mapped call, and where each has the mapped axis."""


def _map_forward(call: Operator, info: Info, dims: Sequence[Dim], *arguments: Any) -> Mapping:
    mapped = _mapped(info, dims, arguments)
    if mapped is None:
        return one_by_one(call, info.batch_size, dims, arguments)
    out, lse = call(*_folded(mapped, dims, arguments))
    return (mapped.unfold(out), mapped.unfold(lse)), (0, 0)


def _map_backward(call: Operator, info: Info, dims: Sequence[Dim], *arguments: Any) -> Mapping:
    dout, out, lse, *rest = arguments
    *inner, wanted = rest
    mapped = None if any(wanted) else _mapped(info, dims[3:-1], inner)
    if mapped is None:
        return one_by_one(call, info.batch_size, dims, arguments)
    results = (mapped.fold(dout, dims[0]), mapped.fold(out, dims[1]), mapped.fold(lse, dims[2], 3))
    dq, dk, dv, *added = call(*results, *_folded(mapped, dims[3:-1], inner), wanted)
    return (*map(mapped.unfold, (dq, dk, dv)), *added), (0, 0, 0, *(None for _ in added))


def _mapped(info: Info, dims: Sequence[Dim], arguments: Sequence[Any]) -> Mapped | None:
    """How the call is folded into one batch; None if a mapped tensor has no batch axis, or with dropout.

    Which weights are dropped depends on the batch number.
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


def _folded(mapped: Mapped, dims: Sequence[Dim], arguments: Sequence[Any]) -> list[Any]:
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
    """The operator for functorch, whose transforms of derivatives ignore those that operators register."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.aule.attention(*arguments)  # type: ignore[no-any-return]

    setup_context = staticmethod(_keep)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> Results:
        return _backward(_AttentionBackward.apply, ctx, dout)

    @staticmethod
    def vmap(info: Info, dims: Sequence[Dim], *arguments: Any) -> Mapping:
        return _map_forward(_Attention.apply, info, dims, *arguments)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise no_forward_mode()


class _AttentionBackward(torch.autograd.Function):  # type: ignore[misc]
    """The gradient of `_Attention` for functorch."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return torch.ops.aule.attention_backward(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise no_second_derivative()

    @staticmethod
    def vmap(info: Info, dims: Sequence[Dim], *arguments: Any) -> Mapping:
        return _map_backward(_AttentionBackward.apply, info, dims, *arguments)
