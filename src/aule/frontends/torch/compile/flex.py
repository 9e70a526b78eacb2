"""Attention with functions of the user as operators of PyTorch, ``torch.ops.aule.flex_attention`` and its gradient.

An operator takes a function as notes about it (`flex.record`), beside the tensors and numbers that it captured: new
values of them need no new graph, except those that the compiler itself fixes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from aule.frontends.block_mask import MASK_INPUTS, SCORE_INPUTS, check_shape
from aule.frontends.torch.attention import Saved
from aule.frontends.torch.checks import dtype_name, no_gradient, no_second_derivative, require_tensor
from aule.frontends.torch.compile.operators import backward_flops, flops
from aule.frontends.torch.flex.autograd import compute, gradients
from aule.frontends.torch.flex.entry import flex_attention as eager
from aule.frontends.torch.flex.entry import shared_keys
from aule.frontends.torch.flex.masks import as_block_mask
from aule.frontends.torch.flex.max_scores import max_scores as largest
from aule.frontends.torch.flex.record import Recording, replayed
from aule.frontends.torch.flex.trace import traced
from aule.frontends.torch.functions import Functions, loadable
from aule.frontends.torch.modes import as_operator, autocast, refuse_tracing
from aule.frontends.torch.views import work_dtype
from aule.ops.attention.validate import Operands, attention_problem
from aule.ops.scores.functions.trace import OP
from aule.options import AttentionOptions
from aule.view import TensorView

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor[] captured, str? score_mod, str? mask_mod, SymInt[] integers, "
    "float[] floats, float? scale, str? backend"
)


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp in a graph. A graph ends before a function that cannot be recorded: outside of it
    the function is served, or refused with the line of its code. Dynamo reads this function."""
    found = in_graph(q, k, v, score_mod, block_mask, scale, backend)
    return _outside(q, k, v, score_mod, block_mask, scale, backend) if found is None else found


_outside = torch.compiler.disable(eager)
max_scores = torch.compiler.disable(largest)


def in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    backend: str | None,
) -> tuple[Tensor, Tensor] | None:
    """Attention and its log-sum-exp by the operator; None if a function cannot be recorded. Dynamo reads this."""
    recording = Recording(q)
    try:
        score = None if score_mod is None else recording.function(score_mod, SCORE_INPUTS)
        of_score = len(recording.tensors)
        mask = as_block_mask(block_mask, q)
        keeps = None if mask is None else recording.function(mask.mask_mod, MASK_INPUTS)
    except TypeError:
        return None
    shape = None if mask is None else mask.shape
    counts = of_score, len(recording.tensors), len(recording.integers)
    captured = (*recording.tensors, *recording.integers, *recording.floats)
    found: tuple[Tensor, Tensor] = _operator(q, k, v, (score, keeps), shape, scale, backend, counts, *captured)
    return found


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    functions: tuple[str | None, str | None],
    mask_shape: tuple[int, ...] | None,
    scale: float | None,
    backend: str | None,
    counts: tuple[int, int, int],
    *captured: Any,
) -> tuple[Tensor, Tensor]:
    """The operator, with what comes before it.

    Parameters
    ----------
    functions : (str or None, str or None)
        Notes about the score function and the mask function.
    counts : (int, int, int)
        Tensors of the score function, all tensors, and integers among what was ``captured``; floats are last.
    """
    refuse_tracing(OP)
    for name, x in (("query", q), ("key", k), ("value", v)):
        require_tensor(x, name, OP, "query")
    q, k, v = autocast(q, k, v)
    k, v = shared_keys(q, k, v)
    if mask_shape is not None:
        check_shape(mask_shape, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    of_score, tensors, integers = counts
    if torch.is_grad_enabled() and any(x.requires_grad for x in captured[of_score:tensors]):
        raise no_gradient("a tensor captured by a mask function", "detach it: a mask has no gradient", OP)
    given = [loadable(x, q, OP) for x in captured[:tensors]]
    numbers = list(captured[tensors : tensors + integers]), list(captured[tensors + integers :])
    found: tuple[Tensor, Tensor] = torch.ops.aule.flex_attention(
        q, k, v, given, *functions, *numbers, None if scale is None else float(scale), backend
    )
    return found


def _functions(
    q: Tensor,
    captured: Sequence[Tensor],
    score_mod: str | None,
    mask_mod: str | None,
    integers: Sequence[int],
    floats: Sequence[float],
) -> Functions:
    """The functions of a call, traced."""
    given = captured, integers, floats
    score = None if score_mod is None else traced(replayed(score_mod, *given), SCORE_INPUTS, q, "score_mod")
    mask = None if mask_mod is None else traced(replayed(mask_mod, *given), MASK_INPUTS, q, "mask_mod")
    return Functions.of(score, mask)


def _options(scale: float | None, backend: str | None) -> AttentionOptions:
    return AttentionOptions(causal=False, scale=scale, return_lse=True, backend=backend)


@as_operator
def _flex(q: Tensor, k: Tensor, v: Tensor, captured: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    *functions, scale, backend = rest
    out, lse = compute(q, k, v, _options(scale, backend), _functions(q, captured, *functions), True)
    return out.contiguous(), lse  # a compiler may give q other strides than the fake had


def _flex_fake(q: Tensor, k: Tensor, v: Tensor, captured: Sequence[Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
    score_mod, mask_mod, integers, floats, scale, backend = rest
    if all(type(x) in (int, float) for x in (*integers, *floats)):  # others have no value before the graph runs
        _functions(q, captured, score_mod, mask_mod, integers, floats)  # raises an error for what cannot be traced
    operands = _checked(q, k, v, _options(scale, backend))
    return q.new_empty(operands.out_shape), q.new_empty(operands.lse_shape, dtype=work_dtype(q))


def _checked(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Operands:
    views: dict[str, Any] = {
        name: TensorView(dtype_name(x, name, OP), tuple(x.shape), x.stride(), str(x.device), None)
        for name, x in (("q", q), ("k", k), ("v", v))
    }
    return attention_problem(**views, **options.plain(), op=OP)[1]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, captured, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, *captured)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *captured = ctx.saved_tensors
    # PyTorch takes an empty list for one of tensors.
    nothing: list[Any] = [[] if isinstance(x, (list, tuple)) and not x else None for x in ctx.rest]
    if dout is None and dlse is None:
        return (None, None, None, [None] * len(captured), *nothing)
    dout = torch.zeros_like(out) if dout is None else dout
    wanted = [bool(want) for want in ctx.needs_input_grad[3]]
    dq, dk, dv, *found = torch.ops.aule.flex_attention_backward(
        dout, out, lse, q, k, v, captured, *ctx.rest, dlse, wanted
    )
    return (dq, dk, dv, [x if want else None for x, want in zip(found, wanted, strict=True)], *nothing)


@as_operator
def _flex_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    """Gradients of q, k, v and, where ``wanted``, of captured tensors, else empty."""
    *given, scale, backend, dlse, wanted = rest
    functions = _functions(q, captured, *given)
    names = [_name(functions, x) if want else None for x, want in zip(captured, wanted, strict=True)]
    saved = Saved(q, k, v, out, lse, dout.resolve_neg())
    used = list({name: None for name in names if name is not None})
    dq, dk, dv, found = gradients(saved, dlse, _options(scale, backend), functions, used)
    results = [dq, dk, dv]
    for x, name, want in zip(captured, names, wanted, strict=True):
        # A tensor that is listed twice has its gradient at the first place.
        none = torch.zeros_like(x) if want else q.new_empty(0)
        results.append(found.pop(name, none) if name is not None else none)
    return results


def _name(functions: Functions, x: Tensor) -> str | None:
    """The name of a captured tensor in the kernel; None if the score function does not use it."""
    score = functions.of_score
    return next((name for name, y in score.items() if y is x), None)


def _flex_backward_fake(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, captured: Sequence[Tensor], *rest: Any
) -> list[Tensor]:
    added = [x.new_empty(x.shape) if want else q.new_empty(0) for x, want in zip(captured, rest[-1], strict=True)]
    return [*(x.new_empty(x.shape) for x in (q, k, v)), *added]


def _no_more(ctx: Any, grads: Any) -> NoReturn:
    raise no_second_derivative(OP)


_forward_operator = torch.library.custom_op(
    "aule::flex_attention", _flex, mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)"
)
_forward_operator.register_fake(_flex_fake)
_forward_operator.register_autograd(_backward, setup_context=_keep)
_backward_operator = torch.library.custom_op(
    "aule::flex_attention_backward",
    _flex_backward,
    mutates_args=(),
    schema=f"(Tensor dout, Tensor out, Tensor lse, {_SCHEMA}, Tensor? dlse, bool[] wanted) -> Tensor[]",
)
_backward_operator.register_fake(_flex_backward_fake)
_backward_operator.register_autograd(_no_more)
register_flop_formula(torch.ops.aule.flex_attention)(flops)
register_flop_formula(torch.ops.aule.flex_attention_backward)(backward_flops)
