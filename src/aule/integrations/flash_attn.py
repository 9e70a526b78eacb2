"""The functions of flash-attn 2, so that ``import aule.integrations.flash_attn as flash_attn`` serves.

Signatures, layout (``[batch, seq, heads, head_dim]``) and meaning are those of flash-attn 2.8. Inputs are read where
they lie: the layout is a matter of strides. Refused are ``return_attn_probs`` and, where there are gradients, a paged
cache (``block_table``). float32 and float64 are served too.

Gradients of q, k and v are there for CPU and CUDA tensors, but not over a cache (`flash_attn_with_kvcache`). Where one
is needed, the result is copied once, into the layout that flash-attn gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from aule.api import flash_attention, flash_attention_paged, flash_attention_varlen
from aule.errors import AuleError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.frontends.torch_routes import autocast
from aule.frontends.torch_sdpa import host_backend
from aule.frontends.torch_views import integers
from aule.integrations._flash_attn_cache import CacheCall, split_pages, with_kvcache
from aule.ops.checked import checked_flag, checked_integer, checked_number

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


class _Options(NamedTuple):
    """What all six functions take."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Sequence[int]
    softcap: float
    alibi_slopes: Any
    deterministic: bool
    return_attn_probs: bool


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention.

    Parameters
    ----------
    q : Tensor
        ``[batch, seq_q, heads, head_dim]``.
    k, v : Tensor
        ``[batch, seq_kv, heads_kv, head_dim]``; ``heads`` is a multiple of ``heads_kv``.
    dropout_p : float
        Chance of each weight to be dropped; the seed comes from PyTorch's generator of the tensors' device.
    softmax_scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    causal : bool
        The last row attends to all keys (bottom-right).
    window_size : (left, right)
        Keys around a row's own position; -1 leaves a side open.
    softcap : float
        0.0 for none.
    alibi_slopes : float32 Tensor, optional
        ``[heads]`` or ``[batch, heads]``.
    deterministic : bool
        Gradients are the same bits every time, as in `aule.flash_attention`; results always are.
    return_attn_probs : bool
        False: the probabilities are never stored.

    Returns
    -------
    Tensor
        ``[batch, seq_q, heads, head_dim]``, contiguous.
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _batched("flash_attn_func", q, k, v, options)


def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` on ``qkv`` of ``[batch, seq, 3, heads, head_dim]``."""
    op = "flash_attn_qkvpacked_func"
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    q, k, v = _unpacked(op, "qkv", qkv, 3, 5)
    return _batched(op, q, k, v, options)


def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` on ``kv`` of ``[batch, seq_kv, 2, heads_kv, head_dim]``."""
    op = "flash_attn_kvpacked_func"
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    k, v = _unpacked(op, "kv", kv, 2, 5)
    return _batched(op, q, k, v, options)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Attention within each sequence of a packed batch: one launch for all of them.

    Parameters
    ----------
    q : Tensor
        ``[total_q, heads, head_dim]``, the sequences of the batch one behind the other.
    k, v : Tensor
        ``[total_k, heads_kv, head_dim]``.
    cu_seqlens_q, cu_seqlens_k : integer Tensor
        ``[batch + 1]``: where each sequence begins, and where the last one ends.
    max_seqlen_q, max_seqlen_k : int
        Lengths of the longest sequences; for CPU tensors they are not needed.
    block_table : int32 Tensor, optional
        ``[batch, max_pages]``: k and v are a cache of pages, ``[pages, page, heads_kv, head_dim]``, without gradients
        and dropout; ``cu_seqlens_k`` says how many keys each sequence has.

    Returns
    -------
    Tensor
        ``[total_q, heads, head_dim]``, contiguous; rows that belong to no sequence are zero.

    Other parameters are those of `flash_attn_func`.
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    op = "flash_attn_varlen_func"
    if block_table is not None:
        return _paged(op, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table, options)
    return _packed(op, q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` on ``qkv`` of ``[total, 3, heads, head_dim]``."""
    op = "flash_attn_varlen_qkvpacked_func"
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    q, k, v = _unpacked(op, "qkv", qkv, 3, 4)
    return _packed(op, q, k, v, cu_seqlens, cu_seqlens, (max_seqlen, max_seqlen), options)


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` on ``kv`` of ``[total_k, 2, heads_kv, head_dim]``."""
    op = "flash_attn_varlen_kvpacked_func"
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    k, v = _unpacked(op, "kv", kv, 2, 4)
    return _packed(op, q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), options)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, into which new keys and values are written first, in place.

    Parameters
    ----------
    q : Tensor
        ``[batch, seq_q, heads, head_dim]``.
    k_cache, v_cache : Tensor
        ``[batch_cache, max_len, heads_kv, head_dim]``, or with ``block_table`` ``[pages, page, heads_kv, head_dim]``.
    k, v : Tensor, optional
        ``[batch, new, heads_kv, head_dim]``, written behind the first ``cache_seqlens`` keys of each sequence. Where
        these lengths are on a GPU nobody looks at them, and what has no room is dropped.
    rotary_cos, rotary_sin : Tensor, optional
        ``[positions, rotary_dim / 2]``: k is rotated by the angles of its place in the cache, and q by those of the
        places from ``cache_seqlens`` on, or all of it by the first where there is neither ``causal`` nor a window.
    cache_seqlens : int or int32 Tensor, optional
        ``[batch]``: keys that each sequence has, without the new ones. None: all.
    cache_batch_idx : int32 Tensor, optional
        ``[batch]``: the row of the cache that each sequence has.
    cache_leftpad : int32 Tensor, optional
        ``[batch]``: where the keys of each sequence begin in its row. It is read key by key, which is slow.
    block_table : int32 Tensor, optional
        ``[batch, max_pages]``.
    rotary_interleaved : bool
        Rotate elements 2i and 2i + 1 together, and not i and i + rotary_dim / 2.
    num_splits : int
        Without effect: how keys are split follows from the problem.
    return_softmax_lse : bool
        Also return the log-sum-exp, float32 ``[batch, heads, seq_q]``.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        ``[batch, seq_q, heads, head_dim]``, contiguous. There are no gradients.

    Other parameters are those of `flash_attn_func`.
    """
    op = "flash_attn_with_kvcache"
    _check(op, 4, "[batch, seq, heads, head_dim]", q=q, k_cache=k_cache, v_cache=v_cache)
    if k is not None and v is not None:
        _check(op, 4, "[batch, new, heads_kv, head_dim]", k=k, v=v)
    return_softmax_lse = checked_flag(op, "return_softmax_lse", return_softmax_lse)
    plain = _Options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, False)
    call = CacheCall(
        op, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        block_table, checked_flag(op, "rotary_interleaved", rotary_interleaved),
    )  # fmt: skip
    out, lse = with_kvcache(call, _decode_keywords(op, plain, q))
    return (out, lse) if return_softmax_lse else out


# -- how ---------------------------------------------------------------------------------------------------------------


def _batched(op: str, q: Any, k: Any, v: Any, options: _Options) -> Any:
    given = _keywords(op, options)
    _check(op, 4, "[batch, seq, heads, head_dim]", q=q, k=k, v=v)
    q, k, v = autocast(q, k, v)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    given["backend"] = host_backend(q)
    if _needs_gradient(q, k, v):
        return flash_attention(*turned, **given).transpose(1, 2).contiguous()
    out = q.new_empty(*q.shape[:3], v.shape[3])
    flash_attention(*turned, **given, out=out.transpose(1, 2))
    return out


def _packed(op: str, q: Any, k: Any, v: Any, at_q: Any, at_k: Any, longest: tuple[int, int], options: _Options) -> Any:
    given = _keywords(op, options)
    _check(op, 3, "[total, heads, head_dim]", q=q, k=k, v=v)
    if len(k) != len(v):
        got = f"{len(k)} and {len(v)} rows"
        raise InvalidShapeError(f"[{op}] expected k and v of one length, got {got}; every key needs its value")
    given["backend"] = host_backend(q)
    if q.device.type != "cpu":
        return flash_attention_varlen(q, k, v, at_q, at_k, *longest, **given)
    # Offsets in host memory are read in no time, and rows before the first sequence and behind the last left out.
    first_q, end_q = _bounds(op, "cu_seqlens_q", at_q, len(q))
    first_k, end_k = _bounds(op, "cu_seqlens_k", at_k, len(k))
    parts = (q[first_q:end_q], k[first_k:end_k], v[first_k:end_k])
    out = flash_attention_varlen(*parts, at_q - first_q, at_k - first_k, **given)
    if len(out) == len(q):
        return out
    return torch.nn.functional.pad(out, (0, 0, 0, 0, first_q, len(q) - end_q))


def _paged(
    op: str, q: Any, k: Any, v: Any, at_q: Any, at_k: Any, longest_q: int, block_table: Any, options: _Options
) -> Any:
    _check(op, 3, "[total, heads, head_dim]", q=q)
    _check(op, 4, "[pages, page, heads_kv, head_dim]", k=k, v=v)
    given = _decode_keywords(op, options, q)
    if checked_number(op, "dropout_p", options.dropout_p) or _needs_gradient(q, k, v):
        remedy = "gather k and v first"
        raise _unsupported(op, "neither dropout nor gradients with block_table", "one of them", remedy)
    at_k = integers(op, "cu_seqlens_k", at_k)
    if at_k.dim() != 1:
        raise InvalidShapeError(f"[{op}] expected cu_seqlens_k of [batch + 1], got {list(at_k.shape)}; flatten it")
    k, v, table = split_pages(op, k, v, block_table)
    return flash_attention_paged(q, k, v, table, at_k.diff(), cu_seqlens_q=at_q, max_seqlen_q=longest_q, **given)


def _bounds(op: str, name: str, offsets: Any, total: int) -> tuple[int, int]:
    """The rows at which the first sequence begins and the last one ends."""
    integers = isinstance(offsets, torch.Tensor) and offsets.dtype in (torch.int32, torch.int64)
    if not integers or offsets.dim() != 1 or len(offsets) < 1:
        got = f"{offsets.dtype} {list(offsets.shape)}" if isinstance(offsets, torch.Tensor) else type(offsets).__name__
        raise InvalidDtypeError(f"[{op}] expected {name} as an int32 tensor [batch + 1], got {got}; convert it")
    first, end = int(offsets[0]), int(offsets[-1])
    if not 0 <= first <= end <= total:
        raise InvalidShapeError(
            f"[{op}] expected {name} to rise from 0 to at most {total}, got {offsets.tolist()}; "
            "give the cumulated lengths"
        )
    return first, end


def _keywords(op: str, options: _Options) -> dict[str, Any]:
    """The options as `aule.flash_attention` takes them."""
    if checked_flag(op, "return_attn_probs", options.return_attn_probs):
        remedy = "the probabilities are never stored; aule.flash_attention gives the log-sum-exp with return_lse=True"
        raise _unsupported(op, "return_attn_probs=False", "True", remedy)
    sides = options.window_size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise InvalidArgumentError(
            f"[{op}] expected window_size as (left, right), got {sides!r}; pass -1 for an open side"
        )
    left, right = (checked_integer(op, "window_size", side, "pass -1 for an open side") for side in sides)
    return {
        "causal": options.causal,
        "scale": options.softmax_scale,
        "window": (max(left, -1), max(right, -1)),
        "softcap": options.softcap,
        "alibi_slopes": options.alibi_slopes,
        "dropout_p": options.dropout_p,
        "deterministic": options.deterministic,
    }


def _decode_keywords(op: str, options: _Options, q: Any) -> dict[str, Any]:
    """The options as `aule.decode_attention` takes them."""
    given = _keywords(op, options) | {"backend": host_backend(q)}
    return {name: value for name, value in given.items() if name not in ("dropout_p", "deterministic")}


def _unsupported(op: str, expected: str, got: str, remedy: str) -> AuleError:
    return AuleError("AULE_ERROR_UNSUPPORTED", f"[{op}] expected {expected}, got {got}; {remedy}")


def _check(op: str, axes: int, layout: str, **tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidDtypeError(
                f"[{op}] expected {name} to be a torch tensor, got {type(tensor).__name__}; convert it first"
            )
        if tensor.dim() != axes:
            raise InvalidShapeError(f"[{op}] expected {name} of {layout}, got {list(tensor.shape)}; reshape it")


def _unpacked(op: str, name: str, packed: Any, count: int, axes: int) -> Any:
    """The ``count`` tensors along the third axis from the end."""
    if not isinstance(packed, torch.Tensor) or packed.dim() != axes or packed.shape[-3] != count:
        got = list(packed.shape) if isinstance(packed, torch.Tensor) else type(packed).__name__
        raise InvalidShapeError(
            f"[{op}] expected {name} with {axes} axes, the third from the end of length {count}, got {got}; stack it"
        )
    return packed.unbind(-3)


def _needs_gradient(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
