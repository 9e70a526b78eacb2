"""Plans attention of a few query rows to many keys with the decoding kernels: reading the keys is all that takes time,
and these read them once for all query heads of a key head. Pure."""

from __future__ import annotations

from aule import tuning
from aule.ops.attention.problem import UNBOUNDED, AttentionProblem
from aule.ops.decode.plan.decode import plan_decode
from aule.ops.decode.plan.prefill import few_tokens
from aule.ops.decode.plan.shapes import choose_decode_fragments
from aule.ops.decode.problem import DecodeProblem
from aule.ops.shared.plan import Plan
from aule.target import Target
from aule.view import TensorView


def plan_few_rows(
    problem: AttentionProblem, views: dict[str, TensorView], target: Target, aligned_base: dict[str, bool] | None = None
) -> Plan | None:
    """Plan a forward pass as decoding; None if it has other options, or more rows or fewer keys than pay."""
    same = _as_decoding(problem)
    if same is None or problem.seq_kv < tuning.number(target, "decode.few_rows_keys"):
        return None
    if problem.seq_q * problem.group > tuning.number(target, "decode.few_rows_at_once"):
        # Keys are read more than once: only by units that would have nothing to do.
        idle = problem.batch * problem.heads_q < target.compute_units
        if not idle or problem.seq_q > few_tokens(same, target) or choose_decode_fragments(same, target) is None:
            return None
    return plan_decode(same, views, target, aligned_base)


def _as_decoding(problem: AttentionProblem) -> DecodeProblem | None:
    """Express a forward pass as decoding from a contiguous cache without lengths; None if decoding lacks an option."""
    others = problem.modifiers - (problem.softcap > 0) or problem.sinks or problem.packed or problem.precision
    others = others or problem.origin is not None
    banded = problem.limits != (UNBOUNDED, UNBOUNDED)
    aligned = problem.causal_align == "bottom-right" or problem.seq_q == problem.seq_kv
    if others or (banded and not aligned):
        return None
    return DecodeProblem(
        problem.batch, problem.heads_q, problem.heads_kv, problem.seq_q, problem.seq_kv, problem.head_dim,
        problem.value_dim, problem.dtype, problem.dtype, problem.scale, problem.causal, problem.window, problem.softcap,
        return_lse=problem.return_lse, lens=False,
    )  # fmt: skip
