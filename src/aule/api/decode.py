"""The decoding functions of the public API: attention over caches of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import numpy as np

from aule.api.names import refuses_unknown, unknown_option
from aule.api.types import (
    A,
    Array,
    B,
    CascadeKeywords,
    DecodeKeywords,
    Integers,
    MaskMod,
    PagedKeywords,
    ScoreMod,
    Window,
)
from aule.errors import InvalidArgumentError, InvalidShapeError
from aule.frontends import by_type, front_end
from aule.ops.shared.checks import checked_flag
from aule.options import DecodeOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def decode_attention(
    q: A, k: Array, v: Array, *, return_lse: Literal[False] = ..., **options: Unpack[DecodeKeywords]
) -> A: ...
@overload
def decode_attention(
    q: A, k: Array, v: Array, *, return_lse: Literal[True], **options: Unpack[DecodeKeywords]
) -> tuple[A, A]: ...
@overload
def decode_attention(
    q: A, k: Array, v: Array, *, return_lse: bool, **options: Unpack[DecodeKeywords]
) -> A | tuple[A, A]: ...
@refuses_unknown
def decode_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    context_lens: Integers | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    backend: str | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    tree_mask: Array | None = None,
    **unknown: NoReturn,
) -> Any:
    """Compute attention of the newest tokens of each sequence over its cache of keys and values.

    Parameters
    ----------
    q : array
        ``[batch, heads_q, seq_q, head_dim]``: the last ``seq_q`` tokens of each sequence; or, for one token each,
        ``[batch, heads_q, head_dim]``.
    k, v : array
        ``[batch, heads_kv, max_len, head_dim]`` of any strides: a cache ``[batch, max_len, heads_kv, head_dim]`` comes
        as its transposed view. Memory past a sequence's end is never read.
    context_lens : int32 array, optional
        ``[batch]``: keys of each sequence, those of ``q`` included; None: all. Query row ``i`` stands at key
        ``context_len - seq_q + i``. Lengths in host memory are checked; on a GPU they are clamped to ``max_len``
        without a synchronisation.
    causal, scale, window, softcap, alibi_slopes, sinks, return_lse, out, backend
        As in `flash_attention`. Gradients are not supported.
    score_mod : callable, optional
        ``score_mod(score, b, h, q_idx, kv_idx) -> score``, traced into the kernel as in `flex_attention`. ``b`` is the
        sequence; ``q_idx`` and ``kv_idx`` are the places of query and key in their sequence, so that a function means
        the same as for the whole prompt: query row ``i`` has ``q_idx = context_len - seq_q + i``.
    mask_mod : callable, optional
        ``mask_mod(b, h, q_idx, kv_idx) -> bool``: whether a key is kept, of those that the other options keep.
    tree_mask : bool array, optional
        ``[tokens, tokens]`` or ``[batch, tokens, tokens]``, for speculative decoding: which of the last ``tokens`` keys
        each of the ``tokens`` newest queries keeps. It takes the place of ``causal``; all earlier keys are kept.

    Returns
    -------
    array or (array, array)
        The kind, dtype, device and shape of ``q``, and with ``return_lse`` float32 of that shape without its last axis.
        A sequence without keys gives zeros and -inf.
    """
    if unknown:
        raise unknown_option(decode_attention, unknown)
    options = DecodeOptions(
        context_lens, None, None, None, None, None, "HND", causal, scale, window, softcap, alibi_slopes, sinks,
        return_lse, out, backend, score_mod, mask_mod, tree_mask,
    )  # fmt: skip
    found = by_type.get(type(q))  # saves a function call on the path of repeated calls
    return (front_end(q, "decode_attention") if found is None else found).decode(q, k, v, options)


@overload
def flash_attention_paged(
    q: A,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Integers,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[PagedKeywords],
) -> A: ...
@overload
def flash_attention_paged(
    q: A,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Integers,
    *,
    return_lse: Literal[True],
    **options: Unpack[PagedKeywords],
) -> tuple[A, A]: ...
@overload
def flash_attention_paged(
    q: A,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Integers,
    *,
    return_lse: bool,
    **options: Unpack[PagedKeywords],
) -> A | tuple[A, A]: ...
@refuses_unknown
def flash_attention_paged(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Integers,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    cu_seqlens_q: Integers | None = None,
    max_seqlen_q: int | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    layout: str = "NHD",
    return_lse: bool = False,
    out: Array | None = None,
    backend: str | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    tree_mask: Array | None = None,
    **unknown: NoReturn,
) -> Any:
    """Compute attention over keys and values that are stored in pages of a pool.

    Parameters
    ----------
    q : array
        ``[batch, heads_q, seq_q, head_dim]``: the last tokens of each sequence; or ``[batch, heads_q, head_dim]``, one
        each; or, with ``cu_seqlens_q``, ``[total_q, heads_q, head_dim]``: any number for each sequence, concatenated,
        so that prefill and decoding share a batch.
    k_cache, v_cache : array
        The pool: ``[pages, page, heads_kv, head_dim]`` (layout "NHD") or ``[pages, heads_kv, page, head_dim]`` ("HND"),
        pages of 1 to 256 keys, any strides. Of q's dtype, or int8, or float8_e4m3fn, with scales.
    block_tables : int32 array
        ``[batch, max_pages]``: the pages of each sequence in order. Entries past its end are never read. Page numbers
        outside of the pool are refused where the table is in host memory, and clamped on a GPU.
    context_lens : int32 array
        ``[batch]``: keys of each sequence, those of ``q``, which are in the pool already, included.
    cu_seqlens_q : int32 array, optional
        ``[batch + 1]``: the row of q at which each sequence begins, and where the last one ends.
    max_seqlen_q : int, optional
        Rows of the longest sequence. Without it, offsets on a GPU are read, which waits for the GPU.
    k_scale, v_scale : float32 array, optional
        The cache's shape without its last axis: the factor of each token and head of an int8 or fp8 cache. NaNs of fp8,
        which `KVCache` never stores, count as 480 on a GPU.
    layout : {"NHD", "HND"}
        Order of the cache's axes.
    causal, scale, window, softcap, alibi_slopes, sinks, return_lse, out, backend
        As in `flash_attention`. Gradients are not supported.
    score_mod : callable, optional
        ``score_mod(score, b, h, q_idx, kv_idx) -> score``, traced into the kernel as in `flex_attention`. ``b`` is the
        sequence; ``q_idx`` and ``kv_idx`` are the places of query and key in their sequence, so that a function means
        the same as for the whole prompt: query row ``i`` has ``q_idx = context_len - seq_q + i``.
    mask_mod : callable, optional
        ``mask_mod(b, h, q_idx, kv_idx) -> bool``: whether a key is kept, of those that the other options keep.
    tree_mask : bool array, optional
        ``[tokens, tokens]`` or ``[batch, tokens, tokens]``, for speculative decoding: which of the last ``tokens`` keys
        each of the ``tokens`` newest queries keeps. It takes the place of ``causal``; all earlier keys are kept.

    Returns
    -------
    array or (array, array)
        The kind, dtype, device and shape of ``q``, and with ``return_lse`` float32 of that shape without its last axis,
        or, packed, ``[heads_q, total_q]``. A sequence without keys gives zeros and -inf.
    """
    if unknown:
        raise unknown_option(flash_attention_paged, unknown)
    if block_tables is None or context_lens is None:
        raise InvalidArgumentError(
            "[flash_attention_paged] expected block_tables and context_lens, got None; use aule.decode_attention for a "
            "contiguous cache"
        )
    options = DecodeOptions(
        context_lens, block_tables, cu_seqlens_q, max_seqlen_q, k_scale, v_scale, layout, causal, scale, window,
        softcap, alibi_slopes, sinks, return_lse, out, backend, score_mod, mask_mod, tree_mask,
    )  # fmt: skip
    found = by_type.get(type(q))
    end = front_end(q, "flash_attention_paged") if found is None else found
    return end.decode(q, k_cache, v_cache, options)


def merge_states(o_a: A, lse_a: B, o_b: A, lse_b: B) -> tuple[A, B]:
    """Attention over two disjoint sets of keys, from the results over each.

    Parameters
    ----------
    o_a, o_b : array
        Results of attention of the same queries, one over the first keys, one over the others; of one shape.
    lse_a, lse_b : float32 array
        Their log-sum-exps, of that shape without its last axis.

    Returns
    -------
    o : array
        What attention over all keys gives, with the dtype of ``o_a``.
    lse : float32 array
        Its log-sum-exp.
    """
    merged: tuple[A, B] = front_end(o_a, "merge_states").merge_states(o_a, lse_a, o_b, lse_b)
    return merged


@overload
def cascade_attention(
    q: A,
    k_cache: A,
    v_cache: A,
    block_tables: Array,
    context_lens: Array,
    *,
    shared_pages: int,
    return_lse: Literal[False] = ...,
    **options: Unpack[CascadeKeywords],
) -> A: ...
@overload
def cascade_attention(
    q: A,
    k_cache: A,
    v_cache: A,
    block_tables: Array,
    context_lens: Array,
    *,
    shared_pages: int,
    return_lse: Literal[True],
    **options: Unpack[CascadeKeywords],
) -> tuple[A, A]: ...
@overload
def cascade_attention(
    q: A,
    k_cache: A,
    v_cache: A,
    block_tables: Array,
    context_lens: Array,
    *,
    shared_pages: int,
    return_lse: bool,
    **options: Unpack[CascadeKeywords],
) -> A | tuple[A, A]: ...
def cascade_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    shared_pages: int,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """`flash_attention_paged` of sequences that begin with the same pages, which are read once for all of them.

    The queries of all sequences attend to the common pages as if they were one sequence, then each to its own pages;
    `merge_states` merges the two. This is faster if the common part is long and there are many sequences.

    Parameters
    ----------
    q, k_cache, v_cache, block_tables, context_lens
        As for `flash_attention_paged`: NumPy arrays or torch tensors.
    shared_pages : int
        How many columns of ``block_tables`` are the same in all rows. All of the common pages lie before the first
        query of every sequence. Both are checked where tables, lengths and offsets are in host memory.
    sinks, cu_seqlens_q, max_seqlen_q, causal, return_lse
        As for `flash_attention_paged`.
    **options
        Other options of `flash_attention_paged`, except ``window``, ``alibi_slopes``, ``out``, ``score_mod``,
        ``mask_mod`` and ``tree_mask``.

    Returns
    -------
    array or (array, array)
        As `flash_attention_paged` returns it.
    """
    _check_cascade(q, k_cache, v_cache, block_tables, context_lens, shared_pages, options)
    return_lse = checked_flag("cascade_attention", "return_lse", return_lse)
    causal = checked_flag("cascade_attention", "causal", causal)
    own: dict[str, Any] = {"sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "causal": causal}
    if shared_pages == 0:
        return flash_attention_paged(
            q, k_cache, v_cache, block_tables, context_lens, **own, **options, return_lse=return_lse
        )
    page = k_cache.shape[2 if options.get("layout") == "HND" else 1]
    keys = shared_pages * page
    if not 0 <= shared_pages <= block_tables.shape[1]:
        raise InvalidArgumentError(
            f"[cascade_attention] expected shared_pages from 0 to {block_tables.shape[1]}, got {shared_pages}; they "
            "are columns of block_tables"
        )
    _check_shared(q, block_tables, context_lens, cu_seqlens_q, shared_pages, keys, causal)
    # To the common keys the rows of all sequences are those of one sequence: [1, heads, rows, dim].
    heads, dim = q.shape[1], v_cache.shape[3]
    together = q.swapaxes(0, 1).reshape(heads, -1, q.shape[-1])[None]
    common, common_lse = flash_attention_paged(
        together, k_cache, v_cache, block_tables[:1, :shared_pages], context_lens[:1] * 0 + keys, causal=False,
        **options, return_lse=True,
    )  # fmt: skip
    own_part, own_lse = flash_attention_paged(
        q, k_cache, v_cache, block_tables[:, shared_pages:], context_lens - keys, **own, **options, return_lse=True
    )
    if cu_seqlens_q is not None:
        own_lse = own_lse.swapaxes(0, 1)
    batch, rows = q.shape[0], q.shape[2:-1]
    common = common[0].reshape(heads, batch, *rows, dim).swapaxes(0, 1)
    common_lse = common_lse[0].reshape(heads, batch, *rows).swapaxes(0, 1)
    out, lse = merge_states(common, common_lse, own_part, own_lse)
    if not return_lse:
        return out
    return out, lse if cu_seqlens_q is None else lse.swapaxes(0, 1)


def _check_cascade(
    q: Any, k_cache: Any, v_cache: Any, block_tables: Any, context_lens: Any, shared_pages: Any, options: dict[str, Any]
) -> None:
    for name in ("window", "alibi_slopes", "out", "score_mod", "mask_mod", "tree_mask"):
        if options.get(name) is not None:
            raise InvalidArgumentError(
                f"[cascade_attention] expected no {name}, got one; use flash_attention_paged, which has it"
            )
    if block_tables is None or context_lens is None:
        raise InvalidArgumentError(
            "[cascade_attention] expected block_tables and context_lens, got None; pages are what sequences share"
        )
    if isinstance(shared_pages, bool) or not isinstance(shared_pages, (int, np.integer)):
        raise InvalidArgumentError(
            f"[cascade_attention] expected shared_pages as an int, got {shared_pages!r}; `KVCache.shared_pages` counts "
            "them"
        )
    for name, array, least in (
        ("q", q, 3), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4), ("block_tables", block_tables, 2),
        ("context_lens", context_lens, 1),
    ):  # fmt: skip
        shape = getattr(array, "shape", None)
        sparse = getattr(array, "is_sparse", False)
        if shape is None or len(shape) < least or sparse:
            got = type(array).__name__ if shape is None else f"{'sparse, ' if sparse else ''}shape {list(shape)}"
            raise InvalidShapeError(
                f"[cascade_attention] expected {name} as an array of {least} axes or more, got {got}; as for "
                "flash_attention_paged"
            )


def _check_shared(q: Any, tables: Any, lens: Any, cu_q: Any, pages: int, keys: int, causal: bool) -> None:
    """Refuse sequences that do not share their first pages, lack keys of these or, if causal, query before their end.

    Checks what is in host memory.
    """
    table, lengths, offsets = (_readable(x) for x in (tables, lens, cu_q))
    if table is not None and (table[:, :pages] != table[:1, :pages]).any():
        sequence, page = (int(i) for i in np.argwhere(table[:, :pages] != table[:1, :pages])[0])
        raise InvalidArgumentError(
            f"[cascade_attention] expected the first {pages} columns of block_tables alike in all rows, got page "
            f"{table[sequence, page]} for sequence {sequence} and {table[0, page]} for the first in column {page}; "
            "pass fewer shared_pages"
        )
    rows: Any = 1 if len(q.shape) == 3 else q.shape[2]
    if cu_q is not None:
        rows = None if offsets is None or offsets.ndim != 1 else np.diff(offsets)
    if lengths is None or lengths.ndim != 1 or rows is None or np.shape(rows) not in ((), lengths.shape):
        return
    behind = np.where(rows > 0, rows - 1, 0) if causal else np.zeros_like(rows)
    early = np.flatnonzero(lengths - behind < keys)
    if early.size:
        sequence = int(early[0])
        count = int(np.broadcast_to(rows, lengths.shape)[sequence])
        raise InvalidArgumentError(
            f"[cascade_attention] expected the queries behind the {keys} keys of shared_pages, got {count} of them in "
            f"sequence {sequence}, which has {lengths[sequence]} keys; pass fewer shared_pages"
        )


def _readable(array: Any) -> Any:
    """Return integers as a NumPy array, or None if they are on a device or no integers (refused elsewhere)."""
    if not isinstance(array, np.ndarray):
        if getattr(getattr(array, "device", None), "type", None) != "cpu" or array.is_sparse:
            return None
        array = np.asarray(array)
    return array.astype(np.int64) if array.dtype.kind in "iu" else None
