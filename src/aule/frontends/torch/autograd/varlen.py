"""Attention on packed batches that can be differentiated with respect to q, k, v and sinks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from aule.engine import observe
from aule.frontends.torch import route
from aule.frontends.torch.attention import Saved
from aule.frontends.torch.autograd.attention import CONSTANT, needs_gradient
from aule.frontends.torch.autograd.refuse import refuse_second
from aule.frontends.torch.calls import Results
from aule.frontends.torch.checks import no_gradient
from aule.frontends.torch.modes import grad_enabled, refuse_transforms
from aule.frontends.torch.passes import sink_gradient
from aule.frontends.torch.varlen import Backward, Forward, Packed
from aule.ops.attention.varlen import OP
from aule.options import AttentionOptions

REMEDY = "call flash_attention on each sequence"


def flash_attention_varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor | tuple[Tensor, Tensor]:
    """Attention on packed batches, with gradients if a tensor needs one; `packed_call` has checked the call."""
    options = packed.options
    if grad_enabled() and packed.functions is not None:
        _refuse_captured(packed.functions.captured.values())
    if grad_enabled() and needs_gradient(q, k, v, options):
        _check(q, options)
        out, lse = _Packed.apply(q, k, v, options.sinks, packed)
        return (out, lse) if options.return_lse else out
    found = route.route(q, options.backend).compute(Forward(q, k, v, packed, False))
    return (found[0], found[1].float()) if options.return_lse else found[0]  # type: ignore


def _refuse_captured(tensors: Iterable[Tensor]) -> None:
    if any(x.requires_grad for x in tensors):
        remedy = "detach it, or use aule.flex_attention, which has gradients of captured tensors"
        raise no_gradient("a captured tensor", remedy, OP)


def _check(q: Tensor, options: AttentionOptions) -> None:
    """Refuse tensors that require a gradient but cannot get one."""
    for name in (*CONSTANT, "out"):
        if getattr(getattr(options, name), "requires_grad", False) or (name == "out" and options.out is not None):
            raise no_gradient(f"{name}=", f"detach {name}, or leave it out", OP)
    if not route.route(q, options.backend).packed_gradients:
        where = f"tensors on {q.device}" + (f" and backend {options.backend}" if options.backend else "")
        raise no_gradient(where, "gradients are there for CUDA tensors on cuda, and for CPU tensors: move them", OP)


class _Packed(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, packed: Packed
    ) -> tuple[Tensor, Tensor]:
        out, lse = route.route(q, packed.options.backend).compute(Forward(q, k, v, packed, True))
        assert lse is not None
        ctx.packed, ctx.caller = packed, observe.caller.get()
        shown = lse.float() if lse.dtype != torch.float32 else lse.clone()
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.mark_non_differentiable(shown)
        return out, shown

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> Results:
        refuse_transforms(OP, (dout,), REMEDY)
        # Raises when one of them was changed in place since. Asked for once: checkpointing has them only once.
        inputs = ctx.saved_tensors
        q, k, v, sinks, out, lse = inputs
        saved = Saved(q, k, v, out, lse, dout.resolve_neg())  # the caller cannot be told to resolve it
        with torch.no_grad(), observe.called_by(ctx.caller):
            grads = route.route(q, ctx.packed.options.backend).compute(Backward(saved, ctx.packed))
            of_sinks = None
            if ctx.needs_input_grad[3]:
                heads_first = saved._replace(out=out.transpose(0, 1), dout=saved.dout.transpose(0, 1))
                of_sinks = sink_gradient(heads_first, sinks)
        return (*refuse_second((*grads, of_sinks), dout, *inputs, op=OP), None)
