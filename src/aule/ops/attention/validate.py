"""From the arrays of a call to a valid `AttentionProblem` and its operands in one normal form.

It runs on the first call of a signature only, so it favours clear messages over speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from aule.errors import InvalidArgumentError
from aule.ops.attention.checks import (
    alibi_operand,
    check_devices,
    check_dtypes,
    check_rank,
    check_shapes,
    lift,
    score_operand,
    sinks_operand,
)
from aule.ops.attention.precision import factor_type
from aule.ops.attention.problem import FAR, UNBOUNDED, AttentionProblem
from aule.ops.rope.tables import rope_operands
from aule.ops.shared.checks import (
    LARGEST,
    checked_choice,
    checked_deterministic,
    checked_dropout,
    checked_flag,
    checked_integer,
    checked_number,
    checked_seed_words,
)
from aule.view import TensorView

_WINDOW = "pass an int or a pair (left, right)"


@dataclass(frozen=True, eq=False)
class Operands:
    """The arrays of one attention call in normal form.

    Attributes
    ----------
    q, k, v : TensorView
        ``[batch, heads, seq, dim]``; axes that the caller did not give have length 1 and stride 0.
    mask, bias : TensorView or None
        ``[batch, heads_q, seq_q, seq_kv]`` with stride 0 on every broadcast axis.
    alibi : TensorView or None
        f32 ``[batch, heads_q]``, stride 0 on the batch axis when all batches share the slopes.
    sinks : TensorView or None
        f32 ``[heads_q]``.
    seed : TensorView or None
        Two words of 32 bits, low word first, where weights are dropped.
    cos, sin : TensorView or None
        ``[batch, 1, positions, rope.half]``, stride 0 on the batch axis when all batches share the tables.
    cu_q, cu_k : TensorView or None
        i32 ``[batch + 1]``, where sequences are packed: the rows of q, and of k and v, at which they begin, and where
        the last one ends. q, k and v then have a batch axis of length 1.
    captured : mapping
        Arrays that the user's functions capture, by buffer name.
    rank : int
        Number of axes the caller gave q, k and v; results are returned with as many.
    """

    q: TensorView
    k: TensorView
    v: TensorView
    mask: TensorView | None = None
    bias: TensorView | None = None
    alibi: TensorView | None = None
    sinks: TensorView | None = None
    seed: TensorView | None = None
    cos: TensorView | None = None
    sin: TensorView | None = None
    cu_q: TensorView | None = None
    cu_k: TensorView | None = None
    captured: Mapping[str, TensorView] = field(default_factory=dict)
    rank: int = 4

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the result in the caller's rank."""
        return (*self.q.shape[:3], self.v.shape[3])[4 - self.rank :]

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the log-sum-exp in the caller's rank."""
        return self.q.shape[4 - self.rank : 3]


def attention_problem(
    q: TensorView,
    k: TensorView,
    v: TensorView,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | Sequence[int | None] | None = None,
    softcap: float | None = None,
    mask: TensorView | None = None,
    bias: TensorView | None = None,
    alibi_slopes: TensorView | None = None,
    sinks: TensorView | None = None,
    rope_cos: TensorView | None = None,
    rope_sin: TensorView | None = None,
    rope_interleaved: bool = False,
    dropout_p: float = 0.0,
    seed: TensorView | None = None,
    causal_align: str = "bottom-right",
    return_lse: bool = False,
    deterministic: bool = False,
    precision: str | None = None,
    op: str = "flash_attention",
) -> tuple[AttentionProblem, Operands]:
    """Check one attention call and bring its operands into normal form.

    Parameters
    ----------
    q, k, v : TensorView
        ``[seq, dim]``, ``[heads, seq, dim]`` or ``[batch, heads, seq, dim]``, all three alike.
    causal, scale, window, softcap, dropout_p, causal_align, return_lse, deterministic, precision
        As in `aule.flash_attention`.
    mask, bias : TensorView, optional
        2-D to 4-D, broadcastable to ``[batch, heads_q, seq_q, seq_kv]``.
    alibi_slopes : TensorView, optional
        f32 ``[heads_q]`` or ``[batch, heads_q]``.
    sinks : TensorView, optional
        f32 ``[heads_q]``.
    rope_cos, rope_sin : TensorView, optional
        As `aule.ops.rope.tables.rope_operands` takes them.
    seed : TensorView, optional
        The words of a seed (`aule.ops.softmax.dropout.seed_words`); needed where ``dropout_p > 0``, else ignored.
    op : str
        The public function that was called, for messages.

    Returns
    -------
    problem : AttentionProblem
    operands : Operands

    Raises
    ------
    InvalidShapeError, InvalidDtypeError, InvalidArgumentError, DeviceMismatchError
        Naming what was expected, what was found and the remedy.
    """
    check_dtypes(op, q, k, v)
    arrays = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    arrays |= {"rope_cos": rope_cos, "rope_sin": rope_sin}
    dropout_p = checked_dropout(op, dropout_p)
    check_devices(op, arrays)
    rank = check_rank(op, q, k, v)
    q4, k4, v4 = lift(q), lift(k), lift(v)
    check_shapes(op, q4, k4, v4, rank)

    batch, heads_q, seq_q, head_dim = q4.shape
    score_shape = (batch, heads_q, seq_q, k4.shape[2])
    rope, cos, sin = rope_operands(
        op, rope_cos, rope_sin, rope_interleaved, (q.dtype, head_dim, batch), (seq_q, k4.shape[2])
    )
    scale = _scale(op, scale, head_dim, q.dtype)
    problem = AttentionProblem(
        batch=batch,
        heads_q=heads_q,
        heads_kv=k4.shape[1],
        seq_q=seq_q,
        seq_kv=k4.shape[2],
        head_dim=head_dim,
        value_dim=v4.shape[3],
        dtype=q.dtype,
        scale=scale,
        causal=checked_flag(op, "causal", causal),
        causal_align=_causal_align(op, causal_align),
        window=window_sides(op, window, bool(causal)),
        softcap=_softcap(op, softcap, scale, q.dtype),
        mask=None if mask is None else mask.dtype,
        bias=None if bias is None else bias.dtype,
        alibi=alibi_slopes is not None,
        sinks=sinks is not None,
        return_lse=checked_flag(op, "return_lse", return_lse),
        deterministic=checked_deterministic(op, deterministic),
        dropout_p=dropout_p,
        rope=rope,
        precision=factor_type(op, precision, q.dtype),
    )
    operands = Operands(
        q=q4,
        k=k4,
        v=v4,
        mask=None if mask is None else score_operand(op, "mask", mask, q.dtype, score_shape),
        bias=None if bias is None else score_operand(op, "bias", bias, q.dtype, score_shape),
        alibi=None if alibi_slopes is None else alibi_operand(op, alibi_slopes, batch, heads_q),
        sinks=None if sinks is None else sinks_operand(op, sinks, heads_q),
        seed=checked_seed_words(op, seed) if dropout_p else None,
        cos=cos,
        sin=sin,
        rank=rank,
    )
    return problem, operands


def _scale(op: str, scale: float | None, head_dim: int, dtype: str) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = checked_number(op, "scale", scale)
    if not math.isfinite(value):
        raise InvalidArgumentError(
            f"[{op}] expected a finite scale, got {value}; pass None for the default 1/sqrt(head_dim)"
        )
    if dtype != "f64" and abs(value) > LARGEST:
        raise InvalidArgumentError(
            f"[{op}] expected a scale of at most {LARGEST:g}, since scores are float32, got {value}; pass None for the "
            "default 1/sqrt(head_dim)"
        )
    return value


def _softcap(op: str, softcap: float | None, scale: float, dtype: str) -> float:
    if softcap is None:
        return 0.0
    value = checked_number(op, "softcap", softcap)
    if not 0.0 <= value < math.inf:
        raise InvalidArgumentError(f"[{op}] expected a finite softcap >= 0, got {value}; pass None to switch it off")
    if dtype != "f64" and value and not abs(scale) / LARGEST <= value <= LARGEST:
        raise InvalidArgumentError(
            f"[{op}] expected a softcap from {abs(scale) / LARGEST:.2g} to {LARGEST:g}, since scores are float32 (with "
            f"scale {scale:.3g}), got {value}; pass None to switch it off"
        )
    return value


def _causal_align(op: str, causal_align: str) -> Literal["bottom-right", "top-left"]:
    choices = ("bottom-right", "top-left")
    found = checked_choice(op, "causal_align", causal_align, choices, "pass 'top-left' for PyTorch's is_causal")
    return cast("Literal['bottom-right', 'top-left']", found)


def window_sides(op: str, window: int | Sequence[int | None] | None, causal: bool) -> tuple[int, int]:
    """A window as the user gave it, as (left, right) with `UNBOUNDED` for an open side."""
    if window is None:
        return UNBOUNDED, UNBOUNDED
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise InvalidArgumentError(
                f"[{op}] expected window as (left, right), got {len(window)} values; pass None for an open side"
            )
        return _window_side(op, "left", window[0]), _window_side(op, "right", window[1])
    width = checked_integer(op, "window", window, _WINDOW)
    if width < 1:
        raise InvalidArgumentError(f"[{op}] expected an int window >= 1, got {width}; pass None for no window")
    side = _bounded(width - 1)
    return side, 0 if causal else side


def _window_side(op: str, side: str, value: int | None) -> int:
    if value is None:
        return UNBOUNDED
    keys = checked_integer(op, f"the {side} side of window", value, _WINDOW)
    if keys < UNBOUNDED:
        raise InvalidArgumentError(
            f"[{op}] expected the {side} side of window >= 0, got {keys}; pass None or -1 for an open side"
        )
    return _bounded(keys)


def _bounded(keys: int) -> int:
    # Kernels count keys in 32 bits, and a window wider than any sequence is no window.
    return keys if keys < FAR else UNBOUNDED
