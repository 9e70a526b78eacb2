"""The forward and backward passes of attention and row operations, on the route of their tensors.

Eager calls reach them through `autograd`, traced and transformed ones through the operators of `compile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from aule.frontends.torch import repeated, route
from aule.frontends.torch.attention import Backward, Forward, Saved, repeat_key
from aule.frontends.torch.calls import Results
from aule.frontends.torch.devices.base import copied_back
from aule.frontends.torch.modes import wrapped
from aule.frontends.torch.row_ops import Options, RowOp, Tensors
from aule.ops.shared.spec import OpSpec
from aule.options import AttentionOptions


def forward_with_lse(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, training: bool
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp in the type computed in, both fresh and contiguous, for `gradients`.

    With ``training``, a machine that has only NumPy is refused, since NumPy has no gradients.
    """
    key, tensors = repeat_key(q, k, v, options, training)
    found = repeated.repeat(key, tensors)
    if found is None:
        options = options._replace(return_lse=True, out=None)
        found = route.route(q, options.backend).compute(Forward(q, k, v, options, training, key))
    return cast("tuple[Tensor, Tensor]", found)


def gradients(saved: Saved, options: AttentionOptions, wanted: Sequence[bool]) -> Results:
    """Gradients of q, k and v and, where wanted, of mask, bias and sinks, else None.

    Parameters
    ----------
    saved : Saved
        With the results of `forward_with_lse`.
    wanted : sequence of bool
        Whether for mask, bias and sinks.
    """
    if not options.deterministic and torch.are_deterministic_algorithms_enabled():
        options = options._replace(deterministic=True)
    if wrapped(saved.dout):
        from aule.frontends.torch.compile import operators  # imports this module

        return operators.mapped_gradients(saved, options, wanted)
    scores = any(wanted[:2])
    # A negated gradient is resolved: the caller cannot be told to. Kernels take a contiguous log-sum-exp, which a
    # mapped call may have expanded.
    saved = saved._replace(dout=saved.dout.resolve_neg(), lse=saved.lse.contiguous())
    call = Backward(saved, options, scores)
    found = None if call.repeat_key is None else repeated.repeat(call.repeat_key, list(call.tensors.values()))
    dq, dk, dv, *rest = found or route.route(saved.q, options.backend).compute(call)
    ds = rest[0] if rest else None
    added: list[Tensor | None] = []
    for want, tensor in zip(wanted, (options.mask, options.bias), strict=False):
        # Broadcast axes are summed over.
        added.append(ds.sum_to_size(tensor.shape).to(tensor.dtype) if want and ds is not None else None)
    of_sinks = sink_gradient(saved, options.sinks) if wanted[2] else None
    return (dq, dk, dv, *added, of_sinks)


def sink_gradient(saved: Saved, sinks: Tensor) -> Tensor:
    """The gradient of the sinks: their weight in every row, times the row's sum of dout * out."""
    lse, work = saved.lse, saved.lse.dtype
    delta = (saved.dout.to(work) * saved.out.to(work)).sum(-1)
    # A sink of -inf in a row without keys has no weight: -inf - lse would be NaN.
    weight = torch.exp(sinks.to(work)[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
    terms = weight * delta  # [..., heads, rows], also if q has no axis of heads
    return -terms.sum((*range(terms.ndim - 2), -1)).to(sinks.dtype)


def compute(spec: OpSpec, tensors: Tensors, options: Options, backend: str | None, wanted: tuple[str, ...]) -> Results:
    """All results of a row operation in order, None for those that are not wanted."""
    call = RowOp(spec, tensors, options, backend, wanted)
    where = route.route(call.first, backend)
    if True in [x.is_neg() for x in call.tensors.values()]:  # memory holds the numbers that PyTorch negates
        resolved = {name: x.resolve_neg() for name, x in call.tensors.items()}
        return copied_back(call, where.compute(call.with_tensors(resolved)))
    return where.compute(call)
