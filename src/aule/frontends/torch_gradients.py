"""Attention that can be differentiated, on whatever route the tensors take.

`with_lse` and `gradients` are the two passes; eager calls reach them through autograd here, traced and transformed ones
through the operators of `torch_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aule.errors import AuleError
from aule.frontends import torch_routes
from aule.frontends.torch_cuda import cuda_gradients, on_cuda
from aule.frontends.torch_host import host_gradients, host_with_lse, no_gradient
from aule.frontends.torch_stage import staged_gradients, staged_with_lse
from aule.frontends.torch_views import keyed, require_tensor
from aule.options import AttentionOptions


def needs_gradient(q: Any, k: Any, v: Any, options: AttentionOptions) -> bool:
    """Asked on every call: a loop over all of them would cost more than the rest of a repeated one."""
    if q.requires_grad or getattr(k, "requires_grad", False) or getattr(v, "requires_grad", False):
        return True
    mask, bias, slopes, sinks, out = options.mask, options.bias, options.alibi_slopes, options.sinks, options.out
    cos = options.rope_cos
    if mask is None and bias is None and slopes is None and sinks is None and cos is None and out is None:
        return False
    return any(getattr(x, "requires_grad", False) for x in (mask, bias, slopes, sinks, cos, options.rope_sin, out))


CONSTANT = ("alibi_slopes", "rope_cos", "rope_sin")
"""Options that are tensors of floats and have no gradient."""


def check_gradients(q: Any, k: Any, v: Any, options: AttentionOptions) -> None:
    """Refuse what has no gradient but wants one."""
    for name in (*CONSTANT, "out"):
        if getattr(getattr(options, name), "requires_grad", False):
            raise no_gradient(name, f"detach {name}, which has no gradient here")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_tensor(tensor, name)
    if options.out is not None:
        raise no_gradient("out=", "leave out= away, or call it under torch.no_grad()")


def with_gradient(q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
    """Attention whose result can be differentiated with respect to q, k, v, additive masks, bias and sinks."""
    check_gradients(q, k, v, options)
    options = keyed("flash_attention", options)
    # As arguments of their own, so that autograd sees them.
    out, lse = _Attention.apply(q, k, v, options.mask, options.bias, options.sinks, options)
    return (out, lse) if options.return_lse else out


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Attention with its gradient, on whatever device."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any, options: AttentionOptions) -> Any:
        out, lse = with_lse(q, k, v, options, training=True)
        # Tensors are kept as such.
        ctx.options = options._replace(mask=None, bias=None, sinks=None, rope_cos=None, rope_sin=None, seed=None)
        tables = options.rope_cos, options.rope_sin
        ctx.save_for_backward(q, k, v, out, lse, mask, bias, sinks, *tables, options.seed)
        shown = lse.to(torch.float32)
        ctx.mark_non_differentiable(shown)
        return out, shown

    @staticmethod
    def backward(ctx: Any, dout: Any, _: Any) -> Any:
        # Raises when one of them was changed in place since. Once, for they may be made anew each time, and
        # checkpointing does not make them twice.
        kept = ctx.saved_tensors
        q, k, v, out, lse, mask, bias, sinks, cos, sin, seed = kept
        options = ctx.options._replace(mask=mask, bias=bias, sinks=sinks, rope_cos=cos, rope_sin=sin, seed=seed)
        with torch.no_grad():
            found = gradients(q, k, v, out, lse, dout, options, ctx.needs_input_grad[3:6])
        return (*last(found, dout, *kept), None)


# -- the two passes ----------------------------------------------------------------------------------------------------


def with_lse(q: Any, k: Any, v: Any, options: AttentionOptions, *, training: bool) -> tuple[Any, Any]:
    """Attention and its log-sum-exp in the type that is computed in, both fresh and contiguous, for `gradients`.

    Where nothing but NumPy is there, which has no gradients, ``training`` refuses.
    """
    options = options._replace(return_lse=True, out=None)
    where = torch_routes.route(q, options.backend)
    if where == "cuda":
        return on_cuda(q, k, v, options)  # type: ignore[no-any-return]
    if where == "host":
        return host_with_lse(q, k, v, options, training=training)
    if where == "mps":
        return torch_routes.mps().on_mps(q, k, v, options)  # type: ignore[no-any-return]
    return staged_with_lse(q, k, v, options, training=training)


def gradients(
    q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, options: AttentionOptions, wanted: Sequence[bool]
) -> tuple[Any, ...]:
    """Gradients of q, k and v, and of mask, bias and sinks where they are wanted, else None, from what `with_lse` gave.

    Parameters
    ----------
    wanted : sequence of bool
        Whether for mask, bias and sinks.
    """
    if not options.deterministic and torch.are_deterministic_algorithms_enabled():
        options = options._replace(deterministic=True)
    scores = any(wanted[:2])
    dout = dout.resolve_neg()  # nobody can be told to hand over another
    lse = lse.contiguous()  # kernels take it so; a mapped call may have expanded it
    where = torch_routes.route(q, options.backend)
    if where == "cuda":
        grads, ds = cuda_gradients(q, k, v, out, lse, dout, options, scores)
    elif where == "mps":
        grads, ds = torch_routes.mps().mps_gradients(q, k, v, out, lse, dout, options, scores)
    elif where == "host":
        grads, ds = host_gradients(q, k, v, out, lse, dout, options, scores)
    else:
        grads, ds = staged_gradients(q, k, v, out, lse, dout, options, scores)
    added: list[Any] = []
    for want, tensor in zip(wanted, (options.mask, options.bias), strict=False):
        # What was broadcast is summed over.
        added.append(ds.sum_to_size(tensor.shape).to(tensor.dtype) if want else None)
    if not wanted[2]:
        return (*grads, *added, None)
    work, sinks = lse.dtype, options.sinks
    delta = (dout.to(work) * out.to(work)).sum(-1)
    weight = torch.exp(sinks.to(work)[:, None] - lse)  # of the sink, in every row
    return (*grads, *added, -(weight * delta).reshape(-1, *lse.shape[-2:]).sum((0, 2)).to(sinks.dtype))


# -- and no further ----------------------------------------------------------------------------------------------------


def no_second_derivative(op: str = "flash_attention") -> AuleError:
    """The error for a gradient of a gradient."""
    theirs = "PyTorch's own operators"
    if op == "flash_attention":
        theirs = "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
    return AuleError(
        "AULE_ERROR_NO_GRADIENT",
        f"[{op}] expected one derivative, got a second; use {theirs} where you need it",
    )


def last(found: tuple[Any, ...], *inputs: Any, op: str = "flash_attention") -> tuple[Any, ...]:
    """Gradients that say clearly that they cannot be differentiated again, instead of being taken for constants."""
    if not torch.is_grad_enabled():
        return found
    given = [x for x in inputs if x is not None]
    return tuple(None if grad is None else _Last.apply(op, grad, *given) for grad in found)


class _Last(torch.autograd.Function):  # type: ignore[misc]
    """A gradient on whose own gradient there is nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: str, grad: Any, *inputs: Any) -> Any:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise no_second_derivative(ctx.op)
