"""Attention with functions that can be differentiated: by q, k, v, the log-sum-exp and captured tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aule.engine import observe
from aule.frontends.torch import route
from aule.frontends.torch.attention import Saved
from aule.frontends.torch.autograd.refuse import refuse_second
from aule.frontends.torch.checks import no_gradient
from aule.frontends.torch.flex.calls import Backward, Forward, Functions
from aule.frontends.torch.flex.captured import captured_gradients
from aule.ops.scores.functions.emit import MASK_FUNCTION
from aule.ops.scores.functions.trace import OP
from aule.options import AttentionOptions


def forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, functions: Functions) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; differentiable where a tensor asks for it."""
    tensors = (q, k, v, *functions.captured.values())
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return _compute(q, k, v, options, functions, None)
    for name, x in functions.captured.items():
        if x.requires_grad and name.startswith(MASK_FUNCTION):
            raise no_gradient("a tensor captured by a mask function", "detach it: a mask has no gradient", OP)
    names = list(functions.captured)
    found: tuple[Tensor, Tensor] = _Flex.apply(q, k, v, options, functions, names, *functions.captured.values())
    return found


def _compute(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, functions: Functions, training: bool | None
) -> tuple[Tensor, Tensor]:
    call = Forward(q, k, v, options, functions, training)
    out, lse = route.route(q, options.backend).compute(call)
    assert out is not None and lse is not None
    return out, lse


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
        out, lse = _compute(q, k, v, options, functions, True)
        # Without the tensors, which are saved as such.
        ctx.options, ctx.names, ctx.caller = options, names, observe.caller.get()
        ctx.functions = Functions(functions.score_mod, functions.mask_mod, {})
        ctx.save_for_backward(q, k, v, out, lse, *captured)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        q, k, v, out, lse, *captured = saved
        nothing = (None,) * (6 + len(captured))
        if dout is None and dlse is None:
            return nothing
        functions = Functions(
            ctx.functions.score_mod, ctx.functions.mask_mod, dict(zip(ctx.names, captured, strict=True))
        )
        wanted = [name for name, want in zip(ctx.names, ctx.needs_input_grad[6:], strict=True) if want]
        given = tuple(x for x in (dout, dlse) if x is not None)
        with torch.no_grad(), observe.called_by(ctx.caller):
            dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
            if dlse is not None:
                # A row that keeps no key has a log-sum-exp of -inf, and depends on nothing.
                dlse = torch.where(lse == -torch.inf, 0.0, dlse.resolve_neg()).to(lse.dtype).contiguous()
            options = ctx.options
            if torch.are_deterministic_algorithms_enabled():
                options = options._replace(deterministic=True)
            call = Backward(Saved(q, k, v, out, lse, dout), options, functions, bool(wanted), dlse)
            dq, dk, dv, *rest = route.route(q, options.backend).compute(call)
            found = {}
            if wanted:
                ds = rest[0]
                assert ds is not None
                scale = options.scale if options.scale is not None else q.shape[-1] ** -0.5
                found = captured_gradients(functions, wanted, ds, q, k, scale)
        gradients = (dq, dk, dv, *(found.get(name) for name in ctx.names))
        dq, dk, dv, *rest = refuse_second(gradients, *given, *saved, op=OP)
        return (dq, dk, dv, None, None, None, *rest)
