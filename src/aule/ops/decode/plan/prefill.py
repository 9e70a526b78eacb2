"""Plans prefill: many query rows attend to a cache, with attention's own kernel on matrix units over the cache's pages.

The decoding kernels read every key once for a few rows. Many rows are bound by the products, and need tiles of rows. In
a packed batch each kernel takes the sequences that suit it, so that prefill and decoding share a call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aule import tuning
from aule.ops.attention.build import build_forward
from aule.ops.attention.config import FragmentConfig
from aule.ops.attention.plan.layout import aligned_rows, view_scalars
from aule.ops.attention.plan.scalars import folded, problem_scalars, score_options
from aule.ops.attention.plan.tiles import choose_fragments, choose_warpgroups
from aule.ops.decode.problem import DecodeProblem
from aule.ops.scores.config import Paging
from aule.ops.shared.plan import Step, grid_of
from aule.target import Target
from aule.tile.fragment.shape import RUN
from aule.view import TensorView


def few_tokens(problem: DecodeProblem, target: Target) -> int:
    """Query tokens of a sequence up to which the decoding kernels are used. Rows of a key head are query heads times
    query tokens."""
    return max(int(tuning.number(target, "decode.few_rows")) // max(problem.group, 1), 1)


def plan_prefill(
    problem: DecodeProblem,
    views: dict[str, TensorView],
    target: Target,
    paging: Paging,
    base_ok: dict[str, bool],
    index64: bool,
) -> Step | None:
    """The launch for sequences of many rows; None if there are none, or only the decoding kernels can serve them."""
    few = few_tokens(problem, target)
    if problem.seq_q <= few or problem.quantised:
        return None
    aligned = tuple(aligned_rows(views[n], RUN) and base_ok.get(n, True) for n in "qkvo")
    dims = problem.head_dim, problem.value_dim
    attention = problem.alone(problem.seq_q, problem.seq_kv)
    attention = replace(attention, batch=problem.batch, packed=(problem.total_q or 0, 0))
    functions = attention.has_functions
    shape = None
    if all(aligned[:3]) and not functions:
        shape = choose_warpgroups(target, problem.dtype, *dims)
    shape = shape or choose_fragments(target, problem.dtype, *dims, functions, not all(aligned[:3]))
    if shape is None:
        return None
    options: dict[str, Any] = score_options(attention) | {"packed": problem.total_q is not None}
    config = FragmentConfig(
        **options,
        lens=problem.lens,
        paging=paging,
        unit=tuple(views[n].strides[3] == 1 or views[n].shape[3] == 1 for n in "qkvo"),
        aligned=aligned,
        shape=shape,
        index64=index64,
        folded=folded(attention),
    )
    blocks_q = -(-problem.seq_q // shape.block_q)
    blocks = blocks_q * problem.batch * problem.heads_q
    scalars = problem_scalars(attention, target) | view_scalars(views) | page_scalars(problem)
    scalars |= {"blocks_q": blocks_q, "blocks": blocks, "few_tokens": few}
    return Step(config, build_forward, grid_of("flash_attention_paged", blocks, target), scalars)


def page_scalars(problem: DecodeProblem) -> dict[str, int | float]:
    """Scalar parameters of kernels that read pages."""
    shift = problem.page.bit_length() - 1 if problem.page else 0
    return {"page": problem.page, "page_shift": shift, "pages": problem.pages}
