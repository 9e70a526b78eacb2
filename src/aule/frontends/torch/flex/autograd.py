"""Attention with functions that can be differentiated: by q, k, v, the log-sum-exp and captured tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aule.engine import observe
from aule.frontends.torch import route
from aule.frontends.torch.attention import Saved
from aule.frontends.torch.autograd.refuse import refuse_second
from aule.frontends.torch.checks import no_gradient
from aule.frontends.torch.flex import lists
from aule.frontends.torch.flex.calls import Backward, Forward
from aule.frontends.torch.flex.captured import captured_gradients
from aule.frontends.torch.functions import Functions
from aule.ops.scores.functions.emit import MASK_FUNCTION
from aule.ops.scores.functions.trace import OP
from aule.options import AttentionOptions


def forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, functions: Functions) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; differentiable where a tensor asks for it."""
    tensors = (q, k, v, *functions.captured.values())
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return compute(q, k, v, options, functions, None)
    for name, x in functions.captured.items():
        if x.requires_grad and name.startswith(MASK_FUNCTION):
            raise no_gradient("a tensor captured by a mask function", "detach it: a mask has no gradient", OP)
    names = list(functions.captured)
    found: tuple[Tensor, Tensor] = _Flex.apply(q, k, v, options, functions, names, *functions.captured.values())
    return found


def compute(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, functions: Functions, training: bool | None
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp."""
    call = Forward(q, k, v, options, functions, training)
    out, lse = lists.compute(route.route(q, options.backend), call)
    assert out is not None and lse is not None
    return out, lse


def gradients(
    saved: Saved, dlse: Tensor | None, options: AttentionOptions, functions: Functions, wanted: Sequence[str]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Gradients of q, k, v and of the captured tensors ``wanted``, by buffer name."""
    if dlse is not None:
        # A row that keeps no key has a log-sum-exp of -inf, and depends on nothing.
        dlse = torch.where(saved.lse == -torch.inf, 0.0, dlse.resolve_neg()).to(saved.lse.dtype).contiguous()
    if torch.are_deterministic_algorithms_enabled():
        options = options._replace(deterministic=True)
    where = route.route(saved.q, options.backend)
    dq, dk, dv = lists.compute(where, Backward(saved, options, functions, dlse))
    assert dq is not None and dk is not None and dv is not None
    found = captured_gradients(where, saved, dlse, options, functions, wanted) if wanted else {}
    return dq, dk, dv, found


class _Flex(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
        functions: Functions,
        names: list[str],
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out, lse = compute(q, k, v, options, functions, True)
        # Without the tensors, which are saved as such.
        ctx.options, ctx.names, ctx.caller = options, names, observe.caller.get()
        ctx.functions = replace(functions, captured={})
        ctx.save_for_backward(q, k, v, out, lse, *captured)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        q, k, v, out, lse, *captured = saved
        if dout is None and dlse is None:
            return (None,) * (6 + len(captured))
        functions = replace(ctx.functions, captured=dict(zip(ctx.names, captured, strict=True)))
        wanted = [name for name, want in zip(ctx.names, ctx.needs_input_grad[6:], strict=True) if want]
        given = tuple(x for x in (dout, dlse) if x is not None)
        with torch.no_grad(), observe.called_by(ctx.caller):
            dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
            kept = Saved(q, k, v, out, lse, dout)
            dq, dk, dv, found = gradients(kept, dlse, ctx.options, functions, wanted)
        results = (dq, dk, dv, *(found.get(name) for name in ctx.names))
        dq, dk, dv, *rest = refuse_second(results, *given, *saved, op=OP)
        return (dq, dk, dv, None, None, None, *rest)
