"""The largest score of each row, after the user's functions.

Kernels do not have it: the maximum that they subtract may lie below it. It is computed in a pass of its own, by torch's
operations on a part of the scores at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aule.frontends.torch.flex.entry import functions_of, shared_keys
from aule.frontends.torch.flex.evaluate import Evaluator
from aule.frontends.torch.modes import autocast, refuse_tracing, refuse_transforms
from aule.frontends.torch.views import work_dtype
from aule.ops.scores.functions.emit import MASK_FUNCTION, SCORE_FUNCTION
from aule.ops.scores.functions.program import BoundFunction
from aule.ops.scores.functions.trace import OP

MOST_SCORES = 1 << 22
"""Scores of a part."""


def max_scores(
    q: Tensor, k: Tensor, score_mod: Callable[..., Any] | None, block_mask: Any, scale: float | None
) -> Tensor:
    """``[batch, heads_q, seq_q]``, -inf for rows that keep no key; without gradients."""
    refuse_tracing(OP)
    refuse_transforms(OP, (q, k), "ask for max_scores outside of them")
    with torch.no_grad():
        q, k = autocast(q, k)
        k, _ = shared_keys(q, k, k)
        functions = functions_of(score_mod, block_mask, q, k)
        work, (batch, heads, rows, _), (_, heads_kv, keys, _) = work_dtype(q), q.shape, k.shape
        found = torch.full((batch, heads, rows), -torch.inf, dtype=work, device=q.device)
        if found.numel() == 0 or keys == 0:
            return found
        group = heads // heads_kv
        step = max(MOST_SCORES // (group * keys), 1)
        bound = [
            (Evaluator(name, functions.captured, function.numbers, q.device), function)
            for name, function in ((SCORE_FUNCTION, functions.score_mod), (MASK_FUNCTION, functions.mask_mod))
            if function is not None
        ]
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        places = [torch.arange(n, device=q.device, dtype=torch.int32) for n in (batch, heads, rows, keys)]
        for b in range(batch):
            for h in range(heads_kv):
                own = slice(h * group, (h + 1) * group)
                transposed = k[b, h].to(work).T
                for first in range(0, rows, step):
                    part = slice(first, min(first + step, rows))
                    inputs = {
                        "batch": places[0][b], "head": places[1][own, None, None], "query": places[2][part, None],
                        "key": places[3], "score": (q[b, own, part].to(work) @ transposed) * factor,
                    }  # fmt: skip
                    found[b, own, part] = _modified(bound, inputs).amax(-1)
        return found


def _modified(functions: list[tuple[Evaluator, BoundFunction]], inputs: dict[str, Tensor]) -> Tensor:
    """The scores after the functions."""
    scores = inputs["score"]
    for evaluator, function in functions:
        (value,) = evaluator.values(function.program, function.program.results, inputs)
        value = torch.where(value, scores, -torch.inf) if evaluator.name == MASK_FUNCTION else value
        scores = value.expand_as(scores)
    return scores
