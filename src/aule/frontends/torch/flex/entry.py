"""Entry of `aule.flex_attention` on torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from aule.frontends.block_mask import SCORE_INPUTS
from aule.frontends.torch.checks import keyed, require_tensor
from aule.frontends.torch.flex import autograd
from aule.frontends.torch.flex.masks import mask_of
from aule.frontends.torch.flex.trace import traced
from aule.frontends.torch.functions import Functions
from aule.frontends.torch.modes import autocast, needs_operator, refuse_tracing, refuse_transforms, transformed
from aule.ops.scores.functions.trace import OP
from aule.options import AttentionOptions


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        require_tensor(x, name, OP, "query")
    refuse_tracing(OP)
    if needs_operator((q, k, v)) and not transformed():
        from aule.frontends.torch.compile import flex  # few programs use it

        found = flex.in_graph(q, k, v, score_mod, block_mask, scale, backend)
        if found is not None:
            return found
    refuse_transforms(OP, (q, k, v), "call it outside of them, on all that is mapped at once")
    q, k, v = autocast(q, k, v)
    k, v = shared_keys(q, k, v)
    return autograd.forward(q, k, v, options_of(scale, backend), functions_of(score_mod, block_mask, q, k))


def options_of(scale: float | None, backend: str | None) -> AttentionOptions:
    """The options of a call."""
    return keyed(OP, AttentionOptions(causal=False, scale=scale, return_lse=True, backend=backend))


def functions_of(score_mod: Callable[..., Any] | None, block_mask: Any, q: Tensor, k: Tensor) -> Functions:
    """The functions of a call, traced."""
    score = None if score_mod is None else traced(score_mod, SCORE_INPUTS, q, "score_mod")
    return Functions.of(score, *mask_of(block_mask, q, k.shape[2])).checked(q)


def shared_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values for every batch: those of one serve all, as in PyTorch, where a cache of pages is one batch."""
    k, v = (x.expand(q.shape[0], *x.shape[1:]) if x.shape[0] == 1 else x for x in (k, v))
    return k, v
