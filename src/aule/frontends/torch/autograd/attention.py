"""Attention that can be differentiated with respect to q, k, v, additive masks, bias and sinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aule.engine import observe
from aule.frontends.torch.attention import Saved
from aule.frontends.torch.autograd.refuse import refuse_second
from aule.frontends.torch.calls import Results
from aule.frontends.torch.checks import keyed, no_gradient, require_tensor
from aule.frontends.torch.passes import forward_with_lse, gradients
from aule.options import AttentionOptions

CONSTANT = ("alibi_slopes", "rope_cos", "rope_sin")
"""Options that are tensors of floats and have no gradient."""


def needs_gradient(q: Tensor, k: object, v: object, options: AttentionOptions) -> bool:
    """Whether a tensor of a call needs a gradient. Written out because every call pays for it."""
    if q.requires_grad or getattr(k, "requires_grad", False) or getattr(v, "requires_grad", False):
        return True
    mask, bias, slopes, sinks, out = options.mask, options.bias, options.alibi_slopes, options.sinks, options.out
    cos = options.rope_cos
    if mask is None and bias is None and slopes is None and sinks is None and cos is None and out is None:
        return False
    return any(getattr(x, "requires_grad", False) for x in (mask, bias, slopes, sinks, cos, options.rope_sin, out))


def check_gradients(q: Tensor, k: object, v: object, options: AttentionOptions) -> None:
    """Refuse tensors that require a gradient but cannot get one."""
    for name in (*CONSTANT, "out"):
        if getattr(getattr(options, name), "requires_grad", False):
            raise no_gradient(name, f"detach {name}, which has no gradient here")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_tensor(tensor, name)
    if options.out is not None:
        raise no_gradient("out=", "leave out= out, or call it under torch.no_grad()")


def with_gradient(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose result can be differentiated."""
    check_gradients(q, k, v, options)
    options = keyed("flash_attention", options)
    # As arguments of their own, so that autograd sees them.
    out, lse = _Attention.apply(q, k, v, options.mask, options.bias, options.sinks, options)
    return (out, lse) if options.return_lse else out


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = forward_with_lse(q, k, v, options, training=True)
        # Tensors are saved as such, so that autograd sees changes in place and may offload them.
        ctx.options = options._replace(mask=None, bias=None, sinks=None, rope_cos=None, rope_sin=None, seed=None)
        tables = options.rope_cos, options.rope_sin
        ctx.save_for_backward(q, k, v, out, lse, mask, bias, sinks, *tables, options.seed)
        ctx.caller = observe.caller.get()  # autograd may compute gradients in a thread of its own
        shown = lse.to(torch.float32)
        ctx.mark_non_differentiable(shown)
        return out, shown

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> Results:
        # Raises when one of them was changed in place since. Asked for once: checkpointing has them only once.
        saved = ctx.saved_tensors
        q, k, v, out, lse, mask, bias, sinks, cos, sin, seed = saved
        options = ctx.options._replace(mask=mask, bias=bias, sinks=sinks, rope_cos=cos, rope_sin=sin, seed=seed)
        with torch.no_grad(), observe.called_by(ctx.caller):
            found = gradients(Saved(q, k, v, out, lse, dout), options, ctx.needs_input_grad[3:6])
        return (*refuse_second(found, dout, *saved), None)
