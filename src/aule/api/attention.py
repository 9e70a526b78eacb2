"""The attention functions of the public API. Each passes its arrays to the front end for their type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from aule.api.names import refuses_unknown, unknown_option
from aule.api.types import (
    A,
    Array,
    AttentionKeywords,
    Integers,
    MaskMod,
    PackedKeywords,
    RopeKeywords,
    ScoreMod,
    Tables,
    TensorKeywords,
    Window,
)
from aule.errors import InvalidDtypeError
from aule.frontends import by_type, front_end
from aule.ops.rope.tables import rope_tables
from aule.options import AttentionOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def flash_attention(
    q: A, k: A, v: A, *, return_lse: Literal[False] = ..., **options: Unpack[AttentionKeywords]
) -> A: ...
@overload
def flash_attention(
    q: A, k: A, v: A, *, return_lse: Literal[True], **options: Unpack[AttentionKeywords]
) -> tuple[A, A]: ...
@overload
def flash_attention(q: A, k: A, v: A, *, return_lse: bool, **options: Unpack[AttentionKeywords]) -> A | tuple[A, A]: ...
@refuses_unknown
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    rope: Tables | None = None,
    rope_interleaved: bool = False,
    dropout_p: float = 0.0,
    seed: int | None = None,
    causal_align: str = "bottom-right",
    return_lse: bool = False,
    deterministic: bool = False,
    precision: object = None,
    out: Array | None = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Any:
    """Compute exact attention without storing the score matrix.

    Parameters
    ----------
    q, k, v : array
        ``[batch, heads, seq, head_dim]``, or ``[heads, seq, head_dim]``, or ``[seq, head_dim]``: NumPy arrays, torch
        tensors or arrays with ``__dlpack__``; float32, float16 or bfloat16 (float64 on the CPU), any strides.
        ``heads_q`` may be a multiple of ``heads_kv``, ``seq_q`` may differ from ``seq_kv``, the head dimension of ``v``
        may differ from that of ``q`` and ``k``; each is at most `aule.MAX_HEAD_DIM`, 576.
    causal : bool
        Row ``i`` attends to keys up to its own position. True by default, whereas ``is_causal`` of PyTorch's
        ``scaled_dot_product_attention`` is False by default.
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
        Added to the scores; broadcastable like ``mask``.
    alibi_slopes : float32 array, optional
        ``[heads_q]`` or ``[batch, heads_q]``: ``-slope * |i - j|`` is added.
    sinks : float32 array, optional
        ``[heads_q]``: one further logit per head that takes part in softmax and has no value.
    rope : (cos, sin), optional
        Rotate the rows of q and k by their positions, inside the kernel (rotary position embedding); float32 or the
        dtype of q, ``[positions, rotary_dim // 2]`` or ``[batch, positions, rotary_dim // 2]``. The first
        ``rotary_dim`` columns are rotated. Tables of more than ``head_dim // 2`` columns are taken for transformers'
        ``[..., rotary_dim]``, whose second half repeats the first. Key ``j`` uses row ``j`` of the tables. A query uses
        the row of the key that ``causal_align`` aligns it with, causal or not: the last query that of the last key
        (``"bottom-right"``), or query ``i`` row ``i`` (``"top-left"``). With more queries than keys and bottom-right,
        queries start at row 0 and keys at row ``seq_q - seq_kv``. So the tables need ``max(seq_q, seq_kv)`` positions.
        cos and sin have no gradient.
    rope_interleaved : bool
        Columns ``2 i`` and ``2 i + 1`` are a pair (GPT-J); otherwise ``i`` and ``i + rotary_dim // 2`` (Llama).
    dropout_p : float
        Probability of dropping each weight after softmax; the others are multiplied by ``1 / (1 - dropout_p)``. It is
        rounded to a multiple of 2**-16; only 0 drops nothing, and only 1 drops everything.
    seed : int, optional
        0 to 2**64 - 1: decides which weights are dropped, the same ones on every backend. None draws a new seed for
        each call; for torch tensors from PyTorch's generator of their device, which `torch.manual_seed` sets. A CUDA
        graph replays a given seed, and so the same mask, each time.
    causal_align : {"bottom-right", "top-left"}
        Where the diagonal ends when ``seq_q != seq_kv``: FlashAttention's choice or PyTorch's.
    return_lse : bool
        Also return the log-sum-exp of the scores, float32 ``[batch, heads_q, seq_q]``; it has no gradient.
    deterministic : bool
        Gradients with the same bits every time. By default GPUs with atomic float additions (CUDA, most Vulkan
        drivers) sum dQ in any order, which is faster. ``torch.use_deterministic_algorithms(True)`` has the same
        effect for torch tensors. Everything else is always deterministic.
    precision : {"float16", "bfloat16", "tf32"}, optional
        Only for float32 inputs: round q, k, v and the weights to this type and multiply them on matrix units; sums,
        softmax, the result and the log-sum-exp stay float32. In float16, values beyond 65504 become infinite; tf32 has
        the digits of float16 and the range of float32, and needs CUDA sm_80 or newer. Gradients are computed in
        float32. A device without such units is refused; without this option float32 is never rounded. Other spellings
        (``"fp16"``, ``torch.bfloat16`` ...) are understood.
    out : array, optional
        Write the result here; it may share memory with q, k or v.
    backend : str, optional
        ``"cuda"``, ``"vulkan:1"``, ``"numpy"`` ...; default: where the arrays live, else the best device.

    Returns
    -------
    array or (array, array)
        The kind, dtype and device of ``q``. A row with nothing to attend to is zero, its log-sum-exp -inf. Host arrays
        come back finished; on a GPU the result is ordered after the call like any other work on the stream.
    """
    if unknown:
        raise unknown_option(flash_attention, unknown)
    cos, sin = (None, None) if rope is None else rope_tables("flash_attention", rope)
    options = tuple.__new__(AttentionOptions, (  # skips the slower constructor
        causal, scale, window, softcap, mask, bias, alibi_slopes, sinks, cos, sin, rope_interleaved, dropout_p, seed,
        causal_align, return_lse, deterministic, out, backend, precision,
    ))  # fmt: skip
    found = by_type.get(type(q))  # saves a function call on the path of repeated calls
    return (front_end(q) if found is None else found).flash_attention(q, k, v, options)


@overload
def aule_attention(
    q: A,
    k: A,
    v: A,
    causal: bool = ...,
    scale: float | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[TensorKeywords],
) -> A: ...
@overload
def aule_attention(
    q: A,
    k: A,
    v: A,
    causal: bool = ...,
    scale: float | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[TensorKeywords],
) -> tuple[A, A]: ...
@overload
def aule_attention(
    q: A, k: A, v: A, causal: bool = ..., scale: float | None = ..., *, return_lse: bool,
    **options: Unpack[TensorKeywords],
) -> A | tuple[A, A]: ...  # fmt: skip
def aule_attention(
    q: Array, k: Array, v: Array, causal: bool = True, scale: float | None = None, **options: Any
) -> Any:
    """Compute attention on torch tensors, with gradients.

    The same as `flash_attention`, but only for torch tensors; ``causal`` and ``scale`` may also be positional.

    Parameters
    ----------
    q, k, v : Tensor
        As for `flash_attention`.
    causal : bool
        Row ``i`` attends to keys up to its own position. True by default, other than in PyTorch's own function.
    scale : float, optional
        Factor of the scores; default ``1 / sqrt(head_dim)``.
    **options
        Every other option of `flash_attention`.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        As `flash_attention` returns it. q, k, v, an additive mask, a bias and sinks have gradients; second
        derivatives are not supported.
    """
    if front_end(q, "aule_attention").__name__ != "aule.frontends.torch.entry":
        raise InvalidDtypeError(
            f"[aule_attention] expected torch tensors, got {type(q).__name__}; use aule.flash_attention for others"
        )
    return flash_attention(q, k, v, causal=causal, scale=scale, **options)


@overload
def flash_attention_varlen(
    q: A,
    k: A,
    v: A,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[PackedKeywords],
) -> A: ...
@overload
def flash_attention_varlen(
    q: A,
    k: A,
    v: A,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[PackedKeywords],
) -> tuple[A, A]: ...
@overload
def flash_attention_varlen(
    q: A, k: A, v: A, cu_seqlens_q: Integers, cu_seqlens_k: Integers, max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., *, return_lse: bool, **options: Unpack[PackedKeywords],
) -> A | tuple[A, A]: ...  # fmt: skip
@refuses_unknown
def flash_attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    mask: None = None,
    bias: None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    rope: Tables | None = None,
    rope_interleaved: bool = False,
    dropout_p: float = 0.0,
    seed: int | None = None,
    causal_align: str = "bottom-right",
    return_lse: bool = False,
    deterministic: bool = False,
    out: Array | None = None,
    backend: str | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    **unknown: NoReturn,
) -> Any:
    """Compute attention within each sequence of a packed batch, in one launch.

    Parameters
    ----------
    q : array
        ``[total_q, heads_q, head_dim]``: the sequences of the batch, concatenated.
    k, v : array
        ``[total_k, heads_kv, head_dim]``.
    cu_seqlens_q, cu_seqlens_k : int32 array
        ``[batch + 1]``: where each sequence begins, and where the last one ends; from 0 up to ``total_q`` and
        ``total_k``. A sequence may be empty, and may have another length in k than in q. Offsets in host memory are
        checked; those on a GPU are not.
    max_seqlen_q, max_seqlen_k : int, optional
        Lengths of the longest sequences. If they are missing and the offsets are on a GPU, the call reads them from
        the offsets, which waits for the GPU.
    mask, bias : None
        Not supported for packed batches.
    alibi_slopes : float32 array, optional
        ``[heads_q]`` or ``[batch, heads_q]``.
    causal, scale, window, softcap, sinks, rope, rope_interleaved, dropout_p, seed, causal_align
        As in `flash_attention`. Positions count within each sequence; for dropout and rope sequence ``i`` is batch
        ``i``.
    return_lse, deterministic, out, backend
        As in `flash_attention`.
    score_mod, mask_mod : callable, optional
        ``score_mod(score, b, h, q_idx, kv_idx) -> score`` and ``mask_mod(b, h, q_idx, kv_idx) -> bool``, as in
        `flex_attention`: ``b`` is the sequence, and the indices count within it. They come after the other options;
        for a mask of your own alone pass ``causal=False``. Tensors that they capture get no gradients here.

    Returns
    -------
    array or (array, array)
        ``[total_q, heads_q, value_dim]`` and, with ``return_lse``, float32 ``[heads_q, total_q]``.
    """
    if unknown:
        raise unknown_option(flash_attention_varlen, unknown)
    cos, sin = (None, None) if rope is None else rope_tables("flash_attention_varlen", rope)
    options = AttentionOptions(
        causal, scale, window, softcap, mask, bias, alibi_slopes, sinks, cos, sin, rope_interleaved, dropout_p, seed,
        causal_align, return_lse, deterministic, out, backend,
    )  # fmt: skip
    offsets, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return front_end(q, "flash_attention_varlen").flash_attention_varlen(
        q, k, v, offsets, longest, options, (score_mod, mask_mod)
    )


@overload
def flash_attention_rope(
    q: A,
    k: A,
    v: A,
    cos: Array,
    sin: Array,
    causal: bool = ...,
    scale: float | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[RopeKeywords],
) -> A: ...
@overload
def flash_attention_rope(
    q: A,
    k: A,
    v: A,
    cos: Array,
    sin: Array,
    causal: bool = ...,
    scale: float | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[RopeKeywords],
) -> tuple[A, A]: ...
@overload
def flash_attention_rope(
    q: A, k: A, v: A, cos: Array, sin: Array, causal: bool = ..., scale: float | None = ..., *,
    return_lse: bool, **options: Unpack[RopeKeywords],
) -> A | tuple[A, A]: ...  # fmt: skip
def flash_attention_rope(
    q: Array, k: Array, v: Array, cos: Array, sin: Array, causal: bool = True, scale: float | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Compute attention with rotary position embeddings of q and k.

    The same as ``flash_attention(rope=(cos, sin))``.

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
