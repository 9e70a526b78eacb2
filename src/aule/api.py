"""One function per operation: picks the front end of the arrays and hands over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aule.context import Aule
from aule.errors import InvalidArgumentError, InvalidDtypeError, InvalidShapeError, OutOfMemoryError
from aule.frontends import by_type, front_end, maker
from aule.ops.attention.rope import checked_frequencies, frequencies, rope_tables
from aule.ops.checked import checked_flag
from aule.options import AttentionOptions, DecodeOptions


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | Sequence[int | None] | None = None,
    softcap: float | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    rope: tuple[Any, Any] | None = None,
    rope_interleaved: bool = False,
    dropout_p: float = 0.0,
    seed: int | None = None,
    causal_align: str = "bottom-right",
    return_lse: bool = False,
    deterministic: bool = False,
    precision: str | None = None,
    out: Any = None,
    backend: str | None = None,
) -> Any:
    """Attention, exact, without ever storing the score matrix.

    Parameters
    ----------
    q, k, v : array
        ``[batch, heads, seq, head_dim]``, or ``[heads, seq, head_dim]``, or ``[seq, head_dim]``: NumPy arrays, torch
        tensors or arrays with ``__dlpack__``; float32, float16 or bfloat16 (float64 on the CPU), any strides.
        ``heads_q`` may be a multiple of ``heads_kv``, ``seq_q`` may differ from ``seq_kv``, the head dimension of ``v``
        may differ from that of ``q`` and ``k``; each is at most 256.
    causal : bool
        Row ``i`` attends to keys up to its own position.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    window : int or (left, right), optional
        Keep keys ``i-left .. i+right``; None or -1 leaves a side open. An int means ``(window-1, 0)`` with causal,
        ``(window-1, window-1)`` without.
    softcap : float, optional
        ``softcap * tanh(score / softcap)``.
    mask : array, optional
        Boolean (True attends) or additive; broadcastable to ``[batch, heads_q, seq_q, seq_kv]``.
    bias : array, optional
        Added to the scores; broadcastable likewise.
    alibi_slopes : float32 array, optional
        ``[heads_q]`` or ``[batch, heads_q]``: ``-slope * |i - j|`` is added.
    sinks : float32 array, optional
        ``[heads_q]``: one further logit per head that takes part in softmax and has no value.
    rope : (cos, sin), optional
        Rotate the rows of q and k by their positions, inside the kernel (rotary position embedding); float32 or the
        dtype of q, ``[positions, rotary_dim // 2]`` or ``[batch, positions, rotary_dim // 2]``. The first
        ``rotary_dim`` columns are rotated. Tables of more than ``head_dim // 2`` columns are taken for transformers'
        ``[..., rotary_dim]``, whose second half repeats the first. Key ``j`` has row ``j`` of the tables, and a query
        that of the key it stands at by ``causal_align``, causal or not: the last query that of the last key
        (``"bottom-right"``), or query ``i`` row ``i`` (``"top-left"``). With more queries than keys, bottom-right,
        the queries begin at row 0 and the keys at row ``seq_q - seq_kv``. So ``max(seq_q, seq_kv)`` positions are
        needed. No gradient for cos and sin.
    rope_interleaved : bool
        Columns ``2 i`` and ``2 i + 1`` are a pair (GPT-J); otherwise ``i`` and ``i + rotary_dim // 2`` (Llama).
    dropout_p : float
        Chance of each weight to be dropped after softmax; the others are multiplied by ``1 / (1 - dropout_p)``. In both
        it is rounded to a multiple of 2**-16, but 0 and 1 are for themselves alone: no other drops nothing, or all.
    seed : int, optional
        0 to 2**64 - 1: says which weights are dropped, the same ones on every backend. None takes a new one each time,
        for torch tensors from PyTorch's generator of their device, which `torch.manual_seed` sets. A CUDA graph replays
        a given seed, and so the same mask, each time.
    causal_align : {"bottom-right", "top-left"}
        Where the diagonal ends when ``seq_q != seq_kv``: FlashAttention's choice or PyTorch's.
    return_lse : bool
        Also return the log-sum-exp of the scores, float32 ``[batch, heads_q, seq_q]``; it has no gradient.
    deterministic : bool
        Gradients on GPUs add up dQ in any order where the driver has atomic additions of floats (CUDA, most of
        Vulkan's), which is faster. ``deterministic=True`` gives the same bits every time, and so does
        ``torch.use_deterministic_algorithms(True)`` for torch tensors. Everything else is deterministic always.
    precision : {"fp16", "bf16", "tf32"}, optional
        Only for float32 inputs: round q, k and v, and the weights, to this type and multiply them on matrix units;
        sums, softmax, the result and the log-sum-exp stay float32. fp16 turns what is beyond 65504 into infinities;
        tf32, with as many digits as fp16 and the range of float32, is for CUDA from sm_80 on. Gradients are computed
        in float32. A device without such units is refused; without this option float32 is never rounded.
    out : array, optional
        Write the result here; it may lie over q, k or v.
    backend : str, optional
        ``"cuda"``, ``"vulkan:1"``, ``"numpy"`` ...; default: where the arrays live, else the best device.

    Returns
    -------
    array or (array, array)
        The kind, dtype and device of ``q``. A row with nothing to attend to is zero, its log-sum-exp -inf. Host arrays
        come back finished; on a GPU the result is ordered after the call like any other work on the stream.
    """
    cos, sin = (None, None) if rope is None else rope_tables("flash_attention", rope)
    options = tuple.__new__(AttentionOptions, (  # past the constructor, a quarter of a microsecond
        causal, scale, window, softcap, mask, bias, alibi_slopes, sinks, cos, sin, rope_interleaved, dropout_p, seed,
        causal_align, return_lse, deterministic, out, backend, precision,
    ))  # fmt: skip
    found = by_type.get(type(q))  # a call saved, where every repeated one passes
    return (front_end(q) if found is None else found).flash_attention(q, k, v, options)


def aule_attention(q: Any, k: Any, v: Any, causal: bool = True, scale: float | None = None, **options: Any) -> Any:
    """Attention on torch tensors, with gradients.

    It is `flash_attention` for torch tensors alone, with ``causal`` and ``scale`` by position too.

    Parameters
    ----------
    q, k, v : Tensor
        As for `flash_attention`.
    causal : bool
        Row ``i`` attends to keys up to its own position.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    **options
        Every other option of `flash_attention`.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        As `flash_attention` returns it. Gradients of q, k, v, of an additive mask, of a bias and of sinks are there
        once: they cannot be differentiated again.
    """
    if front_end(q, "aule_attention").__name__ != "aule.frontends.torch":
        raise InvalidDtypeError(
            f"[aule_attention] expected torch tensors, got {type(q).__name__}; use aule.flash_attention for others"
        )
    return flash_attention(q, k, v, causal=causal, scale=scale, **options)


def flash_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | Sequence[int | None] | None = None,
    softcap: float | None = None,
    mask: None = None,
    bias: None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    rope: tuple[Any, Any] | None = None,
    rope_interleaved: bool = False,
    dropout_p: float = 0.0,
    seed: int | None = None,
    causal_align: str = "bottom-right",
    return_lse: bool = False,
    deterministic: bool = False,
    out: Any = None,
    backend: str | None = None,
) -> Any:
    """Attention within each sequence of a packed batch, all of them in one launch.

    Parameters
    ----------
    q : array
        ``[total_q, heads_q, head_dim]``: the sequences of the batch one behind the other.
    k, v : array
        ``[total_k, heads_kv, head_dim]``.
    cu_seqlens_q, cu_seqlens_k : int32 array
        ``[batch + 1]``: where each sequence begins, and where the last one ends; from 0 up to ``total_q`` and
        ``total_k``. A sequence may be empty, and have another length in k than in q. In host memory they are checked;
        on a GPU they are taken as they are.
    max_seqlen_q, max_seqlen_k : int, optional
        Lengths of the longest sequences. Where they are not given and the offsets are on a GPU, the call waits for it
        to read them.
    mask, bias : None
        Not for packed batches.
    alibi_slopes : float32 array, optional
        ``[heads_q]`` or ``[batch, heads_q]``.
    causal, scale, window, softcap, sinks, rope, rope_interleaved, dropout_p, seed, causal_align, return_lse, \
    deterministic, out, backend
        As in `flash_attention`. Positions count within each sequence; for dropout and rope sequence ``i`` is batch
        ``i``.

    Returns
    -------
    array or (array, array)
        ``[total_q, heads_q, value_dim]`` and, with ``return_lse``, float32 ``[heads_q, total_q]``.
    """
    cos, sin = (None, None) if rope is None else rope_tables("flash_attention_varlen", rope)
    options = AttentionOptions(
        causal, scale, window, softcap, mask, bias, alibi_slopes, sinks, cos, sin, rope_interleaved, dropout_p, seed,
        causal_align, return_lse, deterministic, out, backend,
    )  # fmt: skip
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return front_end(q, "flash_attention_varlen").flash_attention_varlen(q, k, v, *offsets, options)


def flash_attention_rope(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, causal: bool = True, scale: float | None = None, **options: Any
) -> Any:
    """Attention with rotary position embeddings of q and k.

    It is ``flash_attention(rope=(cos, sin))``.

    Parameters
    ----------
    q, k, v : array
        As for `flash_attention`.
    cos, sin : array
        ``[positions, rotary_dim // 2]``, as `precompute_rope_frequencies` gives them; more in `flash_attention`.
    causal : bool
        Row ``i`` attends to keys up to its own position.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    **options
        Every other option of `flash_attention`.

    Returns
    -------
    array or (array, array)
        As `flash_attention` returns it.
    """
    return flash_attention(q, k, v, causal=causal, scale=scale, rope=(cos, sin), **options)


def precompute_rope_frequencies(
    seq_len: int, head_dim: int, base: float = 10000.0, device: Any = None, dtype: Any = None
) -> tuple[Any, Any]:
    """Cosines and sines of rotary position embeddings.

    Parameters
    ----------
    seq_len : int
        Positions, from 0 on.
    head_dim : int
        Columns to rotate; even.
    base : float
        Pair ``i`` turns by ``base ** (-2 i / head_dim)`` with each position.
    device : torch.device or str, optional
        Give torch tensors there; otherwise, unless ``dtype`` is one of torch, NumPy arrays.
    dtype : dtype, optional
        Default float32. They are computed in float64 and rounded once.

    Returns
    -------
    cos, sin : array
        ``[seq_len, head_dim // 2]``.
    """
    op = "precompute_rope_frequencies"
    seq_len, head_dim, base = checked_frequencies(op, seq_len, head_dim, base, ("seq_len", "head_dim"))
    end = maker(device, dtype, op)
    try:
        cos, sin = frequencies(seq_len, head_dim, base)
    except MemoryError as error:
        nbytes = 8 * seq_len * (head_dim // 2)
        raise OutOfMemoryError(f"[{op}] expected {nbytes} bytes, got none ({error}); take less", nbytes) from error
    return end.make(cos, device, dtype, op), end.make(sin, device, dtype, op)


def decode_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    context_lens: Any = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    return_lse: bool = False,
    out: Any = None,
    backend: str | None = None,
) -> Any:
    """Attention of the newest tokens of each sequence over its cache of keys and values.

    Parameters
    ----------
    q : array
        ``[batch, heads_q, seq_q, head_dim]``: the last ``seq_q`` tokens of each sequence; or, for one token each,
        ``[batch, heads_q, head_dim]``.
    k, v : array
        ``[batch, heads_kv, max_len, head_dim]`` of any strides: a cache ``[batch, max_len, heads_kv, head_dim]`` comes
        as its transposed view. What lies behind a sequence's end is never looked at.
    context_lens : int32 array, optional
        ``[batch]``: keys of each sequence, those of ``q`` included; None: all. Query row ``i`` stands at key
        ``context_len - seq_q + i``. In host memory they are checked; on a GPU they are taken as they are, never beyond
        ``max_len``, and nothing waits for them.
    causal, scale, window, softcap, alibi_slopes, sinks, return_lse, out, backend
        As in `flash_attention`. There are no gradients.

    Returns
    -------
    array or (array, array)
        The kind, dtype, device and shape of ``q``, and with ``return_lse`` float32 of that shape without its last axis.
        A sequence without keys gives zeros and -inf.
    """
    options = DecodeOptions(
        context_lens, None, None, None, None, None, "HND", causal, scale, window, softcap, alibi_slopes, sinks,
        return_lse, out, backend,
    )  # fmt: skip
    found = by_type.get(type(q))  # a call saved, where every repeated one passes
    return (front_end(q, "decode_attention") if found is None else found).decode(q, k, v, options)


def flash_attention_paged(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = "NHD",
    return_lse: bool = False,
    out: Any = None,
    backend: str | None = None,
) -> Any:
    """Attention over keys and values that lie in pages of a pool.

    Parameters
    ----------
    q : array
        ``[batch, heads_q, seq_q, head_dim]``: the last tokens of each sequence; or ``[batch, heads_q, head_dim]``, one
        each; or, with ``cu_seqlens_q``, ``[total_q, heads_q, head_dim]``: each sequence's own number of them, one
        sequence behind the other, so that prefill and decoding share a batch.
    k_cache, v_cache : array
        The pool: ``[pages, page, heads_kv, head_dim]`` (layout "NHD") or ``[pages, heads_kv, page, head_dim]`` ("HND"),
        pages of 1 to 256 keys, any strides. Of q's dtype, or int8, or float8_e4m3fn, with scales.
    block_tables : int32 array
        ``[batch, max_pages]``: the pages of each sequence in order. Those behind its end are never looked at. Numbers
        outside of the pool are refused where the table is in host memory; on a GPU some page of the pool is read
        instead.
    context_lens : int32 array
        ``[batch]``: keys of each sequence, those of ``q``, which are in the pool already, included.
    cu_seqlens_q : int32 array, optional
        ``[batch + 1]``: the row of q at which each sequence begins, and where the last one ends.
    max_seqlen_q : int, optional
        Rows of the sequence that has most. Where it is not given and the offsets are on a GPU, the call waits for it
        to read them.
    k_scale, v_scale : float32 array, optional
        Of the cache's shape without its last axis: what each token and head of an int8 or fp8 cache is multiplied by.
        Codes of fp8 that are NaN, which `KVCache` never stores, count as 480 on a GPU.
    layout : {"NHD", "HND"}
        Order of the cache's axes.
    causal, scale, window, softcap, alibi_slopes, sinks, return_lse, out, backend
        As in `flash_attention`. There are no gradients.

    Returns
    -------
    array or (array, array)
        The kind, dtype, device and shape of ``q``, and with ``return_lse`` float32 of that shape without its last axis,
        or, packed, ``[heads_q, total_q]``. A sequence without keys gives zeros and -inf.
    """
    if block_tables is None or context_lens is None:
        raise InvalidArgumentError(
            "[flash_attention_paged] expected block_tables and context_lens, got None; use aule.decode_attention for a "
            "contiguous cache"
        )
    options = DecodeOptions(
        context_lens, block_tables, cu_seqlens_q, max_seqlen_q, k_scale, v_scale, layout, causal, scale, window,
        softcap, alibi_slopes, sinks, return_lse, out, backend,
    )  # fmt: skip
    found = by_type.get(type(q))
    end = front_end(q, "flash_attention_paged") if found is None else found
    return end.decode(q, k_cache, v_cache, options)


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
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
    merged: tuple[Any, Any] = front_end(o_a, "merge_states").merge_states(o_a, lse_a, o_b, lse_b)
    return merged


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

    The queries of all sequences attend to the common pages as those of one sequence, then each to its own, and
    `merge_states` puts the two together. It pays where the common part is long and the sequences are many.

    Parameters
    ----------
    q, k_cache, v_cache, block_tables, context_lens
        As for `flash_attention_paged`: NumPy arrays or torch tensors.
    shared_pages : int
        How many columns of ``block_tables`` are the same in all rows. All of the common pages lie before the first
        query of every sequence. Both are checked where tables, lengths and offsets are in host memory.
    **options
        As for `flash_attention_paged`; there is no ``window``, no ``alibi_slopes`` and no ``out``.

    Returns
    -------
    array or (array, array)
        As `flash_attention_paged` returns it.
    """
    for name in ("window", "alibi_slopes", "out"):
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
    # The rows of all sequences behind each other, [1, heads, rows, dim]: to the common keys they are one sequence's.
    heads, dim = q.shape[1], v_cache.shape[3]
    together = q.swapaxes(0, 1).reshape(heads, -1, q.shape[-1])[None]
    common, common_lse = flash_attention_paged(
        together, k_cache, v_cache, block_tables[:1, :shared_pages], context_lens[:1] * 0 + keys, causal=False,
        **options, return_lse=True,
    )  # fmt: skip
    apart, apart_lse = flash_attention_paged(
        q, k_cache, v_cache, block_tables[:, shared_pages:], context_lens - keys, **own, **options, return_lse=True
    )
    if cu_seqlens_q is not None:
        apart_lse = apart_lse.swapaxes(0, 1)
    batch, rows = q.shape[0], q.shape[2:-1]
    common = common[0].reshape(heads, batch, *rows, dim).swapaxes(0, 1)
    common_lse = common_lse[0].reshape(heads, batch, *rows).swapaxes(0, 1)
    out, lse = merge_states(common, common_lse, apart, apart_lse)
    if not return_lse:
        return out
    return out, lse if cu_seqlens_q is None else lse.swapaxes(0, 1)


def _check_shared(q: Any, tables: Any, lens: Any, cu_q: Any, pages: int, keys: int, causal: bool) -> None:
    """Whether sequences share their first pages, have all keys of these and, where the mask is causal, stand behind
    them, as far as it can be seen from the host."""
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
    """Integers as a NumPy array; None where they are on a device, or no integers at all, which others refuse."""
    if not isinstance(array, np.ndarray):
        if getattr(getattr(array, "device", None), "type", None) != "cpu" or array.is_sparse:
            return None
        array = np.asarray(array)
    return array.astype(np.int64) if array.dtype.kind in "iu" else None


_PRECISIONS = ("fp16", "bf16", "fp32")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    context: Aule | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    input_precision: str | None = None,
    intermediate_precision: str = "fp32",
    output_precision: str | None = None,
) -> Any:
    """Attention with chosen precisions.

    Parameters
    ----------
    q, k, v : array
        As for `flash_attention`.
    context : Aule, optional
        Compute on this context's device.
    input_precision, output_precision : {"fp16", "bf16", "fp32"}, optional
        Convert the inputs before, or the result after. Default: leave them.
    intermediate_precision : {"fp32"}
        Scores and sums are always accumulated in fp32.
    """
    for name, value in (("input_precision", input_precision), ("output_precision", output_precision)):
        if value is not None and not (isinstance(value, str) and value in _PRECISIONS):
            raise InvalidArgumentError(
                f"[attention] expected {name} of {', '.join(_PRECISIONS)}, got {value!r}; pass None to leave it"
            )
    if not isinstance(intermediate_precision, str) or intermediate_precision != "fp32":
        raise InvalidArgumentError(
            f"[attention] expected intermediate_precision 'fp32', got {intermediate_precision!r}; sums in half "
            "precision are not offered because they lose digits without being faster"
        )
    if context is not None and not isinstance(context, Aule):
        raise InvalidArgumentError(
            f"[attention] expected an aule.Aule as context, got {type(context).__name__}; pass None for the best device"
        )
    end = front_end(q, "attention")
    if input_precision is not None:
        q, k, v = (end.to_precision(x, input_precision) for x in (q, k, v))
    backend = None if context is None else context.device_name
    result = flash_attention(q, k, v, causal=causal, scale=softmax_scale, backend=backend)
    return result if output_precision is None else end.to_precision(result, output_precision)
