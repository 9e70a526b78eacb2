"""aule's operators expressed by PyTorch's own, for ONNX export.

While ``torch.onnx.export`` traces a model, calls become these formulas instead of operators of aule, and PyTorch's
exporter translates them: with opset 23 attention becomes ONNX Attention, norms RMSNormalization and LayerNormalization.
Half precision is computed in float32 outside of Attention. Calls have been checked before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from aule.errors import AuleError
from aule.frontends.torch.row_ops import Options, Tensors, named_options
from aule.frontends.torch.views import work_dtype
from aule.ops.attention.problem import UNBOUNDED
from aule.ops.attention.validate import window_sides
from aule.ops.shared.spec import OpSpec
from aule.options import AttentionOptions


def _no_dropout(op: str, p: float) -> None:
    if p != 0.0:
        raise AuleError(
            "AULE_ERROR_UNSUPPORTED",
            f"[{op}] expected no dropout in ONNX export, which has no form for aule's, got dropout_p={p}; export the "
            "model in evaluation mode",
        )


# -- attention ---------------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Any]:
    """Attention and, with ``return_lse``, its log-sum-exp, else None."""
    _no_dropout("flash_attention", options.dropout_p)
    rank = q.dim()
    q, k, v = (x[(None,) * (4 - rank)] for x in (q, k, v))
    seq_q, seq_kv = q.shape[2], k.shape[2]
    shift = seq_kv - seq_q if options.causal_align == "bottom-right" else 0
    if options.rope_cos is not None:
        first_q, first_k = torch.sym_max(shift, 0), torch.sym_max(-shift, 0)
        q, k = (_rotated(x, options, first) for x, first in ((q, first_q), (k, first_k)))
    distance = torch.arange(seq_kv, device=q.device) - (torch.arange(seq_q, device=q.device)[:, None] + shift)
    left, right = _limits(options)
    band, added = _band(left, right, distance), _added(options, distance, work_dtype(q))
    keep = _kept(options, band)
    capped = bool(options.softcap) or options.sinks is not None
    out = lse = None
    if not capped:
        top_left = (left, right) == (UNBOUNDED, 0) and keep is band and added is None and _known_zero(shift)
        out = _fused(q, k, v, options.scale, keep, added, top_left)
    if capped or options.return_lse:
        weights, lse = _softmax(_scores(q, k, options, keep, added), options.sinks)
        out = (weights @ _grouped(v, q).to(weights.dtype)).to(v.dtype) if out is None else out
    assert out is not None
    lead = (0,) * (4 - rank)
    return out[lead], None if lse is None else lse[lead]


def _known_zero(shift: Any) -> bool:
    """Whether a length that may be symbolic is known to be 0, without a guard."""
    if isinstance(shift, int):
        return shift == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(shift == 0))


def _rotated(x: Tensor, options: AttentionOptions, first: Any) -> Tensor:
    """Rotate q or k, whose row 0 stands at position ``first``."""
    cos, sin = options.rope_cos, options.rope_sin
    pairs = cos.shape[-1] if 2 * cos.shape[-1] <= x.shape[-1] else cos.shape[-1] // 2
    cos, sin = (t[..., first : first + x.shape[2], :pairs] for t in (cos, sin))
    cos, sin = (t[:, None] if t.dim() == 3 else t for t in (cos, sin))
    return _rotate(x, cos, sin, options.rope_interleaved)


def _limits(options: AttentionOptions) -> tuple[int, int]:
    """How far to the left and right of its own position a row keeps keys."""
    left, right = window_sides("flash_attention", options.window, bool(options.causal))
    if options.causal:
        right = 0 if right == UNBOUNDED else min(right, 0)
    return left, right


def _band(left: int, right: int, distance: Tensor) -> Tensor | None:
    """Keys that causal mask and window keep, by their distance from the key that a row stands at; None for all."""
    kept = None if right == UNBOUNDED else distance <= right
    if left == UNBOUNDED:
        return kept
    return distance >= -left if kept is None else kept & (distance >= -left)


def _kept(options: AttentionOptions, band: Tensor | None) -> Tensor | None:
    """Keys that band and a boolean mask keep; None for all."""
    mask = options.mask
    if mask is None or mask.dtype != torch.bool:
        return band
    return mask if band is None else mask & band


def _added(options: AttentionOptions, distance: Tensor, work: torch.dtype) -> Tensor | None:
    """The sum of an additive mask, bias and ALiBi; None if there is none."""
    terms = [x.to(work) for x in (options.mask, options.bias) if x is not None and x.dtype != torch.bool]
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(work)
        terms.append(-slopes[..., None, None] * distance.abs())
    return sum(terms[1:], terms[0]) if terms else None


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: Any, keep: Tensor | None, added: Tensor | None, top_left: bool
) -> Tensor:
    """Attention by PyTorch's function, which the exporter knows; a row that keeps no key is zero."""
    # The operator, because `aule.install` may have replaced the function.
    attend, options = torch.ops.aten.scaled_dot_product_attention.default, {"scale": scale}
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    mask = keep if added is None or keep is None else torch.where(keep, added, -torch.inf)
    mask = added if mask is None else mask
    if top_left or mask is None:
        return attend(q, k, v, None, 0.0, top_left, **options)
    mask = mask.expand(*mask.shape[:-2], q.shape[2], k.shape[2])
    boolean = mask.dtype == torch.bool
    out = attend(q, k, v, mask if boolean else mask.to(q.dtype), 0.0, False, **options)
    some = (mask if boolean else mask > -torch.inf).any(-1, keepdim=True)
    return torch.where(some, out, 0)


def _grouped(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values with as many heads as the queries."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, options: AttentionOptions, keep: Tensor | None, added: Tensor | None) -> Tensor:
    work = work_dtype(q)
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = q.to(work) @ _grouped(k, q).to(work).mT * scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if added is not None:
        scores = scores + added
    return scores if keep is None else torch.where(keep, scores, -torch.inf)


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp of rows that may keep no key."""
    all_scores = scores
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        all_scores = torch.cat([scores, column], -1)
    most = all_scores.amax(-1, keepdim=True)
    most = torch.where(most == -torch.inf, 0, most)
    total = torch.exp(all_scores - most).sum(-1, keepdim=True)
    weights = torch.exp(scores - most) / torch.where(total == 0, 1, total)
    return weights, (most + torch.log(total))[..., 0]


# -- row operations ----------------------------------------------------------------------------------------------------


def row_op(spec: OpSpec, tensors: Tensors, options: Options) -> Tensor | tuple[Tensor, ...]:
    """A row operation; ``tensors`` and ``options`` in the order of its spec."""
    return _ROW_OPS[spec.name](*tensors, **named_options(spec, options))


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    work = work_dtype(x)
    weight = x.new_ones(x.shape[-1], dtype=work) if weight is None else weight.to(work)
    return functional.rms_norm(x.to(work), x.shape[-1:], weight, eps).to(x.dtype)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    work = work_dtype(x)
    weight, bias = (None if y is None else y.to(work) for y in (weight, bias))
    return functional.layer_norm(x.to(work), x.shape[-1:], weight, bias, eps).to(x.dtype)


def _residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    h = x + residual
    return _rms_norm(h, weight, eps), h


def _residual_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    h = x + residual
    return _layer_norm(h, weight, bias, eps), h


def _layer_norm_linear(
    x: Tensor, weight_norm: Tensor | None, bias_norm: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    normal = _layer_norm(x, weight_norm, bias_norm, eps)
    return functional.linear(normal, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.to(work_dtype(logits)).reshape(-1, logits.shape[-1])
    loss = functional.cross_entropy(
        rows,
        target.reshape(-1).long(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    loss = loss.reshape(target.shape) if reduction == "none" else loss
    most = rows.amax(-1).reshape(target.shape)
    above = torch.logsumexp(rows, -1).reshape(target.shape) - most
    return loss if wide else loss.to(logits.dtype), most, above


def _glu(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor | None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, -1)
    work = work_dtype(gate)
    return (activation(gate.to(work)) * up.to(work)).to(gate.dtype)


def _swiglu(gate: Tensor, up: Tensor | None) -> Tensor:
    return _glu(functional.silu, gate, up)


def _geglu(gate: Tensor, up: Tensor | None, approximate: str) -> Tensor:
    return _glu(lambda x: functional.gelu(x, approximate=approximate), gate, up)


def _rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    interleaved: bool,
    rotary_dim: int | None,
    inplace: bool = False,
) -> Tensor:
    width = cos.shape[-1]
    columns = rotary_dim or (2 * width if 2 * width <= x.shape[-1] else width)

    def rows(table: Tensor) -> Tensor:
        if width == columns:  # each number twice
            table = table[..., ::2] if interleaved else table[..., : columns // 2]
        if position_ids is not None:
            return table[position_ids[:, None] if position_ids.dim() == 2 and x.dim() == 4 else position_ids]
        return table[:, None] if table.dim() == 3 and x.dim() == 4 else table

    return _rotate(x, rows(cos), rows(sin), interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of the first columns of ``x``, as many as the tables have columns."""
    work, pairs = work_dtype(x), cos.shape[-1]
    first, rest = x[..., : 2 * pairs].to(work), x[..., 2 * pairs :]
    a, b = (first[..., ::2], first[..., 1::2]) if interleaved else (first[..., :pairs], first[..., pairs:])
    cos, sin = cos.to(work), sin.to(work)
    a, b = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([rotated.to(x.dtype), rest], -1)


def _rms_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    interleaved: bool,
    rotary_dim: int | None,
    eps: float,
) -> Tensor:
    return _rope(_rms_norm(x, weight, eps), cos, sin, position_ids, interleaved, rotary_dim)


def _softmax_dropout(
    x: Tensor, mask: Tensor | None, seed: Tensor | None, dropout_p: float, causal: bool, scale: float
) -> Tensor:
    _no_dropout("softmax_dropout", dropout_p)
    scores = x.to(work_dtype(x)) * scale
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        rows = x.shape[-2] if x.dim() > 1 else 1
        last = torch.arange(rows, device=x.device)[:, None] + (x.shape[-1] - rows)
        keep = torch.arange(x.shape[-1], device=x.device) <= last
        scores = torch.where(keep if x.dim() > 1 else keep[0], scores, -torch.inf)
    some = (scores > -torch.inf).any(-1, keepdim=True)
    return torch.where(some, torch.softmax(scores, -1), 0).to(x.dtype)


_ROW_OPS: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "residual_rms_norm": _residual_rms_norm,
    "residual_layer_norm": _residual_layer_norm,
    "layer_norm_linear": _layer_norm_linear,
    "cross_entropy": _cross_entropy,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "rope": _rope,
    "rms_norm_rope": _rms_norm_rope,
    "softmax_dropout": _softmax_dropout,
}
"""All row operations of the catalogue."""
