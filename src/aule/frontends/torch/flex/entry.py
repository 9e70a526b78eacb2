"""Entry of `aule.flex_attention` on torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from aule.frontends.block_mask import SCORE_INPUTS
from aule.frontends.torch.checks import keyed, require_tensor
from aule.frontends.torch.flex import autograd
from aule.frontends.torch.flex.calls import Functions
from aule.frontends.torch.flex.masks import mask_of
from aule.frontends.torch.flex.trace import traced
from aule.frontends.torch.modes import autocast, refuse_tracing, refuse_transforms
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
    refuse_transforms(OP, (q, k, v), "call it outside of them, on all that is mapped at once")
    q, k, v = autocast(q, k, v)
    # Keys of one batch serve all, as in PyTorch: a cache of pages is one batch.
    k, v = (x.expand(q.shape[0], *x.shape[1:]) if x.shape[0] == 1 else x for x in (k, v))
    score = None if score_mod is None else traced(score_mod, SCORE_INPUTS, q, "score_mod")
    functions = Functions.of(score, mask_of(block_mask, q, k.shape[2])).checked(q)
    options = AttentionOptions(causal=False, scale=scale, return_lse=True, backend=backend)
    return autograd.forward(q, k, v, keyed(OP, options), functions)
