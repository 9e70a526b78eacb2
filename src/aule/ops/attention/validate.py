"""From the arrays of a call to a valid `AttentionProblem` and its operands in one normal form.

It runs on the first call of a signature only, so it favours clear messages over speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

from aule.errors import DeviceMismatchError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.ops.attention.precision import factor_type
from aule.ops.attention.problem import FAR, UNBOUNDED, AttentionProblem
from aule.ops.rope.tables import rope_operands
from aule.ops.shared.checks import (
    FLOAT_DTYPES,
    LARGEST,
    checked_choice,
    checked_deterministic,
    checked_dropout,
    checked_flag,
    checked_integer,
    checked_number,
    checked_seed_words,
)
from aule.view import TensorView, restride

MAX_HEAD_DIM = 256
"""Largest query and value head dimension."""

_WINDOW = "pass an int or a pair (left, right)"

_LAYOUTS = {2: "[seq, head_dim]", 3: "[heads, seq, head_dim]", 4: "[batch, heads, seq, head_dim]"}
_AXES = ("batch", "heads", "seq", "head_dim")


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
    _check_dtypes(op, q, k, v)
    arrays = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    arrays |= {"rope_cos": rope_cos, "rope_sin": rope_sin}
    dropout_p = checked_dropout(op, dropout_p)
    _check_devices(op, arrays)
    rank = _check_rank(op, q, k, v)
    q4, k4, v4 = _lift(q), _lift(k), _lift(v)
    _check_shapes(op, q4, k4, v4)

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
        mask=None if mask is None else _score_operand(op, "mask", mask, q.dtype, score_shape),
        bias=None if bias is None else _score_operand(op, "bias", bias, q.dtype, score_shape),
        alibi=None if alibi_slopes is None else alibi_operand(op, alibi_slopes, batch, heads_q),
        sinks=None if sinks is None else _sinks(op, sinks, heads_q),
        seed=checked_seed_words(op, seed) if dropout_p else None,
        cos=cos,
        sin=sin,
        rank=rank,
    )
    return problem, operands


def _check_dtypes(op: str, q: TensorView, k: TensorView, v: TensorView) -> None:
    for name, view in (("q", q), ("k", k), ("v", v)):
        if view.dtype not in FLOAT_DTYPES:
            raise InvalidDtypeError(
                f"[{op}] expected {name} of dtype {_either(FLOAT_DTYPES)}, got {view.dtype}; "
                f"convert {name} to one of these first"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise InvalidDtypeError(
            f"[{op}] expected q, k and v of one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}; "
            f"convert k and v to {q.dtype}"
        )


def _check_devices(op: str, arrays: dict[str, TensorView | None]) -> None:
    present = {name: view.device for name, view in arrays.items() if view is not None}
    home = present["q"]
    if any(device != home for device in present.values()):
        found = ", ".join(f"{name} on {device}" for name, device in present.items())
        raise DeviceMismatchError(f"[{op}] expected all arrays on one device, got {found}; move them to {home}")


def _check_rank(op: str, q: TensorView, k: TensorView, v: TensorView) -> int:
    for name, view in (("q", q), ("k", k), ("v", v)):
        if len(view.shape) not in _LAYOUTS:
            raise InvalidShapeError(
                f"[{op}] expected {name} of shape {_either(_LAYOUTS.values())}, got {list(view.shape)}; "
                f"add or merge axes of {name}"
            )
    ranks = {len(view.shape) for view in (q, k, v)}
    if len(ranks) != 1:
        raise InvalidShapeError(
            f"[{op}] expected q, k and v with the same number of axes, got q {list(q.shape)}, k {list(k.shape)}, "
            f"v {list(v.shape)}; add the missing axes of length 1"
        )
    return ranks.pop()


def _check_shapes(op: str, q: TensorView, k: TensorView, v: TensorView) -> None:
    for name, view in (("k", k), ("v", v)):
        if view.shape[0] != q.shape[0]:
            _mismatch(op, 0, "q", q, name, view, f"give {name} the batch of q, or expand it with stride 0")
    for axis in (1, 2):
        if k.shape[axis] != v.shape[axis]:
            _mismatch(op, axis, "k", k, "v", v, "every key needs its value")
    if q.shape[3] != k.shape[3]:
        _mismatch(op, 3, "q", q, "k", k, "only v may have another head_dim")

    for name, view in (("q", q), ("v", v)):
        if not 1 <= view.shape[3] <= MAX_HEAD_DIM:
            whose = "q and k" if name == "q" else "v"
            remedy = "pad the last axis" if view.shape[3] == 0 else "split the last axis over more heads"
            raise InvalidShapeError(
                f"[{op}] expected the head_dim of {whose} in 1..{MAX_HEAD_DIM}, got {view.shape[3]}; {remedy}"
            )

    for name, view in (("q", q), ("k", k)):
        if view.shape[2] > FAR:
            raise InvalidShapeError(
                f"[{op}] expected {name} of at most 2**30 = {FAR} rows, got {view.shape[2]} (shape "
                f"{list(view.shape)}); split the sequence, and put the results together by their log-sum-exps"
            )

    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_q % heads_kv if heads_kv else heads_q:
        raise InvalidShapeError(
            f"[{op}] expected heads_q to be a multiple of heads_kv, got heads_q {heads_q} and heads_kv {heads_kv}; "
            "repeat or drop heads of k and v"
        )


def _mismatch(op: str, axis: int, a: str, left: TensorView, b: str, right: TensorView, remedy: str) -> NoReturn:
    raise InvalidShapeError(
        f"[{op}] expected {a} and {b} of equal {_AXES[axis]}, got {a} {left.shape[axis]} and {b} {right.shape[axis]} "
        f"(shapes {list(left.shape)} and {list(right.shape)}); {remedy}"
    )


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
            f"[{op}] expected a scale of at most {LARGEST:g}, for scores are float32, got {value}; pass None for the "
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
            f"[{op}] expected a softcap of {abs(scale) / LARGEST:.2g} to {LARGEST:g}, for scores, here with scale "
            f"{scale:.3g}, are float32, got {value}; pass None to switch it off"
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


def _score_operand(op: str, name: str, view: TensorView, dtype: str, shape: tuple[int, ...]) -> TensorView:
    if view.dtype not in FLOAT_DTYPES and not (name == "mask" and view.dtype == "bool"):
        expected, remedy = "a float dtype", "convert it to float32"
        if name == "mask":
            expected, remedy = "dtype bool or a float dtype", "use mask.astype(bool) where True means attend"
        elif view.dtype == "bool":
            remedy = "pass a boolean array as mask"
        raise InvalidDtypeError(f"[{op}] expected {name} of {expected}, got {view.dtype}; {remedy}")
    if view.dtype == "f64" and dtype != "f64":
        raise InvalidDtypeError(
            f"[{op}] expected {name} of at most 32 bits with q of dtype {dtype}, got f64; convert {name} to float32"
        )
    if not 2 <= len(view.shape) <= 4:
        raise InvalidShapeError(
            f"[{op}] expected {name} with 2 to 4 axes, broadcastable to [batch, heads_q, seq_q, seq_kv] = "
            f"{list(shape)}, got {list(view.shape)}; reshape {name}, a key-padding mask to [batch, 1, 1, seq_kv]"
        )
    lifted = _lift(view)
    if any(size not in (1, full) for size, full in zip(lifted.shape, shape, strict=True)):
        raise InvalidShapeError(
            f"[{op}] expected {name} that broadcasts to [batch, heads_q, seq_q, seq_kv] = {list(shape)}, "
            f"got {list(view.shape)}; give each axis its full length or 1"
        )
    # An axis of length 1 is read at index 0 only: stride 0 also where nothing is broadcast gives one key per layout.
    strides = tuple(0 if size == 1 else stride for size, stride in zip(lifted.shape, lifted.strides, strict=True))
    return restride(view, shape, strides)


def alibi_operand(op: str, view: TensorView, batch: int, heads_q: int) -> TensorView:
    """Check slopes and bring them into the form of `Operands.alibi`."""
    _check_f32(op, "alibi_slopes", view)
    if view.shape == (heads_q,):
        return restride(view, (batch, heads_q), (0, *view.strides))
    if view.shape == (batch, heads_q):
        return view
    raise InvalidShapeError(
        f"[{op}] expected alibi_slopes of shape [heads_q] = [{heads_q}] or [batch, heads_q] = [{batch}, {heads_q}], "
        f"got {list(view.shape)}; give one slope per query head"
    )


def _sinks(op: str, view: TensorView, heads_q: int) -> TensorView:
    _check_f32(op, "sinks", view)
    if view.shape != (heads_q,):
        raise InvalidShapeError(
            f"[{op}] expected sinks of shape [heads_q] = [{heads_q}], got {list(view.shape)}; "
            "give one logit per query head"
        )
    return view


def _check_f32(op: str, name: str, view: TensorView) -> None:
    if view.dtype != "f32":
        raise InvalidDtypeError(f"[{op}] expected {name} of dtype f32, got {view.dtype}; convert {name} to float32")


def _lift(view: TensorView) -> TensorView:
    """The view with missing leading axes of length 1 and stride 0."""
    lead = 4 - len(view.shape)
    if lead == 0:
        return view
    return restride(view, (1,) * lead + view.shape, (0,) * lead + view.strides)


def _either(options: Any) -> str:
    *most, last = options
    return f"{', '.join(most)} or {last}"
