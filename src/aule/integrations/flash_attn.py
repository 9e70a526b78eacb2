"""The functions of flash-attn 2: use ``import aule.integrations.flash_attn as flash_attn``.

Signatures, layout (``[batch, seq, heads, head_dim]``) and meaning are those of flash-attn 2.8. Inputs are read in
place, through their strides. ``return_attn_probs`` is not supported, nor gradients and dropout over a paged cache
(``block_table``). float32 and float64 are supported too.

CPU and CUDA tensors support gradients of q, k and v, except over a cache (`flash_attn_with_kvcache`). If a gradient is
needed, the result is copied once into flash-attn's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from aule.api.attention import flash_attention, flash_attention_varlen
from aule.api.decode import flash_attention_paged
from aule.errors import AuleError, InvalidArgumentError, InvalidDtypeError, InvalidShapeError
from aule.frontends.torch.autograd.refuse import without_gradient
from aule.frontends.torch.checks import integers
from aule.frontends.torch.modes import autocast, called_by
from aule.frontends.torch.route import host_backend
from aule.integrations._flash_attn_cache import CacheCall, split_pages, with_kvcache
from aule.ops.shared.checks import checked_flag, checked_integer, checked_number

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
    """Options that all functions without a cache share."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Sequence[int]
    softcap: float
    alibi_slopes: Any
    deterministic: bool
    return_attn_probs: bool


class _Sequences(NamedTuple):
    """Offsets of the sequences in a packed batch, and the lengths of the longest ones."""

    offsets_q: Any
    offsets_k: Any
    longest_q: int
    longest_k: int


@called_by("flash_attn")
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
    """Compute attention.

    Parameters
    ----------
    q : Tensor
        ``[batch, seq_q, heads, head_dim]``.
    k, v : Tensor
        ``[batch, seq_kv, heads_kv, head_dim]``; ``heads`` is a multiple of ``heads_kv``.
    dropout_p : float
        Probability of dropping each weight; the seed comes from PyTorch's generator of the tensors' device.
    softmax_scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    causal : bool
        Causal mask, aligned bottom-right: the last row attends to all keys.
    window_size : (left, right)
        Number of keys on each side of a row's own position, as a pair or a tensor of two; -1 for no limit.
    softcap : float
        Cap of the scores; 0.0 for none.
    alibi_slopes : float32 Tensor, optional
        ``[heads]`` or ``[batch, heads]``.
    deterministic : bool
        Compute bitwise reproducible gradients, as in `aule.flash_attention`. Results always are.
    return_attn_probs : bool
        Must be False: the probabilities are never stored.

    Returns
    -------
    Tensor
        ``[batch, seq_q, heads, head_dim]``, contiguous.
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _batched("flash_attn_func", options, q, k, v)


@called_by("flash_attn")
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
    """Compute `flash_attn_func` with ``qkv`` of ``[batch, seq, 3, heads, head_dim]``."""
    op = "flash_attn_qkvpacked_func"
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _batched(op, options, *_unpacked(op, "qkv", qkv, 3, 5))


@called_by("flash_attn")
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
    """Compute `flash_attn_func` with ``kv`` of ``[batch, seq_kv, 2, heads_kv, head_dim]``."""
    op = "flash_attn_kvpacked_func"
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return _batched(op, options, q, *_unpacked(op, "kv", kv, 2, 5))


@called_by("flash_attn")
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
    """Compute attention within each sequence of a packed batch, in one launch.

    Parameters
    ----------
    q : Tensor
        ``[total_q, heads, head_dim]``: the sequences of the batch, one after the other.
    k, v : Tensor
        ``[total_k, heads_kv, head_dim]``.
    cu_seqlens_q, cu_seqlens_k : integer Tensor
        ``[batch + 1]``: the start of each sequence, and the end of the last one.
    max_seqlen_q, max_seqlen_k : int
        Lengths of the longest sequences; not needed for CPU tensors.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As for `flash_attn_func`.
    block_table : int32 Tensor, optional
        ``[batch, max_pages]``: k and v are a paged cache, ``[pages, page, heads_kv, head_dim]``, without dropout; the
        differences of ``cu_seqlens_k`` are the numbers of keys. The backward pass raises.

    Returns
    -------
    Tensor
        ``[total_q, heads, head_dim]``, contiguous; rows outside all sequences are zero.
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    op = "flash_attn_varlen_func"
    sequences = _Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_table is not None:
        return _paged(op, options, sequences, block_table, q, k, v)
    return _packed(op, options, sequences, q, k, v)


@called_by("flash_attn")
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
    """Compute `flash_attn_varlen_func` with ``qkv`` of ``[total, 3, heads, head_dim]``."""
    op = "flash_attn_varlen_qkvpacked_func"
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    sequences = _Sequences(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _packed(op, options, sequences, *_unpacked(op, "qkv", qkv, 3, 4))


@called_by("flash_attn")
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
    """Compute `flash_attn_varlen_func` with ``kv`` of ``[total_k, 2, heads_kv, head_dim]``."""
    op = "flash_attn_varlen_kvpacked_func"
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    sequences = _Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _packed(op, options, sequences, q, *_unpacked(op, "kv", kv, 2, 4))


@called_by("flash_attn")
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
    """Write new keys and values into a cache in place, then compute attention over the cache.

    Parameters
    ----------
    q : Tensor
        ``[batch, seq_q, heads, head_dim]``.
    k_cache, v_cache : Tensor
        ``[batch_cache, max_len, heads_kv, head_dim]``, or with ``block_table`` ``[pages, page, heads_kv, head_dim]``.
    k, v : Tensor, optional
        ``[batch, new, heads_kv, head_dim]``, written after the first ``cache_seqlens`` keys of each sequence. If these
        lengths are on a GPU they are not checked, and keys that do not fit are dropped.
    rotary_cos, rotary_sin : Tensor, optional
        ``[positions, rotary_dim / 2]``: k is rotated by its position in the cache, and q by the positions from
        ``cache_seqlens`` on. With neither ``causal`` nor a window, all of q is rotated by the first of these.
    cache_seqlens : int or int32 Tensor, optional
        ``[batch]``: number of keys of each sequence, without the new ones. Default: all. Those on a GPU are limited to
        the room there is; with ``AULE_CHECK_INDICES=1`` they are checked, which waits for the GPU.
    cache_batch_idx : int32 Tensor, optional
        ``[batch]``: the row of each sequence in the cache or, with ``block_table``, in the table.
    cache_leftpad : int32 Tensor, optional
        ``[batch]``: where the keys of each sequence start in its row. Slow: keys are read one by one.
    block_table : int32 Tensor, optional
        ``[batch, max_pages]``; with ``cache_batch_idx`` any number of rows.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As for `flash_attn_func`.
    rotary_interleaved : bool
        Rotate elements 2i and 2i + 1 together, instead of i and i + rotary_dim / 2.
    num_splits : int
        Ignored: aule chooses how to split the keys.
    return_softmax_lse : bool
        Also return the log-sum-exp, float32 ``[batch, heads, seq_q]``.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        ``[batch, seq_q, heads, head_dim]``, contiguous, without gradients.
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


# -- implementation ----------------------------------------------------------------------------------------------------


def _batched(op: str, options: _Options, q: Any, k: Any, v: Any) -> Any:
    keywords = _keywords(op, options)
    _check(op, 4, "[batch, seq, heads, head_dim]", q=q, k=k, v=v)
    q, k, v = autocast(q, k, v)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    keywords["backend"] = host_backend(q)
    if _needs_gradient(q, k, v):
        return flash_attention(*heads_first, **keywords).transpose(1, 2).contiguous()
    out = q.new_empty(*q.shape[:3], v.shape[3])
    flash_attention(*heads_first, **keywords, out=out.transpose(1, 2))
    return out


def _packed(op: str, options: _Options, sequences: _Sequences, q: Any, k: Any, v: Any) -> Any:
    keywords = _keywords(op, options)
    _check(op, 3, "[total, heads, head_dim]", q=q, k=k, v=v)
    if len(k) != len(v):
        got = f"{len(k)} and {len(v)} rows"
        raise InvalidShapeError(f"[{op}] expected k and v of one length, got {got}; every key needs its value")
    keywords["backend"] = host_backend(q)
    if q.device.type != "cpu":
        return flash_attention_varlen(q, k, v, *sequences, **keywords)
    # Offsets in host memory are cheap to read, so rows before the first sequence and after the last are left out.
    first_q, end_q = _bounds(op, "cu_seqlens_q", sequences.offsets_q, len(q))
    first_k, end_k = _bounds(op, "cu_seqlens_k", sequences.offsets_k, len(k))
    parts = (q[first_q:end_q], k[first_k:end_k], v[first_k:end_k])
    out = flash_attention_varlen(*parts, sequences.offsets_q - first_q, sequences.offsets_k - first_k, **keywords)
    if len(out) == len(q):
        return out
    return torch.nn.functional.pad(out, (0, 0, 0, 0, first_q, len(q) - end_q))


def _paged(op: str, options: _Options, sequences: _Sequences, block_table: Any, q: Any, k: Any, v: Any) -> Any:
    _check(op, 3, "[total, heads, head_dim]", q=q)
    _check(op, 4, "[pages, page, heads_kv, head_dim]", k=k, v=v)
    keywords = _decode_keywords(op, options, q)
    if checked_number(op, "dropout_p", options.dropout_p):
        raise _unsupported(op, "no dropout with block_table", "some", "gather k and v first")
    offsets_k = integers(op, "cu_seqlens_k", sequences.offsets_k)
    if offsets_k.dim() != 1:
        raise InvalidShapeError(f"[{op}] expected cu_seqlens_k of [batch + 1], got {list(offsets_k.shape)}; flatten it")
    k, v, table = split_pages(op, k, v, block_table)
    packed = {"cu_seqlens_q": sequences.offsets_q, "max_seqlen_q": sequences.longest_q}

    def compute() -> Any:
        with torch.no_grad():
            return flash_attention_paged(q, k, v, table, offsets_k.diff(), **packed, **keywords)

    if not _needs_gradient(q, k, v):
        return compute()
    remedy = "gather k and v first, or call it under torch.no_grad()"
    return without_gradient(compute, op, remedy, q, k, v)


def _bounds(op: str, name: str, offsets: Any, total: int) -> tuple[int, int]:
    """Return the rows at which the first sequence starts and the last one ends."""
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
    """Return the options as keywords of `aule.flash_attention`."""
    if checked_flag(op, "return_attn_probs", options.return_attn_probs):
        remedy = "the probabilities are never stored; aule.flash_attention gives the log-sum-exp with return_lse=True"
        raise _unsupported(op, "return_attn_probs=False", "True", remedy)
    sides = options.window_size
    if isinstance(sides, torch.Tensor) and sides.layout is torch.strided and not (sides.is_meta or sides.is_nested):
        sides = sides.tolist()  # flash-attn's own tests pass a tensor
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
    """Return the options as keywords of `aule.decode_attention`."""
    keywords = _keywords(op, options) | {"backend": host_backend(q)}
    return {name: value for name, value in keywords.items() if name not in ("dropout_p", "deterministic")}


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
    """Split a packed tensor into ``count`` tensors along the third axis from the end."""
    if not isinstance(packed, torch.Tensor) or packed.dim() != axes or packed.shape[-3] != count:
        got = list(packed.shape) if isinstance(packed, torch.Tensor) else type(packed).__name__
        raise InvalidShapeError(
            f"[{op}] expected {name} with {axes} axes, the third from the end of length {count}, got {got}; stack it"
        )
    return packed.unbind(-3)


def _needs_gradient(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
