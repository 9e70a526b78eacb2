"""Scalar parameters of kernels and fields of their configurations that do not depend on tiles."""

from __future__ import annotations

from typing import Any

from aule.errors import InvalidArgumentError
from aule.ops.attention.problem import FAR, UNBOUNDED, AttentionProblem, Origin
from aule.ops.scores.functions.emit import MASK_FUNCTION, SCORE_FUNCTION
from aule.ops.scores.functions.program import MOST_ROWS
from aule.ops.softmax.dropout import OCTET, keep_scale, threshold
from aule.target import Target
from aule.tile.common.math import LOG2E
from aule.tile.fragment.shape import RUN
from aule.tuning import model


def problem_scalars(problem: AttentionProblem, target: Target) -> dict[str, int | float]:
    """Scalar parameters of kernels."""
    left, right = problem.limits
    cached = model.cached_bytes(target, "attention")
    total_q, total_kv = problem.packed or (0, 0)
    origin = problem.origin or Origin(0)
    return {
        "seq_q": problem.seq_q,
        "seq_kv": problem.seq_kv,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "group": problem.group,
        "heads_together": _heads_together(problem, cached),
        "key_heads_together": _key_heads_together(problem, cached),
        "shift": problem.shift,
        "left": min(left, FAR),
        "right": min(right, FAR),
        **score_scalars(problem.scale, problem.softcap, LOG2E),
        "dropout_limit": threshold(problem.dropout_p),
        "keep_scale": keep_scale(problem.dropout_p),
        "dropout_row": origin.row,
        "dropout_octet": origin.key // OCTET,
        "dropout_head": origin.head,
        "batches": problem.batch,
        "total_q": total_q,
        "total_kv": total_kv,
        "bottom_right": int(problem.causal_align == "bottom-right"),
        **function_scalars(problem),
    }


def function_scalars(problem: AttentionProblem) -> dict[str, int | float]:
    """Captured numbers of the user's functions."""
    functions = {SCORE_FUNCTION: problem.score_mod, MASK_FUNCTION: problem.mask_mod}
    return {
        f"{name}_number{i}": x
        for name, function in functions.items()
        if function is not None
        for i, x in enumerate(function.numbers)
    }


def score_scalars(scale: float, softcap: float, unit: float) -> dict[str, int | float]:
    """What products are multiplied by to make scores in their unit; with a softcap they go through tanh first."""
    return {"scale": scale / softcap if softcap > 0 else scale * unit, "softcap": softcap * unit}


def _heads_together(problem: AttentionProblem, cached: int) -> int:
    """Query heads whose K and V fit a GPU's cache; at most all there are."""
    each = problem.seq_kv * (problem.head_dim + problem.value_dim) * (4 if problem.dtype == "f32" else 2)
    return max(min(cached * problem.group // max(each, 1), problem.batch * problem.heads_q), 1)


def _key_heads_together(problem: AttentionProblem, cached: int) -> int:
    """Key heads whose query heads' Q, dO and sums of dQ fit a GPU's cache."""
    row = (problem.head_dim + problem.value_dim) * (4 if problem.dtype == "f32" else 2) + 4 * problem.head_dim
    each = problem.group * problem.seq_q * row
    return max(min(cached // max(each, 1), problem.batch * problem.heads_kv), 1)


def row_scalars(problem: AttentionProblem) -> dict[str, int | float]:
    """Scalars that differ in kernels over rows, for which packed sequences are one sequence."""
    return {} if problem.packed is None else {"seq_q": problem.packed[0]}


def score_options(problem: AttentionProblem) -> dict[str, Any]:
    """Fields of a `ScoreConfig`."""
    left, right = problem.limits
    longest = max(problem.seq_q, problem.seq_kv)
    if problem.has_functions and longest > MOST_ROWS:
        raise InvalidArgumentError(
            f"[flex_attention] expected at most {MOST_ROWS} rows and keys with a score or mask function, "
            f"got {longest}; split the sequence"
        )
    packed = problem.packed is not None
    return {
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        # The band may reach beyond all keys (decoding has right = 0 at the last key): then no tile needs its mask code.
        # Unknown for packed sequences.
        "left": left != UNBOUNDED and (packed or problem.seq_q - 1 + problem.shift - left > 0),
        "right": right != UNBOUNDED and (packed or problem.shift + right + 1 < problem.seq_kv),
        "softcap": problem.softcap > 0,
        "mask": problem.mask,
        "bias": problem.bias,
        "alibi": problem.alibi,
        "score_function": None if problem.score_mod is None else problem.score_mod.program,
        "mask_function": None if problem.mask_mod is None else problem.mask_mod.program,
        "sinks": problem.sinks,
        "lse": problem.return_lse,
        "dropout": problem.dropout_p > 0,
        "dropout_origin": problem.dropout_p > 0 and problem.origin is not None,
        "packed": packed,
        "rope": problem.rope,
    }


def folded(problem: AttentionProblem) -> bool:
    """Whether the scale can be part of the exponent: it keeps the order of scores, and nothing is added to them."""
    added = problem.softcap > 0 or problem.bias or problem.alibi or problem.mask not in (None, "bool")
    added = added or problem.score_mod is not None
    return problem.scale > 0 and not added


def rotates_runs(problem: AttentionProblem) -> bool:
    """Whether kernels on matrix units, which rotate full runs of columns, can rotate Q and K."""
    rope = problem.rope
    return rope is None or (rope.dim if rope.interleaved else rope.half) % RUN == 0
